"""Time and memory of layers on a GPU: pyg_sar, PyG, torch's own sums, and the device's bounds.

    python benchmarks/gpu_layers.py --out docs/results    # 2.4M nodes, 62M edges, as ogbn-products has
    python benchmarks/gpu_layers.py --nodes 230000 --edges 114000000 --out docs/results    # as Reddit has
    python benchmarks/gpu_layers.py --nodes 600000 --edges 15500000 --out docs/results    # where PyG fits
    python benchmarks/gpu_layers.py --nodes 600000 --edges 15500000 --peers    # beside fused layers of other libraries
    ncu --profile-from-start off python benchmarks/gpu_layers.py --profile --cases gat-2 sum-128    # of a step of ours

First all kernels are compiled, by some processes together, on a smaller graph, where the output and all gradients are
compared with PyG in double precision, too. Then one process measures one implementation after the other, forward and
backward by CUDA events; peaks are those of torch's allocator. *copy* is the time in which the device reads and writes
as many bytes as the aggregation must read, *gather* that of a kernel that only reads the rows of its edges, in order.

Writes ``gpu-layers-NODES-EDGES.md``, or ``gpu-peers.md``.
"""

import argparse
import gc
import json
import math
import multiprocessing
import statistics
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product, repeat
from pathlib import Path

import torch
import torch_geometric.nn
import triton
import triton.language as tl
from harness import gpu_peers
from harness.device import events, power_law_graph
from harness.layer_jobs import BF16, RELATIONS, Case, Job, Problem, cases, error, noise, ours, pyg, torch_csr
from harness.report import write
from torch import Tensor

import pyg_sar

SMALL = 20_000, 300_000  # nodes and edges of the graph on which is compared
TOLERANCE, SEEDS = 1e-3, 3  # of float32
WARMUPS = 2
# Whose products of a sparse matrix there are.
CSR = {"SimpleConv": "torch", "SAGEConv": "PyG", "GCNConv": "PyG", "GINConv": "PyG"}
EACH = 16  # edges of a row of a tile of the bound


