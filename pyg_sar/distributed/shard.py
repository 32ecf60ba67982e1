r"""Cuts a graph into source shards within one process, and checks what such a cut is given."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pyg_sar.block import Index, cut
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.exchange import Local, Routes
from pyg_sar.graph import Seeds, ShardedGraph


def shard(
    edge_index: Tensor, num_nodes: int | tuple[int, int], num_parts: int = 1, *, assignment: Tensor | None = None
) -> ShardedEdgeIndex:
    r"""Cut a graph into source shards within one process.

    Layers of :mod:`pyg_sar.nn` then stream over the shards as they do over workers, so that only the messages of one
    shard exist at a time: the numbers are those of the whole graph, the memory of messages falls with ``num_parts``. A
    single shard is the graph in the form that the compiled kernels take.

    .. code-block:: python

        edge_index = pyg_sar.shard(data.edge_index, data.num_nodes, num_parts=8)
        out = pyg_sar.nn.GATConv(64, 8, heads=4)(data.x, edge_index)

    Args:
        edge_index (torch.Tensor): The edges :math:`(2, |\mathcal{E}|)`. Edge tensors keep its order.
        num_nodes (int or tuple): The number of nodes, or the numbers of sources and destinations of a bipartite graph.
        num_parts (int, optional): The number of source shards. (default: :obj:`1`)
        assignment (torch.Tensor, optional): Shard of every source node :math:`(|\mathcal{V}|)`. By default shards are
            ranges of equal length. (default: :obj:`None`)

    Returns:
        The graph, a :class:`~pyg_sar.edge_index.ShardedEdgeIndex` :math:`(2, |\mathcal{E}|)`.

    Raises:
        ValueError: If ``edge_index``, ``num_parts`` or ``assignment`` is invalid.
    """
    num_src, num_dst = (num_nodes, num_nodes) if isinstance(num_nodes, int) else num_nodes
    check_edge_index(edge_index, num_src, num_dst)
    if num_parts < 1:
        raise ValueError(f"Expected 'num_parts' to be at least 1 (got {num_parts})")
    if assignment is None:
        ends = [num_src * k // num_parts for k in range(num_parts + 1)]
        ids: list[Index] = [slice(a, b) for a, b in pairwise(ends)]
        bounds = torch.tensor(ends[1:], device=edge_index.device)
        part = None if num_parts == 1 else torch.bucketize(edge_index[0].contiguous(), bounds, right=True)
    else:
        check_assignment(assignment, num_src, num_parts)
        ids = [(assignment == q).nonzero().view(-1) for q in range(num_parts)]
        part = assignment[edge_index[0]]
    graph = ShardedGraph(
        cut(edge_index, part, ids, num_dst),
        num_src,
        num_dst,
        Local(Routes.local(ids, edge_index.device)),
        seeds=Seeds(torch.initial_seed()),
        dst=slice(0, num_dst) if isinstance(num_nodes, int) else None,
    )
    return ShardedEdgeIndex(graph)


def check_edge_index(edge_index: Tensor, num_src: int, num_dst: int, name: str = "'edge_index'") -> None:
    """Raise unless ``edge_index`` holds node ids."""
    if edge_index.dim() != 2 or edge_index.size(0) != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"Expected {name} to be of type torch.int64 and shape [2, num_edges] (got {edge_index.dtype} and "
            f"{list(edge_index.shape)})"
        )
    for row, end, size in ((edge_index[0], "source", num_src), (edge_index[1], "destination", num_dst)):
        if row.numel() > 0 and not 0 <= int(row.min()) <= int(row.max()) < size:
            raise ValueError(
                f"Expected {end} ids in {name} to be in [0, {size}) (got {int(row.min())} to {int(row.max())}). "
                f"Is 'num_nodes' right? Of pairs of nodes of a partitioned graph 'pyg_sar.shard_links' makes those of "
                f"this worker."
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
