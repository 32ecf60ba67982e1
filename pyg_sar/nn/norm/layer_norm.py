r"""Normalisation of each graph of a batch, or of each node."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph


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

    def normalise(self, x: Tensor, per_graph: PerGraph) -> Tensor:
        """Normalise by the rows of all workers."""
        x = x - per_graph.of_rows(per_graph.mean(x).mean(1, keepdim=True))
        var = per_graph.mean(x * x).mean(1, keepdim=True)
        # As in PyG, which takes its constant inside the root for batches alone.
        out = x / per_graph.of_rows(var.sqrt() + self.eps if per_graph.single else (var + self.eps).sqrt())
        return out if self.weight is None else out * self.weight + self.bias
