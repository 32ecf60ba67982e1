"""What is found in structures."""

from collections import OrderedDict, namedtuple

import torch

from pyg_sar.structure import mapped, tensors


def test_tensors_are_found_in_their_order():
    a, b, c = (torch.tensor(k) for k in range(3))
    assert [t.item() for t in tensors([a, ("x", None, {"k": b})], 3, {"l": (c, a)})] == [0, 1, 2, 0]
    assert list(tensors()) == []


def test_values_are_changed_where_they_are():
    Pair = namedtuple("Pair", "a b")
    best = torch.ones(2, 2).max(0)
    given = [1, (2, [3], {"k": 4}), Pair(5, 6), OrderedDict(l=7), torch.Size([8]), None]
    expected = ["1", ("2", ["3"], {"k": "4"}), Pair("5", "6"), {"l": "7"}, "torch.Size([8])", "None"]
    found = mapped(str, given)
    assert found == expected and type(found[2]) is Pair
    assert type(mapped(torch.neg, best)) is type(best) and mapped(torch.neg, best).values.tolist() == [-1, -1]
