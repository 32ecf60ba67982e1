r"""Subtraction of the mean."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph


class MeanSubtractionNorm(NormalisesPerGraph, torch_geometric.nn.MeanSubtractionNorm):
    r"""Mean subtraction from the `"Revisiting 'Over-smoothing' in Deep GCNs" <https://arxiv.org/abs/2003.13663>`_ paper
    over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{x}_i - \frac{1}{|\mathcal{V}|} \sum_{j \in \mathcal{V}} \mathbf{x}_j

    Graphs of a batch must be numbered alike on all workers.
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, dim_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        return super().forward(x, batch, dim_size)

    def coefficients(self, count: Any, mean: Tensor, m2: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift."""
        return torch.ones_like(mean), torch.zeros_like(mean)
