r"""Who the workers are, and the few ways in which they talk: through :mod:`torch.distributed`, or, if workers are
simulated by threads of one process, through its memory.

Everything else that communicates is made of what is here. ``group`` is a process group, a :class:`Member` of simulated
workers, or None: the simulated workers to which this thread belongs, if there are some, else the default process group.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_sar.distributed import notices, values

Group = Any
OWN = ("allocate memory", "No backend type associated", "Invalid scalar type")  # what torch says of this worker alone
_here = threading.local()  # whose `member` this thread is

# Messages under way that nobody waits for any more, after an exception between the start of an aggregation and its end
# that the user caught. gloo loses a connection if the memory of a message dies before it has arrived.
ABANDONED: list[Any] = []


def abandon(group: Group, *under_way: Any) -> None:
    """Keep messages that nobody waits for any more, with their memory."""
    if not isinstance(group, Member):  # whose messages are copies
        ABANDONED.append(under_way)


class Message(NamedTuple):
    """A tensor to be sent to a worker, or to be received from it; both sides must give it the same tag."""

    tensor: Tensor
    peer: int
    tag: int
    sends: bool


def current(group: Group = None) -> Group:
    """Return the group that ``group`` stands for; None for the default one of :mod:`torch.distributed`."""
    return getattr(_here, "member", None) if group is None else group


def is_group(value: Any) -> bool:
    """Whether a value may stand for a group."""
    return value is None or isinstance(value, Member) or (dist.is_available() and isinstance(value, dist.ProcessGroup))


def takes_group(cls: type) -> bool:
    """Whether the attribute ``group`` of modules of a class is the workers that they ask, and nothing of the user's."""
    owner: Any = next((base for base in cls.__mro__ if "group" in base.__dict__), None)
    return owner is not None and owner.__module__.startswith("pyg_sar.")


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model whose layers belong to the same groups of workers, which cannot be copied."""
    groups = [module.__dict__.get("group") for module in model.modules()]
    return copy.deepcopy(model, {id(group): group for group in groups if group is not None and is_group(group)})


def connected() -> bool:
    """Whether there is a group, if only of one worker."""
    return isinstance(current(), Member) or (dist.is_available() and dist.is_initialized())


def rank_of(group: Group = None) -> int:
    """Return the number of this worker; 0 where there is no group."""
    group = current(group)
    if isinstance(group, Member):
        return group.rank
    return dist.get_rank(group) if connected() else 0


def size_of(group: Group = None) -> int:
    """Return the number of workers; 1 where there is no group."""
    group = current(group)
    if isinstance(group, Member):
        return group.workers.size
    return dist.get_world_size(group) if connected() else 1


@contextmanager
def talking(doing: str, group: Group = None, peer: int | None = None) -> Iterator[None]:
    """Say what has happened when the other workers do not answer.

    Args:
        doing: What this worker does.
        group: The workers.
        peer: Whom it waits for; None for all of them, in a call that all make.
    """
    board = None if isinstance(current(group), Member) else notices.CURRENT
    if board is not None:
        if peer is None:
            notices.calls(doing)
        board.waits = awaited(group, peer)
    try:
        yield
    except notices.LostWorkers:
        raise
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in OWN):
            raise  # no matter of others
        why = (board.why() if board else "") or (
            f"either a worker ended (look for the first error among all ranks), or they ran different code. "
            f"{notices.ORDER}"
        )
        said = notices.short(error)
        raise notices.LostWorkers(
            f"[rank {rank_of(group)}] Lost the other workers while {doing}: {why} ({said})"
        ) from error
    finally:
        if board is not None:
            board.waits = None


def awaited(group: Group, peer: int | None) -> int | list[int]:
    """Return whom a worker waits for, by their ranks among all, see :class:`~pyg_sar.distributed.notices.Sign`."""
    if peer is None:
        return notices.EVERYBODY if group is None else dist.get_process_group_ranks(group)
    return peer if group is None or peer == notices.NOBODY else dist.get_global_rank(group, peer)


def host(group: Group = None) -> torch.device:
    """Return the device of small messages that the host reads: the CPU, if the workers can talk from there."""
    group = current(group)
    if isinstance(group, Member) or not connected():
        return torch.device("cpu")
    config = dist.get_backend_config(group)
    return torch.device("cpu" if "cuda:" not in config or "cpu:" in config else "cuda")


def is_local(tensor: Tensor) -> bool:
    """Whether a parameter or buffer holds rows of this worker's nodes (:class:`~pyg_sar.nn.NodeEmbedding`)."""
    return getattr(tensor, "is_local", False)


def all_reduce_(tensor: Tensor, group: Group = None) -> None:
    """Add up a tensor over all workers, in place."""
    group = current(group)
    if isinstance(group, Member):
        tensor.copy_(torch.stack(group.gather("all_reduce", tensor)).sum(0))
    else:
        dist.all_reduce(tensor, group=group)


def all_gather(tensor: Tensor, group: Group = None) -> list[Tensor]:
    """Return the tensors of all workers."""
    group = current(group)
    if isinstance(group, Member):
        return group.gather("all_gather", tensor)
    out = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, tensor, group=group)
    return out


def gather_objects(value: Any, group: Group = None, doing: str = "gathering from all of them") -> list[Any]:
    """Return the values of all workers, in the order of ranks; :mod:`~pyg_sar.distributed.values` can write them."""
    if size_of(group) == 1:
        return [value]
    with talking(doing, group):
        member = current(group)
        if isinstance(member, Member):
            return member.workers.meet(member.rank, "gather_objects", value)
        mine = torch.frombuffer(bytearray(values.to_bytes(value)), dtype=torch.uint8).to(host(group))
        sizes = [int(n) for n in all_gather(torch.tensor([mine.numel()], device=mine.device), group)]
        mine = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))
        found = zip(all_gather(mine, group), sizes, strict=True)
        return [values.from_bytes(bytes(data[:size].cpu().numpy())) for data, size in found]


def broadcast_(tensor: Tensor, group: Group = None) -> None:
    """Take the values of rank 0, in place."""
    group = current(group)
    if isinstance(group, Member):
        tensor.copy_(group.gather("broadcast", tensor)[0])
    else:
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=0)  # not every backend has every type


def start(messages: Sequence[Message], group: Group = None) -> list[Any]:
    """Start to send and to receive; return handles with ``wait()``, one for each message or one for all."""
    group = current(group)
    if isinstance(group, Member):
        return [group.start(message) for message in messages]
    if all(m.tensor.is_cpu for m in messages):  # a batch would be the same, and take longer
        return [
            dist.isend(m.tensor, group=group, tag=m.tag, group_dst=m.peer)
            if m.sends
            else dist.irecv(m.tensor, group=group, tag=m.tag, group_src=m.peer)
            for m in messages
        ]
    ops = [
        dist.P2POp(dist.isend if m.sends else dist.irecv, m.tensor, group=group, tag=m.tag, group_peer=m.peer)
        for m in messages
    ]
    return dist.batch_isend_irecv(ops)


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

    def start(self, message: Message) -> Arrival | Sent:
        """Send, or say what shall be received."""
        key = (self.rank, message.peer) if message.sends else (message.peer, self.rank)
        if message.sends:
            self.workers.post((*key, message.tag), message.tensor.detach().clone())
            return Sent()
        return Arrival(self, (*key, message.tag), message.tensor)


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
