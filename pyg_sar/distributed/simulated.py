r"""Workers that are threads of one process and talk through its memory: :func:`pyg_sar.check` compares a training step
on two of them with one process, and tests run on them.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_here = threading.local()  # whose `member` this thread is


def member() -> Member | None:
    """Return the simulated worker that this thread is, if it is one."""
    return getattr(_here, "member", None)


class Member(NamedTuple):
    """One of simulated workers."""

    workers: Workers
    rank: int

    def gather(self, what: str, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all workers, which must be alike."""
        found = self.workers.meet(self.rank, what, tensor.detach().clone())
        kinds = [(t.dtype, list(t.shape)) for t in found]
        if any(kind != kinds[0] for kind in kinds):
            raise RuntimeError(f"'{what}' of tensors that differ between workers: {', '.join(map(str, kinds))}")
        return [t.clone() for t in found]

    def send(self, tensor: Tensor, peer: int, tag: int) -> Sent:
        """Send a copy of a tensor."""
        self.workers.post((self.rank, peer, tag), tensor.detach().clone())
        return Sent()

    def receive(self, into: Tensor, peer: int, tag: int) -> Arrival:
        """Say what shall be received."""
        return Arrival(self, (peer, self.rank, tag), into)


class Sent:
    """A message that is already there."""

    def wait(self, *timeout: Any) -> None:
        """Do nothing."""


class Arrival(NamedTuple):
    """A message that somebody will have sent."""

    member: Member
    key: tuple[int, int, int]
    into: Tensor

    def wait(self, *timeout: Any) -> None:
        """Take it; whether it can still come is known without a timeout."""
        self.into.copy_(self.member.workers.take(self.member.rank, self.key))


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the random generators of torch (on the CPU), numpy and Python as they are."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    modules = set(sys.modules)
    try:
        yield
    finally:
        # PyG keeps the code of each 'Sequential' under a name that it draws: the next that draws it would get that.
        for name in [m for m in sys.modules if "sequential_Sequential_" in m and m not in modules]:
            del sys.modules[name]
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class Workers:
    """Simulated workers: threads of this process, of which each runs the same function.

    One of them runs at a time, until it waits for another one, so that each draws random numbers as if it were alone,
    and none sees what others change for a while in the whole process. A worker that waits for what cannot come any more
    raises at once, as all others then do: because a peer ended, or because all that are left wait for something else.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()  # whoever runs holds its lock
        self.box: dict[Any, Any] = {}  # messages that nobody has taken yet
        # What each of those that wait is waiting for, and whether it is there.
        self.waits: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.turns = [0] * size  # how often each of them has met all others
        self.ended: set[int] = set()
        self.broken = ""

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what ``work(rank)`` returns, or the exception that it raises, for each worker."""
        results: list[Any] = [None] * self.size

        def worker(rank: int) -> None:
            _here.member = Member(self, rank)
            with self.changed:
                try:
                    with kept_generators():
                        results[rank] = work(rank)
                except BaseException as error:
                    results[rank] = error
                self.ended.add(rank)
                self.changed.notify_all()

        threads = [threading.Thread(target=worker, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def post(self, key: Any, value: Any) -> None:
        """Leave something for somebody, behind what was left before."""
        self.box.setdefault(key, deque()).append(value)
        self.changed.notify_all()

    def take(self, rank: int, key: tuple[int, int, int]) -> Any:
        """Wait for a message and take it."""
        self.wait(rank, f"a message of worker {key[0]}", lambda: bool(self.box.get(key)), {key[0]})
        found = self.box[key].popleft()
        if not self.box[key]:
            del self.box[key]
        return found

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """Wait until all workers have come, and return what they brought."""
        turn, self.turns[rank] = self.turns[rank], self.turns[rank] + 1
        met = self.box.setdefault(turn, {})
        met[rank] = what, value
        self.changed.notify_all()
        self.wait(rank, f"all others, in '{what}'", lambda: len(met) == self.size, set(range(self.size)) - {rank})
        self.box.pop(turn, None)  # all have come, and have it
        names = [met[r][0] for r in range(self.size)]
        if len(set(names)) > 1:
            raise RuntimeError(f"the workers called different things: {', '.join(names)}")
        return [met[r][1] for r in range(self.size)]

    def wait(self, rank: int, what: str, ready: Callable[[], bool], of: set[int]) -> None:
        """Wait until something is there, or cannot come any more."""
        self.waits[rank] = what, ready
        while not ready():
            all_wait = len(self.waits) + len(self.ended) == self.size
            if not self.broken and (lost := sorted(of & self.ended)):
                self.broken = f"worker {lost[0]} ended while worker {rank} waited for {what}"
            elif not self.broken and all_wait and not any(comes() for _, comes in self.waits.values()):
                self.broken = "; ".join(f"worker {r} waits for {w}" for r, (w, _) in sorted(self.waits.items()))
            if self.broken:
                self.changed.notify_all()
                raise RuntimeError(self.broken)
            with kept_generators():
                self.changed.wait()
        del self.waits[rank]
