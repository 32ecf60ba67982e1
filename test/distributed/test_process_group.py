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
    print("total", total.item(), pyg_sar.all_reduce(total).item())
assert not dist.is_initialized()
"""


def launch(tmp_path, what):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(pyg_sar.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*torchrun, str(script), what], env=env, capture_output=True, text=True, timeout=120)


def test_ends_well_under_torchrun(tmp_path):
    done = launch(tmp_path, "well")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n").count("total 3 6") == 2


def test_exception_on_one_worker_ends_all_and_is_shown(tmp_path):
    start = time.monotonic()
    done = launch(tmp_path, "raise")
    assert time.monotonic() - start < 55  # nobody waited for the timeout
    assert done.returncode != 0
    assert "ValueError: boom on purpose" in done.stderr
    assert "Traceback" in done.stderr
    assert "total" not in done.stdout


def test_without_torchrun_it_is_a_group_of_one():
    environment = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    with mock.patch.dict(os.environ, environment, clear=True), pyg_sar.process_group() as rank:
        assert rank == 0
        assert not dist.is_initialized()


def member(rank, store, ends, pipe):
    """A worker whose block ends in some way; reports how the exit from the block went."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    init = dist.init_process_group

    def with_file_store(backend, timeout):
        init(backend, timeout=timeout, store=dist.FileStore(store, 2), rank=rank, world_size=2)

    try:
        with mock.patch.object(dist, "init_process_group", with_file_store), pyg_sar.process_group("gloo", 20) as me:
            assert me == rank
            if rank == 1:
                time.sleep(0.5)  # the other one is at the end of its block by then
                pyg_sar.all_reduce(pyg_sar.nn.SAGEConv(1, 1).lin_l.weight) if ends == "raise" else None
            end = {"return": lambda: None, "exit 0": sys.exit, "exit None": lambda: sys.exit(None)}
            if ends == "raise" and rank == 0:
                raise ValueError("boom")
            if ends == "exit 3" and rank == 0:
                sys.exit(3)
            end.get(ends, lambda: None)() if rank == 0 else None
    except BaseException as error:
        pipe.send((type(error).__name__, str(error), dist.is_initialized()))
    else:
        pipe.send(("", "", dist.is_initialized()))


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


@pytest.mark.parametrize("ends", ["return", "exit 0", "exit None"])
def test_waits_for_the_others_before_it_leaves(tmp_path, ends):
    """Rank 0 ends first; had it left, the barrier of rank 1 would fail."""
    first, second = run_two(tmp_path, ends)
    assert first[0] == ("SystemExit" if ends.startswith("exit") else "")
    assert second == ("", "", False)
    assert not first[2]


@pytest.mark.parametrize(("ends", "error"), [("raise", "ValueError"), ("exit 3", "SystemExit")])
def test_leaves_at_once_after_an_error(tmp_path, ends, error):
    first, second = run_two(tmp_path, ends)
    assert first[0] == error
    assert first[2]  # no barrier, no farewell
    assert second[0] == "RuntimeError"
