"""Draws ``docs/sar.png``: the blocks of a partition, and which of them a worker computes and fetches when."""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

from pyg_sar.data.assign import assign
from pyg_sar.data.datasets import community_graph

WORKERS, RANK = 4, 1
COLORS = ["#1b6ca8", "#d1495b", "#e0a030", "#3d8b5f"]


def blocks(axes: plt.Axes) -> None:
    """Draw the edges of a small graph, sorted by part; a color for each owner of sources."""
    data = community_graph(600, 6000, 8, 4)
    part = assign(data, WORKERS).long()
    place = torch.empty_like(part)
    place[part.argsort(stable=True)] = torch.arange(len(part))
    source, destination = data.edge_index
    axes.scatter(place[source], place[destination], s=0.5, c=[COLORS[p] for p in part[source].tolist()])
    bounds = [0, *torch.bincount(part).cumsum(0).tolist()]
    for bound in bounds[1:-1]:
        axes.axhline(bound, color="gray", linewidth=0.6)
        axes.axvline(bound, color="gray", linewidth=0.6)
    middle = [(a + b) / 2 for a, b in pairwise(bounds)]
    axes.set(xlim=(0, len(part)), ylim=(len(part), 0), xlabel="source, by owner", ylabel="destination, by owner")
    axes.set_xticks(middle, [f"worker {k}" for k in range(WORKERS)])
    axes.set_yticks(middle, [f"worker {k}" for k in range(WORKERS)], rotation=90, va="center")
    box = Rectangle((0, bounds[RANK]), len(part), bounds[RANK + 1] - bounds[RANK], fill=False, linewidth=2)
    axes.add_patch(box)
    axes.set_title(f"Edges in blocks; framed: what worker {RANK} holds", fontsize=10)


def schedule(axes: plt.Axes) -> None:
    """Draw what worker 1 computes and fetches, and whose rows it holds, forward and backward."""
    peers = [(RANK + step) % WORKERS for step in range(1, WORKERS)]
    forward, backward = [RANK, *peers], [*peers, RANK]
    time = 0.0
    for title, order in (("forward", forward), ("backward (case 2)", backward)):
        axes.text(time + 2, 2.75, title, ha="center", fontsize=9)
        for k, owner in enumerate(order):
            start = time + k
            label = "local" if owner == RANK else f"rows of {owner}"
            bar(axes, start, 2, 0.92, owner, label)
            if owner != RANK:
                bar(axes, start - 1, 1, 1.6, owner, "", alpha=0.45)
                if title != "forward":
                    bar(axes, start + 1, 0, 0.92, owner, f"to {owner}", alpha=0.8)
        time += 5.6
    axes.set_yticks([2.3, 1.3, 0.3], ["computes", "fetches", "sends\ngradients"])
    axes.set(xlim=(-0.3, 9.8), ylim=(-0.2, 3.1), xticks=[], xlabel="time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"Worker {RANK}: at most two blocks of others at any time", fontsize=10)


def bar(axes: plt.Axes, start: float, row: float, width: float, owner: int, text: str, alpha: float = 1.0) -> None:
    """Draw what takes some time."""
    axes.add_patch(Rectangle((start, row), width, 0.6, color=COLORS[owner], alpha=alpha, linewidth=0))
    axes.text(start + width / 2, row + 0.3, text, ha="center", va="center", color="white", fontsize=7)


def main(path: Path) -> None:
    """Draw both."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=[1, 1.5], layout="constrained")
    blocks(left)
    schedule(right)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(Path(__file__).with_name("sar.png"))
