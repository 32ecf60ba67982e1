"""What tables of benchmarks have in common: the file that they are written to, and the machine in their first lines."""

import platform
from collections.abc import Iterable
from pathlib import Path

import torch


def write(folder: str, name: str, lines: Iterable[str]) -> str:
    """Write lines to a file, whose folder is made if need be, and return them as one text."""
    path, text = Path(folder) / name, "\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return text


def processor() -> str:
    """Return the processor's name, and which of its instructions PyTorch uses."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
