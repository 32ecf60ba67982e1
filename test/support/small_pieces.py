"""Small pieces: the blocks of the tests' graphs are cut, and sorted, as those of large graphs are."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pyg_sar import csr, pieces, runs
from pyg_sar.distributed import links

ORDINARY = pieces.EDGES
PIECE = csr.PIECE
RANGES = {"SIZE": runs.SIZE, "SIZE_ON_GPU": runs.SIZE_ON_GPU, "OF_TYPE": runs.OF_TYPE}


def make_small() -> None:
    """Cut blocks that have more edges than source rows, and rows with many runs, sort edges and ask for ids piece by
    piece, from now on in this process.
    """
    pieces.EDGES = csr.PIECE = links.IDS = 16
    runs.SIZE, runs.SIZE_ON_GPU, runs.OF_TYPE = 16, 16, 0


@contextmanager
def ordinary_ranges() -> Iterator[None]:
    """Cut no rows of small graphs, where memory is counted: thousands of ranges would take minutes."""
    with mock.patch.multiple(runs, **RANGES), mock.patch.object(csr, "PIECE", PIECE):
        yield
