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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.aggregate import aggregate
from pyg_sar.autograd import once_differentiable
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload.passes import force, rows_of
from pyg_sar.offload.rows import HostRows, Place, answers, record
from pyg_sar.offload.schedule import ranges
from pyg_sar.reduce.base import Needs, Reduce, Rows
from pyg_sar.sources import LocalRows, ProjectedRows

# What an input has rows of; a parameter is a constant that a layer reads by itself.
SOURCE, DESTINATION, EDGE, CONSTANT, PARAMETER = "source", "destination", "edge", "constant", "parameter"


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
    """Cut destinations into ranges of about equal cost."""
    rowptr = F.pad(graph.degree.cumsum(0), (1, 0))
    return [(chunk.start, chunk.stop) for chunk in ranges(rowptr.cpu(), count)]


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


class Program(Protocol):
    """What is computed for each chunk.

    Args:
        needs_source: Whether gradients depend on source rows (case 2); if not, :meth:`grad` knows that of source rows.
    """

    needs_source: bool

    def run(self, it: Chunk, values: Sequence[Any]) -> Tensor:
        """Return rows of the chunk's destinations, given what it reads of every input."""

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor) -> Tensor | None:
        """Return the gradient of source rows, of which ``like`` has none, in case 1."""


class Aggregation(Program):
    """An aggregation by a reduction.

    Args:
        reduce: How messages combine.
        counts: How many tensors it reads of destinations, of edges and of constants.
    """

    def __init__(self, reduce: Reduce, counts: tuple[int, int, int]) -> None:
        self.reduce, self.counts, self.needs_source = reduce, counts, reduce.needs_source

    def rows(self, values: Sequence[Any]) -> Rows:
        """Return what is read besides source rows."""
        dst, edge, _ = self.counts
        return Rows(values[:dst], values[dst : dst + edge], values[dst + edge :])

    def run(self, it: Chunk, values: Sequence[Any]) -> Tensor:
        """Aggregate."""
        rows = self.rows(values[1:])
        return aggregate(it.graph, self.reduce.into(it.graph, *it.span), values[0], rows.dst, rows.edge, rows.const)

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor) -> Tensor | None:
        """Ask the reduction."""
        rows = self.rows(values[1:])
        (tile,) = self.reduce.into(it.graph, *it.span).tiles(like, rows, 1)
        needs = Needs(True, Rows(*([False] * len(t) for t in rows)))
        return tile.grad(it.graph.blocks[0], None, rows, tile.reduce.prepare((), grad), grad, needs)[0]


class ByChunks(torch.autograd.Function):
    """A program, chunk by chunk. What is saved is what a chunk reads again: in case 1, no source rows."""

    @staticmethod
    def forward(
        ctx: Any, place: Place, graph: ShardedGraph, program: Program, kinds: Sequence[str], *inputs: Any
    ) -> HostRows:
        """Fetch, compute and write each chunk."""
        ctx.place, ctx.graph, ctx.program, ctx.kinds = place, graph, program, kinds
        ctx.shapes = [(t.shape, t.dtype, isinstance(t, HostRows)) for t in inputs]
        keeps = [program.needs_source or kind != SOURCE for kind in kinds]
        ctx.save_for_backward(*(t if keep else None for t, keep in zip(inputs, keeps, strict=True)))
        out = None
        for it in chunks(graph, len(place.ranges)):
            rows = program.run(it, [read(t, kind, it, place) for t, kind in zip(inputs, kinds, strict=True)])
            if out is None:
                out = place.home.empty((graph.num_dst, *rows.shape[1:]), rows.dtype)
            out[it.span[0] : it.span[1]] = rows
        return HostRows(place, out)

    @staticmethod
    def backward(ctx: Any, grad: HostRows) -> Any:
        """Differentiate each chunk, and add up what its rows, edges and constants get."""
        once_differentiable()
        place, program, kinds, wanted = ctx.place, ctx.program, ctx.kinds, ctx.needs_input_grad[4:]
        inputs = ctx.saved_tensors
        sums: list[Any] = [None] * len(wanted)
        for it in chunks(ctx.graph, len(place.ranges)):
            values = [None if t is None else read(t, kind, it, place) for t, kind in zip(inputs, kinds, strict=True)]
            given = rows_of(grad, it.span)
            if program.needs_source:
                found = differentiate(it, program, values, kinds, wanted, given)
            else:
                (_, *width), dtype, _ = ctx.shapes[0]
                like = given.new_empty(0, *width, dtype=dtype)
                found = [program.grad(it, like, values, given), *[None] * (len(values) - 1)]
            for k, kind in enumerate(kinds):
                if wanted[k]:
                    sums[k] = add_up(sums[k], found[k], kind, it, place, *ctx.shapes[k][:2])
        made = (HostRows(place, s) if on_host and s is not None else s
                for s, (*_, on_host) in zip(sums, ctx.shapes, strict=True))  # fmt: skip
        return None, None, None, None, *made


