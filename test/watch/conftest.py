"""The parts that tests of the watch load."""

from __future__ import annotations

import pytest
import torch
from support.watched import N, graph, two_types

import pyg_sar


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("watch"))
    pyg_sar.partition(graph(), 2, f"{path}/one", method=torch.arange(N) % 2)
    pyg_sar.partition(graph(), 2, f"{path}/alike", method=torch.arange(N) % 2)
    pyg_sar.partition(graph(), 2, f"{path}/other", method=torch.arange(N) // 20)
    pyg_sar.partition(two_types(), 2, f"{path}/two")
    return path
