r"""Which layer of a model is running: what workers tell each other, so that none takes part in another's layer; and
whether it runs on a chunk of a pipeline.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

# The `layer` of this thread, whether its parameters are `told`, whether its rows are those of a `chunk`, and whether a
# `loss` of a pipeline is being made.
_here = threading.local()
CHUNK, LOSS = "chunk", "loss"
LAYERS: WeakIdKeyDictionary = WeakIdKeyDictionary()
LAZY: WeakIdKeyDictionary = WeakIdKeyDictionary()  # models of which parameters had no values when they ran


@dataclass
class Layer:
    """What is known of a layer.

    Args:
        name: What it is called in the model that ran when it was first seen.
        first: The sum of its parameters then, as soon as all of them have values.
        lazy: Whether some parameters in the model that ran had none then, which a first run makes.
    """

    name: str
    first: float | None = None
    lazy: bool = False


class About(NamedTuple):
    """What a worker does, which its peers must do as well.

    Args:
        what: The words, the same on all workers.
        layer: The layer, if it is known.
        parameters: Its own parameters; none where workers have compared them already.
        complete: Whether all parameters have values.
        training: Whether the layer trains.
    """

    what: str
    layer: Layer | None = None
    parameters: Sequence[Tensor] = ()
    complete: bool = True
    training: bool = True


def enter(modules: Sequence[torch.nn.Module]) -> None:
    """Take note of the modules that are running, from the innermost to the outermost one."""
    _here.layer = weakref.ref(modules[0]) if modules else None
    _here.told = False
    if modules and modules[0] not in LAYERS:
        outer = modules[-1]
        if any(map(is_lazy, outer.parameters())):
            LAZY[outer] = True
        LAYERS[modules[0]] = Layer(called(modules), lazy=outer in LAZY)


def called(modules: Sequence[torch.nn.Module]) -> str:
    """Return what the innermost of the running modules is called in the outermost one that contains it."""
    layer = modules[0]
    kind = type(layer).__name__
    names = (name for outer in reversed(modules) for name, found in outer.named_modules() if found is layer)
    name = next(names)
    return f"layer '{name}' ({kind})" if name else f"layer '{kind}'"


def present() -> torch.nn.Module | None:
    """Return the layer that is running, if it is known."""
    return getattr(_here, "layer", None) and _here.layer()


def name() -> str:
    """Return what the present layer is called, or nothing."""
    module = present()
    return "" if module is None else LAYERS[module].name


@contextmanager
def within(what: str) -> Iterator[None]:
    """Say that what runs within the context has the rows of a ``CHUNK`` alone, or makes a pipeline's ``LOSS``."""
    setattr(_here, what, True)
    try:
        yield
    finally:
        setattr(_here, what, False)


def is_within(what: str) -> bool:
    """Whether it was said."""
    return getattr(_here, what, False)


def named_range(*words: str) -> AbstractContextManager[Any]:
    """Show a range of a name in traces of :mod:`torch.profiler`; without a profiler it costs nothing."""
    if not torch.autograd.profiler._is_profiler_enabled:
        return nullcontext()
    return torch.profiler.record_function(": ".join(words))


def about(rows: Tensor | torch.Size, dtype: torch.dtype, how: str) -> About:
    """Return what the present layer does with rows of a shape."""
    module = present()
    columns = " x ".join(map(str, rows[1:])) or "1"
    mode = "" if module is None or module.training else ", in evaluation mode"
    doing = f"rows of {columns} columns ({str(dtype)[6:]}, {how}{mode})"
    if module is None:
        return About(doing)
    layer, told, _here.told = LAYERS[module], _here.told, True
    if told:
        return About(f"{layer.name} on {doing}", layer)
    # Others than message passing layers, such as a whole model that reads rows itself, may hold many.
    owners = module.modules() if hasattr(module, "propagate") else (module,)
    parameters = [p for owner in owners for p in owner._parameters.values() if p is not None]
    return About(f"{layer.name} on {doing}", layer, parameters, not any(map(is_lazy, parameters)), module.training)
