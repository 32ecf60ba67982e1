r"""What users pass on: a tensor ``[2, num_edges]`` that stands for a sharded graph.

Layers of :mod:`pyg_sar.nn` recognise a :class:`ShardedEdgeIndex` and stream. In any other PyG layer it behaves as the
``edge_index`` of the whole graph would, in one shot: row 0 numbers sources local-first, row 1 numbers the own
destinations, and

* reading node rows by sources is a differentiable exchange of rows,
* adding edge rows onto sources sends the sums to their owners,
* comparing a source with a destination tells self-loops,

so that degrees, self-loops, normalisation and messages come out exactly. What cannot be exact raises: an operation that
``OPERATIONS`` does not list, and a layer that looks at all nodes by other means than ``edge_index`` (``WHOLE_GRAPH``).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_sar import running
from pyg_sar.distributed.group import is_local, size_of
from pyg_sar.graph import ShardedGraph

# What a tensor holds: both rows, both rows the other way round, or source numbers alone.
EDGES, FLIPPED, SOURCES = "edge_index", "flipped edge_index", "row of sources"

PLAIN = torch._C.DisableTorchFunctionSubclass


class ShardedEdgeIndex(Tensor):
    r"""The edges that end on this worker, in place of ``edge_index``.

    Args:
        graph (ShardedGraph): This worker's share of the graph.

    It has no storage of its own; numbers are made when an operation asks for them.
    """

    _graph: ShardedGraph
    _kind: str
    _data: Tensor | None

    @staticmethod
    def __new__(cls, graph: ShardedGraph, kind: str = EDGES, data: Tensor | None = None) -> ShardedEdgeIndex:
        """Make a tensor; ``data`` holds the numbers of one that was derived."""
        shape = (2, graph.num_edges) if data is None else data.shape
        strides = None if data is None else data.stride()
        out = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=torch.int64, device=graph.device)
        out._graph, out._kind, out._data = graph, kind, data
        return out

    @property
    def graph(self) -> ShardedGraph:
        """The sharded graph, which layers stream over; only the ``edge_index`` as it was loaded has one."""
        refuse_whole_graph(self)
        if self._data is not None:
            raise AttributeError(
                f"This {self._kind} was derived by an operation on a sharded 'edge_index' and has no blocks to stream"
            )
        return self._graph

    @property
    def streams(self) -> bool:
        """Whether the edges are those of the sharded graph, so that layers can stream."""
        return self._data is None

    @property
    def kind(self) -> str:
        """What the numbers are: ``EDGES``, ``FLIPPED`` or ``SOURCES``."""
        return self._kind

    def regroup(self, aggr: torch.nn.Module | None = None) -> ShardedGraph:
        """Return the graph of these edges, which may have been derived by adding or leaving out some, or by flipping.

        Whoever asks may know more than ``WHOLE_GRAPH`` says of an aggregation ``aggr``.
        """
        refuse_whole_graph(self, () if aggr is None else aggr.modules())
        if self._data is None:
            return self._graph
        return self._graph.regroup(self._data.flip(0) if self._kind == FLIPPED else self._data)

    @property
    def of_flow(self) -> bool:
        """Whether this is a layer of a message flow, which has the in-edges of some destinations only."""
        return self._graph.origin is not None

    def merge(self) -> ShardedEdgeIndex:
        """Return the same edges, whose sources are fetched in one shot (mode 3)."""
        return ShardedEdgeIndex(self.graph.merge())

    def replace(self, **changes: Any) -> ShardedEdgeIndex:
        """Return the same edges with other fields of the graph, such as ``remat=False`` (mode 2)."""
        return ShardedEdgeIndex(self.graph.replace(**changes))

    def cache(self, x: Tensor) -> None:
        """Keep what layers fetch or sum up of node features that never change, instead of doing so in every step.

        Layers of :mod:`pyg_sar.nn` that are given this very tensor communicate for it once: ``SAGEConv`` (unless it
        projects features before), ``GINConv``, ``GCNConv`` and ``RGCNConv`` keep its aggregate, ``GATConv`` and
        ``RGCNConv`` with bases the rows of other workers, as long as the tensor lives. All workers call it alike.
        Changes in place, of the tensor or of an aggregate, are noticed, and must be made by all of them, too.

        Args:
            x (torch.Tensor): The own rows, such as ``data.x``.
        """
        graph = self.graph
        if x.requires_grad or x.is_inference() or x.dim() == 0 or x.size(0) != graph.num_src:
            raise ValueError(
                f"Expected an ordinary tensor without gradient that has one row for each of this worker's "
                f"{graph.num_src} nodes (got shape {list(x.shape)}, requires_grad={x.requires_grad})"
            )
        graph.constants[x] = x._version, WeakKeyDictionary()

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operation exactly, or refuse it."""
        # Operators of other libraries may share a name with one of torch's functions, but not its meaning.
        name = "" if isinstance(func, OPERATORS) else getattr(func, "__name__", "")
        with PLAIN():
            return HANDLERS.get(name, refuse)(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Refuse what reached the tensor without passing ``__torch_function__``."""
        refuse(func, args, kwargs or {})


OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def plain(value: Any) -> Any:
    """Replace every sharded tensor in an argument by its numbers."""
    if isinstance(value, ShardedEdgeIndex):
        return value._graph.coo() if value._data is None else value._data
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


def sharded(*values: Any) -> Iterator[ShardedEdgeIndex]:
    """Yield the sharded tensors in the arguments."""
    for value in values:
        if isinstance(value, ShardedEdgeIndex):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from sharded(*value)
        elif isinstance(value, dict):
            yield from sharded(*value.values())


def bind(args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Return the arguments of these names, given by position or by name; None for those not given."""
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in enumerate(names)]


