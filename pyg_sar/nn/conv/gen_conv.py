r"""The generalised graph convolution of deep networks (GENConv)."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.aggr import SoftmaxAggregation

from pyg_sar.aggregate import SIMPLE, aggregate, reduce_rows
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.message_passing import MessagePassing, of_sources
from pyg_sar.nn.norm.batch_norm import BatchNorm1d
from pyg_sar.reduce import ColumnSoftmax


class GENConv(MessagePassing, torch_geometric.nn.GENConv):
    r"""The GENeralized Graph Convolution (GENConv) from the `"DeeperGCN: All You Need to Train Deeper GCNs"
    <https://arxiv.org/abs/2006.07739>`_ paper.

    .. math::
        \mathbf{x}_i^{\prime} = \mathrm{MLP} \left( \mathbf{x}_i + \mathrm{AGG} \left( \left\{
        \mathrm{ReLU} \left( \mathbf{x}_j + \mathbf{e_{ji}} \right) +\epsilon : j \in \mathcal{N}(i) \right\} \right)
        \right)

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GENConv`. Without features of edges the
    aggregation ``"softmax"`` (with one temperature for all columns) streams as sums of rows, whose exponentials are
    taken once for each node, see :class:`~pyg_sar.reduce.ColumnSoftmax`; ``"mean"``, ``"sum"``, ``"max"`` and
    ``"min"`` stream as those of :class:`SAGEConv`. With features, and for others, it streams by PyG's own code
    (:mod:`pyg_sar.nn.replay.choose`). The normalisations of ``norm="batch"`` are over the rows of all workers.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded;
          edge indices :math:`(2, |\mathcal{E}|)`; edge attributes :math:`(|\mathcal{E}|, D)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})` if bipartite
    """

    streamable = (*SIMPLE, "softmax")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.mlp:
            if type(module) is torch.nn.BatchNorm1d:
                module.__class__ = BatchNorm1d

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, size: Any = None) -> Tensor:
        """Run the forward pass."""
        return super().forward(self.pair(x, edge_index), edge_index, edge_attr, size)

    def streams(self, kwargs: dict[str, Any]) -> bool:
        """Whether messages are rows of sources, which the aggregation knows."""
        if kwargs.get("edge_attr") is not None:
            return False
        it = self.aggr_module
        plain = type(it) is SoftmaxAggregation and it.channels == 1 and of_sources(kwargs["x"]).dim() == 2
        return plain or self.aggr in SIMPLE

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate the messages of ``x``."""
        x = of_sources(kwargs["x"]).relu() + self.eps
        if self.aggr in SIMPLE:
            return reduce_rows(graph, x, self.aggr, node_dim=self.node_dim)
        it: Any = self.aggr_module
        if not it.learn:
            return aggregate(graph, ColumnSoftmax(graph.degree, it.t, it.semi_grad), x)
        x = x.to(torch.promote_types(x.dtype, it.t.dtype))
        return aggregate(graph, ColumnSoftmax(graph.degree), x, const=[it.t])
