"""Accuracy of pipelines whose chunks read old rows, beside PyG, and what each rule for old rows does to it.

    python benchmarks/staleness.py --root data --runs /tmp/runs.jsonl --out docs/results
    python benchmarks/staleness.py --root data --runs /tmp/cora.jsonl --out /tmp --graphs Cora --seeds 1

Runs are of one process, but for a row of four stages: their number changes no bit (``test/test_pipeline.py``). Each
trains until the validation accuracy has not risen for a while, which is measured by an exact pass after each epoch, and
tells the test accuracy at its best epoch. ``runs`` keeps what was trained, so that several processes, one for each
graph, can share the work and a last one writes the tables. Writes ``staleness.md``.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.deep import MASKS, graph, there
from harness.launch import DeepGNN, answer, asked, launch, words
from harness.report import write
from harness.runs import Runs, mean_and_spread
from torch import Tensor
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_torch_csr_tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.distributed.history import ChunkSink, History, PipelineChunk

# Of each graph and model: learning rate, dropout, weight decay, and epochs without progress after which it ends; found
# by few runs of one chunk on the first split
TASKS = {
    "Cora": {"gcn2": (0.01, 0.5, 5e-4, 150), "resgcn": (0.002, 0.5, 0.0, 150)},
    "squirrel": {"gcn2": (0.01, 0.5, 0.0, 30), "resgcn": (0.002, 0.5, 0.0, 30)},
    "Computers": {"gcn2": (0.01, 0.2, 0.0, 30), "resgcn": (0.002, 0.5, 0.0, 30)},
}
WITHOUT_PYG = {("squirrel", "resgcn"), ("Computers", "resgcn")}  # its layers take too long there; one chunk is exact
MODELS = {"gcn2": "GCNII", "resgcn": "ResGCN+"}
LAYERS, HIDDEN = 16, 64
COLUMNS: dict[str, dict[str, Any]] = {
    "PyG": {},
    "1 chunk": {"chunks": 1},
    "8 chunks": {"chunks": 8},
    "32 chunks": {"chunks": 32},
}
# Of GCNII by 32 chunks: what is not as in the last column.
RULES: dict[str, dict[str, Any]] = {
    "history of 1 epoch": {"history": 1},
    "history of 5 epochs": {"history": 5},
    "history of 50 epochs": {"history": 50},
    "history of the exact pass": {"exact": True},
    "chunks in one order": {"shuffle": False},
    "gradients to history, an epoch late": {"late": True},
    "all three given up": {"history": 1, "shuffle": False, "late": True},
    "8 parts, all rows of other parts old": {"chunks": 8, "rival": True},
    "four stages on four workers": {"stages": 4},
}
ABLATION = ("Cora", "squirrel")
ABOUT = """Test accuracy in per cent at the best validation accuracy, mean ± deviation over seeds (each with another
split where there are several; their number comes last), and in brackets the median of epochs until the validation
accuracy is within 1% of its best. {layers} layers of {hidden}, Adam, at most {epochs} epochs, fewer where nothing
improves for 30 (not on Cora). History of ten epochs, chunks in another order in each epoch; one chunk is exact. *Not
run*: PyG's own layers take too long. †: the mean differs from that of PyG (of one chunk, where PyG was not run) by more
than both deviations together. Squirrel has ten splits, of which each seed takes one. Made by
`benchmarks/staleness.py`."""
RULES_ABOUT = """What each rule for old rows does, by 32 chunks if not said otherwise. *The exact pass*: history is that
of an evaluation at the end of the epoch, without dropout. *Late*: the gradient of a row that was read as history
arrives in the next epoch. *8 parts*: all rows of other parts are old, as if eight workers refreshed theirs every ten
epochs."""


@contextmanager
def late_gradients() -> Iterator[None]:
    """Deliver the gradients of rows that were read as history in the next epoch."""
    keep, end = ChunkSink.keep, History.end

    def kept(sink: ChunkSink, others: Tensor) -> None:
        keep(sink, others)
        grad = sink.site[sink.tile - 1].grad
        assert grad is not None
        grad[sink.it.chunk.span] = 0  # handed on; what comes after it is of rows that are read as history

    def ended(history: History, refresh: bool) -> None:
        grads = [(rows, rows.grad) for site in history.sites.values() for rows in site]
        end(history, refresh)
        for rows, grad in grads:
            rows.grad = grad

    with mock.patch.object(ChunkSink, "keep", kept), mock.patch.object(History, "end", ended):
        yield


@contextmanager
def rows_of_others_old() -> Iterator[None]:
    """Have chunks read history of all other ones, as workers that refresh each other's rows every few epochs do."""

    def always(history: History, it: PipelineChunk) -> Tensor:
        return torch.ones(len(it.reads), dtype=torch.bool)

    def own(sink: ChunkSink, others: Tensor) -> None:
        assert sink.own is not None
        sink.receiver.add_grad(sink.tile, sink.own)
        sink.tile, sink.own = sink.tile + 1, None

    with mock.patch.object(ChunkSink, "keep", own), mock.patch.object(History, "is_stale", always):
        yield


