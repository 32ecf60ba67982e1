"""Processes that work one at a time, on command: each holds one implementation of the same thing.

The parent starts a :class:`Child` for each and asks them in turn; a question is one line of JSON, and so is the answer.
So peaks of memory are separate, a crash ends one implementation alone, and slow minutes of the machine hit all alike.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.launch import ROOT


class Died(Exception):
    """A child ended before it answered, for example because the system ran out of memory."""


class Child:
    """Runs ``script --worker`` with ``args``; ``settings`` are environment variables."""

    def __init__(self, script: str, args: list[str], threads: int, **settings: str) -> None:
        paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Threads that wait must not spin, or those that work would share their cores.
        waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
        count = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **waiting, **count, **settings}
        command = [sys.executable, script, "--worker", *args]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: str, *args: Any) -> Any:
        """Have the child run a method and wait for what it returns."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([question, *args]) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise Died(f"ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()


def alternate(children: Iterable[Child], question: str, repetitions: int, warmups: int = 0) -> list[list[Any]]:
    """Ask all children in turn, so many times; return the answers of each, but those to the first questions."""
    children = [*children]
    turns = [[child.ask(question) for child in children] for _ in range(warmups + repetitions)]
    return [[*answers] for answers in zip(*turns[warmups:], strict=True)]


def serve(make: Any) -> None:
    """Be a child: answer questions by the methods of the object that ``make()`` returns."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    Path("/proc/self/oom_score_adj").write_text("1000")  # the one that takes the memory goes first, not the parent
    target = None
    for line in sys.stdin:
        try:
            target = target or make()
            question, *args = json.loads(line)
            answer = {"result": getattr(target, question)(*args)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
