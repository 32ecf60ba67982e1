r"""What is in a structure of lists, tuples and dictionaries, such as the arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return nested lists, tuples and dictionaries with each other value changed, sooner than torch's ``tree_map``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, v) for v in value])
    if isinstance(value, dict):
        return {key: mapped(change, v) for key, v in value.items()}
    if isinstance(value, tuple) and kind is not torch.Size:
        items = [mapped(change, v) for v in value]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return change(value)
