r"""What workers say about themselves in the store of their group: that they live, what they do, and why they end.

A message that does not come tells nothing about its sender. So every worker has a thread that writes a *sign* of life
each second: the number of its last call and what it does. Who ends writes why, with the step, the layer and the line.
Who waits in vain reads both, and says which of three things happened: a worker *ended*, it *stopped answering*, or the
workers *ran different code*.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from pyg_sar import running
from pyg_sar.caller import raised_at, script_line

INTERVAL = 1.0  # seconds between two signs
SILENT = 3 * INTERVAL  # without a new sign of a worker, after which it is gone, for one that waited for it in vain
STUCK = 5  # signs in a row of a worker that waits for one that has left
LAST = 20  # calls that are remembered
EVERYBODY, NOBODY = -1, -2  # whom a worker waits for in a collective call, and while it starts to send

ORDER = (
    "Every rank must call the same layers in the same order, with inputs of the same width, 'dtype' and "
    "'requires_grad', even if it holds no nodes, edges or labels."
)


class LostWorkers(RuntimeError):
    """Other workers did not answer: what this worker ends by, but not why."""


class Sign(NamedTuple):
    """What a living worker says.

    Args:
        beat: How many signs it has given.
        calls: How many calls it has begun in which workers talk.
        steps: How many training steps it has finished.
        doing: What the last call does.
        waits: Whom it waits for in it: a rank, several, ``EVERYBODY``, ``NOBODY``, or None between calls.
        line: The line of its script, in the last call.
    """

    beat: int
    calls: int
    steps: int
    doing: str
    waits: int | list[int] | None
    line: str

    def __str__(self) -> str:
        place = f", {self.line}" if self.line else ""
        return f"in {self.doing} (call {self.calls}, step {self.steps}{place})"


class Notices:
    """The signs and last words of all workers."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.others = store, rank, [r for r in range(size) if r != rank]
        self.beat = self.calls = self.steps = 0
        self.doing, self.waits = "its first lines", None  # type: str, int | list[int] | None
        self.reason = ""
        self.last: deque[tuple[float, int, int, str]] = deque(maxlen=LAST)
        self.line, self.over = script_line(), threading.Event()
        self.write()
        threading.Thread(target=self.live, name="pyg_sar signs", daemon=True).start()

    def live(self) -> None:
        """Give signs until this worker ends."""
        with suppress(RuntimeError):  # the store is gone
            while not self.over.wait(INTERVAL):
                self.write()

    def write(self) -> None:
        """Give a sign."""
        self.beat += 1
        sign = Sign(self.beat, self.calls, self.steps, self.doing, self.waits, str(self.line or ""))
        self.store.set(f"sign/{self.rank}", json.dumps(sign))

    def end(self, error: BaseException) -> None:
        """Say why this worker ends."""
        self.over.set()
        told = {
            "step": self.steps,
            "doing": layer_of(error) or self.doing,
            "call": self.calls,
            "line": str(raised_at(error) or ""),
            "why": "".join(traceback.format_exception_only(error)).strip(),
            "lost": isinstance(error, LostWorkers),
        }
        with suppress(RuntimeError):
            self.store.set(f"ended/{self.rank}", json.dumps(told))

    def read(self, what: str) -> dict[int, Any]:
        """Return what other workers have written."""
        keys = {r: f"{what}/{r}" for r in self.others}
        return {r: json.loads(self.store.get(key)) for r, key in keys.items() if self.store.check([key])}

    def signs(self) -> dict[int, Sign]:
        """Return the last sign of every other worker."""
        return {r: Sign(*found) for r, found in self.read("sign").items()}

    def why(self) -> str:
        """Return why other workers did not answer; found out once."""
        self.reason = self.reason or self.find_reason()
        return self.reason

    def find_reason(self) -> str:
        """Read what others have said, and look who still gives signs."""
        try:
            before, ended = self.signs(), self.read("ended")
            if not causes(ended):
                time.sleep(SILENT)  # who ends may not have written yet, and who lives gives signs
                ended = self.read("ended")
            if told := causes(ended):
                return told
            now, left = self.signs(), self.read("left")
        except RuntimeError:
            return "the store of the group does not answer either: the process or host that keeps it is gone"
        mine = Sign(0, self.calls, self.steps, self.doing, None, str(self.line or ""))
        silent = [r for r in self.others if r not in ended and r not in left and now.get(r) == before.get(r)]
        if silent:
            signs = ((r, now.get(r, "before its first call")) for r in silent)
            last = "; ".join(f"rank {r} stopped answering, last heard of {sign}" for r, sign in signs)
            return f"{last}: it was killed, or its host or its connection was lost. This worker is {mine}"
        if left:
            gone = "; ".join(f"rank {r} has left {text}" for r, text in left.items())
            return f"the workers ran different code: {gone}. {ORDER}"
        if ended:
            return "; ".join(f"rank {r} ended: {told['why']}" for r, told in ended.items())
        if {str(sign) for sign in now.values()} == {str(mine)}:
            return f"all workers are {mine}; a message failed, or several threads of a worker call layers of one graph"
        others = "; ".join(f"rank {r} is {sign}" for r, sign in now.items())
        return f"the workers ran different code: {others}; this one is {mine}. {ORDER}"

    def leave(self, timeout: float, limit: float | None = None) -> None:
        """Wait until all workers leave.

        Args:
            timeout: Seconds without a sign after which a worker is lost.
            limit: Seconds to wait for those that live.

        Raises:
            RuntimeError: If one ends instead, stops answering, waits for this one, or works beyond the limit.
        """
        line = str(script_line() or "")
        self.store.set(f"left/{self.rank}", json.dumps(f"at {line}" if line else "its script"))
        begin, seen, count = time.monotonic(), {}, 0  # type: float, dict[int, tuple[Sign, float]], int
        waits: dict[int, int] = {}  # signs in a row that say the same
        while self.others and not self.store.check([f"left/{r}" for r in self.others]):
            count += 1
            time.sleep(min(0.001 * count, 0.05))
            if count % 20:
                continue
            missing = [r for r in self.others if not self.store.check([f"left/{r}"])]
            if told := causes({r: t for r, t in self.read("ended").items() if r in missing}, also_lost=True):
                raise LostWorkers(f"[rank {self.rank}] This worker has finished, but {told}")
            now = time.monotonic()
            for r, sign in self.signs().items():
                old, since = seen.get(r, (None, now))
                if old is None or sign.beat != old.beat:
                    same = old is not None and sign.calls == old.calls and sign.waits == old.waits is not None
                    waits[r] = waits.get(r, 0) + 1 if same else 0
                    seen[r] = sign, now
                elif r in missing and now - since > timeout:
                    raise LostWorkers(
                        f"[rank {self.rank}] This worker has finished, but rank {r} stopped answering, last heard of "
                        f"{sign}"
                    )
            stuck = {r: seen[r][0].waits for r in missing if waits.get(r, 0) >= STUCK}
            alone = [r for r, whom in stuck.items() if whom == self.rank]
            if alone or (stuck and self.needed_by(stuck) == set(missing)):
                r = (alone or missing)[0]
                raise RuntimeError(
                    f"[rank {self.rank}] This worker has left ({line or 'at the end of its script'}), but rank {r} "
                    f"waits for it: it is {seen[r][0]}. The workers ran different code. {ORDER}"
                )
            if limit is not None and now - begin > limit:
                working = "; ".join(f"rank {r} is {seen[r][0]}" for r in missing if r in seen)
                raise RuntimeError(f"[rank {self.rank}] Waited for {limit:g} s for others to finish: {working}")
        self.over.set()
        self.part()

    def needed_by(self, waits: dict[int, Any]) -> set[int]:
        """Return which workers wait for this one, or for one that does."""
        found = {self.rank}
        while more := {r for r, whom in waits.items() if r not in found and reaches(whom, found)}:
            found |= more
        return found - {self.rank}

    def part(self) -> None:
        """See that nobody reads the store any more when the worker that may keep it ends."""
        with suppress(RuntimeError):
            self.store.set(f"gone/{self.rank}", "")
            for _ in range(200):
                if self.rank != 0 or not self.others or self.store.check([f"gone/{r}" for r in self.others]):
                    return
                time.sleep(0.01)


