r"""One worker's row of the block matrix, as :class:`ShardedGraph`; graphs made of it are in :mod:`pyg_sar.rewire`.

Index arithmetic, and what was made of cached input features; nothing here communicates. Source rows are numbered
*local-first*: a worker's local rows are :math:`0 \ldots n-1`, the rows it reads from others follow, grouped by owner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.block import Block, Index, ordinary_mode, put_rows, rows_at
from pyg_sar.exchange import Exchange
from pyg_sar.memo import Memo

T = TypeVar("T")


class Origin(NamedTuple):
    """What a graph of some destinations was made from: a layer of a message-flow graph, or a range of destinations.

    Args:
        graph: The graph with all destinations.
        rows: The rows there of the local sources.
        looped: Whether exactly one self-loop was added at every destination, unlike in ``graph``.
        given: How many rows a layer of a message-flow graph has of the set of nodes that destinations are the first of.
    """

    graph: ShardedGraph
    rows: Index
    looped: bool = False
    given: int | None = None


class EdgeIds:
    """Ids of edges that are made when they are asked for, and kept: only dropout reads them."""

    @cached_property
    @ordinary_mode
    def ids(self) -> Tensor:
        """The ids."""
        return self.make()

    def make(self) -> Tensor:
        """Return them."""
        raise NotImplementedError


def made(e_id: Tensor | EdgeIds | None) -> Tensor | None:
    """Return ids of edges that may be yet to be made."""
    return e_id.ids if isinstance(e_id, EdgeIds) else e_id


@dataclass(frozen=True, eq=False)
class SomeIds(EdgeIds):
    """Ids of some edges.

    Args:
        e_id: Those of all edges, or None if they are ``0, 1, ...``.
        edges: Where these have them.
    """

    e_id: Tensor | EdgeIds | None
    edges: Tensor

    def make(self) -> Tensor:
        """Choose them."""
        every = made(self.e_id)
        return self.edges if every is None else every[self.edges]


class Seeds:
    """RNG seeds that are the same on every worker, because every worker draws from it in the same order.

    Args:
        seed: Where the seeds start; None takes seeds from PyTorch's generator, for graphs of a single process.
    """

    def __init__(self, seed: int | None) -> None:
        self.replayed: tuple[list[int], Iterator[int]] | None = None
        self.manual_seed(seed)

    def manual_seed(self, seed: int | None) -> None:
        """Start anew from ``seed``."""
        self.seed, self.drawn = seed, 0

    @contextmanager
    def replay(self, drawn: list[int]) -> Iterator[None]:
        """Draw the seeds of a list again, in their order; once these are used up, append those that are drawn.

        What runs for one chunk of destinations after the other, or again in a backward pass, so drops the same edges:
        it runs with the same list, which is empty at first.
        """
        before, self.replayed = self.replayed, (drawn, iter(list(drawn)))
        try:
            yield
        finally:
            self.replayed = before

    def draw(self) -> int:
        """Return the next seed, of the list that is replayed if there is one."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Dropout of a graph cannot be captured in a CUDA graph, each replay of which would drop the same edges."
            )
        if self.replayed is None:
            return self._next()
        drawn, again = self.replayed
        seed = next(again, None)
        if seed is None:
            drawn.append(seed := self._next())
        return seed

    def _next(self) -> int:
        """Return a new seed; refuse to be run once more in a backward pass, which would need the same one again."""
        if self.seed is None:
            return int(torch.randint(1 << 62, (), device="cpu"))
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "Dropout of a graph cannot be recomputed by 'torch.utils.checkpoint'. Leave the layer out of it: on a "
                "sharded graph it keeps no messages anyway."
            )
        self.drawn += 1
        return (self.seed * 0x9E3779B1 + self.drawn) % (1 << 62)


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """All in-edges of this worker's destinations, cut into one :class:`Block` for each source shard.

    The SAR modes are two choices, not a flag: mode 1 fetches source rows again in the backward pass (``remat=True``),
    mode 2 keeps them (``replace(remat=False)``), and mode 3 has a single source block (:meth:`merge`).

    Args:
        blocks: ``blocks[q]`` holds the edges whose sources live on shard ``q``.
        num_src: Number of source rows that this worker owns.
        num_dst: Number of destinations that this worker owns.
        exchange: Where the source rows live, see :mod:`pyg_sar.exchange`.
        remat: Whether backward fetches source rows again (mode 1) instead of keeping them (mode 2).
        n_id: Global ids of the local source rows, or None if they are ``0 ... num_src - 1``.
        e_id: Global ids of the edges, or None if they are ``0 ... num_edges - 1`` (:func:`edge_ids`).
        seeds: Source of the seeds for attention dropout.
        dst: Which of the local source rows are the destinations: all of them, unless there is an ``origin``. None if
            sources and destinations are different sets of nodes, whatever their numbers.
        cached: Input features that never change, and what was made of them (:meth:`recall`).
        origin: What a graph with some of the destinations was made from, or None.
        ends: The types of sources and of destinations in heterogeneous data; of several types one after the other, a
            tuple. None if that is not known.
    """

    blocks: tuple[Block, ...]
    num_src: int
    num_dst: int
    exchange: Exchange
    remat: bool = True
    n_id: Tensor | None = None
    e_id: Tensor | EdgeIds | None = None
    seeds: Seeds = field(default_factory=lambda: Seeds(0))
    dst: slice | None = field(kw_only=True)
    cached: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)
    origin: Origin | None = None
    ends: tuple[Any, Any] | None = None
    memo: Memo = field(default_factory=Memo, init=False, repr=False)

    @property
    def num_edges(self) -> int:
        """Number of edges that end on this worker."""
        return sum(block.num_edges for block in self.blocks)

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.blocks[0].col.device

    @property
    def bipartite(self) -> bool:
        """Whether sources and destinations are different sets of nodes."""
        return self.dst is None

    def derived(self, key: Hashable, make: Callable[[], T], of: Tensor | None = None) -> T:
        """Return what ``make`` makes of this graph, and perhaps of a tensor of integers; it is made once and kept, see
        :class:`~pyg_sar.memo.Memo`.
        """
        return self.memo.get(key, make, of)

    @property
    def degree(self) -> Tensor:
        """In-degree of every destination; global, because a worker holds all in-edges of its destinations."""

        def count() -> Tensor:
            degree = torch.zeros(self.num_dst, dtype=torch.int64, device=self.device)
            for block in self.blocks:  # one after the other: all together are as long as the graph has nodes
                degree += block.degree
            return degree

        return self.derived("degree", count)

    @property
    def loops(self) -> Tensor:
        """Number of self-loops of every destination."""

        def count() -> Tensor:
            assert self.dst is not None
            start = self.dst.start
            rows = [block.narrow_row[block.loops(start)] for block in self.blocks]
            return torch.bincount(torch.cat(rows), minlength=self.num_dst)

        return self.derived("loops", count)

    @property
    def source_degree(self) -> Tensor:
        """Global in-degree of every local source, also of those that are no destinations here."""
        if self.origin is None:
            return self.degree
        whole, rows, looped, _ = self.origin
        return self.derived(
            "source degree",
            lambda: (whole.degree - whole.loops + 1 if looped else whole.degree)[rows].to(self.device),
        )

    def dst_rows(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return those rows of local sources that are destinations; the first ones if these are another set of nodes,
        which is how PyG reads a single tensor for both.
        """
        rows = slice(0, self.num_dst) if self.dst is None else self.dst
        index = (*[slice(None)] * (dim % x.dim()), rows)
        return x[index]

    def rows(self, start: int, end: int) -> ShardedGraph:
        """Return the graph of a range of destinations, with the same sources and the same exchange.

        Layers take the pair ``(x, graph.dst_rows(x))`` on it, and of tensors of edges the rows :meth:`edge_rows`.
        """
        if not 0 <= start <= end <= self.num_dst:
            raise ValueError(f"Expected a range of the {self.num_dst} destinations (got {start} to {end})")
        blocks, first, edges = [], 0, self.edge_rows(start, end)
        for block in self.blocks:
            some = block.rows(start, end)
            blocks.append(dataclasses.replace(some, edges=slice(first, first := first + some.num_edges)))
        return self.replace(
            blocks=tuple(blocks),
            num_dst=end - start,
            dst=None if self.dst is None else slice(self.dst.start + start, self.dst.start + end),
            e_id=SomeIds(self.e_id, edges),
            origin=self.origin or Origin(self, slice(None)),
        )

    def edge_rows(self, start: int, end: int) -> Tensor:
        """Return where the worker's edge tensors hold the edges of :meth:`rows`."""
        return torch.cat([positions(block.rows(start, end)) for block in self.blocks])

    def ids_of(self, block: Block) -> Tensor:
        """Return the global ids of the edges of a block."""
        return positions(block) if self.e_id is None else rows_at(edge_ids(self), block.edges)

    def is_cached(self, x: Tensor) -> bool:
        """Whether ``x`` is a cached input feature and has no gradient."""
        return x in self.cached and not x.requires_grad

    def learns(self, x: Tensor) -> bool:
        """Whether rows have gradients, or count as such: with a history, a pass without any chooses as others do."""
        return x.requires_grad or self.exchange.remembers

    def recall(self, x: Tensor, owner: Any, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; if ``x`` is cached, it is made once for ``key`` and kept as long as ``x`` and
        ``owner`` live, and as long as nobody changes what was returned.
        """
        if not self.is_cached(x):
            return make()
        version, owners = self.cached[x]
        if version != x._version:
            self.cached[x] = x._version, (owners := WeakKeyDictionary())
        kept = owners.setdefault(owner, {})
        value, changes = kept.get(key, (None, None))
        if changes is None or changes != getattr(value, "_version", 0):
            with torch.inference_mode(False):
                value = make()
            kept[key] = value, getattr(value, "_version", 0)
        return value

    def replace(self, **changes: Any) -> ShardedGraph:
        """Return a copy in which the given fields differ, and for which nothing was derived."""
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device | str) -> ShardedGraph:
        """Move the index tensors to ``device``."""
        ids = self.n_id, None if self.e_id is None else edge_ids(self)
        n_id, e_id = (None if t is None else t.to(device) for t in ids)
        blocks = tuple(block.to(device) for block in self.blocks)
        return self.replace(blocks=blocks, exchange=self.exchange.to(device), n_id=n_id, e_id=e_id)

    def memory(self) -> dict[str, int]:
        """Return the bytes that the topology holds, memory that is shared counted once.

        ``blocks``, their ``transposes`` (made in the first backward pass), ``ids`` of nodes and edges, the rows to
        ``serve``, what is kept of ``cached`` features, and all that was ``derived`` (degrees, self-loops, one-shot
        blocks, edge types, reversed and joined graphs), with what was derived of that; but not the chunks of
        :func:`pyg_sar.offload`, which are at home with the rows, even if that is in memory.
        """
        seen: set[int] = set()
        return {kind: _bytes(tensors, seen) for kind, tensors in self._tensors().items()}

    def _tensors(self) -> dict[str, list[Tensor]]:
        held = {
            "blocks": [getattr(b, f.name) for b in self.blocks for f in dataclasses.fields(b)],
            "transposes": [b.__dict__.get(name) for b in self.blocks for name in ("by_source", "perm")],
            "ids": [self.n_id, self.e_id],
            "serve": self.exchange.routes.serve,
            "cached": self.cached,
            "derived": [self.memo.values, self.memo.of_tensors],
        }
        return {kind: list(_tensors_in(values)) for kind, values in held.items()}

    def coo(self) -> Tensor:
        """Return the edges as ``[2, num_edges]``: local-first sources and destinations, in the worker's edge order."""
        out = torch.empty(2, self.num_edges, dtype=torch.int64, device=self.device)
        for block in self.blocks:
            put_rows(out[0], block.edges, block.source)
            put_rows(out[1], block.edges, block.row)
        return out

    @property
    def row(self) -> Tensor:
        """Destination of each edge, in the worker's edge order."""
        out = torch.empty(self.num_edges, dtype=torch.int64, device=self.device)
        for block in self.blocks:
            put_rows(out, block.edges, block.row)
        return out

    def merge(self) -> ShardedGraph:
        """Return the same graph with one source block, whose rows are fetched one-shot (mode 3)."""
        return self.derived("one-shot", self._merge)

    def _merge(self) -> ShardedGraph:
        exchange = self.exchange.one_shot()
        source, row = self.coo()
        position = torch.arange(self.num_edges, device=self.device)
        num_src = self.num_src + exchange.routes.num_halo
        block = Block.from_coo(row, source, slice(0, num_src), num_src, self.num_dst, position)
        return self.replace(blocks=(block,), exchange=exchange, remat=False)


def positions(block: Block) -> Tensor:
    """Return where the edges of a block are among those of the worker."""
    if isinstance(block.edges, Tensor):
        return block.edges.long()
    return torch.arange(block.edges.start, block.edges.stop, device=block.col.device)


def edge_ids(graph: ShardedGraph) -> Tensor:
    """Return the global ids of a graph's edges."""
    e_id = made(graph.e_id)
    return torch.arange(graph.num_edges, device=graph.device) if e_id is None else e_id


def _bytes(tensors: list[Tensor], seen: set[int]) -> int:
    """Return the bytes of tensors whose memory was not seen before."""
    total = 0
    for storage in (t.untyped_storage() for t in tensors):
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in graphs, in what is made of them, and in collections."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ShardedGraph):
        yield from _tensors_in(value._tensors())
    elif dataclasses.is_dataclass(value):  # a block, runs, ids
        yield from _tensors_in(vars(value))
    elif isinstance(value, (Mapping, list, tuple)):
        for v in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(v)
