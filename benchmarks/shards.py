"""Time and memory of a training step in one process whose graph is in several shards, and of PyG.

    python benchmarks/shards.py --device cuda --out docs/results    # 2.4M nodes, 62M edges, as ogbn-products has
    python benchmarks/shards.py --nodes 20000 --edges 1000000 --out /tmp

Three layers of GraphSAGE or GAT, forward, backward and one step of Adam. Implementations take turns; each has the whole
device while it runs. There are more ways to run a step on one shard: captured in a CUDA graph, and with the model
compiled, whose layers are what the compiler leaves as they are; and of PyG: GraphSAGE by its sparse matrix, and
mini-batches, drawn before the clock starts, whose epoch is as many of them as the labelled nodes make. Writes
``shards-cpu.md`` or ``shards-cuda.md``.
"""

import argparse
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.device import power_law_graph
from harness.layer_jobs import clock
from harness.mini_batches import Neighbors
from harness.process_memory import peak, settle
from harness.report import write
from layers import machine
from torch import Tensor
from torch_geometric.utils import to_torch_csr_tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import GNN

HIDDEN = {"sage": 256, "gat": 128}
FEATURES, CLASSES = 100, 47
CAPTURED, COMPILED, SPARSE, BATCHES = "captured", "compiled", "sparse matrix", "mini-batches"
BATCH, FANOUTS, DRAWN = 1024, [15, 10, 5], 10
Run = tuple[str, int, str]  # model, shards, and the way to run a step


def make_data(args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Return features, labels and edges; on a GPU they are made there."""
    if args.device == "cuda":
        x = torch.randn(args.nodes, FEATURES, device="cuda")
        return x, x[:, :CLASSES].argmax(1), power_law_graph(args.nodes, args.edges, loops=False)
    data = community_graph(args.nodes, args.edges, num_features=FEATURES, num_classes=CLASSES)
    return data.x, data.y, data.edge_index


def make_step(args: argparse.Namespace, data: tuple[Tensor, ...], run: Run) -> Callable[[], Tensor]:
    """Return a training step on so many shards, or by PyG if there are none; it returns the loss."""
    model, parts, way = run
    x, y, edge_index = data
    torch.manual_seed(0)
    nn = pyg_sar.nn if parts else torch_geometric.nn
    net = GNN(nn, model, FEATURES, HIDDEN[model], CLASSES, args.heads, 0.0, 0.0).to(args.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, capturable=way == CAPTURED)
    called = torch.compile(net) if way == COMPILED else net

    def step(x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(called(x, edge_index)[: y.numel()], y)
        loss.backward()
        optimizer.step()
        return loss

    if way == BATCHES:
        batches = itertools.cycle(draw(edge_index, x.size(0)))
        return lambda: by_batch(step, x, y, *next(batches))
    graph = pyg_sar.shard(edge_index, x.size(0), parts) if parts else edge_index
    if way == SPARSE:
        graph = to_torch_csr_tensor(edge_index.flip(0), size=(x.size(0), x.size(0)))
    return captured(lambda: step(x, graph, y)) if way == CAPTURED else lambda: step(x, graph, y)


def draw(edge_index: Tensor, num_nodes: int) -> list[tuple[Tensor, Tensor]]:
    """Return the nodes and edges of some mini-batches."""
    neighbors = Neighbors(edge_index, num_nodes, FANOUTS)
    order = torch.randperm(num_nodes, device=edge_index.device)
    return [neighbors.draw(batch) for batch in order.split(BATCH)[:DRAWN]]


def by_batch(step: Callable[..., Tensor], x: Tensor, y: Tensor, nodes: Tensor, edge_index: Tensor) -> Tensor:
    """Take a step on a mini-batch, whose features are still to be looked up."""
    return step(x[nodes], edge_index, y[nodes[:BATCH]])


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


class Found(NamedTuple):
    """Losses, the seconds of every epoch but the first, the peak in MiB above what was there before, and how often
    the host waits for the device in a step.
    """

    losses: list[float]
    seconds: list[float]
    memory: float
    waits: int


def measure(args: argparse.Namespace, data: tuple[Tensor, ...], run: Run) -> Found:
    before = settle(args.device)
    step = make_step(args, data, run)
    each = math.ceil(args.labelled * args.nodes / BATCH) if run[2] == BATCHES else 1
    losses, times = [step().item()], []  # the first makes what is made once
    for _ in range(args.steps):
        start = clock(args.device)
        losses.append(step().item())
        times.append(each * (clock(args.device) - start) / 1e3)
    memory = peak(args.device) - before
    return Found(losses, times, memory, waits(step) if args.device == "cuda" else 0)


def waits(step: Callable[[], object]) -> int:
    """Return how often a step has the host wait for the device."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in said)


def main(args: argparse.Namespace) -> None:
    tensors = make_data(args)
    ways = [(parts, "") for parts in (*args.parts, 0)] + [(int(way in (CAPTURED, COMPILED)), way) for way in args.ways]
    runs = [(model, *way) for model in args.models for way in ways if (model, way[1]) != ("gat", SPARSE)]
    found: dict[Run, Found | None] = {}  # None is what ran out of memory
    for _ in range(args.rounds):
        for run in tqdm(runs):
            last = found.get(run, Found([], [], 0.0, 0))
            if last is None:
                continue
            try:
                new = measure(args, tensors, run)
            except torch.cuda.OutOfMemoryError:
                found[run] = None
            else:
                found[run] = new._replace(seconds=last.seconds + new.seconds, memory=max(last.memory, new.memory))
            text = write(args.out, f"shards-{args.device}.md", table(args, found, tensors[2].size(1)))
    print(text)


def table(args: argparse.Namespace, found: dict[Run, Found | None], edges: int) -> list[str]:
    """Return what was found until now."""
    columns = ["model", "implementation", "shards", "seconds an epoch (min to max)", "times one shard", "peak MiB"]
    columns += ["synchronisations", "last loss"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (model, parts, way), it in found.items():
        name = f"{'pyg_sar' if parts else 'PyG'}{way and ', ' + way}"
        cells = [model, name, str(parts or ""), "out of memory", *[""] * 4]
        if it is not None:
            middle, one = statistics.median(it.seconds), found.get((model, args.parts[0], ""))
            cells[3:] = [f"{middle:.3f} ({min(it.seconds):.3f} to {max(it.seconds):.3f})",
                         f"{middle / statistics.median(one.seconds):.2f}" if one else "", f"{it.memory:.0f}",
                         f"{it.waits}" if args.device == "cuda" else "", f"{it.losses[-1]:.5f}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    where = torch.cuda.get_device_name() if args.device == "cuda" else machine(args)
    head = (
        f"A training step of three layers (hidden {HIDDEN['sage']} for sage, {args.heads} x {HIDDEN['gat']} for gat) "
        f"in one process on {where}: {args.nodes:,} nodes, {edges:,} edges, {FEATURES} features; "
        f"torch {torch.__version__}, PyG {torch_geometric.__version__}. An epoch is a step, but with mini-batches: "
        f"those of {BATCH} nodes and {FANOUTS} neighbors, for the {args.labelled:.0%} of all nodes that have labels. "
        "Made by `benchmarks/shards.py`."
    )
    return [head, "", *lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=list(HIDDEN), choices=list(HIDDEN))
    parser.add_argument("--parts", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="*", default=[], choices=[CAPTURED, COMPILED, SPARSE, BATCHES])
    parser.add_argument("--labelled", type=float, default=0.08, help="share of nodes, as in ogbn-products")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2_400_000)
    parser.add_argument("--edges", type=int, default=62_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
