"""What a pipeline of layers moves on eight workers, beside workers that share the graph.

    python benchmarks/pipeline.py --root data --out docs/results
    python benchmarks/pipeline.py --root data --out /tmp --graphs Computers --layers 8

Counts, no times. ``root`` holds the raw files of PyG's data sets, and ``npz/squirrel.npz``; graphs that are not there
are left out, and named. ``runs`` keeps what was counted. Writes ``pipeline-traffic.md``, anew after each graph.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.deep import graph, partitions, there
from harness.launch import DeepGNN, answer, asked, launch, words
from harness.report import write
from harness.runs import Runs
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.assign import assign
from pyg_sar.data.store import read_meta
from pyg_sar.offload.schedule import ranges
from pyg_sar.planner import received

MODELS = {"gcn": "GCN", "sage": "GraphSAGE", "gcn2": "GCNII", "resgcn": "ResGCN+"}
CASES = [("squirrel", 100), ("tolokers", 100), ("Computers", 100), ("Physics", 100), ("squirrel", 1000)]
CASES += [("Community/50000/2500000", 100)]
WORKERS, STAGES = 8, (8, 4, 2)
# Of the paper: graph, nodes, remote rows of 8 parts per node, features, classes, hidden; and GB of graph parallel and
# pipeline for each model
PAPER = [
    ("Squirrel", 5_201, 2.22, 2089, 5, 1000, [(4.43, 0.27), (6.10, 0.27), (4.53, 0.54), (6.20, 0.27)]),
    ("Physics", 34_493, 0.99, 8415, 5, 100, [(0.88, 0.18), (0.94, 0.18), (0.88, 0.36), (0.89, 0.18)]),
    ("Flickr", 89_250, 2.15, 500, 7, 100, [(4.60, 0.47), (4.62, 0.47), (4.60, 0.93), (4.62, 0.47)]),
    ("Reddit", 232_965, 2.61, 602, 41, 100, [(14.50, 1.22), (14.52, 1.22), (14.50, 2.43), (14.52, 1.22)]),
]
# Of a model: square matrices in all layers, matrices of its first and of its last layer, tensors between stages
SHAPES = {"gcn": (30, 1, 1), "sage": (60, 2, 1), "gcn2": (32, 1, 2), "resgcn": (64, 1, 1)}


def loss_of(data: Any) -> Any:
    """Return what a chunk's share of the loss is; every node counts as labelled."""
    total = data.get("total_nodes") or data.num_nodes
    return lambda out, rows: F.cross_entropy(out, data.y[rows], reduction="sum") / total


def step(model: Any, data: Any) -> None:
    """Train all rows at once for a step, on workers that share the graph."""
    loss_of(data)(model(data.x, data.edge_index), slice(None)).backward()
    pyg_sar.sum_gradients(model)


