r"""Normalisation that keeps the distances between all pairs of nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph
from pyg_sar.nn.together import knows_all_rows


class PairNorm(NormalisesPerGraph, torch_geometric.nn.PairNorm):
    r"""Pair normalisation from the `"PairNorm: Tackling Oversmoothing in GNNs" <https://arxiv.org/abs/1909.12223>`_
    paper over the rows of all workers.

    .. math::
        \mathbf{x}_i^c &= \mathbf{x}_i - \frac{1}{n} \sum_{j=1}^n \mathbf{x}_j

        \mathbf{x}_i^{\prime} &= s \cdot \frac{\mathbf{x}_i^c}
        {\sqrt{\frac{1}{n} \sum_{j=1}^n {\| \mathbf{x}_j^c \|}^2_2}}

    Arguments are those of :class:`torch_geometric.nn.PairNorm`. Graphs of a batch must be numbered alike on all
    workers.
    """

    @knows_all_rows
    def over_all(self, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor:
        """Normalise by the rows of all workers."""
        x = super().over_all(x, batch, batch_size)
        return self.scale * x / (self.eps + x.norm(2, -1, keepdim=True)) if self.scale_individually else x

    def coefficients(self, count: Any, mean: Tensor, m2: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and shift."""
        if self.scale_individually:
            return torch.ones_like(mean), torch.zeros_like(mean)
        square = (m2 / count).sum(-1, keepdim=True)
        return (self.scale / (self.eps + square).sqrt()).expand_as(mean), torch.zeros_like(mean)
