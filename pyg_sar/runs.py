r"""Edges in *runs*: those of a row that have the same type, which can be added up before they are weighted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.block import Block, compress, ordinary_mode, rows_at, rows_of
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import empty, spmm_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.rewire import check_types

# Rows and runs of a range, at least, and for each type: what is made for them is some MiB, which stay in a cache, or
# keep a GPU busy, and as many rows of a type are multiplied at once.
SIZE, SIZE_ON_GPU, OF_TYPE = 1 << 15, 1 << 19, 1024
SCALE = 1.0  # of all three, in a graph that is a smaller model of another one


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
        block, length = self.block, torch.cat([span.of_runs.ptr.diff() for span in self.ranges])
        place = torch.cat([span.row + span.rows.start for span in self.ranges])
        every = torch.arange(self.num_types, device=place.device)
        types = torch.cat([span.each(every) for span in self.ranges])
        row = place if block.dst is None else rows_at(block.dst, place)
        row, types, sizes = (
            t.repeat_interleave(length, 0, output_size=block.num_edges) for t in (row, types, self.sizes)
        )
        col = torch.cat([span.of_runs.col for span in self.ranges])
        ranges, order, _ = sort(col, row.to(col.dtype), types, block.num_src, self.num_types)
        return ranges, sizes[order]


def runs_of(graph: ShardedGraph, edge_type: Tensor, num_types: int) -> dict[Block, Runs]:
    """Return the runs of each block that has edges; they are kept as long as ``edge_type`` lives unchanged."""

    def make() -> dict[Block, Runs]:
        check_types(graph, edge_type, num_types)
        blocks = [block for block in graph.blocks if block.num_edges > 0]
        if not blocks:
            return {}
        types = [rows_at(edge_type, block.edges) for block in blocks]
        keys = [block.row * num_types + its for block, its in zip(blocks, types, strict=True)]
        _, pair, count = torch.cat(keys).unique(return_inverse=True, return_counts=True)
        sizes = count.int()[pair].split([block.num_edges for block in blocks])
        found = {}
        for block, its, size in zip(blocks, types, sizes, strict=True):
            row = rows_of(block.rowptr, block.col)
            ranges, order, first = sort(row, block.col, its, block.rowptr.numel() - 1, num_types)
            found[block] = Runs(block, num_types, ranges, size[order[first]].unsqueeze(1))
        return found

    return graph.derived(("runs", num_types), make, of=edge_type)


def sort(
    row: Tensor, col: Tensor, edge_type: Tensor, num_rows: int, num_types: int
) -> tuple[list[Range], Tensor, Tensor]:
    """Cut rows into ranges, and sort edges by range, type and row, else as they are given; return their order, too, and
    where the first edge of each run is.
    """
    row, dtype = row.long(), col.dtype
    most = row.bincount(minlength=num_rows).clamp_(max=num_types)  # runs of a row, at most
    size = SCALE * max(SIZE if row.device.type == "cpu" else SIZE_ON_GPU, OF_TYPE * num_types)
    number = ((most + 1).cumsum(0) - 1) // max(round(size), 1)
    number = number.unique_consecutive(return_inverse=True)[1]  # of each row's range
    key, order = torch.sort((number[row] * num_types + edge_type) * num_rows + row, stable=True)
    key, length = key.unique_consecutive(return_counts=True)
    run_row, run_type = key % num_rows, key // num_rows % num_types
    counts_of = [number[of].bincount(minlength=int(number[-1]) + 1) for of in (slice(None), run_row, row)]
    ranges, begin = [], [0, 0, 0]
    for counts in torch.stack(counts_of, 1).tolist():
        rows, runs, edges = (slice(b, b + n) for b, n in zip(begin, counts, strict=True))
        begin = [rows.stop, runs.stop, edges.stop]
        where, types = run_row[runs] - rows.start, compress(run_type[runs], num_types)
        by_row = where.argsort(stable=True)
        filled = [(r, slice(a, b)) for r, (a, b) in enumerate(pairwise(types.tolist())) if a < b]
        ranges.append(Range(
            rows, edges, runs, filled, where.int(),
            Csr(torch.cat([length.new_zeros(1), length[runs].cumsum(0)]).to(dtype), col[order[edges]]),
            Csr(compress(where, counts[0]), by_row.int()),
            Csr(types, by_row.argsort().int()),
        ))  # fmt: skip
    return ranges, order, length.cumsum(0) - length
