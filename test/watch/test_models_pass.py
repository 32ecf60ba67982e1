"""Models of PyG, and its layers, compute what they should under the watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as gnn
from support.conv_zoo import CASES, INPUTS, Case, arguments, converted, default, layer_of, output, sizes
from support.nasty_graph import Share, assignment, edges
from support.watched import BACK, RELATION, C, passes, step
from torch import Tensor

import pyg_sar
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.simulated import Workers
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.structure import tensors
from pyg_sar.watch import ROWS, current, rows
from pyg_sar.watch.kinds import Kind
from pyg_sar.watch.mode import watching

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCN": lambda: gnn.GCN(8, 4, 3, C, norm="BatchNorm", jk="lstm"),
    "GraphSAGE": lambda: gnn.GraphSAGE(8, 4, 2, C, norm="GraphNorm", jk="max"),
    "GIN": lambda: gnn.GIN(8, 4, 2, C, norm="InstanceNorm", jk="cat"),
    "GAT": lambda: gnn.GAT(8, 4, 2, C, v2=True, heads=2, norm="PairNorm", dropout=0.5),
    "PNA": lambda: gnn.PNA(8, 4, 2, C, aggregators=["mean", "std"], scalers=["identity"], deg=torch.ones(9).long()),
    "EdgeCNN": lambda: gnn.EdgeCNN(8, 4, 2, C, norm="LayerNorm"),
    "DeepGCN": lambda: gnn.Sequential(
        "x, edge_index",
        [
            (gnn.DeepGCNLayer(gnn.GENConv(8, 8), gnn.LayerNorm(8), torch.nn.ReLU()), "x, edge_index -> x"),
            gnn.MLP([8, 4, C]),
        ],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_pass(parts: str, name: str) -> None:
    def work(data: Any) -> None:
        torch.manual_seed(0)
        model = pyg_sar.nn.convert(MODELS[name]())
        model(data.x, data.edge_index)
        pyg_sar.broadcast_parameters(model)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4)
        step(model, optimizer, data, lambda: model(data.x, data.edge_index))
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        assert current() is not None and current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
        pyg_sar.accuracy(out.argmax(-1), data.y, data.train_mask)

    passes(f"{parts}/one", work)


# Which have loops over types, orders and widths of their own, are not cut, or are written by hand.
ODD = ["MFConv", "RGCNConv", "HEATConv", "MedianAggregation", "RGATConv within-relation",
       "CorrectAndSmooth unscaled", "MetaLayer", "DirGNNConv"]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("make", [CASES.get, converted], ids=["as it is", "converted"])
def test_layers_pass(name: str, make: Callable[[str], Case]) -> None:
    case = make(name)
    part = assignment("random", 2)
    topologies = [list(split(edges(seed=seed), part, part, 2)) for seed in (0, 1)]

    def worker(rank: int) -> None:
        own = [Share(ShardedEdgeIndex(assemble(t[rank], rank)), *ids(t[rank])) for t in topologies]
        with watching():
            given, _ = arguments(case, own, sizes(case))
            for value in tensors([given[k] for k in given if INPUTS.get(k, ("",))[0] in ("node", "dst", "edge")]):
                rows(value)
            out = output(layers[rank](**given))
            assert current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
            if out.requires_grad:
                out.square().sum().backward()

    with default(case.dtype):
        layers = [layer_of(case) for _ in range(2)]
        for error in Workers(2).run(worker):
            if error is not None:
                raise error


def ids(topology: Any) -> tuple[Tensor, Tensor, Tensor]:
    return topology.src_id, topology.dst_id, topology.e_id


def test_heterogeneous_models_pass(parts: str) -> None:
    metadata = (["u", "v"], [RELATION, BACK])
    models = {
        "HeteroConv": lambda: gnn.HeteroConv({t: gnn.SAGEConv((-1, -1), 4) for t in metadata[1]}, aggr="mean"),
        "to_hetero": lambda: gnn.to_hetero(gnn.GraphSAGE((-1, -1), 4, 2), metadata),
        "HGT": lambda: gnn.HGTConv(8, 4, metadata, heads=2),
        "HAN": lambda: gnn.HANConv(8, 4, metadata, heads=2),
    }
    try:
        models["to_hetero"]()
    except AttributeError:  # that of PyG 2.6 asks for an older torch
        del models["to_hetero"]

    def work(data: Any) -> None:
        for make in models.values():
            model = pyg_sar.nn.convert(make())
            for out in model(data.x_dict, data.edge_index_dict).values():
                assert current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
                out.square().sum().backward(retain_graph=True)

    passes(f"{parts}/two", work)
