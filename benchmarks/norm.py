"""Time of batch normalisation, forward and backward, against PyTorch's own and the memory that it moves.

    python benchmarks/norm.py --out docs/results
    python benchmarks/norm.py --out /tmp --rows 5000 --widths 64 --threads 1 --repetitions 3

Every implementation lives in a child process of its own and they take turns, one repetition each; the table has
medians. ``pyg_sar`` normalises by the statistics of all workers, here of one; ``plain`` is the same without its
compiled kernels. The bound is the time in which memory is copied that has as many bytes as forward (read for the
moments, read, write) and backward (read rows and gradient twice, write) move. Writes ``norm-cpu.md``.
"""

import argparse
import statistics
import sys
import time
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from harness.report import processor, write
from harness.rounds import Child, alternate, serve
from tqdm import tqdm

from pyg_sar.nn import BatchNorm1d

SETTINGS = {"pyg_sar": {}, "plain": {"PYG_SAR_KERNELS": "0"}, "PyTorch": {}, "copy": {}}
READS_AND_WRITES = {"forward": 3, "backward": 5}


class Job:
    """Rows and an implementation."""

    def __init__(self, name: str, rows: int, width: int) -> None:
        torch.manual_seed(0)
        self.name, self.norm = name, BatchNorm1d(width)
        self.x, self.grad = torch.randn(2, rows, width)
        self.x.requires_grad_(name != "copy")
        self.into = torch.empty_like(self.grad)

    def run(self) -> dict[str, float]:
        """Return the seconds of each pass."""
        start = time.perf_counter()
        if self.name == "copy":
            self.into.copy_(self.grad)
            seconds = time.perf_counter() - start
            return {name: seconds * passes / 2 for name, passes in READS_AND_WRITES.items()}
        norm = self.norm
        if self.name == "PyTorch":
            out = F.batch_norm(self.x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
        else:
            out = norm.over_all(self.x)
        middle = time.perf_counter()
        out.backward(self.grad)
        found = {"forward": middle - start, "backward": time.perf_counter() - middle}
        self.x.grad = None
        return found


def measure(rows: int, width: int, threads: int, repetitions: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of each pass of each implementation."""
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(Child(__file__, [name, str(rows), str(width)], threads, **settings))
            for name, settings in SETTINGS.items()
        }
        times = alternate(children.values(), "run", repetitions, warmups=2)  # which touch memory for the first time
    return {
        name: {step: statistics.median(one[step] for one in found) for step in READS_AND_WRITES}
        for name, found in zip(children, times, strict=True)
    }


def main(args: argparse.Namespace) -> None:
    lines = [
        "| width | threads | pyg_sar, ms | PyTorch, ms | plain, ms | PyTorch / ours | plain / ours | of the bound |",
        "|" + "---|" * 8,
    ]
    for width, threads in tqdm([(w, t) for w in args.widths for t in args.threads]):
        found = measure(args.rows, width, threads, args.repetitions)
        total = {name: sum(seconds.values()) for name, seconds in found.items()}
        names, ours = ("pyg_sar", "PyTorch", "plain"), total["pyg_sar"]
        cells = [" + ".join(f"{1e3 * seconds:.1f}" for seconds in found[name].values()) for name in names]
        cells += [f"{total[name] / ours:.2f}" for name in names[1:]]
        lines.append(f"| {width} | {threads} | {' | '.join(cells)} | {total['copy'] / ours:.0%} |")
    text = (
        f"Batch normalisation of {args.rows:,} rows in single precision, training, forward + backward; medians of "
        f"{args.repetitions} alternating runs. *Plain* is pyg_sar without its compiled kernels. The bound is the time "
        f"in which the same bytes are copied. {processor()}, torch {torch.__version__}. Made by `benchmarks/norm.py`."
    )
    print(write(args.out, "norm-cpu.md", [text, "", *lines]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, *size = sys.argv[2:]
        serve(lambda: Job(name, *map(int, size)))
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
