r"""Moments of columns, sums of products with a gradient, and rows scaled and shifted by column."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops.reference import accumulator
from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.schedule import power_of_2
from pyg_sar.ops.triton.tiles import VARYING, program, tile

ROWS, COLUMNS = 32, 64  # of a tile
TILES = 32  # of a program, at least


@triton.jit
def _rows_of(k, num_rows, R: tl.constexpr):
    """Return some rows and which of them there are."""
    i = k.to(tl.int64) * R + tl.arange(0, R)
    return i, i < num_rows


@triton.jit(do_not_specialize=VARYING)
def _moments(
    mean, m2, x, stride: tl.constexpr, num_rows, width: tl.constexpr, tiles: tl.constexpr, columns: tl.constexpr,
    type: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    unit, column = program(columns)
    c = column * C + tl.arange(0, C)
    center, spread, count = tl.zeros([C], tl.float64), tl.zeros([C], tl.float64), tl.full([], 0, tl.float64)
    for t in range(0, tiles):
        i, on = _rows_of(unit * tiles + t, num_rows, R)
        mask = on[:, None] & (c < width)[None, :]
        value = tile(x, i, stride, c, mask, type)
        n = tl.sum(on.to(tl.float64), 0)
        some = tl.maximum(n, 1)
        guess = (tl.sum(value, 0) / some).to(type)
        deviation = tl.where(mask, value - guess[None, :], 0)
        lack = tl.sum(deviation, 0).to(tl.float64)
        shift = lack / some
        here = tl.sum(deviation * deviation, 0).to(tl.float64) - shift * lack
        delta, both = guess + shift - center, tl.maximum(count + n, 1)
        center += delta * (n / both)
        spread += tl.where(n > 0, here + delta * delta * (count * n / both), 0)
        count += n
    tl.store(mean + unit * width + c, center, c < width)
    tl.store(m2 + unit * width + c, spread, c < width)


def moments_(mean: Tensor, m2: Tensor, x: Tensor) -> None:
    """Write means and sums of squared deviations of columns; those of units are merged by Chan's formula."""
    width = checks.width_of("x", x)
    x = checks.rows("x", x, -1, width, x.dtype, x)
    mean, m2 = (vector(*it, width, torch.float64, x) for it in (("mean", mean), ("m2", m2)))
    grid, tiles, units, columns = grid_of(x)
    means, m2s = x.new_empty(2, units, width, dtype=torch.float64)
    with torch.cuda.device_of(x):
        _moments[grid](means, m2s, x, x.stride(0), x.size(0), width, tiles, columns, checks.type_of(x), ROWS, COLUMNS)
    counts = (x.size(0) - torch.arange(units, device=x.device) * tiles * ROWS).clamp(max=tiles * ROWS).double()
    mean.copy_((means * counts.unsqueeze(1)).sum(0) / max(x.size(0), 1))
    m2.copy_(m2s.sum(0) + (counts.unsqueeze(1) * (means - mean).square()).sum(0))


