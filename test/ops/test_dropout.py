"""The mask of attention dropout: random enough, and the same wherever it is computed."""

import itertools

import pytest
import torch

from pyg_sar.graph import Seeds
from pyg_sar.ops.dropout import WORD, dropout_factors, mix

E, H = 1 << 15, 8
# Deviations from the expected number in standard deviations; chances of about 1e-7 for each comparison.
SIGMA = 5.3


def mask(ids, seed, heads=H, p=0.5):
    return dropout_factors(ids, heads, p, seed, torch.float64) == 0


def off(hits, p):
    """How many standard deviations the number of hits is off what chance ``p`` gives."""
    n = hits.shape[0]
    return ((hits.sum(0) - n * p) / (n * p * (1 - p)) ** 0.5).abs().max().item()


def mix_reference(h):
    """The 32-bit hash in Python's integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ (h >> shift)) * factor & WORD
    return h ^ (h >> 16)


def test_mix_is_the_32_bit_hash():
    words = torch.cat([torch.arange(1000), torch.tensor([WORD, WORD - 1, 1 << 31]), torch.randint(1 << 32, (1000,))])
    assert mix(words).tolist() == [mix_reference(w) for w in words.tolist()]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.6, 0.95])
def test_rate_and_scale(p):
    ids = torch.arange(E)
    for seed in (0, 1, 2**31, 2**32 + 1, 2**61 + 12345):
        factors = dropout_factors(ids, H, p, seed, torch.float64)
        assert set(factors.unique().tolist()) == {0.0, 1 / (1 - p)}
        assert off(factors == 0, p) < SIGMA


def test_extreme_rates():
    ids = torch.arange(1000)
    assert (dropout_factors(ids, 2, 0.0, 3, torch.float32) == 1).all()
    assert (dropout_factors(ids, 2, 1.0, 3, torch.float32) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_type_and_shape(dtype):
    factors = dropout_factors(torch.arange(7), 3, 0.5, 3, dtype)
    assert factors.dtype == dtype
    assert factors.shape == (7, 3)
    assert dropout_factors(torch.arange(0), 3, 0.5, 3, dtype).shape == (0, 3)


def ids_of(kind):
    """Ids as they occur: a range, every 64th, beyond 32 bits, and the negative ones of self-loops."""
    start, step = {"range": (0, 1), "sparse": (0, 64), "beyond 2^24": (2**24 - 7, 1), "beyond 2^32": (2**33 + 5, 1),
                   "loops": (-E, 1)}[kind]  # fmt: skip
    return torch.arange(E) * step + start


KINDS = ["range", "sparse", "beyond 2^24", "beyond 2^32", "loops"]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_independent(kind):
    for seed in (0, 7):
        drop = mask(ids_of(kind), seed)
        for a, b in itertools.combinations(range(H), 2):
            assert off((drop[:, a] == drop[:, b])[:, None], 0.5) < SIGMA


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_edges_are_independent(kind):
    drop = mask(ids_of(kind), 11)
    for bit in range(14):
        partner = torch.arange(E) ^ (1 << bit)
        first = torch.arange(E) < partner  # every pair once
        assert off((drop == drop[partner])[first], 0.5) < SIGMA


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_are_independent(kind):
    """Edge by edge, and for any pair of edges that differ in a bit: seeds that are added to ids would swap them."""
    ids = ids_of(kind)
    for seed, other in ((0, 1), (1, 2), (5, 4), (0, 2**20), (3, 3 + 2**32), (2**61, 2**61 + 1)):
        drop, again = mask(ids, seed), mask(ids, other)
        assert off(drop == again, 0.5) < SIGMA
        for bit in range(14):
            assert off(drop == again[torch.arange(E) ^ (1 << bit)], 0.5) < SIGMA


def test_every_edge_has_its_own_history():
    """Over the seeds of consecutive calls each edge is dropped a binomial number of times (chi-square test)."""
    calls, edges = 256, 2048
    seeds = Seeds(3)
    total = sum(mask(torch.arange(edges), seeds.draw(), 2).double() for _ in range(calls))
    chi = ((total - calls / 2).square() / (calls / 4)).sum().item()
    assert abs(chi - total.numel()) < 5 * (2 * total.numel()) ** 0.5


def test_pairs_of_bits_are_uniform():
    """Four heads of one edge: all 16 patterns equally often (chi-square test)."""
    drop = mask(torch.arange(E), 99, 4)
    counts = torch.bincount((drop * torch.tensor([1, 2, 4, 8])).sum(1), minlength=16).double()
    assert ((counts - E / 16).square() / (E / 16)).sum() < 45  # 15 degrees of freedom, chance 1e-4


def test_ids_are_used_whole():
    """No two of these ids may share a mask: 24, 32 and 53 bits are where narrower types would join them."""
    high = [2**24, 2**24 + 1, 2**31 + 3, 2**32 + 5, 2**33 + 5, 2**53, 2**53 + 1, 2**62 + 5]
    base = torch.tensor([5, *high, -1, -2, -(2**32) - 1])
    rows = mask(base, 17, heads=64)
    assert len({tuple(r) for r in rows.tolist()}) == len(base)


def unmix(h):
    """The word that is scrambled to ``h``."""
    first, second = (pow(factor, -1, 1 << 32) for factor in (0x7FEB352D, 0x846CA68B))
    h = (h ^ (h >> 16)) * second & WORD
    h = (h ^ (h >> 15) ^ (h >> 30)) * first & WORD
    return h ^ (h >> 16)


def test_no_two_edges_share_their_masks_for_ever():
    """Beyond 2^32 edges, and with self-loops, some pairs of ids are scrambled to the same word of 32 bits: to others by
    each seed, not to those that scrambling without a seed would join.
    """
    ids = list(range(100))
    others = [[(high << 32) + unmix(mix_reference(k) ^ high) for k in ids] for high in (1, 2, WORD)]
    assert [mix_reference(other & WORD) ^ 1 for other in others[0]] == [mix_reference(k) for k in ids]
    for high in others:
        high = torch.tensor([other - (1 << 64) * (other >> 63) for other in high])
        for seed in range(5):
            assert not (mask(torch.tensor(ids), seed, 64) == mask(high, seed, 64)).all(1).any()


def test_mask_depends_on_id_and_seed_alone():
    ids = torch.randperm(1000)
    whole = dropout_factors(torch.arange(1000), 3, 0.4, 6, torch.float32)
    assert torch.equal(dropout_factors(ids, 3, 0.4, 6, torch.float32), whole[ids])
    assert torch.equal(dropout_factors(torch.arange(1000), 1, 0.4, 6, torch.float32), whole[:, :1])


def test_seeds_never_repeat_soon():
    drawn = [Seeds(0).draw(), Seeds(1).draw()]
    seeds = Seeds(torch.iinfo(torch.int64).max)  # torch.initial_seed() has 64 bits
    drawn += [seeds.draw() for _ in range(1000)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= d < 2**62 for d in drawn)
    seeds.manual_seed(0)
    assert seeds.draw() == drawn[0]
