r"""Chunks that come one after the other, and read rows of later chunks as an earlier epoch left them: the histories of
the `"GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism" <https://arxiv.org/abs/2308.10087>`_ paper.

To a chunk of destinations other chunks are what other workers are to a worker: rows that live elsewhere. So a chunk is
a :class:`~pyg_sar.graph.ShardedGraph` with two blocks, the edges within the chunk and all others, and what it reads of
others comes from its exchange. A *site* is one aggregation of a block of the model. It knows, for all source rows of
this worker (its own, and those that it reads of the other workers of its stage)::

    fresh     the rows of this epoch, as far as chunks have passed
    history   the rows of an earlier epoch, constants
    grad      the gradients of fresh rows that chunks left which came later

    chunk k, forward:   fresh[k] = its rows; send those that others read, receive theirs of chunk k
                        read fresh rows of chunks that came before, and history of those that will come
    chunk k, backward:  (in reverse order) grad[reads] += gradient of what was read; the gradient of its rows is
                        complete, since all that read them as fresh ones came later: + grad[k] + those of others

What lands in ``grad`` of later chunks is the gradient of history, which is none: nobody reads it there any more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from pyg_sar import running
from pyg_sar.block import cut, rows_at
from pyg_sar.distributed.group import rank_of
from pyg_sar.distributed.peers import Remote
from pyg_sar.distributed.transfer import wait_for
from pyg_sar.exchange import Local, Meter, Receiver, Routes, Schedule, Sink
from pyg_sar.graph import Seeds, ShardedGraph, SomeIds
from pyg_sar.halo import fetch_halo
from pyg_sar.running import About


@dataclass
class SiteRows:
    """What a site knows of one column tile, ``[N + N_halo, F]`` each.

    Args:
        fresh: The rows of this epoch.
        history: Those of an earlier one; None before there is one.
        grad: Gradients that are not handed on yet; None before the first.
    """

    fresh: Tensor
    history: Tensor | None = None
    grad: Tensor | None = None


Site = list[SiteRows]  # what one aggregation of a block knows, by column tile


@dataclass(frozen=True, eq=False)
class PipelineChunk:
    """Some destinations, and what they read.

    Args:
        number: Its number; the chunks of other workers with this number come at the same time.
        span: Its range of rows.
        graph: Their in-edges: those within the chunk, and all others.
        edges: Where the worker's edge tensors hold them.
        reads: The local-first numbers of the rows of other chunks that it reads, ascending.
        serves: For each worker, the rows of the chunk that it reads, numbered from its first row.
        halo: For each worker, which rows of its chunk of this number are read here, as local-first numbers.
    """

    number: int
    span: slice
    graph: ShardedGraph
    edges: Tensor
    reads: Tensor
    serves: list[Tensor]
    halo: list[slice]


class History:
    """The rows of all sites of a stage, and which of them are fresh.

    Args:
        graph: This worker's share of the graph.
        ranges: The chunks, ranges of its rows; as many on each worker.
    """

    def __init__(self, graph: ShardedGraph, ranges: Sequence[tuple[int, int]]) -> None:
        self.graph = graph
        self.peers = graph.exchange if isinstance(graph.exchange, Remote) else None
        own = torch.empty(graph.num_src, 1, dtype=torch.int64)
        for k, (start, end) in enumerate(ranges):
            own[start:end] = k
        self.chunk_of = fetch_halo(own, graph).view(-1)
        self.sites: dict[tuple[int, int], Site] = {}
        self.place = torch.zeros(len(ranges), dtype=torch.int64)  # of each chunk in the order of this epoch
        self.stale: dict[int, Tensor] = {}  # of each chunk in this epoch
        self.in_chunks = False  # whether this epoch reads history
        self.block = self.call = 0
        self.chunks = [self.make(k, *span) for k, span in enumerate(ranges)]
        self.whole = self.make(None, 0, graph.num_src)

    def make(self, number: int | None, start: int, end: int) -> PipelineChunk:
        """Return a chunk, or all rows as a single one."""
        part, routes = self.graph.rows(start, end), self.graph.exchange.routes
        assert isinstance(part.e_id, SomeIds)
        source, row = part.coo()
        within = (source >= start) & (source < end)
        read = torch.zeros(len(self.chunk_of), dtype=torch.bool)
        read[source[~within]] = True
        reads = read.nonzero().view(-1)
        numbers = torch.empty(len(read), dtype=torch.int64)
        numbers[reads] = torch.arange(len(reads)) + end - start
        numbers[start:end] = torch.arange(end - start)
        places = [slice(0, end - start), slice(end - start, end - start + len(reads))]
        blocks = cut(torch.stack([numbers[source], row]), (~within).long(), places, end - start)
        serves = [rows[spanned(rows, start, end)].long() - start for rows in routes.serve]
        halo = [ids if number is None else self.of_chunk(ids, number) for ids in routes.ids]
        nobody = torch.empty(0, dtype=torch.int64)
        exchange = ChunkExchange(self, Routes(0, (nobody, nobody), (end - start, len(reads))))
        n_id = self.graph.n_id
        it = PipelineChunk(
            0 if number is None else number, slice(start, end),
            part.replace(
                blocks=blocks, num_src=end - start, dst=slice(0, end - start), remat=True, origin=None,
                exchange=exchange, n_id=torch.arange(start, end) if n_id is None else n_id[start:end], seeds=Seeds(0),
            ),
            part.e_id.edges, reads, serves, halo,
        )  # fmt: skip
        exchange.chunk = it
        return it

    def of_chunk(self, ids: slice, number: int) -> slice:
        """Return which halo rows of one worker are in its chunk of a number: a range, since chunks are."""
        found = spanned(self.chunk_of[ids], number, number + 1)
        return slice(ids.start + found.start, ids.start + found.stop)

    def begin(self, order: Sequence[int] | None) -> None:
        """Begin an epoch, with chunks in this order; None for one in which all is fresh."""
        self.place.zero_()
        self.stale.clear()
        self.in_chunks = order is not None
        for site in self.sites.values():
            for rows in site:
                rows.grad = None  # left by an epoch that was interrupted
        if order is not None:
            self.place[torch.tensor(order)] = torch.arange(len(order))

    def end(self, refresh: bool) -> None:
        """End an epoch; with ``refresh`` its rows are history from now on."""
        for site in self.sites.values():
            for rows in site:
                if refresh:  # the next epoch writes all of what is fresh
                    old, rows.history = rows.history, rows.fresh
                    rows.fresh = torch.empty_like(rows.fresh) if old is None else old
                rows.grad = None

    def restore(self, rows: dict[tuple[int, ...], Tensor]) -> None:
        """Have these histories, by block, call and tile."""
        self.sites = {}
        for (block, call, _), history in sorted(rows.items(), key=lambda it: it[0]):
            site = self.sites.setdefault((block, call), [])
            site.append(SiteRows(torch.empty_like(history), history.clone()))

    @contextmanager
    def within(self, block: int) -> Iterator[None]:
        """Run a block of the model on a chunk; raise unless it has aggregated as often as for other chunks."""
        self.block, self.call = block, 0
        with running.within(running.CHUNK):
            yield
        self.check_calls()

    def site(self) -> Site:
        """Return the site of the next aggregation."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"Block {self.block} of a pipeline is recomputed in backward ('torch.utils.checkpoint'). Leave it out: "
                f"on a sharded graph it keeps no messages anyway."
            )
        self.call += 1
        if self.in_chunks and (self.block, self.call) not in self.sites:
            self.check_calls()
        return self.sites.setdefault((self.block, self.call), [])

    def check_calls(self) -> None:
        """Raise unless the block has aggregated as often as for other chunks."""
        calls = sum(block == self.block for block, _ in self.sites)
        if self.call != calls:
            raise ValueError(
                f"[rank {rank_of()}] Block {self.block} aggregated {self.call} times for a chunk, and {calls} times "
                f"for others. All chunks must take the same way through a block."
            )

    def store(self, it: PipelineChunk, site: Site, tile: int, x: Tensor, meter: Meter, about: About | None) -> None:
        """Keep the rows of a chunk, and exchange those that workers read of each other."""
        if tile == len(site):
            site.append(SiteRows(x.new_empty(len(self.chunk_of), *x.shape[1:])))
        fresh = site[tile].fresh
        if fresh.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"[rank {rank_of()}] Block {self.block} aggregates rows of shape {list(x.shape[1:])}, and of shape "
                f"{list(fresh.shape[1:])} before. All chunks, and the pass that fills the history, which has no "
                f"gradients, must take the same way through a block."
            )
        fresh[it.span] = x
        if self.peers is not None:
            self.swap(it, x, fresh, meter, about, f"source rows {tile}")

    def swap(
        self, it: PipelineChunk, own: Tensor, all_rows: Tensor, meter: Meter, about: About | None, what: str
    ) -> None:  # fmt: skip
        """Send the rows of a chunk that others read, and receive theirs."""
        assert self.peers is not None
        routes, channel, arriving = self.peers.routes, self.peers.channel, []
        self.peers.begin_turn(about, meter)
        for q in routes.others:
            client = routes.client(q)
            into = channel.buffer(it.halo[q].stop - it.halo[q].start, all_rows)
            arriving.append((q, into, channel.swap(own[it.serves[client]], client, into, q, what, meter)))
        for q, into, transfers in arriving:
            wait_for(transfers)
            all_rows[it.halo[q]] = into.to(all_rows.dtype)

    def return_grads(self, it: PipelineChunk, grad: Tensor, total: Tensor, meter: Meter, what: str) -> None:
        """Send the gradients of halo rows in this chunk to their owners, and add up those of the chunk's rows."""
        assert self.peers is not None
        routes, channel, arriving = self.peers.routes, self.peers.channel, []
        self.peers.begin_turn(None, meter)
        for q in routes.others:
            client = routes.client(q)
            rows = it.serves[client]
            into = channel.buffer(len(rows), total)
            arriving.append((rows, into, channel.swap(grad[it.halo[q]], q, into, client, what, meter)))
        for rows, into, transfers in arriving:
            wait_for(transfers)
            total.index_add_(0, rows, into.to(total.dtype))

    def read(self, it: PipelineChunk, rows: SiteRows) -> Tensor:
        """Return what a chunk reads of other chunks."""
        stale = self.is_stale(it)
        if not stale.any():
            return rows_at(rows.fresh, it.reads)
        assert rows.history is not None
        out = rows_at(rows.history, it.reads)
        fresh = (~stale).nonzero().view(-1)
        return out.index_copy_(0, fresh, rows_at(rows.fresh, it.reads[fresh]))

    def is_stale(self, it: PipelineChunk) -> Tensor:
        """Which of the rows that a chunk reads have not passed in this epoch, in all of its sites."""
        if it.number not in self.stale:
            self.stale[it.number] = self.place[self.chunk_of[it.reads]] > self.place[it.number]
        return self.stale[it.number]

    def stale_share(self) -> float:
        """Return the share of edges that read history in this epoch."""
        stale = sum(int(self.is_stale(it)[it.graph.blocks[1].col.long()].sum()) for it in self.chunks)
        return stale / max(self.graph.num_edges, 1)


