"""Time of an epoch of ``examples/train.py`` with the compiled kernels and without them.

    python benchmarks/epoch.py --out docs

Runs with and without kernels (``PYG_SAR_KERNELS=0``) take turns, so that slow minutes of the machine hit both alike. An
epoch takes as long as its slowest worker; the first of a run, which makes what is made once, does not count. Writes
``epoch-cpu.md``.
"""

import argparse
import os
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
from launch import answer, launch
from layers import processor
from tqdm import tqdm

import pyg_sar
from pyg_sar.distributed.datasets import dataset

KERNELS = {"on": "1", "off": "0"}
Times = dict[tuple[str, int], dict[str, list[float]]]  # seconds by model and mode, with kernels on and off


def worker(options: list[str]) -> None:
    import train  # workers alone have the examples on their path

    with pyg_sar.process_group() as rank:
        answer(train.main(train.parser.parse_args(options), rank))


def epochs(args: argparse.Namespace, folder: str, model: str, mode: int, kernels: str) -> list[float]:
    """Return the seconds of every epoch of one run but the first."""
    options = [folder, "--model", model, "--mode", str(mode), "--epochs", str(args.epochs)]
    options += ["--hidden", str(args.hidden)] if args.hidden else []
    ranks = launch(__file__, args.workers, options, threads=args.threads, PYG_SAR_KERNELS=KERNELS[kernels])
    return [max(times) for times in zip(*ranks, strict=True)][1:]


def main(args: argparse.Namespace) -> None:
    data = dataset(args.graph)
    runs = list(product(args.models, args.modes, range(args.rounds), KERNELS))
    times: Times = {(model, mode): {kernels: [] for kernels in KERNELS} for model, mode, _, _ in runs}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "parts")
        pyg_sar.partition(data, args.workers, folder)
        for model, mode, _, kernels in tqdm(runs):
            times[model, mode][kernels] += epochs(args, folder, model, mode, kernels)
    text = "\n".join([heading(args, data.num_nodes, data.num_edges), "", *table(times)])
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "epoch-cpu.md").write_text(text + "\n")
    print(text)


def heading(args: argparse.Namespace, nodes: int, edges: int) -> str:
    return (
        f"Seconds of a training epoch of `examples/train.py` on {args.workers} workers with {args.threads} thread(s) "
        f"each, with the compiled kernels and without them: medians (and least to most) over {args.rounds} alternating "
        f"runs of {args.epochs} epochs, the first of each left out. {args.graph}: {nodes:,} nodes, {edges:,} edges, "
        f"float32; {processor()}, {os.cpu_count()} cores; torch {torch.__version__}. Made by `benchmarks/epoch.py`."
    )


def table(times: Times) -> list[str]:
    lines = ["| model | mode | kernels on | kernels off | off / on |", "|---|---|---|---|---|"]
    for (model, mode), found in times.items():
        median = {kernels: statistics.median(seconds) for kernels, seconds in found.items()}
        cells = [f"{median[k]:.3f} ({min(found[k]):.3f} to {max(found[k]):.3f})" for k in KERNELS]
        lines.append(f"| {model} | {mode} | {' | '.join(cells)} | {median['off'] / median['on']:.2f} |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", default="Community")
    parser.add_argument("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"])
    parser.add_argument("--modes", nargs="+", type=int, choices=[1, 2, 3], default=[1, 3])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--epochs", type=int, default=5, help="of each run; the first does not count")
    parser.add_argument("--rounds", type=int, default=3, help="runs with kernels, and as many without")
    parser.add_argument("--hidden", type=int, help="default: 256 for sage, 128 (a head) for gat")
    parser.add_argument("--out", default="docs")
    return parser.parse_args()


if __name__ == "__main__":
    worker(sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main(parse())
