"""Memory, traffic and time of graphs too large to try, calculated: none of it is measured.

    python benchmarks/extrapolate.py --out docs/results
    python benchmarks/extrapolate.py --out /tmp --parts 64 --boundary 0.5 --sum-rate 2e9 --attention-rate 5e8

Memory and traffic are those that :func:`pyg_sar.plan` tells of a worker if all parts are alike: with P parts each owns
1/P of nodes and edges and reads ``boundary`` halo rows for every row of its own. The time of an epoch comes from
rates. Writes ``extrapolated.md``.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from harness.launch import GNN
from harness.report import write
from tqdm import tqdm

import pyg_sar
from pyg_sar import planner
from pyg_sar.planner import Need, Share

HEADS = 4
GIB = 2**30


@dataclass(frozen=True)
class Layer:
    """Widths of a layer: of its input, of what it aggregates, and of what it gives."""

    inputs: int
    values: int
    outputs: int
    attention: bool
    home: bool  # whether rows have a gradient


def layers(model: str, features: int, classes: int) -> list[Layer]:
    """Return the layers of a model of ``examples/models.py``, 256 hidden or 4 heads of 128."""
    if model == "sage":
        sizes = list(pairwise([features, 256, 256, classes]))
        return [Layer(a, min(a, b), b, False, k > 0) for k, (a, b) in enumerate(sizes)]
    values = [HEADS * 128, HEADS * 128, HEADS * classes]
    inputs = [features, *values[:2]]
    return [
        Layer(a, v, classes if k == 2 else v, True, True) for k, (a, v) in enumerate(zip(inputs, values, strict=True))
    ]


def needs(model: str, share: Share, features: int, classes: int, prefetch: int) -> list[Need]:
    """Return what a worker needs in each mode."""

    def network() -> torch.nn.Module:
        return GNN(pyg_sar.nn, model, features, 128 if model == "gat" else 256, classes, HEADS, dropout=0.0)

    return pyg_sar.plan(network, share, features, prefetch=prefetch)


def seconds(share: Share, model: list[Layer], received: int, args: argparse.Namespace) -> float:
    """Return the time of a step from rates: sums over edges, dense products, and the traffic that is not hidden.

    A sum is walked once in each pass, attention once in forward and twice in backward; a product is worth three.
    """
    time = (1 - args.hidden) * received / args.link_rate
    for layer in model:
        if layer.attention:
            time += 3 * share.edges * layer.values / args.attention_rate
            product = layer.values + HEADS
        else:
            time += (1 + layer.home) * share.edges * layer.values / args.sum_rate
            product = 2 * layer.outputs
        time += 3 * 2 * share.nodes * layer.inputs * product / args.dense_rate
    return time


# Nodes, edges in both directions, features, classes; the second one is made up.
GRAPHS = {
    "ogbn-papers100M": (111_059_956, 2 * 1_615_685_872, 128, 172),
    "10 billion edges": (500_000_000, 10_000_000_000, 128, 172),
}


def table(args: argparse.Namespace) -> list[str]:
    columns = [
        "graph",
        "model",
        "parts",
        "local rows",
        "halo rows",
        "loaded GiB",
        "step GiB, mode 1",
        "mode 2",
        "mode 3",
    ]
    columns += ["received GiB, mode 1", "modes 2, 3", "epoch s, mode 1"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (name, (nodes, edges, features, classes)), model, parts in tqdm(
        [*product(GRAPHS.items(), args.models, args.parts)]
    ):
        share = planner.from_counts(nodes, edges, parts, args.boundary)
        found = needs(model, share, features, classes, args.prefetch)
        time = seconds(share, layers(model, features, classes), found[0].received, args)
        sizes = [found[0].loaded, *(need.step for need in found), *(need.received for need in found[:2])]
        cells = [name, model, str(parts), f"{share.nodes:,}", f"{sum(share.rows_in):,}"]
        cells += [*(f"{size / GIB:.2f}" for size in sizes), f"{time:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def heading(args: argparse.Namespace) -> str:
    rates = [f"{args.sum_rate:.3g} floats/s in sums", f"{args.attention_rate:.3g} in attention"]
    rates += [f"{args.dense_rate:.3g} flop/s in products", f"{args.link_rate:.3g} bytes/s through its link"]
    return (
        "**Calculated, not measured**: what one worker holds and receives in a training step of the 3-layer models of "
        "`benchmarks/scaling.py` (GraphSAGE: 256 hidden; GAT: 4 heads of 128; float32, no dropout), prefetch "
        f"{args.prefetch}, by `pyg_sar.plan`. Assumed: all parts are alike, for each of its rows a worker reads "
        f"{args.boundary:g} of others; for the epoch, rates of a worker of {', '.join(rates)}, and "
        f"{100 * args.hidden:g}% of the traffic hidden. *Loaded*: features, topology, parameters, state of Adam. "
        "*Step*: peak above that. Made by `benchmarks/extrapolate.py`."
    )


def main(args: argparse.Namespace) -> None:
    print(write(args.out, "extrapolated.md", [heading(args), "", *table(args)]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"], help="models")
    add("--parts", nargs="+", type=int, default=[16, 64, 256], help="numbers of workers")
    add("--boundary", type=float, default=1.0, help="halo rows that a worker reads for each of its own")
    add("--prefetch", type=int, default=1, help="blocks under way")
    add("--sum-rate", type=float, default=1e9, help="floats a second that a worker adds up over edges")
    add("--attention-rate", type=float, default=5e8, help="floats a second of attention, of each walk over the edges")
    add("--dense-rate", type=float, default=1e11, help="flop/s of a worker's dense products")
    add("--link-rate", type=float, default=1.25e9, help="bytes a second that a worker receives")
    add("--hidden", type=float, default=0.0, help="share of the traffic that hides behind computation")
    add("--out", default="docs", help="folder to write to")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
