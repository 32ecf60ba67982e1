r"""Start and orderly end of the workers."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pyg_sar.watch.mode import start, stop, watching


@contextmanager
def process_group(backend: str | None = None, timeout: float = 300.0) -> Iterator[int]:
    """Join the workers that ``torch.distributed.run`` has started, and leave them in order; yields the rank.

    A script that was started without it is a group of one worker. When the block ends well, workers wait for each other
    before they leave: gloo aborts a process that leaves while others still talk. When it ends with an exception the
    worker leaves at once, so that the others see a lost connection instead of waiting.

    Args:
        backend (str, optional): As for :func:`torch.distributed.init_process_group`. (default: :obj:`None`, gloo for
            CPU tensors, and NCCL for CUDA tensors if there is a GPU for every local worker)
        timeout (float, optional): Seconds after which a worker stops waiting for another one. (default: :obj:`300.0`)

    Yields:
        The rank of this worker, an integer; 0 in a process that ``torchrun`` did not start.
    """
    if not join(backend, timeout):
        yield 0
        return
    try:
        with watching():
            yield dist.get_rank()
    except SystemExit as end:
        if not end.code:  # a script that ends well by `sys.exit()`
            leave()
        raise
    # Not in a `finally`: after an exception the others may never come to the barrier.
    leave()


def init(backend: str | None = None, timeout: float = 300.0) -> int:
    """Join the workers as :func:`process_group` does, for the rest of the script, and return the rank.

    .. code-block:: python

        pyg_sar.init()
        data = pyg_sar.load("parts/cora")

    Workers wait for each other when the script has ended well, and leave at once after an exception that nobody caught,
    or ``sys.exit`` with another status than 0.

    Args:
        backend (str, optional): As for :func:`process_group`.
        timeout (float, optional): As for :func:`process_group`.

    Returns:
        The rank of this worker, an integer; 0 in a process that ``torchrun`` did not start.
    """
    if not join(backend, timeout):
        return 0
    start()
    leave_at_exit()
    return dist.get_rank()


def leave_at_exit() -> None:
    """Leave when the interpreter ends, if it ends well: of an exception it tells in ``sys.last_value``, of ``sys.exit``
    only those who were called.
    """
    leaves, statuses = sys.exit, []

    def leaving(status: Any = None) -> NoReturn:
        statuses.append(status)
        leaves(status)

    def end() -> None:
        stop()
        if not hasattr(sys, "last_value") and not any(statuses):
            leave()

    sys.exit = leaving
    atexit.register(end)


def join(backend: str | None, timeout: float) -> bool:
    """Join the workers, if there are others."""
    if "WORLD_SIZE" not in os.environ:
        return False
    if backend is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        backend = "cpu:gloo,cuda:nccl" if 0 < local <= torch.cuda.device_count() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if "nccl" in backend:  # a first message from one worker to another one takes connections that all make together
        dist.all_reduce(torch.zeros(1, device="cuda"))
    return True


def leave() -> None:
    """Wait for the other workers, then leave the group; does nothing where there is none."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def silent_group(size: int) -> Iterator[None]:
    """Be the first of ``size`` workers, none of which says anything: what is received is whatever was in memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
