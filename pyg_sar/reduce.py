r"""How messages combine: each reduction is a few small functions over one block, without communication.

A reduction is a state that takes one source block after the other (``init``, ``step``, ``finish``) and the gradient of
one block (``grad``). ``needs_source`` says whether that gradient needs the source rows again: *case 2* of the SAR
paper, against *case 1*, in which walking the transposed block is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.graph import Block
from pyg_sar.ops import accumulator, sddmm, segment_max, segment_sum, spmm


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


class Reduce:
    """Base class; ``state`` is whatever ``init`` returns, ``saved`` are the tensors that backward reads."""

    needs_source = True

    def init(self, x: Tensor, num_dst: int) -> Any:
        """Return the state before the first block."""
        raise NotImplementedError

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Return the state after a block with source rows ``x``."""
        raise NotImplementedError

    def finish(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output and what backward needs of it."""
        raise NotImplementedError

    def prepare(self, saved: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        """Turn what was saved, once, into what ``grad`` reads for every block; ``out`` is the output's gradient."""
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
    """

    def __init__(self, learn_weight: bool = False) -> None:
        self.needs_source = learn_weight

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        """Return zeros."""
        return x.new_zeros(num_dst, *x.shape[1:], dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        """Add the block."""
        return state.add_(spmm(block.rowptr, block.col, x, *rows.edge))

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Round once."""
        return state.to(dtype), ()

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Sum over the transposed block; weights get the product of the two rows that they join."""
        source = weight = None
        if needs.source:
            ptr, row, perm = block.transpose
            source = spmm(ptr, row, out, *(w[perm] for w in rows.edge))
        if self.needs_source:
            assert x is not None
            weight = sddmm(block.rowptr, block.row, block.col, out, x, heads=rows.edge[0].dim() == 2)
        return source, Rows(edge=[weight] if rows.edge else [])


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

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor]:
        """Return minus infinity, held by no edge."""
        best = x.new_full((num_dst, *x.shape[1:]), -torch.inf)
        return best, torch.zeros_like(best, dtype=accumulator(x.dtype))

    def step(self, state: tuple[Tensor, Tensor], block: Block, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Merge the block: whoever is larger brings its count."""
        best, count = state
        row, values = block.row, x[block.col] * self.sign
        here = segment_max(row, block.num_dst, values)
        ties = segment_sum(row, block.num_dst, (values == here[row]).to(count.dtype))
        new = torch.maximum(best, here)
        return new, count * (best == new) + ties * (here == new)

    def finish(self, state: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return 0 where there is no edge."""
        best, count = state
        out = (best * self.sign).masked_fill_(best == -torch.inf, 0)
        return out, (out, (count + (out == 0)).to(dtype))

    def prepare(self, saved: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        """Return the extrema and the share of each edge that attains one."""
        best, count = saved
        return best, out / count

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Share the gradient among the edges that attain the extremum."""
        assert x is not None
        (best, share), row = saved, block.row
        hit = (x[block.col] == best[row]) * share[row]
        return segment_sum(block.col.long(), block.num_src, hit), Rows()


class Softmax(Reduce):
    r"""Attention: :math:`\sum_j \alpha_{ij} \mathbf{v}_j` with :math:`\alpha_{ij} = \mathrm{softmax}_j(s_{ij})`.

    A source row is packed as ``[values (H * C) | terms of the score (H)]``. The forward pass keeps a running maximum
    :math:`m`, normaliser :math:`l` and output :math:`o` for each destination ("online softmax", Milakov & Gimelshein
    2018) and saves the output and the log-sum-exp; backward rebuilds :math:`\alpha = e^{s - \mathrm{lse}}` and uses, as
    FlashAttention does (Dao et al. 2022, appendix B),

    .. math::
        \frac{\partial L}{\partial s_{ij}} = \alpha_{ij} \left( d_{ij} \langle \mathbf{g}_i, \mathbf{v}_j \rangle
        - \langle \mathbf{g}_i, \mathbf{o}_i \rangle \right)

    with :math:`d_{ij}` the dropout factor. Only numbers for each edge and head of one block exist at a time.

    Args:
        heads: Number of heads :math:`H`.
        channels: Number of values for each head :math:`C`.
        score: ``score(block, terms, rows) -> [num_edges, H]`` from the terms of the source rows, ``[num_src, H]``.
        dropout: ``dropout(block) -> [num_edges, H]`` factors, or None.
    """

    def __init__(
        self,
        heads: int,
        channels: int,
        score: Callable[[Block, Tensor, Rows], Tensor],
        dropout: Callable[[Block], Tensor] | None = None,
    ) -> None:
        self.heads, self.channels, self.score, self.dropout = heads, channels, score, dropout

    def unpack(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values ``[*, H, C]`` and the terms of the score ``[*, H]`` of packed rows."""
        width = self.heads * self.channels
        return x[:, :width].view(-1, self.heads, self.channels), x[:, width:]

    def init(self, x: Tensor, num_dst: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of a destination that has seen nothing."""
        x = x.new_empty(0, dtype=accumulator(x.dtype))
        lowest = x.new_full((num_dst, self.heads), -torch.inf)
        return lowest, torch.zeros_like(lowest), x.new_zeros(num_dst, self.heads, self.channels)

    def step(
        self, state: tuple[Tensor, Tensor, Tensor], block: Block, x: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge the block into the running softmax."""
        peak, total, out = state
        values, terms = self.unpack(x)
        score, row = self.score(block, terms, rows).to(peak.dtype), block.row
        new = torch.maximum(peak, segment_max(row, block.num_dst, score))
        anchor = new.masked_fill(new == -torch.inf, 0)  # a destination without edges so far
        weight, decay = (score - anchor[row]).exp_(), (peak - anchor).exp_()
        total = total.mul_(decay).add_(segment_sum(row, block.num_dst, weight))
        if self.dropout is not None:
            weight = weight * self.dropout(block)
        out = out.mul_(decay.unsqueeze(-1)).add_(spmm(block.rowptr, block.col, values, weight))
        return new, total, out

    def finish(self, state: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise; a destination without edges gets 0."""
        peak, total, out = state
        some = total > 0
        out = (out / total.where(some, 1).unsqueeze(-1)).to(dtype)
        return out, (out, torch.where(some, peak + total.log(), 0))

    def prepare(self, saved: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        """Return the log-sum-exp and the product of output and gradient."""
        result, lse = saved
        return lse, (out * result).sum(-1, dtype=lse.dtype)

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Rebuild the coefficients from the log-sum-exp; the gradient of the score itself is left to autograd."""
        assert x is not None
        (lse, inner_out), row = saved, block.row
        values, terms = self.unpack(x)
        alpha = (self.score(block, terms, rows).to(lse.dtype) - lse[row]).exp_()
        drop = None if self.dropout is None else self.dropout(block)
        inner = sddmm(block.rowptr, row, block.col, out, values, heads=True).to(lse.dtype)
        if drop is not None:
            inner = inner * drop
        d_score = alpha * (inner - inner_out[row])
        d_terms, d_rows = rebuild(
            lambda terms, rows: [self.score(block, terms, rows)], [d_score.to(terms.dtype)], terms, rows, needs
        )
        if not needs.source:
            return None, d_rows
        ptr, dst, perm = block.transpose
        d_values = spmm(ptr, dst, out, (alpha if drop is None else alpha * drop)[perm])
        assert d_terms is not None
        return torch.cat([d_values.flatten(1), d_terms], 1), d_rows


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
