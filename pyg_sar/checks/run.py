r"""Runs a training step in one process and on simulated workers, on copies of a model, and compares what came out."""

from __future__ import annotations

import inspect
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.checks.record import CheckError, Recorder
from pyg_sar.checks.sample import Sample, ids_of, total_nodes
from pyg_sar.data.load import load
from pyg_sar.distributed.group import copied, is_group, is_local
from pyg_sar.distributed.simulated import Workers
from pyg_sar.nn.models.node_embedding import NodeEmbedding
from pyg_sar.structure import tensors

Step = Callable[[torch.nn.Module, Any], Any]
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
# A gradient that is nothing but rounding errors is not compared by its own size.
LEAST = 1e-2


@dataclass
class Run:
    """What a worker found: all that the step returned, gradients and buffers, by name."""

    recorder: Recorder
    ids: dict[Any, Tensor]
    values: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass
class Team:
    """What all workers found."""

    runs: list[Run]
    stuck: str = ""  # what they waited for when it could not come any more


class Problem:
    """A step, a model, whose parameters take a floating-point type if one is given, and the small graph for both."""

    def __init__(self, step: Step, sample: Sample, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        self.step, self.sample, self.model, self.dtype = step, sample, model, dtype
        self.foreign = {id(p): "the model itself" for p in model.parameters()} | parameters_around(step)
        found = {p.dtype for p in model.parameters() if p.is_floating_point()}
        self.tolerance = 1e-8 if dtype else max((TOLERANCE.get(d, 0.05) for d in found), default=1e-4)

    def copied(self) -> torch.nn.Module:
        """Return a copy of the model without gradients, groups of workers, and what layers kept of another graph."""
        model = copied(self.model).cpu()
        for module in model.modules():
            kept = [name for name, value in module.__dict__.items() if name == "group" and is_group(value)]
            if isinstance(module, torch_geometric.nn.MessagePassing):
                kept += [name for name in module.__dict__ if name.startswith("_cached")]
            for name in kept:
                setattr(module, name, None)
        model.zero_grad()
        return model if self.dtype is None else model.to(self.dtype)

    def whole(self, parts: bool) -> Team:
        """Run in one process: on an ordinary graph, or on one of a single part, for a step that asks for that."""
        return self.team(1) if parts else self.gather(Workers(1), self.sample.one)

    def team(self, size: int) -> Team:
        """Run on some workers."""
        with tempfile.TemporaryDirectory() as folder:
            self.sample.write(Path(folder) / "parts", size)
            return self.gather(Workers(size), lambda: self.sample.complete(load(Path(folder) / "parts", mmap=False)))

    def gather(self, workers: Workers, data: Callable[[], Any]) -> Team:
        """Run on each of the workers."""
        # Not by the workers: PyG's Sequential imports the script when it is copied, which this thread may be doing.
        models = [self.copied() for _ in range(workers.size)]
        runs = workers.run(lambda rank: self.run(models[rank], data()))
        for run in runs:
            if isinstance(run, BaseException):  # of what is ours
                raise run
            # A step may leave the type of its model, by '.float()' for example, and round to another one.
            dtypes = run.recorder.dtypes | {t.dtype for t in run.values.values() if t.is_floating_point()}
            self.tolerance = max(self.tolerance, *(TOLERANCE.get(d, 0.05) for d in dtypes), 0)
        return Team(runs, workers.broken)

    def run(self, model: torch.nn.Module, data: Any) -> Run:
        """Run on a worker."""
        ids = ids_of(data)
        totals = ids_of(self.sample.one())
        self.fill_tables(model, ids, totals)
        for seed in (torch.default_generator.manual_seed, np.random.seed, random.seed):
            seed(0)  # after the copy, for which PyG 2.6 draws weights
        before = states()
        recorder = Recorder(model, {k: (i, totals[k].numel()) for k, i in ids.items()}, self.foreign)
        run = Run(recorder, ids)
        try:
            with recorder:
                returned = self.step(model, data)
            run.values = named(returned)
        except CheckError:
            raise
        except Exception as error:
            run.error = error
        if before != states():
            recorder.random = recorder.random or "a generator of torch, numpy or Python"
        for name, p in model.named_parameters():
            grad = None if p.grad is None else p.grad.detach().to_dense()
            if p.requires_grad and not is_local(p):
                run.grads[name] = grad
            elif p.requires_grad and run.values:
                run.values[f"gradient of '{name}'"] = torch.zeros_like(p) if grad is None else grad
        run.buffers = {name: b.detach() for name, b in model.named_buffers() if not is_local(b)}
        recorder.sum = None  # a frame, with all that it holds
        return run

    def fill_tables(self, model: torch.nn.Module, ids: dict[Any, Tensor], totals: dict[Any, Tensor]) -> None:
        """Give tables of nodes the rows of the small graph, of that type of nodes of which they have had these, or as
        many.
        """
        for name, module in model.named_modules():
            if isinstance(module, NodeEmbedding):
                stores = [s for s in self.sample.given.node_stores if total_nodes(s) == module.num_nodes]
                if not stores:
                    raise CheckError(f"The table '{name}' is of {module.num_nodes} nodes, which 'data' does not have")
                alike = (s for s in stores if "n_id" in s and torch.equal(s.n_id.cpu(), module.n_id.cpu()))
                kind = next(alike, stores[0])._key or "nodes"
                generator = torch.Generator().manual_seed(11)
                size = totals[kind].numel(), *module.weight.shape[1:]
                module.become(ids[kind], torch.randn(size, generator=generator, dtype=torch.float64))

    def same(self, found: Tensor, expected: Tensor, scale: float | None = None) -> bool:
        """Whether numbers are the same up to rounding."""
        if found.shape != expected.shape:
            return False
        found, expected = found.double(), expected.double()
        if scale is None:
            scale = largest([expected])
        return torch.allclose(found, expected, rtol=0, atol=self.tolerance * scale + 1e-30, equal_nan=True)

    def sums_up(self, found: list[Tensor]) -> bool:
        """Whether the numbers of workers sum up to those of one process, the first ones."""
        expected, *parts = found
        if any(t.shape != expected.shape for t in parts):
            return False
        return self.same(torch.stack([t.double() for t in parts]).sum(0), expected, largest(found))

    def agrees(self, runs: list[Run], found: list[Tensor], inner: bool = False) -> bool:
        """Whether workers found what one process, the first of the runs, found: their rows of it, or all of it.

        Of ``inner`` numbers, which the step did not return, they may also have found shares that sum up to it, and
        integers may mean something on one worker alone.
        """
        expected, *parts = rows_first(found)
        alike = expected.dim() > 0 and all(t.shape[1:] == expected.shape[1:] for t in parts)
        if inner and expected.dim() > 0 and not expected.is_floating_point():
            return alike
        rows = rows_of_all(runs, [expected, *parts])
        if rows is not None:
            return self.same(rows, expected)
        if all(t.shape == expected.shape for t in parts):
            return all(self.same(t, expected) for t in parts) or (inner and self.sums_up([expected, *parts]))
        if not alike:
            return False
        if sum(t.size(0) for t in parts) != expected.size(0):
            return not inner
        # Rows of some of the nodes, and nobody knows of which.
        total = torch.stack([t.double().sum(0) for t in parts]).sum(0)
        return self.same(total, expected.double().sum(0), largest([expected, *parts]) * expected.size(0))


def rows_of_all(runs: list[Run], found: list[Tensor]) -> Tensor | None:
    """Return the rows of all workers in the order of the whole graph, if there is one for each node or edge."""
    expected, *parts = found
    if expected.dim() == 0 or any(t.shape[1:] != expected.shape[1:] for t in parts):
        return None
    for kind in runs[0].ids:
        ids = [run.ids[kind] for run in runs]
        if [i.numel() for i in ids] == [t.size(0) for t in found]:
            out = torch.zeros_like(expected)
            for i, part in zip(ids[1:], parts, strict=True):
                out[i] = part.to(out.dtype)
            return out
    return None


def rows_first(tensors: list[Tensor]) -> list[Tensor]:
    """Put the dimension first in which tensors of several runs differ, if it is one."""
    if len({t.dim() for t in tensors}) > 1:
        return tensors
    dims = [dim for dim, sizes in enumerate(zip(*(t.shape for t in tensors), strict=True)) if len(set(sizes)) > 1]
    return [t.movedim(dims[0], 0) for t in tensors] if len(dims) == 1 else tensors


def largest(tensors: Sequence[Tensor | None]) -> float:
    """Return the largest absolute number."""
    sizes = [t.double().nan_to_num(0, 0, 0).abs().max().item() for t in tensors if t is not None and t.numel() > 0]
    return max(sizes, default=0.0)


def states() -> Any:
    """Return the states of the generators."""
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


def named(returned: Any) -> dict[str, Tensor]:
    """Return what a step returned, by name."""
    if isinstance(returned, (tuple, list)) and returned:
        returned = {f"output {k}" if k else "loss": value for k, value in enumerate(returned)}
    elif not isinstance(returned, dict):
        returned = {"loss": returned}
    out: dict[str, Tensor] = {}
    for name, value in returned.items():
        if isinstance(value, (bool, int, float, np.number)):
            value = torch.tensor(float(value), dtype=torch.float64)
        found = list(tensors(value))
        for k, t in enumerate(found):
            out[str(name) if len(found) == 1 else f"{name}[{k}]"] = t.detach().clone()
    return out


def parameters_around(step: Any) -> dict[int, str]:
    """Return the parameters of modules that a function reads without being given them."""
    if not inspect.isfunction(step):
        return {}
    around = inspect.getclosurevars(step)
    found = {**around.globals, **around.nonlocals}
    modules = {name: value for name, value in found.items() if isinstance(value, torch.nn.Module)}
    return {id(p): f"'{name}'" for name, module in modules.items() for p in module.parameters()}
