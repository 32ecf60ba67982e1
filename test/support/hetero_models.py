"""A heterogeneous graph, models of it, and their comparison with PyG on the whole graph."""

import copy

import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import close
from torch_geometric.data import HeteroData

import pyg_sar
from pyg_sar.nn import convert, describe
from pyg_sar.offload.rows import HostRows

NODES = {"author": 31, "paper": 47, "venue": 5, "alone": 3}
EDGES = {
    ("author", "writes", "paper"): 160,
    ("paper", "rev_writes", "author"): 150,
    ("paper", "cites", "paper"): 190,
    ("venue", "rev_in", "paper"): 47,
    ("paper", "in", "venue"): 0,  # none at all
}
KINDS = [*NODES], [*EDGES]
WIDTH = {"author": 6, "paper": 8, "venue": 3, "alone": 4}


def graph():
    g, data = torch.Generator().manual_seed(0), HeteroData()
    for t, n in NODES.items():
        data[t].x = torch.randn(n, WIDTH[t], generator=g, dtype=torch.float64)
        data[t].num_nodes = n
    data["paper"].train_mask = torch.rand(47, generator=g) < 0.5
    for (s, r, t), m in EDGES.items():
        data[s, r, t].edge_index = torch.stack([torch.randint(NODES[k], (m,), generator=g) for k in (s, t)])
        data[s, r, t].edge_attr = torch.randn(m, 2, generator=g, dtype=torch.float64)
    data.note = "a graph"
    return data


class Embed(torch.nn.Module):
    """Features of all types become as wide as each other."""

    def __init__(self, layers):
        super().__init__()
        self.lin = gnn.HeteroDictLinear(WIDTH, 8)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x)
        for layer in self.layers:
            x = {t: rows for t, rows in layer(x, edge_index).items() if rows is not None}
        return x


class Attributes(torch.nn.Module):
    """A layer for each edge type, with edge features."""

    def __init__(self):
        super().__init__()
        make = (
            lambda: gnn.GATConv((-1, -1), 4, 2, add_self_loops=False, edge_dim=2),
            lambda: gnn.GATv2Conv((-1, -1), 8, add_self_loops=False, edge_dim=2),
            lambda: gnn.GINEConv(gnn.Linear(8, 8), edge_dim=2),
            lambda: gnn.TransformerConv((-1, -1), 4, 2, edge_dim=2),
            lambda: gnn.GeneralConv((8, 8), 8, 2, attention=True),
        )
        self.lin = gnn.HeteroDictLinear(WIDTH, 8)
        self.conv = gnn.HeteroConv({it: layer() for it, layer in zip(EDGES, make, strict=True)}, aggr="mean")

    def forward(self, x, edge_index, edge_attr):
        return self.conv(self.lin(x), edge_index, edge_attr_dict=edge_attr)


class Homogeneous(torch.nn.Module):
    """What ``to_hetero`` makes of a model for one type of nodes."""

    def __init__(self, aggr):
        super().__init__()

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = gnn.SAGEConv((-1, -1), 8), gnn.GraphConv((-1, -1), 8)

            def forward(self, x, edge_index):
                return self.second(self.first(x, edge_index).relu(), edge_index)

        kinds = [t for t in NODES if t != "alone"], KINDS[1]
        self.net = gnn.to_hetero(Net(), kinds, aggr)

    def forward(self, x, edge_index, edge_attr):
        return self.net({t: rows for t, rows in x.items() if t != "alone"}, edge_index)


def simple(aggr):
    return gnn.HeteroConv({it: gnn.SAGEConv((8, 8), 8, aggr) for it in EDGES}, aggr="sum")


MODELS = {
    "HeteroConv": lambda: Embed([simple("mean"), simple("max")]),
    "attributes": Attributes,
    "to_hetero": lambda: Homogeneous("sum"),
    "HGTConv": lambda: Embed([gnn.HGTConv(8, 8, KINDS, 2), gnn.HGTConv(8, 6, KINDS, 3)]),
    "HANConv": lambda: Embed([gnn.HANConv(8, 8, KINDS, 2)]),
}


try:
    gnn.to_hetero(gnn.GraphSAGE(2, 2, 1), (["a"], [("a", "to", "a")]))
except AttributeError:  # that of PyG 2.6 asks for an older torch
    del MODELS["to_hetero"]


def make(name, data):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():  # lazy layers
        model(data.x_dict, data.edge_index_dict, data.edge_attr_dict)
    return model


def leaves(data):
    at_home = isinstance(data["paper"].x, HostRows)
    return {t: (x if at_home else x.clone()).requires_grad_() for t, x in data.x_dict.items()}


def ordinary(rows):
    """Return rows, also those at home, as a tensor."""
    return rows[torch.arange(len(rows))].detach().cpu() if isinstance(rows, HostRows) else rows.cpu()


def train(data, model, ids):
    x = leaves(data)
    out = model(x, data.edge_index_dict, data.edge_attr_dict)
    loss = 0.0
    for t in sorted(out):
        weight = torch.randn(NODES[t], out[t].size(1), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        loss = loss + (out[t] * weight[ids[t].cpu()].to(out[t].device)).sum()
    loss.backward()
    return out, x


def check(group, folder, name, mode, device="cpu", home=None):
    """``home`` are arguments of :func:`pyg_sar.offload`."""
    data, whole = pyg_sar.load(folder, device, group, remat=mode == 1), graph()
    if mode == 3:
        for it in EDGES:
            data[it].edge_index = data[it].edge_index.merge()
    if home is not None:
        data = pyg_sar.offload(data, **home)
    reference = make(name, whole)
    model = convert(copy.deepcopy(reference), group).to(device)
    expected, every = train(whole, reference, {t: torch.arange(n) for t, n in NODES.items()})
    out, mine = train(data, model, data.n_id_dict)
    assert out.keys() == expected.keys()
    own = {t: data[t].n_id.cpu() for t in NODES}
    for t in out:
        assert out[t].device.type == device
        assert isinstance(out[t], HostRows) == (home is not None)
        close(ordinary(out[t]), expected[t][own[t]], f"{name}: output {t}")
    for t in mine:
        found, grad = (None if g is None else ordinary(g) for g in (mine[t].grad, every[t].grad))
        close(found, None if grad is None else grad[own[t]], f"{name}: gradient of {t}")
    for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(grad, group=group)
        close(grad.cpu(), q.grad, f"{name}: gradient of {key}")
    assert "one-shot" not in describe(model)
