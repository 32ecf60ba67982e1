"""Random models, trained by several workers in every mode and on rows at home, under the watch, against PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import conv_zoo as zoo
from support.nasty_graph import NUM_NODES, close
from support.random_models import Model, graph
from support.random_training import WAYS, first_that_runs, train
from support.simulate import simulate
from torch import Tensor

import pyg_sar
from pyg_sar.watch.mode import watching

SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(2, 200))]


def result(model: Model, data: Any, shared: bool) -> dict[str, Tensor]:
    """Return what training a model gives."""
    return train(model, lambda: model.loss(data, shared), shared, lambda: model(data))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("parts")
    with zoo.default(torch.float64):
        for size in {size for size, *_ in WAYS.values()}:
            assignment = torch.randint(size, (NUM_NODES,), generator=torch.Generator().manual_seed(size))
            pyg_sar.partition(graph(), size, folder / str(size), method=assignment)
    return str(folder)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(seed: int, parts: str) -> None:
    with zoo.default(torch.float64):
        at_home = seed % 2 == 0
        model, expected = first_that_runs(seed, lambda n: Model(n, at_home), lambda it: result(it, graph(), False))
        print(*model.plan, sep="\n")  # pytest shows it if the test fails
        for way, (size, how, chunks) in WAYS.items():
            if chunks and not at_home:
                continue

            def work(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
                with watching():
                    data = pyg_sar.load(f"{parts}/{size}", **how)  # noqa: B023
                    data = pyg_sar.offload(data, chunks=chunks) if chunks else data  # noqa: B023
                    mine = pyg_sar.nn.convert(copy.deepcopy(model))
                    mine.pools = pyg_sar.nn
                    return data.n_id, result(mine, data, True)

            for n_id, got in simulate(size, work):
                for key, value in expected.items():
                    of_nodes = key == "output" and model.head != "graphs"
                    close(got.get(key), value[n_id] if of_nodes else value, f"{way}: {key}", tol=1e-9)
