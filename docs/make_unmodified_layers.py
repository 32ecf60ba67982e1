"""Writes ``unmodified_layers.md``: what becomes of every layer of the installed PyG on a sharded graph.

The facts are those of ``test/conv_zoo.py``, which ``test/test_unmodified_layers.py`` proves on several workers.
"""

import re
import sys
from pathlib import Path

import torch_geometric
import torch_geometric.nn as gnn

HERE = Path(__file__).resolve().parent
PATH = HERE / "unmodified_layers.md"
sys.path.insert(0, str(HERE.parent / "test"))

from conv_zoo import AGGREGATIONS, CASES, LAYERS, NOT_RUNNABLE, OPTIONS, refusal  # noqa: E402

from pyg_sar.edge_index import WHOLE_GRAPH  # noqa: E402

INTRODUCTION = """\
# PyG's own layers on a sharded graph

A layer of `pyg_sar.nn` streams over a sharded `edge_index`. Any other layer of PyG can be given the same `edge_index`
as it is: it then fetches the source rows that it reads in one shot, and computes what it computes on the whole graph
(outputs, and gradients of inputs, edge inputs and, after `sum_gradients`, parameters), or it raises an error that names
`pyg_sar.nn`.

*exact*: equal to PyG in one process to 1e-10 in float64 on 1, 2 and 3 workers, also where a worker has no nodes or no
edges. *refused*: the error says why. *not runnable*: PyG needs a package that the tests do not have.

"""

LIMITS = """
## What cannot be noticed

An operation on `edge_index` is answered exactly or refused, and a model is searched for modules that look at all nodes
at once. What a layer computes without either is this worker's share:

* means, sums or maxima over nodes or edges in code of your own (`x.mean(dim=0)`; losses: use `global_mean`);
* statistics of `edge_index[1]`, such as the histogram of degrees for `PNAConv` (sum it with `all_reduce`), and tables of
  all nodes that are indexed by it: it numbers this worker's nodes (global ids are in `data.n_id`);
* `torch.nn.functional.batch_norm` and other normalisations that are no modules, or modules that are not part of the model
  that calls the layer;
* attention dropout, which is drawn anew on every worker, as are sampled edges.
"""


def fate(name: str) -> str:
    """Exact, or what the layer says."""
    if not CASES[name].says:
        return "exact"
    said = re.sub(r"^\[rank \d+\] (.*)\. Use the layer of this name.*$", r"\1", refusal(name), flags=re.S)
    return f"refused: {said}".replace("|", r"\|")


def remark(name: str) -> str:
    """What a layer that is exact still needs."""
    return f"; it {WHOLE_GRAPH[name]}" if name in WHOLE_GRAPH and not CASES[name].says else ""


def options(name: str) -> str:
    """Other configurations that are tested."""
    found: dict[str, list[str]] = {"exact": [], "refused": []}
    for key, case in OPTIONS.items():
        if key.split()[0] == name and key in CASES:
            found["refused" if case.says else "exact"].append(" ".join(key.split()[1:]))
    return "; ".join(f"{how}: {', '.join(keys)}" for how, keys in found.items() if keys)


def table(title: str, names: list[str]) -> str:
    """One line for each class."""
    lines = [f"## {title}", "", "| class | on a sharded graph | other configurations |", "|---|---|---|"]
    for name in names:
        what = f"not runnable: {NOT_RUNNABLE[name]}" if name in NOT_RUNNABLE else fate(name) + remark(name)
        lines.append(f"| `{name}` | {what} | {options(name)} |")
    return "\n".join(lines) + "\n"


def counts() -> str:
    """How many layers are exact."""
    names = [name for name in gnn.conv.classes if name in LAYERS]
    refused = [name for name in names if LAYERS[name].says]
    rest = len(gnn.conv.classes) - len(names)
    return (
        f"PyG {torch_geometric.__version__}: of {len(gnn.conv.classes)} classes, {len(names) - len(refused)} are exact, "
        f"{len(refused)} are refused as they come from their constructor, {rest} cannot run here.\n\n"
    )


def text() -> str:
    """The whole page."""
    rest = [n for n in CASES if " " not in n and n not in LAYERS and n not in AGGREGATIONS]
    aggregations = [n for n in gnn.aggr.classes if n in AGGREGATIONS]
    others = sorted(
        {*rest, *(n.split()[1] for n in CASES if n.startswith("Net ") and n.endswith("Norm"))}, key=str.lower
    )
    CASES.update({n: CASES[f"Net {n}"] for n in others if n not in CASES})
    return (
        "<!-- Written by docs/make_unmodified_layers.py. -->\n\n" + INTRODUCTION + counts()
        + table("torch_geometric.nn.conv", list(gnn.conv.classes)) + "\n"
        + table("torch_geometric.nn.aggr", aggregations) + "\n"
        + table("Models, normalisations and poolings", others) + LIMITS
    )  # fmt: skip


if __name__ == "__main__":
    PATH.write_text(text())
