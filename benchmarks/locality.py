"""How many gathered rows a cache still holds, for several orders of the nodes.

    python benchmarks/locality.py --out docs/results
    python benchmarks/locality.py --out /tmp --graphs Community/50000/2500000 Coauthor/Physics --root data

Counts instead of measuring: a walk over the edges by destination, as an aggregation makes it, and a cache of the given
size that drops the row which was unused for longest. Writes ``locality.md``.
"""

import argparse
from collections import OrderedDict
from pathlib import Path

import torch
from harness.report import write
from torch import Tensor
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset

FLOATS = (100, 400)  # of a row


ORDERS = ("random", "as given", "RCM", "locality")


def orders(edge_index: Tensor, num_nodes: int) -> list[Tensor]:
    """Return the old number of every node in each of ``ORDERS``."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    row, col = edge_index.numpy()
    matrix = coo_matrix((torch.ones(len(row)).numpy(), (row, col)), (num_nodes, num_nodes)).tocsr()
    cuthill_mckee = torch.from_numpy(reverse_cuthill_mckee((matrix + matrix.T).tocsr(), symmetric_mode=True).copy())
    random = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
    return [random, torch.arange(num_nodes), cuthill_mckee.long(), pyg_sar.locality_order(edge_index, num_nodes)]


def found(edge_index: Tensor, num_nodes: int, rows: int) -> float:
    """Return the share of gathered rows that are among the last ``rows`` different ones."""
    src, dst = edge_index
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for node in src[(dst * num_nodes + src).argsort()].tolist():
        if node in cache:
            hits += 1
            cache.move_to_end(node)
        else:
            cache[node] = None
            if len(cache) > rows:
                cache.popitem(last=False)
    return hits / max(edge_index.size(1), 1)


def main(args: argparse.Namespace) -> None:
    names = [f"{width} floats, {order}" for width in FLOATS for order in ORDERS]
    lines = [f"| graph | nodes | edges | {' | '.join(names)} |", "|" + "---|" * (3 + len(names))]
    for name in tqdm(args.graphs):
        data = dataset(name, args.root)
        n, edge_index, cells = data.num_nodes, data.edge_index, []
        relabelled = [order.argsort()[edge_index] for order in orders(edge_index, n)]
        for rows in (args.cache // (4 * width) for width in FLOATS):
            cells += [f"{found(edges, n, rows):.0%}" for edges in relabelled]
        title = Path(name).stem if Path(name).is_file() else name
        lines.append(f"| {title} | {n:,} | {edge_index.size(1):,} | {' | '.join(cells)} |")
    text = (
        f"Share of the source rows that a walk over the edges finds in a cache of {args.cache / 2**20:g} MiB, by the "
        "order of the nodes: random, as the data set has them, reverse Cuthill-McKee (RCM), and "
        "`pyg_sar.locality_order`. Made by `benchmarks/locality.py`."
    )
    print(write(args.out, "locality.md", [text, "", *lines]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", default=["Community/50000/2500000"], help="as in `pyg-sar partition`")
    parser.add_argument("--root", default="data")
    parser.add_argument("--cache", type=int, default=1 << 20, help="bytes")
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
