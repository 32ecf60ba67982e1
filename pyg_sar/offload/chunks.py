r"""One aggregation of rows in host memory, one chunk of destinations at a time: the destination loop of HongTu.

A chunk is a :class:`~pyg_sar.graph.ShardedGraph` like any other: some destinations, all their in-edges, and as its
sources the rows that these read, in *pieces* that are fetched from home one after the other. ``stream.py`` runs over it
as it is: the source loop of SAR within the destination loop of HongTu::

    forward                                      backward
    for each chunk of destinations               for each chunk of destinations
        for each piece of its sources                case 1: d_x = gradient, which reads no rows
            x = fetch the rows                       case 2: fetch again, aggregate again, d_x = gradient
            y = merge(y, messages of x)              add d_x to the gradients at home, piece by piece
        write y to the home

With several workers each walks its own chunks. The rows that it reads of others come home before
(:mod:`pyg_sar.offload.halo`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar import running, watch
from pyg_sar.aggregate import aggregate
from pyg_sar.autograd import once_differentiable
from pyg_sar.block import Block, cut
from pyg_sar.exchange import Local, Meter, Receiver, Routes, Schedule
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload.halo import SourceRows, fetch_halo, sum_halo
from pyg_sar.offload.home import Home
from pyg_sar.offload.passes import force, reader
from pyg_sar.offload.rows import HostRows, Place, answers, record
from pyg_sar.offload.schedule import ranges, source_pieces
from pyg_sar.reduce.base import Needs, Reduce, Rows
from pyg_sar.running import About
from pyg_sar.sources import LocalGrads, LocalRows, ProjectedRows

# What an input has rows of; a parameter is a constant that a layer reads by itself.
SOURCE, DESTINATION, EDGE, CONSTANT, PARAMETER = "source", "destination", "edge", "constant", "parameter"


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some destinations and what they read.

    Args:
        span: The range of destinations.
        graph: Their in-edges; its sources are the rows that these read, its blocks the pieces of these.
        sources: The local-first numbers of these rows, ascending.
        edges: Where the worker's edge tensors hold the edges.
    """

    span: tuple[int, int]
    graph: ShardedGraph
    sources: Tensor
    edges: Tensor

    def at(self, place: Place) -> Chunk:
        """Return the chunk with its topology where rows are computed on; what rows at home are found by stays."""
        graph = self.graph
        if place.device == graph.device and not place.copies:
            return self
        assert graph.e_id is not None
        blocks = []
        for block in graph.blocks:
            moved: dict[str, Any] = {k: place.bring(t) for k, t in vars(block).items() if isinstance(t, Tensor)}
            blocks.append(replace(block, **moved))
            blocks[-1].__dict__["transpose"] = tuple(map(place.bring, block.transpose))
        exchange = graph.exchange.to(place.device)
        return replace(self, graph=graph.replace(blocks=tuple(blocks), exchange=exchange, e_id=place.bring(graph.e_id)))

    @property
    def pieces(self) -> list[Tensor]:
        """The numbers of the rows of each piece."""
        return [self.sources[piece] for piece in self.graph.exchange.routes.shards]


def chunks(place: Place, graph: ShardedGraph, by_pieces: bool) -> list[Chunk]:
    """Return chunks of destinations, which are made once for each graph; with all sources in one piece, or in as many
    as the place has room for.
    """
    count, slots = len(place.ranges), place.slots if by_pieces and place.slots is not None else graph.num_src

    def make() -> list[Chunk]:
        return [chunk(place.home, graph, *span, slots) for span in spans(graph, count)]

    return graph.derived(("chunks", place.home, count, slots), make)


def spans(graph: ShardedGraph, count: int) -> list[tuple[int, int]]:
    """Cut destinations into ranges of about equal cost."""
    rowptr = F.pad(graph.degree.cumsum(0), (1, 0))
    return [(chunk.start, chunk.stop) for chunk in ranges(rowptr.cpu(), count)]


def sources_of(graph: ShardedGraph, start: int, end: int) -> tuple[list[Block], Tensor]:
    """Return the edges into a range of destinations by source shard, and what numbers the sources that they read,
    ascending, from 0; the others have the number -1.
    """
    blocks = [block.rows(start, end) for block in graph.blocks]
    number = torch.full((graph.num_src + graph.exchange.routes.num_halo,), -1)
    for block in blocks:
        number[block.source] = 0
    sources = (number == 0).nonzero().view(-1)
    number[sources] = torch.arange(len(sources))
    return blocks, number


