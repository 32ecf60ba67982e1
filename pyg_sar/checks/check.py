r"""Checks a training step before it trains: that it finds on several workers what it finds in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pyg_sar.checks.diagnose import diagnose, failure
from pyg_sar.checks.record import CheckError
from pyg_sar.checks.run import Problem, Run, Step
from pyg_sar.checks.sample import Sample, total_nodes
from pyg_sar.distributed.group import is_local
from pyg_sar.distributed.simulated import kept_generators

TABLE = 20_000  # nodes of the graph up to which a table with a row for each is taken as it is


@dataclass
class Report:
    """What was compared.

    Args:
        seconds: The time that it took.
        compared: The names of what was returned, and of parameters with a gradient.
        dtype: The type in which it was compared; None: that of the model.
    """

    seconds: float
    compared: list[str]
    dtype: torch.dtype | None


def check(step: Step, data: Any, model: torch.nn.Module) -> Report:
    r"""Check that a training step finds on several workers what it finds in one process.

    The step runs on a small random graph with the attributes of ``data``: as a whole, with PyG's meaning of everything,
    and on two simulated workers, which are threads of this process. What it returns, gradients and buffers are
    compared. It takes seconds, prints nothing, and talks to nobody: call it on any rank, or in a test.

    .. code-block:: python

        def step(model, data):
            model.train()
            out = model(data.x, data.edge_index)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
            loss = pyg_sar.global_mean(loss)
            loss.backward()
            pyg_sar.sum_gradients(model)
            return loss


        pyg_sar.check(step, data, model)

    The step must use the model and the data that it is called with: these are copies, in double precision if it can do
    with that. It runs without dropout; the optimizer of the model itself does nothing meanwhile. Numbers of
    ``torch.rand`` and ``torch.randn`` (and ``*_like``) with a row for each node or edge are the same for these, however
    the graph is cut; steps that draw others cannot be compared.

    Args:
        step (callable): Does a forward pass, ``backward``, and :func:`~pyg_sar.sum_gradients`, and returns the loss, a
            tuple that begins with the loss, or a dictionary. Tensors with a row for each node or edge are compared row
            by row.
        data (torch_geometric.data.Data or torch_geometric.data.HeteroData): The graph, as loaded or as a whole; it is
            not modified.
        model (torch.nn.Module): The model; it is not modified.

    Returns:
        The seconds that it took, and the names of what was compared.

    Raises:
        CheckError: If anything differs. It says what, what that usually means, and what to do.
    """
    begin = time.perf_counter()
    model = getattr(model, "_orig_mod", model)  # of a compiled model
    refuse(data, model)
    total = {total_nodes(store) for store in data.node_stores}
    tables = {n for p in model.parameters() if not is_local(p) for n in p.shape if n in total and n <= TABLE}
    with kept_generators(), without_gradients(model):
        problem, whole = in_one_process(step, data, model, tables)
        diagnose(problem, whole)
    compared = [*whole.values, *(name for name, grad in whole.grads.items() if grad is not None)]
    return Report(time.perf_counter() - begin, compared, problem.dtype)


def refuse(data: Any, model: torch.nn.Module) -> None:
    """Raise for what cannot be checked."""
    if any("edge_index" not in store for store in data.edge_stores) or not data.edge_stores:
        raise CheckError(
            "The data has no 'edge_index'.\nThe check makes a small graph like it, for which it must know the edges.\n"
            "Give it a Data or HeteroData with 'edge_index', as loaded or as a whole."
        )
    if any(map(is_lazy, model.parameters())):
        raise CheckError(
            "The model has parameters without a shape.\nIts lazy layers have not been run yet.\n"
            "Run the model once under 'torch.no_grad()' before the check."
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise CheckError(
            "The model is wrapped in DistributedDataParallel.\nIt would talk to the other workers of this job.\n"
            "Check 'model.module', with 'pyg_sar.sum_gradients' in the step."
        )


def in_one_process(step: Step, data: Any, model: torch.nn.Module, tables: set[int]) -> tuple[Problem, Run]:
    """Return the step in one process: in double precision if it can do with that, on an ordinary graph if it can."""
    for dtype in (torch.float64, None):
        problem = Problem(step, Sample(data, tables, dtype), model, dtype)
        errors: list[Any] = []
        for parts in (False, True):
            (whole,) = problem.whole(parts).runs
            if whole.error is None:
                return problem, whole
            errors.append(whole.error)
    # What an ordinary 'edge_index' does not have is not what is wrong.
    error = errors[isinstance(errors[0], AttributeError)]
    raise CheckError(failure(error)) from error


@contextmanager
def without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Have an optimizer find nothing to do."""
    grads = [(p, p.grad) for p in model.parameters()]
    for p, _ in grads:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in grads:
            p.grad = grad
