r"""The block-level operators under every layer, as operators of PyTorch's dispatcher: ``torch.ops.pyg_sar``.

An operator takes index tensors and rows ``[*, width]`` and knows nothing of workers. They add to tensors that are
given, or write them, in the accumulator's type as a rule, and return nothing: blocks follow one another without a copy,
and to :func:`torch.compile` and :func:`torch.export` they are opaque mutations. On CPU tensors the compiled kernels of
``csrc/`` run if they are there, on CUDA tensors those of :mod:`pyg_sar.ops.triton` if there is Triton, everywhere else,
and if :envvar:`PYG_SAR_KERNELS` is ``0``, :mod:`pyg_sar.ops.reference`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_sar.ops import reference

# Where rows of several heads lie side by side, the width of another argument counts them: of weights, or of ``peak``.
# All heads share the columns of ``x``, or add to those of ``out``, where it has so many times fewer. If ``ptr`` leads
# over some rows only, these are ``rows``, ascending (doubly compressed rows); tensors of destinations have all of them.
SCHEMAS = (
    # out = 0, for memory that is touched for the first time
    "zero_(Tensor(a!) out) -> ()",
    # nothing to the numbers of out; memory that will be touched for the first time comes in large pages
    "huge_pages_(Tensor(a!) out) -> ()",
    # out[i] += sum over e in i of weight[perm[e]] * x[col[e]]; if `once`, out[i] = the sum, rounded to the type of x
    "spmm_(Tensor(a!) out, Tensor ptr, Tensor col, Tensor x, Tensor? weight, Tensor? perm, bool once, "
    "Tensor? rows=None) -> ()",
    # out[e] = <y[row of e], x[col[e]]>
    "sddmm_(Tensor(a!) out, Tensor ptr, Tensor col, Tensor y, Tensor x, Tensor? rows=None) -> ()",
    # out[i] = <x[i], y[i]>, head by head
    "row_products_(Tensor(a!) out, Tensor x, Tensor y) -> ()",
    # best[i] = max over e in i of (-)x[col[e]], count[i]: how many edges attain it
    "extremum_(Tensor(a!) best, Tensor(b!) count, Tensor ptr, Tensor col, Tensor x, bool largest, "
    "Tensor? rows=None) -> ()",
    # out[j] += sum over e in j of share[row[e]] where best[row[e]] == x[j]
    "extremum_grad_(Tensor(a!) out, Tensor ptr, Tensor row, Tensor x, Tensor best, Tensor share) -> ()",
    # One block of an online softmax, and its gradient, see reduce/softmax.py; `head` is the number of the first head.
    "attention_(Tensor(a!) peak, Tensor(b!) total, Tensor(c!) out, Tensor ptr, Tensor col, Tensor key, Tensor value, "
    "Tensor? query, Tensor? edge, Tensor? att, int kind, float parameter, Tensor? e_id, int seed, float dropout, "
    "int head, Tensor? rows=None) -> ()",
    "attention_grad_(Tensor(a!) d_value, Tensor(b!)? d_key, Tensor(c!)? d_query, Tensor(d!)? d_edge, "
    "Tensor(e!)? d_att, Tensor ptr, Tensor col, Tensor src_ptr, Tensor dst, Tensor perm, Tensor key, Tensor value, "
    "Tensor? query, Tensor? edge, Tensor? att, Tensor peak, Tensor total, Tensor inner, Tensor grad, int kind, "
    "float parameter, Tensor? e_id, int seed, float dropout, int head, Tensor? rows=None) -> ()",
    # The same for additive scores, if the block holds all edges: without the output, and `value` becomes its gradient.
    "additive_grad_(Tensor(a!) value, Tensor(b!) d_key, Tensor(c!)? d_query, Tensor(d!)? d_edge, Tensor ptr, "
    "Tensor col, Tensor src_ptr, Tensor dst, Tensor perm, Tensor key, Tensor? query, Tensor? edge, Tensor peak, "
    "Tensor total, Tensor grad, float parameter, Tensor? e_id, int seed, float dropout, int head, "
    "Tensor? rows=None) -> ()",
    # mean[c] = mean of column c of x, m2[c] = sum of squared deviations from it; both are given as zeros, double
    "moments_(Tensor(a!) mean, Tensor(b!) m2, Tensor x) -> ()",
    # sums[c] += sum of column c of grad, products[c] += that of grad * (x - center); both are double
    "column_products_(Tensor(a!) sums, Tensor(b!) products, Tensor x, Tensor grad, Tensor center) -> ()",
    # out = (x - center) * scale + shift, and + grad * factor if there is one
    "column_affine_(Tensor(a!) out, Tensor x, Tensor center, Tensor scale, Tensor shift, Tensor? grad, "
    "Tensor? factor) -> ()",
    # out = x * f(seed, id[i], column), which is 0 with probability p, else 1 / (1 - p)
    "dropout_rows_(Tensor(a!) out, Tensor x, Tensor id, int seed, float p) -> ()",
)
LIBRARY = torch.library.Library("pyg_sar", "DEF")


def register() -> None:
    """Define the operators with their PyTorch implementation."""
    for schema in SCHEMAS:
        LIBRARY.define(schema)
        name = schema.partition("(")[0]
        LIBRARY.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
        torch.library.register_fake(f"pyg_sar::{name}", lambda *args: None, lib=LIBRARY)
        LIBRARY.impl(name, on_gpu(name), "CUDA")


def on_gpu(name: str) -> Callable[..., None]:
    """Return what an operator does with CUDA tensors."""

    def run(*args: Any) -> None:
        getattr(gpu(), name)(*args)

    return run


@functools.cache
def gpu() -> Any:
    """Return the kernels in Triton, imported when they are first needed; without it, warn once and return others."""
    if os.environ.get("PYG_SAR_KERNELS") == "0":
        return reference
    try:
        from pyg_sar.ops import triton
    except ImportError as error:
        warnings.warn(
            f"pyg_sar runs on CUDA tensors without its kernels, in plain PyTorch, which is exact but slower and takes "
            f"more memory: {error}. Install them with 'pip install triton' (or set PYG_SAR_KERNELS=0 to choose plain "
            f"PyTorch).",
            stacklevel=2,
        )
        return reference
    return triton


def load() -> bool:
    """Load the compiled kernels; without them, warn once and return False."""
    if os.environ.get("PYG_SAR_KERNELS") == "0":
        return False
    library = Path(__file__).parents[1] / "_kernels.abi3.so"
    try:
        torch.ops.load_library(library)
    except OSError as error:
        why = error.__cause__ or error if library.is_file() else "they were not built"  # torch names the file alone
        warnings.warn(
            f"pyg_sar runs without its compiled kernels, in plain PyTorch, which is exact but slower: {why}. Install "
            "it with 'pip install --no-build-isolation .' into an environment with torch >= 2.10 and a C++ compiler "
            "(or set PYG_SAR_KERNELS=0 to choose plain PyTorch).",
            stacklevel=2,
        )
        return False
    return True


register()
KERNELS = load()


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for what will be written on the device of ``like``, of its type by default."""
    out = like.new_empty(shape, dtype=dtype)
    torch.ops.pyg_sar.huge_pages_(out)
    return out


def zeros(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return zeros on the device of ``like``, of its type by default."""
    out = like.new_empty(shape, dtype=dtype)
    torch.ops.pyg_sar.zero_(out)
    return out


spmm_ = torch.ops.pyg_sar.spmm_
sddmm_ = torch.ops.pyg_sar.sddmm_
row_products_ = torch.ops.pyg_sar.row_products_
extremum_ = torch.ops.pyg_sar.extremum_
extremum_grad_ = torch.ops.pyg_sar.extremum_grad_
attention_ = torch.ops.pyg_sar.attention_
attention_grad_ = torch.ops.pyg_sar.attention_grad_
additive_grad_ = torch.ops.pyg_sar.additive_grad_
moments_ = torch.ops.pyg_sar.moments_
column_products_ = torch.ops.pyg_sar.column_products_
column_affine_ = torch.ops.pyg_sar.column_affine_
dropout_rows_ = torch.ops.pyg_sar.dropout_rows_
