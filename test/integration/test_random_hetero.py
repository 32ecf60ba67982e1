"""Random models of heterogeneous graphs, trained by workers in every mode, at home and on flows, against PyG."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import conv_zoo as zoo
from support.nasty_graph import close
from support.random_hetero import Model, graph
from support.random_training import WAYS, first_that_runs, train
from support.simulate import simulate
from torch import Tensor

import pyg_sar
from pyg_sar.watch.mode import watching

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(1, 40))]


def result(model: Model, data: Any, way: str) -> dict[str, Tensor]:
    """Return what training a model gives; a message-flow graph has no output of all nodes."""
    whole = None if way == "flow" else lambda: model.whole(data)
    return train(model, lambda: model.loss(data, way), way != "pyg", whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_hetero(seed: int, tmp_path: Path) -> None:
    """Every third model is for message-flow graphs, and not for rows at home."""
    with zoo.default(torch.float64):
        whole, flow = graph(seed), seed % 3 == 0
        model, expected = first_that_runs(seed, lambda n: Model(n, whole, flow), lambda it: result(it, whole, "pyg"))
        print(*model.layers, model.by_row, model.norms, model.target, model.residual, model.joins, sep="\n")
        for size in (1, 2, 3):
            part = {
                t: torch.randint(size, (whole[t].num_nodes,), generator=torch.Generator().manual_seed(size))
                for t in whole.node_types
            }
            pyg_sar.partition(whole, size, tmp_path / str(size), method=part)
        for way, (size, how, chunks) in WAYS.items():
            if chunks and flow:
                continue

            def work(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
                with watching():
                    data = pyg_sar.load(tmp_path / str(size), **how)  # noqa: B023
                    data = pyg_sar.offload(data, chunks=chunks) if chunks else data  # noqa: B023
                    mine = pyg_sar.nn.convert(copy.deepcopy(model))
                    return data[model.target].n_id, result(mine, data, "flow" if flow else "workers")

            for n_id, got in simulate(size, work):
                for key, value in expected.items():
                    if flow and key == "output":
                        continue
                    found, mine = got.get(key), value[n_id] if key == "output" else value
                    close(torch.zeros_like(mine) if found is None else found, mine, f"{way}: {key}", tol=1e-9)
