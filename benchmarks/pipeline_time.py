"""Seconds and memory of a pipeline of layers: what chunks cost, how long stages wait, what is gained over slow links.

    python benchmarks/pipeline_time.py --root data --of chunks waits hosts memory --out docs/results

*Chunks*: one process, two threads. *Waits*: two stages on two cores; and for more of them, which would need as many
cores, the schedule with the seconds of each block and chunk in one process. *Hosts*: simulated hosts of one thread, see
``hosts.py``, which takes root. *Memory*: eight workers, all tensors of the one that holds most, beside what is planned.
Run it on an idle machine, but for memory; exit status 77 says that there can be no hosts. ``runs`` keeps what hosts
took. Writes ``pipeline-chunks.md``, ``pipeline-waits.md``, ``pipeline-hosts.md`` and ``pipeline-memory.md``.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from harness.deep import graph, partitions, there
from harness.launch import DeepGNN, answer, asked, environment, launch, results, words
from harness.process_memory import resident
from harness.report import processor, write
from harness.runs import Runs
from hosts import SKIPPED, Hosts, Unavailable
from tqdm import tqdm

import pyg_sar
from pyg_sar.blocks import even_cut
from pyg_sar.live import Live
from pyg_sar.pipeline_planner import plan_pipeline
from pyg_sar.planner import from_partition, largest, plan

HIDDEN = 100
LARGE = "Community/50000/2500000"
# Ways to train on hosts: title, whether each is a stage (else they share the graph), chunks, what `load` gets
WAYS: list[tuple[str, bool, int, dict[str, Any]]] = [
    ("sharing", False, 1, {}),
    ("sharing, rows kept", False, 1, {"remat": False}),
    ("sharing, rows kept, two fetches ahead", False, 1, {"remat": False, "prefetch": 2}),
    ("sharing, rows kept, bfloat16 travels", False, 1, {"remat": False, "comm_dtype": torch.bfloat16}),
    ("stages, 1 chunk", True, 1, {}),
    ("stages, 8 chunks", True, 8, {}),
    ("stages, 32 chunks", True, 32, {}),
]
# Stages (0: workers share the graph) and chunks of eight workers
SHAPES = [(0, 1), (8, 1), (8, 32), (4, 32)]


def loaded(args: argparse.Namespace, **options: Any) -> Any:
    """Return the mesh of stages, if there are some, and this worker's share of the graph."""
    mesh = pyg_sar.stage_mesh(args.stages) if args.stages else None
    parts = args.workers // (args.stages or 1)
    group = None if mesh is None else mesh.get_group("graph")
    return mesh, pyg_sar.load(f"{args.folder}/{parts}", group=group, **options)


def step(args: argparse.Namespace, mesh: Any, data: Any) -> Any:
    """Return a function that trains for an epoch, and the pipeline if there is one."""
    group = None if mesh is None else mesh.get_group("graph")
    torch.manual_seed(0)
    model = DeepGNN(pyg_sar.nn, args.kind, data.x.size(1), HIDDEN, data.num_classes, args.layers)
    total = int(pyg_sar.all_reduce(data.train_mask.sum(), group))

    def loss_of(out: torch.Tensor, rows: slice) -> torch.Tensor:
        mask = data.train_mask[rows]
        return F.cross_entropy(out[mask], data.y[rows][mask], reduction="sum") / total

    if mesh is not None:
        pipe = pyg_sar.Pipeline(model.blocks, data.edge_index, mesh, args.chunks)
        optimizer = torch.optim.Adam(pipe.parameters())

        def piped() -> None:
            optimizer.zero_grad()
            pipe.step(data.x, loss_of)
            optimizer.step()

        return piped, pipe
    optimizer = torch.optim.Adam(model.parameters())

    def shared() -> None:
        optimizer.zero_grad()
        with pyg_sar.allow_local():
            loss = loss_of(model(data.x, data.edge_index), slice(None))
        loss.backward()
        pyg_sar.sum_gradients(model)
        optimizer.step()

    return shared, None


