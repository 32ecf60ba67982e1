"""Small pipelines of layers, and what they are compared with."""

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch_geometric.data import Data

import pyg_sar

NODES, WIDTH, CLASSES, BLOCKS = 40, 6, 6, 4


def inputs():
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(NODES, (2, 160), generator=generator)
    edge_index = torch.cat([edge_index, torch.tensor([[3, 3, 7, 7], [3, 3, 9, 9]])], 1)  # loops, parallel edges
    x = torch.randn(NODES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (NODES,), generator=generator)
    mask = torch.rand(NODES, generator=generator) < 0.6
    edge_weight = torch.rand(edge_index.size(1), generator=generator, dtype=torch.float64)
    return Data(x=x, y=y, edge_index=edge_index, edge_weight=edge_weight, train_mask=mask)


class Block(torch.nn.Module):
    """A layer or two, a normalisation of rows or over all rows, and a residual."""

    def __init__(self, nn, kind, k, norm="layer"):
        super().__init__()
        out = CLASSES if k == BLOCKS - 1 else WIDTH
        self.conv = {
            "gcn": lambda: nn.GCNConv(WIDTH, out),
            "sage": lambda: nn.SAGEConv(WIDTH, out),
            "gat": lambda: nn.GATConv(WIDTH, out, 2, concat=False),
            "gcn2": lambda: nn.GCN2Conv(WIDTH, 0.2, 0.5, k + 1, shared_weights=k % 2 == 0),
            "gen": lambda: torch_geometric.nn.GENConv(WIDTH, out, num_layers=1, learn_t=True, aggr="softmax"),
            "two": lambda: nn.SAGEConv(WIDTH, out),
            "weighted": lambda: torch_geometric.nn.GraphConv(WIDTH, out),
        }[kind]()
        self.other = nn.SAGEConv(WIDTH, out, aggr="max") if kind == "two" else None
        if kind in ("gen", "weighted") and nn is pyg_sar.nn:
            pyg_sar.nn.convert(self)
        self.norm = torch.nn.LayerNorm(out) if norm == "layer" else nn.BatchNorm(out)
        self.last, self.initial = k == BLOCKS - 1, kind == "gcn2"

    def forward(self, x, edge_index, *edges):
        if self.initial:
            return self.finish(x, self.conv(*x, edge_index))
        out = self.conv(x, edge_index, *edges)
        return self.finish(x, out if self.other is None else out + self.other(x, edge_index))

    def finish(self, x, out):
        """With a residual, or the first rows beside."""
        if self.initial:
            return out if self.last else (self.norm(out).relu(), x[1])
        return out if self.last else self.norm(out).relu() + x


def start(x, kind):
    return (x, x.tanh()) if kind == "gcn2" else x


def edges_of(data, kind):
    return [data.edge_weight] if kind == "weighted" else []


def blocks_of(nn, kind, norm="layer"):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Block(nn, kind, k, norm) for k in range(BLOCKS)).double()


def loss_of(out, y, mask, total):
    return F.cross_entropy(out[mask], y[mask], reduction="sum") / total


def close(found, expected, tol=1e-10):
    torch.testing.assert_close(found, expected, atol=tol, rtol=tol)


def alone(edge_index, chunks, shuffle=False, blocks=None, **settings):
    return pyg_sar.Pipeline(
        blocks or blocks_of(pyg_sar.nn, "sage"),
        pyg_sar.shard(edge_index, NODES),
        None,
        chunks,
        shuffle=shuffle,
        **settings,
    )


def steps(pipe, data, count=4):
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
    losses, total = [], int(data.train_mask.sum())
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(pipe.step(data.x, lambda out, r: loss_of(out, data.y[r], data.train_mask[r], total)).item())
        optimizer.step()
    return losses
