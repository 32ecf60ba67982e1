r"""Graph isomorphism network."""

from __future__ import annotations

from typing import Any

import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE, reduce_rows
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.message_passing import MessagePassing, of_sources


class GINConv(MessagePassing, torch_geometric.nn.GINConv):
    r"""The graph isomorphism operator from the `"How Powerful are Graph Neural Networks?"
    <https://arxiv.org/abs/1810.00826>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot \mathbf{x}_i +
        \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GINConv`. The aggregations ``"sum"``,
    ``"mean"``, ``"max"`` and ``"min"`` stream; sums and means fetch no row twice (case 1 of the SAR paper). A
    normalisation over nodes inside ``nn`` must be one of :mod:`pyg_sar.nn`, to see the rows of all workers.

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
        return reduce_rows(graph, of_sources(kwargs["x"]), self.aggr, node_dim=self.node_dim)
