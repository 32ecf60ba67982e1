"""Seconds and memory until a model is good: the whole graph by pyg_sar and PyG, and mini-batches of sampled neighbors.

    pip install --no-deps dgl==1.1.3 && pip install psutil requests    # whose sampler draws the mini-batches
    pip install --no-build-isolation torch-scatter torch-sparse        # that of PyG's NeighborLoader, built for an hour
    python benchmarks/time_to_accuracy.py --root data --runs /tmp/time.jsonl --out docs/results

All ways train the same model, GraphSAGE with batch normalisation, for the same seconds of training. PyG multiplies by a
sparse matrix, which is faster than messages. Evaluations, of the whole graph by pyg_sar in all ways, are not counted:
one after a step, once 10% more time has gone by than at the one before. Every way has one run with each learning rate;
the rate that reached the goal first (or, if none did, the best accuracy) is that of its other seeds. The goal is 99% of
the best validation accuracy that any way reached with any rate. ``runs`` keeps what was trained. Writes
``time-to-accuracy.md`` and ``.png``.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.deep import MASKS, first_split, graph, labels_as_features, partitions, there
from harness.launch import GNN, answer, asked, launch, words
from harness.process_memory import reset_peak, resident, settle
from harness.report import processor, write
from harness.runs import Runs, mean_and_spread
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import MaskLabel
from torch_geometric.utils import to_torch_csr_tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.edge_index import ShardedEdgeIndex


class Way(NamedTuple):
    """A way to train.

    Args:
        workers: 0 is one process of plain PyG.
        kind: What a step is.
    """

    workers: int
    kind: str = "plain"


WAYS = {
    "PyG": Way(0),
    "PyG, DGL's sampler": Way(0, "sampled"),
    "PyG, NeighborLoader": Way(0, "loader"),
    "1 worker": Way(1),
    "1 worker, cached features": Way(1, "cached"),
    "1 worker, message flow": Way(1, "flow"),
    "1 worker, 4 steps an epoch": Way(1, "steps"),
    "1 worker, sampled at first": Way(1, "warm"),
    "1 worker, the SAR paper's recipe": Way(1, "recipe"),
    "2 workers": Way(2),
    "2 workers, cached features": Way(2, "cached"),
    "2 workers, message flow": Way(2, "flow"),
    "2 workers, 4 steps an epoch": Way(2, "steps"),
    "2 workers, the SAR paper's recipe": Way(2, "recipe"),
}


class Task(NamedTuple):
    """A graph, and how long each run trains on it.

    Args:
        graph: Its name.
        seconds: Of training.
        labels: Nodes of each class that are trained on; 0: all of the split, of 48 to 60% of the nodes, for which there
            is no message-flow graph of all.
    """

    graph: str
    seconds: float
    labels: int = 0


TASKS = {
    "squirrel": Task("squirrel", 10),
    "tolokers": Task("tolokers", 10),
    "Computers": Task("Computers", 10),
    "Computers, 20 labels a class": Task("Computers", 10, 20),
    "Physics": Task("Physics", 20),
    "Physics, 20 labels a class": Task("Physics", 6, 20),
    "aclanth2021": Task("aclanth2021", 30),
    "1M nodes, 500 labels a class": Task("Community/1000000/10000000", 30, 500),
    "small": Task("Community/300/4000", 0.1),  # to see that the script runs
}
RATES = (0.003, 0.01, 0.03)
STEPS = 4  # label subsets of an epoch
WARM = 3  # epochs of sampled neighbors before those of message-flow graphs
BATCH, FANOUT = 512, 10
LAYERS = 2


class Net(torch.nn.Module):
    """GraphSAGE, which may be given labels as features."""

    def __init__(self, nn: Any, data: Any, hidden: int, labels: bool) -> None:
        super().__init__()
        self.gnn = GNN(nn, "sage", data.x.size(1), hidden, data.num_classes, layers=LAYERS)
        self.labels = labels_as_features(data) if labels else None

    def forward(self, x: Tensor, edges: Any, y: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        if self.labels is not None:
            x = self.labels(x, y, given)
        return self.gnn(x, edges)


def by_blocks(gnn: torch.nn.Module, x: Tensor, blocks: list[Any]) -> Tensor:
    """Run the layers on sampled blocks, whose first sources are their destinations."""
    for k, block in enumerate(blocks):
        edges = torch.stack(block.edges())
        x = gnn.convs[k]((x, x[: block.num_dst_nodes()]), edges)
        if k < len(blocks) - 1:
            x = F.dropout(gnn.norms[k](x).relu(), gnn.dropout, gnn.training)
    return x


def batches(data: Any) -> Callable[[], Iterator[tuple[Tensor, list[Any]]]]:
    """Return what draws an epoch of mini-batches: labelled nodes, and the blocks of each layer."""
    import dgl

    edges = data.edge_index.graph.coo() if isinstance(data.edge_index, ShardedEdgeIndex) else data.edge_index
    whole = dgl.graph(tuple(edges), num_nodes=data.num_nodes)
    whole.create_formats_()
    labelled = data.train_mask.nonzero().view(-1)

    def epoch() -> Iterator[tuple[Tensor, list[Any]]]:
        for seeds in labelled[torch.randperm(len(labelled))].split(BATCH):
            blocks, ends = [], seeds
            for _ in range(LAYERS):
                block = dgl.to_block(dgl.sampling.sample_neighbors(whole, ends, FANOUT), ends)
                ends = block.srcdata[dgl.NID]
                blocks.insert(0, block)
            yield ends, blocks

    return epoch


def flows(data: Any, steps: int) -> list[tuple[Tensor, Any]]:
    """Return disjoint masks of the labelled nodes, and the message-flow graphs that compute these."""
    place = torch.randperm(len(data.train_mask)) % steps
    masks = [data.train_mask & (place == k) for k in range(steps)]
    return [(mask, pyg_sar.message_flow_graphs(data.edge_index, mask, LAYERS)) for mask in masks]


def steps_of(kind: str, model: Net, data: Any) -> Callable[[], Iterator[tuple[Tensor, Tensor]]]:
    """Return what runs an epoch: outputs and labels of each of its steps."""
    x, y, edges, train = data.x, data.y, data.get("adj", data.edge_index), data.train_mask
    if kind == "cached":
        edges.cache_features(x)
    if kind == "warm":
        first, then, numbers = steps_of("sampled", model, data), steps_of("flow", model, data), itertools.count()
        return lambda: first() if next(numbers) < WARM else then()
    if kind == "sampled":
        epoch = batches(data)

        def sampled() -> Iterator[tuple[Tensor, Tensor]]:
            for ends, blocks in epoch():
                yield by_blocks(model.gnn, x[ends], blocks), y[blocks[-1].dstdata["_ID"]]

        return sampled
    if kind == "loader":
        graph = Data(x=x, y=y, edge_index=data.edge_index)
        loader = NeighborLoader(graph, [FANOUT] * LAYERS, input_nodes=train, batch_size=BATCH, shuffle=True)
        return lambda: ((model(one.x, one.edge_index)[: one.batch_size], one.y[: one.batch_size]) for one in loader)
    if kind in ("flow", "steps"):
        pairs = flows(data, STEPS if kind == "steps" else 1)
        parts = [(x[flow.node_rows], flow.edge_indices, y[mask]) for mask, flow in pairs]
        for rows, layers, _ in parts:
            layers[0].cache_features(rows)
        return lambda: ((model(rows, layers), labels) for rows, layers, labels in parts)
    if kind == "recipe":

        def masked() -> Iterator[tuple[Tensor, Tensor]]:
            given = MaskLabel.ratio_mask(train, 0.5)
            yield model(x, edges, y, given)[train & ~given], y[train & ~given]

        return masked
    return lambda: iter([(model(x, edges)[train], y[train])])


def steps_for_ever(epoch: Callable, kind: str, labelled: int) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield the steps of one epoch after the other: what share of it each is, outputs and labels."""
    for count in itertools.count():
        sampled = kind in ("sampled", "loader") or (kind == "warm" and count < WARM)
        length = -(-labelled // BATCH) if sampled else STEPS if kind == "steps" else 1
        for out, y in epoch():
            yield 1 / length, out, y


def fit(
    nn: Any, data: Any, args: argparse.Namespace, rank: int, seconds: float, rate: float, seed: int
) -> dict[str, Any]:
    """Train; return the seconds, validation and test accuracy at each evaluation, and what more memory training took at
    its peak.
    """
    kind, before = args.kind, settle()
    torch.manual_seed(seed)
    model = Net(nn, data, args.hidden, kind == "recipe")
    pyg_sar.broadcast_parameters(model)
    torch.manual_seed(1000 * seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    start = time.perf_counter()
    epoch = steps_of(kind, model, data)
    made = time.perf_counter() - start
    judge = Net(pyg_sar.nn, data, args.hidden, kind == "recipe").eval()
    smooth = pyg_sar.nn.CorrectAndSmooth(50, 0.9, 50, 0.8)
    spent = looked = peak = epochs = 0.0
    curve: list[list[float]] = []
    reset_peak()
    start = time.perf_counter()
    for share, out, y in steps_for_ever(epoch, kind, int(data.train_mask.sum())):
        if kind == "recipe":  # the rate falls by a cosine
            optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * min(looked / max(seconds, 1e-9), 1))) / 2
        optimizer.zero_grad()
        pyg_sar.global_mean(F.cross_entropy(out, y, reduction="none")).backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        spent, epochs = spent + time.perf_counter() - start, epochs + share
        peak = max(peak, resident("VmHWM"))
        (slowest,) = pyg_sar.distributed.collectives.global_max(torch.tensor([spent])).tolist()
        if slowest >= min(1.1 * looked, seconds):
            looked = slowest
            judge.load_state_dict(model.state_dict())
            with torch.no_grad():
                pred = judge(data.x, data.edge_index, data.y, data.train_mask).softmax(-1)
                if kind == "recipe":
                    pred = smooth(pred, data.y[data.train_mask], data.train_mask, data.edge_index)
            accuracies = [pyg_sar.accuracy(pred.argmax(-1), data.y, data[mask]) for mask in MASKS[1:]]
            curve.append([slowest + made, *accuracies])
            reset_peak()
        if slowest >= seconds:
            break
        start = time.perf_counter()
    return {"curve": curve, "memory": peak - before, "epoch": spent / epochs, "processor": processor()}


