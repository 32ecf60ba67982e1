r"""Layers with PyG's constructors and ``state_dict`` that stream on a sharded graph."""

from pyg_sar.nn.autoencoder import ARGA, ARGVA, GAE, VGAE
from pyg_sar.nn.batch_norm import BatchNorm, BatchNorm1d
from pyg_sar.nn.cheb_conv import ChebConv
from pyg_sar.nn.convert import convert, describe
from pyg_sar.nn.deep_graph_infomax import DeepGraphInfomax
from pyg_sar.nn.gat_conv import GATConv
from pyg_sar.nn.gatv2_conv import GATv2Conv
from pyg_sar.nn.gcn_conv import GCNConv
from pyg_sar.nn.gin_conv import GINConv
from pyg_sar.nn.glob import global_add_pool, global_max_pool, global_mean_pool
from pyg_sar.nn.graph_norm import GraphNorm
from pyg_sar.nn.graph_size_norm import GraphSizeNorm
from pyg_sar.nn.han_conv import HANConv
from pyg_sar.nn.hetero_batch_norm import HeteroBatchNorm
from pyg_sar.nn.hgt_conv import HGTConv
from pyg_sar.nn.instance_norm import InstanceNorm
from pyg_sar.nn.layer_norm import LayerNorm
from pyg_sar.nn.lightgcn import LightGCN
from pyg_sar.nn.linkx import LINKX, SparseLinear
from pyg_sar.nn.mean_subtraction_norm import MeanSubtractionNorm
from pyg_sar.nn.message_passing import MessagePassing
from pyg_sar.nn.node_embedding import NodeEmbedding, whole_state_dict
from pyg_sar.nn.pair_norm import PairNorm
from pyg_sar.nn.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_sar.nn.sage_conv import SAGEConv
from pyg_sar.nn.transformer_conv import TransformerConv

__all__ = classes = [
    "MessagePassing",
    "GCNConv",
    "SAGEConv",
    "ChebConv",
    "GINConv",
    "GATConv",
    "GATv2Conv",
    "TransformerConv",
    "RGCNConv",
    "FastRGCNConv",
    "BatchNorm",
    "BatchNorm1d",
    "GraphNorm",
    "GraphSizeNorm",
    "HANConv",
    "HGTConv",
    "HeteroBatchNorm",
    "InstanceNorm",
    "LayerNorm",
    "LightGCN",
    "LINKX",
    "MeanSubtractionNorm",
    "NodeEmbedding",
    "PairNorm",
    "ARGA",
    "ARGVA",
    "DeepGraphInfomax",
    "GAE",
    "VGAE",
    "SparseLinear",
    "convert",
    "describe",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "whole_state_dict",
]
