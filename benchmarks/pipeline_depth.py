"""What a pipeline of layers moves on eight workers by its depth, beside workers that share the graph.

    python benchmarks/pipeline_depth.py --root data --out docs/results
    python benchmarks/pipeline_depth.py --root data --out /tmp --graphs squirrel --depths 8 16

Nothing is trained: rows that workers read of each other are counted in parts of METIS, and put into the formulas that
``benchmarks/pipeline.py`` has found to hold to the byte. So it takes graphs and depths that would take too long there.
``root`` holds the raw files of PyG's data sets and ``npz/*.npz``; graphs that are not there are left out, and named.
Writes ``pipeline-depth.md`` and ``pipeline-depth.png``.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from chunks import read
from harness.deep import NAMES, graph, there
from harness.report import write
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_sar.data.assign import assign

CASES = [("Physics", 100), ("squirrel", 100), ("squirrel", 1000), ("Computers", 100), ("tolokers", 100)]
CASES += [("Community/50000/2500000", 100), ("cnr-2000", 100)]
WORKERS, DEPTHS = 8, (8, 16, 32, 64, 128)
WEB = ("cnr-2000",)  # directed, without features
TEXT = """\
MiB of rows that all of eight workers together receive in an epoch, float32, forward and backward, computed: 2 rho N L H
b by sharing the graph (eight parts, rows kept), 2 (S - 1) c N H b and 2 rho N L H b with the rho of W parts by S stages
of W workers (c: tensors that blocks hand on, 2 for GCNII, else 1; N nodes, L layers of width H, b = 4).
`benchmarks/pipeline.py` counts the same to the byte. *rho*: rows read of other workers for each node, in 8, 4 and 2
parts of METIS, counted. Cells have *sharing / 4 x 2 / 2 x 4* of GCN. *Crossing*: the number of layers from which on
8 x 1 moves fewer rows, for GCN and GCNII. cnr-2000 is directed, the others are not. Made by
`benchmarks/pipeline_depth.py`.
"""


class Counted(NamedTuple):
    """A graph's number of nodes, and how many rows the workers of 8, 4, 2 parts read of each other, all together."""

    nodes: int
    remote: dict[int, int]

    def volume(self, stages: int, layers: int, width: int, carried: int = 1) -> float:
        """Return the MiB of rows, and of their gradients, of an epoch on so many stages; 1 is sharing."""
        rows = (stages - 1) * carried * self.nodes + self.remote[WORKERS // stages] * layers
        return 2 * rows * width * 4 / 2**20


@functools.cache
def counted(name: str, root: str) -> Counted | None:
    """Return the counts of a graph, if its file is there."""
    if not there(name, root):
        return None
    if name in WEB:
        edge_index, num_nodes = read(Path(root) / NAMES[name])
        data = Data(edge_index=edge_index, num_nodes=num_nodes)
    else:
        data = graph(name, root)
        data.train_mask = data.train_mask[:, 0]
    return Counted(data.num_nodes, {1: 0} | {parts: remote_rows(data, parts) for parts in (8, 4, 2)})


def remote_rows(data: Data, parts: int) -> int:
    """Return how many rows the workers of so many parts read of each other, all together."""
    part = assign(data, parts).long()
    src, dst = data.edge_index
    apart = part[src] != part[dst]
    return len(torch.unique(src[apart] * parts + part[dst[apart]]))


def drawn(found: Sequence[tuple[str, int, Counted]], depths: Sequence[int], file: Path) -> None:
    """Draw volumes against the number of layers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(3.1 * len(found), 3.4), squeeze=False)
    for ax, (name, width, it) in zip(axes[0], found, strict=True):
        for label, stages, carried, style in (
            ("sharing", 1, 1, "0.4"), ("2 x 4", 2, 1, "tab:purple"), ("4 x 2", 4, 1, "tab:orange"),
            ("8 x 1", 8, 1, "tab:blue"), ("8 x 1, GCNII", 8, 2, "tab:green"),
        ):  # fmt: skip
            values = [it.volume(stages, n, width, carried) for n in depths]
            ax.plot(depths, values, "o-", markersize=3, color=style, label=label)
        ax.set(xscale="log", yscale="log", xlabel="layers", xticks=depths, xticklabels=depths)
        ax.set_title(f"{name}, {width} wide", fontsize=9)
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("MiB of rows an epoch, eight workers")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main(args: argparse.Namespace) -> None:
    """Count each graph's rows, and write the table and the drawing."""
    columns = ["graph", "nodes", "width", "rho 8, 4, 2", "8 x 1: GCN", "GCNII", *args.depths, "crossing"]
    lines = [TEXT, f"| {' | '.join(map(str, columns))} |", "|---" * len(columns) + "|"]
    cases = [case for case in CASES if not args.graphs or case[0] in args.graphs]
    cases += [(name, 100) for name in args.graphs or () if name not in dict(CASES)]
    found = [(name, width, it) for name, width in tqdm(cases) if (it := counted(name, args.root))]
    for name, width, it in found:
        cells = [name, f"{it.nodes:,}", width, ", ".join(f"{it.remote[p] / it.nodes:.2f}" for p in (8, 4, 2))]
        cells += [f"{it.volume(8, 1, width, carried):,.0f}" for carried in (1, 2)]
        for layers in args.depths:
            cells.append(" / ".join(f"{it.volume(stages, layers, width):,.0f}" for stages in (1, 4, 2)))
        crossing = (WORKERS - 1) * it.nodes / max(it.remote[WORKERS], 1)
        cells.append(f"{crossing:.1f}, {2 * crossing:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    write(args.out, "pipeline-depth.md", lines)
    drawn(found, args.depths, Path(args.out) / "pipeline-depth.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", help="only these")
    parser.add_argument("--root", default="data")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
