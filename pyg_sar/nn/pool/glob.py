r"""Readouts: one row for the whole graph, or for each graph of a batch, from the rows of all workers."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.autograd import zeros_of
from pyg_sar.distributed.collectives import all_reduce, global_max
from pyg_sar.nn.norm.statistics import PerGraph, sum_by
from pyg_sar.nn.together import together


@torch.compiler.disable  # it waits for others
def global_add_pool(x: Tensor, batch: Tensor | None, size: int | None = None, group: Any = None) -> Tensor:
    r"""Sum the rows of each graph of a batch over all workers, as :func:`torch_geometric.nn.global_add_pool` in one.

    .. math::
        \mathbf{r}_i = \sum_{n=1}^{N_i} \mathbf{x}_n

    Every worker gets all results. A loss of them must be each worker's share, as of :func:`pyg_sar.global_mean`: the
    gradient is a sum over the workers.

    Args:
        x (torch.Tensor): This worker's rows, :math:`(n, F)` or :math:`(n)`.
        batch (torch.Tensor, optional): The graph of each row, numbered alike on all workers.
        size (int, optional): The number of graphs. (default: :obj:`None`, one more than the largest on any worker)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        A row for each graph of the batch, :math:`(B, F)`, the same on all workers.
    """
    if not together(group):
        return torch_geometric.nn.global_add_pool(x, batch, size)
    return PerGraph(x, batch, size, group).sum(x).to(x.dtype)


@torch.compiler.disable  # it waits for others
def global_mean_pool(x: Tensor, batch: Tensor | None, size: int | None = None, group: Any = None) -> Tensor:
    r"""Average the rows of each graph of a batch over all workers, see :func:`global_add_pool`.

    .. math::
        \mathbf{r}_i = \frac{1}{N_i} \sum_{n=1}^{N_i} \mathbf{x}_n

    Args:
        x (torch.Tensor): This worker's rows, :math:`(n, F)` or :math:`(n)`.
        batch (torch.Tensor, optional): The graph of each row, numbered alike on all workers.
        size (int, optional): The number of graphs. (default: :obj:`None`, one more than the largest on any worker)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        A row for each graph of the batch, :math:`(B, F)`, the same on all workers.
    """
    if not together(group):
        return torch_geometric.nn.global_mean_pool(x, batch, size)
    out = PerGraph(x, batch, size, group).mean(x)
    return out.to(x.dtype) if x.is_floating_point() else out


@torch.compiler.disable  # it waits for others
def global_max_pool(x: Tensor, batch: Tensor | None, size: int | None = None, group: Any = None) -> Tensor:
    r"""Take the largest entry of the rows of each graph of a batch over all workers, 0 where there is none, see
    :func:`global_add_pool`. Equal entries share the gradient evenly, wherever they live (as in PyG, which without
    ``batch`` gives all of it to one of them).

    .. math::
        \mathbf{r}_i = \mathrm{max}_{n=1}^{N_i} \, \mathbf{x}_n

    Args:
        x (torch.Tensor): This worker's rows, :math:`(n, F)` or :math:`(n)`.
        batch (torch.Tensor, optional): The graph of each row, numbered alike on all workers.
        size (int, optional): The number of graphs. (default: :obj:`None`, one more than the largest on any worker)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        A row for each graph of the batch, :math:`(B, F)`, the same on all workers.
    """
    if not together(group):
        return torch_geometric.nn.global_max_pool(x, batch, size)
    per_graph = PerGraph(x, batch, size, group)
    index = per_graph.batch.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    best = x.new_full((per_graph.size, *x.shape[1:]), lowest).scatter_reduce(0, index, x.detach(), "amax")
    best = global_max(best, group)
    hit = (x == per_graph.of_rows(best)).to(per_graph.count.dtype)
    ties = all_reduce(sum_by(per_graph.batch, hit, per_graph.size), group)
    shared = ties if batch is None else ties + (best == 0)  # by the zero that PyG begins with, too
    share = per_graph.sum(hit / per_graph.of_rows(shared.clamp(min=1)) * zeros_of(x)).to(x.dtype)
    return best.masked_fill((best == lowest) & (ties == 0), 0) + share
