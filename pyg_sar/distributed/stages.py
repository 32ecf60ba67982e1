r"""The workers of a pipeline, *stages* of consecutive blocks of a model, each with a worker for every part of the
graph; and the rows that go from one stage to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_sar.distributed.group import gather_objects, rank_of, size_of
from pyg_sar.distributed.traffic import Traffic
from pyg_sar.distributed.transfer import Channel, UnderWay, wait_for

Shape = tuple[list[int], torch.dtype]  # of a row, and its type


def stage_mesh(stages: int) -> Any:
    r"""Return the workers as stages of a pipeline, of which each has a copy of the graph, cut among its workers.

    .. code-block:: python

        mesh = pyg_sar.stage_mesh(4)
        data = pyg_sar.load("parts/2", group=mesh.get_group("graph"))  # 8 workers: 4 stages of 2

    Workers of a stage are next to each other, so that they are on one host if each host has as many.

    Args:
        stages (int): The number of stages.

    Returns:
        A :class:`torch.distributed.device_mesh.DeviceMesh` with the dimensions :obj:`"stage"` and :obj:`"graph"`, whose
        groups have the timeout of :func:`pyg_sar.process_group`.

    Raises:
        ValueError: If the number of workers is no multiple of that of stages.
        RuntimeError: In a process that is in no group.
    """
    if not dist.is_initialized():
        raise RuntimeError("A pipeline needs workers: call 'stage_mesh' within 'pyg_sar.process_group()'")
    size = size_of()
    if type(stages) is not int or stages < 1 or size % stages:
        raise ValueError(
            f"[rank {rank_of()}] Expected a number of stages that divides the {size} workers (got {stages!r}). Start a "
            f"multiple of it ('--nproc-per-node')."
        )
    return mesh_of(torch.arange(size).view(stages, -1))


def mesh_of(ranks: Tensor) -> Any:
    """Return the mesh of some workers, ``[stages, graph workers]``, or None to others; all of them call it."""
    from torch.distributed.device_mesh import DeviceMesh

    world: Any = dist.group.WORLD
    timeout = world._get_backend(torch.device("cpu")).options._timeout  # which new groups do not take over
    mine = []
    for rows in (ranks.t().tolist(), ranks.tolist()):
        made = [dist.new_group(row, timeout=timeout) for row in rows]
        mine += [group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row]
    return DeviceMesh.from_group(mine, "cpu", mesh=ranks, mesh_dim_names=("stage", "graph")) if mine else None


class Stages:
    """What a stage sends to its neighbours and receives from them.

    Args:
        mesh: What :func:`stage_mesh` returned, or None for a single stage.
        comm_dtype: As for :func:`pyg_sar.load`.
    """

    def __init__(self, mesh: Any, comm_dtype: torch.dtype | None = None) -> None:
        group = None if mesh is None else mesh.get_group("stage")
        self.rank, self.size = (0, 1) if mesh is None else (rank_of(group), size_of(group))
        self.channel = Channel(group, comm_dtype)
        self.traffic = Traffic()
        self.sent: list[UnderWay] = []

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.rank == self.size - 1

    def begin(self) -> None:
        """Begin what all stages do once in an epoch."""
        self.channel.begin(None, (), torch.device("cpu"), self.traffic.forward)

    def gather(self, value: Any, what: str = "what all stages tell") -> list[Any]:
        """Return the values of all stages."""
        if self.size == 1:
            return [value]
        return gather_objects(value, self.channel.group, f"waiting for {what}")

    def tell(self, value: Any, stage: int) -> Any:
        """Return the value of a stage to all."""
        return self.gather(value if self.rank == stage else None, f"what stage {stage} tells")[stage]

    def send(self, rows: Sequence[Tensor], to: int, what: str) -> None:
        """Start to send."""
        meter = self.traffic.forward if to > self.rank else self.traffic.backward
        for k, t in enumerate(rows):
            nothing = t.new_empty(0)
            self.sent += self.channel.swap(t, to, nothing, to, named(what, self.rank, to, k), meter)

    def receive(self, shapes: Sequence[Shape], count: int, of: int, what: str) -> Callable[[], list[Tensor]]:
        """Start to receive so many rows; what is returned waits for them."""
        meter = self.traffic.forward if of < self.rank else self.traffic.backward
        rows, pending = [], []
        for k, (shape, dtype) in enumerate(shapes):
            into = torch.empty(count, *shape, dtype=self.channel.sent_as(dtype))
            pending += self.channel.swap(into.new_empty(0), of, into, of, named(what, of, self.rank, k), meter)
            rows.append((into, dtype))

        def wait() -> list[Tensor]:
            wait_for(pending)
            return [t.to(dtype) for t, dtype in rows]

        return wait

    def settle(self) -> None:
        """Wait until all is sent."""
        wait_for(self.sent)
        self.sent = []


def named(what: str, start: int, end: int, k: int) -> str:
    """Return the words for a message between stages."""
    return f"{'rows' if end > start else 'gradients'} of {what}, stage {start} to {end}, tensor {k}"
