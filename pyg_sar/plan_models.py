r"""The models that ``pyg-sar plan`` tells of, given its options."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import DeepGCNLayer

from pyg_sar import nn


class Stack(torch.nn.Module):
    """Layers with batch normalisation and ReLU between them."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        heads = args.heads if args.model == "gat" else 1
        widths = [args.features, *[heads * args.hidden] * (args.layers - 1)]
        self.convs = torch.nn.ModuleList(layer(args, a, b) for a, b in pairwise(widths))
        self.norms = torch.nn.ModuleList(nn.BatchNorm(b) for b in widths[1:])
        self.last = layer(args, widths[-1], args.classes, last=True)

    def forward(self, x: Tensor, *edges: Tensor) -> Tensor:
        """Return scores of classes."""
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, *edges)).relu()
        return self.last(x, *edges)


def layer(args: Namespace, before: int, after: int, last: bool = False) -> torch.nn.Module:
    """Return a layer; the heads of the last one are averaged."""
    if args.model == "gat":
        return nn.GATConv(before, after if last else after // args.heads, args.heads, concat=not last)
    if args.model == "rgcn":
        return nn.RGCNConv(before, after, args.relations)
    return {"sage": nn.SAGEConv, "gcn": nn.GCNConv}[args.model](before, after)


def blocks(args: Namespace) -> Any:
    """Return a deep model as blocks: a linear layer, layers with a normalisation of rows, and a linear layer."""
    hidden = args.hidden * (args.heads if args.model == "gat" else 1)
    layers = [deep_layer(args, hidden) for _ in range(args.layers)]
    model = torch.nn.ModuleList([torch.nn.Linear(args.features, hidden), *layers, Last(hidden, args.classes)])
    return nn.convert(model)


def deep_layer(args: Namespace, hidden: int) -> torch.nn.Module:
    """Return a layer of a deep model."""
    if args.model == "gcn2":
        return WithFirstRows(hidden)
    if args.model == "resgcn":
        conv: torch.nn.Module = nn.GENConv(hidden, hidden, aggr="softmax", learn_t=True, norm="layer")
    else:
        conv = layer(args, hidden, hidden)
    return DeepGCNLayer(conv, torch.nn.LayerNorm(hidden), torch.nn.ReLU(), dropout=0.5)


class WithFirstRows(torch.nn.Module):
    """A layer of GCNII, with the first rows beside."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv = nn.GCN2Conv(hidden, 0.1)

    def forward(self, x: Any, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows, and the first ones."""
        h, first = x if isinstance(x, tuple) else (x, x)
        return self.conv(h, first, edge_index).relu(), first


class Last(torch.nn.Linear):
    """A linear layer of rows that may have the first ones beside."""

    def forward(self, x: Any) -> Tensor:
        """Return scores of classes."""
        return super().forward(x[0] if isinstance(x, tuple) else x)
