r"""Dropout of rows, by a mask that is a function of a seed, a row's id and a column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.tiles import VARYING, dropout, key_of, mix, program, tile, word_of

ROWS, COLUMNS = 32, 64  # of a tile


@triton.jit(do_not_specialize=VARYING)
def _dropout_rows(
    out, x, e_id, seed_low, seed_high, out_stride: tl.constexpr, x_stride: tl.constexpr, num_rows,
    width: tl.constexpr, columns: tl.constexpr, first_head: tl.constexpr, threshold: tl.constexpr,
    scale: tl.constexpr, type: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    i, c = group.to(tl.int64) * R + tl.arange(0, R), column * C + tl.arange(0, C)
    on = i < num_rows
    mask = on[:, None] & (c < width)[None, :]
    of_ids = key_of(seed_low, seed_high, tl.full([1], 1, tl.uint32))
    bits = mix(word_of(e_id, i, on, of_ids)[:, None] ^ key_of(seed_low, seed_high, c + first_head + 2)[None, :])
    factor = tl.where(bits.to(tl.int64) >= threshold, tl.full([R, C], scale, type), 0)
    value = tile(x, i, x_stride, c, mask, type) * factor
    tl.store(out + (i * out_stride)[:, None] + c[None, :], value.to(out.dtype.element_ty), mask)


def dropout_rows_(out: Tensor, x: Tensor, id: Tensor, seed: int, p: float) -> None:
    """Drop numbers of rows."""
    width = checks.width_of("x", x)
    checks.expect(0 <= p <= 1, f"Expected 'p' from 0 to 1 (got {p})")
    x = checks.rows("x", x, -1, width, x.dtype, x)
    id = checks.index("id", id, x.size(0), torch.int64, x)
    out = checks.out("out", out, x.size(0), width, x.dtype, x)
    if out.numel() == 0:
        return
    columns = -(-width // COLUMNS)
    with torch.cuda.device_of(x):
        _dropout_rows[(-(-x.size(0) // ROWS) * columns,)](
            out, x, out_stride=out.stride(0), x_stride=x.stride(0), num_rows=x.size(0), width=width, columns=columns,
            type=checks.type_of(x), R=ROWS, C=COLUMNS, **dropout(id, p, seed, 0, x.dtype),
        )  # fmt: skip
