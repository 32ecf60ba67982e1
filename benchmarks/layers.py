"""Time and memory of one layer in one process: pyg_sar on a graph of one block, DGL, PyG, and the machine's own bound.

    python benchmarks/layers.py --out docs/results
    python benchmarks/layers.py --out /tmp --cases gat sum-400 --implementations DGL gather --repetitions 3

Every implementation of a case lives in a child process of its own, with the same graph, weights and features; its
output and all gradients are checked against PyG in double precision before anything is timed. Then they take turns, one
repetition each, and the table has medians. Peaks of memory come last, in fresh processes that give freed tensors of 128
KiB and more back to the system. The bound is a loop that only reads the rows which the aggregation must read
(``gather.cpp``). What a GPU does is measured by ``gpu_layers.py``.

DGL and torch-scatter are measured where they can be imported. DGL's release 1.1.3 runs with current torch (besides what
PyG needs, it imports scipy)::

    pip install --no-deps --target DIRECTORY dgl==1.1.3
    pip install --no-deps --target DIRECTORY --no-build-isolation torch-scatter
    PYTHONPATH=DIRECTORY python benchmarks/layers.py --out docs/results

Writes ``layers-cpu.md`` and ``layers-cpu.png``, with ``--order`` ``layers-cpu-ordered.*``, after every case; with
``--table narrow``, which measures attention of narrow heads alone, ``layers-cpu-narrow.md``, and with ``--table
relational`` R-GCN in ``layers-cpu-relational.md``.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from harness.layer_jobs import BF16, FEATURES, RELATIONS, Case, cases, make_job, narrow_cases, needs, relational_cases
from harness.process_memory import RETURN_FREED_MEMORY, available
from harness.report import processor, write
from harness.rounds import Child, Died, serve
from safetensors.torch import save_file
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph

TOLERANCE, TOLERANCE_BF16 = 1e-3, 2e-2
TABLES = {"main": cases, "narrow": narrow_cases, "relational": relational_cases}
BOUNDS = ("linear maps", "gather", "gather" + BF16)


@dataclass
class Result:
    """What was measured of one implementation of a case; ``note`` tells why nothing was."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    memory: tuple[float, float] | None = None
    error: str = ""
    note: str = ""

    @property
    def both(self) -> list[float]:
        """Milliseconds of each repetition as a whole."""
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]

    def median(self, which: str) -> float:
        """Return the median of ``forward``, ``backward`` or ``both``."""
        return statistics.median(getattr(self, which))


Results = dict[str, dict[str, Result]]  # of a case's name and an implementation


def main(args: argparse.Namespace) -> None:
    known, names = TABLES[args.table](), args.cases
    chosen = [case for case in known if not names or any(f"{case.name}-".startswith(f"{name}-") for name in names)]
    missing = [case for case in chosen if case.layer != "SimpleConv" and not hasattr(pyg_sar.nn, case.layer)]
    results: Results = {case.name: {"pyg_sar": Result(note=f"no {case.layer} yet")} for case in missing}
    with tempfile.TemporaryDirectory() as scratch:
        edges = write_graph(args, args.nodes, args.edges, Path(scratch) / "graph.safetensors")
        library = compile_gather(Path(scratch))
        todo = [case for case in chosen if case not in missing]
        bar = tqdm(total=len(todo) * (args.warmups + args.repetitions + 4))
        for case in todo:
            bar.set_description(case.name)
            results[case.name] = measure(args, case, edges, scratch, library, bar)
            text = report(args, edges, {case.name: results[case.name] for case in chosen if case.name in results})
        bar.close()
    print(text)


def write_graph(args: argparse.Namespace, nodes: int, edges: int, path: Path) -> int:
    """Write a graph with a self-loop at every node, edges sorted by destination, and return the number of edges."""
    data = community_graph(nodes, edges, num_features=FEATURES)
    loops, x = torch.arange(nodes), data.x
    edge_index = torch.cat([data.edge_index, torch.stack([loops, loops])], 1)
    if args.order:
        order = pyg_sar.locality_order(data.edge_index, nodes)
        edge_index, x = order.argsort()[edge_index], x[order]
    edge_index = edge_index[:, (edge_index[1] * nodes + edge_index[0]).argsort()]
    edge_type = torch.randint(RELATIONS, (edge_index.size(1),), generator=torch.Generator().manual_seed(0))
    save_file({"x": x, "edge_index": edge_index.contiguous(), "edge_type": edge_type}, path)
    return edge_index.size(1)


