r"""Halo rows at home: they are fetched once for each aggregation, before its first chunk, and their gradients are sent
to the owners once, behind the last one.

So a row crosses the network once for each worker that reads it, however many chunks do, and workers need not walk their
chunks in step. HongTu, whose workers share one host's memory, sends rows with every batch of chunks instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.distributed.peers import Remote
from pyg_sar.distributed.transfer import UnderWay, wait_for
from pyg_sar.exchange import Exchange, Meter, Routes
from pyg_sar.offload.home import Home
from pyg_sar.reduce.base import columns
from pyg_sar.running import About

PARTS = 8  # of rows that are added across the bus
MESSAGE = 2**18  # bytes of rows, of which four are in memory: two that leave and two that come


class SourceRows:
    """What chunks read of an input, or its gradient: local rows, and behind them those of others.

    Args:
        local: The local rows, :math:`(n, *)`.
        halo: The halo rows, :math:`(n_{halo}, *)`, grouped by owner; None if there are no other workers.
    """

    def __init__(self, local: Tensor, halo: Tensor | None) -> None:
        self.local, self.halo = local, halo

    def split(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some ascending numbers are those of local rows, and of halo rows."""
        n = self.local.size(0)
        end = int(torch.searchsorted(index, n))
        return index[:end], index[end:] - n

    def select(self, index: Tensor) -> Tensor:
        """Return some rows."""
        index = index.to(self.local.device)
        if self.halo is None:
            return self.local.index_select(0, index)
        out = self.local.new_empty(len(index), *self.local.shape[1:])
        local, halo = self.split(index)
        torch.index_select(self.local, 0, local, out=out[: len(local)])
        torch.index_select(self.halo, 0, halo, out=out[len(local) :])
        return out

    def add(self, index: Tensor, rows: Tensor) -> None:
        """Add to some rows, each of which occurs once."""
        index, rows = index.to(self.local.device), rows.to(self.local.device, self.local.dtype)
        if self.halo is None:
            add_to(self.local, index, rows)
            return
        local, halo = self.split(index)
        add_to(self.local, local, rows[: len(local)])
        add_to(self.halo, halo, rows[len(local) :])

    def seen(self, home: Home) -> SourceRows:
        """Return the same rows as a device sees them, if it sees all of them."""
        local, halo = (None if t is None else home.seen(t) for t in (self.local, self.halo))
        if local is not None and self.halo is not None and not self.halo.numel():
            halo = local.new_empty(self.halo.shape)
        return self if local is None or (halo is None) != (self.halo is None) else SourceRows(local, halo)

    def columns(self, which: slice) -> SourceRows:
        """Return some columns."""
        return SourceRows(columns(self.local, which), None if self.halo is None else columns(self.halo, which))


def add_to(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add to some rows, each of which occurs once, of the host or as a device sees them."""
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:
        add_across(total, index, rows)


def add_across(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Fetch rows, add to them, and write them, a part at a time: what a GPU adds to memory by itself does not cross the
    bus.
    """
    for some, more in zip(index.chunk(PARTS), rows.chunk(PARTS), strict=True):
        total.index_copy_(0, some, total.index_select(0, some).add_(more))


class Part(NamedTuple):
    """Rows that are exchanged in one message with each of two workers.

    Args:
        number: Of the message.
        owner: The worker whose rows are read here.
        client: The worker that reads rows of this one meanwhile.
        halo: The rows of the owner, among the halo rows.
        local: The rows that the client reads.
    """

    number: int
    owner: int
    client: int
    halo: slice
    local: Tensor


def parts(routes: Routes, row: int) -> Iterator[Part]:
    """Yield what is exchanged in each message of rows that take ``row`` bytes."""
    size = max(MESSAGE // max(row, 1), 1)
    for owner in routes.others:
        client, span = routes.client(owner), routes.spans[owner]
        serve = routes.serve[client]
        for k, at in enumerate(range(0, max(len(serve), span.stop - span.start), size)):
            begin, end = (min(span.start + i, span.stop) for i in (at, at + size))
            yield Part(k, owner, client, slice(begin, end), serve[at : at + size])


def fetch_halo(rows: Tensor, home: Home, exchange: Exchange, meter: Meter, about: About | None = None) -> SourceRows:
    """Return local rows and, at home, the halo rows; all workers call it together."""
    if exchange.alone:
        return SourceRows(rows, None)
    halo = home.empty((exchange.routes.num_halo, *rows.shape[1:]), rows.dtype)

    def send(part: Part) -> Any:
        out = rows.index_select(0, part.local)
        meter(loaded=out.nbytes)
        return out, part.client, part.owner, part.halo.stop - part.halo.start

    def take(part: Part, found: Tensor) -> None:
        halo[part.halo] = found
        meter(stored=found.nbytes)
        home.wrote(halo, part.halo.start, part.halo.stop)

    swap(exchange, rows, "source rows", send, take, meter, about)
    return SourceRows(rows, halo)


def sum_halo(grads: SourceRows, exchange: Exchange, meter: Meter) -> None:
    """Send the gradients of halo rows to their owners, and add to the local ones what others send."""
    if grads.halo is None:
        return
    total, halo = grads.local, grads.halo

    def send(part: Part) -> Any:
        out = halo[part.halo]
        meter(loaded=out.nbytes)
        return out, part.owner, part.client, len(part.local)

    def take(part: Part, found: Tensor) -> None:
        total.index_add_(0, part.local, found.to(total.dtype))
        meter(loaded=found.nbytes, stored=found.nbytes)

    swap(exchange, total, "gradients", send, take, meter, None)


def swap(
    exchange: Exchange, like: Tensor, what: str, send: Callable[[Part], Any], take: Callable[[Part, Tensor], None],
    meter: Meter, about: About | None,
) -> None:  # fmt: skip
    """Send and receive rows like ``like``, message by message, the next ones while one is taken: ``send`` returns what
    to send, whom to, whom to receive from, and how many rows; ``take`` takes these.
    """
    assert isinstance(exchange, Remote)
    channel = exchange.channel
    queue: deque[tuple[Part, Tensor, list[UnderWay]]] = deque()
    exchange.begin_turn(about, meter)

    def arrive() -> None:
        part, into, transfers = queue.popleft()
        wait_for(transfers)
        take(part, into)

    for part in parts(exchange.routes, math.prod(like.shape[1:]) * like.itemsize):
        out, dst, src, count = send(part)
        into = channel.buffer(count, like)
        queue.append((part, into, channel.swap(out, dst, into, src, f"{what} {part.number}", meter)))
        if len(queue) > 1:
            arrive()
    while queue:
        arrive()
