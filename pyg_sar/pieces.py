r"""Cuts a block into pieces, some destinations with all their edges in it, so that messages live for one of them.

A piece has at most about as many edges as the block has source rows, and more than half of them, because backward makes
a gradient of all these rows for every piece; what messages take is then a few times what these rows do, however many
edges there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_sar.block import Block, Index
from pyg_sar.csr import sized
from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Grads, Needs, Rows

# Of a piece, about, where the block has fewer source rows; on a GPU, which waits for the host between pieces, 16 times.
EDGES = 1 << 16


class Piece(NamedTuple):
    """Some destinations of a block, with all their edges in it.

    Args:
        block: These edges.
        dst: The destinations.
        edges: Where the edges are among those of the whole block.
    """

    block: Block
    dst: slice
    edges: slice

    def rows(self, rows: Rows) -> Rows:
        """Return what is read of the rows of the whole block."""
        return Rows([t[self.dst] for t in rows.dst], [t[self.edges] for t in rows.edge], rows.const)

    def narrow(self, state: Any) -> Any:
        """Return views of tensors whose rows are destinations."""
        return tree_map(lambda t: t[self.dst], state)


def piece_size(graph: ShardedGraph) -> int:
    """Return about how many edges a piece has where the block has fewer source rows."""
    return sized(EDGES) * (1 if graph.device.type == "cpu" else 16)


def is_one_piece(graph: ShardedGraph) -> bool:
    """Whether all edges of the whole graph are one piece, so that PyG's code may run on them, and keep messages."""
    whole = graph.exchange.alone and len(graph.blocks) == 1 and not graph.bipartite and graph.origin is None
    return whole and graph.num_edges <= piece_size(graph)


def pieces(graph: ShardedGraph, block: Block) -> Sequence[Piece]:
    """Return the pieces of a block of a graph, which are made once."""
    size = max(piece_size(graph), block.num_src)
    if block.num_edges <= size:
        return (Piece(block, slice(None), slice(None)),)
    return graph.derived(("pieces", block, size), lambda: cut(block, size))


def cut(block: Block, size: int) -> list[Piece]:
    """Cut a block into pieces of about equally many edges, about ``size`` at most; none is without edges."""
    count = -(-block.num_edges // size)
    ends = torch.tensor([block.num_edges * k // count for k in range(1, count)], device="cpu")
    at = torch.searchsorted(block.rowptr.cpu().long(), ends).unique()
    at = at.to(block.rowptr.device)
    first = block.rowptr[at]
    at, first = at[first < block.num_edges], first[first < block.num_edges]
    rows = at if block.dst is None else block.dst[at]
    spans = (pairwise([0, *inner.tolist(), end]) for inner, end in ((rows, block.num_dst), (first, block.num_edges)))
    return [Piece(block.rows(*dst), slice(*dst), slice(*edges)) for dst, edges in zip(*spans, strict=True)]


class Totals:
    """Gradients of source rows ``x`` and of other ``rows``, added up from those of pieces, or of chunks."""

    def __init__(self, x: Tensor, rows: Rows) -> None:
        self.x, self.rows = x, rows
        self.d_x: Tensor | None = None
        self.others = Rows(*([None] * len(ts) for ts in rows))

    def add(self, grads: Grads, dst: Index, edge: Index, src: Index = slice(None)) -> None:
        """Add those of a part, given where its rows are; ranges of parts do not overlap, indices may."""
        d_x, others = grads
        if d_x is not None and self.d_x is not None and isinstance(src, slice):
            self.d_x.add_(d_x)  # in place, since it is large and shares its memory with no other gradient
        else:
            self.d_x = added(self.d_x, d_x, src, self.x)
        for totals, found, like, place in zip(self.others, others, self.rows, (dst, edge, slice(None)), strict=True):
            for k, grad in enumerate(found):
                totals[k] = added(totals[k], grad, place, like[k])  # type: ignore[index]

    def grads(self, needs: Needs) -> Grads:
        """Return them; somebody may wait for those of source rows, also where there are none."""
        d_x = torch.zeros_like(self.x) if self.d_x is None and needs.source else self.d_x
        return d_x, self.others


def added(total: Tensor | None, grad: Tensor | None, place: Index, like: Tensor) -> Tensor | None:
    """Add the gradient of some rows to that of all, which looks ``like`` these; what stood in for no row has none."""
    if grad is None:
        return total
    if isinstance(place, slice) and place == slice(None):
        return grad if total is None else total + grad
    total = torch.zeros_like(like) if total is None else total
    if isinstance(place, slice):
        total[place] = grad
    elif total.size(0) > 0:
        total.index_add_(0, place, grad)
    return total
