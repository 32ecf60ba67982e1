r"""Columns that are scaled and shifted, by vectors in double precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.autograd import once_differentiable
from pyg_sar.ops import column_affine_, column_products_
from pyg_sar.ops.reference import accumulator


def affine(
    x: Tensor, center: Tensor, scale: Tensor, shift: Tensor, grad: Tensor | None = None, factor: Tensor | None = None
) -> Tensor:
    """Return ``(x - center) * scale + shift``, and ``+ grad * factor``, in the type of the rows."""
    dtype, out = accumulator(x.dtype), x.new_empty(x.shape)
    shift = shift + (center.to(dtype) - center) * scale  # the center has digits that the rows' type has not
    vectors = [t.to(dtype).contiguous() for t in (center, scale, shift)]
    column_affine_(out, x, *vectors, grad, None if factor is None else factor.to(dtype).contiguous())
    return out


def column_sums(x: Tensor, grad: Tensor, center: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums over rows of ``grad`` and of ``grad * (x - center)``, in double precision."""
    sums, products = torch.zeros(2, *center.shape, dtype=torch.float64, device=center.device)
    near = center.to(accumulator(x.dtype))
    column_products_(sums, products, x, grad, near)
    return sums, products + (near - center) * sums  # the center has digits that the rows' type has not


def merge_moments(counts: Tensor, means: Tensor, m2s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge counts, means and sums of squared deviations of several sets of rows, all in double precision (Chan, Golub
    & LeVeque 1979): a large mean costs no digits.
    """
    total = counts.sum(0)
    center = (counts / total.clamp(min=1) * means).sum(0)
    return total, center, m2s.sum(0) + (counts * (means - center).square()).sum(0)


class Affine(torch.autograd.Function):
    """``(x - center) * scale + shift`` of rows ``[n, channels]`` and vectors ``[1, channels]``, under autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Scale and shift."""
        ctx.save_for_backward(x, center, scale)
        return affine(x, center[0], scale[0], shift[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Scale the gradient of rows, and sum up those of vectors."""
        once_differentiable()
        x, center, scale = ctx.saved_tensors
        sums, products = column_sums(x, grad, center[0])
        d_x = grad * scale.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return d_x, -sums.unsqueeze(0) * scale, products.unsqueeze(0), sums.unsqueeze(0)


def scaled(x: Tensor, center: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``(x - center) * scale + shift``, see :class:`Affine`."""
    return Affine.apply(x, center, scale, shift)
