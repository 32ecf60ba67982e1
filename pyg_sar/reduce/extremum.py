r"""Maxima and minima of source rows."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.ops import extremum_, extremum_grad_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, column_tiles, flat


class Extremum(Reduce):
    r"""Largest (or smallest) entry among the source rows of each destination, 0 where there is none.

    As in PyTorch, and so in PyG, equal entries share the gradient evenly, wherever they live; the zero that the output
    starts from counts as one of them.

    Args:
        sign: 1 for the maximum, -1 for the minimum.
    """

    saves_output = True
    tiles = column_tiles

    def __init__(self, sign: int) -> None:
        self.sign = sign

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        """Return minus infinity, held by no edge."""
        best = x.new_full((num_dst, *x.shape[1:]), -torch.inf, dtype=accumulator(x.dtype))  # [M, F], as the count
        return best, torch.zeros_like(best)

    def step(self, state: tuple[Tensor, Tensor], block: Block, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Merge the block: whoever is larger brings its count."""
        best, count = state
        extremum_(flat(best), flat(count), block.rowptr, block.col, flat(x), self.sign > 0, block.dst)
        return state

    def finish(self, state: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return 0 where there is no edge."""
        best, count = state
        # Entries may be infinite, and who is not a number is counted nowhere.
        out = (best * self.sign).masked_fill_((best == -torch.inf) & (count == 0), 0).to(dtype)
        return out, (count + (out == 0),)  # in the type of sums: half precision ends at 65,504

    def prepare(self, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
        """Return the extrema and the share of each edge that attains one."""
        count, best = saved
        return best, (d_out / count).to(d_out.dtype)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Share the gradient among the edges that attain the extremum."""
        assert x is not None
        best, share = saved  # [M, F]
        ptr, row = block.by_source
        d_x = zeros(x, *x.shape, dtype=accumulator(x.dtype))  # [N, F]
        extremum_grad_(flat(d_x), ptr, row, flat(x), flat(best), flat(share))
        return d_x.to(x.dtype), Rows()
