r"""Start and orderly end of the workers."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from pyg_sar.debugging import debug_if_asked
from pyg_sar.distributed import notices
from pyg_sar.watch import current
from pyg_sar.watch.mode import watching


@contextmanager
def process_group(
    backend: str | None = None, timeout: float = 300.0, leave_within: float | None = None
) -> Iterator[int]:
    """Join the workers that ``torch.distributed.run`` has started, and leave them in order; yields the rank.

    A script that was started without it is a group of one worker. When the block ends well, a worker waits for all
    others, as long as they live: gloo aborts a process that leaves while others still talk. So one of them may still
    write results alone. When it ends with an exception the worker says why, and leaves at once; the others raise, too,
    and tell its reason. ``torchrun --max-restarts`` starts all of them again.

    Args:
        backend (str, optional): As for :func:`torch.distributed.init_process_group`. (default: :obj:`None`, gloo for
            CPU tensors, and NCCL for CUDA tensors if there is a GPU for every local worker)
        timeout (float, optional): Seconds after which a worker stops waiting for another one, within the block and
            before it. (default: :obj:`300.0`)
        leave_within (float, optional): Seconds after which a worker that has finished stops waiting for others that
            still work. (default: :obj:`None`, as long as they live)

    Yields:
        The rank of this worker, an integer; 0 in a process that ``torchrun`` did not start. In a group that is there
        already it is the rank there, whoever made the group leaves it, and workers do not tell why they end.

    Raises:
        RuntimeError: If another worker ended, stopped answering, or runs different code, with what it said.
    """
    if not join(backend, timeout):
        with looked_at(joined=False):
            yield present() or 0
        return
    try:
        with looked_at(joined=True):
            yield dist.get_rank()
    except SystemExit as end:
        if not end.code:  # a script that ends well by `sys.exit()`
            leave(timeout, leave_within)
        else:
            tell(end)
        raise
    except BaseException as error:
        tell(error)
        raise
    # Not in a `finally`: after an exception the others may never come.
    leave(timeout, leave_within)


def init(backend: str | None = None, timeout: float = 300.0, leave_within: float | None = None) -> int:
    """Join the workers as :func:`process_group` does, for the rest of the script, and return the rank.

    .. code-block:: python

        pyg_sar.init()
        data = pyg_sar.load("parts/cora")

    Workers wait for each other when the script has ended well, and leave at once after an exception that nobody caught,
    or ``sys.exit`` with another status than 0.

    Args:
        backend (str, optional): As for :func:`process_group`. (default: :obj:`None`)
        timeout (float, optional): As for :func:`process_group`. (default: :obj:`300.0`)
        leave_within (float, optional): As for :func:`process_group`. (default: :obj:`None`)

    Returns:
        The rank of this worker, an integer; 0 in a process that ``torchrun`` did not start. In a group that is there
        already it is the rank there, whoever made the group leaves it, and workers do not tell why they end.
    """
    looking, joined = ExitStack(), join(backend, timeout)
    looking.enter_context(looked_at(joined))
    if joined:
        leave_at_exit(timeout, leave_within, looking)
    else:
        atexit.register(looking.close)
    return present() or 0


FAILED: list[bool] = []  # whether this worker could not leave in order


@atexit.register  # so that it runs after what is registered later
def fail_at_exit() -> None:
    """End with status 1 if this worker could not leave in order."""
    if FAILED:
        for finish in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
            with suppress(Exception):
                finish()
        os._exit(1)


def leave_at_exit(timeout: float, leave_within: float | None, looking: ExitStack) -> None:
    """Leave when the interpreter ends, if it ends well; before, what was ``looking`` for mistakes ends.

    An exception that ended it is in ``sys.last_value``. The status of ``sys.exit`` is nowhere, so what stands in its
    place remembers it.
    """
    leaves, statuses = sys.exit, []

    def leaving(status: Any = None) -> NoReturn:
        statuses.append(status)
        leaves(status)

    def end() -> None:
        error = getattr(sys, "last_value", None)
        with suppress(BaseException):
            trace = getattr(error, "__traceback__", None)  # without which the line of the error would be lost
            looking.__exit__(None if error is None else type(error), error, trace)
        if error is not None or any(statuses):
            tell(error or SystemExit(next(filter(None, statuses))))
            return
        try:
            leave(timeout, leave_within)
        except BaseException:  # which Python would print, and end as if all were well
            FAILED.append(True)
            with suppress(Exception):
                traceback.print_exc()

    sys.exit = leaving
    atexit.register(end)


def present() -> int | None:
    """Return the rank in the group that there is, if there is one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


