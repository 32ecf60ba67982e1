"""Moments of columns, sums of products, and rows scaled and shifted by column: kernels against double precision."""

import pytest
import torch
from support.cases import some
from support.kernel_check import HALF, LAYOUTS, rows_of

from pyg_sar import ops
from pyg_sar.ops import reference

TYPES = [torch.float64, *HALF]
# A block has 32 rows and 256 columns, a unit 1024 rows.
SIZES = [(0, 3), (1, 1), (2, 257), (33, 5), (1025, 300), (2049, 17)]


def moments(module, x):
    mean, m2 = torch.zeros(2, x.size(1), dtype=torch.float64)
    module.moments_(mean, m2, x)
    return mean, m2


def products(module, x, grad, center):
    sums, products = torch.ones(2, x.size(1), dtype=torch.float64)
    module.column_products_(sums, products, x, grad, center)
    return sums - 1, products - 1


def affine(module, x, vectors, grad=None, factor=None):
    out = torch.full(x.shape, 77, dtype=x.dtype)
    module.column_affine_(out, x, *vectors, grad, factor)
    return out


def vectors_of(count, width, mean=0.0):
    return [mean * (k == 0) + rows_of(1, width, torch.float64, seed=k)[0] for k in range(count)]


def error(found, truth):
    return (found.double() - truth).square().sum()


@pytest.mark.parametrize(("kernels", "mean", "dtype"), [
    *some(["compiled"], [0.0, 3.0], TYPES, every=2), *some(["triton"], [0.0, 3.0], TYPES, every=5),
], indirect=["kernels"])  # fmt: skip
def test_rounds_to_at_most_twice_the_error_of_the_reference(kernels, dtype, mean):
    """In double precision to 1e-10; every shape and layout in turn."""
    bad = dict.fromkeys(("mean", "m2", "sums", "products", "affine", "with gradient"), (0.0, 0.0))
    acc = reference.accumulator(dtype)
    for k, (n, width) in enumerate(SIZES):
        layout = list(LAYOUTS)[k % len(LAYOUTS)]
        x, grad = rows_of(n, width, dtype, mean, layout), rows_of(n, width, dtype, 0, layout, seed=9)
        center, scale, shift, factor = (v.to(acc) for v in vectors_of(4, width, mean))
        d, g, wide = x.double(), grad.double(), [v.double() for v in (center, scale, shift, factor)]
        true_mean = d.mean(0) if n > 0 else torch.zeros(width, dtype=torch.float64)
        truth = {
            "mean": true_mean, "m2": (d - true_mean).square().sum(0), "sums": g.sum(0),
            "products": (g * (d - wide[0])).sum(0), "affine": (d - wide[0]) * wide[1] + wide[2],
        }  # fmt: skip
        truth["with gradient"] = truth["affine"] + g * wide[3]
        for place, module in enumerate((kernels, reference)):
            found = dict(zip(truth, (
                *moments(module, x), *products(module, x, grad, center), affine(module, x, (center, scale, shift)),
                affine(module, x, (center, scale, shift), grad, factor),
            ), strict=True))  # fmt: skip
            for name, value in found.items():
                if dtype == torch.float64:
                    torch.testing.assert_close(value, truth[name], rtol=1e-10, atol=1e-10, msg=name)
                both = list(bad[name])
                both[place] += float(error(value, truth[name]))
                bad[name] = tuple(both)
    if dtype != torch.float64:
        for name, (ours, theirs) in bad.items():
            assert ours**0.5 <= 2 * theirs**0.5, name


def test_a_large_mean_costs_no_digits(kernels):
    """3000 with a deviation of 1, in single precision: the variance as of numbers around 0."""
    x = rows_of(5000, 40, torch.float32, 3000.0)
    mean, m2 = moments(kernels, x)
    d = x.double()
    torch.testing.assert_close(mean, d.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(m2, (d - d.mean(0)).square().sum(0), rtol=1e-6, atol=0)


def test_what_is_not_a_number_stays_in_its_column(kernels):
    x = rows_of(40, 3, torch.float32)
    x[7, 1], x[9, 2] = torch.nan, torch.inf
    for found in (*moments(kernels, x), *products(kernels, x, x, torch.zeros(3))):
        assert found.isfinite().tolist() == [True, False, False]
    out = affine(kernels, x, (torch.zeros(3), torch.ones(3), torch.zeros(3)))
    torch.testing.assert_close(out, x, equal_nan=True, rtol=0, atol=0)


@pytest.mark.skipif(not ops.KERNELS, reason="the kernels were not built, or are turned off")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [3000, 70_000])  # 70,000 rows of 64 floats go past the caches
def test_any_number_of_threads_gives_the_same_bits(dtype, n):
    x, grad = (rows_of(n, 64, dtype, seed=k) for k in (0, 1))
    vectors = [v.to(reference.accumulator(dtype)) for v in vectors_of(4, 64)]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = affine(ops, x, vectors[:3], grad, vectors[3])
        found.append((*moments(ops, x), *products(ops, x, grad, vectors[0]), out))
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    expected = affine(reference, x, vectors[:3], grad, vectors[3])
    torch.testing.assert_close(found[0][-1], expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-2)


def test_as_operators_of_pytorch():
    x, vector = torch.randn(4, 3), torch.zeros(3)
    for op, args in (
        (ops.moments_, (torch.zeros(3).double(), torch.zeros(3).double(), x)),
        (ops.column_products_, (torch.zeros(3).double(), torch.zeros(3).double(), x, x, vector)),
        (ops.column_affine_, (torch.empty(4, 3), x, vector, vector, vector, x, vector)),
    ):
        torch.library.opcheck(op.default, args)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.zeros(4)}, "'x' to be a matrix"),
        ({"grad": torch.zeros(5, 3)}, "'grad' of shape"),
        ({"grad": torch.zeros(4, 3).double()}, "'grad' of type"),
        ({"center": torch.zeros(2)}, "'center'"),
        ({"center": torch.zeros(6)[::2]}, "'center' to be contiguous"),
        ({"scale": torch.zeros(3).double()}, "'scale'"),
        ({"factor": None}, "come together"),
        ({"out": torch.zeros(3, 4).t()}, "'out' to be contiguous"),
    ],
)
def test_wrong_arguments(kernels, change, why):
    args = {"out": torch.zeros(4, 3), "x": torch.zeros(4, 3), "center": torch.zeros(3), "scale": torch.zeros(3),
            "shift": torch.zeros(3), "grad": torch.zeros(4, 3), "factor": torch.zeros(3)}  # fmt: skip
    with pytest.raises(RuntimeError, match=why):
        kernels.column_affine_(*{**args, **change}.values())
