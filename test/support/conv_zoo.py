"""Every layer of PyG in small: how it is made, what it is given, and what becomes of it on a sharded graph."""

import dataclasses
import functools
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, Result, Share, assignment, backward, close, edges, share, with_one_loop
from torch import Tensor
from torch.nn import Linear, Sequential, Tanh
from torch_geometric.utils import scatter, softmax

from pyg_sar import shard
from pyg_sar.nn import convert, describe

# PyG's Sequential imports who makes it by the name of the file alone, or has the code of another Sequential.
sys.modules["conv_zoo"] = sys.modules[__name__]

F, D, T = 6, 3, 3  # node features, edge features, edge types
NUM_DST = 47  # of the graph with two sets of nodes
V, TO, BACK = "v", ("v", "to", "v"), ("v", "back", "v")

# What an argument holds: rows of nodes, of destinations or of edges, and their shape.
INPUTS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "x": ("node", lambda n, g: torch.randn(n, F, generator=g)),
    "x_0": ("node", lambda n, g: torch.randn(n, F, generator=g)),
    "x_dst": ("dst", lambda n, g: torch.randn(n, F, generator=g)),
    "layers": ("node", lambda n, g: torch.randn(n, 2, F, generator=g)),
    "pos": ("node", lambda n, g: torch.randn(n, 3, generator=g)),
    "normal": ("node", lambda n, g: torch.randn(n, 3, generator=g)),
    "ids": ("node", lambda n, g: torch.arange(n)),
    "node_type": ("node", lambda n, g: torch.randint(2, (n,), generator=g)),
    "edge_weight": ("edge", lambda n, g: torch.rand(n, generator=g) + 0.1),
    "edge_attr": ("edge", lambda n, g: torch.randn(n, D, generator=g)),
    "edge_type": ("edge", lambda n, g: torch.randint(T, (n,), generator=g)),
    "lambda_max": ("graph", lambda n, g: torch.tensor(2.5)),
    "nothing": ("graph", lambda n, g: None),
}
HYPER = "hyperedge_index"
GRAPHS = {"edge_index": 0, HYPER: 0, "pos_edge_index": 0, "neg_edge_index": 1}


class Case(NamedTuple):
    """A layer and its fate.

    Args:
        make: Makes the layer.
        given: The arguments it is called with, as ``name`` or ``name=kind``.
        says: What the refusal says; empty if the layer is exact.
        train: Whether it is in training mode.
        two: Whether the graph joins two sets of nodes.
        methods: Partitions, if not all will do.
        tol: How close it comes.
        dtype: The type of parameters and inputs.
        one_loop: Whether no node has several self-loops.
    """

    make: Callable[[], torch.nn.Module]
    given: str = "x edge_index"
    says: str = ""
    train: bool = True
    two: bool = False
    methods: tuple[str, ...] = ("random", "empty", "edgeless")
    tol: float = 1e-10
    dtype: torch.dtype = torch.float64
    one_loop: bool = False


def mlp(width: int, out: int = F) -> Sequential:
    return Sequential(Linear(width, out), Tanh(), Linear(out, out))


def sage(aggr: Any, **kwargs: Any) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.SAGEConv(F, F, aggr=aggr, **kwargs)


def simple(aggr: Callable[[], gnn.Aggregation]) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.SimpleConv(aggr())


class InOrder(torch.nn.Module):
    """Gives PyG's own code the edges in the order that it asks for."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if type(edge_index) is Tensor:
            edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
        return self.layer(x, edge_index)


def ordered(aggr: Callable[[], gnn.Aggregation]) -> Case:
    return Case(lambda: InOrder(gnn.SimpleConv(aggr())), says=ORDER)


def bare(cls: type[torch.nn.Module]) -> torch.nn.Module:
    """A layer whose constructor asks for a kernel that is absent."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    return layer


