r"""One aggregation of rows in host memory, one chunk of destinations at a time: the destination loop of HongTu.

A chunk is a :class:`~pyg_sar.graph.ShardedGraph` like any other: some destinations, all their in-edges, and as its
sources the rows that these read, which are fetched from the host. ``stream.py`` runs over it as it is::

    forward                                      backward
    for each chunk of destinations               for each chunk of destinations
        x = fetch the rows that it reads             case 1: d_x = gradient, which reads no rows
        y = aggregate over the chunk                 case 2: x = fetch again, y = aggregate again, d_x = gradient
        write y to the host                          add d_x to the gradients in host memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.aggregate import aggregate
from pyg_sar.autograd import once_differentiable
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload.passes import force, rows_of
from pyg_sar.offload.rows import HostRows, Place, answers, record
from pyg_sar.reduce.base import Needs, Reduce, Rows
from pyg_sar.sources import LocalRows, ProjectedRows


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some destinations and what they read.

    Args:
        span: The range of destinations.
        graph: Their in-edges; its sources are the rows that these read.
        sources: The numbers of these rows, ascending.
        edges: Where the worker's edge tensors hold the edges.
    """

    span: tuple[int, int]
    graph: ShardedGraph
    sources: Tensor
    edges: Tensor


def chunks(graph: ShardedGraph, count: int) -> list[Chunk]:
    """Return chunks of destinations, which are made once for each graph."""
    return graph.derived(("chunks", count), lambda: [chunk(graph, *span) for span in spans(graph, count)])


def spans(graph: ShardedGraph, count: int) -> list[tuple[int, int]]:
    """Cut destinations into ranges of about equal cost: a row costs as much as four edges."""
    cost = (4 + graph.degree).cumsum(0)
    total = int(cost[-1]) if len(cost) else 0
    ends = torch.searchsorted(cost, torch.arange(1, count + 1) * total / count).add(1).clamp(max=graph.num_dst)
    ends = [0, *ends.tolist()[: count - 1], graph.num_dst]
    return list(zip(ends[:-1], ends[1:], strict=True))


def chunk(graph: ShardedGraph, start: int, end: int) -> Chunk:
    """Return the chunk of a range of destinations."""
    part = graph.rows(start, end)
    (block,) = part.blocks
    sources = block.source.unique()
    number = torch.full((graph.num_src,), -1)
    number[sources] = torch.arange(len(sources))
    exchange = graph.exchange.restrict(number.new_zeros(0, dtype=torch.bool), graph.exchange.routes.serve, number)
    few = part.replace(
        blocks=(block.renumber(number, slice(0, block.num_edges)),),
        num_src=len(sources),
        dst=None,
        exchange=exchange,
        n_id=sources if graph.n_id is None else graph.n_id[sources],
    )
    return Chunk((start, end), few, sources, graph.edge_rows(start, end))


class Hop(torch.autograd.Function):
    """An aggregation, chunk by chunk. What is saved is what a chunk reads again: in case 1, no source rows."""

    @staticmethod
    def forward(
        ctx: Any, place: Place, graph: ShardedGraph, reduce: Reduce, counts: Sequence[int], *inputs: Any
    ) -> HostRows:
        """Fetch, aggregate and write each chunk."""
        ctx.place, ctx.graph, ctx.reduce, ctx.counts = place, graph, reduce, counts
        x, *others = inputs
        ctx.x, ctx.shape, ctx.dtype = x.detach() if reduce.needs_source else None, x.shape, x.dtype
        ctx.rows = [t.detach() if isinstance(t, HostRows) else None for t in others]
        ctx.save_for_backward(*(None if isinstance(t, HostRows) else t for t in others))
        out = None
        for it in chunks(graph, len(place.ranges)):
            values = [part_of(t, k, counts, it, place) for k, t in enumerate(inputs)]
            rows = compute(it, reduce, values[0], split(values[1:], counts))
            if out is None:
                out = place.home.empty((graph.num_dst, *rows.shape[1:]), rows.dtype)
            out[it.span[0] : it.span[1]] = rows
        return HostRows(place, out)

    @staticmethod
    def backward(ctx: Any, grad: HostRows) -> Any:
        """Differentiate each chunk, and add up what its rows, edges and constants get."""
        once_differentiable()
        place, reduce, counts, wanted = ctx.place, ctx.reduce, ctx.counts, ctx.needs_input_grad[4:]
        others = [h if h is not None else t for h, t in zip(ctx.rows, ctx.saved_tensors, strict=True)]
        like = HostRows(place, torch.empty(ctx.shape, dtype=ctx.dtype, device="meta")) if ctx.x is None else ctx.x
        sums: list[Any] = [None] * len(wanted)
        for it in chunks(ctx.graph, len(place.ranges)):
            given = rows_of(grad, it.span)
            values = [part_of(t, k, counts, it, place) for k, t in enumerate(others, 1)]
            if ctx.x is None:
                found: list[Any] = [grad_of_sum(it, reduce, ctx, split(values, counts), given)] + [None] * len(values)
            else:
                found = grads_of(it, reduce, [part_of(ctx.x, 0, counts, it, place), *values], wanted, counts, given)
            for k, (t, d) in enumerate(zip((like, *others), found, strict=True)):
                if wanted[k]:
                    sums[k] = add_up(sums[k], d, t, k, counts, it, place)
        made = (HostRows(place, s) if isinstance(t, HostRows) and s is not None else s
                for s, t in zip(sums, (like, *others), strict=True))  # fmt: skip
        return None, None, None, None, *made


