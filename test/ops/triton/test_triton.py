"""The kernels in Triton against the reference: on a GPU if there is one, else in Triton's interpreter."""

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_geometric.nn
from support import gpu
from support.gpu import DEVICE, schedule
from support.kernel_check import ALL, BLOCKS, LAYOUTS, SCHEMAS, block, calls, check_double, check_precision, execute
from support.nasty_graph import NUM_NODES, close, edges

import pyg_sar

# The numbers.


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "around a unit"])  # of the CPU's kernels
def test_double_precision(name):
    """Every operator and choice of arguments; rows lie in all ways."""
    ways = itertools.cycle(itertools.product(LAYOUTS, (torch.int32, torch.int64)))
    compared = 0
    for call, (layout, index) in zip(calls(block(name), 2, 3), ways, strict=False):
        compared += check_double(gpu.OPS, call, index, layout)
    assert compared > (1000 if block(name).sizes[2] > 2 else 0)


@pytest.mark.grid
def test_single_precision():
    """The error of every operator on all blocks and shapes is at most twice that of the reference."""
    # With one source, gradients of scores cancel: what is left is rounding in any precision.
    shapes = [(name, shape) for name, shape in ALL if BLOCKS[name][1] > 1 and sum(BLOCKS[name][0])]
    # Each call on five of them or more, as few may be off by chance: all calls on all of them take nine minutes.
    assert check_precision(gpu.OPS, torch.float32, 4, shapes, step=8) > 100


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    gpu.needs_rounding(dtype)
    assert check_precision(gpu.OPS, dtype, 2, [("mixed", (3, 8))], step=2) > 50


@pytest.mark.parametrize("cut", [3, 512])
def test_any_cut_gives_the_same_numbers(monkeypatch, cut):
    """And the same bits each time."""
    monkeypatch.setattr(schedule, "CUT", cut)
    monkeypatch.setattr(schedule, "MEANS", 0)
    wanted = ("spmm_ 2 weights ", "extremum_ True", "attention_ gatv2 query edge", "attention_ dot query gradient all")
    for call in calls(block("mixed"), 2, 3):
        if call.title in wanted:
            one, other, expected = (execute(m, call, torch.float64) for m in (gpu.OPS, gpu.OPS, torch.ops.pyg_sar))
            for key, value in expected.items():
                torch.testing.assert_close(one[key], value, rtol=1e-10, atol=1e-10)
                assert torch.equal(one[key], other[key])


# How edges are shared out.


def test_a_few_long_rows_are_cut(monkeypatch):
    """Or a sum into them would be a few programs."""
    monkeypatch.setattr(schedule, "MEANS", 2)
    it = schedule.share_out(torch.tensor([0, 1 << 20, 1 << 21]))
    assert it.hubs.pieces.first.numel() == (1 << 21) // schedule.LONGEST


