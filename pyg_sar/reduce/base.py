r"""What all reductions share: their interface, column tiles, and what they read besides source rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.block import Block, rows_at
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops.reference import accumulator

COLUMNS = 128  # of a column tile, about: as wide as a tile of the kernels, see csrc/rows.inl


class Rows(NamedTuple):
    """What an aggregation reads besides the source rows.

    Args:
        dst: Tensors with one row for each destination, ``[M, *]``.
        edge: Tensors with one row for each edge of the worker, or of a block in its order, ``[E, *]``.
        const: Tensors that all edges share, such as parameters.
    """

    dst: Sequence[Any] = ()
    edge: Sequence[Any] = ()
    const: Sequence[Any] = ()

    def of(self, block: Block) -> Rows:
        """Return the same with the edges of a block alone."""
        return self._replace(edge=[rows_at(e, block.edges) for e in self.edge])


class Needs(NamedTuple):
    """Which gradients are wanted."""

    source: bool
    rows: Rows  # of booleans


Grads = tuple[Tensor | None, Rows]  # of source rows, and of what is read besides


class Reduce:
    """Base class; ``state`` is whatever ``init`` returns, ``saved`` are the tensors that backward reads.

    These go from one method to the next::

        out, saved = finish(state)                                 saved by autograd; the output if ``saves_output``
        saved = condense(saved, out, d_out)                        of all tiles, before the first block
        saved = prepare(saved, d_out)                              of one tile, when its turn comes
        d_x, d_rows = grad(block, x, rows, saved, d_out, needs)    of one block; ``x`` if ``needs_source``

    ``skips_empty`` says whether blocks without edges change nothing. ``optional`` are places in ``rows.const`` whose
    gradient stays None where no block has one; the others begin with zeros.
    """

    needs_source = True
    saves_output = False
    skips_empty = True
    optional: frozenset[int] = frozenset()

    def tiles(self, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
        """Return reductions over column tiles of source rows that together do the same; here, one over all columns.

        Args:
            like: An empty tensor of source rows, ``[0, *]``.
            rows: What is read besides.
            num_blocks: The number of source blocks.
        """
        return [Tile(0, self, slice(None), slice(None), like)]

    def into(self, graph: ShardedGraph, start: int, end: int) -> Reduce:
        """Return what does the same for a range of destinations, of which ``graph`` has the in-edges; here, itself."""
        return self

    def narrow(self, rows: Rows) -> Rows:
        """Return views of what a reduction over a column tile reads of ``rows``, or of their gradients; here, all."""
        return rows

    def init(self, x: Tensor, num_dst: int) -> Any:
        """Return the state before the first block, given source rows, of which there may be none."""
        raise NotImplementedError

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Return the state after a block with source rows ``x``."""
        raise NotImplementedError

    def finish(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and what backward needs besides it."""
        raise NotImplementedError

    def condense(self, saved: tuple[Tensor, ...], out: Tensor | None, d_out: Tensor) -> tuple[Tensor, ...]:
        """Return what backward reads of what was saved, of the output ``out`` (None if it was not saved) and of its
        gradient ``d_out``. It is called for all tiles before the first block, and what it does not return is dropped.
        """
        return saved if out is None else (*saved, out)

    def prepare(self, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
        """Turn what ``condense`` returned, once, into what ``grad`` reads for every block; ``d_out`` is as there."""
        return saved

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Return the gradients of a block's source rows and of ``rows``, given that of the output, ``d_out``."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Tile:
    """A reduction over a column tile, that is, over some columns of the source rows.

    Args:
        number: Its number among the tiles of an aggregation.
        reduce: The reduction over these columns.
        source: The columns of the source rows that it reads.
        out: The columns of the output that it makes.
        like: An empty tensor of the source rows that it reads, ``[0, *]``.
    """

    number: int
    reduce: Reduce
    source: slice
    out: slice
    like: Tensor

    def init(self, num_dst: int) -> Any:
        """Return the state before the first block."""
        return self.reduce.init(self.like, num_dst)

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Return the state after a block, given the tile of its source rows and all other rows."""
        if block.num_edges == 0 and self.reduce.skips_empty:
            return state
        return self.reduce.step(state, block, x, self.reduce.narrow(rows.of(block)))

    def finish(self, state: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return these columns of the output and what backward needs besides it."""
        return self.reduce.finish(state, self.like.dtype)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Return the gradients of a block; its owner waits for those of source rows, even if the block has no edges."""
        if block.num_edges == 0 and self.reduce.skips_empty:
            return self.like.new_zeros(block.num_src, *self.like.shape[1:]), Rows()
        return self.reduce.grad(block, x, self.reduce.narrow(rows.of(block)), saved, d_out, needs)


def column_tiles(reduce: Reduce, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
    """Cut a reduction that treats all columns alike into tiles of about equal width, unless all is in one block: what
    :meth:`Reduce.tiles` is there.
    """
    width = like.size(-1) if like.dim() > 1 else 1
    count = -(-width // COLUMNS) if num_blocks > 1 else 1
    if count < 2:
        return Reduce.tiles(reduce, like, rows, num_blocks)
    spans = pairwise(width * k // count for k in range(count + 1))
    return [Tile(k, reduce, slice(*span), slice(*span), like[..., slice(*span)]) for k, span in enumerate(spans)]


def head_groups(heads: int, channels: int) -> list[slice]:
    """Return ranges of heads that have about as many values as a column tile."""
    step = max(COLUMNS // max(channels, 1), 1)
    return [slice(h, min(h + step, heads)) for h in range(0, heads, step)]


def columns(x: Tensor, which: slice) -> Tensor:
    """Return some columns; all of them as the tensor itself, whose changes in place torch then tells best."""
    return x if which == slice(None) else x[..., which]


def flat(x: Tensor) -> Tensor:
    """Return rows as a matrix, which shares their memory if they are contiguous."""
    return x.reshape(x.size(0), math.prod(x.shape[1:]))


def divisor(count: Tensor, like: Tensor) -> Tensor:
    """Return what turns sums over as many rows into means: counts, in a type that holds them."""
    return factor(count.clamp(min=1), like)


def factor(numbers: Tensor, like: Tensor) -> Tensor:
    """Return a number for each row of another tensor, in the type in which these are summed."""
    return numbers.to(accumulator(like.dtype)).view(-1, *[1] * (like.dim() - 1))
