r"""Layers with PyG's constructors and ``state_dict`` that stream on a sharded graph."""

from pyg_sar.nn.batch_norm import BatchNorm, BatchNorm1d
from pyg_sar.nn.gat_conv import GATConv
from pyg_sar.nn.gatv2_conv import GATv2Conv
from pyg_sar.nn.gcn_conv import GCNConv
from pyg_sar.nn.gin_conv import GINConv
from pyg_sar.nn.message_passing import MessagePassing
from pyg_sar.nn.rgcn_conv import FastRGCNConv, RGCNConv
from pyg_sar.nn.sage_conv import SAGEConv
from pyg_sar.nn.transformer_conv import TransformerConv

__all__ = classes = [
    "MessagePassing",
    "GCNConv",
    "SAGEConv",
    "GINConv",
    "GATConv",
    "GATv2Conv",
    "TransformerConv",
    "RGCNConv",
    "FastRGCNConv",
    "BatchNorm",
    "BatchNorm1d",
]