def worker(args: argparse.Namespace) -> None:
    """Train, and answer the seconds of each epoch but the first, and what the pipeline did in the last one."""
    with pyg_sar.process_group() as rank:
        if args.count:
            answer(count(args))
            return
        train, pipe = step(args, *loaded(args, **(WAYS[args.way][3] if args.way >= 0 else {})))
        train()  # fills the history
        if args.blocks:
            answer(by_block(train, pipe))
            return
        seconds: list[float] = []
        for _ in range(args.epochs - (pipe is not None)):
            start = time.perf_counter()
            train()
            seconds.append(time.perf_counter() - start)
        found: dict[str, Any] = {}
        if pipe is not None:
            with pipe.record() as seen:
                start = time.perf_counter()
                train()
                seconds.append(time.perf_counter() - start)
            found = {"waited": seen.between.forward_wait + seen.between.backward_wait}
        answer({"rank": rank, "seconds": seconds, "peak": resident("VmHWM"), **found})


def by_block(train: Callable[[], None], pipe: Any) -> dict[str, list[list[float]]]:
    """Return the seconds of an epoch of each block, chunk by chunk, forward and backward, in the order of chunks."""
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    back, last = torch.autograd.backward, pipe.blocks[len(pipe.blocks) - 1]

    def begin(block: torch.nn.Module, given: Any) -> None:
        if block is pipe.blocks[0]:
            forward.append([])
        forward[-1].append(-time.perf_counter())

    def end(block: torch.nn.Module, given: Any, out: Any) -> None:
        forward[-1][-1] += time.perf_counter()
        first = out if isinstance(out, torch.Tensor) else out[0]
        if block is not last:
            first.register_hook(lambda grad: backward[-1].append(time.perf_counter()))

    def timed(*given: Any) -> None:
        """The gradient of a block is there when that of what it was called with is."""
        backward.append([time.perf_counter()])
        back(*given)
        backward[-1].append(time.perf_counter())

    hooks = [hook for b in pipe.blocks for hook in (b.register_forward_pre_hook(begin), b.register_forward_hook(end))]
    with mock.patch.object(torch.autograd, "backward", timed):
        train()
    for hook in hooks:
        hook.remove()
    spent = [[after - before for before, after in pairwise(times)] for times in backward]
    return {"forward": forward, "backward": [times[::-1] for times in spent]}


def count(args: argparse.Namespace) -> int:
    """Return the bytes of all tensors at the peak of the second epoch."""
    mesh, data = loaded(args, remat=False)
    with Live() as live:  # blocks and graphs of chunks, too
        train, _ = step(args, mesh, data)
        for _ in range(2):  # the first one fills the history
            live.peak = live.now
            train()
    features = data.x.nbytes if mesh is None or mesh.get_local_rank("stage") == 0 else 0
    return live.peak + sum(data.edge_index.graph.memory().values()) + features


def options(
    args: argparse.Namespace, folder: str, kind: str, stages: int, chunks: int, workers: int, way: int = -1,
    count: bool = False, blocks: bool = False,
) -> list[str]:  # fmt: skip
    """Return the arguments of a worker."""
    own = {"folder": folder, "kind": kind, "stages": stages, "chunks": chunks, "workers": workers, "way": way}
    return words(**own, count=int(count), blocks=int(blocks), epochs=args.epochs, layers=args.layers)


def chunk_lines(folders: dict[str, str], args: argparse.Namespace) -> list[str]:
    """Return the seconds of an epoch in one process, by the number of chunks."""
    lines = [
        "| graph | model | chunks | s an epoch | times one chunk | ms of a chunk and layer | MiB |",
        "|---" * 7 + "|",
    ]
    for name, folder in folders.items():
        for kind in args.models:
            one = 0.0
            for chunks in (1, 8, 32, 128):
                (found,) = launch(__file__, 1, options(args, folder, kind, 1, chunks, 1), threads=2)
                seconds = statistics.median(found["seconds"])
                one = one or seconds
                each = 1000 * seconds / chunks / args.layers
                cells = [name, kind, chunks, f"{seconds:.2f}", f"{seconds / one:.2f}", f"{each:.1f}"]
                lines.append(f"| {' | '.join(map(str, cells))} | {found['peak']:.0f} |")
    return lines


