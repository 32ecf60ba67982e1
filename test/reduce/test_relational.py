"""Sums by types of edges: against sums of every relation and basis, range by range, in one block and in several."""

import pytest
import torch
from support.cases import some

from pyg_sar import runs
from pyg_sar.aggregate import aggregate
from pyg_sar.distributed.shard import shard
from pyg_sar.live import Live
from pyg_sar.reduce import BasisSum, RelationSum, relational

NUM_NODES, TYPES, IN, OUT = 40, 5, 6, 4


def edges(count=300):
    """Edges of which node 39 has none, node 0 most, and type 3 none."""
    dst = (torch.rand(count).square() * (NUM_NODES - 1)).long()
    types = torch.randint(TYPES - 1, (count,))
    types[types == 3] = 4
    return torch.stack([torch.randint(NUM_NODES - 1, (count,)), dst]), types


def oracle(edge_index, types, x, weights, mean):
    """Every relation's sum of messages."""
    out = 0
    for r in range(TYPES):
        src, dst = edge_index[:, types == r]
        rows = x.new_zeros(NUM_NODES, x.size(1)).index_add(0, dst, x[src])
        count = torch.bincount(dst, minlength=NUM_NODES).clamp(min=1).unsqueeze(1) if mean else 1
        out = out + rows / count @ weights[r]
    return out


def inputs(bases, dtype=torch.double, blocks=1):
    """Features, and what the relations' matrices are made of."""
    x = torch.randn(NUM_NODES, IN, dtype=dtype, requires_grad=True)
    if bases:
        return x, [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((TYPES, 2), (2, IN, OUT))]
    return x, [torch.randn(TYPES, blocks, IN // blocks, OUT // blocks, dtype=dtype, requires_grad=True)]


def matrices(consts):
    """Every relation's matrix."""
    if len(consts) == 2:
        return torch.einsum("rb,bio->rio", *consts)
    return torch.stack([torch.block_diag(*of_type) for of_type in consts[0].unbind()])


@pytest.fixture(params=["ranges", "whole"])
def size(request, monkeypatch):
    """Ranges of some rows, and of all of them."""
    for name in ("SIZE", "SIZE_ON_GPU"):
        monkeypatch.setattr(runs, name, {"ranges": 16, "whole": 1 << 15}[request.param])


KINDS, PARTS, RANGES, MEAN = ["bases", "matrices", "blocks"], [1, 3, 20], ["ranges", "whole"], [True, False]


@pytest.mark.parametrize(("kernels", "size", "kind", "parts", "mean"), [
    *some(["compiled"], RANGES, KINDS, PARTS, MEAN, every=1), *some(["triton"], RANGES, KINDS, PARTS, MEAN, every=6),
], indirect=["kernels", "size"])  # fmt: skip
def test_equals_every_relation_alone(parts, kind, mean, size, device, kernels, monkeypatch):
    for module, names in ((runs, ["spmm_"]), (relational, ["spmm_", "sddmm_"])):
        for name in names:
            monkeypatch.setattr(module, name, getattr(kernels, name))
    edge_index, types = edges()
    graph = shard(edge_index, NUM_NODES, parts)._graph.to(device)
    assert parts < 20 or any(block.dst is not None for block in graph.blocks)
    x, consts = inputs(kind == "bases", blocks=2 if kind == "blocks" else 1)
    expected = oracle(edge_index, types, x, matrices(consts), mean)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), [x, *consts])
    reduce = (BasisSum if kind == "bases" else RelationSum)(graph, types.to(device), TYPES, mean, OUT)
    there = [t.detach().to(device).requires_grad_() for t in (x, *consts)]
    out = aggregate(graph, reduce, there[0], const=there[1:])
    found = torch.autograd.grad((out * weight.to(device)).sum(), there)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-10, atol=1e-10)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "parts", "bases", "dtype"), some(
    RANGES, PARTS, [True, False], [torch.float32, torch.bfloat16, torch.float16], every=4,
), indirect=["size"])  # fmt: skip
def test_rounds_to_at_most_twice_the_error_of_every_relation_alone(dtype, bases, parts, size):
    """The root of the mean square, of five graphs."""
    square = torch.zeros(2, 4 if bases else 3)
    for seed in range(5):
        torch.manual_seed(seed)
        (edge_index, types), (x, consts), weight = (
            edges(1000),
            inputs(bases, dtype),
            torch.randn(NUM_NODES, OUT).to(dtype),
        )
        graph = shard(edge_index, NUM_NODES, parts)._graph

        def ours(x, *consts, graph=graph, types=types):
            reduce = (BasisSum if bases else RelationSum)(graph, types, TYPES, True, OUT)
            return aggregate(graph, reduce, x, const=consts)

        def theirs(x, *consts, edge_index=edge_index, types=types):
            return oracle(edge_index, types, x, matrices(consts), True)

        exact = results(theirs, [t.detach().double().requires_grad_() for t in (x, *consts)], weight.double())
        for k, run in enumerate((ours, theirs)):
            found = results(run, [x, *consts], weight)
            assert {t.dtype for t in found} == {dtype}
            square[k] += torch.stack([(t.double() - e).square().mean() for t, e in zip(found, exact, strict=True)])
    found, allowed = square.sqrt()
    assert (found <= 2 * allowed).all(), (found / allowed).tolist()


