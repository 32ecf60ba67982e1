r"""A model of PyG becomes one whose layers stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn

from pyg_sar.distributed.group import takes_group
from pyg_sar.nn.conv.cheb_conv import ChebConv
from pyg_sar.nn.conv.gat_conv import GATConv
from pyg_sar.nn.conv.gatv2_conv import GATv2Conv
from pyg_sar.nn.conv.gcn2_conv import GCN2Conv
from pyg_sar.nn.conv.gcn_conv import GCNConv
from pyg_sar.nn.conv.gen_conv import GENConv
from pyg_sar.nn.conv.gin_conv import GINConv
from pyg_sar.nn.conv.han_conv import HANConv
from pyg_sar.nn.conv.hgt_conv import HGTConv
from pyg_sar.nn.conv.message_passing import DRIVERS, MessagePassing, is_wrapped, own_driver
from pyg_sar.nn.conv.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_sar.nn.conv.sage_conv import SAGEConv
from pyg_sar.nn.conv.transformer_conv import TransformerConv
from pyg_sar.nn.models.autoencoder import ARGA, ARGVA, GAE, VGAE
from pyg_sar.nn.models.correct_and_smooth import CorrectAndSmooth
from pyg_sar.nn.models.deep_graph_infomax import DeepGraphInfomax
from pyg_sar.nn.models.label_propagation import LabelPropagation
from pyg_sar.nn.norm.batch_norm import BatchNorm, BatchNorm1d
from pyg_sar.nn.norm.graph_norm import GraphNorm
from pyg_sar.nn.norm.graph_size_norm import GraphSizeNorm
from pyg_sar.nn.norm.hetero_batch_norm import HeteroBatchNorm
from pyg_sar.nn.norm.instance_norm import InstanceNorm
from pyg_sar.nn.norm.layer_norm import LayerNorm
from pyg_sar.nn.norm.mean_subtraction_norm import MeanSubtractionNorm
from pyg_sar.nn.norm.pair_norm import PairNorm
from pyg_sar.nn.pool.readout import Readout
from pyg_sar.nn.replay.choose import STRATEGIES
from pyg_sar.refusals import NO_SUCH, TABLES, for_layer
from pyg_sar.whole_graph import reason

OURS = (
    ARGA, ARGVA, BatchNorm, BatchNorm1d, ChebConv, CorrectAndSmooth, DeepGraphInfomax, FastRGCNConv, GAE, GATConv,
    GATv2Conv, GCN2Conv, GCNConv, GENConv, GINConv, GraphNorm, GraphSizeNorm, HANConv, HGTConv, HeteroBatchNorm,
    InstanceNorm, LabelPropagation, LayerNorm, MeanSubtractionNorm, PairNorm, RGCNConv, SAGEConv, TransformerConv, VGAE,
)  # fmt: skip
# By the class of PyG or torch that each of them takes the place of.
FORMS: dict[type, type] = {
    next(base for base in cls.__mro__ if base.__module__.partition(".")[0] != "pyg_sar"): cls for cls in OURS
}
# What our class adds to PyG's, in the place of which a layer's module of such a name would not be found.
TAKEN = [name for name in {*vars(MessagePassing)} - {*dir(torch_geometric.nn.MessagePassing)} if name[0] != "_"]


def convert(module: torch.nn.Module, group: Any = None, verbose: bool = False) -> torch.nn.Module:
    r"""Turn every layer of a model into one that works on a sharded graph, in place, and return the model.

    Layers that have a form in :mod:`pyg_sar.nn` become that; every other :class:`~torch_geometric.nn.MessagePassing`
    layer, of PyG or your own, streams by its own code, or runs it one-shot, whichever is verified to be exact when it
    is first called (see :mod:`pyg_sar.nn.replay.choose` and :func:`describe`).

    A layer changes its class and nothing else: parameters, buffers, hooks, names in the ``state_dict`` and whoever
    refers to it stay, also an optimizer. It goes on to work on an ordinary ``edge_index``, and can be copied and
    pickled.

    .. code-block:: python

        model = pyg_sar.nn.convert(torch_geometric.nn.GAT(100, 64, 3, 47, norm="BatchNorm"))
        out = model(data.x, data.edge_index)

    Normalisations change only if they are exactly of PyG's or torch's classes, because what a subclass adds might not
    be true of ours.

    Args:
        module (torch.nn.Module): The model.
        group (ProcessGroup, optional): The workers, for layers that look at the rows of all of them. (default:
            :obj:`None`, those that a layer knows, or all of them)
        verbose (bool, optional): Whether to print what becomes of every layer. (default: :obj:`False`)

    Returns:
        ``module``, which was changed in place.

    Raises:
        NotImplementedError: If a layer would look at the rows of one worker where it must see all of them. Nothing is
            changed then.
        ValueError: If a layer has an attribute by whose name our layers have something else. Nothing is changed then.
    """
    table = [(name, layer, *fate(layer)) for name, layer in outer_modules(module)]
    for name, layer, cls, why in table:
        if cls is not None and issubclass(cls, MessagePassing) and not isinstance(layer, MessagePassing):
            check_names(name, layer)
        if cls is None:
            raise NotImplementedError(
                f"'{type(layer).__name__}' ({name or 'the module itself'}) cannot run on a share of the graph, because "
                f"it {why}. {instead_of(layer)}{in_evaluation(layer)}."
            )
    for _, layer, cls, _ in table:
        if cls is not None and cls is not type(layer):
            if not is_wrapped(layer):
                layer.__dict__.pop("propagate", None)  # of the class that it was
            layer.__class__ = cls
        if group is not None and cls is not None and takes_group(cls):
            layer.group = group
    if verbose:
        print(describe(module))
    return module


def check_names(name: str, layer: torch.nn.Module) -> None:
    """Raise if a layer has something of a name by which our class has something else."""
    if taken := next((it for it in TAKEN if hasattr(layer, it)), ""):
        raise ValueError(
            f"'{type(layer).__name__}' ({name or 'the module itself'}) has a '{taken}', as layers of pyg_sar have one "
            f"that is something else. Give it another name."
        )


class Converted:
    """What a layer of another class gets with it: copies and pickles know it by that class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Say how to make it again."""
        (original,) = (base for base in type(self).__bases__ if base not in (Converted, Readout, MessagePassing))
        state = getattr(self, "__getstate__", lambda: self.__dict__)  # which each object has from Python 3.11 on
        return blank, (original,), state()


@functools.cache
def streaming(cls: type) -> type:
    """Return a subclass that streams, or, of an aggregation, that reads out the rows of all workers."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    if issubclass(cls, torch_geometric.nn.Aggregation):
        return type(cls.__name__, (Converted, Readout, cls), names)
    return type(cls.__name__, (Converted, cls, MessagePassing), names)


