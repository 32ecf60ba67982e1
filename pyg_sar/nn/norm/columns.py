r"""Normalisations that scale and shift columns by what their moments say, over the rows of all workers.

Batch, graph, instance, pair and layer normalisation of a whole graph all are

.. math::
    \mathbf{x}^{\prime}_i = (\mathbf{x}_i - \mu) \odot \mathbf{s} + \mathbf{b}, \qquad
    \mathbf{s}, \mathbf{b} = \phi(|\mathcal{V}|, \mu, \mathbf{m}_2, \ldots)

with the means :math:`\mu` and the sums of squared deviations :math:`\mathbf{m}_2` of all rows. They differ in
:math:`\phi`, a small differentiable function of vectors. So one pass over the rows suffices for the moments and one for
the result, and in backward one for :math:`\sum_i \mathbf{g}_i` and :math:`\sum_i \mathbf{g}_i \odot (\mathbf{x}_i -
\mu)`, and one for the gradient

.. math::
    \frac{\partial L}{\partial \mathbf{x}_i} = \mathbf{g}_i \odot \mathbf{s} + (\mathbf{x}_i - \mu) \odot 2
    \frac{\partial L}{\partial \mathbf{m}_2} + \frac{1}{|\mathcal{V}|} \frac{\partial L}{\partial \mu}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_sar.affine import affine, column_sums
from pyg_sar.autograd import once_differentiable
from pyg_sar.distributed.collectives import all_reduce, global_merge
from pyg_sar.nn.shifted import unshifted
from pyg_sar.ops import moments_

# Scale and shift, given how many rows there are, mean, squared deviations, and parameters, all in double precision.
Coefficients = Callable[..., tuple[Tensor, Tensor]]


class NormaliseColumns(torch.autograd.Function):
    """Scale and shift the columns of rows ``[n, channels]`` by what the moments of all workers' rows say.

    Both passes make one tensor as long as the rows, and nothing else.

    Args:
        x: The rows of this worker.
        moments: What :func:`global_moments` returns of them.
        group: The workers.
        coefficients: Returns scale and shift; called as ``coefficients(count, mean, m2, *parameters)``.
        parameters: What it reads besides, whose gradients are this worker's share.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, moments: tuple[int, Tensor, Tensor], group: Any, coefficients: Coefficients,
        *parameters: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Normalise."""
        count, mean, m2 = moments
        scale, shift = coefficients(count, mean, m2, *(None if p is None else p.double() for p in parameters))
        rows, bias = unshifted(x)
        own_mean = mean if bias is None else mean - bias
        ctx.save_for_backward(rows, own_mean, mean, m2, *parameters)
        ctx.count, ctx.group, ctx.coefficients = count, group, coefficients
        return affine(x, mean, scale, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Parameters get this worker's share, rows the exact gradient."""
        once_differentiable()
        x, own_mean, mean, m2, *parameters = ctx.saved_tensors  # rows, perhaps without a bias, and the mean of these
        sums, products = column_sums(x, grad, own_mean)
        with torch.enable_grad():
            moments = [t.detach().requires_grad_() for t in (mean, m2)]
            leaves = [None if p is None else p.detach().double().requires_grad_() for p in parameters]
            out = list(ctx.coefficients(ctx.count, *moments, *leaves))
        found = differentiate(out, [products, sums], leaves, ctx.needs_input_grad[4:])
        given = [None if g is None else g.to(p.dtype) for g, p in zip(found, parameters, strict=True)]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, *given
        sums, products = all_reduce(torch.stack([sums, products]), ctx.group)
        scale = out[0].detach()
        of_moments = differentiate(out, [products, sums], moments, (True, True))
        d_mean, d_m2 = (torch.zeros_like(mean) if g is None else g for g in of_moments)
        shift = (d_mean - scale * sums) / max(ctx.count, 1)
        return affine(x, own_mean, 2 * d_m2, shift, grad, scale), None, None, None, *given


def standardise(
    eps: float, count: Any, mean: Tensor, m2: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scale and shift that give columns a variance of 1, but for ``eps``, and then ``weight`` and ``bias``."""
    scale, shift = (m2 / count + eps).rsqrt(), torch.zeros_like(m2)
    return scale if weight is None else scale * weight, shift if bias is None else shift + bias


def differentiate(
    out: list[Tensor], grads: list[Tensor], leaves: list[Any], wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """Return the gradients of the leaves that are wanted, given those of what was made of them."""
    leaf = [t for t, want in zip(leaves, wanted, strict=True) if want and t is not None]
    made = [(o, g) for o, g in zip(out, grads, strict=True) if o.requires_grad]
    if not leaf or not made:
        return [None] * len(leaves)
    outs, given = zip(*made, strict=True)
    found = iter(torch.autograd.grad(outs, leaf, given, retain_graph=True, allow_unused=True))
    return [next(found) if want and t is not None else None for t, want in zip(leaves, wanted, strict=True)]


def global_moments(x: Tensor, group: Any) -> tuple[int, Tensor, Tensor]:
    """Return the number of rows of all workers, and means and sums of squared deviations of their columns, in double
    precision.
    """
    mean, m2 = torch.zeros(2, x.size(1), dtype=torch.float64, device=x.device)
    moments_(mean, m2, x.detach())
    total, mean, m2 = global_merge(torch.tensor(x.size(0), device=x.device), mean, m2, group)
    return int(total), mean, m2
