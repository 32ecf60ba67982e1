r"""Runs code that was written for all edges on some of them, and cuts it at its reductions by destination.

Code that builds messages, normalises and aggregates them touches edges of other blocks in one way only: it adds up, or
takes extrema of, rows that have the same destination. :class:`Trace` watches every function of torch that such code
calls. It knows the tensor that holds the destination of each edge, and

* a reduction by it is *cut*: what this block contributes is handed out, and the result stands for something unknown;
* once the contributions of all blocks are merged the code runs again, where the reduction has that *known* result;
* whatever reads something unknown is itself unknown; a reduction of that ends the run, because it needs another pass;
* reading rows of destinations is what it seems; anything else that is done with the destinations raises
  :class:`NotStreamable`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.block import Block
from pyg_sar.nn.together import aside
from pyg_sar.ops import spmm_
from pyg_sar.ops.dropout import nothing_drops
from pyg_sar.structure import tensors

# What may be done with the destinations of edges, by the names of functions and methods of torch alike.
SAME = {"view", "expand", "expand_as", "view_as", "clone", "to", "long", "contiguous", "reshape", "unsqueeze",
        "squeeze", "detach", "broadcast_to"}  # fmt: skip
READS = {"index_select", "__getitem__", "gather"}
SUMS = {"scatter_add", "scatter_add_", "index_add", "index_add_"}
EXTREMA = {"scatter_reduce", "scatter_reduce_"}
# What tells of a tensor, and not of its values; what is known although a tensor is not; what needs values to go on.
TELLS = {"__get__", "size", "dim", "numel", "nelement", "stride", "is_contiguous", "element_size", "is_floating_point",
         "__len__", "get_device"}  # fmt: skip
KNOWN = TELLS | {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like"}
ZEROS = {"new_zeros", "zeros_like", "zeros"}
VALUES = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "nonzero"}
# What gives other results for some edges than for all of them, unless it is along another dimension.
MIXES = {"max", "min", "amax", "amin", "sum", "mean", "std", "var", "norm", "median", "sort", "argsort", "topk",
         "cumsum", "cumprod", "vector_norm", "linalg_vector_norm", "softmax", "log_softmax", "logsumexp", "any", "all",
         "unique", "count_nonzero", "flip"}  # fmt: skip
BEHIND = {"topk", "norm", "vector_norm", "linalg_vector_norm"}  # have the dimension behind another argument
ORDERS = {"topk", "sort", "argsort"}  # along the last dimension, unless another one is given
NAMES = {"edges": "edge_index", "row": "index", "col": "edge_index_j"}  # of what stands for nodes, in PyG's messages
DROPOUT = inspect.signature(F.dropout)


class NotStreamable(Exception):
    """Why a function cannot run on some of its edges at a time."""


class ReadsRows(NotStreamable):
    """Code reads rows by the numbers of nodes of this worker, or of some of them."""

    def __init__(self, read: Tensor, why: str) -> None:
        super().__init__(why)
        self.read = read


class MixesEdges(NotStreamable):
    """Why a function may not run on some of its edges, however these are chosen."""


class Stop(Exception):
    """The rest of the run needs what is not known yet."""


class Reduction(NamedTuple):
    """A reduction by destination.

    Args:
        op: ``"sum"``, ``"amax"`` or ``"amin"``.
        dim: The dimension of the edges.
        entries: The destination of each entry.
        src: What is reduced.
        like: A tensor like the result, whose destinations come first, but without any.
        whole: Whether all edges take part, in their order.
    """

    op: str
    dim: int
    entries: Tensor
    src: Tensor
    like: Tensor
    whole: bool

    @property
    def row(self) -> Tensor | None:
        """The destination of each edge, if all entries of an edge have the same."""
        strides = [s for d, s in enumerate(self.entries.stride()) if d != self.dim and self.entries.size(d) != 1]
        if any(strides):
            return None
        return self.entries.movedim(self.dim, 0).flatten(1)[:, 0] if self.entries.dim() > 1 else self.entries

    def read(self, rows: Tensor) -> Tensor:
        """Return for every entry that of its destination; ``rows`` are by destination."""
        rows, row = rows.movedim(0, self.dim), self.row
        return rows.gather(self.dim, self.entries) if row is None else rows.index_select(self.dim, row)

    def extremum(self, num_dst: int) -> tuple[Tensor, Tensor]:
        """Return the extremum of every destination and by how many entries it is attained; none: no entry."""
        src = self.src if self.op == "amax" else -self.src
        best = self.like.new_full((num_dst, *self.like.shape[1:]), -torch.inf)
        best.movedim(0, self.dim).scatter_reduce_(self.dim, self.entries, src, "amax")
        count = torch.zeros_like(best)
        hits = (src == self.read(best)) | src.isnan()
        count.movedim(0, self.dim).scatter_add_(self.dim, self.entries, hits.to(src.dtype))
        return best if self.op == "amax" else -best, count

    def add_to(self, total: Tensor, block: Block) -> None:
        """Add the sum over a block to that of others."""
        if not self.whole or self.dim != 0:
            total.movedim(0, self.dim).scatter_add_(self.dim, self.entries, self.src.to(total.dtype))
            return
        ptr = block.rowptr
        edges = torch.arange(self.src.size(0), dtype=ptr.dtype, device=ptr.device)
        width = math.prod(total.shape[1:])
        spmm_(total.view(-1, width), ptr, edges, self.src.reshape(-1, width), None, None, False, block.dst)

    def total(self, num_dst: int) -> Tensor:
        """Return the sum of every destination."""
        total = self.like.new_zeros(num_dst, *self.like.shape[1:])
        total.movedim(0, self.dim).scatter_add_(self.dim, self.entries, self.src)
        return total


def mixes(num_edges: int, name: str, args: Any, kwargs: Any) -> bool:
    """Whether a function reduces edges, or puts them in order, in another way than by destination.

    Where other dimensions are as long, those of heads or channels, the first one may be none of edges. The probe graph
    and others tell.
    """
    x = args[0] if args else None
    if name not in MIXES or not isinstance(x, Tensor) or x.shape[:1] != (num_edges,) or x.shape.count(num_edges) > 1:
        return False
    given = args[1 + (name in BEHIND) :]
    named = (kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs)
    dims = next(named, given[0] if given else -1 if name in ORDERS else None)
    if isinstance(dims, Tensor) or "other" in kwargs:  # the larger of two numbers, or the smaller one
        return False
    if isinstance(dims, float) or name == "unique":
        dims = None
    every = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(d is None or (isinstance(d, int) and d % x.dim() == 0) for d in every)


def in_place(name: str) -> bool:
    """Whether a function of a name writes into its first argument."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


