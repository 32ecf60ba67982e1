r"""GraphSAGE."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.message_passing import SIMPLE, MessagePassing, reduce_rows


class SAGEConv(MessagePassing, torch_geometric.nn.SAGEConv):
    r"""The GraphSAGE operator from the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.SAGEConv`. The aggregations ``"mean"``,
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
        """Run the forward pass."""
        return super().forward(self.pair(x, edge_index), edge_index, size)

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate ``x``."""
        assert isinstance(self.aggr, str)
        return reduce_rows(graph, kwargs["x"][0], self.aggr, node_dim=self.node_dim)