def chunk(home: Home, graph: ShardedGraph, start: int, end: int, slots: int) -> Chunk:
    """Return the chunk of a range of destinations, whose index tensors are at home."""
    some, number = sources_of(graph, start, end)
    sources = (number >= 0).nonzero().view(-1)
    sizes = [len(ids) for ids in source_pieces(sources, max(slots, 1))]
    ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    pieces = [slice(*ends_of_one) for ends_of_one in pairwise(ends)]
    if len(pieces) == len(some) == 1:
        blocks: tuple[Block, ...] = (some[0].renumber(number, slice(0, some[0].num_edges)),)
    else:
        col, row = number[torch.cat([b.source for b in some])], torch.cat([b.row for b in some])
        of = torch.bucketize(col, torch.tensor(ends[1:]), right=True)
        blocks = cut(torch.stack([col, row]), of, pieces, end - start)
    few = graph.rows(start, end).replace(
        blocks=blocks,
        num_src=len(sources),
        dst=None,
        remat=len(pieces) > 1,
        exchange=Local(Routes.local(pieces)),
        n_id=sources,  # nothing that runs on a chunk asks for global ids
    )
    return at_home(home, Chunk((start, end), few, sources, graph.edge_rows(start, end)))


def at_home(home: Home, it: Chunk) -> Chunk:
    """Return the chunk with its index tensors in a file, if rows are in files: of all chunks they are as long as the
    edges, several times.
    """
    if home.folder is None:
        return it
    names = ("rowptr", "col", "ids", "edges", "dst")
    tensors = [it.sources, it.edges, it.graph.n_id, it.graph.e_id]
    for block in it.graph.blocks:
        tensors += [*(getattr(block, name) for name in names), *block.transpose]
    kept = iter(home.keep(tensors))
    sources, edges, n_id, e_id = islice(kept, 4)
    blocks = []
    for block in it.graph.blocks:
        blocks.append(replace(block, **dict(zip(names, islice(kept, len(names)), strict=True))))
        blocks[-1].__dict__["transpose"] = tuple(islice(kept, 3))
    graph = it.graph.replace(blocks=tuple(blocks), n_id=n_id, e_id=e_id)
    return Chunk(it.span, graph, sources, edges)


class AtHome(Local):
    """The exchange of a chunk whose source rows are at home: a piece is fetched when its turn comes, and its gradient
    is added up there.

    Args:
        it: The chunk.
        place: Where rows are computed on.
        meter: Counts bytes.
        source: The rows; None where the program is given those that it reads.
        total: Their gradient, or None if nobody wants it.
    """

    def __init__(
        self, it: Chunk, place: Place, meter: Meter, source: SourceRows | None, total: SourceRows | None
    ) -> None:  # fmt: skip
        super().__init__(it.graph.exchange.routes)
        self.pieces, self.place, self.meter, self.source, self.total = it.pieces, place, meter, source, total

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Fetch every piece of every tile, which are all columns, or some, of the rows at home."""
        assert self.source is not None
        start = 0
        for x, pieces in zip(tiles, order, strict=True):
            source = self.source
            if x.shape[1:] != source.local.shape[1:]:
                source = source.columns(slice(start, start := start + x.size(-1)))
            for q in pieces:
                yield q, fetch(source, self.pieces[q], self.place, self.meter)

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> HomeSink:
        """Return what adds up gradients at home."""
        assert isinstance(receiver, LocalGrads) and self.total is not None
        return HomeSink(self, self.total, receiver.tiles)


class RowsElsewhere(LocalRows):
    """All local rows, which are at home, of an aggregation on a device.

    Args:
        x: The rows.
        device: Where they are fetched to.
    """

    def __init__(self, x: Tensor, device: torch.device) -> None:
        super().__init__(x)
        self.device = device

    @property
    def like(self) -> Tensor:
        """An empty tensor of fetched rows."""
        return self.x.new_empty(0, *self.x.shape[1:], device=self.device)


class HomeSink:
    """Adds the gradients of pieces to those at home; the receiver gets none.

    Args:
        exchange: Of the chunk.
        total: The gradient of all rows.
        tiles: The columns of each tile.
    """

    def __init__(self, exchange: AtHome, total: SourceRows, tiles: Sequence[slice]) -> None:
        self.exchange, self.total, self.tiles, self.count = exchange, total, tiles, 0

    def push(self, q: int, grad: Tensor) -> None:
        """Add the gradient of a piece; all pieces of a tile come before those of the next one."""
        it, total = self.exchange, self.total
        if len(self.tiles) > 1:
            total = total.columns(self.tiles[self.count // len(it.pieces)])
        add(total, it.pieces[q], grad, it.meter)
        self.count += 1

    def close(self) -> None:
        """Do nothing: all is at home."""


def fetch(rows: SourceRows, index: Tensor, place: Place, meter: Meter) -> Tensor:
    """Return rows from home."""
    found = rows.select(index)
    meter(loaded=found.nbytes)
    return place.bring(found)


def add(total: SourceRows, index: Tensor, grad: Tensor, meter: Meter) -> None:
    """Add gradients of rows to those at home, which are loaded and stored."""
    total.add(index, grad.to(total.local.device, total.local.dtype))
    meter(loaded=grad.nbytes, stored=grad.nbytes)


class Program(Protocol):
    """What is computed for each chunk.

    Args:
        needs_source: Whether gradients depend on source rows (case 2); if not, :meth:`grad` knows that of source rows.
        by_pieces: Whether it reads source rows from home itself, and adds up their gradients there.
    """

    needs_source: bool
    by_pieces: bool

    def run(self, it: Chunk, values: Sequence[Any], exchange: AtHome) -> Tensor:
        """Return rows of the chunk's destinations, given what it reads of every input."""

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor, exchange: AtHome) -> None:
        """Add up the gradient of source rows, of which ``like`` has none, in case 1."""


