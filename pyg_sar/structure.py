r"""What is in a structure of lists, tuples and dictionaries, such as the arguments of a call; and copies of modules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def tensors(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and values of dictionaries, in their order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(*value)
        elif isinstance(value, dict):
            yield from tensors(*value.values())


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose layers belong to the same groups of workers, which cannot be copied."""
    groups = [module.__dict__.get("group") for module in model.modules()]
    return copy.deepcopy(model, {id(group): group for group in groups if group is not None})
