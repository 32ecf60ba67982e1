r"""What a layer is called with, sorted by what its rows stand for."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.group import is_local
from pyg_sar.edge_index import EDGES, ShardedEdgeIndex, wrong_rows
from pyg_sar.graph import ShardedGraph
from pyg_sar.trace import NotStreamable

PROPAGATE = torch_geometric.nn.MessagePassing.propagate
EDGE_UPDATER = torch_geometric.nn.MessagePassing.edge_updater
FLOW, PAIR = "source_to_target", (tuple, list)
EDGE_TENSORS = ("edge_weight", "edge_attr", "edge_type")  # as PyG's layers call them


def edge_arguments(cls: type) -> dict[str, int]:
    """Return where the forward method of a layer takes ``edge_index`` and tensors with a row for each edge."""
    names = list(inspect.signature(cls.forward).parameters)[1:]  # type: ignore[attr-defined]
    return {name: k for k, name in enumerate(names) if name in ("edge_index", *EDGE_TENSORS)}


def check_edges(layer: Any, args: Any, kwargs: Any) -> None:
    """Raise unless edge tensors have a row for each edge, or one that all edges share: where they enter, because a
    layer that adds self-loops would take as many rows of a longer one as it needs.

    On an ordinary ``edge_index`` PyG's own code does so for itself.
    """
    given = {n: args[k] if k < len(args) else kwargs.get(n) for n, k in layer.edge_arguments.items()}
    it: Any = given.pop("edge_index", None)
    sharded = isinstance(it, ShardedEdgeIndex)
    if not (sharded or (layer.streamable and type(it) is Tensor)) or it.dim() != 2:
        return
    for name, t in given.items():
        shared = not isinstance(t, Tensor) or t.dim() == 0 or (t.size(0) == 1 and not layer.streamable)
        if shared or t.size(0) == it.size(1):
            continue
        found = f"'{type(layer).__name__}' got '{name}' of shape {list(t.shape)}"
        if not sharded:
            raise ValueError(f"{found}, but 'edge_index' has {it.size(1)} edges: expected a row for each of them.")
        raise wrong_rows(it, found, f"{it.size(1)} edges", "edge_attr[data.e_id]")


@dataclass
class Call:
    """A call of a layer's ``propagate`` or ``edge_updater``.

    Args:
        layer: The layer.
        kwargs: The arguments.
        updates: Whether it updates edges, instead of aggregating messages.
    """

    layer: Any
    kwargs: dict[str, Any]
    updates: bool = False

    @property
    def asked(self) -> list[str]:
        """What the layer's code asks for."""
        return self.layer._edge_user_args if self.updates else self.layer._user_args

    @property
    def asked_by_messages(self) -> set[str]:
        """What its code for edges asks for."""
        functions = ("edge_update",) if self.updates else ("message", "aggregate")
        return {name for f in functions for name in self.layer.inspector.get_param_names(f)}

    @property
    def lifted(self) -> set[str]:
        """The names of arguments that have rows of nodes."""
        return {name[:-2] for name in self.asked if name.endswith(("_i", "_j"))}

    def run(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        """Run PyG's own code.

        Where messages flow to sources, the code that PyG generates for a class, and runs, takes a pair for the rows at
        the beginning and at the end of a message; this code takes it for those of sources and destinations.
        """
        if self.backwards:
            kwargs = {name: v[::-1] if name in self.lifted and isinstance(v, PAIR) else v for name, v in kwargs.items()}
        return (EDGE_UPDATER if self.updates else PROPAGATE)(self.layer, edge_index, size=size, **kwargs)

    @property
    def backwards(self) -> bool:
        """Whether messages flow from destinations to sources."""
        return self.layer.flow != FLOW


def check_destinations(layer: Any, name: str, value: Any, it: ShardedEdgeIndex) -> None:
    """Raise unless rows of destinations, the second ones of a pair, or all that a layer is given of what it reads by
    destination alone, are those of this worker: the rest might be left out, or one row be taken for all.
    """
    t = value[1] if isinstance(value, PAIR) else value
    if it.kind != EDGES or not isinstance(t, Tensor) or t.dim() < abs(layer.node_dim):
        return
    found, expected = t.size(layer.node_dim), it._graph.num_dst
    if found != expected and (isinstance(value, PAIR) or found != it._graph.num_src):
        got = f"'{type(layer).__name__}' got '{name}' of shape {list(t.shape)}"
        raise wrong_rows(it, got, f"{expected} destinations", "x[data.n_id]")


class Ref(NamedTuple):
    """Where an argument stands among the :class:`Inputs`."""

    kind: str  # "src", "table", "dst", "edge", "const"
    number: int


@dataclass
class Inputs:
    """The arguments of a call, by what their rows stand for; nodes come first in them.

    Args:
        src: Rows of the own sources.
        table: The same of integers, which are fetched in one shot.
        dst: Rows of the own destinations.
        edge: Rows of the edges.
        const: What all edges share.
        spec: Every argument, as it is or as a :class:`Ref`; a pair of those for rows of sources and destinations.
    """

    src: list[Tensor] = field(default_factory=list)
    table: list[Tensor] = field(default_factory=list)
    dst: list[Tensor] = field(default_factory=list)
    edge: list[Tensor] = field(default_factory=list)
    const: list[Tensor] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, value: Tensor) -> Ref:
        """Keep a tensor, once."""
        held = getattr(self, kind)
        for k, t in enumerate(held):
            if t is value:
                return Ref(kind, k)
        held.append(value)
        return Ref(kind, len(held) - 1)

    def only(self, names: frozenset[tuple[str, int]]) -> set[Ref]:
        """Return the tensors that arguments of these names, and places in a pair, stand for, and no others do."""
        refs: dict[bool, set[Ref]] = {True: set(), False: set()}
        for name, spec in self.spec.items():
            for side, ref in enumerate(spec if type(spec) is tuple else (spec,)):
                if isinstance(ref, Ref):
                    refs[(name, side) in names].add(ref)
        return refs[True] - refs[False]

    def packed(self, num_src: int) -> Tensor:
        """Return the rows of sources side by side."""
        if not self.src:
            like = next((t for t in (*self.dst, *self.edge) if t.is_floating_point()), torch.empty(0))
            return like.new_zeros(num_src, 1)
        return torch.cat([flat(t) for t in self.src], 1) if len(self.src) > 1 else flat(self.src[0])

    def unpacked(self, x: Tensor) -> list[Tensor]:
        """Return the rows of some sources as they were."""
        if not self.src:
            return []
        widths = [math.prod(t.shape[1:]) for t in self.src]
        return [c.view(c.size(0), *t.shape[1:]) for c, t in zip(x.split(widths, 1), self.src, strict=True)]


