r"""The edges from one source shard into a worker's destinations, and the arithmetic of row numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyg_sar.csr import compress, compress_doubly, index_type, piece_starts, rows_of, sorting

Index = slice | Tensor

# For what is made once and kept: it must serve training even if it was first asked for in inference mode.
ordinary_mode = torch.inference_mode(False)

NARROW = 8  # columns


@dataclass(frozen=True, eq=False)
class Block:
    """The edges from one source shard into this worker's destinations, in CSR order by destination.

    With many shards most destinations have no edges from most of them: a row pointer over all destinations for each
    shard would be as long as the graph has nodes. A block that few destinations have edges in holds these alone.

    Args:
        rowptr: Row pointer over the destinations, ``[num_dst + 1]``, or over ``dst``.
        col: Source row of each edge within the shard, ``[num_edges]``.
        ids: Local-first number of each source row of the shard, as a slice or as a tensor ``[num_src]``.
        num_src: Number of source rows of the shard that are read.
        edges: Where the worker's edge tensors hold these edges, in CSR order; a tensor of int32 where that will do.
        num_dst: Number of destinations.
        dst: The destinations that ``rowptr`` leads over, ascending, or None if it leads over all.
    """

    rowptr: Tensor
    col: Tensor
    ids: Index
    num_src: int
    edges: Index
    num_dst: int
    dst: Tensor | None = None

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.col.numel()

    @property
    def row(self) -> Tensor:
        """Destination of each edge; derived anew at every use because it is as long as the edges."""
        return self.narrow_row.long()

    @property
    def narrow_row(self) -> Tensor:
        """The same in the type of ``rowptr``."""
        return rows_of(self.rowptr, self.col, self.dst)

    @property
    def degree(self) -> Tensor:
        """Number of edges into each destination."""
        count = self.rowptr.diff().long()
        return count if self.dst is None else count.new_zeros(self.num_dst).index_copy_(0, self.dst.long(), count)

    @property
    def source(self) -> Tensor:
        """Local-first source number of each edge."""
        return self.col.long() + self.ids.start if isinstance(self.ids, slice) else rows_at(self.ids, self.col)

    @cached_property
    @ordinary_mode
    def perm(self) -> Tensor:
        """The position of each edge of the transpose in the forward order, which only those need who read edges."""
        return sorting(self.col, self.num_src)

    @cached_property
    @ordinary_mode
    def by_source(self) -> tuple[Tensor, Tensor]:
        """The transpose, CSR by source: row pointer, and destination of each edge."""
        perm = self.__dict__["perm"] if "perm" in self.__dict__ else sorting(self.col, self.num_src)
        row = self.narrow_row.index_select(0, perm)
        return compress(self.col, self.num_src).to(row.dtype), row

    @property
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """``by_source`` and ``perm``."""
        perm = self.perm  # first, so that edges are sorted once
        return *self.by_source, perm

    @classmethod
    def from_coo(
        cls, row: Tensor, col: Tensor, ids: Index, num_src: int, num_dst: int, edges: Tensor | None = None
    ) -> Block:
        """Sort edges by destination, keeping the given order among the edges of one destination.

        Args:
            row: Destination of each edge.
            col: Its source row within the shard.
            ids: As for the block.
            num_src: As for the block.
            num_dst: As for the block.
            edges: Where the worker's edge tensors hold it; None if these are all of its edges, in their order.
        """
        perm = sorting(row.to(index_type(max(num_dst, row.numel()))), num_dst)
        rowptr, dst = compress_doubly(row, num_dst, index_type(max(num_src, num_dst)))
        if edges is None:
            places = perm
        else:
            places = edges.to(index_type(int(edges.max()) if edges.numel() > 0 else 0)).index_select(0, perm)
        col = col.to(rowptr.dtype).index_select(0, perm)
        return cls(rowptr, col, ids, num_src, places, num_dst, dst)

    def ranges(self) -> Iterator[tuple[int, Block]]:
        """Yield the edges in their order, by ranges of destinations with about ``PIECE`` edges, or one with more: the
        first destination of each, and its block.
        """
        first = piece_starts(self.rowptr, self.num_edges)
        first = first if self.dst is None else self.dst[first]
        yield from ((start, self.rows(start, end)) for start, end in pairwise([*first.tolist(), self.num_dst]))

    def rows(self, start: int, end: int) -> Block:
        """Return the edges into a range of destinations."""
        low, high, dst = start, end, None
        if self.dst is not None:
            low, high = torch.searchsorted(self.dst, self.dst.new_tensor([start, end])).tolist()
            dst = self.dst[low:high] - start
        first, last = self.rowptr[[low, high]].tolist()
        edges = some_of(self.edges, slice(first, last))
        rowptr, col = self.rowptr[low : high + 1] - first, self.col[first:last]
        return dataclasses.replace(self, rowptr=rowptr, col=col, edges=edges, num_dst=end - start, dst=dst)

    def loops(self, start: int) -> Tensor:
        """Return which edges are self-loops, given the local-first number of the first destination."""
        found = [some.source == some.row + (start + first) for first, some in self.ranges()]
        return torch.cat(found) if found else self.col.bool()

    def choose(self, rows: Tensor) -> Block:
        """Return the edges into some destinations, which become destinations 0, 1, ... in the order given."""
        place, end = rows, rows + 1
        if self.dst is not None:
            place = torch.searchsorted(self.dst, rows.to(self.dst.dtype))
            end = place + (torch.nn.functional.pad(self.dst, (0, 1), value=-1)[place] == rows)  # else without edges
        first, last = self.rowptr[place].long(), self.rowptr[end].long()
        row = torch.arange(rows.numel(), device=rows.device).repeat_interleave(last - first)
        position = (last - (last - first).cumsum(0))[row] + torch.arange(row.numel(), device=rows.device)
        edges = self.edges.start + position if isinstance(self.edges, slice) else self.edges[position]
        rowptr, dst = compress_doubly(row, rows.numel(), self.col.dtype)
        col = self.col[position]
        return dataclasses.replace(self, rowptr=rowptr, col=col, edges=edges, num_dst=rows.numel(), dst=dst)

    def renumber(self, number: Tensor, edges: Index) -> Block:
        """Give sources other local-first numbers, without those that have a negative one, and edges other positions."""
        ids = renumber(self.ids, number)
        col = places_in(ids, number[self.source])
        return dataclasses.replace(self, col=col.to(self.col.dtype), ids=ids, num_src=length(ids), edges=edges)

    def map(self, fn: Callable[[Tensor], Tensor], transpose: bool = False) -> Block:
        """Return the block of what a function makes of each index tensor, and perhaps of each of the transpose."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        made: dict[str, Any] = {k: fn(v) if isinstance(v, Tensor) else v for k, v in fields.items()}
        block = Block(**made)
        if transpose:
            *by_source, perm = map(fn, self.transpose)
            vars(block).update(by_source=tuple(by_source), perm=perm)
        return block

    def to(self, device: torch.device | str) -> Block:
        """Move the index tensors to ``device``."""
        return self.map(lambda t: t.to(device))


