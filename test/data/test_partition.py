import json
import sys

import numpy as np
import pytest
import torch
from support.sample_graphs import GRAPHS, graph, put_together, random_edges, read_part
from torch_geometric import EdgeIndex, transforms
from torch_geometric.data import Data, HeteroData

from pyg_sar.data import partition as module
from pyg_sar.data import store
from pyg_sar.data.assign import assign
from pyg_sar.data.load import load
from pyg_sar.data.partition import partition, prepare

METHODS = ["metis", "fennel", "random", "contiguous"]


def read(folder, num_parts):
    return [read_part(folder, p) for p in range(num_parts)]


def gathered(shards, key, dim=0):
    """Put a node-level or edge-level tensor together again."""
    node_level = key in shards[0].node_attrs
    ids = torch.cat([shard.topology.src_id if node_level else shard.topology.e_id for shard in shards])
    values = [(shard.node_attrs if node_level else shard.edge_attrs)[key] for shard in shards]
    return torch.cat(values, dim).movedim(dim, 0)[ids.argsort()].movedim(0, dim)


def tensor(value):
    return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value)


def random_data(num_nodes=60, num_edges=400, seed=0):
    return Data(edge_index=random_edges(num_nodes, num_edges, seed), num_nodes=num_nodes)


def two_cliques(size=20):
    """Two cliques joined by one edge, their nodes shuffled: there is one good cut."""
    block = torch.combinations(torch.arange(size)).t()
    edges = torch.cat([block, block + size, torch.tensor([[0], [size]])], 1)
    name = torch.randperm(2 * size, generator=torch.Generator().manual_seed(0))
    edges = name[torch.cat([edges, edges.flip(0)], 1)]
    return Data(edge_index=edges, num_nodes=2 * size), name[:size]


@pytest.mark.parametrize("num_parts", [1, 3, 12])
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "metis") for name in GRAPHS] + [(name, m) for m in METHODS[1:] for name in ("no nodes", "star", "random")],
)
def test_the_parts_hold_the_graph(tmp_path, name, method, num_parts):
    num_nodes, edge_index = graph(name)
    data = Data(edge_index=edge_index, num_nodes=num_nodes)
    report = partition(data, num_parts, tmp_path / "graph", method=method)
    shards = read(tmp_path / "graph", num_parts)
    assert put_together([shard.topology for shard in shards]).equal(edge_index)
    for p, shard in enumerate(shards):
        assert (shard.num_nodes, shard.num_edges) == (num_nodes, edge_index.size(1))
        assert shard.topology.src_id.numel() == report["nodes"][p]
        assert shard.topology.e_id.numel() == report["edges"][p]
    assert set(data.keys()) == {"edge_index", "num_nodes"}, "the graph given is not touched"


def test_attributes_are_cut_with_their_rows(tmp_path):
    data = random_data()
    nodes = {
        "x": torch.randn(60, 3),
        "y": torch.arange(60),
        "train_mask": torch.rand(60, 10) < 0.5,
        "half": torch.randn(60).bfloat16(),
        "pos": torch.randn(60, 2, 2)[:, :, 1],
        "array": np.arange(60.0),
        "backwards": np.arange(60)[::-1],
        "unsigned": np.arange(65500, 65560, dtype=np.uint32),
        "short": np.arange(65450, 65510, dtype=np.uint16),
    }
    edges = {"edge_attr": torch.randn(400, 2), "edge_type": torch.arange(400) % 3, "weight": torch.randn(400)}
    rest = {"table": torch.randn(4, 5), "scalar": torch.tensor(3.0), "flags": np.array([True, False])}
    plain = {"num_classes": 7, "rate": 0.25, "name": "graph", "deep": False, "sizes": [1, 2], "count": np.int64(3)}
    for key, value in (nodes | edges | rest | plain).items():
        data[key] = value
    partition(data, 3, tmp_path / "graph", method="random")
    shards = read(tmp_path / "graph", 3)
    assert shards[0].node_attrs.keys() == nodes.keys()
    assert shards[0].edge_attrs.keys() == edges.keys()
    assert shards[0].graph_attrs.keys() == rest.keys() | plain.keys() | {"num_relations"}
    for key, value in (nodes | edges).items():
        found = gathered(shards, key)
        assert found.equal(tensor(value)) and found.dtype == tensor(value).dtype
    for shard in shards:
        for key, value in rest.items():
            assert shard.graph_attrs[key].equal(tensor(value))
        assert {key: shard.graph_attrs[key] for key in plain} == plain
    assert data["array"] is nodes["array"], "the graph given is not touched"


