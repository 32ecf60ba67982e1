r"""Graph attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.attention import attend, pack, replace_self_loops, travelling
from pyg_sar.nn.message_passing import MessagePassing, affine, misses_loops
from pyg_sar.nn.rows import SUMS
from pyg_sar.reference import ADDITIVE
from pyg_sar.stream import Lin


class GATConv(MessagePassing, torch_geometric.nn.GATConv):
    r"""The graph attentional operator from the `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_s \mathbf{x}_j,
        \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathrm{LeakyReLU} \left(
        \mathbf{a}^{\top}_s \mathbf{\Theta}_s \mathbf{x}_j + \mathbf{a}^{\top}_t \mathbf{\Theta}_t \mathbf{x}_i
        + \mathbf{a}^{\top}_e \mathbf{\Theta}_e \mathbf{e}_{i,j} \right) \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GATConv`. On a sharded graph the softmax runs
    online over the source shards, and backward fetches source rows again unless the graph keeps them (case 2 of the SAR
    paper). In a single process transformed rows exist for some heads at a time, and are made again in backward. The
    mask of attention dropout is a function of the graph's seed, the global edge id and the head, and so does not depend
    on the number of workers. With ``return_attention_weights`` the layer runs in one shot.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded; edge
          indices :math:`(2, |\mathcal{E}|)`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})`, or :math:`(|\mathcal{V}|, F_{out})` if
          ``concat=False``
    """

    streamable = SUMS

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Run the forward pass."""
        x = self.pair(x, edge_index)
        graph = self.streamed(edge_index, x) if return_attention_weights is None else None
        if graph is None or misses_loops(self, graph, edge_index):
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        res = None if self.res is None or x_dst is None else self.res(x_dst)
        lin_src, lin_dst = (self.lin_src, self.lin_dst) if self.lin is None else (self.lin, self.lin)
        if self.add_self_loops:
            graph, edge_attr = replace_self_loops(graph, edge_attr, self.fill_value)
        edge = None
        if edge_attr is not None and self.lin_edge is not None:
            edge = edge_attr, through(self.lin_edge.weight, self.att_edge)
        query = None if x_dst is None else self.terms(lin_dst, x_dst, self.att_dst)
        rows, lin, project = self.rows(graph, lin_src, x_src)
        return attend(
            self, graph, ADDITIVE, self.negative_slope, rows, query, edge, project=project, res=res, bias=self.bias,
            lin=lin,
        )  # fmt: skip

    def rows(self, graph: ShardedGraph, lin: Any, x: Tensor) -> tuple[Tensor, Lin | None, tuple[Tensor, ...]]:
        """Return packed source rows, transformed features and their terms of the scores; or features and the map to
        such rows; or features and the maps to both, where features are not the wider ones and no rows travel, or where
        they are at most half as wide and constant: each worker then transforms the rows that it reads, no gradient of
        rows travels, and what is fetched is the same in every step.
        """
        groups = travelling(self, graph)
        if not is_matrix(lin):
            z = lin(x)
            key = (z.view(-1, self.heads, self.out_channels) * self.att_src).sum(-1)
            return pack(z, key, self.heads, groups, 1), None, ()
        maps, width = (lin.weight, through(lin.weight, self.att_src)), lin.weight.size(0)
        alone = graph.exchange.alone and len(graph.blocks) == 1
        narrow = x.size(1) <= width if alone else 2 * x.size(1) <= width and not x.requires_grad
        if (narrow or graph.is_constant(x)) and not torch.is_autocast_enabled(x.device.type):
            return x, None, maps
        return x, (pack(*maps, self.heads, groups, 0), None), ()

    def terms(self, lin: Any, x: Tensor, att: Tensor) -> Tensor:
        """Return the terms of destinations, one for each head."""
        if is_matrix(lin):
            return F.linear(x, through(lin.weight, att))
        return (lin(x).view(-1, self.heads, self.out_channels) * att).sum(-1)


def is_matrix(lin: Any) -> bool:
    """Whether a linear layer is nothing but its weight."""
    pair = affine(lin)
    return pair is not None and pair[1] is None


def through(weight: Tensor, att: Tensor) -> Tensor:
    r"""Return :math:`\mathbf{a}^{\top} \mathbf{W}` for each head, as :math:`\mathbf{a}^{\top} (\mathbf{W} \mathbf{x}) =
    (\mathbf{a}^{\top} \mathbf{W}) \mathbf{x}`: a number for each row and head instead of a row of the full width.
    """
    _, heads, channels = att.shape
    return (weight.view(heads, channels, -1) * att.view(heads, channels, 1)).sum(1)
