"""Homes in memory and in files: their numbers, their bytes, and what is left of them."""

import errno
import gc
import mmap
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from pyg_sar.offload import home as module
from pyg_sar.offload.home import WINDOW, Home

CPU = torch.device("cpu")


@pytest.fixture(params=["memory", "file"])
def folder(request, tmp_path):
    return str(tmp_path) if request.param == "file" else None


@pytest.fixture
def files(tmp_path):
    home = Home(str(tmp_path), CPU, None)
    home.plenty = 0
    return home


def mapping_of(home, rows):
    return home._living[rows.untyped_storage().data_ptr()].obj


def resident(rows) -> int:
    """Return the bytes of a tensor's mapping that the process has in its page table."""
    text = Path("/proc/self/smaps").read_text()
    return int(re.search(rf"^{rows.data_ptr():x}-.*?^Rss: +(\d+)", text, re.M | re.S)[1]) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (7,), (1000, 33), (5, 3, 2), (0, 8), (8, 0)])
def test_numbers_survive(folder, dtype, shape):
    home = Home(folder, CPU, None)
    rows = home.empty(shape, dtype)
    assert rows.shape == shape and rows.dtype == dtype and rows.device == CPU
    assert rows.is_contiguous() and not rows._is_view() and not rows.requires_grad
    expected = torch.randint(2, shape).to(dtype)
    rows.copy_(expected)
    view = rows.view(-1)
    del rows, home
    gc.collect()
    assert torch.equal(view, expected.view(-1)), "a view keeps the bytes"


@pytest.mark.parametrize("step", [100, 4001, 9973, 40000])
def test_hints_change_no_numbers(folder, step):
    home = Home(folder, CPU, None)
    home.plenty = 0
    expected = torch.randn(30000, 24)
    whole = home.empty(expected.shape, torch.float32)
    assert whole.nbytes > 20 * WINDOW
    for rows, values in ((whole, expected), (whole[5:, 2:4], expected[5:, 2:4])):
        whole.zero_()
        for a in range(0, rows.shape[0], step):
            rows[a : a + step] = values[a : a + step]
            home.wrote(rows, a, a + step)
            home.advise(rows, a + step, a + 2 * step)
        assert torch.equal(rows, values)


def test_where_memory_is_plenty_the_system_writes_when_it_likes(files):
    rows, asked = files.empty((5000, 3), torch.float64), []
    with mock.patch.object(module, "_sync", lambda mapping, *span: asked.append(span)):
        for files.plenty in (rows.nbytes - 1, rows.nbytes):
            for a in range(0, 5000, 1000):
                files.wrote(rows, a, a + 1000)
            counts, asked = len(asked), []
            assert (counts > 0) == (files.plenty < rows.nbytes)
    assert 2**26 < module.memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_hints_of_no_rows(folder, shape):
    home = Home(folder, CPU, None)
    rows = home.empty(shape, torch.float32)
    home.wrote(rows, 0, shape[0])
    home.advise(rows, 0, shape[0])
    assert home.held == home.peak == 0


def test_what_was_written_is_dropped(files):
    chunk = 64 * 1024 // 4
    rows = files.empty((32 * chunk,), torch.float32)
    for a in range(0, rows.numel(), chunk):
        rows[a : a + chunk] = a
        files.wrote(rows, a, a + chunk)
        # Two chunks that are being written, and no more than the system maps around a page.
        assert resident(rows) <= 4 * 64 * 1024
    assert torch.equal(rows, (torch.arange(rows.numel()) // chunk * chunk).float())


def test_rows_are_written_from_the_start_of_the_first_to_the_end_of_the_last(files):
    rows = files.empty((1000, 3), torch.float64)
    asked = []
    with mock.patch.object(module, "_sync", lambda mapping, *span: asked.append(span)):
        for a, b in ((0, 1), (1, 200), (200, 600), (600, 1000)):
            files.wrote(rows, a, b)
    page = mmap.PAGESIZE
    assert [span for *span, how in asked if how == 2] == [[0, page], [page, 3 * page], [3 * page, 5 * page]]
    assert [span for *span, how in asked if how != 2] == [[0, page]], "two calls ago"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSYS])
