"""The operators in plain PyTorch against dense linear algebra."""

import math

import pytest
import torch
from support.nasty_graph import close

from pyg_sar import ops
from pyg_sar.ops import reference
from pyg_sar.ops.dropout import dropout_factors
from pyg_sar.ops.reference import (
    ADDITIVE,
    DOT,
    GATV2,
    accumulator,
    attention_,
    attention_grad_,
    extremum_,
    extremum_grad_,
    sddmm_,
    segment_max,
    segment_sum,
    spmm_,
)

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


INDEX = pytest.mark.parametrize("index", [torch.int32, torch.int64])


@INDEX
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (1, 3), (3, 4), (2, 0)])
@pytest.mark.parametrize("reorder", [False, True])
def test_spmm(problem, heads, channels, index, reorder):
    """Without weights, with one for each edge, and with one for each edge and head; it adds to what is there."""
    ptr, row, col = problem
    x = torch.randn(N, heads * channels, dtype=torch.float64)
    for weights in (0, 1, heads):
        weight = torch.randn(len(row), weights, dtype=torch.float64) if weights else None
        perm = torch.randperm(len(row)) if reorder else None
        out = torch.randn(M, heads * channels, dtype=torch.float64)
        each = torch.ones(len(row), 1, dtype=torch.float64) if weight is None else weight
        each = each.expand(-1, heads) if perm is None or weight is None else each[perm].expand(-1, heads)
        pairs = zip(each.unbind(1), x.chunk(heads, 1), strict=True)
        expected = out + torch.cat([matrix(row, col, w) @ part for w, part in pairs], 1)
        spmm_(out, ptr.to(index), col.to(index), x, weight, None if perm is None else perm.to(index), False)
        close(out, expected, f"{weights} weights")


def test_spmm_of_rows_that_are_not_contiguous(problem):
    ptr, row, col = problem
    x, out = torch.randn(3, N, dtype=torch.float64).t(), torch.zeros(M, 3, dtype=torch.float64)
    spmm_(out, ptr, col, x, None, None, False)
    close(out, matrix(row, col, torch.ones(len(row)).double()) @ x, "spmm")


def test_spmm_without_sources_or_destinations():
    none = torch.empty(0, dtype=torch.int32)
    spmm_(torch.empty(0, 2), torch.zeros(1, dtype=torch.int32), none, torch.rand(3, 2), None, None, False)
    out = torch.ones(3, 2)
    spmm_(out, torch.zeros(4, dtype=torch.int32), none, torch.rand(0, 2), None, None, False)
    assert out.tolist() == [[1.0, 1.0]] * 3


@INDEX
@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (1, 3), (3, 1), (2, 3), (2, 0)])
def test_sddmm(problem, heads, channels, index):
    ptr, row, col = problem
    y, x = (torch.randn(n, heads * channels, dtype=torch.float64) for n in (M, N))
    out = torch.full((len(row), heads), 7.0, dtype=torch.float64)
    sddmm_(out, ptr.to(index), col.to(index), y, x)
    close(out, (y[row] * x[col]).view(len(row), heads, channels).sum(-1), "products")


@pytest.mark.parametrize("largest", [False, True])
def test_extremum(problem, largest):
    """Merged with what is there, whose entries count as well."""
    ptr, row, col = problem
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (N, 4), generator=g).double()
    best, count = torch.randint(-2, 3, (M, 4), generator=g).double(), torch.ones(M, 4, dtype=torch.float64)
    sign = 1 if largest else -1
    entries = [torch.cat([best[i : i + 1], sign * x[col[row == i]]]) for i in range(M)]
    extremum_(best, count, ptr, col, x, largest)
    assert torch.equal(best, torch.stack([e.amax(0) for e in entries]))
    assert torch.equal(count, torch.stack([(e == e.amax(0)).sum(0) for e in entries]).double())


def test_gradient_of_the_extremum(problem):
    _, row, col = problem
    perm = col.argsort(stable=True)
    src_ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(col, minlength=N).cumsum(0)])
    g = torch.Generator().manual_seed(1)
    x, best = (torch.randint(-1, 2, (n, 4), generator=g).double() for n in (N, M))
    share, out = torch.randn(M, 4, generator=g, dtype=torch.float64), torch.ones(N, 4, dtype=torch.float64)
    expected = out.clone()
    for i, j in zip(row.tolist(), col.tolist(), strict=True):
        expected[j] += share[i] * (x[j] == best[i])
    extremum_grad_(out, src_ptr, row[perm], x, best, share)
    close(out, expected, "gradient")


