r"""Offline partitioning: one ``Data`` becomes a partition folder with one part for each worker."""

from __future__ import annotations

import copy
import os
import sys
import uuid
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import transforms
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_sar.distributed import store
from pyg_sar.distributed.metis import metis
from pyg_sar.distributed.order import order_within
from pyg_sar.distributed.split import split
from pyg_sar.distributed.streaming import fennel

RESERVED = ("n_id", "e_id", "total_nodes")


def partition(
    data: Data | HeteroData,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    method: str | Tensor | dict[str, Tensor] = "metis",
    order: str = "locality",
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    r"""Cut a graph into parts and write them into a partition folder.

    Every node-level and edge-level tensor travels with its nodes and edges, as PyG tells them apart
    (:meth:`~torch_geometric.data.Data.is_node_attr`). Other tensors, and numbers, strings and lists of them, are copied
    into every part. Whatever else there is, is left out with a warning.

    METIS can balance one weight per node here (``pymetis`` has no multi-constraint partitioning), so it gets a sum:
    two fifths nodes, two fifths in-edges, one fifth labelled nodes (``train_mask``). FENNEL balances the same. The
    report says how well each came out.

    FENNEL, a streaming partitioner, is for graphs that METIS has no room for. It cuts more edges than METIS, but far
    fewer than a random assignment (``benchmarks/partition.py``). Use it with :obj:`order="id"`: the other order runs
    METIS on the edges within each part.

    The rows of a part are in the order of :func:`pyg_sar.locality_order`, so that layers find most of the rows they
    gather in a cache. ``n_id`` of the loaded data tells which node each row is.

    Peak memory, above ``data`` itself and the attributes of one part, is 18 times the bytes of ``edge_index`` where
    METIS sees all edges (9 to 10 times if both directions of every edge are stored): to partition, or to order the rows
    of a single part. With other methods and :obj:`order="id"` it is 1.1 to 1.2 times, 2.6 times for a single part.
    ``benchmarks/partition.py`` measures it on random graphs, METIS's worst case, of 1M nodes and 10M edges, in 8 parts
    unless single.

    Args:
        data (torch_geometric.data.Data or torch_geometric.data.HeteroData): The graph; it is not modified. All node
            types of a heterogeneous graph are assigned together, and their weights are balanced together.
        num_parts (int): Number of parts; some stay empty if there are more than nodes.
        out (str): The folder to write. Nothing is left there if this function fails.
        method (str or torch.Tensor, optional): :obj:`"metis"`, :obj:`"fennel"` (little memory), :obj:`"random"`,
            :obj:`"contiguous"` (equal ranges of nodes), or an integer tensor :obj:`[num_nodes]` with the part of each
            node, by node type for a heterogeneous graph. (default: :obj:`"metis"`)
        order (str, optional): Order of the rows of each part: :obj:`"locality"`, or :obj:`"id"` for that of the graph.
            (default: :obj:`"locality"`)
        seed (int, optional): Seed of METIS, FENNEL and the random assignment. (default: :obj:`0`)
        overwrite (bool, optional): Whether to replace a partition that :obj:`out` holds. (default: :obj:`False`)
        progress (bool, optional): Whether to show a progress bar. (default: :obj:`False`)

    Returns:
        The report, which is also in ``meta.json``: nodes, in-edges and labelled nodes of each part, their balance
        (largest over mean), the edges cut, and in ``boundary[p][q]`` how many rows part ``p`` reads from part ``q``.
    """
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"'num_parts' must be an integer of at least 1, got {num_parts!r}.")
    if order not in ("locality", "id"):
        raise ValueError(f"Unknown order {order!r}, expected locality or id.")
    if isinstance(data, HeteroData):
        from pyg_sar.distributed.partition_hetero import write  # which needs what is here

        return write(data, num_parts, out, method, order, seed, overwrite, progress)
    if isinstance(method, dict):
        raise TypeError("Expected a tensor with the part of each node, got a dict, which is for a HeteroData.")
    data = _checked(data)
    with (
        store.create(out, overwrite) as folder,
        tqdm(total=num_parts + 2, desc="assigning nodes", disable=not progress) as bar,
    ):
        part = assign(data, num_parts, method, seed)
        bar.update()
        bar.set_description("ordering rows")
        nodes = order_within(part, data.edge_index, num_parts, seed) if order == "locality" else None
        bar.update()
        bar.set_description("writing parts")
        levels, labelled, identity = _levels(data), _labelled(data), uuid.uuid4().hex
        infos, labels = [], []
        for p, topology in enumerate(split(data.edge_index, part, part, num_parts, nodes)):
            shard = store.Shard(
                part=p,
                num_parts=num_parts,
                identity=identity,
                num_nodes=data.num_nodes,
                num_edges=data.num_edges,
                topology=topology,
                node_attrs=_select(data, levels[0], topology.src_id),
                edge_attrs=_select(data, levels[1], topology.e_id),
                graph_attrs=levels[2],
            )
            infos.append(store.write_part(folder, shard))
            labels.append(int(labelled[topology.src_id].sum()))
            bar.update()
        name = "given" if isinstance(method, Tensor) else method
        report = {"method": name, "order": order, "seed": seed} | report_of(infos, labels)
        attributes = [store.describe(level) for level in levels]
        store.write_meta(folder, {"identity": identity, "attributes": attributes} | report)
    return report


