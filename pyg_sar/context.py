r"""What the two passes of an aggregation share, and what each of them holds while it runs.

============== ===================================================== ==================================================
object         alive                                                 holds
============== ===================================================== ==================================================
``Context``    as long as autograd may run backward                  no rows; gradients under way, see ``arrive``
``Forward``    from ``aggregate_async`` to the end of ``wait``       the local rows, the blocks under way, the output
``Saved``      as long as autograd may run backward                  what backward reads, by name
``Backward``   while ``Aggregate.backward`` runs                     what was saved, the blocks and gradients under way
============== ===================================================== ==================================================

The comments give shapes for ``N`` local source rows of ``F`` columns and ``N_q`` source rows of block :math:`q`, ``M``
local destinations, ``E`` edges of this worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from pyg_sar import running
from pyg_sar.block import add_rows
from pyg_sar.cached import pull_cached
from pyg_sar.exchange import Meter, Schedule, Sink
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import empty
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce.base import Needs, Reduce, Rows, Tile, columns
from pyg_sar.running import About
from pyg_sar.sources import LocalGrads, LocalRows, ProjectedGrads, ProjectedRows

Blocks = Iterator[tuple[int, Any]]  # of the number of a block and a column tile of its rows, [N_q, F of the tile]


class Context:
    """What both passes share. Nothing changes here after the constructor but ``under_way``.

    Args:
        graph: The graph.
        reduce: The reduction of all columns.
        source: The local source rows.
        rows: What the reduction reads besides source rows.
    """

    def __init__(self, graph: ShardedGraph, reduce: Reduce, source: LocalRows, rows: Rows) -> None:
        self.graph, self.reduce, self.blocks, self.exchange = graph, reduce, graph.blocks, graph.exchange.begin()
        self.like, self.projects, self.layer = source.like, isinstance(source, ProjectedRows), running.name()
        self.tiles = reduce.tiles(self.like, rows, len(graph.blocks))
        self.num_inputs = (len(source.inputs), len(rows.dst), len(rows.edge), len(rows.const))
        # Asked here, because within a function of autograd gradients are always off.
        self.grads = torch.is_grad_enabled() and any(t.requires_grad for t in (*source.inputs, *chain(*rows)))
        self.fetches_again = self.grads and reduce.needs_source and graph.remat  # mode 1
        self.keeps = self.grads and reduce.needs_source and not graph.remat  # modes 2 and 3
        self.traffic = self.exchange.log.open(self.layer)
        self.traffic.case = 2 if reduce.needs_source else 1
        # From the end of `Aggregate.backward` until somebody waits for the gradients of local rows.
        self.under_way: tuple[Any, LocalGrads | ProjectedGrads] | None = None

    def about(self, source: LocalRows) -> About | None:
        """Return what workers must do alike, for the others to compare."""
        if self.exchange.alone:
            return None
        which = "of rows" if any(t.requires_grad for t in source.inputs) else "of all but rows"
        mode = 3 if len(self.blocks) == 1 else 1 if self.fetches_again else 2 if self.keeps else "1 or 2"
        how = f"{f'gradients {which}' if self.grads else 'no gradients'}, mode {mode}"
        return running.about(self.like.shape, self.like.dtype, how)

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], Rows]:
        """Return the values that belong to local rows, and those that belong to what is read besides."""
        it = iter(values)
        source, *others = (list(islice(it, n)) for n in self.num_inputs)
        return source, Rows(*others)

    def pull(self, source: LocalRows, order: Schedule, meter: Meter, about: About | None = None) -> Blocks:
        """Return source rows, tile by tile and block by block; those of cached input features are fetched once.

        What is returned is the exchange's own iterator: a generator here would have a variable that keeps the last
        block alive while the next one is fetched.
        """
        tiles = (source.tile(tile.source) for tile in self.tiles)
        if not self.projects and self.graph.is_cached(source.x) and not self.exchange.alone:
            return pull_cached(self.graph, source.x, self.exchange, tiles, order, meter, about)
        return self.exchange.pull(tiles, order, meter, about)

    def arrive(self) -> list[Tensor | None]:
        """Wait for the gradients of local rows that are under way, and return those of what these are made of."""
        if self.under_way is None:
            return [None] * self.num_inputs[0]
        (sink, receiver), self.under_way = self.under_way, None
        sink.close()
        return receiver.grads()


class Saved(NamedTuple):
    """What backward reads.

    Args:
        finished: What ``finish`` of each tile returned besides the output.
        output: The output, ``[M, *]``, if the reduction reads it again.
        kept: The source rows of each tile and block (modes 2 and 3, case 2), ``[N_q, F of the tile]``.
        source: What backward sends again (mode 1, case 2): local rows ``[N, F]``; or what projected ones are made of.
        rows: What the reduction reads besides source rows.
    """

    finished: list[tuple[Tensor, ...]]
    output: Any
    kept: dict[tuple[int, int], Tensor]
    source: Sequence[Tensor]
    rows: Rows

    def save(self, ctx: Any, context: Context) -> None:
        """Hand all tensors to autograd, and count those that nobody else keeps."""
        made = [*self.finished, (self.output,), tuple(self.kept.values())]
        groups = [*made, self.source, *self.rows]
        ctx.context, ctx.structure = context, ([len(group) for group in groups], tuple(self.kept))
        ctx.save_for_backward(*chain(*groups))
        if context.grads:
            counted = chain(*made, () if context.projects else self.source)
            context.traffic.saved = sum(t.nbytes for t in counted if t is not None)

    @staticmethod
    def restore(ctx: Any) -> Saved:
        """Return what was saved."""
        (lengths, blocks), tensors = ctx.structure, iter(ctx.saved_tensors)
        *finished, (output,), kept, source, dst, edge, const = (tuple(islice(tensors, n)) for n in lengths)
        return Saved(finished, output, dict(zip(blocks, kept, strict=True)), source, Rows(dst, edge, const))


class Walk:
    """A pass over all blocks of each tile."""

    context: Context
    fetched: Blocks

    def fetch(self, tile: Tile) -> Blocks:
        """Return the blocks of ``tile``, each when it has come; tiles must be asked for one after the other."""
        return islice(self.fetched, len(self.context.blocks))


class Forward(Walk):
    """The forward pass, whose first block is under way as soon as this is made.

    Args:
        context: What both passes share.
        source: The local source rows.
    """

    def __init__(self, context: Context, source: LocalRows) -> None:
        self.context = context
        self.out: Any = None
        self.finished: list[tuple[Tensor, ...]] = []
        self.kept: dict[tuple[int, int], Tensor] = {}
        with torch.no_grad():
            order, about = context.exchange.order(len(context.tiles)), context.about(source)
            fetched = context.pull(source, order, context.traffic.forward, about)
            first = [next(fetched)]  # local rows: when they come, the next ones are under way
        # `pop`, so that the chain does not keep the first block alive.
        self.fetched: Blocks = chain((first.pop() for _ in range(1)), fetched)

    def keep(self, tile: Tile, q: int, x: Tensor) -> None:
        """Keep a block for backward in modes 2 and 3, unless its gradient needs no source rows."""
        if self.context.keeps:
            self.kept[tile.number, q] = x

    def write(self, tile: Tile, result: tuple[Tensor, tuple[Tensor, ...]]) -> None:
        """Write a tile of the output, ``[M, columns of the tile]``; a single one is the output."""
        out, finished = result
        self.finished.append(finished)
        tiles = self.context.tiles
        if len(tiles) == 1:
            self.out = out
            return
        if self.out is None:
            self.out = empty(out, *out.shape[:-1], tiles[-1].out.stop)
        self.out[..., tile.out] = out

    def save(self, ctx: Any, inputs: Sequence[Tensor]) -> Tensor:
        """Save what backward reads, and return the output."""
        context = self.context
        source, rows = context.split(inputs)
        output = self.out if context.reduce.saves_output else None
        source = source if context.fetches_again or context.projects else ()
        Saved(self.finished, output, self.kept, source, rows).save(ctx, context)
        return self.out


class Backward(Walk):
    """A backward pass.

    Args:
        ctx: Autograd's, of the function that saved what is read here.
        grad_out: The gradient of the output, ``[M, *]``.
    """

    def __init__(self, ctx: Any, grad_out: Tensor) -> None:
        self.context = context = ctx.context
        self.saved, self.grad_out = self.condense(Saved.restore(ctx), grad_out), grad_out
        ctx.maybe_clear_saved_tensors()  # what is not read again dies now, unless the graph is retained
        wants, others = context.split(ctx.needs_input_grad[1:])
        self.needs = Needs(any(wants), others)
        self.fetched = self.pull(context.exchange.order(len(context.tiles), True, context.fetches_again))
        self.receiver = self.receive(wants)
        self.sink: Sink | None = None
        if self.needs.source:
            self.sink = context.exchange.sink(context.traffic.backward, self.receiver)
        self.total = Rows(*([self.zeros(t, name) if n else None for t, n in zip(ts, ns, strict=True)]
                            for name, ts, ns in zip(Rows._fields, self.saved.rows, others, strict=True)))  # fmt: skip
        const: Any = self.total.const
        for c in context.reduce.optional:
            const[c] = None  # until a block has a gradient of it

    def zeros(self, t: Tensor, name: str) -> Tensor:
        """Return zeros to add the gradients of all blocks to; each edge is in one block alone."""
        dtype = t.dtype if name == "edge" or len(self.context.blocks) == 1 else accumulator(t.dtype)
        return torch.zeros_like(t, dtype=dtype)

    def condense(self, saved: Saved, grad_out: Tensor) -> Saved:
        """Replace what forward found by what backward reads of it, without the output where the loop reads none."""
        condensed = []
        for tile, finished in zip(self.context.tiles, saved.finished, strict=True):
            output = None if saved.output is None else columns(saved.output, tile.out)
            condensed.append(tile.reduce.condense(finished, output, columns(grad_out, tile.out)))
        return saved._replace(finished=condensed, output=None)

    def pull(self, order: Sequence[Sequence[int]]) -> Blocks:
        """Return what backward reads of the source rows: what is fetched again, what was kept, or None."""
        context, kept = self.context, self.saved.kept
        if not context.fetches_again:
            return ((q, kept.pop((k, q), None)) for k, blocks in enumerate(order) for q in blocks)
        source = ProjectedRows(*self.saved.source) if context.projects else LocalRows(*self.saved.source)
        return context.pull(source, order, context.traffic.backward)

    def receive(self, wants: Sequence[bool]) -> LocalGrads | ProjectedGrads:
        """Return what takes the gradients of the local rows."""
        tiles = [tile.source for tile in self.context.tiles]
        if self.context.projects:
            return ProjectedGrads(ProjectedRows(*self.saved.source), wants, tiles)
        return LocalGrads((self.context.graph.num_src, *self.context.like.shape[1:]), tiles)

    def prepare(self, tile: Tile) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what the gradients of a tile read of what was saved, and the gradient of its output."""
        grad_out = columns(self.grad_out, tile.out)
        if self.context.reduce.needs_source:  # read for every block, where rows far apart take many pages of memory
            grad_out = grad_out.contiguous()
        return tile.reduce.prepare(self.saved.finished[tile.number], grad_out), grad_out

    def add(self, tile: Tile, q: int, grads: Rows) -> None:
        """Add a block's gradients of what is read besides source rows."""
        const: Any = self.total.const
        for c in self.context.reduce.optional:
            if grads.const and grads.const[c] is not None and const[c] is None:
                const[c] = self.zeros(self.saved.rows.const[c], "const")
        total = tile.reduce.narrow(self.total)  # views of the totals
        for name in Rows._fields:
            for t, grad in zip(getattr(total, name), getattr(grads, name), strict=False):
                if t is not None and grad is not None:
                    if name == "edge":
                        add_rows(t, self.context.blocks[q].edges, grad.to(t.dtype))
                    else:
                        t += grad

    def push(self, q: int, grad: Tensor | None) -> None:
        """Start to send the gradient of a block's source rows to their owner, if anybody asks for it."""
        if self.sink is not None:
            assert grad is not None, "peers wait for a gradient of every block"
            self.sink.push(q, grad)

    def leave(self) -> list[Tensor | None]:
        """Return the gradients of all inputs, but none of those of local rows that are under way."""
        context = self.context
        grads: list[Tensor | None] = [None] * context.num_inputs[0]
        if self.sink is not None:
            context.under_way = self.sink, self.receiver
            if context.exchange.alone:
                grads = context.arrive()
            else:  # where nobody asks for them, autograd does not come to `WaitForGrads`
                Variable._execution_engine.queue_callback(context.arrive)  # type: ignore[arg-type]
        for totals, given in zip(self.total, self.saved.rows, strict=True):
            grads += [None if t is None else t.to(its.dtype) for t, its in zip(totals, given, strict=True)]
        return grads
