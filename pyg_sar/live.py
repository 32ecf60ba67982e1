r"""What lives while a step runs: a count of the bytes of tensors, for dry runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_sar.ops.workspace import workspace


@contextmanager
def few_objects() -> Iterator[None]:
    """Have garbage collections look at new objects alone: else they would take most of the time."""
    theirs = gc.get_freeze_count()  # what the caller froze stays frozen
    if not theirs:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if not theirs:
            gc.unfreeze()


def storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of tensors; what only stands for rows has none."""
    if type(value) in (Tensor, torch.nn.Parameter):
        yield value.untyped_storage()
    elif isinstance(value, (tuple, list)):  # all that operators take and return besides
        for item in value:
            yield from storages(item)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that were made within and still live.

    Args:
        dry: Whether to leave out the operators of this package, which write into tensors that they are given, but for
            what the compiled kernels would hold meanwhile.
    """

    def __init__(self, dry: bool = False) -> None:
        super().__init__()
        self.dry = dry
        gc.collect()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look for memory that is not that of an argument."""
        given = {memory._cdata for memory in storages((*args, *(kwargs or {}).values()))}
        if self.dry and func.namespace == "pyg_sar":
            self.peak, out = max(self.peak, self.now + workspace(func, args)), None
        else:
            out = func(*args, **(kwargs or {}))
        for memory in storages(out):
            if memory._cdata not in given:
                given.add(memory._cdata)
                self.now += memory.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self.free, memory.nbytes())
        return out

    def free(self, count: int) -> None:
        """Forget memory that was given back."""
        self.now -= count


def kept(net: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the tensors that a model and its optimizer, if there is one, hold between steps."""
    states = () if optimizer is None else optimizer.state.values()
    state = [t for s in states for t in s.values() if isinstance(t, Tensor)]
    return [*net.parameters(), *net.buffers(), *state]
