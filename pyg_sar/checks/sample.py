r"""A small random graph that has the attributes of a given one, as a whole and in parts.

It has what goes wrong: self-loops, one edge several times, isolated nodes, nodes without in-edges; workers that hold
very different numbers of nodes and labels; and labels of which the largest is on the first worker alone. Rows are drawn
from those that are given, so that labels, types and ids stay valid.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_sar.data.attributes import leaves, meaning
from pyg_sar.edge_index import ShardedEdgeIndex

NODES, EDGES, LISTED = 40, 200, 31  # of the first type; ids in a list of them
OWN = ("n_id", "e_id", "total_nodes", "num_nodes", "edge_index")
LISTS = ("node_ids", "edge_ids", "pairs")


class Sample:
    """A small random graph.

    Args:
        data: The graph whose attributes it gets, as loaded or as a whole.
        tables: Numbers of rows that a model has one for each node of: then there are as many nodes as in ``data``.
        dtype: The type of floating-point attributes; None: their own.
    """

    def __init__(self, data: Any, tables: set[int], dtype: torch.dtype | None) -> None:
        self.random, self.dtype, self.given = torch.Generator().manual_seed(7), dtype, data
        self.hetero = hasattr(data, "node_types")
        self.whole = copy.copy(data)
        types = data.node_types if self.hetero else [None]
        stores = {t or "nodes": self.node_store(data, t) for t in types}
        # Of the given graph, by the names of 'ids_of'.
        self.counts = {t: int(store.get("total_nodes") or store.num_nodes or 0) for t, store in stores.items()}
        self.first = {t: self.nodes(self.node_store(data, t), k, tables) for k, t in enumerate(types)}
        self.listed = self.lists(data)
        for store, given in zip(self.whole.stores, data.stores, strict=True):
            for key in [key for key in OWN if key in store]:
                del store[key]
            for key in [key for key, value in store.items() if isinstance(value, ShardedEdgeIndex)]:
                del store[key]
            if self.hetero and store._key is None:
                self.fill(store, given, None, None)
        self.edges()
        for t, first in self.first.items():
            self.node_store(self.whole, t).num_nodes = first.numel()
            self.fill(self.node_store(self.whole, t), self.node_store(data, t), first, None)

    @staticmethod
    def node_store(data: Any, node_type: str | None) -> Any:
        """Return the attributes of nodes."""
        return data._store if node_type is None else data[node_type]

    def nodes(self, store: Any, k: int, tables: set[int]) -> Tensor:
        """Return which of the nodes of a type are on the first worker."""
        total = int(store.get("total_nodes") or store.num_nodes or 0)
        count = total if total in tables else min(NODES + 3 * k, total)
        first = torch.rand(count, generator=self.random) < 0.7
        first[:1], first[1:3] = True, False
        return first

    def part(self, parts: int) -> Any:
        """Return the part of every node; the first one is always the same."""
        found = {t: torch.where(first, 0, 1) for t, first in self.first.items()}
        if parts == 1:
            found = {t: torch.zeros_like(part) for t, part in found.items()}
        for part in found.values():  # every fourth of the others' nodes is on the third worker
            others = (part == 1).nonzero().view(-1)[1::4]
            part[others] = min(parts, 3) - 1
        return found if self.hetero else found[None]

    def edges(self) -> None:
        """Draw the edges of every type."""
        types = self.given.edge_types if self.hetero else [None]
        for k, it in enumerate(types):
            store = self.whole._store if it is None else self.whole[it]
            given = self.given._store if it is None else self.given[it]
            source, target = (self.first[None if it is None else it[end]] for end in (0, 2))
            count = EDGES + 7 * k if given.num_edges else 0
            store.edge_index = self.random_edges(source.numel(), target.numel(), count, source is target)
            if self.hetero:
                on_first = target[store.edge_index[1]]
                self.fill(store, given, None, on_first)

    def random_edges(self, num_src: int, num_dst: int, count: int, loops: bool) -> Tensor:
        """Draw edges of a type."""
        if min(num_src, num_dst) == 0:
            return torch.empty(2, 0, dtype=torch.int64)
        edges = torch.stack([torch.randint(n, (count,), generator=self.random) for n in (num_src, num_dst)])
        if num_dst > 8:
            row = edges[1]
            row[row % 7 == 3] -= 1  # nodes without in-edges
            edges[edges == torch.tensor([[num_src - 1], [num_dst - 1]])] = 0  # and some without any edges
        edges[:, : count // 10] = edges[:, count // 10 : 2 * (count // 10)]  # the same edges once more
        if loops:
            edges[0, -6:] = edges[1, -6:]
            edges[:, -1:] = edges[:, -2:-1]
        return edges

    def lists(self, data: Any) -> dict[int, int]:
        """Return the lengths of lists of node ids, and of what belongs to their entries, and those that they get."""
        lengths = set()
        for store in data.stores:
            given = [(k, v) for k, v in store.items() if k not in OWN and not isinstance(v, ShardedEdgeIndex)]
            values = [leaf for key, value in given for leaf in leaves((key,), value)]
            lengths |= {value.size(-1) for path, value in values if meaning(store, path, value)[0] in LISTS}
        return {n: min(n, LISTED) for n in lengths}

    def fill(self, store: Any, given: Any, nodes: Tensor | None, edges: Tensor | None) -> None:
        """Set the attributes of a type, given which nodes or edges are on the first worker."""
        for key, value in list(given.items()):
            if key not in OWN and not isinstance(value, ShardedEdgeIndex):
                store[key] = self.typed(self.like(given, (key,), value, nodes, edges))

    def typed(self, value: Any) -> Any:
        """Return floating-point numbers in the type that is asked for."""
        return value.to(self.dtype) if self.dtype and isinstance(value, Tensor) and value.is_floating_point() else value

    def like(self, given: Any, path: tuple[str, ...], value: Any, nodes: Tensor | None, edges: Tensor | None) -> Any:
        """Return random values of an attribute."""
        if isinstance(value, dict):
            return {k: self.like(given, (*path, str(k)), v, nodes, edges) for k, v in value.items()}
        if not isinstance(value, Tensor):
            return copy.copy(value)
        value = value.detach().cpu()
        level, dim = meaning(given, path, value)
        if level == "node" and nodes is not None:
            return self.rows(value, (dim or 0) % value.dim(), nodes)
        if level == "edge":
            edges = self.first[None][self.whole.edge_index[1]] if edges is None else edges
            return self.rows(value, (dim or 0) % value.dim(), edges)
        if level in LISTS:
            least = min((first.numel() for first in self.first.values()), default=0)
            return torch.randint(max(least, 1), (*value.shape[:-1], self.listed[value.size(-1)]), generator=self.random)
        if value.dim() > 0 and value.size(0) in self.listed:
            return value[: self.listed[value.size(0)]].clone()
        return value.clone()

    def rows(self, value: Tensor, dim: int, first: Tensor) -> Tensor:
        """Draw rows for nodes or edges, given which of them are on the first worker."""
        count, size = first.numel(), value.size(dim)
        shape = [count if d == dim else n for d, n in enumerate(value.shape)]
        if value.dtype == torch.bool:
            return self.mask(shape, dim, first)
        if size == 0:
            some = torch.rand(shape, generator=self.random)
            return some.to(value.dtype) if value.is_floating_point() else torch.zeros(shape, dtype=value.dtype)
        pick = torch.randint(size, (count,), generator=self.random)
        if not value.is_floating_point() and value.numel() == size:
            smaller = (value.view(-1) < value.max()).nonzero().view(-1)
            if smaller.numel() > 0:
                pick[~first] = smaller[torch.randint(smaller.numel(), (int((~first).sum()),), generator=self.random)]
            pick[first.nonzero().view(-1)[:1]] = value.view(-1).argmax()
        out = value.index_select(dim, pick)
        if value.is_floating_point() and bool((out == out.narrow(dim, 0, min(count, 1))).all()):
            out = out * (1 - 0.1 * torch.rand(shape, generator=self.random)).to(out.dtype)  # rows shall differ
        return out

    def mask(self, shape: list[int], dim: int, first: Tensor) -> Tensor:
        """Draw a mask: most of the first worker's rows, one or few of the others."""
        chance = torch.where(first, 0.6, 0.1).view([-1 if d == dim else 1 for d in range(len(shape))])
        out = torch.rand(shape, generator=self.random) < chance
        for rows in (first, ~first):
            out.index_fill_(dim, rows.nonzero().view(-1)[:1], True)
        return out

    def one(self) -> Any:
        """Return the whole graph, with what :func:`pyg_sar.load` adds."""
        data = copy.deepcopy(self.whole)
        for t in self.first:
            store = self.node_store(data, t)
            store.n_id, store.total_nodes = torch.arange(store.num_nodes), store.num_nodes
        for store in data.edge_stores:
            store.e_id = torch.arange(store.edge_index.size(1))
        return data

    def write(self, folder: Path, parts: int) -> None:
        """Write it as a partition."""
        from pyg_sar.data.partition import partition

        with warnings.catch_warnings():  # of what is left out, or has ids: that was told when the graph was partitioned
            warnings.simplefilter("ignore")
            partition(copy.copy(self.whole), parts, folder, method=self.part(parts), order="id")

    def complete(self, data: Any) -> Any:
        """Give a loaded part what was put into the graph after it was loaded, too."""
        if any(isinstance(store.edge_index, ShardedEdgeIndex) for store in self.given.edge_stores):
            for store, whole in zip(data.stores, self.whole.stores, strict=True):
                for key, value in whole.items():
                    if key not in store:
                        store[key] = copy.deepcopy(value)
        return data


def ids_of(data: Any) -> dict[Any, Tensor]:
    """Return the global ids of the rows of every type of nodes and edges."""
    if not hasattr(data, "node_types"):
        return {"nodes": data.n_id, "edges": data.e_id}
    nodes: dict[Any, Tensor] = {t: data[t].n_id for t in data.node_types}
    return nodes | {it: data[it].e_id for it in data.edge_types}