def bind(call: Call, graph: ShardedGraph, edge: frozenset[str]) -> Inputs:
    """Sort the arguments of a call; those named ``edge`` have a row for each edge."""
    asked, inputs, num_dst, flow = call.asked, Inputs(), graph.num_dst, graph.origin is not None
    for name, value in call.kwargs.items():
        ends = [f"{name}_j" in asked, f"{name}_i" in asked]
        if any(ends):
            if name in asked and isinstance(value, PAIR):
                raise NotStreamable(f"it asks for the pair '{name}' as a whole")
            if name in asked and isinstance(value, Tensor):
                ends[1] = True  # as a whole it is read by 'update', which does so at the end
            inputs.spec[name] = _bind_nodes(inputs, call.layer.node_dim, value, ends, num_dst, flow)
        elif name in asked:
            inputs.spec[name] = _bind_other(inputs, name, value, name in edge)
    floats = {t.dtype for t in inputs.src}
    if len(floats) > 1:
        raise NotStreamable(f"sources have rows of several types ({', '.join(sorted(map(str, floats)))})")
    return inputs


def _bind_nodes(inputs: Inputs, node_dim: int, value: Any, lifted: list[bool], num_dst: int, flow: bool) -> Any:
    pair = isinstance(value, (tuple, list))
    if flow and lifted[0] and not pair and value is not None:
        raise NotStreamable("a layer of a message flow needs rows of sources and destinations")
    ends: list[Ref | None] = []
    for side, t in enumerate(value if pair else (value, value)):
        if t is None or not lifted[side]:
            ends.append(None)
            continue
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.dim() < abs(node_dim):
            raise NotStreamable("rows of nodes are no tensors")
        if isinstance(t, torch.nn.Parameter) and not is_local(t):
            raise NotStreamable("it has a parameter for every node of the whole graph")
        t = t.movedim(node_dim, 0) if node_dim % t.dim() else t
        if side == 0:
            ends.append(inputs.add("src" if t.is_floating_point() else "table", t))
        else:
            ends.append(inputs.add("dst", t if pair or t.size(0) == num_dst else t[:num_dst]))
    return tuple(ends)


def _bind_other(inputs: Inputs, name: str, value: Any, is_edge: bool) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise NotStreamable(f"'{name}' is sparse")
        return inputs.add("edge" if is_edge else "const", value)
    if isinstance(value, (list, tuple, dict)):
        raise NotStreamable(f"'{name}' is a {type(value).__name__}")
    return value


def nodes_at(t: Tensor, node_dim: int) -> Tensor:
    """Return rows of nodes with these in the dimension where the layer has them."""
    return t.movedim(0, node_dim) if node_dim % t.dim() else t


def flat(t: Tensor) -> Tensor:
    """Return rows as vectors."""
    return t.reshape(t.size(0), math.prod(t.shape[1:]))
