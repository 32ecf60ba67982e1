r"""Graph attention with a score that ranks sources differently for each destination."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SUMS
from pyg_sar.nn.conv.attention import attend, replace_self_loops
from pyg_sar.nn.conv.message_passing import MessagePassing, loops_between_sets
from pyg_sar.nn.conv.products import edge_weights, multiplies_edges, project, weight_and_bias
from pyg_sar.ops.reference import GATV2
from pyg_sar.sources import ProjectedRows


class GATv2Conv(MessagePassing, torch_geometric.nn.GATv2Conv):
    r"""The GATv2 operator from the `"How Attentive are Graph Attention Networks?" <https://arxiv.org/abs/2105.14491>`_
    paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_s \mathbf{x}_j,
        \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathbf{a}^{\top} \mathrm{LeakyReLU} \left(
        \mathbf{\Theta}_s \mathbf{x}_j + \mathbf{\Theta}_t \mathbf{x}_i + \mathbf{\Theta}_e \mathbf{e}_{i,j} \right)
        \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GATv2Conv`. On a sharded graph it streams as
    :class:`~pyg_sar.nn.GATConv` does (case 2 of the SAR paper). With edge features a row of the full width lives for
    each edge of one block.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded; edge
          indices :math:`(2, |\mathcal{E}|)`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})`, or :math:`(|\mathcal{V}|, F_{out})` if
          ``concat=False``
    """

    streamable = SUMS

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: bool | None = None
    ) -> Any:
        """Run the forward pass."""
        x = self.pair(x, edge_index)
        usual = return_attention_weights is None and multiplies_edges(self.lin_edge, edge_attr)
        graph = self.streamed(edge_index, x) if usual else None
        if graph is None or loops_between_sets(self, graph, edge_index):
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        assert x_dst is not None
        res = None if self.res is None else self.res(x_dst)
        shared, lin = self.share_weights and x_dst is x_src, weight_and_bias(self.lin_l)
        rows: Any = project(self.lin_l, x_src) if shared or lin is None else ProjectedRows(x_src, *lin)
        query = rows if shared else project(self.lin_r, x_dst)
        if self.add_self_loops:
            graph, edge_attr = replace_self_loops(graph, edge_attr, self.fill_value)
        edge = None
        if edge_attr is not None:
            assert self.lin_edge is not None
            edge = edge_attr, edge_weights(self.lin_edge, edge_attr)
        out = attend(self, graph, GATV2, self.negative_slope, rows, query, edge, self.att, res=res, bias=self.bias)
        return out.to(torch.promote_types(out.dtype, self.att.dtype))  # as PyG's under autocast
