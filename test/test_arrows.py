"""Each file imports only what stands below it, and third parties only where they belong."""

import ast
from pathlib import Path

import pytest

import pyg_sar

ROOT = Path(pyg_sar.__file__).parent
BELOW = {
    "graph": set(),
    "dropout": set(),
    "reference": {"dropout"},
    "ops": {"kernels", "reference"},
    "reduce": {"graph", "ops", "reference"},
    "trace": {"dropout", "ops"},
    "running": set(),
    "distributed.group": set(),
    "distributed.guard": {"distributed.group", "running"},
    "edge_index": {"distributed.group", "graph", "running"},
    "kinds": {"edge_index", "trace"},
    "watch": {"distributed.group", "distributed.guard", "edge_index", "kinds", "trace"},
    "stream": {"graph", "reduce", "running", "watch"},
}
THIRD_PARTY = {
    "torch_geometric": {
        "nn",
        "watch.py",
        *(f"distributed/{f}.py" for f in ("partition", "partition_hetero", "datasets", "load")),
    },
    "torch.distributed": {"distributed"},
    "pymetis": {"distributed/metis.py"},
    "safetensors": {"distributed/store.py"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in ("pyg_sar", "pyg_sar.distributed"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    return found


@pytest.mark.parametrize("name", BELOW)
def test_core_imports_only_what_is_below(name):
    found = imports((ROOT / name.replace(".", "/")).with_suffix(".py"))
    assert {i.removeprefix("pyg_sar.") for i in found if i.startswith("pyg_sar.")} <= BELOW[name]


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_third_parties_are_imported_where_they_belong(package):
    users = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(i == package or i.startswith(f"{package}.") for i in imports(path))
    }
    allowed = THIRD_PARTY[package]
    assert users, f"nobody imports {package}: is this test out of date?"
    assert {u for u in users if u not in allowed and u.split("/")[0] not in allowed} == set()


def test_layers_know_little_of_workers():
    for path in (ROOT / "nn").glob("*.py"):
        known = {i.rpartition(".")[2] for i in imports(path) if i.startswith("pyg_sar.distributed")}
        # 'assemble' makes a graph of one block.
        assert known <= {"assemble", "collectives", "gather", "group", "links", "loss", "reverse"}
