r"""The block-level operations under every layer, in plain PyTorch.

An operation takes index tensors and rows and knows nothing of workers. :func:`spmm` and :func:`sddmm` are
:func:`~torch.nn.functional.embedding_bag` and its gradient: the one sum over gathered rows in PyTorch that gathers no
row into memory, on every device and for every floating-point type.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which rows of ``dtype`` are summed: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def spmm(ptr: Tensor, index: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    r"""Sum rows over the edges of each destination, :math:`\mathbf{y}_i = \sum_{e \in i} w_e \mathbf{x}_{index_e}`.

    Args:
        ptr: Row pointer ``[num_rows + 1]``.
        index: Row of ``x`` for each edge, ``[num_edges]``.
        x: Rows ``[*, ...]``.
        weight: Weight of each edge, ``[num_edges]``, or ``[num_edges, H]`` for rows ``[*, H, ...]``.
    """
    shape = (ptr.numel() - 1, *x.shape[1:])
    if weight is not None and weight.dim() == 2:
        heads = [spmm(ptr, index, x[:, h], weight[:, h]) for h in range(weight.size(1))]
        return torch.stack(heads, 1) if heads else x.new_zeros(shape)
    if index.numel() == 0 or x.numel() == 0:
        return x.new_zeros(shape)
    if weight is not None:
        weight = weight.to(x.dtype)
    out = F.embedding_bag(
        index, x.flatten(1) if x.dim() > 1 else x.unsqueeze(1), ptr, mode="sum", include_last_offset=True,
        per_sample_weights=weight,
    )  # fmt: skip
    return out.view(shape)


def sddmm(ptr: Tensor, row: Tensor, col: Tensor, y: Tensor, x: Tensor, heads: bool) -> Tensor:
    r"""Return the dot product of two rows for each edge, :math:`\langle \mathbf{y}_{row_e}, \mathbf{x}_{col_e}\rangle`.

    Args:
        ptr: Row pointer of the edges over the rows of ``y``.
        row: Row of ``y`` for each edge, sorted.
        col: Row of ``x`` for each edge.
        y: Rows ``[*, ...]``.
        x: Rows ``[*, ...]``.
        heads: Whether dimension 1 counts heads, each of which has a product of its own.
    """
    if heads:
        each = [sddmm(ptr, row, col, y[:, h], x[:, h], heads=False) for h in range(y.size(1))]
        return torch.stack(each, 1) if each else y.new_empty(row.numel(), 0)
    if row.numel() == 0 or x.numel() == 0:
        return y.new_zeros(row.numel())
    y, x = (t.flatten(1) if t.dim() > 1 else t.unsqueeze(1) for t in (y, x))
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(y, x, col, ptr, row.to(col.dtype), 0)


def segment_sum(row: Tensor, num_rows: int, values: Tensor) -> Tensor:
    """Sum the values of the edges of each destination."""
    index = row.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return values.new_zeros(num_rows, *values.shape[1:]).scatter_add_(0, index, values)


def segment_max(row: Tensor, num_rows: int, values: Tensor) -> Tensor:
    """Return the largest value among the edges of each destination; minus infinity if there is none."""
    index = row.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    lowest = values.new_full((num_rows, *values.shape[1:]), -torch.inf)
    return lowest.scatter_reduce_(0, index, values, "amax")