def fit(
    model: Any, step: Callable[[int], None], predict: Callable[[], Tensor | None], tell: Callable[[Any], Any],
    y: Tensor, masks: Any, ends: tuple[int, int],
) -> list[float]:  # fmt: skip
    """Train; return the test accuracy at the best epoch, and the first epoch within 1% of its validation accuracy. The
    worker that has a prediction tells the others what it is worth.
    """
    curve: list[tuple[float, float]] = []
    epochs, patience = ends
    for epoch in range(1, epochs + 1):
        model.train()
        step(epoch)
        model.eval()
        with torch.no_grad():
            out = predict()
        shares: Any = None
        if out is not None:
            right = (out.argmax(-1) == y).double()
            shares = [float(right[masks[mask]].mean()) for mask in MASKS[1:]]
        curve.append(tuple(tell(shares)))
        best = max(range(epoch), key=lambda k: curve[k][0])
        if epoch - 1 - best >= patience:
            break
    return [100 * curve[best][1], next(k for k, (val, _) in enumerate(curve, 1) if val >= 0.99 * curve[best][0])]


def run(
    it: Any, task: str, kind: str, settings: dict[str, Any], seed: int, epochs: int, mesh: Any = None
) -> list[float]:
    """Train one model from one seed, on the split of that number where there are several: by PyG without settings."""
    torch.manual_seed(seed)
    rate, dropout, decay, patience = TASKS[task][kind]
    masks = {mask: it[mask][:, seed % it[mask].size(1)] for mask in MASKS}
    train, y = masks["train_mask"], it.y
    nn = pyg_sar.nn if settings else torch_geometric.nn
    model = DeepGNN(nn, kind, it.x.size(1), HIDDEN, it.num_classes, LAYERS, dropout)
    if not settings:
        optimizer = torch.optim.Adam(model.parameters(), rate, weight_decay=decay)
        edges = it.edge_index
        if kind == "gcn2":  # takes a sparse matrix, which is symmetric here, and is faster then
            edges = to_torch_csr_tensor(edges, size=(it.num_nodes, it.num_nodes))
            for layer in model.modules():
                if isinstance(layer, torch_geometric.nn.GCN2Conv):
                    layer.cached = True  # the edges are normalised once

        def plain(epoch: int) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(it.x, edges)[train], y[train]).backward()
            optimizer.step()

        return fit(model, plain, lambda: model(it.x, edges), list, y, masks, (epochs, patience))

    names = ("chunks", "history", "shuffle")
    options = {name: settings[name] for name in names if name in settings}
    exact, period = settings.get("exact", False), options.get("history", 10)
    if exact:
        options["history"] = epochs + 1
    pipe = pyg_sar.Pipeline(model.blocks, it.edge_index, mesh, seed=seed, **options)
    optimizer = torch.optim.Adam(pipe.parameters(), rate, weight_decay=decay)

    def loss_of(out: Tensor, rows: slice) -> Tensor:
        return F.cross_entropy(out[train[rows]], y[rows][train[rows]], reduction="sum") / train.sum()

    def piped(epoch: int) -> None:
        optimizer.zero_grad()
        pipe.step(it.x, loss_of)
        optimizer.step()
        if exact and epoch % period == 0:
            model.eval()
            pipe.fill(it.x, ())

    with ExitStack() as stack:
        if settings.get("late"):
            stack.enter_context(late_gradients())
        if settings.get("rival"):
            stack.enter_context(rows_of_others_old())
        return fit(model, piped, lambda: pipe(it.x), pipe.tell, y, masks, (epochs, patience))


def cases(graphs: list[str], models: list[str], seeds: int) -> list[tuple[str, str, str, int]]:
    """Return what is to be trained: graph, model, line or column, seed; those first that a table cannot do without."""
    pairs = [(task, kind) for task in graphs for kind in TASKS[task] if kind in models]
    columns = [(*pair, name) for pair in pairs for name in COLUMNS if name != "PyG" or pair not in WITHOUT_PYG]
    rules = [(task, "gcn2", name) for task in ABLATION for name in RULES if task in graphs and "gcn2" in models]
    return [(*case, seed) for of_table in (columns, rules) for seed in range(seeds) for case in of_table]


