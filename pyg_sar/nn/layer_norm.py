r"""Normalisation of each example, or of each node."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.examples import ByExample, Examples


class LayerNorm(ByExample, torch_geometric.nn.LayerNorm):
    r"""Layer normalisation from the `"Layer Normalization" <https://arxiv.org/abs/1607.06450>`_ paper; with
    ``mode="graph"`` over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.LayerNorm`. Examples of
    a batch must be numbered alike on all workers.
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        if self.mode != "graph":
            return torch_geometric.nn.LayerNorm.forward(self, x, batch, batch_size)
        return super().forward(x, batch, batch_size)

    def normalise(self, x: Tensor, examples: Examples) -> Tensor:
        """Normalise by the rows of all workers."""
        x = x - examples.of_rows(examples.mean(x).mean(1, keepdim=True))
        var = examples.mean(x * x).mean(1, keepdim=True)
        # As in PyG, which takes its constant inside the root for batches alone.
        out = x / examples.of_rows(var.sqrt() + self.eps if examples.single else (var + self.eps).sqrt())
        return out if self.weight is None else out * self.weight + self.bias
