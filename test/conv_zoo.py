"""Every layer of PyG in small: how it is made, what it is given, and what becomes of it on a sharded graph."""

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from problem import NUM_NODES, Result, Share, assignment, backward, close, edges, share
from torch import Tensor
from torch.nn import Linear, Sequential, Tanh

F, D, T = 6, 3, 3  # node features, edge features, edge types
NUM_DST = 47  # of the graph with two sets of nodes
V, TO = "v", ("v", "to", "v")

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
}
GRAPHS = {"edge_index": 0, "hyperedge_index": 0, "pos_edge_index": 0, "neg_edge_index": 1}


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
    """

    make: Callable[[], torch.nn.Module]
    given: str = "x edge_index"
    says: str = ""
    train: bool = True
    two: bool = False
    methods: tuple[str, ...] = ("random", "empty", "edgeless")
    tol: float = 1e-10


def mlp(width: int, out: int = F) -> Sequential:
    return Sequential(Linear(width, out), Tanh(), Linear(out, out))


def sage(aggr: Any, **kwargs: Any) -> Callable[[], torch.nn.Module]:
    return lambda: gnn.SAGEConv(F, F, aggr=aggr() if callable(aggr) else aggr, **kwargs)


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
    "HGTConv": Case(lambda: gnn.HGTConv(F, F, META, heads=2), "x_dict edge_index_dict", "'add_' cannot be computed"),
    "HEATConv": Case(
        lambda: gnn.HEATConv(F, F, 2, T, 4, D, 4, heads=2), "x edge_index node_type edge_type edge_attr"
    ),
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

NOT_RUNNABLE = {
    "MessagePassing": "the abstract base class",
    "SplineConv": "needs the spline kernels of pyg-lib or torch-spline-conv",
    "GravNetConv": "builds its edges by the kNN kernel of pyg-lib or torch-cluster; has no `edge_index`",
    "DynamicEdgeConv": "builds its edges by the kNN kernel of pyg-lib or torch-cluster; has no `edge_index`",
    "XConv": "builds its edges by the kNN kernel of pyg-lib or torch-cluster; has no `edge_index`",
    "PANConv": "needs the sparse matrices of torch-sparse",
    "FusedGATConv": "needs the kernels of dgNN; takes CSR and CSC instead of `edge_index`",
    "CuGraphSAGEConv": "needs pylibcugraphops",
    "CuGraphGATConv": "needs pylibcugraphops",
    "CuGraphRGCNConv": "needs pylibcugraphops",
}

DEGREE = "largest degree of the whole graph"

# Aggregations stand in a layer that does nothing else.
AGGREGATIONS: dict[str, Case] = {
    name: Case(lambda make=make: gnn.SimpleConv(make()), **how)
    for name, make, how in [
        ("MultiAggregation", lambda: gnn.MultiAggregation(["mean", "max", "std"]), {}),
        ("SumAggregation", lambda: gnn.SumAggregation(), {}),
        ("MeanAggregation", lambda: gnn.MeanAggregation(), {}),
        ("MaxAggregation", lambda: gnn.MaxAggregation(), {}),
        ("MinAggregation", lambda: gnn.MinAggregation(), {}),
        ("MulAggregation", lambda: gnn.MulAggregation(), {}),
        ("VarAggregation", lambda: gnn.VarAggregation(), {}),
        ("StdAggregation", lambda: gnn.StdAggregation(), {}),
        ("SoftmaxAggregation", lambda: gnn.SoftmaxAggregation(learn=True, channels=F), {}),
        ("PowerMeanAggregation", lambda: gnn.PowerMeanAggregation(learn=True), {}),
        ("MedianAggregation", lambda: gnn.MedianAggregation(), {"methods": ("contiguous",)}),
        ("QuantileAggregation", lambda: gnn.QuantileAggregation([0.2, 0.7]), {"methods": ("contiguous",)}),
        ("LSTMAggregation", lambda: gnn.LSTMAggregation(F, F), {"says": DEGREE}),
        ("GRUAggregation", lambda: gnn.GRUAggregation(F, F), {"says": DEGREE}),
        ("Set2Set", lambda: gnn.Set2Set(F, 2), {}),
        ("DegreeScalerAggregation", lambda: gnn.DegreeScalerAggregation("mean", "linear", histogram(), True), {}),
        ("EquilibriumAggregation", lambda: gnn.EquilibriumAggregation(F, F, [4]), {"says": "optimises"}),
        ("SortAggregation", lambda: gnn.SortAggregation(2), {}),
        ("GraphMultisetTransformer", lambda: gnn.GraphMultisetTransformer(F, 2), {}),
        ("AttentionalAggregation", lambda: gnn.AttentionalAggregation(mlp(F, 1)), {}),
        ("MLPAggregation", lambda: gnn.MLPAggregation(F, F, 20, num_layers=1), {}),
        ("DeepSetsAggregation", lambda: gnn.DeepSetsAggregation(mlp(F), mlp(F)), {}),
        ("SetTransformerAggregation", lambda: gnn.SetTransformerAggregation(F, 2), {}),
        ("LCMAggregation", lambda: gnn.LCMAggregation(F, F), {"says": DEGREE}),
        ("VariancePreservingAggregation", lambda: gnn.VariancePreservingAggregation(), {}),
        ("PatchTransformerAggregation", lambda: gnn.PatchTransformerAggregation(F, F, 2, 4), {"says": DEGREE}),
    ]
}

@contextmanager
def double() -> Iterator[None]:
    """Make layers and inputs in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def numbers(what: str, count: int) -> Tensor:
    """The same numbers for the same kind of input."""
    g = torch.Generator().manual_seed(zlib.crc32(what.encode()))
    return INPUTS[what][1](count, g)


