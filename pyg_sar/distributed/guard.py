r"""Checks that workers do the same before they exchange rows; :envvar:`PYG_SAR_GUARDS` ``=0`` turns them off.

Before rows are communicated, workers tell each other in a *header* which layer of the model they run, on rows of which
shape, and a number made of its parameters. Whoever hears of something else than its own raises at once, with both
names.
What :func:`pyg_sar.sum_gradients` compares is in :mod:`pyg_sar.distributed.agreement`.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.distributed.group import Group, Member, Message, abandon, is_local, rank_of, start, talking
from pyg_sar.distributed.notices import ORDER
from pyg_sar.exchange import Meter
from pyg_sar.ops.reference import accumulator
from pyg_sar.running import About

ON = os.environ.get("PYG_SAR_GUARDS") != "0"

SIZE = 256  # of a header, in bytes
FIELDS = struct.Struct("<dBI")  # see `Told`; the words follow
UNTOLD, FIRST, CHANGED = range(3)  # there is no sum; it is that of the first call, and may differ; it must not
LAST_WORDS = timedelta(seconds=1)  # in which peers shall hear why a worker ends

WIDTHS = "Widths must not be taken from a worker's own labels: 'data.num_classes' is that of the whole graph."
START = (
    "All workers must start from the same parameters: make and load the model alike on all of them, or call "
    "'pyg_sar.broadcast_parameters(model)' before the first step."
)
NEVER = "Was 'pyg_sar.sum_gradients(model)' left out? It must be called between 'backward' and 'optimizer.step()'."
STEPS = (
    "Their optimizers have made different steps: by other numbers such as the learning rate, which "
    "'pyg_sar.sum_gradients(model, optimizer=optimizer)' compares, or by gradients that were not summed after every "
    "backward pass. Or parameters were drawn or loaded anew: then call 'pyg_sar.broadcast_parameters(model)' after "
    "'reset_parameters()' or 'load_state_dict(...)'."
)
SUMMED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is remembered of parameters, see `agreement.Mark`


def has_headers(group: Group, device: torch.device) -> bool:
    """Whether headers accompany rows of a device: not where NCCL carries these, nor where nobody answers."""
    if isinstance(group, Member):
        return True
    config = dist.get_backend_config(group)
    return "cpu:gloo" in config and f"{device.type}:nccl" not in config


class Told(NamedTuple):
    """What is in a header."""

    total: float  # that of the layer's parameters, see `totals`
    kind: int  # `UNTOLD`, `FIRST` or `CHANGED`
    checksum: int  # that of the words, which may have been cut
    words: str  # what the worker does


def pack(about: About) -> bytearray:
    """Return the header of what this worker does."""
    total, kind, words = 0.0, UNTOLD, about.what.encode()
    if about.layer is not None and (parameters := summable(about.parameters)):
        total, layer = sum(totals(parameters)), about.layer
        # Lazy layers get their parameters in a first run, before they can be made alike.
        if layer.first is None and about.complete:
            layer.first = total
        early = about.training or layer.lazy
        kind = FIRST if early and (layer.first is None or alike(layer.first, total)) else CHANGED
    packed = FIELDS.pack(total, kind, zlib.crc32(words)) + words
    return bytearray(packed[:SIZE].ljust(SIZE, b"\0"))


def unpack(header: bytearray) -> Told:
    """Return what is in a header."""
    total, kind, checksum = FIELDS.unpack_from(header)
    return Told(total, kind, checksum, header[FIELDS.size :].rstrip(b"\0").decode(errors="ignore"))


class Header:
    """What a peer tells in a turn."""

    def __init__(self, turn: Turn, peer: int) -> None:
        self.turn, self.peer, self.theirs = turn, peer, bytearray(SIZE)
        self.into = torch.frombuffer(self.theirs, dtype=torch.uint8)
        self.came: Any = None  # the handles of the messages from the peer and to it
        self.sent: Any = None
        self.heard = self.arrived = False  # it is waited for once, also in vain

    def wait(self) -> None:
        """Wait for it, and raise if the peer does something else."""
        try:
            why = self.hear()
        except RuntimeError as error:
            self.turn.explain(error)
            raise
        if why:
            self.turn.fail(why)

    def hear(self, *timeout: timedelta) -> str:
        """Wait for it, and return what is wrong with it."""
        if self.heard:
            return ""
        begin, self.heard = time.perf_counter(), True
        with talking(f"hearing what worker {self.peer} does", self.turn.group, self.peer):
            self.came.wait(*timeout)
            self.sent.wait(*timeout)  # at once: who tells has asked before
        self.arrived = True
        self.turn.meter(wait=time.perf_counter() - begin)
        why = "" if self.theirs == self.turn.mine else self.compare(unpack(self.turn.mine), unpack(self.theirs))
        if not why:
            del self.turn  # which knows its headers: a circle, which only the garbage collector would free
        return why

    def __del__(self) -> None:
        """Keep what has not arrived."""
        if not self.arrived:
            abandon(self.turn.group, self.came, self.sent)

    def compare(self, mine: Told, theirs: Told) -> str:
        """Return what differs beyond rounding."""
        layer, other = (told.words.partition(" on rows of ")[0] for told in (mine, theirs))
        if mine[2:] != theirs[2:]:
            advice = f"{ORDER} {WIDTHS}" if layer == other else ORDER
            return f"This worker runs {mine.words}, worker {self.peer} {theirs.words}. {advice}"
        known = UNTOLD not in (mine.kind, theirs.kind) and CHANGED in (mine.kind, theirs.kind)
        if not known or alike(mine.total, theirs.total):
            return ""
        parameters = summable(self.turn.about.parameters)
        if alike(mine.total, theirs.total, sum(map(bound, parameters))):
            return ""
        advice = STEPS if any(p in SUMMED for p in parameters) else f"{NEVER} {START}"
        return f"The parameters of {layer} are not those of worker {self.peer}. {advice}"


class Turn:
    """The headers of all peers with whom rows are exchanged in one turn; only these have its tag."""

    def __init__(self, about: About, peers: Iterable[int], group: Group, tag: int, meter: Meter) -> None:
        self.about, self.group, self.meter, self.mine = about, group, meter, pack(about)
        self.headers = {q: Header(self, q) for q in peers}
        out = torch.frombuffer(self.mine, dtype=torch.uint8)
        messages = [Message(header.into, q, tag, False) for q, header in self.headers.items()]
        messages += [Message(out, q, tag, True) for q in self.headers]
        works = start(messages, group) if messages else []
        for header, came, sent in zip(self.headers.values(), works, works[len(self.headers) :], strict=False):
            header.came, header.sent = came, sent

    def fail(self, why: str, error: RuntimeError | None = None) -> NoReturn:
        """Raise, as soon as all peers have heard what this worker does and can tell by themselves."""
        for header in self.headers.values():
            with suppress(RuntimeError):
                header.sent.wait(LAST_WORDS)
        raise RuntimeError(f"[rank {rank_of(self.group)}] {why}") from error

    def explain(self, error: RuntimeError) -> None:
        """Raise if a worker was lost because workers do different things."""
        for header in self.headers.values():
            why = ""
            with suppress(RuntimeError):
                why = header.hear(LAST_WORDS)
            if why:
                self.fail(why, error)


def is_summed(tensor: Tensor) -> bool:
    """Whether the gradient that a parameter has was summed."""
    mark = SUMMED.get(tensor)
    return mark is not None and mark.grad() is tensor.grad


def summable(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that all workers have alike and whose total is known without waiting for a device."""
    return [t for t in tensors if type(t) is torch.nn.Parameter and t.is_cpu and not is_local(t)]


