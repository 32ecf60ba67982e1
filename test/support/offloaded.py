"""Models and inputs of the tests of training on rows at home."""

from unittest import mock

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from support.nasty_graph import NUM_NODES, edges
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.nn.models.attentive_fp import GATEConv

from pyg_sar.offload.home import Home

IN, HIDDEN, OUT = 8, 6, 4


def leaf(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(dtype=torch.float64):
    """A graph with hubs, self-loops, multi-edges and isolated nodes, and what layers read of its edges."""
    edge_index = edges()
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    count = edge_index.size(1)
    x = leaf(NUM_NODES, IN, dtype=dtype)
    y, mask = torch.arange(NUM_NODES) % OUT, torch.arange(NUM_NODES) % 3 > 0
    weight = leaf(count, seed=2, dtype=dtype).detach().abs().requires_grad_()
    return Data(x=x, y=y, mask=mask, edge_index=edge_index), {
        "edge_attr": leaf(count, 3, seed=1, dtype=dtype),
        "edge_weight": weight,
        "edge_type": torch.arange(count) % 3,
    }


def mlp(a, b):
    return torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.ReLU(), torch.nn.Linear(b, b))


class Updating(torch.nn.Module):
    """A layer whose attention is made by an update of edges, before its messages."""

    def __init__(self, a, b, flow="source_to_target"):
        super().__init__()
        self.lin, self.conv = torch.nn.Linear(a, b), GATEConv(b, b, 3)
        self.conv.flow = flow

    def forward(self, x, edge_index, edge_attr):
        return self.conv(self.lin(x), edge_index, edge_attr)


DEGREES = torch.bincount(torch.bincount(edges()[1], minlength=NUM_NODES))
# Layers of PyG, and which tensors of edges they are given.
LAYERS = {
    "sage": (lambda a, b: pyg.SAGEConv(a, b), ()),
    "sage, max": (lambda a, b: pyg.SAGEConv(a, b, aggr="max", project=True), ()),
    "sage, sum": (lambda a, b: pyg.SAGEConv(a, b, aggr="sum", normalize=True), ()),
    "gcn": (lambda a, b: pyg.GCNConv(a, b), ()),
    "gcn, weights": (lambda a, b: pyg.GCNConv(a, b), ("edge_weight",)),
    "gin": (lambda a, b: pyg.GINConv(mlp(a, b), train_eps=True), ()),
    "gat": (lambda a, b: pyg.GATConv(a, b // 2, 2), ()),
    "gat, edges": (lambda a, b: pyg.GATConv(a, b, 2, concat=False, edge_dim=3, residual=True), ("edge_attr",)),
    "gatv2": (lambda a, b: pyg.GATv2Conv(a, b // 2, 2), ()),
    "gatv2, shared": (lambda a, b: pyg.GATv2Conv(a, b // 2, 2, share_weights=True, edge_dim=3), ("edge_attr",)),
    "transformer": (lambda a, b: pyg.TransformerConv(a, b // 2, 2, beta=True), ()),
    "rgcn": (lambda a, b: pyg.RGCNConv(a, b, 3), ("edge_type",)),
    "rgcn, bases": (lambda a, b: pyg.RGCNConv(a, b, 3, num_bases=2), ("edge_type",)),
    # by their own code, or by kernels that do the same
    "graphconv": (lambda a, b: pyg.GraphConv(a, b), ("edge_weight",)),
    "tag": (lambda a, b: pyg.TAGConv(a, b), ()),
    "cheb": (lambda a, b: pyg.ChebConv(a, b, 3), ()),
    "gine": (lambda a, b: pyg.GINEConv(mlp(a, b), edge_dim=3), ("edge_attr",)),
    "edge": (lambda a, b: pyg.EdgeConv(mlp(2 * a, b)), ()),
    "gen": (lambda a, b: pyg.GENConv(a, b, aggr="softmax", learn_t=True), ()),
    "pna": (lambda a, b: pyg.PNAConv(a, b, ["mean", "max", "std"], ["identity", "amplification"], DEGREES), ()),
    "median": (lambda a, b: pyg.SAGEConv(a, b, aggr="median"), ()),
    # also against the direction of edges, or with updates of edges
    "both ways": (lambda a, b: pyg.DirGNNConv(pyg.GraphConv(a, b)), ()),
    "updates": (Updating, ("edge_attr",)),
    "updates, to sources": (lambda a, b: Updating(a, b, "target_to_source"), ("edge_attr",)),
}


class Net(torch.nn.Module):
    """Three layers of a kind, normalised, with a residual and jumping knowledge."""

    def __init__(self, kind, norm):
        super().__init__()
        make, self.names = LAYERS[kind]
        self.convs = torch.nn.ModuleList(make(a, b) for a, b in ((IN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)))
        self.norms = torch.nn.ModuleList(norm(HIDDEN) for _ in range(2))
        self.jump, self.lin = pyg.JumpingKnowledge("cat"), torch.nn.Linear(3 * HIDDEN, OUT)

    def forward(self, x, edge_index, given):
        given = [given[name] for name in self.names]
        h = self.norms[0](self.convs[0](x, edge_index, *given)).relu_()
        k = h + F.gelu(self.norms[1](self.convs[1](h, edge_index, *given)))
        return self.lin(self.jump([h, k, self.convs[2](k, edge_index, *given).tanh()]))


def network(kind, norm, dtype=torch.float64):
    torch.manual_seed(3)
    return Net(kind, {"batch": pyg.BatchNorm, "layer": torch.nn.LayerNorm, "none": torch.nn.Identity}[norm]).to(dtype)


class WithoutEdges(torch.nn.Module):
    """A model that is called without tensors of edges."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, edge_index):
        return self.model(x, edge_index, {})


class Longest(TorchDispatchMode):
    """The most rows of a tensor that was made, other than at home."""

    def __init__(self):
        super().__init__()
        self.rows, self.what = 0, None

    @classmethod
    def of(cls, step):
        """Look at a step; what is made at home is hidden from this."""
        empty = Home.empty

        def hidden(*args):
            with _disable_current_modes():
                return empty(*args)

        with mock.patch.object(Home, "empty", hidden), cls() as longest:
            step()
        return longest

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if type(t) is torch.Tensor}
        for t in tree_leaves(out):
            made = type(t) is torch.Tensor and t.dim() > 1 and t.untyped_storage()._cdata not in given
            if made and t.size(0) > self.rows:
                self.rows, self.what = t.size(0), (func, t.shape)
        return out
