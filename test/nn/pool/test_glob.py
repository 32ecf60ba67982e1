"""Readouts on several workers against PyG on all rows."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.nasty_graph import close

import pyg_sar
import pyg_sar.nn
from pyg_sar.distributed.simulated import Workers

POOLS = ("global_add_pool", "global_mean_pool", "global_max_pool")
SIZES = {"even": [5, 5, 5, 5], "uneven": [0, 1, 17, 2]}


def check(group, name, method, examples):
    theirs, ours = (getattr(library, name) for library in (torch_geometric.nn, pyg_sar.nn))
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (20, 3), generator=g).double()  # with many ties
    x[:, 0].clamp_(max=0)  # also with the zero that PyG's maxima begin with
    x = (x if examples else x + torch.rand(20, 3, generator=g)).requires_grad_()  # of which PyG then chooses one
    y = torch.randn(max(examples, 1), 3, generator=g, dtype=torch.float64)
    batch = torch.randint(examples, (20,), generator=g).sort().values if examples else None
    whole = theirs(x, batch, examples or None)
    (whole - y).square().mean().backward()
    sizes = SIZES[method]
    sizes = [*sizes[: group.size() - 1], sum(sizes[group.size() - 1 :])]
    mine = slice(sum(sizes[: dist.get_rank(group)]), sum(sizes[: dist.get_rank(group) + 1]))
    sized = [None] if not examples else [examples, *([None] if batch[-1] == examples - 1 else [])]
    for size in sized:
        part = x.detach()[mine].clone().requires_grad_()
        out = ours(part, None if batch is None else batch[mine], size, group)
        close(out, whole, f"{name}: output")
        pyg_sar.global_mean((out - y).square(), group).backward()
        close(part.grad, x.grad[mine], f"{name}: gradient")


@pytest.mark.parametrize("examples", [0, 1, 4])
@pytest.mark.parametrize("method", SIZES)
@pytest.mark.parametrize("name", POOLS)
def test_on_several_workers(pool, name, method, examples):
    for workers in (1, 4):
        pool.run(workers, check, name, method, examples)


@pytest.mark.parametrize("batch", [None, torch.zeros(1 << 15, dtype=torch.long)])
def test_many_rows(batch):
    """After a sum of 2^24 single precision knows no more ones."""
    x = torch.ones(1 << 15, 2).index_fill_(0, torch.arange(1 << 14), 1024)
    work = lambda rank: [getattr(pyg_sar.nn, name)(x, batch, 1) for name in POOLS]  # noqa: E731
    for total, mean, largest in Workers(2).run(work):
        assert torch.equal(total, torch.full((1, 2), 2.0**25 + 2**15))
        assert torch.equal(mean, torch.full((1, 2), 512.5)) and torch.equal(largest, torch.full((1, 2), 1024.0))


def test_integers():
    x, batch = torch.arange(24).view(6, 4) - 12, torch.tensor([0, 0, 1, 1, 3, 3])
    expected = [getattr(torch_geometric.nn, name)(x, batch, 5) for name in POOLS]

    def work(rank):
        return [getattr(pyg_sar.nn, name)(x[3 * rank :][:3], batch[3 * rank :][:3], 5) for name in POOLS]

    for found in Workers(2).run(work):
        for one, other, name in zip(found, expected, POOLS, strict=True):
            assert torch.equal(one, other.to(one.dtype)), name


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2), (3, None)])
def test_numbers_of_graphs_that_are_a_workers_own(sizes):
    batches = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 2, 2])
    for name in POOLS:
        work = lambda rank, name=name: getattr(pyg_sar.nn, name)(torch.ones(4, 2), batches[rank], sizes[rank])  # noqa: E731
        for error in Workers(2).run(work):
            assert isinstance(error, ValueError) and "number of graphs of a batch, which all workers" in str(error)


def infinite(group):
    """Some entries left out, all of an example, and largest ones that are infinite."""
    x, batch = torch.arange(40.0, dtype=torch.float64).view(20, 2), torch.arange(20) // 5
    x[(x % 3 == 0) | (batch == 1).view(-1, 1)] = -torch.inf
    x[-1] = torch.inf
    mine = torch.arange(20) % group.size() == dist.get_rank(group)
    weight = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for ours in (pyg_sar.nn.global_max_pool, pyg_sar.nn.convert(torch_geometric.nn.MaxAggregation(), group)):
        whole, part = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        pools = "convert" if isinstance(ours, torch.nn.Module) else "global_max_pool"
        expected = torch_geometric.nn.global_max_pool(whole, batch, 5)
        given = {"dim_size": 5} if pools == "convert" else {"size": 5, "group": group}
        out = ours(part, batch[mine], **given)
        assert torch.equal(out, expected), f"{pools}: {out} instead of {expected}"
        torch.autograd.backward(expected, weight)
        torch.autograd.backward(out, weight / group.size())
        close(part.grad, whole.grad[mine], f"{pools}: gradient")


def test_infinite_entries(pool):
    pool.run(2, infinite)


@pytest.mark.parametrize("name", POOLS)
def test_examples_without_rows_are_zero(name):
    batch = torch.tensor([0, 2, 2])
    x = torch.randn(3, 2)
    close(getattr(pyg_sar.nn, name)(x, batch, 4), getattr(torch_geometric.nn, name)(x, batch, 4), name, 1e-6)


def other_shapes(group):
    """A number for each node, many rows of half precision, and more than rows."""
    rank, size = dist.get_rank(group), group.size()
    g = torch.Generator().manual_seed(0)
    x, batch = torch.randn(20, generator=g, dtype=torch.float64), torch.arange(20) // 5
    mine = torch.arange(20) % size == rank
    for name in POOLS:
        theirs, ours = (getattr(library, name) for library in (torch_geometric.nn, pyg_sar.nn))
        for numbers in (None, batch):
            part = None if numbers is None else numbers[mine]
            close(ours(x[mine], part, group=group), theirs(x, numbers), name)
        try:
            ours(torch.ones(3, 2, 2), None, group=group)
        except ValueError as error:
            assert f"[rank {rank}] Expected a row of numbers for each node" in str(error)
        else:
            raise AssertionError("more than rows")
    many = torch.full((70_000 // size, 2), 0.5, dtype=torch.float16, requires_grad=True)
    mean = pyg_sar.nn.global_mean_pool(many, None, group=group)
    assert mean.dtype == torch.float16 and mean.eq(0.5).all()
    norm = pyg_sar.nn.convert(torch_geometric.nn.GraphNorm(2), group).half()
    out = norm(many.detach() * torch.tensor([1.0, 3.0]).half(), torch.zeros(len(many), dtype=torch.long))
    assert out.dtype == torch.float16 and torch.isfinite(out).all()


def test_other_shapes_and_types(pool):
    pool.run(2, other_shapes)
