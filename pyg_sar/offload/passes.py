r"""Passes over rows at home: what is pending runs on one range of rows after the other, and so does backward.

Nothing is kept between forward and backward but the rows that a pass read: backward runs a range again, under autograd,
and differentiates it (HongTu, section 4.2).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.affine import affine, merge_moments
from pyg_sar.autograd import once_differentiable
from pyg_sar.distributed.collectives import all_reduce, global_merge
from pyg_sar.linear import linear
from pyg_sar.offload.dropout import dropout_rows
from pyg_sar.offload.place import Place
from pyg_sar.offload.rows import HostRows, Op, answers, has_rows, name_of, pending, requires_grad
from pyg_sar.ops import moments_
from pyg_sar.ops.reference import accumulator
from pyg_sar.structure import mapped

FASTER: dict[Callable, Callable] = {F.linear: linear}  # on real rows


@answers("force")
def force(rows: HostRows) -> HostRows:
    """Return rows that exist: what is pending is computed, range by range, and written once."""
    if rows.op is None:
        return rows
    requires_grad(rows)  # which refuses what autograd has made of them
    if rows.made is None:
        with torch.set_grad_enabled(rows.differentiated):  # as it was when this was recorded
            reads = Reads()
            step = reads.step(rows.op)
            rows.made = ByRanges.apply(rows.place, step, len(rows), *reads.leaves)
    return rows.made


def host(rows: HostRows) -> Tensor:
    """Return the rows at home."""
    found = force(rows).host
    assert found is not None
    return found


class Leaf(int):
    """The number of what a program reads, which autograd keeps, and lets go after backward."""


class Step:
    """A function of a program, whose arguments are leaves, steps and values.

    Args:
        op: The function.
        learns: Whether it was recorded with gradients.
    """

    def __init__(self, op: Op, learns: bool) -> None:
        self.op, self.learns = op, learns


class Reads:
    """What a program reads: its rows and differentiated tensors, each once.

    It is a class, since an inner function that calls itself is a reference cycle, which would keep rows until the next
    garbage collection.
    """

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.known: dict[int, Any] = {}

    def step(self, op: Op, learns: bool = True) -> Step:
        """Return a function of the program."""
        args, kwargs = mapped(self.argument, (op.args, op.kwargs))
        return Step(op._replace(args=args, kwargs=kwargs), learns)

    def argument(self, value: Any) -> Any:
        """Return what stands for an argument."""
        if isinstance(value, HostRows) and value.op is not None:
            if id(value) not in self.known:
                self.known[id(value)] = self.step(value.op, value.differentiated)
            return self.known[id(value)]
        if not isinstance(value, HostRows) and not (isinstance(value, Tensor) and value.requires_grad):
            return value
        if id(value) not in self.known:
            self.leaves.append(value)
            self.known[id(value)] = Leaf(len(self.leaves) - 1)
        return self.known[id(value)]


class Evaluation:
    """A program on a range of the rows, of which there are ``num_rows``; ``leaves`` are what it reads there."""

    def __init__(self, place: Place, num_rows: int, span: tuple[int, int], leaves: Sequence[Any]) -> None:
        self.place, self.num_rows, self.span, self.leaves = place, num_rows, span, leaves
        self.made: dict[int, Any] = {}  # by steps, which several others may read

    def rows(self, value: Tensor) -> Tensor:
        """Return the range of rows that are on the host."""
        a, b = self.span
        return self.place.bring(value[a:b])

    def value(self, value: Any) -> Any:
        """Return an argument of a function as it is for the range."""
        if type(value) is Leaf:
            return self.leaves[value]
        if type(value) is Step:
            if id(value) not in self.made:
                self.made[id(value)] = self.run(value)
            return self.made[id(value)]
        return self.rows(value) if has_rows(value, self.num_rows) else value

    def run(self, step: Step) -> Any:
        """Return what a function makes."""
        func, args, kwargs, changes, autocast, _ = step.op
        step.op.check()
        if func is dropout_rows:  # which reads the numbers of rows
            rows, p, seed = args
            return dropout_rows(self.value(rows), p, seed, self.place.bring(self.place.ids(*self.span)))
        args, kwargs = mapped(self.value, (args, kwargs))
        if changes:  # others may read what it changes
            args = (args[0].clone(), *args[1:])
        with torch.set_grad_enabled(step.learns and torch.is_grad_enabled()), autocast():
            return FASTER.get(func, func)(*args, **kwargs)


def on_range(leaf: Tensor, span: tuple[int, int], place: Place, num_rows: int) -> Tensor:
    """Return what a program reads of a leaf on a range: rows of the range, or what all rows share."""
    rows = leaf.host if isinstance(leaf, HostRows) else leaf
    if not isinstance(leaf, HostRows) and not has_rows(leaf, num_rows):
        return leaf.detach()
    assert rows is not None
    return place.bring(rows[span[0] : span[1]].detach())


Version = tuple[weakref.ref[Tensor], int]


def versions(inputs: Sequence[Any]) -> list[Version | None]:
    """Return what rows at home are, and how often they were changed; None of other tensors, which autograd looks at."""
    at_home = (t.host if isinstance(t, HostRows) else None for t in inputs)
    return [None if rows is None or rows.is_inference() else (weakref.ref(rows), rows._version) for rows in at_home]


def check_versions(inputs: Sequence[Any], before: Sequence[Version | None]) -> None:
    """Raise if rows at home, which backward reads again, were changed since, or others took their place."""
    for t, version in zip(inputs, before, strict=True):
        if t is None or version is None:
            continue
        rows, count = version[0](), version[1]
        if rows is None or rows is not t.host or rows._version != count:
            raise RuntimeError(
                f"Rows at home of shape {list(t.shape)} were changed in place after they were used, and "
                f"backward reads them again. They share the memory of the data that was moved: change a copy, or call "
                f"'backward' before; and leave 'torch.utils.checkpoint' out, since backward computes them again anyway."
            )


class ByRanges(torch.autograd.Function):
    """Pending rows, computed and written range by range."""

    @staticmethod
    def forward(ctx: Any, place: Place, step: Step, num_rows: int, *leaves: Tensor) -> HostRows:
        """Write each range."""
        ctx.set_materialize_grads(False)  # as rows that nobody could take apart
        ctx.place, ctx.step, ctx.num_rows, ctx.versions = place, step, num_rows, versions(leaves)
        ctx.save_for_backward(*leaves)
        out = None
        for a, b in place.ranges:
            values = [on_range(leaf, (a, b), place, num_rows) for leaf in leaves]
            rows = Evaluation(place, num_rows, (a, b), values).run(step)
            del values
            if out is None:
                out = place.home.empty((num_rows, *rows.shape[1:]), rows.dtype)
            if rows.shape[1:] != out.shape[1:]:
                raise RuntimeError(
                    f"'{name_of(step.op.func)}' makes rows of shape {list(out.shape[1:])} of some rows at home and of "
                    f"{list(rows.shape[1:])} of others. Give it a shape that does not depend on values "
                    f"('F.one_hot(y, num_classes)'), or take the rows that it needs before ('out[mask]')."
                )
            out[a:b] = rows
            place.home.wrote(out, a, b)
            del rows
        return HostRows(place, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Run each range again, and differentiate it."""
        once_differentiable()
        if grad is None:  # of rows that no output depends on
            return (None,) * len(ctx.needs_input_grad)
        place, n, leaves, wanted = ctx.place, ctx.num_rows, ctx.saved_tensors, ctx.needs_input_grad[3:]
        check_versions(leaves, ctx.versions)
        grads: list[Any] = [None] * len(leaves)
        given = reader(grad, place)
        for span in place.ranges:
            found = differentiate(place, ctx.step, n, span, leaves, wanted, given)
            for k, leaf in enumerate(leaves):
                if wanted[k]:
                    collect(grads, k, leaf, next(found), span, place, n)
            del found  # or it would live while the next range is computed
        pairs = zip(grads, leaves, strict=True)
        return None, None, None, *(returned(g, t.dtype, t.device, getattr(t, "place", None)) for g, t in pairs)


