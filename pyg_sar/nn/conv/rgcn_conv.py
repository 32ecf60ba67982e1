r"""Relational graph convolution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE, SUMS, aggregate, reduce_rows
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.message_passing import MessagePassing, add
from pyg_sar.reduce import Sum
from pyg_sar.rewire import TypedGraph, by_type


class RGCNConv(MessagePassing, torch_geometric.nn.RGCNConv):
    r"""The relational graph convolutional operator from the `"Modeling Relational Data with Graph Convolutional
    Networks" <https://arxiv.org/abs/1703.06103>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}_{\textrm{root}} \cdot \mathbf{x}_i + \sum_{r \in \mathcal{R}}
        \sum_{j \in \mathcal{N}_r(i)} \frac{1}{|\mathcal{N}_r(i)|} \mathbf{\Theta}_r \cdot \mathbf{x}_j

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.RGCNConv`. On a sharded graph all relations
    stream at once: rows are aggregated for every pair :math:`(r, i)` that has an edge, where PyG runs over the graph
    once for each relation and keeps :math:`|\mathcal{R}| \cdot |\mathcal{V}|` rows; sums and means fetch no row twice
    (case 1 of the SAR paper). With fewer bases than relations they are aggregated for every basis instead, with
    coefficients that are learnt (case 2, as in the paper). Without input features (``x=None``, or node ids in place
    of ``x``) each node selects a row of the weights: ``in_channels`` is then the number of nodes of the whole graph.
    There, without fewer bases or with ``aggr="max"``, relations stream one by one, as each has rows of its own.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, global node ids :math:`(|\mathcal{V}|)` or None,
          or a tuple if bipartite, this worker's rows if sharded; edge indices :math:`(2, |\mathcal{E}|)`; edge types
          :math:`(|\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`
    """

    streamable = SIMPLE

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """Run the forward pass."""
        x = self.pair(x, edge_index)
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        if x_src is None and not isinstance(edge_index, ShardedEdgeIndex):
            x_src = torch.arange(self.in_channels_l, device=self.weight.device)
        graph = self.streamed(edge_index, (x_src, x_src if x_dst is None else x_dst))
        if graph is None:
            return super().forward(x, edge_index, edge_type)
        if edge_type is None:
            raise ValueError(f"'{self.__class__.__name__}' needs 'edge_type' (got None)")
        ids = torch.arange(graph.num_src, device=graph.device) if graph.n_id is None else graph.n_id
        x_src = ids if x_src is None else x_src
        if x_dst is None:
            x_dst = x_src if graph.bipartite else graph.dst_rows(x_src)
        if x_src.is_floating_point() != x_dst.is_floating_point():
            raise ValueError(
                f"Expected features of sources and of destinations, or node ids of both (got {x_src.dtype} and "
                f"{x_dst.dtype})"
            )
        typed = by_type(graph, edge_type, self.num_relations)
        few_bases = self.num_bases is not None and self.num_bases < self.num_relations
        if few_bases and self.aggr in SUMS:
            return self.finish(self.compose(graph, self.coefficients(typed, edge_type), x_src), x_dst)

        out = None
        for messages, dst in zip(self.messages(typed, x_src), typed.dst.split(typed.counts), strict=True):
            out = messages.new_zeros(graph.num_dst, self.out_channels) if out is None else out
            out = out.index_add_(0, dst, messages)
        assert out is not None, "no relations"
        return self.finish(out, x_dst)

    def finish(self, out: Tensor, x_dst: Tensor) -> Tensor:
        """Add the destinations' own term and the bias; PyG adds to zeros of the default type."""
        out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))
        if self.root is not None:
            out = add(out, x_dst @ self.root if x_dst.is_floating_point() else self.root[x_dst])
        return out if self.bias is None else add(out, self.bias)

    def compose(self, graph: ShardedGraph, weight: Tensor, x: Tensor) -> Tensor:
        """Aggregate rows for each basis, or the rows of each basis that nodes select, weighted by coefficients."""
        learn = weight.requires_grad
        if not x.is_floating_point():
            rows = self.weight.transpose(0, 1).index_select(0, x)
            return aggregate(graph, Sum(learn_weight=learn, adds_heads=True), rows, edge=[weight])
        sums = aggregate(graph, Sum(learn_weight=learn, sums=self.num_bases), x, edge=[weight])
        return sums.flatten(1) @ self.weight.flatten(0, 1)

    def coefficients(self, typed: TypedGraph, edge_type: Tensor) -> Tensor:
        """Return the coefficients of each edge: those of its relation, for each basis."""
        # The gradient of a coefficient is a sum over all edges of its relation: in double precision, basis by basis.
        columns = [column[edge_type].to(self.comp.dtype) for column in self.comp.double().unbind(1)]
        weight = torch.stack(columns, 1)
        if self.aggr == "mean":
            weight = weight * typed.norm.unsqueeze(-1).to(weight.dtype)
        return weight

    def messages(self, typed: TypedGraph, x: Tensor) -> Iterator[Tensor]:
        r"""Yield what each relation has for its pairs, :math:`(|\mathcal{V}_r|, F_{out})`."""
        weights = self.relation_weights()
        if not x.is_floating_point():
            if self.num_blocks is not None:
                raise ValueError("Block-diagonal decomposition not supported for non-continuous input features.")
            for graph, weight in zip(typed.relations, weights, strict=True):
                yield reduce_rows(graph, weight[x], self.aggr)
            return
        sums = reduce_rows(typed.graph, x, self.aggr).split(typed.counts)
        for h, weight in zip(sums, weights, strict=True):
            yield self.product(h, weight)

    def relation_weights(self) -> Tensor:
        """Return the weights of every relation, composed of the bases if there are any."""
        if self.num_bases is None:
            return self.weight
        return (self.comp @ self.weight.flatten(1)).view(self.num_relations, *self.weight.shape[1:])

    def product(self, h: Tensor, weight: Tensor) -> Tensor:
        """Multiply by one relation's weights, dense or block-diagonal."""
        if self.num_blocks is None:
            return h @ weight
        return torch.einsum("abc,bcd->abd", h.unflatten(-1, weight.shape[:2]), weight).flatten(1)


class FastRGCNConv(RGCNConv, torch_geometric.nn.FastRGCNConv):
    r"""The same as :class:`RGCNConv`; PyG's :class:`~torch_geometric.nn.FastRGCNConv` is a faster form of it that needs
    more memory.
    """

    streamable = SUMS