def split(values: Sequence[Any], counts: Sequence[int]) -> Rows:
    """Return what an aggregation reads besides source rows."""
    dst, edge, _ = counts
    return Rows(values[:dst], values[dst : dst + edge], values[dst + edge :])


def compute(it: Chunk, reduce: Reduce, x: Tensor, rows: Rows) -> Tensor:
    """Aggregate over a chunk."""
    return aggregate(it.graph, reduce.into(it.graph, *it.span), x, rows.dst, rows.edge, rows.const)


def grads_of(
    it: Chunk, reduce: Reduce, values: list[Tensor], wanted: Sequence[bool], counts: Sequence[int], grad: Tensor
) -> list[Tensor | None]:
    """Aggregate over a chunk once more, and return the gradients of what it reads."""
    values = [v.detach().requires_grad_(want) for v, want in zip(values, wanted, strict=True)]
    with torch.enable_grad():
        out = compute(it, reduce, values[0], split(values[1:], counts))
    found = iter(torch.autograd.grad(out, [v for v in values if v.requires_grad], grad, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def grad_of_sum(it: Chunk, reduce: Reduce, ctx: Any, rows: Rows, grad: Tensor) -> Tensor | None:
    """Return the gradient of source rows where it depends on none (case 1)."""
    like = grad.new_empty(0, *ctx.shape[1:], dtype=ctx.dtype)
    (tile,) = reduce.into(it.graph, *it.span).tiles(like, rows, 1)
    needs = Needs(True, Rows(*([False] * len(t) for t in rows)))
    return tile.grad(it.graph.blocks[0], None, rows, tile.reduce.prepare((), grad), grad, needs)[0]


def part_of(value: Any, k: int, counts: Sequence[int], it: Chunk, place: Place) -> Any:
    """Return what a chunk reads of input ``k``: source rows, rows of destinations, of edges, or a constant."""
    rows = value.host if isinstance(value, HostRows) else value
    if k == 0:
        rows = rows.index_select(0, it.sources)
    elif k <= counts[0]:
        rows = rows[it.span[0] : it.span[1]]
    elif k <= counts[0] + counts[1]:
        rows = rows.index_select(0, it.edges)
    return rows.to(place.device, non_blocking=True)


def add_up(
    total: Any, grad: Tensor | None, like: Any, k: int, counts: Sequence[int], it: Chunk, place: Place
) -> Tensor | None:
    """Add the gradient of what a chunk reads of input ``k``, see :func:`part_of`."""
    if k > counts[0] + counts[1]:
        return total if grad is None else grad if total is None else total.add_(grad)
    if total is None:
        total = place.home.empty(like.shape, like.dtype).zero_()
    if grad is not None and k == 0:
        total.index_add_(0, it.sources, grad.to(total.device, total.dtype))
    elif grad is not None and k <= counts[0]:
        total[it.span[0] : it.span[1]] = grad
    elif grad is not None:
        total.index_copy_(0, it.edges, grad.to(total.device))
    return total


@answers("aggregate")
def hop(graph: ShardedGraph, reduce: Reduce, source: LocalRows, rows: Rows) -> HostRows:
    """Aggregate rows in host memory; what is pending of them is computed before."""
    if not graph.exchange.alone:
        raise NotImplementedError(
            f"[rank {graph.exchange.routes.rank}] Rows in host memory are aggregated by a single worker (got "
            f"{graph.exchange.routes.size}). Start one process, or leave the rows of several in memory."
        )
    x: Any = source.x
    place = x.place
    x = force(record(F.linear, source.inputs, {}) if isinstance(source, ProjectedRows) else x)
    dst = [force(t) if isinstance(t, HostRows) else t for t in rows.dst]
    graph = graph if len(graph.blocks) == 1 else graph.merge()
    counts = (len(dst), len(rows.edge), len(rows.const))
    return Hop.apply(place, graph, reduce, counts, x, *dst, *rows.edge, *rows.const)
