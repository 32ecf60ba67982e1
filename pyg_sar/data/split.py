r"""Cuts a global ``edge_index`` into what each worker holds: the arithmetic behind partitioning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.csr import compress, compress_doubly


@dataclass(frozen=True, eq=False)
class Topology:
    """The share of one worker, as tensors that can be written to a file as they are; lists are by source shard."""

    src_id: Tensor  # global ids of the local source rows
    dst_id: Tensor  # global ids of the local destinations; the same tensor as `src_id` unless bipartite
    e_id: Tensor  # global ids of the edges that end here, ordered by owner of the source, then row of the destination
    rowptr: list[Tensor]  # the CSR row pointer over the local destinations, or over those of `rows`
    col: list[Tensor]  # the source row of each edge: a row of `src_id`, or of what another worker serves
    serve: list[Tensor]  # for each worker, the local source rows that it reads, ascending; empty for oneself
    num_src: list[int]  # the number of rows that are read (all local rows for oneself)
    rows: list[Tensor | None]  # the destinations that the row pointer leads over, None if all, as in a `Block`


def split(
    edge_index: Tensor,
    src_part: Tensor,
    dst_part: Tensor,
    num_parts: int,
    nodes: Tensor | None = None,
    dst_nodes: Tensor | None = None,
) -> Iterator[Topology]:
    """Yield every worker's :class:`Topology`, one at a time.

    An edge belongs to the owner of its destination. Owners of sources and of destinations are the same tensor unless
    the graph is bipartite. ``nodes`` are all source nodes, part by part, in the order of rows, by default that of
    global ids; ``dst_nodes`` are the destinations of a bipartite graph.

    Peak memory above the inputs is that of the sorted order of the edges, half the bytes of ``edge_index``, and what it
    takes to sort those of the largest worker.
    """
    src_row, src_ptr, src_nodes = _number(src_part, num_parts, nodes)
    same = dst_part is src_part
    dst_row, dst_ptr, dst_nodes = (src_row, src_ptr, src_nodes) if same else _number(dst_part, num_parts, dst_nodes)
    parts, owner = range(num_parts), dst_part[edge_index[1]]
    order = [_edge_order(edge_index, (owner == p).nonzero().view(-1), src_part, dst_row) for p in parts]
    del owner
    edges = [e.split(src_part[edge_index[0][e]].bincount(minlength=num_parts).tolist()) for e in order]
    none = src_row.new_empty(0)  # not a view, which would keep the numbers of all nodes
    needs = [[none if p == q else src_row[edge_index[0][edges[p][q]]].unique() for q in parts] for p in parts]
    for p in parts:
        num_dst = dst_ptr[p + 1] - dst_ptr[p]
        pointers, col, num_src = [], [], []
        for q in parts:
            need = needs[p][q]
            sources = src_row[edge_index[0][edges[p][q]]]
            # Both are sorted and every source is needed, so a binary search numbers the sources.
            col.append(sources if p == q else torch.searchsorted(need, sources, out_int32=True))
            pointers.append(compress_doubly(dst_row[edge_index[1][edges[p][q]]], num_dst))
            num_src.append(src_ptr[q + 1] - src_ptr[q] if p == q else need.numel())
        serve = [needs[q][p] for q in parts]
        src_id = src_nodes[src_ptr[p] : src_ptr[p + 1]]
        dst_id = src_id if same else dst_nodes[dst_ptr[p] : dst_ptr[p + 1]]
        rowptr, rows = map(list, zip(*pointers, strict=True))
        yield Topology(src_id, dst_id, order[p], rowptr, col, serve, num_src, rows)


def _number(part: Tensor, num_parts: int, nodes: Tensor | None) -> tuple[Tensor, list[int], Tensor]:
    """Number the nodes within their parts: row of each node, pointer over parts, nodes part by part."""
    if nodes is None:
        nodes = torch.argsort(part, stable=True)
    ptr = compress(part[nodes], num_parts).tolist()
    row = torch.empty_like(nodes)
    row[nodes] = torch.arange(nodes.numel())
    row -= torch.tensor(ptr)[part.long()]
    return row.int(), ptr, nodes


def _edge_order(edge_index: Tensor, edges: Tensor, src_part: Tensor, dst_row: Tensor) -> Tensor:
    """Order some edges by owner of the source, row of the destination; ties keep their order."""
    edges = edges[torch.argsort(dst_row[edge_index[1][edges]], stable=True)]
    return edges[torch.argsort(src_part[edge_index[0][edges]], stable=True)]
