"""Tests on simulated workers: threads of this process, which start at once."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyg_sar import ShardedEdgeIndex
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.simulated import Workers


def simulate(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what ``work(rank)`` returns on each worker, or raise what the first of them raised."""
    results = Workers(size).run(work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def raised(size: int, work: Callable[[int], Any]) -> list[str]:
    """Return the message of the error that each worker must raise."""
    results = Workers(size).run(work)
    assert all(isinstance(result, Exception) for result in results), results
    return [str(result) for result in results]


class Cut:
    """A graph cut for several workers: ``ids[rank]`` are the nodes of each, in the order of its rows."""

    def __init__(self, edge_index: Tensor, part: Tensor, size: int) -> None:
        self.topologies = list(split(edge_index, part, part, size))
        self.ids = [topology.src_id for topology in self.topologies]

    def edge_index(self, rank: int) -> ShardedEdgeIndex:
        """Return a worker's share, to be called by it."""
        return ShardedEdgeIndex(assemble(self.topologies[rank], rank))
