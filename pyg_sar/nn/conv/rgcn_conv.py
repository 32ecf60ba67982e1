r"""Relational graph convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE, SUMS, aggregate, reduce_rows
from pyg_sar.autograd import once_differentiable
from pyg_sar.block import add_rows
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import linear, linear_grad
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.nn.conv.products import add
from pyg_sar.nn.replay.by_chunks import layer_by_chunks
from pyg_sar.offload.rows import HostRows
from pyg_sar.ops import empty, spmm_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce import BasisSum, RelationSum, Sum
from pyg_sar.reduce.relational import by_block, times
from pyg_sar.rewire import TypedGraph, by_type
from pyg_sar.runs import runs_of

# Up to so many blocks runs take at most an eighth longer than sums of all, for a fraction of the memory, in parts that
# read nearly all rows (`benchmarks/rgcn.py`); with few bases or not.
MOST_BLOCKS = {True: 8, False: 16}


class RGCNConv(MessagePassing, torch_geometric.nn.RGCNConv):
    r"""The relational graph convolutional operator from the `"Modeling Relational Data with Graph Convolutional
    Networks" <https://arxiv.org/abs/1703.06103>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}_{\textrm{root}} \cdot \mathbf{x}_i + \sum_{r \in \mathcal{R}}
        \sum_{j \in \mathcal{N}_r(i)} \frac{1}{|\mathcal{N}_r(i)|} \mathbf{\Theta}_r \cdot \mathbf{x}_j

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.RGCNConv`. On a sharded graph all relations
    stream at once: rows are added up for every pair :math:`(r, i)` that has an edge, for some nodes at a time, where
    PyG runs over the graph once for each relation and keeps :math:`|\mathcal{R}| \cdot |\mathcal{V}|` rows; nothing is
    kept for backward but the features (case 2 of the SAR paper). In modes 2 and 3, on more than 16 workers, under
    autocast, and where input features are cached, sums and means without fewer bases than relations are kept instead,
    and fetch no row twice (case 1), in more memory. On more than 8 workers, under autocast, in a message-flow graph or
    between two sets of nodes, fewer bases than relations have a sum each, with coefficients that are learnt. Without
    input features (``x=None``, or node ids in place of ``x``) each node selects a row of the weights: ``in_channels``
    is then the number of nodes of the whole graph. There, without fewer bases or with ``aggr="max"``, relations stream
    one by one, as each has rows of its own.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, global node ids :math:`(|\mathcal{V}|)` or None,
          or a tuple if bipartite, this worker's rows if sharded; edge indices :math:`(2, |\mathcal{E}|)`; edge types
          :math:`(|\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`
    """

    streamable = SIMPLE
    takes_ids = True
    adds_to_zeros = True  # of the default type, as PyG's

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
        if isinstance(x_src, HostRows):
            return layer_by_chunks(self, graph, (x_src, x_src if x_dst is None else x_dst), edge_type)
        ids = torch.arange(graph.num_src, device=graph.device) if graph.n_id is None else graph.n_id
        x_src = ids if x_src is None else x_src
        if x_dst is None:
            x_dst = x_src if graph.bipartite else graph.dst_rows(x_src)
        if x_src.is_floating_point() != x_dst.is_floating_point():
            raise ValueError(
                f"Expected features of sources and of destinations, or node ids of both (got {x_src.dtype} and "
                f"{x_dst.dtype})"
            )
        out = self.over_relations(graph, edge_type, x_src)
        out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype())) if self.adds_to_zeros else out
        if self.root is not None:
            out = add(out, linear(x_dst, self.root.t()) if x_dst.is_floating_point() else self.root[x_dst])
        return out if self.bias is None else add(out, self.bias)

    def over_relations(self, graph: ShardedGraph, edge_type: Tensor, x: Tensor) -> Tensor:
        """Return the sum of what relations give, by the way that takes least."""
        few_bases = self.num_bases is not None and self.num_bases < self.num_relations and self.aggr in SUMS
        if self.aggr in SUMS and sums_by_runs(graph, x, few_bases):
            return self.by_runs(graph, edge_type, x, few_bases)
        typed = by_type(graph, edge_type, self.num_relations)
        if few_bases:
            return self.compose(graph, self.coefficients(typed, edge_type), x)
        if not x.is_floating_point():
            return self.select(graph, typed, x, self.relation_weights())
        sums, weights, device = reduce_rows(typed.graph, x, self.aggr), self.blocks(), graph.device.type
        if torch.is_autocast_enabled(device) and sums.dtype != torch.float64:
            sums, weights = (t.to(torch.get_autocast_dtype(device)) for t in (sums, weights))
        return Multiply.apply(typed, graph.num_dst, sums, weights)

    def by_runs(self, graph: ShardedGraph, edge_type: Tensor, x: Tensor, few_bases: bool) -> Tensor:
        """Aggregate by bases if that multiplies less, which are a row for each basis and destination of a block, and
        for each source, twice, against a row for each run three times.
        """
        args = graph, edge_type, self.num_relations, self.aggr == "mean", self.out_channels
        if few_bases:
            num_runs = sum(len(its.sizes) for its in runs_of(*args[:3]).values())
            num_rows = sum(graph.num_dst + block.num_src for block in graph.blocks)
            if 2 * len(self.weight) * num_rows < 3 * num_runs:
                return aggregate(graph, BasisSum(*args), x, const=[self.comp, self.weight])
        return aggregate(graph, RelationSum(*args), x, const=[self.blocks()])

    def compose(self, graph: ShardedGraph, weight: Tensor, x: Tensor) -> Tensor:
        """Aggregate rows for each basis, or the rows of each basis that nodes select, weighted by coefficients."""
        learn = weight.requires_grad
        if not x.is_floating_point():
            rows = self.weight.transpose(0, 1).index_select(0, x)
            return aggregate(graph, Sum(learn_weight=learn, adds_heads=True), rows, edge=[weight])
        sums = aggregate(graph, Sum(learn_weight=learn, sums=self.num_bases), x, edge=[weight])
        return linear(sums.flatten(1), self.weight.flatten(0, 1).t())

    def coefficients(self, typed: TypedGraph, edge_type: Tensor) -> Tensor:
        """Return the coefficients of each edge: those of its relation, for each basis."""
        # The gradient of a coefficient is a sum over all edges of its relation: in double precision, basis by basis.
        of_edges = edge_type.int()  # bytes would be a mask
        columns = [Pick.apply(column, of_edges, typed).to(self.comp.dtype) for column in self.comp.double().unbind(1)]
        weight = torch.stack(columns, 1)
        if self.aggr == "mean":
            weight = weight * typed.norm.unsqueeze(-1).to(weight.dtype)
        return weight

    def select(self, graph: ShardedGraph, typed: TypedGraph, ids: Tensor, weights: Tensor) -> Tensor:
        """Aggregate the rows of each relation's weights that nodes select."""
        if self.num_blocks is not None:
            raise ValueError("Block-diagonal decomposition not supported for non-continuous input features.")
        out = weights.new_zeros(graph.num_dst, self.out_channels, dtype=accumulator(weights.dtype))
        for relation, dst, weight in zip(typed.relations, typed.dst.split(typed.counts), weights, strict=True):
            out = out.index_add_(0, dst, reduce_rows(relation, weight[ids], self.aggr).to(out.dtype))
        return out if self.adds_to_zeros else out.to(weights.dtype)

    def blocks(self) -> Tensor:
        """Return the diagonal blocks of every relation's weights, of which dense ones have one."""
        weights = self.relation_weights()
        return weights.unsqueeze(1) if self.num_blocks is None else weights

    def relation_weights(self) -> Tensor:
        """Return the weights of every relation, composed of the bases if there are any."""
        if self.num_bases is None:
            return self.weight
        return (self.comp @ self.weight.flatten(1)).view(self.num_relations, *self.weight.shape[1:])


