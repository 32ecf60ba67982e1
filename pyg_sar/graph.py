r"""One worker's row of the block matrix: :class:`Block` and :class:`ShardedGraph`.

Index arithmetic only: nothing here holds features or communicates. Source rows are numbered *local-first*: a worker's
own rows are :math:`0 \ldots n-1`, the rows it reads from others follow, grouped by owner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Index = slice | Tensor
KEPT = 2  # graphs with other edges, which layers make in every step

# For what is made once and kept: it must serve training even if it was first asked for in inference mode.
ordinary_mode = torch.inference_mode(False)


def compress(row: Tensor, num_rows: int) -> Tensor:
    """Return the CSR row pointer of sorted row numbers, in int32 wherever the number of edges allows."""
    ptr = torch.zeros(num_rows + 1, dtype=torch.int64, device=row.device)
    torch.cumsum(torch.bincount(row, minlength=num_rows), 0, out=ptr[1:])
    return ptr if row.numel() > torch.iinfo(torch.int32).max else ptr.int()


def fingerprint(t: Tensor) -> Tensor:
    """Return sums that tell whether somebody changed the integers ``[*]`` or ``[2, *]`` of a tensor, in whatever way.

    Integers of a row are laid out in a square, of which the rows and the columns are added up: any that change change
    two sums, and any that change places. It reads every integer twice, fast compared with what a layer gathers by it,
    and what is kept grows as the square root of their number, where a copy would be as long as they are.
    """
    sums = []
    for row in t.unbind() if t.dim() == 2 else (t,):
        width = max(math.isqrt(row.numel()), 1)
        end = row.numel() // width * width
        square = row[:end].view(-1, width)
        sums += [square.sum(0), square.sum(1), row[end:]]
    return torch.cat(sums)


@dataclass(frozen=True, eq=False)
class Block:
    """The edges from one source shard into this worker's destinations, in CSR order by destination.

    Args:
        rowptr: Row pointer over the destinations, ``[num_dst + 1]``.
        col: Source row of each edge within the shard, ``[num_edges]``.
        ids: Local-first number of each source row of the shard, as a slice or as a tensor ``[num_src]``.
        num_src: Number of source rows of the shard that are read.
        edges: Where the worker's edge tensors hold these edges, in CSR order.
    """

    rowptr: Tensor
    col: Tensor
    ids: Index
    num_src: int
    edges: Index

    @property
    def num_dst(self) -> int:
        """Number of destinations."""
        return self.rowptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.col.numel()

    @property
    def row(self) -> Tensor:
        """Destination of each edge; derived anew at every use because it is as long as the edges."""
        rows = torch.arange(self.num_dst, device=self.col.device)
        return rows.repeat_interleave(self.rowptr.diff(), output_size=self.num_edges)

    @property
    def source(self) -> Tensor:
        """Local-first source number of each edge."""
        return self.col.long() + self.ids.start if isinstance(self.ids, slice) else self.ids[self.col]

    @cached_property
    @ordinary_mode
    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """CSR by source: row pointer, destination of each edge, and its position in the forward order."""
        perm = torch.argsort(self.col, stable=True)
        ptr = compress(self.col[perm], self.num_src)
        narrow = ptr.dtype
        return ptr, self.row[perm].to(narrow), perm.to(narrow)

    @classmethod
    def from_coo(cls, row: Tensor, col: Tensor, ids: Index, num_src: int, num_dst: int, edges: Tensor) -> Block:
        """Sort edges by destination, keeping the given order among the edges of one destination."""
        perm = torch.argsort(row, stable=True)
        rowptr = compress(row[perm], num_dst)
        if num_src > torch.iinfo(torch.int32).max:
            rowptr = rowptr.long()
        return cls(rowptr, col[perm].to(rowptr.dtype), ids, num_src, edges[perm])

    def rows(self, start: int, end: int) -> Block:
        """Return the edges into a range of destinations."""
        first, last = self.rowptr[[start, end]].tolist()
        edges = self.edges
        edges = slice(edges.start + first, edges.start + last) if isinstance(edges, slice) else edges[first:last]
        rowptr = self.rowptr[start : end + 1] - first
        return dataclasses.replace(self, rowptr=rowptr, col=self.col[first:last], edges=edges)

    def choose(self, rows: Tensor) -> Block:
        """Return the edges into some destinations, which become destinations 0, 1, ... in the order given."""
        count = self.rowptr.diff()[rows]
        ptr = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(count, 0, out=ptr[1:])
        position = (self.rowptr[rows] - ptr[:-1]).repeat_interleave(count)
        position += torch.arange(position.numel(), device=rows.device)
        edges = self.edges.start + position if isinstance(self.edges, slice) else self.edges[position]
        return dataclasses.replace(self, rowptr=ptr.to(self.rowptr.dtype), col=self.col[position], edges=edges)

    def renumber(self, number: Tensor, edges: Index) -> Block:
        """Give sources other local-first numbers, without those that have a negative one, and edges other positions."""
        ids = renumber(self.ids, number)
        col = number[self.source]
        col = col - ids.start if isinstance(ids, slice) else torch.searchsorted(ids, col)
        return dataclasses.replace(self, col=col.to(self.col.dtype), ids=ids, num_src=length(ids), edges=edges)

    def to(self, device: torch.device | str) -> Block:
        """Move the index tensors to ``device``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in fields.items()}
        return Block(**moved)


