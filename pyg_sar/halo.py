r"""The differentiable exchange of all halo rows at once: of rows from their owners, and of sums to their owners.

Each is the gradient of the other. A worker owns :math:`|\mathcal{V}_{local}|` rows and reads
:math:`|\mathcal{V}_{halo}|` rows of other workers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pyg_sar import running
from pyg_sar.exchange import Exchange, Meter
from pyg_sar.graph import ShardedGraph
from pyg_sar.running import About
from pyg_sar.sources import LocalGrads


def fetch_halo(x: Tensor, graph: ShardedGraph) -> Tensor:
    r"""Return local rows followed by halo rows; the gradients of halo rows are sent to the owners.

    Args:
        x (torch.Tensor): The local rows, :math:`(|\mathcal{V}_{local}|, *)`.
        graph (ShardedGraph): The graph whose edges read the halo rows.

    Returns:
        Rows :math:`(|\mathcal{V}_{local}| + |\mathcal{V}_{halo}|, *)`.
    """
    return _Fetch.apply(x, graph, None)


def sum_halo(rows: Tensor, graph: ShardedGraph) -> Tensor:
    r"""Send halo rows to their owners and return the sums of local rows; the gradients are fetched from the owners.

    Args:
        rows (torch.Tensor): Local rows followed by halo rows,
            :math:`(|\mathcal{V}_{local}| + |\mathcal{V}_{halo}|, *)`.
        graph (ShardedGraph): The graph whose edges read the halo rows.

    Returns:
        Rows :math:`(|\mathcal{V}_{local}|, *)`.
    """
    return _Sum.apply(rows, graph, None)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: ShardedGraph, begun: Any) -> Tensor:
        exchange, meter, about = begin(ctx, x, graph, begun, "fetched one-shot")
        ((_, rows),) = exchange.pull([x.contiguous()], exchange.order(1), meter, about)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad, ctx.graph, ctx.begun), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, graph: ShardedGraph, begun: Any) -> Tensor:
        exchange, meter, about = begin(ctx, rows, graph, begun, "added up at their owners")
        grads = LocalGrads((), [slice(None)])
        sink = exchange.sink(meter, grads, about)
        sink.push(0, rows)
        sink.close()
        total = cast(Tensor, grads.d_x)
        return rows.clone() if total is rows else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Fetch.apply(grad, ctx.graph, ctx.begun), None, None


def begin(ctx: Any, x: Tensor, graph: ShardedGraph, begun: Any, how: str) -> tuple[Exchange, Meter, About | None]:
    """Return the exchange of this pass, its meter, and what peers compare; ``begun`` are the exchange and the record of
    what is being differentiated, or None in the forward pass, which begins them.
    """
    ctx.graph = graph
    ctx.begun = begun or (graph.exchange.begin().one_shot(), graph.exchange.log.open(running.name()))
    exchange, traffic = ctx.begun
    if begun:
        return exchange, traffic.backward, None
    return exchange, traffic.forward, None if exchange.alone else running.about(x.shape, x.dtype, how)
