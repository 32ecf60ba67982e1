"""Test accuracy by the recipe of the SAR paper on real graphs: PyG in one process, and pyg_sar on 2 and 4 workers.

    python benchmarks/recipe.py --root data --runs /tmp/recipe.jsonl --out docs/results

Each model is trained as it is, and with labels as features (half of the training labels, the loss on the others); each
of both is corrected and smoothed afterwards (C&S). The rate falls by a cosine to nothing. Graphs with ten splits are
trained on each of them, the others from five seeds. PyG multiplies by a sparse matrix, which is faster than messages.
Nodes without features cannot be given labels as such, and types of nodes that have no edges among themselves are not
smoothed. ``runs`` keeps what was trained. Writes ``recipe.md``.
"""

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.deep import MASKS, graph, labels_as_features, there
from harness.launch import GNN, answer, asked, launch, words
from harness.report import write
from harness.runs import Runs, mean_and_spread
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch_geometric.nn import HeteroConv, MaskLabel
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_torch_csr_tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset


class Task(NamedTuple):
    """How a graph is trained on: 2 layers, Adam. Of several types of nodes the ``target`` is classified."""

    kind: str
    hidden: int
    epochs: int
    rate: float = 0.01
    decay: float = 5e-4
    seeds: int = 5
    target: str = ""


TASKS = {
    "Cora": Task("gcn", 64, 100),
    "CiteSeer": Task("gcn", 64, 100),
    "Computers": Task("gcn", 128, 150, decay=0.0),
    "Physics": Task("gcn", 64, 30),
    "tolokers": Task("sage", 128, 200, decay=0.0, seeds=10),
    "minesweeper": Task("sage", 128, 200, decay=0.0, seeds=10),
    "squirrel": Task("sage", 128, 100, decay=0.0, seeds=10),
    "aclanth2021": Task("sage", 128, 60, decay=0.0),
    "AIFB": Task("rgcn", 16, 50),
    "MUTAG": Task("rgcn", 16, 50),
    "DBLP": Task("hetero", 64, 50, 0.005, 0.001, target="author"),
    "IMDB": Task("hetero", 64, 50, 0.005, 0.001, target="movie"),
}
BY_AREA = ("tolokers", "minesweeper")  # two classes, one of them rare: the area under the ROC curve
WORKERS = (0, 2, 4)  # 0: PyG in one process
COLUMNS = ("plain", "C&S", "labels", "labels, C&S")
ABOUT = """Test accuracy in per cent ({areas}: area under the ROC curve) at the best validation accuracy, mean ±
deviation over seeds, each with another split where there are several. *Labels*: half of the training labels are
features, the loss is taken on the others. *C&S*: the same model, corrected and smoothed. 2 layers of GCN (Cora,
CiteSeer, Computers, Physics), R-GCN (AIFB, MUTAG: no features), GraphSAGE for each type of edges (DBLP, IMDB: nothing
to smooth along), or GraphSAGE; the script has the hyper-parameters. Not run here: the paper's own graphs, of which its
Table 1 has 65.8 and 66.3 for GraphSAGE on ogbn-papers100M, as a reader quotes it (IntelLabs/SAR, issue 24). Made by
`benchmarks/recipe.py`."""


class Net(torch.nn.Module):
    """A model that may be given labels."""

    def __init__(self, nn: Any, data: Any, task: Task, labels: bool) -> None:
        super().__init__()
        self.gnn = GNN(nn, task.kind, data.x.size(1), task.hidden, data.num_classes, layers=2)
        self.labels = labels_as_features(data) if labels else None

    def forward(self, data: Any, given: Tensor) -> Tensor:
        x = data.x if self.labels is None else self.labels(data.x, data.y, given)
        return self.gnn(x, data.get("adj", data.edge_index))


class Relations(torch.nn.Module):
    """R-GCN of nodes without features, as in PyG's own example."""

    def __init__(self, nn: Any, data: Any, task: Task) -> None:
        super().__init__()
        count = data.get("total_nodes", data.num_nodes)
        self.first = nn.RGCNConv(count, task.hidden, data.num_relations, 30)
        self.second = nn.RGCNConv(task.hidden, data.num_classes, data.num_relations, 30)

    def forward(self, data: Any, given: Tensor) -> Tensor:
        x = self.first(None, data.edge_index, data.edge_type).relu()
        return self.second(x, data.edge_index, data.edge_type)


class Types(torch.nn.Module):
    """A layer of GraphSAGE for each type of edges; nodes of the type that is classified may be given labels."""

    def __init__(self, nn: Any, data: Any, task: Task, labels: bool) -> None:
        super().__init__()
        self.target, nodes = task.target, data[task.target]
        self.labels = labels_as_features(nodes) if labels else None
        widths = [{name: x.size(1) for name, x in data.x_dict.items()}, dict.fromkeys(data.node_types, task.hidden)]
        self.convs = torch.nn.ModuleList(
            HeteroConv({one: nn.SAGEConv((width[one[0]], width[one[2]]), task.hidden) for one in data.edge_types})
            for width in widths
        )
        self.lin = torch.nn.Linear(task.hidden, nodes.num_classes)

    def forward(self, data: Any, given: Tensor) -> Tensor:
        x, nodes = data.x_dict, data[self.target]
        if self.labels is not None:
            x[self.target] = self.labels(nodes.x, nodes.y, given)
        edges = data.adj_dict if "adj" in data.edge_stores[0] else data.edge_index_dict
        for conv in self.convs:
            x = {name: F.leaky_relu(rows) for name, rows in conv(x, edges).items()}
        return self.lin(x[self.target])


