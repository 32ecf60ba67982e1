r"""Graphs made of graphs: with other edges, by edge type, and several joined to one.

Each is made once and kept by the graph that it is made of (:meth:`~pyg_sar.graph.ShardedGraph.derived`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.block import Block, cut, parts_of, places_in, put_rows, renumber, rows_at
from pyg_sar.csr import compress
from pyg_sar.graph import ShardedGraph, edge_ids, positions

KEPT = 2, 64  # graphs with other edges, which layers make in every step: at least, and at most
MAX_IN_DEGREE = 1 << 24  # with other edges, whose ids hold the destination's id above these bits


def regroup(graph: ShardedGraph, coo: Tensor) -> ShardedGraph:
    """Return the graph with other edges ``[2, *]`` between the same rows, as :meth:`ShardedGraph.coo` has them.

    The last ones are kept, as many as together have no more edges than the graph: one for each relation, for example.
    Ids of edges are new: they depend on the partition.
    """
    kept: list[tuple[Tensor, ShardedGraph]] = graph.derived("other edges", list)
    for edges, other in kept:
        if torch.equal(edges, coo):
            return other
    with torch.inference_mode(False):
        kept.append((coo, _regroup(graph, coo)))
    least, most = KEPT
    while len(kept) > most or (len(kept) > least and sum(edges.size(1) for edges, _ in kept) > graph.num_edges):
        del kept[0]
    return kept[-1][1]


def _regroup(graph: ShardedGraph, coo: Tensor) -> ShardedGraph:
    source, row = coo
    ids = [block.ids for block in graph.blocks]
    part = parts_of(source, ids, graph.num_src + graph.exchange.routes.num_halo)
    blocks = cut(coo, part, ids, graph.num_dst)
    # Ids of edges are made of those of destinations, whose edges are on one worker.
    order = torch.argsort(row, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=graph.device) - compress(row[order], graph.num_dst)[row[order]]
    most = int(place.max()) + 1 if place.numel() > 0 else 0
    if most > MAX_IN_DEGREE:
        raise ValueError(
            f"A destination has {most} in-edges after edges were added or left out, but at most {MAX_IN_DEGREE} are "
            f"possible there. Do this before 'partition'."
        )
    e_id = dst_ids(graph)[row] * MAX_IN_DEGREE + place
    # Whether edges are new is a matter of each worker: what is kept of cached features must not depend on it.
    return graph.replace(blocks=blocks, e_id=e_id, cached=WeakIdKeyDictionary())


class TypedGraph(NamedTuple):
    """A :class:`~pyg_sar.graph.ShardedGraph` over pairs of edge type and destination, sorted by type.

    Args:
        graph: The graph over the pairs.
        num_types: Number of edge types.
        dst: Destination of every pair.
        ptr: ``ptr[r]:ptr[r + 1]`` are the pairs of type ``r``.
    """

    graph: ShardedGraph
    num_types: int
    dst: Tensor
    ptr: list[int]

    @property
    def counts(self) -> list[int]:
        """Number of pairs of every type."""
        return [end - start for start, end in pairwise(self.ptr)]

    @property
    def norm(self) -> Tensor:
        """One over the number of edges of the same type and destination, for each edge in the worker's order."""
        return self.graph.derived("norm", lambda: self.graph.degree.double().reciprocal()[self.graph.row])

    @property
    def edges_of_types(self) -> list[tuple[Tensor, Tensor]]:
        """Where the edges of every type begin in each block, and the numbers of its edges in the worker's order."""
        return self.graph.derived("edges of types", lambda: [*map(self._edges_of_types, self.graph.blocks)])

    def _edges_of_types(self, block: Block) -> tuple[Tensor, Tensor]:
        pair = torch.tensor(self.ptr, device=block.col.device)
        pair = pair if block.dst is None else torch.searchsorted(block.dst.long(), pair)
        edge = positions(block)
        return block.rowptr[pair].to(edge.dtype), edge

    @property
    def relations(self) -> list[ShardedGraph]:
        """The graph of every type, whose destinations are the pairs of that type."""
        return self.graph.derived("relations", lambda: [self._relation(a, b) for a, b in pairwise(self.ptr)])

    def _relation(self, start: int, end: int) -> ShardedGraph:
        blocks = tuple(block.rows(start, end) for block in self.graph.blocks)
        return self.graph.replace(blocks=blocks, num_dst=end - start)


def by_type(graph: ShardedGraph, edge_type: Tensor, num_types: int) -> TypedGraph:
    """Return the graph whose destinations are the pairs (edge type, destination) that have an edge.

    It is made once for an ``edge_type`` tensor and kept as long as that tensor lives unchanged.
    """
    return graph.derived(("types", num_types), lambda: _by_type(graph, edge_type, num_types), of=edge_type)


