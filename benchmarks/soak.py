"""Thousands of steps on two workers: does memory grow, or the number of files and threads?

    python benchmarks/soak.py --steps 5000 --out docs/results

GAT with dropout of features and of attention, sums of gradients, accuracy, and a checkpoint every thousand steps. After
a fifth of the steps a line is fitted to the resident memory. Writes ``soak.md``.
"""

import argparse
import os
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness.launch import GNN, answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, resident
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset

EVERY = 50  # steps between two looks


def worker(folder: str, steps: int) -> None:
    """Train, and answer what was seen."""
    with pyg_sar.process_group() as rank:
        torch.manual_seed(0)
        data = pyg_sar.load(f"{folder}/graph")
        model = GNN(pyg_sar.nn, "gat", data.x.size(1), 8, data.num_classes, attention_dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters())
        seen: list[Any] = []
        for step in tqdm(range(steps), disable=rank != 0):
            optimizer.zero_grad()
            out, mask = model(data.x, data.edge_index), data.train_mask
            pyg_sar.global_mean(F.cross_entropy(out[mask], data.y[mask], reduction="none")).backward()
            pyg_sar.sum_gradients(model)
            optimizer.step()
            pyg_sar.accuracy(out.argmax(-1), data.y, data.val_mask)
            if step % 1000 == 999:
                pyg_sar.save_checkpoint(f"{folder}/saves", model=model, optimizer=optimizer, data=data, epoch=step)
            if step % EVERY == 0:
                seen.append((step, resident("VmRSS"), len(os.listdir("/proc/self/fd")), threading.active_count()))
        answer(seen)


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.partition(dataset(args.graph, "data"), 2, f"{folder}/graph")
        found = launch(__file__, 2, [folder, str(args.steps)], **RETURN_FREED_MEMORY)
    lines = [
        f"GAT on `{args.graph}`, two workers, {args.steps} steps, a checkpoint every thousand. {processor()}, torch "
        f"{torch.__version__}. Made by `benchmarks/soak.py`.",
        "",
        "| worker | MiB at the end | KiB a thousand steps | files | threads |",
        "|---|---|---|---|---|",
    ]
    for rank, seen in enumerate(found):
        rows = np.array(seen)[len(seen) // 5 :]
        (slope, _), spread = np.polyfit(rows[:, 0], rows[:, 1], 1, cov=True)
        counts = [f"{int(rows[:, k].min())} to {int(rows[:, k].max())}" for k in (2, 3)]
        slope, error = (1000 * 1024 * x for x in (slope, np.sqrt(spread[0, 0])))
        lines.append(f"| {rank} | {rows[-1, 1]:.0f} | {slope:.0f} ± {error:.0f} | {counts[0]} | {counts[1]} |")
    print(write(args.out, "soak.md", lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", default="Community/1000/20000")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