def arguments(case: Case, shares: list[Share], counts: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the layer is called with, and the inputs that get gradients with their level."""
    leaves: dict[str, Any] = {}
    rows = {"node": shares[0].src, "dst": shares[0].dst, "edge": shares[0].edge}

    def leaf(what: str) -> Tensor:
        level = INPUTS[what][0]
        value = numbers(what, counts[level])[rows[level]].clone()
        if value.is_floating_point():
            leaves[what] = value.requires_grad_()
        return value

    given: dict[str, Any] = {}
    for word in case.given.split():
        name, _, what = word.partition("=")
        what = what or name
        if what in GRAPHS:
            given[name] = shares[GRAPHS[what]].edge_index
        elif what == "edge_index_dict":
            given[name] = {TO: shares[0].edge_index}
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
    dst = NUM_DST if case.two else NUM_NODES
    return {"node": NUM_NODES, "dst": dst, "edge": edges(NUM_NODES, dst).size(1)}


def layer_of(case: Case) -> torch.nn.Module:
    torch.manual_seed(2)
    return case.make().train(case.train)


def output(out: Any) -> Tensor:
    out = out[V] if isinstance(out, dict) else out
    return out[0] if isinstance(out, tuple) else out


def forward_and_backward(case: Case, shares: list[Share]) -> Result:
    counts, layer = sizes(case), layer_of(case)
    given, leaves = arguments(case, shares, counts)
    out = output(layer(**given))
    rows, total = (shares[0].src, NUM_NODES) if "hyperedge_index" in given else (shares[0].dst, counts["dst"])
    backward(out, rows, total)
    grads = {name: x.grad for name, x in leaves.items()}
    return Result(out.detach(), grads, {}, {name: p.grad for name, p in layer.named_parameters()})


@functools.cache
def whole(name: str) -> Result:
    """What PyG computes on the whole graph, once in every process."""
    case, (n, dst, e) = CASES[name], sizes(CASES[name]).values()
    shares = [Share(edges(n, dst, seed), torch.arange(n), torch.arange(dst), torch.arange(e)) for seed in (0, 1)]
    return forward_and_backward(case, shares)


def parts(method: str, size: int, num_nodes: int) -> Tensor:
    """As ``assignment``; "edgeless": the last worker owns the nodes that have no in-edges."""
    if method != "edgeless":
        return assignment(method, size, num_nodes)
    nodes = torch.arange(num_nodes)
    return torch.where((nodes == 7) | (nodes % 11 == 5), size - 1, assignment("empty", size, num_nodes))


def cut(group: Any, case: Case, method: str) -> list[Share]:
    n, dst, _ = sizes(case).values()
    size = dist.get_world_size(group)
    part = parts(method, size, n)
    return [share(group, edges(n, dst, seed), part, dst_part=parts(method, size, dst) if case.two else None)
            for seed in (0, 1)]  # fmt: skip


def check_exact(group: Any, name: str, method: str) -> None:
    """Compare this worker's rows, and the sums of the workers' parameter gradients, with the whole graph's."""
    case, expected = CASES[name], whole(name)
    shares = cut(group, case, method)
    found = forward_and_backward(case, shares)
    hyper = "hyperedge_index" in case.given
    close(found.out, expected.out[shares[0].src if hyper else shares[0].dst], "output", case.tol)
    rows = {"node": shares[0].src, "dst": shares[0].dst, "edge": shares[0].edge}
    for what, grad in found.node_grads.items():
        whole_grad = expected.node_grads[what]
        mine = None if whole_grad is None else whole_grad[rows[INPUTS[what][0]]]
        close(grad, mine, f"gradient of {what}", case.tol)
    for what, grad in found.param_grads.items():
        whole_grad = expected.param_grads[what]
        if whole_grad is not None:
            total = torch.zeros_like(whole_grad) if grad is None else grad.clone()
            dist.all_reduce(total, group=group)
            close(total, whole_grad, f"gradient of parameter {what}", case.tol)
        else:
            assert grad is None, f"gradient of parameter {what}"


def check_refused(group: Any, name: str, method: str) -> None:
    """Every worker says what cannot be done and where the way out is."""
    case = CASES[name]
    try:
        forward_and_backward(case, cut(group, case, method))
    except NotImplementedError as error:
        for text in (case.says, "'pyg_sar.nn'", f"[rank {dist.get_rank(group)}]"):
            assert text in str(error), f"expected {text!r} in {str(error)!r}"
    else:
        raise AssertionError("it ran")


def check(group: Any, name: str, method: str) -> None:
    with double():
        (check_refused if CASES[name].says else check_exact)(group, name, method)


CASES = LAYERS | AGGREGATIONS