NUMBERING = "its numbers mean something on this worker alone"


# What to do instead of what a user called: by its name, or by the package of PyG that it is from.
ADVICE = {
    "Use the layer of this name in 'pyg_sar.nn' if there is one, or 'pyg_sar.nn.convert'": "nn",
    "Do this to the whole graph, before 'partition'": "data datasets transforms utils",
    "Ask this of the whole graph, before 'partition'": "contains_isolated_nodes has_isolated_nodes is_coalesced "
    "is_sorted is_sorted_by_time is_undirected validate",
    "Draw pairs by 'pyg_sar.corrupt', or before 'partition'": "batched_negative_sampling negative_sampling "
    "structured_negative_sampling",
    "Split edges before 'partition', and give each worker its pairs by 'pyg_sar.links'": "RandomLinkSplit "
    "train_test_split_edges",
    "Sample before 'partition'; 'pyg_sar.message_flow' finds all that the outputs of some nodes depend on":
    "bipartite_subgraph dropout_node k_hop_subgraph loader sampler subgraph",
    "It belongs to this process: load the partition again instead, and read edges as a whole before 'partition'":
    "__array__ __reduce_ex__ numpy share_memory_ to_networkx to_scipy_sparse_matrix tolist",
    "There are 'data.num_nodes' nodes here; pass them as 'num_nodes' where a function asks for it": "amax amin max min",
    "In-edges are counted by 'degree(edge_index[1], data.num_nodes)', out-edges by 'edge_index[0]'": "bincount",
    "Its rows are 'edge_index[0]' and 'edge_index[1]', a mask chooses edges, 'edge_index[:, mask]', and rows of nodes "
    "are read by one of its rows, 'x[edge_index[0]]'":
    "T __getitem__ flatten index_select reshape select t transpose view",
}  # fmt: skip
INSTEAD = {name: advice for advice, names in ADVICE.items() for name in names.split()}
ELSE = "Do this before 'partition', or use what 'pyg_sar.nn' has for it; global ids are in 'data.n_id' and 'data.e_id'"
# Functions of PyG that need nothing but the number of nodes, and methods that are called by the name of their class.
COUNTED = ("add_remaining_self_loops", "add_self_loops", "degree", "get_laplacian", "scatter", "softmax")
ENTRIES = ("__call__", "__init__", "forward")
SPOKEN = {"__eq__": "==", "__getitem__": "indexing", "__ne__": "!=", "__reduce_ex__": "copying or saving",
          "__setitem__": "writing"}  # fmt: skip


