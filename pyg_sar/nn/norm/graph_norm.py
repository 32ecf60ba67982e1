r"""Normalisation of each graph's features."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph


class GraphNorm(NormalisesPerGraph, torch_geometric.nn.GraphNorm):
    r"""Graph normalisation from the `"GraphNorm: A Principled Approach to Accelerating Graph Neural Network Training"
    <https://arxiv.org/abs/2009.03294>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]}
        {\sqrt{\textrm{Var}[\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]] + \epsilon}} \odot \gamma + \beta

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GraphNorm`. Graphs of
    a batch must be numbered alike on all workers.
    """

    def coefficients(
        self, count: Any, mean: Tensor, m2: Tensor, weight: Tensor, bias: Tensor, mean_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return scale and shift: what is left of the mean is squared with the deviations, and shifts the rows."""
        rest = (1 - mean_scale) * mean
        scale = weight / (m2 / count + rest.square() + self.eps).sqrt()
        return scale, rest * scale + bias
