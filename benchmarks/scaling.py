"""Memory, traffic and time of a training step of the paper's 3-layer models, against the number of workers.

    python benchmarks/scaling.py --out docs/results
    python benchmarks/scaling.py --out /tmp --models sage --workers 2 4 --modes 1 --method random --no-peer

For every model, mode and number of workers it measures in each worker: the peak of resident memory during training
steps above what the process held before them (libraries, graph, features, model, optimizer), the bytes that travel, the
seconds of a step, and those of them that are spent waiting for messages; of memory and times it takes the largest
worker. Beside the peak stands what :func:`pyg_sar.plan` predicts from the counts of the partition alone. The share of
communication that hides behind computation is one minus waiting time by the time that the same messages take when
nothing is computed. Memory is measured in processes that give tensors back to the system when they are freed, or what
the C library keeps would count, too; times are measured in others. Workers beyond the cores are there for memory and
traffic only and are not timed. Writes ``scaling-METHOD.md`` and ``scaling-METHOD.png``.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn
from harness.launch import GNN, answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, available, resident, settle
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar import planner
from pyg_sar.data.datasets import community_graph
from pyg_sar.distributed.traffic import Traffic
from pyg_sar.sources import LocalGrads

MODES = {1: "rematerialise", 2: "keep", 3: "one-shot"}
NAMES = {"sage": "GraphSAGE", "gat": "GAT", "rgcn": "R-GCN"}
FEATURES, CLASSES, RELATIONS = 100, 47, 8


@dataclass
class Found:
    """What was measured of one configuration: MiB, and seconds of a step."""

    peak: float
    received: float
    step: float = 0.0
    waited: float = 0.0
    alone: float = 0.0
    planned: float = 0.0


def graph(args: argparse.Namespace) -> Any:
    data = community_graph(args.nodes, args.edges, FEATURES, CLASSES)
    data.edge_type = torch.randint(RELATIONS, (data.num_edges,), generator=torch.Generator().manual_seed(0))
    return data


def worker(args: argparse.Namespace) -> None:
    with pyg_sar.process_group():
        torch.manual_seed(0)
        if args.folder:
            nn, data = pyg_sar.nn, pyg_sar.load(args.folder, remat=args.mode == 1, prefetch=args.prefetch)
            data.edge_index = data.edge_index.merge() if args.mode == 3 else data.edge_index
        else:
            limit = int(0.9 * available() * 2**20)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # beyond which other processes would end, too
            nn, data = torch_geometric.nn, graph(args)
        model, optimizer = prepare(nn, *args.models, data)
        before, steps, layers = settle(), [], []
        for _ in range(args.steps):
            start = time.perf_counter()
            if args.folder:
                with pyg_sar.record_traffic(data.edge_index) as layers:
                    step(model, optimizer, data)
            else:
                step(model, optimizer, data)
            steps.append(time.perf_counter() - start)
        peak = resident("VmHWM") - before
        received = sum(t.forward_received + t.backward_received for t in layers)
        waited = sum(t.forward_wait + t.backward_wait for t in layers)
        alone = replay(data.edge_index.graph, layers) if args.folder and args.mode != 3 else 0.0
        answer([peak, received / 2**20, statistics.median(steps), waited, alone])


def network(nn: ModuleType, kind: str) -> torch.nn.Module:
    """Return the model."""
    hidden = 128 if kind == "gat" else 256  # of each of 4 heads
    return GNN(nn, kind, FEATURES, hidden, CLASSES, dropout=0.0, relations=RELATIONS)


def prepare(nn: ModuleType, kind: str, data: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after a first step."""
    model = network(nn, kind)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer, data)  # makes what is made once: transposed blocks, self-loops, the optimizer's state
    model.zero_grad()
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    optimizer.zero_grad()
    extra = [data.edge_type] if isinstance(model.convs[0], torch_geometric.nn.RGCNConv) else []
    out = model(data.x, data.edge_index, *extra)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
    pyg_sar.global_mean(loss).backward()
    pyg_sar.sum_gradients(model)
    optimizer.step()


