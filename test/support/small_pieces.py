"""Small pieces: the blocks of the tests' graphs are cut as those of large graphs are."""

from pyg_sar import pieces, runs

ORDINARY = pieces.EDGES


def make_small() -> None:
    """Cut blocks that have more edges than source rows, and rows with many runs, from now on in this process."""
    pieces.EDGES = 16
    runs.SIZE, runs.SIZE_ON_GPU, runs.OF_TYPE = 16, 16, 0
