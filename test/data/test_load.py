"""Opening a partition: what each worker gets, and errors that reach every worker."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, edges
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import load, partition
from pyg_sar.data.partition import prepare
from pyg_sar.distributed.simulated import Workers


def data():
    n, e = NUM_NODES, edges().size(1)
    return Data(
        x=torch.arange(2.0 * n).view(n, 2), edge_index=edges(), edge_attr=torch.arange(float(e)), y=torch.arange(n) % 3
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Partitions into 2 and 3 parts, another one into 3, and three damaged ones."""
    root = tmp_path_factory.mktemp("partitions")
    for name, parts, seed in (("two", 2, 0), ("three", 3, 0), ("other", 3, 1)):
        partition(data(), parts, root / name, method="random", seed=seed)
    for name in ("missing", "truncated", "mixed", "odd"):
        shutil.copytree(root / "three", root / name)
    shutil.rmtree(root / "missing" / "part_1")
    file = root / "truncated" / "part_1" / "nodes.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    shutil.rmtree(root / "mixed" / "part_1")
    shutil.copytree(root / "other" / "part_1", root / "mixed" / "part_1")
    info = json.loads((root / "odd" / "part_1" / "part.json").read_text())
    del info["counts"]
    (root / "odd" / "part_1" / "part.json").write_text(json.dumps(info))
    return root


def open_part(group, folder):
    torch.manual_seed(dist.get_rank(group))  # rank 0's counts
    it = load(folder, group=group)
    graph = it.edge_index.graph
    assert it.num_nodes == graph.num_src == len(it.n_id)
    assert it.total_nodes == NUM_NODES
    assert it.edge_index.size(1) == len(it.e_id)
    return it.n_id, it.x, it.y, it.e_id, it.edge_attr, graph.seeds.seed, graph.remat


def test_every_worker_gets_its_rows(pool, folders):
    whole = data()
    parts = pool.run(3, open_part, folders / "three")
    for n_id, x, y, e_id, edge_attr, seed, remat in parts:
        assert torch.equal(x, whole.x[n_id])
        assert torch.equal(y, whole.y[n_id])
        assert torch.equal(edge_attr, whole.edge_attr[e_id])
        assert torch.isin(whole.edge_index[1, e_id], n_id).all()
        assert (seed, remat) == (0, True)
    for k, count in ((0, NUM_NODES), (3, whole.num_edges)):
        assert torch.equal(torch.cat([p[k] for p in parts]).sort().values, torch.arange(count))


def train_in_bfloat16(group, folder, kind, autocast):
    """Return the rows of a layer on features in bfloat16, and the gradient of its weights."""
    it = load(folder, group=group)
    assert it.x.dtype == torch.bfloat16
    torch.manual_seed(0)
    conv = getattr(pyg_sar.nn, kind)(2, 3)
    if autocast:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = conv(it.x, it.edge_index)
    else:
        out = conv.bfloat16()(it.x, it.edge_index)
    out.float().square().mean().backward()
    pyg_sar.sum_gradients(conv, group)
    return it.n_id, out.detach().float(), next(conv.parameters()).grad.float()


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", ["SAGEConv", "GATConv", "GCNConv"])
def test_layers_work_on_features_in_bfloat16(pool, tmp_path, kind, autocast):
    whole = data()
    whole.x = torch.randn(NUM_NODES, 2, generator=torch.Generator().manual_seed(0))
    partition(prepare(whole, features=torch.bfloat16), 2, tmp_path / "graph", method="fennel")
    torch.manual_seed(0)
    expected = getattr(torch_geometric.nn, kind)(2, 3)(whole.x.bfloat16().float(), whole.edge_index)
    for n_id, out, grad in pool.run(2, train_in_bfloat16, tmp_path / "graph", kind, autocast):
        torch.testing.assert_close(out, expected[n_id].detach(), rtol=0.05, atol=0.05)
        assert grad.isfinite().all() and grad.any()


