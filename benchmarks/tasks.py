"""Heterogeneous graphs and link prediction on real graphs: PyG in one process, and pyg_sar on 1, 2 and 4 workers.

    python benchmarks/tasks.py --root data --runs /tmp/tasks.jsonl --out docs/results

All is trained in double precision without dropout, so that the losses of all epochs can be compared: the table's last
column is the largest difference from PyG's, of any number of workers. Negative pairs of "link" are the same in every
epoch; those of "link, drawn" are drawn anew, by ``pyg_sar.negative_sampling``. ``runs`` keeps what was trained. Writes
``tasks.md``.
"""

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
import torch_geometric.nn as gnn
from harness.launch import answer, asked, launch, words
from harness.report import write
from harness.runs import Runs, mean_and_spread
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.distributed.group import gather_objects

# data set, model, epochs, seeds
TASKS = [
    ("DBLP", "to_hetero SAGE", 12, 5),
    ("DBLP", "R-GCN", 12, 5),
    ("DBLP", "HGT", 12, 5),
    ("DBLP", "HAN", 12, 5),
    ("IMDB", "to_hetero SAGE", 12, 5),
    ("IMDB", "HAN", 12, 5),
    ("Planetoid/Cora", "link", 40, 3),
    ("Planetoid/Cora", "link, drawn", 40, 6),
]
WORKERS = (0, 1, 2, 4)  # 0: PyG in one process
WIDTH = 32
LABELLED = {"DBLP": "author", "IMDB": "movie"}  # the type of nodes that is classified
ABOUT = """Trained in double precision, {width} hidden; mean ± deviation over seeds; METIS parts. *Losses differ by*: at
most, between PyG and any number of workers, over all epochs and seeds. Made by `benchmarks/tasks.py`."""


def read(task: str, root: str) -> Any:
    """Return the graph; every type of nodes gets features."""
    data = dataset(task, root)
    if task not in LABELLED:
        torch_geometric.seed_everything(0)  # negative_sampling draws from Python's generator
        split = RandomLinkSplit(num_val=0.05, num_test=0.1, is_undirected=True)
        train, _, test = split(data)
        train.pairs = train.edge_label_index[:, train.edge_label == 1]
        train.negatives = negative_sampling(data.edge_index, data.num_nodes, train.pairs.size(1))
        train.test_pairs, train.test_labels = test.edge_label_index, test.edge_label
        del train.edge_label, train.edge_label_index
        data = train
    stores = data.node_stores if task in LABELLED else [data]
    for store in stores:
        store.x = store.x.double() if "x" in store else torch.ones(store.num_nodes, 1, dtype=torch.float64)
    return data


class Hetero(torch.nn.Module):
    """Two layers between linear maps, for the nodes of one type."""

    def __init__(self, kind: str, data: Any, target: str) -> None:
        super().__init__()
        self.target = target
        types, metadata = {t: x.size(1) for t, x in data.x_dict.items()}, data.metadata()
        self.embed = gnn.HeteroDictLinear(types, WIDTH)
        if kind == "to_hetero SAGE":
            layers = [gnn.to_hetero(gnn.GraphSAGE(WIDTH, WIDTH, 2), metadata)]
        elif kind == "R-GCN":  # a weight for each relation, whose messages are averaged, and one for the node itself
            convs = [{it: gnn.SAGEConv(WIDTH, WIDTH) for it in metadata[1]} for _ in range(2)]
            layers = [gnn.HeteroConv(conv) for conv in convs]
        else:
            conv = {"HGT": gnn.HGTConv, "HAN": gnn.HANConv}[kind]
            layers = [conv(WIDTH, WIDTH, metadata, heads=2) for _ in range(2 if kind == "HGT" else 1)]
        self.layers, self.out = torch.nn.ModuleList(layers), torch.nn.Linear(WIDTH, 4)  # the most classes

    def forward(self, data: Any) -> torch.Tensor:
        x = {t: rows.relu() for t, rows in self.embed(data.x_dict).items()}
        for layer in self.layers:
            x = {t: rows.relu() for t, rows in layer(x, data.edge_index_dict).items() if rows is not None}
        return self.out(x[self.target])


def classify(model: Any, data: Any, epochs: int) -> tuple[list[float], float]:
    """Train for node classification; return losses and test accuracy."""
    nodes, losses, optimizer = data[model.target], [], torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        each = F.cross_entropy(model(data)[nodes.train_mask], nodes.y[nodes.train_mask], reduction="none")
        loss = pyg_sar.global_mean(each)
        loss.backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, pyg_sar.accuracy(model(data).argmax(-1), nodes.y, nodes.test_mask)


