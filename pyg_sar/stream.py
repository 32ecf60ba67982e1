r"""Sequential aggregation and rematerialization (SAR): the one loop under every layer, reduction and mode.

It is Algorithms 1 and 2 of the `"Sequential Aggregation and Rematerialization: Distributed Full-batch Training of Graph
Neural Networks on Large Graphs" <https://arxiv.org/abs/2111.06483>`_ paper. A column tile is some columns of the source
rows; a source block is the rows of one worker that this worker reads, and the edges between::

    Algorithm 1, forward                               Algorithm 2, backward
    for each column tile                               for each column tile
        state = initial state                              for each source block
        for each source block, the local one first             x = fetch its rows again (mode 1), or those that
            x = fetch its rows                                     were kept (modes 2 and 3); none in case 1
            state = merge(state, messages of x)                d_x, d_rows = gradients, of messages made again
            drop x (but keep it in modes 2 and 3)              drop x
        output = finish(state)                                 send d_x to the owner of x
                                                       gradient of local rows = sum of all d_x that arrive

In case 1 the gradient needs no source rows (sums); in case 2 it does (attention, maxima).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.autograd import once_differentiable
from pyg_sar.context import Backward, Forward
from pyg_sar.running import named_range


class Aggregate(torch.autograd.Function):
    """One aggregation. What is deleted here would otherwise live on while the next block, or tile, is fetched."""

    @staticmethod
    def forward(ctx: Any, walk: Forward, *inputs: Tensor) -> Tensor:
        """Algorithm 1; ``inputs`` are what local rows are made of, and rows of destinations, edges and constants."""
        context = walk.context
        _, rows = context.split(inputs)
        with named_range(context.layer or "aggregation", "forward"):
            for tile in context.tiles:
                state = tile.init(context.graph.num_dst)
                for q, x in walk.fetch(tile):
                    state = tile.step(state, context.blocks[q], x, rows)
                    walk.keep(tile, q, x)
                    del x
                result = tile.finish(state)
                del state
                walk.write(tile, result)
                del result
        return walk.save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        """Algorithm 2; the last gradients of local rows are under way when it returns, see ``aggregate.py``."""
        once_differentiable()
        walk, context = Backward(ctx, grad_out), ctx.context
        alike = torch.autocast(context.graph.device.type, enabled=False)  # as in forward, wherever `backward` is called
        with named_range(context.layer or "aggregation", "backward"), alike:
            for tile in context.tiles:
                saved, d_out = walk.prepare(tile)
                for q, x in walk.fetch(tile):
                    d_x, d_rows = tile.grad(context.blocks[q], x, walk.saved.rows, saved, d_out, walk.needs)
                    del x
                    walk.add(tile, q, d_rows)
                    del d_rows
                    walk.push(q, d_x)
                    del d_x
                del saved, d_out
        return None, *walk.leave()
