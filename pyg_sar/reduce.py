r"""How messages combine: each reduction is a few small functions over one block, without communication.

A reduction is a state that takes one source block after the other (``init``, ``step``, ``finish``) and the gradient of
one block (``grad``). ``needs_source`` says whether that gradient needs the source rows again: *case 2* of the SAR
paper, against *case 1*, in which walking the transposed block is enough. ``split`` cuts it by columns, so that narrow
rows travel one part after the other instead of wide ones at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.graph import Block
from pyg_sar.ops import additive_grad_, attention_, attention_grad_, extremum_, extremum_grad_, sddmm_, spmm_, zeros
from pyg_sar.reference import ADDITIVE, GATV2, accumulator, segment_sum


class Rows(NamedTuple):
    """What an aggregation reads besides the source rows.

    Args:
        dst: Tensors with one row for each destination.
        edge: Tensors with one row for each edge of the block at hand, in its order.
        const: Tensors that all edges share, such as parameters.
    """

    dst: Sequence[Any] = ()
    edge: Sequence[Any] = ()
    const: Sequence[Any] = ()


class Needs(NamedTuple):
    """Which gradients are wanted."""

    source: bool
    rows: Rows  # of booleans


Grads = tuple[Tensor | None, Rows]

COLUMNS = 128  # of values that travel at a time: as wide as a tile of the kernels, see csrc/rows.inl


class Part(NamedTuple):
    """A reduction over some columns.

    Args:
        reduce: The reduction.
        source: The columns of the source rows that it reads.
        out: The columns of the output that it makes.
        narrow: Returns views of what it reads of :class:`Rows`, or of their gradients.
    """

    reduce: Reduce
    source: slice
    out: slice
    narrow: Callable[[Rows], Rows]


class Reduce:
    """Base class; ``state`` is whatever ``init`` returns, ``saved`` are the tensors that backward reads.

    ``needs_source`` and ``saves_output`` say whether backward reads source rows and the output, too; ``skips_empty``
    says whether blocks without edges change nothing. Of the constants, those of ``optional`` numbers have no gradient
    where no block has one, instead of zeros.
    """

    needs_source = True
    saves_output = False
    skips_empty = True
    optional: frozenset[int] = frozenset()

    def split(self, x: Tensor, rows: Rows, blocks: int) -> list[Part]:
        """Return reductions over narrower source rows that together do the same over some blocks; here, itself."""
        return [Part(self, slice(None), slice(None), lambda rows: rows)]

    def init(self, x: Tensor, num_dst: int) -> Any:
        """Return the state before the first block."""
        raise NotImplementedError

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Return the state after a block with source rows ``x``."""
        raise NotImplementedError

    def finish(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and what backward needs besides it."""
        raise NotImplementedError

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Turn what was saved, once, into what ``grad`` reads for every block.

        ``result`` is the output, if it was saved, and ``out`` its gradient.
        """
        return saved

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Return the gradients of a block's source rows and of ``rows``, given that of the output, ``out``."""
        raise NotImplementedError


class Sum(Reduce):
    r"""Weighted sum :math:`\sum_j w_{ij} \mathbf{x}_j`, the weights (if any) being ``rows.edge[0]``.

    While the weights are constant the gradient is a sum over the transposed block: case 1, no row travels twice.

    Args:
        learn_weight: Whether the weights need a gradient.
        sums: If given, the number of sums over the same rows, each with a column of the weights.
        once: Whether there is a single block, which has edges: then every sum is written once, and nothing zeroed.
        count: What the sum of each destination is divided by (if it is more than 1), for means.
    """

    def __init__(
        self, learn_weight: bool = False, sums: int | None = None, once: bool = False, count: Tensor | None = None
    ) -> None:
        self.needs_source, self.sums, self.once, self.count = learn_weight, sums, once, count

    def split(self, x: Tensor, rows: Rows, blocks: int) -> list[Part]:
        """Cut columns, unless each head of them has weights of its own."""
        whole = self.sums is None and len(rows.edge) > 0 and rows.edge[0].dim() > 1
        return super().split(x, rows, blocks) if whole else by_columns(self, x, blocks)

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros, or what will be written."""
        shape = x.shape[1:] if self.sums is None else (self.sums, *x.shape[1:])
        return x.new_empty(num_dst, *shape) if self.once else zeros(x, num_dst, *shape, dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add the block."""
        weight = per_head(rows.edge[0], accumulator(x.dtype)) if rows.edge else None
        spmm_(flat(state), block.rowptr, block.col, flat(x), weight, None, self.once)
        return state

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round once."""
        if self.count is not None:
            state.div_(divisor(self.count, state))
        return state.to(dtype), ()

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the sum."""
        return (out if self.count is None else out / divisor(self.count, out),)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Sum over the transposed block; weights get the product of the two rows that they join."""
        (out,), source, d_weight = saved, None, None
        weight = per_head(rows.edge[0], accumulator(out.dtype)) if rows.edge else None
        if needs.source:
            ptr, row, perm = block.transpose
            shape = out.shape[1:] if self.sums is None else out.shape[2:]
            source = out.new_empty(block.num_src, *shape)
            spmm_(flat(source), ptr, row, flat(out), weight, perm, True)
        if self.needs_source:
            assert x is not None and weight is not None
            d_weight = torch.empty_like(weight)
            sddmm_(d_weight, block.rowptr, block.col, flat(out), flat(x))
            d_weight = d_weight.view(rows.edge[0].shape)
        return source, Rows(edge=[d_weight] if rows.edge else [])


class Message(Reduce):
    r"""Sum of any message, :math:`\sum_j \phi(\mathbf{x}_j, \ldots)`, rebuilt under autograd in backward (case 2).

    It is the general path, and the oracle of those above and below that know their own gradient. It holds the messages
    of one block.

    Args:
        message: ``message(block, x, rows) -> [num_edges, ...]``; must be a function of its arguments alone, so that it
            computes the same when it is rebuilt.
        shape: Shape of one message.
    """

    def __init__(self, message: Callable[[Block, Tensor, Rows], Tensor], shape: Sequence[int]) -> None:
        self.message, self.shape = message, shape

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros."""
        return x.new_zeros(num_dst, *self.shape, dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add the block."""
        values = self.message(block, x, rows).to(state.dtype)
        return state.add_(segment_sum(block.row, block.num_dst, values))

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round once."""
        return state.to(dtype), ()

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the messages and differentiate them."""
        assert x is not None
        return rebuild(lambda x, rows: [self.message(block, x, rows)], [out[block.row]], x, rows, needs)


class Extremum(Reduce):
    r"""Largest (or smallest) entry among the source rows of each destination, 0 where there is none.

    As in PyTorch, and so in PyG, equal entries share the gradient evenly, wherever they live; the zero that the output
    starts from counts as one of them. It gathers the source rows of one block.

    Args:
        sign: 1 for the maximum, -1 for the minimum.
    """

    def __init__(self, sign: int) -> None:
        self.sign = sign

    saves_output = True

    def split(self, x: Tensor, rows: Rows, blocks: int) -> list[Part]:
        """Cut columns."""
        return by_columns(self, x, blocks)

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        """Return minus infinity, held by no edge."""
        best = x.new_full((num_dst, *x.shape[1:]), -torch.inf, dtype=accumulator(x.dtype))
        return best, torch.zeros_like(best)

    def step(self, state: tuple[Tensor, Tensor], block: Block, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Merge the block: whoever is larger brings its count."""
        best, count = state
        extremum_(flat(best), flat(count), block.rowptr, block.col, flat(x), self.sign > 0)
        return state

    def finish(self, state: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return 0 where there is no edge."""
        best, count = state
        out = (best * self.sign).masked_fill_(best == -torch.inf, 0).to(dtype)
        return out, ((count + (out == 0)).to(dtype),)

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return the extrema and the share of each edge that attains one."""
        return result, out / saved[0]

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Share the gradient among the edges that attain the extremum."""
        assert x is not None
        best, share = saved
        ptr, row, _ = block.transpose
        source = zeros(x, *x.shape, dtype=accumulator(x.dtype))
        extremum_grad_(flat(source), ptr, row, flat(x), flat(best), flat(share))
        return source.to(x.dtype), Rows()


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
    in backward a number for each edge and head, for as many heads as have rows that fit the cache together.

    Args:
        heads: Number of heads :math:`H`.
        channels: Number of values for each head :math:`C`.
        kind: ``ADDITIVE``, ``GATV2`` or ``DOT``.
        parameter: The negative slope, or :math:`\lambda`.
        degree: The number of in-edges of each destination.
        dropout: Probability and seed of dropout and the ids of the edges of a block, or None.
        groups: The groups of heads, as ranges.
        first: The number of the first head.
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
        first: int = 0,
    ) -> None:
        self.heads, self.channels, self.kind, self.parameter, self.degree = heads, channels, kind, parameter, degree
        self.dropout, self.groups, self.first = dropout, groups, first

    def split(self, x: Tensor, rows: Rows, blocks: int) -> list[Part]:
        """Return one reduction for each group of heads."""
        if len(self.groups) < 2:
            return super().split(x, rows, blocks)
        width, parts = x.size(1) // self.heads, []
        for g in self.groups:
            count = g.stop - g.start
            reduce = Softmax(count, self.channels, self.kind, self.parameter, self.degree, self.dropout, first=g.start)
            source, out = (slice(g.start * k, g.stop * k) for k in (width, self.channels))
            parts.append(Part(reduce, source, out, partial(of_heads, heads=g, total=self.heads)))
        return parts

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of a destination that has seen nothing."""
        lowest = x.new_full((num_dst, self.heads), -torch.inf, dtype=accumulator(x.dtype))
        return lowest, torch.zeros_like(lowest), zeros(lowest, num_dst, self.heads * self.channels)

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of packed rows."""
        values, keys = x.split([self.heads * self.channels, x.size(1) - self.heads * self.channels], 1)
        if self.kind == GATV2:
            return values, values
        # One line of memory holds narrow keys of several sources if they stand apart from the values.
        return keys.contiguous() if self.kind == ADDITIVE else keys, values

    def arguments(self, key: Tensor, value: Tensor, block: Block, rows: Rows, head: int) -> tuple[list[Any], list[Any]]:
        """Return the tensors and the settings of the operators."""
        att, edge = (rows.const[0], rows.const[1:]) if self.kind == GATV2 else (None, rows.const)
        att = None if att is None else att.reshape(-1).to(accumulator(value.dtype))
        mapped = embed(rows.edge[0], edge[0]).to(value.dtype) if rows.edge else None
        p, seed, e_id = (0.0, 0, None) if self.dropout is None else (*self.dropout[:2], self.dropout[2](block))
        query = rows.dst[0] if rows.dst else None
        return [key, value, query, mapped, att], [self.kind, self.parameter, e_id, seed, p, self.first + head]

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
        peak, total, out = state
        total.masked_fill_((self.degree == 0).unsqueeze(1), 1)
        out.view(-1, self.heads, self.channels).div_(total.unsqueeze(-1))
        return out.to(dtype), (peak, total)

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return the largest score, the normaliser and the product of output and gradient."""
        peak, total = saved
        inner, ids = torch.empty_like(peak), torch.arange(peak.size(0) + 1, dtype=torch.int32, device=peak.device)
        sddmm_(inner, ids, ids[:-1], out, result)  # without a product as wide as the rows
        return peak, total, inner

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the coefficients."""
        assert x is not None
        source = zeros(x, *x.shape, dtype=accumulator(x.dtype))
        values, keys = source.split([self.heads * self.channels, x.size(1) - self.heads * self.channels], 1)
        tensors, settings = self.arguments(*self.unpack(x), block, rows, 0)
        into = room(tensors, needs)
        attention_grad_(
            values, None if self.kind == GATV2 else keys, *into, block.rowptr, block.col, *block.transpose, *tensors,
            *saved, out, *settings,
        )  # fmt: skip
        return source.to(x.dtype), collect(into, rows)


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
        once: Whether there is a single block.

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
        once: bool,
    ) -> None:
        super().__init__(heads, channels, ADDITIVE, parameter, degree, dropout, groups)
        self.once, self.saves_output = once, not once

    def split(self, x: Tensor, rows: Rows, blocks: int) -> list[Part]:
        """Return itself: all heads read the same columns."""
        return Reduce.split(self, x, rows, blocks)

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return what was saved, and the product of output and gradient if there are several blocks."""
        return saved if self.once else super().prepare(saved, result, out)

    def columns(self, heads: slice) -> slice:
        """Return the columns of the values of some heads."""
        return slice(heads.start * self.channels, heads.stop * self.channels)

    def step(
        self, state: tuple[Tensor, Tensor, Tensor], block: Block, x: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the block into the running softmax."""
        (*_, weight, key_weight), (peak, total, out) = rows.const, state
        keys = F.linear(x, key_weight)
        for heads in self.groups:
            part = (peak[:, heads], total[:, heads], out[:, self.columns(heads)])
            value = F.linear(x, weight[self.columns(heads)])
            self.merge(part, block, keys[:, heads].contiguous(), value, self.of_heads(rows, heads), heads.start)
            del value  # or it would outlive the making of the next one
        return state

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Make the rows again, and their gradients, and from those the gradients of features and maps."""
        assert x is not None
        *_, weight, key_weight = rows.const
        keys = F.linear(x, key_weight)
        d_keys = zeros(keys, *keys.shape, dtype=accumulator(x.dtype))
        source = torch.zeros_like(x) if needs.source else None
        d_weight, parts = torch.empty_like(weight), []
        for heads in self.groups:
            columns = self.columns(heads)
            grad = out[:, columns]
            if len(self.groups) > 2:  # rows far apart take many pages of memory: to copy them is faster
                grad = grad.contiguous()
            value = F.linear(x, weight[columns])
            found = [t[:, heads] for t in saved]
            d_value, others = self.grad_of_heads(
                value, d_keys[:, heads], block, keys[:, heads].contiguous(), self.of_heads(rows, heads), found, grad,
                needs, heads.start,
            )  # fmt: skip
            parts.append(others)
            linear_grad(x, d_value, weight[columns], source, d_weight[columns])
            del value, d_value, grad  # or they would outlive the making of the next ones
        d_key_weight = torch.empty_like(key_weight)
        linear_grad(x, d_keys, key_weight, source, d_key_weight)
        dst, edge, const = (list(zip(*grads, strict=True)) for grads in zip(*parts, strict=True))
        return source, Rows(
            [None if g[0] is None else torch.cat(g, 1) for g in dst],
            [sum(g[1:], g[0]) for g in edge],
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
        into, walk = room(tensors, needs), (block.rowptr, block.col, *block.transpose)
        if self.once:  # values become their gradient
            _, _, query, mapped, _ = tensors
            additive_grad_(value, d_key, *into[:2], *walk, key, query, mapped, *saved, grad, *settings[1:])
            return value, collect(into, rows)
        d_value = zeros(value, *value.shape, dtype=accumulator(value.dtype))
        attention_grad_(d_value, d_key, *into, *walk, *tensors, *saved, grad, *settings)
        return d_value, collect(into, rows)


def by_columns(reduce: Reduce, x: Tensor, blocks: int) -> list[Part]:
    """Cut a reduction that treats all columns alike into parts of about equal width, unless all is in one block."""
    width = x.size(-1) if x.dim() > 1 else 1
    count = -(-width // COLUMNS) if blocks > 1 else 1
    if count < 2:
        return Reduce.split(reduce, x, Rows(), blocks)
    ends = [width * k // count for k in range(count + 1)]
    return [Part(reduce, slice(a, b), slice(a, b), lambda rows: rows) for a, b in pairwise(ends)]


def head_groups(heads: int, channels: int) -> list[slice]:
    """Return ranges of heads that have about as many values as travel at a time."""
    step = max(COLUMNS // max(channels, 1), 1)
    return [slice(h, min(h + step, heads)) for h in range(0, heads, step)]


def room(tensors: Sequence[Tensor | None], needs: Needs) -> list[Tensor | None]:
    """Return zeros for the gradients of queries, mapped features and ``att`` that are wanted."""
    query, mapped, att = tensors[2:]
    wanted = (query if needs.rows.dst and needs.rows.dst[0] else None, mapped, att)
    return [None if t is None else torch.zeros_like(t, dtype=accumulator(t.dtype)) for t in wanted]


def collect(grads: Sequence[Tensor | None], rows: Rows) -> Rows:
    """Return the gradients of rows, given those of queries, mapped features and ``att``."""
    d_query, d_mapped, d_att = grads
    edge: list[Tensor] = []
    const = [] if d_att is None else [d_att.view(rows.const[0].shape)]
    if d_mapped is not None:
        d_edge, d_map = embed_grad(d_mapped, rows.edge[0], rows.const[-1])
        edge, const = [d_edge], [*const, d_map]
    return Rows([d_query] if rows.dst else [], edge, const)


def of_heads(rows: Rows, heads: slice, total: int) -> Rows:
    """Return what some of all heads read: their share of queries and of constants, and the features of edges."""

    def cut(t: Any, dim: int) -> Any:
        width = 0 if t is None else t.size(dim) // total
        return None if t is None else t.narrow(dim, heads.start * width, (heads.stop - heads.start) * width)

    return Rows([cut(q, 1) for q in rows.dst], rows.edge, [cut(m, 0) for m in rows.const])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, on a CPU some rows at a time: MKL is up to 1.5 times as fast then, where
    rows of the result are no multiple of 64 bytes.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias)
    out = x.new_empty(x.size(0), weight.size(0))
    for rows, into in zip(x.split(1024), out.split(1024), strict=True):
        if bias is None:
            torch.mm(rows, weight.t(), out=into)
        else:
            torch.addmm(bias, rows, weight.t(), out=into)
    return out


def linear_grad(
    x: Tensor, grad: Tensor, weight: Tensor, source: Tensor | None, d_weight: Tensor | None,
    d_bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Add to the gradient of ``x`` and write those of weight and bias, given that of ``F.linear(x, weight, bias)``."""
    grad = grad.to(x.dtype)
    if source is not None:
        source.addmm_(grad, weight)
    if d_weight is not None:
        torch.mm(grad.t(), x, out=d_weight)
    if d_bias is not None:
        torch.sum(grad, 0, out=d_bias)


def embed(edge: Tensor, weight: Tensor) -> Tensor:
    """Map the features of edges, ``[num_edges, D]`` or ``[num_edges]``, by a matrix ``[*, D]``."""
    return edge.view(edge.size(0), -1).to(weight.dtype) @ weight.t()


def embed_grad(grad: Tensor, edge: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both.

    That of the matrix is one sum over all edges of a block: in double precision it has no larger error than PyG's way.
    """
    features = edge.view(edge.size(0), -1)
    d_weight = grad.double().t() @ features.double() if grad.size(1) <= 64 else grad.t() @ features.to(grad.dtype)
    return (grad.to(weight.dtype) @ weight).to(edge.dtype).view_as(edge), d_weight.to(weight.dtype)


def divisor(count: Tensor, like: Tensor) -> Tensor:
    """Return what turns sums over as many rows into means."""
    return count.clamp(min=1).to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def flat(x: Tensor) -> Tensor:
    """Return rows as a matrix, which shares their memory if they are contiguous."""
    return x.reshape(x.size(0), math.prod(x.shape[1:]))


def per_head(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return weights ``[num_edges]`` or ``[num_edges, H]`` as a matrix."""
    return weight.view(weight.size(0), -1).to(dtype)


def rebuild(
    function: Callable[[Tensor, Rows], list[Tensor]], grads: list[Tensor], x: Tensor, rows: Rows, needs: Needs
) -> Grads:
    """Run ``function(x, rows)`` once more under autograd and return the gradients that ``needs`` names."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_(needs.source)
        leaves = Rows(
            *(
                [t.detach().requires_grad_(n) for t, n in zip(ts, ns, strict=True)]
                for ts, ns in zip(rows, needs.rows, strict=True)
            )
        )
        outputs = function(leaf, leaves)
    wanted = [t for t in (leaf, *leaves.dst, *leaves.edge, *leaves.const) if t.requires_grad]
    if not wanted or not any(o.requires_grad for o in outputs):
        found = {}
    else:
        got = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        found = dict(zip(map(id, wanted), got, strict=True))
    pick = Rows(*([found.get(id(t)) for t in ts] for ts in leaves))
    source = found.get(id(leaf))
    return (torch.zeros_like(x) if source is None and needs.source else source), pick
