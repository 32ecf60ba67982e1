"""The examples, as their docstrings tell to run them, on small generated graphs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, workers: int = 0) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers] if workers else []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    words = [sys.executable, *map(str, [*launch, *command])]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.grid
@pytest.mark.parametrize("model", ["sage", "gat"])
def test_train_and_check(tmp_path, model):
    graph, parts, weights = "Community/300/4000", tmp_path / "parts", tmp_path / "weights.safetensors"
    run("-m", "pyg_sar", "partition", graph, "--num-parts", 2, "--out", parts)
    small = ["--model", model, "--hidden", 8, "--heads", 2, "--epochs", 2, "--save", weights]
    told = run("examples/train.py", parts, *small, workers=2)
    assert f"{model}: test accuracy" in told and "layer 2, case" in told and told.count("peak memory") == 2
    told = run("examples/check.py", parts, graph, "--model", model, "--weights", weights, workers=2)
    assert told.rstrip().endswith("equal")


@pytest.mark.grid
def test_rgcn(tmp_path):
    run("-m", "pyg_sar", "partition", "Relations/300/4000", "--num-parts", 2, "--out", tmp_path / "parts")
    told = run("examples/rgcn.py", tmp_path / "parts", "--epochs", 2, workers=2)
    assert "rgcn: test accuracy" in told and "layer 1, case 1" in told


@pytest.mark.grid
@pytest.mark.parametrize(
    ("workers", "chunks", "model"), [(2, 1, "gcn2"), (2, 4, "gcn"), (4, 4, "sage"), (2, 3, "resgcn")]
)
def test_deep_gcn(tmp_path, workers, chunks, model):
    run("-m", "pyg_sar", "partition", "Community/300/2000", "--num-parts", workers // 2, "--out", tmp_path / "parts")
    small = ["--model", model, "--layers", 4, "--hidden", 8, "--epochs", 2, "--chunks", chunks]
    told = run("examples/deep_gcn.py", tmp_path / "parts", *small, workers=workers)
    assert "epoch   2  loss" in told and ("stale edges 0.0%" in told) == (chunks == 1)


@pytest.mark.grid
def test_deep_gcn_goes_on(tmp_path):
    """With the same losses; stages are cut by what was measured, so that they may differ between runs."""
    run("-m", "pyg_sar", "partition", "Community/300/2000", "--num-parts", 1, "--out", tmp_path / "parts")
    small = ["examples/deep_gcn.py", tmp_path / "parts", "--layers", 4, "--hidden", 8, "--chunks", 3]
    whole = run(*small, "--epochs", 4, "--balance", workers=2)
    run(*small, "--epochs", 2, "--checkpoint", tmp_path / "saves", workers=2)
    rest = run(*small, "--epochs", 4, "--checkpoint", tmp_path / "saves", "--resume", workers=2)
    told = [[line.split("stale")[0] for line in out.splitlines() if line.startswith("epoch")] for out in (whole, rest)]
    assert len(told[0]) == 4 and told[0][2:] == told[1]