def differentiate(
    it: Chunk, program: Program, values: list[Any], kinds: Sequence[str], wanted: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Compute a chunk once more, and return the gradients of what it reads."""
    values = [v if kind == PARAMETER else v.detach().requires_grad_(want)
              for v, kind, want in zip(values, kinds, wanted, strict=True)]  # fmt: skip
    with torch.enable_grad():
        out = program.run(it, values)
    given = [v for v, want in zip(values, wanted, strict=True) if want]
    if not given or not out.requires_grad:
        return [None] * len(values)
    found = iter(torch.autograd.grad(out, given, grad, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def read(value: Any, kind: str, it: Chunk, place: Place) -> Any:
    """Return what a chunk reads of an input."""
    rows: Any = value.host if isinstance(value, HostRows) else value
    if kind == SOURCE:
        rows = rows.index_select(0, it.sources)
    elif kind == DESTINATION:
        rows = rows[it.span[0] : it.span[1]]
    elif kind == EDGE:
        rows = rows.index_select(0, it.edges)
    return rows.to(place.device, non_blocking=True)


def add_up(
    total: Any, grad: Tensor | None, kind: str, it: Chunk, place: Place, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """Add the gradient of what a chunk reads of an input."""
    if kind in (CONSTANT, PARAMETER):
        return total if grad is None else grad if total is None else total.add_(grad)
    if total is None:
        total = place.home.empty(shape, dtype).zero_()
    grad = None if grad is None else grad.to(total.device, total.dtype)
    if grad is not None and kind == SOURCE:
        total.index_add_(0, it.sources, grad)
    elif grad is not None and kind == DESTINATION:
        total[it.span[0] : it.span[1]] = grad
    elif grad is not None:
        total.index_copy_(0, it.edges, grad)
    return total


@answers("aggregate")
def aggregate_rows(graph: ShardedGraph, reduce: Reduce, source: LocalRows, rows: Rows) -> HostRows:
    """Aggregate rows in host memory; what is pending of them is computed before."""
    x: Any = source.x
    place = x.place
    x = record(F.linear, source.inputs, {}) if isinstance(source, ProjectedRows) else x
    kinds = [SOURCE, *[DESTINATION] * len(rows.dst), *[EDGE] * len(rows.edge), *[CONSTANT] * len(rows.const)]
    program = Aggregation(reduce, (len(rows.dst), len(rows.edge), len(rows.const)))
    return run(place, graph, program, kinds, [x, *rows.dst, *rows.edge, *rows.const])


def run(place: Place, graph: ShardedGraph, program: Program, kinds: Sequence[str], inputs: Sequence[Any]) -> HostRows:
    """Run a program over the chunks of a graph, of inputs that exist."""
    if not graph.exchange.alone:
        raise NotImplementedError(
            f"[rank {graph.exchange.routes.rank}] Rows in host memory are aggregated by a single worker (got "
            f"{graph.exchange.routes.size}). Start one process, or leave the rows of several in memory."
        )
    graph = graph if len(graph.blocks) == 1 else graph.merge()
    exist = [force(t) if isinstance(t, HostRows) else t for t in inputs]
    return ByChunks.apply(place, graph, program, kinds, *exist)
