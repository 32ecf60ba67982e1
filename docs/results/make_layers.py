"""Writes ``layers.md``: what becomes of every layer of PyG on a sharded graph.

The facts are those of ``test/support/conv_zoo.py``, which ``test_unmodified_layers.py`` and ``test_replay.py`` in
``test/nn/replay`` prove on several workers. What is found with the installed release of PyG goes into ``layers/``; the
page shows the newest release there, and how others differ.
"""

import json
import re
import sys
from pathlib import Path

import torch_geometric
import torch_geometric.nn as gnn

HERE = Path(__file__).resolve().parent
PATH, FACTS = HERE / "layers.md", HERE / "layers"
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "test")]

from support.conv_zoo import (  # noqa: E402
    ABSTRACT,
    AGGREGATIONS,
    CASES,
    LAYERS,
    NOT_CONVERTED,
    NOT_RUNNABLE,
    OPTIONS,
    converted,
    refusal,
    strategies,
)

from pyg_sar.whole_graph import WHOLE_GRAPH  # noqa: E402

INTRODUCTION = """\
# PyG's own layers on a sharded graph

A layer of `pyg_sar.nn` streams over a sharded `edge_index`. Any other layer of PyG can be given the same `edge_index`
as it is: it then fetches all source rows that it reads at once (one-shot), and computes what it computes on the whole
graph (outputs, and gradients of inputs, edge inputs and, after `sum_gradients`, parameters), or it raises an error that
names `pyg_sar.nn`. `pyg_sar.nn.convert` makes it stream, if it can, and normalisations and readouts see the rows of all
workers.

*converted*: how it then streams, each of its layers; found out and checked when it is first called. *In chunks of
destinations*: all edges of some destinations at a time, and again in backward, the rows of all blocks fetched together.

*exact*: equal to PyG in one process to 1e-10 in float64 on 1, 2 and 3 workers, also where a worker has no nodes or no
edges. *refused*: the error says why. *not runnable*: PyG needs a package that the tests do not have.

"""

LIMITS = """\
## What cannot be noticed

An operation on `edge_index` is answered exactly or refused, and a model is searched for modules that look at all nodes
at once. What a layer computes without either is this worker's share:

* means, sums or maxima over nodes in code of your own (`x.mean(dim=0)`; losses: use `global_mean`), and over edges in
  layers that are not converted (in messages of those that are, this is refused);
* statistics of `edge_index[1]` (`pyg_sar.degree_histogram(data.edge_index)` is what `PNAConv` asks for), and tables of
  all nodes that are indexed by it: it numbers this worker's nodes (global ids are in `data.n_id`);
* `torch.nn.functional.batch_norm` and other normalisations that are no modules, or modules that are not part of the
  model that calls the layer;
* random numbers: dropout and sampled edges are drawn on every worker, not as they would be drawn for the whole graph.
"""


def case_of(name: str) -> str:
    """Normalisations stand in a model named ``Net``."""
    return name if name in CASES else f"Net {name}"


def fate(name: str) -> str:
    """Exact, or what the layer says."""
    if name in ABSTRACT:
        return "not runnable: abstract"
    if name in NOT_RUNNABLE:
        return f"not runnable: {NOT_RUNNABLE[name][0]}"
    if CASES[case_of(name)].says:
        advice = r"\. (Use the layer of this name|Nothing in 'pyg_sar\.nn')"
        said = re.sub(rf"^\[rank \d+\] (.*){advice}.*$", r"\1", refusal(case_of(name)), flags=re.S)
        return "refused: " + re.sub(r"^'\w+' in '\w+' cannot run on a share of the graph, because it ", "", said)
    known = [WHOLE_GRAPH[cls.__name__] for cls in getattr(gnn, name).__mro__ if cls.__name__ in WHOLE_GRAPH]
    return f"exact; refused where it {known[0]}" if known else "exact"


def way(name: str) -> str:
    """How it streams when it is converted."""
    if name in ABSTRACT or name in NOT_RUNNABLE:
        return ""
    if case_of(name) == "LINKX" or converted(case_of(name)).says:
        return "refused"
    if case_of(name) in NOT_CONVERTED:
        return "sees the rows of all workers"
    return ", ".join(dict.fromkeys(strategies(case_of(name)))) or "exact"