class OnDevice(Problem):
    """A power-law graph on the device, edges sorted by destination, with a self-loop at every node."""

    def __init__(self, nodes: int, edges: int, device: str = "cuda") -> None:
        self.num_nodes, self.device = nodes, device
        self.edge_index = power_law_graph(nodes, edges, device)
        g = torch.Generator(device).manual_seed(1)
        self.edge_type = torch.randint(RELATIONS, self.edge_index[0].shape, generator=g, device=device)

    def of(self, case: Case, dtype: torch.dtype, seed: int = 0) -> "OnDevice":
        """Return the same graph with features of a case."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.case, other.dtype = case, dtype
        other.x = noise(self.num_nodes, case.inputs, 2 * seed, self.device).to(dtype)
        return other


def implementations(case: Case) -> list[str]:
    """Return what computes a case, our own first."""
    more = [] if case.layer not in CSR else [f"{CSR[case.layer]} CSR"]
    return ["pyg_sar", *more, *gpu_peers.peers(case), "PyG", "PyG compiled", "pyg_sar" + BF16, "PyG" + BF16]


def make(problem: OnDevice, implementation: str) -> Job:
    """Make one implementation of a case."""
    kind = implementation.removesuffix(BF16).removesuffix(" compiled")
    peers = dict.fromkeys(gpu_peers.peers(problem.case), gpu_peers.job)
    job = {"pyg_sar": ours, "torch CSR": torch_csr, **peers}.get(kind, pyg)(problem, kind)
    if implementation.endswith(BF16):
        cast_parameters(job)
    if implementation.endswith("compiled"):
        job.call = torch.compile(job.call)
    return job


def cast_parameters(job: Job) -> None:
    for parameter in job.parameters.values():
        parameter.data = parameter.data.bfloat16()


def dtype_of(implementation: str) -> torch.dtype:
    return torch.bfloat16 if implementation.endswith(BF16) else torch.float32


def results_of(job: Job) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    job.clear()
    out = job.call(job.x)
    out.backward(job.problem.grad(out))
    return {"out": out.detach(), "x": job.x.grad, **{name: p.grad for name, p in job.parameters.items()}}


def compare(name: str, chosen: list[str]) -> dict[str, str]:
    """Compare the implementations of a case with PyG in double precision on the small graph, in a fresh process.

    Medians over features, because a single score that rounds to the other side of LeakyReLU's kink is an outlier.
    """
    case, graph, found = find(name), OnDevice(*SMALL), {}
    for dtype in (torch.float32, torch.bfloat16):  # which compiles them
        Bounds(graph).of(case.width, dtype)
    for implementation in chosen:
        if implementation not in implementations(case) or implementation.endswith("compiled"):
            continue
        try:
            seeds = [errors(graph, case, implementation, seed) for seed in range(SEEDS)]
        except Exception as raised:
            found[implementation] = failure(implementation, raised)
            continue
        medians = {key: statistics.median(each[key] for each in seeds) for key in seeds[0]}
        worst = max(medians, key=lambda key, of=medians: math.inf if math.isnan(of[key]) else of[key])
        wrong = not (medians[worst] <= TOLERANCE or implementation.endswith(BF16))
        found[implementation] = f"{medians[worst]:.0e} ({worst}){' WRONG' * wrong}"
    return found


def failure(implementation: str, raised: Exception) -> str:
    """Return what is told of an implementation that raised; of ours, print all of it."""
    if implementation.startswith("pyg_sar"):
        traceback.print_exception(raised)
    return "out of memory" if isinstance(raised, torch.cuda.OutOfMemoryError) else f"raises {type(raised).__name__}"


def is_broken(implementation: str, told: str) -> bool:
    """Return whether an implementation is ours, and :func:`failure` tells of it."""
    return implementation.startswith("pyg_sar") and told.startswith(("out of memory", "raises"))


def errors(graph: OnDevice, case: Case, implementation: str, seed: int) -> dict[str, float]:
    """Return the errors of the output and of all gradients, by norm."""
    reference = pyg(graph.of(case, torch.float64, seed), "PyG")
    for parameter in reference.parameters.values():
        parameter.data = parameter.data.double()
    expected = results_of(reference)
    got = results_of(make(graph.of(case, dtype_of(implementation), seed), implementation))
    return {key: error(value, expected[key]) for key, value in got.items()}


def find(name: str) -> Case:
    return next(case for case in (*cases("cuda"), *gpu_peers.cases()) if case.name == name)


def measure(job: Job, repetitions: int) -> tuple[float, float, float]:
    """Return medians of milliseconds, forward and backward, and the peak in MiB above the inputs."""
    out = job.call(job.x)
    grad_out = job.problem.grad(out)
    del out
    times: list[tuple[float, float]] = []
    job.clear()
    before = torch.cuda.memory_allocated()
    for _ in range(WARMUPS + repetitions):
        torch.cuda.reset_peak_memory_stats()
        forward, out = events(lambda: job.call(job.x))
        backward, _ = events(lambda out=out: out.backward(grad_out))
        peak = torch.cuda.max_memory_allocated() - before
        times.append((forward, backward))
        del out
        job.clear()
    medians = (statistics.median(t) for t in zip(*times[WARMUPS:], strict=True))
    return *medians, peak / 2**20


@triton.jit(do_not_specialize=["num_edges"])
def _gather(
    out, col, x, num_edges, width: tl.constexpr, each: tl.constexpr, ahead: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    # One number is written, so that nothing that is read is left out.
    c, total = tl.arange(0, C), tl.zeros([R, C], tl.float32)
    for begun in range(0, each, ahead):
        for k in tl.static_range(ahead):
            e = (tl.program_id(0).to(tl.int64) * each + begun + k) * R + tl.arange(0, R)
            on = e < num_edges
            j, mask = tl.load(col + e, on, 0).to(tl.int64), on[:, None] & (c < width)[None, :]
            total += tl.load(x + (j * width)[:, None] + c[None, :], mask, 0).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 0), 0))


def gather(index: Tensor, x: Tensor, repetitions: int = 3) -> float:
    """Return the milliseconds in which the rows of all edges are read, each program some edges in a row; the least of
    some shapes of programs.
    """
    width, best = x.size(1), float("inf")
    c = triton.next_power_of_2(width)
    for rows, warps, ahead in product((max(1024 // c, 1), max(512 // c, 1)), (1, 4), (1, 4)):
        grid = triton.cdiv(index.numel(), rows * EACH)
        out = x.new_empty(grid, dtype=torch.float32)
        read = partial(_gather[(grid,)], out, index, x, index.numel(), width, EACH, ahead, rows, c, num_warps=warps)
        best = min(best, *(events(read)[0] for _ in range(repetitions)))
    return best


def copy_rate() -> float:
    """Return bytes per millisecond, read and written."""
    one, other = (torch.ones(1 << 28, device="cuda") for _ in range(2))
    return 2 * one.nbytes / min(events(lambda: one.copy_(other))[0] for _ in range(5))


class Bounds:
    """Milliseconds of both passes over a graph: of a copy of as many bytes as edges read, and of a kernel that reads
    them; measured once for a width and a type.
    """

    def __init__(self, graph: OnDevice) -> None:
        self.block = pyg_sar.shard(graph.edge_index, graph.num_nodes, 1).graph.blocks[0]
        self.num_nodes, self.indices = graph.num_nodes, (self.block.col, self.block.transpose[1])
        self.rate, self.found = copy_rate(), {}

    def of(self, width: int, dtype: torch.dtype) -> tuple[float, float]:
        """Return those of a copy and of a kernel."""
        if (width, dtype) not in self.found:
            rows = noise(self.num_nodes, width, 0, "cuda").to(dtype)
            copied = sum(index.numel() for index in self.indices) * width * rows.itemsize / self.rate
            self.found[width, dtype] = copied, sum(gather(index, rows) for index in self.indices)
        return self.found[width, dtype]


def row(name: str, times: tuple[float, float, float], ours: float, bound: tuple[float, float], err: str) -> list[str]:
    forward, backward, peak = times
    both = forward + backward
    shares = [f"{100 * b / both:.0f}" for b in bound]
    return [
        name,
        f"{forward:.1f}",
        f"{backward:.1f}",
        f"{both:.1f}",
        f"{both / ours:.2f}" if ours else "",
        f"{peak:.0f}",
        *shares,
        err,
    ]


def errors_of(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the errors of all implementations of all cases, by some processes, or as they were found before."""
    kept = args.errors is not None and args.errors.exists()
    by_case = json.loads(args.errors.read_text()) if kept else {}
    names, context = [name for name in args.cases if name not in by_case], multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context, max_tasks_per_child=1) as pool:
        by_case |= zip(names, pool.map(compare, names, repeat(args.implementations)), strict=True)
    if args.errors is not None:
        args.errors.write_text(json.dumps(by_case))
    return by_case


