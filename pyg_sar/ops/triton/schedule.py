r"""How edges are shared out to programs of a GPU.

A program takes a few *units* in lockstep, of which each is a row's edges, and sums in their order: there are no atomic
additions, so results are the same in every run. Rows are taken in the order of their degree: units of a program are
about equally long, and the longest ones start first. What has many edges is a *hub*, cut into pieces that are units of
their own; their results are merged by the same kernels, as edges from pieces to hubs. Where an edge reads a few numbers
only, some edges of a unit are taken at a time, by threads that would idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.csr import rows_of

# A hub has more than so many edges, and more than so many times the mean, so that there are fewer pieces than rows; but
# a few long rows are cut, too. Pieces of 512 take as long as a tenth of all rows, pieces of 128 many more launches.
CUT, MEANS, LONGEST = 256, 2, 1024
# About the fastest of 14 choices on an H100, for sums and all kinds of attention over 31M edges: the rows of a wider
# program wait for the longest of them, and several edges of a row at a time take registers.
CELLS, WARPS = 256, 1  # numbers of sums that a program holds, about, and warps that share them
ROWS = 64  # units of a program at most
COLUMNS = 128  # of a tile at most, where columns do not depend on each other
NARROW = 16  # numbers of a tile at most for which as many edges of a unit are taken at a time
# Edges of a unit that sums of wider tiles read before they add the first, where an edge has one weight at most: loads
# that wait for each other leave memory idle. The compiler does so by itself for full tiles, not for 100 or 400 columns.
AHEAD = 4

Outs = Sequence[Any]  # tensors, or None for those that nobody wants


class Units(NamedTuple):
    """Runs of edges, one after the other.

    Args:
        first: Their first edges.
        last: The edges after their last ones.
        row: The rows that they belong to.
        place: The rows of the output that they make.
    """

    first: Tensor
    last: Tensor
    row: Tensor
    place: Tensor


class Hubs(NamedTuple):
    """The hubs of a block.

    Args:
        rows: The rows of the output that they make.
        pieces: Their pieces.
        ptr: Where the pieces of each begin.
        of: The number of the hub of each piece.
    """

    rows: Tensor
    pieces: Units
    ptr: Tensor
    of: Tensor


class Work(NamedTuple):
    """The rows of a block.

    Args:
        rows: Those that are no hubs.
        filled: How many of them have edges; these come first.
        hubs: The hubs, if there are any.
    """

    rows: Units
    filled: int
    hubs: Hubs | None


WORK: WeakIdKeyDictionary = WeakIdKeyDictionary()


def work_of(ptr: Tensor, num_edges: int, rows: Tensor | None = None) -> Work:
    """Return how the rows of a block are shared out, found once for a row pointer: only then host and device
    synchronise.

    ``rows`` are those that it leads over, unless they are all.
    """
    both = [t for t in (ptr, rows) if t is not None]
    now = None if any(t.is_inference() for t in both) else (num_edges, *((t._version, t.data_ptr()) for t in both))
    version, work = WORK.get(ptr, (None, None))
    if now is None or version != now:
        ends = (0, 0) if ptr.numel() == 0 else tuple(ptr[[0, -1]].tolist())
        if ptr.numel() == 0 or ends != (0, num_edges):
            raise RuntimeError(
                f"Expected 'ptr' to hold at least one number and to lead from 0 to the number of edges, {num_edges} "
                f"(got {ends[0]} to {ends[1]})"
            )
        with torch.inference_mode(False):
            WORK[ptr] = now, (work := share_out(ptr, rows))
    return work


def share_out(ptr: Tensor, numbers: Tensor | None = None) -> Work:
    """Sort rows by degree and cut hubs."""
    degree, num_edges = ptr.diff(), int(ptr[-1])
    order = degree.argsort(descending=True, stable=True)
    filled = int((degree > 0).sum())
    cut = max(CUT, min(MEANS * -(-num_edges // max(filled, 1)), LONGEST))
    if ptr.dtype == torch.int32 and num_edges > (1 << 31) - 1 - cut - NARROW:
        ptr = ptr.long()  # lockstep goes past the last edge
    num_hubs = int((degree > cut).sum())
    longest, order = order[:num_hubs], order[num_hubs:].to(ptr.dtype)
    row = order if numbers is None else numbers[order.long()].to(ptr.dtype)
    rows = Units(ptr[:-1][order.long()], ptr[1:][order.long()], row, row)
    if num_hubs == 0:
        return Work(rows, filled, None)
    count = -(-degree[longest] // cut)
    pieces_ptr = torch.cat([count.new_zeros(1), count.cumsum(0)]).to(ptr.dtype)
    place = torch.arange(int(count.sum()), device=ptr.device, dtype=ptr.dtype)
    hub = rows_of(pieces_ptr, place).long()
    first = ptr[longest][hub] + (place - pieces_ptr[hub]) * cut
    last = torch.minimum(first + cut, ptr[longest + 1][hub])
    hubs = longest if numbers is None else numbers[longest].long()
    pieces = Units(first, last.to(ptr.dtype), hubs[hub].to(ptr.dtype), place)
    return Work(rows, filled - num_hubs, Hubs(hubs, pieces, pieces_ptr, hub))


def scores_of(value: Tensor, ptr: Tensor, col: Tensor) -> int:
    """Return the number that :func:`launch` is given for all scores of a block: about its units, by row or column."""
    return max(value.size(0), ptr.numel()) + col.numel() // CUT


def power_of_2(n: int) -> int:
    """Return the next power of 2; Triton's own, and its ``cdiv``, are functions of kernels, which take microseconds."""
    return 1 << max(n - 1, 0).bit_length()


