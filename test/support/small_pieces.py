"""Small pieces: the blocks of the tests' graphs are cut as those of large graphs are."""

from pyg_sar import pieces

ORDINARY = pieces.EDGES


def make_small() -> None:
    """Cut blocks that have more edges than source rows, from now on in this process."""
    pieces.EDGES = 16
