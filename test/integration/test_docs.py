"""The documents: their code runs, their words are those of the glossary, and their links lead somewhere."""

import ast
import re
import runpy
import shlex
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
import torch_geometric.transforms as T
from support import graphs, hetero_models
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


class Evaluator:
    """What OGB's does with classes."""

    def __init__(self, name: str) -> None:
        assert name == "ogbn-arxiv"

    def eval(self, rows: dict[str, torch.Tensor]) -> dict[str, float]:
        assert rows["y_true"].shape == rows["y_pred"].shape == (graphs.NODES, 1)
        return {"acc": float((rows["y_true"] == rows["y_pred"]).double().mean())}


class Model(torch.nn.Module):
    """Two layers, which the guide's blocks call `model`."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([pyg_sar.nn.SAGEConv(width, 8), pyg_sar.nn.SAGEConv(8, num_classes)])

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)


def names(folder: Path) -> dict[str, Any]:
    """Return what the guide's blocks find: a loaded graph, a model and its outputs, and pairs of nodes."""
    pyg_sar.partition(graphs.citations(), 1, folder)
    data = pyg_sar.load(folder)
    model = Model(data.num_features, data.num_classes).to(data.x.dtype)
    out = model(data.x, data.edge_index)
    return {
        "torch": torch, "F": F, "Data": Data, "pyg_sar": pyg_sar, "data": data, "model": model, "out": out, "z": out,
        "optimizer": torch.optim.Adam(model.parameters()), "rank": 0,
        "convs": model.convs, "edge_label_index": torch.tensor([[0, 1, 2], [3, 4, 5]]),
        "edge_label": torch.tensor([0.0, 1.0, 1.0]), "roc_auc_score": lambda y, score: (y.shape, score.shape),
        "Evaluator": Evaluator, "T": T, "graph": graphs.citations()[0],
    }  # fmt: skip


def test_blocks_of_the_guide_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = names(tmp_path / "graph")
    found = blocks(ROOT / "docs" / "guide.md", "python")
    assert len(found) >= 7
    for block in found:
        exec(compile(block, "guide.md", "exec"), values)
    data = values["data"]
    network = values["EdgeNetwork"](data.num_features, 3)
    assert network(torch.randn(data.x.shape), data.edge_index, torch.randn(data.num_edges, 3)).isfinite().all()


# What blocks of other pages name, and what stands for it here
INSTEAD = {
    "offload": {"parts/products": "graph", "/scratch": "."},
    "pipeline": {"pyg_sar.stage_mesh(4)": "None", 'mesh.get_group("graph")': "None", "parts/2": "graph", "100": "2"},
    "clusters": {},
}


@pytest.mark.parametrize("page", INSTEAD)
def test_blocks_of_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = names(tmp_path / "graph")
    width, classes = values["data"].num_features, values["data"].num_classes

    def loss_of(out, y, mask):
        return F.cross_entropy(out[mask], y[mask], reduction="sum")

    def train(model, data, optimizer):
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()

    if page == "pipeline":
        values["model"] = torch_geometric.nn.GCN(width, 8, 2, classes).double()
    optimizer = torch.optim.Adam(values["model"].parameters())
    values |= {"loss_of": loss_of, "train": train, "optimizer": optimizer}
    values |= {"loss_fn": lambda out, rows: loss_of(out, values["data"].y[rows], values["data"].train_mask[rows])}
    for block in blocks(ROOT / "docs" / f"{page}.md", "python"):
        for one, other in INSTEAD[page].items():
            block = block.replace(one, other)
        exec(compile(block, page, "exec"), values)


