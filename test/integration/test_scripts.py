"""Scripts in the shape of PyG's, adopted by what README says: the same losses on 1, 2 and 3 workers as in one process,
and how many of their lines change.

Files of ``scripts/`` and ``examples/`` are both: lines behind ``# -`` are the original's, lines that end in ``# +``
took their place. One more script is README's own. Small graphs stand for the data sets that they load, and they run in
double precision and without dropout.
"""

import math
import re
import statistics
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_geometric.datasets
import torch_geometric.logging
import torch_geometric.nn
import torch_geometric.utils
from support import graphs
from support.cases import some
from support.pool import Pool
from torch import Tensor

import pyg_sar
from pyg_sar.watch.mode import watching

ROOT = Path(__file__).parents[2]
SAMELOSS = 1e-12
OURS = "  # +"


def readme() -> str:
    """Return README's script in the form of the others: few epochs, no dropout."""
    block = (ROOT / "README.md").read_text().split("```diff\n")[1].split("```")[0]
    for one, other in (('"parts/cora"', "PARTS"), ("range(200)", "range(4)"), ("print", "log"), ("0.6", "0.0")):
        assert one in block
        block = block.replace(one, other)
    return "\n".join(f"# - {x[1:]}" if x[:1] == "-" else x[1:] + OURS if x[:1] == "+" else x[1:]
                     for x in block.splitlines())  # fmt: skip


EXAMPLES = {f.stem: f.read_text() for f in sorted((ROOT / "examples").glob("*.py")) if "# -" in f.read_text()}
SCRIPTS = {
    "readme": readme(),
    **{f.stem: f.read_text() for f in sorted((ROOT / "test/scripts").glob("*.py"))},
    **EXAMPLES,
    "any_model GCN2": EXAMPLES["any_model"],
    "any_model GINE": EXAMPLES["any_model"],
}
SCRIPTS["any_model PNA"] = SCRIPTS.pop("any_model")
DATASETS = {
    **{"deepgcn": "proteins", "dir_gnn": "wikipedia", "han": "imdb", "hetero_dblp": "dblp", "hgt": "dblp"},
    **{"autoencoder": "links", "link_prediction": "links", "ogbn_mag_rgcn": "dblp", "rgcn": "entities"},
    **{name: "products" for name in SCRIPTS if name.startswith(("ogbn_pr", "ogbn_pa", "ogbn_a", "correct"))},
}
# Options of examples, beside the folder and the number of epochs
SMALL = {
    **dict.fromkeys(("ogbn_products_sage", "ogbn_papers100m_sage", "correct_and_smooth"), "--hidden 16 --dropout 0"),
    "ogbn_products_gat": "--hidden 4 --heads 2 --dropout 0",
    "ogbn_arxiv_unimp": "--hidden 16 --dropout 0",
    "ogbn_mag_rgcn": "--hidden 8 --dropout 0 --target author",
    "physics_gat": "--dropout 0",
    "hetero_dblp": "--hidden 8",
    **{f"any_model {kind}": f"--model {kind} --hidden 8 --layers 2" for kind in ("PNA", "GCN2", "GINE")},
    "link_prediction": "--hidden 8",
    "infomax": "--hidden 16",
}
# What is drawn at random cannot be the same in one process, and float32 is not in double precision.
INSTEAD = {
    "autoencoder": ('pairs["train_pos"])\n', 'pairs["train_pos"], pairs["test_neg"])\n'),
    "infomax": ("x[torch.randperm(x.size(0), device=x.device)]", "data.shuffled"),
    "ogbn_papers100m_sage": (".float()", ""),
}


def original(script: str) -> str:
    lines = [line for line in script.splitlines() if not line.endswith(OURS)]
    return "\n".join(re.sub("^( *)# - ", r"\1", line) for line in lines)


def changed(script: str) -> int:
    """Return how many lines are new; those that only went are fewer."""
    return max(len(re.findall(pattern, script, re.M)) for pattern in ("  # \\+$", "^ *# - "))


@contextmanager
def small_world(name: str, parts: str, values: dict[str, Any]) -> Iterator[None]:
    """Have a script find small graphs where it looks for large ones, and log to a list."""

    def log(**told: Any) -> None:
        values["logged"].append(tuple(map(float, told.values())))

    def dataset(*args: Any, **kwargs: Any) -> Any:
        return getattr(graphs, DATASETS.get(name, "citations"))()

    def mask(mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return mask & values["data"].hint_mask

    def negatives(*args: Any, **kwargs: Any) -> Tensor:
        return graphs.links()[0].train_neg_edge_label_index

    ogb = ModuleType("ogb.nodeproppred")
    ogb.PygNodePropPredDataset = dataset  # type: ignore[attr-defined]
    sys.modules["ogb.nodeproppred"] = ogb
    argv = [name, "--dataset", parts, "--epochs", "3", *SMALL.get(name, "").split()]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.multiple(torch_geometric.datasets, **dict.fromkeys(
            ("Amazon", "Coauthor", "DBLP", "OGB_MAG", "Planetoid"), dataset)),
        mock.patch.object(torch_geometric.logging, "log", log),
        mock.patch.object(torch_geometric.utils, "negative_sampling", negatives),
        mock.patch.object(torch_geometric.nn.MaskLabel, "ratio_mask", mask),
        mock.patch.object(torch, "load", lambda *args, **kwargs: dataset()[0]),
        mock.patch.multiple(pyg_sar, RunLog=lambda *args: log, negative_sampling=negatives),
    ):  # fmt: skip
        try:
            yield
        finally:
            del sys.modules["ogb.nodeproppred"]


def execute(text: str, name: str, parts: str = "") -> dict[str, Any]:
    """Run a script in double precision and return its names, and what it logs."""
    one, other = INSTEAD.get(name, ("", ""))
    assert one in text
    values: dict[str, Any] = {"__name__": name, "graphs": graphs, "PARTS": parts, "logged": []}
    values["log"] = lambda *row: values["logged"].append(row)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with small_world(name, parts, values):
            exec(compile(text.replace(one, other) if one else text, name, "exec"), values)
    finally:
        torch.set_default_dtype(torch.float32)
    return values


def run_adapted(group: Any, folder: str) -> list[list[tuple[float, ...]]]:
    """Run all adapted scripts, one after the other; their workers are those of the default group."""
    assert dist.get_world_size(group) == dist.get_world_size()
    found = []
    for name, script in SCRIPTS.items():
        dist.barrier()  # as between jobs
        with watching():  # as after `init()` in a process of its own
            found.append(execute(script, name, f"{folder}/{name}")["logged"])
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[float, ...]]]:
    return {name: execute(original(script), name)["logged"] for name, script in SCRIPTS.items()}


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


# Theirs reads data that are not its arguments, or pairs, graphs or masks made of them; README has no function. One of
# three models stands for all.
APART = (
    *("agnn", "autoencoder", "infomax", "link_prediction", "readme", "ogbn_papers100m_sage", "ogbn_products_gat"),
    *("ogbn_arxiv_unimp", "correct_and_smooth", "ogbn_mag_rgcn", "hetero_dblp", "ogbn_products_sage"),
    *("any_model PNA", "any_model GINE"),
)


@pytest.mark.parametrize(("name",), some([name for name in SCRIPTS if name not in APART], every=3))
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
    told = re.findall(r"\((\w+)\.py\) \|.*\| (\d+) \|$", (ROOT / "examples/README.md").read_text(), re.M)
    assert dict(told) == {name.split()[0]: str(counts[name]) for name in SCRIPTS if name.split()[0] in EXAMPLES}
