r"""Extrema of gathered rows, how many edges attain them, and their gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops.reference import accumulator
from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.schedule import Hubs, Outs, Units, launch, tiles, work_of
from pyg_sar.ops.triton.sum import in_units, merged
from pyg_sar.ops.triton.tiles import VARYING, program, tile, units_of


@triton.jit(do_not_specialize=VARYING)
def _extremum(
    best, count, col, x, best_stride: tl.constexpr, count_stride: tl.constexpr, x_stride: tl.constexpr,
    width: tl.constexpr, first, last, row, place, num_units, columns: tl.constexpr, largest: tl.constexpr,
    type: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, _, at, some = units_of(first, last, row, place, num_units, group, R)
    c = column * C + tl.arange(0, C)
    mask = some[:, None] & (c < width)[None, :]
    top, ties = tile(best, at, best_stride, c, mask, type), tile(count, at, count_stride, c, mask, type)
    for k in range(0, tl.max(end - begin, 0)):
        e = begin + k
        on = (e < end)[:, None] & mask
        j = e if col is None else tl.load(col + e, e < end, 0)
        value = tile(x, j, x_stride, c, on, type)
        if not largest:
            value = -value
        new = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
        # What is not a number equals nothing, and is attained by nobody.
        ties = tl.where(on, tl.where(top == new, ties, 0) + tl.where(value == new, 1.0, 0.0), ties)
        top = tl.where(on, new, top)
    tl.store(best + (at * best_stride)[:, None] + c[None, :], top, mask)
    tl.store(count + (at * count_stride)[:, None] + c[None, :], ties, mask)


def extremum_(
    best: Tensor, count: Tensor, ptr: Tensor, col: Tensor, x: Tensor, largest: bool, rows: Tensor | None = None
) -> None:
    """Merge the block: whoever is larger brings its count."""
    width, acc = checks.width_of("x", x), accumulator(x.dtype)
    checks.type_of(x)
    ptr, col, _ = checks.edges(ptr, col, None, x)
    x = checks.rows("x", x, -1, width, x.dtype, x)
    for name, t in (("best", best), ("count", count)):
        checks.out(name, t, checks.count_of(rows, ptr, best), width, acc, x)
    merge(best, count, ptr, x, col, largest, rows)


def merge(
    best: Tensor, count: Tensor, ptr: Tensor, x: Tensor, col: Tensor | None = None, largest: bool = True,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge a block whose tensors are right, see :func:`extremum_`; without ``col`` each edge has a row of ``x``."""
    work, width = work_of(ptr, x.size(0) if col is None else col.numel(), rows), x.size(1)

    def run(units: Units, num_units: int, best: Tensor, count: Tensor) -> None:
        launch(_extremum, units, num_units, tiles(width), best, count, col, x,
               best.stride(0), count.stride(0), x.stride(0), width, largest=largest,
               type=checks.type_of(x))  # fmt: skip

    run(work.rows, work.filled, best, count)
    hubs = work.hubs
    if hubs is None:
        return
    tops = x.new_full((hubs.pieces.first.numel(), width), -torch.inf, dtype=best.dtype)
    ties = torch.zeros_like(tops)
    run(hubs.pieces, tops.size(0), tops, ties)
    top = highest(hubs, tops)
    ties = merged(hubs, ties * (tops == top[hubs.of]))
    old, new = best[hubs.rows], torch.maximum(best[hubs.rows], top)
    count[hubs.rows] = count[hubs.rows] * (old == new) + ties * (top == new)
    best[hubs.rows] = new


def highest(hubs: Hubs, tops: Tensor) -> Tensor:
    """Return the largest entries of the pieces of each hub."""
    top = tops.new_full((hubs.rows.numel(), tops.size(1)), -torch.inf)
    merge(top, torch.zeros_like(top), hubs.ptr, tops)
    return top


@triton.jit(do_not_specialize=VARYING)
def _extremum_grad(
    out, row_of, x, best, share, out_stride: tl.constexpr, x_stride: tl.constexpr, best_stride: tl.constexpr,
    share_stride: tl.constexpr, width: tl.constexpr, first, last, row, place, num_units, columns: tl.constexpr,
    type: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, j, at, some = units_of(first, last, row, place, num_units, group, R)
    c = column * C + tl.arange(0, C)
    mask = some[:, None] & (c < width)[None, :]
    value = tile(x, j, x_stride, c, mask, type)
    where = out + (at * out_stride)[:, None] + c[None, :]
    total = tl.load(where, mask, 0)
    for k in range(0, tl.max(end - begin, 0)):
        e = begin + k
        on = (e < end)[:, None] & mask
        i = tl.load(row_of + e, e < end, 0)
        # A product, because a share may be infinite where nobody attains the extremum.
        attains = tl.where(tile(best, i, best_stride, c, on, type) == value, 1.0, 0.0)
        total += attains.to(type) * tile(share, i, share_stride, c, on, type)
    tl.store(where, total, mask)


def extremum_grad_(out: Tensor, ptr: Tensor, row: Tensor, x: Tensor, best: Tensor, share: Tensor) -> None:
    """Give each source its share of the extrema that it attains."""
    width, type = checks.width_of("x", x), checks.type_of(x)
    ptr, row, _ = checks.edges(ptr, row, None, x)
    best = checks.rows("best", best, -1, width, x.dtype, x)
    share = checks.rows("share", share, best.size(0), width, x.dtype, x)
    checks.out("out", out, ptr.numel() - 1, width, accumulator(x.dtype), x)
    x = checks.rows("x", x, ptr.numel() - 1, width, x.dtype, x)

    def run(units: Units, count: int, outs: Outs, once: bool) -> None:
        (into,) = outs
        strides = checks.stride(into), x.stride(0), best.stride(0), share.stride(0)
        launch(_extremum_grad, units, count, tiles(width), into, row, x, best, share,
               *strides, width, type=type)  # fmt: skip

    in_units(work_of(ptr, row.numel()), [out], run)
