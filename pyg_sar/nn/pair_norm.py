r"""Normalisation that keeps the distances between all pairs of nodes."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.collectives import grouped
from pyg_sar.nn.examples import Examples


class PairNorm(torch_geometric.nn.PairNorm):
    r"""Pair normalisation from the `"PairNorm: Tackling Oversmoothing in GNNs" <https://arxiv.org/abs/1909.12223>`_
    paper over the rows of all workers.

    .. math::
        \mathbf{x}_i^c &= \mathbf{x}_i - \frac{1}{n} \sum_{j=1}^n \mathbf{x}_j

        \mathbf{x}_i^{\prime} &= s \cdot \frac{\mathbf{x}_i^c}
        {\sqrt{\frac{1}{n} \sum_{j=1}^n {\| \mathbf{x}_j^c \|}^2_2}}

    Arguments are those of :class:`torch_geometric.nn.PairNorm`. Examples of a batch must be numbered alike on all
    workers.
    """

    group: Any = None

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        if not grouped(self.group):
            return super().forward(x, batch, batch_size)
        examples = Examples(x, batch, batch_size, self.group)
        x = x - examples.of_rows(examples.mean(x))
        if self.scale_individually:
            return self.scale * x / (self.eps + x.norm(2, -1, keepdim=True))
        square = examples.mean(x.pow(2).sum(-1, keepdim=True))
        return self.scale * x / examples.of_rows((self.eps + square).sqrt())
