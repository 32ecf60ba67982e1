"""Random models, trained by several workers in every mode and on rows at home, under the watch, against PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import conv_zoo as zoo
from support.nasty_graph import NUM_NODES, close
from support.random_models import Model, graph
from support.simulate import simulate
from torch import Tensor

import pyg_sar
from pyg_sar.watch.mode import watching

STEPS = 2
SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(2, 200))]
# Workers, how they load, and chunks of rows at home.
WAYS: dict[str, tuple[int, dict[str, bool], int]] = {
    "one worker": (1, {}, 0),
    "two in mode 1": (2, {}, 0),
    "three in mode 2": (3, {"remat": False}, 0),
    "two in mode 3": (2, {"one_shot": True}, 0),
    "at home": (1, {}, 3),
    "two at home": (2, {}, 2),
}


def train(model: Model, data: Any, shared: bool) -> dict[str, Tensor]:
    """Train, and return losses, the last gradients, and the output in evaluation mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model.loss(data, shared)
        loss.backward()
        if shared:
            pyg_sar.sum_gradients(model)
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": b for name, b in model.named_buffers() if b.is_floating_point()}
    model.eval()
    with torch.no_grad():
        out = model(data)
    found["output"] = out[torch.arange(len(out))]
    return found


def model_of(seed: int, at_home: bool) -> tuple[Model, dict[str, Tensor]]:
    """Return a random model that PyG can train, and what it gives: no large numbers, which lose digits on their way."""
    for attempt in range(30):
        torch.manual_seed(seed)
        try:
            model = Model(1000 * seed + attempt, at_home)
            expected = train(copy.deepcopy(model), graph(), False)
        except Exception:  # of widths that do not fit, for example
            continue
        if all(bool(t.isfinite().all()) and bool(t.abs().amax() < 1e3) for t in expected.values()):
            print(*model.plan, sep="\n")  # pytest shows it if the test fails
            return model, expected
    raise AssertionError("no model that runs")


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
        model, expected = model_of(seed, at_home)
        for way, (size, how, chunks) in WAYS.items():
            if chunks and not at_home:
                continue

            def work(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
                with watching():
                    data = pyg_sar.load(f"{parts}/{size}", **how)  # noqa: B023
                    data = pyg_sar.offload(data, chunks=chunks) if chunks else data  # noqa: B023
                    mine = pyg_sar.nn.convert(copy.deepcopy(model))
                    mine.pools = pyg_sar.nn
                    return data.n_id, train(mine, data, True)

            for n_id, got in simulate(size, work):
                for key, value in expected.items():
                    of_nodes = key == "output" and model.head != "graphs"
                    close(got.get(key), value[n_id] if of_nodes else value, f"{way}: {key}", tol=1e-9)
