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
from pyg_sar.graph import ShardedGraph, cut, edge_ids, ordinary_mode


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
    n_id = None if graph.bipartite else graph.n_id
    sizes = {"num_src": graph.num_dst, "num_dst": graph.num_src, "n_id": n_id, "constants": WeakIdKeyDictionary()}
    source, row = graph.coo()
    if isinstance(graph.exchange, Local):
        ids = [slice(0, graph.num_dst)] if graph.bipartite else graph.exchange.ids
        part = torch.empty(graph.num_dst, dtype=torch.int64, device=graph.device)
        for q, rows in enumerate(ids):
            part[rows] = q
        blocks = cut(torch.stack([row, source]), part[row], ids, graph.num_src)
        exchange: Any = Local(ids, graph.exchange.log)
        turned = graph.replace(blocks=blocks, exchange=exchange, e_id=edge_ids(graph), **sizes)
        return Reversed(turned, None, torch.arange(graph.num_edges, device=graph.device))
    whole = graph.exchange.merge()
    peers, n = whole.peers, graph.num_src
    # For each peer: its edges among those held here, and the own rows that these end at.
    held, serve, table = [], [], torch.zeros(graph.num_edges, 3, dtype=torch.int64, device=graph.device)
    for span in whole.spans:
        mine = ((source >= n + span.start) & (source < n + span.stop)).nonzero().view(-1)
        ends, number = row[mine].unique(return_inverse=True)
        table[mine] = torch.stack([source[mine] - n - span.start, number, edge_ids(graph)[mine]], 1)
        held.append(mine)
        serve.append(ends)
    held_here = torch.tensor([[len(mine), len(ends)] for mine, ends in zip(held, serve, strict=True)])
    counts = all_gather(held_here.to(graph.device), peers.group)[:, peers.rank].tolist()
    counts[peers.rank] = [graph.num_edges, graph.num_dst]
    num_edges, num_src = ([count[k] for count in counts] for k in (0, 1))
    options = (peers.group, peers.prefetch, peers.log)
    edges = graph.replace(exchange=Peers(held, num_edges, *options), num_src=graph.num_edges)
    own = (source < n).nonzero().view(-1)
    brought = Halo.apply(table, edges)[graph.num_edges :]
    others = [q for q in range(peers.size) if q != peers.rank]
    part = torch.tensor(others).repeat_interleave(torch.tensor([num_edges[q] for q in others])).to(graph.device)
    ids, start = [slice(0, graph.num_dst)] * peers.size, graph.num_dst
    for q in others:
        mine = part == q
        brought[mine, 0] = peers.serve[q][brought[mine, 0]].long()
        brought[mine, 1] += start
        ids[q] = slice(start, start + num_src[q])
        start += num_src[q]
    coo = torch.stack([torch.cat([row[own], brought[:, 1]]), torch.cat([source[own], brought[:, 0]])])
    part = torch.cat([torch.full_like(own, peers.rank), part])
    turned = graph.replace(
        blocks=cut(coo, part, ids, graph.num_src),
        exchange=Peers(serve, num_src, *options, peers.wire),
        e_id=torch.cat([edge_ids(graph)[own], brought[:, 2]]),
        **sizes,
    )
    place = torch.cat([own, graph.num_edges + torch.arange(len(brought), device=graph.device)])
    return Reversed(turned.merge() if graph.exchange is whole else turned, edges, place)
