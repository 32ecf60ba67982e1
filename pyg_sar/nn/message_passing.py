r"""The base of all layers: PyG's ``propagate``, which streams when it is given a sharded graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn.dense.linear import is_uninitialized_parameter

from pyg_sar import ops
from pyg_sar.distributed.assemble import shard
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Seeds, ShardedGraph
from pyg_sar.reduce import Extremum, Reduce, Rows, Sum
from pyg_sar.stream import Lin, start

PROPAGATE = torch_geometric.nn.MessagePassing.propagate
EDGE_UPDATER = torch_geometric.nn.MessagePassing.edge_updater
SUMS: tuple[str, ...] = ("sum", "add", "mean")
SIMPLE: tuple[str, ...] = (*SUMS, "max", "min")


class MessagePassing(torch_geometric.nn.MessagePassing):
    r"""Base class for layers that stream source shards through their aggregation.

    A subclass says how it streams by :meth:`stream`. Given a :class:`~pyg_sar.edge_index.ShardedEdgeIndex` that it
    cannot stream (a subclass with a message of its own, hooks on messages, ``explain``, another flow, an aggregation
    without a streaming form) it runs PyG's own code in one shot, which is exact too or raises. An ordinary
    ``edge_index`` on the CPU runs through the same kernels as a graph of a single block, which is made once for each
    tensor and kept as long as that lives (``pyg_sar.shard(edge_index, num_nodes)`` makes it by hand); without compiled
    kernels, and under :func:`torch.compile`, it is PyG's layer.
    """

    streamable: tuple[str, ...] = ()  # the aggregations that have a streaming form

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # PyG replaces inherited methods by generated ones when a class is first constructed; only what stands in the
        # class's own dictionary survives.
        for name in ("propagate", "edge_updater"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(MessagePassing, name))

    def streamed(self, edge_index: Any, x: Any, size: Any = None) -> ShardedGraph | None:
        """Return the graph over which this call can stream source rows ``x``, a tensor or a pair, if there is one."""
        sharded = isinstance(edge_index, ShardedEdgeIndex)
        if (sharded and not edge_index.streams) or (not sharded and not has_kernels(edge_index, x)):
            return None
        hooked = any(hooks for name, hooks in self.__dict__.items() if name.endswith("_hooks") and is_message(name))
        watched = hooked or self.explain or self.decomposed_layers > 1
        cls: Any = type(self)
        if watched or self.flow != "source_to_target" or overridden(cls) or not self.can_stream():
            return None
        return edge_index.graph if sharded else one_block(edge_index, sizes(x, size, self.node_dim))

    def pair(self, x: Any, edge_index: Any) -> Any:
        """Return rows of sources and destinations: in a layer of a message flow these are the first of the sources."""
        if isinstance(x, Tensor) and isinstance(edge_index, ShardedEdgeIndex) and edge_index.of_flow:
            return x, x.movedim(self.node_dim, 0)[: edge_index._graph.num_dst].movedim(0, self.node_dim)
        return x

    def can_stream(self) -> bool:
        """Whether the options of this layer have a streaming form."""
        return self.aggr in self.streamable

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate the arguments of :meth:`propagate` over ``graph``."""
        raise NotImplementedError

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Stream if possible, else run PyG's own code."""
        if type(self).stream is not MessagePassing.stream:
            graph = self.streamed(edge_index, kwargs.get("x"), size)
            if graph is not None:
                return self.stream(graph, **kwargs)
        try:
            return PROPAGATE(self, edge_index, size=size, **kwargs)
        except IndexError as error:  # PyG's quantiles of nodes without in-edges, for example
            if not isinstance(edge_index, ShardedEdgeIndex):
                raise
            raise RuntimeError(
                f"{type(self).__name__}(aggr={self.aggr}) does not stream, and PyG's own code failed on this worker's "
                f"{edge_index.size(1)} edges ({error}). The aggregations {', '.join(SIMPLE)} work on every graph."
            ) from error

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        """Run PyG's own code; the generated one does not know the arguments of an overridden ``forward``."""
        return EDGE_UPDATER(self, edge_index, size=size, **kwargs)


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
    version, graphs = GRAPHS.get(edge_index, (None, {}))
    if version != edge_index._version:
        GRAPHS[edge_index] = edge_index._version, (graphs := {})
    if num_nodes not in graphs:
        same = num_nodes[0] == num_nodes[1]
        graph = shard(edge_index.detach(), num_nodes[0] if same else num_nodes).graph
        graphs[num_nodes] = graph.replace(seeds=Seeds(None))
    return graphs[num_nodes]


