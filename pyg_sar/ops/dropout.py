r"""Dropout whose mask is a function of a seed and an edge's id, and so the same however the graph is cut; and none."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WORD = 0xFFFFFFFF
_kinds = ("", "1d", "2d", "3d", "_")
DROPOUTS = {f"{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in _kinds}
_here = threading.local()  # how many of the modes are active in this thread


class NoDropout(TorchFunctionMode):
    """Nothing is dropped, neither by functions of torch nor by layers that make masks of their own."""

    def __enter__(self) -> Any:
        _here.depth = getattr(_here, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _here.depth -= 1
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the input of dropout."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def nothing_drops() -> bool:
    """Whether :class:`NoDropout` is active."""
    return getattr(_here, "depth", 0) > 0


def mix(h: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (the "lowbias32" hash of C. Wellons' hash prospector).

    Shifts and products are exact in int64: a product may wrap at 64 bits, of which only the low 32 are kept.
    """
    h = (h ^ (h >> 16)) * 0x7FEB352D & WORD
    h = (h ^ (h >> 15)) * 0x846CA68B & WORD
    return h ^ (h >> 16)


def dropout_factors(e_id: Tensor, heads: int, p: float, seed: int, dtype: torch.dtype, head: int = 0) -> Tensor:
    r"""Return factors :math:`(|\mathcal{E}|, H)`: 0 with probability ``p``, else :math:`1 / (1 - p)`.

    They depend on the global id of the edge, the seed of this call and the number of the head; ``head`` is the first.
    """
    # Scrambled before they meet: were they merely added, the masks of seeds 0 and 1 would be the same numbers in
    # another order. One key is for the edges and one for each head.
    numbers = torch.arange(head + 1, head + heads + 2, device=e_id.device)
    numbers[0] = 1
    keys = mix(numbers)
    keys = mix(mix(keys ^ (seed & WORD)) ^ (seed >> 32 & WORD))
    # The key goes before both halves of an id: ids that the first scrambling joins are others for each seed.
    h = mix(mix(e_id & WORD ^ keys[0]) ^ (e_id >> 32 & WORD) ^ keys[0])
    bits = mix(h.unsqueeze(1) ^ keys[1:])
    keep = bits >= round(p * 2**32)
    return keep.to(dtype) / (1 - p) if p < 1 else keep.to(dtype) * 0
