r"""Entry points of the loop in ``stream.py``: :func:`aggregate`, and :func:`aggregate_async`, whose first messages
are under way while the layer computes something else.

What overlaps, for worker 0 of 3 and two column tiles ``a`` and ``b`` of projected rows, with ``prefetch = 1``. ``a1``
is tile ``a`` of the rows of worker 1, ``make a`` the projection of the local tile, ``root`` what the layer computes
between ``aggregate_async`` and ``wait``; ``===`` is a message under way. Forward::

              aggregate_async   wait
    computes  make a | root   | a0     | a1     | make b | a2     | b0     | b1     | b2
    fetches            a1 =============
                                         a2 =============
                                                           b1 =============
                                                                             b2 ====

Backward of a sum, which fetches nothing (case 1), starts at the other end; local blocks come last, to hide the messages
of the gradients before. ``W a`` is the gradient of the projection by tile ``a``, all of whose gradients have arrived::

              Aggregate.backward                                             layer    WaitForGrads.backward
    computes  d a1   | d a2   | d a0   | d b1   | W a    | d b2   | d b0   | d root | W b
    sends              a1 ====
                                a2 =============
                                                  b1 =============
                                                                    b2 =============

Autograd visits nodes in the reverse order of their making: ``Aggregate`` first, then what the layer computed between
``aggregate_async`` and ``wait``, then ``WaitForGrads``, which was made by ``aggregate_async``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_sar import running, watch
from pyg_sar.context import Context, Forward
from pyg_sar.graph import ShardedGraph
from pyg_sar.reduce import Extremum, Reduce, Rows, Sum
from pyg_sar.sources import LocalRows, ProjectedRows
from pyg_sar.stream import Aggregate

SUMS: tuple[str, ...] = ("sum", "add", "mean")
SIMPLE: tuple[str, ...] = (*SUMS, "max", "min")


def aggregate(
    graph: ShardedGraph, reduce: Reduce, x: Tensor | LocalRows, dst: Sequence[Tensor] = (), edge: Sequence[Tensor] = (),
    const: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    r"""Aggregate source rows over the in-edges of every destination, one source block at a time.

    It implements sequential aggregation and rematerialization from the `"Sequential Aggregation and Rematerialization:
    Distributed Full-batch Training of Graph Neural Networks on Large Graphs" <https://arxiv.org/abs/2111.06483>`_
    paper. All workers must call it together, with inputs of the same width, ``dtype`` and ``requires_grad``.

    Args:
        graph (ShardedGraph): The in-edges of this worker's destinations.
        reduce (Reduce): How messages combine.
        x (torch.Tensor or LocalRows): The local source rows, :math:`(n_{src}, *)`; or
            :class:`~pyg_sar.sources.ProjectedRows`, of which some columns are made while others are communicated.
        dst (sequence): Tensors with one row for each local destination.
        edge (sequence): Tensors with one row for each edge, in the order of ``edge_index``.
        const (sequence): Tensors that every edge reads, such as parameters. Their gradient is this worker's share.

    Returns:
        torch.Tensor: One row for each local destination, :math:`(n_{dst}, *)`.

    Raises:
        ValueError: If a tensor has another number of rows.
    """
    return aggregate_async(graph, reduce, x, dst, edge, const).wait()


def aggregate_async(
    graph: ShardedGraph, reduce: Reduce, x: Tensor | LocalRows, dst: Sequence[Tensor] = (), edge: Sequence[Tensor] = (),
    const: Sequence[Tensor] = (),
) -> Pending:  # fmt: skip
    """Begin :func:`aggregate`, of which all arguments are, and return what ends it.

    What is computed before :meth:`Pending.wait` overlaps with the first messages and, in backward, with the last ones.
    """
    source = x if isinstance(x, LocalRows) else LocalRows(x)
    refuse_transforms(graph, running.name())
    check(graph, source.x, Rows(dst, edge))
    if elsewhere := [t for t in (source.x, *dst) if is_elsewhere(t)]:
        rows: Any = elsewhere[0]
        return Pending(None, out=rows.aggregate(graph, reduce, source, Rows(dst, edge, const)))
    if isinstance(source, ProjectedRows) and (
        len(graph.blocks) == 1 or source.x.dim() != 2 or torch.is_autocast_enabled(source.x.device.type)
    ):
        source = LocalRows(source.project())  # nothing to be gained, or more than a product of matrices
    context = Context(graph, reduce, source, Rows(dst, edge, const))
    forward, inputs = Forward(context, source), source.inputs
    if context.grads and not graph.exchange.alone and any(t.requires_grad for t in inputs):
        inputs = WaitForGrads.apply(context, *inputs)
    return Pending(forward, (*inputs, *dst, *edge, *const))


def refuse_transforms(graph: ShardedGraph, name: str) -> None:
    """Raise within forward-mode differentiation and the transforms of :mod:`torch.func`, which no message knows."""
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        raise NotImplementedError(
            f"[rank {graph.exchange.routes.rank}] Forward-mode derivatives, 'torch.vmap' and 'torch.func.grad' do not "
            f"go through {name or 'a layer'} on a sharded graph. Take 'torch.autograd.grad', or an ordinary "
            f"'edge_index' in one process."
        )


def is_elsewhere(x: Tensor) -> bool:
    """Whether rows are not in the memory of the device, and know how they are aggregated: `offload.rows.HostRows`."""
    return hasattr(x, "aggregate")


@dataclass(eq=False)
class Pending:
    """An aggregation that has begun.

    Args:
        forward: The forward pass; None if there is nothing to wait for.
        inputs: All that the aggregation is differentiated by.
        out: The output, if it is there already.
        dim: Which dimension of the output the destinations become.
    """

    forward: Forward | None
    inputs: Sequence[Tensor] = ()
    out: Tensor | None = None
    dim: int = 0

    def wait(self) -> Tensor:
        """End the aggregation and return its output; this object then holds nothing more.

        Returns:
            torch.Tensor: One row for each local destination.

        Raises:
            RuntimeError: If it was called before.
        """
        forward, inputs, out = self.forward, self.inputs, self.out
        self.forward, self.inputs, self.out = None, (), None
        if forward is not None:
            graph = forward.context.graph
            with torch.autocast(graph.device.type, enabled=False):  # as in backward, which rebuilds this
                out = Aggregate.apply(forward, *inputs)
            out = watch.rows(out, of=graph.n_id) if graph.exchange.remembers or not graph.exchange.alone else out
        if out is None:
            raise RuntimeError("'wait' was called twice. Keep what it returned the first time.")
        # `movedim(0, 0)` would be a view, whose changes in place make autograd copy.
        return out if self.dim == 0 else out.movedim(0, self.dim)


class WaitForGrads(torch.autograd.Function):
    """What local rows are made of, as it is; in backward, the place where its gradients have arrived."""

    @staticmethod
    def forward(ctx: Any, context: Context, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs."""
        ctx.context = context
        ctx.set_materialize_grads(False)
        out = tuple(t.detach() for t in inputs)
        ctx.mark_non_differentiable(*(o for o, t in zip(out, inputs, strict=True) if not t.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *nothing: None) -> Any:
        """Wait for the gradients."""
        return None, *ctx.context.arrive()


def reduce_rows(
    graph: ShardedGraph, x: Tensor | LocalRows, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0,
    scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Aggregate (weighted) source rows by one of PyG's simple aggregations.

    Args:
        graph: This worker's share of the graph.
        x: Local source rows, counted by dimension ``node_dim``; or :class:`~pyg_sar.sources.ProjectedRows`.
        aggr: One of ``SIMPLE``.
        weight: Weight of each edge, for sums and means.
        node_dim: The dimension of the nodes.
        scale: What sums and means are multiplied by, a constant for each destination.

    Returns:
        torch.Tensor: The aggregated rows, counted by dimension ``node_dim``.
    """
    return reduce_rows_async(graph, x, aggr, weight, node_dim, scale).wait()


def reduce_rows_async(
    graph: ShardedGraph, x: Tensor | LocalRows, aggr: str | None, weight: Tensor | None = None, node_dim: int = 0,
    scale: Tensor | None = None,
) -> Pending:  # fmt: skip
    """Start :func:`reduce_rows`, which takes the same arguments, and return what ends it (:func:`aggregate_async`)."""
    source = x if isinstance(x, LocalRows) else LocalRows(x)
    first = node_dim % source.x.dim() == 0
    if isinstance(source, ProjectedRows):
        if first and weight is None:
            return aggregate_async(graph, simple(graph, aggr, None, scale), source)
        source = LocalRows(source.project())
    x = source.x
    if weight is scale is None and graph.is_cached(x):  # what is summed up is kept, and not its rows
        detached = x.detach()  # of which nothing is kept
        out = graph.recall(x, graph, (aggr, node_dim), lambda: reduce_rows(graph, detached, aggr, None, node_dim))
        return Pending(None, out=out)
    if weight is not None:
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    edge = () if weight is None else (weight,)
    reduce = simple(graph, aggr, weight, scale)
    pending = aggregate_async(graph, reduce, x if first else x.movedim(node_dim, 0), edge=edge)
    pending.dim = 0 if first else node_dim
    return pending


def simple(
    graph: ShardedGraph, aggr: str | None, weight: Tensor | None = None, scale: Tensor | None = None
) -> Reduce:  # fmt: skip
    """Return the reduction of one of PyG's simple aggregations, see :func:`reduce_rows`."""
    if aggr in ("max", "min"):
        return Extremum(1 if aggr == "max" else -1)
    learn = weight is not None and weight.requires_grad
    overwrite = len(graph.blocks) == 1 and graph.num_edges > 0
    count = graph.degree if aggr == "mean" else None
    return Sum(learn_weight=learn, overwrite=overwrite, count=count, scale=scale)


def check(graph: ShardedGraph, x: Tensor, rows: Rows) -> None:
    """Raise if a tensor has too few or too many rows."""
    counts = {"source row": graph.num_src, "destination": graph.num_dst, "edge": graph.num_edges}
    for (name, count), tensors in zip(counts.items(), ((x,), rows.dst, rows.edge), strict=True):
        for shape in (tuple(t.shape) for t in tensors if t.size(0) != count):
            rank = "" if graph.exchange.alone else f"[rank {graph.exchange.routes.rank}] "
            flow = ", and of these 'x[flow.node_rows]' and 'edge_attr[flow.edge_rows[k]]' for layer k"
            raise ValueError(
                f"{rank}Expected a tensor with one row for each of this worker's {count} {name}s (got one of shape "
                f"{shape}). Take node and edge tensors from the loaded data, whose rows are this worker's "
                f"share{'' if graph.origin is None else flow}."
            )
