r"""From which loaded data rows are: those of two partitions of one graph may be as many, but of other nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.operations import EdgeNumbers
from pyg_sar.structure import tensors
from pyg_sar.watch.kinds import LocalUse

ADVICE = (
    "Take all of them from the data of one 'pyg_sar.load'. To have several sets of edges over the same nodes, give "
    "'partition' the same assignment and order for all (method=part, order='id'), or make them edge types of one graph"
)


class Origin:
    """The nodes of a type in loaded data, by their ids."""

    def __init__(self, kind: Any, ids: Tensor) -> None:
        self.kind, self.ids = kind, ids

    def apart(self, other: Origin) -> str:
        """Return how rows differ from those of the same type in other data, if they do."""
        if self.kind != other.kind:
            return ""
        if self.ids.shape != other.ids.shape:
            return f"{self.ids.numel()} nodes and {other.ids.numel()} nodes"
        if torch.equal(self.ids, other.ids):
            return ""
        row = int((self.ids != other.ids).nonzero()[0])
        return f"row {row} is node {int(self.ids[row])} in one and node {int(other.ids[row])} in the other"


Known = tuple[Origin, ...]  # of the rows of a tensor, which may be made of several types of nodes


class Origins:
    """Knows the origins of rows, and of graphs by the ids of their sources and of their edges."""

    def __init__(self) -> None:
        self.known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.ids: WeakIdKeyDictionary = WeakIdKeyDictionary()  # `n_id` and `e_id` of loaded data by type, and parts
        self.pairs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the types of the nodes that pairs are of
        self.compared: dict[tuple[Origin, Origin], str] = {}

    def load(self, data: Any) -> dict[Any, Origin]:
        """Remember loaded data, by its graphs, and return the origins of its types of nodes."""
        found = {store._key: Origin(store._key, store["n_id"]) for store in data.node_stores}
        for store in (*data.node_stores, *data.edge_stores):
            self.ids.update({store[key]: store._key for key in ("n_id", "e_id") if key in store})
            if isinstance(store._key, tuple):
                pairs = [value for key, value in store.items() if key.endswith("edge_label_index")]
                self.pairs.update(dict.fromkeys(pairs, store._key[::2]))
        for store in data.edge_stores:
            ends = (None,) if store._key is None else (store._key[0], store._key[2])
            graph = store.edge_index.graph
            self.known[graph.n_id] = (found[ends[0]],)
            self.known[graph.e_id] = tuple(found[end] for end in dict.fromkeys(ends))
        return found

    def check_pairs(self, pairs: Tensor, ids: Sequence[Tensor]) -> None:
        """Refuse to look for pairs of nodes of some types among the ids of other types."""
        found = [self.ids.get(of_nodes) for of_nodes in ids]
        for expected, kind in zip(self.pairs.get(pairs, ()), found, strict=False):
            if isinstance(kind, str) and kind != expected:
                one, other = self.pairs[pairs]
                raise ValueError(
                    f"Expected the ids of nodes of types '{one}' and '{other}', of which the pairs are (got those of "
                    f"{' and '.join(map(repr, found))}). Take '(data[{one!r}].n_id, data[{other!r}].n_id)'."
                )

    def join(self, *values: Any, compares: bool = False) -> Known:
        """Return the origins of what a function makes of some values; refuse rows of other nodes. Functions that may
        compare numbers of nodes (``compares``) take those of any data.
        """
        found: dict[Origin, bool] = {}
        for t, of_graph in keys(*values):
            rows = of_graph or not (compares and t in self.ids)
            found |= {origin: rows or found.get(origin, False) for origin in self.known.get(t, ())}
        mixed = False
        for one, other in combinations(found, 2):
            if (one, other) not in self.compared:
                self.compared[one, other] = one.apart(other)
            told = self.compared[one, other]
            if told and found[one] and found[other]:
                raise LocalUse(f"joins rows of two partitions, which are of other nodes: {told}", ADVICE)
            mixed = mixed or bool(told)
        return () if mixed else tuple(found)


def keys(*values: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors by which origins are known, and whether that is a graph's."""
    for t in tensors(*values):
        if isinstance(t, EdgeNumbers):
            yield from ((ids, True) for ids in (t._graph.n_id, t._graph.e_id) if isinstance(ids, Tensor))
        else:
            yield t, False
