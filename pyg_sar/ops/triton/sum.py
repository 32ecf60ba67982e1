r"""Sums of gathered rows, weighted or not, by destination or by source; and products of the two rows of an edge."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops.reference import accumulator
from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.schedule import CELLS, Hubs, Outs, Units, Work, head_tiles, launch, power_of_2, tiles, work_of
from pyg_sar.ops.triton.tiles import VARYING, add_up, edge_at, edges_of, head_of, program, tile, units_of


@triton.jit(do_not_specialize=VARYING)
def _sum(
    out, col, x, weight, perm, out_stride: tl.constexpr, x_stride: tl.constexpr, weight_stride: tl.constexpr,
    width: tl.constexpr, first, last, row, place, num_units, columns: tl.constexpr, heads: tl.constexpr,
    channels: tl.constexpr, shared_x: tl.constexpr, shared_out: tl.constexpr, once: tl.constexpr, type: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, _, _ = edges_of(first, last, row, num_units, group, R, K)
    c = column * C + tl.arange(0, C)
    total = tl.zeros([R * K, C], type)
    for begun in range(0, tl.max(end - begin, 0), K * AHEAD):
        for k in tl.static_range(0, K * AHEAD, K):  # whose loads do not wait for each other
            e = begin + begun + k
            on = e < end
            mask = on[:, None] & (c < width)[None, :]
            j = e if col is None else tl.load(col + e, on, 0)
            p = (e if perm is None else tl.load(perm + e, on, 0)).to(tl.int64)
            if shared_out:
                value = tl.zeros([R * K, C], type)  # of the edge
                for h in range(heads):
                    w = tl.load(weight + p * weight_stride + h, on, 0)
                    value += w[:, None] * tile(x, j, x_stride, h * channels + c, mask, type)
            else:
                value = tile(x, j, x_stride, c % channels if shared_x else c, mask, type)
                if weight is not None and heads == 1:
                    value *= tl.load(weight + p * weight_stride, on, 0)[:, None]
                elif weight is not None:
                    value *= tl.load(weight + (p * weight_stride)[:, None] + (c // channels)[None, :], mask, 0)
            total += value
    total = add_up(total, R, K, C)
    _, _, _, at, some = units_of(first, last, row, place, num_units, group, R)
    where = out + (at * out_stride)[:, None] + c[None, :]
    mask = some[:, None] & (c < width)[None, :]
    if not once:
        total += tl.load(where, mask, 0)
    tl.store(where, total.to(out.dtype.element_ty), mask)


def spmm_(
    out: Tensor, ptr: Tensor, col: Tensor, x: Tensor, weight: Tensor | None, perm: Tensor | None, once: bool,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Add a sum of rows, or write it ``once``."""
    width, acc = checks.width_of("x", x), accumulator(x.dtype)
    heads = 1 if weight is None else checks.width_of("weight", weight)
    channels = checks.channels_of(max(width, checks.width_of("out", out)), heads)
    wide, same_x, same_out = heads * channels, width < out.size(1), out.size(1) < width
    ptr, col, perm = checks.edges(ptr, col, perm, x)
    count = checks.count_of(rows, ptr, out)
    work_of(ptr, col.numel(), rows)  # which looks at ptr
    x = checks.rows("x", x, -1, channels if same_x else wide, x.dtype, x)
    weight = checks.rows("weight", weight, col.numel(), heads, acc, x)
    checks.out("out", out, count, channels if same_out else wide, x.dtype if once else acc, x)
    add_rows(out, ptr, x, weight, col, perm, once, rows)


