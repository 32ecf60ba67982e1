r"""What a run tells of itself while it goes: a line on the terminal, and TensorBoard scalars of every worker."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from pyg_sar.distributed.group import rank_of
from pyg_sar.distributed.traffic import Traffic
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.running import named_range

LAYERS = "layers.json"  # what the layers of aggregations are called, in the order of an epoch


class RunLog:
    r"""Prints numbers of an epoch on rank 0, as :func:`torch_geometric.logging.log` does, and writes scalars for
    TensorBoard on every worker.

    .. code-block:: python

        log = pyg_sar.RunLog("runs/products", data)
        for epoch in range(1, 101):
            log(Epoch=epoch, Loss=train(), Val=test())

    In ``folder/rank-k`` worker :math:`k` writes, at each call, what was given, and of the time since the call before:
    ``time/seconds``, ``time/exposed communication`` (seconds in which it waited for rows of other workers),
    ``traffic/received`` and ``traffic/sent`` (MiB), ``memory/peak`` (MiB, since the process began), and for each
    aggregation, numbered in the order of an epoch, ``aggregations/k received`` and ``aggregations/k saved`` (MiB, what
    it keeps until the backward pass) and ``aggregations/k waited`` (seconds); ``layers.json`` there has the names of
    their layers. ``tensorboard --logdir folder`` shows it, ``pyg-sar report folder`` makes a page of it. In traces of
    :mod:`torch.profiler` what goes on from one call to the next is a range ``step k``.

    Args:
        folder (str, optional): Where to write; needs the package ``tensorboard``. (default: :obj:`None`, nowhere)
        data (torch_geometric.data.Data or torch_geometric.data.HeteroData, optional): The loaded graph, whose traffic
            is counted. (default: :obj:`None`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Raises:
        ImportError: If there is a ``folder`` but no ``tensorboard``.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, data: Any = None, group: Any = None) -> None:
        self.rank, self.count, self.writer = rank_of(group), 0, None
        self.layers: list[str] = []
        self.step = ExitStack()
        self.records: list[list[Traffic]] = []
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("RunLog writes for TensorBoard. Run 'pip install tensorboard'.") from error
            self.writer = SummaryWriter(Path(folder) / f"rank-{self.rank}")
            stores = [] if data is None else data.edge_stores
            edges = [store.edge_index for store in stores if isinstance(store.get("edge_index"), ShardedEdgeIndex)]
            self.counting = ExitStack()
            for log in {id(e._graph.exchange.log): e._graph.exchange.log for e in edges}.values():
                self.records.append(self.counting.enter_context(log.record()))
            self.device = edges[0]._graph.device if edges else torch.device("cpu")
        self.since = time.perf_counter()

    def __call__(self, step: int | None = None, **values: float) -> None:
        """Tell some numbers, which are the same on all workers.

        Args:
            step (int, optional): The number of the step or epoch. (default: :obj:`None`, ``Epoch`` if it is given, or
                that of the call)
            **values (optional): Numbers by name; what is none is printed alone.
        """
        self.count += 1
        if self.rank == 0:
            print(", ".join(f"{name}: {shown(value)}" for name, value in values.items()), flush=True)
        if self.writer is not None:
            self.write(int(values.get("Epoch", self.count)) if step is None else step, values)
        self.step.close()
        self.step.enter_context(named_range(f"step {self.count + 1}"))
        self.since = time.perf_counter()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write scalars of the time since the last call."""
        assert self.writer is not None
        records = [one for records in self.records for one in records]
        told = {f"values/{name}": float(v) for name, v in values.items() if name != "Epoch" and is_number(v)}
        told |= {
            "time/seconds": time.perf_counter() - self.since,
            "time/exposed communication": sum(r.forward_wait + r.backward_wait for r in records),
            "traffic/received": sum(r.forward_received + r.backward_received for r in records) / 2**20,
            "traffic/sent": sum(r.forward_sent + r.backward_sent for r in records) / 2**20,
            "memory/peak": peak(self.device),
        }
        for k, r in enumerate(records):
            told[f"aggregations/{k} received"] = (r.forward_received + r.backward_received) / 2**20
            told[f"aggregations/{k} saved"] = r.saved / 2**20
            told[f"aggregations/{k} waited"] = r.forward_wait + r.backward_wait
        for name, value in told.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
        if len(records) > len(self.layers):
            self.layers = [r.layer for r in records]
            (Path(self.writer.log_dir) / LAYERS).write_text(json.dumps(self.layers))
        for each in self.records:
            each.clear()


def is_number(value: Any) -> bool:
    """Whether a value is a point of a curve."""
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def shown(value: Any) -> str:
    """Return a number as PyG prints it."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:03d}" if isinstance(value, int) else f"{value:.4f}"


def peak(device: torch.device) -> float:
    """Return the largest memory of this process so far, in MiB; of a GPU, what torch's allocator gave out."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
