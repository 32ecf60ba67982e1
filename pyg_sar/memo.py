r"""What is made once and kept: by a key, and as long as the tensor of integers that it was made of lives unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class Memo:
    """Keeps what was made, by a key and perhaps a tensor.

    Attributes:
        values: What was made, by its key; of no tensor.
        of_tensors: By the tensor that it was made of: the tensor's version and :func:`fingerprint`, and what was made.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Any] = {}
        self.of_tensors = WeakIdKeyDictionary()

    def get(self, key: Hashable, make: Callable[[], T], of: Tensor | None = None) -> T:
        """Return what ``make`` returned when the key was first asked for, or the tensor ``of`` had changed since.

        It serves training even if it was first asked for in inference mode, and dies with the tensor. Changes behind
        autograd's back, through ``.data`` or NumPy, are noticed on the CPU; on a GPU, the host would wait for it.
        """
        values = self.values if of is None else self._values_of(of)
        if key not in values:
            with torch.inference_mode(False):
                values[key] = make()
        return values[key]

    def _values_of(self, tensor: Tensor) -> dict[Hashable, Any]:
        if tensor.is_inference():  # nobody counts its changes
            return {}
        version, sums, values = self.of_tensors.get(tensor, (None, None, {}))
        now = fingerprint(tensor) if tensor.is_cpu else None
        if version != tensor._version or (now is not None and not torch.equal(now, sums)):
            self.of_tensors[tensor] = tensor._version, now, (values := {})
        return values


def fingerprint(t: Tensor) -> Tensor:
    """Return sums that tell whether somebody changed the integers ``[*]`` or ``[2, *]`` of a tensor, in whatever way.

    Integers of a row are laid out in a square, whose rows are multiplied by a vector of odd numbers of 64 bits: the sum
    of a row changes with any one of its integers, and with several almost surely. It reads every integer once, fast
    compared with what a layer gathers by it, and what is kept grows as the square root of their number, where a copy
    would be as long as they are.
    """
    sums = []
    for row in t.unbind() if t.dim() == 2 else (t,):
        width = max(math.isqrt(row.numel()), 1)
        end = row.numel() // width * width
        pieces = row[:end].view(-1, width).split(width // 16 + 1)  # of which a narrower type is copied
        odd = odd_numbers(width)
        sums += [*(piece.long().mv(odd) for piece in pieces), row[end:].long()]
    return torch.cat(sums)


def odd_numbers(count: int) -> Tensor:
    """Return odd numbers that are the same each time, in no order, mixed as in SplitMix64: no generator is asked."""
    z = torch.arange(1, count + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    return (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15 | 1
