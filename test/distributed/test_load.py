"""Opening a partition: what each worker gets, and errors that reach every worker."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from problem import NUM_NODES, edges
from torch_geometric.data import Data

from pyg_sar import load, partition


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


ERRORS = {
    "too few workers": ("three", {}, "The partition has 3 parts, but there are 2 workers", 2),
    "too many workers": ("two", {}, "The partition has 2 parts, but there are 3 workers", 3),
    "no folder": ("nowhere", {}, "rank 0: FileNotFoundError: There is no folder", 3),
    "a part is missing": ("missing", {}, "rank 1: FileNotFoundError", 3),
    "a file is damaged": ("truncated", {}, "rank 1: ValueError.*truncated or damaged", 3),
    "a file makes no sense": ("odd", {}, "rank 1: KeyError: 'counts'", 3),
    "a part of another partition": ("mixed", {}, "differ in 'identity'.*one run of the partitioner", 3),
    "mode": ("three", {"remat": False}, "differ in 'remat'.*rank 1: False", 3),
    "prefetch": ("three", {"prefetch": 2}, "differ in 'prefetch'.*rank 1: 2", 3),
    "negative prefetch": ("three", {"prefetch": -1}, "rank 1: ValueError.*'prefetch' to be 0 or more", 3),
    "wire": ("three", {"wire": torch.bfloat16}, "differ in 'wire'.*rank 1: torch.bfloat16", 3),
    "whole numbers on the wire": ("three", {"wire": torch.int8}, "rank 1: ValueError.*floating-point type", 3),
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
