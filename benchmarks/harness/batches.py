"""Batches of destination chunks, of several workers, as Algorithm 4 of HongTu forms them, for ``chunks.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_sar.offload.schedule import overlaps

# Chunk j of all workers is batch j. 'rows[p][j]' are the rows that chunk j of worker p reads.


def source_rows(rowptr: Tensor, col: Tensor, chunks: Sequence[slice], num_src: int) -> list[Tensor]:
    """Return the source rows that each chunk reads, ascending.

    Args:
        rowptr: CSR row pointer over the destinations.
        col: Source row of each edge.
        chunks: The destinations of each chunk, as :func:`ranges` returns them.
        num_src: Number of source rows.
    """
    found, read = [], torch.zeros(num_src, dtype=torch.bool)
    for chunk in chunks:
        first, last = rowptr[[chunk.start, chunk.stop]].tolist()
        read[col[first:last]] = True
        found.append(read.nonzero().view(-1))
        read[found[-1]] = False
    return found


def union(rows: Sequence[Tensor]) -> Tensor:
    """Return the rows that any of several chunks reads, ascending: loaded once for all workers of a batch."""
    return torch.cat(list(rows)).unique()


def form_batches(rows: Sequence[Sequence[Tensor]], num_rows: int) -> list[list[int]]:
    """Return each worker's chunks in the order of batches, such that chunks of a batch share rows.

    Algorithm 4, phase 1: the chunks of the first worker begin a batch each, and every other worker gives each batch in
    turn that of its chunks, of those left, which has most rows in common with it.
    """
    batches, orders = list(rows[0]), [list(range(len(rows[0])))]
    for chunks in rows[1:]:
        orders.append(order := match(overlaps(batches, chunks, num_rows)))
        batches = [union([batch, chunks[c]]) for batch, c in zip(batches, order, strict=True)]
    return orders


def match(shared: Tensor) -> list[int]:
    """Return the column that each row takes in turn, the largest of those left."""
    left, order = list(range(shared.size(1))), []
    for counts in shared.tolist():
        order.append(max(left, key=counts.__getitem__))
        left.remove(order[-1])
    return order
