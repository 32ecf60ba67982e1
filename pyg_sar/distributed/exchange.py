r"""Where source rows live and how they travel.

Every exchange has the same few verbs, which is all that the streaming loop knows of it:

* ``visits(count, ...)``: for each of ``count`` parts, the source shards in the order in which they are visited;
* ``pull(parts, visits, meter, about)``: a generator of ``(q, x_q)``, the rows of shard ``q`` that this worker reads,
  for one tensor ``x`` of ``parts`` after the other, which may be made when it is asked for: what is cut by columns
  travels in one pipeline; if it is told what this worker is about, it raises where others are about something else;
* ``sink(meter, take, about)``: gets the gradients of these rows by ``push(q, grad_q)``, in that order, adds them up at
  their owners, and calls ``take(part, grad)`` with those of the own rows as soon as they are complete, at the latest in
  ``close()``; it may keep and change what was pushed;
* ``tell(used)``: given which of the rows of other workers are used here (local-first), returns the own rows that each
  of them uses; ``restrict(used, served, number)``: the exchange of these rows alone, own rows having new numbers;
* ``largest(values)``: of every value the largest one on any worker;
* ``join(others)``: the exchange of the rows of all of them, and what numbers the rows of each (local-first) have there;
* ``merge()``: the same rows in one shot; ``num_halo``: how many of them live elsewhere; ``alone``: whether there is no
  other worker.

:class:`Peers` runs the pairwise shift schedule: at step :math:`t` worker :math:`p` reads from :math:`p + t` and serves
:math:`p - t`. Its own shard comes first, so that local work hides the first transfer, but in backward last wherever
another transfer is under way already, so that it hides the gradients of the shard before::

    step     0     1     2     3          prefetch = 1: the next remote block travels while one is consumed, so that
    rank 0   0     1     2     3          at most prefetch + 1 of them are alive; after the last one follows the first
    rank 1   1     2     3     0          one of the next part.
    rank 2   2     3     0     1
    rank 3   3     0     1     2
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pyg_sar.distributed import guard, staging
from pyg_sar.distributed.collectives import global_max
from pyg_sar.distributed.group import Group, Message, current, rank_of, size_of, start, talking
from pyg_sar.graph import Index, length, renumber
from pyg_sar.running import About

Visits = Sequence[Sequence[int]]
Meter = Callable[..., None]  # of bytes sent and received, and of seconds spent waiting
Take = Callable[[int, Tensor], None]  # of the number of a part and the gradient of its own rows


@dataclass
class Traffic:
    """Bytes that one aggregation sent to and received from other workers, and the seconds in which it waited for them;
    ``case`` is the paper's 1 or 2, ``saved`` the bytes that it keeps until the backward pass, own rows included.
    """

    forward_sent: int = 0
    forward_received: int = 0
    backward_sent: int = 0
    backward_received: int = 0
    case: int = 0
    saved: int = 0
    forward_wait: float = 0.0
    backward_wait: float = 0.0

    def forward(self, sent: int = 0, received: int = 0, wait: float = 0.0) -> None:
        """Add to the forward pass."""
        self.forward_sent += sent
        self.forward_received += received
        self.forward_wait += wait

    def backward(self, sent: int = 0, received: int = 0, wait: float = 0.0) -> None:
        """Add to the backward pass."""
        self.backward_sent += sent
        self.backward_received += received
        self.backward_wait += wait


@dataclass
class Log:
    """Collects the :class:`Traffic` of every aggregation while somebody listens."""

    records: list[Traffic] | None = field(default=None)

    def open(self) -> Traffic:
        """Return the record of a new aggregation."""
        traffic = Traffic()
        if self.records is not None:
            self.records.append(traffic)
        return traffic

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """Collect a :class:`Traffic` for each aggregation within the context, in the order of the forward pass."""
        outer, self.records = self.records, []
        try:
            yield self.records
        finally:
            if outer is not None:
                outer += self.records
            self.records = outer


class Local:
    """All source rows live in this process, in pieces: one device, host memory, or the one-process test twin."""

    num_halo, alone = 0, True

    def __init__(self, ids: Sequence[Index], log: Log | None = None) -> None:
        self.ids, self.log = list(ids), log or Log()

    def to(self, device: torch.device | str) -> Local:
        """Move the index tensors to ``device``."""
        return Local([i.to(device) if isinstance(i, Tensor) else i for i in self.ids], self.log)

    def merge(self) -> Local:
        """Return the exchange with all rows in one piece."""
        return Local([slice(0, num_rows(self.ids))], self.log)

    def join(self, others: Sequence[Local]) -> tuple[Local, list[Tensor]]:
        """Return the exchange of the rows of all, one after the other."""
        ends = list(accumulate((num_rows(other.ids) for other in others), initial=0))
        device = next((i.device for other in others for i in other.ids if isinstance(i, Tensor)), None)
        numbers = [torch.arange(start, end, device=device) for start, end in pairwise(ends)]
        pieces = zip(*(other.ids for other in others), strict=True)
        ids = [torch.cat([number[i] for number, i in zip(numbers, piece, strict=True)]) for piece in pieces]
        return Local([renumber(i, torch.arange(ends[-1], device=device)) for i in ids], self.log), numbers

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    def tell(self, used: Tensor) -> list[Tensor]:
        """Return nothing: there are no others."""
        return []

    def restrict(self, used: Tensor, served: Sequence[Tensor], number: Tensor) -> Local:
        """Return the exchange of the rows whose new number is not negative."""
        return Local([renumber(i, number) for i in self.ids], self.log)

    def visits(self, count: int, backward: bool = False, pulls: bool = True) -> Visits:
        """Return the pieces in their order."""
        return [range(len(self.ids))] * count

    def pull(
        self, parts: Iterable[Tensor], visits: Visits, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield every piece of every part."""
        for x, order in zip(parts, visits, strict=True):
            for q in order:
                yield q, x[self.ids[q]]

    def sink(self, meter: Meter, take: Take, about: About | None = None) -> LocalSink:
        """Return the sink."""
        return LocalSink(self.ids, take)


