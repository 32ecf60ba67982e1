r"""Normalisation by the number of nodes."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.collectives import grouped
from pyg_sar.nn.examples import Examples


class GraphSizeNorm(torch_geometric.nn.GraphSizeNorm):
    r"""Graph size normalisation from the `"Benchmarking Graph Neural Networks" <https://arxiv.org/abs/2003.00982>`_
    paper, with the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x}_i}{\sqrt{|\mathcal{V}|}}

    Examples of a batch must be numbered alike on all workers.
    """

    group: Any = None

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        if not grouped(self.group):
            return super().forward(x, batch, batch_size)
        examples = Examples(x, batch, batch_size, self.group)
        return x * examples.of_rows(examples.count.pow(-0.5))