def differentiate(
    place: Place, step: Step, num_rows: int, span: tuple[int, int], leaves: Sequence[Tensor], wanted: Sequence[bool],
    given: Callable[[tuple[int, int]], Tensor],
) -> Iterator[Tensor | None]:  # fmt: skip
    """Run a program on a range of rows once more, and return the gradients of the leaves that are wanted."""
    values = [on_range(leaf, span, place, num_rows).requires_grad_(want)
              for leaf, want in zip(leaves, wanted, strict=True)]  # fmt: skip
    with torch.enable_grad():
        out = Evaluation(place, num_rows, span, values).run(step)
    by = [value for value, want in zip(values, wanted, strict=True) if want]
    del values
    if not out.requires_grad:
        return iter([None] * len(by))
    return iter(torch.autograd.grad(out, by, given(span), allow_unused=True))


def reader(rows: Tensor, place: Place) -> Callable[[tuple[int, int]], Tensor]:
    """Return what reads a range of rows, of pending ones what they are made of: who reads each row once does not need
    them to be written before. A function of a script may give ordinary rows for a gradient.
    """
    n = len(rows)
    if not isinstance(rows, HostRows):
        return lambda span: place.bring(rows[span[0] : span[1]])
    if rows.op is None or rows.made is not None:
        return lambda span: on_range(force(rows), span, place, n)
    reads = Reads()
    step = reads.step(rows.op)

    def compute(span: tuple[int, int]) -> Tensor:
        with torch.no_grad():
            return Evaluation(place, n, span, [on_range(leaf, span, place, n) for leaf in reads.leaves]).run(step)

    return compute


