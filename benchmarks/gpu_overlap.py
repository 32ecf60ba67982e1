"""How much of what workers tell each other hides behind what a GPU computes, where rows travel through gloo.

    python benchmarks/gpu_overlap.py --out docs/results

Workers share one GPU and train GAT. Of one step each is seen what its kernels, its copies from and to the host and its
messages (from the moment they are posted until the host has them) take, and how much of the latter two lies beside a
kernel of the same worker. Kernels of workers that share a GPU take turns, so steps are longer than on a GPU each.
Writes ``gpu-overlap.md`` and ``gpu-overlap.png``.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.launch import GNN, answer, asked, launch, words
from harness.report import write
from harness.timeline import WAITING, watch
from torch.profiler import ProfilerActivity, profile

import pyg_sar
from pyg_sar.data.datasets import community_graph

Spans = list[tuple[float, float]]
HEADS, HIDDEN, FEATURES, CLASSES = 4, 32, 100, 47
COLORS = {"kernels": "tab:blue", "copies": "tab:orange", "messages": "tab:green", "waiting": "tab:red"}


def worker(args: argparse.Namespace) -> None:
    with pyg_sar.process_group() as rank:
        torch.manual_seed(0)
        data = pyg_sar.load(args.folder, args.device)
        model = GNN(pyg_sar.nn, "gat", FEATURES, HIDDEN, CLASSES, HEADS, 0.0).to(args.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            losses = F.cross_entropy(model(data.x, data.edge_index), data.y, reduction="none")
            pyg_sar.global_mean(losses).backward()
            pyg_sar.sum_gradients(model)
            optimizer.step()
            if args.device == "cuda":
                torch.cuda.synchronize()

        for _ in range(3):
            step()
        pyg_sar.all_reduce(torch.ones(1))  # they begin together
        kind = ProfilerActivity.CUDA if args.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen, watch() as host:
            step()
        clock = time.time() - time.perf_counter()  # from that of `watch` to that of the profiler
        waits = [span for span in host.spans if span.kind in WAITING and span.message]
        spans = {
            **of_device(seen),
            "messages": [(span.posted + clock, span.end + clock) for span in waits],
            "waiting": [(span.start + clock, span.end + clock) for span in waits],
        }
        answer({"rank": rank, "start": host.start + clock, "end": host.end + clock, "spans": spans})


def of_device(seen: profile) -> dict[str, Spans]:
    """Return when kernels and copies between device and host ran, in seconds."""
    zero = seen.profiler.kineto_results.trace_start_ns() * 1e-9
    spans: dict[str, Spans] = {"kernels": [], "copies": []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            where = "copies" if "HtoD" in event.name or "DtoH" in event.name else "kernels"
            if where == "copies" or "Mem" not in event.name:
                spans[where].append((zero + event.time_range.start * 1e-6, zero + event.time_range.end * 1e-6))
    return spans


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return spans that do not overlap, in order."""
    found: Spans = []
    for start, end in sorted(map(tuple, spans)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def seconds(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def beside(one: Spans, other: Spans) -> float:
    """Return for how long spans of both go on."""
    return seconds(one) + seconds(other) - seconds(union([*one, *other]))


def table(found: list[dict[str, Any]]) -> list[str]:
    columns = ["worker", "step", *COLORS, "copies beside kernels", "messages beside kernels"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for it in found:
        spans = {kind: union(it["spans"][kind]) for kind in COLORS}
        cells = [f"{1e3 * t:.1f}" for t in (it["end"] - it["start"], *map(seconds, spans.values()))]
        for kind in ("copies", "messages"):
            both = beside(spans[kind], spans["kernels"])
            cells.append(f"{100 * both / max(seconds(spans[kind]), 1e-9):.0f}%")
        lines.append(f"| {it['rank']} | {' | '.join(cells)} |")
    return lines


def plot(path: Path, found: list[dict[str, Any]]) -> None:
    """Draw the steps of all workers, one above the other."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(found), figsize=(9, 2.2 * len(found)), squeeze=False, sharex=True)
    zero = min(it["start"] for it in found)
    for ax, it in zip(axes[:, 0], found, strict=True):
        for row, (kind, color) in enumerate(COLORS.items()):
            spans = [(1e3 * (start - zero), 1e3 * (end - start)) for start, end in union(it["spans"][kind])]
            ax.broken_barh(spans, (row - 0.4, 0.8), color=color)
        ax.set(yticks=range(len(COLORS)), yticklabels=list(COLORS), title=f"worker {it['rank']}")
        ax.invert_yaxis()
    axes[-1, 0].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(args: argparse.Namespace) -> None:
    data = community_graph(args.nodes, args.edges, num_features=FEATURES, num_classes=CLASSES)
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.partition(data, args.workers, folder, method=args.method, overwrite=True)
        found = launch(__file__, args.workers, words(folder=folder, device=args.device))
    found.sort(key=lambda it: it["rank"])
    name = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU"
    head = (
        f"One step of three layers of GAT ({HEADS} heads of {HIDDEN}) with batch normalisation and Adam by "
        f"{args.workers} workers that share {name}, through gloo: {args.nodes:,} nodes, {args.edges:,} edges, parts by "
        f"{args.method}; torch {torch.__version__}. Milliseconds in which at least one of a kind goes on. Made by "
        "`benchmarks/gpu_overlap.py`."
    )
    print(write(args.out, "gpu-overlap.md", [head, "", *table(found)]))
    plot(Path(args.out) / "gpu-overlap.png", found)


if __name__ == "__main__":
    if mine := asked(folder=str, device=str):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--method", default="random")
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