def prepare(
    data: Data | HeteroData,
    *,
    to_undirected: bool = False,
    self_loops: bool = False,
    gcn_norm: bool = False,
    features: torch.dtype | None = None,
) -> Data | HeteroData:
    """Apply PyG's transforms that change edges, and choose the type of features, in the order of the arguments.

    Args:
        data (torch_geometric.data.Data): The graph; it is not modified.
        to_undirected (bool, optional): Whether to add reverse edges and merge duplicates
            (:class:`~torch_geometric.transforms.ToUndirected`). (default: :obj:`False`)
        self_loops (bool, optional): Whether to add a self-loop to every node without one
            (:class:`~torch_geometric.transforms.AddRemainingSelfLoops`). (default: :obj:`False`)
        gcn_norm (bool, optional): Whether to add self-loops and store the normalised :obj:`edge_weight`
            (:class:`~torch_geometric.transforms.GCNNorm`), for layers with :obj:`normalize=False`.
            (default: :obj:`False`)
        features (torch.dtype, optional): The floating-point type to store the node features :obj:`x` in;
            :obj:`torch.bfloat16` halves their memory and bytes. Train on them in a model of that type or under
            :class:`torch.autocast`. (default: :obj:`None`, the type that they have)
    """
    if isinstance(data, HeteroData) and (self_loops or gcn_norm or features is not None):
        raise ValueError("Of the transforms, only 'to_undirected' is for a HeteroData; apply others before.")
    if to_undirected:
        data = transforms.ToUndirected()(copy.copy(data))
    if isinstance(data, HeteroData):
        return data
    keys = [key for key in data.edge_attrs() if isinstance(data[key], Tensor)]
    if self_loops:
        data = transforms.AddRemainingSelfLoops()(copy.copy(data))
    if gcn_norm:
        data = transforms.GCNNorm()(copy.copy(data))
    lost = [key for key in keys if data[key].size(_dim(data, key)) != data.num_edges]
    if lost:
        raise ValueError(
            f"The added self-loops have no {', '.join(lost)}, which every edge must have. Remove it from the graph, or "
            "add loops yourself with PyG's 'AddSelfLoops(attr=...)'."
        )
    if features is not None:
        x = plain(data.x)
        if not isinstance(x, Tensor) or not features.is_floating_point:
            raise ValueError(f"Node features 'x' (got {type(x).__name__}) cannot be stored as {features}.")
        data = copy.copy(data)
        data.x = x.to(features)
    return data