def options(name: str) -> str:
    """Other configurations that are tested."""
    found: dict[str, list[str]] = {"exact": [], "refused": []}
    for key, case in OPTIONS.items():
        if key.startswith(f"{case_of(name)} ") and key in CASES:
            found["refused" if case.says else "exact"].append(key.removeprefix(f"{case_of(name)} "))
    return "; ".join(f"{how}: {', '.join(keys)}" for how, keys in found.items() if keys)


def facts() -> dict[str, list[tuple[str, str, str, str]]]:
    """What becomes of every class of the installed release, by the titles of tables."""
    norms = [name for name in gnn.norm.classes if f"Net {name}" in CASES]
    models = [name for name in CASES if " " not in name and name not in LAYERS and name not in AGGREGATIONS]
    tables = {
        "Layers (torch_geometric.nn.conv)": list(gnn.conv.classes),
        "Aggregations (torch_geometric.nn.aggr)": [n for n in gnn.aggr.classes if n in AGGREGATIONS],
        "Normalisations between layers (torch_geometric.nn.norm)": norms,
        "Models and poolings": sorted(models),
    }
    return {title: [(n, fate(n), way(n), options(n)) for n in names] for title, names in tables.items()}


def written() -> str:
    """The facts as they are kept."""
    return json.dumps(facts(), indent=1) + "\n"


def counts(version: str, layers: list[list[str]]) -> str:
    """How many layers are exact, and how many stream."""
    fates = [fate.split(":")[0].split(";")[0] for _, fate, _, _ in layers]
    ways = [way.split(" ")[0] for _, _, way, _ in layers]
    return (
        f"PyG {version} has {len(fates)} classes of layers. As they are, {fates.count('exact')} are exact, "
        f"{fates.count('refused')} are refused (some only in the configuration of the first column), "
        f"{fates.count('not runnable')} are not runnable. Converted, {ways.count('streams')} stream and "
        f"{ways.count('runs')} run in chunks or one-shot.\n\n"
    )


def table(title: str, rows: list[list[str]]) -> str:
    """One line for each class."""
    lines = [
        f"## {title}",
        "",
        "| class | as it is | converted | other configurations, as they are |",
        "|---|---|---|---|",
        *(f"| `{name}` | {' | '.join(what)} |" for name, *what in rows),
    ]
    return "\n".join(lines) + "\n\n"


def differences(version: str, tables: dict[str, list[list[str]]], newest: dict[str, list[list[str]]]) -> str:
    """What is another thing in an older release."""
    old, new = ({name: what for rows in t.values() for name, *what in rows} for t in (tables, newest))
    lines = [f"| `{name}` | not in this release |  |  |" for name in new if name not in old]
    lines += [f"| `{name}` | {' | '.join(what)} |" for name, what in old.items() if what != new.get(name, what)]
    if not lines:
        return f"PyG {version}: the same.\n\n"
    head = [f"PyG {version}:", "", "| class | as it is | converted | other configurations |", "|---|---|---|---|"]
    return "\n".join([*head, *lines]) + "\n\n"


def text() -> str:
    """The whole page."""
    found = {path.stem: json.loads(path.read_text()) for path in FACTS.glob("*.json")}
    *older, newest = sorted(found, key=lambda version: tuple(map(int, version.split("."))))
    return "".join(
        [
            "<!-- Written by docs/results/make_layers.py. -->\n\n",
            INTRODUCTION,
            counts(newest, found[newest]["Layers (torch_geometric.nn.conv)"]),
            *(table(title, rows) for title, rows in found[newest].items()),
            "## Other releases of PyG\n\nWhat is another thing there.\n\n",
            *(differences(version, found[version], found[newest]) for version in reversed(older)),
            LIMITS,
        ]
    )


if __name__ == "__main__":
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"{torch_geometric.__version__}.json").write_text(written())
    PATH.write_text(text())