def test_pages_that_the_disk_does_not_take(files, code):
    rows = files.empty((4096,), torch.float32)
    lost = pytest.raises(OSError, match=r"not written to the disk: .*Give a folder")
    with (
        mock.patch.object(module, "_LIBC", mock.Mock(sync_file_range=lambda *args: -1)),
        mock.patch.object(module.ctypes, "get_errno", lambda: code),
        lost if code == errno.EIO else nullcontext(),
    ):
        files.wrote(rows, 0, 4096)


def test_bytes_are_counted(folder):
    home = Home(folder, CPU, 1000)
    assert (home.held, home.peak) == (0, 0)
    a = home.empty((10, 5), torch.float64)
    b = home.empty((3,), torch.int8)
    assert (home.held, home.peak) == (403, 403)
    row = a[3]
    del a
    assert home.held == 403, "a view lives"
    del row
    assert (home.held, home.peak) == (3, 403)
    c = home.empty((997,), torch.bool)
    assert (home.held, home.peak) == (1000, 1000)
    with pytest.raises(
        OSError, match=r"Rows need 1 bytes more .* 1,000 bytes of rows are held, but the limit is 1,000"
    ):
        home.empty((1,), torch.bool)
    assert (home.held, home.peak) == (1000, 1000)
    del b, c
    home.empty((1000,), torch.bool)
    assert (home.held, home.peak) == (0, 1000)


def test_dead_memory_is_used_again():
    home = Home(None, CPU, None)
    a, b, c = (home.empty((100, k), torch.float32) for k in (1, 1, 2))
    place, other = a.data_ptr(), c.data_ptr()
    del a
    assert home.empty((400,), torch.int8).data_ptr() == place, "of the same size, whatever shape"
    alive = home.empty((200, 2), torch.int8)
    assert alive.data_ptr() == place != b.data_ptr()
    assert home.empty((100,), torch.float32).data_ptr() not in (place, b.data_ptr()), "not while a tensor lives there"
    del c
    assert home.empty((50, 4), torch.float32).data_ptr() == other


