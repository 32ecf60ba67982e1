"""Thousands of steps on two workers: does memory grow, or the number of files and threads?

    python benchmarks/soak.py --steps 5000 --out docs/results

GAT with dropout of features and of attention, sums of gradients, accuracy, and a checkpoint every thousand steps. After
two fifths of the steps lines are fitted to the resident memory, and to what is in use of it: the difference is what the
C library keeps of what was freed, in pieces that come and go. Writes ``soak.md``.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness.launch import GNN, answer, launch
from harness.process_memory import RETURN_FREED_MEMORY, in_use, resident
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
                gc.collect()
                memory = resident("VmRSS"), in_use()
                seen.append((step, *memory, len(os.listdir("/proc/self/fd")), threading.active_count()))
        answer(seen)


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pyg_sar.partition(dataset(args.graph, "data"), 2, f"{folder}/graph")
        found = launch(__file__, 2, [folder, str(args.steps)], **RETURN_FREED_MEMORY)
    lines = [
        f"GAT on `{args.graph}`, two workers, {args.steps} steps, a checkpoint every thousand. {processor()}, torch "
        f"{torch.__version__}. Made by `benchmarks/soak.py`.",
        "",
        "| worker | resident, MiB | KiB a thousand steps | in use, MiB | KiB a thousand steps | files | threads |",
        "|---|---|---|---|---|---|---|",
    ]
    for rank, seen in enumerate(found):
        rows = np.array(seen)[2 * len(seen) // 5 :]
        cells = [str(rank)]
        for k in (1, 2):
            (slope, _), spread = np.polyfit(rows[:, 0], rows[:, k] * 1024, 1, cov=True)
            cells += [f"{rows[-1, k]:.1f}", f"{1000 * slope:.1f} ± {1000 * np.sqrt(spread[0, 0]):.1f}"]
        cells += [f"{int(rows[:, k].min())} to {int(rows[:, k].max())}" for k in (3, 4)]
        lines.append(f"| {' | '.join(cells)} |")
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