class Tiles(NamedTuple):
    """What programs take of the columns of a unit.

    Args:
        number: Into how many tiles columns are cut.
        heads: The heads of a tile, 0 where columns have none.
        width: The columns of a tile, or of one of its heads.
    """

    number: int
    heads: int
    width: int


def tiles(width: int) -> Tiles:
    """Return tiles of columns that do not depend on each other."""
    return Tiles(-(-width // COLUMNS), 0, min(width, COLUMNS))


def head_tiles(heads: int, channels: int, least: int = 1) -> Tiles:
    """Return tiles of as many heads as have about :data:`COLUMNS` columns, or ``least``, if there are so many."""
    some = min(max(COLUMNS // power_of_2(channels), least), power_of_2(heads))
    return Tiles(-(-heads // some), some, channels)


def launch(
    kernel: Any, units: Units, count: int, tiles: Tiles, *args: Any, programs: int = 1 << 31, scores: int = 0,
    **settings: Any,
) -> None:  # fmt: skip
    """Run a kernel on ``count`` units, times tiles, in so many programs for each of these at most.

    Kernels that make ``scores`` must make the same ones, to the last digit: they are given the same number, and so have
    tiles of the same shape, and no product is fused with the difference that follows. Those that know of a number of
    edges at a time, ``K``, or of loads :data:`AHEAD` are given one.
    """
    columns, heads, width = tiles
    if count == 0 or columns == 0:
        return
    c = power_of_2(width)
    cells = c * max(heads, 1)
    if "K" in kernel.arg_names:
        settings["K"] = NARROW if cells <= NARROW else 1
        cells *= settings["K"]
    if "AHEAD" in kernel.arg_names:
        settings["AHEAD"] = AHEAD if settings["K"] == settings["heads"] == 1 else 1
    r = min(max(CELLS // cells, 1), ROWS, power_of_2(scores or count))
    if heads:
        settings["H"] = heads
    with torch.cuda.device_of(units.first):
        kernel[(min(-(-count // r), programs) * columns,)](
            *args, **units._asdict(), num_units=count, columns=columns, **settings, R=r, C=c, num_warps=WARPS,
            enable_fp_fusion=scores == 0,
        )  # fmt: skip
