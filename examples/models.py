"""The models of the SAR paper, and deep ones. ``nn`` is ``pyg_sar.nn`` or ``torch_geometric.nn``, with equal names."""

from itertools import pairwise
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import DeepGCNLayer


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


class First(torch.nn.Module):
    """Features become rows of the hidden width, twice for GCNII, whose layers all read the first ones."""

    def __init__(self, in_channels: int, hidden: int, dropout: float, twice: bool) -> None:
        super().__init__()
        self.lin, self.dropout, self.twice = torch.nn.Linear(in_channels, hidden), dropout, twice

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.lin(F.dropout(x, self.dropout, self.training)).relu()
        return (x, x) if self.twice else x


class Layer(torch.nn.Module):
    """A layer of GCN or GraphSAGE, a normalisation of each row, and a residual; or a layer of GCNII."""

    def __init__(self, nn: ModuleType, kind: str, hidden: int, number: int, dropout: float) -> None:
        super().__init__()
        self.dropout, self.initial = dropout, kind == "gcn2"
        if self.initial:
            self.conv = nn.GCN2Conv(hidden, 0.1, 0.5, number)
        else:
            self.conv = {"gcn": nn.GCNConv, "sage": nn.SAGEConv}[kind](hidden, hidden)
            self.norm = torch.nn.LayerNorm(hidden)

    def forward(self, x: Tensor | tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self.initial:
            x, first = x
            return self.conv(F.dropout(x, self.dropout, self.training), first, edge_index).relu(), first
        return x + F.dropout(self.norm(self.conv(x, edge_index)).relu(), self.dropout, self.training)


class Last(torch.nn.Module):
    """Scores of classes."""

    def __init__(self, hidden: int, out_channels: int, dropout: float, normalised: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(hidden) if normalised else None
        self.lin, self.dropout = torch.nn.Linear(hidden, out_channels), dropout

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        x = x[0] if isinstance(x, tuple) else x
        x = x if self.norm is None else self.norm(x).relu()
        return self.lin(F.dropout(x, self.dropout, self.training))


class DeepGNN(torch.nn.Module):
    """GCN, GraphSAGE, GCNII or ResGCN+ of many layers, as blocks of which each is called with the rows of the last."""

    def __init__(
        self, nn: ModuleType, kind: str, in_channels: int, hidden: int, out_channels: int, layers: int = 16,
        dropout: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        if kind == "resgcn":
            middle = [residual(nn, hidden, dropout) for _ in range(layers)]
        else:
            middle = [Layer(nn, kind, hidden, k + 1, dropout) for k in range(layers)]
        first = First(in_channels, hidden, dropout, kind == "gcn2")
        self.blocks = torch.nn.ModuleList([first, *middle, Last(hidden, out_channels, dropout, kind == "resgcn")])

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = block(x, edge_index)
        return self.blocks[-1](x)


def residual(nn: ModuleType, hidden: int, dropout: float) -> torch.nn.Module:
    """A layer of ResGCN+: normalisation and activation come before the convolution."""
    conv = nn.GENConv(hidden, hidden, aggr="softmax", learn_t=True, norm="layer")
    return DeepGCNLayer(conv, torch.nn.LayerNorm(hidden), torch.nn.ReLU(), block="res+", dropout=dropout)
