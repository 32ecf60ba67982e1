r"""Sums and means of weighted source rows, and of any message."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import sddmm_, spmm_, zeros
from pyg_sar.ops.reference import accumulator, segment_sum
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, Tile, column_tiles, divisor, flat


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
    """

    def __init__(
        self, learn_weight: bool = False, sums: int | None = None, overwrite: bool = False,
        count: Tensor | None = None, adds_heads: bool = False,
    ) -> None:  # fmt: skip
        assert sums is None or not adds_heads
        self.needs_source, self.sums, self.overwrite, self.count = learn_weight, sums, overwrite, count
        self.adds_heads = adds_heads

    def into(self, graph: ShardedGraph, start: int, end: int) -> Sum:
        """Return the sum with the counts of these destinations."""
        other = copy.copy(self)
        other.count = None if self.count is None else self.count[start:end].to(graph.device)
        other.overwrite = len(graph.blocks) == 1 and graph.num_edges > 0
        return other

    def tiles(self, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
        """Cut columns, unless each head of them has weights of its own."""
        whole = self.sums is None and len(rows.edge) > 0 and rows.edge[0].dim() > 1
        return super().tiles(like, rows, num_blocks) if whole else column_tiles(self, like, num_blocks)

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros, or what will be written."""
        shape = x.shape[1:] if self.sums is None else (self.sums, *x.shape[1:])  # F, or [sums, F]
        shape = shape[1:] if self.adds_heads else shape
        if self.writes(x.dtype):
            return x.new_empty(num_dst, *shape)
        return zeros(x, num_dst, *shape, dtype=accumulator(x.dtype))

    def writes(self, dtype: torch.dtype) -> bool:
        """Whether sums are written in the type of rows, in which they may be too large where it is half precision and
        their means are not.
        """
        return self.overwrite and (self.count is None or dtype == accumulator(dtype))

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
        return state.to(dtype), ()

    def prepare(self, saved: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the sum."""
        return (out if self.count is None else (out / divisor(self.count, out)).to(out.dtype),)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Sum over the transposed block; a weight gets the dot product of the two rows that its edge joins."""
        (out,), source, d_weight = saved, None, None  # [M, F], or [M, sums, F]
        weight = per_head(rows.edge[0], accumulator(out.dtype)) if rows.edge else None  # [E, H]
        if needs.source:
            ptr, row, perm = block.transpose
            shape = out.shape[1:] if self.sums is None else out.shape[2:]
            heads = rows.edge[0].shape[1:] if self.adds_heads else ()
            source = out.new_empty(block.num_src, *heads, *shape)  # [N, F], or [N, H, F]
            spmm_(flat(source), ptr, row, flat(out), weight, perm, True)
        if self.needs_source:
            assert x is not None and weight is not None
            d_weight = torch.empty_like(weight)
            y = flat(out).repeat(1, d_weight.size(1)) if self.adds_heads else flat(out)
            sddmm_(d_weight, block.rowptr, block.col, y, flat(x), block.dst)
            d_weight = d_weight.view(rows.edge[0].shape)
        return source, Rows(edge=[d_weight] if rows.edge else [])


class Message(Reduce):
    r"""Sum of any message, :math:`\sum_j \phi(\mathbf{x}_j, \ldots)`, rebuilt under autograd in backward (case 2).

    It is the oracle of the reductions that know their own gradient, and holds the messages of one block.

    Args:
        message: ``message(block, x, rows)`` returns a message for each edge, ``[E, *]``; must be a function of its
            arguments alone, so that it computes the same when it is rebuilt.
        shape: Shape of one message.
    """

    def __init__(self, message: Callable[[Block, Tensor, Rows], Tensor], shape: Sequence[int]) -> None:
        self.message, self.shape = message, shape

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros."""
        return x.new_zeros(num_dst, *self.shape, dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add the block."""
        values = self.message(block, x, rows).to(state.dtype)  # [E, *]
        return state.add_(segment_sum(block.row, block.num_dst, values))

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round once."""
        return state.to(dtype), ()

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the messages and differentiate them."""
        assert x is not None
        return rebuild(lambda x, rows: [self.message(block, x, rows)], [out[block.row]], x, rows, needs)


def per_head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights ``[E]`` or ``[E, H]`` as a matrix."""
    return weight.view(weight.size(0), -1).to(dtype)


def rebuild(
    function: Callable[[Tensor, Rows], list[Tensor]], grads: list[Tensor], x: Tensor, rows: Rows, needs: Needs
) -> Grads:
    """Run ``function(x, rows)`` once more under autograd and return the gradients that ``needs`` names."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(needs.source)
        leaves = Rows(
            *(
                [t.detach().requires_grad_(n) for t, n in zip(ts, ns, strict=True)]
                for ts, ns in zip(rows, needs.rows, strict=True)
            )
        )
        outputs = function(leaf, leaves)
    wanted = [t for t in (leaf, *leaves.dst, *leaves.edge, *leaves.const) if t.requires_grad]
    if not wanted or not any(o.requires_grad for o in outputs):
        found = {}
    else:
        got = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        found = dict(zip(map(id, wanted), got, strict=True))
    pick = Rows(*([found.get(id(t)) for t in ts] for ts in leaves))
    source = found.get(id(leaf))
    return (torch.zeros_like(x) if source is None and needs.source else source), pick
