r"""The gradient of a block of an online softmax, see :class:`pyg_sar.reduce.Softmax`.

Coefficients are rebuilt edge by edge where the gradient of values is summed, by source: whose values are at hand, so
that per edge only that of the output is fetched. The gradient of scores is left behind for the sums by destination, or,
where the output is not known, the products that it is made of, of which numbers alone are read once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_sar.ops import reference
from pyg_sar.ops.reference import accumulator
from pyg_sar.ops.triton import checks
from pyg_sar.ops.triton.attention import inputs
from pyg_sar.ops.triton.checks import expect, stride
from pyg_sar.ops.triton.schedule import Outs, Units, head_tiles, launch, scores_of, work_of
from pyg_sar.ops.triton.sum import add_rows, in_units
from pyg_sar.ops.triton.tiles import (
    ADDITIVE,
    DOT,
    GATV2,
    VARYING,
    add_compensated,
    add_up,
    dropout,
    edge_at,
    edges_of,
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

PROGRAMS = 4096  # that share the gradient of GATv2's vector, each with a sum of its own


@triton.jit(do_not_specialize=VARYING)
def _sources(
    d_value, d_key, d_edge, d_score, dst, perm, key, value, query, edge, att, peak, total, inner, grad,
    d_value_stride: tl.constexpr, d_key_stride: tl.constexpr, d_edge_stride: tl.constexpr, key_stride: tl.constexpr,
    value_stride: tl.constexpr, query_stride: tl.constexpr, edge_stride: tl.constexpr, peak_stride: tl.constexpr,
    total_stride: tl.constexpr, inner_stride: tl.constexpr, grad_stride: tl.constexpr, e_id, seed_low, seed_high,
    first_head, first, last, row, place, num_units, columns: tl.constexpr, kind: tl.constexpr, parameter: tl.constexpr,
    threshold: tl.constexpr, scale: tl.constexpr, heads: tl.constexpr, channels: tl.constexpr, once: tl.constexpr,
    type: tl.constexpr, R: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, j, at, some = units_of(first, last, row, place, num_units, group, R)
    h, c = column * H + tl.arange(0, H), tl.arange(0, C)
    inside = (c < channels)[None, None, :]
    those = some[:, None] & (h < heads)[None, :]
    wide: tl.constexpr = kind != ADDITIVE
    x = head_of(value, j, value_stride, h, c, those, True, channels, type)
    it = x if kind == GATV2 else head_of(key, j, key_stride, h, c, those, wide, channels, type)
    a = vector_of(att, h, c, heads, channels, type)
    to_value, to_key = tl.zeros([R, H, C], type), tl.zeros([R, H, C] if kind == DOT else [R, H], type)
    lack = tl.zeros([R, H], type)  # of numbers: a compensated sum of these costs little
    of_edges, of_heads = keys_of(seed_low, seed_high, first_head, h)
    for k in range(0, tl.max(end - begin, 0)):
        p, there = edge_at(begin, end, k)
        on = there[:, None] & (h < heads)[None, :]
        i, e = tl.load(dst + p), tl.load(perm + p).to(tl.int64)
        q = head_of(query, i, query_stride, h, c, on, wide, channels, type)
        features = head_of(edge, e, edge_stride, h, c, on, wide, channels, type)
        g = head_of(grad, i, grad_stride, h, c, on, True, channels, type)
        score, sums = score_of(it, q, features, a, kind, parameter)
        values = x
        if kind == DOT and edge is not None:
            values = x + features
        product = tl.sum(g * values, 2)
        top = number(peak, i, peak_stride, h, on, type)
        norm = tl.where(on, number(total, i, total_stride, h, on, type), 1.0)
        alpha = tl.where(on, exp(score - top) / norm, 0.0)
        factor = factor_of(e_id, e, there, of_edges, of_heads, threshold, scale, type, R, H)
        if inner is None:
            d = alpha * (product * factor)
        else:
            of_row = number(inner, i, inner_stride, h, on, type)
            # Next to a coefficient of 1 all others are 0: no gradient passes its score, though rounding may leave a
            # difference of two large products.
            d = tl.where(on, tl.where(alpha == 1, 0.0, alpha) * (product * factor - of_row), 0.0)
        as_value = (alpha * factor)[:, :, None] * g
        if kind == DOT:
            back = (d * parameter)[:, :, None] * q
            to_key += back
            d *= parameter
            if d_edge is not None:
                back += as_value
        elif kind == GATV2:
            back = d[:, :, None] * tl.where(sums > 0, a, a * parameter)
            as_value += back  # values are keys, too
        elif inner is not None:
            back = tl.where(sums > 0, d, d * parameter)
            d = back
            to_key, lack = add_compensated(to_key, lack, back)
        to_value += as_value
        if d_score is not None:
            tl.store(d_score + (e * heads)[:, None] + h[None, :], d, on)
        if d_edge is not None:
            if wide:
                where = d_edge + places(e, d_edge_stride, h, c, channels)
                mask = on[:, :, None] & inside
                tl.store(where, tl.load(where, mask, 0) + back, mask)
            else:
                where = d_edge + (e * d_edge_stride)[:, None] + h[None, :]
                tl.store(where, tl.load(where, on, 0) + back, on)
    mask = those[:, :, None] & inside
    where = d_value + places(at, d_value_stride, h, c, channels)
    if not once:
        to_value += tl.load(where, mask, 0)
    tl.store(where, to_value.to(d_value.dtype.element_ty), mask)
    if kind == DOT:
        where = d_key + places(at, d_key_stride, h, c, channels)
        tl.store(where, tl.load(where, mask, 0) + to_key, mask)
    elif d_key is not None:
        where = d_key + (at * d_key_stride)[:, None] + h[None, :]
        tl.store(where, tl.load(where, those, 0) + to_key, those)


@triton.jit(do_not_specialize=VARYING)
def _scores(
    d_query, d_score, col, key, query, edge, peak, total, inner, d_query_stride: tl.constexpr,
    d_score_stride: tl.constexpr, key_stride: tl.constexpr, query_stride: tl.constexpr, edge_stride: tl.constexpr,
    peak_stride: tl.constexpr, total_stride: tl.constexpr, inner_stride: tl.constexpr, first, last, row, place,
    num_units, columns: tl.constexpr, parameter: tl.constexpr, heads: tl.constexpr, type: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    group, column = program(columns)
    begin, end, i, some = edges_of(first, last, row, num_units, group, R, K)
    h = column * H + tl.arange(0, H)
    those = some[:, None] & (h < heads)[None, :]
    q = head_of(query, i, query_stride, h, None, those, False, C, type)
    top, norm = number(peak, i, peak_stride, h, those, type), number(total, i, total_stride, h, those, type)
    norm = tl.where(norm == 0, 1.0, norm)  # rows without edges, and those of no unit, walk along
    of_row, to_query = number(inner, i, inner_stride, h, those, type), tl.zeros([R * K, H], type)
    for k in range(0, tl.max(end - begin, 0), K):
        e, there = edge_at(begin, end, k)
        on, j = there[:, None] & (h < heads)[None, :], tl.load(col + e)
        it = number(key, j, key_stride, h, on, type)
        features = head_of(edge, e, edge_stride, h, None, on, False, C, type)
        score, sums = score_of(it, q, features, None, ADDITIVE, parameter)
        alpha = tl.where(on, exp(score - top) / norm, 0.0)
        d = tl.fma(-alpha, of_row, number(d_score, e, d_score_stride, h, on, type))
        d = tl.where(alpha == 1, 0.0, d)  # as in _sources
        d = tl.where(sums > 0, d, d * parameter)
        tl.store(d_score + (e.to(tl.int64) * d_score_stride)[:, None] + h[None, :], d, on)
        to_query += tl.where(on, d, 0.0)
    if d_query is not None:
        to_query = add_up(to_query, R, K, H)
        _, _, _, at, some = units_of(first, last, row, place, num_units, group, R)
        those = some[:, None] & (h < heads)[None, :]
        where = d_query + (at * d_query_stride)[:, None] + h[None, :]
        tl.store(where, tl.load(where, those, 0) + to_query, those)


@triton.jit(do_not_specialize=VARYING)
def _gatv2_queries(
    d_query, d_att, col, d_score, key, query, edge, att, d_query_stride: tl.constexpr, key_stride: tl.constexpr,
    query_stride: tl.constexpr, edge_stride: tl.constexpr, first, last, row, place, num_units,
    columns: tl.constexpr, parameter: tl.constexpr, heads: tl.constexpr, channels: tl.constexpr, type: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    begun, column = program(columns)
    h, c, programs = column * H + tl.arange(0, H), tl.arange(0, C), tl.num_programs(0) // columns
    a = vector_of(att, h, c, heads, channels, type)
    to_att, lack = tl.zeros([R, H, C], type), tl.zeros([R, H, C], type)
    for group in range(begun, tl.cdiv(num_units, R), programs):
        begin, end, i, at, some = units_of(first, last, row, place, num_units, group, R)
        those = some[:, None] & (h < heads)[None, :]
        q = head_of(query, i, query_stride, h, c, those, True, channels, type)
        to_query = tl.zeros([R, H, C], type)
        for k in range(0, tl.max(end - begin, 0)):
            e, there = edge_at(begin, end, k)
            on, j = there[:, None] & (h < heads)[None, :], tl.load(col + e)
            it = head_of(key, j, key_stride, h, c, on, True, channels, type)
            features = head_of(edge, e, edge_stride, h, c, on, True, channels, type)
            _, total = score_of(it, q, features, a, GATV2, parameter)
            d = number(d_score, e, heads, h, on, type)[:, :, None]
            back = tl.where(total > 0, d, d * parameter)
            to_query += back * a
            if d_att is not None:
                to_att, lack = add_compensated(to_att, lack, tl.where(on[:, :, None], back * total, 0.0))
        if d_query is not None:
            where = d_query + places(at, d_query_stride, h, c, channels)
            mask = those[:, :, None] & (c < channels)[None, None, :]
            tl.store(where, tl.load(where, mask, 0) + to_query, mask)
    if d_att is not None:
        where = d_att + ((begun * heads + h) * channels)[:, None] + c[None, :]
        tl.store(where, tl.sum(to_att, 0), (h < heads)[:, None] & (c < channels)[None, :])


def attention_grad_(
    d_value: Tensor, d_key: Tensor | None, d_query: Tensor | None, d_edge: Tensor | None, d_att: Tensor | None,
    ptr: Tensor, col: Tensor, src_ptr: Tensor, dst: Tensor, perm: Tensor, key: Tensor, value: Tensor,
    query: Tensor | None, edge: Tensor | None, att: Tensor | None, peak: Tensor, total: Tensor, inner: Tensor,
    grad: Tensor, kind: int, parameter: float, e_id: Tensor | None, seed: int, p: float, head: int,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Add to the gradients of everything that attention reads."""
    settings = kind, parameter, e_id, seed, p, head
    call = _Call(ptr, rows, col, src_ptr, dst, perm, key, value, query, edge, att, peak, *settings)
    expect((d_key is not None) == (kind != reference.GATV2), "'d_key' is for keys that are not the values")
    type, wide = accumulator(value.dtype), value.size(1)
    checks.out("d_value", d_value, call.num_src, wide, type, value)
    checks.index("d_att", d_att, wide, type, value)
    expect(d_att is None or d_att.is_contiguous(), "Expected 'd_att' to be contiguous")
    call.take(peak, total, inner, grad)
    call.give(d_key, d_query, d_edge)
    d_score = call.to_sources(d_value, d_key, d_edge, d_query is not None or d_att is not None)
    if d_score is None:
        return
    if kind == reference.GATV2:
        call.of_gatv2(d_score, d_query, d_att)
        return
    assert d_query is not None
    if kind == reference.ADDITIVE:
        add_rows(d_query, call.ptr, d_score, rows=rows)
        return
    add_rows(d_query, call.ptr, call.given["key"], d_score, call.col, rows=rows)
    if edge is not None:
        add_rows(d_query, call.ptr, call.given["edge"], d_score, rows=rows)