@torch.no_grad()
def totals(tensors: Sequence[Tensor]) -> list[float]:
    """Return the sum of the numbers of each tensor and of their norm, 0 of those that have none.

    Steps of SGD keep the sum of the weights that make a softmax's scores, whatever the gradient is, and hardly change
    the norm of weights before a normalisation: where the one does not tell steps apart, the other does.
    """
    found = [total(t) if has_sum(t) else t.new_zeros(()) for t in tensors]
    if all(t.is_cpu for t in found):
        return [float(t) for t in found]
    return torch.stack([t.double().to(found[0].device) for t in found]).tolist()  # one host-device synchronisation


def total(tensor: Tensor) -> Tensor:
    """Return the sum of the numbers of a tensor and of their norm."""
    kind = accumulator(tensor.dtype)
    return tensor.sum(dtype=kind) + torch.linalg.vector_norm(tensor, dtype=kind)


@torch.no_grad()
def bound(tensor: Tensor) -> float:
    """Return how far the total of a tensor may be off on other processors."""
    if not has_sum(tensor):
        return 0.0
    values = tensor.double()
    return min(32 * torch.finfo(tensor.dtype).eps, 1e-2) * float(values.norm() + values.sum().abs())


def has_sum(tensor: Tensor) -> bool:
    """Whether a tensor has a total."""
    return tensor.is_floating_point() and tensor.itemsize > 1 and tensor.layout == torch.strided


def alike(one: float, other: float, bound: float = 0.0) -> bool:
    """Whether two totals differ by no more than a bound, or both are no numbers."""
    return one == other or (one != one and other != other) or abs(one - other) <= bound