@pytest.mark.parametrize("means", [0, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_every_edge_is_in_one_unit(name, means, monkeypatch):
    """And there are fewer pieces than rows, if units may be twice as long as the mean."""
    monkeypatch.setattr(schedule, "MEANS", means)
    ptr = block(name).ptr
    it = schedule.share_out(ptr)
    filled = int((ptr.diff() > 0).sum())
    mean = -(-int(ptr[-1]) // max(filled, 1))
    cut = max(schedule.CUT, min(means * mean, schedule.LONGEST))
    pieces = None if it.hubs is None else it.hubs.pieces
    assert pieces is None or cut < means * mean or not means or pieces.first.numel() < filled
    seen = torch.zeros(block(name).sizes[2], dtype=torch.long)
    for units in filter(None, (it.rows, pieces)):
        assert units.first.numel() == units.last.numel() == units.row.numel() == units.place.numel()
        for first, last, row in zip(units.first, units.last, units.row, strict=True):
            assert 0 <= last - first <= cut and ptr[row] <= first <= last <= ptr[row + 1]
            seen[first:last] += 1
    assert (seen == 1).all()
    lengths = it.rows.last - it.rows.first
    assert (lengths.diff() <= 0).all() and it.filled == (lengths > 0).sum()
    assert sorted([*it.rows.row.tolist(), *(it.hubs.rows.tolist() if it.hubs is not None else [])]) == list(
        range(len(ptr) - 1)
    )


def test_shared_out_once(monkeypatch):
    """Later the host does not wait for the device."""
    ptr, counts = block("mixed").ptr.clone(), []
    share_out = schedule.share_out
    monkeypatch.setattr(schedule, "share_out", lambda *args: counts.append(1) or share_out(*args))
    first = schedule.work_of(ptr, 182)
    assert schedule.work_of(ptr, 182) is first and len(counts) == 1
    ptr[0] = 0  # somebody changed it
    assert schedule.work_of(ptr, 182) is not first and len(counts) == 2
    with pytest.raises(RuntimeError, match=r"lead from 0 to the number of edges, 181 \(got 0 to 182\)"):
        schedule.work_of(ptr.clone(), 181)
    with torch.inference_mode():
        assert schedule.work_of(ptr.clone(), 182).rows.first.is_inference() is False


# Layers.


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SAGEConv", {}),
        ("SAGEConv", {"aggr": "max"}),
        ("GATConv", {"heads": 2}),
        ("GATv2Conv", {"heads": 2}),
        ("TransformerConv", {"heads": 2}),
        ("RGCNConv", {"num_relations": 3, "num_bases": 2}),
    ],
)
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.grid), 3])
def test_layers(monkeypatch, name, kwargs, parts):
    """Whole layers over these kernels, whatever device they run on."""
    for module in (
        "reduce.sums",
        "reduce.extremum",
        "reduce.softmax",
        "reduce.projected_softmax",
        "reduce.relational",
        "runs",
    ):
        for op in SCHEMAS.keys() & vars(importlib.import_module(f"pyg_sar.{module}")).keys():
            monkeypatch.setattr(f"pyg_sar.{module}.{op}", getattr(gpu.kernels, op))
    edge_index, x = edges().to(DEVICE), torch.randn(NUM_NODES, 8, dtype=torch.float64, device=DEVICE)
    extra = [torch.arange(edge_index.size(1), device=DEVICE) % 3] if name == "RGCNConv" else []
    layer = getattr(pyg_sar.nn, name)(8, 4, **kwargs).double().to(DEVICE)
    reference = getattr(torch_geometric.nn, name)(8, 4, **kwargs).double().to(DEVICE)
    reference.load_state_dict(layer.state_dict())
    found = []
    for module, graph in ((layer, pyg_sar.shard(edge_index, NUM_NODES, parts)), (reference, edge_index)):
        leaf = x.clone().requires_grad_()
        out = module(leaf, graph, *extra)
        out.square().sum().backward()
        found.append({"out": out, "x": leaf.grad, **{n: p.grad for n, p in module.named_parameters()}})
    for key, value in found[1].items():
        close(found[0][key], value, key)


# What compiles.

COMPILE = """
import sys, torch, triton, warnings
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
sys.path[:0] = sys.argv[1:3]
from support.kernel_check import block, calls, execute

class Driver:
    def __init__(self, target): self.target = target
    def get_current_target(self): return self.target
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

target = GPUTarget(sys.argv[3], int(sys.argv[4]) if sys.argv[4].isdecimal() else sys.argv[4], int(sys.argv[5]))
triton.runtime.driver.set_active(Driver(target))
run, done = JITFunction.run, set()

def compile(self, *args, grid, warmup, **kwargs):
    run(self, *args, grid=grid, warmup=True, **kwargs)
    done.add(self.__name__)

JITFunction.run = compile
from pyg_sar.ops import triton
from pyg_sar.ops.triton import schedule
schedule.CUT, schedule.MEANS = 8, 0
warnings.simplefilter("error")
wanted = {"spmm_ 2 weights by source", "spmm_ to shared columns", "sddmm_", "extremum_ True", "extremum_grad_"}
for kind in ("additive", "gatv2", "dot"):
    wanted |= {f"attention_ {kind} query edge dropout{more}" for more in ("", " gradient all")}
wanted.add("attention_ additive query edge dropout gradient all alone")
wide = {"spmm_ 0 weights ", "spmm_ 0 weights by source", "spmm_ 1 weights ", "spmm_ 1 weights by source"}  # edges ahead
for heads, channels, wanted in ((2, 5, wanted), (1, 100, wide)):
    for call in calls(block("mixed"), heads, channels):
        if call.title in wanted:
            execute(triton, call, getattr(torch, sys.argv[6]))
            wanted.remove(call.title)
    assert not wanted, wanted
print(*sorted(done))
"""


@pytest.mark.grid
@pytest.mark.parametrize(
    ("target", "dtype"),
    [(("cuda", "80", "32"), "bfloat16"), (("hip", "gfx942", "64"), "float64")],
)
def test_kernels_compile_without_a_gpu(tmp_path, target, dtype):
    """For NVIDIA's and AMD's; the interpreter knows nothing of types that Triton refuses."""
    root = Path(__file__).parents[3]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE, str(root), str(root / "test"), *target, dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    names = "_attention _extremum _extremum_grad _gatv2_queries _products _scores _sources _sum"
    assert done.stdout.split() == names.split()
