r"""What the package's functions of autograd share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor


def once_differentiable() -> None:
    """Raise within a backward pass that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Layers of 'pyg_sar.nn' have no second derivative. Call 'backward' or 'autograd.grad' without "
            "'create_graph=True', or use the layer of 'torch_geometric.nn' without 'convert', which has them, one-shot."
        )


def random_states(device: torch.device) -> Tensor:
    """Return the states of the generators from which code on a device may draw random numbers."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def autocast_as_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what has functions run as autocast would have them run now, in a later pass, too.

    Copies of parameters are not kept: of those that are made without gradients, others would take none either.
    """
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    return partial(torch.autocast, device.type, dtype, enabled, cache_enabled=False)


def nodes_behind(outs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of autograd's graph of which tensors are made, each once."""
    todo, seen = [t.grad_fn for t in outs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [other for other, _ in node.next_functions]


class Valued(torch.autograd.Function):
    """A value with the gradient of something else: ``Valued.apply(of, value)``."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, value: Tensor) -> Tensor:
        """Return the value."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradient."""
        return grad, None


def zeros_of(x: Tensor) -> Tensor:
    """Return zeros that have the gradient of ``x``; what is infinite would not be zero less itself."""
    return Valued.apply(x, torch.zeros_like(x))