class Sideways(Data):
    def __cat_dim__(self, key, value, *args, **kwargs):
        return {"features": 1, "whole": None}.get(key, super().__cat_dim__(key, value, *args, **kwargs))


def test_attributes_are_cut_in_the_dimension_that_pyg_says(tmp_path):
    data = Sideways(edge_index=random_edges(60, 400), num_nodes=60)
    data.features, data.whole = torch.randn(3, 60), torch.randn(60)
    data.pair_index = torch.randint(60, (2, 400))
    with pytest.warns(UserWarning, match="'pair_index' keeps the ids of the whole graph"):
        partition(data, 3, tmp_path / "graph", method="random")
    shards = read(tmp_path / "graph", 3)
    assert gathered(shards, "features", dim=1).equal(data.features)
    assert gathered(shards, "pair_index", dim=1).equal(data.pair_index)
    assert shards[2].graph_attrs["whole"].equal(data.whole)


def test_stale_thoughts_of_pyg_about_an_attribute_are_ignored(tmp_path):
    data = random_data()
    data.edge_attr = torch.randn(400)
    assert data.is_edge_attr("edge_attr")
    data.edge_index = random_edges(60, 500)
    with pytest.raises(ValueError, match=r"'edge_attr' \[400\] .* row for each edge .* 60 nodes and 500 edges"):
        partition(data, 2, tmp_path / "graph")
    partition(data, 2, tmp_path / "graph", levels={"edge_attr": "graph"})
    assert read_part(tmp_path / "graph", 0).graph_attrs["edge_attr"].equal(data.edge_attr)


def test_as_many_nodes_as_edges(tmp_path):
    data = Data(edge_index=random_edges(40, 40), x=torch.randn(40), edge_attr=torch.randn(40))
    partition(data, 2, tmp_path / "graph")
    shard = read_part(tmp_path / "graph", 0)
    assert shard.node_attrs.keys() == {"x"} and shard.edge_attrs.keys() == {"edge_attr"}


@pytest.mark.parametrize(
    "key, value",
    [
        ("names", ["a"] * 60),
        ("links", tuple("b" * 400)),
        ("table", {"a": 1}),
        ("strings", np.array(["a", "b"])),
        ("tensors", [torch.ones(2)]),
        ("sparse", torch.eye(60).to_sparse()),
        ("adj_t", torch.eye(60).to_sparse()),
        ("wide", torch.ones(60, dtype=torch.complex128)),
        ("thing", object()),
        ("n_id", torch.arange(60)),
        ("__metadata__", torch.ones(60)),
    ],
)
def test_what_cannot_be_stored_is_left_out_and_named(tmp_path, key, value):
    data = random_data()
    data[key] = value
    with pytest.warns(UserWarning, match=f"'{key}' .* is left out") as record:
        partition(data, 2, tmp_path / "graph")
    assert record[0].filename == __file__
    shard = read_part(tmp_path / "graph", 0)
    assert key not in shard.node_attrs.keys() | shard.edge_attrs.keys() | shard.graph_attrs.keys()
    assert key in data


def test_edge_index_of_pyg_and_gradients(tmp_path):
    edge_index = random_edges(60, 400)
    data = Data(x=torch.randn(60, 2, requires_grad=True), edge_index=EdgeIndex(edge_index, sparse_size=(60, 60)))
    partition(data, 2, tmp_path / "graph")
    shards = read(tmp_path / "graph", 2)
    assert put_together([shard.topology for shard in shards]).equal(edge_index)
    assert gathered(shards, "x").equal(data.x)


# Assignment


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_parts(method):
    data = random_data(500, 4000)
    first = assign(data, 5, method, seed=3)
    assert first.dtype == torch.int32 and first.shape == (500,)
    assert assign(data, 5, method, seed=3).equal(first)
    if method != "contiguous":
        assert not assign(data, 5, method, seed=4).equal(first)


@pytest.mark.parametrize("method", ["random", "contiguous"])
def test_simple_methods_balance_nodes(method):
    count = torch.bincount(assign(random_data(61), 4, method))
    assert sorted(count.tolist()) == [15, 15, 15, 16]