def test_threads_get_memory_of_their_own(monkeypatch):
    home, found, choose = Home(None, CPU, None), [], Home._memory
    rows = [home.empty((1000,), torch.float32) for _ in range(4)]
    del rows  # whose memory is used again

    def slowly(self, needed):
        memory = choose(self, needed)
        time.sleep(0.05)
        return memory

    monkeypatch.setattr(Home, "_memory", slowly)
    threads = [threading.Thread(target=lambda: found.append(home.empty((1000,), torch.float32))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({rows.data_ptr() for rows in found}) == 4


def test_no_more_is_kept_than_was_in_use():
    home = Home(None, CPU, None)
    for size in (1000, 300, 2000, 10, 500):
        rows = [home.empty((size,), torch.int8) for _ in range(3)]
        rows.clear()
        assert sum(map(len, home._kept.values())) <= home.peak
    assert home.peak == 6000
    assert home.empty((6000,), torch.int8).numel() == 6000 == home.peak
    assert list(map(len, home._kept.values())) == [6000]


def test_files_are_allocated_and_have_no_name(files, tmp_path):
    rows = files.empty((1 << 20,), torch.int8)
    status = os.fstat(mapping_of(files, rows).descriptor)
    assert status.st_size == 1 << 20 <= status.st_blocks * 512, "a sparse file on a full disk would be a signal"
    assert status.st_nlink == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("unnamed", [True, False])
def test_nothing_grows(folder, tmp_path, unnamed):
    """Files are unlinked at once where the file system has none without a name."""
    works = unnamed and module.tempfile._O_TMPFILE_WORKS
    home = Home(folder, CPU, None)
    home.plenty = 0

    def counts():
        gc.collect()
        ours = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        return len(os.listdir("/proc/self/fd")), len(ours), len(list(tmp_path.iterdir()))

    before = counts()
    with mock.patch.object(module.tempfile, "_O_TMPFILE_WORKS", works):
        for k in range(200):
            a, b = home.empty((100 + k, 8), torch.float32), home.empty((4096,), torch.float32)
            home.wrote(b, 0, 4096)
            if k == 100 and folder:
                assert counts()[1:] == (2, 0)
            del a, b
    assert counts() == before and before[1:] == (0, 0)
    assert len(home._kept) <= 2


def test_killed_processes_leave_nothing(tmp_path):
    code = """
        import os, signal, sys, torch
        from pyg_sar.offload.home import Home
        rows = Home(sys.argv[1], torch.device("cpu"), None).empty((1 << 20,), torch.float32).fill_(1)
        print(rows.sum().item(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (-9, "1048576.0\n")
    assert not list(tmp_path.iterdir())


def test_limits_of_data_count_memory_alone(tmp_path):
    code = """
        import re, resource, sys, torch
        from pathlib import Path
        from pyg_sar.offload.home import Home
        now = int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (now + (32 << 20),) * 2)
        rows = Home(sys.argv[1], torch.device("cpu"), None).empty((64 << 20,), torch.int8)
        print(rows.fill_(1).view(torch.int64).eq(0x0101010101010101).all().item())
        Home(None, torch.device("cpu"), None).empty((64 << 20,), torch.int8)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
    message = "Rows need 67,108,864 bytes more in memory, where 0 bytes of rows are held, but the system says: "
    assert message in done.stderr and "Give a folder for homes." in done.stderr


def test_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"'.*/gone' says: No such file or directory\. Make this folder"):
        Home(str(tmp_path / "gone"), CPU, None)
    with pytest.raises(NotADirectoryError, match=r"'.*/file' says: Not a directory"):
        Home(str(tmp_path / "file"), CPU, None)
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(module.tempfile, "TemporaryFile", side_effect=refused),
        pytest.raises(PermissionError, match=r"says: Permission denied\. Make this folder writable"),
    ):
        Home(str(tmp_path), CPU, None)