CURRENT: Notices | None = None  # of this process
LOOKS = 0  # how many blocks of :func:`pyg_sar.debug` are running


def calls(doing: str) -> None:
    """Take note of a call in which workers talk."""
    if CURRENT is not None:
        CURRENT.calls += 1
        CURRENT.doing = doing
        CURRENT.line = script_line() or CURRENT.line  # threads of autograd run no script
        CURRENT.last.append((time.time(), CURRENT.calls, CURRENT.steps, doing))


def stepped() -> None:
    """Take note of the end of a training step."""
    if CURRENT is not None:
        CURRENT.steps += 1


def causes(ended: dict[int, Any], also_lost: bool = False) -> str:
    """Return why workers ended, other than because they lost others."""
    return "; ".join(
        f"rank {r} ended in step {told['step']}, {told['doing']} (call {told['call']}"
        f"{told['line'] and ', '}{told['line']}): {told['why']}"
        for r, told in ended.items()
        if also_lost or not told["lost"]
    )


def reaches(whom: int | list[int], workers: set[int]) -> bool:
    """Whether one of the workers is among those that another one waits for."""
    return whom == EVERYBODY or not workers.isdisjoint(whom if isinstance(whom, list) else [whom])


def short(error: BaseException) -> str:
    """Return what a library says, without the line of its own code and its advice."""
    said = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0])
    return re.split(r"\. (?:This|Check|Either)|, possibly", said)[0].rstrip(".")


def layer_of(error: BaseException) -> str:
    """Return the layer in whose code an error was raised."""
    modules: Sequence[Any] = [
        module
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if "self" in frame.f_code.co_varnames and isinstance(module := frame.f_locals.get("self"), torch.nn.Module)
    ]
    return running.called(modules[::-1]) if modules else ""
