"""Time of an epoch of ``examples/train.py`` with the compiled kernels and without them, or with the guards.

    python benchmarks/epoch.py --out docs/results
    python benchmarks/epoch.py --of guards --layers 16 --graph Community/20000/400000 --out docs/results

Runs with and without kernels (``PYG_SAR_KERNELS=0``) take turns, so that slow minutes of the machine hit both alike. An
epoch takes as long as its slowest worker; the first of a run, which makes what is made once, does not count. Writes
``epoch-cpu.md``.

Guards cost so little that epochs with and without them take turns in each run, and with them the signs of life that
workers write each second; first epochs are those of runs of their own (``PYG_SAR_GUARDS=0``). Writes ``guards-cpu.md``.
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
from itertools import count, product
from pathlib import Path
from typing import Any

import torch
from harness.launch import answer, launch
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.distributed import guard, notices

SWITCH = {"on": "1", "off": "0"}
WHAT = {"kernels": "compiled kernels", "guards": "guards and signs"}
Times = dict[tuple[str, int], dict[str, list[float]]]  # seconds by model and mode, and with what


def worker(options: list[str]) -> None:
    import train  # workers alone have the examples on their path

    layers, alternates, *options = options
    train.GNN = functools.partial(train.GNN, layers=int(layers))
    if alternates == "True":
        train.train = alternating(train.train)
    with pyg_sar.process_group() as rank:
        answer(train.main(train.parser.parse_args(options), rank))


def alternating(step: Any) -> Any:
    """Return a step that is guarded every other time, at first; then the worker gives signs as well."""
    steps = count()

    def train(*args: Any) -> float:
        guard.ON = next(steps) % 2 == 0
        if (board := notices.CURRENT) is not None:
            board.write = (lambda: type(board).write(board)) if guard.ON else (lambda: None)
        return step(*args)

    return train


def epochs(args: argparse.Namespace, folder: str, model: str, mode: int, number: int, alternates: bool = False,
           **settings: str) -> list[float]:  # fmt: skip
    """Return the seconds of every epoch of one run."""
    options = [str(args.layers), str(alternates), folder, "--model", model, "--mode", str(mode)]
    options += ["--epochs", str(number), *(["--hidden", str(args.hidden)] if args.hidden else [])]
    ranks = launch(__file__, args.workers, options, threads=args.threads, **settings)
    return [max(times) for times in zip(*ranks, strict=True)]


def with_kernels(args: argparse.Namespace, folder: str, model: str, mode: int) -> dict[str, list[float]]:
    return {k: epochs(args, folder, model, mode, args.epochs, PYG_SAR_KERNELS=SWITCH[k])[1:] for k in SWITCH}


def with_guards(args: argparse.Namespace, folder: str, model: str, mode: int) -> dict[str, list[float]]:
    first = {f"first, {k}": epochs(args, folder, model, mode, 1, PYG_SAR_GUARDS=SWITCH[k]) for k in SWITCH}
    times = epochs(args, folder, model, mode, 2 * args.epochs, alternates=True)
    return {"on": times[2::2], "off": times[3::2], **first}


def main(args: argparse.Namespace) -> None:
    data, measure = dataset(args.graph), with_guards if args.of == "guards" else with_kernels
    runs = list(product(args.models, args.modes, range(args.rounds)))
    times: Times = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "parts")
        pyg_sar.partition(data, args.workers, folder)
        for model, mode, _ in tqdm(runs):
            for key, seconds in measure(args, folder, model, mode).items():
                times.setdefault((model, mode), {}).setdefault(key, []).extend(seconds)
    lines = [heading(args, data.num_nodes, data.num_edges), "", *table(times, args.of)]
    print(write(args.out, f"{'guards' if args.of == 'guards' else 'epoch'}-cpu.md", lines))


def heading(args: argparse.Namespace, nodes: int, edges: int) -> str:
    return (
        f"Seconds of a training epoch of `examples/train.py` on {args.workers} workers with {args.threads} thread(s) "
        f"each and {args.layers} layers, with the {WHAT[args.of]} and without them: medians (and least to most) over "
        f"{args.rounds} runs of {args.epochs} epochs of both kinds, the first of each left out. {args.graph}: "
        f"{nodes:,} nodes, {edges:,} edges, float32; {processor()}, {os.cpu_count()} cores; torch "
        f"{torch.__version__}. Made by `benchmarks/epoch.py`."
    )


def table(times: Times, of: str) -> list[str]:
    kinds = list(next(iter(times.values())))
    columns = ["model", "mode", *(f"{of} {kind}" for kind in kinds), "off / on" if of == "kernels" else "on / off"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (model, mode), found in times.items():
        median = {kind: statistics.median(seconds) for kind, seconds in found.items()}
        cells = [f"{median[k]:.4f} ({min(found[k]):.4f} to {max(found[k]):.4f})" for k in kinds]
        if of == "kernels":
            ratio = f"{median['off'] / median['on']:.2f}"
        else:  # of neighbouring epochs
            ratio = f"{statistics.median(a / b for a, b in zip(found['on'], found['off'], strict=True)):.4f}"
        lines.append(f"| {model} | {mode} | {' | '.join(cells)} | {ratio} |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", choices=list(WHAT), default="kernels")
    parser.add_argument("--graph", default="Community")
    parser.add_argument("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"])
    parser.add_argument("--modes", nargs="+", type=int, choices=[1, 2, 3], default=[1, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=5, help="of each run; the first does not count")
    parser.add_argument("--rounds", type=int, default=3, help="runs with kernels, and as many without; or with guards")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, help="default: 256 for sage, 128 (a head) for gat")
    parser.add_argument("--out", default="docs")
    return parser.parse_args()


if __name__ == "__main__":
    worker(sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main(parse())
