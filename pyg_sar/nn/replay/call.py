r"""A call of a layer's ``propagate`` or ``edge_updater``, and its arguments sorted by what their rows stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn import aggr

from pyg_sar.distributed.group import is_local
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.trace import NotStreamable
from pyg_sar.operations import EDGES
from pyg_sar.reduce.base import flat
from pyg_sar.refusals import wrong_rows

PROPAGATE = torch_geometric.nn.MessagePassing.propagate
FLOW, PAIR = "source_to_target", (tuple, list)


class Ends(tuple):
    """What a chunk of the graph has of the rows of all nodes, as sources and as destinations: ``update``, which may ask
    for these rows as a whole, gets those of destinations.
    """


def alike(pair: Any, made: Iterable[Any]) -> tuple[Any, ...]:
    """Return what was made of both of a pair, which are ends of the same rows if they were."""
    return Ends(made) if type(pair) is Ends else tuple(made)


@dataclass
class Call:
    """A call of a layer's ``propagate``, or of its ``edge_updater`` if it ``updates`` edges, with its arguments; those
    named ``nodes`` have rows of nodes, as far as that is known, though none are read for edges.
    """

    layer: Any
    kwargs: dict[str, Any]
    updates: bool = False
    nodes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Fill in defaults of what is not given, as the code does that PyG generates for a class and this one is run
        instead of.
        """
        inspector, special = self.layer.inspector, self.layer.special_args
        functions = ("edge_update",) if self.updates else ("message", "aggregate", "update")
        for param in (p for function in functions for p in inspector.get_params(function)):
            name = param.name[:-2] if param.name.endswith(("_i", "_j")) else param.name
            if param.default is not Parameter.empty and param.name not in special and name not in self.kwargs:
                self.kwargs = {**self.kwargs, name: param.default}

    @property
    def asked(self) -> list[str]:
        """What the layer's code asks for."""
        return self.layer._edge_user_args if self.updates else self.layer._user_args

    @property
    def lifted(self) -> set[str]:
        """The names of arguments that have rows of nodes."""
        return {name[:-2] for name in self.asked if name.endswith(("_i", "_j"))} | self.nodes

    @property
    def for_update(self) -> set[str]:
        """The names of arguments that ``update`` alone asks for."""
        update, *others = (set(self.layer.inspector.get_param_names(f)) for f in ("update", "message", "aggregate"))
        return set() if self.updates else update.difference(*others)

    @property
    def backwards(self) -> bool:
        """Whether messages flow from destinations to sources."""
        return self.layer.flow != FLOW

    def run(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Any:
        """Run PyG's own code.

        Where messages flow to sources, the code that PyG generates for a class, and runs, takes a pair for the rows at
        the beginning and at the end of a message; this code takes it for those of sources and destinations.
        """
        if self.backwards:
            kwargs = {name: v[::-1] if name in self.lifted and isinstance(v, PAIR) else v for name, v in kwargs.items()}
        layer = self.layer
        if not self.updates:
            return PROPAGATE(layer, edge_index, size=size, **kwargs)
        # PyG's 'edge_updater' forgets 'size': where no rows are read by destination, it counts those of sources.
        given = layer._collect(layer._edge_user_args, edge_index, layer._check_input(edge_index, size), kwargs)
        return layer.edge_update(**layer.inspector.collect_param_data("edge_update", given))

    def map(self, make: Callable[[str, Any], Any], edge: frozenset[str], bipartite: bool) -> Call:
        """Return the call with other arguments.

        Args:
            make: ``make(kind, value)``: an argument in place of another one; its kind is ``"src"``, ``"dst"``,
                ``"edge"`` or ``"const"``. Of a pair of rows of nodes it makes each.
            edge: The arguments that have a row for each edge.
            bipartite: Whether sources and destinations are two sets of nodes; of one, all rows are sources'.
        """
        kwargs, lifted, asked = {}, self.lifted, self.asked
        for name, value in self.kwargs.items():
            if name in lifted and isinstance(value, PAIR):
                kwargs[name] = alike(value, (make(kind, v) for kind, v in zip(("src", "dst"), value, strict=True)))
            elif name in lifted:
                kwargs[name] = make("dst" if bipartite and f"{name}_j" not in asked else "src", value)
            else:
                kwargs[name] = make("edge" if name in edge else "const", value)
        return replace(self, kwargs=kwargs)

    def bind(self, graph: ShardedGraph, edge: frozenset[str]) -> Inputs:
        """Sort the arguments over a graph; those named ``edge`` have a row for each edge.

        Raises:
            NotStreamable: If an argument cannot be read block by block.
        """
        inputs, asked, lifted = Inputs(), self.asked, self.lifted
        for name, value in self.kwargs.items():
            if name in lifted:
                inputs.spec[name] = self._bind_nodes(inputs, name, value, graph)
            elif name in asked:
                inputs.spec[name] = value
                if isinstance(value, (list, tuple, dict)):
                    raise NotStreamable(f"'{name}' is a {type(value).__name__}")
                if isinstance(value, Tensor):
                    if value.layout != torch.strided:
                        raise NotStreamable(f"'{name}' is sparse")
                    inputs.spec[name] = inputs.add("edge" if name in edge else "const", value)
        types = {t.dtype for t in inputs.src}
        if len(types) > 1:
            raise NotStreamable(f"sources have rows of several types ({', '.join(sorted(map(str, types)))})")
        return inputs

    def _bind_nodes(self, inputs: Inputs, name: str, value: Any, graph: ShardedGraph) -> tuple[Ref | None, ...]:
        pair, asked, node_dim = isinstance(value, PAIR), self.asked, self.layer.node_dim
        of_one = isinstance(value, (Tensor, Ends))
        if name in asked and not of_one and value is not None:
            raise NotStreamable(f"it asks for the pair '{name}' as a whole")
        # A tensor that is asked for as a whole is read by 'update', which does so at the end.
        reads = f"{name}_j" in asked, f"{name}_i" in asked or (name in asked and of_one)
        # Of one set of nodes it may hold what was made for destinations, such as degrees.
        if graph.origin is not None and not graph.bipartite and reads[0] and not pair and value is not None:
            raise NotStreamable("a layer of a message-flow graph needs rows of sources and destinations")
        ends: list[Ref | None] = []
        for side, t in enumerate(value if pair else (value, value)):
            if t is None or not reads[side]:
                ends.append(None)
                continue
            least = 1 if name in self.nodes else abs(node_dim)
            if not isinstance(t, Tensor) or t.layout != torch.strided or t.dim() < least:
                raise NotStreamable("rows of nodes are no tensors")
            if isinstance(t, torch.nn.Parameter) and not is_local(t):
                raise NotStreamable("it has a parameter for every node of the whole graph")
            t = t.movedim(node_dim, 0) if node_dim % t.dim() else t
            if side == 0:
                ends.append(inputs.add("src" if t.is_floating_point() else "table", t))
            else:
                ends.append(inputs.add("dst", t if pair or t.size(0) == graph.num_dst else graph.dst_rows(t)))
        return tuple(ends)


class Ref(NamedTuple):
    """Where an argument stands among the :class:`Inputs`."""

    kind: str  # "src", "table", "dst", "edge", "const"
    number: int


@dataclass
class Inputs:
    """The arguments of a call, by what their rows stand for; nodes come first in them.

    Args:
        src: Rows of the local sources.
        table: The same of integers, which are fetched one-shot.
        dst: Rows of the local destinations.
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
        refs = [
            (ref, (name, side) in names)
            for name, spec in self.spec.items()
            for side, ref in enumerate(spec if type(spec) is tuple else (spec,))
            if isinstance(ref, Ref)
        ]
        return {ref for ref, inside in refs if inside} - {ref for ref, inside in refs if not inside}

    def packed(self, graph: ShardedGraph) -> Tensor:
        """Return the rows of sources side by side."""
        if not self.src:
            floats = (t.dtype for t in (*self.dst, *self.edge) if t.is_floating_point())
            return torch.zeros(graph.num_src, 1, dtype=next(floats, None), device=graph.device)
        return torch.cat([flat(t) for t in self.src], 1) if len(self.src) > 1 else flat(self.src[0])

    def unpacked(self, x: Tensor) -> list[Tensor]:
        """Return the rows of some sources as they were."""
        if not self.src:
            return []
        widths = [math.prod(t.shape[1:]) for t in self.src]
        return [c.view(c.size(0), *t.shape[1:]) for c, t in zip(x.split(widths, 1), self.src, strict=True)]


def has_message_hooks(layer: Any) -> bool:
    """Whether hooks or an explanation look at the messages of a layer, or it splits their columns itself."""
    functions = ("_propagate", "_message", "_aggregate", "_edge_update")
    hooks = (v for name, v in layer.__dict__.items() if name.endswith("_hooks") and name.startswith(functions))
    return any(hooks) or layer.explain or layer.decomposed_layers > 1


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether somebody looks at what a module is given and returns, so that it has to run."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


AGGREGATIONS: dict[type, tuple[str, ...]] = {  # which kernels have, and what they are called
    aggr.SumAggregation: ("sum", "add"), aggr.MeanAggregation: ("mean",), aggr.MaxAggregation: ("max",),
    aggr.MinAggregation: ("min",), aggr.SoftmaxAggregation: ("softmax",),
}  # fmt: skip


def aggregation_of(layer: Any) -> tuple[str, ...]:
    """Return what messages are combined by, by the names of that; none if it is not for a kernel to do."""
    module = layer.aggr_module
    return () if has_hooks(module) or "forward" in module.__dict__ else AGGREGATIONS.get(type(module), ())


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
        raise wrong_rows(it._graph, got, f"{expected} destinations", "x[data.n_id]")


def nodes_at(t: Tensor, node_dim: int) -> Tensor:
    """Return rows of nodes with these in the dimension where the layer has them."""
    return t.movedim(0, node_dim) if node_dim % t.dim() else t
