r"""One aggregation of rows at home, one chunk of destinations at a time: the destination loop of HongTu.

A chunk is a :class:`~pyg_sar.graph.ShardedGraph` like any other: some destinations, all their in-edges, and as its
sources the rows that these read, in *pieces* that are fetched from home one after the other. ``stream.py`` runs over it
as it is: the source loop of SAR within the destination loop of HongTu::

    forward                                      backward
    for each chunk of destinations               for each chunk of destinations
        for each piece of its sources                case 1: d_x = gradient, which reads no rows
            load what is in no slot                  case 2: load again, aggregate again, d_x = gradient
            y = merge(y, messages of the slots)      store the gradients of rows that leave their slots
        write y to the home                          add d_x to those in slots

With several workers each walks its own chunks, with its halo rows at home, too (:mod:`pyg_sar.offload.halo`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar import running, watch
from pyg_sar.aggregate import aggregate
from pyg_sar.autograd import autocast_as_now, once_differentiable
from pyg_sar.block import Block, cut, length
from pyg_sar.exchange import Local, Meter, Receiver, Routes, Schedule, Sink
from pyg_sar.graph import ShardedGraph, SomeIds
from pyg_sar.memo import Memo
from pyg_sar.offload.halo import SourceRows, fetch_halo, sum_halo
from pyg_sar.offload.home import Home
from pyg_sar.offload.passes import add_shared, check_versions, force, reader, returned, versions
from pyg_sar.offload.place import CPU, Place
from pyg_sar.offload.rows import HostRows, answers, record, rows_in
from pyg_sar.offload.schedule import accesses, best_order, ranges, source_pieces
from pyg_sar.offload.slots import Slots, add, fetch
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
        graph: Their in-edges; its blocks are those of the pieces, whose source rows are those of a piece, in their
            order, or slots.
        pieces: The local-first numbers of the rows of each piece, ascending.
        slots: The slots that these rows are in, or None.
    """

    span: tuple[int, int]
    graph: ShardedGraph
    pieces: list[Tensor]
    slots: list[Tensor] | None

    @property
    def ids(self) -> SomeIds:
        """The ids of the edges."""
        assert isinstance(self.graph.e_id, SomeIds)
        return self.graph.e_id

    def at(self, place: Place, transposed: bool) -> Chunk:
        """Return the chunk where rows are computed on, with the transposes of its blocks if backward will read them;
        what tensors of edges are found by stays.
        """
        graph = self.graph
        if place.device == graph.device and not place.copies:
            return self
        blocks = tuple(block.map(place.bring, transposed) for block in graph.blocks)
        exchange = graph.exchange.to(place.device)
        e_id = IdsBrought(self.ids.e_id, self.ids.edges, place)
        moved_graph = graph.replace(blocks=blocks, exchange=exchange, e_id=e_id)
        pieces = [place.bring(ids) for ids in self.pieces]
        slots = None if self.slots is None else [place.bring(of_piece) for of_piece in self.slots]
        return replace(self, graph=moved_graph, pieces=pieces, slots=slots)


class IdsAtHome(SomeIds):
    """Ids of some edges that are not kept: those of all chunks are as long as the edges."""

    @property
    def ids(self) -> Tensor:
        """The ids, made anew."""
        return self.make()


@dataclass(frozen=True, eq=False)
class IdsBrought(SomeIds):
    """Ids of some edges that are brought to the device.

    Args:
        place: Where they are brought.
    """

    place: Place

    def make(self) -> Tensor:
        """Bring them."""
        return self.place.bring(super().make())


def chunks(place: Place, graph: ShardedGraph, by_pieces: bool) -> list[Chunk]:
    """Return chunks of destinations, which are made once for each graph; with all sources in one piece, or in as many
    as the place has room for. Where source rows stay for the next chunks, these are in the order that loads fewer.
    """
    count, num_slots = place.chunks, place.slots if by_pieces else None
    keeps = by_pieces and place.keeps

    def make() -> list[Chunk]:
        every = spans(graph.degree, count)
        sources = place.home.keep([sources_of(graph, span) for span in every])
        most = max(map(len, sources))
        room = max(most if num_slots is None else min(num_slots, most), 1)
        if keeps:
            order = best_order(sources, graph.num_src + graph.exchange.routes.num_halo, room)
            every, sources = ([of_chunk[c] for c in order] for of_chunk in (every, sources))
        pieces = [list(source_pieces(ids, room)) for ids in sources]
        room = max(len(ids) for of_chunk in pieces for ids in of_chunk)
        slots: Iterable[Any] = scheduled(graph, pieces, room) if keeps else [None] * len(pieces)
        return [chunk(place.home, graph, *of_one, room) for of_one in zip(every, pieces, slots, strict=True)]

    # Data of this graph may have other homes later.
    homes: WeakKeyDictionary[Home, Memo] = graph.derived("chunks", WeakKeyDictionary)
    with CPU:  # whatever torch's default device is
        return homes.setdefault(place.home, Memo()).get((count, num_slots, keeps), make)


