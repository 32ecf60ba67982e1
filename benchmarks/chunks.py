"""How many source rows destination chunks load: as they come, by the method of HongTu, and by the best schedule.

    python benchmarks/chunks.py --data FOLDER --out docs/results
    python benchmarks/chunks.py --out /tmp --graphs Community --nodes 5000 --edges 50000

Counts, no training. ``FOLDER`` holds, anywhere in it, the raw files of PyG's data sets and those of the other graphs
(``FILES``); graphs that are not there are left out, and named. Writes ``chunks.md``.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from harness.batches import form_batches, source_rows, union
from harness.report import write
from torch import Tensor
from torch_geometric.utils import to_undirected
from tqdm import tqdm

import pyg_sar
from pyg_sar.csr import compress
from pyg_sar.data.datasets import community_graph
from pyg_sar.offload.schedule import count_loads, greedy_order, overlaps, ranges, source_pieces

FILES = {
    "Physics": "ms_academic_phy.npz",
    "Computers": "amazon_electronics_computers.npz",
    "tolokers": "tolokers.npz",
    "aclanth2021": "aclanth2021.npz",
    "cnr-2000": "cnr-2000.npz",
    "soc-slashdot0902": "soc-slashdot0902.npz",
}
DIRECTED = ("cnr-2000", "soc-slashdot0902")
ORDERS = ("as given", "locality", "random")
WORTH, ENOUGH = 1.5, 0.25  # from so many rows loaded per row on, such a share should be saved
COLUMNS = (
    "graph", "rows", "workers", "chunks", "naive", "+ shared", "+ previous stays", "+ reorganised", "optimal",
    "+ order", "loading ahead", "each once", "K", "K ahead", "HongTu saves", "we save", "seconds",
)  # fmt: skip
TEXT = """\
Source rows that one pass over all destination chunks loads, per row of the graph. Counted, not measured, by
`benchmarks/chunks.py`.

* *rows*: their order. Workers own ranges of rows of equal cost, and so do chunks within a worker; *chunks* is how many
  each worker has.
* *naive*: every chunk loads all of its source rows. *+ shared*: chunks of the same number are a batch; a row that
  several workers read in a batch is loaded once, by its owner. *+ previous stays*: rows of the batch before are not
  loaded again. *+ reorganised*: the same with batches, and their order, by Algorithm 4: all of HongTu's method.
* *optimal*: shared, in given order, in a buffer of K rows on each worker, of which those make room that are used
  latest. *+ order*: the best of given and reorganised batches, in given and in greedy order. K is what HongTu's method
  needs at most where it loads less, with or without reorganisation; batches with more rows are cut into source pieces.
* *loading ahead*: as *optimal*, but the rows of the next batch are loaded while one is computed, so that the buffer
  (*K ahead*) holds both. HongTu's method in given order needs as much for it, and loads as many rows as without.
* *each once*: rows that are read at all; nothing loads fewer. *K*: as a share of a worker's rows, on average.
* *HongTu saves*: the less of *+ previous stays* and *+ reorganised*, against *naive*; *we save*: *+ order*, against
  *naive*. *seconds*: to find all that *+ order* takes, for all workers in one process.
"""


@dataclass
class Counts:
    """Rows that one pass loads, per row of the graph; slots as a share of a worker's rows."""

    naive: float
    shared: float
    previous: float
    reorganised: float
    optimal: float
    ordered: float
    ahead: float
    once: float
    slots: float
    slots_ahead: float
    seconds: float

    @property
    def hongtu(self) -> float:
        return min(self.previous, self.reorganised)

    def saved(self, loads: float) -> float:
        return 1 - loads / self.naive

    def cells(self) -> list[str]:
        loads = (self.naive, self.shared, self.previous, self.reorganised, self.optimal, self.ordered, self.ahead)
        shares = (self.slots, self.slots_ahead, self.saved(self.hongtu), self.saved(self.ordered))
        return [*(f"{x:.2f}" for x in (*loads, self.once)), *(f"{x:.0%}" for x in shares), f"{self.seconds:.1f}"]


