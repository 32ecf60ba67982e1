"""Heterogeneous graphs: partitioned, loaded, and through every kind of model against PyG on the whole graph."""

import copy
import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.cases import some
from support.hetero_models import EDGES, MODELS, NODES, check, graph, make
from support.nasty_graph import backward, close
from support.sample_graphs import REAL, real

import pyg_sar
from pyg_sar.data import store
from pyg_sar.data.datasets import dataset
from pyg_sar.data.store import read_meta
from pyg_sar.nn import convert


def fewer_edges(group, folder):
    """In every step other edges are left out, and all that a worker has."""
    data, whole, model = pyg_sar.load(folder, group=group), graph(), make("HGTConv", graph())
    ours = convert(copy.deepcopy(model), group)
    for step in range(3):
        left, every = {}, {}
        for it, num_edges in EDGES.items():
            g = torch.Generator().manual_seed(step)
            kept = (torch.rand(num_edges, generator=g) < 0.7)[data[it].e_id]
            kept &= dist.get_rank(group) != 0
            left[it] = data[it].edge_index[:, kept]
            flags = torch.zeros(num_edges).index_put_((data[it].e_id[kept],), torch.tensor(1.0))
            dist.all_reduce(flags, group=group)
            every[it] = whole[it].edge_index[:, flags.bool()]
        out = ours(data.x_dict, left, {})
        expected = model(whole.x_dict, every, {})
        for t in out:
            close(out[t], expected[t][data[t].n_id], f"step {step}: output {t}")
        sum(rows.square().sum() for rows in out.values()).backward()