def compile_gather(folder: Path) -> str | None:
    """Compile the bound, if there is a compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        print("There is no C++ compiler: without the bound.", file=sys.stderr)
        return None
    source, target = Path(__file__).with_name("gather.cpp"), folder / "gather.so"
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True)
    return str(target)


def measure(
    args: argparse.Namespace, case: Case, edges: int, scratch: str, library: str | None, bar: tqdm
) -> dict[str, Result]:
    """Measure all implementations of a case."""
    names = [name for name in case.implementations if library or not name.startswith("gather")]
    names = [name for name in names if not args.implementations or name in ("pyg_sar", *args.implementations)]
    results = {name: Result(note=skip(args, case, name, edges)) for name in names}
    with contextlib.ExitStack() as stack:

        def start(name: str, **settings: str) -> Child:
            told = ["--cases", case.name, "--hold", name, "--scratch", scratch, "--threads", str(args.threads)]
            return stack.enter_context(Child(__file__, told, args.threads, DGLBACKEND="pytorch", **settings))

        reference = str(Path(scratch) / "reference.safetensors")
        with start("reference") as child:
            child.ask("write", reference)
        bar.update()
        children = {name: start(name) for name, result in results.items() if not result.note}

        def ask(question: str, *arguments: Any) -> Iterator[tuple[str, Any]]:
            """Ask the living children in turn, the bounds only what they know."""
            for name in list(children):
                bar.set_postfix_str(f"{question} {name}", refresh=False)
                if name in BOUNDS and question == "check":
                    continue
                try:
                    answer = children[name].ask(question, *arguments)
                except (Died, RuntimeError) as death:
                    full = "OutOfMemoryError" in str(death)
                    if not full and not isinstance(death, Died):
                        raise
                    results[name] = Result(note="out of memory" if full else str(death))
                    children.pop(name).__exit__(None, None, None)
                else:
                    yield name, answer
            bar.update()

        for _ in ask("ready"):
            pass
        for name, errors in ask("check", reference):
            wrong, results[name].error = validate(name, errors)
            if wrong and name.startswith("pyg_sar"):
                raise RuntimeError(f"{case.name}: {name} differs from PyG in double precision in {wrong}")
            if wrong:
                results[name] = Result(note=f"computes something else: error of {wrong}")
                del children[name]
        for k in range(args.warmups + args.repetitions):
            for name, (forward, backward) in ask("repeat"):
                if k >= args.warmups:
                    results[name].forward.append(forward)
                    results[name].backward.append(backward)
        stack.close()
        for name in (name for name in children if name not in BOUNDS):
            bar.set_postfix_str(f"memory {name}", refresh=False)
            results[name].memory = start(name, **RETURN_FREED_MEMORY).ask("memory")
            stack.close()
        bar.update()
    return results


def skip(args: argparse.Namespace, case: Case, implementation: str, edges: int) -> str:
    """Return why an implementation cannot run here, if so."""
    free = available() * 2**20
    need, have = needs(case, implementation, edges) / 1e9, args.memory or free / 1e9
    return f"skipped: needs about {need:.0f} GB" if need > have else ""


def validate(implementation: str, errors: dict[str, float]) -> tuple[str, str]:
    """Return the errors that are too large, and the largest with what has it."""
    tolerance = TOLERANCE_BF16 if implementation.endswith(BF16) else TOLERANCE
    wrong = ", ".join(f"{name} {value:.0e}" for name, value in errors.items() if not value <= tolerance)
    worst = max(errors, key=errors.__getitem__)
    return wrong, f"{errors[worst]:.0e} ({worst})"


def report(args: argparse.Namespace, edges: int, results: Results) -> str:
    """Write table and figure; return the table."""
    name = f"layers-cpu{'-ordered' * args.order}{f'-{args.table}' * (args.table != 'main')}"
    text = write(args.out, f"{name}.md", [*heading(args, edges), "", *table(results), "", *legend()])
    gat = {name: found for name, found in results.items() if name.startswith("gat-")}
    if gat and args.table == "main":
        plot(Path(args.out) / f"{name}.png", gat)
    return text


def heading(args: argparse.Namespace, edges: int) -> list[str]:
    switch = os.environ.get("PYG_SAR_KERNELS")
    order = "relabelled by `pyg_sar.locality_order`" if args.order else "in random order"
    return [
        f"One layer, forward and backward, in one process on {machine(args)}; medians of {args.repetitions} "
        f"alternating repetitions. float32; {args.nodes:,} nodes {order}, "
        f"{edges:,} edges (with self-loops, power-law degrees, sorted by destination), {FEATURES} input features. "
        + ", ".join(
            f"{name} {release(name)}" for name in ("torch", "torch_geometric", "torch_scatter", "dgl", "triton")
        )
        + f", pyg_sar {pyg_sar.__version__}{f' (PYG_SAR_KERNELS={switch})' if switch else ''}. "
        "Made by `benchmarks/layers.py`.",
    ]


def machine(args: argparse.Namespace) -> str:
    """Return what it runs on."""
    return f"{processor()}, {os.cpu_count()} cores, {args.threads} threads"


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(absent)"


def table(results: Results) -> list[str]:
    columns = ["case", "implementation", "forward ms", "backward ms", "both ms (min to max)", "times pyg_sar"]
    columns += [
        "peak MiB above inputs",
        "above inputs and results",
        "% of gather, forward / backward / both",
        "with linear maps",
        "error",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, found in results.items():
        for name, result in found.items():
            cells = [result.note, *[""] * (len(columns) - 3)] if result.note else numbers(name, found)
            lines.append(f"| {' | '.join([case, name, *cells])} |")
    return lines


def numbers(name: str, found: dict[str, Result]) -> list[str]:
    """Return the cells of an implementation that ran."""
    result, both = found[name], found[name].both
    cells = [f"{result.median('forward'):.1f}", f"{result.median('backward'):.1f}"]
    cells.append(f"{result.median('both'):.1f} ({min(both):.1f} to {max(both):.1f})")
    peer = found["pyg_sar"]
    cells.append("" if peer.note else f"{result.median('both') / peer.median('both'):.2f}")
    cells += ["", ""] if result.memory is None else [f"{value:.0f}" for value in result.memory]
    cells += ["", ""] if name in BOUNDS else percents(result, found, BF16 if name.endswith(BF16) else "")
    return [*cells, result.error]


def percents(result: Result, found: dict[str, Result], kind: str) -> list[str]:
    """Return the share of a time that the bound takes, alone and with the linear maps of the layer."""
    gather, linear = found.get("gather" + kind), found.get("linear maps")
    if gather is None or gather.note:
        return ["", ""]
    alone = " / ".join(f"{100 * gather.median(k) / result.median(k):.0f}" for k in ("forward", "backward", "both"))
    if linear is None or linear.note:
        return [alone, ""]
    return [alone, f"{100 * (gather.median('both') + linear.median('both')) / result.median('both'):.0f}"]


def legend() -> list[str]:
    return [
        "*Times pyg_sar*: time of both passes by that of pyg_sar. *Peak*: resident memory during one forward and "
        "backward pass above the inputs (features, graph and weights); *results* are the output, its gradient and the "
        "gradients of features and weights. *gather* reads the rows that the aggregation must read, in its order, and "
        "computes nothing: once over the edges in each pass. *% of gather* is its time by that of the implementation, "
        "*with linear maps* adds the layer's dense products, measured alone. *Error*: the largest among "
        "the output and all gradients, norm of the difference from PyG in double precision by norm. "
        "*PyG CSR* is PyG with a sparse matrix instead of `edge_index`. PyG has none of its optional compiled "
        "packages, but in rows that name it, torch-scatter."
        " DGL has graphs with 32-bit ids."
    ]


def plot(path: Path, results: Results) -> None:
    """Draw time and memory against the number of heads, as in figure 2 of the SAR paper."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (times, memory) = plt.subplots(1, 2, figsize=(9, 3.6))
    names = [name for name in ("PyG", "DGL", "pyg_sar") if any(name in found for found in results.values())]
    for k, name in enumerate(names):
        for x, found in enumerate(results.values()):
            place, result, color = x + 0.28 * (k - (len(names) - 1) / 2), found[name], f"C{k}"
            label = name if x == 0 else None
            if result.note:
                for axes in (times, memory):
                    axes.bar(place, 0, color=color, label=label)
                    axes.annotate(f" {result.note}", (place, 0), rotation=90, ha="center", va="bottom", fontsize=7)
                continue
            forward, backward = result.median("forward") / 1e3, result.median("backward") / 1e3
            times.bar(place, forward, 0.26, color=color, label=label)
            times.bar(place, backward, 0.26, bottom=forward, color=color, alpha=0.5)
            memory.bar(place, result.memory[0] / 2**10, 0.26, color=color, label=label)
    heads = [name.removeprefix("gat-") for name in results]
    for axes, title in ((times, "seconds: forward, above it backward (pale)"), (memory, "peak GiB above the inputs")):
        axes.set(xlabel="heads of GAT", xticks=range(len(heads)), xticklabels=heads, title=title)
        axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    case = next(case for table in TABLES.values() for case in table() if case.name == args.cases[0])
    scratch = Path(args.scratch)
    serve(lambda: make_job(case, args.hold, str(scratch / "graph.safetensors"), str(scratch / "gather.so")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", choices=[*TABLES], default="main", help="narrow: heads of 8 and of 7 columns")
    parser.add_argument("--cases", nargs="+", help="of the table, such as gat or gat-2 (default: all)")
    parser.add_argument("--implementations", nargs="+", help="besides pyg_sar; names as in the table, default: all")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--order", action="store_true", help="relabel nodes by pyg_sar.locality_order")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", type=float, help="GB that PyG may take; default: what is available")
    parser.add_argument("--out", default="docs")
    for option in ("--hold", "--scratch"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker(arguments) if arguments.worker else main(arguments)
