r"""One self-loop at every destination: a graph that has them, and tensors of its edges."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.block import Block, Index, ordinary_mode, rows_at
from pyg_sar.csr import index_type, lead_over
from pyg_sar.graph import EdgeIds, ShardedGraph, made, positions
from pyg_sar.rewire import dst_ids


def with_self_loops(graph: ShardedGraph) -> tuple[ShardedGraph, Loops]:
    """Replace self-loops by exactly one at every destination.

    Returns:
        The new graph, and what makes tensors of its edges.
    """
    if graph.bipartite:
        raise ValueError(
            f"Self-loops need one set of nodes, but this sharded graph joins {graph.num_src} sources with "
            f"{graph.num_dst} destinations. Construct the layer with 'add_self_loops=False'."
        )
    return graph.derived("self-loops", lambda: _with_self_loops(graph))


def _with_self_loops(graph: ShardedGraph) -> tuple[ShardedGraph, Loops]:
    assert graph.dst is not None
    loops, blocks, first = Loops(graph.blocks, graph.dst.start, graph.num_dst, graph.num_edges), [], 0
    for block in graph.blocks:
        new = loops.add(block)
        blocks.append(dataclasses.replace(new, edges=slice(first, first := first + new.num_edges)))
    ids = IdsWithLoops(graph.e_id, dst_ids(graph), loops)
    origin = None if graph.origin is None else graph.origin._replace(looped=True)
    return graph.replace(blocks=tuple(blocks), e_id=ids, origin=origin), loops


class Added(NamedTuple):
    """Self-loops that are added to a block.

    Args:
        row: Their destinations.
        col: Their rows in the block.
        rest: Which of the block's edges stay.
        counts: How many edges each destination has then.
    """

    row: Tensor
    col: Tensor
    rest: Index
    counts: Tensor

    def insert(self, edges: Tensor, loops: Tensor) -> Tensor:
        """Return numbers of the edges that stay, those of each destination followed by that of its loop."""
        rest, place = rows_at(edges, self.rest), self.counts.cumsum(0)[self.row] - 1
        out = rest.new_empty(rest.numel() + loops.numel())
        others = torch.ones_like(out, dtype=torch.bool).index_fill_(0, place, False)
        return out.masked_scatter_(others, rest).index_copy_(0, place, loops.to(out.dtype))


@dataclass(frozen=True, eq=False)
class Loops:
    """What tells the edges of a graph with self-loops from those of the graph that it was made of.

    They are ordered as its blocks have them, so that these read slices. What only tensors of edges need is made when
    it is asked for.

    Args:
        blocks: The blocks without the loops.
        start: The local row of the first destination.
        num_dst: Number of destinations.
        num_edges: Number of edges without the loops.
    """

    blocks: tuple[Block, ...]
    start: int
    num_dst: int
    num_edges: int

    def added(self, block: Block) -> Added | None:
        """Return what is added to a block; None if it holds no rows of destinations, and so no loops."""
        ids = torch.arange(block.ids.start, block.ids.stop) if isinstance(block.ids, slice) else block.ids
        row = ids.to(block.col.device) - self.start
        col = ((row >= 0) & (row < self.num_dst)).nonzero().view(-1)
        if col.numel() == 0:
            return None
        row, old = row[col], block.loops(self.start)
        rest = (~old).nonzero().view(-1) if bool(old.any()) else slice(None)
        counts = rows_at(block.narrow_row, rest).bincount(minlength=self.num_dst)
        counts[row] += 1
        return Added(row, col, rest, counts)

    def add(self, block: Block) -> Block:
        """Return a block with the loops of its rows in the place of those that it has."""
        added = self.added(block)
        if added is None:
            return block
        rows = added.counts.nonzero().view(-1)
        rowptr, dst = lead_over(rows, added.counts[rows], self.num_dst, block.rowptr.dtype)
        col = added.insert(block.col.to(rowptr.dtype), added.col)
        return dataclasses.replace(block, rowptr=rowptr, col=col, dst=dst)

    @cached_property
    @ordinary_mode
    def order(self) -> Tensor:
        """What :meth:`find_order` returns, for tensors of edges that come in every step."""
        return self.find_order()

    def find_order(self) -> Tensor:
        """Return the place of each edge among those without the loops, followed by a loop for each destination."""
        kind, every = index_type(self.num_edges + self.num_dst), []
        for block in self.blocks:
            added, edges = self.added(block), positions(block).to(kind)
            every.append(edges if added is None else added.insert(edges, self.num_edges + added.row))
        return torch.cat(every)

    def join(self, edges: Tensor, loops: Tensor) -> Tensor:
        """Return the rows of all edges, given those of the graph without the loops and of the loops."""
        return rows_at(torch.cat([edges, loops]), self.order)

    @cached_property
    @ordinary_mode
    def replaced(self) -> tuple[Tensor, Tensor]:
        """The loops that were there: where they are among the worker's edges, ascending, and their destinations."""
        places, rows = [], []
        for block in self.blocks:
            old = block.loops(self.start).nonzero().view(-1)
            places.append(positions(block)[old])
            rows.append(block.narrow_row[old].long())
        place, order = torch.cat(places).sort()
        return place, torch.cat(rows)[order]

    @cached_property
    @ordinary_mode
    def kept(self) -> Index:
        """Where the other edges are."""
        old, _ = self.replaced
        keep = torch.ones(self.num_edges, dtype=torch.bool, device=old.device).index_fill_(0, old, False)
        return keep.nonzero().view(-1).to(index_type(self.num_edges)) if old.numel() > 0 else slice(None)


@dataclass(frozen=True, eq=False)
class IdsWithLoops(EdgeIds):
    """Ids of edges, and of self-loops.

    Args:
        e_id: Ids of the edges without the loops, or None if they are ``0, 1, ...``.
        dst_id: An id of each destination.
        loops: Which edges there are.
    """

    e_id: Tensor | EdgeIds | None
    dst_id: Tensor
    loops: Loops

    def make(self) -> Tensor:
        """Join them; those of loops are negative, which no edge's are."""
        e_id = made(self.e_id)
        e_id = torch.arange(self.loops.num_edges, device=self.dst_id.device) if e_id is None else e_id
        return torch.cat([e_id, -1 - self.dst_id]).index_select(0, self.loops.find_order())
