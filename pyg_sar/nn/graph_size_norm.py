r"""Normalisation by the number of nodes."""

from __future__ import annotations

import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.examples import ByExample, Examples


class GraphSizeNorm(ByExample, torch_geometric.nn.GraphSizeNorm):
    r"""Graph size normalisation from the `"Benchmarking Graph Neural Networks" <https://arxiv.org/abs/2003.00982>`_
    paper, with the nodes of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x}_i}{\sqrt{|\mathcal{V}|}}

    Examples of a batch must be numbered alike on all workers.
    """

    def normalise(self, x: Tensor, examples: Examples) -> Tensor:
        """Normalise by the rows of all workers."""
        return x * examples.of_rows(examples.count.pow(-0.5))
