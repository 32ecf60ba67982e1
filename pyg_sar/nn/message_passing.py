r"""The base of all layers: PyG's ``propagate``, which streams when it is given a sharded graph."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
import torch_geometric.nn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.dense.linear import is_uninitialized_parameter

from pyg_sar import ops
from pyg_sar.distributed.assemble import shard
from pyg_sar.distributed.reverse import reverse
from pyg_sar.edge_index import EDGES, SOURCES, ShardedEdgeIndex, fail, refuse_table, sharded
from pyg_sar.graph import Seeds, ShardedGraph, fingerprint
from pyg_sar.kinds import ROWS
from pyg_sar.nn.arguments import FLOW, PAIR, Call, check_destinations, check_edges, edge_arguments
from pyg_sar.nn.rows import SIMPLE
from pyg_sar.nn.strategy import rows_of_edges, strategy
from pyg_sar.watch import gives

OWN = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")


class MessagePassing(torch_geometric.nn.MessagePassing):
    r"""Base class for layers that stream source shards through their aggregation.

    A subclass may say how it streams by :meth:`stream`. Any other one, also of your own, streams by its own code, run
    block by block or in chunks of destinations, if that works out (see :mod:`pyg_sar.nn.strategy`). Otherwise it runs
    in one shot: PyG's own code on the rows of all blocks at once, which is exact too or raises; so it does with hooks
    on messages and ``explain``. An ordinary ``edge_index`` on the CPU runs through the kernels of layers
    with a :meth:`stream` as a graph of a single block, which is made once for each tensor and kept as long as that
    lives (``pyg_sar.shard(edge_index, num_nodes)`` makes it by hand); without compiled kernels, under
    :func:`torch.compile`, and for other layers, it is PyG's layer.
    """

    streamable: tuple[str, ...] = ()  # the aggregations that have a streaming form
    edge_arguments: ClassVar[dict[str, int]] = {}  # of forward, by their positions

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # PyG replaces inherited methods by generated ones when a class is first constructed; only what stands in the
        # class's own dictionary survives.
        for name in ("propagate", "edge_updater"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(MessagePassing, name))
        cls.edge_arguments = edge_arguments(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on edge tensors that have a row for each edge, and as it is on a sharded graph, which
        :func:`torch.compile` leaves alone: the rest of the model is compiled.
        """
        if torch.compiler.is_compiling():
            run = super().__call__ if next(sharded(args, kwargs), None) is None else self.uncompiled
            return run(*args, **kwargs)
        check_edges(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    @torch.compiler.disable
    def uncompiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer as it is."""
        return self(*args, **kwargs)

    def streamed(self, edge_index: Any, x: Any, size: Any = None) -> ShardedGraph | None:
        """Return the graph over which this call can stream source rows ``x``, a tensor or a pair, if there is one."""
        sharded = isinstance(edge_index, ShardedEdgeIndex)
        if (sharded and not edge_index.streams) or (not sharded and not has_kernels(edge_index, x)):
            return None
        cls: Any = type(self)
        patched = any(name in self.__dict__ for name in OWN)
        if watched(self) or self.flow != FLOW or patched or overridden(cls) or not self.can_stream():
            return None
        if sharded:
            refuse_table(edge_index, *(x if isinstance(x, (tuple, list)) else (x,)))
        return edge_index.graph if sharded else one_block(edge_index, sizes(x, size, self.node_dim))

    def pair(self, x: Any, edge_index: Any) -> Any:
        """Return rows of sources and destinations: in a layer of a message flow these are the first of the sources."""
        if not isinstance(edge_index, ShardedEdgeIndex):
            return x
        if isinstance(x, PAIR):
            check_destinations(self, "x", x, edge_index)
        elif isinstance(x, Tensor) and edge_index.of_flow:
            return x, x.movedim(self.node_dim, 0)[: edge_index._graph.num_dst].movedim(0, self.node_dim)
        return x

    def can_stream(self) -> bool:
        """Whether the options of this layer have a streaming form."""
        return self.aggr in self.streamable

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate the arguments of :meth:`propagate` over ``graph``."""
        raise NotImplementedError

    @gives(ROWS)
    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Stream if possible, else run PyG's own code."""
        if type(self).stream is not MessagePassing.stream:
            graph = self.streamed(edge_index, kwargs.get("x"), size)
            if graph is not None:
                return self.stream(graph, **kwargs)
        call = Call(self, kwargs)
        if isinstance(edge_index, ShardedEdgeIndex):
            out = replay(call, edge_index, size)
            if out is not None:
                return out
        try:
            return call.run(edge_index, size, kwargs)
        except IndexError as error:  # PyG's quantiles of nodes without in-edges, for example
            if not isinstance(edge_index, ShardedEdgeIndex):
                raise
            raise RuntimeError(
                f"{type(self).__name__}(aggr={self.aggr}) does not stream, and PyG's own code failed on this worker's "
                f"{edge_index.size(1)} edges ({error}). The aggregations {', '.join(SIMPLE)} work on every graph."
            ) from error

    @gives(ROWS)
    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Stream if possible, else run PyG's own code; the generated one does not know the arguments of an overridden
        ``forward``.
        """
        call = Call(self, kwargs, updates=True)
        out = replay(call, edge_index, size) if isinstance(edge_index, ShardedEdgeIndex) else None
        return call.run(edge_index, size, kwargs) if out is None else out


def has_kernels(edge_index: Any, x: Any) -> bool:
    """Whether an ordinary ``edge_index`` can be streamed by compiled kernels."""
    if not ops.KERNELS or type(edge_index) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    rows = [t for t in (x if isinstance(x, (tuple, list)) else (x,)) if t is not None]
    return (
        edge_index.layout == torch.strided
        and edge_index.is_cpu
        and not edge_index.is_inference()  # nobody counts its changes
        and len(rows) > 0
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and t.layout == torch.strided for t in rows)
    )


def sizes(x: Any, size: Any, node_dim: int) -> tuple[int, int]:
    """Return the numbers of sources and destinations, as PyG finds them."""
    src, dst = x if isinstance(x, (tuple, list)) else (x, x)
    if dst is not None:
        num_dst = dst.size(node_dim)
    else:
        num_dst = src.size(node_dim) if size is None or size[1] is None else size[1]
    return src.size(node_dim), num_dst


GRAPHS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def one_block(edge_index: Tensor, num_nodes: tuple[int, int]) -> ShardedGraph:
    """Return the graph of an ordinary ``edge_index``, made once as long as that lives unchanged."""
    version, sums, graphs = GRAPHS.get(edge_index, (None, None, {}))
    now = fingerprint(edge_index)  # its version does not tell of changes through '.data' or NumPy
    if version != edge_index._version or not torch.equal(now, sums):
        GRAPHS[edge_index] = edge_index._version, now, (graphs := {})
    if num_nodes not in graphs:
        same = num_nodes[0] == num_nodes[1]
        graph = shard(edge_index.detach(), num_nodes[0] if same else num_nodes)._graph  # all of it: nothing to refuse
        graphs[num_nodes] = graph.replace(seeds=Seeds(None))
    return graphs[num_nodes]


def misses_loops(layer: Any, graph: ShardedGraph, edge_index: Any) -> bool:
    """Whether PyG must add self-loops between two sets of nodes, by its rule for the smaller one."""
    return layer.add_self_loops and graph.bipartite and not isinstance(edge_index, ShardedEdgeIndex)


@torch.compiler.disable
def replay(call: Call, edge_index: ShardedEdgeIndex, size: Any) -> Tensor | None:
    """Stream a layer by its own code, or by kernels that do the same; None if that is not possible."""
    layer = call.layer
    if edge_index.kind == SOURCES or watched(layer):
        return None
    graph = edge_index.regroup(layer.aggr_module)
    backwards = call.backwards
    if not backwards and edge_index.kind == EDGES:
        return stream(call, edge_index, graph, size)
    if graph.origin is not None:
        return None
    turned = reverse(graph) if backwards == (edge_index.kind == EDGES) else None
    edge, _ = rows_of_edges(call, graph)
    if turned is not None:
        kwargs = {name: turned.bring(value) if name in edge else value for name, value in call.kwargs.items()}
        call = dataclasses.replace(call, kwargs=kwargs)
    out = stream(call, edge_index, graph if turned is None else turned.graph, size)
    return turned.take_back(out) if turned is not None and out is not None and call.updates else out


def stream(call: Call, edge_index: ShardedEdgeIndex, graph: ShardedGraph, size: Any) -> Tensor | None:
    """Stream a call whose messages flow along the edges of ``graph``."""
    # There the layer counts by another rule, or these are rows of sources.
    others = (graph.bipartite and size is not None) or call.backwards
    for name in () if others else call.lifted & call.kwargs.keys():
        if isinstance(call.kwargs[name], PAIR) or f"{name}_j" not in call.asked:
            check_destinations(call.layer, name, call.kwargs[name], edge_index)
    plan, name = strategy(call, graph, size), type(call.layer).__name__
    if plan.way == "one shot":
        return None
    if plan.way == "refused":
        fail(edge_index, f"'{name}' cannot run on a share of the graph: {plan.why}")
    if not edge_index.streams and (plan.ordered or plan.way == "padded"):
        fail(edge_index, f"'{name}' needs all edges in their order, but some were added or left out since they were "
             f"loaded: do so before 'partition'")  # fmt: skip
    return plan.run(call, graph)


def watched(layer: Any) -> bool:
    """Whether somebody looks at messages, or they are cut into pieces."""
    hooked = any(hooks for name, hooks in layer.__dict__.items() if name.endswith("_hooks") and is_message(name))
    return hooked or layer.explain or layer.decomposed_layers > 1


@functools.cache
def overridden(cls: type) -> bool:
    """Whether a subclass has a message or aggregation of its own, which PyG's code runs in one shot."""
    base = next(c for c in cls.__mro__ if c.__module__.startswith("torch_geometric."))
    return any(getattr(cls, name) is not getattr(base, name) for name in OWN)


def is_message(name: str) -> bool:
    """Whether a dictionary of hooks belongs to message passing, not to the module as a whole."""
    return name.startswith(("_propagate", "_message", "_aggregate", "_edge_update"))


def affine(lin: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of a linear layer that does nothing else, so that several can become one product."""
    hooks = (lin._forward_hooks, lin._forward_pre_hooks, lin._backward_hooks, lin._backward_pre_hooks)
    if type(lin) is not torch_geometric.nn.Linear or any(hooks) or is_uninitialized_parameter(lin.weight):
        return None
    return lin.weight, lin.bias


def add(own: Tensor, term: Tensor) -> Tensor:
    """Return the sum, in the memory of ``own`` (which nobody else reads) if its type allows."""
    return own.add_(term) if torch.promote_types(own.dtype, term.dtype) == own.dtype else own + term
