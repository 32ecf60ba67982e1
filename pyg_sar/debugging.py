r"""Checks that cost too much for every run: of numbers by which operators read memory, and of gradients."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode

from pyg_sar.distributed import notices
from pyg_sar.distributed.group import Group, gather_objects, rank_of

# Of every operator, which arguments number rows, and of what; a row pointer ends at the length of the other argument.
NUMBERS = {
    "spmm_": {"col": "x", "rows": "out"},
    "sddmm_": {"col": "x", "rows": "y"},
    "extremum_": {"col": "x", "rows": "best"},
    "extremum_grad_": {"row": "best"},
    "attention_": {"col": "key", "rows": "out"},
    "attention_grad_": {"col": "key", "dst": "grad", "perm": "col", "rows": "grad"},
    "additive_grad_": {"col": "value", "dst": "grad", "perm": "col", "rows": "grad"},
}
POINTERS = {"ptr": ("col", "row"), "src_ptr": ("dst",)}


@contextmanager
def debug() -> Iterator[None]:
    r"""Look for what is wrong while a block runs, at the price of time; :envvar:`PYG_SAR_DEBUG` ``=1`` does it for all
    of :func:`pyg_sar.process_group`.

    * Numbers by which an operator reads memory are checked before it runs.
    * A gradient with a NaN or an infinity raises in :func:`pyg_sar.sum_gradients`, on all workers, with the rank and
      the name of the parameter.
    * When the block ends by an exception, the last calls in which workers talked are printed.

    .. code-block:: python

        with pyg_sar.debug():
            loss.backward()
            pyg_sar.sum_gradients(model)

    Yields:
        Nothing.

    Raises:
        IndexError: If an operator would read beyond its memory.
        FloatingPointError: If a gradient is a NaN or an infinity.
    """
    notices.LOOKS += 1
    try:
        with Numbers():
            yield
    except BaseException:
        if notices.CURRENT is not None:
            calls = "".join(
                f"\n  {time.strftime('%H:%M:%S', time.localtime(at))} call {call}, step {step}: {doing}"
                for at, call, step, doing in notices.CURRENT.last
            )
            print(f"[rank {rank_of()}] The last calls:{calls}", file=sys.stderr, flush=True)
        raise
    finally:
        notices.LOOKS -= 1


@contextmanager
def debug_if_asked() -> Iterator[None]:
    """Look while a block runs, if the environment says so."""
    asked = os.environ.get("PYG_SAR_DEBUG", "0")
    if asked not in ("", "0", "1"):
        warnings.warn(f"Expected PYG_SAR_DEBUG to be 0 or 1 (got '{asked}', taken for 0)", stacklevel=2)
    if asked != "1":
        yield
        return
    with debug():
        yield


class Numbers(TorchFunctionMode):
    """Checks the arguments of this package's operators; below a mode of dispatch there is no autograd, which those
    in plain PyTorch use.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look, then run."""
        if isinstance(func, OpOverloadPacket) and func._qualified_op_name.startswith("pyg_sar::"):
            names = [argument.name for argument in func.default._schema.arguments]
            check(func.__name__, dict(zip(names, args, strict=False)) | (kwargs or {}))
        return func(*args, **(kwargs or {}))


def check(name: str, given: dict[str, Any]) -> None:
    """Raise if an operator would read beyond its memory."""
    for key, counted in NUMBERS.get(name, {}).items():
        ids, rows = given.get(key), given[counted]
        if not isinstance(ids, Tensor) or ids.numel() == 0:
            continue
        least, most = (int(t) for t in ids.aminmax())
        if least < 0 or most >= rows.size(0):
            raise IndexError(
                f"[rank {rank_of()}] '{name}' got numbers from {least} to {most} in '{key}', expected 0 to "
                f"{rows.size(0) - 1}, the rows of '{counted}'. Did something change the graph's index tensors?"
            )
    for key, others in POINTERS.items() if name in NUMBERS else ():
        ptr = given.get(key)
        if ptr is None:
            continue
        edges = next(given[other] for other in others if other in given)
        if int(ptr[0]) != 0 or int(ptr[-1]) != edges.numel() or bool((ptr[1:] < ptr[:-1]).any()):
            raise IndexError(
                f"[rank {rank_of()}] '{name}' got a row pointer '{key}' that does not ascend from 0 to "
                f"{edges.numel()}, the number of edges. Did something change the graph's index tensors?"
            )


def look(named: dict[str, Tensor], group: Group) -> None:
    """Raise on all workers if a gradient is no number on any of them."""
    grads = {name: p.grad for name, p in named.items() if p.grad is not None}
    numbers = {name: g.coalesce().values() if g.layout == torch.sparse_coo else g for name, g in grads.items()}
    odd = [name for name, t in numbers.items() if not bool(torch.isfinite(t).all())]
    for rank, names in enumerate(gather_objects(odd, group)):
        if names:
            raise FloatingPointError(
                f"[rank {rank_of()}] The gradient of '{names[0]}' on rank {rank} has a NaN or an infinity"
                + (f", and those of {len(names) - 1} other parameters" if len(names) > 1 else "")
                + ". Look at the loss and the learning rate; 'torch.autograd.detect_anomaly()' finds the operation."
            )