def test_contiguous_is_contiguous():
    part = assign(random_data(61), 4, "contiguous")
    assert part.equal(part.sort().values)


def test_metis_finds_the_cut(tmp_path):
    data, clique = two_cliques()
    report = partition(data, 2, tmp_path / "graph")
    assert report["cut"] == 2
    assert assign(data, 2)[clique].unique().numel() == 1


def test_metis_ignores_direction_loops_and_duplicates():
    data, _ = two_cliques()
    data.train_mask = torch.arange(data.num_nodes) % 3 == 0
    expected = assign(data, 2)
    source, target = data.edge_index
    one_way = data.edge_index[:, source < target]
    # Every node keeps one in-edge for each neighbor, so that the weights stay the same.
    loops = torch.arange(data.num_nodes).expand(2, -1)
    data.edge_index = torch.cat([one_way, one_way.flip(0), data.edge_index, loops], 1)
    assert assign(data, 2).equal(expected)


def test_metis_balances_nodes_edges_and_labels_together(tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = random_data(2000, 8000)
    hubs = torch.stack([torch.randint(2000, (8000,), generator=generator), torch.arange(8000) % 100])
    data.edge_index = torch.cat([data.edge_index, hubs], 1)
    data.train_mask = torch.arange(2000) < 200
    report = partition(data, 4, tmp_path / "graph")
    weight = torch.zeros(4)
    for key, share in (("nodes", 0.4), ("edges", 0.4), ("labelled", 0.2)):
        count = torch.tensor(report[key])
        weight += share * count / count.sum()
    assert weight.max() < 1.04 / 4
    assert max(report["balance"].values()) < 1.6


def test_metis_survives_small_and_odd_graphs():
    for num_nodes in (1, 2, 3, 5, 9):
        for num_edges in (0, 1, 2, 20):
            for num_parts in (1, 2, 3, 4, 8, 9, 20):
                data = Data(edge_index=random_edges(num_nodes, num_edges), num_nodes=num_nodes)
                part = assign(data, num_parts)
                assert part.shape == (num_nodes,)
                assert part.min() >= 0 and part.max() < num_parts


@pytest.mark.parametrize("dtype", [torch.long, torch.int, torch.uint8])
def test_given_assignment(tmp_path, dtype):
    part = torch.tensor([3, 0, 0, 3, 1])
    data = Data(edge_index=random_edges(5, 30), num_nodes=5)
    report = partition(data, 5, tmp_path / "graph", method=part.to(dtype))
    nodes = [shard.topology.src_id.tolist() for shard in read(tmp_path / "graph", 5)]
    assert nodes == [[1, 2], [4], [], [0, 3], []]
    assert report["method"] == "given"


# Report


def test_report(tmp_path):
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 0, 4], [1, 0, 0, 0, 2, 3, 4]])
    data = Data(edge_index=edge_index, num_nodes=6, train_mask=torch.tensor([1, 0, 1, 0, 0, 0]).bool())
    report = partition(data, 3, tmp_path / "graph", method=torch.tensor([0, 0, 1, 1, 1, 2]), seed=5)
    assert sum(report.pop("bytes")) > 0
    assert report == {
        "method": "given",
        "order": "locality",
        "seed": 5,
        "num_parts": 3,
        "num_nodes": 6,
        "num_edges": 7,
        "nodes": [2, 3, 1],
        "edges": [4, 3, 0],
        "labelled": [1, 1, 0],
        "balance": {"nodes": 1.5, "edges": 12 / 7, "labelled": 1.5},
        "cut": 4,
        "cut_fraction": 4 / 7,
        "boundary": [[0, 2, 0], [1, 0, 0], [0, 0, 0]],
        "boundary_rows": 3,
        "lists": [],
    }
    meta = store.read_meta(tmp_path / "graph")
    assert {key: meta[key] for key in report} == json.loads(json.dumps(report))
    assert meta["attributes"] == [{"train_mask": ["bool", [6]]}, {}, {}]


def test_labels_of_several_splits(tmp_path):
    data = random_data()
    data.train_mask = torch.zeros(60, 3, dtype=torch.bool)
    data.train_mask[4, 1] = data.train_mask[5, 2] = data.train_mask[5, 0] = True
    assert sum(partition(data, 2, tmp_path / "graph")["labelled"]) == 2