def softmax_of(row, col, key, value, query, edge, att, kind, parameter, drop):
    """Attention as dense matrices of one head after the other; every edge has an entry of its own, so M x E."""
    heads = drop.size(1)
    incidence = torch.zeros(M, len(row), dtype=torch.bool).index_put((row, torch.arange(len(row))), torch.tensor(True))
    terms = key[col]
    if kind == DOT:
        terms = terms if edge is None else terms + edge
        score = parameter * (query[row] * terms).unflatten(1, (heads, -1)).sum(-1)
    else:
        terms = sum((t for t in (None if query is None else query[row], edge) if t is not None), terms)
        score = torch.where(terms > 0, terms, parameter * terms)
        score = score if kind == ADDITIVE else (score * att).unflatten(1, (heads, -1)).sum(-1)
    values = value[col] + (edge if kind == DOT and edge is not None else 0)
    outs, logs = [], []
    for h, part in enumerate(values.chunk(heads, 1)):
        dense = score[:, h].expand(M, -1).masked_fill(~incidence, -torch.inf)
        logs.append(dense.logsumexp(1))
        outs.append((dense.softmax(1).nan_to_num() * drop[:, h]) @ part)
    return torch.stack(logs, 1), torch.cat(outs, 1)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("with_edge", [False, True])
@pytest.mark.parametrize(("kind", "with_query"), [(ADDITIVE, False), (ADDITIVE, True), (GATV2, True), (DOT, True)])
def test_attention(problem, kind, with_query, with_edge, p):
    """Two blocks at once are one softmax; its gradients are those of dense matrices."""
    (ptr, row, col), heads, channels, parameter, seed = problem, 2, 3, 0.3, 99
    g = torch.Generator().manual_seed(2)

    def rows(count, width):
        return torch.randn(count, width, generator=g, dtype=torch.float64)

    width = heads if kind == ADDITIVE else heads * channels
    value = rows(N, heads * channels)
    inputs = {
        "key": value if kind == GATV2 else rows(N, width),
        "value": value,
        "query": rows(M, width) if with_query else None,
        "edge": rows(len(row), width) if with_edge else None,
        "att": rows(1, heads * channels)[0] if kind == GATV2 else None,
    }
    e_id = torch.arange(len(row)) * 2**33 if p > 0 else None
    drop = torch.ones(len(row), heads, dtype=torch.float64)
    drop = drop if e_id is None else dropout_factors(e_id, heads, p, seed, torch.float64, 3)
    settings = (kind, parameter, e_id, seed, p, 3)

    leaves = {k: t.clone().requires_grad_() for k, t in inputs.items() if t is not None}
    if kind == GATV2:
        leaves["key"] = leaves["value"]
    arguments = {k: leaves.get(k) for k in inputs}
    lse, expected = softmax_of(row, col, **arguments, kind=kind, parameter=parameter, drop=drop)
    peak, total = torch.full((M, heads), -torch.inf, dtype=torch.float64), torch.zeros(M, heads, dtype=torch.float64)
    out = torch.zeros(M, heads * channels, dtype=torch.float64)
    attention_(peak, total, out, ptr, col, *inputs.values(), *settings)
    found = out.unflatten(1, (heads, channels)) / total.where(total > 0, 1).unsqueeze(-1)
    close(found.flatten(1), expected.detach(), "output")
    close(peak + total.log(), lse.detach(), "log-sum-exp")
    again = peak.clone(), total.clone(), out
    attention_(*again, ptr, col, *inputs.values(), *settings)
    close(again[0] + again[1].log(), lse.detach() + math.log(2), "log-sum-exp of twice the edges")

    grad = rows(M, heads * channels)
    inner = (grad * expected.detach()).unflatten(1, (heads, channels)).sum(-1)
    perm = col.argsort(stable=True)
    src_ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(col, minlength=N).cumsum(0)])
    names = [k for k in leaves if k != "key" or kind != GATV2]
    truth = dict(zip(names, torch.autograd.grad(expected, [leaves[k] for k in names], grad), strict=True))
    for given in (inner, None):
        totals = {k: torch.ones_like(leaves[k]) for k in names}
        attention_grad_(
            *(totals.get(k) for k in ("value", "key", "query", "edge", "att")), ptr, col, src_ptr, row[perm], perm,
            *inputs.values(), peak, total, given, grad, *settings,
        )  # fmt: skip
        for name, d in truth.items():
            close(totals[name], 1 + d, f"gradient of '{name}'")


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
@pytest.mark.parametrize("module", [reference, ops], ids=["reference", "ops"])
def test_sums_in_half_precision_round_once(module, dtype):
    """4096 times 1 + 1/8: a running sum in half precision would stop growing."""
    n = 4096
    ptr, col = torch.tensor([0, n]), torch.zeros(n, dtype=torch.long)
    x = torch.full((1, 3), 1.125, dtype=dtype)
    for weight, expected in ((None, n * 1.125), (torch.full((n, 1), 2.0), n * 2.25)):
        out = torch.zeros(1, 3)
        module.spmm_(out, ptr, col, x, weight, None, False)
        assert out.tolist() == [[expected] * 3]
