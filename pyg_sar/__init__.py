r"""Exact full-graph training of PyG models on many workers by Sequential Aggregation and Rematerialization (SAR)."""

import importlib
from typing import Any

from pyg_sar import nn
from pyg_sar.check import check
from pyg_sar.checks.record import CheckError
from pyg_sar.distributed.assemble import shard
from pyg_sar.distributed.collectives import (
    all_reduce,
    broadcast_parameters,
    degree_histogram,
    global_sum,
    sum_gradients,
)
from pyg_sar.distributed.exchange import record_traffic
from pyg_sar.distributed.flow import MessageFlow, message_flow
from pyg_sar.distributed.gather import gather
from pyg_sar.distributed.links import corrupt, links
from pyg_sar.distributed.load import load
from pyg_sar.distributed.loss import accuracy, global_mean, replicated
from pyg_sar.distributed.process_group import init, process_group
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Block, ShardedGraph
from pyg_sar.inference import inference
from pyg_sar.watch import allow_local

__version__ = "0.1.0"


# Imported only where they are used: workers do without METIS, and without what makes plans.
OFFLINE = {
    "locality_order": "order",
    "partition": "partition",
    "even_share": "plan",
    "plan": "plan",
    "shares_of": "plan",
}


def __getattr__(name: str) -> Any:
    """Import what is used before workers start."""
    if name not in OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pyg_sar.distributed.{OFFLINE[name]}"), name)


__all__ = [
    "Block",
    "CheckError",
    "MessageFlow",
    "ShardedEdgeIndex",
    "ShardedGraph",
    "accuracy",
    "all_reduce",
    "allow_local",
    "broadcast_parameters",
    "check",
    "corrupt",
    "degree_histogram",
    "even_share",
    "gather",
    "global_mean",
    "global_sum",
    "inference",
    "init",
    "links",
    "load",
    "locality_order",
    "message_flow",
    "nn",
    "partition",
    "plan",
    "process_group",
    "record_traffic",
    "replicated",
    "shard",
    "shares_of",
    "sum_gradients",
]