def chain(layer: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.Sequential("x, edge_index", [(layer(), "x, edge_index -> x"), Linear(F, F)])


def rgat(**kwargs: Any) -> torch.nn.Module:
    layer = gnn.RGATConv(F, 4, T, heads=2, **kwargs)
    for parameter in (layer.l2, layer.b2):  # PyG leaves them as the memory was
        torch.nn.init.normal_(parameter)
    return layer


class Ring(torch.nn.Module):
    """What tutorials write without a layer of PyG."""

    def forward(self, x: Tensor, edge_index: Tensor, *args: Any) -> Tensor:
        row, col = edge_index
        weight = softmax((x[row] * x[col]).sum(-1), col)
        return x + scatter(x[row] * weight.unsqueeze(-1), col, dim=0, dim_size=x.size(0), reduce="sum")


class Smooth(torch.nn.Module):
    """The post-processing of predictions ``x``; those of half the nodes are known."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.smooth = gnn.CorrectAndSmooth(2, 0.5, 2, 0.5, **kwargs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        known = x[:, 0] > 0
        return self.smooth(x, x[known].round(), known, edge_index)


class Net(torch.nn.Module):
    """A model with something between its layers."""

    def __init__(self, between: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = gnn.SAGEConv(F, F), between, gnn.GCNConv(F, F)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.between(self.first(x, edge_index)), edge_index)


def histogram() -> Tensor:
    return torch.bincount(torch.bincount(edges()[1], minlength=NUM_NODES))


W, A, TYPE = "x edge_index edge_weight", "x edge_index edge_attr", "x edge_index edge_type"
POS, META = "x pos edge_index", ([V], [TO])

LAYERS: dict[str, Case] = {
    "SimpleConv": Case(lambda: gnn.SimpleConv("mean", combine_root="sum"), W),
    "GCNConv": Case(lambda: gnn.GCNConv(F, F), W),
    "ChebConv": Case(lambda: gnn.ChebConv(F, F, 3), W, "lambda_max"),
    "SAGEConv": Case(lambda: gnn.SAGEConv(F, F)),
    "GraphConv": Case(lambda: gnn.GraphConv(F, F), W),
    "GatedGraphConv": Case(lambda: gnn.GatedGraphConv(F, 2), W),
    "ResGatedGraphConv": Case(lambda: gnn.ResGatedGraphConv(F, F, edge_dim=D), A),
    "GATConv": Case(lambda: gnn.GATConv(F, 4, heads=2, edge_dim=D), A),
    "GATv2Conv": Case(lambda: gnn.GATv2Conv(F, 4, heads=2, edge_dim=D), A),
    "TransformerConv": Case(lambda: gnn.TransformerConv(F, 4, heads=2, edge_dim=D, beta=True), A),
    "AGNNConv": Case(lambda: gnn.AGNNConv()),
    "TAGConv": Case(lambda: gnn.TAGConv(F, F), W),
    "GINConv": Case(lambda: gnn.GINConv(mlp(F), train_eps=True)),
    "GINEConv": Case(lambda: gnn.GINEConv(mlp(F), edge_dim=D), A),
    "ARMAConv": Case(lambda: gnn.ARMAConv(F, F, 2, 2), W),
    "SGConv": Case(lambda: gnn.SGConv(F, F, 2), W),
    "SSGConv": Case(lambda: gnn.SSGConv(F, F, 0.3, 2), W),
    "APPNP": Case(lambda: gnn.APPNP(3, 0.1), W),
    "MFConv": Case(lambda: gnn.MFConv(F, F)),
    "RGCNConv": Case(lambda: gnn.RGCNConv(F, F, T), TYPE),
    "FastRGCNConv": Case(lambda: gnn.FastRGCNConv(F, F, T), TYPE),
    "RGATConv": Case(lambda: gnn.RGATConv(F, 4, T, heads=2, edge_dim=D), TYPE + " edge_attr"),
    "SignedConv": Case(lambda: gnn.SignedConv(F, 4, True), "x pos_edge_index neg_edge_index"),
    "DNAConv": Case(lambda: gnn.DNAConv(F, heads=2), "x=layers edge_index edge_weight"),
    "PointNetConv": Case(lambda: gnn.PointNetConv(mlp(F + 3), mlp(F)), POS),
    "GMMConv": Case(lambda: gnn.GMMConv(F, F, dim=D, kernel_size=2), A),
    "NNConv": Case(lambda: gnn.NNConv(F, F, Linear(D, F * F)), A),
    "CGConv": Case(lambda: gnn.CGConv(F, D), A),
    "EdgeConv": Case(lambda: gnn.EdgeConv(mlp(2 * F))),
    "PPFConv": Case(lambda: gnn.PPFConv(mlp(F + 4), mlp(F)), "x pos normal edge_index"),
    "FeaStConv": Case(lambda: gnn.FeaStConv(F, F, heads=2), methods=("random", "edgeless")),
    "PointTransformerConv": Case(lambda: gnn.PointTransformerConv(F, F), POS),
    "HypergraphConv": Case(lambda: gnn.HypergraphConv(F, F), "x hyperedge_index", two=True),
    "LEConv": Case(lambda: gnn.LEConv(F, F), W),
    "PNAConv": Case(
        lambda: gnn.PNAConv(F, F, ["mean", "max", "std"], ["identity", "amplification"], histogram(), edge_dim=D), A
    ),
    "ClusterGCNConv": Case(lambda: gnn.ClusterGCNConv(F, F)),
    "GENConv": Case(lambda: gnn.GENConv(F, F, learn_t=True, norm="layer", edge_dim=D), A),
    "GCN2Conv": Case(lambda: gnn.GCN2Conv(F, 0.1, 0.5, 1), "x x_0 edge_index edge_weight"),
    "WLConv": Case(lambda: gnn.WLConv(), "x=node_type edge_index", "colours of all nodes"),
    "WLConvContinuous": Case(lambda: gnn.WLConvContinuous(), W),
    "FiLMConv": Case(lambda: gnn.FiLMConv(F, F, T), TYPE),
    "SuperGATConv": Case(lambda: gnn.SuperGATConv(F, 4, heads=2), says="training loss"),
    "FAConv": Case(lambda: gnn.FAConv(F), "x x_0 edge_index"),
    "EGConv": Case(lambda: gnn.EGConv(F, F, ["symnorm", "mean", "max", "std"], num_heads=2, num_bases=2)),
    "PDNConv": Case(lambda: gnn.PDNConv(F, F, D, F), A),
    "GeneralConv": Case(lambda: gnn.GeneralConv(F, F, D, attention=True, heads=2), A),
    "HGTConv": Case(lambda: gnn.HGTConv(F, F, META, heads=2), "x_dict edge_index_dict", "'HGTConv' cannot be computed"),
    "HEATConv": Case(lambda: gnn.HEATConv(F, F, 2, T, 4, D, 4, heads=2), "x edge_index node_type edge_type edge_attr"),
    "HeteroConv": Case(lambda: gnn.HeteroConv({TO: gnn.SAGEConv(F, F)}), "x_dict edge_index_dict"),
    "HANConv": Case(lambda: gnn.HANConv(F, F, META, heads=2), "x_dict edge_index_dict", "semantic attention"),
    "LGConv": Case(lambda: gnn.LGConv(), W),
    "PointGNNConv": Case(lambda: gnn.PointGNNConv(mlp(F, 3), mlp(F + 3), mlp(F)), POS),
    "GPSConv": Case(lambda: gnn.GPSConv(F, gnn.SAGEConv(F, F), norm=None), says="attends over all nodes"),
    "AntiSymmetricConv": Case(lambda: gnn.AntiSymmetricConv(F)),
    "DirGNNConv": Case(lambda: gnn.DirGNNConv(gnn.SAGEConv(F, F))),
    "MixHopConv": Case(lambda: gnn.MixHopConv(F, F), W),
    "MeshCNNConv": Case(
        lambda: gnn.MeshCNNConv(F, F, torch.nn.ModuleList(Linear(F, F) for _ in range(5))), says="by their position"
    ),
}

KERNEL = "finds its edges by a kNN kernel of pyg-lib or torch-cluster instead of `edge_index`"

# Why they are not run, and what fails for this reason.
NOT_RUNNABLE: dict[str, tuple[str, Callable[[], Any]]] = {
    "SplineConv": ("needs the spline kernels of pyg-lib or torch-spline-conv", lambda: gnn.SplineConv(F, F, 2, 3)),
    "GravNetConv": (KERNEL, lambda: gnn.GravNetConv(F, F, 2, 2, 3)),
    "DynamicEdgeConv": (KERNEL, lambda: gnn.DynamicEdgeConv(mlp(2 * F), 3)),
    "XConv": (KERNEL, lambda: gnn.XConv(F, F, 3, 3)),
    "PANConv": ("needs torch-sparse", lambda: gnn.PANConv(F, F, 2)(torch.randn(NUM_NODES, F), edges())),
    "FusedGATConv": (
        "needs dgNN; takes CSR and CSC instead of `edge_index`",
        lambda: gnn.FusedGATConv(F, F, add_self_loops=False),
    ),
    "CuGraphSAGEConv": ("needs pylibcugraphops", lambda: gnn.CuGraphSAGEConv(F, F)),
    "CuGraphGATConv": ("needs pylibcugraphops", lambda: gnn.CuGraphGATConv(F, F)),
    "CuGraphRGCNConv": ("needs pylibcugraphops", lambda: gnn.CuGraphRGCNConv(F, F, T)),
}
ABSTRACT = {"MessagePassing", "Aggregation"}

ORDER = "order of their destinations"

# Aggregations stand in a layer that does nothing else.
AGGREGATIONS: dict[str, Case] = {
    "MultiAggregation": Case(simple(lambda: gnn.MultiAggregation(["mean", "max", "std"]))),
    "SumAggregation": Case(simple(gnn.SumAggregation)),
    "MeanAggregation": Case(simple(gnn.MeanAggregation)),
    "MaxAggregation": Case(simple(gnn.MaxAggregation)),
    "MinAggregation": Case(simple(gnn.MinAggregation)),
    "MulAggregation": Case(simple(gnn.MulAggregation)),
    "VarAggregation": Case(simple(gnn.VarAggregation)),
    "StdAggregation": Case(simple(gnn.StdAggregation)),
    "SoftmaxAggregation": Case(simple(lambda: gnn.SoftmaxAggregation(learn=True, channels=F))),
    "PowerMeanAggregation": Case(simple(lambda: gnn.PowerMeanAggregation(learn=True))),
    "MedianAggregation": Case(simple(gnn.MedianAggregation), methods=("contiguous",)),
    "QuantileAggregation": Case(simple(lambda: gnn.QuantileAggregation([0.2, 0.7])), methods=("contiguous",)),
    "LSTMAggregation": ordered(lambda: gnn.LSTMAggregation(F, F)),
    "GRUAggregation": ordered(lambda: gnn.GRUAggregation(F, F)),
    "Set2Set": Case(simple(lambda: gnn.Set2Set(F, 2))),
    "DegreeScalerAggregation": Case(
        simple(lambda: gnn.DegreeScalerAggregation(["mean", "max"], ["linear", "attenuation"], histogram(), True))
    ),
    "EquilibriumAggregation": Case(simple(lambda: gnn.EquilibriumAggregation(F, F, [4])), says="optimises"),
    "SortAggregation": ordered(lambda: gnn.SortAggregation(2)),
    "GraphMultisetTransformer": ordered(lambda: gnn.GraphMultisetTransformer(F, 2)),
    "AttentionalAggregation": Case(simple(lambda: gnn.AttentionalAggregation(mlp(F, 1)))),
    "MLPAggregation": ordered(lambda: gnn.MLPAggregation(F, F, 20, num_layers=1)),
    "DeepSetsAggregation": Case(simple(lambda: gnn.DeepSetsAggregation(mlp(F), mlp(F)))),
    "SetTransformerAggregation": ordered(lambda: gnn.SetTransformerAggregation(F, 2)),
    "LCMAggregation": ordered(lambda: gnn.LCMAggregation(F, F)),
    "VariancePreservingAggregation": Case(simple(gnn.VariancePreservingAggregation)),
    "PatchTransformerAggregation": ordered(lambda: gnn.PatchTransformerAggregation(F, F, 2, 4)),
}

LOOPS, PAIR, T2S = "two sets of nodes", "x=pair edge_index", "target_to_source"
REDUCE, SOME = "Conv' cannot be computed", ("random", "edgeless")
NORMS = {
    "BatchNorm": (lambda: gnn.BatchNorm(F), "'BatchNorm1d' in 'Net'"),
    "HeteroBatchNorm": (lambda: gnn.HeteroBatchNorm(F, 2), "takes its statistics"),
    "InstanceNorm": (lambda: gnn.InstanceNorm(F), "normalises over all nodes"),
    "LayerNorm": (lambda: gnn.LayerNorm(F), "unless mode='node'"),
    "LayerNorm node": (lambda: gnn.LayerNorm(F, mode="node"), ""),
    "GraphNorm": (lambda: gnn.GraphNorm(F), "normalises over all nodes"),
    "GraphSizeNorm": (lambda: gnn.GraphSizeNorm(), "normalises over all nodes"),
    "PairNorm": (lambda: gnn.PairNorm(), "normalises over all nodes"),
    "MeanSubtractionNorm": (lambda: gnn.MeanSubtractionNorm(), "normalises over all nodes"),
    "DiffGroupNorm": (lambda: gnn.DiffGroupNorm(F, 2), "takes its statistics"),
}

OPTIONS: dict[str, Case] = {
    "SAGEConv project": Case(sage("mean", project=True, normalize=True)),
    "GCNConv decomposed": Case(lambda: gnn.GCNConv(F, F, decomposed_layers=2), W),
    "SAGEConv aggregations": Case(sage(["mean", "max", "std", "softmax"])),
    "SAGEConv to sources": Case(sage("mean", flow=T2S)),
    "SAGEConv sum to sources": Case(sage("sum", flow=T2S)),
    "SAGEConv max to sources": Case(sage("max", flow=T2S), says=REDUCE),
    "SAGEConv lstm": Case(lambda: InOrder(sage("lstm")()), says=ORDER),
    "SAGEConv pair": Case(sage("max"), PAIR, two=True),
    "SAGEConv sources": Case(sage("mean"), "x=source edge_index"),
    "SAGEConv float32": Case(sage("mean"), dtype=torch.float32, tol=1e-5),
    "GraphConv max": Case(lambda: gnn.GraphConv(F, F, "max"), W),
    "GraphConv softmax": Case(lambda: gnn.GraphConv(F, F, "softmax"), W),
    "GraphConv pair": Case(lambda: gnn.GraphConv(F, F), PAIR + " edge_weight", two=True),
    "GCNConv unweighted": Case(lambda: gnn.GCNConv(F, F)),
    "GCNConv improved": Case(lambda: gnn.GCNConv(F, F, improved=True), W),
    "GCNConv loopless": Case(lambda: gnn.GCNConv(F, F, add_self_loops=False), W),
    "GCNConv raw": Case(lambda: gnn.GCNConv(F, F, normalize=False), W),
    "GCNConv to sources": Case(lambda: gnn.GCNConv(F, F, flow=T2S), W),
    "GCNConv float32": Case(lambda: gnn.GCNConv(F, F), W, dtype=torch.float32, tol=1e-5),
    "ChebConv with lambda": Case(lambda: gnn.ChebConv(F, F, 3), W + " lambda_max"),
    "ChebConv unnormalised": Case(lambda: gnn.ChebConv(F, F, 2, None), W + " lambda_max"),
    "ChebConv rw": Case(lambda: gnn.ChebConv(F, F, 2, "rw"), W + " lambda_max"),
    "GATConv mean of heads": Case(lambda: gnn.GATConv(F, 4, 2, concat=False, residual=True)),
    "GATConv loopless": Case(lambda: gnn.GATConv(F, 4, 2, add_self_loops=False, edge_dim=D), A),
    "GATConv sum of loops": Case(lambda: gnn.GATConv(F, 4, edge_dim=D, fill_value="sum"), A),
    "GATConv max of loops": Case(lambda: gnn.GATConv(F, 4, edge_dim=D, fill_value="max"), A),
    "GATConv to sources": Case(lambda: gnn.GATConv(F, 4, flow=T2S), says=REDUCE, methods=SOME),
    "GATConv pair": Case(lambda: gnn.GATConv((F, F), 4, 2, add_self_loops=False), PAIR, two=True),
    "GATConv pair with loops": Case(lambda: gnn.GATConv((F, F), 4), PAIR, LOOPS, two=True, methods=("random",)),
    "GATConv float32": Case(lambda: gnn.GATConv(F, 4, 2, edge_dim=D), A, dtype=torch.float32, tol=1e-5),
    "GATv2Conv shared": Case(lambda: gnn.GATv2Conv(F, 4, 2, share_weights=True, residual=True)),
    "GATv2Conv pair": Case(
        lambda: gnn.GATv2Conv((F, F), 4, add_self_loops=False, edge_dim=D), PAIR + " edge_attr", two=True
    ),
    "TransformerConv mean of heads": Case(lambda: gnn.TransformerConv(F, 4, 2, concat=False)),
    "TransformerConv pair": Case(lambda: gnn.TransformerConv((F, F), 4, edge_dim=D), PAIR + " edge_attr", two=True),
    "GINEConv pair": Case(lambda: gnn.GINEConv(mlp(F), edge_dim=D), PAIR + " edge_attr", two=True),
    "NNConv pair": Case(lambda: gnn.NNConv((F, F), 4, Linear(D, F * 4)), PAIR + " edge_attr", two=True),
    "RGCNConv bases": Case(lambda: gnn.RGCNConv(F, F, T, num_bases=2), TYPE),
    "RGCNConv blocks": Case(lambda: gnn.RGCNConv(F, F, T, num_blocks=2, aggr="max"), TYPE),
    "RGCNConv global ids": Case(lambda: gnn.RGCNConv(NUM_NODES, F, T), "x=ids edge_index edge_type"),
    "FastRGCNConv bases": Case(lambda: gnn.FastRGCNConv(F, F, T, num_bases=2), TYPE),
    "FastRGCNConv global ids": Case(
        lambda: gnn.FastRGCNConv(NUM_NODES, F, T), "x=ids edge_index edge_type", "'FastRGCNConv' cannot be computed"
    ),
    **{
        f"RGATConv {' '.join(map(str, how.values()))}": Case(lambda how=how: rgat(**how), TYPE)
        for how in [
            {"attention_mechanism": "within-relation"},
            {"attention_mode": "multiplicative-self-attention", "dim": 2},
            {"mod": "additive"},
            {"mod": "scaled"},
            {"mod": "f-additive"},
            {"mod": "f-scaled"},
            {"num_bases": 2},
            {"num_blocks": 2},
        ]
    },
    "GENConv batch": Case(lambda: gnn.GENConv(F, F, norm="batch"), says="'BatchNorm1d' in 'GENConv'"),
    "GENConv batch eval": Case(lambda: gnn.GENConv(F, F, norm="batch"), train=False),
    "CGConv batch": Case(lambda: gnn.CGConv(F, D, batch_norm=True), A, "'BatchNorm1d' in 'CGConv'"),
    "EdgeConv batch": Case(lambda: gnn.EdgeConv(gnn.MLP([2 * F, F, F])), says="'BatchNorm1d' in 'EdgeConv'"),
    "EdgeConv untracked": Case(
        lambda: gnn.EdgeConv(Sequential(Linear(2 * F, F), torch.nn.BatchNorm1d(F, track_running_stats=False))),
        says="'BatchNorm1d' in 'EdgeConv'",
        train=False,
    ),
    "SuperGATConv eval": Case(lambda: gnn.SuperGATConv(F, 4, 2), train=False),
    "SuperGATConv SD eval": Case(lambda: gnn.SuperGATConv(F, 4, 2, attention_type="SD"), train=False),
    "EGConv loopless": Case(lambda: gnn.EGConv(F, F, ["mean", "var"], 2, 2, add_self_loops=False)),
    "EGConv loops": Case(lambda: gnn.EGConv(F, F, ["mean"], 2, 2), says="'add_self_loops=False'", methods=("random",)),
    "DirGNNConv GCN": Case(lambda: gnn.DirGNNConv(gnn.GCNConv(F, F))),
    "DirGNNConv GAT": Case(lambda: gnn.DirGNNConv(gnn.GATConv(F, F)), says=REDUCE, methods=("random",)),
    "HypergraphConv node attention": Case(
        lambda: gnn.HypergraphConv(F, F, use_attention=True, heads=2),
        "x hyperedge_index hyperedge_attr=x_dst",
        two=True,
    ),
    "HypergraphConv edge attention": Case(
        lambda: gnn.HypergraphConv(F, F, use_attention=True, attention_mode="edge"),
        "x hyperedge_index hyperedge_attr=x_dst",
        REDUCE,
        two=True,
    ),
    "FeaStConv loopless": Case(lambda: gnn.FeaStConv(F, F, 2, add_self_loops=False), methods=("random",)),
    "AGNNConv loopless": Case(lambda: gnn.AGNNConv(add_self_loops=False)),
    "PPFConv loopless": Case(lambda: gnn.PPFConv(mlp(F + 4), add_self_loops=False), "x pos normal edge_index"),
    "PointTransformerConv loopless": Case(
        lambda: gnn.PointTransformerConv(F, F, mlp(3), mlp(F), add_self_loops=False), POS
    ),
    "SuperGATConv loopless": Case(lambda: gnn.SuperGATConv(F, 4, 2, add_self_loops=False), train=False),
    "PointNetConv positions": Case(lambda: gnn.PointNetConv(mlp(3)), "x=nothing pos edge_index"),
    "GMMConv separate": Case(lambda: gnn.GMMConv(F, F, D, 2, separate_gaussians=True), A),
    "PNAConv towers": Case(
        lambda: gnn.PNAConv(
            F, F, ["mean", "min"], ["linear"], histogram(), towers=2, divide_input=True, train_norm=True
        )
    ),
    "HeteroConv two relations": Case(
        lambda: gnn.HeteroConv({TO: gnn.SAGEConv(F, F), BACK: gnn.GATConv(F, F)}), "x_dict edge_index_dict=two"
    ),
    "HGTConv two relations": Case(
        lambda: gnn.HGTConv(F, F, ([V], [TO, BACK])), "x_dict edge_index_dict=two", "'HGTConv' cannot be computed"
    ),
    "HANConv two relations": Case(
        lambda: gnn.HANConv(F, F, ([V], [TO, BACK])), "x_dict edge_index_dict=two", "semantic attention"
    ),
    "GCN": Case(lambda: gnn.GCN(F, 8, 3, F), W),
    "GraphSAGE": Case(lambda: gnn.GraphSAGE(F, 8, 2, F, jk="lstm")),
    "GIN": Case(lambda: gnn.GIN(F, 8, 2, F)),
    "GAT": Case(lambda: gnn.GAT(F, 8, 2, F, v2=True, heads=2, jk="cat")),
    "PNA": Case(lambda: gnn.PNA(F, 8, 2, F, aggregators=["mean", "max"], scalers=["identity"], deg=histogram())),
    "EdgeCNN": Case(lambda: gnn.EdgeCNN(F, 8, 2, F)),
    "GraphSAGE rows": Case(lambda: gnn.GraphSAGE(F, 8, 2, F, norm="layer", norm_kwargs={"mode": "node"})),
    "DeepGCNLayer": Case(chain(lambda: gnn.DeepGCNLayer(gnn.SAGEConv(F, F), torch.nn.LayerNorm(F), Tanh()))),
    "GroupAddRev": Case(chain(lambda: gnn.GroupAddRev(gnn.SAGEConv(F // 2, F // 2), num_groups=2))),
    "LabelPropagation": Case(lambda: gnn.LabelPropagation(2, 0.5), "y=x edge_index"),
    "CorrectAndSmooth": Case(Smooth, says="error of all nodes"),
    "CorrectAndSmooth unscaled": Case(lambda: Smooth(autoscale=False)),
    "MetaLayer": Case(lambda: gnn.MetaLayer(node_model=Ring())),
    "MetaLayer global": Case(lambda: gnn.MetaLayer(node_model=Ring(), global_model=Ring()), says="whole graph"),
    "TopKPooling": Case(lambda: gnn.TopKPooling(F), says="compares all nodes"),
    "SAGPooling": Case(lambda: gnn.SAGPooling(F), says="compares all nodes"),
    "GraphUNet": Case(lambda: gnn.GraphUNet(F, F, F, 2), says="compares all nodes"),
    "AttentiveFP": Case(lambda: gnn.AttentiveFP(F, 8, F, D, 2, 2), A + " batch=node_type", "sums up all nodes"),
    "NeuralFingerprint": Case(lambda: gnn.NeuralFingerprint(F, 8, F, 2), says="sums up all nodes"),
    "DeepGraphInfomax": Case(
        lambda: gnn.DeepGraphInfomax(F, gnn.SAGEConv(F, F), lambda z, *args: z.mean(0), lambda *args: args),
        says="sums up all nodes",
    ),
    "GAE": Case(lambda: gnn.GAE(gnn.SAGEConv(F, F)), says="averages its losses"),
    "LINKX": Case(lambda: gnn.LINKX(NUM_NODES, F, 8, F, 2), says="weights for each node of the whole graph"),
    **{f"Net {norm}": Case(lambda make=make: Net(make()), says=says) for norm, (make, says) in NORMS.items()},
    "Net attention": Case(lambda: Net(gnn.attention.PerformerAttention(F, 2)), says="attends over all nodes"),
    **{
        f"Net {name}": Case(
            lambda name=name: Net(bare(getattr(gnn, name))), says="looks for neighbours among all nodes"
        )
        for name in ("DimeNet", "DynamicEdgeConv", "GNNFF", "GravNetConv", "ViSNet", "XConv")
    },
    "Net batch": Case(lambda: Net(torch.nn.BatchNorm1d(F)), says="'BatchNorm1d' in 'Net'"),
    "Net batch eval": Case(lambda: Net(torch.nn.BatchNorm1d(F)), train=False),
}


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """Make layers and inputs of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(what: str, count: int) -> Tensor:
    """The same numbers for the same kind of input."""
    g = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    return INPUTS[what][1](count, g)


def arguments(
    case: Case, shares: list[Share], counts: dict[str, int], device: str = "cpu", cast: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the layer is called with on a device, and the inputs that get gradients, which stay on the CPU."""
    leaves: dict[str, Any] = {}
    rows = {"node": shares[0].src, "dst": shares[0].dst, "edge": shares[0].edge}

    def leaf(what: str) -> Tensor:
        level = INPUTS[what][0]
        if level == "graph":
            value = numbers(what, 0)
            return value if value is None else value.to(device)
        value = numbers(what, counts[level])[rows[level]].clone()
        value = value.float() if cast and value.is_floating_point() else value
        if value.is_floating_point():
            leaves[what] = value.requires_grad_()
        return value.to(device)

    given: dict[str, Any] = {}
    for word in case.given.split():
        name, _, what = word.partition("=")
        what = what or name
        if what in GRAPHS:
            given[name] = shares[GRAPHS[what]].edge_index
        elif what == "edge_index_dict":
            given[name] = {TO: shares[0].edge_index}
        elif what == "two":
            given[name] = {TO: shares[0].edge_index, BACK: shares[1].edge_index}
        elif what == "x_dict":
            given[name] = {V: leaf("x")}
        elif what == "pair":
            given[name] = (leaf("x"), leaf("x_dst"))
        elif what == "source":
            given[name] = (leaf("x"), None)
        else:
            given[name] = leaf(what)
    return given, leaves


def sizes(case: Case) -> dict[str, int]:
    return {"node": NUM_NODES, "dst": NUM_DST if case.two else NUM_NODES, "edge": edges_of(case).size(1)}


def edges_of(case: Case, seed: int = 0) -> Tensor:
    it = edges(NUM_NODES, NUM_DST if case.two else NUM_NODES, seed)
    return with_one_loop(it) if case.one_loop else it


def layer_of(case: Case) -> torch.nn.Module:
    torch.manual_seed(2)
    return case.make().train(case.train)


def output(out: Any) -> Tensor:
    out = out[V] if isinstance(out, dict) else out
    return out[0] if isinstance(out, tuple) else out


def forward_and_backward(case: Case, shares: list[Share], device: str = "cpu", cast: bool = False) -> Result:
    """Run a layer on a device; if ``cast``, in single precision under autocast to bfloat16."""
    counts, layer = sizes(case), layer_of(case).to(device)
    layer = layer.float() if cast else layer
    if device != "cpu":
        shares = [dataclasses.replace(it, edge_index=it.edge_index.to(device)) for it in shares]
    given, leaves = arguments(case, shares, counts, device, cast)
    with default(torch.float32 if cast else case.dtype), torch.autocast(device, torch.bfloat16, enabled=cast):
        out = output(layer(**given)).cpu()
    rows, total = (shares[0].src, NUM_NODES) if HYPER in given else (shares[0].dst, counts["dst"])
    if out.requires_grad:
        backward(out, rows, total)
    grads = {name: x.grad for name, x in leaves.items()}
    of_parameters = {name: None if p.grad is None else p.grad.cpu() for name, p in layer.named_parameters()}
    return Result(out.detach(), grads, {}, of_parameters)


@functools.cache
def whole(name: str, one_loop: bool = False) -> Result:
    """What PyG computes on the whole graph, once in every process."""
    case = CASES[name]._replace(one_loop=one_loop)
    return forward_and_backward(case, in_one_process(case, 0))


def parts(method: str, size: int, num_nodes: int) -> Tensor:
    """As ``assignment``; "edgeless": the last worker owns the nodes that have no in-edges."""
    if size == 1:
        return torch.zeros(num_nodes, dtype=torch.long)
    if method != "edgeless":
        return assignment(method, size, num_nodes)
    nodes = torch.arange(num_nodes)
    return torch.where((nodes == 7) | (nodes % 11 == 5), size - 1, assignment("empty", size, num_nodes))


def cut(group: Any, case: Case, method: str) -> list[Share]:
    n, dst, _ = sizes(case).values()
    size = dist.get_world_size(group)
    part = parts(method, size, n)
    return [share(group, edges_of(case, seed), part, dst_part=parts(method, size, dst) if case.two else None)
            for seed in (0, 1)]  # fmt: skip


def check_exact(group: Any, case: Case, name: str, method: str, device: str = "cpu") -> list[str]:
    """Compare this worker's rows, and the sums of the workers' parameter gradients, with the whole graph's."""
    expected, shares = whole(name, case.one_loop), cut(group, case, method)
    found = forward_and_backward(case, shares, device)
    rows = {"node": shares[0].src, "dst": shares[0].dst, "edge": shares[0].edge}
    pairs = [("output", found.out, expected.out[rows["node" if HYPER in case.given else "dst"]])]
    for what, grad in found.node_grads.items():
        all_rows = expected.node_grads[what]
        pairs.append((f"gradient of {what}", grad, None if all_rows is None else all_rows[rows[INPUTS[what][0]]]))
    for what, grad in found.param_grads.items():
        total = expected.param_grads[what]
        if total is not None:
            grad = torch.zeros_like(total) if grad is None else grad
            dist.all_reduce(grad, group=group)
        pairs.append((f"gradient of {what}", grad, total))
    return [problem for pair in pairs if (problem := difference(*pair, case.tol))]


def difference(what: str, found: Tensor | None, expected: Tensor | None, tol: float) -> str:
    """Say what differs instead of raising: the other workers go on."""
    try:
        close(found, expected, what, tol)
    except AssertionError as error:
        return str(error)
    return ""


def check_refused(group: Any, case: Case, name: str, method: str, device: str = "cpu") -> list[str]:
    """Every worker says what cannot be done and where the way out is."""
    layer = "it was not made"
    try:
        layer = layer_of(case)
        forward_and_backward(case._replace(make=lambda: layer), cut(group, case, method), device)
    except ValueError as error:  # of our own layers
        return [] if case.says in str(error) else [str(error)]
    except NotImplementedError as error:
        rank = "" if isinstance(layer, str) else f"[rank {dist.get_rank(group)}]"
        way_out = "'pyg_sar.nn'" if "add_self_loops" not in case.says else "before 'partition'"
        if name in ("LINKX", "LightGCN"):  # which need the data
            way_out = f"Take 'pyg_sar.nn.{name}(data, ...)'"
        texts = (case.says, way_out, rank)
        return [f"expected {text!r} in {str(error)!r}" for text in texts if text not in str(error)]
    return ["it ran"]


def in_one_process(case: Case, parts: int) -> list[Share]:
    """Return all of the graph, in so many shards or, if there are none, as an ordinary ``edge_index``."""
    n, dst, e = sizes(case).values()

    def graph(seed: int) -> Any:
        it = edges_of(case, seed)
        return shard(it, (n, dst) if case.two else n, parts) if parts else it

    return [Share(graph(seed), torch.arange(n), torch.arange(dst), torch.arange(e)) for seed in (0, 1)]


def refusal(name: str) -> str:
    """What a refused case says on a graph that is cut within this process."""
    case = CASES[name]
    try:
        with default(case.dtype):
            forward_and_backward(case, in_one_process(case, 2))
    except NotImplementedError as error:
        return str(error)
    return ""


def check(group: Any, names: list[str], method: str, converts: bool = False, device: str = "cpu") -> list[str]:
    """Check many cases and tell what is wrong with which."""
    problems = []
    for name in names:
        case = converted(name, group) if converts else CASES[name]
        if device != "cpu" and name in REFUSED_SOONER:
            case = case._replace(says=CASES[name].says)
        weighted = "edge_weight" in case.given or name == "PDNConv"
        case = case._replace(one_loop=device != "cpu" and weighted and not case.two)
        with default(case.dtype):
            try:
                found = (check_refused if case.says else check_exact)(group, case, name, method, device)
            except Exception as error:
                raise RuntimeError(f"{name}, partition {method!r}") from error
        problems += [f"{name}, partition {method!r}, rank {dist.get_rank(group)}: {problem}" for problem in found]
    return problems


# What a converted layer refuses, if that is another thing than it refuses as it is.
REFUSED_CONVERTED = {
    **dict.fromkeys(
        ["FastRGCNConv global ids", "ChebConv", "HGTConv", "HGTConv two relations", "HANConv", "HANConv two relations"],
        "",
    ),
    "GATConv pair with loops": "Construct the layer with 'add_self_loops=False'",
    **dict.fromkeys(["SAGEConv max to sources", "GATConv to sources", "DirGNNConv GAT"], ""),
    "EquilibriumAggregation": "on some destinations alone its output would differ",
    **{name: "" for name, case in (AGGREGATIONS | OPTIONS).items() if case.says == ORDER},
    "CorrectAndSmooth": "",
    "DeepGraphInfomax": "",
}
# LINKX has weights for each node of the whole graph: refused on several workers, see test_linkx.py. The types of rows
# that HeteroBatchNorm asks for are no input here, see test_hetero.py. A summary has no rows, see
# test_deep_graph_infomax.py.
NOT_CONVERTED = {"LINKX", "Net HeteroBatchNorm", "DeepGraphInfomax"}
# It differentiates in its message, which autograd does in a thread of the device, where operations are counted anew:
# they seem to be older than the message, and it is refused as it is.
REFUSED_SOONER = {"EquilibriumAggregation"}
SEES_ALL = (
    "'BatchNorm1d' in",
    "unless mode='node'",
    "normalises over all nodes",
    "takes its statistics",
    "averages its losses",
)


def converted(name: str, group: Any = None) -> Case:
    """The case of a converted layer: what is refused for a normalisation that sees all nodes becomes exact."""
    case = CASES[name]
    says = REFUSED_CONVERTED.get(name, "" if case.says.startswith(SEES_ALL) else case.says)
    methods = Case._field_defaults["methods"] if name in AGGREGATIONS else case.methods
    return case._replace(make=lambda: convert(case.make().train(case.train), group), says=says, methods=methods)


def strategies(name: str) -> list[str]:
    """How the converted layers of an exact case stream on a graph that is cut within this process."""
    case = converted(name)
    with default(case.dtype):
        layer = layer_of(case)
        forward_and_backward(case._replace(make=lambda: layer), in_one_process(case, 2))
    return [line.split(maxsplit=2)[2] for line in describe(layer).splitlines()]


# Some layers are younger than the oldest release of PyG that is supported.
CASES = {
    name: case
    for name, case in (LAYERS | AGGREGATIONS | OPTIONS).items()
    if hasattr(gnn, name.split()[0]) or "Net" in name
}
