"""Rows at home (``pyg_sar.offload``) against rows in memory: time of a step, memory, and what moves; and under a limit.

    python benchmarks/offload.py --folder /scratch --out docs/results
    python benchmarks/offload.py --folder /scratch --out /tmp --of limit disk --limited Community/200000/4000000

The first table trains on a graph that fits, homes in memory. Each setting is a process of its own; they take turns, and
the table has medians. The loss of the second step is compared, before rounding grows with each. *Device* is the peak of
all tensors that are made in a step, other than rows at home; *planned* is what a dry run tells of it. *Again*: backward
computes sums once more, as it does attention, instead of keeping what they give (HongTu's hybrid switched off). *Stay*:
source rows stay in slots between chunks, as on an accelerator.

The second table trains in processes whose anonymous memory the system limits (``RLIMIT_DATA``) to what they hold once
the data is loaded, and a share of what a step in memory needs; homes are files in ``--folder``. Mapped files do not
count. The third trains in a control group that holds so much memory, pages of files included (version 1, made by
``root``), so that the disk has to be read and written: rows at home; the same without reading ahead and writing behind;
and rows in memory, of which autograd saves all tensors in mapped files (``saved_tensors_hooks``). Writes
``offload-time.md``, ``offload-limit.md`` and ``offload-disk.md``.
"""

import argparse
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.launch import GNN, answer, environment, launch, results
from harness.process_memory import RETURN_FREED_MEMORY, entry, resident
from harness.report import processor, write
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.live import Live
from pyg_sar.offload import chunks as by_chunks
from pyg_sar.offload.counts import counts_of
from pyg_sar.offload.home import Home
from pyg_sar.offload.move import move, place_of
from pyg_sar.offload.plan import plan_offload

SLACK = 32 * 2**20  # for what Python and the allocator take besides tensors


