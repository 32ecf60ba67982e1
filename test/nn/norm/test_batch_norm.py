"""Batch normalisation on several workers against torch and PyG on all rows."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.cases import some
from support.nasty_graph import close

from pyg_sar.distributed.collectives import global_merge
from pyg_sar.nn import BatchNorm, BatchNorm1d
from pyg_sar.nn.norm import columns

F = 5
# Rows of each of four workers: none, one, most.
SIZES = {"even": [10, 10, 10, 10], "uneven": [0, 1, 30, 2], "single rows": [1, 1, 0, 1], "one has all": [0, 0, 0, 8]}
OPTIONS = [
    {},
    {"momentum": None},
    {"momentum": 0.5, "eps": 1e-2},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


def batches(sizes, dtype, mean=0.0):
    """Rows of all workers for three steps, and gradients of their outputs."""
    g = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x, grad = torch.randn(2, 3, n, F, generator=g, dtype=torch.float64)
    scale = torch.tensor([1.0, 3.0, 1.0, 0.1, 1.0], dtype=torch.float64)
    return (x * scale + mean).to(dtype), grad.to(dtype)


def cut(group, rows, sizes):
    rank = dist.get_rank(group)
    last = group.size() - 1
    return rows.split([*sizes[:last], sum(sizes[last:])])[rank]


def norms(kind, options, dtype, group=None):
    reference = {"torch": torch.nn.BatchNorm1d, "pyg": torch_geometric.nn.BatchNorm}[kind](F, **options).to(dtype)
    ours = {"torch": BatchNorm1d, "pyg": BatchNorm}[kind](F, **options, group=group).to(dtype)
    g = torch.Generator().manual_seed(1)
    for p in reference.parameters():
        p.data = torch.randn(F, generator=g, dtype=torch.float64).to(p.dtype)
    ours.load_state_dict(reference.state_dict(), strict=True)
    return reference, ours


def step(norm, x, grad):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    out = norm(x)
    out.backward(grad)
    return out.detach(), x.grad, {n: p.grad for n, p in norm.named_parameters()}


def check(group, kind, options, method, dtype=torch.float64):
    sizes = SIZES[method]
    reference, ours = norms(kind, options, dtype, group)
    for x, grad in zip(*batches(sizes, dtype), strict=True):
        out, d_x, d_p = step(reference, x, grad)
        mine, d_mine, d_p_mine = step(ours, cut(group, x, sizes), cut(group, grad, sizes))
        close(mine, cut(group, out, sizes), "output")
        close(d_mine, cut(group, d_x, sizes), "gradient of x")
        for name, value in d_p.items():
            dist.all_reduce(d_p_mine[name], group=group)
            close(d_p_mine[name], value, f"gradient of {name}")
        buffers = dict(ours.named_buffers())
        assert buffers.keys() == dict(reference.named_buffers()).keys()
        for name, value in reference.named_buffers():
            assert buffers[name].dtype == value.dtype
            close(buffers[name].double(), value.double(), name)
    reference.load_state_dict(ours.state_dict(), strict=True)
    reference.eval(), ours.eval()
    x = batches(sizes, dtype)[0][0]
    close(ours(cut(group, x, sizes)), cut(group, reference(x), sizes), "output in evaluation")


def check_all(group, kind, method):
    for options in OPTIONS:
        check(group, kind, options, method)


@pytest.mark.parametrize(("workers", "method", "kind"), some([1, 2, 3, 4], SIZES, ["torch", "pyg"], every=3))
def test_equals_the_whole(pool, workers, method, kind):
    pool.run(workers, check_all, kind, method)


def large_mean(group):
    """Errors of output and gradient, of ours and of torch's, in single precision."""
    sizes = SIZES["uneven"]
    reference, ours = norms("torch", {}, torch.float32, group)
    exact = torch.nn.BatchNorm1d(F).double()
    exact.load_state_dict(reference.state_dict())
    errors = []
    x, grad = (t[0] for t in batches([100 * s for s in sizes], torch.float32, mean=3000.0))
    truth = step(exact, x.double(), grad.double())
    theirs = step(reference, x, grad)
    ours_out = step(ours, *(cut(group, t, [100 * s for s in sizes]) for t in (x, grad)))
    for k in range(2):
        whole = cut(group, truth[k], [100 * s for s in sizes])
        mine = (ours_out[k] - whole).square().sum()
        dist.all_reduce(mine, group=group)
        errors.append((mine.sqrt().item(), (theirs[k] - truth[k]).norm().item()))
    for name in ("running_mean", "running_var"):
        value = getattr(exact, name)
        mine, others = ((getattr(n, name) - value).abs().max().item() for n in (ours, reference))
        errors.append((mine, others + torch.finfo(torch.float32).eps * value.abs().max().item()))
    return errors


@pytest.mark.parametrize("workers", [2, 4])
def test_large_mean_costs_no_digits(pool, workers):
    """Mean 3000, deviation 1: a mean of squares would have no correct digit left."""
    for errors in pool.run(workers, large_mean):
        for mine, theirs in errors:
            assert mine <= 2 * theirs