def spans(degree: Tensor, count: int) -> list[tuple[int, int]]:
    """Cut destinations into at most so many ranges of about equal cost, of which none is empty if there are any."""
    rowptr = F.pad(degree.cumsum(0), (1, 0))
    return [(one.start, one.stop) for one in ranges(rowptr.cpu(), count) if one.start < one.stop] or [(0, 0)]


def sources_of(graph: ShardedGraph, span: tuple[int, int]) -> Tensor:
    """Return the numbers of the sources that a range of destinations reads, ascending."""
    read = torch.zeros(graph.num_src + graph.exchange.routes.num_halo, dtype=torch.bool)
    for block in graph.blocks:
        read[block.rows(*span).source] = True
    return read.nonzero().view(-1)


def scheduled(graph: ShardedGraph, pieces: list[list[Tensor]], num_slots: int) -> Iterator[list[Tensor]]:
    """Yield the slots of the rows of each piece, chunk by chunk, such that no other choice loads fewer rows."""
    every = [ids for of_chunk in pieces for ids in of_chunk]
    plan = accesses(every, graph.num_src + graph.exchange.routes.num_halo, num_slots)
    for of_chunk in pieces:
        yield [next(plan).slots for _ in of_chunk]


def chunk(
    home: Home, graph: ShardedGraph, span: tuple[int, int], pieces: list[Tensor], slots: list[Tensor] | None,
    num_slots: int,
) -> Chunk:  # fmt: skip
    """Return the chunk of a range of destinations, whose index tensors are at home; without slots, the rows of a piece
    are numbered in their order.
    """
    part = graph.rows(*span)
    some = part.blocks
    number = torch.empty(graph.num_src + graph.exchange.routes.num_halo, dtype=torch.int64)
    for k, ids in enumerate(pieces):
        number[ids] = torch.arange(len(ids)) if slots is None else slots[k]
    places = [slice(0, len(ids)) if slots is None else slice(0, num_slots) for ids in pieces]
    if len(pieces) == len(some) == 1:
        (block,) = some
        col, edges = number[block.source].to(block.col.dtype), slice(0, block.num_edges)
        blocks: tuple[Block, ...] = (replace(block, col=col, ids=places[0], num_src=length(places[0]), edges=edges),)
    else:
        source, row = torch.cat([b.source for b in some]), torch.cat([b.row for b in some])
        last = torch.stack([ids[-1] if len(ids) else torch.tensor(-1) for ids in pieces])
        of = torch.bucketize(source, last)
        blocks = cut(torch.stack([number[source], row]), of, places, span[1] - span[0])
    few = part.replace(
        blocks=blocks,
        num_src=num_slots if slots else sum(map(len, pieces)),
        dst=None,
        remat=len(pieces) > 1,
        exchange=Local(Routes.local(places)),
        n_id=pieces[0],  # nothing that runs on a chunk asks for global ids
    )
    return at_home(home, Chunk(span, few, pieces, slots))


def at_home(home: Home, it: Chunk) -> Chunk:
    """Return the chunk with its index tensors at home, if that is apart: of all chunks they are as long as the edges,
    several times.
    """
    if not home.apart:
        return it
    tensors = [it.ids.edges, *(it.slots or ())]

    def collect(t: Tensor) -> Tensor:
        tensors.append(t)
        return t

    for block in it.graph.blocks:
        block.map(collect, transpose=True)
    kept = iter(home.keep(tensors))
    e_id = IdsAtHome(it.ids.e_id, next(kept))
    slots = None if it.slots is None else list(islice(kept, len(it.slots)))
    blocks = tuple(block.map(lambda _: next(kept), transpose=True) for block in it.graph.blocks)
    return replace(it, graph=it.graph.replace(blocks=blocks, e_id=e_id), slots=slots)


