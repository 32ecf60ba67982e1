r"""Runs a layer's own code on some destinations at a time, with all their edges: for aggregations that do not merge.

Medians, networks on sets and the like need all messages of a destination at once, but those of no other one. The rows
of all blocks are fetched together, and messages live for one chunk of destinations; backward runs on chunk after chunk
again. Destinations of similar degree share a chunk, because such code pads them to the largest degree that it sees.

In front of each chunk stands a padding destination, so that code which fails without edges, or where the first
destination has none, does not fail. Where results depend on the maximum in-degree of the whole graph (a recurrent
network that reads padding), it has as many edges.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.aggregate import aggregate
from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph, positions
from pyg_sar.nn.replay.runner import Pair, Runner
from pyg_sar.nn.replay.trace import NotStreamable
from pyg_sar.pieces import Totals
from pyg_sar.reduce import Grads, Needs, Reduce, Rows

CELLS = 1 << 16  # of a chunk, about: messages, padded; on a GPU, which waits for the host between chunks, 16 times
FEWEST = 2  # edges of a padding destination: the quantiles of PyG count on them


class Chunk(NamedTuple):
    """Some destinations, the first of which is padding.

    Args:
        dst: Their rows.
        edges: The positions of their edges in the block, sorted by destination and then by global id.
        src: The sources of these edges, each once.
        edge_index: The edges, by positions in ``src`` and ``dst``.
    """

    dst: Tensor
    edges: Tensor
    src: Tensor
    edge_index: Tensor


class Chunks(Reduce):
    """A layer's ``propagate`` up to its aggregate, or its ``edge_updater``, a chunk at a time.

    A chunk has about ``cells`` messages (a destination's are never split), its padding destination ``padding`` edges.
    """

    skips_empty = False

    def __init__(self, runner: Runner, cells: int, padding: int) -> None:
        self.runner, self.cells, self.padding, self.optional = runner, cells, padding, runner.optional

    def init(self, x: Tensor, num_dst: int) -> None:
        """Return nothing: what results look like is not known."""

    def step(self, state: Tensor | None, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Return the results of all chunks: there is one block."""
        out: Tensor | None = None
        ids = self.runner.graph.ids_of(block)
        count = block.num_edges if self.runner.call.updates else block.num_dst
        for chunk in self.chunks(block, ids):
            some = self.run(chunk, ids, *rows_of(chunk, x, rows))
            out = some.new_empty(count, *some.shape[1:]) if out is None else out
            self.runner.put(some, out, self.place(chunk, block))
        assert out is not None
        return out

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the results."""
        return state, ()

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Run once more under autograd, chunk by chunk."""
        assert x is not None
        ids = self.runner.graph.ids_of(block)
        totals = Totals(x, rows)
        for chunk in self.chunks(block, ids):
            totals.add(self.rebuild(chunk, block, ids, x, rows, d_out, needs), chunk.dst, chunk.edges, chunk.src)
        return totals.grads(needs)

    def rebuild(
        self, chunk: Chunk, block: Block, ids: Tensor, x: Tensor, rows: Rows, d_out: Tensor, needs: Needs
    ) -> Grads:
        """Return the gradients of the rows of a chunk."""

        def run(leaf: Tensor, leaves: Rows) -> list[Pair]:
            result = self.run(chunk, ids, leaf, leaves)
            return [(result, d_out[self.place(chunk, block)])] if result.requires_grad else []

        return self.runner.rebuild(*rows_of(chunk, x, rows), needs, run)

    def chunks(self, block: Block, ids: Tensor) -> Iterator[Chunk]:
        """Yield destinations in the order of their degrees, and their edges, of which ``ids`` holds the global ids."""
        degree = block.degree
        order = degree.argsort(stable=True)
        cells = (degree[order] + 1).clamp(min=self.padding).cumsum(0)
        _, counts = ((cells - 1) // self.cells).unique_consecutive(return_counts=True)
        whole = dataclasses.replace(block, edges=slice(0, block.num_edges))
        first = torch.zeros(1, dtype=torch.int64, device=block.col.device)
        ends_at = (degree > 0).int().argmax().view(1) if block.num_edges else first  # where the first edge ends
        for dst in order.split(counts.tolist()) if order.numel() else [order]:
            some = whole.choose(dst)
            edges = some.edges
            assert isinstance(edges, Tensor)
            row = some.row
            order_by_id = ids[edges].argsort(stable=True)
            order_by_id = order_by_id[row[order_by_id].argsort(stable=True)]
            # The padding destination has the edges, and the row, of one that is there.
            made = edges[:1] if edges.numel() else first
            edges = torch.cat([made.expand(self.padding), edges[order_by_id]])
            row = torch.cat([first.expand(self.padding), row[order_by_id] + 1])
            col = block.col[edges].long() if block.num_edges else edges
            src, col = col.unique(return_inverse=True)
            dst = torch.cat([dst[some.row[:1]] if some.num_edges else ends_at, dst])
            yield Chunk(dst, edges, src, torch.stack([col, row]))

    def place(self, chunk: Chunk, block: Block) -> Tensor:
        """Return where the results of a chunk are among those of the worker: of destinations, or of edges."""
        return positions(block)[chunk.edges[self.padding :]] if self.runner.call.updates else chunk.dst[1:]

    def run(self, chunk: Chunk, ids: Tensor, x: Tensor, rows: Rows) -> Tensor:
        """Return the results of a chunk."""
        runner, num_dst = self.runner, chunk.dst.numel()
        table = [take(t, chunk.src) for t in runner.tables]
        out = runner.run_chunk(chunk.edge_index, take(ids, chunk.edges), x, table, rows, num_dst)
        node_dim, updates = runner.layer.node_dim, runner.call.updates
        if not isinstance(out, Tensor) or out.dim() < (1 if updates else abs(node_dim)):
            raise NotStreamable(f"it makes a {type(out).__name__} of messages")
        out = out if updates else out.movedim(node_dim, 0)
        if out.size(0) != (chunk.edges.numel() if updates else num_dst):
            raise NotStreamable(f"it makes {out.size(0)} rows of messages to {num_dst} destinations")
        return out[self.padding if updates else 1 :]


def rows_of(chunk: Chunk, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Return the rows of a chunk."""
    dst, edge = [take(t, chunk.dst) for t in rows.dst], [take(t, chunk.edges) for t in rows.edge]
    return take(x, chunk.src), Rows(dst, edge, rows.const)


def take(t: Tensor, index: Tensor) -> Tensor:
    """Return some rows; padding, if there are none at all."""
    if t.size(0) > 0:
        return t[index]
    return t.new_full((index.numel(), *t.shape[1:]), 1 if t.is_floating_point() else 0)


def largest_degree(graph: ShardedGraph) -> int:
    """Return the maximum in-degree on any worker; all of them call it together for the first time."""
    whole = graph if graph.origin is None else graph.origin.graph

    def largest() -> int:
        return whole.exchange.all_reduce_max([int(whole.degree.max()) if whole.num_dst > 0 else 0])[0]

    return whole.derived("largest degree", largest)


def in_chunks(runner: Runner, padding: int, cells: int | None) -> Tensor:
    """Run a call on chunk after chunk, each of about so many ``cells``."""
    graph = runner.graph
    chunks = Chunks(runner, cells or CELLS * (1 if graph.device.type == "cpu" else 16), padding)
    x, dst, edge, const = runner.rows()
    out = aggregate(graph, chunks, x, dst, edge, const)
    return out if runner.call.updates else runner.finish({}, out)
