"""The kernels for GPUs, and plain PyTorch beside them, as operators on CPU tensors: run on a GPU if there is one, else
in Triton's interpreter, which ``conftest.py`` asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.kernel_check import SCHEMAS
from torch import Tensor

from pyg_sar.ops import reference

kernels = pytest.importorskip("pyg_sar.ops.triton", reason="needs Triton", exc_type=ImportError)
schedule = kernels.schedule
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function within a kernel; Triton's interpreter would look through its own modules each time."""
    if id(function.fn.__globals__) not in PATCHED:
        PATCHED.add(id(function.fn.__globals__))
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


PATCHED: set[int] = set()
if DEVICE == "cpu":
    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter.InterpretedFunction.__call__ = call
    # The interpreter is as fast for many units at a time as for one: fewer steps with more units. Small pieces make
    # hubs of most rows, and hubs of the pieces of hubs.
    schedule.CUT, schedule.MEANS, schedule.CELLS, schedule.ROWS = 8, 0, 1 << 14, 1 << 10


def needs_rounding(dtype: torch.dtype) -> None:
    """Skip a test of what the interpreter does not do: it cuts off digits, and misreads subnormal numbers."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not round to bfloat16")


def around(value: Tensor) -> Tensor:
    """Return all memory of which a tensor is a view."""
    return value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)


def moved(value: Any, there: dict[int, Tensor]) -> Any:
    """Return a tensor on the device, its rows as far apart as before, and what lies between them, too: all memory of
    which tensors are views is ``there`` once.
    """
    if not isinstance(value, Tensor) or value.device.type == DEVICE:
        return value
    if value.untyped_storage().nbytes() == 0:
        return value.to(DEVICE)
    memory = there.setdefault(value.untyped_storage().data_ptr(), around(value).to(DEVICE))
    return memory.as_strided(value.size(), value.stride(), value.storage_offset())


def operator(module: Any, name: str) -> Callable[..., None]:
    written = [k for k, a in enumerate(SCHEMAS[name].arguments) if a.alias_info is not None and a.alias_info.is_write]

    def run(*args: Any) -> None:
        memory: dict[int, Tensor] = {}
        there = [moved(value, memory) for value in args]
        with np.errstate(all="ignore"):  # the interpreter's numbers are NumPy's, which warns of NaN
            getattr(module, name)(*there)
        for k in written:
            if there[k] is not args[k]:
                around(args[k]).copy_(around(there[k]))

    return run


OPS, PLAIN = (SimpleNamespace(**{name: operator(m, name) for name in SCHEMAS}) for m in (kernels, reference))