class AtHome(Local):
    """The exchange of a chunk whose source rows are at home: a piece is loaded when its turn comes, and its gradient
    is added up.
    """

    def __init__(self, it: Chunk, slots: Slots) -> None:
        super().__init__(it.graph.exchange.routes)
        self.it, self.slots = it, slots

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Load every piece of every tile, which are all columns, or some, of the rows at home."""
        start, all_columns = 0, self.slots.shape
        for x, pieces in zip(tiles, order, strict=True):
            which = slice(None)
            if x.shape[1:] != all_columns:
                which = slice(start, start := start + x.size(-1))
            for q in pieces:
                yield q, self.slots.load(*self.piece(q), which, self.it.graph.num_src)

    def piece(self, q: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows of a piece, and their slots if they have some."""
        return self.it.pieces[q], None if self.it.slots is None else self.it.slots[q]

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> HomeSink:
        """Return what adds up gradients."""
        assert isinstance(receiver, LocalGrads)
        return HomeSink(self, receiver.tiles)


class HomeSink(Sink):
    """Adds up the gradients of pieces; the receiver gets none."""

    def __init__(self, exchange: AtHome, tiles: Sequence[slice]) -> None:
        self.exchange, self.tiles, self.count = exchange, tiles, 0

    def push(self, q: int, grad: Tensor) -> None:
        """Add the gradient of a piece; all pieces of a tile come before those of the next one."""
        exchange = self.exchange
        which = self.tiles[self.count // len(exchange.it.pieces)] if len(self.tiles) > 1 else slice(None)
        exchange.slots.add(*exchange.piece(q), which, grad)
        self.count += 1


class RowsElsewhere(LocalRows):
    """All local rows, which are at home, of an aggregation on a device."""

    def __init__(self, x: Tensor, device: torch.device) -> None:
        super().__init__(x)
        self.device = device

    @property
    def like(self) -> Tensor:
        """An empty tensor of fetched rows."""
        return self.x.new_empty(0, *self.x.shape[1:], device=self.device)


class PerChunk:
    """What is computed for each chunk.

    Args:
        needs_source: Whether gradients depend on source rows (case 2); if not, :meth:`grad` knows that of source rows.
        by_pieces: Whether it reads source rows from home itself, and adds up their gradients there.
        makes: What it makes rows of, destinations or edges.
    """

    needs_source: bool
    by_pieces: bool
    makes: str = DESTINATION

    def run(self, it: Chunk, values: Sequence[Any], exchange: AtHome) -> Tensor:
        """Return rows of the chunk's destinations or edges, given what it reads of every input."""
        raise NotImplementedError

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor, exchange: AtHome) -> None:
        """Add up the gradient of source rows, of which ``like`` has none; only asked in case 1."""
        raise NotImplementedError


class Aggregation(PerChunk):
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
        source = RowsElsewhere(values[0], exchange.slots.place.device)
        return aggregate(graph, self.reduce.into(graph, *it.span), source, *self.rows(values[1:]))

    def grad(self, it: Chunk, like: Tensor, values: Sequence[Any], grad: Tensor, exchange: AtHome) -> None:
        """Add up what the reduction finds for the rows of each piece."""
        rows = self.rows(values[1:])
        (tile,) = self.reduce.into(it.graph, *it.span).tiles(like, rows, 1)
        needs, saved = Needs(True, Rows(*([False] * len(t) for t in rows))), tile.reduce.prepare((), grad)
        for q, block in enumerate(it.graph.blocks):
            d_x = tile.grad(block, None, rows, saved, grad, needs)[0]
            assert d_x is not None
            exchange.slots.add(*exchange.piece(q), slice(None), d_x)
            del d_x


