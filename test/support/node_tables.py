"""Training of models with a table of nodes on several workers, against PyG in one process."""

from collections.abc import Callable
from typing import Any

import torch
from support.nasty_graph import close
from torch import Tensor

import pyg_sar
from pyg_sar.nn import NodeEmbedding, whole_state_dict


def whole_grads(model: torch.nn.Module, group: Any) -> dict[str, Tensor]:
    """Gradients of all parameters after ``sum_gradients``, of tables in the order of the graph."""
    pyg_sar.sum_gradients(model, group)
    tables = {id(m.weight): m for m in model.modules() if isinstance(m, NodeEmbedding)}
    grads = {name: (p, p.grad.to_dense()) for name, p in model.named_parameters() if p.grad is not None}
    return {name: tables[id(p)].whole(grad) if id(p) in tables else grad for name, (p, grad) in grads.items()}


def check_training(
    group: Any, models: tuple[torch.nn.Module, torch.nn.Module], losses: tuple[Callable, Callable],
    optimizers: Callable[[torch.nn.Module], list[torch.optim.Optimizer]] | None = None,
) -> None:  # fmt: skip
    """Run three steps of PyG's model and of ours; all losses, gradients and what was learnt are the same.

    Args:
        group: The workers.
        models: PyG's and ours, made with the same seed and in double precision.
        losses: Functions of a model and the number of the step: of all nodes, and as a worker computes it.
        optimizers: Makes the optimizers of a model. By default Adam with weight decay.
    """
    reference, model = models
    make = optimizers or (lambda m: [torch.optim.Adam(m.parameters(), 0.01, weight_decay=0.1)])
    steppers = [make(m) for m in models]
    for step in range(3):
        for m in models:
            m.zero_grad()
        expected, loss = (compute(m, step) for compute, m in zip(losses, models, strict=True))
        close(loss.detach(), expected.detach(), f"loss of step {step}")
        expected.backward(), loss.backward()
        found = whole_grads(model, group)
        for name, p in reference.named_parameters():
            close(found.get(name), None if p.grad is None else p.grad.to_dense(), f"gradient of {name} in step {step}")
        for stepper in (*steppers[0], *steppers[1]):
            stepper.step()
    learnt = whole_state_dict(model)
    assert list(learnt) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        close(learnt[name], value, name)
    reference.load_state_dict(learnt)