def add_rows(
    out: Tensor, ptr: Tensor, x: Tensor, weight: Tensor | None = None, col: Tensor | None = None,
    perm: Tensor | None = None, once: bool = False, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Add sums of tensors that are right, see :func:`spmm_`; without ``col`` each edge has a row of ``x``."""
    heads, width = 1 if weight is None else weight.size(1), out.size(1)
    settings = {
        "heads": heads, "channels": max(width, x.size(1)) // max(heads, 1), "shared_x": x.size(1) < width,
        "shared_out": width < x.size(1), "type": checks.type_of(x),
    }  # fmt: skip

    def run(units: Units, count: int, outs: Outs, once: bool) -> None:
        (into,) = outs
        strides = checks.stride(into), x.stride(0), checks.stride(weight)
        launch(_sum, units, count, tiles(width), into, col, x, weight, perm, *strides,
               width, once=once, **settings)  # fmt: skip

    in_units(work_of(ptr, x.size(0) if col is None else col.numel(), rows), [out], run, once)


def in_units(work: Work, outs: Outs, run: Callable[[Units, int, Outs, bool], None], once: bool = False) -> None:
    """Have ``run`` add the sums of all rows to ``outs``, or write the first one ``once``."""
    run(work.rows, work.rows.first.numel() if once else work.filled, outs, once)
    if work.hubs is None:
        return
    count = work.hubs.pieces.first.numel()
    parts = [None if t is None else zeros(t, count) for t in outs]
    run(work.hubs.pieces, count, parts, False)
    for k, (out, part) in enumerate(zip(outs, parts, strict=True)):
        if out is not None and part is not None:
            add_hubs(out, merged(work.hubs, part), work.hubs, once and k == 0)


def add_hubs(out: Tensor, sums: Tensor, hubs: Hubs, once: bool = False) -> None:
    """Add to the rows of hubs, or write them."""
    out[hubs.rows] = (sums if once else out[hubs.rows] + sums).to(out.dtype)


def merged(hubs: Hubs, part: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sums over the pieces of each hub."""
    out = zeros(part, hubs.rows.numel())
    add_rows(out, hubs.ptr, part, weight)
    return out


def zeros(like: Tensor, rows: int) -> Tensor:
    """Return zeros to sum up rows in."""
    return like.new_zeros(rows, like.size(1), dtype=accumulator(like.dtype))


@triton.jit(do_not_specialize=VARYING)
def _products(
    out, col, x, y, out_stride: tl.constexpr, x_stride: tl.constexpr, y_stride: tl.constexpr, first, last, row, place,
    num_units, columns: tl.constexpr, heads: tl.constexpr, channels: tl.constexpr, shared_x: tl.constexpr,
    type: tl.constexpr, R: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, i, _, some = units_of(first, last, row, place, num_units, group, R)
    h, c = column * H + tl.arange(0, H), tl.arange(0, C)
    b = head_of(y, i, y_stride, h, c, some[:, None] & (h < heads)[None, :], True, channels, type)
    for k in range(0, tl.max(end - begin, 0)):
        e, there = edge_at(begin, end, k)
        on, j = there[:, None] & (h < heads)[None, :], tl.load(col + e)
        if shared_x:
            a = tile(x, j, x_stride, c, there[:, None] & (c < channels)[None, :], type)[:, None, :]
        else:
            a = head_of(x, j, x_stride, h, c, on, True, channels, type)
        tl.store(out + (e.to(tl.int64) * out_stride)[:, None] + h[None, :], tl.sum(a * b, 2), on)


def sddmm_(out: Tensor, ptr: Tensor, col: Tensor, y: Tensor, x: Tensor, rows: Tensor | None = None) -> None:
    """Write the product of the two rows of each edge, head by head."""
    heads, width, wide = (checks.width_of(*it) for it in (("out", out), ("x", x), ("y", y)))
    channels, type = checks.channels_of(wide, heads), checks.type_of(x)
    ptr, col, _ = checks.edges(ptr, col, None, x)
    work, shared = work_of(ptr, col.numel(), rows), width < wide  # which looks at ptr
    y = checks.rows("y", y, checks.count_of(rows, ptr, y), wide, x.dtype, x)
    x = checks.rows("x", x, -1, channels if shared else wide, x.dtype, x)
    out = checks.out("out", out, col.numel(), heads, accumulator(x.dtype), x)
    if out.numel() == 0:
        return
    shape = head_tiles(heads, channels, 4 if shared else 1)  # what heads share is read for some of them together
    pieces = [] if work.hubs is None else [(work.hubs.pieces, work.hubs.pieces.first.numel())]
    for units, count in ((work.rows, work.filled), *pieces):
        launch(_products, units, count, shape, out, col, x, y, out.stride(0), x.stride(0),
               y.stride(0), heads=heads, channels=channels, shared_x=shared, type=type)  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _row_products(
    out, x, y, out_stride: tl.constexpr, x_stride: tl.constexpr, y_stride: tl.constexpr, num_rows,
    columns: tl.constexpr, heads: tl.constexpr, channels: tl.constexpr, type: tl.constexpr, R: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    i, h, c = group.to(tl.int64) * R + tl.arange(0, R), column * H + tl.arange(0, H), tl.arange(0, C)
    on = (i < num_rows)[:, None] & (h < heads)[None, :]
    a = head_of(x, i, x_stride, h, c, on, True, channels, type)
    b = head_of(y, i, y_stride, h, c, on, True, channels, type)
    tl.store(out + (i * out_stride)[:, None] + h[None, :], tl.sum(a * b, 2), on)


def row_products_(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Write the product of two rows, head by head."""
    heads, width, type = checks.width_of("out", out), checks.width_of("x", x), checks.type_of(x)
    channels = checks.channels_of(width, heads)
    x = checks.rows("x", x, -1, width, x.dtype, x)
    y = checks.rows("y", y, x.size(0), width, x.dtype, x)
    out = checks.out("out", out, x.size(0), heads, accumulator(x.dtype), x)
    if out.numel() == 0:
        return
    columns, some, _ = head_tiles(heads, channels)
    c = power_of_2(channels)
    r = max(CELLS // (c * some), 1)
    with torch.cuda.device_of(x):
        _row_products[(-(-x.size(0) // r) * columns,)](
            out, x, y, out.stride(0), x.stride(0), y.stride(0), x.size(0), columns, heads, channels, type, r, some, c,
            num_warps=1,
        )  # fmt: skip
