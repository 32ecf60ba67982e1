"""Memory, traffic and time of graphs too large to try, calculated: none of it is measured.

    python benchmarks/paper.py --out docs
    python benchmarks/paper.py --out /tmp --parts 64 --boundary 0.5 --sum-rate 2e9 --attention-rate 5e8

Counts what one worker holds and receives in a training step of the models of ``scaling.py``, if all parts are alike:
with P parts each worker owns 1/P of nodes and edges and reads ``boundary`` rows of others for every row of its own, of
which each of the others owns as many. Every quantity has one function. Writes ``paper.md``.
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

HEADS = 4
GIB = 2**30
FLOAT, INT, LONG = 4, 4, 8  # bytes


@dataclass(frozen=True)
class Share:
    """What one worker has of a graph: own rows, in-edges, rows of others, and in-edges from own rows."""

    parts: int
    own: float
    edges: float
    remote: float
    own_edges: float

    @classmethod
    def of(cls, nodes: int, edges: int, parts: int, boundary: float, cut: float) -> "Share":
        return cls(parts, nodes / parts, edges / parts, boundary * nodes / parts, (1 - cut) * edges / parts)


@dataclass(frozen=True)
class Layer:
    """Widths of a layer: of its input, of what it aggregates, of a row that travels, and of what it gives."""

    inputs: int
    values: int
    travels: int
    outputs: int
    attention: bool
    home: bool  # whether gradients of rows travel
    last: bool


def layers(model: str, features: int, classes: int) -> list[Layer]:
    """Return the layers of a model of ``examples/models.py``, 256 hidden or 4 heads of 128."""
    if model == "sage":
        sizes = list(pairwise([features, 256, 256, classes]))
        return [Layer(a, a, a, b, False, k > 0, k == 2) for k, (a, b) in enumerate(sizes)]
    values = [HEADS * 128, HEADS * 128, HEADS * classes]
    inputs = [features, *values[:2]]
    return [
        Layer(a, v, v + HEADS, classes if k == 2 else v, True, True, k == 2)
        for k, (a, v) in enumerate(zip(inputs, values, strict=True))
    ]


def topology(share: Share, attention: bool, merged: bool) -> float:
    """Return the bytes of the index tensors of a worker once it has trained, see ``pyg_sar/graph.py``.

    The loaded graph has columns and, for each block, a pointer over all own rows. A transpose has rows and positions.
    Self-loops of attention renew what the own edges have, and merged blocks (mode 3) know the position of every edge.
    """
    e, n = share.edges, share.own
    blocks = 1 if merged else share.parts
    touched = e if merged else share.own_edges  # edges of blocks that hold own sources
    size = INT * (e + blocks * (n + 1)) + LONG * (e + n) + INT * share.remote  # columns, pointers, ids, rows to serve
    size += LONG * e if merged else 0  # positions
    if attention:
        size += e + LONG * (e + n)  # which edges stay, new ids
        size += INT * (touched + n) + INT * (n + 1) + LONG * (touched + n)  # columns, pointer, positions
        e += n
    else:
        size += LONG * n  # degrees
    return size + INT * (2 * e + n + share.remote + blocks)


def saved(share: Share, layer: Layer, mode: int) -> tuple[float, float]:
    """Return the bytes kept for the backward pass of the aggregation of a layer, and of what follows it.

    Mode 1 keeps nothing of others, modes 2 and 3 keep the rows that attention needs again.
    """
    if layer.attention:
        rows = share.own + (share.remote if mode > 1 else 0)
        aggregation = rows * layer.travels + share.own * (layer.values + 2 * HEADS)
    else:
        aggregation = share.own * layer.values
    after = layer.outputs if layer.last else 2 * layer.outputs  # before normalisation, and after ReLU
    return FLOAT * aggregation, FLOAT * share.own * after


def working(share: Share, layer: Layer, mode: int, prefetch: int) -> float:
    """Return the bytes that live for the time of the backward pass of an aggregation.

    The gradients of output and own rows, and of each remote block under way what arrives and what leaves: gradients
    and, where attention fetches them again, rows. In mode 3 all are under way.
    """
    alive = 1.0 if mode == 3 else min(1.0, (prefetch + 1) / max(share.parts - 1, 1))
    kinds = 2 * layer.home + 2 * (layer.attention and mode == 1)
    own = layer.values + layer.travels * (2 if mode == 3 else 1) * layer.home
    return FLOAT * (share.own * own + alive * share.remote * kinds * layer.travels)


def peak(share: Share, model: list[Layer], mode: int, prefetch: int) -> float:
    """Return the bytes of a step at its peak: after forward, or in the backward pass of some aggregation."""
    kept = [saved(share, layer, mode) for layer in model]
    done, most = 0.0, sum(map(sum, kept))
    for layer, (aggregation, after) in zip(model, kept, strict=True):
        most = max(most, done + aggregation + working(share, layer, mode, prefetch))
        done += aggregation + after
    return most


def traffic(share: Share, model: list[Layer], mode: int) -> float:
    """Return the bytes that a worker receives in a step: rows, rows again, gradients."""
    times = [1 + (layer.attention and mode == 1) + layer.home for layer in model]
    return FLOAT * share.remote * sum(k * layer.travels for k, layer in zip(times, model, strict=True))


def seconds(share: Share, model: list[Layer], mode: int, args: argparse.Namespace) -> float:
    """Return the time of a step from rates: sums over edges, dense products, and the traffic that is not hidden.

    A sum is walked once in each pass, attention once in forward and twice in backward; a product is worth three.
    """
    time = (1 - args.hidden) * traffic(share, model, mode) / args.link_rate
    for layer in model:
        if layer.attention:
            time += 3 * share.edges * layer.travels / args.attention_rate
            product = layer.travels + HEADS
        else:
            time += (1 + layer.home) * share.edges * layer.travels / args.sum_rate
            product = 2 * layer.outputs
        time += 3 * 2 * share.own * layer.inputs * product / args.dense_rate
    return time


# Nodes, edges in both directions, features, classes; the second one is made up.
GRAPHS = {
    "ogbn-papers100M": (111_059_956, 2 * 1_615_685_872, 128, 172),
    "10 billion edges": (500_000_000, 10_000_000_000, 128, 172),
}


def table(args: argparse.Namespace) -> list[str]:
    columns = ["graph", "model", "parts", "own rows", "remote rows", "features GiB", "topology GiB", "in mode 3"]
    columns += ["step GiB, mode 1", "mode 2", "mode 3", "received GiB, mode 1", "modes 2, 3", "epoch s, mode 1"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (name, (nodes, edges, features, classes)), model, parts in product(GRAPHS.items(), args.models, args.parts):
        share = Share.of(nodes, edges, parts, args.boundary, args.cut)
        stack, attention = layers(model, features, classes), model == "gat"
        sizes = [FLOAT * share.own * features, *(topology(share, attention, merged) for merged in (False, True))]
        sizes += [peak(share, stack, mode, args.prefetch) for mode in (1, 2, 3)]
        sizes += [traffic(share, stack, mode) for mode in (1, 2)]
        cells = [name, model, str(parts), f"{share.own:,.0f}", f"{share.remote:,.0f}"]
        cells += [*(f"{size / GIB:.2f}" for size in sizes), f"{seconds(share, stack, 1, args):.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def heading(args: argparse.Namespace) -> str:
    rates = [f"{args.sum_rate:.3g} floats/s in sums", f"{args.attention_rate:.3g} in attention"]
    rates += [f"{args.dense_rate:.3g} flop/s in products", f"{args.link_rate:.3g} bytes/s through its link"]
    return (
        "**Calculated, not measured**: what one worker holds and receives in a training step of the 3-layer models of "
        "`benchmarks/scaling.py` (GraphSAGE: 256 hidden; GAT: 4 heads of 128; float32, no dropout), prefetch "
        f"{args.prefetch}. Assumed: all parts are alike, for each of its rows a worker reads {args.boundary:g} of "
        f"others, {100 * args.cut:g}% of the edges are cut; for the epoch, rates of a worker of {', '.join(rates)}, "
        f"and {100 * args.hidden:g}% of the traffic hidden. *Topology*: index tensors once trained. *Step*: peak above "
        "features, topology, parameters and the libraries. Made by `benchmarks/paper.py`, which has the formulas."
    )


def main(args: argparse.Namespace) -> None:
    text = "\n".join([heading(args), "", *table(args)])
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.md").write_text(text + "\n")
    print(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=["sage", "gat"], default=["sage", "gat"], help="models")
    add("--parts", nargs="+", type=int, default=[16, 64, 256], help="numbers of workers")
    add("--boundary", type=float, default=1.0, help="rows of others that a worker reads for each of its own")
    add("--cut", type=float, default=0.5, help="share of the edges whose source is on another worker")
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
