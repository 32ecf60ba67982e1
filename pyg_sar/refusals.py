r"""Errors for what cannot be computed on a share of the graph: what it was, and what to do instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import torch

from pyg_sar.caller import callers, package_of, running_modules, spoken
from pyg_sar.distributed.group import is_local
from pyg_sar.graph import ShardedGraph

# What to do instead of what a user called: by its name, or by the package of PyG that it is from.
ADVICE = {
    "Use the layer of this name in 'pyg_sar.nn', or 'pyg_sar.nn.convert'": "nn",
    "Do this to the whole graph, before 'partition'": "data datasets transforms utils",
    "Ask this of the whole graph, before 'partition'": "contains_isolated_nodes contains_self_loops "
    "has_isolated_nodes has_self_loops is_coalesced is_sorted is_sorted_by_time is_undirected validate",
    "Draw pairs by 'pyg_sar.negative_sampling', or before 'partition'": "batched_negative_sampling negative_sampling "
    "structured_negative_sampling",
    "Split edges before 'partition', and give each worker its pairs by 'pyg_sar.shard_links'": "RandomLinkSplit "
    "train_test_split_edges",
    "Sample before 'partition'; 'pyg_sar.message_flow_graphs' finds all that the outputs of some nodes depend on":
    "bipartite_subgraph dropout_node k_hop_subgraph loader sampler subgraph",
    "It belongs to this process: load the partition again instead, and read edges as a whole before 'partition'":
    "__array__ __reduce_ex__ numpy share_memory_ to_networkx to_scipy_sparse_matrix tolist",
    "There are 'data.num_nodes' nodes here; pass them as 'num_nodes' where a function asks for it": "amax amin max min",
    "In-edges are counted by 'degree(edge_index[1], data.num_nodes)', out-edges by 'edge_index[0]'": "bincount",
    "At the sources of edges there are sums and means alone, of 'data.num_nodes' rows. Combine at destinations, "
    "'edge_index[1]', or turn all edges round before 'partition'":
    "index_reduce index_reduce_ scatter scatter_reduce scatter_reduce_ softmax",
    "Its rows are 'edge_index[0]' and 'edge_index[1]', a mask chooses edges, 'edge_index[:, mask]', and rows of nodes "
    "are read by one of its rows, 'x[edge_index[0]]'":
    "T __getitem__ flatten index_select reshape select t transpose view",
}  # fmt: skip
INSTEAD = {name: advice for advice, names in ADVICE.items() for name in names.split()}
NO_SUCH = (
    "Nothing in 'pyg_sar.nn' takes its place: do what it does before 'partition', leave it out, or use one process"
)
ELSE = "Do this before 'partition', or use what 'pyg_sar.nn' has for it; global ids are in 'data.n_id' and 'data.e_id'"
LOOPS = (
    "It adds self-loops up to the largest number of a node. Add them before 'partition' (T.AddRemainingSelfLoops), and "
    "make the layer with 'add_self_loops=False'"
)
TABLES = ("LINKX", "LightGCN")  # models which 'convert' cannot give the tables that they need
# Functions of PyG that need nothing but the number of nodes.
COUNTED = ("add_remaining_self_loops", "add_self_loops", "degree", "get_laplacian")
SPOKEN = {"__eq__": "==", "__getitem__": "indexing", "__ne__": "!=", "__reduce_ex__": "copying or saving",
          "__setitem__": "writing"}  # fmt: skip


def fail(graph: ShardedGraph, what: str, advice: str = INSTEAD["nn"]) -> NoReturn:
    """Raise an error that names the way out."""
    raise NotImplementedError(f"[rank {graph.exchange.routes.rank}] {what}. {advice}.")


def for_layer(name: str) -> str:
    """Return what to do instead of a class of PyG, or a function, by its name."""
    if name in TABLES:
        return f"Take 'pyg_sar.nn.{name}(data, ...)', of whose weights for each node a worker has those of its own"
    return INSTEAD["nn"] if hasattr(sys.modules.get("pyg_sar.nn"), name) else NO_SUCH


def refuse_table(graph: ShardedGraph, *rows: object) -> None:
    """Refuse parameters as rows of nodes where there are other workers, but for those that are a worker's own."""
    for x in rows:
        if isinstance(x, torch.nn.Parameter) and not (is_local(x) or graph.exchange.alone):
            fail(
                graph,
                f"A parameter of shape {list(x.shape)} cannot be rows of nodes or edges, because all workers "
                f"have the same parameters and others of these ('pyg_sar.nn.NodeEmbedding' is a table of nodes)",
            )


def wrong_rows(graph: ShardedGraph, found: str, rows: str, advice: str) -> ValueError:
    """Return the error for a tensor whose rows are not those of this worker's edges or nodes."""
    flow = ", in a message-flow graph with 'edge_attr[flow.edge_rows[k]]' and 'x[flow.node_rows]' for layer k"
    flow = flow if graph.origin is not None else ""
    return ValueError(
        f"[rank {graph.exchange.routes.rank}] {found}, but expected a row for each of this worker's {rows}. Take it "
        f"from the loaded data{flow}; of a tensor for the whole graph, '{advice}' are this worker's rows. Where edges "
        f"were added or left out, do the same to what belongs to them."
    )


def called(func: Callable) -> tuple[str, str]:
    """Return what the user called, PyG's function or the one of torch, and what to do instead."""
    user, outer, names = find_user()
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    if outer is None:
        if name.startswith("_") and not name.endswith("__"):  # unknown to people
            return f"Line {user.f_lineno} of {os.path.basename(user.f_code.co_filename)}", INSTEAD.get(name, ELSE)
        return f"'{SPOKEN.get(name, name)}'", INSTEAD.get(name, ELSE)
    what, method, package = spoken(outer), outer.f_code.co_name, outer.f_globals["__name__"].split(".")[1]
    if name in ("max", "min") and method in COUNTED:
        return f"'{what}'", INSTEAD[name]
    if name in ("max", "min") and any(name in COUNTED[:2] for name in names):
        return f"'{what}'", LOOPS
    name = what.partition(".")[0]
    found = next((word for word in (name, method, package) if word in INSTEAD), "")
    if found == "nn" and any(map(is_converted, running_modules())):
        return f"'{what}'", NO_SUCH
    # What is not a method of a class of PyG is called as a layer, of which any may be converted.
    return f"'{what}'", for_layer(name) if found == "nn" and what != name else INSTEAD.get(found, ELSE)


def is_converted(running: tuple[torch.nn.Module, object]) -> bool:
    """Return whether a module that is running is one of this package."""
    return any(base.__module__.startswith("pyg_sar.") for base in type(running[0]).__mro__)


def find_user() -> tuple[FrameType, FrameType | None, list[str]]:
    """Return the frame of the user's code, and that of the function of PyG that it called, if it called one, and the
    names of all functions that are running within.
    """
    outer, names = None, []
    for user in callers():
        package = library(user)
        if not package:
            break
        names.append(user.f_code.co_name)
        outer = user if package == "torch_geometric" else outer
    return user, outer, names


def library(frame: FrameType) -> str:
    """Return the library that code is part of; torch for what PyG generates or wraps, the user's own has none."""
    module = frame.f_globals.get("__name__", "")
    if module.endswith(("_propagate", "_edge_updater")) or frame.f_code.co_name == "wrapper":
        return "torch"
    package = package_of(frame)
    return package if package in ("torch", "torch_geometric", "pyg_sar") else ""
