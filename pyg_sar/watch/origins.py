r"""From which loaded data rows are: those of two partitions of one graph may be as many, but of other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.operations import sharded
from pyg_sar.structure import tensors
from pyg_sar.watch.kinds import Local

ADVICE = (
    "Take all of them from the data of one 'pyg_sar.load'. To have several sets of edges over the same nodes, give "
    "'partition' the same assignment and order for all (method=part, order='id'), or make them edge types of one graph"
)


class Origin:
    """Loaded data, by the ids of the rows of each type of nodes."""

    def __init__(self, data: Any) -> None:
        self.ids: dict[Any, Tensor] = {store._key: store["n_id"] for store in data.node_stores}

    def apart(self, other: Origin) -> str:
        """Return for which nodes rows are others than those of other data, if there are any."""
        for key, mine in self.ids.items():
            theirs = other.ids.get(key, mine)
            if theirs.shape != mine.shape:
                return f"{mine.numel()} nodes and {theirs.numel()} nodes"
            if not torch.equal(mine, theirs):
                row = int((mine != theirs).nonzero()[0])
                return f"row {row} is node {int(mine[row])} in one and node {int(theirs[row])} in the other"
        return ""


class Origins:
    """Knows the origin of rows, and of graphs by the ids of their local nodes."""

    def __init__(self) -> None:
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.compared: dict[tuple[Origin, Origin], str] = {}

    def load(self, data: Any) -> Origin:
        """Remember loaded data, by its graphs, and return what its rows come from."""
        origin = Origin(data)
        for store in data.edge_stores:
            self.known[store.edge_index.graph.n_id] = origin
        return origin

    def of(self, *values: Any) -> list[Origin]:
        """Return the origins of rows and graphs among some values, each of them once."""
        return list(dict.fromkeys(origin for t in keys(*values) if (origin := self.known.get(t)) is not None))

    def join(self, *values: Any) -> Origin | None:
        """Return the origin of what a function makes of some values; refuse those whose rows are of other nodes."""
        found = self.of(*values)
        for pair in combinations(found, 2):
            if pair not in self.compared:
                self.compared[pair] = pair[0].apart(pair[1])
            if told := self.compared[pair]:
                raise Local(f"joins rows of two partitions, which are of other nodes: {told}", ADVICE)
        return found[0] if found else None


def keys(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors by which origins are known."""
    for t in tensors(*values):
        graph = next((it._graph for it in sharded(t)), None)
        if graph is None:
            yield t
        elif graph.n_id is not None:
            yield graph.n_id
