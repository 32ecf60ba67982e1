r"""Rows plus a bias, of which a normalisation by column keeps the rows alone.

Backward of attention reads its output :math:`\mathbf{o}`. A normalisation that follows keeps what it is given for
backward, :math:`\mathbf{o} + \mathbf{b}`, but reads nothing of it other than deviations from the mean, which a bias
does not change. So it keeps :math:`\mathbf{o}`, too, and the sum dies when the model drops it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.distributed.group import size_of
from pyg_sar.ops import empty
from pyg_sar.watch import ROWS, gives


@gives(ROWS)
def shifted(rows: Tensor, bias: Tensor) -> Tensor:
    """Return ``rows + bias``; ``rows`` are read by backward and are never changed in place."""
    plain = type(rows) is Tensor  # and not what stands for rows at home
    out: Any = Shift.apply(rows, bias) if plain and rows.dtype == bias.dtype else rows + bias
    if plain and out.requires_grad and out.dtype == rows.dtype and size_of() > 1:  # or torch's own normalises
        out._sar_made_of = rows.detach(), bias.detach().clone(), out._version
    return out


class Shift(torch.autograd.Function):
    """The sum, whose memory is asked for as that of other large results."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor) -> Tensor:
        """Add."""
        return torch.add(rows, bias, out=empty(rows, *rows.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Add up for the bias."""
        return grad, grad.sum(0) if ctx.needs_input_grad[1] else None


def unshifted(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the rows and the bias that ``x`` is the sum of; ``x`` alone if that is not known, or no longer true."""
    rows, bias, version = getattr(x, "_sar_made_of", (x, None, None))
    return (rows, bias) if bias is not None and version == x._version else (x, None)