def replay(shares: Any, layers: list[Any]) -> float:
    """Return the seconds that the messages of a step take when nothing is computed between them."""
    exchange, num_halo = shares.exchange, shares.exchange.routes.num_halo
    dist.barrier()  # waiting for a worker that starts later is not what messages take
    if num_halo == 0:
        return 0.0

    silent, start = Traffic().forward, time.perf_counter()
    for t in layers:
        x = torch.zeros(shares.num_src, t.forward_received // num_halo // 4)
        for _ in range(2 if t.case == 2 and shares.remat else 1):
            deque(exchange.pull([x], exchange.order(1), silent), maxlen=0)
        if t.backward_received:
            sink = exchange.sink(silent, LocalGrads((), [slice(None)]))
            for q in exchange.order(1, True, False)[0]:
                sink.push(q, x.new_zeros(shares.blocks[q].num_src, x.size(1)))
            sink.close()
    return time.perf_counter() - start


def measure(args: argparse.Namespace, model: str, workers: int, mode: int, folder: str | None) -> Found:
    """Run a configuration; take the mean of the bytes and the largest worker's of the rest."""
    options = ["--models", model, "--mode", str(mode), "--prefetch", str(args.prefetch)]
    options += ["--nodes", str(args.nodes), "--edges", str(args.edges), *(["--folder", folder] if folder else [])]
    rows = launch(__file__, workers, [*options, "--steps", "2"], **RETURN_FREED_MEMORY)
    peak, received, *_ = zip(*rows, strict=True)
    found = Found(max(peak), statistics.mean(received))
    if timed(args, workers):
        rows = launch(__file__, workers, [*options, "--steps", str(args.steps)])
        found.step, found.waited, found.alone = (max(column) for column in list(zip(*rows, strict=True))[2:])
    if folder:
        share = planner.largest(planner.from_partition(folder))
        relations = RELATIONS if model == "rgcn" else 0
        options = {"modes": [mode], "prefetch": args.prefetch, "num_relations": relations}
        (need,) = pyg_sar.plan(lambda: network(pyg_sar.nn, model), share, FEATURES, **options)
        found.planned = need.step / 2**20
    return found


def peer(args: argparse.Namespace, model: str) -> Found | None:
    """Measure PyG in one process; return nothing if that needs more memory than there is."""
    try:
        return measure(args, model, 0, 0, None)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return None


def timed(args: argparse.Namespace, workers: int) -> bool:
    """Whether times mean something: every worker has a core."""
    return args.times and workers <= (os.cpu_count() or 1)


def main(args: argparse.Namespace) -> None:
    found: dict[tuple[str, int, int], Found] = {}
    peers: dict[str, Found | None] = {}
    runs = list(product(args.workers, args.models, args.modes))
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(runs) + len(args.models) * args.peer) as bar:
        data, folders = graph(args), {}
        for workers in args.workers:
            folders[workers] = str(Path(scratch) / str(workers))
            pyg_sar.partition(data, workers, folders[workers], method=args.method)
        del data
        for workers, model, mode in runs:
            bar.set_description(f"{model}, mode {mode}, {workers} workers")
            found[model, mode, workers] = measure(args, model, workers, mode, folders[workers])
            bar.update()
            text = report(args, found, peers)
        for model in args.models if args.peer else []:
            bar.set_description(f"{model}, PyG")
            peers[model] = peer(args, model)
            bar.update()
            text = report(args, found, peers)
    print(text)


def report(args: argparse.Namespace, found: dict[tuple[str, int, int], Found], peers: dict[str, Found | None]) -> str:
    """Write table and figure; return the table."""
    text = write(args.out, f"scaling-{args.method}.md", [heading(args), "", *table(args, found, peers)])
    plot(Path(args.out) / f"scaling-{args.method}.png", found, peers)
    return text


