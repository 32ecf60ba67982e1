"""Under autocast layers give the types that PyG's give, and are about as near to the truth as these."""

import statistics

import pytest
import torch
import torch_geometric.nn
from support import conv_zoo
from support.conv_zoo import CASES
from support.layer_check import run
from support.layers import FULL, OPTIONS, inputs, leaf
from support.nasty_graph import NUM_NODES, assignment, edges, share
from torch.utils.checkpoint import checkpoint

import pyg_sar
from pyg_sar.distributed.group import ABANDONED

UNIT = torch.finfo(torch.bfloat16).eps / 2  # what rounding to bfloat16 changes a number by, at most


def compare(what, draws, slack):
    """Say what is of another type, or further from the truth than twice as far as the reference is, and a rounding; for
    gradients, and ``slack``, because rounding changes signs, and behind a ReLU a gradient is there or not. Medians of
    several draws count: a sum of numbers that cancel each other is all rounding, and either may be lucky.
    """
    found, reference, truth = draws[0]
    types = found["out"].dtype, reference["out"].dtype
    problems = [] if types[0] == types[1] else [f"{what} returns {types[0]} instead of {types[1]}"]
    for name, value in truth.items():
        if value is None or value.norm() < 1e-9:
            continue  # a bias before a softmax, for example: all is rounding
        pairs = [(mine[name], its[name], true[name]) for mine, its, true in draws]
        one = statistics.median(error(mine, true) for mine, _, true in pairs)
        other = statistics.median(error(its, true) for _, its, true in pairs)
        if not one <= 2 * other + (UNIT if name == "out" else slack):
            problems.append(f"{what} {name}: {one:.1e} off, and the reference {other:.1e}")
    return problems


def error(found, true):
    return float((found.double() - true).norm() / true.norm())


def draw(case, rows, device, seed):
    """Return what our layer gives, PyG's, both under autocast, and PyG's in double precision."""
    counts, widths = case.shape()
    edge_index = edges(*counts)
    graph = pyg_sar.shard(edge_index, counts if case.pair == "two" else NUM_NODES, 3)
    torch.manual_seed(seed)
    x = [torch.randn(n, w, dtype=torch.float64) for n, w in zip(counts, widths, strict=True)]
    extra, state, results = inputs(case.roles, edge_index.size(1), torch.float64), None, []
    for package, at, cast in ((torch_geometric.nn, edge_index, False), (torch_geometric.nn, edge_index, True),
                              (pyg_sar.nn, graph, True)):  # fmt: skip
        layer = case.build(package)
        state = state or layer.state_dict()
        layer.load_state_dict(state)
        layer, dtype = (layer.float(), rows) if cast else (layer, torch.float64)
        src, dst = (leaf(t.to(dtype)) for t in x)
        given = (src, None if case.pair == "none" else dst) if case.pair else src
        other = [leaf(t.to(dtype) if t.is_floating_point() else t, case.learn) for t in extra]
        results.append(run(layer.to(device), given, at, other, torch.arange(counts[1]), counts[1], device, cast))
    return results[::-1]


@pytest.mark.parametrize("rows", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.grid)])
def test_layers(rows, device):
    """From rows of the user's, or from those of another layer under autocast."""
    problems = []
    for case in [*FULL, *OPTIONS]:
        draws = [draw(case, rows, device, 0)]
        if compare(str(case), draws, 8 * UNIT):
            draws += [draw(case, rows, device, seed) for seed in range(1, 9)]
        problems += compare(str(case), draws, 8 * UNIT)
    assert not problems, "\n".join(problems)


def named(result):
    return {"out": result.out, **{f"d{name}": g for name, g in (result.node_grads | result.param_grads).items()}}


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_backward_within_autocast(name):
    """Scores that backward makes again are those of forward: single precision."""
    edge_index, grads = pyg_sar.shard(edges(), NUM_NODES, 3), []
    torch.manual_seed(0)
    layer, x = getattr(pyg_sar.nn, name)(8, 4, 2, edge_dim=3), torch.randn(NUM_NODES, 8)
    edge_attr = 100 * torch.randn(edge_index.size(1), 3)
    for cast in (False, True):
        layer.zero_grad()
        out = layer(x, edge_index, edge_attr).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out.backward()
        weights = [p for key, p in layer.named_parameters() if "edge" in key]
        grads.append([p.grad.clone() for p in weights])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(one.abs().max()))


def has_lstm(device):
    """Whether this processor's library has an LSTM in bfloat16: oneDNN does without AVX-512."""
    try:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            torch.nn.LSTM(2, 2, device=device)(torch.ones(1, 1, 2, device=device))
    except RuntimeError:
        return False
    return True


@pytest.mark.grid
def test_layers_of_pyg(device):
    problems, lstm = [], has_lstm(device)
    for name in CASES:
        if not lstm and any(isinstance(m, torch.nn.LSTM) for m in CASES[name].make().modules()):
            continue
        case = CASES[name] if name in conv_zoo.NOT_CONVERTED else conv_zoo.converted(name)
        if case.says or case.dtype != torch.float64 or name == "MFConv":  # which PyG cannot run under autocast
            continue
        with conv_zoo.default(torch.float64):
            truth = named(conv_zoo.whole(name))
            reference = named(
                conv_zoo.forward_and_backward(CASES[name], conv_zoo.in_one_process(case, 0), device, True)
            )
            found = named(conv_zoo.forward_and_backward(case, conv_zoo.in_one_process(case, 3), device, True))
        problems += compare(name, [(found, reference, truth)], 64 * UNIT)
    assert not problems, "\n".join(problems)


def checkpointed(group):
    """How many messages nobody has waited for, after some steps behind a checkpoint."""
    mine, before = share(group, edges(), assignment("random", group.size())), len(ABANDONED)
    conv = pyg_sar.nn.SAGEConv(8, 8)
    for _ in range(3):
        x = torch.randn(len(mine.src), 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(conv, x, mine.edge_index, use_reentrant=False)
        out.float().sum().backward()
        assert x.grad.isfinite().all()
    return len(ABANDONED) - before


def test_no_messages_are_left_behind_a_checkpoint(pool):
    """It stops at the last tensor that backward needs, which may be that of the root, while messages are under way."""
    assert pool.run(3, checkpointed) == [0, 0, 0]
