"""The probe graph tells right strategies from wrong ones at every width of rows."""

import pytest
import torch
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, edges

from pyg_sar import shard
from pyg_sar.nn import convert, describe
from pyg_sar.nn.replay import passes

WIDTHS = (8, 1433, 8000)


def found(layer, width, dtype=torch.float32):
    layer = convert(layer).to(dtype)
    x = (torch.rand(NUM_NODES, width) < 0.1).to(dtype).requires_grad_()
    layer(x, shard(edges(), NUM_NODES, 3))
    return describe(layer)


@pytest.mark.parametrize(("width", "dtype"), [*((n, torch.float32) for n in WIDTHS), (1433, torch.bfloat16)])
def test_wide_rows_stream(width, dtype):
    """Scores are sums of as many products as a row has entries, and so is their rounding error."""
    assert "streams by replay (softmax, in one pass)" in found(gnn.AGNNConv(), width, dtype)
    assert "streams" in found(gnn.SimpleConv(aggr="std"), width, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("wrong", ["heads", "fold"])
def test_small_errors_are_found_at_every_width(monkeypatch, width, wrong):
    """One percent too much: in the weights of what is merged, or in what is taken off the gradients of scores."""
    right = getattr(passes, wrong)
    monkeypatch.setattr(passes, wrong, lambda *args: right(*args) * (1.01 if args[0].any() else 1))
    assert "softmax" not in found(gnn.AGNNConv(), width)