def main(args: argparse.Namespace) -> None:
    head = (
        f"Three layers (GraphSAGE, GCN: {args.hidden} hidden, GAT: 4 heads of {args.hidden // 2}), batch "
        f"normalisation, no dropout, Adam, single precision, {args.threads} threads. {processor()}, torch "
        f"{torch.__version__}. Made by `benchmarks/offload.py`."
    )
    tables = {"time": (times, args.graph), "limit": (limits, args.limited), "disk": (disk, args.limited)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in args.of:
            make, graph = tables[name]
            print(write(args.out, f"offload-{name}.md", [head, "", *make(args, prepare(graph, folder))]))


def prepare(graph: str, folder: str) -> str:
    """Partition a graph into one part, whose rows are in locality order."""
    path = f"{folder}/{graph.replace('/', '-')}"
    if not Path(path).exists():
        pyg_sar.partition(dataset(graph, "data"), 1, path)
    return path


def times(args: argparse.Namespace, path: str) -> list[str]:
    """Return the lines of the first table."""
    settings = [(kind, chunks, "") for kind in args.models for chunks in (0, *args.chunks)]
    settings += [(kind, args.chunks[0], how) for kind in args.models for how in ("again", "stay")
                 if how == "stay" or kind != "gat"]  # fmt: skip
    found: dict[Any, list[dict[str, Any]]] = {setting: [] for setting in settings}
    for _ in tqdm(range(args.rounds)):
        for kind, chunks, how in settings:
            options = [path, kind, str(args.hidden), str(args.steps), "--chunks", str(chunks), "--how", how]
            found[kind, chunks, how] += launch(__file__, 0, options, threads=args.threads)
    lines = [
        f"`{args.graph}`, homes in memory, medians of {args.rounds} rounds.",
        "",
        "| model | chunks | s a step | times memory | device MiB | of memory | planned | MiB at home | GiB loaded | "
        "stored |",
        "|" + "---|" * 10,
    ]
    for (kind, chunks, how), runs in sorted(found.items(), key=lambda it: settings.index((it[0][0], 0, ""))):
        one = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
        memory = {k: statistics.median(r[k] for r in found[kind, 0, ""]) for k in one}
        assert abs(one["loss"] - memory["loss"]) <= 1e-4 * abs(memory["loss"])
        cells = [f"{one['seconds']:.2f}", f"{one['seconds'] / memory['seconds']:.2f}", f"{one['device'] / 2**20:.0f}"]
        plan = planned(args, path, kind, chunks) / one["device"] if chunks and not how else None
        cells += [f"{one['device'] / memory['device']:.2f}", f"{plan:.2f} times" if plan else ""]
        cells.append(f"{one['home'] / 2**20:.0f}")
        cells += [f"{one[k] / 2**30:.2f}" for k in ("loaded", "stored")]
        setting = f"{chunks}{how and f', {how}'}" if chunks else "in memory"
        lines.append(f"| {kind} | {setting} | {' | '.join(cells)} |")
    return lines


def planned(args: argparse.Namespace, path: str, kind: str, chunks: int) -> int:
    """Return the peak of a step that a dry run tells."""
    data = pyg_sar.load(path)
    counts = counts_of(data.edge_index.graph, chunks, int(data.train_mask.sum()))
    return plan_offload(lambda: model_of(kind, args.hidden, data), counts, data.x.size(1)).step


def model_of(kind: str, hidden: int, data: Any) -> GNN:
    """Return a model of layers as wide as those of the others."""
    hidden = hidden // 2 if kind == "gat" else hidden
    return GNN(pyg_sar.nn, kind, data.x.size(1), hidden, data.num_classes, dropout=0.0)


def limits(args: argparse.Namespace, path: str) -> list[str]:
    """Return the lines of the second table."""
    lines = [
        f"`{args.limited}`, anonymous memory limited, homes in files.",
        "",
        "| model | in memory needs, MiB | budget, MiB | in memory | chunks | s a step | at home, MiB | resident |",
        "|" + "---|" * 8,
    ]
    for kind in args.limited_models:
        options = [path, kind, str(args.hidden), "2"]
        (free,) = launch(__file__, 0, [*options, "--chunks", "0"], threads=args.threads)
        for share in tqdm(args.shares):
            budget = round(free["device"] / share)
            limited = ["--budget", str(budget), "--home", args.folder]
            memory = attempt([*options, "--chunks", "0", *limited], args.threads)
            home = attempt([*options, *limited], args.threads)
            cells = [f"{free['device'] / 2**20:.0f}", f"{budget / 2**20:.0f} (1/{share})"]
            cells.append(f"{memory['seconds']:.1f} s" if isinstance(memory, dict) else memory)
            if isinstance(home, dict):
                assert abs(home["loss"] - free["loss"]) <= 1e-4 * abs(free["loss"])
                cells += [f"{home['chunks']}", f"{home['seconds']:.1f} ({home['seconds'] / free['seconds']:.1f} times)"]
                cells += [f"{home['home'] / 2**20:.0f}", f"{home['resident']:.0f}"]
            else:
                cells += [home, "", "", ""]
            lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def disk(args: argparse.Namespace, path: str) -> list[str]:
    """Return the lines of the third table."""
    reads, writes = rates(args.folder)
    lines = [
        f"`{args.limited}`, in a control group of the budget and {SLACK >> 20} MiB, pages of files included. This disk "
        f"reads {reads / 2**20:.0f} and writes {writes / 2**20:.0f} MiB/s, one after the other in one file.",
        "",
        "| model | budget, MiB | rows | s a step | GiB read | written | share of the disk's rate |",
        "|" + "---|" * 7,
    ]
    for kind in args.limited_models:
        options = [path, kind, str(args.hidden), str(args.steps)]
        (free,) = launch(__file__, 0, [*options, "--chunks", "0"], threads=args.threads)
        budget = round(free["device"] / args.disk_share)
        for how, what in (("", "at home"), ("plain", "at home, plain files"), ("saved", "saved tensors in files")):
            Path("/proc/sys/vm/drop_caches").write_text("1")
            limited = ["--budget", str(budget), "--home", args.folder, "--group", "--how", how]
            it = attempt([*options, *limited, *(["--chunks", "0"] if how == "saved" else [])], args.threads)
            cells = [kind, f"{budget / 2**20:.0f} (1/{args.disk_share})", what]
            if isinstance(it, dict):
                assert abs(it["loss"] - free["loss"]) <= 1e-4 * abs(free["loss"])
                moving = it["read"] / reads + it["written"] / writes
                cells += [f"{it['seconds']:.1f}", f"{it['read'] / 2**30:.1f}", f"{it['written'] / 2**30:.1f}"]
                cells.append(f"{moving / it['seconds']:.0%}")
            else:
                cells += [it, "", "", ""]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def rates(folder: str) -> tuple[float, float]:
    """Return the bytes a second that the disk reads and writes, of a file that is not in memory."""
    block, count = bytes(2**24), 128
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(count):
            file.write(block)
        os.fsync(file.fileno())
        write_rate = count * len(block) / (time.perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        while file.read(len(block)):
            pass
        return count * len(block) / (time.perf_counter() - start), write_rate


def moved() -> tuple[int, int]:
    """Return the bytes that this process had read from disks, and written there or marked to be."""
    entries = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(entries["read_bytes"]), int(entries["write_bytes"])


def join_group(limit: int) -> None:
    """Enter a control group that holds so many bytes from now on."""
    (own,) = (
        line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line
    )
    group = Path(f"/sys/fs/cgroup/memory{own}/offload-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "cgroup.procs").write_text(str(os.getpid()))


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Has autograd save tensors in files of a folder, but for parameters."""

    def __init__(self, folder: str) -> None:
        self.home = Home(folder, torch.device("cpu"), None)
        super().__init__(self.pack, lambda t: t)

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        if t.is_leaf and t.requires_grad:
            return t
        return self.home.empty(t.shape, t.dtype).copy_(t)


def attempt(options: list[str], threads: int) -> dict[str, Any] | str:
    """Return what a run finds, or why it failed."""
    command = [sys.executable, __file__, "--worker", *options]
    env = environment(threads, **RETURN_FREED_MEMORY)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return results(done.stdout)[0]
    if done.returncode == -signal.SIGKILL or "can't allocate memory" in done.stderr:
        return "out of memory"
    return f"fails: {done.stderr.strip()[-90:]}"


def worker(argv: list[str]) -> None:
    """Train, perhaps under a limit, and answer what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("kind")
    parser.add_argument("hidden", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--home")
    parser.add_argument("--how", default="")
    parser.add_argument("--group", action="store_true")
    args = parser.parse_args(argv)
    data = pyg_sar.load(args.path)
    torch.manual_seed(0)
    model = model_of(args.kind, args.hidden, data)
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))  # makes threads
    if args.budget:
        if args.group:
            join_group(args.budget + SLACK)
        else:
            limit = int(entry("/proc/self/status", "VmData") * 2**20) + args.budget + SLACK
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if args.how == "plain":
        Home.advise = Home.wrote = lambda *_: None
    if args.how == "again":
        by_chunks.Aggregation.needs_source = property(lambda self: True, lambda self, value: None)
    if args.chunks is None:
        data = pyg_sar.offload(data, args.budget, model, home=args.home)
    elif args.chunks:
        home = Home(args.home, torch.device("cpu"), None)
        place = place_of(data.edge_index.graph, home, args.chunks)
        data = move(data, place._replace(copies=args.how == "stay"))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seconds, losses, ways = [], [], []
    for _ in range(args.steps):
        start, before = time.perf_counter(), moved()
        with (
            pyg_sar.record_traffic(data.edge_index) as layers,
            Saved(args.home) if args.how == "saved" else nullcontext(),
        ):
            losses.append(step(model, data, optimizer))
        seconds.append(time.perf_counter() - start)
        ways.append([after - old for after, old in zip(moved(), before, strict=True)])
    device = 0
    if not args.budget:
        with Live() as live:
            step(model, data, optimizer)
        device = live.peak
    place = getattr(data.x, "place", None)
    answer({
        "seconds": statistics.median(seconds[1:]), "loss": losses[1], "device": device,
        "chunks": len(place.ranges) if place else 0, "home": place.home.peak if place else 0,
        **bytes_of(layers), "resident": resident("VmHWM"),
        "read": statistics.median(r for r, _ in ways[1:]), "written": statistics.median(w for _, w in ways[1:]),
    })  # fmt: skip


def bytes_of(layers: Any) -> dict[str, int]:
    """Return the bytes of rows that came from home in a step, and that went there."""
    return {
        "loaded": sum(t.forward_loaded + t.backward_loaded for t in layers),
        "stored": sum(t.forward_stored + t.backward_stored for t in layers),
    }


def step(model: torch.nn.Module, data: Any, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
        sys.exit()
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", choices=["time", "limit", "disk"], default=["time", "limit"])
    parser.add_argument("--graph", default="Community/50000/1000000")
    parser.add_argument("--limited", default="Community/200000/4000000")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that homes are made on")
    parser.add_argument("--models", nargs="+", default=["sage", "gcn", "gat"])
    parser.add_argument("--limited-models", nargs="+", default=["sage"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--shares", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--disk-share", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="docs/results")
    main(parser.parse_args())
