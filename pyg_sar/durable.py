r"""Files and folders that are on the disk whole or not at all."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from pathlib import Path
from typing import Any

_AT_FDCWD, _EXCHANGE = -100, 2  # of renameat2


def digest(file: Path) -> str:
    """Return a checksum of a file."""
    found = hashlib.sha256()
    with open(file, "rb") as f:
        while chunk := f.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def checksum(content: dict[str, Any]) -> str:
    """Return a checksum of what a JSON file says."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a new JSON file that holds its own checksum."""
    content = json.loads(json.dumps(content))  # as it will be read
    with open(file, "x", encoding="utf-8") as f:
        json.dump(content | {"checksum": checksum(content)}, f, indent=1)
    sync(file)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Have two folders of one disk take each other's name at once; return whether the system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other)
    return rename is not None and rename(*paths, _EXCHANGE) == 0


def owner() -> str:
    """Return a name of this process, by which others tell whether what it left behind is still written."""
    return f"{_node()}-{os.getpid()}"


def is_dead(name: str) -> bool:
    """Whether a name is that of a process of this machine that has ended."""
    node, _, number = name.rpartition("-")
    if node != _node() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, which lives
        pass
    return False


def _node() -> str:
    """Return the name of this machine, without dots, which part the names of files."""
    return os.uname().nodename.replace(".", "_")