def test_progress(tmp_path, capsys):
    partition(random_data(), 3, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    partition(random_data(), 3, tmp_path / "loud", progress=True)
    assert "writing parts: 100%" in capsys.readouterr().err


# Errors


@pytest.mark.parametrize("num_parts", [0, -1, 2.0, None])
def test_bad_number_of_parts(tmp_path, num_parts):
    with pytest.raises(ValueError, match="'num_parts' must be an integer of at least 1, got"):
        partition(random_data(), num_parts, tmp_path / "graph")


def test_other_data_is_not_supported(tmp_path):
    with pytest.raises(TypeError, match=r"Expected a torch_geometric.data.Data or HeteroData, got dict"):
        partition({}, 2, tmp_path / "graph")
    with pytest.raises(TypeError, match="which is for a HeteroData"):
        partition(Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=1), 2, tmp_path / "graph", method={})


@pytest.mark.parametrize("count", [2.5, -2, "2", torch.tensor([2, 3])])
def test_bad_number_of_nodes(tmp_path, count):
    data = Data(edge_index=torch.zeros(2, 1, dtype=torch.long), num_nodes=count)
    with pytest.raises(ValueError, match=r"Expected 'num_nodes' to be a whole number of 0 or more \(got .*2"):
        partition(data, 2, tmp_path / "graph")


def test_only_adj_t(tmp_path):
    data = Data(adj_t=torch.eye(3).to_sparse(), num_nodes=3)
    with pytest.raises(ValueError, match=r"needs an 'edge_index'.*holds \[.*'adj_t'.*\]\. To convert.*to_edge_index"):
        partition(data, 2, tmp_path / "graph")


@pytest.mark.parametrize(
    "edge_index, message",
    [
        (torch.zeros(2, 3), r"to be of type torch\.int64 and shape \[2, num_edges\] \(got torch\.float32"),
        (torch.zeros(2, 3, dtype=torch.int32), r"type torch\.int64.*\(got torch\.int32"),
        (torch.zeros(3, 2, dtype=torch.long), r"\(got torch\.int64 and \[3, 2\]\)"),
        (torch.zeros(2, dtype=torch.long), r"\(got torch\.int64 and \[2\]\)"),
        (torch.tensor([[0], [9]]), r"Expected destination ids .* in \[0, 9\) \(got 9 to 9\)\. Is 'num_nodes' right\?"),
        (torch.tensor([[-1], [3]]), r"Expected source ids .* in \[0, 9\) \(got -1 to -1\)"),
    ],
)
def test_bad_edge_index(tmp_path, edge_index, message):
    with pytest.raises(ValueError, match=message):
        partition(Data(edge_index=edge_index, num_nodes=9), 2, tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "method, message",
    [
        ("best", "Unknown method 'best', expected metis, fennel, random, contiguous, or a tensor"),
        (torch.zeros(59, dtype=torch.long), r"shape \[60\], got torch\.int64 of shape \[59\]"),
        (torch.zeros(60, 1, dtype=torch.long), r"shape \[60\], got torch\.int64 of shape \[60, 1\]"),
        (torch.zeros(60), r"one integer for each node, .*got torch\.float32"),
        (torch.zeros(60, dtype=torch.bool), r"one integer for each node, .*got torch\.bool"),
        (torch.arange(60), "2 parts must hold numbers from 0 to 1, got 0 to 59. Correct it, or change"),
        (torch.arange(60) - 1, "must hold numbers from 0 to 1, got -1 to 58"),
    ],
)
def test_bad_assignment(tmp_path, method, message):
    with pytest.raises(ValueError, match=message):
        partition(random_data(), 2, tmp_path / "graph", method=method)
    assert list(tmp_path.iterdir()) == []


def test_parts_are_not_cut_again(tmp_path):
    partition(random_data(), 1, tmp_path / "graph")
    with pytest.raises(ValueError, match=r"a part that 'pyg_sar\.load' returned"):
        partition(load(tmp_path / "graph"), 1, tmp_path / "other")


def test_bad_seed(tmp_path):
    with pytest.raises(ValueError, match="'seed' must be an integer of 64 bits, got 18446744073709551616"):
        partition(random_data(), 2, tmp_path / "graph", seed=2**64)


def test_existing_folder(tmp_path):
    partition(random_data(), 2, tmp_path / "graph")
    with pytest.raises(FileExistsError, match=r"exists already.*overwrite=True"):
        partition(random_data(), 3, tmp_path / "graph")
    assert store.read_meta(tmp_path / "graph")["num_parts"] == 2
    partition(random_data(), 3, tmp_path / "graph", overwrite=True)
    assert store.read_meta(tmp_path / "graph")["num_parts"] == 3