def results(run, leaves, weight):
    """The output and all gradients."""
    out = run(*leaves)
    return [t.detach() for t in (out, *torch.autograd.grad(out, leaves, weight))]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_has_no_gradient(frozen):
    edge_index, types = edges()
    graph = shard(edge_index, NUM_NODES)._graph
    x, consts = inputs(True)
    leaves = [x, *consts]
    wanted = torch.autograd.grad(oracle(edge_index, types, x, matrices(consts), True).sum(), leaves)
    leaves[frozen].requires_grad_(False)
    aggregate(graph, BasisSum(graph, types, TYPES, True, OUT), x, const=consts).sum().backward()
    for k, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (k == frozen)
        if k != frozen:
            torch.testing.assert_close(leaf.grad, wanted[k], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bases", [True, False])
def test_sums_of_runs_live_for_one_range(bases, monkeypatch):
    """Beside output and gradient a step takes less memory than a number for each edge, of which runs have some."""
    monkeypatch.setattr(runs, "SIZE", 256)
    nodes, types = 4000, torch.randint(TYPES, (40_000,))
    graph = shard(torch.randint(nodes, (2, 40_000)), nodes)._graph
    x, (_, consts) = torch.randn(nodes, IN, requires_grad=True), inputs(bases, torch.float)
    reduce = (BasisSum if bases else RelationSum)(graph, types, TYPES, False, OUT)
    aggregate(graph, reduce, x, const=consts).sum().backward()
    with Live() as live:
        aggregate(graph, reduce, x, const=consts).sum().backward()
    held = 4 * nodes * (IN + OUT)
    assert held <= live.peak < held + 4 * 10_000


def test_edge_types_are_checked_and_runs_live_as_long_as_they_do():
    edge_index, types = edges()
    graph = shard(edge_index, NUM_NODES)._graph
    with pytest.raises(ValueError, match="Expected edge types from 0 to 2"):
        BasisSum(graph, types, 3, True, OUT)
    with pytest.raises(ValueError, match="integer for each of this worker's 300 edges"):
        RelationSum(graph, types[1:], TYPES, True, OUT)
    first = BasisSum(graph, types, TYPES, True, OUT)
    assert BasisSum(graph, types, TYPES, True, OUT).runs is first.runs
    assert RelationSum(graph, types.clone(), TYPES, True, OUT).runs is not first.runs
    types[0] = (types[0] + 1) % TYPES
    assert BasisSum(graph, types, TYPES, True, OUT).runs is not first.runs
