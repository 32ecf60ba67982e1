"""Time of an epoch with few labelled nodes, on the rows that they depend on (message flow) and on the whole graph.

    python benchmarks/message_flow_graphs.py --out docs/results
    python benchmarks/message_flow_graphs.py --out /tmp --models sage --layers 2 --degrees 5 --nodes 2000 --rounds 1

How many rows a few nodes depend on is a matter of depth and degree, so both vary. Runs with and without the flow take
turns, so that slow minutes of the machine hit both alike; an epoch takes as long as its slowest worker, and the first
of a run, which makes what is made once, does not count. Features never change: their rows may be read once, and the
first layer may keep what it makes of them alone. Before it trains, a run with the flow checks that the outputs of the
labelled nodes are those of the whole graph. Writes ``message-flow-graphs.md``.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.launch import GNN, answer, launch
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph

WAYS = ("kept", "flow", "whole")
Case = tuple[int, str, int]  # average degree, model, number of layers


def graph(args: argparse.Namespace, degree: int) -> Any:
    data = community_graph(args.nodes, args.nodes * degree, num_features=100, num_classes=47)
    data.train_mask = torch.rand(args.nodes, generator=torch.Generator().manual_seed(0)) < args.labelled
    return data


def worker(args: argparse.Namespace) -> None:

    with pyg_sar.process_group():
        torch.manual_seed(0)
        data = pyg_sar.load(args.folder)
        (kind,), (layers,) = args.models, args.layers
        hidden = 128 if kind == "gat" else 256  # of each of 4 heads
        model = GNN(pyg_sar.nn, kind, data.x.size(1), hidden, data.num_classes, dropout=0.0, layers=layers)
        optimizer = torch.optim.Adam(model.parameters())
        start = time.perf_counter()
        flow = None if args.way == "whole" else pyg_sar.message_flow_graphs(data.edge_index, data.train_mask, layers)
        x = data.x[flow.node_rows] if args.way == "kept" else None
        if x is not None:
            flow.edge_indices[0].cache_features(x)
        made, epochs, received = time.perf_counter() - start, [], 0
        if flow is not None:
            check(model, data, flow, x)
        for _ in range(args.epochs):
            start = time.perf_counter()
            with pyg_sar.record_traffic(data.edge_index) as traffic:
                step(model, optimizer, data, flow, x)
            epochs.append(time.perf_counter() - start)
            received = sum(t.forward_received + t.backward_received for t in traffic)
        rows = [] if flow is None else [len(flow.node_rows), *(layer.graph.num_dst for layer in flow.edge_indices)]
        answer({"epochs": epochs, "made": made, "received": received / 2**20, "rows": rows})


def labelled(
    model: torch.nn.Module, data: Any, flow: pyg_sar.MessageFlowGraphs | None, x: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the outputs of the labelled nodes; ``x`` are the rows that the flow reads, if they are kept."""
    if flow is None:
        return model(data.x, data.edge_index)[data.train_mask]
    return model(data.x[flow.node_rows] if x is None else x, flow.edge_indices)


@torch.no_grad()
def check(model: torch.nn.Module, data: Any, flow: pyg_sar.MessageFlowGraphs, x: torch.Tensor | None) -> None:
    model.eval()
    torch.testing.assert_close(labelled(model, data, flow, x), labelled(model, data, None), rtol=1e-4, atol=1e-4)
    model.train()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any, flow: Any, x: Any) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(labelled(model, data, flow, x), data.y[data.train_mask], reduction="none")
    pyg_sar.global_mean(loss).backward()
    pyg_sar.sum_gradients(model)
    optimizer.step()


def measure(args: argparse.Namespace, folder: str, model: str, layers: int, way: str) -> dict[str, Any]:
    """Run once; take the slowest worker's times, the mean of the bytes, and the sum of the rows."""
    options = ["--folder", folder, "--models", model, "--layers", str(layers), "--way", way]
    ranks = launch(__file__, args.workers, [*options, "--epochs", str(args.epochs)])
    by_epoch = zip(*(rank["epochs"] for rank in ranks), strict=True)
    return {
        "epochs": [max(seconds) for seconds in by_epoch][1:],
        "made": max(rank["made"] for rank in ranks),
        "received": statistics.mean(rank["received"] for rank in ranks),
        "rows": [sum(rows) for rows in zip(*(rank["rows"] for rank in ranks), strict=True)],
    }


def main(args: argparse.Namespace) -> None:
    runs = list(product(args.models, args.layers, range(args.rounds), WAYS))
    found: dict[Case, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(runs) * len(args.degrees)) as bar:
        for degree in args.degrees:
            folder = str(Path(scratch) / str(degree))
            pyg_sar.partition(graph(args, degree), args.workers, folder)
            for model, layers, _, way in runs:
                case = found.setdefault((degree, model, layers), {way: [] for way in WAYS})
                case[way].append(measure(args, folder, model, layers, way))
                bar.update()
    print(write(args.out, "message-flow-graphs.md", [heading(args), "", *table(found)]))


def heading(args: argparse.Namespace) -> str:
    return (
        f"Training epochs with {100 * args.labelled:g}% labelled nodes on {args.workers} workers of 1 thread: "
        "`pyg_sar.message_flow_graphs` against the whole graph. GraphSAGE (256 hidden) and GAT (4 heads of 128), batch "
        f"normalisation, Adam, mode 1; generated graphs of {args.nodes:,} nodes, 100 features, 47 classes, METIS "
        f"parts; float32; {processor()}, {os.cpu_count()} cores, torch {torch.__version__}. *Rows*: those that the "
        "flow reads, then those that each layer computes. *Kept*: these are read once, and the first layer keeps sums "
        "of them (GraphSAGE) or those of other workers (GAT). *Epoch*: seconds, medians (and least to most) over "
        f"{args.rounds} alternating runs of {args.epochs} epochs, the first of each left out; *making it*: the flow, "
        "once. *MiB received*: by a worker in an epoch. Made by `benchmarks/message_flow_graphs.py`."
    )


def table(found: dict[Case, dict[str, list[Any]]]) -> list[str]:
    columns = ["model", "layers", "average degree", "rows", "epoch, flow, kept", "epoch, flow", "epoch, whole graph"]
    columns += ["whole / kept", "whole / flow", "making it"]
    columns += ["MiB received, flow, kept", "MiB received, flow", "MiB received, whole graph"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (degree, model, layers), case in found.items():
        seconds = {way: [s for it in case[way] for s in it["epochs"]] for way in WAYS}
        median = {way: statistics.median(s) for way, s in seconds.items()}
        cells = [model, str(layers), str(degree), ", ".join(f"{n:,}" for n in case["flow"][0]["rows"])]
        cells += [f"{median[way]:.3f} ({min(seconds[way]):.3f} to {max(seconds[way]):.3f})" for way in WAYS]
        cells += [f"{median['whole'] / median[way]:.2f}" for way in WAYS[:-1]]
        cells.append(f"{statistics.median(it['made'] for it in case['flow']):.3f}")
        cells += [f"{case[way][0]['received']:.1f}" for way in WAYS]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"])
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--degrees", nargs="+", type=int, default=[5, 20], help="average degrees of the graphs")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--labelled", type=float, default=0.01, help="fraction of the nodes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5, help="of each run; the first does not count")
    parser.add_argument("--rounds", type=int, default=3, help="runs with the flow, and as many without")
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    worker(arguments) if arguments.worker else main(arguments)
