r"""Verifies strategies on the probe graph: outputs and gradients must be those of the layer's own code on the whole."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from pyg_sar.nn.replay.isolate import substituted
from pyg_sar.nn.replay.probe import Problem, close
from pyg_sar.nn.replay.probe_graph import BLOCKS
from pyg_sar.nn.replay.strategy import Strategy
from pyg_sar.ops.dropout import NoDropout
from pyg_sar.structure import tensors

FEW = 8  # messages of a chunk of the probe graph


def passing(strategies: Iterator[Strategy], *problems: Problem) -> Generator[Strategy, None, str]:
    """Yield the strategies that solve all problems; return why none does."""
    why, some = "", False
    for strategy in strategies:
        if wrong := next(filter(None, (difference(strategy, problem) for problem in problems)), ""):
            why = f"its {wrong} would differ"
        else:
            some = True
            yield strategy
    return "" if some else why


def difference(strategy: Strategy, problem: Problem) -> str:
    """Return in what a strategy and the layer's own code differ; the strategy is told which inputs nothing reads.

    Outputs are compared with other parameters, too, where some that are read, or buffers, hold one number, as gates do
    at the beginning: with zeros, less may be done. So they are with other rows of what all edges share, of which the
    first ones may be alike.
    """
    while (found := compared(strategy, problem)) is None:
        problem = problem.positive()
    if found:
        return found
    aside = {id(p) for p in strategy.program.unused}
    read = [*(p for p in problem.layer.parameters() if id(p) not in aside), *problem.layer.buffers()]
    alike, other = any(t.is_floating_point() and bool((t == t.flatten()[:1]).all()) for t in read), problem.shuffled()
    if alike or other is not problem:
        with other_parameters(problem), suppress(Exception):  # which its code may not be made for
            found = compared(strategy, other, grads=False) or ""
    return found


@contextmanager
def other_parameters(problem: Problem) -> Iterator[None]:
    """Have the layer read other parameters and buffers of about the same size, none of which is zero."""
    own = [t for t in (*problem.layer.parameters(), *problem.layer.buffers()) if t.is_floating_point()]
    others = []
    for t in own:
        size = t.detach().double().square().mean().sqrt()
        more = torch.rand(t.shape, generator=problem.random, dtype=torch.float64, device="cpu").to(t.device) * 0.2 + 0.1
        other = t.detach() + more * torch.where(size > 0, size, 1.0)
        others.append(other.to(t.dtype).requires_grad_(t.requires_grad))
    with substituted(problem.layer, own, others):
        yield


def compared(strategy: Strategy, problem: Problem, grads: bool = True) -> str | None:
    """Return the difference on a problem, of outputs and perhaps gradients; None if the layer's code makes no finite
    number there, that could differ.
    """
    own = [p for p in problem.layer.parameters() if p.requires_grad]
    copies = [p.detach().requires_grad_() for p in own]  # whose hooks are nobody's
    with substituted(problem.layer, own, copies):
        one, other = problem.leaves(), problem.leaves()
        with NoDropout():
            expected = problem.run_whole(one)
            if expected.numel() > 0 and not expected.isfinite().any():
                return None
            found = strategy.run(other, problem.probe_graph.in_blocks[BLOCKS], False, FEW)
            if expected.shape != found.shape or not close(found, expected):
                return "output"
            if strategy.name != "kernel" and not same_on_shares(strategy, problem, expected.detach()):
                return "output on a worker's share"
        if not grads:
            return ""
        program = strategy.program
        parameters = [*copies, *(p for p in program.hidden if p.requires_grad)]
        grad = torch.randn(expected.shape, generator=problem.random, dtype=torch.float64, device="cpu").to(expected)
        pairs = []
        for out, call in ((found, other), (expected, one)):
            wanted = [t for t in tensors(call.kwargs) if t.requires_grad] + parameters
            pairs.append(torch.autograd.grad(out, wanted, grad, allow_unused=True) if out.requires_grad else ())
    if len(pairs[0]) != len(pairs[1]):
        return "gradients"
    unread = {id(t) for t, g in zip(wanted, pairs[1], strict=False) if g is None}
    program.unused = [p for p, copy in zip(own, copies, strict=True) if id(copy) in unread]
    program.unread = frozenset(
        (name, side)
        for name, value in one.kwargs.items()
        for side, t in enumerate(value if isinstance(value, tuple) else (value, value))
        if id(t) in unread
    )
    for a, b in zip(*pairs, strict=True):
        like = a if a is not None else b
        if like is not None and not close(*(torch.zeros_like(like) if g is None else g for g in (a, b))):
            return "gradients"
    return ""


def same_on_shares(strategy: Strategy, problem: Problem, expected: Tensor) -> bool:
    """Whether two workers, each with some of the destinations and all their edges, find what one finds."""
    found = torch.full_like(expected, torch.nan)
    for share in problem.probe_graph.shares:
        call = problem.of(share)
        out = strategy.run(call, share.graph, False, FEW).detach()
        dim = 0 if call.updates else call.layer.node_dim
        found.index_copy_(dim % found.dim(), share.rows["edge" if call.updates else "dst"], out)
    return close(found, expected)
