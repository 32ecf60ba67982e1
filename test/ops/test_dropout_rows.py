"""Dropout of rows: kernels against the factors in plain PyTorch, to the bit."""

import pytest
import torch
from support.kernel_check import HALF, LAYOUTS, rows_of

from pyg_sar import ops
from pyg_sar.ops import reference
from pyg_sar.ops.dropout import dropout_factors

TYPES = [torch.float64, *HALF]
SIZES = [(0, 3), (1, 1), (2, 257), (33, 5), (1500, 70), (33, 6)]
IDS = torch.randint(-(2**63), 2**63 - 1, (1500,), generator=torch.Generator().manual_seed(1))


def dropped(module, x, ids, seed, p):
    out = torch.full(x.shape, 77, dtype=x.dtype)
    module.dropout_rows_(out, x, ids, seed, p)
    return out


@pytest.mark.parametrize("dtype", TYPES)
def test_the_bits_of_factors(kernels, dtype):
    """Every shape, layout, seed and share in turn, among them nothing and everything."""
    shares, seeds = (0.5, 0.0, 1 - 2**-40, 0.1, 0.5, 1.0), (0, 7, 2**62 + 12345, 3, 2**63 - 1, 3)
    for k, ((n, width), p, seed) in enumerate(zip(SIZES, shares, seeds, strict=True)):
        x, ids = rows_of(n, width, dtype, layout=list(LAYOUTS)[k % len(LAYOUTS)]), IDS[:n]
        expected = x * dropout_factors(ids, width, p, seed, dtype)
        for module in (kernels, reference):
            assert torch.equal(dropped(module, x, ids, seed, p), expected)


def test_what_is_not_a_number_stays(kernels):
    x = torch.full((4, 3), torch.inf)
    expected = x * dropout_factors(IDS[:4], 3, 0.5, 1, x.dtype)
    assert expected.isnan().any() and expected.isinf().any()
    torch.testing.assert_close(dropped(kernels, x, IDS[:4], 1, 0.5), expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.skipif(not ops.KERNELS, reason="the kernels were not built, or are turned off")
def test_any_number_of_threads_gives_the_same_bits():
    x, found = rows_of(1500, 70, torch.float32), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(dropped(ops, x, IDS, 5, 0.5))
    torch.set_num_threads(1)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_as_an_operator_of_pytorch():
    x = torch.randn(4, 3)
    torch.library.opcheck(ops.dropout_rows_.default, (torch.empty(4, 3), x, IDS[:4], 3, 0.5))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.zeros(4)}, "'x' to be a matrix"),
        ({"id": torch.zeros(5, dtype=torch.int64)}, "'id' to be"),
        ({"id": torch.zeros(4, dtype=torch.int32)}, "'id' to be"),
        ({"p": 1.5}, "'p' from 0 to 1"),
        ({"out": torch.zeros(4, 2)}, "'out' of shape"),
        ({"out": torch.zeros(4, 3).double()}, "'out' of type"),
    ],
)
def test_wrong_arguments(kernels, change, why):
    args = {"out": torch.zeros(4, 3), "x": torch.zeros(4, 3), "id": torch.arange(4), "seed": 1, "p": 0.5}
    with pytest.raises(RuntimeError, match=why):
        kernels.dropout_rows_(*{**args, **change}.values())
