r"""Where rows live while they are not computed on: memory of the host, or files that nobody else can see.

Both are CPU tensors, so that who reads and writes rows need not know which; pinned memory a GPU reads and writes by
itself, as other tensors that are the same memory (:meth:`Home.seen`).

* **Memory** is pinned if rows are computed on a GPU. It is slow to get, so that what a tensor leaves behind is kept for
  the next one of the same size.
* **A file** is mapped and shared: its pages belong to the system, which writes them to the disk when memory runs short.
  It has no name, so that nothing is left of it when its tensor dies, even by a crash. Dead files are not used again:
  writing on old rows would read them from the disk first, and a new file costs a millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

# What the system reads ahead at one call: it ignores the rest of a longer range.
WINDOW = 128 * 1024
ALIGNMENT = 64  # bytes
SPARE = 1.5  # times the bytes in use at one time are kept pinned: to pin takes four times as long as to copy
BEHIND = 2  # ranges of a tensor that are being written to the disk, and stay in memory meanwhile

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LOST = {errno.EIO, errno.ENOSPC, errno.EDQUOT}
_MAPPED = 3  # of cudaHostRegister: devices read and write it, at the same address (on Linux)
_START, _FINISH = 2, 7  # of sync_file_range: SYNC_FILE_RANGE_WRITE, and WAIT_BEFORE | WRITE | WAIT_AFTER


class _Mapping(mmap.mmap):
    """Mapped bytes, and what must be given back with them."""

    pinned: torch.device | None = None  # for which device
    descriptor = -1  # of a file, which nobody could open again to have its pages written

    def __init__(self, descriptor: int, length: int, **options: int) -> None:
        super().__init__()  # `__new__` took the arguments
        self.address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self.written: deque[tuple[int, int]] = deque()  # ranges that are being written to the disk

    def pin(self, device: torch.device) -> None:
        # `pin_memory=True` would take up to twice the bytes: torch rounds them to a power of two.
        with torch.cuda.device(device):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.address, len(self), _MAPPED))
        self.pinned = device
        self.madvise(mmap.MADV_DONTFORK)  # or this process might get a copy of pages that the device goes on to write

    def close_file(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:  # before the bytes are unmapped
        if self.pinned is not None and not sys.is_finalizing():
            with torch.cuda.device(self.pinned):
                torch.cuda.synchronize()  # the device may still read and write what died
                torch.cuda.cudart().cudaHostUnregister(self.address)
        self.close_file()


class _Seen:
    """The bytes of rows as a device sees them, for torch to make a tensor of, which keeps the rows."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        place = {"data": (rows.data_ptr(), False), "shape": (rows.nbytes,), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = place


