r"""Row pointers (CSR); sorting by counting, piece by piece, so that never all edges are sorted at once; and the rows of
global ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

MAX = torch.iinfo(torch.int32).max
# A block holds the destinations with edges alone if they are fewer than one in so many. What they take, two numbers
# each instead of one for every destination, is then at most half, and the kernels, which skip what they do not see,
# are faster.
SPARSE = 4
PIECE = 1 << 20  # edges that are sorted, or looked at, at a time, at least: what is made for them is some tens of MiB
_scale = 1.0  # of what is worked on at a time, in a graph that is a smaller model of another one


@contextmanager
def scaled(factor: float) -> Iterator[None]:
    """Work on fewer edges at a time, as in a graph that is a smaller model of another one."""
    global _scale
    before, _scale = _scale, factor
    try:
        yield
    finally:
        _scale = before


def sized(size: int) -> int:
    """Return how many edges, or runs of them, are worked on at a time, given the number of a graph that is no model."""
    return max(round(size * _scale), 1)


def index_type(most: int) -> torch.dtype:
    """Return the type of numbers up to ``most``: int32 where that will do."""
    return torch.int64 if most > MAX else torch.int32


def compress(row: Tensor, num_rows: int) -> Tensor:
    """Return the row pointer of row numbers once these are sorted, in int32 wherever the number of edges allows."""
    ptr = torch.zeros(num_rows + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=num_rows), 0, out=ptr[1:])
    return ptr.to(index_type(row.numel()))


def compress_doubly(row: Tensor, num_rows: int, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor | None]:
    """Return the row pointer of row numbers once these are sorted, and None; or, if few rows occur, a row pointer over
    these alone, and which they are. They are of type ``dtype``, or wider where numbers demand it.
    """
    if row.numel() < num_rows:
        rows, count = row.unique(return_counts=True)
    else:
        count = row.bincount(minlength=num_rows)
        rows = count.nonzero().view(-1)
        count = count[rows]
    return lead_over(rows, count, num_rows, dtype)


def lead_over(rows: Tensor, count: Tensor, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return what :func:`compress_doubly` does, given the rows that occur and the number of edges of each."""
    few = rows.numel() * SPARSE < num_rows
    count = count if few else count.new_zeros(num_rows).index_copy_(0, rows.long(), count)
    ptr = F.pad(count.cumsum(0), (1, 0))
    dtype = torch.promote_types(dtype, index_type(max(int(ptr[-1]), num_rows if few else 0)))
    return ptr.to(dtype), rows.to(dtype) if few else None


def rows_of(ptr: Tensor, col: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the row of each edge, in the type of ``ptr``, given those that ``ptr`` leads over, unless they are all."""
    rows = torch.arange(ptr.numel() - 1, dtype=ptr.dtype, device=ptr.device) if rows is None else rows
    return rows.repeat_interleave(ptr.diff(), output_size=col.numel())


def piece_starts(ptr: Tensor, num_edges: int) -> Tensor:
    """Return the first row of ranges with about ``PIECE`` edges, or of one with more; what is before has none."""
    starts = torch.arange(0, num_edges, sized(PIECE), dtype=ptr.dtype, device=ptr.device)
    return (torch.searchsorted(ptr, starts, right=True) - 1).unique_consecutive()


def sorting(numbers: Tensor, count: int) -> Tensor:
    """Return the order that sorts numbers below ``count``, stably, in their type.

    It is that of ``argsort``, which takes several times the memory of what it returns: sorted pieces are merged by
    counting.
    """
    size = max(sized(PIECE), count)
    if numbers.numel() <= size:
        return numbers.argsort(stable=True).to(numbers.dtype)
    order, begin = torch.empty_like(numbers), compress(numbers, count)[:-1].long()
    for k, piece in enumerate(numbers.split(size)):
        some, which = piece.sort(stable=True)
        counts = piece.bincount(minlength=count)
        place = (begin - (counts.cumsum(0) - counts))[some] + torch.arange(some.numel(), device=some.device)
        order[place] = which.to(order.dtype) + k * size
        begin += counts
    return order


class Lookup:
    """Finds the row of a global id among those of all rows, which are sorted when they are first looked through."""

    def __init__(self, n_id: Tensor) -> None:
        self.n_id = n_id

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """The ids in ascending order, and the row of each."""
        return self.n_id.sort()

    def rows(self, ids: Tensor) -> Tensor:
        """Return the row of every id, or -1."""
        known, row = self.sorted
        if known.numel() == 0:
            return torch.full_like(ids, -1)
        place = torch.searchsorted(known, ids.contiguous()).clamp(max=known.numel() - 1)
        return torch.where(known[place] == ids, row[place], -1)
