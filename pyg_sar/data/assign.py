r"""Which part each node of a graph goes to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.data.attributes import in_any, integers, plain
from pyg_sar.data.fennel import fennel
from pyg_sar.data.metis import metis


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
    if not integers(part) or part.shape != (num_nodes,):
        raise ValueError(
            f"An assignment must hold one integer for each node, shape [{num_nodes}], got {part.dtype} of shape "
            f"{list(part.shape)}."
        )
    part = part.cpu().long()  # torch compares no unsigned numbers
    if num_nodes and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"An assignment to {num_parts} parts must hold numbers from 0 to {num_parts - 1}, got {int(part.min())} to "
            f"{int(part.max())}. Correct it, or change the number of parts."
        )
    return part.int()


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
    mask = plain(data.get("train_mask"))
    labelled = torch.zeros_like(degree) if mask is None or mask.dtype != torch.bool else in_any(mask)
    for count, importance in ((degree, 2), (labelled, 1)):
        weight += importance * count / count.double().mean().clamp(min=1e-9)
    return (100 * weight).round().long()