def test_disk_that_is_too_small(files):
    with pytest.raises(OSError, match=r"Rows need 1,152,921,504,606,846,976 bytes more .* bytes are free") as error:
        files.empty((1 << 60,), torch.int8)
    assert error.value.errno == errno.ENOSPC
    assert (files.held, files.peak) == (0, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_that_fills_up(files, tmp_path, code):
    kept = files.empty((1000,), torch.int8)
    before = os.listdir("/proc/self/fd")

    def full(descriptor, start, length):
        os.ftruncate(descriptor, length)
        raise OSError(code, os.strerror(code))

    says = (
        rf"Rows need 5,000 bytes more in '{tmp_path}', where 1,000 .* of [\d,]+ free bytes.*{os.strerror(code)}.*Free"
    )
    with mock.patch.object(os, "posix_fallocate", full), pytest.raises(OSError, match=says) as error:
        files.empty((5000,), torch.int8)
    assert error.value.errno == errno.ENOSPC
    assert os.listdir("/proc/self/fd") == before and not list(tmp_path.iterdir())
    assert files.held == files.peak == kept.nbytes


def test_files_that_are_kept_take_few_descriptors(files, monkeypatch):
    """As one for each chunk is; and what is said where there are too many."""
    before = len(os.listdir("/proc/self/fd"))
    kept = [files.keep([torch.ones(9)]) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 20 and kept[0][0].eq(1).all()

    def fail(*args):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(
        OSError, match=r"Too many open files. Allow more \('ulimit -n'\), or take fewer chunks"
    ) as error:
        files.empty((3,), torch.float32)
    assert error.value.errno == errno.EMFILE


def test_memory_for_a_gpu_is_pinned_and_given_back(tmp_path):
    pinned = {}
    cudart = mock.Mock(cudaHostUnregister=lambda address: pinned.pop(address))
    cudart.cudaHostRegister = lambda address, length, flags: pinned.update({address: length})
    given = {"cudart": lambda: cudart, "check_error": lambda code: None, "device": nullcontext}
    given["synchronize"] = mock.Mock()
    with mock.patch.multiple(torch.cuda, **given):
        home = Home(None, torch.device("cuda"), None)
        rows = home.empty((100,), torch.float32)
        assert pinned == {rows.data_ptr(): 400}
        Home(str(tmp_path), torch.device("cuda"), None).empty((100,), torch.float32)
        Home(None, CPU, None).empty((100,), torch.float32)
        del home
        gc.collect()
        assert len(pinned) == 1, "a tensor lives"
        assert not given["synchronize"].called
        del rows
        assert not pinned and given["synchronize"].called, "the device is done with it"


def test_pinned_memory_of_two_sizes_is_kept():
    """In turn they take more than is in use at one time: to pin it takes longer than to use it."""
    pinned = []
    cudart = mock.Mock(cudaHostRegister=lambda address, length, flags: pinned.append(length))
    given = {"cudart": lambda: cudart, "check_error": lambda code: None, "device": nullcontext}
    given["synchronize"] = mock.Mock()
    with mock.patch.multiple(torch.cuda, **given):
        home = Home(None, torch.device("cuda"), None)
        for size in (1000, 400, 1000, 400):
            home.empty((size,), torch.int8)
        assert pinned == [1000, 400]
        assert given["synchronize"].call_count == 2, "the device may still read what died"
        home.empty((200,), torch.int8)
        assert len(home._kept) == 2, "but no more than half as much again"
        home = Home(None, torch.device("cuda"), 1000)
        for size in (1000, 400):
            home.empty((size,), torch.int8)
        assert sum(map(len, home._kept.values())) <= 1000, "nor than the limit"
        rows, other = home.empty((10, 10), torch.float32), torch.empty(10, 10)
        assert home.seen(rows.t()) is home.seen(rows[:, 1:]) is home.seen(other) is None
        del home, rows
        gc.collect()


@pytest.mark.gpu
def test_pinned():
    home = Home(None, torch.device("cuda"), None)
    rows = home.empty((1000, 100), torch.float32).normal_()
    assert rows.is_pinned()
    assert torch.equal(rows.to("cuda", non_blocking=True).cpu(), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_sees_pinned_memory(dtype):
    home = Home(None, torch.device("cuda"), None)
    rows = home.empty((1000, 100), dtype).normal_()
    there, index = home.seen(rows), torch.arange(0, 1000, 3, device="cuda")
    assert there.device.type == "cuda" and torch.equal(there[index].cpu(), rows[index.cpu()])
    expected = rows.clone().index_fill_(0, index.cpu(), 9)
    there.index_copy_(0, index, torch.full((len(index), 100), 9, dtype=dtype, device="cuda"))
    torch.cuda.synchronize()
    assert torch.equal(rows, expected), "it is the same memory"
    del rows
    assert home.held == there.nbytes, "what the device sees lives"
    assert home.seen(torch.ones(3, 2)) is home.seen(home.empty((0, 3), dtype)) is None


def test_a_device_sees_no_other_memory(folder):
    home = Home(folder, CPU, None)
    assert home.seen(home.empty((3, 2), torch.float32)) is None


def test_kept_tensors(folder):
    """In one file, what occurs twice once; in memory, and what is no tensor, as they are."""
    home = Home(folder, CPU, None)
    given = [torch.arange(5), None, slice(3), torch.rand(3, 4).double(), torch.arange(7).int(), torch.empty(0)]
    kept = home.keep([*given, given[0]])
    assert [type(k) for k in kept] == [type(g) for g in [*given, given[0]]]
    for k, g in zip(kept, given, strict=False):
        assert torch.equal(k, g) if isinstance(g, torch.Tensor) else k is g
    if folder is None:
        assert all(k is g for k, g in zip(kept, given, strict=False)) and home.held == 0
    else:
        assert len({k.untyped_storage().data_ptr() for k in kept if isinstance(k, torch.Tensor)}) == 1
        assert kept[6] is kept[0] and home.held == 64 + 128 + 64
    del kept, k
    assert home.held == 0
