r"""What functions of torch that do not treat each row by itself make of rows at home, as far as they are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_sar.affine import scaled
from pyg_sar.offload.passes import Join, Moments, Part, Take, Total, force, host
from pyg_sar.offload.place import ALL
from pyg_sar.offload.rows import HostRows, answers, name_of, record, refuse, rows_in
from pyg_sar.operations import bind

ADDS = ("add", "add_", "__add__", "__iadd__")


@answers("detach", "__get__ data")
def detach(func: Callable, args: Any, kwargs: Any) -> HostRows:
    """Return the rows without their place in autograd's graph."""
    return HostRows(args[0].place, host(args[0])).is_view_of(args[0])


@answers("__deepcopy__")
def deepcopy(func: Callable, args: Any, kwargs: Any) -> HostRows:
    """Copy data; of what was computed torch makes no copies."""
    rows, memo = args
    if rows.op is not None or not rows.is_leaf:
        raise RuntimeError("Only rows at home that are data support the deepcopy protocol (got what was made of them)")
    host = rows.place.home.empty(rows.shape, rows.dtype).copy_(rows.host)
    copy: Any = HostRows(rows.place, host).requires_grad_(rows.requires_grad)
    memo[id(rows)] = copy
    return copy


@answers("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
def new(func: Callable, args: Any, kwargs: Any) -> Tensor:
    """An ordinary tensor, of the type of the rows and on their device."""
    return func(args[0].probe, *args[1:], **kwargs)


@answers("reshape", "view")
def reshape(func: Callable, args: Any, kwargs: Any) -> HostRows:
    """Shape each row anew: the number of rows is that of the range."""
    rows, *shape = args
    shape = list(shape[0]) if shape and isinstance(shape[0], (list, tuple)) else shape
    if shape and shape[0] == len(rows):
        known = math.prod(size for size in shape[1:] if size != -1)
        width = math.prod(rows.shape[1:]) // max(known, 1)
        shape = [-1, *(width if size == -1 else size for size in shape[1:])]
    return record(func, (rows, *shape), kwargs)


@answers("__getitem__", "index_select")
def take(func: Callable, args: Any, kwargs: Any) -> Any:
    """Some rows are an ordinary tensor; all of them are these rows; columns of rows are still rows."""
    if func is torch.Tensor.index_select or func is torch.index_select:
        rows, dim, index = bind(args, kwargs, "input", "dim", "index")
        if isinstance(rows, HostRows) and dim % rows.dim() != 0:
            refuse(func, args, kwargs, "it takes columns by their numbers; write 'x[:, index]'")
        if isinstance(rows, HostRows) and dim < 0:  # as PyG's layers read the rows of sources
            refuse(func, args, kwargs, "it takes rows by their numbers, as MFConv does, and layers of PyG that are not "
                   "converted ('pyg_sar.nn.convert') or have another 'edge_index' than this data's")  # fmt: skip
    else:
        rows, index = args
    if not isinstance(rows, HostRows) or any(isinstance(i, HostRows) for i in tree_leaves(index)):
        refuse(func, args, kwargs, "the numbers of rows are needed to take them; move them out of the model first")
    if index is None or isinstance(index, bool):
        refuse(func, args, kwargs, "a dimension in front of the rows would be added")
    if not isinstance(index, (Tensor, slice, int, tuple)) and index is not Ellipsis:
        index = torch.as_tensor(index)  # of a list, in which a row may occur twice
    if hasattr(index, "_graph"):  # numbers of sources, as :func:`shard_links` gives them
        refuse(func, args, kwargs, "it reads rows of other workers by pairs of nodes, which an ordinary tensor of all "
               "local rows allows, 'z[torch.arange(len(z))]'")  # fmt: skip
    if index is Ellipsis:
        return rows
    if isinstance(index, tuple) and index and index[0] is Ellipsis and len(index) <= rows.dim():
        index = (slice(None), *index)
    first = index[0] if isinstance(index, tuple) and index else index
    everything = isinstance(first, slice) and first.indices(len(rows)) == (0, len(rows), 1)
    if everything and (not isinstance(index, tuple) or all(i == slice(None) for i in index[1:])):
        return rows
    if everything:
        return record(func, (rows, (slice(None), *index[1:])), kwargs)
    if isinstance(index, tuple):
        refuse(func, args, kwargs, "rows are taken by one mask, one list of numbers or one range")
    return Take.apply(force(rows), index)


@answers("sum", "mean")
def total(func: Callable, args: Any, kwargs: Any) -> Any:
    """Over all rows, an ordinary tensor; over columns, still rows."""
    rows, dim = bind(args, kwargs, "input", "dim")
    dims = None if dim is None else [d % rows.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    if dims is not None and 0 not in dims:
        return record(func, args, kwargs)
    if (dims is not None and dims != [0]) or len(args) > 2 or kwargs.keys() - {"input", "dim", "dtype"}:
        refuse(func, args, kwargs, "of rows, 'sum(0)', 'mean(0)', 'sum()' and 'mean()' are known")
    count = rows.numel() if dims is None else len(rows)
    return Total.apply(force(rows), dims is None, None if name_of(func) == "sum" else count, kwargs.get("dtype"))


class Stacked:
    """What ``torch.stack`` makes of rows at home, which are then in the second dimension. Layers over several edge
    types stack what each gives, and reduce that; nothing else is known of it.

    Args:
        rows: The same numbers, with the rows in front, :math:`(n, k, *)`.
    """

    REDUCE = ("sum", "mean", "max", "min", "amax", "amin", "prod", "std", "var", "logsumexp")
    KNOWN = "a dimension in front of the rows is reduced at once, such as by 'sum(0)'"

    def __init__(self, rows: HostRows) -> None:
        self.rows = rows

    def __getattr__(self, name: str) -> Any:
        if name not in self.REDUCE:
            raise AttributeError(f"Rows at home that were stacked have no '{name}': {self.KNOWN}")
        return partial(getattr(torch, name), self)

    def unknown(self, *args: Any) -> NoReturn:
        """Refuse to do anything else."""
        refuse(torch.stack, (self.rows,), {}, self.KNOWN)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = unknown
    __pow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __getitem__ = __len__ = __iter__ = unknown
    __eq__ = __ne__ = unknown
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Reduce what was stacked."""
        given = {**dict(zip(("input", "dim"), args, strict=False)), **(kwargs or {})}
        it, dim, known = given.pop("input", None), given.pop("dim", None), name_of(func) in cls.REDUCE
        if isinstance(it, Stacked) and known and dim in (0, [0], (0,)) and not (args[2:] or given.get("keepdim")):
            return record(func, (it.rows, 1), given)
        next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Stacked)).unknown()


@answers("stack")
def stack(func: Callable, args: Any, kwargs: Any) -> Any:
    """In front of the rows, or behind."""
    rows, dim = bind(args, kwargs, "tensors", "dim")
    if (dim or 0) % (next(rows_in(rows)).dim() + 1) != 0:
        return record(func, args, kwargs)
    return Stacked(record(func, (rows,), {"dim": 1}))


@answers("cat", "concat", "concatenate")
def cat(func: Callable, args: Any, kwargs: Any) -> Any:
    """Of rows of nodes of several types, one type after the other."""
    rows, dim = bind(args, kwargs, "tensors", "dim")
    first = next(rows_in(rows))
    if (dim or 0) % first.dim() != 0 or first.place.type == ALL:
        return record(func, args, kwargs)
    if not all(isinstance(t, HostRows) and t.place.sets is first.place.sets for t in rows):
        refuse(func, args, kwargs, "of rows one after the other, all are rows at home of types of the same data")
    like = torch.cat([t.probe for t in rows])  # which raises where rows are of other shapes
    types = tuple(one for t in rows for one in t.place.types)
    return Join.apply(first.place.of(types), *(force(t.to(like.dtype)) for t in rows))


@answers("split")
def split(func: Callable, args: Any, kwargs: Any) -> Any:
    """Into the types of which there are rows, or columns."""
    rows, sizes, dim = bind(args, kwargs, "tensor", "split_size_or_sections", "dim")
    if (dim or 0) % rows.dim() != 0 or not isinstance(rows.place.type, tuple):
        return record(func, args, kwargs)
    if isinstance(sizes, int) or list(sizes) != rows.place.sizes:
        refuse(func, args, kwargs, f"rows of several types are split into the types, of {rows.place.sizes} rows")
    return tuple(part.is_view_of(rows) for part in Part.apply(force(rows)))


@answers("roll", "renorm", "renorm_")
def along_rows(func: Callable, args: Any, kwargs: Any) -> Any:
    """Of five rows it may look as if it treats each one by itself."""
    rows, name = args[0] if args else kwargs["input"], "dims" if name_of(func) == "roll" else "dim"
    dims = args[2] if len(args) > 2 else kwargs.get(name, ())
    moved = [d % rows.dim() for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
    if (not moved or 0 in moved) if name == "dims" else moved != [0]:
        refuse(func, args, kwargs, "the result for a row depends on other rows")
    return record(func, args, kwargs)


@answers("batch_norm")
def batch_norm(func: Callable, args: Any, kwargs: Any) -> Any:
    """Normalise by the statistics of all rows."""
    if func is not F.batch_norm:
        refuse(func, args, kwargs, "of batch normalisation, 'torch.nn.functional.batch_norm' is known")
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    default = dict(zip(names, (None, None, None, None, None, False, 0.1, 1e-5), strict=True))
    given = {**default, **dict(zip(names, args, strict=False)), **kwargs}
    x, running = given["input"], (given["running_mean"], given["running_var"])
    if x.dim() != 2:
        refuse(func, args, kwargs, "of batch normalisation, that of rows [n, channels] is known")
    bias = 0
    if given["training"]:
        x, bias = without_bias(x)
        x = force(x)
        n, mean, var = Moments.apply(x)
        if n == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        with torch.no_grad():
            for old, new in zip(running, (mean + bias, var * (n / max(n - 1, 1))), strict=True):
                if old is not None:
                    old.lerp_(new.to(old.dtype), given["momentum"])
    else:
        mean, var = (t.double() for t in running)
    scale, shift = (var + given["eps"]).rsqrt(), 0 * bias + torch.zeros_like(var)
    scale = scale if given["weight"] is None else scale * given["weight"]
    shift = shift if given["bias"] is None else shift + given["bias"]
    return scale_columns(x, mean, scale, shift)


@answers("normalise")
def normalise(x: HostRows, coefficients: Callable, parameters: Sequence[Tensor], track: Callable) -> HostRows:
    """Scale and shift columns, as the moments of all rows and parameters say."""
    x = force(x)
    count, mean, var = Moments.apply(x)
    m2 = var * count
    track(count, mean.detach(), m2.detach())
    return scale_columns(x, mean, *coefficients(count, mean, m2, *(p.double() for p in parameters)))


def scale_columns(x: HostRows, mean: Tensor, scale: Tensor, shift: Tensor) -> HostRows:
    """Return ``(x - mean) * scale + shift``."""
    # Vectors might be taken for a number of each row.
    return record(scaled, (x, *(t.unsqueeze(0) for t in (mean, scale, shift))), {})


def without_bias(x: HostRows) -> tuple[HostRows, Any]:
    """Return rows and the bias that was added to them and that their normalisation takes out again (its gradient is 0);
    so the sum need not be written.
    """
    if x.op is None or x.made is not None or name_of(x.op.func) not in ADDS or x.op.kwargs or len(x.op.args) != 2:
        return x, 0
    rows, bias = x.op.args
    alike = isinstance(rows, HostRows) and (rows.shape, rows.dtype) == (x.shape, x.dtype)
    is_tensor = isinstance(bias, Tensor) and not isinstance(bias, HostRows)
    is_bias = is_tensor and bias.shape == x.shape[1:] and len(bias) != len(x)
    return (rows, bias) if alike and is_bias else (x, 0)
