r"""The watch over the first training step: what the package tells it. This file imports nothing of the package.

Layers see the rows of all workers. What a script computes beside them (a mean over nodes, a pooling function, a
normalisation that was not converted, a term of the loss without nodes) sees those of one worker, and would silently
give another number than the whole graph does. The watch is a mode of torch that follows the rows of loaded data from
function to function, and raises where they are mixed, or where gradients are clipped before they are summed; it warns
where rows are chosen by position, and knows the losses that :func:`pyg_sar.sum_gradients` compares. It begins with
:func:`pyg_sar.process_group` or :func:`pyg_sar.init` and ends when ``sum_gradients`` was given each parameter twice:
from then on it costs nothing, until it is given others, those of another model.

* ``__init__``: functions of the package report by :func:`gives` and :func:`rows` what they return.
* ``kinds``: what the numbers of a tensor stand for, and calls of functions of torch.
* ``counts``: the number of this worker's nodes.
* ``origins``: from which partition rows are.
* ``rules``: what functions of torch make of these kinds, and which calls are wrong.
* ``mode``: the mode itself, which raises.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

ROWS, SAME, LOSS = "rows", "same", "loss"  # see `kinds`

# Whose `watch` is the `mode.Watch` of this thread, if there is one; else its `resting` may be one that has seen enough.
# `local` counts the `allow_local` blocks that it is in.
_here = threading.local()
Function = TypeVar("Function", bound=Callable[..., Any])


def current() -> Any:
    """Return what watches this thread, or None."""
    return getattr(_here, "watch", None)


def install(watch: Any, before: Any = None) -> None:
    """Have a mode watch this thread, or none, and know the one ``before``, which has seen enough."""
    _here.watch, _here.resting = watch, before


def resting() -> Any:
    """Return what has watched this thread and may do so again, or None."""
    return getattr(_here, "resting", None)


def is_allowed() -> bool:
    """Whether this thread says that a worker's rows are meant (:func:`allow_local`)."""
    return getattr(_here, "local", 0) > 0


def is_alone() -> bool:
    """Whether what watches this thread is for a single worker."""
    return current() is not None and current().alone


def gives(what: str) -> Callable[[Function], Function]:
    """Report what a function of this package returns: ``ROWS`` if it is given rows or a sharded graph, the ``SAME`` on
    every worker, or a ``LOSS``. What it does within is not watched.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def known(*args: Any, **kwargs: Any) -> Any:
            watch = None if torch.compiler.is_compiling() else current()
            if watch is None or watch.leave_if_over():
                return function(*args, **kwargs)
            return watch.run(what, function, args, kwargs)

        return known  # type: ignore[return-value]

    return decorate


def rows(tensor: Tensor, dim: int = 0, of: Tensor | None = None) -> Tensor:
    """Report that a dimension of a tensor counts nodes or edges of this worker, perhaps those of a graph whose nodes
    have the ids ``of``, and return the tensor.
    """
    watch = None if torch.compiler.is_compiling() else current()
    if watch is not None:
        watch.mark_rows(tensor, dim, of)
    return tensor


def together(*values: Any) -> None:
    """Report what a layer or function is given; rows and graphs of two partitions are refused."""
    if (watch := current()) is not None:
        watch.together(values)


def ordered() -> None:
    """Report that rows stand in an order that scripts count on: those of message-flow graphs, destinations first."""
    if (watch := current()) is not None:
        watch.ordered = True


def is_known(tensor: Tensor, what: str) -> bool:
    """Whether a tensor is known, within the first steps, to be the ``SAME`` on all workers, or to have ``ROWS``, one
    for each node or edge of this worker.
    """
    kind = None if torch.compiler.is_compiling() or (watch := current()) is None else watch.kind(tensor)
    return kind is not None and kind.what == what


def ids(tensor: Tensor) -> Tensor:
    """Report that a tensor holds numbers of nodes in the whole graph, and return it."""
    if (watch := current()) is not None:
        watch.mark_ids(tensor)
    return tensor


def pairs_of(pairs: Tensor, ids: Sequence[Tensor]) -> None:
    """Report that pairs of nodes are looked for among some ids; those of other types of nodes are refused."""
    if (watch := current()) is not None:
        watch.origins.check_pairs(pairs, ids)


def refuse_pairs(pairs: Any, *values: Any) -> None:
    """Report what a layer or function takes for edges between rows; pairs of the whole graph are refused."""
    if isinstance(pairs, Tensor) and (watch := current()) is not None:
        watch.refuse_pairs(pairs, *values)


def same_on_all(tensors: Iterable[Tensor]) -> None:
    """Report that tensors have the same numbers on all workers."""
    if (watch := current()) is not None:
        watch.mark_same(tensors)


def loaded(data: Any, rows: Iterable[tuple[Tensor, int, Any]]) -> None:
    """Report what loaded data has: tensors with a row for each node or edge of this worker, with the dimension that
    counts these, and the types of these nodes, or of the edges' ends.
    """
    if (watch := current()) is not None:
        watch.load(data, rows)


def count_step(parameters: Sequence[Tensor], tables: Sequence[Tensor]) -> tuple[int, float]:
    """Report a training step, of whose parameters the gradients are about to be summed, but for those of a worker's own
    ``tables``; return how many of its losses are known, and their sum.
    """
    watch = current() or resting()
    return (0, 0.0) if watch is None else watch.count_step(parameters, tables)


@contextmanager
def allow_local() -> Iterator[None]:
    r"""Take a worker's rows for what they are, within a ``with`` block or a function that this decorates.

    In the first training step what mixes the rows of nodes or edges, of which a worker holds a share, raises. This is
    for those who mean the share:

    .. code-block:: python

        with pyg_sar.allow_local():
            print(f"rank {rank} has labels up to {data.y.max()}")

    Yields:
        Nothing.
    """
    _here.local = getattr(_here, "local", 0) + 1
    try:
        yield
    finally:
        _here.local -= 1
