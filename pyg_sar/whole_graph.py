r"""The audit of modules: which classes of torch and PyG would silently compute with the local nodes only.

PyG's layers are exact on a sharded ``edge_index`` as long as they learn of other nodes from it alone. A batch
normalisation or a pooling beside them looks at all rows that it is given, which are those of one worker.
:func:`audit` looks at the modules that are running, and at all that these contain, before a layer streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import MethodType
from typing import Any, cast

import torch
import torch_geometric.backend
import torch_geometric.typing
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import conv

from pyg_sar.distributed.group import size_of
from pyg_sar.graph import ShardedGraph

# What classes, and all classes of packages, do that look at all nodes or edges by other means than 'edge_index'.
REASONS = {
    "takes its statistics over all nodes or edges": "_BatchNorm HeteroBatchNorm",
    "normalises over all nodes": "GraphNorm GraphSizeNorm InstanceNorm MeanSubtractionNorm PairNorm",
    "normalises over all nodes (unless mode='node')": "LayerNorm",
    "needs the edges in the order of their destinations": "GRUAggregation GraphMultisetTransformer "
    "LCMAggregation LinkEncoder LSTMAggregation MLPAggregation PatchTransformerAggregation "
    "SetTransformerAggregation SortAggregation",
    "optimises over all nodes at once": "EquilibriumAggregation",
    "fails in PyG if a worker's first node has no in-edges; mean, max, min work on every graph": "QuantileAggregation",
    "fails in PyG on a worker without edges": "FeaStConv",
    "takes 'lambda_max' from all edge weights unless it is given (2.0 suits the normalisation 'sym')": "ChebConv",
    "attends over all nodes": "GPSConv torch_geometric.nn.attention",
    "averages over all nodes in its semantic attention": "HANConv",
    "averages its losses over nodes and pairs of nodes": "GAE",
    "averages its training loss over sampled edges": "SuperGATConv",
    "chooses its code by a worker's edges (unless 'torch_geometric.backend.use_segment_matmul' is set)": "RGCNConv",
    "compares all nodes": "torch_geometric.nn.pool",
    "has a model of the whole graph": "MetaLayer",
    "has weights for each node of the whole graph": "LightGCN LINKX",
    "is compiled by TorchScript, whose code takes ordinary tensors ('torch.compile' works)": "ScriptModule",
    "learns from random walks over the whole graph": "MetaPath2Vec Node2Vec",
    "looks for neighbours among all nodes": "DimeNet DynamicEdgeConv GNNFF GravNetConv RadiusInteractionGraph ViSNet "
    "XConv",
    "numbers the colours of all nodes": "WLConv",
    "reads edges by their position": "MeshCNNConv",
    "scales by the error of all nodes": "CorrectAndSmooth",
    "sums up all nodes of a graph": "AttentiveFP DeepGraphInfomax NeuralFingerprint",
}
WHOLE_GRAPH = {name: reason for reason, names in REASONS.items() for name in names.split()}


def name_of(module: torch.nn.Module) -> str:
    """Return the name of the class that a module was before it was compiled."""
    return getattr(module, "original_name", type(module).__name__)


# When they do not, of a module, the local variables of its method (none if it is not running) and perhaps the graph.
UNLESS: dict[str, Callable[[Any, dict[str, Any], ShardedGraph | None], bool]] = {
    "_BatchNorm": lambda layer, *_: not layer.training and layer.running_mean is not None,
    "HeteroBatchNorm": lambda layer, *_: not layer.training and layer.track_running_stats,
    "LayerNorm": lambda layer, *_: getattr(layer, "mode", "node") == "node",
    "QuantileAggregation": lambda _, __, g: g is None or g.num_dst == 0 or bool(g.degree[0] > 0),
    "ChebConv": lambda _, call, __: "lambda_max" not in call or call["lambda_max"] is not None,
    "FeaStConv": lambda layer, _, g: g is None or g.num_edges > 0 or (layer.add_self_loops and g.num_dst > 0),
    # Workers choose the same way to multiply by the weights of relations.
    "RGCNConv": lambda *_: (
        not torch_geometric.typing.WITH_SEGMM or torch_geometric.backend.use_segment_matmul is not None
    ),
    "ScriptModule": lambda layer, *_: not any(hasattr(conv, name_of(module)) for module in layer.modules()),
    "SuperGATConv": lambda layer, *_: not layer.training,
    "CorrectAndSmooth": lambda layer, *_: not layer.autoscale,
    "MetaLayer": lambda layer, *_: layer.global_model is None,
    # Rows are those of all nodes in their order, as they are in one process.
    **dict.fromkeys(
        ("LightGCN", "LINKX", "MetaPath2Vec", "Node2Vec"),
        lambda _, __, g: size_of() == 1 if g is None else g.exchange.alone and g.n_id is None,
    ),
}

# The graphs for which the contents of a running module were audited, by its present call (see `call_of`).
AUDITED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def audit(
    running: Sequence[tuple[torch.nn.Module, dict[str, Any]]],
    graph: ShardedGraph,
    known: Iterable[torch.nn.Module] = (),
) -> tuple[str, str]:
    r"""Return which module cannot run on a share of the graph, and why, and the name of its class; nothing if all can.

    What a module contains is audited once in each of its calls, however many layers ask for the graph meanwhile: the
    time that a model takes is proportional to its size.

    Args:
        running (sequence): The modules that are running, the innermost first, and local variables of their methods.
        graph (ShardedGraph): This worker's share of the graph.
        known (iterable, optional): Modules of which whoever asks knows more than :data:`WHOLE_GRAPH`.
            (default: :obj:`()`)
    """
    calls = {id(layer): call for layer, variables in running if (call := call_of(layer, variables)) is not None}
    seen, looked = set(known), set()
    for layer, variables in running:
        audited = AUDITED.setdefault(calls[id(layer)], set()) if id(layer) in calls else set()
        contents = () if graph in audited or layer in looked else inner_modules(layer, seen)
        for module in chain([layer], contents):
            if why := reason(module, variables if module is layer else {}, graph):
                names = f"'{type(module).__name__}' in '{type(layer).__name__}'"
                return f"{names} cannot run on a share of the graph, because it {why}", type(module).__name__
        audited.add(graph)
        looked.add(layer)
    return "", ""


def call_of(layer: torch.nn.Module, variables: dict[str, Any]) -> MethodType | None:
    """Return what lives as long as the present call of a module: the method that torch has bound to call it."""
    bound = variables.get("forward_call")
    return bound if type(bound) is MethodType and "forward" not in layer.__dict__ else None


def inner_modules(layer: torch.nn.Module, seen: set[torch.nn.Module]) -> Iterable[torch.nn.Module]:
    """Yield the modules within a layer that were not ``seen``, and add them; layers of this package look at their
    aggregations themselves when they run.
    """
    for module in layer.modules():
        aggr = getattr(module, "aggr_module", None)
        if aggr is not None and "pyg_sar" in packages(cast(Any, type(module))):
            seen.update(aggr.modules())
        if module is not layer and module not in seen:
            yield module
        seen.add(module)


def reason(layer: torch.nn.Module, call: dict[str, Any] | None = None, graph: ShardedGraph | None = None) -> str:
    """Return what a module does with all nodes or edges at once, or nothing; for arguments see :data:`UNLESS`."""
    names = entries(cast(Any, type(layer)))
    return next((WHOLE_GRAPH[n] for n in names if not (n in UNLESS and UNLESS[n](layer, call or {}, graph))), "")


@functools.cache
def packages(cls: type) -> set[str]:
    """Return where a class and its base classes are from."""
    return {base.__module__.partition(".")[0] for base in cls.__mro__}


@functools.cache
def entries(cls: type) -> list[str]:
    """Return the entries that a class of torch or PyG and its subclasses have; pyg_sar's own ones know what they do."""
    names: list[str] = []
    for base in cls.__mro__:
        package = base.__module__.split(".")
        if package[0] == "pyg_sar":
            break
        if package[0] in ("torch", "torch_geometric"):
            names += [base.__name__, ".".join(package[:3])]
    return [name for name in names if name in WHOLE_GRAPH]
