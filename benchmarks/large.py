"""A graph that METIS has no room for, end to end: generate, partition by FENNEL, load, train.

    python benchmarks/large.py --out docs/results
    python benchmarks/large.py --out /tmp --nodes 100000 --edges 1000000
    python benchmarks/large.py --out docs/results --home /scratch --limit 6

With ``--home`` one worker trains GraphSAGE with rows in files, of 100 features and 128 hidden, in a process that the
system gives no more than so many GiB of memory beside the mapped parts (``RLIMIT_DATA``; homes do not count), where the
rows take more than the machine has. A graph of a hundredth of the size is trained before, so and in memory without a
limit, and the losses must be the same. Writes ``larger.md``.

Every step runs in fresh processes, and the graph is on disk between them. Peaks are resident memory from the start of
the process on, libraries included; pages of a partition's files, which are mapped, count as long as the system leaves
them in memory. Tensors of 128 KiB and more are given back to the system when they are freed. Writes ``large.md``.
"""

import argparse
import copy
import os
import resource
import tempfile
import time
from pathlib import Path

import torch
from harness.launch import GNN, answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, entry, resident, settle
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph, dataset

# GraphSAGE with 16 hidden features, GAT with 4 heads of 4: rows of 16 floats, too, also those of the last layer. With
# twice as many, GAT on 10M nodes does not fit 24 GB.
FEATURES, CLASSES, HIDDEN, HEADS = 16, 4, {"sage": 16, "gat": 4}, 4
AT_HOME = {"features": 100, "classes": 47, "hidden": 128}
SLACK = 2**28  # for what Python and the allocator take besides tensors


