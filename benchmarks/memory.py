"""Peak memory per worker of one training step of the paper's 3-layer models, against the number of workers.

    python benchmarks/memory.py --out docs

For every mode and number of workers it measures, in each worker, the peak of resident memory during two training steps
above what the process held before them (libraries, graph, features, model), and takes the largest worker. Tensors of
1 MiB and more are given back to the system when they are freed (``MALLOC_MMAP_THRESHOLD_``), or what the C library
keeps would count, too. PyG in one process is the peer. Workers beyond the cores are there for memory and traffic only:
their times mean nothing, and none are printed. Writes ``memory-<model>.md`` and ``memory-<model>.png``.
"""

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from launch import answer, launch
from process_memory import resident, settle

import pyg_sar
from pyg_sar.distributed.datasets import dataset

WORKERS = (1, 2, 4, 8)
MODES = {1: "mode 1: rematerialise", 2: "mode 2: keep", 3: "mode 3: one shot"}


def step(model: torch.nn.Module, data: Any) -> None:
    model.zero_grad()
    out = model(data.x, data.edge_index)
    pyg_sar.global_mean(F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")).backward()
    pyg_sar.sum_gradients(model)


def worker(args: argparse.Namespace) -> None:
    from models import GNN  # workers alone have the examples on their path

    with pyg_sar.process_group() as rank:
        torch.manual_seed(0)
        if args.folder:
            nn, data = pyg_sar.nn, pyg_sar.load(args.folder, remat=args.mode == 1, prefetch=args.prefetch)
            data.edge_index = data.edge_index.merge() if args.mode == 3 else data.edge_index
        else:
            nn, data = torch_geometric.nn, dataset(args.graph)
        hidden = args.hidden or {"sage": 256, "gat": 128}[args.model]
        model = GNN(nn, args.model, data.x.size(1), hidden, data.num_classes)
        step(model, data)  # makes what is made once: gradients, transposed blocks, self-loops
        model.zero_grad()
        before = settle()
        traffic = []
        for _ in range(2):
            if args.folder:
                with pyg_sar.record_traffic(data.edge_index) as traffic:
                    step(model, data)
            else:
                step(model, data)
        received = sum(t.forward_received + t.backward_received for t in traffic)
        answer([rank, before, resident("VmHWM") - before, received / 2**20])


def measure(args: argparse.Namespace, workers: int, folder: str | None, mode: int = 1) -> tuple[float, float]:
    """Largest peak over the workers, and mean MiB received in a step."""
    options = ["--model", args.model, "--graph", args.graph, "--mode", str(mode), "--prefetch", str(args.prefetch)]
    options += ["--hidden", str(args.hidden)] if args.hidden else []
    options += ["--folder", folder] if folder else []
    rows = launch(__file__, workers, options, MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    print(workers, mode, rows, file=sys.stderr)
    return max(row[2] for row in rows), sum(row[3] for row in rows) / len(rows)


def main(args: argparse.Namespace) -> None:
    found: dict[tuple[int, int], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data = dataset(args.graph)
        for workers in WORKERS:
            folder = str(Path(scratch) / str(workers))
            pyg_sar.partition(data, workers, folder)
            for mode in MODES:
                found[workers, mode] = measure(args, workers, folder, mode)
        nodes, edges = data.num_nodes, data.num_edges
        del data
        gc.collect()
    peer = measure(args, 0, None)[0] if args.peer else None
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_table(args, out / f"memory-{args.model}.md", found, peer, nodes, edges)
    plot(args, out / f"memory-{args.model}.png", found, peer)


def write_table(args: argparse.Namespace, path: Path, found: dict, peer: float | None, nodes: int, edges: int) -> None:
    lines = [
        f"Peak MiB per worker in a training step of the 3-layer {args.model.upper()} (above loaded data and model), "
        f"and MiB received by a worker in a step; {nodes:,} nodes, {edges:,} edges, prefetch {args.prefetch}, float32.",
        "",
        "| workers | " + " | ".join(f"{name} | received" for name in MODES.values()) + " |",
        "|---" * (1 + 2 * len(MODES)) + "|",
    ]
    for workers in WORKERS:
        cells = [f"{found[workers, mode][0]:.0f} | {found[workers, mode][1]:.0f}" for mode in MODES]
        lines.append(f"| {workers} | " + " | ".join(cells) + " |")
    if peer is not None:
        lines += ["", f"PyG {torch_geometric.__version__} in one process: {peer:.0f} MiB."]
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def plot(args: argparse.Namespace, path: Path, found: dict, peer: float | None) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.5, 4))
    for mode, name in MODES.items():
        axes.plot(WORKERS, [found[w, mode][0] for w in WORKERS], "o-", label=name)
    first = found[1, 1][0]
    axes.plot(WORKERS, [first / w for w in WORKERS], "k:", label="1 / workers")
    if peer is not None:
        axes.plot([1], [peer], "k*", markersize=10, label="PyG, one process")
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="peak MiB per worker", xticks=WORKERS,
             xticklabels=WORKERS, title=f"3-layer {args.model.upper()}, one training step")  # fmt: skip
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["sage", "gat"], default="gat")
    parser.add_argument("--graph", default="Community")
    parser.add_argument("--hidden", type=int, help="default: 256 for sage, 128 (a head) for gat")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--out", default="docs")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out PyG, which needs about 15 GB")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--mode", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker(arguments) if arguments.worker else main(arguments)