def test_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    write_part = module.write_part

    def fail(folder, shard):
        if shard.part == 2:
            raise MemoryError("no room")
        return write_part(folder, shard)

    monkeypatch.setattr(module, "write_part", fail)
    with pytest.raises(MemoryError, match="no room"):
        partition(random_data(), 4, tmp_path / "graph")
    assert list(tmp_path.iterdir()) == []


def test_without_pymetis(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ImportError, match="pip install pymetis"):
        partition(random_data(), 2, tmp_path / "graph", order="id")
    with pytest.raises(ImportError, match="method 'fennel', 'random' or 'contiguous' and order 'id' do without"):
        partition(random_data(), 1, tmp_path / "graph", method="random")
    partition(random_data(), 1, tmp_path / "graph", method="random", order="id")


# Transforms


def test_prepare_to_undirected():
    data = Data(edge_index=torch.tensor([[0, 1, 1], [1, 0, 2]]), num_nodes=3)
    assert prepare(data, to_undirected=True).edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert data.num_edges == 3


def test_prepare_to_undirected_adds_no_types():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), edge_type=torch.tensor([1, 2]), num_nodes=3)
    with pytest.raises(ValueError, match=r"both directions would become one, whose edge_type would be a sum"):
        prepare(data, to_undirected=True)
    data.edge_index = torch.tensor([[0, 1], [1, 2]])
    assert prepare(data, to_undirected=True).edge_type.tolist() == [1, 1, 2, 2]


def test_prepare_moves_no_edge_attributes():
    data = Data(edge_index=torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]]), edge_type=torch.arange(4), num_nodes=2)
    with pytest.raises(ValueError, match="The added self-loops have no edge_type"):
        prepare(data, self_loops=True)
    data.edge_index = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 1]])  # they are last
    assert prepare(data, self_loops=True).edge_type.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("option", ["to_undirected", "self_loops", "gcn_norm"])
def test_prepare_moves_no_edges_that_have_numbers(option):
    """A self-loop, which PyG puts at the end, and edges that it sorts."""
    data = Data(edge_index=torch.tensor([[3, 0, 2], [0, 0, 0]]), num_nodes=4, train_edge_idx=torch.tensor([1]))
    with pytest.raises(ValueError, match="train_edge_idx should hold ids of edges by its name, but PyG's transforms"):
        prepare(data, **{option: True})
    data.edge_index = torch.tensor([[0, 1], [1, 0]])
    assert prepare(data, to_undirected=True).train_edge_idx.tolist() == [1]  # as they were


def test_prepare_self_loops():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 1]]), num_nodes=3)
    edge_index = prepare(data, self_loops=True).edge_index
    assert edge_index.tolist() == [[0, 0, 1, 2], [1, 0, 1, 2]]
    assert data.num_edges == 2


def test_prepare_gcn_norm(tmp_path):
    data = prepare(Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2), gcn_norm=True)
    assert data.edge_index.tolist() == [[0, 0, 1], [1, 0, 1]]
    torch.testing.assert_close(data.edge_weight, torch.tensor([0.5**0.5, 1.0, 0.5]))
    partition(data, 2, tmp_path / "graph")
    assert read_part(tmp_path / "graph", 0).edge_attrs.keys() == {"edge_weight"}


@pytest.mark.parametrize("option", ["self_loops", "gcn_norm"])
def test_prepare_refuses_to_lose_edge_attributes(option):
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2, edge_type=torch.tensor([0]))
    with pytest.raises(ValueError, match=r"The added self-loops have no edge_type.*AddSelfLoops"):
        prepare(data, **{option: True})


def test_prepare_features(tmp_path):
    data = random_data()
    data.x = torch.randn(60, 3)
    narrow = prepare(data, features=torch.bfloat16)
    assert narrow.x.equal(data.x.bfloat16()) and data.x.dtype == torch.float32
    partition(narrow, 2, tmp_path / "graph")
    assert gathered(read(tmp_path / "graph", 2), "x").equal(data.x.bfloat16())


@pytest.mark.parametrize("x, features", [(None, torch.bfloat16), (torch.randn(60, 3), torch.int8)])
def test_prepare_refuses_features(x, features):
    data = random_data()
    data.x = x
    with pytest.raises(ValueError, match=r"Node features 'x' \(got .*\) cannot be stored as torch"):
        prepare(data, features=features)


