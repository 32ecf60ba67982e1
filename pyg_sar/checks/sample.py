r"""A small random graph that has the attributes of a given one, as a whole and in parts.

It has what goes wrong: self-loops, one edge several times, isolated nodes, nodes without in-edges; workers that hold
very different numbers of nodes and labels; and labels of which the largest is on the first worker alone. Rows are drawn
from those that are given, so that labels, types and ids stay valid.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_sar.data.attributes import belongs, full_name, integers, leaves, meaning, stem_of
from pyg_sar.edge_index import ShardedEdgeIndex

NODES, EDGES, LISTED = 40, 200, 31  # of the first type; ids in a list of them
OWN = ("n_id", "e_id", "total_nodes", "num_nodes", "edge_index")
LISTS = ("node_ids", "edge_ids", "pairs")


class Sample:
    """A small random graph with the attributes of ``data``, in a floating-point type if one is given; if a model has a
    table with a row for each node, of one of the lengths ``tables``, then there are as many nodes as in ``data``.
    """

    def __init__(self, data: Any, tables: set[int], dtype: torch.dtype | None) -> None:
        self.random, self.dtype, self.given = torch.Generator().manual_seed(7), dtype, data
        self.hetero = hasattr(data, "node_types")
        self.whole = copy.copy(data)
        # By type, which is None if there is but one.
        self.first = {store._key: self.nodes(store, k, tables) for k, store in enumerate(data.node_stores)}
        self.lists = list(self.find_lists(data))
        self.listed = {n: min(n, LISTED) for _, _, n in self.lists}  # the lengths that lists get
        for store, given in zip(self.whole.stores, data.stores, strict=True):
            for key in set(store.keys()) - dict(attributes(store)).keys():
                del store[key]
            if self.hetero and store._key is None:
                self.fill(store, given, {})
        self.edges()
        for store, given in zip(self.whole.node_stores, data.node_stores, strict=True):
            first = self.first[store._key]
            store.num_nodes = first.numel()
            self.fill(store, given, {"node": first} | ({} if self.hetero else {"edge": first[store.edge_index[1]]}))

    def nodes(self, store: Any, k: int, tables: set[int]) -> Tensor:
        """Return which of the nodes of a type are on the first worker."""
        total = total_nodes(store)
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
        for k, (store, given) in enumerate(zip(self.whole.edge_stores, self.given.edge_stores, strict=True)):
            source, target = (self.first[store._key[end] if self.hetero else None] for end in (0, -1))
            count = EDGES + 7 * k if given.num_edges else 0
            store.edge_index = self.random_edges(source.numel(), target.numel(), count, source is target)
            if self.hetero:
                self.fill(store, given, {"edge": target[store.edge_index[1]]})

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

    def find_lists(self, data: Any) -> Iterator[tuple[Any, set[str], int]]:
        """Yield of each list of ids the type, the words that names of what belongs to its entries have, the length."""
        for store in data.stores:
            for path, ids in (leaf for key, value in attributes(store) for leaf in leaves((key,), value)):
                if meaning(store, path, ids)[0] in LISTS:
                    yield store._key, stem_of(path), ids.size(-1)

    def is_listed(self, given: Any, path: tuple[str, ...], value: Tensor) -> bool:
        """Whether a tensor belongs to a list, as ``edge_label`` to ``edge_label_index``, also if it is as long as there
        are nodes or edges, see :mod:`pyg_sar.data.attributes`.
        """
        if not value.dim():
            return False
        lists = (stem for key, stem, n in self.lists if key == given._key and value.size(0) in (n, self.listed[n]))
        return any(belongs(path, stem) for stem in lists)

    def fill(self, store: Any, given: Any, first: dict[str, Tensor]) -> None:
        """Set the attributes of a type, given which nodes and edges of it are on the first worker."""
        for key, value in attributes(given):
            made = self.like(given, (key,), value, first)
            if self.dtype and isinstance(made, Tensor) and made.is_floating_point():
                made = made.to(self.dtype)
            store[key] = made

    def like(self, given: Any, path: tuple[str, ...], value: Any, first: dict[str, Tensor]) -> Any:
        """Return random values of an attribute."""
        if isinstance(value, dict):
            return {k: self.like(given, (*path, str(k)), v, first) for k, v in value.items()}
        if not isinstance(value, Tensor):
            return copy.copy(value)
        value = value.detach().cpu()
        level, dim = meaning(given, path, value)
        if level in first and not self.is_listed(given, path, value):
            return self.rows(value, (dim or 0) % value.dim(), first[level])
        if level in LISTS:
            shape = (*value.shape[:-1], self.listed[value.size(-1)])
            return (torch.rand(shape, generator=self.random, dtype=torch.float64) * self.counts(given, shape)).long()
        return value[: self.listed.get(value.size(0))].clone() if value.dim() > 0 else value.clone()

    def counts(self, given: Any, shape: tuple[int, ...]) -> Tensor:
        """Return how many nodes there are of the types that ids, or pairs of ids, of a type's attribute are of."""
        kind, count = given._key, {t: max(first.numel(), 1) for t, first in self.first.items()}
        if isinstance(kind, tuple) and len(shape) == 2 and 2 in shape:
            return torch.tensor([count[kind[0]], count[kind[-1]]]).view([-1, 1] if shape[0] == 2 else [-1])
        return torch.tensor(count[kind] if isinstance(kind, str) else min(count.values(), default=1))

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
        for store in data.node_stores:
            store.n_id, store.total_nodes = torch.arange(store.num_nodes), store.num_nodes
        for store in data.edge_stores:
            store.e_id = torch.arange(store.edge_index.size(1))
        return data

    def write(self, folder: Path, parts: int) -> None:
        """Write it as a partition."""
        from pyg_sar.data.partition import partition

        with warnings.catch_warnings():  # of what is left out, or has ids: that was told when the graph was partitioned
            warnings.simplefilter("ignore")
            partition(
                copy.copy(self.whole), parts, folder, method=self.part(parts), order="id", levels=dict(self.levels())
            )

    def levels(self) -> Iterator[tuple[str, str]]:
        """Yield the integers that would have to be explained, as they were when the graph was partitioned."""
        for store in self.whole.stores:
            for key, value in attributes(store):
                plain = integers(value) and value.dim() > 0 and not self.is_listed(store, (key,), value)
                if plain and meaning(store, (key,), value)[0] == "graph":
                    yield full_name(store, key), "graph"

    def complete(self, data: Any) -> Any:
        """Give a loaded part what was put into the graph after it was loaded, too."""
        if any(isinstance(store.edge_index, ShardedEdgeIndex) for store in self.given.edge_stores):
            for store, whole in zip(data.stores, self.whole.stores, strict=True):
                for key, value in whole.items():
                    if key not in store:
                        store[key] = copy.deepcopy(value)
        return data


def attributes(store: Any) -> list[tuple[str, Any]]:
    """Return what was given of nodes or edges, besides their edges and ids."""
    return [(k, v) for k, v in store.items() if k not in OWN and not isinstance(v, ShardedEdgeIndex)]


def total_nodes(store: Any) -> int:
    """Return how many nodes of a type there are on all workers."""
    return int(store.get("total_nodes") or store.num_nodes or 0)


def ids_of(data: Any) -> dict[Any, Tensor]:
    """Return the global ids of the rows of every type of nodes and edges."""
    nodes = {store._key or "nodes": store.n_id for store in data.node_stores}
    return nodes | {store._key or "edges": store.e_id for store in data.edge_stores}