def renumber(ids: Index, number: Tensor) -> Index:
    """Return the new numbers of rows in ascending order without negative ones, as a slice if they are a range."""
    new = number[ids]
    new = new[new >= 0].sort().values
    if new.numel() == 0:
        return slice(0, 0)
    first, last = new[[0, -1]].tolist()
    return slice(first, last + 1) if last - first + 1 == new.numel() else new


def cut(edge_index: Tensor, part: Tensor, ids: Sequence[Index], num_dst: int) -> tuple[Block, ...]:
    """Cut edges into blocks by the shard of their sources, of which ``ids`` holds the rows."""
    blocks = []
    for q, i in enumerate(ids):
        edges = (part == q).nonzero().view(-1)
        src, dst = edge_index[:, edges]
        col = src - i.start if isinstance(i, slice) else torch.searchsorted(i, src)
        blocks.append(Block.from_coo(dst, col, i, length(i), num_dst, edges))
    return tuple(blocks)


def parts_of(rows: Tensor, ids: Sequence[Index], num_rows: int) -> Tensor:
    """Return the shard of each of these rows, given the rows of each shard."""
    part = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    for q, i in enumerate(ids):
        part[i] = q
    return part[rows]


def length(ids: Index) -> int:
    """Return how many rows there are."""
    return ids.numel() if isinstance(ids, Tensor) else ids.stop - ids.start


class Origin(NamedTuple):
    """What a layer of a message flow was made from.

    Args:
        graph: The graph with all destinations.
        rows: The rows there of the layer's own sources.
        looped: Whether the layer has got exactly one self-loop at every node, unlike ``graph``.
    """

    graph: ShardedGraph
    rows: Tensor
    looped: bool = False


