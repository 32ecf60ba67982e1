"""What sees a worker's rows alone is refused by name in the first step; what does not, is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.distributed.group import Workers
from pyg_sar.watch import watching

N, C = 40, 3


def graph() -> Data:
    g = torch.Generator().manual_seed(0)
    edge_index = torch.randint(N, (2, 200), generator=g)
    return Data(
        x=torch.randn(N, 8, generator=g),
        edge_index=edge_index,
        y=torch.randint(C, (N,), generator=g),
        edge_attr=torch.rand(200, 4, generator=g),
        batch=torch.arange(N) // 20,
        train_mask=torch.rand(N, generator=g) < 0.5,
        num_nodes=N,
    )


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("watch") / "parts")
    pyg_sar.partition(graph(), 2, path)
    return path


def outcomes(parts: str, work: Callable[[Any], Any], watch: bool = True) -> list:
    """Return what becomes of two workers that run ``work(data)``."""

    def worker(rank: int) -> Any:
        if not watch:
            return work(pyg_sar.load(parts))
        with watching():
            return work(pyg_sar.load(parts))

    return Workers(2).run(worker)


def passes(parts: str, work: Callable[[Any], Any], watch: bool = True) -> list:
    results = outcomes(parts, work, watch)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
