r"""Exchanges between workers, of which each owns some of the rows.

:class:`Peers` runs the pairwise shift schedule: at step :math:`t` worker :math:`p` reads from :math:`p + t` and serves
:math:`p - t`. Its local shard comes first, so that local work hides the first transfer, but in backward last wherever
another transfer is under way already, so that it hides the gradients of the shard before::

    step     0     1     2     3          prefetch = 1: the next halo rows arrive while some are consumed, so that
    rank 0   0     1     2     3          at most prefetch + 1 of them are alive; after the last one follows the first
    rank 1   1     2     3     0          one of the next column tile.
    rank 2   2     3     0     1
    rank 3   3     0     1     2

:class:`OneShot` fetches the halo rows of all workers at once (mode 3, as domain-parallel training does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pyg_sar.distributed.collectives import global_max
from pyg_sar.distributed.traffic import Log, Traffic
from pyg_sar.distributed.transfer import Channel, UnderWay, wait_for
from pyg_sar.exchange import Exchange, Meter, Receiver, Routes, Schedule, Sink
from pyg_sar.running import About


class Remote(Exchange):
    """What exchanges between workers share; ``prefetch`` fetches are under way while a block is consumed."""

    def __init__(self, routes: Routes, channel: Channel, prefetch: int = 1, log: Log | None = None) -> None:
        self.routes, self.channel, self.prefetch, self.log = routes, channel, prefetch, log or Log()
        self.group = channel.group

    def begin_turn(self, about: About | None, meter: Meter) -> None:
        """Tell all with whom rows are exchanged what this worker does."""
        it = self.routes
        peers = [q for q in it.others if it.num_src[q] > 0 or len(it.serve[q]) > 0]
        self.channel.begin(about, peers, it.device, meter)

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return of every value the largest one on any worker."""
        device = self.routes.device
        return global_max(torch.tensor(list(values), dtype=torch.int64, device=device), self.group).tolist()

    def exchange_used_rows(self, used: Tensor) -> list[Tensor]:
        """Tell each worker which of its rows are used here, one byte each; return the local rows that each one uses."""
        routes, meter = self.routes, Traffic().forward
        self.begin_turn(None, meter)
        flags = used.byte()
        transfers: list[UnderWay] = []
        answers = [used.new_empty(len(rows), dtype=torch.uint8) for rows in routes.serve]
        for q in routes.others:
            client = routes.client(q)
            out = flags[routes.spans[q]]
            transfers += self.channel.swap(out, q, answers[client], client, "used rows", meter)
        wait_for(transfers)
        return [rows[answer.bool()] for rows, answer in zip(routes.serve, answers, strict=True)]

    def reroute(self, routes: Routes, exact: bool = False) -> Exchange:
        """Return the same exchange of other rows; both count their turns together, so that workers need not make it at
        the same time.
        """
        channel = Channel(self.group) if exact and self.channel.comm_dtype is not None else self.channel
        return type(self)(routes, channel, self.prefetch, self.log)

    def one_shot(self) -> Exchange:
        """Return the exchange that fetches everything at once."""
        return OneShot(self.routes, self.channel, self.prefetch, self.log)


Queue = deque[tuple[int, Tensor, list[UnderWay], torch.dtype]]  # blocks under way, and the type of their rows


def arrived(queue: Queue) -> tuple[int, Tensor]:
    """Wait for the oldest transfer and return what came, in the type it had, keeping no reference to it."""
    q, block, transfers, dtype = queue.popleft()
    wait_for(transfers)
    return q, block.to(dtype)