class Seeds:
    """A stream of seeds that is the same on every worker, because every worker draws from it in the same order.

    Args:
        seed: Where the stream starts; None takes seeds from PyTorch's generator, for graphs of a single process.
    """

    def __init__(self, seed: int | None) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int | None) -> None:
        """Start the stream anew from ``seed``."""
        self.seed, self.drawn = seed, 0

    def draw(self) -> int:
        """Return the next seed; refuse to be run once more in a backward pass, which would need the same one again."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Attention dropout cannot be captured in a CUDA graph, each replay of which would drop the same edges."
            )
        if self.seed is None:
            return int(torch.randint(1 << 62, (), device="cpu"))
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "Attention dropout cannot be recomputed by 'torch.utils.checkpoint'. Leave the layer out of it: on a "
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
        exchange: Where the source rows live, see :mod:`pyg_sar.distributed.exchange`.
        remat: Whether backward fetches source rows again (mode 1) instead of keeping them (mode 2).
        n_id: Global ids of the own source rows, or None if they are ``0 ... num_src - 1``.
        e_id: Global ids of the edges, or None if they are ``0 ... num_edges - 1``.
        seeds: Source of the seeds for attention dropout.
        bipartite: Whether sources and destinations are different sets of nodes, whatever their numbers. If not,
            destinations are the first of the own sources, and all of them unless there is an ``origin``.
        constants: Tensors of source rows that never change, and what was made of them (:meth:`recall`).
        origin: What this layer of a message flow was made from, or None.
    """

    blocks: tuple[Block, ...]
    num_src: int
    num_dst: int
    exchange: Any
    remat: bool = True
    n_id: Tensor | None = None
    e_id: Tensor | None = None
    seeds: Seeds = field(default_factory=lambda: Seeds(0))
    bipartite: bool = False
    constants: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)
    origin: Origin | None = None
    _typed: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, repr=False)
    _regrouped: list[tuple[Tensor, ShardedGraph]] = field(default_factory=list, repr=False)

    @property
    def num_edges(self) -> int:
        """Number of edges that end on this worker."""
        return sum(block.num_edges for block in self.blocks)

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.blocks[0].col.device

    @cached_property
    @ordinary_mode
    def degree(self) -> Tensor:
        """In-degree of every destination; global, because a worker holds all in-edges of its destinations."""
        return torch.stack([block.rowptr.diff() for block in self.blocks]).sum(0)

    @cached_property
    @ordinary_mode
    def loops(self) -> Tensor:
        """Number of self-loops of every destination."""
        rows = [block.row[block.source == block.row] for block in self.blocks]
        return torch.bincount(torch.cat(rows), minlength=self.num_dst)

    @cached_property
    @ordinary_mode
    def source_degree(self) -> Tensor:
        """Global in-degree of every own source, also of those that are no destinations here."""
        if self.origin is None:
            return self.degree
        whole, rows, looped = self.origin
        degree = whole.degree - whole.loops + 1 if looped else whole.degree
        return degree[rows].to(self.device)

    def ids_of(self, block: Block) -> Tensor:
        """Return the global ids of the edges of a block."""
        return positions(block) if self.e_id is None else self.e_id[block.edges]

    def is_constant(self, x: Tensor) -> bool:
        """Whether ``x`` was declared constant and has no gradient."""
        return x in self.constants and not x.requires_grad

    def recall(self, x: Tensor, owner: Any, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; if ``x`` is constant, it is made once for ``key`` and kept as long as ``x`` and
        ``owner`` live, and as long as nobody changes what was returned.
        """
        if not self.is_constant(x):
            return make()
        version, owners = self.constants[x]
        if version != x._version:
            self.constants[x] = x._version, (owners := WeakKeyDictionary())
        kept = owners.setdefault(owner, {})
        value, changes = kept.get(key, (None, None))
        if changes is None or changes != getattr(value, "_version", 0):
            with torch.inference_mode(False):
                value = make()
            kept[key] = value, getattr(value, "_version", 0)
        return value

    def replace(self, **changes: Any) -> ShardedGraph:
        """Return a copy in which the given fields differ."""
        return dataclasses.replace(self, **{"_typed": WeakIdKeyDictionary(), "_regrouped": [], **changes})

    def to(self, device: torch.device | str) -> ShardedGraph:
        """Move the index tensors to ``device``."""
        ids = {k: None if getattr(self, k) is None else getattr(self, k).to(device) for k in ("n_id", "e_id")}
        blocks = tuple(block.to(device) for block in self.blocks)
        return self.replace(blocks=blocks, exchange=self.exchange.to(device), **ids)

    def memory(self) -> dict[str, int]:
        """Return the bytes that the topology holds, memory that is shared counted once.

        ``blocks``, their ``transposes`` (made in the first backward pass), ``ids`` of nodes and edges, the rows to
        ``serve``, what was ``derived`` (self-loops, merged blocks, edge types), and what is kept of ``constants``.
        """
        seen: set[int] = set()
        held = {kind: _bytes(tensors, seen) for kind, tensors in self._tensors().items()}
        others = [self.__dict__.get("_merged"), self.__dict__.get("_looped"), *(t for *_, t in self._typed.values())]
        others += [*map(list, self._regrouped), self.__dict__.get("remaining")]
        held["derived"] = sum(_bytes(_all_tensors(other), seen) for other in others)
        kept = [value for _, owners in self.constants.values() for it in owners.values() for value, _ in it.values()]
        held["constants"] = _bytes(_all_tensors(kept), seen)
        return held

    def _tensors(self) -> dict[str, list[Any]]:
        return {
            "blocks": [getattr(b, f.name) for b in self.blocks for f in dataclasses.fields(b)],
            "transposes": [t for b in self.blocks for t in b.__dict__.get("transpose", ())],
            "ids": [self.n_id, self.e_id, self.__dict__.get("degree")],
            "serve": list(getattr(self.exchange, "serve", ())),
        }

    def coo(self) -> Tensor:
        """Return the edges as ``[2, num_edges]``: local-first sources and destinations, in the worker's edge order."""
        out = torch.empty(2, self.num_edges, dtype=torch.int64, device=self.device)
        for block in self.blocks:
            out[0, block.edges] = block.source
            out[1, block.edges] = block.row
        return out

    @property
    def row(self) -> Tensor:
        """Destination of each edge, in the worker's edge order."""
        out = torch.empty(self.num_edges, dtype=torch.int64, device=self.device)
        for block in self.blocks:
            out[block.edges] = block.row
        return out

    def merge(self) -> ShardedGraph:
        """Return the same graph with one source block, whose rows are fetched in one shot (mode 3)."""
        return self._merged

    @cached_property
    @ordinary_mode
    def _merged(self) -> ShardedGraph:
        exchange = self.exchange.merge()
        source, row = self.coo()
        position = torch.arange(self.num_edges, device=self.device)
        num_src = self.num_src + exchange.num_halo
        block = Block.from_coo(row, source, slice(0, num_src), num_src, self.num_dst, position)
        return self.replace(blocks=(block,), exchange=exchange, remat=False)

    def with_self_loops(self) -> tuple[ShardedGraph, Tensor]:
        """Replace self-loops by exactly one at every destination.

        The edges of the new graph are the remaining ones in their order, followed by one loop for each destination.

        Returns:
            The new graph, and a mask of the old edges that remain.
        """
        if self.bipartite:
            raise ValueError(
                f"Self-loops need one set of nodes, but this sharded graph joins {self.num_src} sources with "
                f"{self.num_dst} destinations. Construct the layer with 'add_self_loops=False'."
            )
        return self._looped

    @cached_property
    @ordinary_mode
    def _looped(self) -> tuple[ShardedGraph, Tensor]:
        n, device = self.num_dst, self.device
        keep = torch.ones(self.num_edges, dtype=torch.bool, device=device)
        for block in self.blocks:
            keep[block.edges] = block.source != block.row
        position = keep.cumsum(0) - 1
        num_kept = int(keep.sum())
        blocks = tuple(self._loop_block(block, keep, position, num_kept) for block in self.blocks)
        nodes = torch.arange(n, device=device)
        n_id = nodes if self.n_id is None else self.n_id
        e_id = edge_ids(self)
        # Negative ids cannot collide with those of edges.
        e_id = torch.cat([e_id[keep], -1 - n_id[:n]])
        origin = None if self.origin is None else self.origin._replace(looped=True)
        return self.replace(blocks=blocks, e_id=e_id, origin=origin), keep

    @cached_property
    @ordinary_mode
    def remaining(self) -> tuple[Tensor, Tensor]:
        """Positions of the edges that are no self-loops, and of those that are; a mask would have the host wait for the
        device in every step.
        """
        _, keep = self.with_self_loops()
        return keep.nonzero().view(-1), (~keep).nonzero().view(-1)

    def _loop_block(self, block: Block, keep: Tensor, position: Tensor, num_kept: int) -> Block:
        ids = torch.arange(block.ids.start, block.ids.stop) if isinstance(block.ids, slice) else block.ids
        ids = ids.to(self.device)
        col = (ids < self.num_dst).nonzero().view(-1)  # source rows of this block that are destinations, too
        stays = keep[block.edges]
        if col.numel() == 0 and isinstance(block.edges, slice):
            start = num_kept if block.num_edges == 0 else int(position[block.edges.start])
            return dataclasses.replace(block, edges=slice(start, start + block.num_edges))
        return Block.from_coo(
            torch.cat([block.row[stays], ids[col]]),
            torch.cat([block.col[stays], col]),
            block.ids,
            block.num_src,
            self.num_dst,
            torch.cat([position[block.edges][stays], num_kept + ids[col]]),
        )

    def regroup(self, coo: Tensor) -> ShardedGraph:
        """Return the graph with other edges ``[2, *]`` between the same rows, as :meth:`coo` has them.

        It is kept until others are asked for several times. Ids of edges are new: they depend on the partition.
        """
        for edges, graph in self._regrouped:
            if torch.equal(edges, coo):
                return graph
        graph = self._regroup(coo)
        self._regrouped.append((coo, graph))
        del self._regrouped[:-KEPT]
        return graph

    @ordinary_mode
    def _regroup(self, coo: Tensor) -> ShardedGraph:
        source, row = coo
        ids = [block.ids for block in self.blocks]
        part = parts_of(source, ids, self.num_src + self.exchange.merge().num_halo)
        blocks = cut(coo, part, ids, self.num_dst)
        # Ids of edges are made of those of destinations, whose edges are on one worker.
        n_id = torch.arange(self.num_dst, device=self.device) if self.n_id is None else self.n_id
        order = torch.argsort(row, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=self.device) - compress(row[order], self.num_dst)[row[order]]
        e_id = (n_id[row] << 24) + place
        # Whether edges are new is a matter of each worker: what is kept of constants must not depend on it.
        return self.replace(blocks=blocks, e_id=e_id, constants=WeakIdKeyDictionary())

    def by_type(self, edge_type: Tensor, num_types: int) -> TypedGraph:
        """Return the graph whose destinations are the pairs (edge type, destination) that have an edge.

        It is built once for an ``edge_type`` tensor and kept as long as that tensor lives unchanged. Changes behind
        autograd's back, through ``.data`` or NumPy, are noticed on the CPU; on a GPU, the host would wait for it.
        """
        if edge_type.is_inference():  # nobody counts its changes
            return self._group(edge_type, num_types)
        version, sums, typed = self._typed.get(edge_type, (None, None, None))
        fresh = version == edge_type._version and typed.num_types == num_types
        if not fresh or (edge_type.is_cpu and not torch.equal(fingerprint(edge_type), sums)):
            typed = self._group(edge_type, num_types)
            sums = fingerprint(edge_type) if edge_type.is_cpu else None
            self._typed[edge_type] = edge_type._version, sums, typed
        return typed

    @ordinary_mode
    def _group(self, edge_type: Tensor, num_types: int) -> TypedGraph:
        if edge_type.shape != (self.num_edges,) or edge_type.is_floating_point():
            raise ValueError(
                f"Expected 'edge_type' to hold an integer for each of this worker's {self.num_edges} edges (got "
                f"{edge_type.dtype} of shape {list(edge_type.shape)}). Take it from the loaded data."
            )
        if edge_type.numel() > 0 and not 0 <= int(edge_type.min()) <= int(edge_type.max()) < num_types:
            raise ValueError(
                f"Expected edge types from 0 to {num_types - 1} (got {int(edge_type.min())} to "
                f"{int(edge_type.max())}). Is 'num_relations' right?"
            )
        key = torch.empty(self.num_edges, dtype=torch.int64, device=self.device)
        for block in self.blocks:
            key[block.edges] = edge_type[block.edges].long() * self.num_dst + block.row
        pairs, pair = torch.unique(key, return_inverse=True)
        position = torch.arange(self.num_edges, device=self.device)
        blocks = tuple(
            Block.from_coo(pair[b.edges], b.col, b.ids, b.num_src, pairs.numel(), position[b.edges])
            for b in self.blocks
        )
        size = max(self.num_dst, 1)
        graph = self.replace(blocks=blocks, num_dst=pairs.numel())
        return TypedGraph(graph, num_types, pairs % size, compress(pairs // size, num_types).tolist())


def join(graphs: Sequence[ShardedGraph], first: Sequence[int], num_dst: int) -> ShardedGraph:
    """Return one graph of the edges of several, whose sources, and edges, follow each other.

    Args:
        graphs: The graphs, of the same workers and in the same mode.
        first: The destination in the new graph that is the first one of each.
        num_dst: The number of destinations of the new graph.
    """
    exchange, numbers = graphs[0].exchange.join([g.exchange for g in graphs])
    numbers = [n.to(g.device) for n, g in zip(numbers, graphs, strict=True)]
    starts = [0, *torch.tensor([g.num_edges for g in graphs]).cumsum(0).tolist()]
    blocks = []
    for pieces in zip(*(g.blocks for g in graphs), strict=True):
        ids = torch.cat([n[b.ids] for n, b in zip(numbers, pieces, strict=True)])
        order = torch.argsort(ids)
        whole = renumber(ids, torch.arange(int(ids.max()) + 1 if ids.numel() else 0, device=ids.device))
        source = torch.cat([n[b.source] for n, b in zip(numbers, pieces, strict=True)])
        col = source - whole.start if isinstance(whole, slice) else torch.searchsorted(ids[order], source)
        row = torch.cat([b.row + start for b, start in zip(pieces, first, strict=True)])
        edges = torch.cat([positions(b) + start for b, start in zip(pieces, starts, strict=False)])
        blocks.append(Block.from_coo(row, col, whole, ids.numel(), num_dst, edges))
    # Ids of edges that are no two of them the same.
    e_id = torch.cat([edge_ids(g) * len(graphs) + k for k, g in enumerate(graphs)])
    num_src = sum(g.num_src for g in graphs)
    n_id = torch.arange(num_src, device=e_id.device)
    return graphs[0].replace(
        blocks=tuple(blocks), num_src=num_src, num_dst=num_dst, exchange=exchange, n_id=n_id, e_id=e_id, bipartite=True
    )


def positions(block: Block) -> Tensor:
    """Return where the edges of a block are among those of the worker."""
    if isinstance(block.edges, Tensor):
        return block.edges
    return torch.arange(block.edges.start, block.edges.stop, device=block.col.device)


def edge_ids(graph: ShardedGraph) -> Tensor:
    """Return the global ids of a graph's edges."""
    return torch.arange(graph.num_edges, device=graph.device) if graph.e_id is None else graph.e_id


def _bytes(values: list[Any], seen: set[int]) -> int:
    """Return the bytes of the tensors among some values whose memory was not seen before."""
    total = 0
    for value in values:
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in seen:
            seen.add(value.untyped_storage().data_ptr())
            total += value.untyped_storage().nbytes()
    return total


def _all_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in graphs, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, ShardedGraph):
        return _all_tensors(list(value._tensors().values()))
    if isinstance(value, TypedGraph):
        return _all_tensors([value.graph, value.dst, value.__dict__.get("norm"), value.__dict__.get("relations")])
    if isinstance(value, dict):
        return _all_tensors(list(value.values()))
    return [t for v in value for t in _all_tensors(v)] if isinstance(value, (list, tuple)) else []


@dataclass(frozen=True, eq=False)
class TypedGraph:
    """A :class:`ShardedGraph` over pairs of edge type and destination, sorted by type.

    Args:
        graph: The graph over the pairs.
        num_types: Number of edge types.
        dst: Destination of every pair.
        ptr: ``ptr[r]:ptr[r + 1]`` are the pairs of type ``r``.
    """

    graph: ShardedGraph
    num_types: int
    dst: Tensor
    ptr: list[int]

    @cached_property
    @ordinary_mode
    def norm(self) -> Tensor:
        """One over the number of edges of the same type and destination, for each edge in the worker's order."""
        return self.graph.degree.double().reciprocal()[self.graph.row]

    @cached_property
    @ordinary_mode
    def relations(self) -> list[ShardedGraph]:
        """The graph of every type, whose destinations are the pairs of that type."""
        graphs = []
        for start, end in pairwise(self.ptr):
            blocks = tuple(block.rows(start, end) for block in self.graph.blocks)
            graphs.append(self.graph.replace(blocks=blocks, num_dst=end - start))
        return graphs