class ByChunks(torch.autograd.Function):
    """A program, chunk by chunk. What is saved is what a chunk reads again: in case 1, no source rows."""

    @staticmethod
    def forward(
        ctx: Any, place: Place, graph: ShardedGraph, program: PerChunk, kinds: Sequence[str], *inputs: Any
    ) -> Tensor:
        """Fetch, compute and write each chunk."""
        ctx.set_materialize_grads(False)  # as rows that nobody could take apart
        ctx.place, ctx.graph, ctx.program, ctx.kinds = place, graph, program, kinds
        ctx.shapes = [(t.shape, t.dtype, t.device, getattr(t, "place", None)) for t in inputs]
        keeps = [program.needs_source or kind != SOURCE for kind in kinds]
        kept = [t if keep else None for t, keep in zip(inputs, keeps, strict=True)]
        ctx.versions = versions(kept)
        ctx.save_for_backward(*kept)
        ctx.autocast = autocast_as_now(place.device)
        ctx.traffic = graph.exchange.log.open(running.name())
        ctx.traffic.case = 2 if program.needs_source else 1
        meter, out, about = ctx.traffic.forward, None, told(graph, inputs[0], ctx.needs_input_grad)
        sources = fetch_sources(place, graph, kinds, inputs, meter, about)
        slots = Slots(place, sources.get(0), None, meter)
        for it in walk(place, graph, program, inputs):
            values = [read(t, kind, it, place, program, sources.get(k), meter)
                      for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True))]  # fmt: skip
            with ctx.autocast():
                rows = program.run(it, values, AtHome(it, slots))
            if out is None:
                count = graph.num_dst if program.makes == DESTINATION else graph.num_edges
                out = place.home.empty((count, *rows.shape[1:]), rows.dtype)
            write(out, rows, program.makes, it, place, meter)
            del it, values, rows  # or they would live while the next chunk is fetched
        assert out is not None
        return HostRows(place.of_destinations(graph), out) if program.makes == DESTINATION else out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Differentiate each chunk, and add up what its rows, edges and constants get."""
        once_differentiable()
        if grad is None:  # of rows that no output depends on, on any worker
            return (None,) * len(ctx.needs_input_grad)
        place, graph, program, kinds, wanted = ctx.place, ctx.graph, ctx.program, ctx.kinds, ctx.needs_input_grad[4:]
        inputs, given, meter = ctx.saved_tensors, reader_of(grad, program.makes, place), ctx.traffic.backward
        check_versions(inputs, ctx.versions)
        sources = fetch_sources(place, graph, kinds, inputs, meter)
        totals = {k: zeros_like_sources(place, graph, *ctx.shapes[k][:2])
                  for k, kind in enumerate(kinds) if kind == SOURCE and wanted[k]}  # fmt: skip
        sums: list[Any] = [totals[k].seen(place.home) if k in totals else None for k in range(len(kinds))]
        slots = Slots(place, sources.get(0), sums[0], meter)
        for it in walk(place, graph, program, inputs, backward=True):
            values = [read(t, kind, it, place, program, sources.get(k), meter)
                      for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True))]  # fmt: skip
            d_out, exchange = given(it), AtHome(it, slots)
            meter(loaded=d_out.nbytes)
            found: list[Any] = [None] * len(values)
            if program.needs_source:
                found = differentiate(it, program, values, kinds, wanted, d_out, exchange, ctx.autocast)
            elif totals:
                (_, *width), dtype, *_ = ctx.shapes[0]
                program.grad(it, d_out.new_empty(0, *width, dtype=dtype), values, d_out, exchange)
            del values, d_out
            for k, kind in enumerate(kinds):
                if wanted[k]:
                    sums[k] = add_up(sums[k], found[k], kind, it, place, meter, *ctx.shapes[k][:2])
            del it, exchange, found
        slots.flush()
        place.settle()
        for k, total in totals.items():
            sum_halo(total, graph.exchange, meter)
            sums[k] = total.local
        pairs = zip(sums, ctx.shapes, strict=True)
        return None, None, None, None, *(returned(s, *about) for s, (_, *about) in pairs)


def reader_of(grad: Tensor, kind: str, place: Place) -> Callable[[Chunk], Tensor]:
    """Return what reads the gradient of what was made of a chunk, rows of destinations or of edges."""
    if kind == EDGE:
        return lambda it: place.bring(grad.index_select(0, it.ids.edges))
    given = reader(grad, place)
    return lambda it: given(it.span)


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
    """Return the source rows of inputs that have some, with those that other workers own, as the device sees them."""
    found = {}
    for k, (t, kind) in enumerate(zip(inputs, kinds, strict=True)):
        if kind == SOURCE and t is not None:
            rows: Any = t.host if isinstance(t, HostRows) else t if graph.exchange.alone else t.cpu()
            found[k], about = fetch_halo(rows, place.home, graph.exchange, meter, about).seen(place.home), None
    return found


def zeros_like_sources(place: Place, graph: ShardedGraph, shape: torch.Size, dtype: torch.dtype) -> SourceRows:
    """Return what gradients of source rows are added up in."""
    halo = (graph.exchange.routes.num_halo, *shape[1:])
    zeros = [place.home.empty(rows, dtype).zero_() for rows in ([shape] if graph.exchange.alone else [shape, halo])]
    return SourceRows(zeros[0], zeros[1] if len(zeros) > 1 else None)


def walk(
    place: Place, graph: ShardedGraph, program: PerChunk, inputs: Sequence[Any], backward: bool = False
) -> Iterator[Chunk]:
    """Yield the chunks, and have what the next one reads of its own range read ahead."""
    every = chunks(place, graph, program.by_pieces)
    for it, following in zip(every, [*every[1:], None], strict=True):
        for t in inputs:
            if following is not None and isinstance(t, HostRows) and t.host is not None:
                place.home.advise(t.host, *following.span)
        yield it.at(place, transposed=backward and program.by_pieces)


def differentiate(
    it: Chunk, program: PerChunk, values: list[Any], kinds: Sequence[str], wanted: Sequence[bool], grad: Tensor,
    exchange: AtHome, autocast: Callable[[], Any],
) -> list[Tensor | None]:  # fmt: skip
    """Compute a chunk once more, and return the gradients of what it reads."""
    values = [v if kind == PARAMETER else v.detach().requires_grad_(want)
              for v, kind, want in zip(values, kinds, wanted, strict=True)]  # fmt: skip
    with torch.enable_grad(), autocast():
        out = program.run(it, values, exchange)
    given = [v for v, want in zip(values, wanted, strict=True) if want]
    if not given or not out.requires_grad:
        return [None] * len(values)
    found = iter(torch.autograd.grad(out, given, grad, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def read(
    value: Any, kind: str, it: Chunk, place: Place, program: PerChunk, source: SourceRows | None, meter: Meter
) -> Any:
    """Return what a chunk reads of an input; of sources that are read by pieces, all local rows, where they are."""
    if value is None:
        return None
    rows: Any = value.host if isinstance(value, HostRows) else value
    if source is not None:
        return rows if program.by_pieces else fetch(source, it.pieces[0], place, meter)
    if kind == DESTINATION:
        rows = rows[it.span[0] : it.span[1]]
        meter(loaded=rows.nbytes)
    elif kind == EDGE:
        rows = rows.index_select(0, it.ids.edges)
    return rows if kind == PARAMETER else place.bring(rows)


def add_up(
    total: Any, grad: Tensor | None, kind: str, it: Chunk, place: Place, meter: Meter, shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Add the gradient of what a chunk reads of an input; sources by pieces have added theirs."""
    if kind in (CONSTANT, PARAMETER):
        return add_shared(total, grad)
    if grad is None:
        return total
    if total is None:
        total = place.home.empty(shape, dtype).zero_()
    if kind == SOURCE:
        add(total, it.pieces[0], grad, meter)
    else:
        write(total, grad, kind, it, place, meter)
    return total


