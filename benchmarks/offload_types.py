"""Rows of several types of nodes at home (``pyg_sar.offload`` of a ``HeteroData``) against rows in memory, and PyG.

    python benchmarks/offload_types.py --out docs/results

A random graph in the proportions of ogbn-mag: papers, authors, institutions and fields, and seven types of edges. Each
setting is a process of its own; they take turns, and the table has medians. *Device* is the peak of all tensors that
are made in a step, other than rows at home; *planned* is what a dry run tells of it. The loss of the second step is
compared. Writes ``offload-types.md``.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from harness.launch import answer, asked, launch, words
from harness.report import processor, write
from torch_geometric.data import HeteroData
from tqdm import tqdm

import pyg_sar
from pyg_sar.live import Live
from pyg_sar.offload.counts import counts_of_data
from pyg_sar.offload.move import graphs_of
from pyg_sar.offload.plan import plan_offload

NODES = {"paper": 736_389, "author": 1_134_649, "institution": 8_740, "field": 59_965}
EDGES = {("author", "affiliated_with", "institution"): 1_043_998, ("author", "writes", "paper"): 7_145_660,
         ("paper", "cites", "paper"): 5_416_271, ("paper", "has_topic", "field"): 7_505_078}  # fmt: skip
CLASSES, LAYERS = 349, 2


def graph(scale: int, channels: int) -> HeteroData:
    """Return a graph of so many times fewer nodes and edges."""
    torch.manual_seed(0)
    data, nodes = HeteroData(), {t: max(n // scale, 8) for t, n in NODES.items()}
    for t, n in nodes.items():
        data[t].x = torch.randn(n, channels)
    for (s, name, t), count in EDGES.items():
        edge_index = torch.stack([torch.randint(nodes[k], (count // scale,)) for k in (s, t)])
        data[s, name, t].edge_index = edge_index
        if s != t:
            data[t, f"rev_{name}", s].edge_index = edge_index.flip(0)
    data["paper"].y = torch.randint(CLASSES, (nodes["paper"],))
    data["paper"].train_mask = torch.arange(nodes["paper"]) % 2 == 0
    return data


class Net(torch.nn.Module):
    """Layers over all types of edges, normalised, and scores of papers."""

    def __init__(self, kind: str, channels: int, hidden: int, edge_types: list[Any]) -> None:
        super().__init__()
        make = {
            "sage": lambda: pyg.HeteroConv({it: pyg.SAGEConv((hidden, hidden), hidden) for it in edge_types}),
            "hgt": lambda: pyg.HGTConv(hidden, hidden, (list(NODES), edge_types), heads=4),
        }[kind]
        self.lins = torch.nn.ModuleDict({t: torch.nn.Linear(channels, hidden) for t in NODES})
        self.convs = torch.nn.ModuleList(make() for _ in range(LAYERS))
        self.norms = torch.nn.ModuleList(
            torch.nn.ModuleDict({t: pyg.BatchNorm(hidden) for t in NODES}) for _ in range(LAYERS)
        )
        self.lin = torch.nn.Linear(hidden, CLASSES)

    def forward(self, x: dict[str, Any], edge_index: dict[Any, Any]) -> torch.Tensor:
        x = {t: self.lins[t](rows).relu() for t, rows in x.items()}
        for conv, norms in zip(self.convs, self.norms, strict=True):
            x = {t: norms[t](rows).relu() for t, rows in conv(x, edge_index).items()}
        return self.lin(x["paper"])


def step(model: torch.nn.Module, data: HeteroData, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    out, mask = model(data.x_dict, data.edge_index_dict), data["paper"].train_mask
    loss = F.cross_entropy(out[mask], data["paper"].y[mask])
    loss.backward()
    optimizer.step()
    return loss.item()


def worker(args: argparse.Namespace) -> None:
    """Train, and answer what was found."""
    data = graph(args.scale, args.channels)
    torch.manual_seed(1)
    sizes = args.kind, args.channels, args.hidden, data.edge_types
    model = Net(*sizes)
    if args.chunks >= 0:
        for it in data.edge_types:
            ends = tuple(data[t].num_nodes for t in it[::2])
            data[it].edge_index = pyg_sar.shard(data[it].edge_index, ends[0] if it[0] == it[-1] else ends)
        pyg_sar.nn.convert(model)
    planned, place = 0, None
    if args.chunks > 0:
        counts = counts_of_data(data, graphs_of(data), args.chunks)
        channels = dict.fromkeys(NODES, args.channels)
        planned = plan_offload(lambda: pyg_sar.nn.convert(Net(*sizes)), counts, channels).step
        data = pyg_sar.offload(data, chunks=args.chunks)
        place = data["paper"].x.place
    optimizer, seconds, losses = torch.optim.Adam(model.parameters()), [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(step(model, data, optimizer))
        seconds.append(time.perf_counter() - start)
    with Live() as live:
        step(model, data, optimizer)
    home = place.home.peak if place is not None else 0
    answer({"seconds": statistics.median(seconds[1:]), "loss": losses[1], "device": live.peak, "planned": planned,
            "home": home})  # fmt: skip


def main(args: argparse.Namespace) -> None:
    settings = [(kind, chunks) for kind in args.models for chunks in (-1, 0, *args.chunks)]
    found: dict[Any, list[dict[str, Any]]] = {setting: [] for setting in settings}
    sizes = {"scale": args.scale, "channels": args.channels, "hidden": args.hidden, "steps": args.steps}
    for _ in tqdm(range(args.rounds)):
        for kind, chunks in settings:
            found[kind, chunks] += launch(__file__, 0, words(kind=kind, chunks=chunks, **sizes), args.threads)
    lines = [
        f"A random graph in the proportions of ogbn-mag, {args.scale} times smaller, {args.channels} features; "
        f"{LAYERS} layers of {args.hidden} (GraphSAGE for each type of edges, HGT with 4 heads), batch normalisation, "
        f"Adam, single precision, {args.threads} threads, medians of {args.rounds} rounds. {processor()}, torch "
        f"{torch.__version__}. Made by `benchmarks/offload_types.py`.",
        "",
        "| model | rows | s a step | times PyG | device MiB | of PyG's | planned | MiB at home |",
        "|" + "---|" * 8,
    ]
    for (kind, chunks), runs in found.items():
        one = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
        whole = {k: statistics.median(r[k] for r in found[kind, -1]) for k in one}
        assert abs(one["loss"] - whole["loss"]) <= 1e-4 * abs(whole["loss"])
        rows = {-1: "PyG", 0: "in memory"}.get(chunks, f"at home, {chunks} chunks")
        times, share = (one[k] / whole[k] for k in ("seconds", "device"))
        planned = f"{one['planned'] / one['device']:.2f} times" if one["planned"] else ""
        lines.append(
            f"| {kind} | {rows} | {one['seconds']:.2f} | {times:.2f} | {one['device'] / 2**20:.0f} | {share:.2f} | "
            f"{planned} | {one['home'] / 2**20:.0f} |"
        )
    print(write(args.out, "offload-types.md", lines))


if __name__ == "__main__":
    if told := asked(kind=str, chunks=int, scale=int, channels=int, hidden=int, steps=int):
        worker(told)
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--models", nargs="+", default=["sage", "hgt"])
        parser.add_argument("--chunks", nargs="+", type=int, default=[4, 16])
        parser.add_argument("--scale", type=int, default=20)
        parser.add_argument("--channels", type=int, default=128)
        parser.add_argument("--hidden", type=int, default=128)
        parser.add_argument("--steps", type=int, default=4)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--threads", type=int, default=2)
        parser.add_argument("--out", default="docs/results")
        main(parser.parse_args())
