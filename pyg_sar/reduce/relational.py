r"""Sums of rows by types of edges, multiplied by the matrices of these (R-GCN)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.block import Block, add_rows
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import linear_grad, product
from pyg_sar.ops import empty, sddmm_, spmm_, zeros
from pyg_sar.ops.reference import accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows
from pyg_sar.runs import Range, runs_of


class RelationSum(Reduce):
    r"""The sums of the `"Modeling Relational Data with Graph Convolutional Networks" <https://arxiv.org/abs/1703.06103>`_
    paper.

    .. math::
        \mathbf{o}_i = \sum_r \mathbf{W}_r^{\top} \frac{1}{n_{ri}} \sum_{j \in \mathcal{N}_r(i)} \mathbf{x}_j

    with :math:`n_{ri} = |\mathcal{N}_r(i)|` for means and 1 for sums. ``rows.const`` holds :math:`\mathbf{W}`, as the
    diagonal blocks of each matrix, ``[R, blocks, F / blocks, O / blocks]``. Forward goes through the destinations of a
    block, and backward through its sources, some of them at a time: sums by relation live for these alone, and nothing
    is saved but the source rows.

    Args:
        graph: The graph.
        edge_type: The type of each edge.
        num_types: Number of types.
        mean: Whether the rows of a type are averaged, over the edges of all blocks.
        channels: Columns of the output.
    """

    def __init__(self, graph: ShardedGraph, edge_type: Tensor, num_types: int, mean: bool, channels: int) -> None:
        self.runs, self.mean, self.channels = runs_of(graph, edge_type, num_types), mean, channels
        # Then a step writes each row once, and there is nothing to add to.
        self.writes = len(graph.blocks) == 1 and graph.num_edges > 0 and graph.blocks[0].dst is None

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Begin with zeros, in the type of sums, or with what is written over."""
        if self.writes:
            return empty(x, num_dst, self.channels)
        return zeros(x, num_dst, self.channels, dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add up the runs of some destinations at a time, multiply them by the matrices of their types, and add up."""
        runs = self.runs[block]
        for span in runs.ranges:
            into = state[span.rows] if self.writes else None
            found = self.sums(span, runs.sizes[span.runs] if self.mean else None, x, rows, into)
            if not self.writes:
                add_rows(state, span.rows if block.dst is None else block.dst[span.rows], found)
        return state

    def sums(self, span: Range, sizes: Tensor | None, x: Tensor, rows: Rows, out: Tensor | None) -> Tensor:
        """Return the sums of some destinations, or write them over ``out``."""
        (weights,) = rows.const
        sums = span.gather(x)
        if sizes is not None:
            sums /= sizes
        return span.combine(multiplied(span, sums.to(x.dtype), weights), out=out)

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output."""
        return state.to(dtype), ()

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Add up the gradients by the runs of some sources at a time."""
        assert x is not None
        (weights,), kind = rows.const, accumulator(x.dtype)
        ranges, sizes = self.runs[block].transpose
        d_x = empty(x, *x.shape) if needs.source else None
        d_weights = torch.zeros_like(weights, dtype=kind)
        for span in ranges:
            share = sizes[span.edges].to(kind).reciprocal_() if self.mean else None  # [edges, 1]
            sums = span.gather(d_out, share).to(x.dtype)
            if d_x is not None:
                span.combine(multiplied(span, sums, weights.mT), out=d_x[span.rows])
            for r, run in span.filled:
                h = x[span.rows].index_select(0, span.row[run])
                d_weights[r] += torch.bmm(by_block(h, weights[r]).mT, by_block(sums[run], weights[r]))
        return d_x, Rows(const=[d_weights.to(weights.dtype)])


class BasisSum(RelationSum):
    r"""The basis decomposition of the `"Modeling Relational Data with Graph Convolutional Networks"
    <https://arxiv.org/abs/1703.06103>`_ paper.

    With :math:`\mathbf{W}_r = \sum_b c_{rb} \mathbf{V}_b` it is

    .. math::
        \mathbf{o}_i = \sum_r \frac{1}{n_{ri}} \sum_{j \in \mathcal{N}_r(i)} \mathbf{W}_r^{\top} \mathbf{x}_j
        = \sum_b \mathbf{V}_b^{\top} \sum_r \frac{c_{rb}}{n_{ri}} \sum_{j \in \mathcal{N}_r(i)} \mathbf{x}_j

    ``rows.const`` holds :math:`c` and :math:`\mathbf{V}`. The sums of a row's runs, which have no weights of edges, are
    combined by the coefficients of their types. With :math:`\mathbf{u}_{rj} = \sum_{i: j \in \mathcal{N}_r(i)}
    \mathbf{g}_i / n_{ri}`,

    .. math::
        \mathbf{y}_{bj} = \sum_r c_{rb} \mathbf{u}_{rj}, \quad
        \frac{\partial L}{\partial \mathbf{x}_j} = \sum_b \mathbf{V}_b \mathbf{y}_{bj}, \quad
        \frac{\partial L}{\partial \mathbf{V}_b} = \sum_j \mathbf{x}_j \mathbf{y}_{bj}^{\top}, \quad
        \frac{\partial L}{\partial c_{rb}} = \sum_j \langle \mathbf{V}_b^{\top} \mathbf{x}_j, \mathbf{u}_{rj} \rangle

    so that nothing is made for each edge.
    """

    def sums(self, span: Range, sizes: Tensor | None, x: Tensor, rows: Rows, out: Tensor | None) -> Tensor:
        """Add up the runs of some destinations, combine them, and multiply by the bases."""
        (coefficient, bases), kind = rows.const, accumulator(x.dtype)  # [R, B], [B, F, O]
        share = span.each(coefficient.to(kind))  # [runs, B]
        if sizes is not None:
            share /= sizes
        sums = span.combine(span.gather(x), share)  # [rows, B * F]
        return product(sums.to(x.dtype), bases.flatten(0, 1).t(), out=out)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Add up the gradients by the runs of some sources at a time."""
        assert x is not None
        (coefficient, bases), kind = rows.const, accumulator(x.dtype)
        ranges, sizes = self.runs[block].transpose
        weight = bases.transpose(1, 2).flatten(0, 1)  # [B * O, F]
        d_x = empty(x, *x.shape) if needs.source else None
        d_coefficient = torch.zeros_like(coefficient, dtype=torch.double)
        d_weight, some = torch.zeros_like(weight, dtype=kind), torch.empty_like(weight)
        for span in ranges:
            share = sizes[span.edges].to(kind).reciprocal_() if self.mean else None  # [edges, 1]
            sums = span.gather(d_out, share)  # u, [runs, O]
            both = span.combine(sums, span.each(coefficient.to(kind)))  # y, [rows, B * O]
            linear_grad(x[span.rows], both, weight, None if d_x is None else d_x[span.rows], some, add=False)
            d_weight += some
            found = sums.new_empty(len(sums), len(bases))  # [runs, B], row by row
            sddmm_(found, *span.of_rows, product(x[span.rows], weight).to(kind), sums)
            spmm_(d_coefficient, *span.of_types, found.double(), None, None, False)
        d_bases = d_weight.to(bases.dtype).unflatten(0, (len(bases), -1)).transpose(1, 2)
        return d_x, Rows(const=[d_coefficient.to(coefficient.dtype), d_bases])


def multiplied(span: Range, sums: Tensor, weights: Tensor) -> Tensor:
    """Multiply the sums of each run by the diagonal blocks of its type's matrix."""
    out = empty(sums, sums.size(0), weights.size(1) * weights.size(3))
    for r, run in span.filled:
        times(sums[run], weights[r], out[run])
    return out


def times(rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply rows by the diagonal blocks of a relation's weights; dense weights are one block."""
    if len(weight) == 1:
        return product(rows, weight[0].t(), out=out)
    out = empty(rows, len(rows), weight.size(0) * weight.size(2)) if out is None else out
    torch.bmm(by_block(rows, weight), weight, out=by_block(out, weight))
    return out


def by_block(rows: Tensor, weight: Tensor) -> Tensor:
    """Return a view of rows by the diagonal blocks that their columns belong to."""
    return rows.unflatten(-1, (weight.size(0), -1)).transpose(0, 1)