def of_docstrings() -> Iterator[tuple[str, str]]:
    """Yield what has a block of code in its docstring, and the block."""
    for path in sorted((ROOT / "pyg_sar").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                told = f"{ast.get_docstring(node) or ''}\n"
                for block in re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", told):
                    yield node.name, textwrap.dedent(block)


# What blocks of docstrings name, and what stands for it here
SMALLER = {
    '"parts/cora"': '"graph"', 'load("parts")': 'load("graph")', '"parts/products"': '"graph"', '"/scratch"': '"."',
    "pyg_sar.stage_mesh(4)": "None", 'mesh.get_group("graph")': "None", '"parts/2"': '"graph"',
    "GATConv(64,": "GATConv(-1,", "GAT(100,": "GAT(-1,", "range(100)": "range(2)", "101": "3", "pyg_sar.init()": "",
    'torch_geometric.datasets.Planetoid("data", "Cora")[0]': "whole",
}  # fmt: skip


def typed(folder: Path) -> dict[str, Any]:
    """Return heterogeneous data of papers with labels, and layers."""
    graph, width = hetero_models.graph(), hetero_models.WIDTH
    graph["paper"].y = torch.arange(graph["paper"].num_nodes) % 3
    pyg_sar.partition(graph, 1, folder)
    layer = {it: pyg_sar.nn.SAGEConv((width[it[0]], width[it[2]]), 3) for it in hetero_models.EDGES}
    return {"data": pyg_sar.load(folder), "convs": [torch_geometric.nn.HeteroConv(layer).double()]}


@pytest.mark.parametrize(("name", "block"), list(of_docstrings()), ids=[name for name, _ in of_docstrings()])
def test_blocks_of_docstrings_run(name, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, whole = names(tmp_path / "graph"), graphs.citations()[0]
    data, model, out, width = values["data"], values["model"], values["out"], whole.num_features
    losses = F.cross_entropy(out, data.y, reduction="none")
    pairs = torch.tensor([[0, 1, 2], [3, 4, 5]])
    encoder = torch_geometric.nn.GCN(width, 8, 2).double()
    models = {
        "GAE": lambda: pyg_sar.nn.GAE(pyg_sar.nn.convert(encoder)),
        "LightGCN": lambda: pyg_sar.nn.LightGCN(data, 8, 2).double(),
        "Pipeline": lambda: Data(
            blocks=pyg_sar.nn.blocks(torch_geometric.nn.GCN(width, 8, 2, data.num_classes).double())
        ),
    }
    model.rel_emb = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    torch.save(model.state_dict(), "graphsage.pt")
    values |= {
        "whole": whole, "x": whole.x, "edge_index": whole.edge_index, "num_nodes": whole.num_nodes, "rank": 0,
        "losses": losses, "loss": losses.sum(), "y": data.y, "w": torch.rand(len(data.y)).double(), "total": 9,
        "global_mean": pyg_sar.global_mean, "torch_geometric": torch_geometric, "pos_edge_label_index": pairs,
        "pos": pairs, "neg": pairs, "self": Namespace(), "train": lambda: 0.5,
        "test": lambda: 0.5, "optimizer": torch.optim.Adam(model.parameters()),
        "model": models.get(name, lambda: model)(),
    }  # fmt: skip
    if 'data["paper"]' in block:
        values |= typed(tmp_path / "typed")
    if name in ("shard", "convert"):  # whose layers are made in single precision
        values["data"] = whole if name == "shard" else data
        values["data"].x = values["data"].x.float()
    if name == "global_mean":  # of nodes and of classes, as many
        values |= {"losses": losses[: data.num_classes], "w": torch.rand(data.num_classes).double()}
    for one, other in SMALLER.items():
        block = block.replace(one, other)
    exec(compile(block, name, "exec"), values)


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md"])
def test_commands_run(name, tmp_path, monkeypatch, capsys):
    """On a smaller graph than theirs."""
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(blocks(ROOT / name, "sh")).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("pyg-sar")]
    assert commands
    for _, *arguments in commands:
        cli.main([a.replace("Planetoid/Cora", "KarateClub") for a in arguments])
    assert capsys.readouterr().out


def test_the_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="draws")
    runpy.run_path(str(ROOT / "docs" / "draw.py"))["main"](tmp_path / "sar.png")
    assert (tmp_path / "sar.png").stat().st_size > 10_000


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", path.read_text()):
        assert link.startswith("http") or not link or (path.parent / link).exists(), link


# The words that are not used.

REPLACED = re.findall(
    r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs" / "glossary.md").read_text().split("## Words")[1], re.M
)[2:]
UNWANTED = re.compile(r"\b(" + "|".join(map(re.escape, REPLACED)) + r")\b", re.I)


def texts() -> dict[str, str]:
    """Return all documents, all strings of the package (docstrings and errors) and its public names."""
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in DOCS if path.name != "glossary.md"}
    for path in sorted((ROOT / "pyg_sar").rglob("*.py")):
        constants = [n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
        found[path.relative_to(ROOT).as_posix()] = "\n".join(c for c in constants if isinstance(c, str))
    public = [*pyg_sar.__all__, *pyg_sar.nn.__all__]
    return found | {"public names": "\n".join(name.replace("_", " ") for name in public)}


def test_words_are_those_of_the_glossary():
    assert len(REPLACED) > 20
    found = {
        f"{name}: {match[0]!r}"
        for name, text in texts().items()
        for match in UNWANTED.finditer(re.sub(r"\s+", " ", text))
    }
    assert not found, "\n".join(sorted(found))