def read(path: Path) -> tuple[Tensor, int]:
    """Return the edges and the number of nodes of a graph, without features."""
    with np.load(path) as file:
        prefix = "adj_" if "adj_indptr" in file else ""
        if f"{prefix}indptr" in file:
            degree = np.diff(file[f"{prefix}indptr"])
            edges = np.stack([np.arange(degree.size).repeat(degree), file[f"{prefix}indices"]])
        else:
            edges = file["edges"].T if "edges" in file else np.stack([file["edge_src"], file["edge_dst"]])
    edge_index = torch.from_numpy(edges.astype(np.int64))
    return edge_index, degree.size if f"{prefix}indptr" in file else int(edge_index.max()) + 1


def graphs(args: argparse.Namespace) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name, edges and number of nodes of each graph that is there."""
    for name in args.graphs:
        if name == "Community":
            yield name, community_graph(args.nodes, args.edges).edge_index, args.nodes
        elif path := next(Path(args.data).rglob(FILES[name]), None):
            edge_index, num_nodes = read(path)
            yield name, edge_index if name in DIRECTED else to_undirected(edge_index, num_nodes=num_nodes), num_nodes
        else:
            print(f"{name} is left out: there is no {FILES[name]} in '{args.data}'.")


def relabelled(edge_index: Tensor, num_nodes: int, order: str) -> tuple[Tensor, Tensor]:
    """Return the graph as CSR by destination, its nodes in another order."""
    if order == "random":
        old = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(0))
    else:
        old = pyg_sar.locality_order(edge_index, num_nodes) if order == "locality" else torch.arange(num_nodes)
    src, dst = old.argsort()[edge_index]
    dst, perm = dst.sort()
    return compress(dst, num_nodes), src[perm]


def reads(rowptr: Tensor, col: Tensor, workers: int, chunks: int) -> tuple[list[slice], list[list[Tensor]]]:
    """Return the rows that each worker owns, and those that each of its chunks reads."""
    parts, found = ranges(rowptr, workers), []
    for part in parts:
        ptr = rowptr[part.start : part.stop + 1]
        edges = slice(*ptr[[0, -1]].tolist())
        found.append(source_rows(ptr - edges.start, col[edges], ranges(ptr - edges.start, chunks), rowptr.numel() - 1))
    return parts, found


def owned(batches: Sequence[Tensor], parts: Sequence[slice]) -> list[list[Tensor]]:
    """Return the rows of each batch that each worker owns: it loads them for all."""
    return [[ids[(ids >= part.start) & (ids < part.stop)] for ids in batches] for part in parts]


def arranged(rows: Sequence[Sequence[Tensor]], orders: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the rows of each batch, of which ``orders`` tells the chunks of each worker."""
    chosen = [[chunks[c] for c in order] for chunks, order in zip(rows, orders, strict=True)]
    return [union(batch) for batch in zip(*chosen, strict=True)]


def most(rows: Sequence[Sequence[Tensor]]) -> int:
    return max(ids.numel() for batches in rows for ids in batches)


def loads(rows: Sequence[Sequence[Tensor]], num_rows: int, slots: int) -> int:
    """Return how many rows all workers load, batches that their buffers do not hold in source pieces."""
    pieces = ([piece for ids in batches for piece in source_pieces(ids, slots)] for batches in rows)
    return sum(count_loads(accesses, num_rows, slots) for accesses in pieces)


def hongtu(rows: Sequence[Sequence[Tensor]]) -> int:
    """Return how many rows all workers load of those that the batch before did not read."""
    before = [[batches[0][:0], *batches] for batches in rows]
    pairs = (pair for batches in before for pair in pairwise(batches))
    return sum(int((~torch.isin(ids, last)).sum()) for last, ids in pairs)


def ordered_loads(rows: Sequence[Sequence[Tensor]], num_rows: int, slots: int) -> int:
    """Return how many rows all workers load in the better order of batches, as given or greedy."""
    shared = torch.stack([overlaps(batches, batches, num_rows) for batches in rows]).sum(0)
    orders = (range(len(shared)), greedy_order(shared))
    return min(loads([[batches[j] for j in order] for batches in rows], num_rows, slots) for order in orders)


