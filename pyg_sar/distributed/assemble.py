r"""Builds a :class:`~pyg_sar.graph.ShardedGraph` from a worker's :class:`~pyg_sar.distributed.split.Topology`."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyg_sar.distributed.exchange import Local, Log, Peers
from pyg_sar.distributed.group import Group
from pyg_sar.distributed.split import Topology
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Block, Index, Seeds, ShardedGraph, cut


def assemble(
    topology: Topology,
    rank: int,
    group: Group = None,
    remat: bool = True,
    prefetch: int = 1,
    seed: int = 0,
    wire: torch.dtype | None = None,
    log: Log | None = None,
) -> ShardedGraph:
    """Return the graph of worker ``rank``; a partition with a single part needs no process group."""
    num_src, ids = topology.src_id.numel(), _local_first(topology.num_src, rank)
    starts = torch.tensor([0, *(c.numel() for c in topology.col)]).cumsum(0).tolist()
    blocks = tuple(
        Block(ptr, col.to(ptr.dtype), ids[q], topology.num_src[q], slice(starts[q], starts[q + 1]))
        for q, (ptr, col) in enumerate(zip(topology.rowptr, topology.col, strict=True))
    )
    if len(blocks) == 1:
        exchange: Local | Peers = Local([slice(0, num_src)], log)
    else:
        exchange = Peers(topology.serve, topology.num_src, group, prefetch, log, wire)
    return ShardedGraph(
        blocks,
        num_src,
        topology.dst_id.numel(),
        exchange,
        remat,
        topology.src_id,
        topology.e_id,
        Seeds(seed),
        bipartite=topology.dst_id is not topology.src_id,
    )


def _local_first(num_src: list[int], rank: int) -> list[Index]:
    ids: list[Index] = []
    start = num_src[rank]
    for q, n in enumerate(num_src):
        ids.append(slice(0, n) if q == rank else slice(start, start + n))
        start += 0 if q == rank else n
    return ids


def shard(
    edge_index: Tensor, num_nodes: int | tuple[int, int], num_parts: int = 1, *, assignment: Tensor | None = None
) -> ShardedEdgeIndex:
    r"""Cut a graph into source shards within one process.

    Layers of :mod:`pyg_sar.nn` then stream over the shards as they do over workers, so that only the messages of one
    shard exist at a time: the numbers are those of the whole graph, the memory of messages falls with ``num_parts``. A
    single shard is the graph in the form that the compiled kernels take.

    Args:
        edge_index (torch.Tensor): The edges :math:`(2, |\mathcal{E}|)`. Edge tensors keep its order.
        num_nodes (int or tuple): The number of nodes, or the numbers of sources and destinations of a bipartite graph.
        num_parts (int, optional): The number of source shards. (default: :obj:`1`)
        assignment (torch.Tensor, optional): Shard of every source node :math:`(|\mathcal{V}|)`. By default shards are
            ranges of equal length. (default: :obj:`None`)
    """
    num_src, num_dst = (num_nodes, num_nodes) if isinstance(num_nodes, int) else num_nodes
    check_edge_index(edge_index, num_src, num_dst)
    if num_parts < 1:
        raise ValueError(f"Expected 'num_parts' to be at least 1 (got {num_parts})")
    if assignment is None:
        ends = [num_src * k // num_parts for k in range(num_parts + 1)]
        ids: list[Index] = [slice(a, b) for a, b in pairwise(ends)]
        part = torch.bucketize(edge_index[0].contiguous(), torch.tensor(ends[1:], device=edge_index.device), right=True)
    else:
        check_assignment(assignment, num_src, num_parts)
        ids = [(assignment == q).nonzero().view(-1) for q in range(num_parts)]
        part = assignment[edge_index[0]]
    graph = ShardedGraph(
        cut(edge_index, part, ids, num_dst),
        num_src,
        num_dst,
        Local(ids),
        seeds=Seeds(torch.initial_seed()),
        bipartite=not isinstance(num_nodes, int),
    )
    return ShardedEdgeIndex(graph)


def check_edge_index(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raise unless ``edge_index`` holds node ids."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"Expected 'edge_index' to be of type torch.int64 and shape [2, num_edges] (got {edge_index.dtype} and "
            f"{list(edge_index.shape)})"
        )
    for row, name, size in ((edge_index[0], "source", num_src), (edge_index[1], "destination", num_dst)):
        if row.numel() > 0 and not 0 <= int(row.min()) <= int(row.max()) < size:
            raise ValueError(
                f"Expected {name} ids in 'edge_index' to be in [0, {size}) (got {int(row.min())} to {int(row.max())}). "
                f"Is 'num_nodes' right?"
            )


def check_assignment(assignment: Tensor, num_nodes: int, num_parts: int) -> None:
    """Raise unless ``assignment`` gives every node a part."""
    if assignment.shape != (num_nodes,) or assignment.is_floating_point():
        raise ValueError(
            f"Expected the assignment to be an integer tensor of shape [{num_nodes}] (got {assignment.dtype} and "
            f"{list(assignment.shape)})"
        )
    if num_nodes > 0 and not 0 <= int(assignment.min()) <= int(assignment.max()) < num_parts:
        raise ValueError(f"Expected parts in [0, {num_parts}) (got {int(assignment.min())} to {int(assignment.max())})")
