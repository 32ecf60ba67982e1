r"""GraphSAGE."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE, SUMS, reduce_rows, reduce_rows_async
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import linear
from pyg_sar.nn.conv.message_passing import MessagePassing, of_sources
from pyg_sar.nn.conv.products import add, weight_and_bias
from pyg_sar.sources import ProjectedRows


class SAGEConv(MessagePassing, torch_geometric.nn.SAGEConv):
    r"""The GraphSAGE operator from the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.SAGEConv`. Sums and means are taken of
    :math:`\mathbf{W}_2 \mathbf{x}_j` if these are no wider than :math:`\mathbf{x}_j` (half as wide, if features have no
    gradient, so that none is communicated for their own sum), and never of cached features. The aggregations
    ``"mean"``, ``"sum"``, ``"max"`` and ``"min"`` stream; sums and means fetch no row twice (case 1 of the SAR paper).
    Others stream by PyG's own code (``"std"``, ``"softmax"``, a list, ...) or run in chunks of destinations
    (``"median"``, ``"lstm"``, for which edges of a destination are in the order of their global ids), see
    :mod:`pyg_sar.nn.replay.choose`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))` if bipartite, this worker's rows if sharded;
          edge indices :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})` or :math:`(|\mathcal{V_t}|, F_{out})` if bipartite
    """

    streamable = SIMPLE

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """Run the forward pass; where less is communicated then, rows are transformed before they are summed."""
        x = self.pair(x, edge_index)
        graph, lin = self.streamed(edge_index, x, size), weight_and_bias(self.lin_l)
        if graph is None or lin is None:
            return super().forward(x, edge_index, size)
        (x_src, x_dst), (weight, bias) = (x, x) if isinstance(x, Tensor) else x, lin
        x_src = self.lin(x_src).relu() if self.project else x_src
        # Whether more is communicated if rows are multiplied first: of products the gradients are, in any case.
        widens = weight.size(0) * (1 if graph.learns(x_src) else 2) > weight.size(1)
        # Weights get the gradient of rows of an earlier epoch, too, if these are not multiplied yet.
        widens = widens or (graph.exchange.remembers and weight.size(0) == weight.size(1))
        before = self.aggr in SUMS and not graph.is_cached(x_src) and not widens
        rows = ProjectedRows(x_src, weight) if before else x_src
        pending = reduce_rows_async(graph, rows, self.aggr, node_dim=self.node_dim)
        try:
            root = self.root(x_dst, bias)
        except Exception:  # that by which a checkpoint stops, for example: what is under way must arrive
            with suppress(Exception):
                pending.wait()
            raise
        out = pending.wait() if before else linear(pending.wait(), weight)
        if root is not None:
            out = add(root, out)
        elif bias is not None:
            out = out + bias.to(out.dtype)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def root(self, x: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """Return the terms of destinations and the bias, if there are such terms."""
        if not self.root_weight or x is None:
            return None
        lin = weight_and_bias(self.lin_r)
        if lin is not None and lin[1] is None:
            return linear(x, lin[0], bias)
        out = self.lin_r(x)
        return out.clone() if bias is None else out + bias  # a hook may have kept `out`, or it is `x`

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate ``x``."""
        return reduce_rows(graph, of_sources(kwargs["x"]), self.aggr, node_dim=self.node_dim)
