r"""What is in a structure of lists, tuples and dictionaries, such as the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
