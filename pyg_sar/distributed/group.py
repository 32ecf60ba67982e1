r"""Who the workers are, and the few ways in which they talk: through :mod:`torch.distributed`, or, if they are
simulated by threads of one process, as in :mod:`pyg_sar.distributed.simulated`.

Everything else that communicates is made of what is here. ``group`` is a process group, a ``Member`` of simulated
workers, or None: the simulated workers to which this thread belongs, if there are some, else the default process group.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_sar.distributed import notices, values
from pyg_sar.distributed.simulated import Member, member

Group = Any
OWN = ("allocate memory", "No backend type associated", "Invalid scalar type")  # what torch says of this worker alone

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
    return member() if group is None else group


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
        group = current(group)
        if isinstance(group, Member):
            return group.workers.meet(group.rank, "gather_objects", value)
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
        return [group.send(*m[:3]) if m.sends else group.receive(*m[:3]) for m in messages]
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
