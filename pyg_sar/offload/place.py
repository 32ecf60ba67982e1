r"""Where rows of a set of nodes are kept and computed on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.exchange import Exchange
from pyg_sar.graph import Seeds, ShardedGraph
from pyg_sar.offload.home import Home

ALL = ""  # the type of nodes that have no types
CPU = torch.device("cpu")


class NodeSet(NamedTuple):
    """The nodes of one type.

    Args:
        ranges: The rows that are computed on at one time.
        n_id: Global ids of the rows.
    """

    ranges: list[tuple[int, int]]
    n_id: Tensor


class Place(NamedTuple):
    """Where rows of the nodes of a type are kept and computed on.

    Args:
        home: Makes memory for rows.
        device: Computes.
        sets: The nodes of each type, of which there is one without a name if there are no types.
        chunks: In how many ranges they were asked to be cut, of which some would be empty.
        seeds: Of what is dropped.
        exchange: The workers, of which each has some of the rows.
        slots: The most source rows that are fetched at one time; None for no limit.
        copies: Whether what comes to the device is copied, even if that is the CPU: in a dry run for an accelerator.
        type: The type of the nodes; a tuple of types, whose nodes follow each other.
    """

    home: Home
    device: torch.device
    sets: Mapping[str, NodeSet]
    chunks: int
    seeds: Seeds
    exchange: Exchange
    slots: int | None = None
    copies: bool = False
    type: str | tuple[str, ...] = ALL

    @property
    def types(self) -> tuple[str, ...]:
        """The types whose nodes these are."""
        return self.type if isinstance(self.type, tuple) else (self.type,)

    @property
    def parts(self) -> list[Place]:
        """The place of each type."""
        return [self.of(one) for one in self.types]

    @property
    def sizes(self) -> list[int]:
        """The number of this worker's nodes of each type."""
        return [self.sets[one].ranges[-1][1] for one in self.types]

    @property
    def num_rows(self) -> int:
        """The number of this worker's nodes."""
        return sum(self.sizes)

    @property
    def starts(self) -> list[int]:
        """The first row of each type."""
        return [0, *accumulate(self.sizes[:-1])]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The rows that are computed on at one time, none of which are of two types."""
        if isinstance(self.type, str):
            return self.sets[self.type].ranges
        every = zip(self.starts, self.types, strict=True)
        found = [(at + a, at + b) for at, one in every for a, b in self.sets[one].ranges if a < b]
        return found or [(0, 0)]

    @property
    def n_id(self) -> Tensor:
        """Global ids of the nodes of the first type."""
        return self.sets[self.types[0]].n_id

    def ids(self, begin: int, end: int) -> Tensor:
        """Return ids of a range of rows, the same for any number of workers: global ones; of several types, such that
        no two of them are the same.
        """
        if isinstance(self.type, str):
            return self.n_id[begin:end]
        k = bisect_right(self.starts, begin) - 1
        some = self.sets[self.types[k]].n_id[begin - self.starts[k] : end - self.starts[k]]
        return some * len(self.types) + k

    def of(self, type: str | tuple[str, ...]) -> Place:
        """Return the place of nodes of another type."""
        return self._replace(type=type)

    def of_sources(self, graph: ShardedGraph) -> Place:
        """Return the place of the sources of edges."""
        return self.of_end(graph, 0, graph.num_src)

    def of_destinations(self, graph: ShardedGraph) -> Place:
        """Return the place of the destinations of edges."""
        return self.of_end(graph, 1, graph.num_dst)

    def of_end(self, graph: ShardedGraph, end: int, count: int) -> Place:
        """Return the place of one end of edges, which has so many nodes; raise if they are those of other data."""
        if self.type == ALL:
            return self
        type = ALL if graph.ends is None else graph.ends[end]
        found = self.of(type)
        if not self.sets.keys() >= set(found.types) or found.num_rows != count:
            raise ValueError(
                f"Expected an 'edge_index' of the data that 'pyg_sar.offload' returned, for rows at home of "
                f"'{self.type}' (got another one, {('from', 'to')[end]} {count} nodes{type and f' of {type}'})"
            )
        return found

    def bring(self, rows: Tensor) -> Tensor:
        """Return rows on the device."""
        return rows.to(self.device, non_blocking=True, copy=self.copies)

    def settle(self) -> None:
        """Wait for what the device writes to rows at home by itself."""
        if self.home.pinned:
            torch.cuda.synchronize(self.device)

    @property
    def keeps(self) -> bool:
        """Whether source rows stay on the device for the next chunks: where they come from another memory. On a CPU
        they would be copied to another place of the same one, which takes as long and more of it.
        """
        return self.copies or self.device.type != "cpu"
