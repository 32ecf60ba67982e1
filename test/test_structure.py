"""What is found in structures."""

import torch

from pyg_sar.structure import tensors


def test_tensors_are_found_in_their_order():
    a, b, c = (torch.tensor(k) for k in range(3))
    assert [t.item() for t in tensors([a, ("x", None, {"k": b})], 3, {"l": (c, a)})] == [0, 1, 2, 0]
    assert list(tensors()) == []
