r"""The one loop: source blocks are fetched, merged into the state and dropped, and fetched again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable

from pyg_sar import running, watch
from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Needs, Reduce, Rows, linear, linear_grad
from pyg_sar.running import About

Lin = tuple[Tensor, Tensor | None]
Visits = Sequence[Sequence[int]]


def aggregate(
    graph: ShardedGraph,
    reduce: Reduce,
    x: Tensor,
    dst: Sequence[Tensor] = (),
    edge: Sequence[Tensor] = (),
    const: Sequence[Tensor] = (),
    lin: Lin | None = None,
) -> Tensor:
    r"""Aggregate source rows over the in-edges of every destination, one source shard at a time.

    It implements sequential aggregation and rematerialization from the `"Sequential Aggregation and Rematerialization:
    Distributed Full-batch Training of Graph Neural Networks on Large Graphs" <https://arxiv.org/abs/2111.06483>`_
    paper. All workers must call it together, with inputs of the same width, ``dtype`` and ``requires_grad``.

    Args:
        graph (ShardedGraph): The in-edges of this worker's destinations.
        reduce (Reduce): How messages combine.
        x (torch.Tensor): The own source rows, :math:`(n_{src}, *)`.
        dst (sequence): Tensors with one row for each own destination.
        edge (sequence): Tensors with one row for each edge, in the order of ``edge_index``.
        const (sequence): Tensors that every edge reads, such as parameters. Their gradient is this worker's share.
        lin (tuple, optional): Weight and bias (or :obj:`None`) of a linear map. Source rows are then those of ``x``
            under this map, of which some columns are made while others travel.
    """
    return start(graph, reduce, x, Rows(dst, edge, const), lin)()


def start(graph: ShardedGraph, reduce: Reduce, x: Tensor, others: Rows, lin: Lin | None = None) -> Callable[[], Tensor]:
    """Start to fetch the first rows of :func:`aggregate`, and return a function that ends it.

    What is computed before that is called runs while rows travel and, in backward, while their gradients come home.
    """
    for name, rows, count in (("source row", (x,), graph.num_src), ("destination", others.dst, graph.num_dst),
                              ("edge", others.edge, graph.num_edges)):  # fmt: skip
        for tensor in rows:
            if tensor.size(0) != count:
                raise ValueError(
                    f"{_rank(graph)}Expected a tensor with one row for each of this worker's {count} {name}s (got one "
                    f"of shape {tuple(tensor.shape)}). Take node and edge tensors from the loaded data, whose rows are "
                    f"this worker's share{within_flow(graph)}."
                )
    if lin is not None and (len(graph.blocks) == 1 or x.dim() != 2 or torch.is_autocast_enabled(x.device.type)):
        x, lin = F.linear(x, *lin), None  # nothing to be gained, or more than a product of matrices
    home = [x, *(t for t in lin or () if t is not None)]
    call = _Call(graph, reduce, home, others)
    if call.grads and not graph.exchange.alone and any(t.requires_grad for t in home):
        home = _Home.apply(call, *home)

    def end() -> Tensor:
        out = _Aggregate.apply(call, *home, *chain(*others))
        return out if graph.exchange.alone else watch.rows(out)

    return end


def once_differentiable() -> None:
    """Raise within a backward pass that shall itself be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Layers of 'pyg_sar.nn' have no second derivative. Call 'backward' or 'autograd.grad' without "
            "'create_graph=True', or use the layer of 'torch_geometric.nn' if the graph is not sharded."
        )


def within_flow(graph: ShardedGraph) -> str:
    """Return what else to do with tensors for a layer of a message flow."""
    return "" if graph.origin is None else ", and of these 'x[flow.rows]' and 'edge_attr[flow.edges[k]]' for layer k"


def _rank(graph: ShardedGraph) -> str:
    rank = getattr(graph.exchange, "rank", None)
    return "" if rank is None else f"[rank {rank}] "


def _columns(x: Tensor, columns: slice) -> Tensor:
    """Return some columns; all of them as the tensor itself, whose changes in place torch then tells best."""
    return x if columns == slice(None) else x[..., columns]