def refuse(func: Callable, args: Any, kwargs: Any, why: str = NUMBERING) -> NoReturn:
    """Raise because of an operation."""
    it = next(sharded(args, kwargs))
    what, advice = called(func)
    fail(it, f"{what} cannot be computed exactly on the {it._kind} of a sharded graph: {why}", advice)


def called(func: Callable) -> tuple[str, str]:
    """Return what the user called, PyG's function or the one of torch, and what to do instead."""
    frame, outer = sys._getframe(1), None
    while frame.f_back is not None and (package := library(frame)):
        outer = frame if package == "torch_geometric" else outer
        frame = frame.f_back
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    if outer is None:
        unknown = name.startswith("_") and not name.endswith("__")  # to people
        place = f"Line {frame.f_lineno} of {os.path.basename(frame.f_code.co_filename)}"
        return place if unknown else f"'{SPOKEN.get(name, name)}'", INSTEAD.get(name, ELSE)
    method, owner = outer.f_code.co_name, outer.f_locals.get("self")
    cls, package = "" if owner is None else type(owner).__name__, outer.f_globals["__name__"].split(".")[1]
    advice = INSTEAD.get(cls, INSTEAD.get(method, INSTEAD.get(package, ELSE)))
    if name in ("max", "min") and method in COUNTED:
        advice = INSTEAD[name]
    return f"'{cls if cls and method in ENTRIES else '.'.join(filter(None, (cls, method)))}'", advice


def library(frame: Any) -> str:
    """Return the library that code is part of; torch for what PyG generates or wraps, the user's own has none."""
    module = frame.f_globals.get("__name__", "")
    nameless = module.endswith(("_propagate", "_edge_updater")) or frame.f_code.co_name == "wrapper"
    package = "torch" if nameless else module.partition(".")[0]
    return package if package in ("torch", "torch_geometric", "pyg_sar") else ""


def fail(it: ShardedEdgeIndex, what: str, advice: str = INSTEAD["nn"]) -> NoReturn:
    """Raise an error that names the way out."""
    raise NotImplementedError(f"[rank {rank_of(it)}] {what}. {advice}.")


def rank_of(it: ShardedEdgeIndex) -> int:
    """Return the number of this worker."""
    exchange = it._graph.exchange
    return getattr(exchange, "rank", getattr(getattr(exchange, "peers", None), "rank", 0))


def wrong_rows(it: ShardedEdgeIndex, found: str, rows: str, advice: str) -> ValueError:
    """Return the error for a tensor whose rows are not those of this worker's edges or nodes."""
    flow = ", in a message flow with 'edge_attr[flow.edges[k]]' and 'x[flow.rows]' for layer k" if it.of_flow else ""
    return ValueError(
        f"[rank {rank_of(it)}] {found}, but expected a row for each of this worker's {rows}. Take it from the loaded "
        f"data{flow}; of a tensor for the whole graph, '{advice}' are this worker's rows. Where edges were added or "
        f"left out, do the same to what belongs to them."
    )


def same(func: Callable, args: Any, kwargs: Any) -> Any:
    """Properties and other questions about the tensor that its numbers do not answer."""
    return func(*args, **kwargs)


def like(func: Callable, args: Any, kwargs: Any) -> Any:
    """New tensors of a type and shape: they hold no source numbers."""
    return func(*plain(args), **kwargs)


def identity(func: Callable, args: Any, kwargs: Any) -> Any:
    """Operations that leave the numbers as they are."""
    return args[0]


