r"""Normalisation of each graph of a batch, or of each node."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph


class LayerNorm(NormalisesPerGraph, torch_geometric.nn.LayerNorm):
    r"""Layer normalisation from the `"Layer Normalization" <https://arxiv.org/abs/1607.06450>`_ paper; with
    ``mode="graph"`` over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.LayerNorm`. Graphs of
    a batch must be numbered alike on all workers.
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        if self.mode != "graph":
            return torch_geometric.nn.LayerNorm.forward(self, x, batch, batch_size)
        return super().forward(x, batch, batch_size)

    def coefficients(
        self, count: Any, mean: Tensor, m2: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return scale and shift: all columns have one mean and one variance."""
        rest = mean - mean.mean(-1, keepdim=True)
        var = (m2 / count + rest.square()).mean(-1, keepdim=True)
        # As in PyG, which takes its constant inside the root for batches alone.
        std = root(var) + self.eps if mean.dim() == 1 else (var + self.eps).sqrt()
        scale = torch.ones_like(mean) / std if weight is None else weight / std
        return scale, rest * scale if bias is None else rest * scale + bias


def root(var: Tensor) -> Tensor:
    """Return the root, whose gradient is 0 where all rows are equal, as that of torch's standard deviation."""
    none = var == 0
    return var.masked_fill(none, 1).sqrt().masked_fill(none, 0)