@triton.jit(do_not_specialize=VARYING)
def _products(
    sums, products, x, grad, center, x_stride: tl.constexpr, grad_stride: tl.constexpr, num_rows, width: tl.constexpr,
    tiles: tl.constexpr, columns: tl.constexpr, type: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    unit, column = program(columns)
    c = column * C + tl.arange(0, C)
    middle = tl.load(center + c, c < width, 0)
    total, product = tl.zeros([C], tl.float64), tl.zeros([C], tl.float64)
    for t in range(0, tiles):
        i, on = _rows_of(unit * tiles + t, num_rows, R)
        mask = on[:, None] & (c < width)[None, :]
        g = tile(grad, i, grad_stride, c, mask, type)
        value = tile(x, i, x_stride, c, mask, type)
        total += tl.sum(g, 0).to(tl.float64)
        product += tl.sum(g * (value - middle[None, :]), 0).to(tl.float64)
    tl.store(sums + unit * width + c, total, c < width)
    tl.store(products + unit * width + c, product, c < width)


def column_products_(sums: Tensor, products: Tensor, x: Tensor, grad: Tensor, center: Tensor) -> None:
    """Add the sums of columns."""
    width = checks.width_of("x", x)
    x = checks.rows("x", x, -1, width, x.dtype, x)
    grad = checks.rows("grad", grad, x.size(0), width, x.dtype, x)
    center = vector("center", center, width, accumulator(x.dtype), x)
    sums, products = (vector(*it, width, torch.float64, x) for it in (("sums", sums), ("products", products)))
    grid, tiles, units, columns = grid_of(x)
    parts = x.new_empty(2, units, width, dtype=torch.float64)
    with torch.cuda.device_of(x):
        _products[grid](
            *parts, x, grad, center, x.stride(0), grad.stride(0), x.size(0), width, tiles, columns, checks.type_of(x),
            ROWS, COLUMNS,
        )  # fmt: skip
    for into, part in zip((sums, products), parts, strict=True):
        into += part.sum(0)


@triton.jit(do_not_specialize=VARYING)
def _affine(
    out, x, grad, center, scale, shift, factor, out_stride: tl.constexpr, x_stride: tl.constexpr,
    grad_stride: tl.constexpr, num_rows, width: tl.constexpr, columns: tl.constexpr, type: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    c = column * C + tl.arange(0, C)
    i, on = _rows_of(group, num_rows, R)
    mask = on[:, None] & (c < width)[None, :]
    value = tile(x, i, x_stride, c, mask, type)
    value = (value - tl.load(center + c, c < width, 0)[None, :]) * tl.load(scale + c, c < width, 0)[None, :]
    value += tl.load(shift + c, c < width, 0)[None, :]
    if grad is not None:
        g = tile(grad, i, grad_stride, c, mask, type)
        value += g * tl.load(factor + c, c < width, 0)[None, :]
    tl.store(out + (i * out_stride)[:, None] + c[None, :], value.to(out.dtype.element_ty), mask)


def column_affine_(
    out: Tensor, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, grad: Tensor | None, factor: Tensor | None
) -> None:
    """Scale and shift."""
    width, type = checks.width_of("x", x), accumulator(x.dtype)
    checks.expect((grad is None) == (factor is None), "'grad' and 'factor' come together")
    x = checks.rows("x", x, -1, width, x.dtype, x)
    grad = checks.rows("grad", grad, x.size(0), width, x.dtype, x)
    vectors = {"center": center, "scale": scale, "shift": shift, "factor": factor}
    columns = -(-width // COLUMNS)
    out = checks.out("out", out, x.size(0), width, x.dtype, x)
    if out.numel() == 0:
        return
    with torch.cuda.device_of(x):
        _affine[(-(-x.size(0) // ROWS) * columns,)](
            out, x, grad, *(vector(*it, width, type, x) for it in vectors.items()), out.stride(0), x.stride(0),
            checks.stride(grad), x.size(0), width, columns, checks.type_of(x), ROWS, COLUMNS,
        )  # fmt: skip


def vector(name: str, t: Any, width: int, dtype: torch.dtype, like: Tensor) -> Any:
    """Check a number for each column."""
    checks.expect(t is None or t.is_contiguous(), f"Expected '{name}' to be contiguous")
    return checks.index(name, t, width, dtype, like)


def grid_of(x: Tensor) -> tuple[tuple[int], int, int, int]:
    """Return the grid, the tiles of a unit of rows, and how many units and column tiles there are."""
    all_tiles, columns = max(-(-x.size(0) // ROWS), 1), max(-(-x.size(1) // COLUMNS), 1)
    tiles = power_of_2(max(TILES, -(-all_tiles // 1024)))
    units = -(-all_tiles // tiles)
    return (units * columns,), tiles, units, columns
