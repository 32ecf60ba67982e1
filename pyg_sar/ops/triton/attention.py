r"""One block of an online softmax over the in-edges of every destination, see :class:`pyg_sar.reduce.Softmax`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops import reference
from pyg_sar.ops.reference import accumulator, spread
from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.checks import expect, stride
from pyg_sar.ops.triton.extremum import highest
from pyg_sar.ops.triton.schedule import Hubs, Units, head_tiles, launch, scores_of, work_of
from pyg_sar.ops.triton.sum import add_hubs, merged
from pyg_sar.ops.triton.tiles import (
    ADDITIVE,
    DOT,
    GATV2,
    VARYING,
    dropout,
    edge_at,
    exp,
    factor_of,
    head_of,
    keys_of,
    number,
    places,
    program,
    score_of,
    units_of,
    vector_of,
)


@triton.jit(do_not_specialize=VARYING)
def _attention(
    peak, total, out, col, key, value, query, edge, att, peak_stride: tl.constexpr, total_stride: tl.constexpr,
    out_stride: tl.constexpr, key_stride: tl.constexpr, value_stride: tl.constexpr, query_stride: tl.constexpr,
    edge_stride: tl.constexpr, e_id, seed_low, seed_high, first_head, first, last, row, place, num_units,
    columns: tl.constexpr, kind: tl.constexpr, parameter: tl.constexpr, threshold: tl.constexpr, scale: tl.constexpr,
    heads: tl.constexpr, channels: tl.constexpr, type: tl.constexpr, R: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, i, at, some = units_of(first, last, row, place, num_units, group, R)
    h, c = column * H + tl.arange(0, H), tl.arange(0, C)
    those = some[:, None] & (h < heads)[None, :]
    mask = those[:, :, None] & (c < channels)[None, None, :]
    wide: tl.constexpr = kind != ADDITIVE
    q = head_of(query, i, query_stride, h, c, those, wide, channels, type)
    a = vector_of(att, h, c, heads, channels, type)
    before = number(peak, at, peak_stride, h, those, type)
    top, norm, mean = before, tl.zeros([R, H], type), tl.zeros([R, H, C], type)
    of_edges, of_heads = keys_of(seed_low, seed_high, first_head, h)
    for k in range(0, tl.max(end - begin, 0)):
        e, there = edge_at(begin, end, k)
        on, j = there[:, None] & (h < heads)[None, :], tl.load(col + e)
        x = head_of(value, j, value_stride, h, c, on, True, channels, type)
        it = x if kind == GATV2 else head_of(key, j, key_stride, h, c, on, wide, channels, type)
        features = head_of(edge, e, edge_stride, h, c, on, wide, channels, type)
        score, _ = score_of(it, q, features, a, kind, parameter)
        score = tl.where(on, score, float("-inf"))
        if kind == DOT and edge is not None:
            x += features
        new = tl.maximum(top, score, propagate_nan=tl.PropagateNan.ALL)
        anchor = tl.where(new == float("-inf"), 0.0, new)  # a destination that has seen nothing
        decay, weight = exp(top - anchor), tl.where(on, exp(score - anchor), 0.0)
        top, norm = new, norm * decay + weight
        weight *= factor_of(e_id, e, there, of_edges, of_heads, threshold, scale, type, R, H)
        mean = mean * decay[:, :, None] + weight[:, :, None] * x
    # What earlier blocks have summed up is added last: it may be much larger than what one edge brings.
    decay = exp(before - tl.where(top == float("-inf"), 0.0, top))
    where = out + places(at, out_stride, h, c, channels)
    tl.store(where, tl.load(where, mask, 0) * decay[:, :, None] + mean, mask)
    where = total + (at * total_stride)[:, None] + h[None, :]
    tl.store(where, tl.load(where, those, 0) * decay + norm, those)
    tl.store(peak + (at * peak_stride)[:, None] + h[None, :], top, those)


def attention_(
    peak: Tensor, total: Tensor, out: Tensor, ptr: Tensor, col: Tensor, key: Tensor, value: Tensor,
    query: Tensor | None, edge: Tensor | None, att: Tensor | None, kind: int, parameter: float, e_id: Tensor | None,
    seed: int, p: float, head: int, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Merge the block into the running softmax."""
    heads, type = checks.width_of("peak", peak), accumulator(value.dtype)
    ptr, col, _ = checks.edges(ptr, col, None, value)
    num_dst = checks.count_of(rows, ptr, peak)
    given = inputs(key, value, query, edge, att, e_id, kind, heads, num_dst, col)
    width = value.size(1)
    for name, t, columns in (("peak", peak, heads), ("total", total, heads), ("out", out, width)):
        checks.out(name, t, num_dst, columns, type, value)
    work = work_of(ptr, col.numel(), rows)

    def run(units: Units, count: int, *state: Tensor) -> None:
        tensors = [given[name] for name in ("key", "value", "query", "edge", "att")]
        launch(_attention, units, count, head_tiles(heads, width // heads), *state, col, *tensors, *map(stride, state),
               *map(stride, tensors[:4]), kind=kind, parameter=parameter, heads=heads, channels=width // heads,
               type=checks.type_of(value), scores=scores_of(value, ptr, col),
               **dropout(given["e_id"], p, seed, head, type))  # fmt: skip

    run(work.rows, work.filled, peak, total, out)
    if work.hubs is not None:
        count = work.hubs.pieces.first.numel()
        peaks = peak.new_full((count, heads), -torch.inf)
        totals, outs = torch.zeros_like(peaks), peak.new_zeros(count, width)
        run(work.hubs.pieces, count, peaks, totals, outs)
        join(work.hubs, (peak, total, out), (peaks, totals, outs))


def inputs(
    key: Tensor, value: Tensor, query: Tensor | None, edge: Tensor | None, att: Tensor | None, e_id: Tensor | None,
    kind: int, heads: int, num_dst: int, col: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """Check what attention reads."""
    expect(kind in (0, 1, 2), f"Unknown score {kind}")
    good = heads > 0 and checks.width_of("value", value) % heads == 0
    expect(good, f"Expected values of {heads} equal heads (got {list(value.shape)})")
    expect(query is not None or kind == reference.ADDITIVE, "This score needs 'query'")
    expect((att is not None) == (kind == reference.GATV2), "'att' is for GATv2")
    wide, type = value.size(1), value.dtype
    width = heads if kind == reference.ADDITIVE else wide
    checks.type_of(value)
    return {
        "key": checks.rows("key", key, value.size(0), width, type, value),
        "value": checks.rows("value", value, -1, wide, type, value),
        "query": checks.rows("query", query, num_dst, width, type, value),
        "edge": checks.rows("edge", edge, col.numel(), width, type, value),
        "att": checks.index("att", att, wide, accumulator(type), value),
        "e_id": checks.index("e_id", e_id, col.numel(), torch.int64, value),
    }


def join(hubs: Hubs, state: tuple[Tensor, Tensor, Tensor], parts: tuple[Tensor, Tensor, Tensor]) -> None:
    """Merge the pieces of hubs into their state."""
    (peak, total, out), (peaks, totals, outs) = state, parts
    top, old = highest(hubs, peaks), peak[hubs.rows]
    new = torch.maximum(old, top)
    anchor = new.masked_fill(new == -torch.inf, 0)
    decay, weight = (old - anchor).exp(), (peaks - anchor[hubs.of]).exp()
    total[hubs.rows] *= decay
    out[hubs.rows] = spread(decay, out[hubs.rows])
    add_hubs(total, merged(hubs, totals * weight), hubs)
    add_hubs(out, merged(hubs, outs, weight), hubs)
    peak[hubs.rows] = new