def write(total: Tensor, rows: Tensor, kind: str, it: Chunk, place: Place, meter: Meter) -> None:
    """Write rows of the destinations or edges of a chunk to their place among all."""
    if kind == DESTINATION:
        total[it.span[0] : it.span[1]] = rows
        place.home.wrote(total, *it.span)
        meter(stored=rows.nbytes)
    else:
        total.index_copy_(0, it.ids.edges, rows.to(total.device, total.dtype))


@answers("aggregate")
def aggregate_rows(graph: ShardedGraph, reduce: Reduce, source: LocalRows, rows: Rows) -> Tensor:
    """Aggregate rows at home; what is pending of them is computed before."""
    x: Any = source.x
    place = next(rows_in((x, *rows.dst))).place
    if isinstance(source, ProjectedRows):
        x = record(F.linear, source.inputs, {}) if isinstance(x, HostRows) else source.project()
    kinds = [SOURCE, *[DESTINATION] * len(rows.dst), *[EDGE] * len(rows.edge), *[CONSTANT] * len(rows.const)]
    program = Aggregation(reduce, (len(rows.dst), len(rows.edge), len(rows.const)))
    return run(place, graph, program, kinds, [x, *rows.dst, *rows.edge, *rows.const])


def run(place: Place, graph: ShardedGraph, program: PerChunk, kinds: Sequence[str], inputs: Sequence[Any]) -> Tensor:
    """Run a program over the chunks of a graph, of inputs that exist."""
    exist = [force(t) if isinstance(t, HostRows) else t for t in inputs]
    out: Any = ByChunks.apply(place, graph, program, kinds, *exist)
    if not graph.exchange.alone and program.makes == DESTINATION:
        watch.rows(out, of=out.place.n_id)
    return out
