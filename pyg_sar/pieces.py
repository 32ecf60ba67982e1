r"""Cuts a block into pieces, some destinations with all their edges in it, so that messages live for one of them.

A piece has at least as many edges as the block has source rows, because backward makes a gradient of all these rows for
every piece; what messages take is then a few times what these rows do, however many edges there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Grads, Rows

EDGES = 1 << 16  # of a piece, at least; on a GPU, which waits for the host between pieces, 16 times


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


def fewest(graph: ShardedGraph) -> int:
    """Return how many edges a piece has at least, if there are as many."""
    return EDGES * (1 if graph.device.type == "cpu" else 16)


def is_one_piece(graph: ShardedGraph) -> bool:
    """Whether all edges of the whole graph are one piece, so that PyG's code may run on them, and keep messages."""
    whole = graph.exchange.alone and len(graph.blocks) == 1 and not graph.bipartite and graph.origin is None
    return whole and graph.num_edges <= fewest(graph)


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """Make pieces smaller, as in a graph that is a smaller model of another one."""
    global EDGES
    before, EDGES = EDGES, max(round(EDGES * factor), 1)
    try:
        yield
    finally:
        EDGES = before


def pieces(graph: ShardedGraph, block: Block) -> Sequence[Piece]:
    """Return the pieces of a block of a graph, which are made once."""
    size = max(fewest(graph), block.num_src)
    if block.num_edges <= size:
        return (Piece(block, slice(None), slice(None)),)
    return graph.derived(("pieces", block, size), lambda: cut(block, size))


def cut(block: Block, size: int) -> list[Piece]:
    """Cut a block into pieces of about equally many edges, about ``size`` at most; none is without edges."""
    count = -(-block.num_edges // size)
    ends = torch.tensor([block.num_edges * k // count for k in range(1, count)])
    at = torch.searchsorted(block.rowptr.cpu().long(), ends).unique()
    at = at.to(block.rowptr.device)
    first = block.rowptr[at]
    at, first = at[first < block.num_edges], first[first < block.num_edges]
    rows = at if block.dst is None else block.dst[at]
    spans = (pairwise([0, *inner.tolist(), end]) for inner, end in ((rows, block.num_dst), (first, block.num_edges)))
    return [Piece(block.rows(*dst), slice(*dst), slice(*edges)) for dst, edges in zip(*spans, strict=True)]


class Totals:
    """Gradients of what a block reads, put together of those of its pieces."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.source: Any = None
        self.total = Rows(*([None] * len(ts) for ts in rows))

    def add(self, piece: Piece, grads: Grads) -> None:
        """Add those of a piece."""
        source, others = grads
        if source is not None:
            self.source = source if self.source is None else self.source.add_(source)
        for name, place in (("dst", piece.dst), ("edge", piece.edges)):
            total: Any = getattr(self.total, name)
            for k, grad in enumerate(getattr(others, name)):
                if grad is not None and place == slice(None):
                    total[k] = grad
                elif grad is not None:
                    total[k] = torch.zeros_like(getattr(self.rows, name)[k]) if total[k] is None else total[k]
                    total[k][place] = grad
        const: Any = self.total.const
        for k, grad in enumerate(others.const):
            if grad is not None:
                const[k] = grad if const[k] is None else const[k] + grad