@pytest.mark.parametrize("x", [torch.tensor([[-1e6, 3.0]]), torch.tensor([[1_000_000, 3]])])
def test_prepare_makes_no_feature_infinite(x):
    data = random_data()
    data.x = torch.cat([x, torch.ones(59, 2).to(x)])
    message = r"'x' reach 1e\+06, but torch\.float16 ends at 6\.55e\+04: .*Scale them.*such as bfloat16"
    with pytest.raises(ValueError, match=message):
        prepare(data, features=torch.float16)
    if x.is_floating_point():
        assert prepare(data, features=torch.bfloat16).x.isfinite().all()
    else:
        with pytest.warns(UserWarning, match=r"are integers up to 1000000, some of which torch\.bfloat16 rounds"):
            assert prepare(data, features=torch.bfloat16).x.isfinite().all()
        assert prepare(data, features=torch.float32).x.equal(data.x.float())
    data.x = torch.full((60, 2), float("inf"))  # which they were before
    assert prepare(data, features=torch.float16).x.isinf().all()


def test_prepare_adds_up_what_edges_have():
    data = random_data()
    data.edge_index = torch.cat([data.edge_index, data.edge_index.flip(0)], 1)
    data = Data(edge_index=data.edge_index, edge_weight=torch.ones(data.num_edges), num_nodes=60)
    with pytest.warns(UserWarning, match="whose edge_weight is a sum"):
        assert int(prepare(data, to_undirected=True).edge_weight.sum()) == 2 * data.num_edges
    data.edge_weight = data.edge_weight.bool()  # of an adjacency of zeros and ones
    expected = transforms.GCNNorm()(Data(edge_index=data.edge_index, num_nodes=60)).edge_weight
    assert prepare(data, gcn_norm=True).edge_weight.equal(expected)


def test_numbers_and_assignments_of_other_libraries(tmp_path):
    data = random_data()
    part = (np.arange(60) % 2).tolist()
    for k, given in enumerate((part, np.array(part), torch.tensor(part))):
        partition(data, np.int64(2), tmp_path / str(k), method=given, order="id", seed=np.int64(0))
        (rows,) = store.read_part(tmp_path / str(k), 0).nodes.values()
        assert rows.attrs["n_id"].equal(torch.arange(0, 60, 2))


@pytest.mark.parametrize("hetero", [False, True])
def test_prepare_split(hetero):
    data = HeteroData() if hetero else random_data()
    store = data["paper"] if hetero else data
    store.train_mask, store.test_mask = torch.rand(60, 3) < 0.5, torch.ones(60, dtype=torch.bool)
    store.attention_mask = torch.rand(60, 5)  # no mask of splits
    kept = prepare(data, split=2)
    assert (kept["paper"] if hetero else kept).attention_mask.equal(store.attention_mask)
    own = kept["paper"] if hetero else kept
    assert own.train_mask.equal(store.train_mask[:, 2]) and store.train_mask.dim() == 2
    assert own.test_mask.equal(store.test_mask)
    for split in (-1, 3):
        with pytest.raises(ValueError, match=rf"Got split={split}, but the graph has 3 splits, numbered from 0"):
            prepare(data, split=split)
    with pytest.raises(ValueError, match="the graph has no mask of several splits"):
        prepare(kept, split=0)


@pytest.mark.parametrize("option", ["to_undirected", "self_loops", "gcn_norm"])
def test_edges_are_looked_at_before_they_are_changed(option):
    """PyG's transforms take the first two rows of any shape for sources and destinations."""
    turned = Data(edge_index=torch.randint(30, (120, 2)), num_nodes=30)
    for data, message in (
        (turned, r"'edge_index' .*\[2, \*\]|\[2, num_edges\]"),
        (Data(edge_index=torch.tensor([[0], [9]]), num_nodes=3), "'edge_index'"),
        (Data(num_nodes=3), "needs an 'edge_index'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(data, **{option: True})


def test_sparse_features_are_not_left_out(tmp_path):
    data = Data(x=torch.eye(4).to_sparse(), edge_index=torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match=r"'x' is a torch.sparse_coo tensor. Store 'x.to_dense\(\)'"):
        partition(data, 2, tmp_path / "graph")
