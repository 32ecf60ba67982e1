r"""Rows without memory on the device: a tensor that stands for rows at home, or for what is made of them.

A function of torch is recorded, not run, if it treats each row by itself. Whether it does is found out by running it on
five rows, whole and in two parts. What is pending runs range by range where numbers are needed: in front of an
aggregation, or where rows are taken out (:mod:`pyg_sar.offload.passes`); what is known of other functions is in
:mod:`pyg_sar.offload.functions`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pyg_sar.autograd import autocast_as_now, random_states
from pyg_sar.distributed.group import is_local
from pyg_sar.offload.place import CPU, Place

PROBE = 5  # rows, as many as no layer is likely to be wide
PLAIN = torch._C.DisableTorchFunctionSubclass


class Op(NamedTuple):
    """A function that was recorded, and what it was called with.

    Args:
        func: The function.
        args: Its arguments; rows among them are :class:`HostRows`.
        kwargs: Those by name.
        changes: Whether it changes its first argument.
        autocast: What it runs within, as it was when it was recorded.
        versions: Of tensors among the arguments, and of rows that exist, as they were then.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    changes: bool = False
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    versions: tuple[tuple[weakref.ref[Tensor], int], ...] = ()

    def check(self) -> None:
        """Raise if a tensor changed since the function was recorded."""
        for reference, version in self.versions:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                raise RuntimeError(
                    f"A tensor of shape {list(tensor.shape)} was changed in place after '{name_of(self.func)}' was "
                    f"called with it on rows at home, which are computed when they are needed, and again in "
                    f"backward. Change a copy, or take what you need of the rows ('out[mask]') and call 'backward' "
                    f"before; an optimizer changes parameters so."
                )


