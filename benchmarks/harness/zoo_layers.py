"""Layers of PyG, 64 wide, and what they are called with besides ``x`` and ``edge_index``."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch_geometric.nn as nn
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.data import Data

from pyg_sar.data.datasets import community_graph

WIDTH, EDGE, TYPES = 64, 16, 8


class Entry(NamedTuple):
    """A layer.

    Args:
        make: Makes it, given the histogram of in-degrees.
        given: The names of its arguments, all attributes of the data.
        most: The most edges for which PyG has memory.
    """

    make: Callable[[torch.Tensor], torch.nn.Module]
    given: str = "x edge_index"
    most: float = float("inf")


def mlp(width: int, out: int = WIDTH) -> Sequential:
    return Sequential(Linear(width, out), ReLU(), Linear(out, out))


def plain(cls: type[torch.nn.Module], *args: object, given: str = "x edge_index", **kwargs: object) -> Entry:
    return Entry(lambda degrees: cls(*args, **kwargs), given)


W, F, D = WIDTH, "x edge_index edge_weight", "x edge_index edge_attr"
TYPED, POS = "x edge_index edge_type", "x pos edge_index"

LAYERS: dict[str, Entry] = {
    "SimpleConv": plain(nn.SimpleConv, "mean"),
    "GCNConv": plain(nn.GCNConv, W, W),
    "ChebConv": plain(nn.ChebConv, W, W, 3),
    "SAGEConv": plain(nn.SAGEConv, W, W),
    "SAGEConv, max": plain(nn.SAGEConv, W, W, aggr="max"),
    "SAGEConv, std": plain(nn.SAGEConv, W, W, aggr=["mean", "std"]),
    "GraphConv": plain(nn.GraphConv, W, W, given=F),
    "GatedGraphConv": plain(nn.GatedGraphConv, W, 2),
    "ResGatedGraphConv": plain(nn.ResGatedGraphConv, W, W),
    "GATConv": plain(nn.GATConv, W, W // 2, heads=2),
    "GATConv, edges": plain(nn.GATConv, W, W // 2, heads=2, edge_dim=EDGE, given=D),
    "GATv2Conv": plain(nn.GATv2Conv, W, W // 2, heads=2),
    "TransformerConv": plain(nn.TransformerConv, W, W // 2, heads=2),
    "AGNNConv": plain(nn.AGNNConv),
    "TAGConv": plain(nn.TAGConv, W, W),
    "GINConv": Entry(lambda degrees: nn.GINConv(mlp(W))),
    "GINEConv": Entry(lambda degrees: nn.GINEConv(mlp(W), edge_dim=EDGE), D),
    "ARMAConv": plain(nn.ARMAConv, W, W, 2, 2),
    "SGConv": plain(nn.SGConv, W, W, 2),
    "SSGConv": plain(nn.SSGConv, W, W, 0.3, 2),
    "APPNP": plain(nn.APPNP, 3, 0.1),
    "MFConv": plain(nn.MFConv, W, W),
    "RGCNConv": plain(nn.RGCNConv, W, W, TYPES, given=TYPED),
    "RGCNConv, bases": plain(nn.RGCNConv, W, W, TYPES, num_bases=4, given=TYPED),
    "FastRGCNConv": plain(nn.FastRGCNConv, W, 16, TYPES, given=TYPED),
    "RGATConv": plain(nn.RGATConv, W, W // 2, TYPES, heads=2, given=TYPED)._replace(most=200_000),
    "PointNetConv": Entry(lambda degrees: nn.PointNetConv(mlp(W + 3), mlp(W)), POS),
    "GMMConv": plain(nn.GMMConv, W, W, dim=EDGE, kernel_size=2, given=D),
    "NNConv": Entry(lambda degrees: nn.NNConv(W, 8, Linear(EDGE, 8 * W)), D),
    "CGConv": plain(nn.CGConv, W, EDGE, given=D),
    "EdgeConv": Entry(lambda degrees: nn.EdgeConv(mlp(2 * W))),
    "PPFConv": Entry(lambda degrees: nn.PPFConv(mlp(W + 4), mlp(W)), "x pos normal edge_index"),
    "FeaStConv": plain(nn.FeaStConv, W, W, heads=2),
    "PointTransformerConv": plain(nn.PointTransformerConv, W, W, given=POS),
    "LEConv": plain(nn.LEConv, W, W, given=F),
    "PNAConv": Entry(lambda degrees: nn.PNAConv(W, W, ["mean", "max", "std"], ["identity", "amplification"], degrees)),
    "ClusterGCNConv": plain(nn.ClusterGCNConv, W, W),
    "GENConv": plain(nn.GENConv, W, W, norm="layer"),
    "GENConv, edges": plain(nn.GENConv, W, W, norm="layer", edge_dim=EDGE, given=D),
    "GCN2Conv": plain(nn.GCN2Conv, W, 0.1, 0.5, 1, given="x x edge_index"),
    "WLConvContinuous": plain(nn.WLConvContinuous, given=F),
    "FiLMConv": plain(nn.FiLMConv, W, W, TYPES, given=TYPED),
    "FAConv": plain(nn.FAConv, W, given="x x edge_index"),
    "EGConv": plain(nn.EGConv, W, W, ["symnorm", "mean", "max"], num_heads=4, num_bases=2),
    "PDNConv": plain(nn.PDNConv, W, W, EDGE, W, given=D),
    "GeneralConv": plain(nn.GeneralConv, W, W, attention=True, heads=2),
    "HEATConv": plain(
        nn.HEATConv, W, W // 2, 2, TYPES, 4, EDGE, 4, heads=2, given="x edge_index node_type edge_type edge_attr"
    ),
    "LGConv": plain(nn.LGConv),
    "PointGNNConv": Entry(lambda degrees: nn.PointGNNConv(mlp(W, 3), mlp(W + 3), mlp(W)), POS),
    "AntiSymmetricConv": plain(nn.AntiSymmetricConv, W),
    "DirGNNConv": Entry(lambda degrees: nn.DirGNNConv(nn.SAGEConv(W, W))),
    "MixHopConv": plain(nn.MixHopConv, W, W),
}


def make_graph(nodes: int, edges: int) -> Data:
    """Return a graph with all that a layer may ask for."""
    data, g = community_graph(nodes, edges, num_features=WIDTH), torch.Generator().manual_seed(0)
    data = Data(x=data.x, edge_index=data.edge_index)
    data.edge_weight = torch.rand(data.num_edges, generator=g) + 0.1
    data.edge_attr = torch.randn(data.num_edges, EDGE, generator=g)
    data.edge_type = torch.randint(TYPES, (data.num_edges,), generator=g)
    data.pos, data.normal = torch.randn(2, nodes, 3, generator=g)
    data.node_type = torch.randint(2, (nodes,), generator=g)
    return data


def in_degrees(data: Data) -> torch.Tensor:
    """Return how many nodes have each in-degree."""
    return torch.bincount(torch.bincount(data.edge_index[1], minlength=data.num_nodes))
