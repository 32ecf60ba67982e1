r"""What is made once and kept: by a key, and as long as the tensor of integers that it was made of lives unchanged."""

from __future__ import annotations

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
    """Return sums that tell whether somebody changed the integers of a tensor on the CPU, in whatever way.

    Rows of them are multiplied by a vector of odd numbers: a sum changes with any one of its integers, and with several
    almost surely. It reads every integer once, fast compared with what a layer gathers by it, and what is kept is a
    fraction of a copy.
    """
    flat = t.reshape(-1)
    rows, rest = flat.split([end := flat.numel() // WIDTH * WIDTH, flat.numel() - end])
    pieces = rows.view(-1, WIDTH).split(512)  # of which a narrower type is copied
    return torch.cat([*(piece.long().mv(ODD) for piece in pieces), rest.long()])


def odd_numbers(count: int) -> Tensor:
    """Return odd numbers that are the same each time, in no order, mixed as in SplitMix64: no generator is asked."""
    z = torch.arange(1, count + 1, device="cpu") * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    return (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15 | 1


WIDTH = 1024
ODD = odd_numbers(WIDTH)