def generate(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    data = community_graph(args.nodes, args.edges, args.features, args.classes)
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
        model = GNN(pyg_sar.nn, kind, args.features, args.hidden or HIDDEN[kind], args.classes, HEADS, dropout=0.0)
        chunks, home = 1, None
        if args.home:
            torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # makes threads
            limit, held = int(args.limit * 2**30), int(entry("/proc/self/status", "VmData") * 2**20)
            resource.setrlimit(resource.RLIMIT_DATA, (held + limit, held + limit))
            budget = limit - SLACK
            many = {"chunks": args.chunks} if args.chunks else {"budget": budget, "model": model}
            data = pyg_sar.offload(data, **many, home=args.home)
            chunks, home = len(data.x.place.ranges), data.x.place.home
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seconds, losses = [], []
        for _ in range(args.epochs):
            start = time.perf_counter()
            with pyg_sar.record_traffic(data.edge_index) as layers:
                losses.append(epoch(model, data, optimizer))
            seconds.append(time.perf_counter() - start)
        received = sum(t.forward_received + t.backward_received for t in layers) / 2**20
        memory = {"peak": resident("VmHWM"), "mapped": resident("RssFile")}
        if home is not None:
            loaded, stored = (sum(getattr(t, f"{way}_{what}") for t in layers for way in ("forward", "backward"))
                              for what in ("loaded", "stored"))  # fmt: skip
            memory |= {"chunks": chunks, "home": home.peak, "loaded": loaded, "stored": stored}
        answer({"rank": rank, "load": load, "seconds": seconds, "losses": losses, "received": received, **memory})


STEPS = {"generate": generate, "partition": partition, "train": train}


def run(args: argparse.Namespace, folder: str, step: str, model: str = "sage") -> list[dict]:
    options = ["--step", step, "--folder", folder, "--models", model, "--workers", str(args.workers)]
    for name in ("nodes", "edges", "epochs", "features", "classes", "hidden", "limit", "chunks"):
        options += [f"--{name}", str(getattr(args, name))]
    options += ["--home", args.home] if args.home else []
    alone = step != "train"
    threads = (os.cpu_count() or 1) if alone or args.workers == 1 else 1
    return launch(__file__, 0 if alone else args.workers, options, threads, **RETURN_FREED_MEMORY)


def at_home(args: argparse.Namespace) -> None:
    """Train a small graph, in memory and at home, and the large one at home."""
    few = copy.copy(args)
    few.nodes, few.edges = args.nodes // 100, args.edges // 100
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        few.chunks = 16
        run(few, folder, "generate"), run(few, folder, "partition")
        (small,) = run(few, folder, "train")
        few.home = None
        (memory,) = run(few, folder, "train")
    differs = max(abs(a - b) / abs(b) for a, b in zip(small["losses"], memory["losses"], strict=True))
    assert differs <= 1e-5, (small["losses"], memory["losses"])
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder, tqdm(total=3, desc="generate") as bar:
        (made,) = run(args, folder, "generate")
        bar.update()
        bar.set_description("partition")
        (report,) = run(args, folder, "partition")
        bar.update()
        bar.set_description("train")
        (found,) = run(args, folder, "train")
    rate = disk_rate(args.home)
    seconds = ", ".join(f"{n:.0f}" for n in found["seconds"])
    losses = ", ".join(f"{n:.4f}" for n in found["losses"])
    sizes = [f"{found[k] / 2**30:.1f}" for k in ("home", "loaded", "stored")]
    lines = [
        f"A generated graph of {args.nodes:,} nodes and {args.edges:,} edges, {args.features} features, {args.classes} "
        f"classes; 3 layers of GraphSAGE, {args.hidden} hidden, batch normalisation, Adam, float32; one worker of "
        f"{os.cpu_count()} threads, rows in files by order of ids, memory beside the data limited to {args.limit:g} "
        f"GiB (`RLIMIT_DATA`). On a hundredth of the graph, by 16 chunks, the losses of {args.epochs} epochs differ "
        f"from those in memory by {differs:.0e} at most. Generated in {made['seconds']:.0f} s and partitioned in "
        f"{report['seconds']:.0f} s, without the limit. The disk writes {rate[0]:.0f} and reads {rate[1]:.0f} MiB/s, "
        f"without anything else. "
        f"{processor()}, torch {torch.__version__}. Made by `benchmarks/large.py --home`.",
        "",
        "| chunks | s an epoch | loss | GiB at home | loaded | stored by aggregations | peak resident, MiB | mapped |",
        "|---" * 8 + "|",
        f"| {found['chunks']} | {seconds} | {losses} | {' | '.join(sizes)} | {found['peak']:,.0f} "
        f"| {found['mapped']:,.0f} |",
    ]
    print(write(args.out, "larger.md", lines))


def disk_rate(folder: str, size: int = 2**32) -> tuple[float, float]:
    """Return MiB/s of writing a file to the disk, and of reading it from there."""
    block, rates = os.urandom(2**24), []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for reads in (False, True):
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            for _ in range(size // len(block)):
                file.read(len(block)) if reads else file.write(block)
            os.fsync(file.fileno())
            rates.append(size / 2**20 / (time.perf_counter() - start))
    return rates[0], rates[1]


def main(args: argparse.Namespace) -> None:
    if args.home:
        return at_home(args)
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
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--home", help="train one worker with rows in files of this folder")
    parser.add_argument("--limit", type=float, default=6, help="with --home: GiB of anonymous memory")
    parser.add_argument("--chunks", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--features", type=int)
    parser.add_argument("--classes", type=int)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--scratch", help="where the graph is kept meanwhile; it needs 6 GB of disk")
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.home and not arguments.worker:
        arguments.models, arguments.workers = ["sage"], 1
    for name, value in {"epochs": 2, **AT_HOME}.items() if arguments.home else ():
        setattr(arguments, name, getattr(arguments, name) or value)
    for name, value in {"epochs": 3, "features": FEATURES, "classes": CLASSES}.items():
        setattr(arguments, name, getattr(arguments, name) or value)
    STEPS[arguments.step](arguments) if arguments.worker else main(arguments)
