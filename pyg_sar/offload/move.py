r"""What moves the rows of loaded data home, for a number of chunks that is known."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_sar import watch
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload import functions  # noqa: F401  # which answer for rows at home
from pyg_sar.offload.chunks import spans
from pyg_sar.offload.home import Home
from pyg_sar.offload.place import ALL, CPU, NodeSet, Place
from pyg_sar.offload.rows import HostRows


def graphs_of(data: Any) -> dict[Any, ShardedGraph]:
    """Return the graphs of data whose rows can be moved, by edge type, whose ends they know; raise for others."""
    stores = getattr(data, "edge_stores", [data])
    found = {getattr(store, "_key", None): graph_of(store) for store in stores}
    if not found:
        raise ValueError("Expected data with edges (got none)")
    for key, graph in found.items():
        if key is None and graph.bipartite:
            raise ValueError(
                "Expected the 'edge_index' of a graph with one set of nodes; give two sets as 'HeteroData'"
            )
        if key is not None:
            check_ends(data, key, graph)
            found[key] = with_ends(graph, key)
    return found


def with_ends(graph: ShardedGraph, edge_type: Any) -> ShardedGraph:
    """Return a graph that knows the types of its ends, and whether these are one set of nodes."""
    ends = src, dst = edge_type[0], edge_type[-1]
    if graph.ends == ends and graph.bipartite == (src != dst):
        return graph
    return graph.replace(ends=ends, dst=slice(0, graph.num_dst) if src == dst else None)


def graph_of(store: Any) -> ShardedGraph:
    """Return the graph of edges of one type; raise for what is none, or not whole, or elsewhere."""
    it, key = getattr(store, "edge_index", None), getattr(store, "_key", None)
    of = "" if key is None else f" of {key}"
    if not isinstance(it, ShardedEdgeIndex):
        raise TypeError(
            f"Expected data with a sharded 'edge_index'{of} (got {type(it).__name__}). Take it from 'pyg_sar.load', or "
            f"set 'data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes)'; of an edge type, with the "
            f"numbers of its sources and destinations, '(num_src, num_dst)'."
        )
    graph = it.graph
    if graph.origin is not None:
        raise ValueError(f"Expected the 'edge_index'{of} of a whole graph (got some of its destinations)")
    if graph.device.type != "cpu":
        raise ValueError(
            f"Expected an 'edge_index' on the CPU, with the rows (got one on {graph.device}). Leave 'device' out of "
            f"'load', and name it here."
        )
    return graph


def check_ends(data: Any, key: Any, graph: ShardedGraph) -> None:
    """Raise unless edges join as many nodes as the data has of their types."""
    known = {store._key: store.num_nodes for store in data.node_stores}
    for t, count in zip(key[::2], (graph.num_src, graph.num_dst), strict=True):
        if (expected := known.get(t)) is None:
            raise ValueError(f"Expected nodes of '{t}', which edges {key} join (got none). Set their 'num_nodes'.")
        if count != expected:
            raise ValueError(
                f"Expected edges {key} to join {int(expected)} nodes of '{t}', as the data has (got {count}): 'pyg_sar."
                f"shard(edge_index, (num_src, num_dst))' takes the numbers of sources and destinations"
            )


def place_of(
    graph: ShardedGraph, home: Home, chunks: int, slots: int | None = None, device: torch.device | None = None
) -> Place:
    """Return the place of a graph's rows, which are computed on where the graph is unless there is a ``device``."""
    with CPU:  # whatever torch's default device is
        n_id = torch.arange(graph.num_src) if graph.n_id is None else graph.n_id
    return place_of_types({ALL: n_id}, {(ALL, ALL): graph}, home, chunks, slots, device)


def ids_of(data: Any) -> dict[str, Tensor]:
    """Return the global ids of the nodes of each type."""
    with CPU:
        return {it._key: it.n_id if "n_id" in it else torch.arange(int(it.num_nodes)) for it in data.node_stores}


def sets_of(ids: Mapping[str, Tensor], graphs: Mapping[Any, ShardedGraph], chunks: int) -> dict[str, NodeSet]:
    """Return the nodes of each type, given their ids."""
    sets = {}
    with CPU:
        for key, n_id in ids.items():
            degree = torch.zeros(len(n_id), dtype=torch.int64)
            for it, graph in graphs.items():
                degree += graph.degree if it[-1] == key else 0
            sets[key] = NodeSet(spans(degree, chunks), n_id)
    return sets


def place_of_types(
    ids: Mapping[str, Tensor], graphs: Mapping[Any, ShardedGraph], home: Home, chunks: int, slots: int | None = None,
    device: torch.device | None = None,
) -> Place:  # fmt: skip
    """Return the place of the rows of the first type of nodes, that of others being :meth:`Place.of`."""
    graph, sets = next(iter(graphs.values())), sets_of(ids, graphs, chunks)
    return Place(home, device or graph.device, sets, chunks, graph.seeds, graph.exchange, slots, type=next(iter(sets)))


def move(data: Any, place: Place, graphs: Mapping[Any, ShardedGraph] | None = None) -> Any:
    """Return the same data with its rows at home, which are copied if that is pinned memory; numbers of nodes, such as
    labels and masks, are on the device. Edges of several types become those of ``graphs``, which know their ends.
    """
    out, goes_home = copy.copy(data), False
    for store in out.node_stores:
        at = place if store._key is None else place.of(store._key)
        for key in store.node_attrs():
            value = store[key]
            if not isinstance(value, Tensor):
                continue
            if value.is_floating_point() and value.dim() > 1:
                store[key], goes_home = rows_of(key, value, at), True
            else:
                moved = value.to(place.device)
                store[key] = moved if place.exchange.alone or moved is value else watch.rows(moved, of=at.n_id)
    if not goes_home:
        raise ValueError(
            f"Expected a floating-point tensor of rows [n, *] of nodes, such as features 'data.x', to move home (got "
            f"{', '.join(data.node_attrs()) or 'no tensors of nodes'}). Nothing would be: leave this data in memory."
        )
    for edge_type, graph in (graphs or {}).items():
        if out[edge_type].edge_index.graph is not graph:
            out[edge_type].edge_index = ShardedEdgeIndex(graph)
    return out


def rows_of(key: str, value: Tensor, place: Place) -> Tensor:
    """Return rows of data at home."""
    if isinstance(value, torch.nn.Parameter) or value.grad_fn is not None:
        what = "parameter" if value.grad_fn is None else "result of a model"
        raise ValueError(
            f"Expected '{key}' to be data (got a {what}, which would learn nothing from rows at home). Apply "
            f"the model to the rows that 'offload' returns."
        )
    host = place.home.empty(value.shape, value.dtype).copy_(value.detach()) if place.home.pinned else value
    rows = HostRows(place, host.detach()).requires_grad_(value.requires_grad)
    return rows if place.exchange.alone else watch.rows(rows, of=place.n_id)