class Aggregation(Program):
    """An aggregation by a reduction.

    Args:
        reduce: How messages combine.
        counts: How many tensors it reads of destinations, of edges and of constants.
    """

    by_pieces = True

    def __init__(self, reduce: Reduce, counts: tuple[int, int, int]) -> None:
        self.reduce, self.counts, self.needs_source = reduce, counts, reduce.needs_source

    def rows(self, values: Sequence[Any]) -> Rows:
        """Return what is read besides source rows."""
        dst, edge, _ = self.counts
        return Rows(values[:dst], values[dst : dst + edge], values[dst + edge :])

    def run(self, it: Chunk, values: Sequence[Any], exchange: AtHome) -> Tensor:
        """Aggregate."""
        graph = it.graph.replace(exchange=exchange, num_src=values[0].size(0))
        source = RowsElsewhere(values[0], exchange.place.device)
        return aggregate(graph, self.reduce.into(graph, *it.span), source, *self.rows(values[1:]))

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor, exchange: AtHome) -> None:
        """Ask the reduction, piece by piece."""
        rows = self.rows(values[1:])
        (tile,) = self.reduce.into(it.graph, *it.span).tiles(like, rows, 1)
        needs, saved = Needs(True, Rows(*([False] * len(t) for t in rows))), tile.reduce.prepare((), grad)
        assert exchange.total is not None
        for block, ids in zip(it.graph.blocks, exchange.pieces, strict=True):
            d_x = tile.grad(block, None, rows, saved, grad, needs)[0]
            assert d_x is not None
            add(exchange.total, ids, d_x, exchange.meter)


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
        ctx.traffic = graph.exchange.log.open()
        ctx.traffic.case = 2 if program.needs_source else 1
        meter, out, about = ctx.traffic.forward, None, told(graph, inputs[0], ctx.needs_input_grad)
        sources = fetch_sources(place, graph, kinds, inputs, meter, about)
        for it in walk(place, graph, program, inputs):
            values = [read(t, kind, it, place, program, sources.get(k), meter)
                      for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True))]  # fmt: skip
            rows = program.run(it, values, AtHome(it, place, meter, sources.get(0), None))
            if out is None:
                out = place.home.empty((graph.num_dst, *rows.shape[1:]), rows.dtype)
            out[it.span[0] : it.span[1]] = rows
            place.home.wrote(out, *it.span)
            meter(stored=rows.nbytes)
            del it, values, rows  # or they would live while the next chunk is fetched
        return HostRows(place, out)

    @staticmethod
    def backward(ctx: Any, grad: HostRows) -> Any:
        """Differentiate each chunk, and add up what its rows, edges and constants get."""
        once_differentiable()
        place, graph, program, kinds, wanted = ctx.place, ctx.graph, ctx.program, ctx.kinds, ctx.needs_input_grad[4:]
        inputs, given, meter = ctx.saved_tensors, reader(grad), ctx.traffic.backward
        sources = fetch_sources(place, graph, kinds, inputs, meter)
        totals = {k: zeros_like_sources(place, graph, *ctx.shapes[k][:2])
                  for k, kind in enumerate(kinds) if kind == SOURCE and wanted[k]}  # fmt: skip
        sums: list[Any] = [totals.get(k) for k in range(len(kinds))]
        for it in walk(place, graph, program, inputs):
            values = [read(t, kind, it, place, program, sources.get(k), meter)
                      for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True))]  # fmt: skip
            d_out, exchange = given(it.span), AtHome(it, place, meter, sources.get(0), totals.get(0))
            meter(loaded=d_out.nbytes)
            found: list[Any] = [None] * len(values)
            if program.needs_source:
                found = differentiate(it, program, values, kinds, wanted, d_out, exchange)
            elif totals:
                (_, *width), dtype, _ = ctx.shapes[0]
                program.grad(it, d_out.new_empty(0, *width, dtype=dtype), values, d_out, exchange)
            del values, d_out
            for k, kind in enumerate(kinds):
                if wanted[k]:
                    sums[k] = add_up(sums[k], found[k], kind, it, place, meter, *ctx.shapes[k][:2])
            del it, exchange, found
        for k, total in totals.items():
            sum_halo(total, graph.exchange, meter)
            sums[k] = total.local
        made = (HostRows(place, s) if on_host and s is not None else s
                for s, (*_, on_host) in zip(sums, ctx.shapes, strict=True))  # fmt: skip
        return None, None, None, None, *made


