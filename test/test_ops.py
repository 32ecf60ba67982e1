"""Block-level operations against dense linear algebra."""

import pytest
import torch
from problem import close

from pyg_sar.ops import accumulator, sddmm, segment_max, segment_sum, spmm

M, N, E = 7, 5, 40


@pytest.fixture(params=[0, 1, E], ids="{} edges".format)
def problem(request):
    """Row pointer, rows and columns with multi-edges and empty rows, and the dense incidence of edges."""
    g = torch.Generator().manual_seed(0)
    row = torch.randint(M - 1, (request.param,), generator=g).sort().values
    row[row == 2] = 3
    col = torch.randint(N, (request.param,), generator=g)
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(row, minlength=M).cumsum(0)])
    return ptr, row, col


def matrix(row, col, weight):
    return torch.zeros(M, N, dtype=weight.dtype).index_put((row, col), weight, accumulate=True)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0)])
def test_spmm(problem, shape, index):
    ptr, row, col = problem
    x = torch.randn(N, *shape, dtype=torch.float64)
    weight = torch.randn(len(row), dtype=torch.float64)
    for w in (None, weight):
        dense = matrix(row, col, torch.ones(len(row), dtype=torch.float64) if w is None else w)
        expected = torch.einsum("mn,n...->m...", dense, x)
        found = spmm(ptr.to(index), col.to(index), x, w)
        assert found.shape == (M, *shape)
        close(found, expected, "spmm")


@pytest.mark.parametrize("heads", [1, 3])
def test_spmm_with_a_weight_for_each_head(problem, heads):
    ptr, row, col = problem
    x, weight = torch.randn(N, heads, 4, dtype=torch.float64), torch.randn(len(row), heads, dtype=torch.float64)
    expected = torch.stack([matrix(row, col, weight[:, h]) @ x[:, h] for h in range(heads)], 1)
    close(spmm(ptr, col, x, weight), expected, "spmm")


def test_spmm_of_rows_that_are_not_contiguous(problem):
    ptr, row, col = problem
    x = torch.randn(3, N, dtype=torch.float64).t()
    close(spmm(ptr, col, x), matrix(row, col, torch.ones(len(row)).double()) @ x, "spmm")


def test_spmm_without_sources_or_destinations():
    none = torch.empty(0, dtype=torch.int32)
    assert spmm(torch.zeros(1, dtype=torch.int32), none, torch.rand(3, 2)).shape == (0, 2)
    assert spmm(torch.zeros(4, dtype=torch.int32), none, torch.rand(0, 2)).tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_sddmm(problem, shape, index):
    ptr, row, col = problem
    ptr, col = ptr.to(index), col.to(index)
    y, x = torch.randn(M, *shape, dtype=torch.float64), torch.randn(N, *shape, dtype=torch.float64)
    product = y[row] * x[col]
    whole = product.flatten(1).sum(-1) if shape else product
    close(sddmm(ptr, row, col, y, x, heads=False), whole, "one product")
    if shape:
        each = product.flatten(2).sum(-1) if len(shape) > 1 else product
        close(sddmm(ptr, row, col, y, x, heads=True), each, "one product for each head")


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_segments(problem, shape):
    _, row, _ = problem
    values = torch.randn(len(row), *shape, dtype=torch.float64)
    total, largest = segment_sum(row, M, values), segment_max(row, M, values)
    for i in range(M):
        mine = values[row == i]
        close(total[i], mine.sum(0), "sum")
        assert torch.equal(largest[i], mine.amax(0) if len(mine) else torch.full(shape, -torch.inf).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_accumulator(dtype):
    assert accumulator(dtype) == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_round_once(dtype):
    """4096 times 1 + 1/8: a running sum in half precision would stop growing."""
    n = 4096
    ptr, col = torch.tensor([0, n]), torch.zeros(n, dtype=torch.long)
    x = torch.full((1, 3), 1.125, dtype=dtype)
    assert spmm(ptr, col, x).tolist() == [[n * 1.125] * 3]
    assert spmm(ptr, col, x, torch.full((n,), 2.0, dtype=torch.float32)).tolist() == [[n * 2.25] * 3]
    assert spmm(ptr, col, x).dtype == dtype