def collect(grads: list[Any], k: int, leaf: Tensor, grad: Tensor | None, span: Any, place: Place, n: int) -> None:
    """Write the gradient of a range of rows; add that of what all rows share."""
    if isinstance(leaf, HostRows) or has_rows(leaf, n):
        if grads[k] is None:
            grads[k] = place.home.empty(leaf.shape, leaf.dtype)
        grads[k][span[0] : span[1]] = 0 if grad is None else grad
        place.home.wrote(grads[k], *span)
    else:
        grads[k] = add_shared(grads[k], grad)


def add_shared(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add a gradient of what all rows share, in at least single precision."""
    if grad is None:
        return total
    if total is None:  # a copy: of a range of one row it might be the gradient of that row itself
        return grad.to(accumulator(grad.dtype), copy=True)
    return total.add_(grad)


def returned(grad: Tensor | None, dtype: torch.dtype, device: torch.device, place: Place | None) -> Any:
    """Return a gradient as autograd takes it: of rows at home as such, of others where they are and in their type."""
    return grad if grad is None else grad.to(device, dtype) if place is None else HostRows(place, grad)


def bring_home(rows: Tensor, place: Place) -> Tensor:
    """Return ordinary rows of the nodes of a place at home; those that are there, and no rows, as they are."""
    is_there = rows is None or isinstance(rows, HostRows) or not rows.is_floating_point()
    return rows if is_there else BringHome.apply(place, rows)


class BringHome(torch.autograd.Function):
    """Ordinary rows, such as those of a table, as rows at home."""

    @staticmethod
    def forward(ctx: Any, place: Place, rows: Tensor) -> HostRows:
        """Copy them if homes lie elsewhere."""
        ctx.set_materialize_grads(False)
        ctx.device, ctx.apart, host = rows.device, place.home.apart, rows.detach()
        if ctx.apart or host.device.type != "cpu":
            host = place.home.empty(rows.shape, rows.dtype).copy_(host)
        return HostRows(place, host)

    @staticmethod
    def backward(ctx: Any, grad: HostRows | None) -> Any:
        """Return an ordinary gradient."""
        once_differentiable()
        return None, None if grad is None else host(grad).to(ctx.device, copy=ctx.apart)


class Join(torch.autograd.Function):
    """Rows of several types, one type after the other."""

    @staticmethod
    def forward(ctx: Any, place: Place, *rows: HostRows) -> HostRows:
        """Copy them, range by range."""
        ctx.set_materialize_grads(False)
        ctx.place = place
        out = place.home.empty((place.num_rows, *rows[0].shape[1:]), rows[0].dtype)
        for at, t in zip(place.starts, rows, strict=True):
            for a, b in t.place.ranges:
                assert t.host is not None
                out[at + a : at + b] = t.host[a:b]
                place.home.wrote(out, at + a, at + b)
        return HostRows(place, out)

    @staticmethod
    def backward(ctx: Any, grad: HostRows | None) -> Any:
        """Those of each type are views of the gradient."""
        once_differentiable()
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        parts = zip(ctx.place.parts, host(grad).split(ctx.place.sizes), strict=True)
        return None, *(HostRows(at, rows) for at, rows in parts)


class Part(torch.autograd.Function):
    """The rows of each of several types; views of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: HostRows) -> tuple[HostRows, ...]:
        """Split them."""
        ctx.set_materialize_grads(False)
        assert rows.host is not None
        ctx.place, ctx.shape, ctx.dtype = rows.place, rows.shape, rows.dtype
        parts = zip(rows.place.parts, rows.host.split(rows.place.sizes), strict=True)
        return tuple(HostRows(at, t) for at, t in parts)

    @staticmethod
    def backward(ctx: Any, *grads: HostRows | None) -> HostRows:
        """Write one after the other."""
        once_differentiable()
        out = ctx.place.home.empty(ctx.shape, ctx.dtype)
        for at, part, grad in zip(ctx.place.starts, ctx.place.parts, grads, strict=True):
            given = None if grad is None else reader(grad, part)
            for a, b in part.ranges:
                out[at + a : at + b] = 0 if given is None else given((a, b))
                ctx.place.home.wrote(out, at + a, at + b)
        return HostRows(ctx.place, out)