class Shared:
    """Tensors that all edges share, however many rows they have: parameters, some that are known, and what is made of
    these alone.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        self.known = WeakIdKeyDictionary(dict.fromkeys(known, True))

    def holds(self, name: str, args: Any, given: Sequence[Tensor]) -> bool:
        """Whether a function is given such tensors and no others; what it writes others into is none any more."""
        every = all(t in self.known or isinstance(t, torch.nn.Parameter) for t in given)
        if not every and in_place(name):
            for t in tensors(args[:1]):
                self.known.pop(t, None)
        return every and len(given) > 0

    def add(self, out: Any) -> Any:
        """Know what such a function returned."""
        self.known.update(dict.fromkeys(tensors(out), True))
        return out


class NoMixing(TorchFunctionMode):
    """Refuses code that computes one number from all edges, which would be another one from some of them, or that reads
    rows of what a layer ``holds`` by ``index``, the numbers of ``num_dst`` destinations.

    To ask whether there are edges of some kind is allowed.
    """

    def __init__(
        self, num_edges: int, shared: Sequence[Tensor], index: Any = None, num_dst: int = 0, holds: Sequence[Any] = ()
    ) -> None:
        super().__init__()
        self.num_edges, self.shared = num_edges, Shared(shared)
        self.row, self.num_dst, self.holds = index, num_dst, holds

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch a function of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        reads = name in READS and any(t is self.row for t in tensors(args[1:], kwargs))
        if reads and any(t is args[0] for t in self.holds):
            check_read(name, args, kwargs, self.num_dst)
        if self.shared.holds(name, args, list(tensors(args, kwargs))):
            return self.shared.add(func(*args, **kwargs))
        if mixes(self.num_edges, name, args, kwargs) and args[0].is_floating_point():
            raise MixesEdges(f"it calls '{name}' across edges")
        return func(*args, **kwargs)


Cut = Callable[[int, Reduction], Tensor | None]
Mask = Callable[[int, int, float], Tensor]


class Dropout(TorchFunctionMode):
    """Drops edges by masks that are the same whenever this runs.

    Args:
        num_edges: The number of edges.
        mask: ``mask(k, width, p)``: the factors of dropout for each edge, at the ``k``-th call; None: no dropout.
    """

    def __init__(self, num_edges: int, mask: Mask | None) -> None:
        super().__init__()
        self.num_edges, self.mask, self.dropouts = num_edges, mask, 0

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch a function of torch."""
        kwargs = kwargs or {}
        return self.drop(func, args, kwargs) if getattr(func, "__name__", "") == "dropout" else func(*args, **kwargs)

    def drop(self, func: Callable, args: Any, kwargs: Any) -> Tensor:
        """Answer a call of dropout."""
        if func is not F.dropout:
            raise NotStreamable("it calls 'torch.dropout' instead of 'torch.nn.functional.dropout'")
        bound = DROPOUT.bind(*args, **kwargs)
        bound.apply_defaults()
        x, p, training, inplace = (bound.arguments[name] for name in ("input", "p", "training", "inplace"))
        return self.apply(x, p, inplace) if training and p != 0.0 and not nothing_drops() else x

    def apply(self, x: Tensor, p: float, inplace: bool) -> Tensor:
        """Drop entries."""
        k, self.dropouts = self.dropouts, self.dropouts + 1
        if self.mask is None:
            return x
        if x.dim() == 0 or x.size(0) != self.num_edges:
            raise NotStreamable("it drops something else than rows of edges")
        mask = self.mask(k, x[:1].numel(), p).view(x.shape).to(x.dtype)
        return x.mul_(mask) if inplace else x * mask


