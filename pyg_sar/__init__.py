r"""Exact full-graph training of PyG models on many workers by Sequential Aggregation and Rematerialization (SAR)."""

from typing import Any

from pyg_sar import nn
from pyg_sar.distributed.assemble import shard
from pyg_sar.distributed.collectives import accuracy, all_reduce, broadcast_parameters, global_mean, sum_gradients
from pyg_sar.distributed.exchange import record_traffic
from pyg_sar.distributed.flow import MessageFlow, message_flow
from pyg_sar.distributed.load import load
from pyg_sar.distributed.process_group import process_group
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Block, ShardedGraph

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the partitioner only where it is used: workers do without METIS."""
    if name == "locality_order":
        from pyg_sar.distributed.order import locality_order

        return locality_order
    if name == "partition":
        from pyg_sar.distributed.partition import partition

        return partition
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Block",
    "MessageFlow",
    "ShardedEdgeIndex",
    "ShardedGraph",
    "accuracy",
    "all_reduce",
    "broadcast_parameters",
    "global_mean",
    "load",
    "locality_order",
    "message_flow",
    "nn",
    "partition",
    "process_group",
    "record_traffic",
    "shard",
    "sum_gradients",
]
