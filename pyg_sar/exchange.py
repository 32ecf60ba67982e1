r"""Where source rows live and how they are communicated: what the streaming loop knows of it, whatever lies behind.

:class:`Exchange` has the verbs. :class:`Local` is the exchange of rows that are all in this process;
:class:`~pyg_sar.distributed.peers.Peers` and :class:`~pyg_sar.distributed.peers.OneShot` are those of several workers;
:class:`~pyg_sar.offload.chunks.AtHome` reads rows at home, and :class:`~pyg_sar.distributed.history.ChunkExchange`
the rows of other chunks of a pipeline.
Source rows are numbered *local-first*: a worker's local rows are :math:`0 \ldots n - 1`, the halo rows follow, grouped
by owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_sar.block import Index, length, renumber
from pyg_sar.distributed.traffic import Log
from pyg_sar.running import About

Schedule = Sequence[Sequence[int]]  # for each column tile, the source shards in the order in which they are visited


class Meter(Protocol):
    """Counts bytes that were sent, received, loaded from home and stored there, and seconds of waiting."""

    def __call__(
        self, sent: int = 0, received: int = 0, wait: float = 0.0, loaded: int = 0, stored: int = 0
    ) -> None:  # fmt: skip
        """Add to what was counted."""


class Receiver(Protocol):
    """Takes the gradients of local source rows."""

    def add_grad(self, tile: int, grad: Tensor) -> None:
        """Take the complete gradient of the local rows of a column tile; each tile comes once, in order."""


class Sink:
    """Sends the gradients of source rows to their owners."""

    def push(self, q: int, grad: Tensor) -> None:
        """Send the gradient of the rows of shard ``q``; the sink may keep and change it."""

    def close(self) -> None:
        """Wait until all gradients of local rows are complete, and the receiver has them: most need not wait."""


@dataclass(frozen=True, eq=False)
class Routes:
    """Who reads which rows.

    Args:
        rank: The number of this worker.
        serve: ``serve[p]`` are the local rows that worker ``p`` reads; empty for oneself.
        num_src: ``num_src[q]`` is how many rows this worker reads from worker ``q``; of itself, all local rows.
        shards: The rows of each source shard, if a single process has cut its rows; else each worker is a shard.
    """

    rank: int
    serve: tuple[Tensor, ...]
    num_src: tuple[int, ...]
    shards: tuple[Index, ...] = ()

    @classmethod
    def local(cls, shards: Sequence[Index], device: torch.device | str = "cpu") -> Routes:
        """Return the routes of a single process, whose rows are cut into shards."""
        nobody = torch.empty(0, dtype=torch.int64, device=device)
        return cls(0, (nobody,), (sum(map(length, shards)),), tuple(shards))

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.num_src)

    @property
    def num_halo(self) -> int:
        """Number of rows that other workers own."""
        return sum(self.num_src) - self.num_src[self.rank]

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.serve[0].device

    @cached_property
    def others(self) -> list[int]:
        """All other workers, in the order in which this one reads from them."""
        return [(self.rank + t) % self.size for t in range(1, self.size)]

    def client(self, q: int) -> int:
        """Return the worker that reads from this one at the step at which this one reads from ``q``."""
        return (2 * self.rank - q) % self.size

    @cached_property
    def spans(self) -> list[slice]:
        """Where the rows of each worker are among the halo rows; nowhere those of this one."""
        ends = accumulate((0 if q == self.rank else n for q, n in enumerate(self.num_src)), initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]

    @cached_property
    def ids(self) -> list[slice]:
        """Local-first numbers of the rows of each worker."""
        n = self.num_src[self.rank]
        ids = [slice(n + span.start, n + span.stop) for span in self.spans]
        ids[self.rank] = slice(0, n)
        return ids

    def to(self, device: torch.device | str) -> Routes:
        """Move the index tensors to ``device``."""
        serve = tuple(rows.to(device) for rows in self.serve)
        shards = tuple(ids.to(device) if isinstance(ids, Tensor) else ids for ids in self.shards)
        return Routes(self.rank, serve, self.num_src, shards)

    def join(self, others: Sequence[Routes]) -> tuple[Routes, list[Tensor]]:
        """Return the routes of the rows of all, those of each worker one after the other, and what numbers the rows of
        each (local-first) have there.
        """
        num_src = tuple(sum(counts) for counts in zip(*(other.num_src for other in others), strict=True))
        starts = [ids.start for ids in Routes(self.rank, (), num_src).ids]
        serve, numbers = [], []
        for other in others:
            number = torch.empty(sum(other.num_src), dtype=torch.int64, device=self.device)
            for ids, start, n in zip(other.ids, starts, other.num_src, strict=True):
                number[ids] = torch.arange(start, start + n, device=self.device)
            numbers.append(number)
            serve.append([rows + starts[self.rank] for rows in other.serve])
            starts = [start + n for start, n in zip(starts, other.num_src, strict=True)]
        served = tuple(torch.cat(rows) for rows in zip(*serve, strict=True))
        pieces = zip(*(other.shards for other in others), strict=True)
        shards = [torch.cat([number[i] for number, i in zip(numbers, piece, strict=True)]) for piece in pieces]
        all_rows = torch.arange(sum(num_src), device=self.device)
        return Routes(self.rank, served, num_src, tuple(renumber(ids, all_rows) for ids in shards)), numbers

    def restrict(self, used: Tensor, served: Sequence[Tensor], number: Tensor) -> Routes:
        """Return the routes of the rows that are used here and of those that others use, see :class:`Exchange`."""
        num_src = [int(used[span].sum()) for span in self.spans]
        num_src[self.rank] = int((number[: self.num_src[self.rank]] >= 0).sum())
        serve = tuple(number[rows].to(rows.dtype) for rows in served)
        return Routes(self.rank, serve, tuple(num_src), tuple(renumber(ids, number) for ids in self.shards))


class Exchange(Protocol):
    """Gives a layer the source rows of each block, and sends their gradients to the owners.

    All workers call ``pull``, ``sink``, ``all_reduce_max`` and ``exchange_used_rows`` together and alike.

    Args:
        routes: Who reads which rows.
        log: Collects what every aggregation sends and receives.
        group: The workers, as collective operations take them.
    """

    routes: Routes
    log: Log
    group: Any
    remembers: bool = False  # whether rows may be those of an earlier epoch, and then constants

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return self.routes.size == 1

    def begin(self) -> Exchange:
        """Return the exchange of one aggregation, in its forward and its backward pass: most are that of all."""
        return self

    def order(self, tiles: int, backward: bool = False, fetches: bool = True) -> Schedule:
        """Return in which order source shards are visited.

        Args:
            tiles: The number of column tiles.
            backward: Whether gradients are pushed in this order.
            fetches: Whether rows are pulled in this order.
        """

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Return an iterator over ``(q, x_q)``, the rows of shard ``q`` that this worker reads, of one tile after the
        other, without a pause between tiles.

        The iterator keeps no rows that it gave away: one block more would be alive while the next one is fetched.

        Args:
            tiles: The local rows, :math:`(n, *)`, of each column tile, which may be made when they are asked for.
            order: The order of :meth:`order`.
            meter: Counts.
            about: What this worker is about; where others are about something else, all raise.
        """

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> Sink:
        """Return what takes the gradients of the rows, pushed in the order of :meth:`order`, adds them up at their
        owners, and hands ``receiver`` those of local rows as soon as they are complete, at the latest in ``close()``.
        """

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return of every value the largest one on any worker."""

    def exchange_used_rows(self, used: Tensor) -> list[Tensor]:
        """Tell every owner which of the halo rows are used here, :math:`(n_{halo})` booleans in local-first order;
        return the local rows that each worker uses.
        """

    def restrict(self, used: Tensor, served: Sequence[Tensor], number: Tensor) -> Exchange:
        """Return the exchange of some of the rows.

        Args:
            used: Which halo rows are used here.
            served: The local rows that each worker uses, as :meth:`exchange_used_rows` returns them.
            number: The new number of every row, negative for those that are left out.
        """
        return self.reroute(self.routes.restrict(used, served, number))

    def join(self, others: Sequence[Exchange]) -> tuple[Exchange, list[Tensor]]:
        """Return the exchange of the rows of all, and what numbers the rows of each (local-first) have there."""
        routes, numbers = self.routes.join([other.routes for other in others])
        return self.reroute(routes), numbers

    def to(self, device: torch.device | str) -> Exchange:
        """Move the index tensors to ``device``."""
        return self.reroute(self.routes.to(device))

    def reroute(self, routes: Routes, exact: bool = False) -> Exchange:
        """Return the same exchange of other rows; if ``exact``, these are communicated in their own type."""

    def one_shot(self) -> Exchange:
        """Return the exchange of the same rows that fetches all of them at once, as a single shard."""


class Local(Exchange):
    """All source rows live in this process, which has cut them into shards.

    Args:
        routes: What :meth:`Routes.local` returns.
        log: Collects what every aggregation does.
    """

    def __init__(self, routes: Routes, log: Log | None = None) -> None:
        self.routes, self.log, self.group = routes, log or Log(), None

    def one_shot(self) -> Local:
        """Return the exchange with all rows in one shard."""
        return self.reroute(Routes.local([slice(0, self.routes.num_src[0])], self.routes.device))

    def reroute(self, routes: Routes, exact: bool = False) -> Local:
        """Return the exchange of other rows."""
        return Local(routes, self.log)

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    def exchange_used_rows(self, used: Tensor) -> list[Tensor]:
        """Return nothing for oneself: there are no others."""
        return list(self.routes.serve)

    def order(self, tiles: int, backward: bool = False, fetches: bool = True) -> Schedule:
        """Return the shards in their order."""
        return [range(len(self.routes.shards))] * tiles

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield every shard of every tile."""
        for x, shards in zip(tiles, order, strict=True):
            for q in shards:
                yield q, x[self.routes.shards[q]]

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> Sink:
        """Return the sink."""
        return LocalSink(self.routes, receiver)


class LocalSink(Sink):
    """Adds the gradients of every shard; those of a single one are the sum.

    Args:
        routes: What :meth:`Routes.local` returns.
        receiver: Takes the sums.
    """

    def __init__(self, routes: Routes, receiver: Receiver) -> None:
        self.num_rows, self.shards, self.receiver, self.tile = routes.num_src[0], routes.shards, receiver, 0
        self.total: Tensor | None = None

    def push(self, q: int, grad: Tensor) -> None:
        """Add the gradient of shard ``q``, which holds a row once."""
        if len(self.shards) > 1:
            if self.total is None:
                self.total = grad.new_zeros(self.num_rows, *grad.shape[1:])
            self.total[self.shards[q]] += grad
            grad = self.total
        if q == len(self.shards) - 1:
            self.receiver.add_grad(self.tile, grad)
            self.tile, self.total = self.tile + 1, None
