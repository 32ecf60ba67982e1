"""What others see of a layer that is looked at: nothing."""

import gc
import weakref

import pytest
import torch
import torch_geometric.nn as gnn

import pyg_sar
from pyg_sar.nn import convert
from pyg_sar.nn.conv.products import weight_and_bias
from pyg_sar.nn.replay.isolate import isolated
from pyg_sar.nn.replay.trace import NotStreamable


def test_modules_beside_a_layer_have_no_hooks():
    """Simulated workers are threads, of which one may choose how a layer runs by the hooks of all modules."""
    norm, lin = torch.nn.BatchNorm1d(2), gnn.Linear(2, 2)
    layer = gnn.GINConv(torch.nn.Sequential(norm, torch.nn.Linear(2, 2)))
    with isolated(layer, torch.device("cpu")):
        assert weight_and_bias(lin) is not None
        torch.nn.BatchNorm1d(2)(torch.rand(3, 2))
        with pytest.raises(NotStreamable, match="BatchNorm1d"):
            norm(torch.rand(3, 2))
    norm(torch.rand(3, 2))


def test_layers_that_were_looked_at_die():
    """What autograd keeps of a result must not be that result itself."""
    layer = convert(gnn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))))
    graph, x = pyg_sar.shard(torch.randint(9, (2, 30)), 9, 2), torch.rand(9, 2, requires_grad=True)
    layer(x, graph).sum().backward()
    alive = weakref.ref(layer), weakref.ref(layer.nn[0].weight)
    del layer
    gc.collect()
    assert [it() for it in alive] == [None, None]