@contextmanager
def looked_at(joined: bool) -> Iterator[None]:
    """Look for mistakes while a block runs, if the group was ``joined`` for it or is the user's own; a block within
    another one leaves that to the outer one, also where that one has ceased to look.
    """
    anew = joined or (notices.CURRENT is None and current() is None)
    with watching() if anew else nullcontext(), debug_if_asked():
        yield


def join(backend: str | None, timeout: float) -> bool:
    """Join the workers, if there are others, and this one has not joined them."""
    if present() is not None or "WORLD_SIZE" not in os.environ:  # a group of the user's own, or no launcher
        return False
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "A process that was started by 'multiprocessing', such as one of a DataLoader, runs the script again and "
            "would join the workers. Put the script under \"if __name__ == '__main__':\"."
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    backend = backend or usual_backend()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    store, rank, size = rendezvous(timeout)
    store = dist.PrefixStore(meet(store, rank, size, timeout), store)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"[rank {rank}] Could not connect with the other workers ({notices.short(error)}). Look for the first "
            f"error among all ranks; on several hosts, see that they reach each other ('GLOO_SOCKET_IFNAME')."
        ) from error
    notices.CURRENT = notices.Notices(store, rank, size)
    if "nccl" in backend:  # a first message from one worker to another one takes connections that all make together
        dist.all_reduce(torch.zeros(1, device="cuda"))
    return True


def usual_backend() -> str:
    """Return NCCL for CUDA tensors where it is there and each worker of this host has a GPU, and gloo for others."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() and 0 < local <= torch.cuda.device_count() else "gloo"


def end_with_launcher() -> None:
    """Have the system end this process by SIGTERM when its launcher is gone, where it can (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None and sys.platform == "linux":
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def rendezvous(timeout: float) -> tuple[dist.Store, int, int]:
    """Return the store that the launcher names, this worker's rank, and the number of workers."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    return store, rank, size


def meet(store: dist.Store, rank: int, size: int, timeout: float) -> str:
    """Return a name that the workers of this attempt alone have in common.

    Launchers keep the store when they start workers again, with all that the dead ones have written, and number
    attempts differently on different hosts. So every worker asks by a name of its own, and rank 0 answers those who
    ask until all of them have heard.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout

    def wait(ranks: list[int]) -> None:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"[rank {rank}] Of {size} workers, rank {', '.join(map(str, ranks))} did not come within {timeout:g} "
                f"s. Start all of them, and look for the first error among all ranks."
            )
        time.sleep(0.01)

    def differ(other: int, theirs: int) -> RuntimeError:
        return RuntimeError(
            f"[rank {rank}] This worker was started as one of {size}, rank {other} as one of {theirs}. Start all "
            f"workers with the same number of them ('--nnodes', '--nproc-per-node')."
        )

    if rank > 0:
        store.set(f"asks/{rank}", mine)
        while not store.check([f"answer/{mine}"]):
            wait([0])
        name, theirs = store.get(f"answer/{mine}").decode().split()
        store.set(f"{name}/heard/{rank}", str(size))
        if int(theirs) != size:
            raise differ(0, int(theirs))
        return name
    waits = list(range(1, size))
    while waits:
        for r in list(waits):
            if store.check([f"{mine}/heard/{r}"]):
                if (started := int(store.get(f"{mine}/heard/{r}"))) != size:
                    raise differ(r, started)
                waits.remove(r)
            elif store.check([f"asks/{r}"]):
                store.set(f"answer/{store.get(f'asks/{r}').decode()}", f"{mine} {size}")
        wait(waits)
    return mine


def tell(error: BaseException) -> None:
    """Say why this worker ends."""
    if notices.CURRENT is not None:
        notices.CURRENT.end(error)


def leave(timeout: float = 300.0, leave_within: float | None = None) -> None:
    """Wait for the other workers, then leave the group; does nothing where there is none."""
    board, notices.CURRENT = notices.CURRENT, None
    if board is not None and dist.is_initialized():
        try:
            board.leave(timeout, leave_within)
        except dist.DistError as error:
            raise notices.LostWorkers(
                f"[rank {board.rank}] This worker has finished, but the store of the group does not answer "
                f"({notices.short(error)}): the process or host that keeps it is gone"
            ) from error
        except RuntimeError as error:
            board.end(error)
            raise
    if dist.is_initialized():
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
