r"""Batch normalisation by type of rows, with the statistics of all workers' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.collectives import global_merge
from pyg_sar.nn.together import knows_all_rows, together
from pyg_sar.ops import moments_
from pyg_sar.watch import ROWS, gives


class HeteroBatchNorm(torch_geometric.nn.HeteroBatchNorm):
    r"""PyG's :class:`~torch_geometric.nn.norm.HeteroBatchNorm` over the rows of all workers: every type of rows is
    normalised by its mean and variance, which as in PyG have no gradient.

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """Normalise rows ``[n, channels]`` of types ``[n]``."""
        if (not self.training and self.track_running_stats) or not together(self.group):
            return super().forward(x, type_vec)
        return self.over_all(x, type_vec)

    @torch.compiler.disable
    @gives(ROWS)
    @knows_all_rows
    def over_all(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """Normalise by the rows of all workers."""
        count, mean, var = self.statistics(x.detach(), type_vec)
        if self.training and self.track_running_stats:
            self.track(count > 0, mean, var)
        out = (x - mean[type_vec]) / var.clamp(self.eps).sqrt()[type_vec]
        return out * self.weight[type_vec] + self.bias[type_vec] if self.affine else out

    def statistics(self, x: Tensor, type_vec: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return how many rows all workers have of every type, and their mean and variance."""
        count = torch.bincount(type_vec, minlength=self.num_types)
        mean, m2 = torch.zeros(2, self.num_types, x.size(1), dtype=torch.float64, device=x.device)
        for k in range(self.num_types):
            moments_(mean[k], m2[k], x[type_vec == k])
        count, mean, m2 = global_merge(count, mean, m2, self.group)
        return count, mean.to(x.dtype), (m2 / count.clamp(min=1).unsqueeze(1)).to(x.dtype)

    @torch.no_grad()
    def track(self, seen: Tensor, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics of the types that there are towards the present ones."""
        momentum = self.momentum
        if momentum is None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked)
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running[seen] = torch.lerp(running[seen], now[seen].to(running.dtype), momentum)