def copy(func: Callable, args: Any, kwargs: Any) -> Any:
    """Copy what was derived; the edges of the graph itself never change."""
    it = args[0]
    return it if it._data is None else ShardedEdgeIndex(it._graph, it._kind, it._data.clone())


def reshape(func: Callable, args: Any, kwargs: Any) -> Any:
    """Give sources another shape; edges have two rows."""
    it = args[0]
    out = func(*plain(args), **kwargs)
    if it._kind != SOURCES and out.shape != it.shape:
        refuse(func, args, kwargs, "its two rows hold numbers of different kinds")
    return ShardedEdgeIndex(it._graph, it._kind, out)


def compare(func: Callable, args: Any, kwargs: Any) -> Any:
    """Tell edge by edge whether sources equal destinations; other numbers mean something else."""
    one, other = bind(args, kwargs, "input", "other")
    known = list(sharded(args))
    if not isinstance(other, Tensor) or other.shape != one.shape or {s._kind for s in known} != {SOURCES}:
        refuse(func, args, kwargs, "it compares numbers of different kinds")
    if len(known) == 1:
        refuse_two_sets(func, args, known[0]._graph)
    elif known[0]._graph is not known[1]._graph:
        refuse(func, args, kwargs, "it compares sources of different graphs")
    return func(*plain(args))


def refuse_two_sets(func: Callable, args: Any, graph: ShardedGraph) -> None:
    """Self-loops need one set of nodes."""
    if graph.bipartite:
        refuse(func, args, {}, "it looks for self-loops between two sets of nodes (pass 'add_self_loops=False')")