def schedule(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], stages: int) -> float:
    """Return the share of time that stages wait whose blocks take so many seconds of each chunk."""
    cut = [0, *accumulate(even_cut(len(forward[0]), stages))]
    ends = [0.0] * stages
    for way, order in ((forward, range(stages)), (backward, range(stages)[::-1])):
        for seconds in way:
            before = 0.0
            for s in order:
                before = ends[s] = max(ends[s], before) + sum(seconds[cut[s] : cut[s + 1]])
    return 1 - sum(map(sum, [*forward, *backward])) / stages / max(ends)


def waits(folders: dict[str, str], args: argparse.Namespace) -> list[str]:
    """Return how long two stages wait for each other, and how long more of them would."""
    lines = ["| graph | model | chunks | s an epoch | waited | S = 2 | 4 | 8, computed |", "|---" * 8 + "|"]
    for name, folder in folders.items():
        for kind in args.models:
            for chunks in (4, 8, 16, 32, 64):
                found = launch(__file__, 2, options(args, folder, kind, 2, chunks, 2))
                seconds = statistics.median(found[0]["seconds"])
                waited = statistics.mean(one["waited"] / one["seconds"][-1] for one in found)
                (spent,) = launch(__file__, 1, options(args, folder, kind, 1, chunks, 1, blocks=True))
                cells = [name, kind, str(chunks), f"{seconds:.2f}", f"{waited:.1%}"]
                enough = [s for s in (2, 4, 8) if s <= len(spent["forward"][0])]
                cells += [f"{schedule(**spent, stages=s):.1%} ({(s - 1) / (chunks + s - 1):.1%})" for s in enough]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def host_lines(folders: dict[str, str], args: argparse.Namespace) -> list[str]:
    """Return the seconds of an epoch on hosts, for each rate of their links."""
    lines = [f"| graph | model | way | MiB | {' | '.join(args.rates)} |"]
    lines.append("|---" * (4 + len(args.rates)) + "|")
    runs = Runs(args.runs)
    for name, folder in folders.items():
        for kind in args.models:
            for k, (title, staged, chunks, _) in enumerate(WAYS):
                own = options(args, folder, kind, args.hosts if staged else 0, chunks, args.hosts, k)
                cells, peak = [], 0.0
                for rate in args.rates:
                    key = json.dumps([name, kind, title, rate, args.hosts, args.layers])
                    if key not in runs:
                        seconds, held = on_hosts(args.hosts, rate, own)
                        runs.keep(key, [seconds, held])
                    cells.append(f"{runs[key][0]:.2f}")
                    peak = max(peak, runs[key][1])
                title = f"{args.hosts} {title}" if staged else title
                lines.append(f"| {name} | {kind} | {title} | {peak:.0f} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    return lines


def on_hosts(hosts: int, rate: str, own: list[str]) -> tuple[float, float]:
    """Return the seconds of an epoch of the slowest worker, and the most that one held."""
    with Hosts(hosts, None if rate == "no limit" else rate) as made:
        told = made.run([__file__, "--worker", *own], env=environment(1), echo=False)
    found = [one for text in told for one in results(text)]
    seconds = statistics.median(max(s) for s in zip(*(f["seconds"] for f in found), strict=True))
    return seconds, max(f["peak"] for f in found)


def memory_lines(folders: dict[str, str], args: argparse.Namespace) -> list[str]:
    """Return what the worker that holds most holds of eight, counted and planned."""
    lines = ["| graph | model | stages x workers | chunks | MiB, counted | planned | ratio |", "|---" * 7 + "|"]
    for name, folder in folders.items():
        for kind in args.models:
            for stages, chunks in SHAPES:
                workers = 8 // (stages or 1)
                counted = max(launch(__file__, 8, options(args, folder, kind, stages, chunks, 8, count=True)))
                planned = planned_bytes(folder, workers, kind, args.layers, stages, chunks)
                title = f"{stages} x {workers}" if stages else "sharing"
                cells = [name, kind, title, chunks, f"{counted / 2**20:.0f}", f"{planned / 2**20:.0f}"]
                lines.append(f"| {' | '.join(map(str, cells))} | {planned / counted:.2f} |")
                print(lines[-1], flush=True)
    return lines


def planned_bytes(folder: str, workers: int, kind: str, layers: int, stages: int, chunks: int) -> int:
    """Return what the planner tells of the worker that holds most."""
    whole = pyg_sar.load(f"{folder}/1")
    columns, classes, shares = whole.x.size(1), whole.num_classes, from_partition(f"{folder}/{workers}")

    def model() -> Any:
        return DeepGNN(pyg_sar.nn, kind, columns, HIDDEN, classes, layers)

    if stages:
        return plan_pipeline(lambda: model().blocks, shares, columns, stages, chunks=chunks).total
    return int(plan(model, largest(shares), columns, modes=[2])[0].total)


TABLES = {"chunks": chunk_lines, "waits": waits, "hosts": host_lines, "memory": memory_lines}
ABOUT = {
    "chunks": "Seconds of an epoch in one process of two threads by the number of chunks, {layers} layers of {hidden}.",
    "waits": "Two stages on two cores: the share of an epoch in which a stage waits for the other, the mean of both. "
    "*Computed*, for S stages of as many blocks as each other: the schedule of the seconds of every block and chunk in "
    "one process of one thread, and in brackets (S - 1) / (K + S - 1); what is more than that is imbalance. {layers} "
    "layers of {hidden}.",
    "hosts": "Seconds of an epoch on {hosts} simulated hosts of one thread, by the rate of their links, and the most "
    "that a worker held, resident, at any of them. {layers} layers of {hidden}; *sharing*: a part of the graph for "
    "each.",
    "memory": "All tensors that the worker that holds most of eight holds at the peak of an epoch, counted, beside "
    "what `pyg-sar plan` tells. {layers} layers of {hidden}, rows kept; *sharing*: eight parts of the graph.",
}


def main(args: argparse.Namespace) -> None:
    """Partition, measure, and write each table."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: f"{scratch}/{k}" for k, name in enumerate(args.graphs) if there(name, args.root)}
        parts = {1, 2, args.hosts} | ({8} if "memory" in args.of else set())
        for name, folder in folders.items():
            partitions(graph(name, args.root), folder, sorted(parts))
        for of in tqdm(args.of):
            about = ABOUT[of].format(layers=args.layers, hidden=HIDDEN, hosts=args.hosts)
            how = "" if of == "memory" else f" Medians of {args.epochs} epochs. {processor()}."
            made = f"{about}{how} Made by `benchmarks/pipeline_time.py`."
            print(write(args.out, f"pipeline-{of}.md", [made, "", *TABLES[of](folders, args)]))


if __name__ == "__main__":
    if mine := asked(
        folder=str,
        kind=str,
        stages=int,
        chunks=int,
        workers=int,
        epochs=int,
        layers=int,
        way=int,
        count=int,
        blocks=int,
    ):
        worker(mine)
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--graphs", nargs="+", default=["squirrel", LARGE])
    parser.add_argument("--models", nargs="+", default=["gcn", "gcn2"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "no limit"], help="of links, for hosts")
    parser.add_argument("--runs", default="hosts.jsonl", help="a file of finished runs of hosts")
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", default="docs/results")
    try:
        main(parser.parse_args())
    except Unavailable as error:
        print(error, file=sys.stderr)
        sys.exit(SKIPPED)
