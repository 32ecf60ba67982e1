r"""What the attention layers share: packed source rows through an online softmax, and self-loops with features."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.dense.linear import is_uninitialized_parameter
from torch_geometric.utils import scatter

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.message_passing import divide_by_degree
from pyg_sar.reduce import Softmax
from pyg_sar.stream import aggregate


def attend(
    layer: Any, graph: ShardedGraph, kind: int, parameter: float, x: Tensor, query: Tensor | None,
    edge: tuple[Tensor, Tensor] | None = None, att: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Return the heads of an attention layer, :math:`(|\mathcal{V}|, H, C)`.

    Args:
        layer: PyG's layer: its heads, channels, dropout and aggregation (a sum or a mean).
        graph: The graph.
        kind: The kind of score, see :class:`~pyg_sar.reduce.Softmax`.
        parameter: Its parameter.
        x: Packed source rows.
        query: Rows of destinations.
        edge: Features of edges and the matrix that maps them.
        att: The vector of GATv2.
    """
    drop = None
    if layer.training and layer.dropout > 0:
        drop = (layer.dropout, graph.seeds.draw(), graph.ids_of)
    out = aggregate(
        graph,
        Softmax(layer.heads, layer.out_channels, kind, parameter, drop),
        x,
        dst=[] if query is None else [query],
        edge=[] if edge is None else edge[:1],
        const=[t for t in (att, None if edge is None else edge[1]) if t is not None],
    )
    return divide_by_degree(graph, out) if layer.aggr == "mean" else out


def finish(layer: Any, heads: Tensor, res: Tensor | None, bias: Tensor | None) -> Tensor:
    """Concatenate or average heads, add residual and bias."""
    out = heads.flatten(1) if layer.concat else heads.mean(1)
    out = out if res is None else out + res
    if bias is not None:
        return out + bias
    # Nothing that the caller may change in place must be what backward reads.
    return out.clone() if layer.concat and res is None else out


def affine(lin: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of a linear layer that does nothing else, so that several can become one product."""
    hooks = (lin._forward_hooks, lin._forward_pre_hooks, lin._backward_hooks, lin._backward_pre_hooks)
    if type(lin) is not torch_geometric.nn.Linear or any(hooks) or is_uninitialized_parameter(lin.weight):
        return None
    return lin.weight, lin.bias


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
