r"""Runs a layer that knows nothing of sharded graphs block by block, by its own code.

Each block is run within a :class:`~pyg_sar.nn.replay.trace.Trace` that cuts its reductions by destination. What the
blocks contribute is merged, as often as reductions need the results of others. Backward runs block after block again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from pyg_sar.aggregate import aggregate
from pyg_sar.block import Block
from pyg_sar.nn.replay.runner import Pair, Runner
from pyg_sar.nn.replay.trace import NotStreamable, Reduction
from pyg_sar.ops.reference import accumulator
from pyg_sar.pieces import Totals, pieces
from pyg_sar.reduce import Grads, Needs, Reduce, Rows
from pyg_sar.reduce.base import flat


class Pass(Reduce):
    """Merges some reductions of a layer, of which none needs another one.

    ``rows.dst`` ends with the results of the reductions ``given``, ``rows.const`` with the parameters of the layer.
    """

    expose: tuple[int, ...] = ()  # known reductions whose gradient is asked for

    def __init__(self, runner: Runner, keys: Sequence[int], given: Sequence[int]) -> None:
        self.runner, self.keys, self.given = runner, list(keys), list(given)
        self.found = runner.program.found
        self.extrema = [k for k in self.keys if self.found[k].op != "sum"]
        self.saves_output = bool(self.extrema)
        self.optional = runner.optional

    def shape(self, k: int, num_dst: int) -> tuple[int, ...]:
        """Return the shape of the result of a reduction."""
        return (num_dst, *self.found[k].like.shape[1:])

    def check(self, k: int, found: Reduction) -> None:
        """Raise for a reduction that was not there, or was another one, when the layer was probed."""
        known = self.found.get(k)
        if known is None or (known.op, known.like.shape[1:]) != (found.op, found.like.shape[1:]):
            raise self.runner.changed()

    def known(self, rows: Rows, saved: tuple[Tensor, ...] = ()) -> dict[int, Tensor]:
        """Return the results of other reductions."""
        return dict(zip(self.given, rows.dst[len(rows.dst) - len(self.given) :], strict=True))

    def init(self, x: Tensor, num_dst: int) -> dict[int, Any]:
        """Return nothing, of every reduction."""
        state: dict[int, Any] = {}
        for k in self.keys:
            like, shape = self.found[k].like, self.shape(k, num_dst)
            if k in self.extrema:
                lowest = -torch.inf if self.found[k].op == "amax" else torch.inf
                state[k] = x.new_full(shape, lowest, dtype=like.dtype), x.new_zeros(shape, dtype=like.dtype)
            else:
                state[k] = x.new_zeros(shape, dtype=accumulator(like.dtype))
        return state

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Merge the block, piece by piece."""
        for piece in pieces(self.runner.graph, block):
            self.merge(piece.narrow(state), piece.block, x, piece.rows(rows))
        return state

    def merge(self, state: dict[int, Any], block: Block, x: Tensor, rows: Rows) -> None:
        """Merge a piece of a block into the state of its destinations."""

        @torch.no_grad()  # a layer's code may have switched gradients on
        def cut(k: int, found: Reduction) -> None:
            self.check(k, found)
            if k not in state:
                return
            if k in self.extrema:
                merged = _merge(found.op, state[k], found.extremum(block.num_dst))
                for t, new in zip(state[k], merged, strict=True):
                    t.copy_(new)
            else:
                found.add_to(state[k], block)

        self.runner.run_block(block, x, rows, cut, self.keys, known=self.known(rows))

    def finish(self, state: dict[int, Any], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return results side by side, and how many entries attain extrema; without any these are 0."""
        for k in self.extrema:
            value, count = state[k]
            value = value.masked_fill(count == 0, 0)
            state[k] = value, count + (value == 0)
        results = [flat(state[k][0] if k in self.extrema else state[k]) for k in self.keys]
        counts = tuple(state[k][1] for k in self.extrema)
        dtype = functools.reduce(torch.promote_types, (self.found[k].like.dtype for k in self.keys))
        return (torch.cat(results, 1) if len(results) > 1 else results[0]).to(dtype), counts

    def split_results(self, out: Tensor) -> dict[int, Tensor]:
        """Return the results one by one."""
        n = out.size(0)
        ends = accumulate((math.prod(self.shape(k, 1)) for k in self.keys), initial=0)
        return {
            k: out[:, a:b].reshape(self.shape(k, n)).to(self.found[k].like.dtype)
            for k, (a, b) in zip(self.keys, pairwise(ends), strict=True)
        }

    def prepare(self, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
        """Share the gradients of extrema; return results, if they are needed, and gradients."""
        grads = self.split_results(d_out)
        if not self.extrema:
            return tuple(grads.values())
        *counts, result = saved
        for k, count in zip(self.extrema, counts, strict=True):
            grads[k] = grads[k] / count
        results = self.split_results(result)
        return (*(results[k] for k in self.extrema), *grads.values())

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Run once more under autograd, piece by piece."""
        assert x is not None
        totals = Totals(x, rows)
        for piece in pieces(self.runner.graph, block):
            some = piece.narrow(saved)
            grads = self.rebuild(piece.block, x, piece.rows(rows), some, d_out, needs)
            totals.add(grads, piece.dst, piece.edges)
        return totals.grads(needs)

    def rebuild(
        self, block: Block, x: Tensor, rows: Rows, saved: tuple[Tensor, ...], d_out: Tensor, needs: Needs
    ) -> Grads:
        """Return the gradients of a piece: what is reduced, or updated, has the gradient of its result."""
        best, grads = dict(zip(self.extrema, saved, strict=False)), self.grads(saved)

        def run(leaf: Tensor, leaves: Rows) -> list[Pair]:
            pairs: list[Pair] = []

            def cut(k: int, found: Reduction) -> None:
                self.check(k, found)
                if k in grads and found.src.requires_grad:
                    grad = found.read(grads[k]).to(found.src.dtype)
                    grad = grad.masked_fill(found.src != found.read(best[k]), 0) if k in best else grad
                    pairs.append((found.src, grad))

            known = self.known(leaves, saved)
            result = self.runner.run_block(block, leaf, leaves, cut, known=known, expose=self.expose)
            if not self.keys and result.requires_grad:  # updated edges
                pairs.append((result, d_out[block.edges]))
            return pairs

        return self.runner.rebuild(x, rows, needs, run)

    def grads(self, saved: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Return the gradients of results."""
        return dict(zip(self.keys, saved[len(self.extrema) :], strict=True))


class SoftmaxPass(Pass):
    r"""Merges the maximum of scores, the sum of their exponentials and sums linear in the quotients, all at once.

    A block's results by its own maximum :math:`a` and normaliser :math:`b` count :math:`b e^{a - m}` in the whole.
    """

    def __init__(self, runner: Runner) -> None:
        (self.row_max,), (self.normaliser,), keys = runner.program.groups
        super().__init__(runner, keys, ())
        self.saves_output, self.expose = True, (self.normaliser,)

    def init(self, x: Tensor, num_dst: int) -> dict[int, Any]:
        """Return the state of destinations that have seen nothing, and what their sums, 0, are divided by."""
        state = super().init(x, num_dst)
        dtype = accumulator(self.found[self.normaliser].like.dtype)
        ones = x.new_ones(self.shape(self.normaliser, num_dst), dtype=dtype)
        return {**state, self.row_max: torch.full_like(ones, -torch.inf), self.normaliser: ones}

    def merge(self, state: dict[int, Any], block: Block, x: Tensor, rows: Rows) -> None:
        """Merge a piece; where all scores so far are minus infinity, the normaliser is 0."""
        new: dict[int, Tensor] = {}
        count: Any = None  # of entries that attain the maximum

        @torch.no_grad()
        def cut(k: int, found: Reduction) -> Tensor:
            nonlocal count
            self.check(k, found)
            if k == self.row_max:
                new[k], count = found.extremum(block.num_dst)
            else:
                new[k] = torch.zeros_like(state[k])
                found.add_to(new[k], block)
            # This block's own result; where all of its scores are minus infinity, one that makes all coefficients 0.
            own = new[k].masked_fill(new[k] == -torch.inf, 0) if k == self.row_max else new[k]
            own = own.masked_fill(own == 0, 1) if k == self.normaliser else own
            return own.to(found.like.dtype)

        self.runner.run_block(block, x, rows, cut, known=self.known(rows))
        if len(new) < len(state):
            raise self.runner.changed()
        row_max = torch.maximum(state[self.row_max], new[self.row_max])
        finite = row_max.masked_fill(row_max == -torch.inf, 0)
        old = (state[self.row_max] - finite).exp_().masked_fill_(count == 0, 1)
        weight = new[self.normaliser] * (new[self.row_max] - finite).exp_()
        for k in self.keys:
            state[k].mul_(heads(old, state[k])).add_(new[k].mul_(heads(weight, new[k])))
        state[self.row_max].copy_(row_max)
        state[self.normaliser].mul_(old).add_(weight)

    def finish(self, state: dict[int, Any], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise; a destination without edges gets 0, and one of which all scores are minus infinity 0 / 0."""
        row_max, normaliser = state.pop(self.row_max), state.pop(self.normaliser)
        for k in self.keys:
            state[k].div_(heads(normaliser, state[k]))
        out, _ = super().finish(state, dtype)
        return out, (row_max, normaliser)

    def condense(self, saved: tuple[Tensor, ...], out: Tensor | None, d_out: Tensor) -> tuple[Tensor, ...]:
        """Return maximum, normaliser and its gradient."""
        assert out is not None
        row_max, normaliser = saved
        results, grads = self.split_results(out), self.split_results(d_out)
        delta = sum((fold(grads[k] * results[k], normaliser) for k in self.keys), torch.zeros_like(normaliser))
        return row_max, normaliser, -delta / normaliser

    def prepare(self, saved: tuple[Tensor, ...], d_out: Tensor) -> tuple[Tensor, ...]:
        """Add the gradients of the sums."""
        return (*saved, *self.split_results(d_out).values())

    def grads(self, saved: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """Return the gradients of the normaliser and of the sums."""
        return dict(zip((self.normaliser, *self.keys), saved[2:], strict=True))

    def known(self, rows: Rows, saved: tuple[Tensor, ...] = ()) -> dict[int, Tensor]:
        """Return maximum and normaliser, in backward."""
        pairs = zip((self.row_max, self.normaliser), saved, strict=False)
        return {k: t.to(self.found[k].like.dtype) for k, t in pairs}


class Update(Pass):
    """Updates edges, when all reductions are known: a pass that merges none."""

    def init(self, x: Tensor, num_dst: int) -> Any:
        """Return place for all edges."""
        like = self.runner.program.updated
        assert like is not None
        return like.new_empty(self.runner.graph.num_edges, *like.shape[1:])

    def step(self, state: Any, block: Block, x: Tensor, rows: Rows) -> Any:
        """Update those of the block, piece by piece."""
        for piece in pieces(self.runner.graph, block):
            some = piece.rows(rows)
            updated = self.runner.run_block(piece.block, x, some, self.check, known=self.known(some))
            self.runner.put(updated, state, piece.block.edges)
        return state

    def finish(self, state: Any, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the updated edges."""
        return state, ()


def heads(weight: Tensor, like: Tensor) -> Tensor:
    """Return a factor for each destination and head in the shape of results, whose heads may lie side by side."""
    if like.shape[: weight.dim()] == weight.shape:
        return weight.reshape(*weight.shape, *[1] * (like.dim() - weight.dim()))
    n, h = weight.size(0), math.prod(weight.shape[1:])
    width = math.prod(like.shape[1:])
    if h == 0 or width % h:
        raise NotStreamable("sums have no column for each score")
    return weight.reshape(n, h, 1).expand(n, h, width // h).reshape(like.shape)


def fold(values: Tensor, like: Tensor) -> Tensor:
    """Add up what belongs to the same destination and head."""
    return values.reshape(*like.shape, math.prod(values.shape[1:]) // max(math.prod(like.shape[1:]), 1)).sum(-1)


def in_passes(runner: Runner) -> Tensor:
    """Run a call in as many passes over the blocks as its reductions need each other."""
    graph = runner.graph
    x, dst, edge, const = runner.rows()
    known: dict[int, Tensor] = {}
    for group in runner.program.groups:
        merge = Pass(runner, group, tuple(known))
        out = aggregate(graph, merge, x, [*dst, *known.values()], edge, const)
        known |= merge.split_results(out)
    if runner.call.updates:
        return aggregate(graph, Update(runner, (), tuple(known)), x, [*dst, *known.values()], edge, const)
    return runner.finish(known)


def in_one_pass(runner: Runner) -> Tensor:
    """Run a call with a softmax in one pass over the blocks."""
    graph, softmax = runner.graph, SoftmaxPass(runner)
    x, dst, edge, const = runner.rows()
    known = softmax.split_results(aggregate(graph, softmax, x, dst, edge, const))
    for k in (softmax.row_max, softmax.normaliser):  # whatever they are: what is made of them is known
        known[k] = x.new_ones(softmax.shape(k, graph.num_dst), dtype=softmax.found[k].like.dtype)
    return runner.finish(known)


Extremum = tuple[Tensor, Tensor]  # and by how many entries it is attained


def _merge(op: str, one: Extremum, other: Extremum) -> Extremum:
    """Merge extrema of different entries."""
    (best, count), (new, more) = one, other
    better = (more > 0) & ((count == 0) | new.isnan() | ((new > best) if op == "amax" else (new < best)))
    count = torch.where(better, more, torch.where(new == best, count + more, count))
    return torch.where(better, new, best), count
