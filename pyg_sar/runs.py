r"""Edges in *runs*: those of a row that have the same type, which can be added up before they are weighted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.block import Block, ordinary_mode, rows_at, some_of
from pyg_sar.csr import compress, piece_starts, rows_of, sized, sorting
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import empty, spmm_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.rewire import check_types

# Rows and runs of a range, at least, and for each type: what is made for them is some MiB, which stay in a cache, or
# keep a GPU busy, and as many rows of a type are multiplied at once.
SIZE, SIZE_ON_GPU, OF_TYPE = 1 << 15, 1 << 19, 1024


class Csr(NamedTuple):
    """A row pointer, and a number for each entry of a row."""

    ptr: Tensor
    col: Tensor


class Range(NamedTuple):
    """A range of rows with all their runs, sorted by type; numbers within a range begin at 0.

    Args:
        rows: Which rows.
        edges: Which edges.
        runs: Which runs.
        filled: The types that have runs, and where these are.
        row: The row of each run.
        of_runs: The other ends of the edges of each run, which are numbers of the whole.
        of_rows: The runs of each row.
        of_types: Where the runs of each type are among those of the rows.
    """

    rows: slice
    edges: slice
    runs: slice
    filled: list[tuple[int, slice]]
    row: Tensor
    of_runs: Csr
    of_rows: Csr
    of_types: Csr

    def each(self, values: Tensor) -> Tensor:
        """Return for each run the row of ``values`` of its type."""
        return values.repeat_interleave(self.of_types.ptr.diff(), 0, output_size=self.row.numel())

    def gather(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return for each run the (weighted) sum of the rows ``x`` that its edges lead to, in the type of sums."""
        kind, shape = accumulator(x.dtype), (self.row.numel(), x.size(1))
        out = empty(x, *shape) if x.dtype == kind else zeros(x, *shape, dtype=kind)
        spmm_(out, *self.of_runs, x, weight, None, x.dtype == kind)
        return out

    def combine(self, sums: Tensor, weight: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Return for each row the sum over its runs, weighted by each column of ``weight``, side by side; or write it
        over ``out``.
        """
        columns = 1 if weight is None else weight.size(1)
        out = empty(sums, self.of_rows.ptr.numel() - 1, columns * sums.size(1)) if out is None else out
        spmm_(out, *self.of_rows, sums, weight, None if weight is None else self.of_rows.col, True)
        return out


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a block's destinations.

    Args:
        block: The block.
        num_types: How many types there are.
        ranges: Its destinations that have edges, in ranges.
        sizes: How many edges of its type the destination of each run has, on the worker, ``[num_runs, 1]``.
    """

    block: Block
    num_types: int
    ranges: list[Range]
    sizes: Tensor

    @cached_property
    @ordinary_mode
    def transpose(self) -> tuple[list[Range], Tensor]:
        """The runs of the block's sources, in ranges of these, and the size above for each edge, in their order.

        Types are those of forward's runs: a change of ``edge_type`` before backward concerns later calls alone.
        """
        block, dtype = self.block, self.block.col.dtype
        lengths = torch.cat([span.of_runs.ptr.diff() for span in self.ranges])
        run = rows_of(F.pad(lengths.cumsum(0, dtype=dtype), (1, 0)), block.col)  # of each edge, in forward's order
        col = torch.cat([span.of_runs.col for span in self.ranges])
        run, ptr = run.index_select(0, sorting(col, block.num_src)), compress(col, block.num_src)
        every = torch.arange(self.num_types, device=col.device)
        types = torch.cat([span.each(every) for span in self.ranges])
        row = torch.cat([span.row.to(dtype) + span.rows.start for span in self.ranges])
        row = row if block.dst is None else rows_at(block.dst, row)
        ranges: list[Range] = []
        sizes = []
        for rows, edges in spans(ptr, self.num_types):
            its = run[edges]
            span, order = sorted_by_type(rows, edges, ptr, row[its], types[its], self.num_types, ranges)
            ranges.append(span)
            sizes.append(self.sizes[its][order])
        return ranges, torch.cat(sizes)


def runs_of(graph: ShardedGraph, edge_type: Tensor, num_types: int) -> dict[Block, Runs]:
    """Return the runs of each block that has edges; they are kept as long as ``edge_type`` lives unchanged."""

    def make() -> dict[Block, Runs]:
        check_types(graph, edge_type, num_types)
        blocks = [block for block in graph.blocks if block.num_edges > 0]
        counts = PairCounts(graph, edge_type, num_types) if len(blocks) > 1 else None
        return {block: _runs(block, edge_type, num_types, counts) for block in blocks}

    return graph.derived(("runs", num_types), make, of=edge_type)


def _runs(block: Block, edge_type: Tensor, num_types: int, counts: PairCounts | None) -> Runs:
    """Return the runs of a block, given how many edges each destination has of each type, unless all are in it."""
    every, sizes = torch.arange(num_types, device=edge_type.device), []
    ranges: list[Range] = []
    for rows, edges in spans(block.rowptr, num_types):
        types = rows_at(edge_type, some_of(block.edges, edges))
        span, _ = sorted_by_type(rows, edges, block.rowptr, block.col[edges], types, num_types, ranges)
        row = span.row.long() + span.rows.start
        ranges.append(span)
        sizes.append(
            span.of_runs.ptr.diff().int() if counts is None
            else counts.of(row if block.dst is None else rows_at(block.dst, row), span.each(every))
        )  # fmt: skip
    return Runs(block, num_types, ranges, torch.cat(sizes).unsqueeze(1))


class PairCounts:
    """How many edges each destination of a worker has of each type.

    Args:
        graph: The graph.
        edge_type: The type of each edge.
        num_types: How many types there are.
    """

    def __init__(self, graph: ShardedGraph, edge_type: Tensor, num_types: int) -> None:
        self.num_types = num_types
        starts, found = piece_starts(F.pad(graph.degree.cumsum(0), (1, 0)), graph.num_edges), []
        for start, end in pairwise([*starts.tolist(), graph.num_dst]):
            some = [block.rows(start, end) for block in graph.blocks]
            keys = [(b.row + start) * num_types + rows_at(edge_type, b.edges) for b in some]
            found.append(torch.cat(keys).unique(return_counts=True))
        self.pairs, self.counts = map(torch.cat, zip(*found, strict=True))  # pairs in ascending order

    def of(self, dst: Tensor, edge_type: Tensor) -> Tensor:
        """Return the number for each of some destinations and types, which occur."""
        return self.counts[torch.searchsorted(self.pairs, dst.long() * self.num_types + edge_type)].int()


def spans(ptr: Tensor, num_types: int) -> Iterator[tuple[slice, slice]]:
    """Cut rows into ranges that have few runs, given the row pointer of their edges: which rows, and which edges."""
    size = sized(max(SIZE if ptr.device.type == "cpu" else SIZE_ON_GPU, OF_TYPE * num_types))
    most = ptr.diff().long().clamp_(max=num_types)  # runs of a row, at most
    number = ((most + 1).cumsum(0) - 1) // size  # of each row's range
    ends = F.pad(number.unique_consecutive(return_counts=True)[1].cumsum(0), (1, 0))
    for rows, edges in zip(pairwise(ends.tolist()), pairwise(ptr[ends].tolist()), strict=True):
        yield slice(*rows), slice(*edges)


def sorted_by_type(
    rows: slice, edges: slice, ptr: Tensor, col: Tensor, edge_type: Tensor, num_types: int, before: Sequence[Range]
) -> tuple[Range, Tensor]:
    """Sort the edges of a range by type, then by row, stably.

    Args:
        rows: The rows of the range.
        edges: Its edges.
        ptr: Row pointer of all edges.
        col: The other ends of its edges.
        edge_type: Their types.
        num_types: How many types there are.
        before: The ranges before it.

    Returns:
        The range, and the order of its edges.
    """
    count, start = rows.stop - rows.start, before[-1].runs.stop if before else 0
    row = rows_of(ptr[rows.start : rows.stop + 1] - edges.start, col)
    key, order = torch.sort(edge_type.long() * count + row, stable=True)
    key, length = key.unique_consecutive(return_counts=True)
    where, types = key % count, compress(key // count, num_types)
    by_row = where.argsort(stable=True)
    filled = [(r, slice(i, k)) for r, (i, k) in enumerate(pairwise(types.tolist())) if i < k]
    return Range(
        rows, edges, slice(start, start + key.numel()), filled, where.int(),
        Csr(F.pad(length.cumsum(0), (1, 0)).to(col.dtype), col[order]),
        Csr(compress(where, count), by_row.int()),
        Csr(types, by_row.argsort().int()),
    ), order  # fmt: skip
