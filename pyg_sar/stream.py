r"""The one loop: source blocks are fetched, merged into the state and dropped, and fetched again in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Needs, Part, Reduce, Rows


def aggregate(
    graph: ShardedGraph,
    reduce: Reduce,
    x: Tensor,
    dst: Sequence[Tensor] = (),
    edge: Sequence[Tensor] = (),
    const: Sequence[Tensor] = (),
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
    """
    for name, rows, count in (("source row", (x,), graph.num_src), ("destination", dst, graph.num_dst),
                              ("edge", edge, graph.num_edges)):  # fmt: skip
        for tensor in rows:
            if tensor.size(0) != count:
                raise ValueError(
                    f"{_rank(graph)}Expected a tensor with one row for each of this worker's {count} {name}s (got one "
                    f"of shape {tuple(tensor.shape)}). Take node and edge tensors from the loaded data, whose rows are "
                    f"this worker's share{within_flow(graph)}."
                )
    counts = (len(dst), len(edge), len(const))
    # Asked here, because within a Function gradients are always off.
    return _Aggregate.apply(graph, reduce, torch.is_grad_enabled(), counts, x, *dst, *edge, *const)


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


def _unflatten(flat: Sequence[Any], counts: tuple[int, int, int]) -> Rows:
    d, e, _ = counts
    return Rows(flat[:d], flat[d : d + e], flat[d + e :])


def _columns(x: Tensor, columns: slice) -> Tensor:
    """Return some columns; all of them as the tensor itself, whose changes in place torch then tells best."""
    return x if columns == slice(None) else x[..., columns]


