r"""Additive attention that multiplies features by the maps to values and keys inside, some heads at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import linear_grad, product
from pyg_sar.ops import additive_grad_, attention_grad_, empty, zeros
from pyg_sar.ops.reference import ADDITIVE, accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, Tile
from pyg_sar.reduce.softmax import Softmax, gradient_buffers, of_heads, row_gradients


class ProjectedSoftmax(Softmax):
    r"""Additive attention over source rows that are features: values :math:`\mathbf{W} \mathbf{x}_j` and keys
    :math:`\mathbf{K} \mathbf{x}_j` are made inside, some heads at a time, and made again in backward.

    With all edges in one block, nothing as wide as all heads lives besides the output, which is not saved, and its
    gradient, because there :math:`\langle \mathbf{g}_i, \mathbf{o}_i \rangle = \sum_j \alpha_{ij} d_{ij} \langle
    \mathbf{g}_i, \mathbf{v}_j \rangle`.

    Args:
        heads: Number of heads :math:`H`.
        channels: Number of values for each head :math:`C`.
        parameter: The negative slope.
        degree: As in :class:`Softmax`.
        dropout: As in :class:`Softmax`.
        groups: The groups of heads whose values are made together.
        single_block: Whether there is a single block.

    ``rows.const`` ends with :math:`\mathbf{W}` of shape ``[H * C, *]`` and :math:`\mathbf{K}` of shape ``[H, *]``.
    """

    def __init__(
        self,
        heads: int,
        channels: int,
        parameter: float,
        degree: Tensor,
        dropout: tuple[float, int, Callable[[Block], Tensor]] | None,
        groups: Sequence[slice],
        single_block: bool,
    ) -> None:
        super().__init__(heads, channels, ADDITIVE, parameter, degree, dropout, groups)
        self.saves_output = not single_block

    def into(self, graph: ShardedGraph, start: int, end: int) -> Softmax:
        """Return the same for these destinations, which may have another number of blocks."""
        other = super().into(graph, start, end)
        other.saves_output = len(graph.blocks) > 1
        return other

    def tiles(self, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
        """Return itself: all heads read the same columns."""
        return Reduce.tiles(self, like, rows, num_blocks)

    def columns(self, heads: slice) -> slice:
        """Return the columns of the values of some heads."""
        return slice(heads.start * self.channels, heads.stop * self.channels)

    def step(
        self, state: tuple[Tensor, Tensor, Tensor], block: Block, x: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the block into the running softmax."""
        (*_, weight, key_weight), (row_max, normaliser, out) = rows.const, state
        keys = product(x, key_weight)  # [N, H]
        for heads in self.groups:
            group = (row_max[:, heads], normaliser[:, heads], out[:, self.columns(heads)])
            value = product(x, weight[self.columns(heads)])  # [N, heads * C]
            self.merge(group, block, keys[:, heads].contiguous(), value, self.of_heads(rows, heads), heads.start)
            del value  # or it would outlive the making of the next one
        return state

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Make the rows again, and their gradients, and from those the gradients of features and maps."""
        assert x is not None
        *_, weight, key_weight = rows.const
        keys = product(x, key_weight)  # [N, H]
        d_keys = zeros(keys, *keys.shape, dtype=accumulator(x.dtype))
        d_x = empty(x, *x.shape) if needs.source else None
        d_weight, groups, d_edge = torch.empty_like(weight), [], None
        for heads in self.groups:
            columns = self.columns(heads)
            grad = d_out[:, columns]  # [M, heads * C]
            if len(self.groups) > 2:  # rows far apart take many pages of memory: to copy them is faster
                grad = grad.contiguous()
            value = product(x, weight[columns])
            found = [t[:, heads] for t in saved]
            d_value, others = self.grad_of_heads(
                value, d_keys[:, heads], block, keys[:, heads].contiguous(), self.of_heads(rows, heads), found, grad,
                needs, heads.start,
            )  # fmt: skip
            if others.edge and others.edge[0] is not None:
                d_edge = others.edge[0] if d_edge is None else d_edge.add_(others.edge[0])
            groups.append(others._replace(edge=()))
            linear_grad(x, d_value, weight[columns], d_x, d_weight[columns], add=heads.start > 0)
            del value, d_value, grad, others  # or they would outlive the making of the next ones
        d_key_weight = torch.empty_like(key_weight)
        linear_grad(x, d_keys, key_weight, d_x, d_key_weight)
        dst, _, const = (list(zip(*grads, strict=True)) for grads in zip(*groups, strict=True))
        return d_x, Rows(
            [None if g[0] is None else torch.cat(g, 1) for g in dst],
            [d_edge] * len(rows.edge),
            [*(torch.cat(g) for g in const), d_weight, d_key_weight],
        )

    def of_heads(self, rows: Rows, heads: slice) -> Rows:
        """Return what some heads read besides their values and keys."""
        return of_heads(rows._replace(const=rows.const[:-2]), heads, self.heads)

    def grad_of_heads(
        self, value: Tensor, d_key: Tensor, block: Block, key: Tensor, rows: Rows, saved: Sequence[Tensor],
        grad: Tensor, needs: Needs, head: int,
    ) -> tuple[Tensor, Rows]:  # fmt: skip
        """Return the gradients of the values of some heads and of others, and add those of keys to ``d_key``."""
        tensors, settings = self.arguments(key, value, block, rows, head)
        into, walk = gradient_buffers(tensors, needs), (block.rowptr, block.col, *block.transpose)
        if not self.saves_output:  # all edges are in this block, and values become their gradient
            _, _, query, mapped, _ = tensors
            additive_grad_(value, d_key, *into[:2], *walk, key, query, mapped, *saved, grad, *settings[1:])
            return value, row_gradients(into, rows, needs)
        d_value = zeros(value, *value.shape, dtype=accumulator(value.dtype))
        attention_grad_(d_value, d_key, *into, *walk, *tensors, *saved, grad, *settings)
        return d_value, row_gradients(into, rows, needs)