class Trace(Dropout):
    """One run over some edges.

    Args:
        row: The destination of each edge.
        col: The row of its source in ``tables``.
        num_dst: The number of destinations.
        known: Results of reductions, by their number.
        cut: Is given every reduction that is not known, and may return a result to go on with, destinations first; and
            those of ``expose``.
        expose: Known reductions that are cut besides.
        mask: See :class:`Dropout`.
        ended: Whether reductions are all known and edges stand for none: dropout is for rows of destinations.
        backwards: Whether ``edge_index`` holds destinations before sources.
        tables: The tensors whose rows may be read by source.
        shared: Tensors that all edges share, besides parameters.
    """

    def __init__(
        self, row: Tensor, col: Tensor, num_dst: int, known: dict[int, Tensor], cut: Cut, *,
        expose: tuple[int, ...] = (), mask: Mask | None = None, ended: bool = False, backwards: bool = False,
        tables: Sequence[Tensor] = (), shared: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__(row.numel(), mask)
        self.shared = Shared(shared)
        self.row, self.col, self.num_dst, self.known, self.cut = row, col, num_dst, known, cut
        self.expose, self.ended, self.tables = expose, ended, tables
        self.edges = row.new_empty(()).expand(2, row.numel())  # what stands for 'edge_index'
        self.ends = (row, col) if backwards else (col, row)
        self.count = 0
        self.met: set[int] = set()  # reductions of what is known
        self.kinds = WeakIdKeyDictionary()  # of tensors that are not what they seem
        self.kinds[self.edges], self.kinds[row], self.kinds[col] = "edges", "row", "col"
        self.zeros = WeakIdKeyDictionary()  # tensors that were zero at some version

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch a function of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if aside():
            return func(*args, **kwargs)
        if name in TELLS and not isinstance(out := func(*args, **kwargs), Tensor):
            return out  # most functions ask for a shape or a type
        out = self.watch(func, name, args, kwargs)
        if name in ZEROS and not out.is_inference():
            self.zeros[out] = out._version
        return out

    def watch(self, func: Callable, name: str, args: Any, kwargs: Any) -> Any:
        """Let a function run or answer in its place."""
        given = list(tensors(args, kwargs))
        kinds = {self.kinds.get(t) for t in given}
        if name == "dropout":
            return self.drop(func, args, kwargs)
        if self.shared.holds(name, args, given) and name not in VALUES:
            return self.shared.add(func(*args, **kwargs))
        if kinds & {"edges", "row", "col"}:
            return self.index(func, name, args, kwargs)
        if name in VALUES and kinds != {"count"}:
            if "unknown" in kinds:
                raise Stop
            raise NotStreamable("it decides by the values of tensors")
        if "unknown" not in kinds and not self.ended and mixes(self.num_edges, name, args, kwargs):
            raise NotStreamable(f"it calls '{name}' across edges")
        out = func(*args, **kwargs)
        if "unknown" in kinds and (name not in KNOWN or name == "__get__"):  # of which one may be 'T'
            for t in tensors((out, args[:1] if in_place(name) else ())):
                self.kinds[t] = "unknown"
        return out

    def index(self, func: Callable, name: str, args: Any, kwargs: Any) -> Any:
        """Answer what is asked of, or done with, the sources and destinations of edges."""
        first = self.kinds.get(args[0]) if args and isinstance(args[0], Tensor) else None
        if name in KNOWN and first:
            out = func(*args, **kwargs)
            if name == "__get__" and isinstance(out, Tensor):  # such as 'index.data'
                self.kinds[out] = first
            return out
        if first == "edges":
            if name == "unbind" and len(args) == 1:
                return self.ends
            if name == "__getitem__" and args[1] in (0, 1) and isinstance(args[1], int):
                return self.ends[args[1]]
        elif first == "row":
            if name in SAME or (name == "__getitem__" and _chooses(args[1])):
                out = func(*args, **kwargs)
                self.kinds[out] = "row"
                return out
            if name == "max" and len(args) == 1 and not kwargs:
                count = torch.tensor(self.num_dst - 1)
                self.kinds[count] = "count"
                return count
        elif name in SUMS | EXTREMA:
            return self.reduce(name, args, kwargs)
        elif name in READS and [self.kinds.get(t) for t in tensors(args[1:], kwargs)] == ["row"]:
            if not self.ended:
                check_read(name, args, kwargs, self.num_dst)
            out = func(*args, **kwargs)
            if first == "unknown":
                self.kinds[out] = "unknown"
            return out
        elif name == "index_select" and any(args[0] is t for t in self.tables):
            return func(*args, **kwargs)
        raise self.uncut(name, args, kwargs)

    def uncut(self, name: str, args: Any, kwargs: Any) -> NotStreamable:
        """Return why a function of sources or destinations refuses to be split by blocks."""
        what = next(NAMES[kind] for t in tensors(args, kwargs) if (kind := self.kinds.get(t)) in NAMES)
        return NotStreamable(f"it calls '{name}' on '{what}', which cannot be split by blocks")

    def reduce(self, name: str, args: Any, kwargs: Any) -> Tensor:
        """Recognise a reduction and answer it."""
        target, dim, index, src, op, include_self = _bind(name, args, kwargs)
        if not isinstance(index, Tensor) or self.kinds.get(index) != "row" or not isinstance(src, Tensor):
            raise self.uncut(name, args, kwargs)
        if name.startswith("index_add"):
            index = index.view([-1 if d == dim % src.dim() else 1 for d in range(src.dim())]).expand_as(src)
        if op not in ("sum", "amax", "amin") or not src.is_floating_point():
            raise NotStreamable(f"it reduces by '{op}' in {src.dtype}")
        k, self.count, dim = self.count, self.count + 1, dim % target.dim()
        if target.size(dim) != self.num_dst or self.kinds.get(target) or kwargs.get("alpha", 1) != 1:
            raise NotStreamable("it reduces into something else than rows of destinations")
        if (op == "sum" or include_self) and not self.is_zero(target):
            raise NotStreamable("it adds to what is there already")
        if op != "sum" and include_self:
            raise NotStreamable("its extrema count a row that is no message")
        found = Reduction(op, dim, index, src, target.detach().movedim(dim, 0)[:0], False)
        row = found.row
        if row is not None and row.data_ptr() == self.row.data_ptr() and row.stride() == self.row.stride():
            found = found._replace(whole=row.shape == self.row.shape)
        value = self.answer(k, found, target)
        return value if value is target or not name.endswith("_") else target.copy_(value)

    def is_zero(self, target: Tensor) -> bool:
        """Whether a tensor holds zeros; of most ones it is known, so that the host need not wait for a GPU."""
        known = None if target.is_inference() else self.zeros.get(target)
        return (known is not None and known == target._version) or not target.detach().any()

    def answer(self, k: int, found: Reduction, target: Tensor) -> Tensor:
        """Return the result of the ``k``-th reduction, or ``target``, from now on unknown."""
        if k not in self.known and self.kinds.get(found.src) == "unknown":
            raise Stop
        self.met.add(k)
        if k in self.known:
            if k in self.expose:
                self.cut(k, found)
            return self.known[k].movedim(0, found.dim)
        value = self.cut(k, found)
        if value is not None:
            return value.movedim(0, found.dim)
        self.kinds[target] = "unknown"
        return target

    def apply(self, x: Tensor, p: float, inplace: bool) -> Tensor:
        """Drop entries, unless they are unknown or, at the end, those of padding edges."""
        if self.ended and (x.dim() == 0 or x.size(0) != self.num_edges):
            return F.dropout(x, p, True, inplace)
        if self.ended or self.kinds.get(x) == "unknown":
            self.dropouts += 1
            return x
        return super().apply(x, p, inplace)


def _chooses(key: Any) -> bool:
    """Whether an index keeps edges apart: a mask, or all of them."""
    keys = key if isinstance(key, tuple) else (key,)
    return all(
        k is None or k is Ellipsis or k == slice(None) if not isinstance(k, Tensor) else k.dtype == torch.bool
        for k in keys
    )


def check_read(name: str, args: Any, kwargs: Any, num_dst: int) -> None:
    """Raise if a tensor that is read by the numbers of some destinations has more rows than there are of these: it
    numbers them in another way.
    """
    if length_read(name, args, kwargs) > num_dst:
        raise ReadsRows(
            args[0],
            f"it reads a tensor of shape {list(args[0].shape)} by 'index', which numbers the nodes of a block (give "
            f"'propagate' the tensor by a name, and ask for this name with '_i' behind it)",
        )


def length_read(name: str, args: Any, kwargs: Any) -> float:
    """Return the length of the dimension of a tensor that is read by an index; infinity if that is not clear."""
    where = args[1] if name == "__getitem__" else kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if isinstance(where, Tensor):
        where = 0
    elif isinstance(where, tuple):
        at = next(k for k, index in enumerate(where) if isinstance(index, Tensor))
        if any(index is None for index in where):
            return math.inf
        where = at - len(where) if any(index is Ellipsis for index in where[:at]) else at
    return args[0].size(where)


def _bind(name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return target, dimension, index, source, kind and whether the target counts, of any function that reduces."""
    last = "source" if name.startswith("index_add") else "src"
    names = ("self", "dim", "index", last, "reduce")
    target, dim, index, src, op = (args[k] if k < len(args) else kwargs.get(n) for k, n in enumerate(names))
    op, include_self = ("sum", False) if name in SUMS else (op, kwargs.get("include_self", True))
    return target, dim, index, src, op, include_self