def spanned(numbers: Tensor, start: int, end: int) -> slice:
    """Return which of ascending numbers are in a range."""
    first, last = torch.searchsorted(numbers.long(), torch.tensor([start, end])).tolist()
    return slice(first, last)


class ChunkExchange(Local):
    """The exchange of a chunk: shard 0 are its rows, shard 1 those that it reads of others."""

    remembers = True
    chunk: PipelineChunk
    at: Site | None = None  # of the aggregation that has begun
    shards = 2
    stored = False  # whether the forward pass has been

    def __init__(self, history: History, routes: Routes) -> None:
        super().__init__(routes, history.graph.exchange.log)
        self.history, self.group = history, history.graph.exchange.group

    @property
    def alone(self) -> bool:
        """Whether there is no other worker in the stage."""
        return self.history.peers is None

    def begin(self) -> ChunkExchange:
        """Return the exchange of the next aggregation."""
        begun = copy.copy(self)
        begun.at = self.history.site()
        return begun

    def one_shot(self) -> ChunkExchange:
        """Return the exchange with all rows in a single shard."""
        merged = copy.copy(self)
        merged.shards = 1
        return merged

    def reroute(self, routes: Routes, exact: bool = False) -> NoReturn:
        """Refuse: what other rows would be is not known."""
        raise NotImplementedError(
            f"[rank {rank_of()}] Block {self.history.block} asks for other rows than those that a chunk of a pipeline "
            f"reads. Take 'chunks=1'."
        )

    def order(self, tiles: int, backward: bool = False, fetches: bool = True) -> Schedule:
        """Return all shards, for each tile."""
        return [tuple(range(self.shards))] * tiles

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return of every value the largest one on any worker of the stage."""
        return self.history.graph.exchange.all_reduce_max(values)

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the rows of the chunk, which the history keeps in the forward pass, and what it reads of others."""
        assert self.at is not None
        stores, self.stored = not self.stored, True
        for tile, x in enumerate(tiles):
            if stores:
                self.history.store(self.chunk, self.at, tile, x, meter, about if tile == 0 else None)
            if self.shards == 1:
                yield 0, torch.cat([x, self.history.read(self.chunk, self.at[tile])])
            else:
                yield 0, x
                yield 1, self.history.read(self.chunk, self.at[tile])

    def sink(self, meter: Meter, receiver: Receiver, about: About | None = None) -> ChunkSink:
        """Return what takes gradients; refuse those of rows that were never read."""
        assert self.at is not None
        if not self.at:
            raise NotImplementedError(
                f"[rank {rank_of()}] Block {self.history.block} of a pipeline adds onto the sources of edges, which "
                f"other chunks have. Take 'chunks=1'."
            )
        return ChunkSink(self, self.at, meter, receiver)


