r"""Dot-product attention over neighbours."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SUMS
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.attention import attend, groups_of_heads, pack
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.nn.conv.products import edge_weights, multiplies_edges, project, weight_and_bias
from pyg_sar.ops.reference import DOT
from pyg_sar.sources import ProjectedRows


class TransformerConv(MessagePassing, torch_geometric.nn.TransformerConv):
    r"""The graph transformer operator from the `"Masked Label Prediction: Unified Message Passing Model for
    Semi-Supervised Classification" <https://arxiv.org/abs/2009.03509>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \alpha_{i,j} \left(
        \mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{e}_{i,j} \right), \qquad
        \alpha_{i,j} = \mathrm{softmax}_j \left( \frac{(\mathbf{W}_3 \mathbf{x}_i)^{\top} (\mathbf{W}_4 \mathbf{x}_j +
        \mathbf{W}_6 \mathbf{e}_{i,j})}{\sqrt{d}} \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.TransformerConv`. On a sharded graph it streams
    as :class:`~pyg_sar.nn.GATConv` does (case 2 of the SAR paper); a source row carries value and key. With edge
    features a row of the full width lives for each edge of one block.

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
        # PyG's layer says what is wrong with features that it does not expect.
        usual = return_attention_weights is None and (edge_attr is None) == (self.lin_edge is None)
        graph = self.streamed(edge_index, x) if usual and multiplies_edges(self.lin_edge, edge_attr) else None
        if graph is None:
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        factor, query = 1 / math.sqrt(self.out_channels), project(self.lin_query, x_dst)
        rows = self.rows(graph, x_src)
        edge = None if edge_attr is None else (edge_attr, edge_weights(self.lin_edge, edge_attr))
        out = attend(self, graph, DOT, factor, rows, query, edge)
        if out.is_cuda and torch.is_autocast_enabled("cuda"):
            out = out.float()  # as PyG's, because there autocast sums up in single precision
        if not self.root_weight:
            return out
        x_dst = project(self.lin_skip, x_dst)
        if self.lin_beta is None:
            return out + x_dst
        beta = self.lin_beta(torch.cat([out, x_dst, out - x_dst], dim=-1)).sigmoid()
        return beta * x_dst + (1 - beta) * out

    def rows(self, graph: ShardedGraph, x: Tensor) -> Tensor | ProjectedRows:
        """Return packed source rows, values and keys."""
        value, key = weight_and_bias(self.lin_value), weight_and_bias(self.lin_key)
        groups = groups_of_heads(self, graph)
        if value is None or key is None or (value[1] is None) != (key[1] is None):
            keys = self.lin_key(x)  # first, as in PyG, if random numbers are drawn for its weights
            return pack(self.lin_value(x), keys, self.heads, groups, 1)
        (weight, bias), (key_weight, key_bias) = value, key
        both = None if bias is None or key_bias is None else pack(bias, key_bias, self.heads, groups, 0)
        return ProjectedRows(x, pack(weight, key_weight, self.heads, groups, 0), both)
