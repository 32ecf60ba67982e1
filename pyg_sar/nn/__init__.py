r"""Layers with PyG's constructors and ``state_dict`` that stream on a sharded graph."""

from pyg_sar.nn.conv.cheb_conv import ChebConv
from pyg_sar.nn.conv.gat_conv import GATConv
from pyg_sar.nn.conv.gatv2_conv import GATv2Conv
from pyg_sar.nn.conv.gcn2_conv import GCN2Conv
from pyg_sar.nn.conv.gcn_conv import GCNConv
from pyg_sar.nn.conv.gen_conv import GENConv
from pyg_sar.nn.conv.gin_conv import GINConv
from pyg_sar.nn.conv.han_conv import HANConv
from pyg_sar.nn.conv.hgt_conv import HGTConv
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.nn.conv.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_sar.nn.conv.sage_conv import SAGEConv
from pyg_sar.nn.conv.transformer_conv import TransformerConv
from pyg_sar.nn.convert import convert, describe
from pyg_sar.nn.models.autoencoder import ARGA, ARGVA, GAE, VGAE
from pyg_sar.nn.models.blocks import blocks
from pyg_sar.nn.models.correct_and_smooth import CorrectAndSmooth
from pyg_sar.nn.models.deep_graph_infomax import DeepGraphInfomax
from pyg_sar.nn.models.label_propagation import LabelPropagation
from pyg_sar.nn.models.lightgcn import LightGCN
from pyg_sar.nn.models.linkx import LINKX, SparseLinear
from pyg_sar.nn.models.node_embedding import NodeEmbedding, whole_state_dict
from pyg_sar.nn.norm.batch_norm import BatchNorm, BatchNorm1d
from pyg_sar.nn.norm.graph_norm import GraphNorm
from pyg_sar.nn.norm.graph_size_norm import GraphSizeNorm
from pyg_sar.nn.norm.hetero_batch_norm import HeteroBatchNorm
from pyg_sar.nn.norm.instance_norm import InstanceNorm
from pyg_sar.nn.norm.layer_norm import LayerNorm
from pyg_sar.nn.norm.mean_subtraction_norm import MeanSubtractionNorm
from pyg_sar.nn.norm.pair_norm import PairNorm
from pyg_sar.nn.pool.glob import global_add_pool, global_max_pool, global_mean_pool

__all__ = classes = [
    "MessagePassing",
    "GCNConv",
    "GCN2Conv",
    "SAGEConv",
    "ChebConv",
    "GENConv",
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
    "CorrectAndSmooth",
    "DeepGraphInfomax",
    "GAE",
    "LabelPropagation",
    "VGAE",
    "SparseLinear",
    "blocks",
    "convert",
    "describe",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "whole_state_dict",
]
