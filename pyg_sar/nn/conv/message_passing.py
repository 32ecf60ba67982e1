r"""The base of all layers: PyG's ``propagate``, which streams when it is given a sharded graph."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.one_block import has_kernels, one_block, rows_in, sizes
from pyg_sar.nn.replay.call import FLOW, PAIR, Call, aggregation_of, check_destinations, has_message_hooks
from pyg_sar.nn.replay.dispatch import replay
from pyg_sar.offload.passes import bring_home
from pyg_sar.offload.rows import HostRows
from pyg_sar.operations import sharded
from pyg_sar.refusals import fail, for_layer, refuse_table, wrong_rows
from pyg_sar.watch import ROWS, gives, refuse_pairs, together
from pyg_sar.whole_graph import reason

DRIVERS = ("propagate", "edge_updater")
OWN = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
EDGE_TENSORS = ("edge_weight", "edge_attr", "edge_type")  # as PyG's layers call them
PAIR_HINT = re.compile(r"uple\[(typing\.)?(Optional\[)?(torch\.)?Tensor|Pair\w*Tensor")  # in each spelling


class MessagePassing(torch_geometric.nn.MessagePassing):
    r"""Base class for layers that stream source shards through their aggregation.

    A subclass may define its streaming form by :meth:`stream`. Any other one, also of your own, streams by its own
    code, run block by block or in chunks of destinations, if that works out (see :mod:`pyg_sar.nn.replay.choose`).
    Otherwise it runs one-shot: PyG's own code on the rows of all blocks at once, which is exact too or raises; so it
    does with hooks on messages and ``explain``.

    An ordinary ``edge_index`` on the CPU runs through the kernels of layers with a :meth:`stream` as a graph of a
    single block, which is made once for each tensor and kept as long as that lives (``pyg_sar.shard(edge_index,
    num_nodes)`` makes it explicitly); without compiled kernels, under :func:`torch.compile`, and for other layers, it
    is PyG's layer.
    """

    streamable: tuple[str, ...] = ()  # the aggregations that have a streaming form
    takes_ids = False  # whether integers may stand for rows
    # Where 'forward' takes 'edge_index' and tensors with a row for each edge, and pairs of rows in place of a tensor.
    edge_arguments: ClassVar[dict[str, int]] = {}
    pairs: ClassVar[dict[str, int]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # PyG replaces inherited methods by generated ones when a class is first constructed; only what stands in the
        # class's own dictionary survives.
        for name in DRIVERS:
            setattr(cls, name, own_driver(cls, name) or getattr(MessagePassing, name))
        cls._orig_propagate = cls._jinja_propagate = cls.propagate  # which PyG binds for explanations, and after them
        _, *parameters = inspect.signature(cls.forward).parameters.values()
        names = {p.name: k for k, p in enumerate(parameters)}
        cls.edge_arguments = {name: k for name, k in names.items() if name in ("edge_index", *EDGE_TENSORS)}
        cls.pairs = {p.name: names[p.name] for p in parameters if PAIR_HINT.search(str(p.annotation))}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on edge tensors that have a row for each edge, and as it is on a sharded graph, which
        :func:`torch.compile` leaves alone: the rest of the model is compiled.
        """
        if torch.compiler.is_compiling():
            run = super().__call__ if next(sharded(args, kwargs), None) is None else self.uncompiled
            return run(*args, **kwargs)
        together(args, kwargs)
        check_edges(self, args, kwargs)
        args, kwargs = with_destinations(self, args, kwargs)
        if self._compiled_call_impl is not None and next(sharded(args, kwargs), None) is not None:
            return self._call_impl(*args, **kwargs)  # of 'layer.compile()', too
        return super().__call__(*args, **kwargs)

    @torch.compiler.disable(reason="layers run as they are on a sharded graph, without 'fullgraph=True'")
    def uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as it is."""
        return self(*args, **kwargs)

    def streamed(self, edge_index: Any, x: Any, size: Any = None, whole: bool = True) -> ShardedGraph | None:
        """Return the graph over which this call can stream source rows ``x``, a tensor or a pair, if there is one; for
        the ``whole`` layer or its :meth:`propagate` alone.
        """
        sharded = isinstance(edge_index, ShardedEdgeIndex)
        if (sharded and not edge_index.streams) or (not sharded and not has_kernels(edge_index, x)):
            return None
        cls: Any = type(self)
        own = overridden(cls) or any(name in self.__dict__ for name in OWN)
        own = own or (whole and (drives(cls) or is_wrapped(self)))
        if own or has_message_hooks(self) or self.flow != FLOW:
            return None
        if self.aggr not in self.streamable or self.aggr not in aggregation_of(self):
            return None
        if not self.takes_ids and not all(t is None or t.is_floating_point() for t in rows_in(x)):
            return None
        if sharded:
            refuse_table(edge_index._graph, *rows_in(x))
        return edge_index.graph if sharded else one_block(edge_index, sizes(x, size, self.node_dim))

    def pair(self, x: Any, edge_index: Any) -> Any:
        """Return rows of sources and destinations, where only some of the sources are these."""
        if not isinstance(edge_index, ShardedEdgeIndex):
            return x
        if isinstance(x, PAIR):
            check_destinations(self, "x", x, edge_index)
            src, dst = x
            if isinstance(dst, HostRows):  # so are sources, or sums would be in memory
                return bring_home(src, dst.place.of_sources(edge_index._graph)), dst
        elif isinstance(x, Tensor) and edge_index.of_flow:
            return x, edge_index._graph.dst_rows(x, self.node_dim)
        return x

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        r"""Aggregate the arguments of :meth:`propagate` over ``graph``: what a subclass with a streaming form defines.

        Args:
            graph: This worker's share of the graph.
            kwargs: The arguments; rows of local nodes :math:`(|\mathcal{V}|, *)`, of edges :math:`(|\mathcal{E}|, *)`.

        Returns:
            The rows of the local destinations.
        """
        raise NotImplementedError

    def streams(self, kwargs: dict[str, Any]) -> bool:
        """Whether :meth:`stream` can do with these arguments of :meth:`propagate`; yes, by default."""
        return True

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Stream if possible, else run PyG's own code."""
        out = self.propagated(edge_index, size, kwargs)
        if out is not None:
            return out
        if isinstance(edge_index, ShardedEdgeIndex):
            refuse_aggregation(self, edge_index)
        try:
            call = Call(self, kwargs)
            return as_rows(self, edge_index, call.run(edge_index, size, call.kwargs))
        except IndexError as error:  # PyG's quantiles of nodes without in-edges, for example
            if not isinstance(edge_index, ShardedEdgeIndex):
                raise
            raise RuntimeError(
                f"{type(self).__name__}(aggr={self.aggr}) does not stream, and PyG's own code failed on this worker's "
                f"{edge_index.size(1)} edges ({error}). The aggregations {', '.join(SIMPLE)} work on every graph."
            ) from error

    @gives(ROWS)
    def propagated(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of :meth:`propagate` if it can stream."""
        if type(self).stream is not MessagePassing.stream and self.streams(kwargs):
            graph = self.streamed(edge_index, kwargs.get("x"), size, whole=False)
            if graph is not None:
                return self.stream(graph, **kwargs)
        return replay(Call(self, kwargs), edge_index, size) if isinstance(edge_index, ShardedEdgeIndex) else None

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Stream if possible, else run PyG's own code; the generated one does not know the arguments of an overridden
        ``forward``.
        """
        out = self.updated_edges(edge_index, size, kwargs)
        if out is not None:
            return out
        call = Call(self, kwargs, updates=True)
        return as_rows(self, edge_index, call.run(edge_index, size, call.kwargs))

    @gives(ROWS)
    def updated_edges(self, edge_index: Any, size: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the result of :meth:`edge_updater` if it can stream."""
        call = Call(self, kwargs, updates=True)
        return replay(call, edge_index, size) if isinstance(edge_index, ShardedEdgeIndex) else None


def refuse_aggregation(layer: Any, edge_index: ShardedEdgeIndex) -> None:
    """Raise for an aggregation that PyG's own code would run on this worker's edges in their order, or not at all."""
    for module in () if layer.aggr_module is None else layer.aggr_module.modules():
        if why := reason(module, {}, edge_index._graph):
            name = type(module).__name__
            what = f"'{name}' in '{type(layer).__name__}' cannot run on a share of the graph, because it {why}"
            fail(edge_index._graph, what, for_layer(name))


@gives(ROWS)
def as_rows(layer: Any, edge_index: Any, out: Any) -> Any:
    """Report what a layer's own code made, which ran one-shot: the watch has looked at it as at any other code."""
    return out


def check_edges(layer: Any, args: Any, kwargs: Any) -> None:
    """Raise unless edge tensors have a row for each edge, or one that all edges share: where they enter, because a
    layer that adds self-loops would take as many rows of a longer one as it needs.

    On an ordinary ``edge_index`` PyG's own code does so for itself.
    """
    given = {n: args[k] if k < len(args) else kwargs.get(n) for n, k in layer.edge_arguments.items()}
    it: Any = given.pop("edge_index", None)
    refuse_pairs(it, args, kwargs)
    sharded = isinstance(it, ShardedEdgeIndex)
    if not (sharded or (layer.streamable and type(it) is Tensor)) or it.dim() != 2 or it.layout != torch.strided:
        return
    for name, t in given.items():
        if sharded and isinstance(t, torch.nn.Parameter) and t.dim() > 0 and t.size(0) > 1:
            refuse_table(it._graph, t)
        if not isinstance(t, Tensor) or t.dim() == 0 or t.size(0) == it.size(1):
            continue
        if not (layer.streamable and layer.streams({name: t})) and (t.size(0) == 1 or not sharded):
            continue  # PyG's own code runs, and may share one row among all edges
        found = f"'{type(layer).__name__}' got '{name}' of shape {list(t.shape)}"
        if not sharded:
            raise ValueError(f"{found}, but 'edge_index' has {it.size(1)} edges: expected a row for each of them.")
        raise wrong_rows(it._graph, found, f"{it.size(1)} edges", "edge_attr[data.e_id]")


def with_destinations(layer: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a layer; on one of a message-flow graph with a pair of rows of sources and of
    destinations in place of a tensor, if it is said to take one, and in place of a pair of all rows of two sets of
    nodes, as heterogeneous models pass it first.
    """
    it: Any = next(sharded(args, kwargs), None)
    if it is None or not it.of_flow:
        return args, kwargs
    graph, dim = it._graph, layer.node_dim

    def ends(value: Any, takes_pair: bool, first: bool) -> Any:
        if takes_pair and not graph.bipartite and num_rows(value, dim) == graph.num_src:
            return value, graph.dst_rows(value, dim)
        of_both = (takes_pair or first) and isinstance(value, PAIR) and len(value) == 2
        if of_both and num_rows(value[1], dim) == graph.origin.given:
            return value[0], graph.dst_rows(value[1], dim)
        return value

    places = layer.pairs.values()
    args = tuple(ends(value, k in places, k == 0) for k, value in enumerate(args))
    return args, {name: ends(value, name in layer.pairs, name == "x") for name, value in kwargs.items()}


def num_rows(t: Any, dim: int) -> int:
    """Return the number of rows of a tensor; of anything else -1."""
    return t.size(dim) if isinstance(t, Tensor) and t.dim() >= abs(dim) else -1


def of_sources(x: Any) -> Tensor:
    """Return the rows of sources of a tensor, or of a pair of rows of sources and destinations."""
    return x if isinstance(x, Tensor) else x[0]


def loops_between_sets(layer: Any, graph: ShardedGraph, edge_index: Any) -> bool:
    """Whether PyG must add self-loops between two sets of nodes, by its rule for the smaller one."""
    return layer.add_self_loops and graph.bipartite and not isinstance(edge_index, ShardedEdgeIndex)


@functools.cache
def overridden(cls: type) -> bool:
    """Whether a subclass has a message or aggregation of its own, which PyG's code runs one-shot."""
    base = next(c for c in cls.__mro__ if c.__module__.startswith("torch_geometric."))
    return any(getattr(cls, name) is not getattr(base, name) for name in OWN)


def own_driver(cls: type, name: str) -> Callable | None:
    """Return a class's own version of ``propagate`` or ``edge_updater``, if it has one; PyG generates some."""
    ours = MessagePassing.__dict__[name]
    for base in cls.__mro__[: cls.__mro__.index(torch_geometric.nn.MessagePassing)]:
        method = base.__dict__.get(name)
        if method is not None and method.__module__ != f"{base.__module__}_{base.__name__}_{name}":
            return None if method is ours else method
    return None


def is_wrapped(layer: Any) -> bool:
    """Whether somebody put another ``propagate`` in the place of a layer's own, which PyG binds, too, where a layer is
    or was explained.
    """
    bound, cls = layer.__dict__.get("propagate"), type(layer)
    own = [getattr(cls, name, None) for name in ("propagate", "_orig_propagate", "_jinja_propagate")]
    return bound is not None and getattr(bound, "__func__", cls) not in own


@functools.cache
def drives(cls: type) -> bool:
    """Whether a class has one of its own, which ``forward`` must call."""
    return any(own_driver(cls, name) for name in DRIVERS)
