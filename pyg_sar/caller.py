r"""Who called: the frames of Python that are running, and the user's line among them."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch

LIBRARIES = ("torch", "torch_geometric")


class Place(NamedTuple):
    """A line of code."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{os.path.basename(self.file)}:{self.line}" + (f", `{text}`" if text else "")


def callers() -> Iterator[FrameType]:
    """Yield the frames that called the function that asks, from the innermost to the outermost one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def script_line() -> Place | None:
    """Return the line outside of libraries that this thread runs, if there is one.

    Of this thread alone: to follow the frames of another one while it runs reads memory that it has given back.
    """
    frames = (f for f in callers() if package_of(f) not in (*LIBRARIES, "pyg_sar", "threading", "contextlib"))
    return next((Place(f.f_code.co_filename, f.f_lineno) for f in frames), None)


def module_of(frame: FrameType) -> str:
    """Return the module whose code a frame runs; what torch compiled stands in none."""
    return "torch" if frame.f_code.co_filename.startswith("<eval_with_key>") else frame.f_globals.get("__name__", "")


def package_of(frame: FrameType) -> str:
    """Return the package whose code a frame runs."""
    return module_of(frame).partition(".")[0]


def within(frame: FrameType, *names: str) -> bool:
    """Return whether a frame runs code of a module or package of these names."""
    module = module_of(frame)
    return any(module == name or module.startswith(f"{name}.") for name in names)


def spoken(frame: FrameType) -> str:
    """Return what people call the function that a frame runs: a layer by its class, a method with its class before."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        return name
    return type(owner).__name__ if name in ("__call__", "__init__", "forward") else f"{type(owner).__name__}.{name}"


def beyond(*names: str) -> tuple[list[FrameType], FrameType | None]:
    """Return the frames of modules of these names that called the one that asks, and the one that called them."""
    inner: list[FrameType] = []
    # Without the one that asks: with this list among its variables it would stay, and all its callers' variables.
    for frame in islice(callers(), 1, None):
        if not within(frame, *names):
            return inner, frame
        inner.append(frame)
    return inner, None


def running_modules() -> Iterator[tuple[torch.nn.Module, dict[str, Any]]]:
    """Yield the modules whose methods are running, the innermost first, with the local variables of the method."""
    for frame in callers():
        # Only of methods: a frame keeps alive the variables that it was asked for until it is asked again.
        variables = frame.f_locals if "self" in frame.f_code.co_varnames else {}
        module = variables.get("self")
        if isinstance(module, torch.nn.Module):
            yield module, variables


def raised_at(error: BaseException) -> Place | None:
    """Return the last line outside of libraries that an error passed, if there is one."""
    ours = (*LIBRARIES, "pyg_sar")
    lines = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if package_of(f) not in ours]
    return Place(lines[-1][0].f_code.co_filename, lines[-1][1]) if lines else None


def warn(message: str) -> None:
    """Warn at the line that called this package, by torch or not."""
    inner, _ = beyond("pyg_sar", "torch")
    warnings.warn(message, stacklevel=len(inner) + 2)