def worker(args: argparse.Namespace) -> None:
    """Count one step of every model on every mesh, and answer the bytes of this worker."""
    found = {}
    with pyg_sar.process_group() as rank:
        for kind in MODELS:
            for stages in (0, *STAGES):
                parts = WORKERS // (stages or 1)
                mesh = None if stages == 0 else pyg_sar.stage_mesh(stages)
                group = None if mesh is None else mesh.get_group("graph")
                data = pyg_sar.load(f"{args.folder}/{parts}", group=group, remat=False)
                torch.manual_seed(0)
                model = DeepGNN(pyg_sar.nn, kind, data.x.size(1), args.hidden, data.num_classes, args.layers)
                if mesh is None:
                    with pyg_sar.record_traffic(data.edge_index) as within:
                        step(model, data)
                    parameters = sum(p.nbytes for p in model.parameters())
                    found[f"{kind} 0"] = [received(within), 0, 2 * (WORKERS - 1) * parameters // WORKERS]
                    continue
                pipe = pyg_sar.Pipeline(model.blocks, data.edge_index, mesh, args.chunks)
                pipe.step(data.x, loss_of(data))  # fills the history, which later epochs do not
                pipe.blocks.zero_grad()
                with pipe.record() as seen:
                    pipe.step(data.x, loss_of(data))
                found[f"{kind} {stages}"] = [received(seen.within), received([seen.between]), seen.parameters]
                del pipe, model
        answer([rank, found])


def stale_share(folder: str, chunks: int) -> float:
    """Return the share of edges that read history, in the mean of all orders: half of those between chunks."""
    data = pyg_sar.load(folder)
    edges = data.edge_index.graph
    rowptr = F.pad(edges.degree.cumsum(0), (1, 0))
    of = torch.zeros(edges.num_src, dtype=torch.long)
    for k, span in enumerate(ranges(rowptr, chunks)):
        of[span] = k
    source, row = edges.coo()
    return float((of[source] != of[row]).double().mean()) / 2


def main(args: argparse.Namespace) -> None:
    """Count, compare with the formulas, and write the table."""
    cases = [case for case in CASES if not args.graphs or case[0] in args.graphs]
    cases += [(name, 100) for name in args.graphs or () if name not in dict(CASES)]
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(args.runs or f"{scratch}/runs")
        keys = {case: json.dumps([*case, args.layers, args.chunks]) for case in cases}
        for name, width in tqdm(cases):
            if keys[name, width] not in runs and there(name, args.root):
                found = counted(name, width, f"{scratch}/{name.replace('/', '-')}", args)
                runs.keep(keys[name, width], found)
            write(args.out, "pipeline-traffic.md", page([runs[key] for key in keys.values() if key in runs], args))


def counted(name: str, width: int, folder: str, args: argparse.Namespace) -> list[list[str]]:
    """Return the lines of a graph's traffic, and those of its stale edges if it is new."""
    data, stale = graph(name, args.root), []
    if not Path(folder).exists():
        partitions(data, folder, (1, 2, 4, 8))
        stale = stale_lines(name, folder, data)
    large = width > 100 or data.num_nodes > 40_000  # history of all workers would not fit a machine of 24 GB
    chunks = 1 if large else args.chunks
    options = words(folder=folder, hidden=width, layers=args.layers, chunks=chunks)
    found = launch(__file__, WORKERS, options)
    return [rows_of(name, width, data.num_nodes, folder, [each for _, each in found], args.layers), stale]


def page(tables: list[list[list[str]]], args: argparse.Namespace) -> list[str]:
    """Return all lines, of the graphs that were counted."""
    columns = ["graph", "width", "model", "rho 8, 4, 2", "sharing: rows", "parameters"]
    columns += [f"{s} x {WORKERS // s}: {what}" for s in STAGES for what in ("rows", "parameters")]
    lines = [TRAFFIC.format(layers=args.layers, chunks=args.chunks)]
    lines += [f"| {' | '.join([*columns, 'rows fall by', 'crossing'])} |", "|---" * (len(columns) + 2) + "|"]
    lines += [line for rows, _ in tables for line in rows]
    lines += ["", STALE, "", "| graph | chunks | ranges | METIS |", "|---|---|---|---|"]
    return [*lines, *dict.fromkeys(line for _, stale in tables for line in stale), "", *paper()]


def rows_of(name: str, width: int, nodes: int, folder: str, found: Any, layers: int) -> list[str]:
    """Return a line for each model; raise unless all bytes are those of the formulas."""
    rho = {p: sum(map(sum, read_meta(f"{folder}/{p}")["boundary"])) / nodes for p in (8, 4, 2, 1)}
    lines = []
    for kind, title in MODELS.items():
        total = {s: [sum(one[f"{kind} {s}"][k] for one in found) for k in range(3)] for s in (0, *STAGES)}
        carried = 2 if kind == "gcn2" else 1
        for s, (within, between, _) in total.items():
            parts = WORKERS // (s or 1)
            expected = [
                round(2 * rho[parts] * nodes) * layers * width * 4,
                2 * max(s - 1, 0) * carried * nodes * width * 4,
            ]
            if [within, between] != expected:
                raise RuntimeError(f"{name}, {kind}, {s} stages: {[within, between]} bytes, expected {expected}")
        cells = [name, width, title, ", ".join(f"{rho[p]:.2f}" for p in (8, 4, 2))]
        for within, between, parameters in total.values():
            cells += [f"{(within + between) / 2**20:.1f}", f"{parameters / 2**20:.1f}"]
        least = sum(total[WORKERS][:2])
        cells += [f"{total[0][0] / least:.1f}", f"{carried * (WORKERS - 1) / rho[WORKERS]:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def stale_lines(name: str, folder: str, data: Any) -> list[str]:
    """Return the shares of edges that read history, by ranges of rows and by METIS."""
    lines = []
    for chunks in (8, 32):
        part = assign(data, chunks)
        src, dst = data.edge_index
        best = float((part[src] != part[dst]).double().mean()) / 2
        lines.append(f"| {name} | {chunks} | {stale_share(f'{folder}/1', chunks):.1%} | {best:.1%} |")
    return lines


def paper() -> list[str]:
    """Return the paper's volumes beside what the counts of its graphs give."""
    lines = [
        PAPER_TEXT,
        "",
        "| graph | model | sharing: paper | formula | pipeline: paper | formula | falls by: paper | rows |",
    ]
    lines.append("|---" * 8 + "|")
    layers, workers, gib = 32, 8, 4 / 2**30
    for name, nodes, rho, features, classes, width, volumes in PAPER:
        for (kind, (squares, ends, carried)), (shared, piped) in zip(SHAPES.items(), volumes, strict=True):
            rows = 2 * rho * layers * nodes * width * gib
            parameters = 2 * (workers - 1) * (squares * width + ends * (features + classes)) * width * gib
            between = 2 * (workers - 1) * carried * nodes * width * gib
            cells = [name, MODELS[kind], f"{shared:.2f}", f"{rows + parameters:.2f}", f"{piped:.2f}", f"{between:.2f}"]
            lines.append(f"| {' | '.join(cells)} | {shared / piped:.1f} | {rows / between:.1f} |")
    return lines


TRAFFIC = """\
MiB that all of eight workers together receive in an epoch, counted, float32, {layers} layers, forward and backward,
{chunks} chunks (one at width 1000 and on 50k nodes, which moves the same). *Sharing*: eight parts of the graph, rows
kept, the mode that moves least. *S x W*: S stages of W workers. *rho*: rows read of other workers for each node, in 8,
4 and 2 parts. Every count equals, to the byte, 2 (S - 1) c N H b between stages and 2 rho N L H b within (c: tensors
that blocks hand on, 2 for GCNII; N nodes, L layers of width H, b = 4), or the script fails. *Parameters*: what a sum of
gradients on a ring takes, from their sizes. *Rows fall by*: sharing by 8 x 1. *Crossing*: the number of layers from
which on 8 x 1 moves fewer rows. Made by `benchmarks/pipeline.py`.
"""
STALE = "Edges that read history, in the mean over all orders, by how nodes are cut into chunks:"
PAPER_TEXT = """\
The paper's volumes (GB, its table 5) beside 2 rho L N H + 2 (M - 1) P numbers of four bytes, with its rho at M = 8
parts: its figures of graph parallelism contain the sum of the gradients of P parameters, of which those of the first
layer, from features to rows, are many. "Up to 22.89x" (ResGCN+ on Squirrel) is 10.1 in rows."""


if __name__ == "__main__":
    if mine := asked(folder=str, hidden=int, layers=int, chunks=int):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", help="only these")
    parser.add_argument("--root", default="data")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--runs", help="a file of finished counts")
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
