r"""Graph convolution with symmetric normalisation."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SUMS, reduce_rows
from pyg_sar.block import rows_at
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.loops import with_self_loops
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.nn.conv.products import add, is_matrix, multiply, project, weight_and_bias
from pyg_sar.nn.replay.call import PAIR, check_destinations
from pyg_sar.ops.reference import accumulator


class WeightedSum(MessagePassing):
    """A layer that sums up source rows, weighted by a number of each edge."""

    streamable = SUMS  # a scaling of rows commutes with them
    caches = False  # whatever `cached` says, on a sharded graph

    def stream(self, graph: ShardedGraph, **kwargs: Any) -> Tensor:
        """Aggregate ``x``, weighted by ``edge_weight``."""
        weight = edge_vector(graph, kwargs["edge_weight"])
        return reduce_rows(graph, kwargs["x"], self.aggr, weight, self.node_dim)


class GCNConv(WeightedSum, torch_geometric.nn.GCNConv):
    r"""The graph convolutional operator from the `"Semi-supervised Classification with Graph Convolutional Networks"
    <https://arxiv.org/abs/1609.02907>`_ paper.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2} \mathbf{X}
        \mathbf{\Theta}

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GCNConv`. On a sharded graph degrees are global
    and no edge is ever normalised: rows are scaled by :math:`\mathbf{\hat{D}}^{-1/2}`, and so are their sums, so that
    no normalised weights are stored, and degrees need no messages. ``cached`` has no effect there. No row is
    fetched twice unless edge weights need a gradient. Where destinations are some of the sources, as in a message-flow
    graph, the layer also takes the pair of both, of which it reads the rows of sources.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, this worker's rows if sharded; edge indices
          :math:`(2, |\mathcal{E}|)`; edge weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`
    """

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """Run the forward pass."""
        if isinstance(x, PAIR) and isinstance(edge_index, ShardedEdgeIndex) and not edge_index._graph.bipartite:
            check_destinations(self, "x", x, edge_index)
            x = x[0]
        graph = self.streamed(edge_index, x) if isinstance(x, Tensor) and self.normalize else None
        if graph is None:
            return super().forward(x, edge_index, edge_weight)
        fill = (2.0 if self.improved else 1.0) if self.add_self_loops else None
        graph, edge_weight, scale = normalised(graph, edge_weight, fill, x.dtype)
        scaled = scale.to(sum_type(x, edge_weight))
        times = torch.mul if weight_and_bias(self.lin) is None else multiply  # a hook may have kept the rows
        sums = functools.partial(normalised_sums, self, graph, edge_weight, scale)
        # Sums in the place of rows: of a chunk of a pipeline, so that the weight gets the gradient of old rows, too.
        matrix, few = is_matrix(self.lin), x.size(-1) <= self.out_channels
        if matrix and edge_weight is None and graph.is_cached(x):
            out = project(self.lin, graph.recall(x, graph, self.aggr, lambda: sums(x * scaled)))
        elif matrix and graph.exchange.remembers and few:
            out = project(self.lin, sums(x * scaled))
        else:
            out = sums(times(project(self.lin, x), scaled))
        if self.bias is None:
            return out
        return out + self.bias if times is torch.mul else add(out, self.bias)


def normalised(
    graph: ShardedGraph, edge_weight: Tensor | None, fill: float | None, dtype: torch.dtype
) -> tuple[ShardedGraph, Tensor | None, Tensor]:
    """Return the graph and its weights, with self-loops unless ``fill`` is None, and by what the rows of sources and
    destinations are scaled, :math:`(n_{src}, 1)`, at least in single precision.
    """
    edge_weight = edge_vector(graph, edge_weight)
    if edge_weight is not None and not edge_weight.is_floating_point():
        raise ValueError(
            f"[rank {graph.exchange.routes.rank}] Weights of edges are normalised in their own type, and got "
            f"'edge_weight' of {edge_weight.dtype}. Pass 'edge_weight.to(x.dtype)'."
        )
    if fill is not None:
        graph, edge_weight = add_remaining_self_loops(graph, edge_weight, fill)
    scale = degree(graph, edge_weight, dtype).pow(-0.5)
    return graph, edge_weight, scale.masked_fill(scale == torch.inf, 0).unsqueeze(-1)


def sum_type(x: Tensor, edge_weight: Tensor | None) -> torch.dtype:
    """Return the type of weighted rows."""
    return x.dtype if edge_weight is None else torch.promote_types(x.dtype, edge_weight.dtype)


def normalised_sums(
    layer: Any, graph: ShardedGraph, edge_weight: Tensor | None, scale: Tensor, x: Tensor
) -> Tensor:  # fmt: skip
    """Sum up rows that have been scaled, and scale the sums by that of destinations before they are rounded: those of
    many rows may be too large for half precision.
    """
    scale = graph.dst_rows(scale)
    constant = scale.detach()
    out = reduce_rows(graph, x, layer.aggr, edge_weight, layer.node_dim, constant)
    if scale.requires_grad:  # times one, of which weights get the gradient
        out = out * (scale / constant.masked_fill(constant == 0, 1)).to(out.dtype)
    return out


def edge_vector(graph: ShardedGraph, edge_weight: Tensor | None) -> Tensor | None:
    """Return weights of edges as a vector."""
    if edge_weight is not None and edge_weight.numel() != graph.num_edges:
        raise ValueError(
            f"[rank {graph.exchange.routes.rank}] Expected one weight for each edge (got 'edge_weight' of shape "
            f"{list(edge_weight.shape)} for this worker's {graph.num_edges} edges)."
        )
    return None if edge_weight is None else edge_weight.view(-1)


def degree(graph: ShardedGraph, edge_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weighted in-degree of every local source, in the type in which rows or weights are summed."""
    if edge_weight is None:
        return graph.source_degree.to(accumulator(dtype))
    if graph.origin is not None:
        raise ValueError(
            "A layer of a message-flow graph does not have all edges that the weighted degrees of its sources are "
            "made of. Normalise the weights of the whole graph once ('pyg-sar partition --gcn-norm') and construct the "
            "layer with 'normalize=False'."
        )
    total = edge_weight.new_zeros(graph.num_dst, dtype=accumulator(edge_weight.dtype))
    for block in graph.blocks:
        total.index_add_(0, block.narrow_row, rows_at(edge_weight, block.edges).to(total.dtype))
    return total


def add_remaining_self_loops(
    graph: ShardedGraph, edge_weight: Tensor | None, fill: float
) -> tuple[ShardedGraph, Tensor | None]:
    """Give every node one self-loop; those that exist keep their weight.

    As in PyG, ``fill`` counts only where there are edge weights. Of several loops the last one counts, as in PyG on a
    CPU; a GPU writes in any order.
    """
    looped, loops = with_self_loops(graph)
    if edge_weight is None:
        return looped, None
    old, row = loops.replaced
    weight = edge_weight.new_full((graph.num_dst,), fill)
    weight = weight.index_put((row,), LastOf.apply(edge_weight.index_select(0, old), row, graph.num_dst))
    return looped, loops.join(edge_weight, weight)


class LastOf(torch.autograd.Function):
    """The last one of the numbers of a row, for each of them; the gradient of each is its own, as in PyG."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, row: Tensor, num_rows: int) -> Tensor:
        """Return ``numbers[last]``."""
        place = torch.arange(row.numel(), device=row.device)
        last = place.new_zeros(num_rows).scatter_reduce_(0, row, place, "amax")
        return numbers[last[row]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient."""
        return grad, None, None