def assign(data: Data, num_parts: int, method: str | Tensor = "metis", seed: int = 0) -> Tensor:
    """Return the part of every node, an ``int32`` tensor ``[num_nodes]``; see :func:`partition`."""
    num_nodes = data.num_nodes
    if isinstance(method, Tensor):
        return _given(method, num_nodes, num_parts)
    if method in ("metis", "fennel"):
        return _balanced(data, num_parts, method, seed)
    if method == "random":
        return (torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed)) % num_parts).int()
    if method == "contiguous":
        return (torch.arange(num_nodes) * num_parts // max(num_nodes, 1)).int()
    raise ValueError(f"Unknown method {method!r}, expected metis, fennel, random, contiguous, or a tensor [num_nodes].")


def _given(part: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    whole = not part.is_floating_point() and not part.is_complex() and part.dtype != torch.bool
    if not whole or part.shape != (num_nodes,):
        raise ValueError(
            f"An assignment must hold one integer for each node, shape [{num_nodes}], got {part.dtype} of shape "
            f"{list(part.shape)}."
        )
    if num_nodes and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"An assignment to {num_parts} parts must hold numbers from 0 to {num_parts - 1}, got {int(part.min())} to "
            f"{int(part.max())}. Correct it, or change the number of parts."
        )
    return part.cpu().int()


def _balanced(data: Data, num_parts: int, method: str, seed: int) -> Tensor:
    if num_parts == 1 or data.num_nodes <= num_parts:
        return assign(data, num_parts, "contiguous")
    weights = balanced_weights(data)
    if method == "fennel":
        return fennel(data.edge_index, weights, num_parts, seed)
    part = metis(data.edge_index, data.num_nodes, num_parts, seed, weights.numpy())
    return assign(data, num_parts, "random", seed) if part is None else part


def balanced_weights(data: Data) -> Tensor:
    """Return what METIS and FENNEL balance: each node's weighted shares of the nodes, in-edges and labels."""
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    weight = torch.full((data.num_nodes,), 2.0, dtype=torch.double)
    for count, importance in ((degree, 2), (_labelled(data), 1)):
        weight += importance * count / count.double().mean().clamp(min=1e-9)
    return (100 * weight).round().long()


def _labelled(data: Data) -> Tensor:
    """Return whether each node is in the training set, of any split if there are several."""
    mask = _levels(data)[0].get("train_mask")
    if mask is None or mask.dtype != torch.bool:
        return torch.zeros(data.num_nodes, dtype=torch.bool)
    return mask.flatten(1).any(1) if mask.dim() > 1 else mask


def _checked(data: Data) -> Data:
    """Return a copy of valid data that holds nothing but what can be stored."""
    if not isinstance(data, Data):
        raise TypeError(
            f"Expected a torch_geometric.data.Data or HeteroData, got {type(data).__name__}, which is not supported."
        )
    data, edge_index = copy.copy(data), plain(data.edge_index)
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"The graph needs an 'edge_index' [2, num_edges], but holds {data.keys()}. To convert 'adj_t': "
            "data.edge_index = torch_geometric.utils.to_edge_index(data.adj_t)[0].flip(0)."
        )
    if edge_index.dtype != torch.long or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            "'edge_index' must be torch.int64 of shape [2, num_edges], got "
            f"{edge_index.dtype} of shape {list(edge_index.shape)}."
        )
    data.edge_index, data.num_nodes = edge_index, int(data.num_nodes or 0)
    if edge_index.numel() and (edge_index.min() < 0 or edge_index.max() >= data.num_nodes):
        raise ValueError(
            f"'edge_index' must hold nodes 0 to {data.num_nodes - 1}, got {int(edge_index.min())} to "
            f"{int(edge_index.max())}. Correct it, or set 'data.num_nodes'."
        )
    for key in list(data.keys()):
        value = plain(data[key])
        if key in RESERVED:
            warnings.warn(f"'{key}' of the graph is left out: 'load' sets an attribute of this name.", stacklevel=3)
            del data[key]
        elif storable(value, (data.num_nodes, data.num_edges)):
            if key != "edge_index" and isinstance(value, Tensor) and ("index" in key or key == "face"):
                warnings.warn(f"'{key}' keeps the ids of the whole graph ('n_id' tells those of a part).", stacklevel=3)
            data[key] = value  # setting it also makes PyG forget the level of a former value
        else:
            warnings.warn(f"'{key}' ({type(value).__name__}) is left out: only tensors travel.", stacklevel=3)
            del data[key]
    return data


def plain(value: Any) -> Any:
    """Return arrays and PyG's index tensors as tensors, and other values as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    if isinstance(value, Tensor):
        return (value.as_tensor() if hasattr(value, "as_tensor") else value).detach().cpu()
    return value


def storable(value: Any, sizes: tuple[int, ...] = ()) -> bool:
    """Tell whether a value is a tensor or JSON, and not a list that should travel with nodes or edges."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided and store.can_hold(value.dtype)
    if isinstance(value, (list, tuple)):
        return len(value) not in sizes and not any(isinstance(v, Tensor) or not storable(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _levels(data: Data) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return node-level, edge-level and graph-level attributes."""
    nodes: dict[str, Any] = {}
    edges: dict[str, Any] = {}
    graph: dict[str, Any] = {}
    for key, value in data.to_dict().items():
        if key in ("edge_index", "num_nodes"):
            continue
        # PyG's own test fails where no dimension is to be cut.
        cut = isinstance(value, Tensor) and isinstance(_dim(data, key), int)
        level = nodes if cut and data.is_node_attr(key) else edges if cut and data.is_edge_attr(key) else graph
        level[key] = value
    return nodes, edges, graph


def _dim(data: Data, key: str) -> Any:
    """Return the dimension of an attribute that counts nodes or edges, usually 0."""
    return data.__cat_dim__(key, data[key])


def _select(data: Data, attrs: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
    return {key: value.index_select(_dim(data, key), ids) for key, value in attrs.items()}


def report_of(infos: list[dict[str, Any]], labelled: list[int]) -> dict[str, Any]:
    """Return what :func:`partition` does, of the parts' counts."""
    counts = [info["counts"] for info in infos]
    edges = [sum(count["edges"]) for count in counts]
    sizes = {"nodes": [count["nodes"] for count in counts], "edges": edges, "labelled": labelled}
    cut = sum(edges) - sum(count["edges"][p] for p, count in enumerate(counts))
    boundary = [count["rows_in"] for count in counts]
    return {
        "num_parts": len(infos),
        "num_nodes": sum(sizes["nodes"]),
        "num_edges": sum(edges),
        **sizes,
        "balance": {key: max(size) * len(size) / sum(size) if any(size) else 1.0 for key, size in sizes.items()},
        "cut": cut,
        "cut_fraction": cut / max(sum(edges), 1),
        "boundary": boundary,
        "boundary_rows": sum(map(sum, boundary)),
        "bytes": [sum(file["bytes"] for file in info["files"].values()) for info in infos],
    }


if __name__ == "__main__":
    from pyg_sar.__main__ import main

    sys.exit(main(["partition", *sys.argv[1:]]))
