r"""Dropout of rows at home. Its mask is a function of a seed of the graph, a row's global id and a column: the same for
any number of chunks and workers, and when a range runs again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_sar.autograd import once_differentiable
from pyg_sar.offload.rows import HostRows, Op, answers, refuse, requires_grad, snapshot
from pyg_sar.ops import dropout_rows_


@answers("dropout")
def dropout(func: Callable, args: Any, kwargs: Any) -> Any:
    """Record it, with a seed that is drawn now."""
    names = dict(zip(("input", "p", "training", "inplace"), args, strict=False), **kwargs)
    rows, p = names["input"], names.get("p", 0.5)
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not names.get("training", names.get("train", True)) or p == 0:  # 'torch.dropout' has another name for it
        return rows
    if names.get("inplace"):
        refuse(func, args, kwargs, "it changes its argument; leave out 'inplace'")
    op = Op(dropout_rows, (snapshot(rows), p, rows.place.seeds.draw()), {})
    learns = torch.is_grad_enabled() and requires_grad(rows)
    return HostRows(rows.place, op=op, probe=rows.probe.clone(), requires_grad=learns)


def dropout_rows(x: Tensor, p: float, seed: int, n_id: Tensor) -> Tensor:
    """Return rows with some entries dropped, and the others scaled."""
    out: Tensor = DropoutRows.apply(x.reshape(len(x), math.prod(x.shape[1:])), p, seed, n_id)
    return out.view(x.shape)


class DropoutRows(torch.autograd.Function):
    """Nothing is saved but the ids: backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int, n_id: Tensor) -> Tensor:
        """Drop numbers."""
        ctx.save_for_backward(n_id)
        ctx.p, ctx.seed = p, seed
        out = x.new_empty(x.shape)  # rows in a row, which those of x need not be
        dropout_rows_(out, x, n_id, seed, p)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Drop those of the gradient."""
        once_differentiable()
        (n_id,) = ctx.saved_tensors
        out = grad.new_empty(grad.shape)
        dropout_rows_(out, grad, n_id, ctx.seed, ctx.p)
        return out, None, None, None
