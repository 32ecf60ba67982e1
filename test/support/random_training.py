"""Random models in training: in which ways workers do it, what they are compared by, and the first model that runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pyg_sar

STEPS = 2
# Workers, how they load, and chunks of rows at home.
WAYS: dict[str, tuple[int, dict[str, bool], int]] = {
    "one worker": (1, {}, 0),
    "two in mode 1": (2, {}, 0),
    "three in mode 2": (3, {"remat": False}, 0),
    "two in mode 3": (2, {"one_shot": True}, 0),
    "at home": (1, {}, 3),
    "two at home": (2, {}, 2),
}


def train(
    model: torch.nn.Module, loss: Callable[[], Tensor], shared: bool, output: Callable[[], Tensor] | None
) -> dict[str, Tensor]:
    """Train, and return losses, gradients, buffers, and the output in evaluation mode, if there is one of all rows."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.02), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        if shared:
            pyg_sar.sum_gradients(model)
        optimizer.step()
        found[f"loss {step}"] = value.detach()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found |= {f"gradient of {name}, {step}": grad for name, grad in grads.items()}
    found |= {f"buffer {name}": b for name, b in model.named_buffers() if b.is_floating_point()}
    if output is not None:
        model.eval()
        with torch.no_grad():
            out = output()
        found["output"] = out[torch.arange(len(out))]
    return found


def first_that_runs(
    seed: int, make: Callable[[int], Any], result: Callable[[Any], dict[str, Tensor]]
) -> tuple[Any, dict[str, Tensor]]:
    """Return a random model that PyG can train, and what it gives: no large numbers, which lose digits on their way."""
    for attempt in range(30):
        torch.manual_seed(seed)
        try:
            model = make(1000 * seed + attempt)
            expected = result(copy.deepcopy(model))
        except Exception:  # of widths that do not fit, or a layer that fails on types without edges, for example
            continue
        if all(bool(t.isfinite().all()) and bool(t.abs().amax() < 1e3) for t in expected.values()):
            return model, expected
    raise AssertionError("no model that runs")