class LocalSink:
    """Adds the gradients of every piece; those of a single piece are the sum."""

    def __init__(self, ids: Sequence[Index], take: Take) -> None:
        self.ids, self.take, self.part = ids, take, 0
        self.total: Tensor | None = None

    def push(self, q: int, grad: Tensor) -> None:
        """Add the gradient of piece ``q``; a piece holds a row once."""
        if len(self.ids) > 1:
            if self.total is None:
                self.total = grad.new_zeros(num_rows(self.ids), *grad.shape[1:])
            self.total[self.ids[q]] += grad
            grad = self.total
        if q == len(self.ids) - 1:
            self.take(self.part, grad)
            self.part, self.total = self.part + 1, None

    def close(self) -> None:
        """Do nothing: all is taken."""


def num_rows(ids: Sequence[Index]) -> int:
    """Return the number of rows in all pieces."""
    return sum(map(length, ids))


class Peers:
    """Source rows live on peer workers.

    Args:
        serve: ``serve[p]`` are the own rows that worker ``p`` reads; empty for oneself.
        num_src: ``num_src[q]`` is how many rows this worker reads from worker ``q``.
        group: The process group, or None for the default one.
        prefetch: How many fetches are under way while a block is consumed.
        wire: The type in which wider floating-point rows and gradients travel, or None for their own.
    """

    def __init__(
        self,
        serve: Sequence[Tensor],
        num_src: Sequence[int],
        group: Group = None,
        prefetch: int = 1,
        log: Log | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        self.serve, self.num_src, self.group, self.prefetch = list(serve), list(num_src), current(group), prefetch
        self.wire = wire
        self.rank, self.size = rank_of(group), size_of(group)
        self.log, self.alone = log or Log(), self.size == 1
        self.others = [(self.rank + t) % self.size for t in range(1, self.size)]
        self.num_halo = sum(n for q, n in enumerate(num_src) if q != self.rank)
        self.turn = 0  # how often rows or gradients were exchanged
        self.told: guard.Turn | None = None  # what others do in this turn, if they tell

    def to(self, device: torch.device | str) -> Peers:
        """Move the index tensors to ``device``."""
        serve = [s.to(device) for s in self.serve]
        return Peers(serve, self.num_src, self.group, self.prefetch, self.log, self.wire)

    def merge(self) -> OneShot:
        """Return the exchange that fetches everything at once."""
        return OneShot(self)

    def join(self, others: Sequence[Peers]) -> tuple[Peers, list[Tensor]]:
        """Return the exchange of the rows of all: own ones one after the other, then those of each worker likewise."""
        sizes = torch.tensor([other.num_src for other in others])  # by exchange and owner
        local_first = [self.rank, *(q for q in range(self.size) if q != self.rank)]
        counts = sizes[:, local_first].t()  # by owner and exchange, as the new numbers go
        starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        numbers = [
            torch.cat([torch.arange(n) + start for n, start in zip(ns.tolist(), begins.tolist(), strict=True)])
            for ns, begins in zip(counts.t(), starts.t(), strict=True)
        ]
        serve = [
            torch.cat([other.serve[p] + start for other, start in zip(others, starts[0].tolist(), strict=True)])
            for p in range(self.size)
        ]
        joined = Peers(serve, sizes.sum(0).tolist(), self.group, self.prefetch, self.log, self.wire)
        return joined, [n.to(self.serve[0].device) for n in numbers]

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return of every value the largest one on any worker."""
        device = self.serve[0].device
        return global_max(torch.tensor(list(values), dtype=torch.int64, device=device), self.group).tolist()

    def tell(self, used: Tensor) -> list[Tensor]:
        """Tell every peer which of its rows are used here, one byte each; return the own rows that each peer uses."""
        meter = Traffic().forward
        self.begin(None, meter)
        flags = self._split(used.byte())
        transfers: list[Pending] = []
        answers = [used.new_empty(len(rows), dtype=torch.uint8) for rows in self.serve]
        for q in self.others:
            client = self.client(q)
            transfers += self.swap(flags[q], q, answers[client], client, "used rows", meter)
        for transfer in transfers:
            transfer.wait()
        return [rows[answer.bool()] for rows, answer in zip(self.serve, answers, strict=True)]

    def restrict(self, used: Tensor, served: Sequence[Tensor], number: Tensor) -> Peers:
        """Return the exchange of the rows that are used here and of those that peers use, by their new numbers."""
        num_src = [int(flags.sum()) for flags in self._split(used)]
        num_src[self.rank] = int((number[: number.numel() - self.num_halo] >= 0).sum())
        serve = [number[rows].to(rows.dtype) for rows in served]
        return Peers(serve, num_src, self.group, self.prefetch, self.log, self.wire)

    def _split(self, halo: Tensor) -> tuple[Tensor, ...]:
        return halo.split([0 if q == self.rank else n for q, n in enumerate(self.num_src)])

    def begin(self, about: About | None, meter: Meter) -> None:
        """Begin another turn; tell all with whom rows are exchanged what this worker does."""
        self.turn, self.told = self.turn + 1, None
        if about is not None and guard.ON and guard.travel(self.group, self.serve[0].device):
            peers = [q for q in self.others if self.num_src[q] > 0 or len(self.serve[q]) > 0]
            with talking("starting to tell others what this worker does", self.group):
                self.told = guard.Turn(about, peers, self.group, zlib.crc32(f"{self.turn}".encode()) >> 1, meter)

    def client(self, q: int) -> int:
        """Return the worker that reads from this one at the step at which this one reads from ``q``."""
        return (2 * self.rank - q) % self.size

    def visits(self, count: int, backward: bool = False, pulls: bool = True) -> Visits:
        """Return the own shard and the others, for each part."""
        early, late = [self.rank, *self.others], [*self.others, self.rank]
        return [late if backward and (k > 0 or not pulls) else early for k in range(count)]

    def pull(
        self, parts: Iterable[Tensor], visits: Visits, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the own rows and those of every peer, for each part."""
        self.begin(about, meter)
        queue: deque[tuple[int, Tensor, list[Pending], torch.dtype]] = deque()
        for number, (x, order) in enumerate(zip(parts, visits, strict=True)):
            for q in order:
                queue.append((q, *self._fetch(q, x, number, meter), x.dtype))
                while queue and self._enough(queue):
                    yield arrived(queue)
        while queue:
            yield arrived(queue)

    def _enough(self, queue: deque[tuple[int, Tensor, list[Pending], torch.dtype]]) -> bool:
        """Whether as many blocks of others are under way as shall be while the first is consumed."""
        # Of two workers every other block is an own one, for which one more keeps the link busy.
        fewer = queue[0][0] == self.rank and self.size > 2
        return self.prefetch == 0 or sum(q != self.rank for q, *_ in queue) > self.prefetch - fewer

    def _fetch(self, q: int, x: Tensor, number: int, meter: Meter) -> tuple[Tensor, list[Pending]]:
        if q == self.rank:
            return x, []
        client = self.client(q)
        block = self.buffer(self.num_src[q], x)
        return block, self.swap(x[self.serve[client]], client, block, q, f"source rows {number}", meter)

    def buffer(self, rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for ``rows`` rows from a peer, as they travel or of another type."""
        return like.new_empty(rows, *like.shape[1:], dtype=dtype or self.travels_as(like.dtype))

    def travels_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which rows of a type travel."""
        if self.wire is None or not dtype.is_floating_point or dtype.itemsize <= self.wire.itemsize:
            return dtype
        return self.wire

    def sink(self, meter: Meter, take: Take, about: About | None = None) -> PeerSink:
        """Return the sink."""
        self.begin(about, meter)
        return PeerSink(self, meter, take)

    def tag(self, what: str, tensor: Tensor) -> int:
        """Return a number that only the same message of the same turn has.

        Workers that ran different code then wait for each other until the timeout of the group; without it gloo would
        take any bytes for the rows, or abort the process if there are too many of them.
        """
        return zlib.crc32(f"{self.turn} {what} {tensor.dtype} {list(tensor.shape)}".encode()) >> 1

    def swap(self, out: Tensor, dst: int, into: Tensor, src: int, what: str, meter: Meter) -> list[Pending]:
        """Start to send ``out`` to ``dst`` and to receive ``into`` from ``src``; nothing empty travels.

        What ``src`` does is heard before its rows are waited for.
        """
        out, landing = out.to(self.travels_as(out.dtype)), None
        if staging.is_staged(into, self.group):
            out = staging.to_host(out) if out.numel() > 0 else out
            landing = staging.Landing(into) if into.numel() > 0 else None
            into = into if landing is None else landing.host
        # gloo tells the other side that it may send through the same connection: never behind what is sent there.
        both = ((into, src, False), (out, dst, True))
        messages = [Message(t, peer, self.tag(what, t), sends) for t, peer, sends in both if t.numel() > 0]
        meter(out.numel() * out.element_size(), into.numel() * into.element_size())
        header = None if self.told is None else self.told.headers.get(src)
        found: list[Pending] = [] if header is None else [header]
        if not messages:
            return found
        with self.talking(f"starting to exchange {what} with workers {dst} and {src}"):
            works = start(messages, self.group)
        # A backend that groups transfers returns one handle for all of them.
        pairs = zip(works, messages, strict=True) if len(works) == len(messages) else [(works[0], messages[0])]
        transfers = [
            Transfer(self, work, messages, f"{'sending' if m.sends else 'receiving'} {what}, worker {m.peer}", meter)
            for work, m in pairs
        ]
        if landing is not None:
            transfers[0].landing = landing  # receiving comes first
        return [*found, *transfers]

    @contextmanager
    def talking(self, doing: str) -> Iterator[None]:
        """Say what has happened when the other workers do not answer."""
        try:
            with talking(doing, self.group):
                yield
        except RuntimeError as error:
            if self.told is not None:
                self.told.explain(error)
            raise


@dataclass
class Transfer:
    """One message under way; keeps its memory alive until it has arrived."""

    peers: Peers
    work: Any
    messages: list[Message]
    doing: str
    meter: Meter
    landing: staging.Landing | None = None

    def wait(self) -> None:
        """Return when the message has arrived."""
        start = time.perf_counter()
        with self.peers.talking(self.doing):
            self.work.wait()
        self.meter(wait=time.perf_counter() - start)
        if self.landing is not None:
            self.landing.finish()
        self.messages, self.landing = [], None


Pending = Transfer | guard.Header


def arrived(queue: deque[tuple[int, Tensor, list[Pending], torch.dtype]]) -> tuple[int, Tensor]:
    """Wait for the oldest transfer and return what came, in the type it had, keeping no reference to it."""
    q, block, transfers, dtype = queue.popleft()
    for transfer in transfers:
        transfer.wait()
    return q, block.to(dtype)


class PeerSink:
    """Sends gradients home while the next block is computed; drains as deep as the pull is prefetched."""

    def __init__(self, peers: Peers, meter: Meter, take: Take) -> None:
        self.peers, self.meter, self.take = peers, meter, take
        self.totals: dict[int, tuple[Tensor, int]] = {}  # of own rows, by part, and how many gradients are missing
        self.queue: deque[tuple[int, Tensor, list[Pending], torch.dtype]] = deque()
        self.pushed = self.drained = 0

    def push(self, q: int, grad: Tensor) -> None:
        """Send the gradient of the rows of worker ``q`` home."""
        peers, part = self.peers, self.pushed // self.peers.size
        self.pushed += 1
        if q == peers.rank:
            self._add(part, grad, None)
            return
        client, what = peers.client(q), f"gradients {part}"
        into = peers.buffer(len(peers.serve[client]), grad)
        transfers = peers.swap(grad.contiguous(), q, into, client, what, self.meter)
        self.queue.append((client, into, transfers, grad.dtype))
        if len(self.queue) > peers.prefetch:
            self._drain()

    def _drain(self) -> None:
        client, grad = arrived(self.queue)
        self._add(self.drained // (self.peers.size - 1), grad, self.peers.serve[client])
        self.drained += 1

    def _add(self, part: int, grad: Tensor, rows: Tensor | None) -> None:
        """Add to some of the own rows, or to all of them."""
        total, missing = self.totals.pop(part, (None, self.peers.size))
        if total is None and rows is None:
            total = grad
        elif total is None:
            total = grad.new_zeros(self.peers.num_src[self.peers.rank], *grad.shape[1:])
        elif rows is None:
            total += grad
        if rows is not None:
            total.index_add_(0, rows, grad)
        if missing > 1:
            self.totals[part] = total, missing - 1
        else:
            self.take(part, total)

    def close(self) -> None:
        """Wait for what is under way."""
        while self.queue:
            self._drain()


class OneShot:
    """Fetches the rows of all peers at once: the own rows come first, then the others by owner (local-first)."""

    def __init__(self, peers: Peers) -> None:
        self.peers, self.log, self.num_halo, self.alone = peers, peers.log, peers.num_halo, peers.alone
        ends = torch.tensor([n if q != peers.rank else 0 for q, n in enumerate(peers.num_src)]).cumsum(0).tolist()
        self.spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def to(self, device: torch.device | str) -> OneShot:
        """Move the index tensors to ``device``."""
        return OneShot(self.peers.to(device))

    def merge(self) -> OneShot:
        """Return itself."""
        return self

    def join(self, others: Sequence[OneShot]) -> tuple[OneShot, list[Tensor]]:
        """Return the exchange of the rows of all."""
        joined, numbers = self.peers.join([other.peers for other in others])
        return OneShot(joined), numbers

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return of every value the largest one on any worker."""
        return self.peers.largest(values)

    def tell(self, used: Tensor) -> list[Tensor]:
        """Tell every peer which of its rows are used here."""
        return self.peers.tell(used)

    def restrict(self, used: Tensor, served: Sequence[Tensor], number: Tensor) -> OneShot:
        """Return the exchange of the rows that are used."""
        return OneShot(self.peers.restrict(used, served, number))

    def visits(self, count: int, backward: bool = False, pulls: bool = True) -> Visits:
        """Return the single piece, for each part."""
        return [(0,)] * count

    def pull(
        self, parts: Iterable[Tensor], visits: Visits, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the own rows and those of all peers as one piece."""
        for number, x in enumerate(parts):
            yield 0, self._fetch(x, meter, about if number == 0 else None)

    def _fetch(self, x: Tensor, meter: Meter, about: About | None) -> Tensor:
        peers, n = self.peers, x.size(0)
        peers.begin(about, meter)
        rows = peers.buffer(n + self.num_halo, x, x.dtype)
        rows[:n] = x
        halo = rows[n:] if peers.travels_as(x.dtype) == x.dtype else peers.buffer(self.num_halo, x)
        transfers: list[Pending] = []
        for q in peers.others:
            client = peers.client(q)
            transfers += peers.swap(x[peers.serve[client]], client, halo[self.spans[q]], q, "source rows", meter)
        for transfer in transfers:
            transfer.wait()
        if halo.dtype != rows.dtype:
            rows[n:] = halo
        return rows

    def sink(self, meter: Meter, take: Take, about: About | None = None) -> OneShotSink:
        """Return the sink."""
        return OneShotSink(self, meter, take, about)


class OneShotSink:
    """Sends all gradients home at once."""

    def __init__(self, exchange: OneShot, meter: Meter, take: Take, about: About | None) -> None:
        self.exchange, self.meter, self.take, self.about, self.part = exchange, meter, take, about, 0

    def push(self, q: int, grad: Tensor) -> None:
        """Take the gradients of the own rows and of all others."""
        peers, n = self.exchange.peers, grad.size(0) - self.exchange.num_halo
        peers.begin(self.about if self.part == 0 else None, self.meter)
        own = grad[:n].clone()  # or the rows of others would live as long
        halo = grad[n:].contiguous()
        pending = []
        for q in peers.others:
            client = peers.client(q)
            into = peers.buffer(len(peers.serve[client]), own)
            out = halo[self.exchange.spans[q]]
            pending.append((client, into, peers.swap(out, q, into, client, "gradients", self.meter)))
        for client, into, transfers in pending:
            for transfer in transfers:
                transfer.wait()
            own.index_add_(0, peers.serve[client], into.to(own.dtype))
        self.take(self.part, own)
        self.part += 1

    def close(self) -> None:
        """Do nothing: all is taken."""


def record_traffic(edge_index: Any) -> AbstractContextManager[list[Traffic]]:
    """Count what every layer sends and receives, see :class:`Traffic`; an aggregate that is kept has no record.

    .. code-block:: python

        with pyg_sar.record_traffic(data.edge_index) as layers:
            model(data.x, data.edge_index).sum().backward()
        print(layers[0].forward_received)

    Args:
        edge_index (ShardedEdgeIndex): The sharded graph on which the layers run, in any mode.
    """
    return edge_index.graph.exchange.log.record()
