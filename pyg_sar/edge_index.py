r"""What users pass on: a tensor ``[2, num_edges]`` that stands for a sharded graph.

Layers of :mod:`pyg_sar.nn` recognise a :class:`ShardedEdgeIndex` and stream. In any other PyG layer it behaves as the
``edge_index`` of the whole graph would, in one shot: row 0 numbers sources local-first, row 1 numbers the own
destinations, and

* reading node rows by sources is a differentiable exchange of rows,
* adding edge rows onto sources sends the sums to their owners,
* comparing a source with a destination tells self-loops,

so that degrees, self-loops, normalisation and messages come out exactly. What cannot be exact raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_sar.graph import ShardedGraph

# What a derived tensor holds: both rows, both rows the other way round, or source numbers alone.
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
        shape = (2, graph.num_edges) if data is None else data.shape
        strides = None if data is None else data.stride()
        out = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, strides=strides, dtype=torch.int64, device=graph.device
        )
        out._graph, out._kind, out._data = graph, kind, data
        return out

    @property
    def graph(self) -> ShardedGraph:
        """The sharded graph; only the ``edge_index`` as it was loaded has one."""
        if self._data is not None:
            raise AttributeError(
                f"This {self._kind} was derived by an operation on a sharded 'edge_index' and has no blocks to stream"
            )
        return self._graph

    @property
    def streams(self) -> bool:
        """Whether the edges are those of the sharded graph, so that layers can stream."""
        return self._data is None

    def merge(self) -> ShardedEdgeIndex:
        """Return the same edges, whose sources are fetched in one shot (mode 3)."""
        return ShardedEdgeIndex(self.graph.merge())

    def replace(self, **changes: Any) -> ShardedEdgeIndex:
        """Return the same edges with other fields of the graph, such as ``remat=False`` (mode 2)."""
        return ShardedEdgeIndex(self.graph.replace(**changes))

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operation exactly, or refuse it."""
        handler = HANDLERS.get(getattr(func, "__name__", ""), refuse)
        with PLAIN():
            return handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse what reached the tensor without passing ``__torch_function__``."""
        refuse(func, args, kwargs or {})


def plain(value: Any) -> Any:
    """Replace every sharded tensor in an argument by its numbers."""
    if isinstance(value, ShardedEdgeIndex):
        return value._graph.coo() if value._data is None else value._data
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
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


def refuse(func: Callable, args: Any, kwargs: Any, why: str = "") -> NoReturn:
    """Raise an error that names the way out."""
    it = next(sharded(args, kwargs))
    rank = getattr(it._graph.exchange, "rank", getattr(getattr(it._graph.exchange, "peers", None), "rank", 0))
    raise NotImplementedError(
        f"[rank {rank}] '{getattr(func, '__name__', func)}' cannot be computed exactly on the {it._kind} of a sharded "
        f"graph{why and ': '}{why}. Use the layer of this name in 'pyg_sar.nn' if there is one; global ids are in "
        f"'data.n_id' and 'data.e_id'."
    )


def same(func: Callable, args: Any, kwargs: Any) -> Any:
    """Properties and other questions about the tensor that its numbers do not answer."""
    return func(*args, **kwargs)


def numbers(func: Callable, args: Any, kwargs: Any) -> Any:
    """Operations whose result holds no source numbers any more."""
    return func(*plain(args), **plain(kwargs))


def compare(func: Callable, args: Any, kwargs: Any) -> Any:
    """Equality of sources with destinations or sources; anything else would compare numbers of different kinds."""
    other = [a for a in args if not isinstance(a, ShardedEdgeIndex)]
    if any(not isinstance(o, Tensor) for o in other):
        refuse(func, args, kwargs, "it compares local numbers with a constant")
    return numbers(func, args, kwargs)


def keep(func: Callable, args: Any, kwargs: Any) -> Any:
    """Operations that move numbers about and leave their kind as it is."""
    first = next(sharded(args, kwargs))
    kinds = {s._kind for s in sharded(args, kwargs)}
    if len(kinds) > 1:
        refuse(func, args, kwargs, f"it mixes {' and '.join(sorted(kinds))}")
    out = func(*plain(args), **plain(kwargs))
    return ShardedEdgeIndex(first._graph, first._kind, out)


def concatenate(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join edges; plain ``[2, *]`` tensors hold pairs of own nodes, such as added self-loops."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    kinds = {s._kind for s in sharded(tensors)}
    first = next(sharded(tensors))
    if len(kinds) > 1 or len({id(s._graph) for s in sharded(tensors)}) > 1:
        refuse(func, args, kwargs, "it mixes different graphs or rows")
    if first._kind == SOURCES or dim in (1, -1):
        return ShardedEdgeIndex(first._graph, first._kind, func(plain(tensors), *plain(args[1:]), **plain(
            {k: v for k, v in kwargs.items() if k != "tensors"})))  # fmt: skip
    refuse(func, args, kwargs, "it stacks edges along the rows")


def flip(func: Callable, args: Any, kwargs: Any) -> Any:
    """Turn edges round."""
    (it,) = sharded(args, kwargs)
    out = func(*plain(args), **plain(kwargs))
    dims = list(args[1:]) + list(kwargs.values())
    if it._kind == SOURCES or dims not in ([0], [[0]], [(0,)], [-2], [[-2]], [(-2,)]):
        refuse(func, args, kwargs)
    return ShardedEdgeIndex(it._graph, FLIPPED if it._kind == EDGES else EDGES, out)


def row(it: ShardedEdgeIndex, which: int, out: Tensor) -> Tensor:
    """Tell whether row ``which`` of the edges holds sources."""
    holds_sources = (which % 2 == 0) == (it._kind == EDGES)
    return ShardedEdgeIndex(it._graph, SOURCES, out) if holds_sources else out


def unbind(func: Callable, args: Any, kwargs: Any) -> Any:
    """Split edges into sources and destinations."""
    it = args[0]
    if it._kind == SOURCES:
        refuse(func, args, kwargs)
    return tuple(row(it, k, out) for k, out in enumerate(func(*plain(args), **plain(kwargs))))


def stack(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join a row of sources and a row of own nodes into edges."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    where = [k for k, t in enumerate(tensors) if isinstance(t, ShardedEdgeIndex)]
    if len(tensors) != 2 or len(where) != 1 or dim != 0 or tensors[where[0]]._kind != SOURCES:
        refuse(func, args, kwargs)
    it = tensors[where[0]]
    return ShardedEdgeIndex(it._graph, EDGES if where == [0] else FLIPPED, torch.stack(plain(tensors)))


def get(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t[i]`` where either side may be sharded."""
    target, index = args
    if not isinstance(target, ShardedEdgeIndex):
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(parts[0], ShardedEdgeIndex) and len(parts) == 1:
            return gather(func, target, 0, parts[0])
        refuse(func, args, kwargs)
    if any(True for _ in sharded(index)):
        refuse(func, args, kwargs, "it indexes numbers by numbers")
    out = plain(target)[index]
    if target._kind == SOURCES:
        return ShardedEdgeIndex(target._graph, SOURCES, out)
    if isinstance(index, int):
        return row(target, index, out)
    if isinstance(index, tuple) and len(index) == 2:
        if isinstance(index[0], int):
            return row(target, index[0], out)
        if index[0] in (Ellipsis, slice(None)):
            return ShardedEdgeIndex(target._graph, target._kind, out)
    refuse(func, args, kwargs)


