r"""METIS, for any ``edge_index``: the only place that knows ``pymetis``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def metis(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    seed: int = 0,
    weights: np.ndarray | None = None,
    recursive: bool = False,
) -> Tensor | None:
    """Cut few edges between two or more parts of equal weight; direction, self-loops and duplicates do not count.

    Weights of nodes are integers, by default all the same. ``recursive`` bisects again and again, so that parts of
    close numbers are close, too. Returned is the part of each node, ``int32``, or None if no edge joins two nodes:
    METIS would fail.
    """
    try:
        import pymetis
    except ImportError as error:
        raise ImportError(
            "METIS needs 'pip install pymetis'; method 'fennel', 'random' or 'contiguous' and order 'id' do without."
        ) from error
    ptr, neighbor = _neighbors(edge_index, num_nodes)
    if neighbor.size == 0:
        return None
    graph, options = pymetis.CSRAdjacency(ptr, neighbor), pymetis.Options(seed=seed)
    _, part = pymetis.part_graph(num_parts, graph, vweights=weights, recursive=recursive, options=options)
    return torch.from_numpy(np.asarray(part, dtype=np.int32))


def _neighbors(edge_index: Tensor, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every node's neighbors in CSR form, both ways, without self-loops and duplicates."""
    source, destination = edge_index.numpy(force=True)
    key = np.concatenate([source, destination])
    key *= num_nodes
    key[: source.size] += destination
    key[source.size :] += source
    key.sort()
    keep = key % (num_nodes + 1) != 0  # only a self-loop's key is a multiple of n + 1
    keep[1:] &= key[1:] != key[:-1]
    key = key[keep]
    ptr = np.searchsorted(key, np.arange(num_nodes + 1) * num_nodes)
    key %= num_nodes
    return ptr, key
