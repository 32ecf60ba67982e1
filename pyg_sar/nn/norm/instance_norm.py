r"""Normalisation of the features of each graph of a batch by themselves."""

from __future__ import annotations

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph


class InstanceNorm(NormalisesPerGraph, torch_geometric.nn.InstanceNorm):
    r"""Instance normalisation from the `"Instance Normalization: The Missing Ingredient for Fast Stylization"
    <https://arxiv.org/abs/1607.08022>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments, running statistics and ``state_dict`` are those of :class:`torch_geometric.nn.InstanceNorm`. Graphs of
    a batch must be numbered alike on all workers.
    """

    def normalise(self, x: Tensor, per_graph: PerGraph) -> Tensor:
        """Normalise by the rows of all workers."""
        if self.training or not self.track_running_stats:
            mean = per_graph.mean(x)
            x = x - per_graph.of_rows(mean)
            squares = per_graph.sum(x * x)
            self.track(mean, squares / (per_graph.count - 1).clamp(min=1))
            var = squares / per_graph.count.clamp(min=1)
        else:
            assert self.running_mean is not None and self.running_var is not None
            x, var = x - self.running_mean, self.running_var.expand(per_graph.size, -1)
        out = x / per_graph.of_rows((var + self.eps).sqrt())
        return out if self.weight is None else out * self.weight + self.bias

    @torch.no_grad()
    def track(self, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics towards the mean of those of all graphs."""
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                running.lerp_(now.mean(0).to(running.dtype), self.momentum)
