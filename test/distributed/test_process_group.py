"""How workers begin and end, under `torch.distributed.run` and alone."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import pyg_sar
from pyg_sar.distributed import process_group as module

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


def launch(tmp_path, what, text=SCRIPT):
    script = tmp_path / "script.py"
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
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
    init, error, ended = dist.init_process_group, "", 0.0

    def with_file_store(backend, timeout):
        init(backend, timeout=timeout, store=dist.FileStore(store, 2), rank=rank, world_size=2)

    try:
        with mock.patch.object(dist, "init_process_group", with_file_store), pyg_sar.process_group("gloo", 20):
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
    assert other == "RuntimeError"


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


def test_init_leaves_in_order_at_the_end(tmp_path):
    done = launch(tmp_path, "well", INIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "totals [3, 6]\n"


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
    monkeypatch.setattr(module, "leave", lambda: left.append(True))
    module.leave_at_exit()
    if isinstance(status, ValueError):  # as the interpreter does with what nobody caught
        monkeypatch.setattr(sys, "last_value", status, raising=False)
    else:
        with pytest.raises(SystemExit):
            sys.exit(status)
    ends[0]()
    assert bool(left) == (status in (None, 0))


def test_init_without_torchrun_is_a_group_of_one():
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    with mock.patch.dict(os.environ, environment, clear=True):
        assert pyg_sar.init() == 0
    assert not dist.is_initialized()
