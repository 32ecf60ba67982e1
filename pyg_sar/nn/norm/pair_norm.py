r"""Normalisation that keeps the distances between all pairs of nodes."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph


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

    def normalise(self, x: Tensor, per_graph: PerGraph) -> Tensor:
        """Normalise by the rows of all workers."""
        x = x - per_graph.of_rows(per_graph.mean(x))
        if self.scale_individually:
            return self.scale * x / (self.eps + x.norm(2, -1, keepdim=True))
        square = per_graph.mean(x.pow(2).sum(-1, keepdim=True))
        return self.scale * x / per_graph.of_rows((self.eps + square).sqrt())
