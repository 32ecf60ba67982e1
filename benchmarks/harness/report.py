"""What tables of benchmarks have in common: the file that they are written to, and the machine in their first lines."""

import platform
from collections.abc import Iterable
from pathlib import Path


def write(folder: str, name: str, lines: Iterable[str]) -> str:
    """Write lines to a file, whose folder is made if need be, and return them as one text."""
    path, text = Path(folder) / name, "\n".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return text


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
