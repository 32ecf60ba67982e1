r"""Messages between this worker and others: a tag on each, so that no message is taken for another one."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.distributed import guard, notices, staging
from pyg_sar.distributed.group import Group, Member, Message, abandon, current, start, talking
from pyg_sar.exchange import Meter
from pyg_sar.running import About


class Channel:
    """Sends and receives in turns, of which each exchanges rows or gradients once.

    Floating-point rows and gradients that are wider than ``comm_dtype`` are sent in this type, if there is one.
    """

    def __init__(self, group: Group = None, comm_dtype: torch.dtype | None = None) -> None:
        self.group, self.comm_dtype = current(group), comm_dtype
        self.turn = 0
        self.told: guard.Turn | None = None  # what others do in this turn, if they tell

    def begin(self, about: About | None, peers: Sequence[int], device: torch.device, meter: Meter) -> None:
        """Begin another turn; tell ``peers`` what this worker does with rows on ``device``."""
        self.turn, self.told = self.turn + 1, None
        if not isinstance(self.group, Member):
            notices.calls("an exchange of rows" if about is None else about.what)
        if about is not None and guard.ON and guard.has_headers(self.group, device):
            with talking("starting to tell others what this worker does", self.group, notices.NOBODY):
                self.told = guard.Turn(about, peers, self.group, zlib.crc32(f"{self.turn}".encode()) >> 1, meter)

    def buffer(self, rows: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for ``rows`` rows from a peer, in the type in which they are sent or in another one."""
        return like.new_empty(rows, *like.shape[1:], dtype=dtype or self.sent_as(like.dtype))

    def sent_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which rows of a type are sent."""
        if self.comm_dtype is None or not dtype.is_floating_point or dtype.itemsize <= self.comm_dtype.itemsize:
            return dtype
        return self.comm_dtype

    def tag(self, what: str, tensor: Tensor) -> int:
        """Return a number that only the same message of the same turn has.

        Workers that ran different code then wait for each other until the timeout of the group; without it gloo would
        take any bytes for the rows, or abort the process if there are too many of them.
        """
        return zlib.crc32(f"{self.turn} {what} {tensor.dtype} {list(tensor.shape)}".encode()) >> 1

    def swap(self, out: Tensor, dst: int, into: Tensor, src: int, what: str, meter: Meter) -> list[UnderWay]:
        """Start to send ``out`` to ``dst`` and to receive ``into`` from ``src``; nothing empty is sent.

        What ``src`` does is heard before its rows are waited for.
        """
        out, landing = out.to(self.sent_as(out.dtype)).contiguous(), None
        if staging.is_staged(into, self.group):
            out = staging.to_host(out) if out.numel() > 0 else out
            landing = staging.Landing(into) if into.numel() > 0 else None
            into = into if landing is None else landing.host
        # Receiving first: gloo announces it through the same connection, where it must not wait behind what is sent.
        both = ((into, src, False), (out, dst, True))
        messages = [Message(t, peer, self.tag(what, t), sends) for t, peer, sends in both if t.numel() > 0]
        meter(out.numel() * out.element_size(), into.numel() * into.element_size())
        header = None if self.told is None else self.told.headers.get(src)
        found: list[UnderWay] = [] if header is None else [header]
        if not messages:
            return found
        with self.talking(f"starting to exchange {what} with workers {dst} and {src}", notices.NOBODY):
            works = start(messages, self.group)
        # A backend that groups transfers returns one handle for all of them.
        pairs = zip(works, messages, strict=True) if len(works) == len(messages) else [(works[0], messages[0])]
        transfers = [
            Transfer(
                self, work, messages, f"{'sending' if m.sends else 'receiving'} {what}, worker {m.peer}", m.peer, meter
            )
            for work, m in pairs
        ]
        if landing is not None:
            transfers[0].landing = landing  # receiving comes first
        return [*found, *transfers]

    @contextmanager
    def talking(self, doing: str, peer: int) -> Iterator[None]:
        """Say what has happened when the other workers do not answer."""
        try:
            with talking(doing, self.group, peer):
                yield
        except RuntimeError as error:
            if self.told is not None and isinstance(error, notices.LostWorkers):
                self.told.explain(error)
            raise


@dataclass
class Transfer:
    """One message under way; keeps its memory alive until it has arrived."""

    channel: Channel
    work: Any
    messages: list[Message]
    doing: str
    peer: int
    meter: Meter
    landing: staging.Landing | None = None

    def wait(self) -> None:
        """Return when the message has arrived."""
        start = time.perf_counter()
        with self.channel.talking(self.doing, self.peer):
            self.work.wait()
        self.meter(wait=time.perf_counter() - start)
        if self.landing is not None:
            self.landing.finish()
        self.messages, self.landing = [], None

    def __del__(self) -> None:
        """Keep what has not arrived."""
        if self.messages:
            abandon(self.channel.group, self.work, self.messages)


UnderWay = Transfer | guard.Header


def wait_for(transfers: Iterable[UnderWay]) -> None:
    """Return when all messages have arrived."""
    for transfer in transfers:
        transfer.wait()
