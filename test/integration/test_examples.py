"""The examples, as their docstrings tell to run them, on small generated graphs."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import graphs

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, workers: int = 0) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", workers] if workers else []
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths}
    words = [sys.executable, *map(str, [*launch, *command])]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(name: str) -> list[str]:
    """Return the commands of an example's docstring."""
    told = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text())) or ""
    lines = re.sub(r"\\\n *", "", told).splitlines()
    return [line.strip() for line in lines if re.match(" +(python|pyg-sar) ", line)]


# What stands for the data set of the docstring: a file of a heterogeneous graph, or a generated one
HETERO = ("ogbn_mag_rgcn", "hetero_dblp")
OF_PYG = [f.stem for f in sorted((ROOT / "examples").glob("*.py")) if "# -" in f.read_text()]


@pytest.mark.grid
@pytest.mark.parametrize("name", OF_PYG)
def test_as_its_docstring_tells(tmp_path, name):
    hetero = graphs.dblp()[0]
    for store in hetero.node_stores:
        store.x = store.x.float()
    torch.save(hetero, tmp_path / "dblp.pt")
    graph = str(tmp_path / "dblp.pt") if name in HETERO else "Community/300/4000"
    for command in commands(name):
        words = shlex.split(command.replace("parts/", f"{tmp_path}/"))
        if "partition" in words or "examples/split_links.py" in words:
            parts, words[2] = words[-1], words[2] if words[2].endswith("links.pt") else graph
        if words[0] == "pyg-sar":
            words = ["-m", "pyg_sar", *words[1:]]
        elif "torch.distributed.run" in words:
            words[words.index("--nproc-per-node") + 1] = re.search(r"-parts (\d+)", " ".join(commands(name)))[1]
            target = ["--target", "author"] if name in HETERO else []
            words = [*words[1:], "--dataset", parts, "--epochs", "2", "--log-dir", tmp_path / "log", *target]
        else:
            words = words[1:]
        told = run(*words)
    assert re.search(r"Epoch: 002, Loss: \d|Accuracy: 0", told), told
    assert len(list((tmp_path / "log").glob("rank-*/events*"))) > 1


@pytest.mark.grid
def test_inference_after_sampling(tmp_path):
    script, parts, weights = "examples/inference_after_sampling.py", tmp_path / "parts", tmp_path / "weights"
    run("-m", "pyg_sar", "partition", "Community/300/4000", "--num-parts", 2, "--out", parts)
    told = run(script, "--train", "Community/300/4000", "--weights", weights, "--epochs", 2)
    assert "epoch   2  loss" in told
    told = run(script, "--dataset", parts, "--weights", weights, workers=2)
    assert re.search(r"test accuracy [01]\.\d", told), told


@pytest.mark.grid
def test_memory_falls(tmp_path):
    out = tmp_path / "memory.png"
    told = run("examples/memory_falls.py", "--dataset", "Community/2000/20000", "--workers", 1, 2, "--out", out)
    sizes = [float(size) for size in re.findall(r"workers, gat: (\S+) MiB", told)]
    assert out.stat().st_size > 0 and sizes[1] < 0.8 * sizes[0], told


@pytest.mark.grid
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["examples/train.py", "PARTS"], "sage: test accuracy"),
        (["examples/physics_gat.py", "--dataset", "PARTS"], "Loss"),
    ],
)
def test_multi_node(tmp_path, words, says):
    run("-m", "pyg_sar", "partition", "Community/300/4000", "--num-parts", 2, "--out", tmp_path / "parts")
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
           "NODES": "2", "PORT": str(29517 + len(words))}  # fmt: skip
    words = [tmp_path / "parts" if word == "PARTS" else word for word in words]
    command = ["bash", ROOT / "examples/multi_node.sh", *words, "--epochs", "1", "--hidden", "8"]
    nodes = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE,
                              text=True) for _ in range(2)]  # fmt: skip
    told = "".join(node.communicate(timeout=200)[0] for node in nodes)
    assert not any(node.returncode for node in nodes) and says in told, told


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
    assert "rgcn: test accuracy" in told and "layer 1, case 2" in told


@pytest.mark.grid
@pytest.mark.parametrize(
    ("workers", "chunks", "model"), [(2, 1, "gcn2"), (2, 4, "gcn"), (4, 4, "sage"), (2, 3, "resgcn")]
)
def test_deep_gcn(tmp_path, workers, chunks, model):
    run("-m", "pyg_sar", "partition", "Community/300/2000", "--num-parts", workers // 2, "--out", tmp_path / "parts")
    small = ["--model", model, "--layers", 4, "--hidden", 8, "--epochs", 2, "--chunks", chunks]
    told = run("examples/deep_gcn.py", tmp_path / "parts", *small, workers=workers)
    assert "Epoch: 002, Loss" in told and ("Stale: 0.0000" in told) == (chunks == 1)


@pytest.mark.grid
def test_deep_gcn_goes_on(tmp_path):
    """With the same losses; stages are cut by what was measured, so that they may differ between runs."""
    run("-m", "pyg_sar", "partition", "Community/300/2000", "--num-parts", 1, "--out", tmp_path / "parts")
    small = ["examples/deep_gcn.py", tmp_path / "parts", "--layers", 4, "--hidden", 8, "--chunks", 3]
    whole = run(*small, "--epochs", 4, "--balance", workers=2)
    run(*small, "--epochs", 2, "--checkpoint", tmp_path / "saves", workers=2)
    rest = run(*small, "--epochs", 4, "--checkpoint", tmp_path / "saves", "--resume", workers=2)
    told = [[line.split("Stale")[0] for line in out.splitlines() if line.startswith("Epoch")] for out in (whole, rest)]
    assert len(told[0]) == 4 and told[0][2:] == told[1]
