r"""Attention: weighted sums of source rows by a softmax over the in-edges of each destination."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.linear import embed, embed_grad
from pyg_sar.ops import attention_, attention_grad_, row_products_, zeros
from pyg_sar.ops.reference import ADDITIVE, GATV2, accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, Tile


class Softmax(Reduce):
    r"""Attention: :math:`\sum_j \alpha_{ij} \mathbf{v}_j` with :math:`\alpha_{ij} = \mathrm{softmax}_j(s_{ij})`.

    The scores are, head by head,

    .. math::
        s_{ij} &= \mathrm{LeakyReLU}(k_j + q_i + e_{ij}) & \text{additive (GAT)}

        s_{ij} &= \langle \mathbf{a}, \mathrm{LeakyReLU}(\mathbf{v}_j + \mathbf{q}_i + \mathbf{e}_{ij}) \rangle
        & \text{GATv2}

        s_{ij} &= \lambda \langle \mathbf{q}_i, \mathbf{k}_j + \mathbf{e}_{ij} \rangle & \text{dot (Transformer), which
        adds } \mathbf{e}_{ij} \text{ to } \mathbf{v}_j \text{ as well}

    with :math:`\mathbf{e}_{ij}` a linear map of the edge's features (or absent). A source row is packed as
    ``[values (H * C) | keys (H, 0, or H * C)]``; ``rows.dst`` holds the queries, ``rows.edge`` the features of the
    edges and ``rows.const`` their map, after :math:`\mathbf{a}` if there is one. The output has rows of :math:`H * C`.
    Heads can be cut into groups, whose parts of a source row stand one behind the other, each packed in this way.

    The forward pass keeps a running maximum :math:`m`, normaliser :math:`l` and output :math:`o` for each destination
    ("online softmax", Milakov & Gimelshein 2018) and saves :math:`m`, :math:`l` and the output; backward rebuilds
    :math:`\alpha = e^{s - m} / l`, whose error does not grow with the scores as that of :math:`e^{s - (m + \log l)}`
    does, and uses, as FlashAttention does (Dao et al. 2022, appendix B),

    .. math::
        \frac{\partial L}{\partial s_{ij}} = \alpha_{ij} \left( d_{ij} \langle \mathbf{g}_i, \mathbf{v}_j \rangle
        - \langle \mathbf{g}_i, \mathbf{o}_i \rangle \right)

    with :math:`d_{ij}` the dropout factor. What is as long as the edges lives for one block: the mapped features, and
    in backward a number for each edge and head (two for GATv2), for as many heads as have rows that fit the cache
    together.

    Args:
        heads: Number of heads :math:`H`.
        channels: Number of values for each head :math:`C`.
        kind: ``ADDITIVE``, ``GATV2`` or ``DOT``.
        parameter: The negative slope, or :math:`\lambda`.
        degree: The number of in-edges of each destination.
        dropout: Probability and seed of dropout and the ids of the edges of a block, or None.
        groups: The groups of heads, as ranges.
    """

    saves_output = True

    def __init__(
        self,
        heads: int,
        channels: int,
        kind: int,
        parameter: float,
        degree: Tensor,
        dropout: tuple[float, int, Callable[[Block], Tensor]] | None = None,
        groups: Sequence[slice] = (),
    ) -> None:
        self.heads, self.channels, self.kind, self.parameter, self.degree = heads, channels, kind, parameter, degree
        self.dropout, self.groups = dropout, groups
        self.first, self.total_heads = 0, heads  # of the layer: these may be a group of its heads

    def into(self, graph: ShardedGraph, start: int, end: int) -> Softmax:
        """Return the softmax with the degrees and the edges of these destinations."""
        other = copy.copy(self)
        other.degree = self.degree[start:end].to(graph.device)
        other.dropout = None if self.dropout is None else (*self.dropout[:2], graph.ids_of)
        return other

    def tiles(self, like: Tensor, rows: Rows, num_blocks: int) -> list[Tile]:
        """Return one reduction for each group of heads."""
        if len(self.groups) < 2:
            return super().tiles(like, rows, num_blocks)
        width, tiles = like.size(1) // self.heads, []
        for k, group in enumerate(self.groups):
            reduce = copy.copy(self)
            reduce.heads, reduce.first, reduce.groups = group.stop - group.start, group.start, ()
            source, out = (slice(group.start * w, group.stop * w) for w in (width, self.channels))
            tiles.append(Tile(k, reduce, source, out, like[:, source]))
        return tiles

    def narrow(self, rows: Rows) -> Rows:
        """Return what these heads read of the rows for all heads of the layer."""
        if self.heads == self.total_heads:
            return rows
        return of_heads(rows, slice(self.first, self.first + self.heads), self.total_heads)

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of a destination that has seen nothing."""
        row_max = x.new_full((num_dst, self.heads), -torch.inf, dtype=accumulator(x.dtype))  # [M, H]
        return row_max, torch.zeros_like(row_max), zeros(row_max, num_dst, self.heads * self.channels)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``[N, K]`` and values ``[N, H * C]`` of packed rows."""
        values, keys = x.split([self.heads * self.channels, x.size(1) - self.heads * self.channels], 1)
        if self.kind == GATV2:
            return values, values
        # One line of memory holds narrow keys of several sources if they stand apart from the values.
        return keys.contiguous() if self.kind == ADDITIVE else keys, values

    def arguments(self, key: Tensor, value: Tensor, block: Block, rows: Rows, head: int) -> tuple[list[Any], list[Any]]:
        """Return the tensors and the settings of the operators."""
        att, edge = (rows.const[0], rows.const[1:]) if self.kind == GATV2 else (None, rows.const)
        att = None if att is None else att.reshape(-1).to(accumulator(value.dtype))  # [H * C]
        mapped = embed(rows.edge[0], edge[0]).to(value.dtype) if rows.edge else None  # [E, K]
        p, seed, e_id = (0.0, 0, None) if self.dropout is None else (*self.dropout[:2], self.dropout[2](block))
        query = rows.dst[0] if rows.dst else None  # [M, K]
        settings = [self.kind, self.parameter, e_id, seed, p, self.first + head, block.dst]
        return [key, value, query, mapped, att], settings

    def step(
        self, state: tuple[Tensor, Tensor, Tensor], block: Block, x: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the block into the running softmax."""
        self.merge(state, block, *self.unpack(x), rows)
        return state

    def merge(
        self, state: Sequence[Tensor], block: Block, key: Tensor, value: Tensor, rows: Rows, head: int = 0
    ) -> None:
        """Merge the block, given keys and values of heads from number ``head`` on."""
        tensors, settings = self.arguments(key, value, block, rows, head)
        attention_(*state, block.rowptr, block.col, *tensors, *settings)

    def finish(self, state: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise; a destination without edges gets 0, and one of which all scores are minus infinity 0 / 0."""
        row_max, normaliser, out = state  # [M, H], [M, H], [M, H * C]
        normaliser.masked_fill_((self.degree == 0).unsqueeze(1), 1)
        out.view(-1, self.heads, self.channels).div_(normaliser.unsqueeze(-1))
        return out.to(dtype), (row_max, normaliser)

    def condense(self, saved: tuple[Tensor, ...], out: Tensor | None, d_out: Tensor) -> tuple[Tensor, ...]:
        """Return the maximum, the normaliser and the dot product of output and gradient (FlashAttention's D)."""
        if out is None:
            return saved
        row_max, normaliser = saved
        delta = torch.empty_like(row_max)  # [M, H]
        row_products_(delta, d_out, out)  # without a product as wide as the rows
        return row_max, normaliser, delta

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the coefficients."""
        assert x is not None
        d_x = zeros(x, *x.shape, dtype=accumulator(x.dtype))  # [N, H * C + keys]
        values, keys = d_x.split([self.heads * self.channels, x.size(1) - self.heads * self.channels], 1)
        tensors, settings = self.arguments(*self.unpack(x), block, rows, 0)
        into = gradient_buffers(tensors, needs)
        attention_grad_(
            values, None if self.kind == GATV2 else keys, *into, block.rowptr, block.col, *block.transpose, *tensors,
            *saved, d_out, *settings,
        )  # fmt: skip
        return d_x.to(x.dtype), row_gradients(into, rows, needs)


def gradient_buffers(tensors: Sequence[Tensor | None], needs: Needs) -> list[Tensor | None]:
    """Return zeros for the gradients of queries, mapped features and ``att`` that are wanted."""
    query, mapped, att = tensors[2:]
    wanted = (query if needs.rows.dst and needs.rows.dst[0] else None, mapped, att)
    return [None if t is None else torch.zeros_like(t, dtype=accumulator(t.dtype)) for t in wanted]


def row_gradients(grads: Sequence[Tensor | None], rows: Rows, needs: Needs) -> Rows:
    """Return the gradients of rows, given those of queries, mapped features and ``att``."""
    d_query, d_mapped, d_att = grads
    edge: list[Tensor | None] = []
    const = [] if d_att is None else [d_att.view(rows.const[0].shape)]
    if d_mapped is not None:
        d_edge, d_map = embed_grad(d_mapped, rows.edge[0], rows.const[-1], needs.rows.edge[0])
        edge, const = [d_edge], [*const, d_map]
    return Rows([d_query] if rows.dst else [], edge, const)


def of_heads(rows: Rows, heads: slice, total: int) -> Rows:
    """Return what some of all heads read: their share of queries and of constants, and the features of edges."""

    def cut(t: Any, dim: int) -> Any:
        width = 0 if t is None else t.size(dim) // total
        return None if t is None else t.narrow(dim, heads.start * width, (heads.stop - heads.start) * width)

    return Rows([cut(q, 1) for q in rows.dst], rows.edge, [cut(m, 0) for m in rows.const])