def model_of(nn: Any, data: Any, task: Task, labels: bool) -> torch.nn.Module:
    """Return the model of a task."""
    if task.kind == "rgcn":
        return Relations(nn, data, task)
    return (Types if task.target else Net)(nn, data, task, labels)


def score(soft: Tensor, data: Any, mask: Tensor, area: bool) -> float:
    """Return the accuracy, or the area under the curve, of the nodes of all workers."""
    if not area:
        return pyg_sar.accuracy(soft.argmax(-1), data.y, mask)
    pred, y = (pyg_sar.gather(rows[mask], data.n_id[mask], None) for rows in (soft[:, 1], data.y))
    return float(roc_auc_score(y, pred))


def fit(nn: Any, data: Any, name: str, seed: int, labels: bool, rank: int) -> list[float]:
    """Train; return the test score, and that after C&S where there are edges to smooth along."""
    torch.manual_seed(seed)
    task, area = TASKS[name], name in BY_AREA
    nodes = data[task.target] if task.target else data
    train, val, test = (split(nodes, mask, seed) for mask in MASKS)
    model = model_of(nn, data, task, labels)
    pyg_sar.broadcast_parameters(model)
    torch.manual_seed(1000 * seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), task.rate, weight_decay=task.decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.epochs)
    best, kept = -1.0, torch.empty(0)
    for epoch in range(task.epochs):
        model.train()
        optimizer.zero_grad()
        given = MaskLabel.ratio_mask(train, 0.5)
        wanted = train & ~given if labels else train
        losses = F.cross_entropy(model(data, given)[wanted], nodes.y[wanted], reduction="none")
        pyg_sar.global_mean(losses).backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            soft = model(data, train).softmax(-1)
        if (now := epoch if val is None else score(soft, nodes, val, area)) > best:
            best, kept = now, soft
    kinds = [kept]
    if not task.target:
        post = nn.CorrectAndSmooth(50, 0.9, 50, 0.8)
        kinds.append(post(kept, data.y[train], train, data.edge_index))
    return [score(soft, nodes, test, area) for soft in kinds]


def split(nodes: Any, mask: str, seed: int) -> Tensor | None:
    """Return a mask of the split of a seed, if there is one."""
    found = nodes.get(mask)
    return found if found is None or found.dim() == 1 else found[:, seed % found.size(1)]


def worker(args: argparse.Namespace) -> None:
    """Train as one of the workers, or alone, from all seeds."""
    with pyg_sar.process_group() if args.workers else nullcontext(0) as rank:
        if args.workers:
            nn, data = pyg_sar.nn, pyg_sar.load(f"{args.folder}/{args.workers}")
        else:
            nn, data = torch_geometric.nn, dataset(f"{args.folder}/whole.pt")
        if not args.workers and TASKS[args.task].kind != "rgcn":
            data.n_id = torch.arange(data.num_nodes)
            for store in data.edge_stores:
                store.adj = to_torch_csr_tensor(store.edge_index.flip(0), size=store.size()[::-1])
        ways = (False,) if TASKS[args.task].kind == "rgcn" else (False, True)
        answer([[fit(nn, data, args.task, seed, labels, rank) for seed in range(args.seeds)] for labels in ways])


def read(name: str, root: str) -> Any:
    """Return a graph."""
    task = TASKS[name]
    if task.kind == "rgcn":
        return dataset(f"Entities/{name}", root)
    if not task.target:
        data = graph(name, root)
        return NormalizeFeatures()(data) if name in ("Cora", "CiteSeer") else data
    data = dataset(name, root)
    for store in data.node_stores:
        store.x = store.x if "x" in store else torch.ones(store.num_nodes, 1)
    data[task.target].num_classes = int(data[task.target].y.max()) + 1
    return data


def seeds_of(name: str, args: argparse.Namespace) -> int:
    """Return how many seeds a graph is trained from."""
    return args.seeds or TASKS[name].seeds


def key(name: str, workers: int, args: argparse.Namespace) -> str:
    """Return what a graph's runs are kept as."""
    return json.dumps([name, workers, seeds_of(name, args)])


def table(runs: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Return the lines of all that was trained."""
    lines = [ABOUT.format(areas=" and ".join(BY_AREA)), ""]
    lines += [f"| graph | seeds | | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 3) + "|"]
    for name in TASKS:
        for workers in WORKERS:
            if found := runs.get(key(name, workers, args)):
                cells = [mean_and_spread([100 * seed[k] for seed in way]) if k < len(way[0]) else ""
                         for way in found for k in range(2)]  # fmt: skip
                cells += [""] * (len(COLUMNS) - len(cells))
                title = f"{workers} workers" if workers else "PyG"
                lines.append(f"| {name} | {len(found[0])} | {title} | {' | '.join(cells)} |")
    return lines


def main(args: argparse.Namespace) -> None:
    """Train what is not in ``runs`` yet, and write the table."""
    runs = Runs(args.runs)
    for name in tqdm(args.graphs):
        todo = [w for w in WORKERS if key(name, w, args) not in runs]
        if todo and not there(name, args.root):
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = read(name, args.root) if todo else None
            for workers in tqdm(todo, leave=False):
                if workers:
                    pyg_sar.partition(data, workers, f"{folder}/{workers}")
                else:
                    torch.save(data, f"{folder}/whole.pt")
                own = words(folder=folder, task=name, seeds=seeds_of(name, args), workers=workers)
                found = launch(__file__, workers, own, threads=max(args.threads // max(workers, 1), 1))
                runs.keep(key(name, workers, args), found[0])
            print(write(args.out, "recipe.md", table(runs, args)))


if __name__ == "__main__":
    if mine := asked(folder=str, task=str, seeds=int, workers=int):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data")
    parser.add_argument("--graphs", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, help="instead of each graph's own number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", default="recipe.jsonl", help="a file of finished runs")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
