r"""Labels that spread along the edges of the whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import one_hot

from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.nn.conv.gcn_conv import WeightedSum


class LabelPropagation(WeightedSum, torch_geometric.nn.LabelPropagation):
    r"""The label propagation operator, firstly introduced in the `"Learning from Labeled and Unlabeled Data with Label
    Propagation" <http://mlg.eng.cam.ac.uk/zoubin/papers/CMU-CALD-02-107.pdf>`_ paper.

    .. math::
        \mathbf{Y}^{\prime} = \alpha \cdot \mathbf{D}^{-1/2} \mathbf{A} \mathbf{D}^{-1/2} \mathbf{Y} + (1 - \alpha)
        \mathbf{Y}

    Arguments are those of :class:`torch_geometric.nn.LabelPropagation`. On a sharded graph degrees are global, and
    there are as many classes as the labels of all workers have.

    Shapes:
        - **input:** classes :math:`(|\mathcal{V}|)` or labels :math:`(|\mathcal{V}|, C)`, this worker's rows if
          sharded; edge indices :math:`(2, |\mathcal{E}|)`; mask :math:`(|\mathcal{V}|)` *(optional)*; edge weights
          :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** labels :math:`(|\mathcal{V}|, C)`
    """

    @torch.no_grad()
    def forward(
        self,
        y: Tensor,
        edge_index: Any,
        mask: Tensor | None = None,
        edge_weight: Tensor | None = None,
        post_step: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Run the forward pass."""
        if isinstance(edge_index, ShardedEdgeIndex) and y.dtype == torch.long:
            if math.prod(y.shape[1:]) == 1:  # also where there are no nodes, unlike the number of entries
                here = int(y.max()) + 1 if len(y) > 0 else 0
                (classes,) = edge_index._graph.exchange.all_reduce_max([here])
                y = one_hot(y.view(-1), num_classes=classes)
            y = y.to(torch.get_default_dtype())
        return super().forward(y, edge_index, mask, edge_weight, post_step)
