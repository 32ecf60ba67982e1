r"""How much a pipeline of layers will move, and what its largest worker needs, by dry runs of its stages.

Traffic is counted by formulas that hold to the byte (``docs/results/pipeline-traffic.md``), with the widths of
rows that the blocks really make::

    between stages    2 N b for every boundary of rows of b bytes: forward, and their gradient back
    within stages     2 H b for every site of rows of b bytes, where workers read H rows of each other; the half where
                      rows are features, which take no gradient
    parameters        2 (W - 1) P: sums of gradients on rings of the W workers of every stage

Memory is that of a step of the stage that needs most, on small graphs of the same shape as in
:mod:`pyg_sar.planner`; the first one has the features. Halo rows of sites are added: a dry run of chunks has none,
since it would not know in which chunk of its owner a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.blocks import call, even_cut, packed, unpacked
from pyg_sar.distributed.group import connected
from pyg_sar.distributed.process_group import silent_group
from pyg_sar.live import Live, few_objects
from pyg_sar.pipeline import Pipeline
from pyg_sar.pipeline_checks import described
from pyg_sar.planner import Share, largest, make_inputs

Blocks = Callable[[], Sequence[torch.nn.Module]]


@dataclass(frozen=True)
class StageNeed:
    """What a pipeline of some shape moves in an epoch, all workers together, and needs, in bytes."""

    stages: int
    workers: int  # of each stage
    each: tuple[tuple[int, int], ...]  # of each stage, its largest worker: between steps; the peak of a step above that
    between: int
    within: int
    parameters: int
    waiting: float  # the share of time in which a stage waits, if all chunks and blocks take equally long

    @property
    def total(self) -> int:
        """The memory of the largest worker of all stages."""
        return max(map(sum, self.each))

    @property
    def moved(self) -> int:
        """All bytes that are sent."""
        return self.between + self.within + self.parameters


def plan_pipeline(
    blocks: Blocks, shares: Sequence[Share], in_channels: int, stages: int, *, chunks: int = 1
) -> StageNeed:
    r"""Tell the memory and traffic of a pipeline, without graph and without other workers.

    Rows are taken to be kept (``remat=False``) with one chunk; with more they always are.

    Args:
        blocks (callable): Makes the blocks of the model, as for :class:`pyg_sar.Pipeline`.
        shares (list): The counts of the workers of a stage: by :func:`pyg_sar.planner.from_partition`, or equal ones by
            :func:`pyg_sar.planner.from_counts`.
        in_channels (int): Number of features of a node.
        stages (int): Number of stages.
        chunks (int, optional): Number of chunks. (default: :obj:`1`)

    Returns:
        A :class:`StageNeed`, in bytes.

    Raises:
        RuntimeError: In a process that is in a process group.
        ValueError: If there are fewer blocks than stages, or one that no chunk could run, such as a BatchNorm.
    """
    if connected():
        raise RuntimeError("'plan_pipeline' makes a process group of its own: call it before, or in another process")
    model = list(blocks())
    cut, workers = even_cut(len(model), stages), len(shares)
    nodes, halo = sum(share.nodes for share in shares), sum(sum(share.rows_in) for share in shares)
    worst = largest(shares)
    with few_objects():
        made, read, returned = row_bytes(model, in_channels)
        known: dict[str, tuple[int, int]] = {}
        each = []
        for k in range(stages):
            stage = slice(sum(cut[:k]), sum(cut[: k + 1]))
            if (alike := f"{k == 0} {k == stages - 1} {model[stage]} {described(model[stage])}") not in known:
                loaded, step = memory(blocks, stage, worst, in_channels, chunks)
                if chunks > 1:  # halo rows: fresh ones and history, and gradients
                    loaded += 2 * sum(worst.rows_in) * sum(read[stage])
                    step += sum(worst.rows_in) * sum(returned[stage])
                known[alike] = loaded, step
            each.append(known[alike])
    between = sum(made[sum(cut[: k + 1]) - 1] for k in range(stages - 1))
    numbers = sum(p.nbytes for p in {p for block in model for p in block.parameters()})
    within = halo * (sum(read) + sum(returned))
    return StageNeed(
        stages, workers, tuple(each), 2 * nodes * between, within, 2 * (workers - 1) * numbers,
        (stages - 1) / (chunks + stages - 1),
    )  # fmt: skip


def row_bytes(blocks: Sequence[torch.nn.Module], in_channels: int) -> tuple[list[int], list[int], list[int]]:
    """Return for each block the bytes of a row that it makes, of rows that its sites read, and of their gradients."""
    x, edge_index = make_inputs(Share(64, 128, 128, (), ()), in_channels, 1, 1, None, 0)
    pipe = Pipeline(blocks, edge_index, chunks=2)
    history = pipe.history
    assert history is not None
    history.begin(None)
    for out in reversed([pipe.run(packed(x[it.span]), edge_index, (), it) for it in history.chunks]):
        torch.autograd.backward([t.sum() for t in out if t.requires_grad])
    read, returned = ([0] * len(blocks) for _ in range(2))
    for (block, _), site in history.sites.items():
        read[block] += sum(bytes_of(rows.fresh) for rows in site)
        returned[block] += sum(bytes_of(rows.grad) for rows in site if rows.grad is not None)
    values, made = packed(x), []
    with torch.no_grad():
        for each in blocks:
            values = packed(call(each, values, edge_index, ()))
            made.append(sum(map(bytes_of, values)))
    return made, read, returned


def bytes_of(t: Tensor) -> int:
    """Return the bytes of a row."""
    return t[0].numel() * t.element_size()


def memory(blocks: Blocks, stage: slice, share: Share, in_channels: int, chunks: int) -> tuple[int, int]:
    """Return what a worker of a stage holds between steps, and the peak of a step above that.

    Both are (a + b / K) n + c for n nodes in K chunks: what lives through all chunks, what one of them takes besides,
    and what is as large as parameters. Many chunks would take long to run, so c and b are found with few.
    """
    few, whole = min(chunks, 4), min(1.0, 4096 / max(share.nodes, 1))

    def measure(factor: float, k: int) -> Tensor:
        small = share.scaled(factor)
        if chunks > 1:
            small = Share(small.nodes, small.edges, small.edges, (), ())
        with silent_group(len(small.rows_in) + 1):
            return run(list(blocks()), stage, k, *make_inputs(small, in_channels, 2, 1, None, 0))

    one, half = measure(whole, few), measure(whole / 2, few)
    found = half + (one - half) * (1 - whole / 2) / (whole / 2)
    if chunks > few:
        each = (measure(whole, few // 2) - one) / (1 / (few // 2) - 1 / few)
        found += each * (1 / chunks - 1 / few) / whole
    loaded, step = found.round().long().tolist()
    return loaded, step


class StageBefore(torch.nn.Module):
    """Makes rows such as come of the stage before: in memory of their own, chunk by chunk, with gradients."""

    def forward(self, x: Any) -> Any:
        """Return what arrives."""
        return unpacked(tuple(t.detach().clone().requires_grad_(t.is_floating_point()) for t in packed(x)))


class NextStage(torch.autograd.Function):
    """Holds what comes of the next stage: the gradients of a chunk, and those of the one after it."""

    @staticmethod
    def forward(ctx: Any, coming: list[Tensor], ahead: bool, *rows: Tensor) -> Tensor:
        """Return a loss of these rows."""
        ctx.coming, ctx.ahead = coming, ahead
        ctx.save_for_backward(*rows)
        return rows[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return gradients as large as those that come; what they are does not matter."""
        ctx.coming[:] = [torch.empty_like(t) for t in ctx.saved_tensors for _ in range(1 + ctx.ahead)]
        return None, None, *ctx.coming[:: 1 + ctx.ahead]


