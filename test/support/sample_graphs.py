"""Graphs to cut, and how to put one together again from its parts."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pyg_sar.data import store
from pyg_sar.data.split import Topology

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"

real = pytest.mark.skipif(not REAL.is_dir(), reason="the folder ../shared/data with real graphs is absent")


def random_edges(num_nodes: int, num_edges: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_nodes, (2, num_edges), generator=generator)


# Number of nodes and edges: each has something that a partitioner can trip over.
GRAPHS = {
    "multi-edges": (3, [[0, 0, 1, 0, 2], [1, 1, 0, 1, 1]]),
    "self-loops": (3, [[0, 0, 1, 2, 2], [0, 1, 1, 2, 2]]),
    "isolated nodes": (9, [[3, 5], [5, 3]]),
    "no edges": (5, [[], []]),
    "only self-loops": (6, [[0, 1, 1], [0, 1, 1]]),
    "one node": (1, [[0], [0]]),
    "no nodes": (0, [[], []]),
    "star": (30, [list(range(1, 30)), [0] * 29]),
    "random": (60, random_edges(60, 400).tolist()),
}


def graph(name: str) -> tuple[int, Tensor]:
    num_nodes, edges = GRAPHS[name]
    return num_nodes, torch.tensor(edges, dtype=torch.long)


def put_together(parts: list[Topology]) -> Tensor:
    """Return the global edge list, after checking that every edge and node has one owner."""
    num_edges = sum(part.e_id.numel() for part in parts)
    edge_index = torch.full((2, num_edges), -1)
    for p, part in enumerate(parts):
        source, target = [], []
        for q, owner in enumerate(parts):
            rows = torch.arange(part.src_id.numel()) if p == q else owner.serve[p].long()
            assert part.num_src[q] == rows.numel()
            assert rows.equal(rows.unique())
            if p != q:
                assert part.col[q].unique().numel() == rows.numel(), "a row is served that no edge needs"
            source.append(owner.src_id[rows][part.col[q].long()])
            ends = part.dst_id if part.rows[q] is None else part.dst_id[part.rows[q].long()]
            target.append(ends.repeat_interleave(part.rowptr[q].diff()))
        edge_index[:, part.e_id] = torch.stack([torch.cat(source), torch.cat(target)])
    nodes = torch.cat([part.src_id for part in parts])
    assert nodes.sort().values.equal(torch.arange(nodes.numel()))
    return edge_index


def read_part(folder: str | os.PathLike[str], part: int) -> SimpleNamespace:
    """Return a part of a graph without types: its counts, its edges, and its attributes by level."""
    shard = store.read_part(folder, part)
    (nodes,), (edges,) = shard.nodes.values(), shard.edges.values()
    attrs = dict(nodes.attrs)
    assert attrs.pop("n_id") is edges.topology.src_id is edges.topology.dst_id
    levels = {"node_attrs": attrs, "edge_attrs": edges.attrs, "graph_attrs": shard.attrs}
    return SimpleNamespace(num_nodes=nodes.total, num_edges=edges.total, topology=edges.topology, **levels)
