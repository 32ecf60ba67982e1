"""Worker processes that the multi-rank tests of a session share.

To import torch, PyG and this package takes seconds, so it happens once: workers are forked from a server process
(multiprocessing's "forkserver") that has imported them, and then serve one test after another. They
are replaced only after a failure, because the state of a process group is unknown then. Where there
is a GPU, each of them is a fresh process.

Some consequences for tests:

* Workers know what pytest's process knew when the first of them was made, its environment included;
  of later changes they see the arguments of the function that they are given, and the warning
  filters of the test.
* Nothing that a function leaves behind in its process (default dtype, threads, open requests) is
  cleaned up. Only the seed is: every function starts after ``torch.manual_seed(0)``.
* A rank whose function raises reports the error and *exits*, as a script would. Its peers see
  closed connections, which is what they would see in production.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

GROUP_TIMEOUT = timedelta(seconds=30)
START_TIMEOUT = 60.0
CLOSE_TIMEOUT = 10.0
# Once one rank has failed, the others get this long to end by themselves.
GRACE = 3.0
MAX_WORKERS = 8


class RankError(Exception):
    """At least one rank failed; the message tells the story of every rank."""


class Report(NamedTuple):
    """What became of one rank: ``outcome`` for programs, ``story`` for people."""

    outcome: tuple
    story: str


class Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection
    stack: Path  # where the process writes its Python stack when it gets SIGUSR1


class Pool:
    """Runs functions on several ranks at once.

    Args:
        size: Number of workers to start with. They start with the first function to run, and more
            of them (up to 8) with the first function that needs more.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._workers: list[Worker] = []

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list:
        """Calls ``fn(group, *args)`` on every rank and returns the results in the order of ranks.

        Args:
            world_size: Number of ranks in ``group``, a gloo group with a timeout of 30 seconds. The
                default group may be larger: code that does not honour ``group`` fails.
            fn: A function at the top level of a module, since it is pickled by its name.
            *args: Are pickled, tensors by value, and so are the results.
            timeout: In seconds.

        Raises:
            RankError: Some rank raised, died or took too long. The message holds the tracebacks of
                those that raised and the stacks of those that hung.
        """
        reports = self._job(world_size, fn, args, timeout, GRACE)
        if not all(_is_ok(report) for report in reports):
            stories = (f"--- rank {r} of {world_size} {report.story}" for r, report in enumerate(reports))
            raise RankError(f"{fn.__module__}.{fn.__qualname__} failed\n" + "\n".join(stories))
        return [report.outcome[1] for report in reports]

    def outcomes(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[tuple]:
        """As ``run``, for tests that expect failures: returns what became of every rank.

        Each of them is one of::

            ("ok", value)
            ("error", name of the exception's type, its message, seconds since the start)
            ("died", exit code, negative for a signal)
            ("timeout",)

        Ranks are not cut short when another one fails, so all of them have ``timeout`` seconds. The
        processes are replaced afterwards unless every rank is "ok".
        """
        return [report.outcome for report in self._job(world_size, fn, args, timeout, timeout)]

    def close(self) -> None:
        """Ends all workers as a well-behaved script ends, and raises if one of them did not."""
        for worker in self._workers:
            _send(worker, b"")
        for worker in self._workers:
            worker.process.join(CLOSE_TIMEOUT)
        codes = [worker.process.exitcode for worker in self._workers]
        self._kill()
        if any(code != 0 for code in codes):
            raise RuntimeError(f"exit codes of the workers at the end of the session: {codes}")

    def _job(self, world_size: int, fn: Callable[..., Any], args: tuple, timeout: float, grace: float) -> list[Report]:
        if world_size > MAX_WORKERS:
            raise ValueError(f"{world_size} ranks: the pool has at most {MAX_WORKERS}")
        # Python's own pickler copies tensors, where a Connection's would share their memory.
        call = pickle.dumps((fn, args))
        if world_size > len(self._workers):
            self.close()
            self._start(max(world_size, self._size))
        return self._call(world_size, call, timeout, grace)

    def _start(self, size: int) -> None:
        if torch.cuda.is_available():  # what it imports may ask for devices, which forked processes could not use then
            context: Any = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["pytest", "pyg_sar.nn"])  # which start no thread of torch
        self._folder = tempfile.TemporaryDirectory(prefix="pyg-sar-pool-")
        folder = Path(self._folder.name)
        for rank in range(size):
            ours, theirs = context.Pipe()
            stack = folder / f"stack-{rank}"
            process = context.Process(target=_work, args=(rank, size, folder / "store", stack, theirs), daemon=True)
            process.start()
            theirs.close()  # the worker has the only copy, so its end closes when it dies
            self._workers.append(Worker(process, ours, stack))
        # A first job, so that no test's timeout pays for the start.
        reports = self._call(size, pickle.dumps((_nothing, ())), START_TIMEOUT, GRACE)
        if not self._workers:
            raise RuntimeError(f"the workers did not start: {[r.outcome for r in reports]}")

    def _call(self, world_size: int, call: bytes, timeout: float, grace: float) -> list[Report]:
        """Has the first ``world_size`` workers do ``call``; none is left if one of them fails."""
        job = pickle.dumps((world_size, warnings.filters, call))
        try:
            for worker in self._workers[:world_size]:
                _send(worker, job)
            reports = self._gather(world_size, timeout, grace)
        except BaseException:  # the user or pytest-timeout interrupts
            self._kill()
            raise
        if not all(_is_ok(report) for report in reports):
            self._kill()
        return reports

    def _gather(self, world_size: int, timeout: float, grace: float) -> list[Report]:
        """Waits for one report of each of the first ``world_size`` workers."""
        start = time.monotonic()
        deadline = start + timeout
        reports: dict[int, Report] = {}
        pending = {self._workers[rank].connection: rank for rank in range(world_size)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                reports[rank] = self._receive(rank)
                if not _is_ok(reports[rank]):
                    deadline = min(deadline, time.monotonic() + grace)
        waited = time.monotonic() - start
        for rank, stack in self._stacks(list(pending.values())).items():
            story = f"did not end within {waited:.1f} s:\n{stack}"
            reports[rank] = Report(("timeout",), story)
        return [reports[rank] for rank in range(world_size)]

    def _receive(self, rank: int) -> Report:
        worker = self._workers[rank]
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            worker.process.join(CLOSE_TIMEOUT)
            code = worker.process.exitcode
            return Report(("died", code), f"died with exit code {code}")
        return Report(*pickle.loads(answer))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Where those ranks stand, in Python."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # the handlers write without a word to us
        return {rank: self._workers[rank].stack.read_text() for rank in ranks}

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        if self._workers:
            self._folder.cleanup()
        self._workers = []


def _is_ok(report: Report) -> bool:
    return report.outcome[0] == "ok"


def _send(worker: Worker, message: bytes) -> None:
    # A worker that died since its last job is noticed when its answer is read.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.connection.send_bytes(message)


def _work(rank: int, size: int, store: Path, stack: Path, connection: Connection) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest gets the Ctrl-C too, and ends us
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"))
    torch.set_num_threads(1)
    from support.small_pieces import make_small  # not before Triton was told to interpret

    make_small()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
    )
    # All at once, because every rank of the default group must take part in making each of them.
    groups = {n: dist.new_group(range(n), GROUP_TIMEOUT) for n in range(1, size + 1)}
    while job := _next_job(connection):
        world_size, filters, call = pickle.loads(job)
        # A test's filters hold in its workers too. In place, since the interpreter has the list as
        # well; the reset makes it forget what it knew of the old ones.
        warnings.resetwarnings()
        warnings.filters[:] = filters
        torch.manual_seed(0)
        start = time.monotonic()
        try:
            fn, args = pickle.loads(call)
            _answer(connection, Report(("ok", fn(groups[world_size], *args)), "returned"))
        except BaseException as error:
            seconds = time.monotonic() - start
            outcome = ("error", type(error).__name__, str(error), seconds)
            story = f"raised after {seconds:.1f} s:\n{traceback.format_exc()}"
            _answer(connection, Report(outcome, story))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    dist.barrier()  # gloo aborts the process when a peer leaves first
    dist.destroy_process_group()


def _nothing(group: dist.ProcessGroup) -> None:
    pass


def _next_job(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:  # pytest was killed
        os._exit(1)


def _answer(connection: Connection, report: Report) -> None:
    connection.send_bytes(pickle.dumps(tuple(report)))
