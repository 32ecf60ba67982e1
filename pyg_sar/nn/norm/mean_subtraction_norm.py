r"""Subtraction of the mean."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph


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

    def normalise(self, x: Tensor, per_graph: PerGraph) -> Tensor:
        """Normalise by the rows of all workers."""
        return x - per_graph.of_rows(per_graph.mean(x))