def test_tensors_are_mapped_from_their_files(tmp_path):
    """They take no memory of their own until they are written to, and writing does not change the file."""
    partition(data(), 1, tmp_path / "graph")
    it, address = load(tmp_path / "graph"), None
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= it.x.data_ptr() < end:
            address = line.split()
    assert address is not None and address[-1] == str(tmp_path / "graph" / "part_0" / "nodes.safetensors")
    before = it.x.clone()
    it.x += 1
    assert load(tmp_path / "graph").x.equal(before)


ERRORS = {
    "too few workers": ("three", {}, "The partition has 3 parts, but there are 2 workers", 2),
    "too many workers": ("two", {}, "The partition has 2 parts, but there are 3 workers", 3),
    "no folder": ("nowhere", {}, "rank 0: FileNotFoundError: There is no folder", 3),
    "a part is missing": ("missing", {}, "rank 1: FileNotFoundError", 3),
    "a file is damaged": ("truncated", {}, "rank 1: ValueError.*truncated or damaged", 3),
    "a file makes no sense": ("odd", {}, "rank 1: ValueError.*damaged: its checksum", 3),
    "a part of another partition": ("mixed", {}, "differ in 'identity'.*one run of the partitioner", 3),
    "mode": ("three", {"remat": False}, "differ in 'remat'.*rank 1: False", 3),
    "prefetch": ("three", {"prefetch": 2}, "differ in 'prefetch'.*rank 1: 2", 3),
    "negative prefetch": ("three", {"prefetch": -1}, "rank 1: ValueError.*'prefetch' to be 0 or more", 3),
    "comm_dtype": ("three", {"comm_dtype": torch.bfloat16}, "differ in 'comm_dtype'.*rank 1: torch.bfloat16", 3),
    "words": ("three", {"comm_dtype": "bfloat16"}, "rank 1: ValueError.*floating-point type", 3),
    "no device": ("three", {"device": "gpu"}, "rank 1: RuntimeError: .*device", 3),
    "integers": ("three", {"comm_dtype": torch.int8}, "rank 1: ValueError.*floating-point type", 3),
    "not a path": ("three", {"path": None}, "rank 1: TypeError", 3),
}


def provoke(group, root, folder, odd, says):
    """Rank 1 passes something else; every rank gets the same error, and the group lives on."""
    arguments = {"path": root / folder, **(odd if dist.get_rank(group) == 1 else {})}
    with pytest.raises(RuntimeError, match=says) as info:
        load(**arguments, group=group)
    assert str(info.value).startswith(f"[rank {dist.get_rank(group)}]")
    dist.barrier(group)


@pytest.mark.parametrize("what", ERRORS)
def test_errors_reach_every_worker(pool, folders, what):
    folder, odd, says, workers = ERRORS[what]
    pool.run(workers, provoke, folders, folder, odd, says)


def test_one_process_cannot_open_several_parts(folders):
    with pytest.raises(RuntimeError, match="The partition has 2 parts, but there are 1 workers"):
        load(folders / "two")


def test_a_process_that_has_not_joined_the_others(folders, monkeypatch, tmp_path):
    partition(data(), 1, tmp_path / "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 workers that were started, .* 'pyg_sar.init\(\)' .* 2 parts"):
        load(folders / "two")
    with pytest.warns(UserWarning, match="has not joined them: .* Each of them will have the whole graph"):
        load(tmp_path / "one")


def test_what_a_worker_without_nodes_loaded_can_be_saved(tmp_path):
    data = Data(x=torch.ones(4, 2), y=torch.ones(4, dtype=torch.int64), edge_index=torch.tensor([[0, 1], [1, 2]]))
    partition(data, 2, tmp_path / "parts", method=torch.zeros(4, dtype=torch.int64))

    def work(rank):
        data = load(tmp_path / "parts")
        torch.save({"x": data.x, "y": data.y}, tmp_path / f"{rank}.pt")
        return data.num_nodes

    assert Workers(2).run(work) == [4, 0]
