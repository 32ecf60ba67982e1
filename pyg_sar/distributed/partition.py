r"""Offline partitioning: one ``Data`` object becomes a partition folder with one part for each worker."""

from __future__ import annotations

import copy
import os
import sys
import uuid
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import transforms as T
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_sar.distributed import store
from pyg_sar.distributed.split import Topology, split


def partition(
    data: Data,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    method: str | Tensor = "metis",
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    r"""Cut a graph into parts and write them into a partition folder.

    Every node-level and edge-level tensor travels with its nodes and edges, as PyG tells them apart
    (:meth:`~torch_geometric.data.Data.is_node_attr`). Other tensors, numbers, strings and lists of them are copied into
    every part. What is none of these is left out with a warning.

    METIS takes one weight for each node (``pymetis`` offers no more), so it balances a sum: the shares of the nodes,
    in-edges and labelled nodes (``train_mask``), each counted a third. The report says how well each is balanced.

    Peak memory above that of ``data`` is PEAK_RANDOM times the bytes of ``edge_index``, and PEAK_METIS times with METIS
    (measured on a random graph, which is METIS's worst case), plus the attributes of one part.

    Args:
        data: The graph.
        num_parts: Number of parts; those beyond the number of nodes stay empty.
        out: The folder to write. Nothing is left there if this function fails.
        method: ``"metis"``, ``"random"``, ``"contiguous"`` (equal ranges of nodes), or the part of each node as an
            integer tensor ``[num_nodes]``.
        seed: Seed of METIS and of the random assignment.
        overwrite: Whether to replace a partition that ``out`` holds.
        progress: Whether to show a progress bar.

    Returns:
        The report, which ``meta.json`` also holds: nodes, in-edges and labelled nodes of each part, their balance
        (largest over mean), the edges cut, and ``boundary[p][q]``, the rows that part ``p`` reads from part ``q``.
    """
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"'num_parts' must be an integer of at least 1, got {num_parts!r}.")
    data = _checked(data)
    with store.create(out, overwrite) as folder, tqdm(total=num_parts + 1, disable=not progress) as bar:
        bar.set_description("assigning nodes")
        part = assign(data, num_parts, method, seed)
        bar.update()
        levels = _levels(data)
        size = {"identity": uuid.uuid4().hex, "num_nodes": data.num_nodes, "num_edges": data.num_edges}
        infos, labelled = [], []
        for p, topology in enumerate(split(data.edge_index, part, part, num_parts)):
            bar.set_description(f"writing part {p}")
            nodes = _select(data, levels["nodes"], topology.src_id)
            edges = _select(data, levels["edges"], topology.e_id)
            shard = store.Shard(p, num_parts, *size.values(), topology, nodes, edges, levels["graph"])
            infos.append(store.write_part(folder, shard))
            labelled.append(int(_labelled(data)[topology.src_id].sum()))
            bar.update()
        report = _report(infos, labelled, method if isinstance(method, str) else "given", seed)
        store.write_meta(folder, {**size, "num_parts": num_parts, "attributes": _describe(data, levels), **report})
    return report


def prepare(data: Data, *, to_undirected: bool = False, self_loops: bool = False, gcn_norm: bool = False) -> Data:
    """Apply PyG's own transforms that change edges, in this order.

    Args:
        data: The graph; it is not modified.
        to_undirected: Whether to add reverse edges and merge duplicates.
        self_loops: Whether to add a self-loop to every node that has none.
        gcn_norm: Whether to add self-loops and to store the symmetrically normalised ``edge_weight``; build
            ``GCNConv`` with ``normalize=False`` then.
    """
    before = {key for key in _levels(data)["edges"]} if self_loops or gcn_norm else set()
    for wanted, transform in ((to_undirected, T.ToUndirected()), (self_loops, T.AddRemainingSelfLoops()), (gcn_norm, T.GCNNorm())):
        data = transform(copy.copy(data)) if wanted else data
    lost = before - set(_levels(data)["edges"])
    if lost:
        raise ValueError(
            f"Self-loops have no {sorted(lost)}, so these edge attributes no longer fit the edges. Add the loops with "
            "'torch_geometric.transforms.AddSelfLoops(attr=..., fill_value=...)' yourself, or remove the attributes."
        )
    return data


def assign(data: Data, num_parts: int, method: str | Tensor = "metis", seed: int = 0) -> Tensor:
    """Return the part of every node as ``int32`` tensor ``[num_nodes]``; see :func:`partition`."""
    num_nodes = data.num_nodes
    if isinstance(method, Tensor):
        return _given(method, num_nodes, num_parts)
    if method not in _METHODS:
        raise ValueError(f"Unknown method '{method}', expected one of {sorted(_METHODS)} or a tensor [num_nodes].")
    return _METHODS[method](data, num_parts, seed)


def _given(part: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    if part.is_floating_point() or part.dtype == torch.bool or part.shape != (num_nodes,):
        raise ValueError(
            f"The assignment must be an integer tensor of shape [{num_nodes}], the part of each node, got {part.dtype} "
            f"of shape {list(part.shape)}."
        )
    if part.numel() and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"The assignment must lie between 0 and num_parts - 1 = {num_parts - 1}, found values from "
            f"{int(part.min())} to {int(part.max())}. Correct it, or change 'num_parts'."
        )
    return part.cpu().int()


def _contiguous(data: Data, num_parts: int, seed: int) -> Tensor:
    return (torch.arange(data.num_nodes) * num_parts // max(data.num_nodes, 1)).int()


def _random(data: Data, num_parts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(data.num_nodes, generator=generator) % num_parts).int()


def _metis(data: Data, num_parts: int, seed: int) -> Tensor:
    try:
        import pymetis
    except ImportError as error:
        raise ImportError("method='metis' needs pymetis. Install it ('pip install pymetis') or use 'random'.") from error
    if num_parts == 1 or data.num_nodes <= num_parts:
        return _contiguous(data, num_parts, seed)
    ptr, neighbor = _undirected(data.edge_index, data.num_nodes)
    if neighbor.size == 0:
        return _random(data, num_parts, seed)
    graph = pymetis.CSRAdjacency(ptr, neighbor)
    options = pymetis.Options(seed=seed)
    _, part = pymetis.part_graph(num_parts, graph, vweights=_weights(data), recursive=False, options=options)
    return torch.from_numpy(np.asarray(part, dtype=np.int32))


_METHODS: dict[str, Callable[[Data, int, int], Tensor]] = {
    "contiguous": _contiguous,
    "metis": _metis,
    "random": _random,
}


def _undirected(edge_index: Tensor, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the neighbours of each node in CSR form, both ways, without self-loops and duplicates."""
    src, dst = edge_index.numpy()
    key = np.concatenate([src, dst])
    key *= num_nodes
    key[: src.size] += dst
    key[src.size :] += src
    key.sort()
    # A self-loop's key is a multiple of n + 1, and no other edge's is.
    keep = key % (num_nodes + 1) != 0
    keep[1:] &= key[1:] != key[:-1]
    key = key[keep]
    ptr = np.searchsorted(key, np.arange(num_nodes + 1) * num_nodes)
    key %= num_nodes
    return ptr, key


def _weights(data: Data) -> np.ndarray:
    """Return one integer weight for each node: its share of nodes, in-edges and labels."""
    weight = torch.ones(data.num_nodes, dtype=torch.double)
    for count in (torch.bincount(data.edge_index[1], minlength=data.num_nodes), _labelled(data)):
        weight += count / max(count.double().mean(), 1e-9)
    return (100 * weight).round().long().numpy()
