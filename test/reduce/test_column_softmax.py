"""Softmax over the in-edges by column, against PyG's aggregation."""

import pytest
import torch
from support.nasty_graph import NUM_NODES, edges
from torch.nn import Parameter
from torch_geometric.nn import SoftmaxAggregation

from pyg_sar import shard
from pyg_sar.aggregate import aggregate
from pyg_sar.reduce import ColumnSoftmax, column_softmax
from pyg_sar.reduce.column_softmax import reference

N, F = NUM_NODES, 5


def both(x, t, parts, semi_grad=False):
    """Output and gradients of rows and of ``t`` by PyG and by the reduction over a number of shards."""
    found, weight = [], torch.linspace(-1, 2, N * F, dtype=x.dtype).view(N, F)
    for ours in (False, True):
        leaf = x.detach().clone().requires_grad_()
        learn = isinstance(t, Parameter)
        if ours:
            it = shard(edges(), N, parts).graph
            reduce = ColumnSoftmax(it.degree, 1.0 if learn else t, semi_grad)
            out = aggregate(it, reduce, leaf, const=[t] if learn else [])
        else:
            aggr = SoftmaxAggregation(1.0, learn, semi_grad)
            aggr.t = t
            src, dst = edges()
            out = aggr(leaf[src], dst, dim_size=N, dim=0)
        found.append((out.detach(), *torch.autograd.grad((out * weight).sum(), [leaf, *[t] * learn])))
    return found


def off(found, truth, scale=None):
    scale = truth.abs().max().clamp(min=1e-30) if scale is None else scale
    return float((found.double() - truth).abs().max() / scale)


# What is added to the rows of each of three shards, and how far rows lie apart in them.
APART = {
    "near": ((0, 0, 0), (1, 1, 1)),
    "shards apart": ((0, 3000, -500), (1, 1, 1)),
    "the last one highest": ((-4000, 0, 4000), (1, 1, 1)),
    "rows of one apart": ((0, 0, 0), (1, 1000, 1)),
    "rows of the first apart": ((2000, 0, 2100), (3000, 1, 1)),
    "all apart": ((0, 500, 0), (1000, 1000, 1000)),
}


@pytest.mark.parametrize("columns", [2, 128])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("apart", APART)
def test_equals_pyg(monkeypatch, apart, parts, columns):
    """Whichever way blocks go, and whatever follows it: a destination has edges from one shard, from two, from all."""
    monkeypatch.setattr("pyg_sar.reduce.base.COLUMNS", columns)
    if columns == 2:  # and some rows at a time
        monkeypatch.setattr(column_softmax, "spans", lambda x: (slice(k, k + 7) for k in range(0, len(x), 7)))
    torch.manual_seed(0)
    shift, scale = (torch.tensor(t, dtype=torch.float64) for t in APART[apart])
    of = torch.arange(N) * 3 // N
    x = torch.randn(N, F, dtype=torch.float64) * scale[of, None] + shift[of, None]
    for t in (Parameter(torch.tensor([0.7], dtype=torch.float64)), 1.0, -0.5):
        for semi_grad in (False, True)[: 1 if isinstance(t, Parameter) else 2]:
            expected, found = both(x, t, parts, semi_grad)
            for k, (a, b) in enumerate(zip(found, expected, strict=True)):
                terms = None if k < 2 else (x * expected[1]).abs().sum()  # whose sum is almost nothing, in both
                assert off(a, b, terms) < 1e-10, (t, semi_grad, k)


def test_both_ways_are_gone(monkeypatch):
    """The shards that the test above takes to be near are summed up, those with rows apart are not."""
    ways = []
    monkeypatch.setattr(column_softmax, "reference", lambda *args: ways.append(reference(*args)) or ways[-1])
    torch.manual_seed(0)
    x = torch.randn(N, F, dtype=torch.float64)
    x[N // 2 :] *= 1000
    both(x, 1.0, 2)
    assert sorted(way is None for way in ways) == [False, False, True, True]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("scale", "shift"), [(1, 0), (8, 0), (1, 1000), (30, -5), (0.01, 30)])
def test_error_at_most_twice_that_of_pyg(scale, shift, parts):
    """In single precision, against double."""
    ours, theirs = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        x = (torch.randn(N, F) * scale + shift).float()
        t = Parameter(torch.tensor([1.0]))
        truth, _ = both(x.double(), Parameter(t.double()), parts)
        expected, found = both(x, t, parts)
        ours.append([off(a, b) for a, b in zip(found, truth, strict=True)])
        theirs.append([off(a, b) for a, b in zip(expected, truth, strict=True)])
    for k, (a, b) in enumerate(zip(torch.tensor(ours).mean(0), torch.tensor(theirs).mean(0), strict=True)):
        assert a <= 2 * b, k


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_no_number_stays_where_pyg_has_it(parts, value):
    torch.manual_seed(0)
    x = torch.randn(N, F, dtype=torch.float64)
    x[3, 1] = value
    (expected, _), (found, _) = both(x, 1.0, parts)
    assert torch.equal(found.isfinite(), expected.isfinite()) and not expected.isfinite().all()
    torch.testing.assert_close(found[expected.isfinite()], expected[expected.isfinite()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Sums are in single precision, as is what is rounded once."""
    torch.manual_seed(0)
    x = torch.randn(N, F).to(dtype)
    truth, _ = both(x.double(), 1.0, 3)
    expected, found = both(x, 1.0, 3)
    for a, b, c in zip(found, expected, truth, strict=True):
        assert a.dtype == dtype and off(a, c) <= 2 * off(b, c)
