"""Memory of this process, as Linux counts it, or as torch's allocator does on a GPU."""

import ctypes
import gc
from pathlib import Path

import torch

# Settings under which a process gives every tensor of 128 KiB and more back to the system when it is freed, or they
# would count as used: the C library starts with this threshold, but raises it. They must hold from its start: what was
# once a heap takes tensors of any size, and keeps their pages. Such a process is slower.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)}


def resident(which: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in MiB."""
    return entry("/proc/self/status", which)


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def in_use() -> float:
    """What this process has from ``malloc`` and has not freed, in MiB, without what the C library keeps for later."""
    look = ctypes.CDLL(None).mallinfo2
    look.restype = _Malloc
    found = look()
    return (found.uordblks + found.hblkhd) / 2**20


def available() -> float:
    """What all processes together can still take, in MiB."""
    return entry("/proc/meminfo", "MemAvailable")


def entry(file: str, which: str) -> float:
    for line in Path(file).read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{file} has no {which}")


def peak(device: str = "cpu") -> float:
    """Return the high-water mark in MiB."""
    return resident("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def settle(device: str = "cpu") -> float:
    """Give free memory back, reset the high-water mark, and return the memory that is used, in MiB."""
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return resident("VmRSS")


def reset_peak() -> None:
    """Reset the high-water mark to what is used now."""
    Path("/proc/self/clear_refs").write_text("5")