def _source(
    graph: ShardedGraph, x: Tensor, parts: Sequence[Part], visits: Sequence[Sequence[int]], meter: Any
) -> Iterator[tuple[int, Tensor]]:
    """Return source rows, part by part and block by block; those of a constant are fetched once."""
    exchange = graph.exchange
    if exchange.alone or not graph.is_constant(x):
        return exchange.pull([_columns(x, part.source) for part in parts], visits, meter)

    def fetch() -> dict[int, Tensor]:
        # Its own rows would keep the constant alive.
        return {q: rows for q, rows in exchange.pull([x], exchange.visits(1), meter) if rows is not x}

    kept = graph.recall(x, exchange, "rows", fetch)
    pairs = ((part, q) for part, visit in zip(parts, visits, strict=True) for q in visit)
    return ((q, _columns(kept.get(q, x), part.source)) for part, q in pairs)


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: ShardedGraph, reduce: Reduce, grads: bool, counts: tuple[int, int, int], *inputs: Tensor
    ) -> Tensor:
        x, *flat = inputs
        rows, exchange, traffic = _unflatten(flat, counts), graph.exchange, graph.exchange.log.open()
        traffic.case = 2 if reduce.needs_source else 1
        grads = grads and any(ctx.needs_input_grad)
        keep = grads and reduce.needs_source and not graph.remat
        parts = reduce.split(x, rows, len(graph.blocks))
        saved: list[Tensor] = []
        kept, out = {}, None
        visits = exchange.visits(len(parts))
        blocks = _source(graph, x, parts, visits, traffic.forward)
        for k, (part, visit) in enumerate(zip(parts, visits, strict=True)):
            state, mine = part.reduce.init(_columns(x, part.source), graph.num_dst), part.narrow(rows)
            for q, x_q in islice(blocks, len(visit)):
                block = graph.blocks[q]
                if block.num_edges > 0:
                    state = part.reduce.step(state, block, x_q, mine._replace(edge=[e[block.edges] for e in mine.edge]))
                if keep:
                    kept[k, q] = x_q
                del x_q  # or it would outlive the fetch of the next block
            result, needed = part.reduce.finish(state, x.dtype)
            saved += needed
            if len(parts) > 1:
                out = result.new_empty(*result.shape[:-1], parts[-1].out.stop) if out is None else out
                out[..., part.out] = result
            del state
        out = result if out is None else out
        saved += [out] if reduce.saves_output else []
        again = (x,) if reduce.needs_source and not kept else ()
        ctx.graph, ctx.reduce, ctx.parts, ctx.counts, ctx.traffic = graph, reduce, parts, counts, traffic
        ctx.shape = x.shape
        ctx.shapes = [_columns(x, part.source).shape[1:] for part in parts]
        ctx.sizes = (len(saved), len(kept), len(again))
        ctx.kept = list(kept)
        if grads:
            traffic.saved = sum(t.nbytes for t in (*saved, *kept.values(), *again))
        ctx.save_for_backward(*saved, *kept.values(), *again, *flat)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        once_differentiable()
        graph, reduce, parts, exchange = ctx.graph, ctx.reduce, ctx.parts, ctx.graph.exchange
        tensors, (n_saved, n_kept, n_again) = ctx.saved_tensors, ctx.sizes
        saved, kept = tensors[:n_saved], tensors[n_saved : n_saved + n_kept]
        again, flat = tensors[n_saved + n_kept :][:n_again], tensors[n_saved + n_kept + n_again :]
        rows = _unflatten(flat, ctx.counts)
        needs = Needs(ctx.needs_input_grad[4], _unflatten(ctx.needs_input_grad[5:], ctx.counts))
        meter, pulls = ctx.traffic.backward, reduce.needs_source and n_kept == 0
        visits = exchange.visits(len(parts), True, pulls)
        order = [(k, q) for k, visit in enumerate(visits) for q in visit]
        source: Iterator[tuple[int, Any]]
        if not reduce.needs_source:
            source = ((q, None) for _, q in order)
        elif n_kept:
            found = dict(zip(ctx.kept, kept, strict=True))
            source = ((q, found[k, q]) for k, q in order)
        else:
            source = _source(graph, again[0], parts, visits, meter)
        grad_x = grad_out.new_empty(ctx.shape) if needs.source and len(parts) > 1 else None
        into = None if grad_x is None else [_columns(grad_x, part.source) for part in parts]
        sink = exchange.sink(meter, into) if needs.source else None
        total = Rows(*([torch.zeros_like(t) if n else None for t, n in zip(ts, ns, strict=True)]
                       for ts, ns in zip(rows, needs.rows, strict=True)))  # fmt: skip
        each = (len(saved) - reduce.saves_output) // len(parts)  # the output comes last
        for k, (part, visit) in enumerate(zip(parts, visits, strict=True)):
            out, grad_part = saved[-1] if reduce.saves_output else grad_out, _columns(grad_out, part.out)
            if reduce.needs_source:  # read for every block, where rows far apart take many pages of memory
                grad_part = grad_part.contiguous()
            prepared = part.reduce.prepare(saved[k * each : (k + 1) * each], out[..., part.out], grad_part)
            mine, sums = part.narrow(rows), part.narrow(total)
            for q, x_q in islice(source, len(visit)):
                block = graph.blocks[q]
                if block.num_edges > 0:
                    here = mine._replace(edge=[e[block.edges] for e in mine.edge])
                    grad_q, grads = part.reduce.grad(block, x_q, here, prepared, grad_part, needs)
                    _add(sums, grads, block.edges)
                else:  # peers wait for a push all the same
                    grad_q = grad_out.new_zeros(block.num_src, *ctx.shapes[k])
                del x_q
                if sink is not None:
                    sink.push(q, grad_q)
                del grad_q
            del prepared, grad_part
        if sink is not None:
            own = sink.sum()
            grad_x = own[0] if grad_x is None else grad_x
        return None, None, None, None, grad_x, *total.dst, *total.edge, *total.const


def _add(total: Rows, grads: Rows, edges: slice | Tensor) -> None:
    for name in Rows._fields:
        for t, g in zip(getattr(total, name), getattr(grads, name), strict=False):
            if t is not None and g is not None:
                if name == "edge":
                    t[edges] += g.to(t.dtype)
                else:
                    t += g