class _Call:
    """What the functions of one aggregation share; it holds no tensor for longer than they need it.

    Args:
        home: The own source rows; or what they are made of: features, weight and, perhaps, bias.
        rows: What else the reduction reads.
    """

    def __init__(self, graph: ShardedGraph, reduce: Reduce, home: Sequence[Tensor], rows: Rows) -> None:
        self.graph, self.reduce, self.traffic = graph, reduce, graph.exchange.log.open()
        self.traffic.case = 2 if reduce.needs_source else 1
        self.counts = (len(home), len(rows.dst), len(rows.edge))
        # Asked here, because within a Function gradients are always off.
        inputs = (*home, *rows.dst, *rows.edge, *rows.const)
        self.grads = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        self.again = self.grads and reduce.needs_source and graph.remat  # fetched in backward
        self.keep = self.grads and reduce.needs_source and not graph.remat
        like = home[0] if len(home) == 1 else home[0].new_empty(0, home[1].size(0))
        self.parts = reduce.split(like, rows, len(graph.blocks))
        self.shape, self.shapes = like.shape, [_columns(like, part.source).shape[1:] for part in self.parts]
        self.own: list[Tensor] = []  # rows that backward sends again
        with torch.no_grad():
            visits, about = graph.exchange.visits(len(self.parts)), None
            if not graph.exchange.alone:
                about = running.about(self.shape, like.dtype, self.how(home))
            blocks = self.fetch(self.make(home), visits, self.traffic.forward, home, about)
            # The first rows are own ones: when they come, the next are under way.
            self.blocks: Iterator[tuple[int, Tensor]] = chain([next(blocks)], blocks)
        self.found: list[Tensor | None] = []  # the gradients of `home`
        self.sink: Any = None  # while there is more to come

    def how(self, home: Sequence[Tensor]) -> str:
        """Return what else workers must do alike, in words."""
        which = "of rows" if any(t.requires_grad for t in home) else "of all but rows"
        mode = 3 if len(self.graph.blocks) == 1 else 1 if self.again else 2 if self.keep else "1 or 2"
        return f"{f'gradients {which}' if self.grads else 'no gradients'}, mode {mode}"

    def make(self, home: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return the own source rows of every part."""
        for part in self.parts:
            if len(home) == 1:
                yield _columns(home[0], part.source)
                continue
            rows = linear(home[0], *(t[part.source] for t in home[1:]))
            if self.again:
                self.own.append(rows)
            yield rows

    def fetch(
        self,
        rows: Iterable[Tensor],
        visits: Visits,
        meter: Any,
        home: Sequence[Tensor] = (),
        about: About | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Return source rows, part by part and block by block; those of a constant are fetched once."""
        exchange = self.graph.exchange
        if exchange.alone or len(home) != 1 or not self.graph.is_constant(home[0]):
            return exchange.pull(rows, visits, meter, about)
        (x,) = home

        def fetch() -> dict[int, Tensor]:
            # Its own rows would keep the constant alive.
            return {q: rows for q, rows in exchange.pull([x], exchange.visits(1), meter, about) if rows is not x}

        kept = self.graph.recall(x, exchange, "rows", fetch)
        pairs = ((part, q) for part, visit in zip(self.parts, visits, strict=True) for q in visit)
        return ((q, _columns(kept.get(q, x), part.source)) for part, q in pairs)

    def forward(self, k: int, rows: Rows, kept: dict[tuple[int, int], Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output of part ``k`` and what backward needs of it besides, and keep source rows if asked."""
        part, graph, state = self.parts[k], self.graph, None
        mine, dtype = part.narrow(rows), None
        for q, x_q in islice(self.blocks, len(graph.blocks)):
            if state is None:
                state, dtype = part.reduce.init(x_q, graph.num_dst), x_q.dtype
            block = graph.blocks[q]
            if block.num_edges > 0 or not part.reduce.skips_empty:
                state = part.reduce.step(state, block, x_q, mine._replace(edge=[e[block.edges] for e in mine.edge]))
            if self.keep:
                kept[k, q] = x_q
            del x_q  # or it would outlive the fetch of the next block
        assert dtype is not None
        return part.reduce.finish(state, dtype)

    def again_from(
        self, visits: Visits, kept: dict[tuple[int, int], Tensor], again: Sequence[Tensor], made_of: Sequence[Tensor]
    ) -> Iterator[tuple[int, Any]]:
        """Return what backward reads of the source rows: nothing, what was kept, or what is fetched again."""
        if not again:
            return ((q, kept.get((k, q))) for k, visit in enumerate(visits) for q in visit)
        own = again if made_of else [_columns(again[0], part.source) for part in self.parts]
        return self.fetch(own, visits, self.traffic.backward, made_of or again)

    def backward(
        self, k: int, q: int, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs,
        sums: Rows,
    ) -> Tensor | None:  # fmt: skip
        """Return the gradient of the source rows of a block, given that of the output, and add up those of others."""
        block = self.graph.blocks[q]
        if block.num_edges == 0 and self.reduce.skips_empty:  # peers wait for a push all the same
            return out.new_zeros(block.num_src, *self.shapes[k])
        here = rows._replace(edge=[e[block.edges] for e in rows.edge])
        grad, others = self.parts[k].reduce.grad(block, x, here, saved, out, needs)
        const: Any = sums.const
        for c in self.reduce.optional:
            if const[c] is None and others.const[c] is not None:
                const[c] = torch.zeros_like(rows.const[c])
        _add(sums, others, block.edges)
        return grad

    def collect(self, home: Sequence[Tensor], wants: Sequence[bool], like: Tensor) -> Callable[[int, Tensor], None]:
        """Return what takes the gradients of the source rows of a part, and makes those of ``home`` of them."""
        parts, found = self.parts, self.found
        found[:] = [None] * self.counts[0]
        if home:
            found[:] = [torch.empty_like(t) if want else None for t, want in zip(home, wants, strict=True)]
            found[0] = torch.zeros_like(home[0]) if wants[0] else None

            def take(k: int, grad: Tensor) -> None:
                into = [None if t is None else t[parts[k].source] for t in found[1:]]
                linear_grad(home[0], grad, home[1][parts[k].source], found[0], *into)

        elif len(parts) == 1:

            def take(k: int, grad: Tensor) -> None:
                found[0] = grad

        else:
            whole = found[0] = like.new_empty(self.shape)

            def take(k: int, grad: Tensor) -> None:
                whole[..., parts[k].source] = grad

        return take

    def leave(self, sink: Any) -> list[Tensor | None]:
        """Return the gradients of ``home``, or nothing where they are still on their way home."""
        self.sink = sink
        if sink is None:
            return [None] * self.counts[0]
        if self.graph.exchange.alone:
            return self.end()
        # Where nobody asks for them, autograd does not come to `_Home`.
        Variable._execution_engine.queue_callback(self.forget)
        return [None] * self.counts[0]

    def end(self) -> list[Tensor | None]:
        """Return the gradients of ``home`` when they are complete."""
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.close()
        found, self.found = self.found, []
        return found

    def forget(self) -> None:
        """Wait for gradients that nobody asked for."""
        self.end()


class _Home(torch.autograd.Function):
    """What the source rows are made of, as it is; in backward, the place where its gradients are complete.

    Autograd comes here late: what was computed after ``start`` is differentiated before.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *home: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        out = tuple(t.detach() for t in home)
        ctx.mark_non_differentiable(*(o for o, t in zip(out, home, strict=True) if not t.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *nothing: None) -> Any:
        once_differentiable()
        return None, *ctx.call.end()


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> Tensor:
        (home, *flat), reduce, parts = _cut(inputs, *call.counts), call.reduce, call.parts
        kept: dict[tuple[int, int], Tensor] = {}
        saved: list[Tensor] = []
        out = None
        for k, part in enumerate(parts):
            with torch.autocast(call.graph.device.type, enabled=False):  # backward, which knows none, rebuilds this
                result, needed = call.forward(k, Rows(*flat), kept)
            saved += needed
            if len(parts) > 1:
                out = result.new_empty(*result.shape[:-1], parts[-1].out.stop) if out is None else out
                out[..., part.out] = result
        del call.blocks  # which would keep rows
        out = result if out is None else out
        saved += [out] if reduce.saves_output else []
        again = home if call.again and len(home) == 1 else call.own
        call.own = []
        made_of = home if len(home) > 1 else ()
        keep = (saved, tuple(kept.values()), again, made_of)
        ctx.call, ctx.kept, ctx.sizes = call, list(kept), [len(tensors) for tensors in (*keep, *flat[:-1])]
        if call.grads:
            call.traffic.saved = sum(t.nbytes for tensors in keep[:3] for t in tensors)
        ctx.save_for_backward(*chain(*keep, *flat))
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        once_differentiable()
        call, parts, exchange = ctx.call, ctx.call.parts, ctx.call.graph.exchange
        saved, kept, again, made_of, *flat = _cut(ctx.saved_tensors, *ctx.sizes)
        wants, *others = _cut(ctx.needs_input_grad[1:], *call.counts)
        rows, needs = Rows(*flat), Needs(any(wants), Rows(*others))
        visits = exchange.visits(len(parts), True, len(again) > 0)
        source = call.again_from(visits, dict(zip(ctx.kept, kept, strict=True)), again, made_of)
        sink = None
        if needs.source:
            sink = exchange.sink(call.traffic.backward, call.collect(made_of, wants, grad_out))
        total = Rows(*([torch.zeros_like(t) if n else None for t, n in zip(ts, ns, strict=True)]
                       for ts, ns in zip(rows, needs.rows, strict=True)))  # fmt: skip
        total = total._replace(const=[None if c in call.reduce.optional else t for c, t in enumerate(total.const)])
        each = (len(saved) - call.reduce.saves_output) // len(parts)  # the output comes last
        for k, part in enumerate(parts):
            out, grad_part = saved[-1] if call.reduce.saves_output else grad_out, _columns(grad_out, part.out)
            if call.reduce.needs_source:  # read for every block, where rows far apart take many pages of memory
                grad_part = grad_part.contiguous()
            prepared = part.reduce.prepare(saved[k * each : (k + 1) * each], out[..., part.out], grad_part)
            mine, sums = part.narrow(rows), part.narrow(total)
            for q, x_q in islice(source, len(visits[k])):
                grad_q = call.backward(k, q, x_q, mine, prepared, grad_part, needs, sums)
                del x_q
                if sink is not None:
                    sink.push(q, grad_q)
                del grad_q
            del prepared, grad_part
        return None, *call.leave(sink), *total.dst, *total.edge, *total.const


def _add(total: Rows, grads: Rows, edges: slice | Tensor) -> None:
    for name in Rows._fields:
        for t, g in zip(getattr(total, name), getattr(grads, name), strict=False):
            if t is not None and g is not None:
                if name == "edge":
                    t[edges] += g.to(t.dtype)
                else:
                    t += g


def _cut(values: Sequence[Any], *counts: int) -> list[Any]:
    """Return so many values each, and the rest."""
    ends = list(accumulate(counts, initial=0))
    return [*(values[a:b] for a, b in pairwise(ends)), values[ends[-1] :]]