def count(rowptr: Tensor, col: Tensor, workers: int, chunks: int) -> Counts:
    """Count what one pass loads by each method."""
    n, start = rowptr.numel() - 1, time.perf_counter()
    parts, rows = reads(rowptr, col, workers, chunks)
    given = owned(arranged(rows, [range(chunks)] * workers), parts)
    batches = arranged(rows, form_batches(rows, n))
    formed = owned([batches[j] for j in greedy_order(overlaps(batches, batches, n))], parts)
    seconds = time.perf_counter() - start
    previous, reorganised = hongtu(given), hongtu(formed)
    slots = most(given if previous <= reorganised else formed)
    start = time.perf_counter()
    best = min(ordered_loads(each, n, slots) for each in (given, owned(batches, parts)))
    seconds += time.perf_counter() - start
    ahead = [[union(pair) for pair in pairwise(own)] for own in given]
    found = {
        "naive": sum(ids.numel() for own in rows for ids in own),
        "shared": sum(ids.numel() for own in given for ids in own),
        "previous": previous,
        "reorganised": reorganised,
        "optimal": loads(given, n, slots),
        "ordered": best,
        "ahead": loads(ahead, n, most(ahead)),
        "once": union([ids for own in rows for ids in own]).numel(),
        "slots": slots * workers,
        "slots_ahead": most(ahead) * workers,
    }
    return Counts(**{key: value / n for key, value in found.items()}, seconds=seconds)


def summary(lines: dict[tuple[str, ...], Counts]) -> Iterator[str]:
    """Yield what all lines together say."""
    more = [" ".join(key) for key, c in lines.items() if c.ordered > c.hongtu]
    yield f"Lines on which the best schedule loads more than HongTu's method: {', '.join(more) or 'none'}."
    if worth := {key: c for key, c in lines.items() if c.naive >= WORTH}:
        few = [" ".join(key) for key, c in worth.items() if c.saved(c.ordered) < ENOUGH]
        yield (
            f"Where *naive* is at least {WORTH:g} ({len(worth)} of {len(lines)} lines) HongTu's method saves "
            f"{span([c.saved(c.hongtu) for c in worth.values()])}, the best schedule in the same memory "
            f"{span([c.saved(c.ordered) for c in worth.values()])}. Lines on which it saves less than {ENOUGH:.0%}: "
            f"{', '.join(few) or 'none'}. Against HongTu's method it loads less by "
            f"{span([1 - c.ordered / c.hongtu for c in worth.values()])}; with room for loading ahead, both in given "
            f"order, by {span([1 - c.ahead / c.previous for c in worth.values()])}."
        )
    gains = {key: 1 - c.ordered / c.optimal for key, c in lines.items()}
    best = max(gains, key=gains.__getitem__)
    nothing = ", ".join(f"{sum(g <= 0 for key, g in gains.items() if key[1] == order)} ({order})" for order in ORDERS)
    yield (
        f"Choosing batches and their order loads no less than *optimal* on {nothing} of "
        f"{len(lines) // len(ORDERS)} lines each, {statistics.median(gains.values()):.1%} less in the median of all, "
        f"{gains[best]:.1%} less at most ({' '.join(best)})."
    )


def span(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%} to {max(shares):.0%}, {statistics.median(shares):.0%} in the median"


def main(args: argparse.Namespace) -> None:
    lines: dict[tuple[str, ...], Counts] = {}
    sizes = [(workers, chunks) for workers in args.workers for chunks in args.chunks]
    for name, edge_index, num_nodes in tqdm(graphs(args), total=len(args.graphs)):
        for order in ORDERS:
            rowptr, col = relabelled(edge_index, num_nodes, order)
            for workers, chunks in sizes:
                lines[name, order, str(workers), str(chunks)] = count(rowptr, col, workers, chunks)
    table = [COLUMNS, ["---"] * len(COLUMNS), *((*key, *counts.cells()) for key, counts in lines.items())]
    print(write(args.out, "chunks.md", [TEXT, *summary(lines), "", *(f"| {' | '.join(line)} |" for line in table)]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", nargs="+", choices=[*FILES, "Community"], default=[*FILES, "Community"])
    parser.add_argument("--data", default="data", help="folder of the graphs' files")
    parser.add_argument("--nodes", type=int, default=50_000, help="of Community")
    parser.add_argument("--edges", type=int, default=1_000_000, help="of Community")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32], help="of each worker")
    parser.add_argument("--out", default="docs")
    main(parser.parse_args())
