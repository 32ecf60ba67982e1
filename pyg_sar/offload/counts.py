r"""The counts of a graph that decide what training with rows at home takes, and small graphs of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.distributed.shard import shard
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload.chunks import sources_of, spans
from pyg_sar.offload.home import Home
from pyg_sar.offload.move import ids_of, place_of, place_of_types, sets_of, with_ends
from pyg_sar.offload.place import ALL, Place
from pyg_sar.offload.rows import HostRows


class Counts(NamedTuple):
    """The counts of a graph, or of the edges of a type, and of its largest chunk, which decide what a step needs.

    Args:
        chunks: Number of chunks.
        nodes: Number of nodes.
        rows: Destinations of a chunk.
        sources: Rows that a chunk reads.
        edges: Edges of a chunk.
        labelled: Number of nodes whose output is taken.
        halo: Number of rows that are read of other workers.
    """

    chunks: int
    nodes: int
    rows: int
    sources: int
    edges: int
    labelled: int
    halo: int = 0

    @property
    def ratio(self) -> float:
        """How many chunks have as many rows as one reads."""
        return self.sources / max(self.rows, 1)


class Nodes(NamedTuple):
    """The counts of the nodes of a type: how many there are, in the largest range, and such whose output is taken."""

    nodes: int
    rows: int
    labelled: int


class TypedCounts(NamedTuple):
    """The counts of a heterogeneous graph, whose rows are those of all types together.

    Args:
        types: Those of the nodes of each type.
        relations: Those of the edges of each type.
    """

    types: dict[str, Nodes]
    relations: dict[Any, Counts]

    @property
    def chunks(self) -> int:
        """Number of chunks of each edge type."""
        return next(iter(self.relations.values())).chunks

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(of_type.nodes for of_type in self.types.values())

    @property
    def rows(self) -> int:
        """Nodes of the largest range of each type."""
        return sum(of_type.rows for of_type in self.types.values())

    @property
    def sources(self) -> int:
        """Rows that a chunk of any edge type reads."""
        return max(counts.sources for counts in self.relations.values())

    @property
    def edges(self) -> int:
        """Edges of a chunk of each edge type."""
        return sum(counts.edges for counts in self.relations.values())

    @property
    def halo(self) -> int:
        """Rows that are read of other workers."""
        return sum(counts.halo for counts in self.relations.values())

    @property
    def ratio(self) -> float:
        """How many ranges have as many rows as a chunk reads, of the edge type of which that are most."""
        return max(counts.sources / max(self.types[it[0]].rows, 1) for it, counts in self.relations.items())


def counts_of(graph: ShardedGraph, chunks: int, labelled: int) -> Counts:
    """Return the counts of a graph, and the largest of its chunks in each respect."""
    ranges = spans(graph.degree, chunks)
    rows = max(end - start for start, end in ranges)
    sources = max(len(sources_of(graph, span)) for span in ranges)
    edges = max(int(graph.degree[slice(*span)].sum()) for span in ranges)
    halo = graph.exchange.routes.num_halo
    return Counts(chunks, graph.num_src, rows, max(sources, 1), max(edges, 1), labelled, halo)


def counts_of_data(data: Any, graphs: Mapping[Any, ShardedGraph], chunks: int) -> Counts | TypedCounts:
    """Return the counts of data; nodes with labels are those of a mask, if there is one, else all."""
    if None not in graphs:
        return counts_of_types(data, graphs, chunks)
    mask, graph = getattr(data, "train_mask", None), graphs[None]
    return counts_of(graph, chunks, graph.num_src if mask is None else int(mask.sum()))


def counts_of_types(data: Any, graphs: Mapping[Any, ShardedGraph], chunks: int) -> TypedCounts:
    """Return the counts of heterogeneous data, of whose types those with a mask have labels, if there are such."""
    types, masked = {}, any("train_mask" in store for store in data.node_stores)
    for key, of_type in sets_of(ids_of(data), graphs, chunks).items():
        count = len(of_type.n_id)
        labelled = int(data[key].train_mask.sum()) if "train_mask" in data[key] else 0 if masked else count
        types[key] = Nodes(count, max(end - start for start, end in of_type.ranges), labelled)
    return TypedCounts(types, {it: counts_of(graph, chunks, 0) for it, graph in graphs.items()})


def small_graph(
    counts: Counts | TypedCounts, rows: int, chunks: int, near: int, home: Home, slots: int | None
) -> tuple[Place, Any, dict[Any, int]]:
    """Return a graph of so many chunks, which have so many rows: the place of its rows, its edges, by type if there are
    types, and how many nodes of each type have labels. For ``near`` see :func:`small`.
    """
    factor, many = rows / max(counts.rows, 1), rows * chunks
    if isinstance(counts, Counts):
        labelled = round(counts.labelled * many / max(counts.nodes, 1))
        edge_index = shard(small(counts, factor, rows, rows, chunks, near), many)
        return place_of(edge_index.graph, home, chunks, slots), edge_index, {ALL: labelled}
    own = {t: max(round(n.rows * factor), 1) for t, n in counts.types.items()}
    graphs = {}
    for it, of_edges in counts.relations.items():
        coo = small(of_edges, factor, own[it[0]], own[it[-1]], chunks, near)
        graphs[it] = with_ends(shard(coo, (own[it[0]] * chunks, own[it[-1]] * chunks)).graph, it)
    place = place_of_types({t: torch.arange(n * chunks) for t, n in own.items()}, graphs, home, chunks, slots)
    labels = {t: round(n.labelled * own[t] * chunks / max(n.nodes, 1)) for t, n in counts.types.items()}
    return place, {it: ShardedEdgeIndex(graph) for it, graph in graphs.items()}, labels


def features(place: Place, channels: Any, dtype: torch.dtype) -> Any:
    """Return features at home, of so many channels; by type if there are types."""
    if ALL in place.sets:
        return HostRows(place, torch.zeros(place.num_rows, channels, dtype=dtype))
    places = {t: place.of(t) for t in place.sets}
    return {t: HostRows(at, torch.zeros(at.num_rows, channels[t], dtype=dtype)) for t, at in places.items()}


def small(counts: Counts, factor: float, own: int, rows: int, chunks: int, near: int) -> Tensor:
    """Return edges of chunks with so many rows, which have sources and edges in proportion. Each chunk reads ``own``
    sources of its number and some of ``near`` chunks around it, whatever the number of chunks, so that two in turn
    share few sources.
    """
    nodes, within = own * chunks, own * near
    sources = min(max(round(counts.sources * factor), 1), within)
    edges = max(round(counts.edges * factor), sources)
    generator, parts = torch.Generator().manual_seed(0), []
    for c in range(chunks):
        first = min(max(c * own + own // 2 - within // 2, 0), nodes - within)
        others = first + torch.randperm(within - own, generator=generator)
        some = torch.cat([torch.arange(c * own, (c + 1) * own), others + own * (others >= c * own)])[:sources]
        col = torch.cat([some, some[torch.randint(sources, (edges - sources,), generator=generator)]])
        parts.append(torch.stack([col, (c * rows + torch.arange(edges) % rows).sort().values]))
    return torch.cat(parts, 1)
