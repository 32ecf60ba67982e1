r"""Normalisation of each graph's features."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph


class GraphNorm(NormalisesPerGraph, torch_geometric.nn.GraphNorm):
    r"""Graph normalisation from the `"GraphNorm: A Principled Approach to Accelerating Graph Neural Network Training"
    <https://arxiv.org/abs/2009.03294>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]}
        {\sqrt{\textrm{Var}[\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]] + \epsilon}} \odot \gamma + \beta

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GraphNorm`. Graphs of
    a batch must be numbered alike on all workers.
    """

    def normalise(self, x: Tensor, per_graph: PerGraph) -> Tensor:
        """Normalise by the rows of all workers."""
        out = x - per_graph.of_rows(per_graph.mean(x)) * self.mean_scale
        std = (per_graph.mean(out.pow(2)) + self.eps).sqrt()
        return self.weight * out / per_graph.of_rows(std) + self.bias
