"""The models of the SAR paper. ``nn`` is ``pyg_sar.nn`` or ``torch_geometric.nn``: they differ in nothing else."""

from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


class GNN(torch.nn.Module):
    """Three layers of GraphSAGE, GAT or R-GCN, with batch normalisation and dropout between them."""

    def __init__(
        self, nn: ModuleType, kind: str, in_channels: int, hidden: int, out_channels: int, heads: int = 4,
        dropout: float = 0.5, attention_dropout: float = 0.0, relations: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = dropout
        if kind in ("sage", "rgcn"):
            layer, options = (nn.SAGEConv, []) if kind == "sage" else (nn.RGCNConv, [relations])
            convs = [layer(a, b, *options) for a, b in pairwise([in_channels, hidden, hidden, out_channels])]
            norms = [nn.BatchNorm(hidden) for _ in range(2)]
        else:
            widths = [in_channels, heads * hidden, heads * hidden]
            convs = [nn.GATConv(a, hidden, heads, dropout=attention_dropout) for a in widths[:2]]
            convs.append(nn.GATConv(widths[2], out_channels, heads, concat=False, dropout=attention_dropout))
            norms = [nn.BatchNorm(heads * hidden) for _ in range(2)]
        self.convs, self.norms = torch.nn.ModuleList(convs), torch.nn.ModuleList(norms)

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.dropout(norm(conv(x, *edges)).relu(), self.dropout, self.training)
        return self.convs[-1](x, *edges)
