"""Where the time of a training step goes: shares of operators, by torch's profiler.

    python benchmarks/shares.py --out docs/results
    python benchmarks/shares.py --out /tmp --models sage --workers 1 --nodes 5000 --edges 50000

Models and graph are those of ``scaling.py``, and two of the same shape with other layers; every worker has one thread.
*Rest* is what remains of the seconds that went by: autograd, Python and waiting for messages besides what is counted.
Dense products are told as a share of the rate of a product of two square matrices of 2048 rows, too. Writes
``shares-cpu.md``. To see what a change gained, run it in a checkout from before it, too.
"""

import argparse
import os
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
from harness.launch import answer, launch
from harness.report import processor, write
from scaling import CLASSES, FEATURES, graph, step
from scaling import network as paper_network
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import pyg_sar
from pyg_sar.linear import product

NAMES = {"sage": "GraphSAGE", "gcn": "GCN", "gat": "GAT", "gatv2": "GATv2", "rgcn": "R-GCN"}
BATCH_NORM = "native_batch_norm", "native_batch_norm_backward"  # which one worker runs
GROUPS = {
    "dense products": {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "linear", "matmul", "_linear_pointwise"},
    "sums": {"spmm_", "sddmm_"},
    "attention, forward": {"attention_"},
    "attention, backward": {"attention_grad_", "additive_grad_"},
    "normalisation": {"moments_", "column_products_", "column_affine_", *BATCH_NORM},
    "ReLU": {"relu", "relu_", "clamp_min", "threshold_backward"},
    "fills": {"zero_", "fill_"},
    "copies": {"copy_", "cat", "index", "index_select", "index_put_", "_index_put_impl_"},
    "additions and scalings": {"add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "sum", "index_add_"},
}
REST, WAITING = "rest", "waiting for messages"
ENTRIES = (*GROUPS, WAITING, REST)


def network(kind: str) -> torch.nn.Module:
    """Return a model of ``scaling.py``, perhaps with other layers."""
    nn = pyg_sar.nn
    if kind == "gcn":
        model = paper_network(nn, "sage")
        model.convs = torch.nn.ModuleList(nn.GCNConv(a, b) for a, b in pairwise([FEATURES, 256, 256, CLASSES]))
    elif kind == "gatv2":
        model = paper_network(nn, "gat")
        convs = [nn.GATv2Conv(FEATURES, 128, 4), nn.GATv2Conv(512, 128, 4), nn.GATv2Conv(512, CLASSES, 4, concat=False)]
        model.convs = torch.nn.ModuleList(convs)
    else:
        model = paper_network(nn, kind)
    return model


def worker(args: argparse.Namespace) -> None:
    """Answer with the seconds of a step, those of its operators, and the rate of dense products, of each model."""
    found = {}
    with pyg_sar.process_group():
        data = pyg_sar.load(args.folder)
        for kind in args.models:
            torch.manual_seed(0)
            model = network(kind)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(2):  # makes what is made once
                step(model, optimizer, data)
            found[kind] = measure(model, optimizer, data, args.steps)
    answer(found)


def measure(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Any, steps: int) -> dict[str, float]:
    """Return seconds of a step and of its entries, and the rate of dense products."""
    # Apart from the profiler, which counts by the shapes of all tensors: noting these takes longer than some operators.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.mkldnn._linear_pointwise: of_product}) as counter:
        step(model, optimizer, data)
    with (
        pyg_sar.record_traffic(data.edge_index) as layers,
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        start = time.perf_counter()
        for _ in range(steps):
            step(model, optimizer, data)
        seconds = time.perf_counter() - start
    entries = dict.fromkeys(ENTRIES, 0.0)
    for event in profiler.key_averages():
        library, _, name = event.key.partition("::")
        group = next((g for g, names in GROUPS.items() if name in names), None)
        if group is not None and library in ("aten", "mkldnn", "pyg_sar"):
            entries[group] += event.self_cpu_time_total / 1e6
    entries[WAITING] = sum(t.forward_wait + t.backward_wait for t in layers)
    entries[REST] = seconds - sum(entries.values())
    found = {name: value / steps for name, value in entries.items()}
    rate = counter.get_total_flops() / found["dense products"] / peak_rate()
    return {**found, "step": seconds / steps, "rate": rate}


def of_product(x: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of a product of rows with a matrix, given the shapes of both."""
    return 2 * x[0] * x[1] * weight[0]


def peak_rate() -> float:
    """Return floating-point operations in a second of a product of large matrices."""
    a = torch.randn(2048, 2048)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        product(a, a)
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times)


def main(args: argparse.Namespace) -> None:
    lines = [heading(args)]
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(args.workers) * len(args.models)) as bar:
        data = graph(args)
        for workers in args.workers:
            folder = f"{scratch}/{workers}"
            pyg_sar.partition(data, workers, folder)
            found: dict[str, dict[str, float]] = {}
            for kind in args.models:
                bar.set_description(f"{kind}, {workers} workers")
                told = ["--folder", folder, "--steps", str(args.steps), "--models", kind]
                ranks = [rank[kind] for rank in launch(__file__, workers, told)]
                found[kind] = max(ranks, key=lambda rank: rank["step"])
                bar.update()
            lines += ["", *table(workers, found)]
    print(write(args.out, "shares-cpu.md", lines))


def heading(args: argparse.Namespace) -> str:
    return (
        f"Shares of a training step, mode 1, of the slowest worker: 3-layer models (GraphSAGE, GCN and R-GCN with 8 "
        f"relations: 256 hidden; GAT and GATv2: 4 heads of 128) with batch normalisation and Adam; generated graph of "
        f"{args.nodes:,} nodes and {args.edges:,} edges, float32, 1 thread a worker; {processor()}, {os.cpu_count()} "
        f"cores, torch {torch.__version__}; {args.steps} steps under torch's profiler. *Rest*: autograd, Python, and "
        "all other operators. Made by `benchmarks/shares.py`."
    )


def table(workers: int, found: dict[str, dict[str, float]]) -> list[str]:
    count = f"{workers} workers" if workers > 1 else "1 worker"
    lines = [f"| {count} | {' | '.join(NAMES[kind] for kind in found)} |", "|---" * (len(found) + 1) + "|"]
    seconds = [f"{it['step']:.2f}" for it in found.values()]
    lines.append(f"| seconds of a step | {' | '.join(seconds)} |")
    for entry in ENTRIES:
        cells = [f"{100 * it[entry] / it['step']:.1f}%" for it in found.values()]
        lines.append(f"| {entry} | {' | '.join(cells)} |")
    rates = [f"{100 * it['rate']:.0f}%" for it in found.values()]
    return [*lines, f"| *rate of dense products, by that of large ones* | {' | '.join(rates)} |"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="docs/results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    worker(arguments) if arguments.worker else main(arguments)
