"""The sum of any message, by autograd: the oracle of the reductions that know their own gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.ops.reference import accumulator, segment_sum
from pyg_sar.reduce import Grads, Needs, Reduce, Rows


class Message(Reduce):
    r"""Sum of any message, :math:`\sum_j \phi(\mathbf{x}_j, \ldots)`, rebuilt under autograd in backward (case 2).

    Args:
        message: ``message(block, x, rows)`` returns a message for each edge, ``[E, *]``; must be a function of its
            arguments alone, so that it computes the same when it is rebuilt.
        shape: Shape of one message.
    """

    def __init__(self, message: Callable[[Block, Tensor, Rows], Tensor], shape: Sequence[int]) -> None:
        self.message, self.shape = message, shape

    def init(self, x: Tensor, num_dst: int) -> Tensor:
        return x.new_zeros(num_dst, *self.shape, dtype=accumulator(x.dtype))

    def step(self, state: Tensor, block: Block, x: Tensor, rows: Rows) -> Tensor:
        values = self.message(block, x, rows).to(state.dtype)  # [E, *]
        return state.add_(segment_sum(block.row, block.num_dst, values))

    def finish(self, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        return state.to(dtype), ()

    def grad(self, block: Block, x: Tensor, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs) -> Grads:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_(needs.source)
            pairs = (zip(ts, ns, strict=True) for ts, ns in zip(rows, needs.rows, strict=True))
            leaves = Rows(*([t.detach().requires_grad_(n) for t, n in some] for some in pairs))
            messages = self.message(block, leaf, leaves)
        wanted = [t for t in (leaf, *leaves.dst, *leaves.edge, *leaves.const) if t.requires_grad]
        found: dict[int, Any] = {}
        if wanted and messages.requires_grad:
            grads = torch.autograd.grad(messages, wanted, out[block.row], allow_unused=True)
            found = dict(zip(map(id, wanted), grads, strict=True))
        source = found.get(id(leaf))
        source = torch.zeros_like(x) if source is None and needs.source else source
        return source, Rows(*([found.get(id(t)) for t in ts] for ts in leaves))
