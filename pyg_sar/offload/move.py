r"""What moves the rows of loaded data home, for a number of chunks that is known."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pyg_sar import watch
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload import functions  # noqa: F401  # which answer for rows at home
from pyg_sar.offload.chunks import spans
from pyg_sar.offload.home import Home
from pyg_sar.offload.rows import CPU, HostRows, Place


def graph_of(data: Any) -> ShardedGraph:
    """Return the graph of data whose rows can be moved; raise for others."""
    it = getattr(data, "edge_index", None)
    if not isinstance(it, ShardedEdgeIndex):
        raise TypeError(
            f"Expected data with a sharded 'edge_index' (got {type(it).__name__}). Take it from 'pyg_sar.load', or set "
            f"'data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes)'. Heterogeneous data stays in memory."
        )
    graph = it.graph
    if graph.bipartite or graph.origin is not None:
        raise ValueError("Expected the 'edge_index' of a whole graph with one set of nodes")
    if graph.device.type != "cpu":
        raise ValueError(
            f"Expected an 'edge_index' on the CPU, with the rows (got one on {graph.device}). Leave 'device' out of "
            f"'load', and name it here."
        )
    return graph


def place_of(
    graph: ShardedGraph, home: Home, chunks: int, slots: int | None = None, device: torch.device | None = None
) -> Place:
    """Return the place of a graph's rows, which are computed on where the graph is unless there is a ``device``."""
    with CPU:  # whatever torch's default device is
        ranges = spans(graph, chunks)
        n_id = torch.arange(graph.num_src) if graph.n_id is None else graph.n_id
    return Place(home, device or graph.device, ranges, chunks, n_id, graph.seeds, graph.exchange, slots)


def move(data: Any, place: Place) -> Any:
    """Return the same data with its rows at home, which are copied if that is pinned memory; numbers of nodes, such as
    labels and masks, are on the device.
    """
    out = copy.copy(data)
    named = {key: data[key] for key in data.node_attrs()}
    tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    go_home = {key for key, value in tensors.items() if value.is_floating_point() and value.dim() > 1}
    if not go_home:
        raise ValueError(
            f"Expected a floating-point tensor of rows [n, *] of nodes, such as features 'data.x', to move home (got "
            f"{', '.join(named) or 'no tensors of nodes'}). Nothing would be: leave this data in memory."
        )
    for key, value in tensors.items():
        if key not in go_home:
            moved = value.to(place.device)
            out[key] = moved if place.exchange.alone or moved is value else watch.rows(moved, of=place.n_id)
        else:
            if isinstance(value, torch.nn.Parameter) or value.grad_fn is not None:
                what = "parameter" if value.grad_fn is None else "result of a model"
                raise ValueError(
                    f"Expected '{key}' to be data (got a {what}, which would learn nothing from rows at home). Apply "
                    f"the model to the rows that 'offload' returns."
                )
            host = place.home.empty(value.shape, value.dtype).copy_(value.detach()) if place.home.pinned else value
            rows = HostRows(place, host.detach()).requires_grad_(value.requires_grad)
            out[key] = rows if place.exchange.alone else watch.rows(rows, of=place.n_id)
    return out
