r"""Exact full-graph training of PyG models on many workers by Sequential Aggregation and Rematerialization (SAR)."""

import importlib
from typing import Any

from pyg_sar import nn
from pyg_sar.blocks import balanced_cut
from pyg_sar.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
from pyg_sar.checks.check import check
from pyg_sar.checks.record import CheckError
from pyg_sar.data.load import load
from pyg_sar.debugging import debug
from pyg_sar.distributed.collectives import (
    all_reduce,
    broadcast_parameters,
    degree_histogram,
    global_sum,
    sum_gradients,
)
from pyg_sar.distributed.gather import gather
from pyg_sar.distributed.links import negative_sampling, shard_links
from pyg_sar.distributed.loss import accuracy, global_mean, replicated
from pyg_sar.distributed.message_flow_graph import MessageFlowGraphs, message_flow_graphs
from pyg_sar.distributed.process_group import init, process_group
from pyg_sar.distributed.shard import shard
from pyg_sar.distributed.stages import stage_mesh
from pyg_sar.distributed.traffic import record_traffic
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.inference import inference
from pyg_sar.offload.data import offload
from pyg_sar.offload.rows import HostRows
from pyg_sar.pipeline import Pipeline
from pyg_sar.run_log import RunLog
from pyg_sar.watch import allow_local

__version__ = "0.1.0"


# Imported only where they are used: workers do without METIS, and without what makes plans.
OFFLINE = {
    "locality_order": "data.order",
    "partition": "data.partition",
    "plan": "planner",
}


def __getattr__(name: str) -> Any:
    """Import what is used before workers start."""
    if name not in OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"pyg_sar.{OFFLINE[name]}"), name)


def __dir__() -> list[str]:
    """List these names, too."""
    return sorted({*globals(), *OFFLINE})


__all__ = [
    "CheckError",
    "Checkpoints",
    "HostRows",
    "MessageFlowGraphs",
    "Pipeline",
    "RunLog",
    "ShardedEdgeIndex",
    "accuracy",
    "all_reduce",
    "allow_local",
    "balanced_cut",
    "broadcast_parameters",
    "check",
    "debug",
    "degree_histogram",
    "gather",
    "global_mean",
    "global_sum",
    "inference",
    "init",
    "load",
    "load_checkpoint",
    "locality_order",
    "message_flow_graphs",
    "negative_sampling",
    "nn",
    "offload",
    "partition",
    "plan",
    "process_group",
    "record_traffic",
    "replicated",
    "save_checkpoint",
    "shard",
    "shard_links",
    "stage_mesh",
    "sum_gradients",
]
