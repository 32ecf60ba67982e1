"""Random heterogeneous graphs, and models of them: a layer for each type of edges or for all, normalised and joined."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from torch import Tensor
from torch_geometric.data import HeteroData

import pyg_sar

WIDTH, CLASSES, OF_EDGES = 6, 3, 2
EdgeType = tuple[str, str, str]

# Layers of one type of edges, whether they read features of edges, and whether they take two sets of nodes.
CONVS: dict[str, tuple[Callable[[], torch.nn.Module], bool, bool]] = {
    **{f"SAGEConv {aggr}": (lambda aggr=aggr: gnn.SAGEConv((WIDTH, WIDTH), WIDTH, aggr), False, True)
       for aggr in ("mean", "max", "sum", "std", "median")},
    "SAGEConv project": (lambda: gnn.SAGEConv((WIDTH, WIDTH), WIDTH, project=True, normalize=True), False, True),
    "GATConv": (lambda: gnn.GATConv((WIDTH, WIDTH), 3, 2, add_self_loops=False, edge_dim=OF_EDGES), True, True),
    "GATConv loops": (lambda: gnn.GATConv(WIDTH, WIDTH, edge_dim=OF_EDGES), True, False),
    "GATv2Conv": (lambda: gnn.GATv2Conv((WIDTH, WIDTH), 3, 2, add_self_loops=False), False, True),
    "TransformerConv": (lambda: gnn.TransformerConv((WIDTH, WIDTH), 3, 2, beta=True), False, True),
    "GraphConv": (lambda: gnn.GraphConv((WIDTH, WIDTH), WIDTH, "mean"), False, True),
    "GINConv": (lambda: gnn.GINConv(gnn.MLP([WIDTH, WIDTH], norm=None), train_eps=True), False, True),
    "GINEConv": (lambda: gnn.GINEConv(torch.nn.Linear(WIDTH, WIDTH), edge_dim=OF_EDGES), True, True),
    "GCNConv": (lambda: gnn.GCNConv(WIDTH, WIDTH), False, False),
    "CGConv": (lambda: gnn.CGConv((WIDTH, WIDTH), OF_EDGES), True, True),
    "NNConv": (lambda: gnn.NNConv((WIDTH, WIDTH), WIDTH, torch.nn.Linear(OF_EDGES, WIDTH * WIDTH)), True, True),
    "EdgeConv": (lambda: gnn.EdgeConv(torch.nn.Linear(2 * WIDTH, WIDTH)), False, True),
    "ResGatedGraphConv": (lambda: gnn.ResGatedGraphConv((WIDTH, WIDTH), WIDTH), False, True),
    "LEConv": (lambda: gnn.LEConv((WIDTH, WIDTH), WIDTH), False, True),
    "GeneralConv": (lambda: gnn.GeneralConv((WIDTH, WIDTH), WIDTH, OF_EDGES, attention=True, heads=2), True, True),
    "FiLMConv": (lambda: gnn.FiLMConv((WIDTH, WIDTH), WIDTH), False, True),
    "SimpleConv": (lambda: gnn.SimpleConv("max"), False, True),
    "TAGConv": (lambda: gnn.TAGConv(WIDTH, WIDTH, 2), False, False),
}  # fmt: skip
# Of one set of nodes: what they read of sources is not a pair of rows of both ends, or comes from several hops.
NOT_ON_FLOWS = {"ResGatedGraphConv", "LEConv", "FiLMConv", "TAGConv"}
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "in place": lambda x: F.elu_(x * 1.5),
    "softmax": lambda x: x.softmax(-1),
}
NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm": lambda: gnn.BatchNorm(WIDTH, allow_single_element=True),
    "GraphNorm": lambda: gnn.GraphNorm(WIDTH),
    "torch.LayerNorm": lambda: torch.nn.LayerNorm(WIDTH),
    "PairNorm": lambda: gnn.PairNorm(),
}


def graph(seed: int) -> HeteroData:
    """A graph of two to four types of nodes, each of which edges end at, and some types of edges without any."""
    it, g = random.Random(seed), torch.Generator().manual_seed(seed)
    types = ["paper", "author", "venue", "word"][: it.randint(2, 4)]
    data, counts = HeteroData(), {t: it.choice([5, 17, 40]) for t in types}
    counts["paper"] = 37
    for t, n in counts.items():
        data[t].x = torch.randn(n, WIDTH, generator=g, dtype=torch.float64)
        data[t].y = torch.arange(n) % CLASSES
        data[t].train_mask = torch.rand(n, generator=g) < 0.5
    ends = [(it.choice(types), t) for t in types] + [(s, it.choice(types)) for s in types]
    ends += [(it.choice(types), it.choice(types)) for _ in range(it.randint(0, 2))]
    for k, (s, t) in enumerate(ends):
        m = it.choice([0, 1, 30, 90])
        edge_index = torch.stack([torch.randint(counts[end], (m,), generator=g) for end in (s, t)])
        data[s, f"r{k}", t].edge_index = edge_index
        data[s, f"r{k}", t].edge_attr = torch.randn(m, OF_EDGES, generator=g, dtype=torch.float64)
    return data


class Layer(torch.nn.Module):
    """One layer over all types of edges."""

    def __init__(self, it: random.Random, data: HeteroData, flow: bool) -> None:
        super().__init__()
        self.kind = it.choice(["HeteroConv", "HeteroConv", "HGTConv"] + ["HANConv"] * (not flow))
        self.names: dict[EdgeType, str] = {}
        if self.kind == "HeteroConv":
            self.aggr = it.choice(["sum", "mean", "max", "min", "cat", None])
            for edge_type in data.edge_types:
                one = edge_type[0] == edge_type[2]
                left_out = NOT_ON_FLOWS if flow and one else ()
                fits = [name for name, (*_, two) in CONVS.items() if (two or one) and name not in left_out]
                self.names[edge_type] = it.choice(fits)
            self.layer = gnn.HeteroConv({e: CONVS[name][0]() for e, name in self.names.items()}, aggr=self.aggr)
            degree = {t: sum(e[2] == t for e in data.edge_types) for t in data.node_types}
            stacked = {t: torch.nn.Linear(WIDTH * n, WIDTH) for t, n in degree.items()}
            self.after = torch.nn.ModuleDict(stacked if self.aggr in ("cat", None) else {})
        else:
            make = gnn.HGTConv if self.kind == "HGTConv" else gnn.HANConv
            self.layer = make(WIDTH, WIDTH, data.metadata(), it.choice([1, 2, 3]))

    def __repr__(self) -> str:
        return f"{self.kind} {self.names} {getattr(self, 'aggr', '')}"

    def forward(self, x: dict[str, Tensor], edge_index: Any, edge_attr: Any) -> dict[str, Tensor]:
        if self.kind != "HeteroConv":
            return {t: rows for t, rows in self.layer(x, edge_index).items() if rows is not None}
        reads = {e: attr for e, attr in edge_attr.items() if CONVS[self.names[e]][1]}
        out = self.layer(x, edge_index, edge_attr_dict=reads)
        if self.aggr == "cat":
            return {t: self.after[t](rows) for t, rows in out.items()}
        if self.aggr is None:  # stacked
            return {t: self.after[t](rows.reshape(len(rows), rows.size(1) * rows.size(2))) for t, rows in out.items()}
        return out


class Model(torch.nn.Module):
    """A random model; on a message-flow graph (``flow``) without what sees the rows of all nodes."""

    def __init__(self, seed: int, data: HeteroData, flow: bool = False) -> None:
        super().__init__()
        it = random.Random(seed)
        self.first = gnn.HeteroDictLinear(WIDTH, WIDTH, data.node_types)
        self.layers = torch.nn.ModuleList(Layer(it, data, flow) for _ in range(it.randint(1, 3)))
        self.by_row = [it.choice(list(BY_ROW)) for _ in self.layers]
        self.norms = torch.nn.ModuleList()
        for _ in self.layers:
            norm = it.choice([None, "torch.LayerNorm"] if flow else [None, *NORMS])
            made = {t: NORMS[norm]() for t in data.node_types} if norm else {}
            self.norms.append(torch.nn.ModuleDict(made))
        self.residual = not flow and it.random() < 0.4
        self.joins = not flow and it.random() < 0.3
        self.target = it.choice(data.node_types)
        self.lin = torch.nn.Linear(WIDTH * (len(self.layers) if self.joins else 1), CLASSES)
        with torch.no_grad():
            for parameter in self.parameters():  # zeros tie, and rounding tells which is the least
                parameter += 0.1 * torch.randn(parameter.shape)

    def forward(self, x: dict[str, Tensor], edges: list[Any], attrs: list[Any]) -> Tensor:
        x, kept = self.first(x), []
        for layer, by_row, norms, edge_index, attr in zip(
            self.layers, self.by_row, self.norms, edges, attrs, strict=True
        ):
            before, x = x, layer(x, edge_index, attr)
            x = {t: norms[t](rows) if t in norms else rows for t, rows in x.items()}
            x = {t: BY_ROW[by_row](rows) for t, rows in x.items()}
            if self.residual:
                x = {t: rows + before[t] for t, rows in x.items()}
            kept.append(x[self.target])
        return self.lin(torch.cat(kept, -1) if self.joins else x[self.target])

    def whole(self, data: HeteroData) -> Tensor:
        """Return the outputs of all target nodes."""
        n = len(self.layers)
        return self(data.x_dict, [data.edge_index_dict] * n, [data.edge_attr_dict] * n)

    def of_flow(self, data: HeteroData) -> Tensor:
        """Return the outputs of the target nodes with labels, by a message-flow graph."""
        mask = {self.target: data[self.target].train_mask}
        flow = pyg_sar.message_flow_graphs(data.edge_index_dict, mask, len(self.layers))
        attrs = [{e: data[e].edge_attr[at] for e, at in rows.items()} for rows in flow.edge_rows]
        return self({t: data[t].x[rows] for t, rows in flow.node_rows.items()}, flow.edge_indices, attrs)

    def loss(self, data: HeteroData, way: str) -> Tensor:
        """Return the mean loss of nodes with labels: in one process (``"pyg"``), on workers, or on their flow."""
        mask, y = data[self.target].train_mask, data[self.target].y
        out = self.of_flow(data) if way == "flow" else self.whole(data)[mask]
        if way == "pyg":
            return F.cross_entropy(out, y[mask])
        return pyg_sar.global_mean(F.cross_entropy(out, y[mask], reduction="none"))
