r"""GraphSAGE."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.message_passing import SIMPLE, SUMS, MessagePassing, affine, reduce_rows


class SAGEConv(MessagePassing, torch_geometric.nn.SAGEConv):
    r"""The GraphSAGE operator from the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.SAGEConv`. Sums and means are taken of
    :math:`\mathbf{W}_2 \mathbf{x}_j` if these are no wider than :math:`\mathbf{x}_j` (half as wide, if features are
    constant: their own sum has no gradient that travels). The aggregations ``"mean"``,
    ``"sum"``, ``"max"`` and ``"min"`` stream; sums and means fetch no row twice (case 1 of the SAR paper). Others run
    in one shot where that is exact (``"median"``, ``"std"``, a list, ...), and raise where the result depends on the
    order or the largest degree of the whole graph (``"lstm"``, ``"gru"``).

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded;
          edge indices :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})` if bipartite
    """

    streamable = SIMPLE

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Run the forward pass; where that makes less travel, rows are transformed before they are summed."""
        x = self.pair(x, edge_index)
        graph, lin = self.streamed(edge_index, x, size), affine(self.lin_l)
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        constant = graph is not None and graph.is_constant(x_src) and not self.project
        if graph is None or lin is None or self.aggr not in SUMS or constant or self.widens(lin[0], x_src):
            return super().forward(x, edge_index, size)
        x_src = self.lin(x_src).relu() if self.project else x_src
        out = reduce_rows(graph, F.linear(x_src, lin[0]), self.aggr, node_dim=self.node_dim)
        out = out if lin[1] is None else out.add_(lin[1])
        if self.root_weight and x_dst is not None:
            out += self.lin_r(x_dst)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate ``x``."""
        assert isinstance(self.aggr, str)
        return reduce_rows(graph, kwargs["x"][0], self.aggr, node_dim=self.node_dim)

    def widens(self, weight: Tensor, x: Tensor) -> bool:
        """Whether more travels if rows are multiplied by ``weight`` first; their gradients then travel in any case."""
        return weight.size(0) * (1 if x.requires_grad or self.project else 2) > weight.size(1)