def concatenate(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join edges with other edges of the same graph, or with one self-loop at every node."""
    tensors, dim = bind(args, kwargs, "tensors", "dim")
    first = next(sharded(tensors))
    for t in tensors:
        if isinstance(t, ShardedEdgeIndex):
            known = t._kind == first._kind and t._graph is first._graph
        else:
            refuse_two_sets(func, args, first._graph)
            loops = torch.arange(first._graph.num_dst, device=t.device).expand(2, -1)
            known = first._kind != SOURCES and torch.equal(t, loops)
        if not known:
            refuse(func, args, kwargs, "it joins edges of different graphs, or edges that are not one self-loop a node")
    if dim not in ((None, 0, -1) if first._kind == SOURCES else (1, -1)):
        refuse(func, args, kwargs)
    return ShardedEdgeIndex(first._graph, first._kind, torch.cat(plain(tensors), dim=-1))


def flip(func: Callable, args: Any, kwargs: Any) -> Any:
    """Turn edges round."""
    it = args[0]
    dims = list(args[1:]) + list(kwargs.values())
    if it._kind == SOURCES or dims not in ([0], [[0]], [(0,)], [-2], [[-2]], [(-2,)]):
        refuse(func, args, kwargs)
    return ShardedEdgeIndex(it._graph, FLIPPED if it._kind == EDGES else EDGES, plain(it).flip(0))


def row(it: ShardedEdgeIndex, which: int) -> Tensor:
    """Return one row of the edges: sources, which stay sharded, or destinations, which are rows of this worker."""
    refuse_whole_graph(it)
    out = plain(it)[which]
    holds_sources = (which % 2 == 0) == (it._kind == EDGES)
    return ShardedEdgeIndex(it._graph, SOURCES, out) if holds_sources else out


def unbind(func: Callable, args: Any, kwargs: Any) -> Any:
    """Split edges into sources and destinations."""
    it, dim = bind(args, kwargs, "input", "dim")
    if it._kind == SOURCES or dim not in (None, 0, -2):
        refuse(func, args, kwargs)
    return row(it, 0), row(it, 1)


def stack(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join a row of sources and a row of own nodes into edges."""
    tensors, dim = bind(args, kwargs, "tensors", "dim")
    kinds = [t._kind if isinstance(t, ShardedEdgeIndex) else None for t in tensors]
    if kinds not in ([SOURCES, None], [None, SOURCES]) or dim not in (None, 0) or tensors[0].dim() != 1:
        refuse(func, args, kwargs, "it joins numbers of different kinds")
    (it,) = sharded(tensors)
    return ShardedEdgeIndex(it._graph, EDGES if kinds[0] else FLIPPED, torch.stack(plain(tensors)))


def get(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t[i]`` where either side may be sharded."""
    target, index = args
    if not isinstance(target, ShardedEdgeIndex):
        return gather(func, target, 0, index)
    if target._kind == SOURCES:
        return pick(func, target, index)
    which, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
    if type(which) is int:
        return pick(func, row(target, which), columns, target)
    if which is not Ellipsis and not everything(which):
        refuse(func, args, kwargs)
    return pick(func, target, columns)


def pick(func: Callable, edges: Tensor, which: Any, it: ShardedEdgeIndex | None = None) -> Tensor:
    """Choose edges by a mask or a list; a share has no first or last edges of the graph."""
    if everything(which):
        return edges
    if not isinstance(which, Tensor) or isinstance(which, ShardedEdgeIndex):
        refuse(func, (edges, it), {}, "it chooses edges by their position")
    if which.dtype == torch.bool and which.shape != edges.shape[-1:]:  # torch would say so without a way out
        it = it if isinstance(it, ShardedEdgeIndex) else next(sharded(edges))
        found, count = f"A mask of edges has shape {list(which.shape)}", f"{edges.size(-1)} edges"
        raise wrong_rows(it, found, count, "mask[data.e_id]")
    if not isinstance(edges, ShardedEdgeIndex):
        return edges[which]
    out = plain(edges)[which] if edges._kind == SOURCES else plain(edges)[:, which]
    return ShardedEdgeIndex(edges._graph, edges._kind, out)


def everything(index: Any) -> bool:
    """Whether an index is ``:``."""
    return isinstance(index, slice) and index == slice(None)


def put(func: Callable, args: Any, kwargs: Any) -> None:
    """``t[i] = v`` writes node rows by sources; exact where all of these are own nodes, as those of self-loops are."""
    target, index, value = args
    if isinstance(target, ShardedEdgeIndex) or not isinstance(index, ShardedEdgeIndex) or index._kind != SOURCES:
        refuse(func, args, kwargs)
    ids, n = plain(index), index._graph.num_src
    if isinstance(value, ShardedEdgeIndex) or target.size(0) != n or bool((ids >= n).any()):
        refuse(func, args, kwargs, "it writes rows of nodes that other workers own")
    target[ids] = value


def index_select(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.index_select(dim, i)`` where either side may be sharded."""
    target, dim, index = bind(args, kwargs, "input", "dim", "index")
    if not isinstance(target, ShardedEdgeIndex):
        return gather(func, target, dim, index)
    if dim not in ((0, -1) if target._kind == SOURCES else (1, -1)):
        refuse(func, args, kwargs)
    return pick(func, target, index)


def select(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.select(dim, k)``."""
    target, dim, which = bind(args, kwargs, "input", "dim", "index")
    return get(func, (target, which if dim in (0, -2) else (slice(None), which)), {})


def gather(func: Callable, target: Tensor, dim: int, index: Any) -> Tensor:
    """Read rows of nodes by sources: fetch those of other workers, then index."""
    it = next(sharded(index))
    graph, shape = it._graph, list(target.shape)
    refuse_table(it, target)
    if it is not index or it._kind != SOURCES or it.dim() != 1 or not shape or shape[dim] != graph.num_src:
        refuse(func, (it,), {}, f"it reads dimension {dim} of a tensor of shape {shape} by the {it._kind}, which reads "
               f"the rows of {graph.num_src} nodes")  # fmt: skip
    if it.of_flow and not given_with_destinations(target, dim, graph):
        refuse(func, (it,), {}, "a layer of a message flow has no in-edges of the sources that are not among its "
               f"destinations; pass the pair (x, x[:{graph.num_dst}]) if the layer takes one")  # fmt: skip
    fetched = Halo.apply(target.movedim(dim, 0), graph)
    return fetched.index_select(0, plain(it)).movedim(0, dim)


def refuse_table(it: ShardedEdgeIndex, *rows: Any) -> None:
    """Refuse parameters as rows of nodes where there are other workers, but for those that are a worker's own."""
    for x in rows:
        if isinstance(x, torch.nn.Parameter) and not (is_local(x) or it._graph.exchange.alone):
            fail(it, f"A parameter of shape {list(x.shape)} cannot be rows of nodes, because all workers have the same "
                 f"parameters and other nodes ('pyg_sar.nn.NodeEmbedding' is a table of nodes)")  # fmt: skip


def given_with_destinations(target: Tensor, dim: int, graph: ShardedGraph) -> bool:
    """Whether PyG is collecting messages, and the rows that it reads by sources are given as a pair with those of
    destinations. Others might be results for destinations (degrees, a first hop), which are wrong for other sources.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.endswith("collect"):
        frame = frame.f_back
    call = {} if frame is None else frame.f_locals
    pairs = [v for v in [*call.values(), *call.get("kwargs", {}).values()] if isinstance(v, (tuple, list))]
    return any(
        len(pair) == 2 and pair[0] is target and isinstance(pair[1], Tensor) and pair[1].size(dim) == graph.num_dst
        for pair in pairs
    )


def scatter(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.scatter_add_(dim, i, src)`` onto sources: add up here, then send the sums to their owners."""
    target, dim, index, src = bind(args, kwargs, "input", "dim", "index", "src")
    if not isinstance(index, ShardedEdgeIndex) or len(list(sharded(args, kwargs))) > 1 or target.dim() == 0:
        refuse(func, args, kwargs)
    if src.shape != index.shape:  # torch would leave out what is longer
        found, count = f"'{func.__name__}' got a source of shape {list(src.shape)}", f"{index.size(dim)} edges"
        raise wrong_rows(index, found, count, "edge_attr[data.e_id]")
    graph, size = index._graph, list(target.shape)
    if index.of_flow:
        refuse(func, args, kwargs, "a layer of a message flow does not have all out-edges of its sources")
    if index._kind != SOURCES or size[dim] != graph.num_src:
        refuse(func, args, kwargs, f"it adds onto dimension {dim} of a tensor of shape {size} by the {index._kind}, "
               f"which reaches the rows of {graph.num_src} nodes")  # fmt: skip
    size[dim] += graph.exchange.merge().num_halo
    sums = src.new_zeros(size).scatter_add(dim, plain(index), src)
    out = Home.apply(sums.movedim(dim, 0), graph).movedim(0, dim)
    return target.add_(out) if func.__name__ == "scatter_add_" else target + out


class Halo(torch.autograd.Function):
    """Own rows -> own rows followed by those of other workers; the gradients go home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: ShardedGraph, traffic: Any = None) -> Tensor:
        """Fetch."""
        meter = counted(ctx, graph, traffic)
        exchange = graph.exchange.merge()
        about = None if traffic or exchange.alone else running.about(x.shape, x.dtype, "fetched in one shot")
        ((_, rows),) = exchange.pull([x.contiguous()], exchange.visits(1), meter, about)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Send home."""
        return Home.apply(grad, ctx.graph, ctx.traffic), None, None


class Home(torch.autograd.Function):
    """Rows in local-first order -> sums at their owners; the gradients are fetched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, graph: ShardedGraph, traffic: Any = None) -> Tensor:
        """Send home."""
        meter = counted(ctx, graph, traffic)
        found: list[Tensor] = []
        exchange = graph.exchange.merge()
        about = None if traffic or exchange.alone else running.about(rows.shape, rows.dtype, "added up at their owners")
        sink = exchange.sink(meter, lambda _, grad: found.append(grad), about)
        sink.push(0, rows)
        sink.close()
        (out,) = found
        return out.clone() if out is rows else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Fetch."""
        return Halo.apply(grad, ctx.graph, ctx.traffic), None, None


def counted(ctx: Any, graph: ShardedGraph, traffic: Any) -> Callable[[int, int], None]:
    """Return what counts the bytes: a new record, or the backward side of the one that is being differentiated."""
    ctx.graph, ctx.traffic = graph, traffic or graph.exchange.log.open()
    return ctx.traffic.backward if traffic else ctx.traffic.forward


# What layers and packages do that look at all nodes or edges by other means than 'edge_index'.
REASONS = {
    "takes its statistics over all nodes or edges": "_BatchNorm HeteroBatchNorm",
    "normalises over all nodes": "GraphNorm GraphSizeNorm InstanceNorm MeanSubtractionNorm PairNorm",
    "normalises over all nodes (unless mode='node')": "LayerNorm",
    "needs the edges in the order of their destinations": "GRUAggregation GraphMultisetTransformer "
    "LCMAggregation LSTMAggregation MLPAggregation PatchTransformerAggregation SetTransformerAggregation "
    "SortAggregation",
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
    "learns from random walks over the whole graph": "MetaPath2Vec Node2Vec",
    "looks for neighbours among all nodes": "DynamicEdgeConv GravNetConv XConv",
    "numbers the colours of all nodes": "WLConv",
    "reads edges by their position": "MeshCNNConv",
    "scales by the error of all nodes": "CorrectAndSmooth",
    "sums up all nodes of a graph": "AttentiveFP DeepGraphInfomax NeuralFingerprint",
}
WHOLE_GRAPH = {name: reason for reason, names in REASONS.items() for name in names.split()}

# When they do not: (layer, the local variables of its running method, graph or None if there is none yet) -> bool.
UNLESS: dict[str, Callable[[Any, dict[str, Any], Any], bool]] = {
    "_BatchNorm": lambda layer, call, graph: not layer.training and layer.running_mean is not None,
    "HeteroBatchNorm": lambda layer, call, graph: not layer.training and layer.track_running_stats,
    "LayerNorm": lambda layer, call, graph: getattr(layer, "mode", "node") == "node",
    "QuantileAggregation": lambda layer, call, graph: graph is None or graph.num_dst == 0 or bool(graph.degree[0] > 0),
    "ChebConv": lambda layer, call, graph: call.get("lambda_max", call) is not None,
    "FeaStConv": lambda layer, call, graph: (
        graph is None or graph.num_edges > 0 or (layer.add_self_loops and graph.num_dst > 0)
    ),
    "RGCNConv": lambda layer, call, graph: decides_alike(sys.modules["torch_geometric"]),
    "SuperGATConv": lambda layer, call, graph: not layer.training,
    "CorrectAndSmooth": lambda layer, call, graph: not layer.autoscale,
    "MetaLayer": lambda layer, call, graph: layer.global_model is None,
    **dict.fromkeys(
        ("LightGCN", "LINKX", "MetaPath2Vec", "Node2Vec"), lambda layer, call, graph: numbers_all_nodes(graph)
    ),
}


def numbers_all_nodes(graph: ShardedGraph | None) -> bool:
    """Whether rows are those of all nodes in their order, as in one process (of which all is known without a graph)."""
    return size_of() == 1 if graph is None else graph.exchange.alone and graph.n_id is None


def decides_alike(pyg: Any) -> bool:
    """Whether all workers choose the same way to multiply by the weights of relations."""
    return not pyg.typing.WITH_SEGMM or pyg.backend.use_segment_matmul is not None


def refuse_whole_graph(it: ShardedEdgeIndex, known: Iterable[torch.nn.Module] = ()) -> None:
    """Look at the layers that are running and at all that is in them but is ``known``, and refuse what would be
    silently local.
    """
    frame: Any = sys._getframe(2)
    seen = set(known)
    layers: list[torch.nn.Module] = []
    while frame is not None:
        # Only methods: to ask a frame for its variables keeps them alive until it is asked again.
        call = frame.f_locals if "self" in frame.f_code.co_varnames else {}
        layer = call.get("self")
        if isinstance(layer, torch.nn.Module):
            layers.append(layer)
            for module in layer.modules():
                aggr = getattr(module, "aggr_module", None)
                cls: Any = type(module)
                if aggr is not None and module is not layer and "pyg_sar" in packages(cls):
                    seen.update(aggr.modules())  # which it looks at itself when it runs
                new = module is layer or module not in seen
                why = whole_graph(module, call if module is layer else {}, it._graph) if new else ""
                if why:
                    names = f"'{type(module).__name__}' in '{type(layer).__name__}'"
                    fail(it, f"{names} cannot run on a share of the graph, because it {why}")
                seen.add(module)
        frame = frame.f_back
    running.enter(layers)


def whole_graph(module: torch.nn.Module, call: dict[str, Any], graph: Any) -> str:
    """Return what a module does with all nodes or edges at once, or an empty string."""
    cls: Any = type(module)
    found = (WHOLE_GRAPH[n] for n in entries(cls) if not (n in UNLESS and UNLESS[n](module, call, graph)))
    return next(found, "")


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


def move(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.to(device)`` moves the graph; the type of the numbers stays."""
    it, where = args[0], [*args[1:], kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
    if any(isinstance(a, Tensor) or (isinstance(a, torch.dtype) and a != torch.int64) for a in where):
        refuse(func, args, kwargs, "its numbers are of type torch.int64")
    devices = [a for a in where if isinstance(a, (str, torch.device)) or type(a) is int]
    name = func.__name__ if func.__name__ != "to" else it._graph.device
    device = torch.device(*devices[:1] or [name])
    if device == it._graph.device:
        return it
    return ShardedEdgeIndex(it._graph.to(device), it._kind, None if it._data is None else it._data.to(device))


def describe(func: Callable, args: Any, kwargs: Any) -> str:
    """Show what it is."""
    it = args[0]
    return f"ShardedEdgeIndex({it._kind}, size={list(it.shape)}, blocks={len(it._graph.blocks)})"


def export(func: Callable, args: Any, kwargs: Any) -> NoReturn:
    """Refuse to leave the process."""
    refuse(func, args, kwargs)


def extreme(func: Callable, args: Any, kwargs: Any) -> NoReturn:
    """Refuse to tell the largest number, by which PyG counts nodes, or explains why an ``index_select`` failed."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        raise error  # it explains itself
    refuse_whole_graph(next(sharded(args, kwargs)))
    refuse(func, args, kwargs)


# What answers which operations of torch, by their names.
OPERATIONS: dict[Callable[[Callable, Any, Any], Any], str] = {
    same: "__get__ __set__ __hash__ __len__ dim ndimension size stride storage_offset numel nelement element_size "
    "get_device has_names is_complex is_contiguous is_floating_point is_inference is_pinned is_signed type "
    "requires_grad_ _is_view",
    like: "new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like",
    identity: "contiguous detach long",
    copy: "clone __deepcopy__",
    reshape: "view view_as reshape expand expand_as squeeze unsqueeze",
    compare: "eq ne __eq__ __ne__",
    concatenate: "cat concat concatenate",
    flip: "flip",
    unbind: "unbind",
    stack: "stack",
    get: "__getitem__",
    put: "__setitem__",
    index_select: "index_select",
    select: "select",
    scatter: "scatter_add_ scatter_add",
    move: "to cpu cuda",
    describe: "__repr__ __format__ __str__",
    export: "__reduce_ex__ __reduce__ numpy tolist __array__",
    extreme: "max min amax amin",
}
HANDLERS = {name: handler for handler, names in OPERATIONS.items() for name in names.split()}
