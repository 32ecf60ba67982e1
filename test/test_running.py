"""Names of the layers that run, and what is told of them."""

import pytest
import torch
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, edges

import pyg_sar
from pyg_sar import running


class Model(torch.nn.Module):
    """A layer that is also called by itself, and one that reads rows without any layer."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.ModuleDict({"conv": torch_geometric.nn.GCNConv(4, 4)})
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, edge_index):
        self.told = [tell(x)]
        x = self.inner["conv"](x, edge_index)
        self.told += [tell(x), tell(x)]
        x = x[edge_index[0]][: x.size(0)]
        return x * self.scale


def tell(x):
    return running.about(x.shape, x.dtype, "somehow")


@pytest.fixture
def told():
    model = Model()
    graph = pyg_sar.shard(edges(), NUM_NODES, 2)
    x = torch.randn(NUM_NODES, 4)
    running.enter([])
    return model, [*(model(x, graph), model.told)[1], tell(x)]


def test_names(told):
    columns = "rows of 4 columns (float32, somehow)"
    layer = f"layer 'inner.conv' (GCNConv) on {columns}"
    assert [about.what for about in told[1]] == [columns, layer, layer, f"layer 'Model' on {columns}"]


def test_parameters_are_told_once_for_each_layer(told):
    """Those of a whole model are its own, without those of its layers."""
    model, (nothing, conv, again, whole) = told
    assert not nothing.parameters and not again.parameters
    assert {id(p) for p in conv.parameters} == {id(p) for p in model.inner.parameters()}
    assert [id(p) for p in whole.parameters] == [id(model.scale)]


def test_names_stay(told):
    """Also if the layer is later called by itself."""
    model, _ = told
    conv = model.inner["conv"]
    conv(torch.randn(NUM_NODES, 4), pyg_sar.shard(edges(), NUM_NODES, 2))
    assert running.LAYERS[conv].name == "layer 'inner.conv' (GCNConv)"


def test_layers_without_all_parameters():
    conv = torch_geometric.nn.GINConv(torch.nn.LazyLinear(3))
    running.enter([conv])
    assert not tell(torch.ones(2, 3)).complete


def test_ranges_of_a_profile():
    edge_index = pyg_sar.shard(torch.randint(20, (2, 60)), 20, 3)
    model = torch.nn.ModuleDict({"one": pyg_sar.nn.GATConv(4, 8), "two": pyg_sar.nn.SAGEConv(8, 3)})

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = model

        def forward(self, x):
            return self.convs["two"](self.convs["one"](x, edge_index), edge_index)

    with torch.profiler.profile() as seen:
        Net()(torch.randn(20, 4)).sum().backward()
    names = [event.name for event in seen.events() if event.name.startswith("layer")]
    one, two = "layer 'convs.one' (GATConv)", "layer 'convs.two' (SAGEConv)"
    assert names == [f"{one}: forward", f"{two}: forward", f"{two}: backward", f"{one}: backward"]
