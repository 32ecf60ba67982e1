"""Peak memory of partitioning, in multiples of the bytes of ``edge_index``.

    python benchmarks/partition.py --out docs
    python benchmarks/partition.py --out /tmp --nodes 10000 --edges 100000 --parts 2

Partitions random graphs without features, which are METIS's worst case, each in a fresh process that gives freed
tensors back to the system. A graph is directed (random pairs), or stores both directions of every edge. Writes
``partition.md``.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from launch import answer, launch
from layers import processor
from process_memory import RETURN_FREED_MEMORY, resident, settle
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_sar

# Method, order of rows, whether edges are stored in both directions, and whether there is a single part.
CASES = [
    ("metis", "locality", False, False),
    ("metis", "locality", True, False),
    ("metis", "locality", False, True),
    ("metis", "locality", True, True),
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
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "partition.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    worker(arguments) if arguments.worker else main(arguments)
