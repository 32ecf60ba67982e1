"""Rows at home (``pyg_sar.offload``) on a GPU against rows in its memory: time of a step, memory, and the bus.

    python benchmarks/gpu_offload.py --out docs/results    # 1M nodes, 25M edges
    python benchmarks/gpu_offload.py --device cpu --nodes 20000 --edges 400000 --out /tmp

Three layers of GraphSAGE or GAT, batch normalisation, Adam, in one process; homes in pinned memory. Edges join *near*
nodes, as after a good partition, or *any*, the worst case. *Bus* is the share of the step that copies of as many bytes
take, both ways one after the other. Losses of the second step are compared. Writes ``gpu-offload.md``.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch
from harness.device import power_law_graph
from harness.layer_jobs import clock
from harness.process_memory import peak, settle
from harness.report import processor, write
from offload import bytes_of, step
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_sar

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import GNN

FEATURES, CLASSES, REACH = 128, 32, 2000


def edges_of(graph: str, nodes: int, edges: int) -> Tensor:
    """Draw edges."""
    if graph == "any":
        return power_law_graph(nodes, edges, "cpu", loops=False)
    g = torch.Generator().manual_seed(0)
    dst = torch.randint(nodes, (edges,), generator=g)
    src = (dst + (REACH * torch.randn(edges, generator=g)).long()) % nodes
    return torch.stack([src, dst])


def make_data(graph: str, nodes: int, edges: int) -> Data:
    """Return a graph with features and labels, on the CPU."""
    x = torch.randn(nodes, FEATURES, generator=torch.Generator().manual_seed(1))
    edge_index = pyg_sar.shard(edges_of(graph, nodes, edges), nodes)
    return Data(x=x, y=x[:, :CLASSES].argmax(1), edge_index=edge_index, train_mask=torch.arange(nodes) % 2 == 0)


def measure(args: argparse.Namespace, whole: Data, kind: str, chunks: int) -> dict[str, float]:
    """Train some steps, with rows in the memory of the device if there are no chunks."""
    torch.manual_seed(0)
    hidden = args.hidden // 4 if kind == "gat" else args.hidden
    model = GNN(pyg_sar.nn, kind, FEATURES, hidden, CLASSES, dropout=0.0).to(args.device)
    before, data = settle(args.device), Data(**whole.to_dict())
    data = pyg_sar.offload(data, chunks=chunks, device=args.device) if chunks else data.to(args.device)
    optimizer, seconds, losses = torch.optim.Adam(model.parameters(), lr=0.01), [], []
    for _ in range(args.steps + 1):
        start = clock(args.device)
        with pyg_sar.record_traffic(data.edge_index) as layers:
            losses.append(step(model, data, optimizer))
        seconds.append((clock(args.device) - start) / 1e3)
    return {
        "seconds": statistics.median(seconds[1:]), "loss": losses[1], "peak": peak(args.device) - before,
        **bytes_of(layers),
    }  # fmt: skip


def bus(device: str) -> tuple[float, float]:
    """Return bytes a second to the device and back, of pinned memory."""
    here = torch.empty(1 << 28, pin_memory=device == "cuda")
    there, rates = torch.empty_like(here, device=device), []
    for to, source in ((there, here), (here, there)):
        times = []
        for _ in range(4):
            start = clock(device)
            to.copy_(source)
            times.append((clock(device) - start) / 1e3)
        rates.append(here.nbytes / min(times))
    return rates[0], rates[1]


def main(args: argparse.Namespace) -> None:
    rates = bus(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    lines = [
        f"A step of three layers (GraphSAGE: {args.hidden} hidden, GAT: 4 heads of {args.hidden // 4}) on one {where}, "
        f"torch {torch.__version__}: {args.nodes:,} nodes, {args.edges:,} edges, {FEATURES} features; medians of "
        f"{args.steps}. The bus moves {rates[0] / 1e9:.1f} GB/s to the device and {rates[1] / 1e9:.1f} back. Made by "
        "`benchmarks/gpu_offload.py`.",
        "",
        "| model | edges join | chunks | s a step | times memory | peak MiB | of memory | GiB loaded | stored | bus |",
        "|---" * 10 + "|",
    ]
    for graph in args.graphs:
        whole = make_data(graph, args.nodes, args.edges)
        for kind in args.models:
            memory: dict[str, float] | None = None
            for chunks in tqdm((0, *args.chunks), f"{kind}, {graph}"):
                one = measure(args, whole, kind, chunks)
                memory = one if memory is None else memory
                copies = sum(one[key] / rate for key, rate in zip(("loaded", "stored"), rates, strict=True))
                cells = [kind, graph, str(chunks or "in memory"), f"{one['seconds']:.3f}"]
                cells += [f"{one['seconds'] / memory['seconds']:.2f}", f"{one['peak']:.0f}"]
                cells += [f"{one['peak'] / memory['peak']:.2f}"]
                cells += [f"{one[key] / 2**30:.2f}" for key in ("loaded", "stored")]
                cells.append(f"{100 * copies / one['seconds']:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
                text = write(args.out, "gpu-offload.md", lines)
                assert abs(one["loss"] - memory["loss"]) <= 1e-4 * abs(memory["loss"]), (one, memory)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=["sage", "gat"])
    parser.add_argument("--graphs", nargs="+", default=["near", "any"], choices=["near", "any"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=25_000_000)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