def sums_by_runs(graph: ShardedGraph, x: Tensor, few_bases: bool) -> bool:
    """Whether sums of types live for some nodes at a time: where nodes have features, of all nodes or not many more
    than there are destinations, unless they are fetched once more for it and nobody asked for that (mode 1), or cut
    into so many blocks that to multiply the runs of each takes longer than to keep the sums of all.

    Autocast, which would multiply in another type, goes the other way. All workers decide alike.
    """
    if not x.is_floating_point() or torch.is_autocast_enabled(graph.device.type):
        return False
    if graph.exchange.alone and len(graph.blocks) == 1:
        return graph.num_src <= 2 * graph.num_dst and (few_bases or not graph.is_cached(x))
    if graph.origin is not None or graph.bipartite or len(graph.blocks) > MOST_BLOCKS[few_bases]:
        return False
    return few_bases or (graph.remat and not graph.is_cached(x))


class Pick(torch.autograd.Function):
    """Numbers of relations for each edge, whose gradients are sums over all edges of a relation: by the kernel of sums.

    An index adds them up one after the other on a GPU, which takes as long as many layers.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, edge_type: Tensor, typed: TypedGraph) -> Tensor:
        """Return ``numbers[edge_type]``."""
        ctx.typed = typed
        return numbers[edge_type]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Sum up the gradients of the edges of each relation."""
        once_differentiable()
        sums = grad.new_zeros(ctx.typed.num_types, 1)
        for ptr, edge in ctx.typed.edges_of_types:
            spmm_(sums, ptr, edge, grad.unsqueeze(1), None, None, False)
        return sums.squeeze(1), None, None