def misses_loops(layer: Any, graph: ShardedGraph, edge_index: Any) -> bool:
    """Whether PyG must add self-loops between two sets of nodes, by its rule for the smaller one."""
    return layer.add_self_loops and graph.bipartite and not isinstance(edge_index, ShardedEdgeIndex)


@functools.cache
def overridden(cls: type) -> bool:
    """Whether a subclass has a message or aggregation of its own, which PyG's code runs in one shot."""
    base = next(c for c in cls.__mro__ if c.__module__.startswith("torch_geometric."))
    names = ("message", "aggregate", "update", "edge_update", "message_and_aggregate")
    return any(getattr(cls, name) is not getattr(base, name) for name in names)


def is_message(name: str) -> bool:
    """Whether a dictionary of hooks belongs to message passing, not to the module as a whole."""
    return name.startswith(("_propagate", "_message", "_aggregate", "_edge_update"))


def reduce_rows(
    graph: ShardedGraph, x: Tensor, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0
) -> Tensor:
    """Aggregate (weighted) source rows by one of PyG's simple aggregations.

    Args:
        graph: This worker's share of the graph.
        x: Own source rows, counted by dimension ``node_dim``.
        aggr: One of ``SIMPLE``.
        weight: Weight of each edge, for sums and means.
        node_dim: The dimension of the nodes.
    """
    return start_rows(graph, x, aggr, weight, node_dim)()


def start_rows(
    graph: ShardedGraph, x: Tensor, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0,
    lin: Lin | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Do as :func:`reduce_rows`, of rows mapped by ``lin`` if given, but return a function that ends it (see
    :func:`~pyg_sar.stream.start`).
    """
    if lin is not None and node_dim % x.dim() != 0:
        x, lin = F.linear(x, *lin), None
    if weight is None and lin is None and graph.is_constant(x):  # what is summed up is kept, and not its rows
        detached = x.detach()  # of which nothing is kept
        kept = graph.recall(x, graph, (aggr, node_dim), lambda: reduce_rows(graph, detached, aggr, None, node_dim))
        return lambda: kept
    if weight is not None:
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    first = node_dim % x.dim() == 0
    reduce: Reduce
    if aggr in ("max", "min"):
        reduce = Extremum(1 if aggr == "max" else -1)
    else:
        learn = weight is not None and weight.requires_grad
        once = len(graph.blocks) == 1 and graph.num_edges > 0
        reduce = Sum(learn_weight=learn, once=once, count=graph.degree if aggr == "mean" else None)
    others = Rows(edge=() if weight is None else (weight,))
    finish = start(graph, reduce, x if first else x.movedim(node_dim, 0), others, lin)
    # A view that moves nothing is no view: changes of it in place would be copied by autograd.
    return finish if first else lambda: finish().movedim(0, node_dim)


def affine(lin: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of a linear layer that does nothing else, so that several can become one product."""
    hooks = (lin._forward_hooks, lin._forward_pre_hooks, lin._backward_hooks, lin._backward_pre_hooks)
    if type(lin) is not torch_geometric.nn.Linear or any(hooks) or is_uninitialized_parameter(lin.weight):
        return None
    return lin.weight, lin.bias


def add(own: Tensor, term: Tensor) -> Tensor:
    """Return the sum, in the memory of ``own`` (which nobody else reads) if its type allows."""
    return own.add_(term) if torch.promote_types(own.dtype, term.dtype) == own.dtype else own + term
