"""Simulated hosts: training across them is exact, a failure ends them all, and nothing of them stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GRAPH = "Community/300/4000"


def start(*args):
    """Start ``benchmarks/hosts.py`` with two hosts."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "benchmarks/hosts.py", "--hosts", "2", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def made(process):
    """Return the namespaces of a process."""
    return list(Path("/run/netns").glob(f"sar-{process.pid}-*"))


def hosts(*args, status=0):
    """Run ``benchmarks/hosts.py``, which must end with ``status``, and return what it writes."""
    process = start(*args)
    out, err = process.communicate(timeout=120)
    if process.returncode == 77 and status != 77:
        pytest.skip(err.strip())
    assert process.returncode == status, out + err
    assert not made(process)
    return out + err


@pytest.mark.grid
def test_train_and_check(tmp_path):
    """Parts on two hosts, on links with a limit, give what PyG gives in one process."""
    parts, weights = tmp_path / "parts", tmp_path / "weights.safetensors"
    command = [sys.executable, "-m", "pyg_sar", "partition", GRAPH, "--num-parts", "2", "--out", str(parts)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    small = ["--model", "gat", "--hidden", 8, "--heads", 2, "--epochs", 2, "--save", weights]
    told = hosts("--rate", "1gbit", "--", "examples/train.py", parts, *small)
    assert "gat: test accuracy" in told and told.count("peak memory") == 2
    told = hosts("--", "examples/check.py", parts, GRAPH, "--model", "gat", "--weights", weights)
    assert "gat on 2 workers" in told and "\n  equal" in told


SCRIPT = """
import os, time, pyg_sar
with pyg_sar.process_group() as rank:
    pyg_sar.distributed.group.gather_objects(rank)
    print(os.popen("ip -brief address show eth0").read(), flush=True)
    if rank == 1:
        raise SystemExit("host 1 says why")
    time.sleep(600)
"""


@pytest.mark.grid
def test_failure(tmp_path):
    """A worker that ends takes the hosts down that do not notice, and what it said is shown."""
    script, began = tmp_path / "script.py", time.monotonic()
    script.write_text(SCRIPT)
    told = hosts("--", script, status=1)
    assert "Host 1 failed" in told and "host 1 says why" in told
    assert "10.77.0.1/24" in told and "10.77.0.2/24" in told  # each has a network of its own
    assert time.monotonic() - began < 60


@pytest.mark.grid
def test_terminated(tmp_path):
    """Who is told to end leaves nothing behind."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process, found = start("--", script), []
    while process.poll() is None and len(found) < 3:  # two hosts and a switch
        found = made(process)
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)
    if process.returncode == 77:
        pytest.skip(err.strip())
    assert process.returncode == 143 and len(found) == 3 and not made(process)


def test_bad_rate():
    """A mistake is not taken for a machine that permits nothing."""
    assert "illegal value" in hosts("--rate", "fast", "--", "script.py", status=1)


def test_not_permitted(monkeypatch):
    """Without the tools it says what is missing, by the status of a skipped test."""
    monkeypatch.setenv("PATH", "")
    told = hosts("--", "script.py", status=77)
    assert "skipped" in told and ("root" in told or "ip and tc" in told)
