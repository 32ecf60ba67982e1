"""The models of the SAR paper. ``nn`` is ``pyg_sar.nn`` or ``torch_geometric.nn``: they differ in nothing else."""

from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


class GNN(torch.nn.Module):
    """Layers of GraphSAGE, GCN, GAT or R-GCN, with batch normalisation and dropout between them."""

    def __init__(
        self, nn: ModuleType, kind: str, in_channels: int, hidden: int, out_channels: int, heads: int = 4,
        dropout: float = 0.5, attention_dropout: float = 0.0, relations: int = 0, layers: int = 3,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        width = heads * hidden if kind == "gat" else hidden
        widths = [in_channels, *[width] * (layers - 1)]
        if kind != "gat":
            layer = {"sage": nn.SAGEConv, "gcn": nn.GCNConv, "rgcn": nn.RGCNConv}[kind]
            options = [relations] if kind == "rgcn" else []
            convs = [layer(a, b, *options) for a, b in pairwise([*widths, out_channels])]
        else:
            convs = [nn.GATConv(a, hidden, heads, dropout=attention_dropout) for a in widths[:-1]]
            convs.append(nn.GATConv(widths[-1], out_channels, heads, concat=False, dropout=attention_dropout))
        norms = [nn.BatchNorm(width) for _ in widths[1:]]
        self.convs, self.norms = torch.nn.ModuleList(convs), torch.nn.ModuleList(norms)

    def forward(self, x: Tensor, *edges: Tensor | list[Tensor]) -> Tensor:
        """``edges`` are ``edge_index`` and edge types; a list has one for each layer, as that of a message flow has."""
        *inner, last = zip(*(e if isinstance(e, list) else [e] * len(self.convs) for e in edges), strict=True)
        for conv, norm, here in zip(self.convs, self.norms, inner, strict=False):
            x = F.dropout(norm(conv(x, *here)).relu(), self.dropout, self.training)
        return self.convs[-1](x, *last)
