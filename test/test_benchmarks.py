"""The benchmark of layers on a tiny graph: it validates every implementation before it measures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_layers(tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--nodes", 300, "--edges", 2000, "--repetitions", 1, "--warmups", 0, "--threads", 1, "--out", tmp_path]
    small += ["--cases", "gat-2", "sum-100", "--implementations", "PyG", "gather"]
    command = [sys.executable, "benchmarks/layers.py", *map(str, small)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "layers-cpu.md").read_text()
    assert "| gat-2 | PyG |" in table and "| sum-100 | gather |" in table and "skipped" not in table
    assert (tmp_path / "layers-cpu.png").exists()
