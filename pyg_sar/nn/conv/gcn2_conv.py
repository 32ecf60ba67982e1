r"""Graph convolution with initial residuals and identity mappings (GCNII)."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.nn.conv.gcn_conv import WeightedSum, normalised, normalised_sums, sum_type


class GCN2Conv(WeightedSum, torch_geometric.nn.GCN2Conv):
    r"""The graph convolutional operator with initial residual connections and identity mapping (GCNII) from the
    `"Simple and Deep Graph Convolutional Networks" <https://arxiv.org/abs/2007.02133>`_ paper.

    .. math::
        \mathbf{X}^{\prime} = \left( (1 - \alpha) \mathbf{\hat{P}} \mathbf{X} + \alpha \mathbf{X^{(0)}} \right)
        \left( (1 - \beta) \mathbf{I} + \beta \mathbf{\Theta} \right)

    with :math:`\mathbf{\hat{P}} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}`. Arguments and
    ``state_dict`` are those of :class:`torch_geometric.nn.GCN2Conv`. On a sharded graph rows are scaled by
    :math:`\mathbf{\hat{D}}^{-1/2}` before and after a plain sum, as :class:`GCNConv` does, and no row is fetched twice.
    ``cached`` has no effect there.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F)`, initial node features :math:`(|\mathcal{V}|, F)`, this
          worker's rows if sharded; edge indices :math:`(2, |\mathcal{E}|)`; edge weights :math:`(|\mathcal{E}|)`
          *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F)`
    """

    def forward(self, x: Tensor, x_0: Tensor, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Run the forward pass."""
        graph = self.streamed(edge_index, x) if self.normalize else None
        if graph is None:
            return super().forward(x, x_0, edge_index, edge_weight)
        graph, edge_weight, scale = normalised(graph, edge_weight, 1.0 if self.add_self_loops else None, x.dtype)
        out = normalised_sums(self, graph, edge_weight, scale, x * scale.to(sum_type(x, edge_weight)))
        out, x_0 = (1 - self.alpha) * out, self.alpha * x_0[: out.size(0)]
        keep, change = 1 - self.beta, self.beta
        if self.weight2 is None:
            out = out + x_0
            return torch.addmm(out, out, self.weight1, beta=keep, alpha=change)
        out = torch.addmm(out, out, self.weight1, beta=keep, alpha=change)
        return out + torch.addmm(x_0, x_0, self.weight2, beta=keep, alpha=change)
