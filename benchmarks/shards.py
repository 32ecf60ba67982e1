"""Time and memory of a training step in one process whose graph is in several shards, and of PyG.

    python benchmarks/shards.py --device cuda --out docs/results    # 2.4M nodes, 62M edges, as ogbn-products has
    python benchmarks/shards.py --nodes 20000 --edges 1000000 --out /tmp

Three layers of GraphSAGE or GAT, forward, backward and one step of Adam. Implementations take turns; each has the whole
device while it runs. On a GPU there are two more ways to run a step on one shard: captured in a CUDA graph, and with
the model compiled, whose layers are what the compiler leaves as they are. Writes ``shards-cpu.md`` or
``shards-cuda.md``.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.device import power_law_graph
from harness.layer_jobs import clock
from harness.process_memory import peak, settle
from harness.report import write
from layers import machine
from torch import Tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import GNN

HIDDEN = {"sage": 256, "gat": 128}
FEATURES, CLASSES = 100, 47
CAPTURED, COMPILED = "captured", "compiled"
Run = tuple[str, int, str]  # model, shards, and the way to run a step


def make_data(args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Return features, labels and edges; on a GPU they are made there."""
    if args.device == "cuda":
        x = torch.randn(args.nodes, FEATURES, device="cuda")
        return x, x[:, :CLASSES].argmax(1), power_law_graph(args.nodes, args.edges, loops=False)
    data = community_graph(args.nodes, args.edges, num_features=FEATURES, num_classes=CLASSES)
    return data.x, data.y, data.edge_index


def make_step(args: argparse.Namespace, data: tuple[Tensor, ...], run: Run) -> Callable[[], float]:
    """Return a training step on so many shards, or by PyG if there are none; it returns the loss."""
    model, parts, way = run
    x, y, edge_index = data
    torch.manual_seed(0)
    nn = pyg_sar.nn if parts else torch_geometric.nn
    net = GNN(nn, model, FEATURES, HIDDEN[model], CLASSES, args.heads, 0.0, 0.0).to(args.device)
    graph = pyg_sar.shard(edge_index, x.size(0), parts) if parts else edge_index
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, capturable=way == CAPTURED)
    called = torch.compile(net) if way == COMPILED else net

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(called(x, graph), y)
        loss.backward()
        optimizer.step()
        return loss

    whole = captured(step) if way == CAPTURED else step
    return lambda: whole().item()


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return what runs a step again from a CUDA graph; it has taken two steps before, and one is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()  # of the other stream
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def again() -> Tensor:
        graph.replay()
        return loss

    return again


def measure(args: argparse.Namespace, data: tuple[Tensor, ...], run: Run) -> tuple[list[float], list[float], float]:
    """Return losses, the seconds of every step but the first, and the peak in MiB above what was there before."""
    before = settle(args.device)
    step = make_step(args, data, run)
    losses, times = [step()], []  # the first makes what is made once
    for _ in range(args.steps):
        start = clock(args.device)
        losses.append(step())
        times.append((clock(args.device) - start) / 1e3)
    return losses, times, peak(args.device) - before


def main(args: argparse.Namespace) -> None:
    tensors = make_data(args)
    ways = [(parts, "") for parts in (*args.parts, 0)] + [(1, way) for way in args.ways]
    runs = [(model, *way) for model in args.models for way in ways]
    found: dict[Run, list] = {run: [[], [], 0.0] for run in runs}
    full: set[Run] = set()  # what ran out of memory
    for _ in range(args.rounds):
        for run in tqdm(runs):
            if run in full:
                continue
            try:
                losses, times, memory = measure(args, tensors, run)
            except torch.cuda.OutOfMemoryError:
                full.add(run)
            else:
                found[run] = [losses, [*found[run][1], *times], max(memory, found[run][2])]
            text = write(args.out, f"shards-{args.device}.md", table(args, found, full, tensors[2].size(1)))
    print(text)


def table(args: argparse.Namespace, found: dict[Run, list], full: set[Run], edges: int) -> list[str]:
    """Return what was found until now."""
    columns = ["model", "implementation", "shards", "seconds a step (min to max)", "times one shard", "peak MiB"]
    columns.append("last loss")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for run in (run for run, (losses, *_) in found.items() if losses or run in full):
        model, parts, way = run
        name, shards = (f"pyg_sar{way and ', ' + way}", str(parts)) if parts else ("PyG", "")
        cells = [model, name, shards, "out of memory", "", "", ""]
        if run not in full:
            losses, times, memory = found[run]
            middle, one = statistics.median(times), (model, args.parts[0], "")
            times_one = "" if one in full else f"{middle / statistics.median(found[one][1]):.2f}"
            cells[3:] = [f"{middle:.3f} ({min(times):.3f} to {max(times):.3f})", times_one, f"{memory:.0f}"]
            cells.append(f"{losses[-1]:.5f}")
        lines.append(f"| {' | '.join(cells)} |")
    head = (
        f"A training step of three layers (hidden {HIDDEN['sage']} for sage, {args.heads} x {HIDDEN['gat']} for gat) "
        f"in one process on {machine(args)}: {args.nodes:,} nodes, {edges:,} edges, {FEATURES} features; "
        f"torch {torch.__version__}. Made by `benchmarks/shards.py`."
    )
    return [head, "", *lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="*", default=[], choices=[CAPTURED, COMPILED])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2_400_000)
    parser.add_argument("--edges", type=int, default=62_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
