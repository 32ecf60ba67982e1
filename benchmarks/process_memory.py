"""Memory of this process, as Linux counts it."""

import ctypes
import gc
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def resident(which: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in MiB."""
    return entry("/proc/self/status", which)


def available() -> float:
    """What all processes together can still take, in MiB."""
    return entry("/proc/meminfo", "MemAvailable")


def entry(file: str, which: str) -> float:
    for line in Path(file).read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{file} has no {which}")


def settle() -> float:
    """Give free memory back, reset the high-water mark, and return the resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def return_freed_memory() -> None:
    """From now on give tensors of 1 MiB and more back to the system when they are freed, or they would count as used.

    The same as ``MALLOC_MMAP_THRESHOLD_``, but only for what comes: it makes every such tensor slower.
    """
    for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        if not ctypes.CDLL(None).mallopt(option, 1 << 20):
            raise RuntimeError("mallopt refused a threshold of 1 MiB")