def check_types(graph: ShardedGraph, edge_type: Tensor, num_types: int) -> None:
    """Raise unless there is a type for each edge."""
    if edge_type.shape != (graph.num_edges,) or edge_type.is_floating_point():
        raise ValueError(
            f"Expected 'edge_type' to hold an integer for each of this worker's {graph.num_edges} edges (got "
            f"{edge_type.dtype} of shape {list(edge_type.shape)}). Take it from the loaded data."
        )
    if edge_type.numel() > 0 and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < num_types:
        raise ValueError(
            f"Expected edge types from 0 to {num_types - 1} (got {int(edge_type.min())} to "
            f"{int(edge_type.max())}). Is 'num_relations' right?"
        )


def _by_type(graph: ShardedGraph, edge_type: Tensor, num_types: int) -> TypedGraph:
    check_types(graph, edge_type, num_types)
    key = torch.empty(graph.num_edges, dtype=torch.int64, device=graph.device)
    for block in graph.blocks:
        put_rows(key, block.edges, rows_at(edge_type, block.edges).long() * graph.num_dst + block.row)
    pairs, pair = torch.unique(key, return_inverse=True)
    blocks = tuple(
        Block.from_coo(rows_at(pair, b.edges), b.col, b.ids, b.num_src, pairs.numel(), positions(b))
        for b in graph.blocks
    )
    size = max(graph.num_dst, 1)
    typed = graph.replace(blocks=blocks, num_dst=pairs.numel(), dst=None)
    return TypedGraph(typed, num_types, pairs % size, compress(pairs // size, num_types).tolist())


def join(graphs: Sequence[ShardedGraph], first: dict[str, int], types: Sequence[str], num_dst: int) -> ShardedGraph:
    """Return one graph of the edges of several, whose sources, and edges, follow each other.

    The first of them keeps it by the names of node types. Without edges, graphs made anew may be the same objects as
    before, so that one worker may keep it where others make it again.

    Args:
        graphs: The graphs, of the same workers and in the same mode.
        first: By node type, the destination in the new graph that is its first one.
        types: The node type of the destinations of each graph.
        num_dst: The number of destinations of the new graph.
    """
    joined: dict[Hashable, tuple[list[ref[ShardedGraph]], ShardedGraph]] = graphs[0].derived("joined", dict)
    key = tuple(first), tuple(types)
    if key not in joined or [other() for other in joined[key][0]] != list(graphs):
        with torch.inference_mode(False):
            joined[key] = [ref(g) for g in graphs], _join(graphs, [first[t] for t in types], num_dst, tuple(first))
    return joined[key][1]


def _join(
    graphs: Sequence[ShardedGraph], first: Sequence[int], num_dst: int, types: tuple[str, ...]
) -> ShardedGraph:  # fmt: skip
    exchange, numbers = graphs[0].exchange.join([g.exchange for g in graphs])
    numbers = [n.to(g.device) for n, g in zip(numbers, graphs, strict=True)]
    starts = [0, *torch.tensor([g.num_edges for g in graphs]).cumsum(0).tolist()]
    blocks = []
    for pieces in zip(*(g.blocks for g in graphs), strict=True):
        ids = torch.cat([n[b.ids] for n, b in zip(numbers, pieces, strict=True)])
        whole = renumber(ids, torch.arange(int(ids.max()) + 1 if ids.numel() else 0, device=ids.device))
        source = torch.cat([n[b.source] for n, b in zip(numbers, pieces, strict=True)])
        row = torch.cat([b.row + start for b, start in zip(pieces, first, strict=True)])
        edges = torch.cat([positions(b) + start for b, start in zip(pieces, starts, strict=False)])
        blocks.append(Block.from_coo(row, places_in(whole, source), whole, ids.numel(), num_dst, edges))
    # Ids of edges that are no two of them the same.
    e_id = torch.cat([edge_ids(g) * len(graphs) + k for k, g in enumerate(graphs)])
    num_src = sum(g.num_src for g in graphs)
    n_id = torch.arange(num_src, device=e_id.device)
    ends = None if graphs[0].ends is None else (tuple(g.ends[0] for g in graphs if g.ends is not None), types)
    return graphs[0].replace(
        blocks=tuple(blocks), num_src=num_src, num_dst=num_dst, dst=None, exchange=exchange, n_id=n_id, e_id=e_id,
        ends=ends, origin=None,  # of several: all edges into all of these destinations
    )  # fmt: skip


def dst_ids(graph: ShardedGraph) -> Tensor:
    """Return ids of the destinations that no other worker has; those of another set of nodes have the least id of their
    in-edges.
    """
    if graph.n_id is None:
        return graph.dst_rows(torch.arange(max(graph.num_src, graph.num_dst), device=graph.device))
    if graph.dst is not None:
        return graph.dst_rows(graph.n_id)
    ids = graph.n_id.new_zeros(graph.num_dst)
    return ids.scatter_reduce(0, graph.row, edge_ids(graph), "amin", include_self=False)
