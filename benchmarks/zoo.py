"""Time and memory of every layer of PyG that converts, in one process and on two workers, against PyG's own.

    python benchmarks/zoo.py --out docs/results
    python benchmarks/zoo.py --out /tmp --graphs 300/2000 --layers GCNConv EdgeConv --repetitions 1

One process for PyG and one for the converted layers, of one thread each, take turns, layer by layer and repetition by
repetition; two more, which give freed memory back to the system, do one pass each for the peak. Outputs are compared
first. Then two workers of one thread run the converted layers on the same graph in two parts. The table has medians of
forward and backward together; *first* is the first call, in which a converted layer is examined.
Writes ``zoo-cpu.md``.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from harness.launch import answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, resident, settle
from harness.report import processor, write
from harness.rounds import Child, alternate, serve
from harness.zoo_layers import EDGE, LAYERS, WIDTH, in_degrees, make_graph
from torch import Tensor
from tqdm import tqdm

import pyg_sar

OURS, PYG = "pyg_sar", "PyG"
TOLERANCE = 1e-3


@dataclass
class Found:
    """What was measured of a layer: seconds and MiB of both implementations, and seconds on two workers."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    first: float = 0.0
    workers: float = 0.0
    how: str = ""

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


class Layers:
    """A graph, and one layer at a time."""

    def __init__(self, data: Any, degrees: Tensor, convert: bool) -> None:
        self.data, self.degrees, self.convert = data, degrees, convert

    @classmethod
    def in_one_process(cls, implementation: str, size: str) -> "Layers":
        """Make the graph, for ours in one part."""
        data = make_graph(*map(int, size.split("/")))
        degrees = in_degrees(data)
        if implementation == OURS:
            data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes, 1)
        return cls(data, degrees, implementation == OURS)

    def make(self, name: str) -> tuple[float, str]:
        """Make a layer and call it once; return the seconds of that, and what became of the layer."""
        torch.manual_seed(0)
        entry = LAYERS[name]
        self.layer = entry.make(self.degrees)
        if self.convert:
            self.layer = pyg_sar.nn.convert(self.layer)
        self.given = [getattr(self.data, key) for key in entry.given.split()]
        x = self.data.x.clone().requires_grad_()
        self.given = [x if given is self.data.x else given for given in self.given]
        self.grad = None
        seconds = self.run()
        return seconds, pyg_sar.nn.describe(self.layer) if self.convert else ""

    def run(self) -> float:
        """Return the seconds of forward and backward."""
        start = time.perf_counter()
        out = self.layer(*self.given)
        if self.grad is None:
            self.grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        out.backward(self.grad)
        seconds = time.perf_counter() - start
        self.layer.zero_grad()
        self.given[0].grad = None
        return seconds

    def sample(self) -> list[float]:
        """Return some numbers of the output."""
        with torch.no_grad():
            return self.layer(*self.given)[:: max(self.data.num_nodes // 50, 1), 0].tolist()

    def memory(self) -> float:
        """Return the peak of a pass above inputs, parameters and what is made once, in MiB."""
        before = settle()
        self.run()
        return resident("VmHWM") - before


def worker(args: argparse.Namespace) -> None:
    """Run all layers on this worker's part, and answer with the median seconds of each."""
    torch.set_num_threads(1)
    with pyg_sar.process_group(), pyg_sar.allow_local():
        data = pyg_sar.load(args.folder)
        layers, found = Layers(data, torch.load(args.degrees, weights_only=True), True), {}
        for name in args.layers:
            layers.make(name)
            found[name] = statistics.median(layers.run() for _ in range(args.repetitions))
        answer(found)


def measure(args: argparse.Namespace, size: str, bar: tqdm) -> dict[str, Found]:
    """Measure all layers on one graph."""
    edges = int(size.partition("/")[2])
    found = {name: Found() for name in args.layers if edges <= LAYERS[name].most}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as scratch:
        timed, trimmed = (
            {kind: stack.enter_context(Child(__file__, [kind, size], 1, **how)) for kind in (OURS, PYG)}
            for how in ({}, RETURN_FREED_MEMORY)
        )
        for name, it in found.items():
            bar.set_description(f"{size} {name}")
            for kind, child in timed.items():
                seconds, how = child.ask("make", name)
                if kind == OURS:
                    it.first, it.how = seconds, how.rpartition("  ")[2]
            check(name, *(torch.tensor(child.ask("sample")) for child in timed.values()))
            it.seconds = dict(zip(timed, alternate(timed.values(), "run", args.repetitions), strict=True))
            for kind, child in trimmed.items():
                child.ask("make", name)
                it.peak[kind] = child.ask("memory")
            bar.update()
        stack.close()
        bar.set_description(f"{size} two workers")
        data, folder, degrees = make_graph(*map(int, size.split("/"))), f"{scratch}/parts", f"{scratch}/degrees.pt"
        torch.save(in_degrees(data), degrees)
        pyg_sar.partition(data, 2, folder)
        told = ["--folder", folder, "--degrees", degrees, "--repetitions", str(args.repetitions), "--layers"]
        ranks = launch(__file__, 2, [*told, *found])
        for name, it in found.items():
            it.workers = max(rank[name] for rank in ranks)
    return found


def check(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Raise if a layer computes something else."""
    error = float((ours - theirs).norm() / theirs.norm())
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name} differs from PyG by {error:.0e}")


def main(args: argparse.Namespace) -> None:
    lines = [heading(args)]
    with tqdm(total=len(args.graphs) * len(args.layers)) as bar:
        for size in args.graphs:
            lines += ["", *table(size, measure(args, size, bar))]
            text = write(args.out, "zoo-cpu.md", lines)
    print(text)


def heading(args: argparse.Namespace) -> str:
    return (
        f"Converted layers, {WIDTH} wide ({EDGE} features of edges), forward and backward, against PyG's own in one "
        f"process of one thread, medians of {args.repetitions} alternating repetitions; and on two workers of one "
        f"thread. Generated graphs, float32; {processor()}, {os.cpu_count()} cores, torch {torch.__version__}. *Peak*: "
        "resident memory above inputs and what is made once. *First*: the first call, in which a converted layer is "
        "examined. A layer is left out where PyG's messages do not fit the machine. Made by `benchmarks/zoo.py`."
    )


def table(size: str, found: dict[str, Found]) -> list[str]:
    nodes, edges = (f"{int(n):,}" for n in size.split("/"))
    columns = [f"{nodes} nodes, {edges} edges", "how", "ms", "PyG, ms", "times PyG's time", "peak MiB", "PyG, MiB"]
    columns += ["times PyG's memory", "first, s", "2 workers, ms", "2 workers / 1"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, it in found.items():
        ours, theirs = it.median(OURS), it.median(PYG)
        cells = [name, it.how, f"{1e3 * ours:.1f}", f"{1e3 * theirs:.1f}", f"{ours / theirs:.2f}"]
        cells += [f"{it.peak[OURS]:.0f}", f"{it.peak[PYG]:.0f}", f"{it.peak[OURS] / max(it.peak[PYG], 1e-9):.2f}"]
        cells += [f"{it.first:.2f}", f"{1e3 * it.workers:.1f}", f"{it.workers / ours:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", default=["3000/12000", "50000/1000000"], help="nodes/edges")
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default="docs/results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--degrees", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"] and sys.argv[2] in (OURS, PYG):
        serve(lambda: Layers.in_one_process(*sys.argv[2:]))
    else:
        arguments = parse()
        worker(arguments) if arguments.worker else main(arguments)
