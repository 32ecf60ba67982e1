r"""PyG's simple aggregations of source rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Extremum, Reduce, Rows, Sum
from pyg_sar.stream import Lin, start

SUMS: tuple[str, ...] = ("sum", "add", "mean")
SIMPLE: tuple[str, ...] = (*SUMS, "max", "min")


def reduce_rows(
    graph: ShardedGraph, x: Tensor, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0
) -> Tensor:
    """Aggregate (weighted) source rows by one of PyG's simple aggregations.

    Args:
        graph: This worker's share of the graph.
        x: Own source rows, counted by dimension ``node_dim``.
        aggr: One of ``SIMPLE``.
        weight: Weight of each edge, for sums and means.
        node_dim: The dimension of the nodes.
    """
    return start_rows(graph, x, aggr, weight, node_dim)()


def start_rows(
    graph: ShardedGraph, x: Tensor, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0,
    lin: Lin | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Do as :func:`reduce_rows`, of rows mapped by ``lin`` if given, but return a function that ends it (see
    :func:`~pyg_sar.stream.start`).
    """
    if lin is not None and node_dim % x.dim() != 0:
        x, lin = F.linear(x, *lin), None
    if weight is None and lin is None and graph.is_constant(x):  # what is summed up is kept, and not its rows
        detached = x.detach()  # of which nothing is kept
        kept = graph.recall(x, graph, (aggr, node_dim), lambda: reduce_rows(graph, detached, aggr, None, node_dim))
        return lambda: kept
    if weight is not None:
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    first = node_dim % x.dim() == 0
    reduce: Reduce
    if aggr in ("max", "min"):
        reduce = Extremum(1 if aggr == "max" else -1)
    else:
        learn = weight is not None and weight.requires_grad
        once = len(graph.blocks) == 1 and graph.num_edges > 0
        reduce = Sum(learn_weight=learn, once=once, count=graph.degree if aggr == "mean" else None)
    others = Rows(edge=() if weight is None else (weight,))
    finish = start(graph, reduce, x if first else x.movedim(node_dim, 0), others, lin)
    # A view that moves nothing is no view: changes of it in place would be copied by autograd.
    return finish if first else lambda: finish().movedim(0, node_dim)