def test_other_edges_in_every_step(pool, folders):
    pool.run(3, fewer_edges, folders[3], timeout=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for parts, method in ((1, "metis"), (2, "metis"), (3, "random")):
        found[parts] = tmp_path_factory.mktemp("hetero") / "g"
        pyg_sar.partition(graph(), parts, found[parts], method=method)
    return found


@pytest.mark.parametrize(("name", "way"), some(MODELS, [(1, 1), (3, 3), (2, 1), (3, 1)], every=2))
def test_models_equal_pyg(pool, folders, name, way, device):
    size, mode = way
    pool.run(size, check, folders[size], name, mode, device)


def loaded(group, folder):
    data = pyg_sar.load(folder, group=group)
    whole = graph()
    assert data.note == "a graph" and data.metadata() == whole.metadata()
    for t in NODES:
        assert data[t].num_nodes == len(data[t].n_id) and data[t].total_nodes == NODES[t]
        assert torch.equal(data[t].x, whole[t].x[data[t].n_id])
    assert torch.equal(data["paper"].train_mask, whole["paper"].train_mask[data["paper"].n_id])
    for it in EDGES:
        assert torch.equal(data[it].edge_attr, whole[it].edge_attr[data[it].e_id])
        target = whole[it].edge_index[1, data[it].e_id]
        assert torch.equal(data[it[2]].n_id[data[it].edge_index[1]], target)
    return {k: v.tolist() for k, v in (data.n_id_dict | {str(it): data[it].e_id for it in EDGES}).items()}


def test_parts_hold_everything_once(pool, folders):
    found = pool.run(3, loaded, folders[3])
    for t, n in NODES.items():
        assert sorted(i for f in found for i in f[t]) == list(range(n))
    for it, m in EDGES.items():
        assert sorted(i for f in found for i in f[str(it)]) == list(range(m))


def test_one_assignment_of_all_types(tmp_path):
    report = pyg_sar.partition(graph(), 2, tmp_path / "g", order="id")
    assert report["num_nodes"] == sum(NODES.values()) and report["num_edges"] == sum(EDGES.values())
    assert report["cut_fraction"] < 0.5 and report["balance"]["nodes"] < 1.2
    assert read_meta(tmp_path / "g")["node_types"] == [*NODES]
    given = {t: torch.arange(n) % 2 for t, n in NODES.items()}
    report = pyg_sar.partition(graph(), 2, tmp_path / "h", method=given)
    assert report["method"] == "given" and report["nodes"] == [45, 41]


@pytest.mark.parametrize("wrong", ["missing", "unknown", "swapped"])
def test_assignments_that_do_not_fit(tmp_path, wrong):
    given = {t: torch.arange(n) % 2 for t, n in NODES.items()}
    one, other, *_ = given
    if wrong == "missing":
        del given[one]
    elif wrong == "unknown":
        given["nobody"] = torch.zeros(3, dtype=torch.long)
    else:
        given[one], given[other] = given[other], given[one]
    with pytest.raises(ValueError, match="Expected 'method' to have the part of each node, by type"):
        pyg_sar.partition(graph(), 2, tmp_path / "g", method=given)
    assert not (tmp_path / "g").exists()


def test_a_worker_without_nodes_of_a_type(pool, tmp_path):
    given = {t: torch.ones(n, dtype=torch.long) if t == "venue" else torch.arange(n) % 2 for t, n in NODES.items()}
    given["author"][:] = 0
    pyg_sar.partition(graph(), 2, tmp_path / "g", method=given)
    for name in MODELS:
        pool.run(2, check, tmp_path / "g", name, 1)


def test_errors(tmp_path):
    data = graph()
    data["author", "writes", "paper"].edge_index[1, 0] = 47
    with pytest.raises(ValueError, match=r"destination ids in 'edge_index' of .*'writes'.* to be in \[0, 47\)"):
        pyg_sar.partition(data, 2, tmp_path / "g")
    data = graph()
    data["author", "knows", "nobody"].edge_index = torch.empty(2, 0, dtype=torch.long)
    with pytest.raises(ValueError, match=r"join nodes of type 'nobody', of which there are none"):
        pyg_sar.partition(data, 2, tmp_path / "g")
    data = graph()
    del data["author", "writes", "paper"].edge_index
    with pytest.raises(ValueError, match=r"needs an 'edge_index' of .*'writes'"):
        pyg_sar.partition(data, 2, tmp_path / "g")
    with pytest.warns(UserWarning, match=r"'paper.words' \(list\) is left out"):
        data = graph()
        data["paper"].words = [torch.zeros(1)]
        pyg_sar.partition(data, 1, tmp_path / "h")
    assert not (tmp_path / "g").exists()
    info = json.loads((tmp_path / "h" / "part_0" / "part.json").read_text())
    info["counts_by_type"][0]["nodes"] += 1
    del info["checksum"]
    info["checksum"] = store.checksum(info)
    (tmp_path / "h" / "part_0" / "part.json").write_text(json.dumps(info))
    with pytest.raises(RuntimeError, match=r"but its part\.json says"):
        pyg_sar.load(tmp_path / "h")


class Movies(torch.nn.Module):
    """A model for a real graph."""

    def __init__(self, kind, data):
        super().__init__()
        self.embed = gnn.HeteroDictLinear({t: x.size(1) for t, x in data.x_dict.items()}, 8)
        kinds = data.metadata()
        self.first = gnn.HGTConv(8, 8, kinds, 2) if kind == "HGT" else gnn.to_hetero(gnn.GraphSAGE(8, 8, 1), kinds)
        convs = {it: gnn.SAGEConv(8, 3) for it in data.edge_types}
        self.second = gnn.HGTConv(8, 3, kinds, 1) if kind == "HGT" else gnn.HeteroConv(convs)

    def forward(self, data):
        x = {t: rows.tanh() for t, rows in self.embed(data.x_dict).items()}
        return self.second(self.first(x, data.edge_index_dict), data.edge_index_dict)["movie"]


def train_on_movies(group, kind, folder):
    """Return the losses; without a folder, those of PyG."""
    data = dataset("IMDB", folder) if group is None else pyg_sar.load(folder, group=group)
    torch.manual_seed(0)
    for t in data.node_types:
        data[t].x = data[t].x.double()
    model, losses, movies = Movies(kind, data).double(), [], data["movie"]
    if group is not None:
        model = convert(model, group)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(4):
        optimizer.zero_grad()
        out = model(data)[movies.train_mask]
        loss = pyg_sar.global_mean(F.cross_entropy(out, movies.y[movies.train_mask], reduction="none"), group)
        loss.backward()
        if group is not None:
            pyg_sar.sum_gradients(model, group)
        optimizer.step()
        losses.append(loss.item())
    return losses


@real
@pytest.mark.grid
@pytest.mark.parametrize("kind", ["HGT", "SAGE"])
def test_real_graph(pool, tmp_path, kind):
    shutil.copytree(REAL / "IMDB" / "raw", tmp_path / "IMDB" / "raw")
    expected = torch.tensor(train_on_movies(None, kind, tmp_path))
    for workers in (1, 2, 4):
        pyg_sar.partition(dataset("IMDB", tmp_path), workers, tmp_path / str(workers), order="id")
        for losses in pool.run(workers, train_on_movies, kind, tmp_path / str(workers), timeout=120):
            close(torch.tensor(losses), expected, "losses", 1e-8)


def norm(group):
    torch.manual_seed(0)
    x, types = torch.randn(40, 6).double(), torch.randint(3, (40,))
    reference = gnn.HeteroBatchNorm(6, 4, momentum=None).double()
    torch.nn.init.normal_(reference.weight)
    layer = convert(copy.deepcopy(reference), group)
    mine = torch.arange(40) % 3 == group.rank() if group.rank() else torch.arange(40) % 3 == 0
    for _ in range(2):
        a, b = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        expected, out = reference(a, types), layer(b, types[mine])
        close(out, expected[mine], "output")
        backward(expected, torch.arange(40), 40)
        backward(out, mine.nonzero().view(-1), 40)
        close(b.grad, a.grad[mine], "gradient")
        for p, q in zip(layer.buffers(), reference.buffers(), strict=True):
            close(p.double(), q.double(), "statistics")
    close(layer.eval()(x[mine], types[mine]), reference.eval()(x, types)[mine], "evaluation")


def test_hetero_batch_norm(pool):
    pool.run(3, norm)
