"""Layers that look at the whole graph are refused by name, whenever they become so, in time linear in a model."""

import copy
from unittest import mock

import pytest
import torch
import torch_geometric.nn as gnn
from support.conv_zoo import CASES, F, Net, refusal
from support.nasty_graph import NUM_NODES, edges

import pyg_sar.nn
from pyg_sar import shard, whole_graph
from pyg_sar.whole_graph import UNLESS, WHOLE_GRAPH

N = NUM_NODES


@pytest.fixture
def plain():
    return edges(N, N)


@pytest.fixture
def sharded(plain):
    return shard(plain, N, 3)


# These have tests below, in test_lightgcn.py and in test_linkx.py.
ELSEWHERE = {"FeaStConv", "QuantileAggregation", "RGCNConv", "LightGCN", "LINKX", "Node2Vec", "MetaPath2Vec"}
SHOWN_BY = {
    "_BatchNorm": "BatchNorm1d",
    "torch_geometric.nn.attention": "PerformerAttention",
    "torch_geometric.nn.pool": "TopKPooling",
}


def test_every_entry_of_the_table_has_a_case():
    said = [refusal(name) for name, case in CASES.items() if case.says]
    for name, reason in WHOLE_GRAPH.items():
        name = SHOWN_BY.get(name, name)
        if name not in ELSEWHERE and (hasattr(gnn, name) or name in SHOWN_BY.values()):
            assert any(f"'{name}' in '" in text and f"because it {reason}" in text for text in said), name
    assert set(UNLESS) <= set(WHOLE_GRAPH)


def test_subclasses_are_refused_and_layers_of_pyg_sar_are_not(sharded):
    class MyGPS(gnn.GPSConv):
        pass

    with pytest.raises(NotImplementedError, match=r"'MyGPS' in 'MyGPS' cannot run .* attends over all nodes"):
        MyGPS(F, gnn.SAGEConv(F, F), norm=None)(torch.randn(N, F), sharded)
    Net(pyg_sar.nn.BatchNorm1d(F))(torch.randn(N, F), sharded)


def test_streaming_layers_look_around_too(sharded):
    class Model(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.conv, self.norm = pyg_sar.nn.SAGEConv(F, F), norm

        def forward(self, x, edge_index):
            return self.norm(self.conv(x, edge_index))

    x = torch.randn(N, F)
    with pytest.raises(NotImplementedError, match="'BatchNorm1d' in 'Model' cannot run"):
        Model(torch.nn.BatchNorm1d(F))(x, sharded)
    for fine in (torch.nn.BatchNorm1d(F).eval(), pyg_sar.nn.BatchNorm1d(F), torch.nn.LayerNorm(F)):
        Model(fine)(x, sharded)


@pytest.mark.parametrize("layer", [gnn.FeaStConv(F, F, add_self_loops=False), gnn.SimpleConv("median")])
def test_layers_that_fail_without_edges_say_so(layer):
    nothing = shard(torch.empty(2, 0, dtype=torch.long), N, 2)
    with pytest.raises(NotImplementedError, match=r"fails in PyG .*'pyg_sar\.nn'"):
        layer(torch.randn(N, F), nothing)


def test_workers_must_not_choose_their_own_way_to_multiply(sharded):
    """With pyg-lib, RGCNConv exchanges rows once or once a relation, as the number of edges suggests."""
    layer, args = gnn.RGCNConv(F, F, 3), (torch.randn(N, F), sharded, torch.zeros(sharded.size(1), dtype=torch.long))
    with mock.patch("torch_geometric.typing.WITH_SEGMM", True):
        with pytest.raises(NotImplementedError, match="use_segment_matmul' is set"):
            layer(*args)
        with mock.patch("torch_geometric.backend.use_segment_matmul", False):
            layer(*args)


class Deep(torch.nn.Module):
    """Layers, and something beside them."""

    def __init__(self, depth, beside=None):
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_sar.nn.SAGEConv(F, F) for _ in range(depth))
        self.beside = beside

    def forward(self, x, *edges):
        for k, conv in enumerate(self.convs):
            x = conv(x, edges[k % len(edges)])
        return x

    def encode(self, x, edges):
        return self.forward(x, edges)


def test_the_audit_is_linear(sharded, monkeypatch):
    """Each layer asks for the graph, and what is in the model is looked at once all the same."""
    looked = []
    monkeypatch.setattr(whole_graph, "reason", lambda layer, *args: looked.append(layer) or "")
    counts = []
    for depth in (8, 16):
        Deep(depth)(torch.randn(N, F), sharded)
        counts.append(len(looked))
        looked.clear()
    assert counts[1] < 2.2 * counts[0], counts


def turn_to_training(model):
    model.beside.train()


def put_into(model):
    model.convs[1].norm = torch.nn.BatchNorm1d(F)


def change_class(model):
    model.beside.__class__ = torch.nn.BatchNorm1d


CHANGES = {
    turn_to_training: torch.nn.BatchNorm1d(F).eval(),
    put_into: None,
    change_class: pyg_sar.nn.BatchNorm1d(F),
}


@pytest.mark.parametrize("call", ["__call__", "forward", "encode", "patched"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_is_noticed(sharded, change, call):
    model, x = Deep(2, copy.deepcopy(CHANGES[change])), torch.randn(N, F)
    if call == "patched":
        model.forward, call = model.forward, "__call__"  # which lives on between the calls
    for _ in range(2):
        getattr(model, call)(x, sharded)
    change(model)
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(NotImplementedError, match="'BatchNorm1d' in"):
            getattr(model, call)(x, sharded)


def test_each_graph_of_a_call_is_audited(plain, sharded):
    """FeaStConv is exact on edges, and fails in PyG without any, such as those of the second layer."""
    model, nothing = Deep(2, gnn.FeaStConv(F, F, add_self_loops=False)), shard(plain[:, :0], N, 3)
    model(torch.randn(N, F), sharded)
    with pytest.raises(NotImplementedError, match="'FeaStConv' in 'Deep'"):
        model(torch.randn(N, F), sharded, nothing)