def put(func: Callable, args: Any, kwargs: Any) -> None:
    """``t[i] = v`` writes node rows by sources; exact where all of these are own nodes, as those of self-loops are."""
    target, index, value = args
    if isinstance(target, ShardedEdgeIndex) or not isinstance(index, ShardedEdgeIndex) or index._kind != SOURCES:
        refuse(func, args, kwargs)
    ids, n = plain(index), index._graph.num_src
    if target.size(0) != n or bool((ids >= n).any()):
        refuse(func, args, kwargs, "it writes rows of nodes that other workers own")
    target[ids] = plain(value)


def index_select(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.index_select(dim, i)`` where either side may be sharded."""
    target, dim, index = (*args, *kwargs.values())
    if not isinstance(target, ShardedEdgeIndex):
        return gather(func, target, dim, index)
    if isinstance(index, ShardedEdgeIndex):
        refuse(func, args, kwargs, "it indexes numbers by numbers")
    if target._kind != SOURCES and dim % 2 == 0:
        refuse(func, args, kwargs)
    return ShardedEdgeIndex(target._graph, target._kind, plain(target).index_select(dim, index))


def select(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.select(dim, k)``."""
    target, dim, which = (*args, *kwargs.values())
    if target._kind == SOURCES or dim % 2 != 0:
        refuse(func, args, kwargs)
    return row(target, which, plain(target).select(dim, which))


def largest(func: Callable, args: Any, kwargs: Any) -> Any:
    """``edge_index.max()`` asks for the number of nodes: here, of the own ones."""
    (it, *rest) = args
    if rest or kwargs:
        refuse(func, args, kwargs)
    graph = it._graph
    return torch.tensor((graph.num_src if it._kind == SOURCES else max(graph.num_src, graph.num_dst)) - 1)


def gather(func: Callable, target: Tensor, dim: int, index: ShardedEdgeIndex) -> Tensor:
    """Read rows of nodes by sources: fetch those of other workers, then index."""
    graph, dim = index._graph, dim % max(target.dim(), 1)
    if index._kind != SOURCES or target.size(dim) != graph.num_src:
        refuse(func, (target, index), {}, f"it reads a tensor of shape {tuple(target.shape)} by sources, expected "
               f"{graph.num_src} rows in dimension {dim}")  # fmt: skip
    refuse_unless_local(func, index)
    rows = Halo.apply(target.movedim(dim, 0), graph)
    return rows.index_select(0, plain(index)).movedim(0, dim)


def scatter(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.scatter_add_(dim, i, src)`` onto sources: add up here, then send the sums to their owners."""
    if kwargs or len(args) < 4 or not isinstance(args[2], ShardedEdgeIndex):
        refuse(func, args, kwargs)
    target, dim, index, src = args[:4]
    graph, dim = index._graph, dim % max(target.dim(), 1)
    if index._kind != SOURCES or target.size(dim) != graph.num_src or isinstance(src, ShardedEdgeIndex):
        refuse(func, args, kwargs, f"expected {graph.num_src} rows in dimension {dim} of {tuple(target.shape)}")
    if target.requires_grad or bool(target.any()):
        refuse(func, args, kwargs, "it adds onto a tensor that is not zero")
    refuse_unless_local(func, index)
    size = list(target.shape)
    size[dim] = graph.num_src + graph.exchange.merge().num_halo
    sums = src.new_zeros(size).scatter_add_(dim, plain(index), src)
    out = Home.apply(sums.movedim(dim, 0), graph).movedim(0, dim)
    return target.copy_(out) if func.__name__.endswith("_") else out


class Halo(torch.autograd.Function):
    """Own rows -> own rows followed by those of other workers; the gradients go home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: ShardedGraph) -> Tensor:
        """Fetch."""
        ctx.graph, ctx.traffic = graph, graph.exchange.log.open()
        return fetch(graph, x, ctx.traffic.forward)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Send home."""
        return Home.apply(grad, ctx.graph, ctx.traffic.backward), None


class Home(torch.autograd.Function):
    """Rows in local-first order -> sums at their owners; the gradients are fetched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, graph: ShardedGraph, meter: Any = None) -> Tensor:
        """Send home."""
        ctx.graph, ctx.traffic = graph, graph.exchange.log.open()
        sink = graph.exchange.merge().sink(rows.new_zeros(graph.num_src, *rows.shape[1:]), meter or ctx.traffic.forward)
        sink.push(0, rows)
        return sink.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Fetch."""
        return Halo.apply(grad, ctx.graph), None, None


def fetch(graph: ShardedGraph, x: Tensor, meter: Any) -> Tensor:
    """Return the own rows followed by those of other workers."""
    ((_, rows),) = graph.exchange.merge().pull(x.contiguous(), meter)
    return rows.clone() if rows is x else rows


# Layers whose forward looks at all nodes or edges by other means than 'edge_index'.
WHOLE_GRAPH = {
    "GPSConv": "its attention runs over all nodes",
    "HANConv": "its semantic attention averages over all nodes",
    "WLConv": "it numbers the colours of all nodes",
    "MeshCNNConv": "it reads edges by their position",
    "LSTMAggregation": "its result depends on the largest degree of the whole graph",
    "GRUAggregation": "its result depends on the largest degree of the whole graph",
    "LCMAggregation": "its result depends on the largest degree of the whole graph",
    "EquilibriumAggregation": "it optimises over all nodes at once",
    "InstanceNorm": "it normalises over all nodes",
    "GraphNorm": "it normalises over all nodes",
    "GraphSizeNorm": "it normalises over all nodes",
    "PairNorm": "it normalises over all nodes",
    "MeanSubtractionNorm": "it normalises over all nodes",
    "DiffGroupNorm": "it normalises over all nodes",
    "HeteroBatchNorm": "it normalises over all nodes",
}


def refuse_unless_local(func: Callable, index: ShardedEdgeIndex) -> None:
    """Look at the layers that are running, and refuse those that would be silently local."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        layer = frame.f_locals.get("self")
        if isinstance(layer, torch.nn.Module) and hasattr(layer, "propagate") or type(layer).__name__ in WHOLE_GRAPH:
            for module in layer.modules():
                why = whole_graph(module)
                if why:
                    refuse(func, (index,), {}, f"'{type(layer).__name__}' cannot run on a share of the nodes, as {why}")
        frame = frame.f_back


