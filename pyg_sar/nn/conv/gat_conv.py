r"""Graph attention."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SUMS, is_elsewhere
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import linear
from pyg_sar.nn.conv.attention import attend, groups_of_heads, pack, replace_self_loops
from pyg_sar.nn.conv.message_passing import MessagePassing, loops_between_sets
from pyg_sar.nn.conv.products import edge_weights, is_matrix, multiplies_edges
from pyg_sar.ops.reference import ADDITIVE
from pyg_sar.sources import ProjectedRows


class GATConv(MessagePassing, torch_geometric.nn.GATConv):
    r"""The graph attentional operator from the `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_s \mathbf{x}_j,
        \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathrm{LeakyReLU} \left(
        \mathbf{a}^{\top}_s \mathbf{\Theta}_s \mathbf{x}_j + \mathbf{a}^{\top}_t \mathbf{\Theta}_t \mathbf{x}_i
        + \mathbf{a}^{\top}_e \mathbf{\Theta}_e \mathbf{e}_{i,j} \right) \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GATConv`. On a sharded graph the softmax runs
    online over the source shards, and backward fetches source rows again unless the graph keeps them (case 2 of the SAR
    paper). In a single process transformed rows exist for some heads at a time (all, in half precision), and are made
    again in backward. The mask of attention dropout is a function of the graph's seed, the global edge id and the head,
    and so does not depend on the number of workers. With ``return_attention_weights`` the layer runs as a converted
    one.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded; edge
          indices :math:`(2, |\mathcal{E}|)`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})`, or :math:`(|\mathcal{V}|, F_{out})` if
          ``concat=False``
    """

    streamable = SUMS

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """Run the forward pass."""
        x = self.pair(x, edge_index)
        usual = return_attention_weights is None and multiplies_edges(self.lin_edge, edge_attr)
        graph = self.streamed(edge_index, x, size) if usual else None
        if graph is None or loops_between_sets(self, graph, edge_index):
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        res = None if self.res is None or x_dst is None else self.res(x_dst)
        if self.add_self_loops:
            graph, edge_attr = replace_self_loops(graph, edge_attr, self.fill_value)
        rows, query, project = self.inputs(graph, x_src, x_dst)
        edge = None
        if edge_attr is not None and self.lin_edge is not None:
            edge = edge_attr, through(edge_weights(self.lin_edge, edge_attr), self.att_edge)
        return attend(
            self, graph, ADDITIVE, self.negative_slope, rows, query, edge, project=project, res=res, bias=self.bias
        )

    def inputs(
        self, graph: ShardedGraph, x_src: Tensor, x_dst: Tensor | None
    ) -> tuple[Tensor | ProjectedRows, Tensor | None, tuple[Tensor, ...]]:
        """Return source rows, terms of destinations, and the maps that have yet to be applied to rows."""
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        if is_matrix(lin_src) and is_matrix(lin_dst) and not torch.is_autocast_enabled(x_src.device.type):
            query = None if x_dst is None else linear(x_dst, through(lin_dst.weight, self.att_dst))
            rows, project = self.rows(graph, lin_src.weight, x_src)
            return rows, query, project
        # Under autocast, too, as PyG does it: terms of half the digits are not near enough.
        z = lin_src(x_src)
        z_dst = z if x_dst is x_src and lin_dst is lin_src else None if x_dst is None else lin_dst(x_dst)
        query = None if z_dst is None else self.terms(z_dst, self.att_dst)
        return pack(z, self.terms(z, self.att_src), self.heads, groups_of_heads(self, graph), 1), query, ()

    def rows(self, graph: ShardedGraph, weight: Tensor, x: Tensor) -> tuple[Tensor | ProjectedRows, tuple[Tensor, ...]]:
        """Return packed source rows, projected features and their terms of the scores; or features and the maps to
        both, where features are not the wider ones and no rows are communicated, or are at most half as wide and have
        no gradient, or are cached: each worker then projects the rows that it reads, no gradient of rows is
        communicated, and what is fetched is the same in every step. Rows at home are projected once for all chunks.
        """
        maps, width = (weight, through(weight, self.att_src)), weight.size(0)
        alone = graph.exchange.alone and len(graph.blocks) == 1
        narrow = x.size(1) <= width if alone else 2 * x.size(1) <= width and not graph.learns(x)
        if (narrow or graph.is_cached(x)) and not is_elsewhere(x):
            return x, maps
        return ProjectedRows(x, pack(*maps, self.heads, groups_of_heads(self, graph), 0)), ()

    def terms(self, z: Tensor, att: Tensor) -> Tensor:
        """Return the terms of transformed rows, one for each head."""
        return (z.view(-1, self.heads, self.out_channels) * att).sum(-1)


def through(weight: Tensor, att: Tensor) -> Tensor:
    r"""Return :math:`\mathbf{a}^{\top} \mathbf{W}` for each head, as :math:`\mathbf{a}^{\top} (\mathbf{W} \mathbf{x}) =
    (\mathbf{a}^{\top} \mathbf{W}) \mathbf{x}`: a number for each row and head instead of a row of the full width.
    """
    _, heads, channels = att.shape
    return (weight.view(heads, channels, -1) * att.view(heads, channels, 1)).sum(1)