class ChunkSink(Sink):
    """Keeps the gradients of rows of other chunks, and completes those of the chunk's rows."""

    def __init__(self, exchange: ChunkExchange, site: Site, meter: Meter, receiver: Receiver) -> None:
        self.exchange, self.site, self.meter, self.receiver, self.tile = exchange, site, meter, receiver, 0
        self.own: Tensor | None = None

    def push(self, q: int, grad: Tensor) -> None:
        """Take the gradient of a shard."""
        exchange = self.exchange
        if exchange.shards == 1:
            own, others = grad.split(list(exchange.routes.num_src))
            self.own = own.clone()
            self.keep(others)
        elif q == 0:
            self.own = grad
        else:
            self.keep(grad)

    def keep(self, others: Tensor) -> None:
        """Take the gradient of rows of other chunks; that of the chunk's rows came before."""
        exchange, total = self.exchange, self.own
        assert total is not None
        rows = self.site[self.tile]
        if rows.grad is None:
            rows.grad = total.new_zeros(len(exchange.history.chunk_of), *total.shape[1:])
        rows.grad.index_add_(0, exchange.chunk.reads, others)
        total = total + rows.grad[exchange.chunk.span]
        if exchange.history.peers is not None:
            exchange.history.return_grads(exchange.chunk, rows.grad, total, self.meter, f"gradients {self.tile}")
        self.receiver.add_grad(self.tile, total)
        self.tile, self.own = self.tile + 1, None
