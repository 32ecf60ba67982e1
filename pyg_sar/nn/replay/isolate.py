r"""Runs the code of a layer that is in use without a trace: keeps what it was like, and puts stand-ins in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from pyg_sar.autograd import random_states
from pyg_sar.distributed.group import takes_group
from pyg_sar.nn.replay.trace import NotStreamable


@contextmanager
def isolated(layer: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Run a layer for its own sake: attributes, random numbers and hooks of a checkpoint stay as they are.

    Modules of the layer that look at all rows that they get are refused: in messages, these are all edges of the graph.
    """

    def refuse(module: torch.nn.Module, args: Any) -> None:
        if (takes_group(type(module)) and not by_row(module)) or (isinstance(module, _BatchNorm) and module.training):
            raise NotStreamable(f"its messages go through {type(module).__name__}, which sees all of them")

    # Not a hook of all modules: simulated workers, threads of this process, would see it, and some do otherwise then.
    looking = [m for m in layer.modules() if takes_group(type(m)) or isinstance(m, _BatchNorm)]
    handles = [m.register_forward_pre_hook(refuse) for m in looking]
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            saved_tensors_hooks(torch.Tensor.detach, lambda t: t),  # a result that kept itself would live for ever
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            unchanged(layer),
        ):
            yield
    finally:
        for handle in handles:
            handle.remove()


def by_row(module: Any) -> bool:
    """Whether a normalisation looks at each row for itself: it knows the statistics, or does not take any over rows."""
    known = not module.training and getattr(module, "running_mean", None) is not None
    return known or getattr(module, "mode", None) == "node"


@contextmanager
def side_effects(layer: torch.nn.Module, device: torch.device, lasting: bool) -> Iterator[list[str]]:
    """Yield a list that names at the end what a layer's code did besides computing, which no run of a block may do;
    then raise for it.

    Args:
        layer: The layer, whose buffers get their values back.
        device: Where it draws random numbers.
        lasting: Whether an attribute that the code sets counts, because somebody may read it; of messages it is known
            what a layer keeps.
    """
    drawn, before, attributes = random_states(device), _footprint(layer), dict(layer.__dict__)
    buffers = {name: b.clone() for name, b in layer.named_buffers()}
    found: list[str] = []
    try:
        yield found
    finally:
        new = any(isinstance(v, Lost) and attributes.get(name) is not v for name, v in layer.__dict__.items())
        if _footprint(layer) != before or (lasting and new):
            found.append("its messages leave something behind")
        for name, b in layer.named_buffers():
            b.data.copy_(buffers.get(name, b))
        if not torch.equal(drawn, random_states(device)):
            found.append("it draws random numbers")
    if found:
        raise NotStreamable(found[0])


def _footprint(layer: torch.nn.Module) -> list[Any]:
    """Return what code may change where nobody notices: buffers, submodules, lists and dictionaries."""
    found: list[Any] = [(id(b), b._version) for b in layer.buffers()]
    for module in layer.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, (list, dict, set)):
                found.append((name, len(value), *map(id, value.values() if isinstance(value, dict) else value)))
            elif module is not layer:
                found.append((name, id(value)))
    return found


class State:
    """What a layer and its submodules were like when they were called: attributes, modes, parameters and buffers.

    Of lists and dictionaries it keeps what was in them, and besides parameters nothing that would keep alive what was
    computed.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        # Of parameters also those that were computed, as 'torch.func.functional_call' puts them there for a while.
        self.modules = [
            (m, {k: _copied(v) for k, v in m.__dict__.items() if k == "_parameters" or _plain(v)})
            for m in layer.modules()
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them be like that again."""
        with ExitStack() as stack:
            for module, then in self.modules:
                stack.enter_context(unchanged(module))
                module.__dict__.update({name: _copied(value) for name, value in then.items()})
            yield


def _plain(value: Any) -> bool:
    """Whether no value, or none in a list or dictionary, was computed with a gradient."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else (value,)
    return not any(isinstance(v, Tensor) and v.grad_fn is not None for v in values)


def _copied(value: Any) -> Any:
    """Return another list or dictionary with the same in it."""
    return value.copy() if type(value) in (dict, list, set) else value


@contextmanager
def unchanged(layer: torch.nn.Module, lost: bool = False, **stubs: Any) -> Iterator[None]:
    """Put attributes of a layer back, because what it keeps of messages would be that of a block; meanwhile some are
    ``stubs``.

    If they are ``lost``, something takes their place that says so when it is read: some layers look if they are there.
    """
    before = dict(layer.__dict__)
    layer.__dict__.update(stubs)
    try:
        yield
    finally:
        after = dict(layer.__dict__)
        layer.__dict__.clear()
        layer.__dict__.update(before)
        if lost:
            new = [name for name, value in after.items() if before.get(name) is not value and name not in stubs]
            layer.__dict__.update({name: Lost(f"{type(layer).__name__}.{name}") for name in new})


class Lost:
    """In place of what messages left on a layer."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        """Refuse to be read."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with."""
        next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Lost)).refuse()

    def refuse(self, other: Any = None) -> NoReturn:
        """Say why."""
        raise NotImplementedError(
            f"'{self.__dict__['name']}' was made of messages, which do not stay on a sharded graph. Compute it from "
            f"the layer's inputs and outputs, or on the whole graph."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = refuse
    __neg__ = __getitem__ = refuse


@contextmanager
def substituted(
    layer: torch.nn.Module, parameters: Sequence[Tensor], copies: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Have a layer read copies of its parameters, whose hooks shall not see the gradient of a block, or of buffers;
    yield these, and parameters of others as they are.
    """
    by_id = {id(p): copy for p, copy in zip(parameters, copies, strict=True)}
    held: list[tuple[torch.nn.Module, Any]] = [(m, d) for m in layer.modules() for d in (m._parameters, m._buffers)]
    slots = [(m, d, name, t) for m, d in held for name, t in d.items() if id(t) in by_id]
    own = {id(t) for *_, t in slots}
    try:
        for _, d, name, t in slots:
            d[name] = by_id[id(t)]
        yield [by_id[id(p)] if id(p) in own else p for p in parameters]
    finally:
        for _, d, name, t in slots:
            d[name] = t
        for module in {module for module, *_ in slots if isinstance(module, torch.nn.RNNBase)}:
            module._init_flat_weights()  # a list of them
