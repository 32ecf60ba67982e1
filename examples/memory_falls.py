"""Draw the memory of a worker against the number of workers, in about a minute.

    python examples/memory_falls.py --dataset Community/20000/400000 --out runs/memory.png

Counted are all tensors that the worker that holds most holds at the peak of a training step of three layers. Dotted is
what a perfect cut would leave, a share of what one worker holds.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator
from models import GNN

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.distributed.group import gather_objects
from pyg_sar.live import Live

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="Community/20000/400000", help="as for 'pyg-sar partition'")
parser.add_argument("--root", default="data")
parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--out", default="memory.png", help="file .png, .svg or .pdf to draw")
parser.add_argument("--worker", choices=["sage", "gat"], help=argparse.SUPPRESS)


def count(args: argparse.Namespace, rank: int) -> None:
    """Train for a step as one of the workers; rank 0 prints the MiB of the one that holds most."""
    data = pyg_sar.load(args.dataset)
    before = data.x.nbytes + sum(data.edge_index.graph.memory().values())
    with Live() as live:
        model = GNN(pyg_sar.nn, args.worker, data.x.size(1), args.hidden, data.num_classes)
        pyg_sar.broadcast_parameters(model)
        out = model(data.x, data.edge_index)
        losses = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
        pyg_sar.global_mean(losses).backward()
        pyg_sar.sum_gradients(model)
    most = max(gather_objects(before + live.peak))
    if rank == 0:
        print(f"\nMiB {most / 2**20}")


def measure(folder: str, workers: int, model: str, hidden: int) -> float:
    """Return the MiB of the worker that holds most."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    own = [__file__, "--worker", model, "--dataset", folder, "--hidden", str(hidden)]
    told = subprocess.run([*launch, *own], check=True, stdout=subprocess.PIPE, text=True).stdout
    return next(float(line.split()[1]) for line in told.splitlines() if line.startswith("MiB "))


def draw(found: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Draw a line for each model."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, values in found.items():
        (line,) = axes.plot(args.workers, values, marker="o", label=name)
        ideal = [values[0] * args.workers[0] / n for n in args.workers]
        axes.plot(args.workers, ideal, color=line.get_color(), linestyle=":", label=f"{name}, a perfect cut")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="MiB of the worker that holds most")
    axes.set_xticks(args.workers, map(str, args.workers))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(f"A training step on {args.dataset}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out, dpi=150)


def main(args: argparse.Namespace) -> None:
    """Cut the graph for each number of workers, measure and draw."""
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    data = dataset(args.dataset, args.root)
    found: dict[str, list[float]] = {"sage": [], "gat": []}
    with tempfile.TemporaryDirectory() as scratch:
        for workers in args.workers:
            folder = f"{scratch}/{workers}"
            pyg_sar.partition(data, workers, folder)
            for name, values in found.items():
                values.append(measure(folder, workers, name, args.hidden))
                print(f"{workers} workers, {name}: {values[-1]:.1f} MiB", flush=True)
    draw(found, args)
    print(f"drawn to {args.out}")


if __name__ == "__main__":
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.worker:
        with pyg_sar.process_group() as own_rank:
            count(arguments, own_rank)
    else:
        main(arguments)
