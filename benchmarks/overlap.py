"""How much of the communication hides behind computation, on simulated hosts with links of limited bandwidth.

    python benchmarks/overlap.py --out docs/results
    python benchmarks/overlap.py --out /tmp --nodes 5000 --edges 100000 --models gat --prefetch 1

Every host runs one worker (mode 1, models and graph of ``scaling.py``). *Hidden* is one minus the seconds that a worker
spends waiting for rows and gradients in a training step by the seconds that the same messages take when nothing is
computed between them. Of the measured steps the one of median length is reported and drawn: what each worker does
when, and what passes its link meanwhile. Writes ``overlap.md`` and ``overlap.png``. It takes root, see ``hosts.py``.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from harness.launch import answer, environment, results
from harness.report import processor, write
from harness.timeline import (
    BACKWARD,
    COLLECTIVES,
    FORWARD,
    GRADIENTS,
    KINDS,
    POSTING,
    WAITING,
    Step,
    late,
    sampled,
    watch,
)
from hosts import LINK, SKIPPED, Hosts, Unavailable, end_in_order, links
from scaling import graph, prepare, replay, step
from tqdm import tqdm

import pyg_sar

Run = tuple[str, int, int]  # model, hosts, prefetch
CACHED = "+cache"  # of a model whose features are declared constant
MODELS = ["gat", "sage", f"sage{CACHED}"]


@dataclass
class Found:
    """What one worker saw: its steps, the seconds of their messages alone, and samples of its link."""

    rank: int
    steps: list[Step]
    received: int
    alone: float
    samples: list[list[float]]

    def hidden(self, k: int) -> float:
        """Return the share of the communication of step ``k`` that was hidden."""
        return 1 - self.steps[k].seconds(*WAITING) / self.alone


def worker(args: argparse.Namespace) -> None:
    with pyg_sar.process_group() as rank:
        torch.manual_seed(0)
        data = pyg_sar.load(args.folder, prefetch=args.prefetch[0])
        (name,) = args.models
        if name.endswith(CACHED):
            data.edge_index.cache_features(data.x)
        model, optimizer = prepare(pyg_sar.nn, name.removesuffix(CACHED), data)
        steps, layers = [], []
        with sampled(LINK) as samples:
            for _ in range(args.steps):
                with pyg_sar.record_traffic(data.edge_index) as layers, watch() as seen:
                    step(model, optimizer, data)
                steps.append(seen.as_json())
        received = sum(t.forward_received + t.backward_received for t in layers)
        alone = statistics.median(replay(data.edge_index.graph, layers) for _ in range(args.steps))
        answer({"rank": rank, "steps": steps, "received": received, "alone": alone, "samples": samples})


def measure(args: argparse.Namespace, hosts: Hosts, model: str, prefetch: int, folder: str) -> list[Found]:
    """Return what the workers saw, by rank."""
    options = ["--models", model, "--prefetch", str(prefetch), "--steps", str(args.steps), "--folder", folder]
    written = hosts.run([__file__, "--worker", *options], env=environment(args.threads), echo=False)
    answers = sorted((found for text in written for found in results(text)), key=lambda found: found["rank"])
    return [Found(**{**found, "steps": [Step.from_json(one) for one in found["steps"]]}) for found in answers]


def main(args: argparse.Namespace) -> int:
    found: dict[Run, list[Found]] = {}
    runs = list(product(args.hosts, args.models, args.prefetch))
    end_in_order()
    try:
        with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(runs)) as bar:
            data = graph(args)
            for count in args.hosts:
                folder = str(Path(scratch) / str(count))
                pyg_sar.partition(data, count, folder, method=args.method)
                with Hosts(count, args.rate, args.delay) as hosts:
                    for model, prefetch in product(args.models, args.prefetch):
                        bar.set_description(f"{model}, {count} hosts, prefetch {prefetch}")
                        found[model, count, prefetch] = measure(args, hosts, model, prefetch, folder)
                        bar.update()
    except Unavailable as error:
        print(f"overlap.py: skipped: {error}", file=sys.stderr)
        return SKIPPED
    print(write(args.out, "overlap.md", [heading(args), "", *table(found)]))
    drawings = {run: workers for run, workers in found.items() if run[2] == drawn(args)}
    plot(Path(args.out) / "overlap.png", drawings)
    return 0


def drawn(args: argparse.Namespace) -> int:
    """Return the depth of prefetching that is drawn: the default of the library if it is measured."""
    return 1 if 1 in args.prefetch else args.prefetch[0]


def median_step(workers: list[Found]) -> int:
    """Return the number of the step whose longest duration on any worker is the (lower) median of all steps."""
    length = [max(w.steps[k].end - w.steps[k].start for w in workers) for k in range(len(workers[0].steps))]
    return length.index(statistics.median_low(length))


def heading(args: argparse.Namespace) -> str:
    delay = f"packets wait {args.delay} more" if args.delay else "no delay but the kernel's own"
    few = " More workers than cores: they slow each other down, which hides more than hosts would." * (
        args.threads * max(args.hosts) > (os.cpu_count() or 1)
    )
    return (
        f"Training steps in mode 1 on simulated hosts with one worker of {args.threads} thread(s) each, links of "
        f"{args.rate} in either direction, {delay}; 3-layer models (GraphSAGE: 256 hidden; GAT: 4 heads of 128) with "
        f"batch normalisation and Adam; generated graph of {args.nodes:,} nodes and {args.edges:,} edges, 100 "
        f"features ({CACHED}: kept after the first step), 47 classes, parts by {args.method}; float32; {processor()}, "
        f"{os.cpu_count()} cores for all hosts together, torch {torch.__version__}.{few} The step of median length of "
        f"{args.steps}, in seconds. "
        "*Computing*: all but what follows. *Sending*: gathering the rows that others read and starting messages, on "
        "the thread that computes. *Waiting*: for rows in forward, in backward, for gradients; *for the peer*: of all "
        "that, until the other end had started the message, too. *Collectives*: sums and statistics over all workers, "
        "which last until the slowest has come. *Alone*: the same messages when nothing is computed. *Hidden*: one "
        "minus waiting by alone (least to most of the steps). Made by `benchmarks/overlap.py`."
    )


def table(found: dict[Run, list[Found]]) -> list[str]:
    columns = ["model", "hosts", "prefetch", "worker", "MiB received", "step", "computing", "sending"]
    columns += ["waiting, forward", "backward", "gradients", "for the peer", "collectives", "alone", "hidden"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (model, hosts, prefetch), workers in found.items():
        k = median_step(workers)
        steps = [w.steps[k] for w in workers]
        for w, it in zip(workers, steps, strict=True):
            seconds = it.end - it.start
            times = [seconds, seconds - it.seconds(*KINDS), it.seconds(POSTING), it.seconds(FORWARD)]
            times += [it.seconds(BACKWARD), it.seconds(GRADIENTS), late(it, steps, w.rank), it.seconds(COLLECTIVES)]
            shares = [w.hidden(one) for one in range(len(w.steps))]
            hidden = f"{100 * shares[k]:.0f}% ({100 * min(shares):.0f} to {100 * max(shares):.0f})"
            cells = [model, hosts, prefetch, w.rank, f"{w.received / 2**20:.1f}"]
            cells += [*(f"{t:.2f}" for t in (*times, w.alone)), hidden]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def plot(path: Path, found: dict[Run, list[Found]]) -> None:
    """Draw the step of median length: above what every worker does, below what it receives."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(KINDS, ["0.55", "tab:orange", "tab:red", "tab:purple", "tab:blue"], strict=True))
    figure, grid = plt.subplots(2, len(found), figsize=(7 * len(found), 5), squeeze=False, sharex="col")
    for (work, link), ((model, hosts, prefetch), workers) in zip(grid.T, found.items(), strict=True):
        k = median_step(workers)
        zero = min(w.steps[k].start for w in workers)
        for w in workers:
            it = w.steps[k]
            work.broken_barh([(it.start - zero, it.end - it.start)], (w.rank - 0.4, 0.8), color="0.85")
            for kind, color in colors.items():
                spans = [(s.start - zero, s.end - s.start) for s in it.spans if s.kind == kind]
                work.broken_barh(spans, (w.rank - 0.4, 0.8), color=color)
            inside = [s for s in w.samples if it.start <= s[0] <= it.end]
            link.plot([s[0] - zero for s in inside[1:]], rates(inside), linewidth=0.8, label=f"worker {w.rank}")
        work.set(title=f"{model}, {hosts} hosts, prefetch {prefetch}", yticks=range(hosts), ylabel="worker")
        work.invert_yaxis()
        link.set(xlabel="seconds", ylabel="Mbit/s received")
        link.legend(frameon=False)
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in ("0.85", *colors.values())]
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.legend(patches, ["computing", *colors], loc="lower center", ncol=3, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def rates(samples: list[list[float]]) -> list[float]:
    """Return the Mbit/s received between samples."""
    return [8e-6 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(samples)]


def parse() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--hosts", nargs="+", type=int, default=[2])
    parser.add_argument("--prefetch", nargs="+", type=int, default=[1, 0, 2])
    links(parser, "1gbit")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--method", choices=["metis", "random", "contiguous"], default="metis")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    sys.exit(worker(arguments) if arguments.worker else main(arguments))
