"""Each file imports only what stands below it, and third parties only where they belong."""

import ast
from pathlib import Path

import pytest

import pyg_sar

ROOT = Path(pyg_sar.__file__).parent

# From the lowest level to the highest. A file imports files of lower levels alone. 'folder.*' are all files of a folder
# that no other level names; these may import each other, but not in a circle.
LEVELS = """
    csr
    autograd block caller running structure watch.__init__ distributed.traffic distributed.values durable
    distributed.notices distributed.simulated
    distributed.group
    debugging
    offload.__init__ offload.home
    ops.*
    affine linear exchange
    memo
    graph
    rewire cached
    loops
    runs
    reduce.*
    sources pieces
    context
    stream
    aggregate

    distributed.guard distributed.staging watch.counts
    distributed.agreement
    halo refusals whole_graph
    operations
    edge_index
    distributed.collectives
    distributed.transfer
    distributed.peers
    offload.place offload.schedule offload.halo
    offload.rows
    offload.slots offload.dropout
    offload.passes
    offload.functions offload.chunks
    distributed.gather distributed.loss
    distributed.links distributed.message_flow_graph distributed.reverse distributed.shard

    watch.kinds
    watch.origins
    watch.rules
    watch.mode
    distributed.*

    data.*
    live run_log
    checkpoint
    offload.move
    offload.counts
    offload.plan
    planner
    offload.data

    blocks distributed.stages distributed.history
    pipeline_checks
    pipeline
    pipeline_planner

    nn.together nn.shifted
    nn.norm.*
    nn.replay.*
    nn.pool.*
    nn.conv.*
    nn.models.autoencoder nn.models.deep_graph_infomax nn.models.node_embedding nn.models.label_propagation
    nn.models.correct_and_smooth
    nn.convert
    nn.models.*
    nn.__init__

    checks.*
    inference
    __init__
    report plan_models
    cli
    __main__
"""
# What a file imports of a higher level, or in a circle, and why.
EXCEPTIONS: dict[tuple[str, str], str] = {}
THIRD_PARTY = {
    "torch_geometric": {
        "nn",
        "checks/run.py",
        "plan_models.py",
        "watch/mode.py",
        "whole_graph.py",
        *(f"data/{f}.py" for f in ("assign", "attributes", "partition", "datasets", "load")),
    },
    "torch.distributed": {"distributed"},
    "triton": {"ops"},
    "pymetis": {"data/metis.py"},
    "safetensors": {"data/store.py", "distributed/values.py"},
}
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}


def imports(path: Path) -> set[str]:
    """Return all that a file imports, also within its functions; of this package, the names of files."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {file_of(alias.name) or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} imports by a relative name"
            found |= {file_of(f"{node.module}.{alias.name}") or file_of(node.module) or node.module
                      for alias in node.names}  # fmt: skip
    return found


def file_of(name: str) -> str:
    """Return the file of a module or package, 'data.load' for example, if it is one of this package."""
    package, _, name = name.partition(".")
    names = (name, f"{name}.__init__".lstrip(".")) if package == "pyg_sar" else ()
    return next((name for name in names if name in FILES), "")


IMPORTS = {name: imports(path) for name, path in FILES.items()}


def levels() -> dict[str, tuple[int, str]]:
    """Return the level of each file, and its entry there."""
    entries = [(k, entry) for k, line in enumerate(LEVELS.splitlines()) for entry in line.split()]
    found = {entry: (k, entry) for k, entry in entries if not entry.endswith(".*")}
    for k, entry in entries:
        if entry.endswith(".*"):
            files = [name for name in FILES if name.startswith(entry[:-1]) and name not in found]
            assert files, f"'{entry}' has no file: take it out of the table"
            found |= dict.fromkeys(files, (k, entry))
    return found


def test_each_file_has_a_level():
    assert not FILES.keys() - levels().keys(), "give these files a level"
    assert not levels().keys() - FILES.keys(), "these files are gone: take them out of the table"


def test_files_import_what_is_below():
    place, wrong = levels(), set()
    for name in place:
        for other in IMPORTS[name] & place.keys():
            if not (place[other][0] < place[name][0] or place[other][1] == place[name][1]):
                wrong.add((name, other))
    assert wrong - EXCEPTIONS.keys() == set(), "a lower file imports a higher one"


def test_there_is_no_circle():
    left = {name: {i for i in found if i in FILES and (name, i) not in EXCEPTIONS} for name, found in IMPORTS.items()}
    while lowest := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in lowest}
    while highest := left.keys() - set().union(*left.values()):
        left = {name: found for name, found in left.items() if name not in highest}
    assert not left, f"circles among {sorted(left)}"


def test_exceptions_are_needed():
    assert all(other in IMPORTS[name] for name, other in EXCEPTIONS)


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_third_parties_are_imported_where_they_belong(package):
    users = {
        FILES[name].relative_to(ROOT).as_posix()
        for name, found in IMPORTS.items()
        if any(i == package or i.startswith(f"{package}.") for i in found)
    }
    allowed = THIRD_PARTY[package]
    assert users, f"nobody imports {package}: is this test out of date?"
    assert {u for u in users if u not in allowed and u.split("/")[0] not in allowed} == set()


def test_run_time_knows_nothing_of_stored_graphs():
    for path in (ROOT / "distributed").rglob("*.py"):
        assert not [i for i in imports(path) if i.startswith("pyg_sar.data")], path


def test_layers_know_little_of_workers():
    for name, found in IMPORTS.items():
        if name.startswith("nn."):
            known = {i.rpartition(".")[2] for i in found if i.startswith("distributed.")}
            # 'shard' makes a graph of one block.
            assert known <= {"shard", "collectives", "gather", "group", "links", "loss", "reverse"}
