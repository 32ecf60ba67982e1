"""A graph that METIS has no room for, end to end: generate, partition by FENNEL, load, train.

    python benchmarks/large.py --out docs/results
    python benchmarks/large.py --out /tmp --nodes 100000 --edges 1000000

Every step runs in fresh processes, and the graph is on disk between them. Peaks are resident memory from the start of
the process on, libraries included; pages of a partition's files, which are mapped, count as long as the system leaves
them in memory. Tensors of 128 KiB and more are given back to the system when they are freed. Writes ``large.md``.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch
from harness.launch import GNN, answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, resident, settle
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph, dataset

# GraphSAGE with 16 hidden features, GAT with 4 heads of 4: rows of 16 floats, too, also those of the last layer. With
# twice as many, GAT on 10M nodes does not fit 24 GB.
FEATURES, CLASSES, HIDDEN, HEADS = 16, 4, {"sage": 16, "gat": 4}, 4


def generate(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    data = community_graph(args.nodes, args.edges, FEATURES, CLASSES)
    torch.save(data.to_dict(), Path(args.folder) / "graph.pt")
    answer({"seconds": time.perf_counter() - start, "peak": resident("VmHWM")})


def partition(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    data = dataset(str(Path(args.folder) / "graph.pt"))
    report = pyg_sar.partition(data, args.workers, Path(args.folder) / "parts", method="fennel", order="id")
    keys = ("cut_fraction", "boundary_rows", "balance", "bytes")
    found = {key: report[key] for key in keys}
    answer({"seconds": time.perf_counter() - start, "peak": resident("VmHWM"), **found})


def train(args: argparse.Namespace) -> None:
    from train import train as epoch

    with pyg_sar.process_group() as rank:
        torch.manual_seed(0)
        start = time.perf_counter()
        data = pyg_sar.load(Path(args.folder) / "parts")
        load = {"seconds": time.perf_counter() - start, "peak": resident("VmHWM")}
        settle()
        (kind,) = args.models
        model = GNN(pyg_sar.nn, kind, FEATURES, HIDDEN[kind], CLASSES, HEADS, dropout=0.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seconds, losses = [], []
        for _ in range(args.epochs):
            start = time.perf_counter()
            with pyg_sar.record_traffic(data.edge_index) as layers:
                losses.append(epoch(model, data, optimizer))
            seconds.append(time.perf_counter() - start)
        received = sum(t.forward_received + t.backward_received for t in layers) / 2**20
        memory = {"peak": resident("VmHWM"), "mapped": resident("RssFile")}
        answer({"rank": rank, "load": load, "seconds": seconds, "losses": losses, "received": received, **memory})


STEPS = {"generate": generate, "partition": partition, "train": train}


def run(args: argparse.Namespace, folder: str, step: str, model: str = "sage") -> list[dict]:
    options = ["--step", step, "--folder", folder, "--models", model, "--workers", str(args.workers)]
    options += ["--nodes", str(args.nodes), "--edges", str(args.edges), "--epochs", str(args.epochs)]
    alone = step != "train"
    threads = (os.cpu_count() or 1) if alone else 1
    return launch(__file__, 0 if alone else args.workers, options, threads, **RETURN_FREED_MEMORY)


def main(args: argparse.Namespace) -> None:
    rows = []
    with (
        tempfile.TemporaryDirectory(dir=args.scratch) as folder,
        tqdm(total=2 + len(args.models), desc="generate") as bar,
    ):
        (made,) = run(args, folder, "generate")
        rows.append(["generate and save", f"{made['seconds']:.0f}", f"{made['peak']:,.0f}", "", ""])
        bar.update()
        bar.set_description("partition")
        (report,) = run(args, folder, "partition")
        rows.append(["read, partition and write", f"{report['seconds']:.0f}", f"{report['peak']:,.0f}", "", ""])
        for model in args.models:
            bar.update()
            bar.set_description(model)
            ranks = sorted(run(args, folder, "train", model), key=lambda it: it["rank"])
            if model == args.models[0]:
                loads = [it["load"] for it in ranks]
                seconds = max(it["seconds"] for it in loads)
                rows.append(["load", f"{seconds:.0f}", each(it["peak"] for it in loads), "", ""])
            seconds = ", ".join(f"{max(times):.0f}" for times in zip(*(it["seconds"] for it in ranks), strict=True))
            peaks = f"{each(it['peak'] for it in ranks)} (mapped: {each(it['mapped'] for it in ranks)})"
            losses = ", ".join(f"{loss:.3f}" for loss in ranks[0]["losses"])
            rows.append([f"train {model}", seconds, peaks, each(it["received"] for it in ranks), losses])
        bar.update()
    lines = [
        heading(args, report),
        "",
        "| step | seconds | peak MiB | MiB received in an epoch | loss |",
        "|---" * 5 + "|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    print(write(args.out, "large.md", lines))


def each(numbers: object) -> str:
    """One number for each worker."""
    return " + ".join(f"{number:,.0f}" for number in numbers)


def heading(args: argparse.Namespace, report: dict) -> str:
    balance = ", ".join(f"{name} {value:.2f}" for name, value in report["balance"].items())
    return (
        f"A generated graph of {args.nodes:,} nodes and {args.edges:,} edges (`edge_index`: "
        f"{args.edges * 16 / 2**20:,.0f} MiB, features: {args.nodes * FEATURES * 4 / 2**20:,.0f} MiB) from start to "
        f"end, each step in fresh processes: {args.workers} parts by FENNEL, order `id`, "
        f"{sum(report['bytes']) / 2**20:,.0f} MiB on disk; {report['cut_fraction']:.1%} of the edges cut, "
        f"{report['boundary_rows']:,} boundary rows, balance (largest over mean): {balance}. Then {args.epochs} epochs "
        f"of 3-layer models on {args.workers} workers of 1 thread, mode 1: GraphSAGE ({HIDDEN['sage']} hidden) and GAT "
        f"({HEADS} heads of {HIDDEN['gat']}), {FEATURES} features, {CLASSES} classes, batch normalisation, Adam, "
        f"float32. *Peak*: resident memory of each process, libraries included; *mapped*: pages of files in it after "
        f"the last epoch, which the system can take back. {processor()}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}. Made by `benchmarks/large.py`."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=10_000_000)
    parser.add_argument("--edges", type=int, default=100_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--scratch", help="where the graph is kept meanwhile; it needs 6 GB of disk")
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    STEPS[arguments.step](arguments) if arguments.worker else main(arguments)