class Take(torch.autograd.Function):
    """Some of the rows, as an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, rows: HostRows, index: Any) -> Tensor:
        """Copy them to the device."""
        assert rows.host is not None
        ctx.place, ctx.shape, ctx.dtype, ctx.index = rows.place, rows.shape, rows.dtype, index
        if isinstance(index, Tensor):
            ctx.index = None
            ctx.save_for_backward(index := index.to(rows.host.device))  # which notices if it is changed meanwhile
        return rows.host[index].to(rows.place.device, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient of all rows, zeros for those that were not taken."""
        once_differentiable()
        out = ctx.place.home.empty(ctx.shape, ctx.dtype).zero_()
        grad, index = grad.to(out.device), ctx.index
        if index is None:
            (index,) = ctx.saved_tensors
        if isinstance(index, Tensor) and index.dtype != torch.bool:
            out.index_put_((index,), grad, accumulate=True)
        else:
            out[index] = grad
        return HostRows(ctx.place, out), None


class Total(torch.autograd.Function):
    """The sum of all rows, or of all numbers, as an ordinary tensor of a type, made in at least single precision; with
    a divisor, the mean.
    """

    @staticmethod
    def forward(ctx: Any, rows: HostRows, numbers: bool, divisor: int | None, dtype: torch.dtype | None) -> Tensor:
        """Add up ranges."""
        ctx.place, ctx.shape, ctx.divisor, ctx.dtype = rows.place, rows.shape, divisor, rows.dtype
        assert rows.host is not None
        dtype = dtype or (rows.dtype if rows.is_floating_point() else None)
        kind = accumulator(dtype) if dtype is not None and dtype.is_floating_point else dtype
        given = reader(rows, rows.place)
        sums = [given(span).sum(0, dtype=kind) for span in rows.place.ranges]
        total = torch.stack(sums).sum(None if numbers else 0, dtype=kind)
        total = total if divisor is None else total / divisor
        return total if dtype is None else total.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """All rows have the same gradient, which takes the memory of one."""
        once_differentiable()
        grad = (grad if ctx.divisor is None else grad / ctx.divisor).to(ctx.dtype)
        return HostRows(ctx.place, grad.cpu().expand(ctx.shape)), None, None, None


class Moments(torch.autograd.Function):
    """The number of all workers' rows, and means and variances of their columns, as ordinary tensors in double
    precision.
    """

    @staticmethod
    def forward(ctx: Any, rows: HostRows) -> tuple[int, Tensor, Tensor]:
        """One pass over the local rows."""
        given, spans, device = reader(rows, rows.place), rows.place.ranges, rows.place.device
        counts = torch.tensor([[b - a] for a, b in spans], dtype=torch.float64, device=device)
        means, m2s = torch.zeros(2, len(spans), rows.size(1), dtype=torch.float64, device=device)
        for own_mean, own_m2, span in zip(means, m2s, spans, strict=True):
            moments_(own_mean, own_m2, given(span))
        count, mean, m2 = merge_moments(counts, means, m2s)
        exchange = rows.place.exchange
        if not exchange.alone:
            count, mean, m2 = global_merge(count.squeeze(0), mean, m2, exchange.group)
        ctx.save_for_backward(rows, mean)
        ctx.count = int(count)
        return ctx.count, mean, m2 / max(ctx.count, 1)

    @staticmethod
    def backward(ctx: Any, _: None, d_mean: Tensor, d_var: Tensor) -> Any:
        """Each row has the share of one of all in both; it is made where it is read."""
        once_differentiable()
        rows, mean = ctx.saved_tensors
        grads, exchange = torch.stack([2 * d_var, d_mean]), rows.place.exchange
        scale, shift = (grads if exchange.alone else all_reduce(grads, exchange.group)) / max(ctx.count, 1)
        return pending(lambda x: affine(x, mean, scale, shift), rows)
