"""A small graph with everything that can go wrong, its share for one worker, and the comparison with PyG."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar import ShardedEdgeIndex
from pyg_sar.data.assign import assign
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split

NUM_NODES = 61
MODES = {1: "rematerialise", 2: "keep", 3: "one shot"}


def edges(num_src: int = NUM_NODES, num_dst: int = NUM_NODES, seed: int = 0) -> Tensor:
    """A directed graph with self-loops (one of them twice), multi-edges, isolated nodes and nodes without in-edges."""
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.stack([torch.randint(n, (420,), generator=g) for n in (num_src, num_dst)])
    edge_index = edge_index[:, (edge_index[0] != 7) & (edge_index[1] != 7) & (edge_index[1] % 11 != 5)]
    loops = torch.tensor([2, 2, 30, 44]).expand(2, -1)
    edge_index = torch.cat([edge_index, edge_index[:, :40], loops], 1)
    return edge_index[:, torch.randperm(edge_index.size(1), generator=g)]


def with_one_loop(edge_index: Tensor) -> Tensor:
    """Leave out all self-loops of a node but its first one: on a GPU PyG takes the weight of any of them."""
    src, dst = edge_index
    loops = (src == dst).nonzero().view(-1)
    first = torch.stack([loops[src[loops] == node][0] for node in src[loops].unique()])
    return edge_index[:, (src != dst).index_fill(0, first, True)]


def assignment(method: str, num_parts: int, num_nodes: int = NUM_NODES, seed: int = 1) -> Tensor:
    """Part of every node: "random", "contiguous", "metis", or "empty" where the last of several parts holds nothing."""
    g = torch.Generator().manual_seed(seed)
    if method == "metis":
        return assign(Data(edge_index=edges(), num_nodes=num_nodes), num_parts)
    if method == "contiguous":
        return torch.arange(num_nodes) * num_parts // num_nodes
    return torch.randint(num_parts - (method == "empty" and num_parts > 1), (num_nodes,), generator=g)


@dataclass
class Share:
    """One worker's share of a graph."""

    edge_index: ShardedEdgeIndex
    src: Tensor
    dst: Tensor
    edge: Tensor


def share(
    group: Any, edge_index: Tensor, part: Tensor, *, mode: int = 1, prefetch: int = 1, dst_part: Tensor | None = None,
    comm_dtype: torch.dtype | None = None,
) -> Share:  # fmt: skip
    """Cut the graph as ``load`` would; rows are in any order but that of ids, because a partition may choose one."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if dst_part is None:
        nodes = torch.randperm(part.numel(), generator=torch.Generator().manual_seed(4))
        nodes = nodes[part[nodes].argsort(stable=True)]
        topology = list(split(edge_index, part, part, size, nodes))[rank]
    else:
        topology = list(split(edge_index, part, dst_part, size))[rank]
    graph = assemble(topology, rank, group, remat=mode == 1, prefetch=prefetch, seed=3, comm_dtype=comm_dtype)
    sharded = ShardedEdgeIndex(graph)
    return Share(sharded.merge() if mode == 3 else sharded, topology.src_id, topology.dst_id, topology.e_id)


@dataclass
class Result:
    """Output and gradients; of a share, or of the whole."""

    out: Tensor
    node_grads: dict[str, Tensor | None] = field(default_factory=dict)
    edge_grads: dict[str, Tensor | None] = field(default_factory=dict)
    param_grads: dict[str, Tensor | None] = field(default_factory=dict)


def backward(out: Tensor, rows: Tensor, total_rows: int) -> None:
    """Send the same gradient through the output, however it is cut."""
    g = torch.Generator().manual_seed(9)
    weight = torch.randn(total_rows, *out.shape[1:], generator=g, dtype=torch.float64)
    (out * weight[rows].to(out.dtype)).sum().backward()


def close(found: Tensor | None, expected: Tensor | None, what: str, tol: float = 1e-10) -> None:
    """Compare with an absolute and relative tolerance; a missing gradient is zero."""
    if expected is None:
        expected = torch.zeros_like(found) if found is not None else None
    if found is None and expected is not None:
        found = torch.zeros_like(expected)
    if expected is not None:
        torch.testing.assert_close(found, expected, rtol=tol, atol=tol, msg=lambda m: f"{what}: {m}")