def worker(args: argparse.Namespace) -> None:
    """Train as one of the workers, or alone."""
    with pyg_sar.process_group() if args.workers else nullcontext(0) as rank:
        data = pyg_sar.load(f"{args.folder}/{max(args.workers, 1)}")
        nn = pyg_sar.nn
        if not args.workers:
            data, nn = dataset(f"{args.folder}/whole.pt"), torch_geometric.nn
            data.adj = to_torch_csr_tensor(data.edge_index, size=(data.num_nodes, data.num_nodes))  # it is symmetric
        fit(nn, data, args, rank, 0.0, RATES[0], 0)  # an epoch to get warm
        wanted = [run.split("/") for run in args.runs]
        answer([fit(nn, data, args, rank, args.seconds, float(rate), int(seed)) for rate, seed in wanted])


def reached(curve: list[list[float]], goal: float) -> float:
    """Return the seconds after which a validation accuracy was reached."""
    return next((seconds for seconds, val, _ in curve if val >= goal), math.inf)


def train(
    args: argparse.Namespace, runs: Runs, folder: str, name: str, title: str, wanted: list[tuple[float, int]]
) -> None:
    """Run a way with those rates and seeds that have not been run, and keep them."""
    todo = {key: run for run in wanted if (key := json.dumps((name, title, *run))) not in runs}
    if not todo:
        return
    way = WAYS[title]
    own = words(folder=folder, kind=way.kind, workers=way.workers, hidden=args.hidden, seconds=TASKS[name].seconds)
    own += ["--runs", *(f"{rate}/{seed}" for rate, seed in todo.values())]
    found = launch(__file__, way.workers, own, threads=2 // max(way.workers, 1))
    for key, ranks in zip(todo, zip(*found, strict=True), strict=True):
        runs.keep(key, {**ranks[0], "memory": sum(one["memory"] for one in ranks)})


def best_rate(runs: dict[str, Any], name: str, way: str, goal: float) -> float:
    """Return the learning rate that reached the goal first, or got furthest."""

    def merit(rate: float) -> tuple[float, float]:
        curve = runs[json.dumps((name, way, rate, 0))]["curve"]
        return reached(curve, goal), -max(val for _, val, _ in curve)

    return min(RATES, key=merit)


def ways_of(name: str, ways: list[str]) -> list[str]:
    """Return the ways of a task."""
    return [way for way in ways if TASKS[name].labels or WAYS[way].kind != "flow"]


def goal_of(runs: dict[str, Any], name: str, ways: list[str]) -> float:
    """Return 99% of the best validation accuracy of all ways and rates."""
    return 0.99 * max(val for way in ways for rate in RATES
                      for _, val, _ in runs[json.dumps((name, way, rate, 0))]["curve"])  # fmt: skip


ABOUT = """Seconds of training until the validation accuracy is 99% of the best that any way reached with any
learning rate (medians of {seeds} seeds; in brackets how many of them got there, if not all; *never*: at most half),
beside seconds of an epoch, the test accuracy at the best validation accuracy, and the memory of all workers above what
they loaded. {layers} layers of GraphSAGE, {hidden} hidden, batch normalisation, dropout 0.5, Adam; 2 cores: 2 threads,
or 2 workers of one. Samples: {batch} labelled nodes and {fanout} neighbors of each node in each layer; DGL's sampler
draws blocks, of which a layer computes what the next one reads; PyG's NeighborLoader, with torch-sparse, draws
subgraphs. *Sampled at first*: for {warm} epochs, by DGL's, before those of message-flow graphs. The first layer of
*cached features*, *message flow* and *steps* keeps its sums. *Recipe*: labels as features, a rate that falls by a
cosine, and predictions corrected and smoothed. {machines}.
Made by `benchmarks/time_to_accuracy.py`."""


def machines(runs: dict[str, Any], names: list[str]) -> str:
    """Return which processors trained which graphs."""
    found: dict[str, dict[str, None]] = {}
    for key, run in runs.items():
        if (name := json.loads(key)[0]) in names:
            found.setdefault(run["processor"], {})[name] = None
    return "; ".join(f"{processor} ({', '.join(graphs)})" for processor, graphs in found.items())


def table(runs: dict[str, Any], args: argparse.Namespace, names: list[str]) -> list[str]:
    """Return the lines of all graphs that were trained."""
    about = ABOUT.format(seeds=args.seeds, layers=LAYERS, hidden=args.hidden, batch=BATCH,
                         fanout=FANOUT, warm=WARM, machines=machines(runs, names))  # fmt: skip
    lines = [about, "", "| graph; seconds | way | rate | s to goal | s an epoch | test % | MiB |", "|---" * 7 + "|"]
    for name in names:
        ways = ways_of(name, args.ways)
        goal = goal_of(runs, name, ways)
        for way in ways:
            rate = best_rate(runs, name, way, goal)
            found = [runs[json.dumps((name, way, rate, seed))] for seed in range(args.seeds)]
            times = [reached(run["curve"], goal) for run in found]
            there, median = sum(map(math.isfinite, times)), statistics.median(times)
            told = f"{median:.2f}" if math.isfinite(median) else "never"
            told += f" ({there})" if there < len(times) else ""
            epochs = statistics.median(run["epoch"] for run in found)
            tests = [100 * max(run["curve"], key=lambda row: row[1])[2] for run in found]
            peak = statistics.median(run["memory"] for run in found)
            title = f"{name}; {TASKS[name].seconds:g}"
            cells = [title, way, rate, told, f"{epochs:.3f}", mean_and_spread(tests), f"{peak:.0f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def draw(runs: dict[str, Any], args: argparse.Namespace, names: list[str], path: Path) -> None:
    """Draw the best validation accuracy so far against seconds, of one seed: a color for each kind, a line style for
    each number of workers.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    kinds = list(dict.fromkeys(way.kind for way in WAYS.values()))
    lines = -(-len(names) // 4)
    columns = -(-len(names) // lines)
    size = 4.2 * columns, 3.2 * lines + 0.6
    figure, grid = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for ax, name in zip(axes, names, strict=False):
        ways = ways_of(name, args.ways)
        goal = goal_of(runs, name, ways)
        for way in ways:
            curve = runs[json.dumps((name, way, best_rate(runs, name, way, goal), 0))]["curve"]
            workers, kind = WAYS[way]
            seconds, best = [row[0] for row in curve], itertools.accumulate((100 * row[1] for row in curve), max)
            style = {"color": f"C{kinds.index(kind)}", "linestyle": (":", "-", "--")[workers], "linewidth": 1.4}
            ax.plot(seconds, list(best), label=way, marker="." if len(curve) < 4 else "", **style)
        ax.axhline(100 * goal, color="gray", linestyle=":", linewidth=1)
        ax.set(title=name, xscale="log", xlabel="seconds of training", ylabel="best validation accuracy, %")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(bottom=100 * goal - 10)
        ax.grid(alpha=0.3)
    for ax in axes[len(names) :]:
        ax.axis("off")
    known = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    shown = [way for way in args.ways if way in known]
    figure.legend([known[way] for way in shown], shown, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def few(y: Tensor, mask: Tensor, labels: int) -> Tensor:
    """Return a mask of some of the nodes of each class in ``mask``."""
    kept = torch.zeros_like(mask)
    draw = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    for label in y.unique():
        kept[draw[(mask[:, 0] & (y == label))[draw]][:labels]] = True
    return kept


def prepare(name: str, root: str, folder: str) -> None:
    """Write a graph with one split whole and in parts."""
    data = graph(TASKS[name].graph, root)
    if TASKS[name].labels:
        data.train_mask = few(data.y, data.train_mask, TASKS[name].labels)
    partitions(data, folder, (1, 2))
    torch.save(first_split(data), f"{folder}/whole.pt")


def main(args: argparse.Namespace) -> None:
    """Train what is not in ``runs`` yet, and write the table and the figure."""
    runs = Runs(args.runs)
    kept = {json.loads(key)[0] for key in runs}
    args.graphs = [name for name in args.graphs if name in kept or there(TASKS[name].graph, args.root)]
    if not args.graphs:
        sys.exit("None of the graphs is there.")
    for name in tqdm(args.graphs):
        with tempfile.TemporaryDirectory() as folder:
            prepare(name, args.root, folder)
            ways = ways_of(name, args.ways)
            for way in tqdm(ways, leave=False):
                train(args, runs, folder, name, way, [(rate, 0) for rate in RATES])
            goal = goal_of(runs, name, ways)
            for way in tqdm(ways, leave=False):
                rate = best_rate(runs, name, way, goal)
                train(args, runs, folder, name, way, [(rate, seed) for seed in range(1, args.seeds)])
    print(write(args.out, "time-to-accuracy.md", table(runs, args, args.graphs)))
    draw(runs, args, args.graphs, Path(args.out) / "time-to-accuracy.png")


if __name__ == "__main__":
    if mine := asked(folder=str, kind=str, workers=int, hidden=int, seconds=float, runs=[str]):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--graphs", nargs="+", default=[name for name in TASKS if name != "small"], choices=list(TASKS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--runs", default="time-to-accuracy.jsonl", help="a file of finished runs")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
