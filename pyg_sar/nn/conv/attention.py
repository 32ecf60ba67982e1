r"""What the attention layers share: packed source rows through an online softmax, and self-loops with features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_sar.aggregate import aggregate
from pyg_sar.block import rows_at
from pyg_sar.graph import ShardedGraph
from pyg_sar.loops import with_self_loops
from pyg_sar.nn.conv.products import add
from pyg_sar.nn.shifted import shifted
from pyg_sar.ops.dropout import nothing_drops
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce import ProjectedSoftmax, Softmax, divisor, head_groups
from pyg_sar.sources import ProjectedRows


def attend(
    layer: Any, graph: ShardedGraph, kind: int, parameter: float, x: Tensor | ProjectedRows, query: Tensor | None,
    edge: tuple[Tensor, Tensor] | None = None, att: Tensor | None = None, project: tuple[Tensor, ...] = (),
    res: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""Return the output of an attention layer.

    Args:
        layer: PyG's layer: its heads, channels, dropout, ``concat`` and aggregation (a sum or a mean).
        graph: The graph.
        kind: The kind of score, see :class:`~pyg_sar.reduce.Softmax`.
        parameter: Its parameter.
        x: Packed source rows, or features with ``project``.
        query: Rows of destinations.
        edge: Features of edges and the matrix that maps them.
        att: The vector of GATv2.
        project: The maps of features to values and keys, see :class:`~pyg_sar.reduce.ProjectedSoftmax`.
        res: What is added to the output.
        bias: The bias.
    """
    drop = None
    if not 0 <= layer.dropout <= 1:
        raise ValueError(f"Expected a dropout probability between 0 and 1 (got {layer.dropout})")
    if layer.training and layer.dropout > 0 and not nothing_drops():
        drop = (layer.dropout, graph.seeds.draw(), graph.ids_of)
    if project:
        # Sums over groups of heads would round in half precision.
        assert isinstance(x, Tensor)
        half = x.dtype != accumulator(x.dtype)
        groups = [slice(0, layer.heads)] if half else head_groups(layer.heads, layer.out_channels)
        reduce: Softmax = ProjectedSoftmax(
            layer.heads, layer.out_channels, parameter, graph.degree, drop, groups, len(graph.blocks) == 1
        )
    else:
        groups = groups_of_heads(layer, graph)
        reduce = Softmax(layer.heads, layer.out_channels, kind, parameter, graph.degree, drop, groups)
    att = None if att is None else att.view(-1)
    const = [t for t in (att, None if edge is None else edge[1], *project) if t is not None]
    dst, features = [] if query is None else [query], [] if edge is None else edge[:1]
    out = aggregate(graph, reduce, x, dst, features, const)
    own = not reduce.saves_output  # nothing that may still be changed in place must be what backward reads
    if layer.aggr == "mean":
        out, own = (out / divisor(graph.degree, out)).to(out.dtype), True
    if not layer.concat:
        out, own = out.view(-1, layer.heads, layer.out_channels).mean(1), True
    if res is not None:
        out, own = add(out, res) if own else out + res, True
    if bias is not None:
        out, own = add(out, bias) if own else shifted(out, bias), True
    return out if own else out.clone()


def groups_of_heads(layer: Any, graph: ShardedGraph) -> list[slice]:
    """Return the groups of heads that are communicated one after the other; a single block is not cut."""
    return head_groups(layer.heads, layer.out_channels) if len(graph.blocks) > 1 else [slice(0, layer.heads)]


def pack(values: Tensor, keys: Tensor, heads: int, groups: list[slice], dim: int) -> Tensor:
    """Join values and keys, or maps to them, in dimension ``dim``, such that groups of heads follow each other."""
    parts = []
    for g in groups:
        for t in (values, keys):
            width = t.size(dim) // heads
            parts.append(t.narrow(dim, g.start * width, (g.stop - g.start) * width))
    return torch.cat(parts, dim)


def replace_self_loops(graph: ShardedGraph, edge_attr: Tensor | None, fill: Any) -> tuple[ShardedGraph, Tensor | None]:
    """Give every node exactly one self-loop, whose features are ``fill`` or reduced from the other edges, as in PyG."""
    looped, loops = with_self_loops(graph)
    if edge_attr is None:
        return looped, None
    n, shape = graph.num_dst, edge_attr.shape[1:]
    if isinstance(fill, str):
        own = scatter(rows_at(edge_attr, loops.kept), rows_at(graph.row, loops.kept), 0, n, fill)
    elif isinstance(fill, Tensor):
        fill = fill.to(edge_attr)
        own = (fill if fill.dim() == edge_attr.dim() else fill.unsqueeze(0)).expand(n, *shape)
    else:
        own = edge_attr.new_full((n, *shape), 1.0 if fill is None else fill)
    return looped, loops.join(edge_attr, own)
