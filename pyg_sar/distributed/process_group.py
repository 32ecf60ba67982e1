r"""Start and orderly end of the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(backend: str | None = None, timeout: float = 300.0) -> Iterator[int]:
    """Join the workers that ``torch.distributed.run`` has started, and leave them in order; yields the rank.

    A script that was started without it is a group of one worker. When the block ends well, workers wait for each other
    before they leave: gloo aborts a process that leaves while others still talk. When it ends with an exception the
    worker leaves at once, so that the others see a lost connection instead of waiting.

    Args:
        backend: As for :func:`torch.distributed.init_process_group`; by default gloo for CPU tensors, and NCCL for CUDA
            tensors if there is a GPU for every local worker.
        timeout: Seconds after which a worker gives up waiting for another one.
    """
    if "WORLD_SIZE" not in os.environ:
        yield 0
        return
    if backend is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        backend = "cpu:gloo,cuda:nccl" if 0 < local <= torch.cuda.device_count() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if "nccl" in backend:  # a first message from one worker to another one takes connections that all make together
        dist.all_reduce(torch.zeros(1, device="cuda"))
    try:
        yield dist.get_rank()
    except SystemExit as end:
        if not end.code:  # a script that ends well by `sys.exit()`
            leave()
        raise
    # Not in a `finally`: after an exception the others may never come to the barrier.
    leave()


def leave() -> None:
    """Wait for the other workers, then leave the group; does nothing where there is none."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
