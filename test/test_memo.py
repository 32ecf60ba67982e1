"""What is kept of tensors of integers: made anew after any change of these, but not otherwise."""

import pytest
import torch

from pyg_sar.memo import Memo, fingerprint

TYPES = [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [(0,), (1,), (2,), (7,), (16,), (300,), (2, 0), (2, 1), (2, 300), (2, 600)])
def test_any_integer_that_changes_is_seen(size, dtype):
    t = torch.randint(2, size).to(dtype)
    before = fingerprint(t)
    assert torch.equal(before, fingerprint(t.clone()))
    for k in range(t.numel()):
        other = t.clone()
        other.view(-1)[k] = 1 - int(other.view(-1)[k])
        assert not torch.equal(before, fingerprint(other)), k


@pytest.mark.parametrize("dtype", TYPES)
def test_changes_that_keep_all_sums_are_seen(dtype):
    """At the corners of a rectangle, wherever rows begin, and of places; in few integers, and in many."""
    for size, widths in ((100, range(1, 40)), (3000, (1, 40, 54, 1023, 1024, 1025, 2048))):
        four_change(torch.zeros(size, dtype=dtype), widths)


def four_change(t, widths):
    for width in widths:
        for a, b in ((1, 0), (0, 1)):
            t[[0, 1, width + 1, width + 2]] = torch.tensor([a, b, b, a]).to(t.dtype)
            one, t = fingerprint(t), t.clone()
            t[[0, 1, width + 1, width + 2]] = torch.tensor([b, a, a, b]).to(t.dtype)
            assert not torch.equal(one, fingerprint(t)), width
    assert not torch.equal(*(fingerprint(torch.arange(2).roll(k).repeat(50)) for k in (0, 1)))


def test_large_integers_are_no_problem():
    t = torch.full((5,), torch.iinfo(torch.int64).max)
    assert not torch.equal(fingerprint(t), fingerprint(t - 1))


CHANGES = [lambda t: None, lambda t: None, lambda t: t.add_(1), lambda t: t.numpy().__setitem__(3, 0)]


def test_what_was_made_dies_with_a_change_or_the_tensor():
    memo, t, made = Memo(), torch.arange(9), []
    for change in CHANGES:
        change(t)
        memo.get("key", lambda t=t: made.append(int(t[3])), t)
    assert made == [3, 4, 0]
    del t
    assert len(memo.of_tensors) == 0
