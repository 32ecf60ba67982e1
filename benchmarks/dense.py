"""Speed of the dense products of layers and of their gradients, by oneDNN and by PyTorch's own library (MKL).

    python benchmarks/dense.py --out docs/results

``pyg_sar.linear`` takes one or the other by the processor and the size. Both take turns in one process for each number
of threads; the table has billions of operations a second, medians, and the best rate is that of a large square product.
Writes ``dense-intel.md`` or ``dense-amd.md``.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from harness.launch import answer, asked, launch, words
from harness.report import processor, write
from tqdm import tqdm

from pyg_sar import linear

# Rows, columns, columns of the result
SHAPES = [
    (50_000, 100, 256),
    (50_000, 256, 256),
    (50_000, 512, 512),
    (50_000, 256, 47),
    (34_493, 8415, 128),
    (13_752, 767, 128),
    (5_201, 2089, 128),
    (8_000, 128, 128),
    (2_000, 64, 64),
    (500, 32, 32),
]
WAYS = {"oneDNN": True, "PyTorch": False}
ABOUT = """Billions of floating point operations a second of `F.linear` + the gradient of its rows + that of its weight,
single precision; medians of {repetitions} alternating runs. *Best*: a square product of 4,096 rows by PyTorch.
{processor}, torch {torch}; `pyg_sar` takes {taken} on it. Made by `benchmarks/dense.py`."""


def rates(passes: dict[str, Callable[[], object]], operations: float, repetitions: int) -> dict[str, list[float]]:
    """Return the rate of each pass of each way."""
    seconds: dict[tuple[str, str], list[float]] = {(way, name): [] for way in WAYS for name in passes}
    for turn in range(-2, repetitions):
        for (way, name), found in seconds.items():
            linear.BY_ONEDNN = WAYS[way]
            start = time.perf_counter()
            passes[name]()
            if turn >= 0:  # the first calls touch memory for the first time
                found.append(time.perf_counter() - start)
    return {way: [operations / statistics.median(seconds[way, name]) / 1e9 for name in passes] for way in WAYS}


def worker(args: argparse.Namespace) -> None:
    """Measure all shapes."""
    linear.FEWEST_ROWS = linear.FEWEST_WEIGHTS = 1
    square = torch.randn(4096, 4096)
    best = rates({"product": lambda: square @ square}, 2 * 4096**3, args.repetitions)["PyTorch"][0]
    found = []
    for rows, columns, wide in (tuple(map(int, shape.split("/"))) for shape in args.shapes):
        x, weight, bias, grad = (torch.randn(*s) for s in ((rows, columns), (wide, columns), (wide,), (rows, wide)))
        out, d_x, d_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
        passes = {
            "product": partial(linear.product, x, weight, bias, out),
            "rows": partial(linear.linear_grad, x, grad, weight, d_x, None, add=False),
            "weight": partial(linear.linear_grad, x, grad, weight, None, d_weight),
        }
        found.append(rates(passes, 2 * rows * columns * wide, args.repetitions))
    answer([best, found])


def main(args: argparse.Namespace) -> None:
    """Measure with each number of threads, and write the table."""
    if not linear.HAS_ONEDNN:
        sys.exit("oneDNN is not taken on processors like this one, which has no AVX-512.")
    taken = "oneDNN for large ones" if linear.BY_ONEDNN else "PyTorch's own"
    family = linear.family_of_amd()
    about = ABOUT.format(
        repetitions=args.repetitions, processor=f"{processor()}, family {family}" if family else processor(),
        torch=torch.__version__, taken=taken,
    )  # fmt: skip
    lines = [about, "", f"| rows, columns, of the result | threads | {' | '.join(WAYS)} | of the best rate |"]
    lines.append("|---" * (3 + len(WAYS)) + "|")
    for threads in tqdm(args.threads):
        own = [*words(repetitions=args.repetitions), "--shapes", *args.shapes]
        ((best, found),) = launch(__file__, 0, own, threads=threads)
        for shape, ways in zip(args.shapes, found, strict=True):
            cells = [" + ".join(f"{rate:.0f}" for rate in ways[way]) for way in WAYS]
            shares = " + ".join(f"{rate / best:.0%}" for rate in ways["oneDNN" if linear.BY_ONEDNN else "PyTorch"])
            lines.append(f"| {', '.join(shape.split('/'))} | {threads} | {' | '.join(cells)} | {shares} |")
    print(write(args.out, f"dense-{'amd' if family else 'intel'}.md", lines))


if __name__ == "__main__":
    if mine := asked(repetitions=int, shapes=[str]):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["/".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