class Home:
    """Gives out CPU tensors for rows, in memory or in files of a folder.

    A tensor keeps its bytes as long as it or a view of it lives, also longer than the home. In memory, they are used
    again when it dies, once a GPU has done what it was asked for.

    Args:
        folder (str, optional): Where files are made. With :obj:`None`, rows are in memory.
        device (torch.device): Where rows are computed on.
        limit (int, optional): The most bytes that all living tensors may take.

    Raises:
        OSError: If no file can be made in the folder.

    Attributes:
        peak: The most bytes that living tensors took so far.
        widest: The most bytes that a row of any of them takes.
    """

    def __init__(self, folder: str | None, device: torch.device, limit: int | None) -> None:
        self.folder, self.device, self.limit = folder, device, limit
        self.pinned = folder is None and device.type == "cuda"
        self.peak = self.widest = 0
        # Bytes of rows in files that the system writes when it likes, or never if they die before.
        self.plenty = memory() // 2
        # Of each living tensor, by its address, the view of its bytes that dies with it. What it views is a `_Mapping`.
        self._living: WeakValueDictionary[int, memoryview] = WeakValueDictionary()
        self._kept: dict[int, _Mapping] = {}  # all memory by its address, also that of dead tensors
        self._lock = threading.Lock()  # of who chooses memory until it lives
        if folder is not None:
            try:
                tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                message = f"Homes need a folder that files can be made in, but '{folder}' says: {error.strerror}."
                raise OSError(error.errno, f"{message} Make this folder writable, or give another one.") from None

    @property
    def apart(self) -> bool:
        """Whether tensors at home lie elsewhere than others."""
        return self.folder is not None or self.pinned

    @property
    def held(self) -> int:
        """The bytes that living tensors take."""
        return sum(view.nbytes for view in self._living.values())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose numbers are not yet set.

        Raises:
            OSError: If it does not fit. Then nothing was taken.
        """
        if not (needed := math.prod(shape) * dtype.itemsize):
            return torch.empty(*shape, dtype=dtype, device="cpu")
        with self._lock:
            if self.limit is not None and self.held + needed > self.limit:
                raise self._full(needed, f"the limit is {self.limit:,} bytes", "Raise the limit.")
            view = memoryview(self._memory(needed) if self.folder is None else self._file(self.folder, needed))
            rows = torch.frombuffer(view, dtype=dtype).resize_(shape)  # no view of another tensor, for autograd's sake
            self._living[rows.data_ptr()] = view
            self.peak, self.widest = max(self.peak, self.held), max(self.widest, needed // [*shape, 1][0])
        return rows

    def keep(self, tensors: Sequence[Any]) -> list[Any]:
        """Return tensors that are never written again, in one file or in pinned memory; in other memory, and what is no
        tensor, as it is.
        """
        if not self.apart:
            return list(tensors)
        places: dict[int, tuple[int, Tensor]] = {}  # by identity: what occurs twice is written once
        needed = 0
        for t in tensors:
            if isinstance(t, Tensor) and id(t) not in places:
                places[id(t)] = needed, t
                needed += -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        file = self.empty((needed,), torch.uint8)
        kept = {}
        for key, (at, t) in places.items():
            kept[key] = file[at : at + t.nbytes].view(t.dtype).view(t.shape)
            kept[key].copy_(t)
        self.wrote(file, 0, needed)
        if found := self._pages(file):  # no others are written, and there may be many such files
            found[0].close_file()
        return [kept.get(id(t), t) for t in tensors]

    def seen(self, rows: Tensor) -> Tensor | None:
        """Return the same rows as a GPU sees them, across the bus; None if it does not see them."""
        if not self.pinned or not rows.is_contiguous() or rows.untyped_storage().data_ptr() not in self._living:
            return None
        found = torch.as_tensor(_Seen(rows), device=self.device).view(rows.dtype).view(rows.shape)
        return found if found.data_ptr() == rows.data_ptr() else None  # a copy for another device

    def advise(self, rows: Tensor, begin: int, end: int) -> None:
        """Start reading some rows of a tensor that are needed next."""
        if found := self._pages(rows[begin:end]):
            mapping, start, stop = found
            for at in range(start, stop, WINDOW):
                mapping.madvise(mmap.MADV_WILLNEED, at, min(WINDOW, stop - at))

    def wrote(self, rows: Tensor, begin: int, end: int) -> None:
        """Where rows do not fit the memory, start writing some to the disk, which were just set, and drop those of two
        calls ago. The system would let them fill the memory first.
        """
        if self.folder is None or self.held <= self.plenty or not hasattr(_LIBC, "sync_file_range"):
            return
        if not (found := self._pages(rows[begin:end])):
            return
        mapping, start, stop = found
        stop -= stop % mmap.PAGESIZE  # the rest of the page is still to be set
        if start < stop:
            _sync(mapping, start, stop, _START)
            mapping.written.append((start, stop))
        if len(mapping.written) > BEHIND:
            start, stop = mapping.written.popleft()
            _sync(mapping, start, stop, _FINISH)
            mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)  # what is mapped cannot be dropped
            os.posix_fadvise(mapping.descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)

    def _memory(self, needed: int) -> _Mapping:
        """Return memory of a dead tensor, or new memory."""
        dead = [address for address in self._kept if address not in self._living]
        for address in dead:
            if len(self._kept[address]) == needed:
                if self.pinned:
                    torch.cuda.synchronize(self.device)  # which may still read what died
                return self._kept[address]
        # Other sizes are given back where more would be kept than was in use at one time, or half as much again.
        most = max(self.peak, self.held + needed) * (SPARE if self.pinned else 1)
        most = most if self.limit is None else min(most, self.limit)
        excess = sum(map(len, self._kept.values())) + needed - most
        while excess > 0:
            excess -= len(self._kept.pop(dead.pop(0)))
        try:
            mapping = _Mapping(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise self._full(needed, f"the system says: {error.strerror}", "Give a folder for homes.") from None
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)  # the first write is several times as fast
        if self.pinned:
            mapping.pin(self.device)
        self._kept[mapping.address] = mapping
        return mapping

    def _file(self, folder: str, needed: int) -> _Mapping:
        """Return a new file, mapped. It has its space: without, a full disk would kill the process by a signal."""
        disk = os.statvfs(folder)
        if needed > (free := disk.f_bavail * disk.f_frsize):
            raise self._full(needed, f"{free:,} bytes are free there", "Free some, or give a folder of a larger disk.")
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, needed)
                mapping = _Mapping(file.fileno(), needed)
                mapping.descriptor = os.dup(file.fileno())
        except OSError as error:
            why = f"of {free:,} free bytes, the system says: {error.strerror}"
            if error.errno == errno.EMFILE:
                raise self._full(needed, why, "Allow more ('ulimit -n'), or take fewer chunks.", error.errno) from None
            if error.errno == errno.EFBIG:
                raise self._full(needed, why, "Allow larger files ('ulimit -f').", error.errno) from None
            raise self._full(needed, why, "Free some, or give a folder of a larger disk.") from None
        return mapping

    def _full(self, needed: int, why: str, remedy: str, code: int | None = None) -> OSError:
        """Return the error that rows do not fit."""
        usual, where = (errno.ENOMEM, "memory") if self.folder is None else (errno.ENOSPC, f"'{self.folder}'")
        have = f"{self.held:,} bytes of rows are held"
        return OSError(code or usual, f"Rows need {needed:,} bytes more in {where}, where {have}, but {why}. {remedy}")

    def _pages(self, part: Tensor) -> tuple[_Mapping, int, int] | None:
        """Return where rows are in a file of ours, from the first byte of a page; of none, and of others, nothing."""
        if self.folder is None or not part.nbytes:
            return None
        base = part.untyped_storage().data_ptr()
        if (view := self._living.get(base)) is None:
            return None  # such as the features that were loaded
        mapping = view.obj
        assert isinstance(mapping, _Mapping)
        start = part.data_ptr() - base
        stop = min(start + part.stride(0) * part.shape[0] * part.itemsize, len(mapping))
        return mapping, start - start % mmap.PAGESIZE, stop


def memory() -> int:
    """Return the bytes of memory of this machine, or what a control group leaves this process of them."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in control_groups():
        for file in (f"/sys/fs/cgroup{group}/memory.max", f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                found.append(int(Path(file).read_text()))
    return min(found)


def control_groups() -> Iterator[str]:
    """Yield the paths of the control groups that count memory of this process, each with those around it."""
    lines = [":memory:/"]
    with suppress(OSError):
        lines += Path("/proc/self/cgroup").read_text().splitlines()
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds in ("", "memory"):
            yield from (str(group).rstrip("/") for group in (Path(path), *Path(path).parents))


def _sync(mapping: _Mapping, start: int, stop: int, how: int) -> None:
    """Write pages of a file to the disk, or start it."""
    span = ctypes.c_int64(start), ctypes.c_int64(stop - start)
    failed = _LIBC.sync_file_range(mapping.descriptor, *span, ctypes.c_uint(how))
    if failed and (code := ctypes.get_errno()) in _LOST:  # who does not know this call loses nothing
        raise OSError(code, f"Rows were not written to the disk: {os.strerror(code)}. Give a folder of another disk.")


def count_bytes(value: int | str | None, name: str) -> int:
    """Return a number of bytes; raise for what is none."""
    found: Any = value
    if isinstance(value, str):
        number = value.rstrip("KMGTiB ")
        unit = value[len(number) :].strip()
        try:
            found = int(float(number) * UNITS[unit or "B"])
        except (KeyError, ValueError, OverflowError):
            found = None
    if type(found) is not int or found <= 0:
        raise ValueError(f"Expected '{name}' to be a positive number of bytes, or such as '2GiB' (got {value!r})")
    return found