def worker(args: argparse.Namespace) -> None:
    """Train as one stage of several."""
    with pyg_sar.process_group() as rank:
        mesh = pyg_sar.stage_mesh(args.stages)
        loaded = pyg_sar.load(args.folder, group=mesh.get_group("graph"))
        answer([rank, run(loaded, args.task, args.kind, COLUMNS["32 chunks"], args.seed, args.epochs, mesh)])


def staged(folder: str, task: str, kind: str, stages: int, seed: int, epochs: int) -> list[float]:
    """Train on a worker for each stage."""
    options = words(folder=folder, task=task, kind=kind, stages=stages, seed=seed, epochs=epochs)
    (found,) = {tuple(accuracy) for _, accuracy in launch(__file__, stages, options)}
    return list(found)


def found_of(runs: dict[str, list[float]], *case: str) -> list[list[float]]:
    """Return the test accuracies and epochs of all seeds."""
    return [value for key, value in runs.items() if json.loads(key)[:-1] == [*case]]


def told(runs: dict[str, list[float]], *case: str) -> str:
    """Return a cell: mean and deviation of the accuracy, and the median of epochs."""
    found = found_of(runs, *case)
    if not found:
        return ""
    return (
        f"{mean_and_spread([test for test, _ in found])} ({statistics.median(e for _, e in found):.0f}), {len(found)}"
    )


def apart(one: list[list[float]], other: list[list[float]]) -> bool:
    """Whether means differ by more than both deviations together."""
    (a, b), (x, y) = (
        [statistics.mean(t), statistics.stdev(t)] for t in ([test for test, _ in f] for f in (one, other))
    )
    return abs(a - x) > b + y


def tables(runs: dict[str, list[float]], epochs: int) -> list[str]:
    """Return the lines of all that was trained."""
    lines = [ABOUT.format(layers=LAYERS, hidden=HIDDEN, epochs=epochs), ""]
    lines += [f"| graph | model | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for task, kind in ((graph_name, kind) for graph_name, kinds in TASKS.items() for kind in kinds):
        if any(cells := [told(runs, task, kind, name) for name in COLUMNS]):
            found = [found_of(runs, task, kind, name) for name in COLUMNS]
            exact = found[0] or found[1]
            cells = [f"{c} †" if min(len(f), len(exact)) > 1 and apart(f, exact) else c
                     for c, f in zip(cells, found, strict=True)]  # fmt: skip
            cells[0] = "not run" if (task, kind) in WITHOUT_PYG else cells[0]
            lines.append(f"| {task} | {MODELS[kind]} | {' | '.join(cells)} |")
    rules = {name: [told(runs, task, "gcn2", name) for task in ABLATION] for name in ("32 chunks", *RULES)}
    if any(any(rules[name]) for name in RULES):
        lines += ["", RULES_ABOUT, "", f"| GCNII | {' | '.join(ABLATION)} |", "|---" * (len(ABLATION) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rules.items()]
    return lines


def main(args: argparse.Namespace) -> None:
    """Train what is not in ``runs`` yet, and write the tables."""
    runs = Runs(args.runs)
    torch.set_num_threads(args.threads)
    pairs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in tqdm(cases(args.graphs, args.models, args.seeds)):
            task, kind, name, seed = case
            if (key := json.dumps(case)) in runs or not there(task, args.root):
                continue
            if task not in pairs:
                data = graph(task, args.root)
                data = NormalizeFeatures()(data) if task == "Cora" else data
                pyg_sar.partition(data, 1, f"{scratch}/{task}")
                pairs[task] = data, pyg_sar.load(f"{scratch}/{task}")
            settings = COLUMNS[name] if name in COLUMNS else {"chunks": 32} | RULES[name]
            data, loaded = pairs[task]
            if "stages" in settings:
                found = staged(f"{scratch}/{task}", task, kind, settings["stages"], seed, args.epochs)
            else:
                found = run(loaded if settings else data, task, kind, settings, seed, args.epochs)
            runs.keep(key, found)
    print(write(args.out, "staleness.md", tables(runs, args.epochs)))


if __name__ == "__main__":
    if mine := asked(folder=str, task=str, kind=str, stages=int, seed=int, epochs=int):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--graphs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", default="staleness.jsonl", help="a file of finished runs")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
