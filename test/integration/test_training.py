"""Whole trainings: the same curve on any number of workers, in any mode, and in PyG on the whole graph."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from support.cases import some
from support.nasty_graph import MODES, NUM_NODES, assignment, close, edges, share

import pyg_sar
import pyg_sar.nn

STEPS, CLASSES = 3, 3
TOLERANCE = 1e-9


class Model(torch.nn.Module):
    """Three layers with batch normalisation between them.

    No bias before a normalisation: its gradient is nothing but rounding errors, which Adam makes steps of.
    """

    def __init__(self, nn, kind, dropout=0.0):
        super().__init__()
        if kind == "sage":
            convs = [nn.SAGEConv(8, 8, bias=False), nn.SAGEConv(8, 8, bias=False), nn.SAGEConv(8, CLASSES)]
        else:
            convs = [nn.GATConv(8, 4, 2, dropout=dropout, bias=False) for _ in range(2)]
            convs.append(nn.GATConv(8, CLASSES, 2, concat=False, dropout=dropout))
        self.convs = torch.nn.ModuleList(convs)
        self.norms = torch.nn.ModuleList([nn.BatchNorm(8), nn.BatchNorm(8)])

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


def problem():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_NODES, 8, generator=g, dtype=torch.float64)
    y = torch.randint(CLASSES, (NUM_NODES,), generator=g)
    return x, y, torch.rand(NUM_NODES, generator=g) < 0.5


def train(model, x, edge_index, y, mask, group=None):
    """Three steps of Adam, then accuracies on labelled and other nodes."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(x, edge_index)
        loss = pyg_sar.global_mean(F.cross_entropy(out[mask], y[mask], reduction="none"), group)
        loss.backward()
        pyg_sar.sum_gradients(model, group)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        pred = model(x, edge_index).argmax(-1)
    return losses, [pyg_sar.accuracy(pred, y, m, group) for m in (mask, ~mask, None)], model.state_dict()


def train_on_workers(group, kind, mode, method, dropout):
    mine = share(group, edges(), assignment(method, group.size()), mode=mode)
    model = Model(pyg_sar.nn, kind, dropout).double()
    for norm in model.norms:
        norm.module.group = group
    pyg_sar.broadcast_parameters(model, group)
    x, y, mask = (t[mine.src] for t in problem())
    return train(model, x, mine.edge_index, y, mask, group)


@functools.cache
def train_whole(kind):
    """The same code with PyG's layers on the whole graph."""
    torch.manual_seed(0)
    x, y, mask = problem()
    return train(Model(torch_geometric.nn, kind).double(), x, edges(), y, mask)


def equal(found, expected):
    losses, accuracies, state = found
    assert losses == pytest.approx(expected[0], rel=TOLERANCE, abs=TOLERANCE)
    assert accuracies == pytest.approx(expected[1], rel=TOLERANCE)
    assert state.keys() == expected[2].keys()
    for name, value in expected[2].items():
        close(state[name], value, name, TOLERANCE)


@pytest.mark.parametrize(("kind", "workers", "mode"), some(["sage", "gat"], [1, 2, 3, 4], MODES, every=2))
def test_equals_pyg_on_the_whole_graph(pool, kind, workers, mode):
    expected = train_whole(kind)
    assert expected[0][-1] < expected[0][0]
    for found in pool.run(workers, train_on_workers, kind, mode, "empty" if workers == 3 else "random", 0.0):
        equal(found, expected)


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(1, train_on_workers, "gat", 1, "random", 0.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_attention_dropout_does_not_depend_on_the_number_of_workers(pool, alone, workers, mode):
    (expected,) = alone
    assert expected[0] != pytest.approx(train_whole("gat")[0])
    for found in pool.run(workers, train_on_workers, "gat", mode, "random", 0.5):
        equal(found, expected)
