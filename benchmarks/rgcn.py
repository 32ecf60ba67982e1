"""Time of R-GCN by runs of edges and by sums for every relation, by the number of blocks; and what ranges of rows cost.

    python benchmarks/rgcn.py --out docs/results
    python benchmarks/rgcn.py --out /tmp --nodes 300 --edges 2000 --blocks 2 --sizes 64 --repetitions 1

A layer of 256 columns, forward and backward, in one process. Blocks are shards of nodes in random order, so that each
reads nearly all rows and has as many runs as there can be: the most that several workers multiply. What runs and sums
make for several blocks says when a worker should take which (``MOST_BLOCKS`` in ``rgcn_conv.py``); the second table is
of runs by how many rows a range has, at least (``SIZE`` in ``runs.py``). Every setting lives in a child process of its
own and they take turns; the table has medians. Peaks of memory come last, in fresh processes that give freed tensors
back to the system. Writes ``rgcn-cpu.md``.
"""

import argparse
import itertools
import statistics
import sys
import time
from contextlib import ExitStack

import torch
from harness.layer_jobs import BASES, RELATIONS
from harness.process_memory import RETURN_FREED_MEMORY, peak, settle
from harness.report import processor, write
from harness.rounds import Child, alternate, serve
from tqdm import tqdm

import pyg_sar
from pyg_sar import runs
from pyg_sar.data.datasets import community_graph
from pyg_sar.nn.conv import rgcn_conv

WIDTH = 256
BY_RUNS, BY_SUMS = "runs", "sums"


class Job:
    """A layer on a graph in shards."""

    def __init__(self, nodes: int, edges: int, blocks: int, bases: int, way: str, size: int) -> None:
        rgcn_conv.MOST_BLOCKS = dict.fromkeys((True, False), blocks if way == BY_RUNS else 0)
        runs.SIZE = size
        torch.manual_seed(0)
        edge_index = community_graph(nodes, edges, num_features=1).edge_index
        self.edge_type = torch.randint(RELATIONS, edge_index[0].shape)
        self.edge_index = pyg_sar.shard(edge_index, nodes, blocks)
        self.layer = pyg_sar.nn.RGCNConv(WIDTH, WIDTH, RELATIONS, num_bases=bases or None)
        self.x, self.grad = torch.randn(2, nodes, WIDTH)
        self.x.requires_grad_()

    def run(self) -> float:
        """Return the seconds of both passes."""
        start = time.perf_counter()
        self.layer(self.x, self.edge_index, self.edge_type).backward(self.grad)
        seconds = time.perf_counter() - start
        self.x.grad = None
        self.layer.zero_grad()
        return seconds

    def memory(self) -> float:
        """Return the peak of both passes in MiB above what is there before, without the output and its gradients."""
        self.run()
        before = settle()
        self.run()
        results = self.x.nbytes * 2 + sum(p.nbytes for p in self.layer.parameters())
        return peak() - before - results / 2**20


def measure(args: argparse.Namespace, settings: list[tuple[int, int, str, int]]) -> list[tuple[float, float]]:
    """Return median seconds and the peak in MiB of each setting."""
    told = [[str(value) for value in (args.nodes, args.edges, *setting)] for setting in settings]
    with ExitStack() as stack:
        children = [stack.enter_context(Child(__file__, its, args.threads)) for its in told]
        times = alternate(children, "run", args.repetitions, warmups=1)  # which makes runs
    found = []
    for its, words in zip(times, told, strict=True):
        with Child(__file__, words, args.threads, **RETURN_FREED_MEMORY) as child:
            found.append((statistics.median(its), child.ask("memory")))
    return found


def main(args: argparse.Namespace) -> None:
    columns = "bases", "blocks", "runs, s", "sums, s", "runs / sums", "runs, MiB", "sums, MiB"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for bases, blocks in tqdm([*itertools.product((0, BASES), args.blocks)]):
        settings = [(blocks, bases, way, runs.SIZE) for way in (BY_RUNS, BY_SUMS)]
        (by_runs, less), (by_sums, more) = measure(args, settings)
        cells = bases or "none", blocks, f"{by_runs:.2f}", f"{by_sums:.2f}", f"{by_runs / by_sums:.2f}"
        lines.append(f"| {' | '.join(map(str, cells))} | {less:.0f} | {more:.0f} |")
    lines += ["", "| bases | blocks | rows of a range | s | MiB |", "|---" * 5 + "|"]
    for bases, blocks in tqdm([*itertools.product((0, BASES), (1, 2))]):
        found = measure(args, [(blocks, bases, BY_RUNS, size) for size in args.sizes])
        for size, (seconds, memory) in zip(args.sizes, found, strict=True):
            lines.append(f"| {bases or 'none'} | {blocks} | {size:,} | {seconds:.2f} | {memory:.0f} |")
    head = (
        f"A layer of R-GCN, {WIDTH} columns to {WIDTH}, {RELATIONS} relations, forward and backward in one process on "
        f"{processor()}, {args.threads} threads; {args.nodes:,} nodes, {args.edges:,} edges in shards of nodes in "
        f"random order; medians of {args.repetitions} alternating repetitions; MiB above inputs and results. "
        f"torch {torch.__version__}. Made by `benchmarks/rgcn.py`."
    )
    print(write(args.out, "rgcn-cpu.md", [head, "", *lines]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        nodes, edges, blocks, bases, way, size = sys.argv[2:]
        serve(lambda: Job(int(nodes), int(edges), int(blocks), int(bases), way, int(size)))
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