class Multiply(torch.autograd.Function):
    """Multiply the rows of each relation's pairs by the relation's weights, and add them up by destination.

    It is one function since the gradients of all rows are one tensor, of which each relation writes its part.
    """

    @staticmethod
    def forward(ctx: Any, typed: TypedGraph, num_dst: int, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply and add up; ``weights`` are those of the diagonal blocks of every relation."""
        ctx.typed = typed
        ctx.save_for_backward(rows, weights)
        out = zeros(rows, num_dst, weights.size(1) * weights.size(3), dtype=accumulator(rows.dtype))
        pieces = zip(typed.dst.split(typed.counts), rows.split(typed.counts), weights, strict=True)
        for dst, h, weight in pieces:
            add_rows(out, dst, times(h, weight))
        return out.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Write the gradients of each relation's rows and weights into those of all."""
        once_differentiable()
        typed, (rows, weights) = ctx.typed, ctx.saved_tensors
        d_rows, d_weights = (
            empty(t, *t.shape) if need else None
            for t, need in zip((rows, weights), ctx.needs_input_grad[2:], strict=True)
        )
        for r, dst in enumerate(typed.dst.split(typed.counts)):
            pairs, weight = slice(typed.ptr[r], typed.ptr[r + 1]), weights[r]
            g = grad.index_select(0, dst)
            if d_rows is not None:
                times(g, weight.mT, d_rows[pairs])
            if d_weights is None:
                continue
            if len(weight) == 1:
                linear_grad(rows[pairs], g, weight[0].t(), None, d_weights[r, 0].t())
            else:
                torch.bmm(by_block(rows[pairs], weight).mT, by_block(g, weight), out=d_weights[r])
        return None, None, d_rows, d_weights


class FastRGCNConv(RGCNConv, torch_geometric.nn.FastRGCNConv):
    r"""The same as :class:`RGCNConv`; PyG's :class:`~torch_geometric.nn.FastRGCNConv` is a faster form of it that needs
    more memory.
    """

    streamable = SUMS
    adds_to_zeros = False
