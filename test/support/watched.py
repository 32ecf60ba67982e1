"""Graphs in two parts, and scripts that two workers run on them under the watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.distributed.simulated import Workers
from pyg_sar.watch import current
from pyg_sar.watch.mode import Watch, watching

N, C = 40, 3
RELATION, BACK = ("u", "to", "v"), ("v", "back", "u")
LINEAR = torch.nn.Linear(8, 8)


def graph() -> Data:
    g = torch.Generator().manual_seed(0)
    data = Data(x=torch.randn(N, 8, generator=g), edge_index=torch.randint(N, (2, 200), generator=g))
    data.y = torch.randint(C, (N,), generator=g)
    data.batch, data.train_mask = torch.arange(N) // 20, torch.rand(N, generator=g) < 0.5
    data.edge_attr, data.edge_type = torch.rand(200, 4, generator=g), torch.randint(2, (200,), generator=g)
    data.edge_label_index = torch.randint(N, (2, 30), generator=g)
    data.label, data.train_idx = torch.tensor([0.0, 1.0]), torch.arange(0, N, 3)  # of the two graphs, and of nodes
    return data


def two_types() -> HeteroData:
    g, data = torch.Generator().manual_seed(0), HeteroData()
    data["u"].x, data["v"].x = torch.randn(20, 8, generator=g), torch.randn(30, 8, generator=g)
    edge_index = torch.stack([torch.randint(20, (80,), generator=g), torch.randint(30, (80,), generator=g)])
    data[RELATION].edge_index, data[BACK].edge_index = edge_index, edge_index.flip(0)
    return data


def outcomes(path: str, work: Callable[[Any], Any]) -> list:
    """Return what becomes of two workers that run ``work(data)`` under the watch."""

    def worker(rank: int) -> Any:
        with watching():
            assert isinstance(current(), Watch)
            return work(pyg_sar.load(path))

    return Workers(2).run(worker)


def passes(path: str, work: Callable[[Any], Any]) -> list:
    results = outcomes(path, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Net(torch.nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second, self.between = pyg_sar.nn.GCNConv(8, 4), pyg_sar.nn.SAGEConv(4, C), between

    def forward(self, data: Any) -> Tensor:
        return self.second(self.between(self.first(data.x, data.edge_index)), data.edge_index)


def net(data: Any, between: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    torch.manual_seed(0)
    return Net(between)(data)


def losses(data: Any) -> Tensor:
    return F.cross_entropy(net(data)[data.train_mask], data.y[data.train_mask], reduction="none")


def warned(work: Callable[[], Any]) -> str:
    with pytest.warns(UserWarning) as caught:
        work()
    return str(caught[0].message)


def step(model: torch.nn.Module, optimizer: Any, data: Any, out: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss = pyg_sar.global_mean(F.cross_entropy(out()[data.train_mask], data.y[data.train_mask], reduction="none"))
    loss.backward()
    pyg_sar.sum_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