def run(blocks: list[torch.nn.Module], stage: slice, chunks: int, x: Tensor, edge_index: Any) -> Tensor:
    """Train a stage for two steps by Adam, of which the first fills history, and makes transposed blocks."""
    values, mine = packed(x), blocks[stage]
    if stage.start > 0:
        mine = [StageBefore(), *mine]
        with torch.no_grad():
            for block in blocks[: stage.start]:
                values = packed(call(block, values, edge_index, ()))
    given = sum(edge_index.graph.memory().values())
    with Live() as made:  # the graphs of chunks
        pipe = Pipeline(mine, edge_index, chunks=chunks)
    model = pipe.blocks
    state = torch.optim.Adam(model.parameters())
    coming: list[Tensor] = []

    def loss(*rows: Tensor) -> Tensor:
        if stage.stop == len(blocks):
            return torch.stack([t.sum() for t in rows]).sum()
        return NextStage.apply(coming, chunks > 1, *rows)

    with Live(dry=True) as live:
        for _ in range(2):
            pipe.step(unpacked(values), lambda out, rows: loss(*packed(out)))
            coming.clear()
            state.step()
            state.zero_grad()
    held = [*([x] if stage.start == 0 else []), *model.parameters(), *model.buffers()]
    loaded = given + sum(t.nbytes for t in held) + made.now + live.now
    return torch.tensor([loaded, live.peak - live.now], dtype=torch.float64)
