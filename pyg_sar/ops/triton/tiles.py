r"""What several kernels do with the tiles of a program: ``R`` units by ``C`` columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops import reference

# Numbers of which no kernel shall make a version of its own.
VARYING = ["seed_low", "seed_high", "num_units", "num_rows"]
ADDITIVE, GATV2, DOT = (tl.constexpr(kind) for kind in (reference.ADDITIVE, reference.GATV2, reference.DOT))


@triton.jit
def program(columns: tl.constexpr):
    """Return which units and which columns (or head) are this program's; all columns of some rows run side by side."""
    return tl.program_id(0) // columns, tl.program_id(0) % columns


@triton.jit
def units_of(first, last, row, place, num_units, group, R: tl.constexpr):
    """Return the edges, rows and places of a group of units, and which of these there are."""
    u = group * R + tl.arange(0, R)
    some = u < num_units
    begin, end, i = tl.load(first + u, some, 0), tl.load(last + u, some, 0), tl.load(row + u, some, 0)
    return begin, end, i, tl.load(place + u, some, 0).to(tl.int64), some


@triton.jit
def edges_of(first, last, row, num_units, group, R: tl.constexpr, K: tl.constexpr):
    """Return, for ``K`` edges at a time of each of a group of units: where they begin and end, the row, and which there
    are, ``[R * K]``.
    """
    u, k = group * R + tl.arange(0, R * K) // K, tl.arange(0, R * K) % K
    some = u < num_units
    return tl.load(first + u, some, 0) + k, tl.load(last + u, some, 0), tl.load(row + u, some, 0), some


@triton.jit
def add_up(sums, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Return the sums of units, ``[R, C]``, of those of their edges."""
    return tl.sum(tl.reshape(sums, (R, K, C)), 1) if K > 1 else sums


@triton.jit
def edge_at(begin, end, k):
    """Return the edge of each unit in step ``k``, its last one when it has no more, and which still have one.

    So that nothing as narrow as units is loaded by a mask: Triton 3.6 (of torch 2.10 and 2.11) fails to compile that in
    loops where rows and numbers of units come together.
    """
    return tl.maximum(tl.minimum(begin + k, end - 1), 0), begin + k < end


@triton.jit
def tile(x, row, stride, column, mask, type: tl.constexpr):
    """Return some columns of some rows."""
    return tl.load(x + (row.to(tl.int64) * stride)[:, None] + column[None, :], mask, 0).to(type)


@triton.jit
def number(x, row, stride, h, on, type: tl.constexpr):
    """Return a number for each of some heads of some rows, ``[R, H]``."""
    return tl.load(x + (row.to(tl.int64) * stride)[:, None] + h[None, :], on, 0).to(type)


@triton.jit
def places(row, stride, h, c, channels: tl.constexpr):
    """Return where the columns of some heads of some rows are, ``[R, H, C]``."""
    return (row.to(tl.int64) * stride)[:, None, None] + (h * channels)[None, :, None] + c[None, None, :]


@triton.jit
def head_of(x, row, stride, h, c, on, wide: tl.constexpr, channels: tl.constexpr, type: tl.constexpr):
    """Return what heads have of some rows: ``channels`` columns if they are ``wide``, else one number."""
    if x is None:
        found = None
    elif wide:
        mask = on[:, :, None] & (c < channels)[None, None, :]
        found = tl.load(x + places(row, stride, h, c, channels), mask, 0).to(type)
    else:
        found = number(x, row, stride, h, on, type)
    return found


@triton.jit
def vector_of(att, h, c, heads: tl.constexpr, channels: tl.constexpr, type: tl.constexpr):
    """Return GATv2's vector of some heads, ``[1, H, C]``."""
    if att is None:
        found = None
    else:
        mask = (h < heads)[:, None] & (c < channels)[None, :]
        found = tl.load(att + (h * channels)[:, None] + c[None, :], mask, 0).to(type)[None, :, :]
    return found


@triton.jit
def score_of(key, query, edge, att, kind: tl.constexpr, parameter: tl.constexpr):
    """Return the scores of edges, and what they were made of last: keys and edges, or what went into LeakyReLU."""
    total = key
    if edge is not None:
        total += edge
    if kind == DOT:
        score = tl.sum(query * total, 2) * parameter
    else:
        if query is not None:
            total += query
        score = tl.where(total > 0, total, total * parameter)
        if kind == GATV2:
            score = tl.sum(score * att, 2)
    return score, total


@triton.jit
def exp(x):
    """Return the exponential; in single precision that of the hardware, of base 2, and what rounding to its argument
    left out: the product alone is off by 10 units in the last place where the result is 1e-6.
    """
    if x.dtype == tl.float32:
        whole = x * 1.4426950408889634
        rest = tl.fma(x, 1.4426950408889634, -whole) + x * 1.925963e-08  # what a float lacks of log2(e)
        power = tl.exp2(whole)
        result = power + power * tl.where(tl.abs(x) < 200, rest * 0.6931471805599453, 0.0)
    else:
        result = tl.exp(x)
    return result


@triton.jit
def add_compensated(total, lack, x):
    """Return a compensated sum and what rounding left out of it (Kahan); what is infinite leaves NaN."""
    x -= lack
    new = total + x
    return new, (new - total) - x


@triton.jit
def mix(h):
    """See :func:`pyg_sar.ops.dropout.mix`."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def key_of(seed_low, seed_high, numbers):
    """Return the keys of dropout for 1, which is of ids, and for the numbers of heads (or columns), from 2 on."""
    return mix(mix(mix(numbers.to(tl.uint32)) ^ seed_low.to(tl.uint32)) ^ seed_high.to(tl.uint32))


@triton.jit
def keys_of(seed_low, seed_high, first_head, h):
    """Return the keys of dropout for edges, ``[1]``, and for some heads, ``[H]``."""
    return key_of(seed_low, seed_high, tl.full([1], 1, tl.uint32)), key_of(seed_low, seed_high, first_head + 2 + h)


@triton.jit
def word_of(e_id, e, on, of_edges):
    """Return what all heads of an edge share."""
    ids = tl.load(e_id + e, on, 0)
    return mix(mix(ids.to(tl.uint32) ^ of_edges) ^ (ids >> 32).to(tl.uint32) ^ of_edges)


@triton.jit
def factor_of(
    e_id, e, on, of_edges, of_heads, threshold: tl.constexpr, scale: tl.constexpr, type: tl.constexpr, R: tl.constexpr,
    H: tl.constexpr,
):  # fmt: skip
    """Return the factors of dropout, see :func:`pyg_sar.ops.dropout.dropout_factors`; 1 where there is none."""
    factor = tl.full([R, H], 1, type)
    if e_id is not None:
        bits = mix(word_of(e_id, e, on, of_edges)[:, None] ^ of_heads[None, :])
        factor = tl.where(bits.to(tl.int64) >= threshold, factor * scale, 0)
    return factor


def dropout(e_id: Tensor | None, p: float, seed: int, head: int, type: torch.dtype) -> dict[str, Any]:
    """Return the arguments of :func:`factor_of`."""
    if e_id is None:
        return {"e_id": None, "seed_low": 0, "seed_high": 0, "first_head": 0, "threshold": 0, "scale": 1.0}
    scale = 0.0 if p >= 1 else (torch.ones((), dtype=type, device="cpu") / (1 - p)).item()
    # As words with a sign, because the type of an argument is a matter of its size.
    low, high = (((seed >> shift & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000 for shift in (0, 32))
    return {"e_id": e_id, "seed_low": low, "seed_high": high, "first_head": head, "threshold": round(p * 2**32),
            "scale": scale}  # fmt: skip