def whole_graph(module: torch.nn.Module) -> str:
    """Return why a module needs all nodes or edges at once, or an empty string."""
    name = type(module).__name__
    if module.training and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return f"the '{name}' in it takes its statistics over all nodes or edges"
    if name == "LayerNorm" and getattr(module, "mode", None) == "graph":
        return "the 'LayerNorm(mode=\"graph\")' in it normalises over all nodes"
    if type(module).__module__.startswith("torch_geometric"):
        return WHOLE_GRAPH.get(name, "")
    return ""


def move(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.to(device)`` moves the graph; the type of the numbers stays."""
    it = args[0]
    wants = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, (torch.dtype, Tensor))]
    if any(a is not torch.int64 for a in wants):
        refuse(func, args, kwargs)
    name = func.__name__
    devices = [a for a in (*args[1:], kwargs.get("device")) if isinstance(a, (str, torch.device))]
    device = torch.device(devices[0] if devices else name if name in ("cpu", "cuda") else it._graph.device)
    if device == it._graph.device:
        return it
    return ShardedEdgeIndex(it._graph.to(device), it._kind, None if it._data is None else it._data.to(device))


def describe(func: Callable, args: Any, kwargs: Any) -> str:
    """Show what it is."""
    it = args[0]
    return f"ShardedEdgeIndex({it._kind}, size={list(it.shape)}, blocks={len(it._graph.blocks)})"


def no_pickle(func: Callable, args: Any, kwargs: Any) -> NoReturn:
    """Refuse to leave the process."""
    refuse(func, args, kwargs, "it belongs to this process; load the partition again instead")


def identity(func: Callable, args: Any, kwargs: Any) -> Any:
    """The numbers never change, so that a copy is the tensor itself."""
    return args[0]


HANDLERS: dict[str, Callable[[Callable, Any, Any], Any]] = {
    **dict.fromkeys(
        "__get__ __set__ size dim numel __len__ is_contiguous stride storage_offset is_floating_point is_complex "
        "ndimension nelement element_size get_device _is_view is_pinned __hash__ is_signed type is_nonzero "
        "is_inference has_names".split(), same
    ),
    **dict.fromkeys("view reshape expand expand_as squeeze unsqueeze view_as".split(), keep),
    **dict.fromkeys("new_zeros new_ones new_empty new_full new_tensor zeros_like ones_like empty_like full_like".split(),
                    numbers),
    **dict.fromkeys("clone detach contiguous long __deepcopy__ requires_grad_ share_memory_ record_stream".split(),
                    identity),
    **dict.fromkeys("to cpu cuda".split(), move),
    **dict.fromkeys("eq ne __eq__ __ne__".split(), compare),
    **dict.fromkeys("cat concat concatenate".split(), concatenate),
    **dict.fromkeys("max amax".split(), largest),
    **dict.fromkeys("scatter_add_ scatter_add".split(), scatter),
    **dict.fromkeys("__repr__ __format__ __str__".split(), describe),
    **dict.fromkeys("__reduce_ex__ __reduce__ numpy tolist __array__".split(), no_pickle),
    "__setitem__": put, "flip": flip, "unbind": unbind, "stack": stack, "__getitem__": get, "index_select": index_select,
    "select": select,
}  # fmt: skip