class Peers(Remote):
    """Fetches the rows of one worker after the other."""

    def order(self, tiles: int, backward: bool = False, fetches: bool = True) -> Schedule:
        """Return the local shard and the others, for each tile."""
        rank, others = self.routes.rank, self.routes.others
        early, late = [rank, *others], [*others, rank]
        return [late if backward and (k > 0 or not fetches) else early for k in range(tiles)]

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the local rows and those of every worker, for each tile."""
        self.begin_turn(about, meter)
        queue: Queue = deque()
        for tile, (x, shards) in enumerate(zip(tiles, order, strict=True)):
            for q in shards:
                queue.append((q, *self._fetch(q, x, tile, meter), x.dtype))
                while queue and self._enough(queue):
                    yield arrived(queue)
        while queue:
            yield arrived(queue)

    def _enough(self, queue: Queue) -> bool:
        """Whether as many blocks of others are under way as shall be while the first is consumed."""
        # Of two workers every other block is the local one: one more under way meanwhile, or the link would idle.
        rank = self.routes.rank
        fewer = queue[0][0] == rank and self.routes.size > 2
        return self.prefetch == 0 or sum(q != rank for q, *_ in queue) > self.prefetch - fewer

    def _fetch(self, q: int, x: Tensor, tile: int, meter: Meter) -> tuple[Tensor, list[UnderWay]]:
        routes = self.routes
        if q == routes.rank:
            return x, []
        client = routes.client(q)
        block = self.channel.buffer(routes.num_src[q], x)
        return block, self.channel.swap(x[routes.serve[client]], client, block, q, f"source rows {tile}", meter)

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> Sink:
        """Return the sink."""
        self.begin_turn(about, meter)
        return PeerSink(self, meter, receiver)


class PeerSink(Sink):
    """Sends gradients to their owners while the next block is computed; drains as deep as the pull is prefetched."""

    def __init__(self, peers: Peers, meter: Meter, receiver: Receiver) -> None:
        self.peers, self.routes, self.meter, self.receiver = peers, peers.routes, meter, receiver
        self.totals: dict[int, tuple[Tensor, int]] = {}  # of local rows, by tile, and how many gradients are missing
        self.queue: Queue = deque()
        self.pushed = self.drained = 0

    def push(self, q: int, grad: Tensor) -> None:
        """Send the gradient of the rows of worker ``q``."""
        routes, channel, tile = self.routes, self.peers.channel, self.pushed // self.routes.size
        self.pushed += 1
        if q == routes.rank:
            self._add(tile, grad, None)
            return
        client, what = routes.client(q), f"gradients {tile}"
        into = channel.buffer(len(routes.serve[client]), grad)
        transfers = channel.swap(grad, q, into, client, what, self.meter)
        self.queue.append((client, into, transfers, grad.dtype))
        if len(self.queue) > self.peers.prefetch:
            self._drain()

    def _drain(self) -> None:
        client, grad = arrived(self.queue)
        self._add(self.drained // (self.routes.size - 1), grad, self.routes.serve[client])
        self.drained += 1

    def _add(self, tile: int, grad: Tensor, rows: Tensor | None) -> None:
        """Add to some of the local rows, or to all of them."""
        total, missing = self.totals.pop(tile, (None, self.routes.size))
        if total is None and rows is None:
            total = grad
        elif total is None:
            total = grad.new_zeros(self.routes.num_src[self.routes.rank], *grad.shape[1:])
        elif rows is None:
            total += grad
        if rows is not None:
            total.index_add_(0, rows, grad)
        if missing > 1:
            self.totals[tile] = total, missing - 1
        else:
            self.receiver.add_grad(tile, total)

    def close(self) -> None:
        """Wait for what is under way."""
        while self.queue:
            self._drain()


class OneShot(Remote):
    """Fetches the rows of all workers at once: local rows come first, then the others by owner (local-first)."""

    def one_shot(self) -> OneShot:
        """Return itself."""
        return self

    def order(self, tiles: int, backward: bool = False, fetches: bool = True) -> Schedule:
        """Return the single shard, for each tile."""
        return [(0,)] * tiles

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the local rows and those of all workers as one shard."""
        for tile, x in enumerate(tiles):
            yield 0, self._fetch(x, meter, about if tile == 0 else None)

    def _fetch(self, x: Tensor, meter: Meter, about: About | None) -> Tensor:
        routes, channel, n = self.routes, self.channel, x.size(0)
        self.begin_turn(about, meter)
        rows = channel.buffer(n + routes.num_halo, x, x.dtype)
        rows[:n] = x
        halo = rows[n:] if channel.sent_as(x.dtype) == x.dtype else channel.buffer(routes.num_halo, x)
        transfers: list[UnderWay] = []
        for q in routes.others:
            client = routes.client(q)
            out, into = x[routes.serve[client]], halo[routes.spans[q]]
            transfers += channel.swap(out, client, into, q, "source rows", meter)
        wait_for(transfers)
        if halo.dtype != rows.dtype:
            rows[n:] = halo
        return rows

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> Sink:
        """Return the sink."""
        return OneShotSink(self, meter, receiver, about)


class OneShotSink(Sink):
    """Sends all gradients to their owners at once."""

    def __init__(self, exchange: OneShot, meter: Meter, receiver: Receiver, about: About | None) -> None:
        self.exchange, self.meter, self.receiver, self.about, self.tile = exchange, meter, receiver, about, 0

    def push(self, q: int, grad: Tensor) -> None:
        """Take the gradients of the local rows and of all others."""
        routes, channel = self.exchange.routes, self.exchange.channel
        n = grad.size(0) - routes.num_halo
        self.exchange.begin_turn(self.about if self.tile == 0 else None, self.meter)
        own = grad[:n].clone()  # or the halo rows would live as long
        halo = grad[n:].contiguous()
        pending = []
        for q in routes.others:
            client = routes.client(q)
            into, out = channel.buffer(len(routes.serve[client]), own), halo[routes.spans[q]]
            pending.append((client, into, channel.swap(out, q, into, client, "gradients", self.meter)))
        for client, into, transfers in pending:
            wait_for(transfers)
            own.index_add_(0, routes.serve[client], into.to(own.dtype))
        self.receiver.add_grad(self.tile, own)
        self.tile += 1
