r"""The Chebyshev spectral graph convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.utils import get_laplacian

from pyg_sar.distributed.collectives import all_reduce, global_max, global_sum
from pyg_sar.distributed.group import size_of
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.operations import shares


class ChebConv(MessagePassing, torch_geometric.nn.ChebConv):
    r"""The chebyshev spectral graph convolutional operator from the `"Convolutional Neural Networks on Graphs with Fast
    Localized Spectral Filtering" <https://arxiv.org/abs/1606.09375>`_ paper.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.ChebConv`. Without ``lambda_max`` it is made of
    the largest weight of the Laplacian on any worker.

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None

    def __norm__(
        self, edge_index: Any, num_nodes: int | None, edge_weight: Tensor | None, normalization: str | None,
        lambda_max: Any = None, dtype: Any = None, batch: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the edges of the scaled Laplacian and their weights."""
        if lambda_max is None and size_of(self.group) > 1 and next(shares(edge_index), None) is not None:
            _, weights = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
            lambda_max = 2.0 * largest(weights, self.group)
        return super().__norm__(edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)


def largest(values: Tensor, group: Any) -> Tensor:
    """Return the largest value on any worker; like torch, equal ones share its gradient."""
    lowest = values.new_full((1,), -torch.inf)
    top = global_max(torch.cat([values.detach(), lowest]).max(), group)
    hits = values == top
    count = all_reduce(hits.sum(), group)
    # The first term has the value, the second one the gradient.
    return top + global_sum((torch.where(hits, values - top, 0) / count).sum(), group)
