"""Times of sums on a GPU by what ``pyg_sar/ops/triton/schedule.py`` chooses: how many numbers, columns and warps a
program has, and how many edges it reads ahead.

    python benchmarks/gpu_tiles.py --out docs/results    # 2.4M nodes, 62M edges

Each choice is changed by itself, for each width and type, and both passes of a sum are timed: by destination and by
source. All kernels are compiled first, by some processes together. Writes ``gpu-tiles.md``.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch
import triton
from gpu_layers import SMALL, Bounds, OnDevice
from harness.device import events
from harness.layer_jobs import noise
from harness.report import write
from torch import Tensor

from pyg_sar.block import Block
from pyg_sar.ops import spmm_
from pyg_sar.ops.triton import schedule

CHOICES = [{"AHEAD": schedule.AHEAD}, *({"AHEAD": n} for n in (1, 2, 8)), *({"CELLS": n} for n in (128, 512, 1024)),
           *({"COLUMNS": n} for n in (64, 256, 512)), {"WARPS": 2}, {"WARPS": 2, "CELLS": 512}]  # fmt: skip
WIDTHS = (32, 47, 64, 100, 128, 200, 256, 400, 512)
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sums(block: Block, x: Tensor, choice: dict[str, int], repetitions: int) -> float:
    """Return the milliseconds of a sum by destination and of one by source."""
    out, (ptr, row, _) = torch.empty_like(x), block.transpose

    def both() -> None:
        spmm_(out, block.rowptr, block.col, x, None, None, True, block.dst)
        spmm_(out, ptr, row, x, None, None, True)

    with mock.patch.multiple(schedule, **choice):
        try:
            both()
        except Exception:  # this choice does not compile, or asks for more than there is
            traceback.print_exc()
            return math.nan
        return statistics.median(events(both)[0] for _ in range(repetitions))


def compile_all(width: int) -> None:
    """Leave kernels in the cache of Triton, which tells such choices apart."""
    graph = OnDevice(*SMALL)
    bounds = Bounds(graph)
    for dtype in TYPES.values():
        bounds.of(width, dtype)
        x = noise(graph.num_nodes, width, 0, "cuda").to(dtype)
        for choice in CHOICES:
            sums(bounds.block, x, choice, 1)


def main(args: argparse.Namespace) -> None:
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_all, WIDTHS))
    graph = OnDevice(args.nodes, args.edges)
    bounds = Bounds(graph)
    changed = [", ".join(f"{key} {value}" for key, value in choice.items()) for choice in CHOICES[1:]]
    columns = ["columns", "type", "rows read, ms", "% of it", "as it is", *changed]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    head = (
        f"Sums by destination and by source on one {torch.cuda.get_device_name()}: {args.nodes:,} nodes, "
        f"{graph.edge_index.size(1):,} edges; milliseconds of both, medians of {args.repetitions}, by choices of "
        "`pyg_sar/ops/triton/schedule.py`. *Rows read* is a kernel that only reads the rows of edges, and *% of it* "
        f"its share of the time of sums as they are. torch {torch.__version__}, Triton {triton.__version__}. "
        "Made by `benchmarks/gpu_tiles.py`."
    )
    failed = False
    for width in WIDTHS:
        for name, dtype in TYPES.items():
            _, bound = bounds.of(width, dtype)
            x = noise(graph.num_nodes, width, 0, "cuda").to(dtype)
            times = [sums(bounds.block, x, choice, args.repetitions) for choice in CHOICES]
            cells = [str(width), name, f"{bound:.1f}", f"{100 * bound / times[0]:.0f}", *(f"{t:.1f}" for t in times)]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            write(args.out, "gpu-tiles.md", [head, "", *lines])
            failed |= any(map(math.isnan, times))
    sys.exit("some choices failed" if failed else 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2_400_000)
    parser.add_argument("--edges", type=int, default=62_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    main(parser.parse_args())
