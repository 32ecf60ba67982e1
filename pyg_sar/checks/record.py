r"""Watches a training step: which numbers it makes where, and what it does to gradients and random generators."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.caller import LIBRARIES, Place, beyond, callers, within
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.ops.dropout import NoDropout
from pyg_sar.structure import tensors
from pyg_sar.watch.rules import CLIPS
from pyg_sar.whole_graph import packages

TABLES = ("rand", "rand_like", "randn", "randn_like")  # what is drawn for the whole graph
# What may draw random numbers, by a part of the name.
DRAWS = re.compile(
    "rand|bernoulli|multinomial|normal|uniform|poisson|exponential|gumbel|geometric_|cauchy|rrelu|scaled_dot"
)
# What is no longer true of the sum if each worker does it to its share of a gradient, by a part of the name.
NONLINEAR = (*CLIPS, "abs", "sign", "square", "pow", "sqrt", "max", "min", "finite", "isnan", "isinf")


class CheckError(AssertionError):
    """A training step has other numbers on several workers than in one process."""


class Record(NamedTuple):
    """Numbers that a function or a module returned."""

    what: str
    place: Place
    tensors: list[Tensor]
    module: bool = False

    @property
    def key(self) -> Any:
        """What tells the same call in another run: its name, and its line, unless it is that of a module."""
        generated = self.place.file.startswith("<")
        return self.what, None if self.module else (not generated, self.place.line)


class Recorder(NoDropout):
    """Watches one run of a step, without dropout.

    Random numbers of ``torch.rand`` and its kin that have a row for each node or edge are those of a table of the whole
    graph.
    """

    def __init__(self, model: torch.nn.Module, ids: dict[Any, tuple[Tensor, int]], foreign: dict[int, str]) -> None:
        super().__init__()
        self.parameters = list(model.parameters())
        self.ids = ids  # global ids of rows, by type of nodes or edges, and how many there are of all workers
        self.foreign = foreign  # parameters that the step must not read, by their identity
        self.records: list[Record] = []
        self.dtypes: set[torch.dtype] = set()  # of what has a gradient, or was rounded
        self.running: list[str] = []  # modules that are taken as a whole
        self.drawn = 0
        self.random = ""  # where other random numbers come from
        self.events: list[str] = []  # backward passes and sums of gradients
        self.early = ""  # who read gradients before their sum
        self.sum: Any = None
        for name, module in outermost(model).items():
            self.watch(f"'{name}' ({type(module).__name__})", module)

    def watch(self, what: str, module: torch.nn.Module) -> None:
        """Record what a module returns."""
        opaque = is_opaque(module)

        def before(*_: Any) -> None:
            if opaque:
                self.running.append(what)

        def after(_module: Any, _args: Any, out: Any) -> None:
            if opaque:
                self.running.pop()
            self.keep(what, out, True)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch a function of torch."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        self.look(name, list(tensors(args, kwargs)))
        state = torch.get_rng_state() if DRAWS.search(name) else None
        out = super().__torch_function__(func, types, args, kwargs)
        if state is not None and (kwargs.get("generator") or not torch.equal(state, torch.get_rng_state())):
            self.draw(name, out, state)
        if name == "backward":
            self.events.append(name)
            self.keep(name, args[0])
        elif not self.running and (not name.startswith("__") or name == "__getitem__"):
            self.keep(name, out)
        return out

    def keep(self, what: str, out: Any, module: bool = False) -> None:
        """Record what was returned."""
        if self.running:
            return
        with torch._C.DisableTorchFunction():
            given = [t for t in tensors(out) if not isinstance(t, ShardedEdgeIndex)]
            self.dtypes |= {t.dtype for t in given if t.requires_grad or rounded(t)}
            found = [t.detach().clone() for t in given]
        place = caller() if found else None
        if place is not None:
            self.records.append(Record(what, place, found, module))

    def look(self, name: str, given: list[Tensor]) -> None:
        """Look at arguments: parameters of others, gradients."""
        for t in given:
            if id(t) in self.foreign:
                raise CheckError(
                    f"The step reads a parameter of {self.foreign[id(t)]}, which is not in the model that it is given "
                    f"({caller()}).\nThe check runs it on copies of the model, one for each worker.\n"
                    f"Use the model that the step is called with; put several into one, such as a ModuleDict."
                )
        grads = {id(p.grad) for p in self.parameters if p.grad is not None}
        if not self.running and any(id(t) in grads for t in given):
            self.read(name)

    def read(self, name: str) -> None:
        """Note who reads a gradient."""
        running = (f for f in callers() if f.f_code.co_name == "sum_gradients" and within(f, "pyg_sar"))
        frame = next(running, None)
        if frame is not None and frame is not self.sum:
            self.sum = frame
            self.events.append("sum")
        early = frame is None and "sum" not in self.events and any(part in name for part in NONLINEAR)
        if early and not self.early:
            self.early = f"'{name}' ({caller()})"

    def draw(self, name: str, out: Any, state: Tensor) -> None:
        """Take random numbers from a table of the whole graph, or note that they are others on workers."""
        if name in TABLES and isinstance(out, Tensor) and out.dim() > 0 and out.is_floating_point():
            for ids, total in self.ids.values():
                if ids.numel() == out.size(0):
                    self.drawn += 1
                    generator = torch.Generator().manual_seed(self.drawn)
                    draw = getattr(torch, name.removesuffix("_like"))
                    table = draw(total, *out.shape[1:], generator=generator, dtype=torch.float64)
                    out.detach().copy_(table[ids])
                    torch.set_rng_state(state)
                    return
        place = caller()
        inside = f" in {self.running[-1]}" if self.running else ""
        self.random = self.random or f"'{name}'{inside}" + (f" ({place})" if place else "")


def outermost(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules of a model by their names, but none within those that are recorded as a whole: layers whose
    own modules have hooks do not run by kernels, as they will in the job.
    """
    opaque = [module for module in model.modules() if is_opaque(module)]
    inside = {id(inner) for module in opaque for inner in module.modules() if inner is not module}
    return {name: module for name, module in model.named_modules() if name and id(module) not in inside}


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether a module is recorded as a whole: layers, and what is in libraries and has nothing in it."""
    own = packages(type(module))  # type: ignore[arg-type]
    library = type(module).__module__.partition(".")[0] in LIBRARIES
    return hasattr(module, "propagate") or "pyg_sar" in own or (library and not list(module.children()))


def rounded(t: Tensor) -> bool:
    """Whether a tensor may have lost digits to its type: a mask or a count as floating-point numbers has not."""
    return t.is_floating_point() and bool((t != t.trunc()).any())


def caller() -> Place | None:
    """Return the line of the user's code that is running, unless it called code of this library."""
    _, frame = beyond(__name__, *LIBRARIES)
    return None if frame is None or within(frame, "pyg_sar") else Place(frame.f_code.co_filename, frame.f_lineno)
