"""Scripts in the shape of PyG's full-batch examples, adopted by what README says: the same losses on 1, 2 and 3
workers, and how many of their lines change.

Each file of ``scripts/`` is both: lines behind ``#-`` are the original's, lines that end in ``#+`` took their place.
One more script is README's own.
"""

import math
import re
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import graphs
from support.pool import Pool

import pyg_sar
from pyg_sar.watch.mode import watching

ROOT = Path(__file__).parents[1]
DATASETS = {"autoencoder": "links", "deepgcn": "proteins", "dir_gnn": "wikipedia", "han": "imdb", "hetero_conv": "dblp",
            "hgt": "dblp", "rgcn": "entities"}  # fmt: skip
SAMELOSS = 1e-12


def readme() -> str:
    """Return README's script in the form of the others: a small graph, few epochs, no dropout."""
    block = (ROOT.parent / "README.md").read_text().split("```diff\n")[1].split("```")[0]
    for one, other in (('"parts/cora"', "PARTS"), ("range(200)", "range(4)"), ("print", "log"), ("0.6", "0.0")):
        assert one in block
        block = block.replace(one, other)
    lines = [line.replace("dataset = Planet", "dataset = graphs.citations() or Planet") for line in block.splitlines()]
    return "\n".join(f"#- {x[1:]}" if x[:1] == "-" else f"{x[1:]}  #+" if x[:1] == "+" else x[1:] for x in lines)


SCRIPTS = {"readme": readme(), **{f.stem: f.read_text() for f in sorted(ROOT.glob("scripts/*.py"))}}


def original(script: str) -> str:
    lines = [line for line in script.splitlines() if not line.endswith("#+")]
    return "\n".join(line.removeprefix("#- ") for line in lines)


def changed(script: str) -> int:
    """Return how many lines are new; those that only went are fewer."""
    lines = script.splitlines()
    return max(sum(line.endswith("#+") for line in lines), sum(line.startswith("#-") for line in lines))


def run(text: str, name: str, parts: str = "") -> list[tuple[float, ...]]:
    """Run a script in double precision and return what it logs."""
    return execute(text, name, parts)["logged"]


def execute(text: str, name: str, parts: str) -> dict[str, Any]:
    """Run a script in double precision and return its names."""
    logged: list[tuple[float, ...]] = []
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        values = {"__name__": name, "graphs": graphs, "PARTS": parts, "log": lambda *row: logged.append(row)}
        exec(compile(text, name, "exec"), values)
    finally:
        torch.set_default_dtype(torch.float32)
    return values | {"logged": logged}


def run_adapted(group: Any, folder: str) -> list[list[tuple[float, ...]]]:
    """Run all adapted scripts, one after the other; their workers are those of the default group."""
    assert dist.get_world_size(group) == dist.get_world_size()
    found = []
    for name, script in SCRIPTS.items():
        dist.barrier()  # as between jobs
        with watching():  # as after `init()` in a process of its own
            found.append(run(script, name, f"{folder}/{name}"))
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, ...]]]:
    return {name: run(original(script), name) for name, script in SCRIPTS.items()}


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.grid) for n in (1, 3))])
def test_same_losses(workers: int, expected: dict[str, list[tuple[float, ...]]], tmp_path: Path) -> None:
    for name in SCRIPTS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of ids has tests of its own
            dataset = getattr(graphs, DATASETS.get(name, "citations"))()
            pyg_sar.partition(dataset, workers, tmp_path / name)
    pool = Pool(workers)
    try:
        results = pool.run(workers, run_adapted, str(tmp_path), timeout=240)
    finally:
        pool.close()
    for found in results:
        for name, rows in zip(SCRIPTS, found, strict=True):
            assert len(rows) == len(expected[name]) > 2
            for row, known in zip(rows, expected[name], strict=True):
                assert row == pytest.approx(known, rel=SAMELOSS, abs=SAMELOSS), (name, workers)
                assert all(map(math.isfinite, row))


# Theirs reads data that are not its arguments, or pairs that were made of them before; README has no function.
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in ("agnn", "autoencoder", "infomax", "readme")])
def test_check_passes(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyg_sar.partition(getattr(graphs, DATASETS.get(name, "citations"))(), 1, tmp_path / "parts")
    values = execute(SCRIPTS[name], name, str(tmp_path / "parts"))
    source = re.search(r"^def train\(.*?\n(?=\w|@)", SCRIPTS[name], re.M | re.S)[0]  # type: ignore[index]

    def step(model: torch.nn.Module, data: Any) -> float:
        own = values | {"model": model, "data": data, "dataset": data}  # of each worker
        exec(source, own)
        return own["train"]()

    pyg_sar.check(step, values["data"], values["model"])


def test_lines_that_change() -> None:
    counts = {name: changed(script) for name, script in SCRIPTS.items()}
    assert statistics.median(counts.values()) <= 10, counts
    assert max(counts.values()) <= 12, counts
