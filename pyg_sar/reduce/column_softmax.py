r"""PyG's ``SoftmaxAggregation`` of source rows, as sums: no number is made for an edge."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.ops import attention_, attention_grad_, empty, spmm_, zeros
from pyg_sar.ops.reference import ADDITIVE, accumulator
from pyg_sar.reduce.base import Grads, Needs, Reduce, Rows, column_tiles

# What exponents are relative to, [M, F] or [1, F] (None at first), and the sums [numerators | normalisers], [M, 2 * F].
State = tuple[Tensor | None, Tensor]


class ColumnSoftmax(Reduce):
    r"""In each column :math:`\sum_j \alpha_{ij} v_j` with :math:`\alpha_{ij} = \mathrm{softmax}_j(t v_j)`, the softmax
    aggregation of the `"DeeperGCN: All You Need to Train Deeper GCNs" <https://arxiv.org/abs/2006.07739>`_ paper.

    A score depends on the source alone. With :math:`w_j = e^{t v_j - r}`, :math:`r` the largest score in the block, the
    output is the quotient of the sums of :math:`w_j v_j` and of :math:`w_j` over the in-edges; exponentials are taken
    once for each source row instead of each edge. Blocks merge as in any online softmax. Backward saves the output
    :math:`o`, :math:`r` and the normaliser :math:`l`, makes :math:`w` again and sums over the transposed block,

    .. math::
        A_j = \sum_i \frac{g_i}{l_i}, \quad B_j = \sum_i \frac{g_i}{l_i} (o_i - c), \quad
        \frac{\partial L}{\partial v_j} = w_j A_j + t s_j, \quad \frac{\partial L}{\partial t} = \sum_j v_j s_j, \quad
        s_j = w_j ((v_j - c) A_j - B_j)

    where a constant :math:`c` amid the values of the block cancels and keeps rounding small. Where scores lie so far
    apart that a destination could have none but vanishing exponentials, the block runs as attention whose heads are
    the columns, which is much slower.

    Args:
        degree: The number of in-edges of each destination.
        t: The inverse temperature, unless it is learnt: then it is ``rows.const[0]``, of one number.
        semi_grad: Whether :math:`\alpha` counts as constant in backward.
    """

    saves_output = True
    tiles = column_tiles

    def __init__(self, degree: Tensor, t: float = 1.0, semi_grad: bool = False) -> None:
        self.degree, self.t, self.semi_grad = degree, t, semi_grad

    def into(self, graph: ShardedGraph, start: int, end: int) -> ColumnSoftmax:
        """Return the softmax with the degrees of these destinations."""
        other = copy.copy(self)
        other.degree = self.degree[start:end].to(graph.device)
        return other

    def init(self, x: Tensor, num_dst: int) -> State:
        """Return the state of destinations that have seen nothing."""
        return None, zeros(x, num_dst, 2 * x.size(1), dtype=accumulator(x.dtype))

    def temperature(self, rows: Rows) -> Tensor | float:
        """Return the inverse temperature."""
        return rows.const[0] if rows.const else self.t

    def step(self, state: State, block: Block, x: Tensor, rows: Rows) -> State:
        """Merge the block into the running softmax."""
        (top, sums), value, t = state, x.to(accumulator(x.dtype)), self.temperature(rows)
        here = reference(ends(value), t)
        if here is None:
            out, total = sums.chunk(2, 1)
            lowest = torch.full_like(total, torch.finfo(total.dtype).min)
            top = lowest if top is None else torch.where(total > 0, top, lowest)
            attention_(top, total, out, block.rowptr, block.col, value * t, value, *AS_HEADS, block.dst)
            return top, sums
        both = empty(value, value.size(0), 2 * value.size(1))  # [N, 2 * F]
        product, weight = both.chunk(2, 1)
        for span in spans(value):
            weight[span] = exponentials(value[span], t, here)
            torch.mul(weight[span], value[span], out=product[span])
        more = sums if top is None else zeros(sums, *sums.shape)
        spmm_(more, block.rowptr, block.col, both, None, None, False, block.dst)
        return (here, sums) if top is None else merge(top, sums, here, more)

    def finish(self, state: State, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise; a destination without edges gets 0."""
        top, sums = state
        out, total = sums.chunk(2, 1)
        total = total.masked_fill((self.degree == 0).unsqueeze(1), 1)
        return (out / total).to(dtype), (total if top is None else top, total)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the exponentials and sum over the transposed block."""
        assert x is not None
        (top, total, out), value, t = saved, x.to(accumulator(x.dtype)), self.temperature(rows)
        limits = ends(value)
        here = reference(limits, t)
        if here is None:
            d_value, d_score = (zeros(value, *value.shape) for _ in range(2))
            top, inner = top.expand_as(total).contiguous(), out.to(total.dtype) * d_out
            attention_grad_(
                d_value, d_score, None, None, None, block.rowptr, block.col, *block.transpose, value * t, value, None,
                None, None, top, total, inner, d_out.to(value.dtype), *AS_HEADS[3:], block.dst,
            )  # fmt: skip
        else:
            center = limits.mean(0)
            both = empty(total, total.size(0), 2 * total.size(1))  # [M, 2 * F]
            share, inner = both.chunk(2, 1)
            torch.div(since(here, top), total, out=share).mul_(d_out)
            torch.sub(out.to(total.dtype), center, out=inner).mul_(share)
            sums = zeros(value, value.size(0), 2 * value.size(1))  # [N, 2 * F]
            ptr, row = block.by_source
            spmm_(sums, ptr, row, both, None, None, False)
            d_value, d_score = sums.chunk(2, 1)
            for span in spans(value):
                weight = exponentials(value[span], t, here)
                torch.addcmul(-d_score[span], value[span] - center, d_value[span], out=d_score[span]).mul_(weight)
                d_value[span] *= weight
        if self.semi_grad:
            return d_value.to(x.dtype).contiguous(), Rows()
        const = [(value * d_score).sum().to(t.dtype).view_as(t)] if isinstance(t, Tensor) else []
        return d_value.add(d_score.mul_(t)).to(x.dtype), Rows(const=const)


# Of 'attention_', after the values: no queries, edges and vector; scores that are the keys; no dropout; first head.
AS_HEADS = (None, None, None, ADDITIVE, 1.0, None, 0, 0.0, 0)


def ends(x: Tensor) -> Tensor:
    """Return the least and the largest value of each column, ``[2, F]``; zeros if there are no rows."""
    return torch.stack([x.amin(0), x.amax(0)]) if x.size(0) > 0 else x.new_zeros(2, x.size(1))


def reference(values: Tensor, t: Tensor | float) -> Tensor | None:
    """Return for each column a whole number next to its largest score ``x * t``, ``[1, F]``, so that differences of two
    are exact; or None where an exponential relative to it would be less than the root of the least number. ``values``
    are the :func:`ends` of ``x``.
    """
    scores = values * t
    top = scores.amax(0, keepdim=True).ceil_()
    near = top - scores.amin(0) <= -math.log(torch.finfo(scores.dtype).tiny) / 2  # NaN is not less either
    return top if bool(near.all()) else None


def spans(x: Tensor) -> Iterator[slice]:
    """Return ranges of rows that stay in a cache, or keep a GPU busy."""
    step = 2**12 if x.device.type == "cpu" else 2**18
    return (slice(k, k + step) for k in range(0, x.size(0), step))


def exponentials(x: Tensor, t: Tensor | float, top: Tensor) -> Tensor:
    """Return the exponentials of scores ``x * t`` relative to a row. The difference is taken in double precision,
    because what rounding takes off a large one is the relative error of the exponential.
    """
    return (x * t).double().sub_(top).exp_().to(x.dtype)


def merge(top: Tensor, sums: Tensor, here: Tensor, more: Tensor) -> State:
    """Merge two states, the second of which is relative to a row ``here`` in common; the first one is overwritten.
    A destination whose normaliser is 0 has seen nothing, and its reference does not count.
    """
    old, new = sums.chunk(2, 1)[1] > 0, more.chunk(2, 1)[1] > 0
    both = torch.where(new, torch.where(old, torch.maximum(top, here), here), top)
    for kept, below in ((sums, top), (more, here)):
        kept.view(sums.size(0), 2, -1).mul_(since(below, both).unsqueeze(1))
    return both, sums.add_(more)


def since(below: Tensor, top: Tensor) -> Tensor:
    """Return the exponential of what a reference lies below another one; 1 where it is above, which is nobody's."""
    return (below - top).clamp_(max=0).exp_()
