"""How workers begin and end, under `torch.distributed.run` and alone."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import pyg_sar
from pyg_sar.distributed import process_group as module
from pyg_sar.watch import current

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import pyg_sar

with pyg_sar.process_group(timeout=60) as rank:
    assert dist.get_world_size() == 2
    total = pyg_sar.all_reduce(torch.tensor(rank + 1))
    if sys.argv[1] == "raise" and rank == 1:
        raise ValueError("boom on purpose")
    totals = [total.item(), pyg_sar.all_reduce(total).item()]
    assert totals == [3, 6]
    if rank == 0:
        print("totals", totals)
assert not dist.is_initialized()
"""


def launch(tmp_path, what, text=SCRIPT, workers=2):
    script = tmp_path / "script.py"
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    path = os.pathsep.join([str(Path(pyg_sar.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([*torchrun, str(script), what], env=env, capture_output=True, text=True, timeout=120)


def test_ends_well_under_torchrun(tmp_path):
    done = launch(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "totals [3, 6]\n"


def test_exception_on_one_worker_ends_all_and_is_shown(tmp_path):
    start = time.monotonic()
    done = launch(tmp_path, "raise")
    assert time.monotonic() - start < 55  # nobody waited for the timeout
    assert done.returncode != 0
    assert "ValueError: boom on purpose" in done.stderr
    assert "Traceback" in done.stderr
    assert done.stdout == ""


@pytest.mark.grid
def test_one_worker_under_torchrun(tmp_path):
    text = "import pyg_sar\nwith pyg_sar.process_group() as rank:\n    print('rank', rank)\n"
    done = launch(tmp_path, "", text, workers=1)
    assert done.returncode == 0 and done.stdout == "rank 0\n", done.stderr


def test_without_torchrun_it_is_a_group_of_one():
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    with mock.patch.dict(os.environ, environment, clear=True), pyg_sar.process_group() as rank:
        assert rank == 0
        assert not dist.is_initialized()


def member(rank, store, ends, pipe):
    """Rank 0 ends its block in some way, rank 1 after half a second.

    Reports the error that left the block, when the block ended and was left, and whether there still is a group.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    error, ended = "", 0.0
    file = dist.FileStore(store, 2)
    try:
        with mock.patch.object(module, "rendezvous", lambda _: (file, rank, 2)), pyg_sar.process_group("gloo", 20):
            ready = dist.FileStore(f"{store}-ready", 2)
            if rank == 1:
                ready.set("connected", "yes")
                time.sleep(0.5)
            else:  # or it would be gone before the other has joined
                ready.wait(["connected"])
            ended = time.monotonic()
            if rank == 0:
                ENDS[ends]()
    except BaseException as e:
        error = type(e).__name__
    pipe.send((error, ended, time.monotonic(), dist.is_initialized()))


def boom():
    raise ValueError("boom")


ENDS = {"return": int, "exit 0": lambda: sys.exit(0), "exit": sys.exit, "raise": boom, "exit 3": lambda: sys.exit(3)}


def run_two(tmp_path, ends):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch_geometric.nn"])  # the pool has the same server
    pipes = [context.Pipe() for _ in range(2)]
    workers = [
        context.Process(target=member, args=(rank, str(tmp_path / "store"), ends, pipes[rank][1])) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    reports = [pipe[0].recv() if pipe[0].poll(60) else None for pipe in pipes]
    for worker in workers:
        worker.join(10)
        worker.kill()
    return reports


@pytest.mark.parametrize("ends", ["return", "exit 0", "exit"])
def test_waits_for_the_others_before_it_leaves(tmp_path, ends):
    (error, _, left, group), (other, ended, _, other_group) = run_two(tmp_path, ends)
    assert (error, other) == ("" if ends == "return" else "SystemExit", "")
    assert left >= ended
    assert not group and not other_group


@pytest.mark.parametrize("ends", ["raise", "exit 3"])
def test_leaves_at_once_after_an_error(tmp_path, ends):
    (error, _, left, group), (other, ended, _, _) = run_two(tmp_path, ends)
    assert error == ("ValueError" if ends == "raise" else "SystemExit")
    assert left < ended
    assert group  # no barrier, no farewell
    assert other == "LostWorkers"


INIT = """
import sys
import torch
import torch.distributed as dist
import pyg_sar

rank = pyg_sar.init(timeout=60)
assert (dist.get_world_size(), dist.get_rank()) == (2, rank)
total = pyg_sar.all_reduce(torch.tensor(rank + 1))
if sys.argv[1] == "raise" and rank == 1:
    raise ValueError("boom on purpose")
totals = [total.item(), pyg_sar.all_reduce(total).item()]
if rank == 0:
    print("totals", totals)
"""


@pytest.mark.grid
def test_init_leaves_in_order_at_the_end(tmp_path):
    done = launch(tmp_path, "well", INIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "totals [3, 6]\n"


@pytest.mark.grid
def test_init_leaves_at_once_after_an_exception(tmp_path):
    done = launch(tmp_path, "raise", INIT)
    assert done.returncode != 0
    assert "ValueError: boom on purpose" in done.stderr
    assert "Timed out" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("status", [None, 0, 3, "a message", ValueError()])
def test_whether_init_waits_at_the_end(monkeypatch, status):
    ends, left = [], []
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(module.atexit, "register", ends.append)
    monkeypatch.setattr(module, "leave", lambda *_: left.append(True))
    module.leave_at_exit(300.0, None, ExitStack())
    if isinstance(status, ValueError):  # as the interpreter does with what nobody caught
        monkeypatch.setattr(sys, "last_value", status, raising=False)
    else:
        with pytest.raises(SystemExit):
            sys.exit(status)
    ends[0]()
    assert bool(left) == (status in (None, 0))


def test_the_line_of_an_error_that_ended_the_script(monkeypatch):
    """It is in the trace, which leaving a context with the error must not take away."""
    ends, told = [], []
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(module.atexit, "register", ends.append)
    monkeypatch.setattr(module, "tell", told.append)
    looking = ExitStack()
    looking.enter_context(watching())
    module.leave_at_exit(300.0, None, looking)
    try:
        raise ValueError("boom")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    ends[0]()
    assert told[0].__traceback__ is not None


@contextmanager
def watching():
    yield


FAILS = """
import pyg_sar
from pyg_sar.distributed import process_group as module


def fail(*_):
    raise RuntimeError("this worker has finished, but the others are gone")


module.join, module.leave = lambda *_: True, fail
module.dist.get_rank = lambda: 0
pyg_sar.init()
print("looks", module.notices.LOOKS)
"""


@pytest.mark.parametrize("asked", [pytest.param("0", marks=pytest.mark.grid), "1", "yes"])
def test_a_worker_that_cannot_leave_fails(asked):
    """Which Python would print, and end as if all were well; and whether it looks for mistakes."""
    path = os.pathsep.join([str(Path(pyg_sar.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "PYG_SAR_DEBUG": asked}
    done = subprocess.run([sys.executable, "-c", FAILS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the others are gone" in done.stderr
    assert done.stdout == f"looks {int(asked == '1')}\n"
    assert ("Expected PYG_SAR_DEBUG to be 0 or 1 (got 'yes'" in done.stderr) == (asked == "yes")


def test_who_is_in_a_group_already_does_not_join(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 4)
    with pyg_sar.process_group() as rank:
        assert (pyg_sar.init(), rank) == (3, 3)
    monkeypatch.undo()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert pyg_sar.init() == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="__main__"):
        pyg_sar.init()


def watched_within(group):
    """Who watches before, within, within a block in it, after that block, and after all."""
    found = [current()]
    with pyg_sar.process_group():
        found.append(current())
        with pyg_sar.process_group():
            found.append(current())
        found.append(current())
    return [watch is found[1] for watch in (*found, current())]


def test_a_group_of_ones_own_is_watched(pool):
    assert pool.run(2, watched_within) == [[False, True, True, True, False]] * 2


@pytest.mark.parametrize(("there", "devices", "backend"), [
    (True, 2, "cpu:gloo,cuda:nccl"), (True, 1, "gloo"), (False, 2, "gloo"),
])  # fmt: skip
def test_usual_backend(monkeypatch, there, devices, backend):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: there)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    assert module.usual_backend() == backend


def test_init_without_torchrun_is_a_group_of_one():
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    with mock.patch.dict(os.environ, environment, clear=True):
        assert pyg_sar.init() == 0
    assert not dist.is_initialized()


def meeting(store, rank, size, found, timeout=10.0):
    try:
        found[rank] = module.meet(store, rank, size, timeout)
    except RuntimeError as error:
        found[rank] = str(error)


def test_attempts_do_not_meet_each_other(tmp_path):
    """A store that is kept, as launchers keep it: every attempt has a name of its own, also after one that only some
    workers reached.
    """
    names = []
    for ranks in ([0, 1, 2], [1], [0, 1, 2], [0, 2], [0, 1, 2]):
        found, whole = {}, len(ranks) == 3
        args = [(dist.FileStore(str(tmp_path / "store"), 3), r, 3, found, 20.0 if whole else 0.2) for r in ranks]
        threads = [threading.Thread(target=meeting, args=a) for a in args]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        if whole:
            assert len(set(found.values())) == 1 and set(found) == {0, 1, 2}
            names.append(found[0])
        else:
            assert "did not come within 0.2 s. Start all of them" in found[ranks[0]]
    assert len(set(names)) == 3


def test_workers_that_were_started_with_another_number(tmp_path):
    found = {}
    args = [(dist.FileStore(str(tmp_path / "store"), 3), r, size, found) for r, size in ((0, 3), (1, 2))]
    threads = [threading.Thread(target=meeting, args=a) for a in args]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "started as one of 3, rank 1 as one of 2. Start all workers" in found[0]
    assert "started as one of 2, rank 0 as one of 3. Start all workers" in found[1]


ALONE = """
import os, sys, time
import torch
import pyg_sar

with pyg_sar.process_group(timeout=2) as rank:
    pyg_sar.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(5)
        print("saved")
"""


@pytest.mark.grid
def test_work_alone_after_the_last_step(tmp_path):
    """For longer than the timeout."""
    done = launch(tmp_path, "", ALONE)
    assert done.returncode == 0 and done.stdout == "saved\n", done.stderr


ORPHAN = """
import os, sys, time
import pyg_sar

with pyg_sar.process_group(timeout=60) as rank:
    open(os.path.join(sys.argv[1], f"pid-{rank}"), "w").write(str(os.getpid()))
    time.sleep(60)
"""


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_workers_end_with_their_launcher(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ORPHAN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(pyg_sar.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    launcher = subprocess.Popen([*torchrun, str(script), str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    files, deadline = [tmp_path / f"pid-{rank}" for rank in range(2)], time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    launcher.kill()
    launcher.wait()
    while any(Path(f"/proc/{pid}/stat").exists() and running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}/stat").exists() and running(pid) for pid in pids)


def running(pid):
    """Whether a process is more than an entry that nobody has read yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
