"""Test accuracy on real graphs: PyG in one process, and pyg_sar on several workers or with rows in files, over seeds.

    python benchmarks/accuracy.py --root data

Prints the table of the README. Every data set is loaded and partitioned once for all runs.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.launch import answer, launch
from harness.runs import mean_and_spread

import pyg_sar
from pyg_sar.data.datasets import dataset

# data set, layer, hidden width, epochs, seeds
TASKS = [
    ("Planetoid/Cora", "gcn", 16, 100, 5),
    ("Entities/AIFB", "rgcn", 16, 10, 5),
    ("Entities/MUTAG", "rgcn", 16, 20, 5),
    ("Coauthor/Physics", "gcn", 16, 10, 5),
]
# number of workers (0: PyG), title, what is not as usual
COLUMNS = [
    (0, "PyG, 1 process", "nothing"),
    (2, "2 workers", "nothing"),
    (4, "4 workers", "nothing"),
    (1, "1 worker, rows in files, 8 chunks", "offload"),
    (2, "2 workers, bf16 travels", "comm_dtype"),
    (0, "PyG, autocast to bf16", "autocast"),
    (2, "2 workers, autocast to bf16", "autocast"),
]


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
    with pyg_sar.process_group() as rank:
        torch.manual_seed(args.seeds)
        if args.folder:
            nn, data = (
                pyg_sar.nn,
                pyg_sar.load(args.folder, comm_dtype=torch.bfloat16 if args.how == "comm_dtype" else None),
            )
            if args.how == "offload":
                data = pyg_sar.offload(data, chunks=8, home=args.folder)
        else:
            nn, data = torch_geometric.nn, dataset(args.task, args.root)
            data.total_nodes = data.num_nodes
        settings = args.kind, args.hidden, args.epochs
        answer([fit(nn, data, *settings, seed, rank, args.how == "autocast") for seed in range(args.seeds)])


def main(args: argparse.Namespace) -> None:
    columns = ["graph", "layer", *(title for _, title, _ in COLUMNS)]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, kind, hidden, epochs, seeds in TASKS:
            if args.only and args.only not in name:
                continue
            common = ["--task", name, "--root", args.root, "--kind", kind, "--hidden", str(hidden)]
            common += ["--epochs", str(epochs), "--seeds", str(seeds)]
            cells = []
            for workers, title, how in COLUMNS:
                if how == "offload" and name.startswith("Entities"):
                    cells.append("no features")
                    continue
                folder = Path(scratch) / f"{name.replace('/', '-')}-{workers}"
                if workers and not folder.exists():
                    pyg_sar.partition(dataset(name, args.root), workers, folder)
                where = ["--how", how, *(["--folder", str(folder)] if workers else [])]
                accs = launch(__file__, workers, common + where, threads=1 if workers else 2)[0]
                cells.append(mean_and_spread([100 * accuracy for accuracy in accs]))
                print(name, kind, title, accs, file=sys.stderr)
            print(f"| {name} | {kind.upper()} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--only", help="only data sets whose name contains this")
    for option in ("--worker", "--how", "--folder", "--task", "--kind", "--hidden", "--epochs", "--seeds"):
        number = option in ("--hidden", "--epochs", "--seeds")
        if option == "--worker":
            parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
        else:
            parser.add_argument(option, type=int if number else str, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker(arguments) if arguments.worker else main(arguments)