def profile(args: argparse.Namespace) -> None:
    """Show a profiler one step of each case, after two."""
    graph = OnDevice(args.nodes, args.edges)
    for name in args.cases:
        job = make(graph.of(find(name), torch.float32), "pyg_sar")
        for _ in range(2):
            results_of(job)
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            results_of(job)
            torch.cuda.synchronize()


def main(args: argparse.Namespace) -> None:
    found = errors_of(args)
    graph = OnDevice(args.nodes, args.edges)
    bounds = Bounds(graph)
    columns = ["case", "implementation", "forward ms", "backward ms", "both ms", "times pyg_sar", "peak MiB",
               "% of copy", "% of gather", "error"]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    broken = {name for name in args.cases for i, told in found[name].items() if is_broken(i, told)}
    head = (
        f"One layer, forward and backward, on one {torch.cuda.get_device_name()}: {args.nodes:,} nodes, "
        f"{graph.edge_index.size(1):,} edges with self-loops, power-law degrees. torch {torch.__version__}, "
        f"PyG {torch_geometric.__version__}, Triton {triton.__version__}, pyg_sar {pyg_sar.__version__}. Medians of "
        f"{args.repetitions}. The device copies {bounds.rate / 1e6:.0f} GB/s, read and written. Made by "
        "`benchmarks/gpu_layers.py`."
    )
    for name in args.cases:
        case, own = find(name), 0.0
        for implementation in (i for i in implementations(case) if i in args.implementations):
            cells = [name, implementation, *[""] * 8]
            try:
                job = make(graph.of(case, dtype_of(implementation)), implementation)
                times = measure(job, args.repetitions)
                own = sum(times[:2]) if implementation == "pyg_sar" else own
                bound = bounds.of(case.width, dtype_of(implementation))
                cells[1:] = row(implementation, times, own, bound, found[name].get(implementation, ""))
            except Exception as raised:
                cells[2] = failure(implementation, raised)
                broken |= {name} if is_broken(implementation, cells[2]) else set()
            job = None
            gc.collect()
            torch.cuda.empty_cache()
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            write(args.out, args.name, [head, "", *lines])
    if broken:
        sys.exit(f"pyg_sar failed: {', '.join(sorted(broken))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+")
    parser.add_argument(
        "--peers", action="store_true", help="measure attention by pyg_sar and by fused layers of others"
    )
    parser.add_argument("--implementations", nargs="+")
    parser.add_argument("--nodes", type=int, default=2_400_000)
    parser.add_argument("--edges", type=int, default=62_000_000)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--errors", type=Path, help="where errors are kept from one size to the next")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--profile", action="store_true", help="run a step of each case, for a profiler, and no more")
    given = parser.parse_args()
    everything = sorted({i for case in cases("cuda") for i in implementations(case) if i not in gpu_peers.peers(case)})
    given.name = "gpu-peers.md" if given.peers else f"gpu-layers-{given.nodes}-{given.edges}.md"
    if given.peers:
        given.cases = given.cases or ["gat-4x32", "gat-2", *(case.name for case in gpu_peers.cases())]
        everything = ["pyg_sar", *(name for names in gpu_peers.PEERS.values() for name in names)]
    given.cases = given.cases or [case.name for case in cases("cuda")]
    given.implementations = given.implementations or [i for i in everything if "compiled" not in i]
    profile(given) if given.profile else main(given)
