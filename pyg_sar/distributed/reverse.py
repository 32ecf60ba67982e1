r"""The same edges the other way round, for messages that flow from destinations to sources.

A worker holds the in-edges of its local nodes. To aggregate along their out-edges it asks their holders for them, once:
:func:`reverse` makes a graph of them like any other, and what belongs to edges is brought in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.block import Index, cut, parts_of
from pyg_sar.distributed.collectives import all_gather
from pyg_sar.distributed.group import host
from pyg_sar.exchange import Exchange, Routes
from pyg_sar.graph import ShardedGraph, edge_ids
from pyg_sar.halo import fetch_halo, sum_halo

NUMBERS = count(1)  # of graphs
KEPT = 16  # graphs the other way round that are kept of one graph, which differ in what others hold


class Reversed(NamedTuple):
    """A graph the other way round."""

    graph: ShardedGraph  # the out-edges of this worker's nodes, as in-edges
    edges: ShardedGraph | None  # its rows are the edges that this worker held before; None if these are all
    place: Tensor  # where the edges of `graph` are among those, followed by what others held; empty for all

    def bring(self, rows: Tensor) -> Tensor:
        """Return rows of the edges of the graph, given those of the edges that were held before."""
        return rows if self.edges is None else fetch_halo(rows, self.edges).index_select(0, self.place)

    def take_back(self, rows: Tensor) -> Tensor:
        """Return rows of the edges that were held before, given those of the edges of the graph."""
        if self.edges is None:
            return rows
        table = rows.new_zeros(self.edges.num_src + self.edges.exchange.routes.num_halo, *rows.shape[1:])
        return sum_halo(table.index_copy(0, self.place, rows), self.edges)


def reverse(graph: ShardedGraph) -> Reversed:
    """Return a graph the other way round, made once; all workers call it together."""
    exchange = graph.exchange
    if exchange.alone:
        return graph.derived("reversed", lambda: _within(graph))
    # Two relations may have the same edges here, and so be the same object, but others on another worker: what the
    # workers make of their graphs together is told by all of these.
    number = torch.tensor([graph.derived("number", lambda: next(NUMBERS))], device=host(exchange.group))
    together = tuple(all_gather(number, exchange.group).view(-1).tolist())
    known: dict[tuple[int, ...], Reversed] = graph.derived("reversed", dict)
    (missing,) = exchange.all_reduce_max([together not in known])  # a worker may have dropped it
    if missing:
        known.pop(together, None)
        while len(known) >= KEPT:
            del known[next(iter(known))]
        with torch.inference_mode(False):
            known[together] = _reverse(graph)
    return known[together]


def _reverse(graph: ShardedGraph) -> Reversed:
    exchange, routes = graph.exchange, graph.exchange.routes
    held, serve, table = _of_others(graph, routes)
    held_here = torch.tensor([[len(mine), len(ends)] for mine, ends in zip(held, serve, strict=True)])
    counts = all_gather(held_here.to(graph.device), exchange.group)[:, routes.rank].tolist()
    counts[routes.rank] = [graph.num_edges, graph.num_dst]
    num_edges, num_src = zip(*counts, strict=True)
    of_edges, turned_routes = Routes(routes.rank, held, num_edges), Routes(routes.rank, serve, num_src)
    edges = graph.replace(exchange=exchange.reroute(of_edges, exact=True), num_src=graph.num_edges)
    brought = fetch_halo(table, edges)[graph.num_edges :]
    ids = turned_routes.ids
    part = torch.empty(len(brought), dtype=torch.int64, device=graph.device)
    for q, span in enumerate(of_edges.spans):
        part[span] = q
        brought[span, 0] = routes.serve[q][brought[span, 0]].long()
        brought[span, 1] += ids[q].start
    source, row = graph.coo()
    own = (source < graph.num_src).nonzero().view(-1)
    coo = torch.stack([torch.cat([row[own], brought[:, 1]]), torch.cat([source[own], brought[:, 0]])])
    part = torch.cat([torch.full_like(own, routes.rank), part])
    if len(graph.blocks) == 1:  # one-shot
        part, ids = torch.zeros_like(part), [slice(0, graph.num_dst + turned_routes.num_halo)]
    e_id = torch.cat([edge_ids(graph)[own], brought[:, 2]])
    turned = _turned(graph, coo, part, ids, exchange.reroute(turned_routes), e_id)
    place = torch.cat([own, graph.num_edges + torch.arange(len(brought), device=graph.device)])
    return Reversed(turned, edges, place)


def _within(graph: ShardedGraph) -> Reversed:
    """Return the edges of a graph that this process holds as a whole."""
    source, row = graph.coo()
    n, num_blocks = graph.num_dst, len(graph.blocks)
    ids: list[Index] = [block.ids for block in graph.blocks]
    if graph.bipartite:  # as many of the other set, so that both ways can be joined
        ids = [slice(n * k // num_blocks, n * (k + 1) // num_blocks) for k in range(num_blocks)]
    part = parts_of(row, ids, graph.num_dst)
    exchange = graph.exchange.reroute(Routes.local(ids, graph.device))
    turned = _turned(graph, torch.stack([row, source]), part, ids, exchange, edge_ids(graph))
    return Reversed(turned, None, torch.empty(0, dtype=torch.int64, device=graph.device))


def _of_others(graph: ShardedGraph, routes: Routes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Return, for each worker, where its edges are among those held here and the local rows that these end at; and for
    each edge its source there, its end among those rows, and its id.
    """
    source, row = graph.coo()
    held, serve, table = [], [], torch.zeros(graph.num_edges, 3, dtype=torch.int64, device=graph.device)
    for span in routes.spans:
        first, last = graph.num_src + span.start, graph.num_src + span.stop
        mine = ((source >= first) & (source < last)).nonzero().view(-1)
        ends, number = row[mine].unique(return_inverse=True)
        table[mine] = torch.stack([source[mine] - first, number, edge_ids(graph)[mine]], 1)
        held.append(mine)
        serve.append(ends)
    return tuple(held), tuple(serve), table


def _turned(
    graph: ShardedGraph, coo: Tensor, part: Tensor, ids: Sequence[Index], exchange: Exchange, e_id: Tensor
) -> ShardedGraph:
    """Return a graph of such edges, whose sources are what were destinations."""
    return graph.replace(
        blocks=cut(coo, part, ids, graph.num_src),
        exchange=exchange,
        e_id=e_id,
        num_src=graph.num_dst,
        num_dst=graph.num_src,
        dst=None if graph.bipartite else slice(0, graph.num_src),
        n_id=None if graph.bipartite else graph.n_id,
        ends=None if graph.ends is None else graph.ends[::-1],
        cached=WeakIdKeyDictionary(),
    )
