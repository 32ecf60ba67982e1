r"""Dropout whose mask is a function of a seed and an edge's id, and so the same however the graph is cut."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def mix(h: Tensor) -> Tensor:
    """Scramble 32-bit words held in int64 (the "lowbias32" hash of C. Wellons' hash prospector).

    Shifts and products are exact in int64: a product may wrap at 64 bits, of which only the low 32 are kept.
    """
    h = (h ^ (h >> 16)) * 0x7FEB352D & WORD
    h = (h ^ (h >> 15)) * 0x846CA68B & WORD
    return h ^ (h >> 16)


def dropout_factors(e_id: Tensor, heads: int, p: float, seed: int, dtype: torch.dtype, head: int = 0) -> Tensor:
    r"""Return factors :math:`(|\mathcal{E}|, H)`: 0 with probability ``p``, else :math:`1 / (1 - p)`.

    Args:
        e_id: Global id of each edge.
        heads: Number of heads.
        p: Probability of 0.
        seed: Seed of this call.
        dtype: Type of the factors.
        head: Number of the first head.
    """
    # Scrambled before they meet: were they merely added, the masks of seeds 0 and 1 would be the same numbers in
    # another order. One key is for the edges and one for each head.
    numbers = torch.arange(head + 1, head + heads + 2, device=e_id.device)
    numbers[0] = 1
    keys = mix(numbers)
    keys = mix(mix(keys ^ (seed & WORD)) ^ (seed >> 32 & WORD))
    h = mix(mix(e_id & WORD) ^ (e_id >> 32 & WORD) ^ keys[0])
    bits = mix(h.unsqueeze(1) ^ keys[1:])
    keep = bits >= round(p * 2**32)
    return keep.to(dtype) / (1 - p) if p < 1 else keep.to(dtype) * 0