def predict_links(model: torch.nn.Module, data: Any, epochs: int, drawn: bool, seed: int) -> tuple[list[float], float]:
    """Train for link prediction; return losses and the area under the ROC curve of the test pairs."""
    sharded = isinstance(data.edge_index, pyg_sar.ShardedEdgeIndex)
    n_id, losses, optimizer = data.get("n_id"), [], torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1000 * seed + (0 if n_id is None else int(n_id[0])))

    def local(pairs: torch.Tensor) -> Any:
        return pyg_sar.shard_links(pairs, n_id) if sharded else (pairs, slice(None))

    def score(z: torch.Tensor, index: Any) -> torch.Tensor:
        return (z[index[0]] * z[index[1]]).sum(-1)

    (positive, _), (negative, _), (test, mine) = map(local, (data.pairs, data.negatives, data.test_pairs))
    for _ in range(epochs):
        if drawn and sharded:
            negative, _ = pyg_sar.shard_links(pyg_sar.negative_sampling(positive, n_id, generator=generator), n_id)
        elif drawn:
            negative = torch.stack([torch.randint(data.num_nodes, data.pairs[1].shape), data.pairs[1]])
        optimizer.zero_grad()
        z = model(data.x, data.edge_index)
        out = torch.cat([score(z, positive), score(z, negative)])
        label = torch.zeros_like(out)
        label[: positive.size(1)] = 1
        loss = pyg_sar.global_mean(F.binary_cross_entropy_with_logits(out, label, reduction="none"))
        loss.backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        found = gather_objects((score(model(data.x, data.edge_index), test).tolist(), data.test_labels[mine].tolist()))
    scores, labels = (torch.tensor([v for pair in found for v in pair[k]]) for k in (0, 1))
    return losses, area(scores, labels)


def area(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of pairs of a positive and a negative one that are in the right order."""
    wins = (scores[labels == 1].unsqueeze(1) - scores[labels == 0]).sign()
    return float((wins + 1).mean() / 2)


def worker(args: argparse.Namespace) -> None:
    """Train as one of the workers, or alone, from all seeds."""
    with pyg_sar.process_group():
        data = pyg_sar.load(args.folder) if args.folder else read(args.task, args.root)
        results = []
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            if args.task in LABELLED:
                model = Hetero(args.kind, data, LABELLED[args.task]).double()
            else:
                model = gnn.GraphSAGE(data.x.size(1), WIDTH, 2, act="tanh").double()
            model = pyg_sar.nn.convert(copy.deepcopy(model)) if args.folder else model
            if args.task in LABELLED:
                results.append(classify(model, data, args.epochs))
            else:
                results.append(predict_links(model, data, args.epochs, args.kind == "link, drawn", seed))
        answer(results)


def table(runs: dict[str, Any]) -> list[str]:
    """Return the lines of all that was trained."""
    columns = ["graph", "model", "metric", "PyG, 1 process", "1 worker", "2 workers", "4 workers", "losses differ by"]
    lines = [ABOUT.format(width=WIDTH), "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for task, kind, *_, seeds in TASKS:
        found = [runs.get(json.dumps([task, kind, seeds, workers])) for workers in WORKERS]
        if not all(found):
            continue
        cells = [mean_and_spread([100 * value for _, value in results]) for results in found]
        losses = [torch.tensor([curve for curve, _ in results], dtype=torch.float64) for results in found]
        differs = max(float((curve - losses[0]).abs().max()) for curve in losses)
        cells.append("drawn anew" if kind == "link, drawn" else f"{differs:.0e}")
        metric = "accuracy" if task in LABELLED else "area under ROC curve"
        lines.append(f"| {task} | {kind} | {metric} | {' | '.join(cells)} |")
    return lines


def main(args: argparse.Namespace) -> None:
    """Train what is not in ``runs`` yet, and write the table."""
    runs = Runs(args.runs)
    with tempfile.TemporaryDirectory() as scratch:
        for task, kind, epochs, seeds, workers in tqdm([(*case, workers) for case in TASKS for workers in WORKERS]):
            if (key := json.dumps([task, kind, seeds, workers])) in runs:
                continue
            folder = Path(scratch) / f"{task.replace('/', '-')}-{workers}"
            if workers and not folder.exists():
                pairs = () if task in LABELLED else ("pairs", "negatives", "test_pairs")  # ids of the whole graph
                pyg_sar.partition(read(task, args.root), workers, folder, levels=dict.fromkeys(pairs, "graph"))
            own = words(task=task, root=args.root, kind=kind, epochs=epochs, seeds=seeds)
            own += words(folder=folder if workers else "")
            runs.keep(key, launch(__file__, workers, own, threads=1)[0])
    print(write(args.out, "tasks.md", table(runs)))


if __name__ == "__main__":
    if mine := asked(folder=str, task=str, root=str, kind=str, epochs=int, seeds=int):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--runs", default="tasks.jsonl", help="a file of finished runs")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
