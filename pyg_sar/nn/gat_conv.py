r"""Graph attention."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.message_passing import MessagePassing
from pyg_sar.reduce import ADDITIVE, Softmax
from pyg_sar.stream import aggregate


class GATConv(MessagePassing, torch_geometric.nn.GATConv):
    r"""The graph attentional operator from the `"Graph Attention Networks" <https://arxiv.org/abs/1710.10903>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}} \alpha_{i,j} \mathbf{\Theta}_s \mathbf{x}_j,
        \qquad \alpha_{i,j} = \mathrm{softmax}_j \left( \mathrm{LeakyReLU} \left(
        \mathbf{a}^{\top}_s \mathbf{\Theta}_s \mathbf{x}_j + \mathbf{a}^{\top}_t \mathbf{\Theta}_t \mathbf{x}_i
        + \mathbf{a}^{\top}_e \mathbf{\Theta}_e \mathbf{e}_{i,j} \right) \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GATConv`. On a sharded graph the softmax runs
    online over the source shards, and backward fetches source rows again unless the graph keeps them (case 2 of the SAR
    paper). The mask of attention dropout is a function of the graph's seed, the global edge id and the head, and so
    does not depend on the number of workers. With ``return_attention_weights`` the layer runs in one shot.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded; edge
          indices :math:`(2, |\mathcal{E}|)`; edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, H * F_{out})`, or :math:`(|\mathcal{V}|, F_{out})` if
          ``concat=False``
    """

    def can_stream(self) -> bool:
        """Whether messages are summed or averaged."""
        return self.aggr in ("sum", "add", "mean")

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Any:
        """Run the forward pass."""
        graph = self.streamed(edge_index)
        if graph is None or return_attention_weights is not None:
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        H, C = self.heads, self.out_channels
        x_src, x_dst = x if isinstance(x, (tuple, list)) else (x, x)
        res = None if self.res is None or x_dst is None else self.res(x_dst)
        z_src = (self.lin_src if self.lin is None else self.lin)(x_src)
        if x_dst is x_src and self.lin is not None:
            z_dst: Tensor | None = z_src
        else:
            z_dst = None if x_dst is None else (self.lin_dst if self.lin is None else self.lin)(x_dst)
        a_src = (z_src.view(-1, H, C) * self.att_src).sum(-1)
        a_dst = None if z_dst is None else (z_dst.view(-1, H, C) * self.att_dst).sum(-1)
        if self.add_self_loops:
            graph, edge_attr = replace_self_loops(graph, edge_attr, self.fill_value)

        out = self.attend(graph, z_src, a_src, a_dst, edge_attr)
        out = out.flatten(1) if self.concat else out.mean(1)
        out = out if res is None else out + res
        if self.bias is not None:
            return out + self.bias
        # Nothing that the caller may change in place must be what backward reads.
        return out.clone() if self.concat and res is None else out

    def attend(
        self, graph: ShardedGraph, z: Tensor, a_src: Tensor, a_dst: Tensor | None, edge_attr: Tensor | None
    ) -> Tensor:
        """Stream packed source rows ``[z | a_src]`` through the softmax."""
        const = []
        if edge_attr is not None and self.lin_edge is not None:
            # a^T (W e) = (a^T W) e: one number for each head instead of a row of the full width for each edge.
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, -1)
            const = [(weight * self.att_edge.view(self.heads, self.out_channels, 1)).sum(1)]
        drop = None
        if self.training and self.dropout > 0:
            drop = (self.dropout, graph.seeds.draw(), graph.ids_of)
        out = aggregate(
            graph,
            Softmax(self.heads, self.out_channels, ADDITIVE, self.negative_slope, drop),
            torch.cat([z, a_src], 1),
            dst=[] if a_dst is None else [a_dst],
            edge=[edge_attr] if const else [],  # type: ignore[list-item]
            const=const,
        )
        if self.aggr == "mean":
            out = out / graph.degree.clamp(min=1).to(out.dtype).view(-1, 1, 1)
        return out


def replace_self_loops(graph: ShardedGraph, edge_attr: Tensor | None, fill: Any) -> tuple[ShardedGraph, Tensor | None]:
    """Give every node exactly one self-loop, whose features are ``fill`` or reduced from the other edges, as in PyG."""
    looped, keep = graph.with_self_loops()
    if edge_attr is None:
        return looped, None
    rest, n = edge_attr[keep], graph.num_dst
    if isinstance(fill, str):
        loops = scatter(rest, graph.row[keep], 0, n, fill)
    elif isinstance(fill, Tensor):
        fill = fill.to(rest)
        loops = (fill if fill.dim() == rest.dim() else fill.unsqueeze(0)).expand(n, *rest.shape[1:])
    else:
        loops = rest.new_full((n, *rest.shape[1:]), 1.0 if fill is None else fill)
    return looped, torch.cat([rest, loops])
