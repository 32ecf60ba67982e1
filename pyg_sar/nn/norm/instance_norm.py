r"""Normalisation of the features of each graph of a batch by themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.columns import standardise
from pyg_sar.nn.norm.statistics import NormalisesPerGraph


class InstanceNorm(NormalisesPerGraph, torch_geometric.nn.InstanceNorm):
    r"""Instance normalisation from the `"Instance Normalization: The Missing Ingredient for Fast Stylization"
    <https://arxiv.org/abs/1607.08022>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments, running statistics and ``state_dict`` are those of :class:`torch_geometric.nn.InstanceNorm`. Graphs of
    a batch must be numbered alike on all workers.
    """

    keeps_type = True  # as torch's own, which PyG calls

    def over_all(self, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor:
        """Normalise by the rows of all workers, or by running statistics."""
        if self.training or not self.track_running_stats:
            return super().over_all(x, batch, batch_size)
        assert self.running_mean is not None and self.running_var is not None
        scale, shift = self.coefficients(1, self.running_mean, self.running_var, *self.parameters())
        return (x - self.running_mean) * scale + shift

    def coefficients(self, *moments_and_parameters: Any) -> tuple[Tensor, Tensor]:
        """Return scale and shift."""
        return standardise(self.eps, *moments_and_parameters)

    @torch.no_grad()
    def track(self, count: Any, mean: Tensor, m2: Tensor) -> None:
        """Move the running statistics towards the mean of those of all graphs; with the unbiased variance, as PyG."""
        var = m2 / (count - 1 if isinstance(count, Tensor) else torch.tensor(count - 1.0)).clamp(min=1)
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                running.lerp_(now.view(-1, now.size(-1)).mean(0).to(running.dtype), self.momentum)
