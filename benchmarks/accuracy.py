"""Test accuracy on real graphs: PyG in one process, and pyg_sar on several workers or with rows in files, over seeds.

    python benchmarks/accuracy.py --root data --runs /tmp/accuracy.jsonl --out docs/results

``runs`` keeps what was trained. Writes ``accuracy.md``.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.launch import answer, asked, launch, words
from harness.report import write
from harness.runs import Runs, mean_and_spread
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset

# Of each data set: layer, hidden width, epochs
TASKS = {
    "Planetoid/Cora": ("gcn", 16, 100),
    "Entities/AIFB": ("rgcn", 16, 10),
    "Entities/MUTAG": ("rgcn", 16, 20),
    "Coauthor/Physics": ("gcn", 16, 10),
}
LAYERS = {"gcn": "GCN", "rgcn": "R-GCN"}
# Number of workers (0: PyG), and what is not as usual
COLUMNS = {
    "PyG, 1 process": (0, "nothing"),
    "2 workers": (2, "nothing"),
    "4 workers": (4, "nothing"),
    "1 worker, rows in files, 8 chunks": (1, "offload"),
    "2 workers, bfloat16 travels": (2, "comm_dtype"),
    "PyG, autocast to bfloat16": (0, "autocast"),
    "2 workers, autocast to bfloat16": (2, "autocast"),
}
ABOUT = """Test accuracy in per cent, mean ± deviation over {seeds} seeds, of two layers as in PyG's own examples:
by PyG in one process, and by the same training on workers, which draw other dropout masks. *Travels*: `comm_dtype`.
Made by `benchmarks/accuracy.py`, which has the hyper-parameters."""


class Net(torch.nn.Module):
    """Two layers, as in PyG's own examples for these data sets."""

    def __init__(self, nn: Any, kind: str, in_channels: int, hidden: int, out_channels: int, relations: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "gcn":
            self.convs = [nn.GCNConv(in_channels, hidden), nn.GCNConv(hidden, out_channels)]
        else:
            self.convs = [nn.RGCNConv(a, b, relations, 30) for a, b in ((in_channels, hidden), (hidden, out_channels))]
        self.convs = torch.nn.ModuleList(self.convs)

    def forward(self, x: Any, *edges: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.convs[0](x, *edges).relu(), 0.5 if self.kind == "gcn" else 0.0, self.training)
        return self.convs[1](x, *edges)


def fit(nn: Any, data: Any, kind: str, hidden: int, epochs: int, seed: int, rank: int, casts: bool) -> float:
    """Train, under autocast if ``casts``, and return the test accuracy at the best validation accuracy (at the end
    where there is no such mask).
    """
    torch.manual_seed(seed)
    x = data.get("x")
    width = data.total_nodes if x is None else x.size(1)
    relations = data.num_relations if kind == "rgcn" else 0
    model = Net(nn, kind, width, hidden, data.num_classes, relations)
    pyg_sar.broadcast_parameters(model)
    torch.manual_seed(1000 * seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    edges = (data.edge_index, data.edge_type) if kind == "rgcn" else (data.edge_index,)
    best, result = -1.0, 0.0
    for epoch in range(epochs):
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            out = model(x, *edges)[data.train_mask]
        pyg_sar.global_mean(F.cross_entropy(out.float(), data.y[data.train_mask], reduction="none")).backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        if "val_mask" not in data and epoch < epochs - 1:
            continue
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=casts):
            pred = model(x, *edges).argmax(-1)
        val = pyg_sar.accuracy(pred, data.y, data.val_mask) if "val_mask" in data else 0.0
        if val > best:
            best, result = val, pyg_sar.accuracy(pred, data.y, data.test_mask)
    return result


def worker(args: argparse.Namespace) -> None:
    """Train as one of the workers, or alone, from all seeds."""
    with pyg_sar.process_group() as rank:
        torch.manual_seed(args.seeds)
        if args.folder:
            sent = torch.bfloat16 if args.how == "comm_dtype" else None
            nn, data = pyg_sar.nn, pyg_sar.load(args.folder, comm_dtype=sent)
            if args.how == "offload":
                data = pyg_sar.offload(data, chunks=8, home=args.folder)
        else:
            nn, data = torch_geometric.nn, dataset(args.task, args.root)
            data.total_nodes = data.num_nodes
        casts = args.how == "autocast"
        answer([fit(nn, data, *TASKS[args.task], seed, rank, casts) for seed in range(args.seeds)])


def table(runs: dict[str, Any], seeds: int) -> list[str]:
    """Return the lines of all that was trained."""
    lines = [ABOUT.format(seeds=seeds), ""]
    lines += [f"| graph | layer | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, (kind, *_) in TASKS.items():
        cells = []
        for title, (_, how) in COLUMNS.items():
            accuracies = runs.get(json.dumps([name, title, seeds]))
            told = mean_and_spread([100 * one for one in accuracies]) if accuracies else ""
            cells.append("no features" if no_rows(name, how) else told)
        lines.append(f"| {name} | {LAYERS[kind]} | {' | '.join(cells)} |")
    return lines


def no_rows(name: str, how: str) -> bool:
    """Whether a graph has nothing that could live in files."""
    return how == "offload" and name.startswith("Entities")


def main(args: argparse.Namespace) -> None:
    """Train what is not in ``runs`` yet, and write the table."""
    runs = Runs(args.runs)
    cases = [(name, title) for name in args.graphs for title in COLUMNS if not no_rows(name, COLUMNS[title][1])]
    with tempfile.TemporaryDirectory() as scratch:
        for name, title in tqdm(cases):
            if (key := json.dumps([name, title, args.seeds])) in runs:
                continue
            workers, how = COLUMNS[title]
            folder = Path(scratch) / f"{name.replace('/', '-')}-{workers}"
            if workers and not folder.exists():
                pyg_sar.partition(dataset(name, args.root), workers, folder)
            own = words(task=name, root=args.root, seeds=args.seeds, how=how, folder=folder if workers else "")
            runs.keep(key, launch(__file__, workers, own, threads=1 if workers else 2)[0])
    print(write(args.out, "accuracy.md", table(runs, args.seeds)))


if __name__ == "__main__":
    if mine := asked(task=str, root=str, how=str, folder=str, seeds=int):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--graphs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", default="accuracy.jsonl", help="a file of finished runs")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
