r"""Predictions that are corrected by their errors on the training nodes of all workers, and smoothed."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import one_hot

from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import rank_of
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.nn.models.label_propagation import LabelPropagation


class CorrectAndSmooth(torch_geometric.nn.CorrectAndSmooth):
    r"""The correct and smooth (C&S) post-processing model from the `"Combining Label Propagation And Simple Models
    Out-performs Graph Neural Networks" <https://arxiv.org/abs/2010.13993>`_ paper: soft predictions
    :math:`\mathbf{Z}` of any model are corrected by the errors :math:`\mathbf{E}` on training nodes, which spread
    along edges, and smoothed.

    .. math::
        \mathbf{E}^{(\ell)} &= \alpha_1 \mathbf{D}^{-1/2}\mathbf{A} \mathbf{D}^{-1/2} \mathbf{E}^{(\ell - 1)} +
        (1 - \alpha_1) \mathbf{E}^{(0)}, \qquad \mathbf{\hat{Z}} = \mathbf{Z} + \gamma \cdot \mathbf{E}^{(L_1)}

        \mathbf{\hat{Z}}^{(\ell)} &= \alpha_2 \mathbf{D}^{-1/2}\mathbf{A} \mathbf{D}^{-1/2}
        \mathbf{\hat{Z}}^{(\ell - 1)} + (1 - \alpha_2) \mathbf{\hat{Z}}^{(0)}

    Arguments are those of :class:`torch_geometric.nn.CorrectAndSmooth`. On a sharded graph ``y_soft`` has this
    worker's rows, ``mask`` says which of them are training nodes, of which there may be none, and ``y_true`` has their
    labels. With ``autoscale``, :math:`\gamma` comes from the mean error of the training nodes of all workers.

    .. code-block:: python

        post = pyg_sar.nn.CorrectAndSmooth(50, 0.9, 50, 0.8)
        pred = post(out.softmax(-1), data.y[data.train_mask], data.train_mask, data.edge_index)

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None
    prop1: LabelPropagation
    prop2: LabelPropagation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prop1, self.prop2 = (LabelPropagation(p.num_layers, p.alpha) for p in (self.prop1, self.prop2))

    def correct(
        self, y_soft: Tensor, y_true: Tensor, mask: Tensor, edge_index: Any, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return predictions that are corrected by their errors, as PyG does with those of the whole graph."""
        if not isinstance(edge_index, ShardedEdgeIndex) or not self.autoscale:
            return super().correct(y_soft, y_true, mask, edge_index, edge_weight)
        count = int(mask.sum()) if mask.dtype == torch.bool else mask.size(0)
        if y_true.size(0) != count:
            raise ValueError(
                f"[rank {rank_of(self.group)}] Expected 'y_true' to have a row for each of the {count} nodes that "
                f"'mask' selects (got {list(y_true.shape)}): pass y[mask]"
            )
        if y_true.dtype == torch.long and y_true.size(0) == y_true.numel():
            y_true = one_hot(y_true.view(-1), num_classes=y_soft.size(-1), dtype=y_soft.dtype)
        error = torch.zeros_like(y_soft)
        error[mask] = y_true - y_soft[mask]
        smoothed = self.prop1(error, edge_index, edge_weight=edge_weight, post_step=lambda x: x.clamp_(-1.0, 1.0))
        here = torch.stack([error[mask].abs().sum(dtype=torch.float64), mask.new_tensor(count, dtype=torch.float64)])
        total, count_all = all_reduce(here, self.group)
        scale = (total / count_all).to(error.dtype) / smoothed.abs().sum(dim=1, keepdim=True)
        scale[scale.isinf() | (scale > 1000)] = 1.0
        return y_soft + scale * smoothed