def blank(cls: type) -> Any:
    """Return an empty layer of the subclass that streams."""
    return object.__new__(streaming(cls))


def fate(layer: torch.nn.Module) -> tuple[type | None, str]:
    """Return the class that a layer gets and what becomes of it; without a class, why it is refused, if it is."""
    cls: Any = FORMS.get(type(layer), type(layer))
    if issubclass(cls, MessagePassing):
        known, own = STRATEGIES.get(layer, {}), cls in FORMS.values()
        # A form of ours that ran as PyG's code for a reason of that call, a string, streams without it.
        found = ["streams"] if own and all(isinstance(kind, str) for kind in known) else []
        found += dict.fromkeys(map(str, known.values()))
        return cls, ", ".join(found) or "streams by replay or runs one-shot: see when run"
    if cls in FORMS.values():
        return cls, "sees the rows of all workers"
    if issubclass(cls, torch_geometric.nn.MessagePassing):
        why = reason(layer)
        if why:
            return None, why
        name = next((name for name in DRIVERS if own_driver(cls, name)), "")
        return (cls, f"runs one-shot (it has a '{name}' of its own)") if name else (streaming(cls), "")
    if issubclass(cls, Readout):
        return cls, "reads out the rows of all workers"
    if issubclass(cls, torch_geometric.nn.EquilibriumAggregation):
        return None, reason(layer)
    if issubclass(cls, torch_geometric.nn.Aggregation):
        return streaming(cls), ""
    why = reason(layer)
    return None if why else cls, why


def instead_of(layer: torch.nn.Module) -> str:
    """Return what to do instead of a layer that is refused: it may be of a subclass of what has a form."""
    if isinstance(layer, torch.nn.SyncBatchNorm):
        return "Take 'torch.nn.BatchNorm1d', of which 'convert' makes one over the rows of all workers"
    if type(layer).__name__ in TABLES:
        return for_layer(type(layer).__name__)
    form = next((FORMS[base] for base in type(layer).__mro__ if base in FORMS), None)
    return NO_SUCH if form is None else f"Leave it out, or take 'pyg_sar.nn.{form.__name__}'"


def in_evaluation(layer: torch.nn.Module) -> str:
    """Return that a layer is refused in training alone, if it is."""
    mode, layer.training = layer.training, False
    try:
        return ", or call 'eval()' before 'convert'" if mode and not reason(layer) else ""
    finally:
        layer.training = mode


def outer_modules(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules with their names but the aggregations that are part of a layer or of another one."""
    yield name, module
    inner = isinstance(module, (torch_geometric.nn.MessagePassing, torch_geometric.nn.Aggregation))
    for key, child in module.named_children():
        for path, found in outer_modules(child, f"{name}.{key}" if name else key):
            if not (inner and isinstance(found, torch_geometric.nn.Aggregation)):
                yield path, found


def describe(module: torch.nn.Module) -> str:
    """Return a table of what layers of a converted model do on a sharded graph: a line for each that has to do with it.

    How layers of other classes than those of :mod:`pyg_sar.nn` stream is known when they have been run.

    Args:
        module (torch.nn.Module): The model.
    """
    found = [(name or "(model)", type(layer).__name__, fate(layer)[1]) for name, layer in outer_modules(module)]
    lines = [line for line in found if line[2]]
    widths = [max((len(line[k]) for line in lines), default=0) for k in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {cls:{widths[1]}}  {what}" for name, cls, what in lines)
