"""A bias between attention and a normalisation: what is kept for backward, and that nothing else changes."""

import pytest
import torch
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch.multiprocessing.reductions import StorageWeakRef

from pyg_sar import nn

CHANGES = {
    "none": lambda x: x,
    "in place": lambda x: x.mul_(2),
    "of a view, in place": lambda x: (x[:, :3].relu_(), x)[1],
    "another tensor": lambda x: x * 3,
}
NORMS = {"BatchNorm": (6,), "GraphNorm": (6,), "InstanceNorm": (6,), "MeanSubtractionNorm": (), "PairNorm": ()}


def pair(name, group):
    """A layer of attention and a normalisation, ours and PyG's, with a bias that is large beside the rows."""
    models = []
    for module in (nn, torch_geometric.nn):
        torch.manual_seed(0)
        conv, norm = module.GATConv(8, 3, heads=2).double(), getattr(module, name)(*NORMS[name]).double()
        with torch.no_grad():
            conv.bias.copy_(torch.linspace(-1000, 1000, 6))
        models.append((conv, norm))
    norm = models[0][1]
    getattr(norm, "module", norm).group = group
    return models


def step(conv, norm, change, x, edge_index, grad):
    x = x.clone().requires_grad_()
    out = norm(change(conv(x, edge_index)))
    out.backward(grad)
    params = [*conv.named_parameters(), *norm.named_parameters()]
    return out.detach(), x.grad, {name: p.grad for name, p in params}


def same(group, name):
    """Compare with PyG on the whole graph."""
    mine = share(group, edges(), assignment("random", group.size()))
    g = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(NUM_NODES, width, generator=g, dtype=torch.float64) for width in (8, 6))
    for what, change in CHANGES.items():
        ours, theirs = pair(name, group)
        out, d_x, d_p = step(*theirs, change, x, edges(), grad)
        found, d_found, d_params = step(*ours, change, x[mine.src], mine.edge_index, grad[mine.dst])
        close(found, out[mine.dst], f"{what}, output")
        close(d_found, d_x[mine.src], f"{what}, gradient of x")
        for key, value in d_p.items():
            torch.distributed.all_reduce(d_params[key], group=group)
            close(d_params[key], value, f"{what}, gradient of {key}")


@pytest.mark.parametrize("name", list(NORMS))
def test_it_is_what_pyg_computes(pool, name):
    pool.run(2, same, name)


def kept(group, grad_mode):
    """Whether the sum of rows and bias lives on when the model has dropped it."""
    mine = share(group, edges(), assignment("random", group.size()))
    (conv, norm), _ = pair("BatchNorm", group)
    found = []
    for change in CHANGES.values():
        with torch.inference_mode(not grad_mode):
            x = change(conv(torch.rand(len(mine.src), 8, dtype=torch.float64), mine.edge_index))
            rows = StorageWeakRef(x.untyped_storage())
            out = norm(x)
            del x
            found.append(not rows.expired())
            del out
    return found


def test_the_sum_dies_with_the_name_that_the_model_has_for_it(pool):
    """What has been changed since is kept as it is."""
    assert pool.run(2, kept, True) == [[False, True, True, True]] * 2
    assert pool.run(2, kept, False) == [[False] * 4] * 2


def test_a_process_alone_keeps_nothing():
    """Nobody would read it: torch normalises there."""
    out = nn.GATConv(8, 3, heads=2)(torch.rand(NUM_NODES, 8), edges())
    assert out.requires_grad and not hasattr(out, "_sar_made_of")