class HostRows(Tensor):
    r"""Rows at home, or what a function makes of them, of shape :math:`(n, *)`.

    Args:
        place: Where they are kept and computed on.
        host: The rows, if they exist.
        op: What makes them, if they do not.
        probe: Five of the rows.
        requires_grad: Whether they are differentiated.
    """

    place: Place
    host: Tensor | None
    op: Op | None
    probe: Tensor
    made: HostRows | None  # these rows, once they exist
    differentiated: bool
    recorded: bool  # whether they did not exist from the beginning
    base: weakref.ref[HostRows] | None  # the rows that torch would have made a view of
    views: list[weakref.ref[HostRows]]  # what it would have made views of these

    @staticmethod
    def __new__(
        cls, place: Place, host: Tensor | None = None, op: Op | None = None, probe: Tensor | None = None,
        requires_grad: bool = False,
    ) -> HostRows:  # fmt: skip
        """Make a tensor without storage of its own."""
        num_rows = place.num_rows
        if host is not None and host.size(0) != num_rows:
            raise ValueError(f"Expected {num_rows} rows of the nodes of this data (got {host.size(0)})")
        if probe is None:
            assert host is not None
            probe = some(host, place.device)
        out = torch.Tensor._make_wrapper_subclass(
            cls, (num_rows, *probe.shape[1:]), dtype=probe.dtype, device=place.device
        )
        out.place, out.host, out.op, out.probe, out.made = place, host, op, probe, None
        out.differentiated, out.recorded, out.base, out.views = requires_grad, op is not None, None, []
        if requires_grad and op is not None:  # for an `autograd.Function` to take note of; what it returns is refused
            with PLAIN():
                out.requires_grad_()
        return out

    def is_view_of(self, base: HostRows) -> HostRows:
        """Return these rows, which torch would have made a view of others."""
        self.base = weakref.ref(base)
        base.views = [view for view in base.views if view() is not None] + [weakref.ref(self)]
        return self

    def shares(self) -> bool:
        """Whether there are other rows that torch would have put in the same memory."""
        return any(other() is not None for other in (*self.views, *([] if self.base is None else [self.base])))

    def aggregate(self, graph: Any, reduce: Any, source: Any, rows: Any) -> HostRows:
        """Aggregate what local rows are made of, which are these, see :func:`pyg_sar.aggregate.aggregate`."""
        return HANDLERS["aggregate"](graph, reduce, source, rows)

    def normalise(self, coefficients: Callable, parameters: Any, track: Callable) -> HostRows:
        """Scale and shift columns by what the moments of all rows say, see :mod:`pyg_sar.nn.norm.columns`."""
        return HANDLERS["normalise"](self, coefficients, parameters, track)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name shape and type, and whether the rows exist."""
        what = "rows at home" if self.op is None else f"made by '{name_of(self.op.func)}'"
        return f"HostRows({list(self.shape)}, {self.dtype}, {what})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer, or record, or refuse."""
        kwargs = kwargs or {}
        name = name_of(func)
        if name in HANDLERS:
            return HANDLERS[name](func, args, kwargs)
        if name in ANSWERS or isinstance(func, torch._ops.OpOverload):  # the latter by a mode, in place of autograd
            with PLAIN():
                return func(*args, **kwargs)
        return record(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do what autograd asks for: gradients that meet are added, and tensors are told from their graph."""
        name = func.overloadpacket.__name__
        if name == "detach":
            it = args[0]
            return HostRows(it.place, it.host, it.op, it.probe)
        if name in ("add", "add_") and all(isinstance(t, HostRows) for t in args[:2]):
            one, other = args[:2]  # gradients: the sum is made where its rows are read
            total = pending(torch.add, one, other)
            if name == "add":
                return total
            one.host, one.op, one.made = HANDLERS["force"](total).host, None, None  # sums over steps do not grow
            return one
        refuse(func, args, kwargs or {}, "it reached the rows beside torch's functions")


def pending(func: Callable, *args: Any) -> HostRows:
    """Return what a function, known to treat each row by itself, makes of gradients, which nobody differentiates."""
    args = tuple(HostRows(t.place, t.host, t.op, t.probe) if isinstance(t, HostRows) else t for t in args)
    first = next(rows_in(args))
    with torch.no_grad():
        probe = func(*(t.probe if isinstance(t, HostRows) else t for t in args))
    return HostRows(first.place, op=Op(func, args, {}), probe=probe)


def some(rows: Tensor, device: torch.device) -> Tensor:
    """Return five of the rows on a device, or zeros if there are none."""
    if rows.size(0) == 0:
        return rows.new_zeros(PROBE, *rows.shape[1:]).to(device)
    return rows.detach()[torch.arange(PROBE, device=rows.device) % rows.size(0)].to(device)


def name_of(func: Any) -> str:
    """Return the name of a function; of a property, that of the property."""
    if isinstance(func, partial):
        return name_of(func.args[0])
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name


def refuse(func: Any, args: Any, kwargs: Any, why: str) -> NoReturn:
    """Raise because of a function."""
    shapes = [list(t.shape) for t in tree_leaves((args, kwargs)) if isinstance(t, HostRows)]
    raise NotImplementedError(
        f"'{name_of(func)}' cannot be computed range by range on rows at home of shape {shapes[0]}: {why}. Take "
        f"the rows that it needs before ('out[mask]' is an ordinary tensor, and so is 'out[torch.arange(len(out))]' of "
        f"all of them), or leave this model in memory."
    )


def rows_in(value: Any) -> Iterator[HostRows]:
    """Yield the rows among arguments."""
    return (t for t in tree_leaves(value) if isinstance(t, HostRows))


def has_rows(value: Any, num_rows: int) -> bool:
    """Whether an ordinary tensor has a row for each node, other than a parameter."""
    plain = isinstance(value, Tensor) and not isinstance(value, (HostRows, torch.nn.Parameter))
    return plain and value.dim() > 0 and value.size(0) == num_rows


def as_rows(value: Any) -> Any:
    """Return a table of local nodes as a tensor that is no parameter, as which it would be the same for all rows."""
    return value.view_as(value) if isinstance(value, torch.nn.Parameter) and is_local(value) else value


def result_of(func: Callable, k: int, *args: Any, **kwargs: Any) -> Any:
    """Return one of the results of a function."""
    return func(*args, **kwargs)[k]


def record(func: Callable, args: Any, kwargs: Any) -> Any:
    """Return what a function makes of rows, which is not computed yet."""
    first = next(rows_in((args, kwargs)))
    check_lengths(args, kwargs)
    args, kwargs = tree_map(as_rows, (args, kwargs))
    autocast = autocast_as_now(first.device)
    with autocast():
        func, args, kwargs, (whole, changes, (base, same)) = understood(func, args, kwargs)
    if base is not None and same and not changes:  # such as 'x.to(x.dtype)'
        return base
    if isinstance(whole, tuple):
        found = [record(partial(result_of, func, k), args, kwargs) for k in range(len(whole))]
        return tuple(found) if type(whole) is tuple else type(whole)(found)  # such as values and numbers of maxima
    learns = torch.is_grad_enabled() and any(requires_grad(t) for t in tree_leaves((args, kwargs)))
    kept = tree_map(lambda v: snapshot(v) if isinstance(v, HostRows) else v, (args, kwargs))
    exist = (t.host if isinstance(t, HostRows) else t for t in tree_leaves(kept))
    versions = tuple((weakref.ref(t), t._version) for t in exist if isinstance(t, Tensor) and not t.is_inference())
    op = Op(func, kept[0], kept[1], changes, autocast, versions)
    out = HostRows(first.place, op=op, probe=whole, requires_grad=learns and whole.is_floating_point())
    if not changes:
        return out if base is None else out.is_view_of(base)
    target = args[0]
    if target.shares():
        refuse(func, args, kwargs, "it changes a part of rows, or what shares their memory; make new rows of them "
               "('torch.cat', 'torch.where')")  # fmt: skip
    if target.op is None and target.is_leaf:
        return changed(target, out)
    target.host, target.op, target.probe, target.made = None, out.op, out.probe, None
    target.differentiated = out.differentiated
    return target


def changed(rows: HostRows, out: HostRows) -> HostRows:
    """Change data in place: at once, since it stays what is differentiated by, as torch's leaves do."""
    if out.differentiated:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    rows.host, rows.probe = HANDLERS["force"](out).host, out.probe
    return rows


def check_lengths(args: Any, kwargs: Any) -> None:
    """Raise if rows are those of several sets of nodes, which five rows of each would not tell."""
    found = list(dict.fromkeys((len(rows), rows.place.type) for rows in rows_in((args, kwargs))))
    if len(found) > 1:
        what = "type of nodes" if found[0][1] else "graph"
        named = " and ".join(f"{count} of '{of}'" if of else str(count) for count, of in found)
        raise ValueError(f"Expected rows at home of one {what} (got {named} rows)")


Base = tuple["HostRows | None", bool]
Probed = tuple[Any, bool, Base]


def understood(func: Callable, args: Any, kwargs: Any) -> tuple[Callable, Any, Any, Probed]:
    """Return a call, and what :func:`probed` does of it. A tensor that is as long as there are rows has a row for each;
    if the function then mixes rows, it may be the same for all of them, such as a weight.
    """
    num_rows = len(next(rows_in((args, kwargs))))
    try:
        return func, args, kwargs, probed(func, args, kwargs)
    except NotImplementedError as refusal:
        if not any(has_rows(t, num_rows) for t in tree_leaves((args, kwargs))):
            raise
        call = sharing(func, args, kwargs, num_rows)
        try:
            return *call, probed(*call)
        except NotImplementedError:
            raise refusal from None


def sharing(func: Callable, args: Any, kwargs: Any, num_rows: int) -> tuple[Callable, Any, Any]:
    """Return the same call, whose ordinary tensors are not as long as there are rows: they stand in others."""
    given, form = tree_flatten((args, kwargs))
    within = [k for k, t in enumerate(given) if has_rows(t, num_rows)]
    for k in within:
        given[k] = given[k].expand(2 if num_rows == 1 else 1, *given[k].shape)
    return partial(shared, func, within), *tree_unflatten(given, form)


def shared(func: Callable, within: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """Return what a function makes of tensors that stand in others."""
    given, form = tree_flatten((args, kwargs))
    for k in within:
        given[k] = given[k][0]
    args, kwargs = tree_unflatten(given, form)
    return func(*args, **kwargs)


def probed(func: Callable, args: Any, kwargs: Any) -> Probed:
    """Return what a function makes of five rows, whether it changes its first argument, and the rows in whose memory
    its result is, with whether it is these; refuse what mixes rows.
    """
    first = next(rows_in((args, kwargs)))
    state = random_states(first.device)
    cuts = (slice(None), slice(0, 2), slice(2, PROBE))
    try:
        results = [run_on(which, func, args, kwargs, len(first), first.device) for which in cuts]
    except NotImplementedError:
        raise
    except Exception as error:
        why = f"on five rows it raised {type(error).__name__}: {error}"
        if any(isinstance(t, torch.nn.Parameter) and t.shape[:1] == (len(first),) for t in tree_leaves((args, kwargs))):
            why += " (a parameter with a row for each node is a 'pyg_sar.nn.NodeEmbedding')"
        refuse(func, args, kwargs, why)
    if not torch.equal(state, random_states(first.device)):
        refuse(func, args, kwargs, "it draws random numbers, which backward would draw anew; 'F.dropout' is known")
    (whole, changes, base), *parts = results
    mixes = not all_row_wise(whole, [out for out, *_ in parts])
    with suppress(Exception):  # which a function may raise of other numbers: it was understood of the given ones
        # On the CPU: a GPU would be of no use after an index beyond the last.
        others = [run_on(which, func, args, kwargs, len(first), CPU, random=True)[0] for which in cuts]
        mixes = mixes or not all_row_wise(others[0], others[1:])
    if mixes:
        found = whole if isinstance(whole, tuple) else (whole,)
        keeps = all(isinstance(t, Tensor) and t.shape[:1] == (PROBE,) for t in found)
        why = "the result for a row depends on other rows" if keeps else "it returns no row for each row"
        refuse(func, args, kwargs, why)
    if changes and (isinstance(whole, tuple) or changes != [True]):
        refuse(func, args, kwargs, "it changes something else than its first argument, or one that is not at home, or "
               "its type or shape")  # fmt: skip
    return whole, bool(changes), base


@lru_cache(maxsize=64)
def random_rows(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return random rows, the same each time, which nobody changes: numbers about one, or zeros and ones in no order,
    also of the first two rows and the others.
    """
    drawn = torch.rand(shape, generator=torch.Generator(CPU).manual_seed(5), device=CPU)
    return (drawn + 0.5 if dtype.is_floating_point or dtype.is_complex else drawn < 0.5).to(dtype)


def run_on(
    which: slice, func: Callable, args: Any, kwargs: Any, num_rows: int, device: torch.device, random: bool = False
) -> tuple[Any, list[bool], Base]:
    """Return what a function makes of some of five rows; of rows that it changes, whether that is its result and they
    are its first argument; and the rows in whose memory its result is, with whether it is these. Rows at home may be
    ``random`` instead: of sparse rows, of zeros or of one class, little can be seen.
    """
    copies: list[tuple[Tensor, Tensor, int]] = []  # with the version of each

    def pick(value: Any) -> Any:
        if not isinstance(value, HostRows) and not has_rows(value, num_rows):
            return value.to(device) if random and isinstance(value, Tensor) else value
        if isinstance(value, HostRows):
            copy = (random_rows(value.probe.shape, value.dtype) if random else value.probe)[which].clone()
        else:
            copy = some(value, device)[which]
        copies.append((copy, value, copy._version))
        return copy

    with torch.inference_mode(False), torch.no_grad():  # tensors of that mode do not tell that they were changed
        given = tree_map(pick, (args, kwargs))
        out = func(*given[0], **given[1])
    altered = [(c, v) for c, v, version in copies if c._version > version]
    shared = (v for c, v, _ in copies if isinstance(out, Tensor) and (out is c or out._base is c))
    base = next((v for v in shared if isinstance(v, HostRows)), None)
    right = (out is c and args[0] is v and c.shape[1:] == v.shape[1:] for c, v in altered)
    changes = [it and isinstance(v, HostRows) for it, (_, v) in zip(right, altered, strict=True)]
    return out, changes, (base, any(out is c for c, *_ in copies))


def all_row_wise(whole: Any, parts: list[Any]) -> bool:
    """Whether the results of the whole are those of its parts."""
    if not isinstance(whole, tuple):
        return row_wise(whole, parts)
    return all(row_wise(whole[k], [part[k] for part in parts]) for k in range(len(whole)))


def row_wise(whole: Any, parts: list[Any]) -> bool:
    """Whether the result of the whole is that of its parts."""
    if not isinstance(whole, Tensor) or whole.dim() == 0 or whole.size(0) != PROBE:
        return False
    if [p.shape for p in parts] != [whole[:2].shape, whole[2:].shape]:
        return False
    joined = torch.cat(parts)
    if not whole.is_floating_point():
        return torch.equal(joined, whole)
    backends: Any = (torch.backends.cuda, torch.backends.mkldnn)
    coarse = whole.dtype == torch.float32 and any(it.matmul.fp32_precision in ("tf32", "bf16") for it in backends)
    dtype = torch.bfloat16 if coarse else whole.dtype
    units = 4 * torch.finfo(dtype).eps  # products of few rows are rounded otherwise than those of more
    size = float(whole.double().nan_to_num(0, 0, 0).abs().sum()) / max(whole.numel(), 1)
    return torch.allclose(joined, whole, rtol=max(1e-3, units), atol=max(1e-5, units) * size, equal_nan=True)


def snapshot(rows: HostRows) -> HostRows:
    """Return the same rows as they are now, with their place in autograd's graph: a function may change ``rows``."""
    if rows.made is not None:
        return rows.made
    if rows.op is not None:
        return HostRows(rows.place, op=rows.op, probe=rows.probe, requires_grad=rows.differentiated)
    return Same.apply(rows) if requires_grad(rows) else HostRows(rows.place, rows.host, probe=rows.probe)


class Same(torch.autograd.Function):
    """The same rows in another tensor; a view would keep the one that it was made of, which may refer to it later."""

    @staticmethod
    def forward(ctx: Any, rows: HostRows) -> HostRows:
        """Return the rows."""
        ctx.set_materialize_grads(False)
        return HostRows(rows.place, rows.host, probe=rows.probe)

    @staticmethod
    def backward(ctx: Any, grad: HostRows | None) -> HostRows | None:
        """Return the gradient."""
        return grad


def requires_grad(value: Any) -> bool:
    """Whether a value is differentiated."""
    if not isinstance(value, HostRows):
        return isinstance(value, Tensor) and value.requires_grad
    with PLAIN():
        native, leaf = value.requires_grad, value.is_leaf
    if value.op is None:
        return native
    if native and not leaf and value.recorded:
        refuse(value.op.func, (value,), {}, "it ran within an 'autograd.Function', which must see rows that exist")
    return value.differentiated


# Questions that the wrapper answers by itself.
ANSWERS = {
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "stride",
    "__len__", "__hash__", "__repr__", "__format__", "is_inference", "is_contiguous", "get_device", "__set__ grad",
    *(f"__get__ {name}" for name in (
        "shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_sparse", "is_leaf", "grad", "grad_fn",
        "is_quantized", "is_meta", "is_nested", "names", "_version", "is_mkldnn", "is_xpu", "is_mps",
    )),
}  # fmt: skip
HANDLERS: dict[str, Callable[..., Any]] = {}


def answers(*names: str) -> Callable[[Callable], Callable]:
    """Have a function answer functions of torch of these names."""

    def add(handler: Callable) -> Callable:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return add


@answers("requires_grad_", "__set__ requires_grad", "register_hook", "retain_grad", "grad", "backward")
def differentiates(func: Callable, args: Any, kwargs: Any) -> Any:
    """Autograd knows rows that exist; those that are still to be made have no place in its graph."""
    for rows in rows_in((args, kwargs)):
        if rows.op is not None:
            refuse(func, args, kwargs, "gradients are those of data, and of what layers on graphs return; these rows "
                   "are made when they are needed, or were changed in place")  # fmt: skip
    with PLAIN():
        return func(*args, **kwargs)


@answers("__get__ requires_grad")
def asks_requires_grad(func: Callable, args: Any, kwargs: Any) -> bool:
    """Rows that are not made yet know it themselves."""
    return requires_grad(args[0])
