r"""Normalisation by the number of nodes."""

from __future__ import annotations

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.norm.statistics import NormalisesPerGraph, PerGraph
from pyg_sar.nn.together import knows_all_rows
from pyg_sar.watch import ROWS, gives


class GraphSizeNorm(NormalisesPerGraph, torch_geometric.nn.GraphSizeNorm):
    r"""Graph size normalisation from the `"Benchmarking Graph Neural Networks" <https://arxiv.org/abs/2003.00982>`_
    paper, with the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x}_i}{\sqrt{|\mathcal{V}|}}

    Graphs of a batch must be numbered alike on all workers.
    """

    @torch.compiler.disable
    @gives(ROWS)
    @knows_all_rows
    def over_all(self, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor:
        """Normalise by the number of rows of all workers."""
        per_graph = PerGraph(x, batch, batch_size, self.group)
        return (x * per_graph.of_rows(per_graph.count.pow(-0.5))).to(x.dtype)
