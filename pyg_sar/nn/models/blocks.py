r"""The blocks of a model of PyG, for :class:`pyg_sar.Pipeline`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.models.basic_gnn import BasicGNN


class Block(torch.nn.Module):
    """A convolution of a model, and what comes between it and the next one.

    Args:
        model: The model.
        k: The number of the convolution.
    """

    def __init__(self, model: BasicGNN, k: int) -> None:
        super().__init__()
        self.conv, self.last = model.convs[k], k == len(model.convs) - 1
        self.norm = None if self.last or model.norms is None else model.norms[k]
        self.act, self.act_first, self.dropout = model.act, model.act_first, model.dropout.p

    def forward(self, x: Tensor, edge_index: Any, *edges: Tensor) -> Tensor:
        """Run the layer; tensors of edges are what the convolution takes after ``edge_index``."""
        x = self.conv(x, edge_index, *edges)
        if self.last:
            return x
        x = self.act(x) if self.act is not None and self.act_first else x
        x = self.norm(x) if self.norm is not None else x
        x = self.act(x) if self.act is not None and not self.act_first else x
        return F.dropout(x, self.dropout, self.training)


def blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    r"""Return the layers of a model of PyG as blocks for :class:`pyg_sar.Pipeline`, with the model's own parameters.

    Args:
        model (torch.nn.Module): One of :class:`torch_geometric.nn.GCN`, :class:`~torch_geometric.nn.GraphSAGE`,
            :class:`~torch_geometric.nn.GAT`, :class:`~torch_geometric.nn.GIN` and others of their kind, without ``jk``,
            perhaps after :func:`convert`.

    Returns:
        torch.nn.ModuleList: A block for each convolution.

    Raises:
        TypeError: If it is another model.
        ValueError: If it has ``jk``, which reads the rows of all layers.
    """
    if not isinstance(model, BasicGNN):
        raise TypeError(
            f"Expected a model such as 'torch_geometric.nn.GCN' (got {type(model).__name__}). A pipeline takes any "
            f"list of modules 'x -> x': give it that of your model."
        )
    if model.jk_mode is not None:
        raise ValueError(f"Expected a model without 'jk', which reads the rows of all layers (got {model.jk_mode!r})")
    return torch.nn.ModuleList(Block(model, k) for k in range(len(model.convs)))