def renumber(ids: Index, number: Tensor) -> Index:
    """Return the new numbers of rows in ascending order without negative ones, as a slice if they are a range."""
    new = number[ids]
    new = new[new >= 0].sort().values
    if new.numel() == 0:
        return slice(0, 0)
    first, last = new[[0, -1]].tolist()
    return slice(first, last + 1) if last - first + 1 == new.numel() else new


def cut(edge_index: Tensor, part: Tensor | None, ids: Sequence[Index], num_dst: int) -> tuple[Block, ...]:
    """Cut edges into blocks by the shard of their sources, of which ``ids`` holds the rows; a single one has all."""
    src, dst = edge_index
    if len(ids) == 1:
        return (Block.from_coo(dst, places_in(ids[0], src), ids[0], length(ids[0]), num_dst),)
    assert part is not None
    blocks = []
    for q, i in enumerate(ids):
        edges = (part == q).nonzero().view(-1)
        row, col = dst.index_select(0, edges), places_in(i, src.index_select(0, edges))
        blocks.append(Block.from_coo(row, col, i, length(i), num_dst, edges))
    return tuple(blocks)


def parts_of(rows: Tensor, ids: Sequence[Index], num_rows: int) -> Tensor:
    """Return the shard of each of these rows, given the rows of each shard."""
    part = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    for q, i in enumerate(ids):
        part[i] = q
    return part[rows]


def places_in(ids: Index, rows: Tensor) -> Tensor:
    """Return where rows stand among those of ascending numbers ``ids``."""
    if isinstance(ids, slice):
        return rows - ids.start if ids.start else rows
    return torch.searchsorted(ids, rows)


def rows_at(t: Tensor, index: Index) -> Tensor:
    """Return some rows; ``t[index]`` would take two to three times as long on a CPU. On a GPU
    ``index_select`` has a warp for each row of a multiple of 16 bytes, however few: narrow ones go column by column.
    """
    if isinstance(index, slice):
        return t[index]
    narrow = t.dim() == 2 and 0 < t.size(1) <= NARROW and t.size(1) * t.itemsize % 16 == 0
    if t.is_cuda and narrow and not (t.requires_grad and torch.is_grad_enabled()):
        out = t.new_empty(index.numel(), t.size(1))
        for column, into in zip(t.unbind(1), out.unbind(1), strict=True):
            into.copy_(column[index])
        return out
    return t.index_select(0, index)


def put_rows(t: Tensor, index: Index, rows: Tensor) -> None:
    """Write rows, each to another place."""
    if isinstance(index, slice):
        t[index] = rows
    else:
        t.index_copy_(0, index.long(), rows)


def add_rows(t: Tensor, index: Index, rows: Tensor) -> None:
    """Add to rows, each of another place, what may be of a narrower type."""
    if isinstance(index, slice):
        t[index] += rows
    else:
        t.index_add_(0, index, rows.to(t.dtype))


def some_of(index: Index, which: slice) -> Index:
    """Return a range of places among those of an index."""
    return slice(index.start + which.start, index.start + which.stop) if isinstance(index, slice) else index[which]


def length(ids: Index) -> int:
    """Return how many rows there are."""
    return ids.numel() if isinstance(ids, Tensor) else ids.stop - ids.start