def heading(args: argparse.Namespace) -> str:
    return (
        f"Training steps of 3-layer models (GraphSAGE and R-GCN with {RELATIONS} relations: 256 hidden; GAT: 4 heads "
        f"of 128) with batch normalisation and Adam; generated graph of {args.nodes:,} nodes and {args.edges:,} edges, "
        f"100 features, 47 classes, parts by {args.method}; float32, 1 thread a worker, prefetch {args.prefetch}; "
        f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}. *Peak*: resident memory above the loaded "
        "state, of the largest worker; *planned*: by `pyg_sar.plan`. *Step*: median; *waiting*: for messages; "
        "*hidden*: one minus that by the time of the same messages alone. Times of more workers than cores mean "
        "nothing and are left out. Made by `benchmarks/scaling.py`."
    )


def table(
    args: argparse.Namespace, found: dict[tuple[str, int, int], Found], peers: dict[str, Found | None]
) -> list[str]:
    columns = ["model", "mode", "workers", "peak MiB", "planned", "x workers, by that of 2", "MiB received by a worker"]
    columns += ["step s", "waiting s", "messages alone s", "hidden"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (model, mode, workers), it in found.items():
        pair = found.get((model, mode, 2))
        growth = "" if pair is None else f"{it.peak * workers / (2 * pair.peak):.2f}"
        cells = [model, f"{mode} {MODES[mode]}", str(workers), f"{it.peak:.0f}", f"{it.planned:.0f}", growth]
        cells += [f"{it.received:.1f}"]
        cells += [f"{it.step:.2f}", f"{it.waited:.2f}", f"{it.alone:.2f}"] if timed(args, workers) else [""] * 3
        cells.append(f"{100 * (1 - it.waited / it.alone):.0f}%" if it.alone > 0 else "")
        lines.append(f"| {' | '.join(cells)} |")
    for model, it in peers.items():
        took = ("more than there is", "") if it is None else (f"{it.peak:.0f}", f"{it.step:.2f}")
        lines.append(f"| {model} | PyG | one process | {took[0]} | | | | {took[1]} | | | |")
    return lines


def plot(path: Path, found: dict[tuple[str, int, int], Found], peers: dict[str, Found | None]) -> None:
    """Draw memory and traffic of each model against the number of workers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator

    models = list(dict.fromkeys(model for model, _, _ in found))
    figure, grid = plt.subplots(2, len(models), figsize=(4 * len(models), 7), squeeze=False)
    for (memory, traffic), model in zip(grid.T, models, strict=True):
        counts = sorted({workers for name, _, workers in found if name == model})
        for mode, name in MODES.items():
            lines = [(w, found[model, mode, w]) for w in counts if (model, mode, w) in found]
            if not lines:
                continue
            memory.plot([w for w, _ in lines], [it.peak for _, it in lines], "o-", label=f"mode {mode}: {name}")
            traffic.plot([w for w, _ in lines], [it.received for _, it in lines], "o-", label=f"mode {mode}: {name}")
        one = max(it.peak for (name, _, workers), it in found.items() if (name, workers) == (model, counts[0]))
        memory.plot(counts, [one * counts[0] / w for w in counts], "--", color="grey", label="1 / workers")
        if (it := peers.get(model)) is not None:
            memory.axhline(it.peak, linestyle=":", color="black", label="PyG in one process")
        memory.set(xscale="log", yscale="log", title=NAMES[model], ylabel="peak MiB per worker")
        memory.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        memory.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        traffic.set(xscale="log", xlabel="workers", ylabel="MiB received by a worker in a step")
        for axes in (memory, traffic):
            axes.set(xticks=counts, xticklabels=counts)
            axes.minorticks_off()
        memory.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--modes", nargs="+", type=int, choices=[1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--method", choices=["metis", "random", "contiguous"], default="metis")
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="docs")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave out PyG in one process")
    parser.add_argument("--no-times", dest="times", action="store_false", help="measure memory and traffic alone")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--mode", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    worker(arguments) if arguments.worker else main(arguments)
