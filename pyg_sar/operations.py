r"""Numbers of the ends of edges: a tensor that answers torch's operations exactly on all workers, or refuses.

Sources are numbered local-first, destinations are local nodes, and

* reading node rows by sources is a differentiable exchange of rows,
* adding edge rows onto sources sends the sums to their owners,
* comparing a source with a destination tells self-loops,

so that degrees, self-loops, normalisation and messages of PyG's own layers come out exactly. What cannot be exact
raises: an operation that ``OPERATIONS`` does not list, and a module that looks at all nodes by other means than
``edge_index`` (:mod:`pyg_sar.whole_graph`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar import running
from pyg_sar.caller import callers, running_modules
from pyg_sar.graph import ShardedGraph
from pyg_sar.halo import fetch_halo, sum_halo
from pyg_sar.refusals import called, fail, for_layer, refuse_table, wrong_rows
from pyg_sar.structure import tensors
from pyg_sar.whole_graph import audit

# What a tensor holds: both rows, both rows the other way round, or source numbers alone.
EDGES, FLIPPED, SOURCES = "edge_index", "flipped edge_index", "row of sources"

PLAIN = torch._C.DisableTorchFunctionSubclass
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
FINDS_LOOPS = ("contains_self_loops", "has_self_loops")  # of PyG, which asks whether there are any
IN_ONE = "Do this in one process, with an ordinary 'edge_index', such as that of the neighborhood of some nodes"
DESTINATIONS: WeakIdKeyDictionary = WeakIdKeyDictionary()  # rows of destinations that somebody asked for
NUMBERING = "its numbers mean something on this worker alone"


class EdgeNumbers(Tensor):
    r"""Numbers of sources, or of sources and destinations, of the edges that end on this worker.

    Args:
        graph (ShardedGraph): This worker's share of the graph.
        kind (str, optional): What the numbers are: ``EDGES``, ``FLIPPED`` or ``SOURCES``. (default: ``EDGES``)
        data (torch.Tensor, optional): The numbers, where an operation made them; those of the graph itself are made
            when an operation asks for them. (default: :obj:`None`)
    """

    _graph: ShardedGraph
    kind: str  # ``EDGES``, ``FLIPPED`` or ``SOURCES``
    _data: Tensor | None
    _ends: Tensor | None  # beside sources, the destinations of the same edges, where they are known

    @staticmethod
    def __new__(cls, graph: ShardedGraph, kind: str = EDGES, data: Tensor | None = None) -> EdgeNumbers:
        """Make a tensor without storage of its own."""
        shape = (2, graph.num_edges) if data is None else data.shape
        strides = None if data is None else data.stride()
        out = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=torch.int64, device=graph.device)
        out._graph, out.kind, out._data, out._ends = graph, kind, data, None
        return out

    @property
    def of_flow(self) -> bool:
        """Whether this is a layer of a message-flow graph, which has the in-edges of some destinations only."""
        return self._graph.origin is not None

    def derive(
        self, kind: str, data: Tensor | None, ends: Tensor | None = None, graph: ShardedGraph | None = None
    ) -> EdgeNumbers:
        """Return numbers that an operation made of these, perhaps of another graph."""
        out = type(self)(graph or self._graph, kind, data)
        out._ends = ends
        return out

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer an operation exactly, or refuse it."""
        # Operators of other libraries may share a name with one of torch's functions, but not its meaning.
        name = "" if isinstance(func, OPERATORS) else getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:  # so that handlers find it where it mostly is
            args = (kwargs.pop("input"),)
        with PLAIN():
            return HANDLERS.get(name, refuse)(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Refuse what reached the tensor without passing ``__torch_function__``."""
        refuse(func, args, kwargs or {})


def plain(value: Any) -> Any:
    """Replace every sharded tensor in an argument by its numbers."""
    if isinstance(value, EdgeNumbers):
        return value._graph.coo() if value._data is None else value._data
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


def sharded(*values: Any) -> Iterator[EdgeNumbers]:
    """Yield the sharded tensors in the arguments."""
    return (t for t in tensors(*values) if isinstance(t, EdgeNumbers))


def shares(*values: Any) -> Iterator[EdgeNumbers]:
    """Yield those of graphs of which this process holds a share, and not the whole."""
    return (it for it in sharded(*values) if not it._graph.exchange.alone)


def bind(args: Any, kwargs: Any, *names: str) -> list[Any]:
    """Return the arguments of these names, given by position or by name; None for those not given."""
    return [args[k] if k < len(args) else kwargs.get(name) for k, name in enumerate(names)]


def refuse(func: Callable, args: Any, kwargs: Any, why: str = NUMBERING) -> NoReturn:
    """Raise because of an operation."""
    it = next(sharded(args, kwargs))
    what, advice = called(func)
    fail(it._graph, f"{what} cannot be computed exactly on the {it.kind} of a sharded graph: {why}", advice)


def refuse_whole_graph(it: EdgeNumbers, known: Iterable[torch.nn.Module] = ()) -> None:
    """Raise if a module that is running, or one within these that is not ``known``, would be silently local."""
    modules, graph = list(running_modules()), it._graph
    why, name = audit(modules, graph, known)
    if why:
        fail(graph, why, for_layer(name))
    if not graph.exchange.alone:
        if torch.jit.is_tracing():
            fail(graph, "A sharded graph cannot be traced ('torch.jit.trace', 'add_graph' of TensorBoard)", IN_ONE)
        if explained := next((layer for layer, _ in modules if getattr(layer, "_explain", None)), None):
            what = f"'{type(explained).__name__}' cannot be explained on a share of the graph"
            fail(graph, f"{what}: a mask of edges is another parameter on each worker", IN_ONE)
    running.enter([module for module, _ in modules])


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
    return it if it._data is None else it.derive(it.kind, it._data.clone(), it._ends)


def reshape(func: Callable, args: Any, kwargs: Any) -> Any:
    """Give sources another shape; edges have two rows."""
    it = args[0]
    out = func(*plain(args), **kwargs)
    if it.kind != SOURCES and out.shape != it.shape:
        refuse(func, args, kwargs, "its two rows hold numbers of different kinds")
    return it.derive(it.kind, out, None if it._ends is None else func(it._ends, *args[1:], **kwargs))


def compare(func: Callable, args: Any, kwargs: Any) -> Any:
    """Tell edge by edge whether sources equal destinations of the same edges; other numbers mean something else."""
    one, other = bind(args, kwargs, "input", "other")
    known = list(sharded(one, other))
    if not known[0]._graph.exchange.alone and any(frame.f_code.co_name in FINDS_LOOPS for frame in callers()):
        refuse(func, args, kwargs, "the other workers may have self-loops that this one does not see")
    if not isinstance(other, Tensor) or other.shape != one.shape or {s.kind for s in known} != {SOURCES}:
        refuse(func, args, kwargs, "it compares numbers of different kinds")
    if len(known) == 1:
        refuse_two_sets(func, (one, other), known[0]._graph)
        ends, others = known[0]._ends, other if known[0] is one else one
        if ends is None or ends.dtype != others.dtype or not torch.equal(ends, others):
            refuse(func, args, kwargs, "it compares sources with other numbers than the destinations of these edges")
    elif known[0]._graph is not known[1]._graph:
        refuse(func, args, kwargs, "it compares sources of different graphs")
    return func(*plain([one, other]))


def refuse_two_sets(func: Callable, args: Any, graph: ShardedGraph) -> None:
    """Self-loops need one set of nodes, whose destinations have the numbers of the sources that they are."""
    if graph.dst is None or graph.dst.start > 0:
        refuse(func, args, {}, "it looks for self-loops between two sets of nodes (pass 'add_self_loops=False')")


def concatenate(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join edges with other edges of the same graph, or with one self-loop at every node."""
    tensors, dim = bind(args, kwargs, "tensors", "dim")
    first = next(sharded(tensors))
    for t in tensors:
        if isinstance(t, EdgeNumbers):
            known = t.kind == first.kind and t._graph is first._graph
        else:
            refuse_two_sets(func, tensors, first._graph)
            loops = torch.arange(first._graph.num_dst, device=t.device).expand(2, -1)
            known = first.kind != SOURCES and torch.equal(t, loops)
        if not known:
            refuse(func, args, kwargs, "it joins edges of different graphs, or edges that are not one self-loop a node")
    if dim not in ((None, 0, -1) if first.kind == SOURCES else (1, -1)):
        refuse(func, args, kwargs)
    return first.derive(first.kind, torch.cat(plain(tensors), dim=-1))


def flip(func: Callable, args: Any, kwargs: Any) -> Any:
    """Turn edges round."""
    it = args[0]
    dims = list(args[1:]) + list(kwargs.values())
    if it.kind == SOURCES or dims not in ([0], [[0]], [(0,)], [-2], [[-2]], [(-2,)]):
        refuse(func, args, kwargs)
    return it.derive(FLIPPED if it.kind == EDGES else EDGES, plain(it).flip(0))


def row(it: EdgeNumbers, which: int) -> Tensor:
    """Return one row of the edges: sources, which stay sharded, or destinations, which are rows of this worker."""
    refuse_whole_graph(it)
    both = plain(it)
    if (which % 2 == 0) == (it.kind == EDGES):
        return it.derive(SOURCES, both[which], both[1 - which % 2])
    ends = both[which]
    DESTINATIONS[ends] = True
    return ends


def unbind(func: Callable, args: Any, kwargs: Any) -> Any:
    """Split edges into sources and destinations."""
    it, dim = bind(args, kwargs, "input", "dim")
    if it.kind == SOURCES or dim not in (None, 0, -2):
        refuse(func, args, kwargs)
    return row(it, 0), row(it, 1)


def stack(func: Callable, args: Any, kwargs: Any) -> Any:
    """Join a row of sources and a row of local nodes into edges."""
    tensors, dim = bind(args, kwargs, "tensors", "dim")
    kinds = [t.kind if isinstance(t, EdgeNumbers) else None for t in tensors]
    if kinds not in ([SOURCES, None], [None, SOURCES]) or dim not in (None, 0) or tensors[0].dim() != 1:
        refuse(func, args, kwargs, "it joins numbers of different kinds")
    (it,) = sharded(tensors)
    return it.derive(EDGES if kinds[0] else FLIPPED, torch.stack(plain(tensors)))


def get(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t[i]`` where either side may be sharded."""
    target, index = args
    if not isinstance(target, EdgeNumbers):
        first, *rest = index if isinstance(index, tuple) else (index,)
        if everything(first) and len(rest) == 1:
            return gather(func, target, 1, rest[0])
        if isinstance(first, EdgeNumbers) and all(k is Ellipsis or type(k) in (int, slice) for k in rest):
            rows = gather(func, target, 0, first)
            within = (slice(None), *rest)
            return rows[within] if rest else rows
        return gather(func, target, 0, index)
    if target.kind == SOURCES:
        return pick(func, target, index)
    which, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
    if isinstance(which, list) and which == [1, 0] and everything(columns):
        return flip(func, (target, 0), {})
    if type(which) is int:
        return pick(func, row(target, which), columns, target)
    if which is not Ellipsis and not everything(which):
        refuse(func, args, kwargs)
    return pick(func, target, columns)


def pick(func: Callable, edges: Tensor, which: Any, it: EdgeNumbers | None = None) -> Tensor:
    """Choose edges by a mask or a list; a share has no first or last edges of the graph."""
    if everything(which):
        return edges
    if not isinstance(which, Tensor) or isinstance(which, EdgeNumbers):
        refuse(func, (edges, it), {}, "it chooses edges by their position")
    if which.dtype == torch.bool and which.shape != edges.shape[-1:]:  # torch would say so without a way out
        it = it if isinstance(it, EdgeNumbers) else next(sharded(edges))
        found, count = f"A mask of edges has shape {list(which.shape)}", f"{edges.size(-1)} edges"
        raise wrong_rows(it._graph, found, count, "mask[data.e_id]")
    if not isinstance(edges, EdgeNumbers):
        return edges[which]
    return edges.derive(edges.kind, plain(edges)[..., which], None if edges._ends is None else edges._ends[..., which])


def everything(index: Any) -> bool:
    """Whether an index is ``:``."""
    return isinstance(index, slice) and index == slice(None)


def put(func: Callable, args: Any, kwargs: Any) -> None:
    """``t[i] = v`` writes node rows by sources; exact where these are local nodes, as those of self-loops are."""
    target, index, value = args
    if isinstance(target, EdgeNumbers) or not isinstance(index, EdgeNumbers) or index.kind != SOURCES:
        refuse(func, args, kwargs)
    ids, n = plain(index), index._graph.num_src
    if isinstance(value, EdgeNumbers) or target.size(0) != n or bool((ids >= n).any()):
        refuse(func, args, kwargs, "it writes rows of nodes that other workers own")
    target[ids] = value


def index_select(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.index_select(dim, i)`` where either side may be sharded."""
    target, dim, index = bind(args, kwargs, "input", "dim", "index")
    if not isinstance(target, EdgeNumbers):
        return gather(func, target, dim, index)
    if dim not in ((0, -1) if target.kind == SOURCES else (1, -1)):
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
    refuse_table(graph, target)
    if it is not index or it.kind != SOURCES or it.dim() != 1 or not shape or shape[dim] != graph.num_src:
        refuse(func, (it,), {}, f"it reads dimension {dim} of a tensor of shape {shape} by the {it.kind}, which reads "
               f"the rows of {graph.num_src} nodes")  # fmt: skip
    if it.of_flow and not given_with_destinations(target, dim, graph):
        refuse(func, (it,), {}, "a layer of a message-flow graph has no in-edges of the sources that are not among its "
               f"destinations; pass the pair (x, x[:{graph.num_dst}]) if the layer takes one")  # fmt: skip
    fetched = fetch_halo(target.movedim(dim, 0), graph)
    return fetched.index_select(0, plain(it)).movedim(0, dim)


def given_with_destinations(target: Tensor, dim: int, graph: ShardedGraph) -> bool:
    """Return whether PyG collects messages of a pair of rows, of sources and destinations. A single tensor may hold
    results for destinations (degrees, a first hop), which are wrong for other sources.
    """
    call = next((frame.f_locals for frame in callers() if frame.f_code.co_name.endswith("collect")), {})
    pairs = [v for v in [*call.values(), *call.get("kwargs", {}).values()] if isinstance(v, (tuple, list))]
    return any(
        len(pair) == 2 and pair[0] is target and isinstance(pair[1], Tensor) and pair[1].size(dim) == graph.num_dst
        for pair in pairs
    )


def scatter(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.scatter_add_(dim, i, src)`` onto sources: add up here, then send the sums to their owners."""
    target, dim, index, src = bind(args, kwargs, "input", "dim", "index", "src")
    if not isinstance(index, EdgeNumbers) or len(list(sharded(args, kwargs))) > 1 or target.dim() == 0:
        refuse(func, args, kwargs)
    if src.shape != index.shape:  # torch would leave out what is longer
        raise wrong_source(func, index, src, index.size(dim))
    return add_onto(func, args, kwargs, target, dim, index, src)


def index_add(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.index_add_(dim, i, src)`` onto sources."""
    target, dim, index, src = bind(args, kwargs, "input", "dim", "index", "source")
    if not isinstance(index, EdgeNumbers) or index.dim() != 1 or len(list(sharded(args, kwargs))) > 1:
        refuse(func, args, kwargs)
    if src.dim() == 0 or src.size(dim) != len(index):
        raise wrong_source(func, index, src, len(index))
    alpha = kwargs.get("alpha", 1)
    return add_onto(func, args, kwargs, target, dim, index, src if alpha == 1 else alpha * src)


def wrong_source(func: Callable, index: EdgeNumbers, src: Tensor, num_edges: int) -> ValueError:
    """Return the error for rows that are not those of the edges onto whose sources they shall be added."""
    found = f"'{func.__name__}' got a source of shape {list(src.shape)}"
    return wrong_rows(index._graph, found, f"{num_edges} edges", "edge_attr[data.e_id]")


def add_onto(
    func: Callable, args: Any, kwargs: Any, target: Tensor, dim: int, index: EdgeNumbers, src: Tensor
) -> Tensor:
    """Add rows of edges onto those of their sources."""
    graph, size = index._graph, list(target.shape)
    if index.of_flow:
        refuse(func, args, kwargs, "a layer of a message-flow graph does not have all out-edges of its sources")
    if index.kind != SOURCES or size[dim] != graph.num_src:
        refuse(func, args, kwargs, f"it adds onto dimension {dim} of a tensor of shape {size} by the {index.kind}, "
               f"which reaches the rows of {graph.num_src} nodes")  # fmt: skip
    size[dim] += graph.exchange.routes.num_halo
    onto = src.new_zeros(size)
    sums = (onto.index_add if "index" in func.__name__ else onto.scatter_add)(dim, plain(index), src)
    out = sum_halo(sums.movedim(dim, 0), graph).movedim(0, dim)
    return target.add_(out) if func.__name__.endswith("_") else target + out


def move(func: Callable, args: Any, kwargs: Any) -> Any:
    """``t.to(device)`` moves the graph; the type of the numbers stays."""
    it, where = args[0], [*args[1:], kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
    if any(isinstance(a, Tensor) or (isinstance(a, torch.dtype) and a != torch.int64) for a in where):
        refuse(func, args, kwargs, "its numbers are of type torch.int64")
    devices = [a for a in where if isinstance(a, (str, torch.device)) or type(a) is int]
    device = torch.device(*devices[:1] or [it._graph.device if func.__name__ == "to" else func.__name__])
    if device == it._graph.device:
        return it
    data, ends = (None if t is None else t.to(device) for t in (it._data, it._ends))
    return it.derive(it.kind, data, ends, it._graph.to(device))


def describe(func: Callable, args: Any, kwargs: Any) -> str:
    """Show what it is."""
    it = args[0]
    return f"{type(it).__name__}({it.kind}, size={list(it.shape)}, blocks={len(it._graph.blocks)})"


def extreme(func: Callable, args: Any, kwargs: Any) -> NoReturn:
    """Refuse to tell the largest number, by which PyG counts nodes, or explains why an ``index_select`` failed."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        raise error  # it explains itself
    refuse_whole_graph(next(sharded(args, kwargs)))
    refuse(func, args, kwargs)


# What answers which operations of torch, by their names; all others are refused.
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
    index_add: "index_add_ index_add",
    move: "to cpu cuda",
    describe: "__repr__ __format__ __str__",
    extreme: "max min amax amin",
}
HANDLERS = {name: handler for handler, names in OPERATIONS.items() for name in names.split()}
