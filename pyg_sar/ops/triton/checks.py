r"""Checks of what operators are given: a GPU would read and write anywhere."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from pyg_sar.ops.reference import accumulator

NAMES = {torch.float64: "Double", torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16",
         torch.int32: "Int", torch.int64: "Long"}  # fmt: skip
TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def expect(good: bool, what: str) -> None:
    """Raise as the kernels for CPUs do."""
    if not good:
        raise RuntimeError(what)


def type_of(x: Tensor) -> Any:
    """Return the type in which Triton sums such rows."""
    expect(x.dtype in NAMES and x.is_floating_point(), f"Expected rows of a floating-point type (got {x.dtype})")
    return TYPES[accumulator(x.dtype)]


def width_of(name: str, t: Tensor) -> int:
    """Return the number of columns."""
    expect(t.dim() == 2, f"Expected '{name}' to be a matrix (got {list(t.shape)})")
    return t.size(1)


def channels_of(wide: int, heads: int) -> int:
    """Return the columns of a head, when ``heads`` heads lie side by side in ``wide`` columns."""
    good = wide % heads == 0 if heads > 0 else wide == 0
    expect(good, f"Expected rows of {heads} equal heads (got {wide} columns)")
    return wide // heads if heads else 0


def rows(name: str, t: Any, count: int, width: int, dtype: torch.dtype, like: Tensor) -> Any:
    """Return rows whose columns are contiguous; ``count`` may be -1 for any."""
    if t is None:
        return None
    expect(t.device == like.device, f"Expected '{name}' on {like.device} (got {t.device})")
    expect(t.dtype == dtype, f"Expected '{name}' of type {NAMES[dtype]} (got {NAMES.get(t.dtype, t.dtype)})")
    good = t.dim() == 2 and count in (-1, t.size(0)) and t.size(1) == width
    expect(good, f"Expected '{name}' of shape [{'*' if count < 0 else count}, {width}] (got {list(t.shape)})")
    return t if width <= 1 or t.stride(1) == 1 else t.contiguous()


def out(name: str, t: Any, count: int, width: int, dtype: torch.dtype, like: Tensor) -> Any:
    """Check what is written to."""
    good = t is None or t.dim() != 2 or width <= 1 or t.stride(1) == 1
    expect(good, f"Expected the rows of '{name}' to be contiguous")
    found = rows(name, t, count, width, dtype, like)
    apart = t is None or t.size(0) <= 1 or t.stride(0) >= width
    expect(apart, f"Expected rows of '{name}' that do not overlap")
    return found


def index(name: str, t: Any, count: int, dtype: torch.dtype, like: Tensor) -> Any:
    """Return a contiguous vector; ``count`` may be -1 for any."""
    if t is None:
        return None
    good = t.device == like.device and t.dtype == dtype and t.dim() == 1 and count in (-1, t.numel())
    expect(good, f"Expected '{name}' to be a {like.device.type.upper()} tensor of {count} numbers of type "
           f"{NAMES[dtype]} (got {NAMES.get(t.dtype, t.dtype)} {list(t.shape)} on {t.device})")  # fmt: skip
    return t.contiguous()


def edges(ptr: Tensor, col: Tensor, perm: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Return the index tensors of a block."""
    expect(ptr.dtype in (torch.int32, torch.int64), f"Expected indices of type int32 or int64 (got {ptr.dtype})")
    index("ptr", ptr, -1, ptr.dtype, like)
    expect(ptr.is_contiguous(), "Expected 'ptr' to be contiguous")  # what is known of it is known by its identity
    count = col.numel()
    return ptr, index("col", col, count, ptr.dtype, like), index("perm", perm, count, ptr.dtype, like)


def count_of(rows: Tensor | None, ptr: Tensor, like: Tensor) -> int:
    """Return how many rows tensors have: those that ``ptr`` leads over, or more, of which these are ``rows``."""
    index("rows", rows, ptr.numel() - 1, ptr.dtype, ptr)
    return ptr.numel() - 1 if rows is None else like.size(0)


def stride(t: Tensor | None) -> int:
    """Return how far rows are apart."""
    return 0 if t is None else t.stride(0)
