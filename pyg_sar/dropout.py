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


def dropout_factors(e_id: Tensor, heads: int, p: float, seed: int, dtype: torch.dtype) -> Tensor:
    r"""Return factors :math:`(|\mathcal{E}|, H)`: 0 with probability ``p``, else :math:`1 / (1 - p)`.

    Args:
        e_id: Global id of each edge.
        heads: Number of heads.
        p: Probability of 0.
        seed: Seed of this call.
        dtype: Type of the factors.
    """
    h = mix((e_id & WORD) ^ (seed & WORD))
    h = mix(h ^ (e_id >> 32 & WORD) ^ (seed >> 32 & WORD))
    head = torch.arange(1, heads + 1, device=e_id.device) * 0x9E3779B9 & WORD
    bits = mix(h.unsqueeze(1) ^ head)
    keep = bits >= round(p * 2**32)
    return keep.to(dtype) / (1 - p) if p < 1 else keep.to(dtype) * 0