def told(graph: ShardedGraph, source: Tensor, wanted: Sequence[bool]) -> About | None:
    """Return what workers must do alike, for the others to compare."""
    if graph.exchange.alone:
        return None
    which = "gradients of rows" if wanted[4] else "gradients of all but rows" if any(wanted) else "no gradients"
    return running.about(source.shape, source.dtype, f"{which}, rows at home")


def fetch_sources(
    place: Place, graph: ShardedGraph, kinds: Sequence[str], inputs: Sequence[Any], meter: Meter,
    about: About | None = None,
) -> dict[int, SourceRows]:  # fmt: skip
    """Return the source rows of each input that has some, with those that other workers own."""
    found = {}
    for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True)):
        if kind == SOURCE and t is not None:
            rows: Any = t.host if isinstance(t, HostRows) else t
            found[k], about = fetch_halo(rows, place.home, graph.exchange, meter, about), None
    return found


def zeros_like_sources(place: Place, graph: ShardedGraph, shape: torch.Size, dtype: torch.dtype) -> SourceRows:
    """Return what gradients of source rows are added up in."""
    halo = (graph.exchange.routes.num_halo, *shape[1:])
    zeros = [place.home.empty(rows, dtype).zero_() for rows in ([shape] if graph.exchange.alone else [shape, halo])]
    return SourceRows(zeros[0], zeros[1] if len(zeros) > 1 else None)


def walk(place: Place, graph: ShardedGraph, program: Program, inputs: Sequence[Any]) -> Iterator[Chunk]:
    """Yield the chunks, and have what the next one reads of its own range read ahead."""
    every = chunks(place, graph, program.by_pieces)
    for it, following in zip(every, [*every[1:], None], strict=True):
        for t in inputs:
            if following is not None and isinstance(t, HostRows) and t.host is not None:
                place.home.advise(t.host, *following.span)
        yield it.at(place)


def differentiate(
    it: Chunk, program: Program, values: list[Any], kinds: Sequence[str], wanted: Sequence[bool], grad: Tensor,
    exchange: AtHome,
) -> list[Tensor | None]:  # fmt: skip
    """Compute a chunk once more, and return the gradients of what it reads."""
    values = [v if kind == PARAMETER else v.detach().requires_grad_(want)
              for v, kind, want in zip(values, kinds, wanted, strict=True)]  # fmt: skip
    with torch.enable_grad():
        out = program.run(it, values, exchange)
    given = [v for v, want in zip(values, wanted, strict=True) if want]
    if not given or not out.requires_grad:
        return [None] * len(values)
    found = iter(torch.autograd.grad(out, given, grad, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def read(
    value: Any, kind: str, it: Chunk, place: Place, program: Program, source: SourceRows | None, meter: Meter
) -> Any:  # fmt: skip
    """Return what a chunk reads of an input; of sources that are read by pieces, all local rows, where they are."""
    if value is None:
        return None
    rows: Any = value.host if isinstance(value, HostRows) else value
    if source is not None:
        return rows if program.by_pieces else fetch(source, it.sources, place, meter)
    if kind == DESTINATION:
        rows = rows[it.span[0] : it.span[1]]
        meter(loaded=rows.nbytes)
    elif kind == EDGE:
        rows = rows.index_select(0, it.edges)
    return place.bring(rows)


def add_up(
    total: Any, grad: Tensor | None, kind: str, it: Chunk, place: Place, meter: Meter, shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Add the gradient of what a chunk reads of an input; sources by pieces have added theirs."""
    if kind in (CONSTANT, PARAMETER):
        return total if grad is None else grad if total is None else total.add_(grad)
    if grad is None:
        return total
    if total is None:
        total = place.home.empty(shape, dtype).zero_()
    if kind == SOURCE:
        add(total, it.sources, grad, meter)
    elif kind == DESTINATION:
        total[it.span[0] : it.span[1]] = grad
        place.home.wrote(total, *it.span)
        meter(stored=grad.nbytes)
    else:
        total.index_copy_(0, it.edges, grad.to(total.device, total.dtype))
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
    exist = [force(t) if isinstance(t, HostRows) else t for t in inputs]
    out: HostRows = ByChunks.apply(place, graph, program, kinds, *exist)
    if not graph.exchange.alone:
        watch.rows(out)
    return out
