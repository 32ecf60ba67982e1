"""Peak memory of partitioning, in multiples of the bytes of ``edge_index``, and the share of edges that are cut.

    python benchmarks/partition.py --out docs/results
    python benchmarks/partition.py --out /tmp --nodes 10000 --edges 100000 --parts 2 --graphs Community/1000/9000

Partitions random graphs without features, which are METIS's worst case, each in a fresh process that gives freed
tensors back to the system. A graph is directed (random pairs), or stores both directions of every edge. The cut is that
of other graphs, over a few seeds. Writes ``partition.md``.
"""

import argparse
import os
import statistics
import tempfile
from itertools import product
from pathlib import Path

import torch
from harness.launch import answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, resident, settle
from harness.report import processor, write
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.assign import assign, balanced_weights
from pyg_sar.data.datasets import dataset

# Method, order of rows, whether edges are stored in both directions, and whether there is a single part.
CASES = [
    ("metis", "locality", False, False),
    ("metis", "locality", True, False),
    ("metis", "locality", False, True),
    ("metis", "locality", True, True),
    ("fennel", "id", False, False),
    ("fennel", "id", True, False),
    ("fennel", "id", True, True),
    ("random", "locality", False, False),
    ("random", "id", False, False),
    ("contiguous", "locality", False, False),
    ("contiguous", "id", False, False),
]


def worker(args: argparse.Namespace) -> None:
    method, order, both, single = CASES[args.case]
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(args.nodes, (2, args.edges), generator=generator)
    if both:
        half = edge_index[:, : args.edges // 2]
        edge_index = torch.cat([half, half.flip(0)], 1)
    data = Data(edge_index=edge_index, num_nodes=args.nodes)
    with tempfile.TemporaryDirectory() as scratch:
        before = settle()
        pyg_sar.partition(data, 1 if single else args.parts, Path(scratch) / "parts", method=method, order=order)
        answer((resident("VmHWM") - before) * 2**20 / edge_index.nbytes)


def main(args: argparse.Namespace) -> None:
    lines = [
        f"Peak memory of `pyg_sar.partition` above the graph, in multiples of the bytes of `edge_index`: "
        f"random graphs of {args.nodes:,} nodes and {args.edges:,} edges without features; {processor()}, "
        f"{os.cpu_count()} cores. Made by `benchmarks/partition.py`.",
        "",
        "| method | order of rows | edges | parts | peak / bytes of `edge_index` |",
        "|---|---|---|---|---|",
    ]
    for case, (method, order, both, single) in enumerate(tqdm(CASES)):
        sizes = ["--nodes", str(args.nodes), "--edges", str(args.edges), "--parts", str(args.parts)]
        options = ["--case", str(case), *sizes]
        (peak,) = launch(__file__, 0, options, threads=args.threads, **RETURN_FREED_MEMORY)
        edges, parts = "both directions" if both else "directed", 1 if single else args.parts
        lines.append(f"| {method} | {order} | {edges} | {parts} | {peak:.1f} |")
    lines += ["", *cuts(args)]
    print(write(args.out, "partition.md", lines))


def cuts(args: argparse.Namespace) -> list[str]:
    lines = [
        f"Edges cut, in percent, by parts of equal weight (see `pyg_sar.partition`): the median and range over "
        f"{args.seeds} seeds. *Weight*: largest part over mean, at worst.",
        "",
        "| graph | nodes | edges | parts | random | fennel | metis | weight, fennel | weight, metis |",
        "|---" * 9 + "|",
    ]
    for name, parts in tqdm(list(product(args.graphs, (2, 8, 32)))):
        data = dataset(name, args.root)
        cells, heaviest = [name, f"{data.num_nodes:,}", f"{data.num_edges:,}", str(parts)], []
        for method in ("random", "fennel", "metis"):
            found = [assign(data, parts, method, seed) for seed in range(args.seeds)]
            cut = [100 * (part[data.edge_index[0]] != part[data.edge_index[1]]).double().mean() for part in found]
            cells.append(f"{statistics.median(cut):.1f} ({min(cut):.1f} to {max(cut):.1f})")
            loads = torch.stack([torch.bincount(part, balanced_weights(data), parts) for part in found])
            heaviest.append(f"{(loads.amax(1) / loads.mean(1)).max():.2f}")
        lines.append(f"| {' | '.join(cells + heaviest[1:])} |")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--graphs", nargs="+", default=["Community", "Coauthor/Physics", "Amazon/Computers"])
    parser.add_argument("--root", default="data", help="where data sets are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker(arguments) if arguments.worker else main(arguments)
