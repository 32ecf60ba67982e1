r"""Sums and means of weighted source rows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import sddmm_, spmm_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, Tile, column_tiles, divisor, factor, flat


class Sum(Reduce):
    r"""Weighted sum :math:`\sum_j w_{ij} \mathbf{x}_j`, the weights (if any) being ``rows.edge[0]``.

    While the weights are constant the gradient is a sum over the transposed block: case 1, no row is fetched twice.

    Args:
        learn_weight: Whether the weights need a gradient.
        sums: If given, the number of sums over the same rows, each with a column of the weights.
        adds_heads: Whether rows have heads, :math:`[N, H, F]`, with a column of the weights each, that are added up;
            not with ``sums``.
        overwrite: Whether there is a single block, which has edges: then sums are written once, over any memory.
        count: What the sum of each destination is divided by (if it is more than 1), for means.
        scale: What it is multiplied by, a constant ``[M]``.
    """

    def __init__(
        self, learn_weight: bool = False, sums: int | None = None, overwrite: bool = False,
        count: Tensor | None = None, adds_heads: bool = False, scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert sums is None or not adds_heads
        self.needs_source, self.sums, self.overwrite, self.count = learn_weight, sums, overwrite, count
        self.adds_heads, self.scale = adds_heads, scale

    def into(self, graph: ShardedGraph, start: int, end: int) -> Sum:
        """Return the sum with the counts and factors of these destinations."""
        other = copy.copy(self)
        other.count = None if self.count is None else self.count[start:end].to(graph.device)
        other.scale = None if self.scale is None else self.scale[start:end].to(graph.device)
        other.overwrite = len(graph.blocks) == 1 and graph.num_edges > 0
        return other

    def tiles(self, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
        """Cut columns, unless each head of them has weights of its own."""
        whole = self.sums is None and len(rows.edge) > 0 and rows.edge[0].dim() > 1
        return super().tiles(like, rows, num_blocks) if whole else column_tiles(self, like, rows, num_blocks)

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros, or what will be written."""
        shape = x.shape[1:] if self.sums is None else (self.sums, *x.shape[1:])  # F, or [sums, F]
        shape = shape[1:] if self.adds_heads else shape
        if self.writes(x.dtype):
            return x.new_empty(num_dst, *shape)
        return zeros(x, num_dst, *shape, dtype=accumulator(x.dtype))

    def writes(self, dtype: torch.dtype) -> bool:
        """Whether sums are written in the type of rows, in which they may be too large where it is half precision and
        what is made of them is not.
        """
        return self.overwrite and (self.count is self.scale is None or dtype == accumulator(dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add the block."""
        weight = per_head(rows.edge[0], accumulator(x.dtype)) if rows.edge else None  # [E, H]
        overwrite = self.writes(x.dtype)
        if overwrite and block.dst is not None:  # the other rows are not written
            state.zero_()
        spmm_(flat(state), block.rowptr, block.col, flat(x), weight, None, overwrite, block.dst)
        return state

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round once."""
        if self.count is not None:
            state.div_(divisor(self.count, state))
        if self.scale is not None:
            state.mul_(factor(self.scale, state))
        return state.to(dtype), ()

    def prepare(self, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the sum."""
        d_sum = d_out if self.count is None else d_out / divisor(self.count, d_out)
        d_sum = d_sum if self.scale is None else d_sum * factor(self.scale, d_sum)
        return (d_sum.to(d_out.dtype),)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Sum over the transposed block; a weight gets the dot product of the two rows that its edge joins."""
        (d_out,), d_x, d_weight = saved, None, None  # [M, F], or [M, sums, F]
        weight = per_head(rows.edge[0], accumulator(d_out.dtype)) if rows.edge else None  # [E, H]
        if needs.source:
            perm = None if weight is None else block.perm
            ptr, row = block.by_source
            shape = d_out.shape[1:] if self.sums is None else d_out.shape[2:]
            heads = rows.edge[0].shape[1:] if self.adds_heads else ()
            d_x = d_out.new_empty(block.num_src, *heads, *shape)  # [N, F], or [N, H, F]
            spmm_(flat(d_x), ptr, row, flat(d_out), weight, perm, True)
        if self.needs_source:
            assert x is not None and weight is not None
            d_weight = torch.empty_like(weight)
            y = flat(d_out).repeat(1, d_weight.size(1)) if self.adds_heads else flat(d_out)
            sddmm_(d_weight, block.rowptr, block.col, y, flat(x), block.dst)
            d_weight = d_weight.view(rows.edge[0].shape)
        return d_x, Rows(edge=[d_weight] if rows.edge else [])


def per_head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights ``[E]`` or ``[E, H]`` as a matrix."""
    return weight.view(weight.size(0), -1).to(dtype)
