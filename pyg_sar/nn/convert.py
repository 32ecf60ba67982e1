r"""A model of PyG becomes one whose layers stream."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn

from pyg_sar.edge_index import whole_graph
from pyg_sar.nn.batch_norm import BatchNorm, BatchNorm1d
from pyg_sar.nn.gat_conv import GATConv
from pyg_sar.nn.gatv2_conv import GATv2Conv
from pyg_sar.nn.gcn_conv import GCNConv
from pyg_sar.nn.gin_conv import GINConv
from pyg_sar.nn.graph_norm import GraphNorm
from pyg_sar.nn.graph_size_norm import GraphSizeNorm
from pyg_sar.nn.instance_norm import InstanceNorm
from pyg_sar.nn.layer_norm import LayerNorm
from pyg_sar.nn.mean_subtraction_norm import MeanSubtractionNorm
from pyg_sar.nn.message_passing import MessagePassing
from pyg_sar.nn.pair_norm import PairNorm
from pyg_sar.nn.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_sar.nn.sage_conv import SAGEConv
from pyg_sar.nn.transformer_conv import TransformerConv

OURS = (
    BatchNorm, BatchNorm1d, FastRGCNConv, GATConv, GATv2Conv, GCNConv, GINConv, GraphNorm, GraphSizeNorm, InstanceNorm,
    LayerNorm, MeanSubtractionNorm, PairNorm, RGCNConv, SAGEConv, TransformerConv,
)  # fmt: skip
# By the class of PyG or torch that each of them takes the place of.
FORMS: dict[type, type] = {
    next(base for base in cls.__mro__ if base.__module__.partition(".")[0] != "pyg_sar"): cls for cls in OURS
}


def convert(module: torch.nn.Module, group: Any = None, verbose: bool = False) -> torch.nn.Module:
    r"""Turn every layer of a model that has a form in :mod:`pyg_sar.nn` into that, in place, and return the model.

    A layer changes its class and nothing else: parameters, buffers, hooks, names in the ``state_dict`` and whoever
    refers to it stay, also an optimizer. It goes on to work on an ordinary ``edge_index``. Layers whose message
    passing has no form here run PyG's own code on a :class:`~pyg_sar.edge_index.ShardedEdgeIndex`, in one shot:
    exactly, or not at all.

    .. code-block:: python

        model = pyg_sar.nn.convert(torch_geometric.nn.GAT(100, 64, 3, 47, norm="BatchNorm"))
        out = model(data.x, data.edge_index)

    Only layers of exactly PyG's or torch's classes change, because what a subclass adds might not be true of ours.

    Args:
        module (torch.nn.Module): The model.
        group (ProcessGroup, optional): The workers, for layers that look at the rows of all of them. (default:
            :obj:`None`, all of them)
        verbose (bool, optional): Whether to print what becomes of every layer. (default: :obj:`False`)

    Raises:
        NotImplementedError: If a layer would look at the rows of one worker where it must see all of them. Nothing is
            changed then.
    """
    table = [(name, layer, *fate(layer)) for name, layer in module.named_modules()]
    for name, layer, cls, why in table:
        if cls is None:
            raise NotImplementedError(
                f"'{type(layer).__name__}' ({name or 'the module itself'}) cannot run on a share of the graph, because "
                f"it {why}. Leave it out, or take what 'pyg_sar.nn' has."
            )
    for _, layer, cls, _ in table:
        if cls in FORMS.values():
            layer.__class__ = cls
            if hasattr(cls, "group"):
                layer.group = group
    if verbose:
        print(describe(table))
    return module


def fate(layer: torch.nn.Module) -> tuple[type | None, str]:
    """Return the class that a layer gets and what becomes of it; without a class, why it is refused, if it is."""
    cls = FORMS.get(type(layer), type(layer))
    if issubclass(cls, MessagePassing):
        return cls, "streams"
    if cls in FORMS.values():
        return cls, "sees the rows of all workers"
    if issubclass(cls, torch_geometric.nn.MessagePassing):
        return cls, "runs in one shot"
    if issubclass(cls, torch_geometric.nn.Aggregation):
        return cls, ""  # whether it may run is a matter of the layer
    why = whole_graph(layer, {}, None)
    return None if why else cls, why


def describe(table: list[tuple[str, torch.nn.Module, type | None, str]]) -> str:
    """Return a line for every layer of which there is something to say."""
    lines = [(name or "(model)", cls.__name__, what) for name, _, cls, what in table if cls is not None and what]
    widths = [max((len(line[k]) for line in lines), default=0) for k in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {cls:{widths[1]}}  {what}" for name, cls, what in lines)
