r"""The blocks of a model: what they take, and how many of them each stage of a pipeline gets."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pyg_sar.distributed.collectives import global_max
from pyg_sar.distributed.group import rank_of

Values = tuple[Tensor, ...]  # what a block takes and returns, tensors with a row for each node


def call(block: torch.nn.Module, values: Values, edge_index: Any, edges: Sequence[Tensor]) -> Any:
    """Call a block by what it takes."""
    cls: Any = type(block)
    own = "forward" in block.__dict__
    more = arguments(block.forward) > 1 if own else arguments_of(cls) > 2  # of which 'self' is the first
    return block(unpacked(values), edge_index, *edges) if more else block(unpacked(values))


@functools.cache
def arguments_of(cls: Any) -> float:
    """Return how many arguments the forward method of a class takes by position."""
    return arguments(cls.forward)


def arguments(function: Callable[..., Any]) -> float:
    """Return how many arguments a function takes by position; any number, if it takes ``*args``."""
    takes = [p.kind for p in inspect.signature(function).parameters.values()]
    names = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return math.inf if inspect.Parameter.VAR_POSITIONAL in takes else sum(kind in names for kind in takes)


def packed(value: Any) -> Values:
    """Return a tensor, or several, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def unpacked(values: Values) -> Any:
    """Return a single tensor by itself."""
    return values[0] if len(values) == 1 else values


def even_cut(blocks: int, stages: int) -> list[int]:
    """Return numbers of blocks as equal as possible, the larger ones first."""
    if blocks < stages:
        raise ValueError(
            f"[rank {rank_of()}] Expected a block for each of the {stages} stages (got {blocks}). Take fewer stages."
        )
    return [blocks // stages + (k < blocks % stages) for k in range(stages)]


def balanced_cut(
    blocks: Sequence[torch.nn.Module],
    x: Tensor | Values,
    edge_index: Any,
    stages: int,
    *edges: Tensor,
    mesh: Any = None,
) -> list[int]:
    r"""Return the ``cut`` of a pipeline whose slowest stage takes least, by the measured seconds of each block.

    The forward pass of all blocks runs twice on every worker, in evaluation, and the second one counts; the slowest
    worker decides.

    Args:
        blocks (list): As for :class:`pyg_sar.Pipeline`.
        x (torch.Tensor or tuple): The features of this worker's nodes.
        edge_index (ShardedEdgeIndex): As for :class:`pyg_sar.Pipeline`.
        stages (int): The number of stages.
        *edges (torch.Tensor): Tensors with a row for each edge, for blocks that take some.
        mesh (DeviceMesh, optional): As for :class:`pyg_sar.Pipeline`. (default: :obj:`None`, a process of its own)

    Returns:
        list: The number of blocks of each stage.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    even_cut(len(blocks), stages)
    modes = [(module, module.training) for block in blocks for module in block.modules()]
    try:
        for _ in range(2):
            values, seconds = packed(x), []
            with torch.no_grad():
                for block in blocks:
                    start = now(values)
                    values = packed(call(block.eval(), values, edge_index, edges))
                    seconds.append(now(values) - start)
    finally:
        for module, mode in modes:
            module.training = mode
    worst = torch.tensor(seconds)
    for name in ("graph", "stage") if mesh is not None else ():
        worst = global_max(worst, mesh.get_group(name))
    return least_maximum(worst.tolist(), stages)


def now(values: Values) -> float:
    """Return the time, once devices have made these tensors."""
    for device in {t.device for t in values if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def least_maximum(seconds: Sequence[float], stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets, so that the slowest one takes least."""
    total = [0.0, *accumulate(seconds)]

    @functools.cache
    def best(k: int, s: int) -> tuple[float, list[int]]:
        """Return what the slowest of ``s`` stages takes for the first ``k`` blocks, and how many each gets."""
        if s == 1:
            return total[k], [k]
        ways = ((j, *best(j, s - 1)) for j in range(s - 1, k))
        return min((max(slowest, total[k] - total[j]), [*counts, k - j]) for j, slowest, counts in ways)

    return best(len(seconds), stages)[1]
