r"""LINKX with a sharded table of nodes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.inits import uniform

from pyg_sar.nn.convert import convert
from pyg_sar.nn.models.node_embedding import NodeEmbedding
from pyg_sar.nn.norm.batch_norm import BatchNorm1d


class SparseLinear(NodeEmbedding):
    r"""A linear map of the rows of the adjacency matrix, whose weights are a row for each node.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{b} + \sum_{j \in \mathcal{N}(i)} e_{ji} \cdot \mathbf{W}_j

    The ``state_dict`` is that of PyG's layer of this name, with the local rows of ``weight`` (see
    :class:`NodeEmbedding`).

    Args:
        nodes (torch_geometric.data.Data or torch.Tensor): The loaded data or ``n_id``, as for :class:`NodeEmbedding`.
        out_channels (int): Size of each output sample.
        bias (bool, optional): Whether a bias is learnt. (default: :obj:`True`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """

    def __init__(self, nodes: Any, out_channels: int, bias: bool = True, group: Any = None) -> None:
        super().__init__(nodes, out_channels, group=group)  # which draws the weights
        self.bias = torch.nn.Parameter(torch.empty(out_channels)) if bias else None
        self.sum = convert(torch_geometric.nn.SimpleConv(aggr="sum"), group)
        uniform(self.num_nodes, self.bias)

    def reset_parameters(self) -> None:
        """Draw from PyG's uniform distributions; all workers call it together."""
        bound = math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * self.num_nodes))
        self.draw(lambda rows, generator: rows.uniform_(-bound, bound, generator=generator))
        uniform(self.num_nodes, self._parameters.get("bias"))

    def forward(self, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Add up the weights of in-neighbors."""
        out = self.sum(self.weight, edge_index, edge_weight)
        return out if self.bias is None else out + self.bias


class LINKX(torch_geometric.nn.LINKX):
    r"""The LINKX model from the `"Large Scale Learning on Non-Homophilous Graphs: New Benchmarks and Strong Simple
    Methods" <https://arxiv.org/abs/2110.14446>`_ paper.

    .. math::
        \mathbf{H}_{\mathbf{A}} = \textrm{MLP}_{\mathbf{A}}(\mathbf{A}), \quad
        \mathbf{H}_{\mathbf{X}} = \textrm{MLP}_{\mathbf{X}}(\mathbf{X}), \quad
        \mathbf{Y} = \textrm{MLP}_{f} \left( \sigma \left( \mathbf{W} [\mathbf{H}_{\mathbf{A}}, \mathbf{H}_{\mathbf{X}}]
        + \mathbf{H}_{\mathbf{A}} + \mathbf{H}_{\mathbf{X}} \right) \right)

    Arguments are those of :class:`torch_geometric.nn.LINKX` but for ``nodes`` in place of the number of nodes: each
    worker has the weights of its local nodes, a :class:`SparseLinear`. Normalisations see the rows of all workers.

    Args:
        nodes (torch_geometric.data.Data or torch.Tensor): The loaded data or ``n_id``, as for :class:`NodeEmbedding`.
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        out_channels (int): Size of each output sample.
        num_layers (int): Number of layers of :math:`\textrm{MLP}_{f}`.
        num_edge_layers (int, optional): Number of layers of :math:`\textrm{MLP}_{\mathbf{A}}`. (default: :obj:`1`)
        num_node_layers (int, optional): Number of layers of :math:`\textrm{MLP}_{\mathbf{X}}`. (default: :obj:`1`)
        dropout (float, optional): Dropout probability of each hidden embedding. (default: :obj:`0.0`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """

    def __init__(
        self, nodes: Any, in_channels: int, hidden_channels: int, out_channels: int, num_layers: int,
        num_edge_layers: int = 1, num_node_layers: int = 1, dropout: float = 0.0, group: Any = None,
    ) -> None:  # fmt: skip
        # PyG's constructor makes a table of all nodes; random numbers are drawn as there.
        torch.nn.Module.__init__(self)
        self.in_channels, self.out_channels, self.num_edge_layers = in_channels, out_channels, num_edge_layers
        self.edge_lin = SparseLinear(nodes, hidden_channels, group=group)
        self.num_nodes = self.edge_lin.num_nodes
        deep = num_edge_layers > 1
        self.edge_norm = BatchNorm1d(hidden_channels, group=group) if deep else None
        self.edge_mlp = mlp([hidden_channels] * num_edge_layers, group) if deep else None
        self.node_mlp = mlp([in_channels] + [hidden_channels] * num_node_layers, group)
        self.cat_lin1 = torch.nn.Linear(hidden_channels, hidden_channels)
        self.cat_lin2 = torch.nn.Linear(hidden_channels, hidden_channels)
        self.final_mlp = mlp([hidden_channels] * num_layers + [out_channels], group, dropout)
        self.reset_parameters()


def mlp(channels: list[int], group: Any, dropout: float = 0.0) -> torch.nn.Module:
    """Return an MLP whose normalisations see the rows of all workers."""
    return convert(torch_geometric.nn.MLP(channels, dropout=dropout, act_first=True), group)