def additive_grad_(
    value: Tensor, d_key: Tensor, d_query: Tensor | None, d_edge: Tensor | None, ptr: Tensor, col: Tensor,
    src_ptr: Tensor, dst: Tensor, perm: Tensor, key: Tensor, query: Tensor | None, edge: Tensor | None, peak: Tensor,
    total: Tensor, grad: Tensor, parameter: float, e_id: Tensor | None, seed: int, p: float, head: int,
    rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradient of values over them, if the block holds all edges."""
    settings = reference.ADDITIVE, parameter, e_id, seed, p, head
    call = _Call(ptr, rows, col, src_ptr, dst, perm, key, value, query, edge, None, peak, *settings)
    checks.out("value", value, call.num_src, value.size(1), value.dtype, value)
    call.take(peak, total, None, grad)
    call.give(d_key, d_query, d_edge)
    d_score = call.to_sources(value, None, None, True, once=True)
    assert d_score is not None
    call.to_scores(d_score, d_query)
    add_rows(d_key, call.src_ptr, d_score, col=call.perm)
    if d_edge is not None:
        d_edge.add_(d_score)


class _Call:
    """What the kernels of one call share."""

    def __init__(
        self, ptr: Tensor, rows: Tensor | None, col: Tensor, src_ptr: Tensor, dst: Tensor, perm: Tensor, key: Tensor,
        value: Tensor, query: Tensor | None, edge: Tensor | None, att: Tensor | None, peak: Tensor, kind: int,
        parameter: float, e_id: Tensor | None, seed: int, p: float, head: int,
    ) -> None:  # fmt: skip
        heads = checks.width_of("peak", peak)
        self.ptr, self.col, _ = checks.edges(ptr, col, None, value)
        self.num_dst, self.rows = checks.count_of(rows, self.ptr, peak), rows
        self.given = inputs(key, value, query, edge, att, e_id, kind, heads, self.num_dst, self.col)
        self.heads, self.channels, self.num_src = heads, value.size(1) // heads, value.size(0)
        self.src_ptr, self.dst, self.perm = checks.edges(src_ptr, dst, perm, value)
        self.work, self.by_source = work_of(self.ptr, col.numel(), rows), work_of(self.src_ptr, dst.numel())
        good = src_ptr.numel() - 1 == self.num_src and dst.numel() == col.numel() and src_ptr.dtype == ptr.dtype
        expect(good, "Expected the transpose of the same block")
        self.width = heads if kind == reference.ADDITIVE else value.size(1)
        self.tiles = head_tiles(heads, self.channels)
        self.common = {"heads": heads, "channels": self.channels, "type": checks.type_of(value)}
        type = accumulator(value.dtype)
        self.settings = {"kind": kind, "parameter": parameter, **dropout(self.given["e_id"], p, seed, head, type)}
        self.scores = scores_of(value, self.ptr, col)

    def take(self, peak: Tensor, total: Tensor, inner: Tensor | None, grad: Tensor) -> None:
        """Check what is known of destinations."""
        value, num_dst = self.given["value"], self.num_dst
        type = accumulator(value.dtype)
        for name, t in (("peak", peak), ("total", total), ("inner", inner)):
            self.given[name] = checks.rows(name, t, num_dst, self.heads, type, value)
        # What an edge reads of its destination stands together: each of them apart would be as many sectors of memory.
        names = ["peak", "total", "inner", *["query"] * (self.width == self.heads)]
        packed = value.new_empty(num_dst, 4, self.heads, dtype=type)
        for k, name in enumerate(names):
            if self.given[name] is not None:
                self.given[name] = packed[:, k].copy_(self.given[name])
        self.given["grad"] = checks.rows("grad", grad, num_dst, value.size(1), value.dtype, value)

    def give(self, d_key: Tensor | None, d_query: Tensor | None, d_edge: Tensor | None) -> None:
        """Check what is written to."""
        value, num_dst = self.given["value"], self.num_dst
        for name, t, count in (("d_key", d_key, self.num_src), ("d_query", d_query, num_dst),
                               ("d_edge", d_edge, self.col.numel())):  # fmt: skip
            checks.out(name, t, count, self.width, accumulator(value.dtype), value)

    def to_sources(
        self, d_value: Tensor, d_key: Tensor | None, d_edge: Tensor | None, scores: bool, once: bool = False
    ) -> Tensor | None:
        """Add to the gradients of sources and edges; return those of scores, if they are wanted, or what these are made
        of where the products of output and gradient are not known.
        """
        d_score = self.given["peak"].new_empty(self.col.numel(), self.heads) if scores else None
        tensors = [self.given[n] for n in ("key", "value", "query", "edge", "att", "peak", "total", "inner", "grad")]
        # Rows without edges are written, too, and the numbers of a first edge are read whether there is one or not.
        walk = [t if t.numel() > 0 else t.new_zeros(1) for t in (self.dst, self.perm)]

        def run(units: Units, count: int, outs: Outs, once: bool) -> None:
            strides = map(stride, (*outs, d_edge, *tensors[:4], *tensors[5:]))
            launch(_sources, units, count, self.tiles, *outs, d_edge, d_score, *walk,
                   *tensors, *strides, once=once, scores=self.scores, **self.common, **self.settings)  # fmt: skip

        in_units(self.by_source, [d_value, d_key], run, once)
        return d_score

    def to_scores(self, d_score: Tensor, d_query: Tensor | None) -> None:
        """Make the gradients of scores, and add to those of queries: the products of coefficients, values and gradients
        add up, over the edges of a destination, to that of its output and its gradient.
        """
        inner = torch.zeros_like(self.given["peak"])
        add_rows(inner, self.ptr, d_score, rows=self.rows)
        tensors = [self.given[n] for n in ("key", "query", "edge", "peak", "total")]

        def run(units: Units, count: int, outs: Outs, once: bool) -> None:
            launch(_scores, units, count, head_tiles(self.heads, 1), *outs, d_score, self.col, *tensors, inner,
                   *map(stride, (*outs, d_score, *tensors, inner)), parameter=self.settings["parameter"],
                   heads=self.heads, type=self.common["type"], scores=self.scores)  # fmt: skip

        in_units(self.work, [d_query], run)

    def of_gatv2(self, d_score: Tensor, d_query: Tensor | None, d_att: Tensor | None) -> None:
        """Add to the gradients of queries and of ``att``."""
        tensors = [self.given[n] for n in ("key", "query", "edge")]

        def run(units: Units, count: int, outs: Outs, once: bool) -> None:
            part = None if d_att is None else d_att.new_zeros(PROGRAMS, d_att.numel())
            programs = {} if part is None else {"programs": PROGRAMS}
            launch(_gatv2_queries, units, count, self.tiles, *outs, part, self.col, d_score, *tensors,
                   self.given["att"], *map(stride, (*outs, *tensors)),
                   parameter=self.settings["parameter"], **programs, **self.common)  # fmt: skip
            if d_att is not None and part is not None:
                d_att.add_(part.sum(0))

        in_units(self.work, [d_query], run)
