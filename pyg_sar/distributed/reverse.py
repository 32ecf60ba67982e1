r"""The same edges the other way round, for messages that flow from destinations to sources.

A worker holds the in-edges of its own nodes. To aggregate along their out-edges it asks their holders for them, once:
:func:`reverse` makes a graph of them like any other, and what belongs to edges is brought in every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.distributed.collectives import all_gather
from pyg_sar.distributed.exchange import Local, Peers
from pyg_sar.edge_index import Halo, Home
from pyg_sar.graph import ShardedGraph, cut, edge_ids, ordinary_mode, parts_of


class Reversed(NamedTuple):
    """A graph the other way round.

    Args:
        graph: The out-edges of this worker's nodes, as in-edges.
        edges: A graph whose rows are the edges that this worker held before, or None if these are all.
        place: Where the edges of ``graph`` are among those, followed by what others held.
    """

    graph: ShardedGraph
    edges: ShardedGraph | None
    place: Tensor

    def bring(self, rows: Tensor) -> Tensor:
        """Return rows of the edges of the graph, given those of the edges that were held before."""
        return rows if self.edges is None else Halo.apply(rows, self.edges).index_select(0, self.place)

    def take_back(self, rows: Tensor) -> Tensor:
        """Do the opposite."""
        if self.edges is None:
            return rows
        table = rows.new_zeros(self.edges.num_src + self.edges.exchange.merge().num_halo, *rows.shape[1:])
        return Home.apply(table.index_copy(0, self.place, rows), self.edges)


REVERSED: WeakKeyDictionary[ShardedGraph, Reversed] = WeakKeyDictionary()


def reverse(graph: ShardedGraph) -> Reversed:
    """Return a graph the other way round, made once; all workers call it together."""
    (missing,) = graph.exchange.largest([graph not in REVERSED])  # of a graph with other edges some may know more
    if missing:
        REVERSED[graph] = _reverse(graph)
    return REVERSED[graph]


@ordinary_mode
def _reverse(graph: ShardedGraph) -> Reversed:
    if isinstance(graph.exchange, Local):
        return _within(graph, graph.exchange)
    whole = graph.exchange.merge()
    held, serve, table = _of_others(graph, whole)
    peers, others = whole.peers, [q for q in range(whole.peers.size) if q != whole.peers.rank]
    held_here = torch.tensor([[len(mine), len(ends)] for mine, ends in zip(held, serve, strict=True)])
    counts = all_gather(held_here.to(graph.device), peers.group)[:, peers.rank].tolist()
    counts[peers.rank] = [graph.num_edges, graph.num_dst]
    num_edges, num_src = ([count[k] for count in counts] for k in (0, 1))
    options = (peers.group, peers.prefetch, peers.log)
    edges = graph.replace(exchange=Peers(held, num_edges, *options), num_src=graph.num_edges)
    brought = Halo.apply(table, edges)[graph.num_edges :]
    part = torch.tensor(others).repeat_interleave(torch.tensor([num_edges[q] for q in others])).to(graph.device)
    ids, start = [slice(0, graph.num_dst)] * peers.size, graph.num_dst
    for q in others:
        mine = part == q
        brought[mine, 0] = peers.serve[q][brought[mine, 0]].long()
        brought[mine, 1] += start
        ids[q] = slice(start, start + num_src[q])
        start += num_src[q]
    source, row = graph.coo()
    own = (source < graph.num_src).nonzero().view(-1)
    coo = torch.stack([torch.cat([row[own], brought[:, 1]]), torch.cat([source[own], brought[:, 0]])])
    part = torch.cat([torch.full_like(own, peers.rank), part])
    turned = _turned(
        graph, coo, part, ids, Peers(serve, num_src, *options, peers.wire),
        torch.cat([edge_ids(graph)[own], brought[:, 2]]),
    )  # fmt: skip
    place = torch.cat([own, graph.num_edges + torch.arange(len(brought), device=graph.device)])
    return Reversed(turned.merge() if graph.exchange is whole else turned, edges, place)


def _within(graph: ShardedGraph, exchange: Local) -> Reversed:
    """Return the edges of a graph that this process holds as a whole."""
    source, row = graph.coo()
    ids = [slice(0, graph.num_dst)] if graph.bipartite else exchange.ids
    part = parts_of(row, ids, graph.num_dst)
    turned = _turned(graph, torch.stack([row, source]), part, ids, Local(ids, exchange.log), edge_ids(graph))
    return Reversed(turned, None, torch.arange(graph.num_edges, device=graph.device))


def _of_others(graph: ShardedGraph, whole: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return, for each worker, where its edges are among those held here and the own rows that these end at; and for
    each edge its source there, its end among those rows, and its id.
    """
    source, row = graph.coo()
    held, serve, table = [], [], torch.zeros(graph.num_edges, 3, dtype=torch.int64, device=graph.device)
    for span in whole.spans:
        first, last = graph.num_src + span.start, graph.num_src + span.stop
        mine = ((source >= first) & (source < last)).nonzero().view(-1)
        ends, number = row[mine].unique(return_inverse=True)
        table[mine] = torch.stack([source[mine] - first, number, edge_ids(graph)[mine]], 1)
        held.append(mine)
        serve.append(ends)
    return held, serve, table


def _turned(
    graph: ShardedGraph, coo: Tensor, part: Tensor, ids: list[Any], exchange: Any, e_id: Tensor
) -> ShardedGraph:  # fmt: skip
    """Return a graph of such edges, whose sources are what were destinations."""
    return graph.replace(
        blocks=cut(coo, part, ids, graph.num_src),
        exchange=exchange,
        e_id=e_id,
        num_src=graph.num_dst,
        num_dst=graph.num_src,
        n_id=None if graph.bipartite else graph.n_id,
        constants=WeakIdKeyDictionary(),
    )
