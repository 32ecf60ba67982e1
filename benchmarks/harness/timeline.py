"""What a worker does during a training step: when it waits and for what, and what passes its link meanwhile.

The library is watched from outside: :func:`watch` wraps its verbs for as long as it is open. All times are of the
system's monotonic clock, which all processes of a machine share.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from pyg_sar.distributed.guard import Header
from pyg_sar.distributed.peers import Peers
from pyg_sar.distributed.transfer import Channel, Transfer

# What takes a worker's time, besides computing. Rows are gathered, and messages started, by the thread that computes.
POSTING, FORWARD, BACKWARD, GRADIENTS, COLLECTIVES = KINDS = (
    "gathering and starting to send",
    "waiting for rows, forward",
    "waiting for rows, backward",
    "waiting for gradients",
    "waiting in collectives",
)
WAITING = (FORWARD, BACKWARD, GRADIENTS)  # what `record_traffic` counts


@dataclass
class Span:
    """A while, and for a wait: the message, as its direction, the peer and its number among these; and since when it
    was under way here.
    """

    kind: str
    start: float
    end: float
    message: tuple[str, int, int] | None = None
    posted: float = 0.0


@dataclass
class Step:
    """What :func:`watch` saw."""

    start: float = 0.0
    end: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def seconds(self, *kinds: str) -> float:
        return sum(span.end - span.start for span in self.spans if span.kind in kinds)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Step":
        spans = [Span(**span) for span in found["spans"]]
        for span in spans:
            span.message = span.message and tuple(span.message)  # JSON knows lists only
        return cls(found["start"], found["end"], spans)


@contextmanager
def watch() -> Iterator[Step]:
    """Record the spans of a step."""
    step, started, numbers = Step(), {}, Counter()
    wait, swap, fetch, collectives = Transfer.wait, Channel.swap, Peers._fetch, ("all_reduce", "all_gather_object")
    hear = Header.wait

    def timed(kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = call(*args, **kwargs)
        step.spans.append(Span(kind, start, time.perf_counter()))
        return out

    def timed_swap(channel: Channel, *args: Any) -> list[Transfer | Header]:
        transfers = swap(channel, *args)
        for transfer in (t for t in transfers if isinstance(t, Transfer)):
            direction, peer = transfer.doing.split()[0], int(transfer.doing.split()[-1])
            numbers[direction, peer] += 1
            started[id(transfer)] = (direction, peer, numbers[direction, peer]), time.perf_counter()
        return transfers

    def timed_wait(transfer: Transfer) -> None:
        forward = transfer.meter.__name__ == "forward"
        kind = GRADIENTS if "gradients" in transfer.doing else FORWARD if forward else BACKWARD
        message, posted = started.pop(id(transfer))
        start = time.perf_counter()
        wait(transfer)
        step.spans.append(Span(kind, start, time.perf_counter(), message, posted))

    with ExitStack() as stack:
        for target, name, new in ((Transfer, "wait", timed_wait), (Channel, "swap", timed_swap)):
            stack.enter_context(patch.object(target, name, new))
        stack.enter_context(patch.object(Header, "wait", lambda header: timed(FORWARD, hear, header)))
        stack.enter_context(patch.object(Peers, "_fetch", lambda *args: timed(POSTING, fetch, *args)))
        for name in (*collectives, "all_gather"):
            stack.enter_context(patch.object(dist, name, partial(timed, COLLECTIVES, getattr(dist, name))))
        step.start = time.perf_counter()
        yield step
        step.end = time.perf_counter()


def late(own: Step, peers: list[Step], rank: int) -> float:
    """Return for how long a worker waited for messages that the peer had not yet started, of all that it waited."""
    opposite = {"sending": "receiving", "receiving": "sending"}
    posted = [{span.message: span.posted for span in step.spans if span.message} for step in peers]
    seconds = 0.0
    for span in own.spans:
        if span.message:
            direction, peer, number = span.message
            began = posted[peer][opposite[direction], rank, number]
            seconds += max(min(began, span.end) - span.start, 0.0)
    return seconds


@contextmanager
def sampled(device: str, every: float = 0.005) -> Iterator[list[tuple[float, int, int]]]:
    """Collect times, and the bytes that a network device has received and sent until then."""
    counters = [Path(f"/sys/class/net/{device}/statistics/{name}_bytes") for name in ("rx", "tx")]
    samples: list[tuple[float, int, int]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(every):
            received, sent = (int(counter.read_text()) for counter in counters)
            samples.append((time.perf_counter(), received, sent))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()
