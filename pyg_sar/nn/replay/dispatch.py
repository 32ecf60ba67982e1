r"""Decides how a layer's call on a sharded graph runs: by its execution strategy, or by PyG's own code, one-shot."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, cast

import torch
import torch_geometric.nn
from torch import Tensor
from torch.nn.parameter import is_lazy

from pyg_sar.aggregate import refuse_transforms
from pyg_sar.caller import running_modules
from pyg_sar.distributed.reverse import reverse
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.by_chunks import by_chunks, in_host_memory
from pyg_sar.nn.replay.call import PAIR, Call, check_destinations, has_message_hooks
from pyg_sar.nn.replay.choose import STRATEGIES, choose, rows_of
from pyg_sar.nn.replay.strategy import Strategy
from pyg_sar.operations import EDGES, SOURCES
from pyg_sar.pieces import is_one_piece
from pyg_sar.refusals import fail, for_layer

WEIGHTS = "return_attention_weights"


@torch.compiler.disable
def replay(call: Call, edge_index: ShardedEdgeIndex, size: Any) -> Tensor | None:
    """Run a layer by its own code, or by kernels that do the same; return None if it has to run one-shot."""
    refuse_transforms(edge_index._graph, f"layer '{type(call.layer).__name__}'")
    if has_message_hooks(call.layer):
        note_one_shot(call.layer, "its messages have hooks")
        return None
    if edge_index.kind == SOURCES:
        return None
    graph = edge_index.regroup(call.layer.aggr_module)
    rows = in_host_memory(call)
    if rows is None:
        if any(map(is_lazy, call.layer.parameters())):  # which are drawn now
            return None
        if returns_weights(call.layer):
            note_one_shot(call.layer, "it was asked for what its messages leave behind")
            return None

    def run(call: Call, graph: ShardedGraph) -> Tensor | None:
        return along_edges(call, edge_index, graph, size) if rows is None else by_chunks(call, graph, rows)

    if call.backwards == (edge_index.kind != EDGES):  # perhaps twice the other way round
        return run(call, graph)
    if graph.origin is not None:
        return None
    turned = reverse(graph)
    edge, *_ = rows_of(call, graph)
    kwargs = {name: turned.bring(value) if name in edge else value for name, value in call.kwargs.items()}
    out = run(dataclasses.replace(call, kwargs=kwargs), turned.graph)
    return turned.take_back(out) if out is not None and call.updates else out


def note_one_shot(layer: Any, why: str) -> None:
    """Have :func:`~pyg_sar.nn.describe` tell why a call of a layer runs one-shot."""
    STRATEGIES.setdefault(layer, {})[why] = Strategy("one-shot", why)


def returns_weights(layer: Any) -> bool:
    """Whether the ``forward`` that calls a layer's messages is asked to return what these leave behind."""
    if not keeps_weights(cast(Any, type(layer))):
        return False
    return any(call.get(WEIGHTS) is not None for module, call in running_modules() if module is layer)


@functools.cache
def keeps_weights(cls: Any) -> bool:
    """Whether messages of a class, and no update of edges before, leave the weights that its ``forward`` may return."""
    made_before = cls.edge_update is not torch_geometric.nn.MessagePassing.edge_update
    return not made_before and WEIGHTS in inspect.signature(cls.forward).parameters


def along_edges(call: Call, edge_index: ShardedEdgeIndex, graph: ShardedGraph, size: Any) -> Tensor | None:
    """Run a call whose messages flow along the edges of ``graph``."""
    # There the layer counts by another rule, or these are rows of sources.
    others = (graph.bipartite and size is not None) or call.backwards
    for name in () if others else call.lifted & call.kwargs.keys():
        if isinstance(call.kwargs[name], PAIR) or f"{name}_j" not in call.asked:
            check_destinations(call.layer, name, call.kwargs[name], edge_index)
    own_code = edge_index.kind == EDGES and not call.backwards and is_one_piece(graph)
    strategy, name = choose(call, graph, size, own_code), type(call.layer).__name__
    if strategy.name == "one-shot":
        return None
    if strategy.name == "refused":
        fail(edge_index._graph, f"'{name}' cannot run on a share of the graph: {strategy.why}", for_layer(name))
    if not edge_index.streams and (strategy.ordered or strategy.name == "padded"):
        fail(edge_index._graph, f"'{name}' needs all edges in their order, but some were added or left out since they "
             f"were loaded: do so before 'partition'")  # fmt: skip
    if own_code and strategy.allows_own_code:
        return call.run(graph.derived("coo", graph.coo), size, call.kwargs)
    return strategy.run(call, graph)