def single_row(group, kind, options):
    norm = {"torch": BatchNorm1d, "pyg": BatchNorm}[kind](F, **options, group=group)
    return norm(torch.ones(int(dist.get_rank(group) == 1), F))


@pytest.mark.parametrize("kind", ["torch", "pyg"])
def test_one_row_in_total_raises_everywhere(pool, kind):
    for outcome in pool.outcomes(3, single_row, kind, {}):
        assert outcome[1] == "ValueError"
        assert "more than 1 value per channel" in outcome[2]
        assert "1 rows on all workers" in outcome[2]


def test_one_row_in_total_may_be_allowed(pool):
    options = {"allow_single_element": True}
    alone = torch_geometric.nn.BatchNorm(F, **options)(torch.ones(1, F))
    first, second, third = pool.run(3, single_row, "pyg", options)
    close(second, alone, "row", 1e-6)
    assert len(first) == len(third) == 0
    with pytest.raises(ValueError, match="requires 'track_running_stats'"):
        BatchNorm(F, allow_single_element=True, track_running_stats=False)


def allowed_but_not_needed(group):
    norm = BatchNorm(F, allow_single_element=True, group=group)
    x = torch.arange(4.0 * F).view(4, F)
    return norm(x[dist.get_rank(group)][None]), norm.module.running_mean


def test_one_row_on_every_worker_is_a_batch(pool):
    whole = torch_geometric.nn.BatchNorm(F)
    expected = whole(torch.arange(4.0 * F).view(4, F))
    for rank, (row, running) in enumerate(pool.run(4, allowed_but_not_needed)):
        close(row, expected[rank : rank + 1], "row", 1e-5)
        close(running, whole.module.running_mean, "running mean", 1e-5)


def low_precision(group, weights, dtype):
    """Types as in torch, errors at most twice its own."""
    reference, ours = norms("torch", {}, torch.float32)
    ours.group = group
    reference, ours = reference.to(weights), ours.to(weights)
    exact = torch.nn.BatchNorm1d(F).double()
    exact.load_state_dict(reference.state_dict())
    sizes = SIZES["uneven"]
    x, grad = (t[0] for t in batches(sizes, dtype))
    theirs, truth = step(reference, x, grad), step(exact, x.double(), grad.double())
    mine = step(ours, cut(group, x, sizes), cut(group, grad, sizes))
    errors = []
    for k in range(2):
        assert mine[k].dtype == theirs[k].dtype == dtype
        errors.append((mine[k].double() - cut(group, truth[k], sizes)).square().sum())
        errors.append((theirs[k].double() - truth[k]).square().sum())
    for name, p in ours.named_parameters():
        assert p.grad.dtype == weights, name
    for name, value in reference.named_buffers():
        assert getattr(ours, name).dtype == value.dtype
        close(getattr(ours, name).double(), value.double(), name, 0.02)
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["same", torch.float32])
def test_low_precision(pool, weights, dtype):
    weights = dtype if weights == "same" else weights
    results = pool.run(3, low_precision, weights, dtype)
    for k in (0, 2):
        assert sum(r[k] for r in results).sqrt() <= 2 * results[0][k + 1].sqrt()


def counts(group, numbers):
    """Merge moments of batches that nobody could hold."""
    mean, m2 = torch.tensor([[float(dist.get_rank(group))], [2.0]], dtype=torch.float64)
    count, mean, m2 = global_merge(torch.tensor(numbers[dist.get_rank(group)]), mean, m2, group)
    return int(count), mean, m2


@pytest.mark.parametrize("numbers", [[2**24 + 1, 2**24 + 1], [2**31 + 5, 1], [2**24 + 1, 0], [2**40 + 1, 2**24 - 1]])
def test_counts_are_exact_beyond_single_precision(pool, numbers):
    a, b = numbers
    for count, mean, m2 in pool.run(2, counts, numbers):
        assert isinstance(count, int)
        assert count == a + b
        close(mean, torch.tensor([b / (a + b)], dtype=torch.float64), "mean")
        close(m2, torch.tensor([4 + a * b / (a + b)], dtype=torch.float64), "squared deviations")


def wrong_width(group):
    norm = BatchNorm1d(F, group=group, affine=False)
    for shape in ((4, 1), (4, F + 1), (4,), (4, F, 2)):
        with pytest.raises(ValueError, match=r"shape \[num_nodes, 5\]"):
            norm(torch.rand(shape))
    return norm.running_mean


def test_wrong_shapes_are_refused(pool):
    for running_mean in pool.run(2, wrong_width):
        assert not running_mean.any()


def second_derivative(group):
    x = torch.rand(4, F, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(BatchNorm1d(F, group=group)(x).sum(), x, create_graph=True)


def test_second_derivative_is_refused(pool):
    pool.run(2, second_derivative)


def test_without_a_group_it_is_the_parent():
    x = torch.rand(6, F)
    for ours, theirs in ((BatchNorm1d, torch.nn.BatchNorm1d), (BatchNorm, torch_geometric.nn.BatchNorm)):
        with mock.patch.object(columns.NormaliseColumns, "apply", side_effect=AssertionError):
            assert torch.equal(ours(F)(x), theirs(F)(x))
            with pytest.raises(ValueError, match="more than 1 value"):
                ours(F)(x[:1])
