r"""FENNEL, a streaming partitioner: for graphs that METIS has no room for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# More passes or smaller batches hardly cut less on the graphs of benchmarks/partition.py.
PASSES, BATCHES = 20, 100
SETTLED = 1e-3  # share of the nodes that move in a pass, below which another one is not worth it
SLACK = 1.03  # METIS's, too
CHOICES = 3  # parts that a node asks for before it takes what has room
CHUNK = 1 << 20  # edges or scores that are looked at together


def fennel(edge_index: Tensor, weights: Tensor, num_parts: int, seed: int = 0) -> Tensor:
    """Cut few edges between parts of equal weight; edges count in both directions, duplicates as often as they come.

    Nodes come in random order, and each goes to the part that holds most of its neighbors, less a price that rises with
    the part's weight (`"FENNEL: Streaming Graph Partitioning for Massive Scale Graphs"
    <https://doi.org/10.1145/2556195.2556213>`_). The stream is repeated until few nodes move (`"Restreaming Graph
    Partitioning" <https://doi.org/10.1145/2487575.2487696>`_). Nodes are placed in batches that know nothing of each
    other; the first pass starts with small ones. No part weighs more than 1.03 of the mean and its heaviest node.

    Memory, above the inputs, is half the bytes of ``edge_index``, some 60 bytes for each node, and that of a batch.
    Weights of nodes are positive ``int64``, the parts that are returned ``int32``. The seed is that of the order.
    """
    num_nodes = weights.numel()
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    turn = torch.empty(num_nodes, dtype=torch.int32 if num_nodes < 1 << 31 else torch.int64)
    turn[order] = torch.arange(num_nodes, dtype=turn.dtype)
    ptr, neighbor = _neighbors(edge_index, turn)
    weights = weights[order]
    part = torch.full((num_nodes,), num_parts, dtype=torch.int32)  # of none yet
    load = torch.zeros(num_parts + 1, dtype=torch.int64)
    load[num_parts] = total = int(weights.sum())
    limit = int(SLACK * total / num_parts) + 1
    # The derivative of the paper's price a w^1.5, a = m sqrt(k) / n^1.5, for weights w whose sum is n.
    price = 1.5 * edge_index.size(1) / max(num_nodes, 1) * (num_parts / max(total, 1)) ** 0.5
    for _ in range(PASSES):
        moved = 0
        for start, end in _batches(num_nodes, num_parts):
            before, weight = part[start:end].long(), weights[start:end]
            load.index_add_(0, before, weight, alpha=-1)
            score = _votes(part, neighbor[ptr[start] : ptr[end]], ptr[start : end + 1] - ptr[start], num_parts)
            score -= price * load[:-1].sqrt()
            after = _place(score, weight, load[:-1], limit)
            load.index_add_(0, after, weight)
            part[start:end] = after
            moved += int((after != before).sum())
        if moved <= SETTLED * num_nodes:
            break
    return part[turn]


def _batches(num_nodes: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut the stream into batches that grow with what is known: the first nodes have no neighbors in a part."""
    size = max(1, min(num_nodes // BATCHES, CHUNK // num_parts))
    batches, start = [], 0
    while start < num_nodes:
        end = min(start + min(size, 1 + start // 4), num_nodes)
        batches.append((start, end))
        start = end
    return batches


def _votes(part: Tensor, neighbor: Tensor, ptr: Tensor, num_parts: int) -> Tensor:
    """Count the neighbors of each node of a batch in each part ``[num_nodes, num_parts]``."""
    # Neighbors that are in no part yet vote in a column of their own. (Unlike 'repeat_interleave', a running sum wakes
    # no threads, which would take longer than a small batch does.)
    columns, num_nodes = num_parts + 1, ptr.numel() - 1
    slot = torch.zeros(neighbor.numel() + 1, dtype=torch.int64)
    slot.index_add_(0, ptr[1:], torch.full((num_nodes,), columns))
    slot = slot.cumsum_(0)[:-1] + part[neighbor]
    votes = torch.bincount(slot, minlength=num_nodes * columns)
    return votes.view(num_nodes, columns)[:, :-1].float()


def _place(score: Tensor, weight: Tensor, load: Tensor, limit: int) -> Tensor:
    """Return the part of each node of a batch: that of the highest score, among those that have room."""
    load, num_parts = load.clone(), load.numel()
    part = torch.empty(weight.numel(), dtype=torch.int64)
    left = torch.arange(weight.numel())
    for _ in range(min(CHOICES, num_parts)):
        choice = score[left].argmax(1)
        # Part by part, who wants it most comes first.
        asks = score[left, choice].argsort(descending=True, stable=True)
        asks = asks[choice[asks].argsort(stable=True)]
        choice, left = choice[asks], left[asks]
        until = weight[left].cumsum(0)
        wanted = torch.zeros_like(load).index_add_(0, choice, weight[left])
        fits = until - (wanted.cumsum(0) - wanted)[choice] <= (limit - load)[choice]
        part[left[fits]] = choice[fits]
        load.index_add_(0, choice[fits], weight[left[fits]])
        score[left[~fits], choice[~fits]] = -torch.inf
        left = left[~fits]
    # The rest fills what room there is, from the first part to the last; each part takes at most one node too many.
    room = (limit - load).clamp(min=0).cumsum(0)
    part[left] = torch.searchsorted(room, weight[left].cumsum(0) - weight[left], right=True)
    return part


def _neighbors(edge_index: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Return every node's neighbors in CSR form, both ways, without self-loops; nodes are numbered by their turn."""
    num_nodes = turn.numel()
    ptr = torch.zeros(num_nodes + 1, dtype=torch.int64)
    for node, _ in _chunks(edge_index, turn):
        ptr[1:].index_add_(0, node, torch.ones_like(node, dtype=torch.int64))
    ptr = ptr.cumsum(0)
    free, neighbor = ptr[:-1].clone(), turn.new_empty(int(ptr[-1]))
    for node, other in _chunks(edge_index, turn):
        node, order = node.sort()
        runs, count = node.unique_consecutive(return_counts=True)
        # Each run goes where the list of its node goes on.
        place = (free[runs] - (count.cumsum(0) - count)).repeat_interleave(count) + torch.arange(node.numel())
        neighbor[place] = other[order]
        free[runs] += count
    return ptr, neighbor


def _chunks(edge_index: Tensor, turn: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some edges at a time, in one direction and then in the other, as turns of nodes and of neighbors."""
    for source, destination in edge_index.split(CHUNK, 1):
        keep = source != destination
        one, other = turn[source[keep]], turn[destination[keep]]
        yield one, other
        yield other, one
