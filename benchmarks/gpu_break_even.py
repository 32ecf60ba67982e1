"""When an ordinary ``edge_index`` on a GPU is worth a graph of its own: layers of PyG and ours, and what a graph costs.

    python benchmarks/gpu_break_even.py --out docs/results

Milliseconds by the clock, forward and backward of one layer, medians. *graph* is the first call on a new
``edge_index``, that is, with the making of its graph and of the transpose; the *break-even* is the number of calls on
the same ``edge_index`` after which that is made good.

Writes ``gpu-break-even.md``.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import torch_geometric.nn
from harness.device import power_law_graph
from harness.layer_jobs import clock
from harness.report import write
from torch import Tensor
from tqdm import tqdm

import pyg_sar

LAYERS = {"SAGEConv": (64,), "GCNConv": (64,), "GATConv": (16, 4), "GATv2Conv": (16, 4)}
SIZES = [(2_000, 10_000), (10_000, 100_000), (50_000, 1_000_000), (200_000, 5_000_000)]


def timed(function: Callable[[], object]) -> float:
    """Return the milliseconds that host and device take together."""
    start = clock("cuda")
    function()
    return clock("cuda") - start


def step(layer: torch.nn.Module, x: Tensor, edge_index: Tensor) -> None:
    """Run forward and backward."""
    layer(x, edge_index).sum().backward()


def measure(name: str, nodes: int, edges: int, repetitions: int) -> tuple[float, float, float]:
    """Return milliseconds of PyG, of ours on a graph, and of ours on an ``edge_index`` that becomes one."""
    x, edge_index = torch.randn(nodes, 64, device="cuda"), power_law_graph(nodes, edges, loops=False)
    times = []
    x.requires_grad_()
    theirs = getattr(torch_geometric.nn, name)(64, *LAYERS[name]).cuda()
    ours = getattr(pyg_sar.nn, name)(64, *LAYERS[name]).cuda()
    graph = pyg_sar.shard(edge_index, nodes)
    runs = (
        lambda: step(theirs, x, edge_index),
        lambda: step(ours, x, graph),
        lambda: step(ours, x, pyg_sar.shard(edge_index.clone(), nodes)),
    )
    for run in runs:
        times.append(statistics.median([timed(run) for _ in range(repetitions + 3)][3:]))
    return times[0], times[1], times[2]


def main(args: argparse.Namespace) -> None:
    lines = [
        f"One layer on one {torch.cuda.get_device_name()}, 64 features, torch {torch.__version__}, PyG "
        f"{torch_geometric.__version__}. Made by `benchmarks/gpu_break_even.py`.",
        "",
        "| layer | nodes | edges | PyG ms | pyg_sar ms | with graph ms | break-even |",
        "|---" * 7 + "|",
    ]
    for name in LAYERS:
        for nodes, edges in tqdm(SIZES, name):
            theirs, ours, first = measure(name, nodes, edges, args.repetitions)
            calls = f"{(first - ours) / (theirs - ours):.1f}" if theirs > ours else "never"
            lines.append(f"| {name} | {nodes} | {edges} | {theirs:.2f} | {ours:.2f} | {first:.2f} | {calls} |")
            text = write(args.out, "gpu-break-even.md", lines)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
