"""The operators as PyTorch sees them, and the compiled kernels against the reference."""

import functools
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support import kernel_check
from support.cases import some
from support.kernel_check import (
    BLOCKS,
    HALF,
    KINDS,
    LAYOUTS,
    OF_BLOCKS,
    block,
    calls,
    cast,
    check_all_double,
    check_few_double,
    check_precision,
    execute,
    rows_of,
)
from support.pool import Pool

from pyg_sar import ops
from pyg_sar.ops import reference
from pyg_sar.ops.dropout import dropout_factors
from pyg_sar.ops.reference import ADDITIVE, DOT, GATV2

OPS = torch.ops.pyg_sar
ROOT = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(not ops.KERNELS, reason="the kernels were not built, or are turned off")


@pytest.fixture(autouse=True)
def threads():
    """Some tests change their number."""
    yield
    torch.set_num_threads(1)


# The numbers.


@needs_kernels
def test_kernels_in_double_precision():
    """Every operator, choice of arguments and block; types of indices and layouts in memory in turn."""
    assert check_few_double(OPS) > 1_500_000


@needs_kernels
@pytest.mark.grid
def test_kernels_on_all_shapes_in_double_precision():
    """Every operator, choice of arguments, block, shape, type of index and layout in memory."""
    assert check_all_double(OPS) > 5_000_000


@needs_kernels
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seeds", [4, pytest.param(6, marks=pytest.mark.grid)])
def test_error_of_kernels_at_most_twice_that_of_the_reference(dtype, seeds):
    assert check_precision(OPS, dtype, seeds) > 100


def check_isa(group, levels, every_shape):
    os.environ["PYG_SAR_ISA"] = levels[group.rank()]
    check_double = check_all_double if every_shape else check_few_double
    return check_double(OPS), *(check_precision(OPS, dtype, 4) for dtype in HALF)


def unknown_isa(group):
    os.environ["PYG_SAR_ISA"] = "neon"
    x = torch.ones(1, 1)
    ops.spmm_(x.clone(), torch.tensor([0, 1]), torch.tensor([0]), x, None, None, False)


@needs_kernels
@pytest.mark.parametrize(
    ("every_shape", "least"), [(False, 1_500_000), pytest.param(True, 5_000_000, marks=pytest.mark.grid)]
)
def test_kernels_of_lesser_processors(every_shape, least):
    """In processes of their own, because the choice is made once; what is best here other tests run."""
    levels = ["plain"] if torch.backends.cpu.get_cpu_capability() == "AVX2" else ["plain", "avx2"]
    fresh = Pool(3)
    try:
        ((kind, error, message, _),) = fresh.outcomes(1, unknown_isa)
        results = fresh.run(len(levels), check_isa, levels, every_shape, timeout=250)
    finally:
        fresh.close()
    assert (kind, error) == ("error", "RuntimeError")
    assert "PYG_SAR_ISA must be plain, avx2 or avx512 (got neon)" in message
    for compared, *errors in results:
        assert compared > least
        assert min(errors) > 100


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(dtype):
    """Several units of work, rows that are cut, and heads in more than one group."""
    compared = 0
    for name, (heads, channels) in (("around a unit", (3, 5)), ("hub", (17, 2))):
        for call in calls(block(name), heads, channels):
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(execute(OPS, call, dtype, torch.int32))
            for other in results[1:]:
                for key, value in results[0].items():
                    assert torch.equal(other[key], value), f"{call.title}: {key}"
                    compared += 1
    assert compared > 200


@pytest.mark.parametrize(
    ("module", "name", "heads", "channels"),
    [(m, *shape) for m in (OPS, reference) for shape in (("mixed", 3, 17), ("hub", 17, 2), ("no edges", 2, 3))]
    + [("triton", "mixed", 2, 3)],
)
def test_doubly_compressed_rows_give_the_same_bits(module, name, heads, channels):
    slow = module == "triton"
    if slow:
        module = pytest.importorskip("support.gpu", reason="needs Triton").OPS
    compared = 0
    every = [c for c in calls(block(name), heads, channels) if c.name != "extremum_grad_"]  # which has rows of sources
    for call in every[:: 8 if slow else 1]:
        small = kernel_check.doubly(call)
        index = (torch.int32, torch.int64)[compared % 2]
        found, expected = (execute(module, c, torch.float32, index) for c in (small, call))
        for key, value in expected.items():
            written = small.args["rows"] if call.title in kernel_check.ONCE else slice(None)
            assert torch.equal(found[key][written], value[written]), f"{call.title}: {key}"
            compared += 1
    assert compared > (10 if slow else 50)


@needs_kernels
@pytest.mark.parametrize(("heads", "channels"), [(1, 130), (5, 26), (2, 65)])
def test_rows_in_tiles(heads, channels):
    """Rows of more than 512 bytes that exceed a megabyte together and are read eight times: some columns at a time."""
    wide = kernel_check.random_block([6000, 700, 0, 2500, 31, 1], 1100)
    n, _, e = wide.sizes
    assert heads * channels * 8 > 512 and n * heads * channels * 8 > 1 << 20 and e > 8 * n
    compared = 0
    for call in calls(wide, heads, channels):
        found, expected = (execute(module, call, torch.float64, torch.int32) for module in (OPS, reference))
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-10, atol=1e-10, msg=lambda m, call=call: f"{call.title}: {m}"
            )
            compared += value.numel()
        if call.name.startswith("attention_"):  # only rows with edges are copied
            again = execute(OPS, kernel_check.doubly(call), torch.float64, torch.int32)
            assert all(torch.equal(again[key], found[key]) for key in found), call.title
    assert compared > 1_000_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_round_as_torch_does(kernels, dtype):
    """Ties, what overflows, subnormal numbers, and what is not a number."""
    g = torch.Generator().manual_seed(0)
    n = 8000
    x = torch.randint(-(2**15), 2**15, (2 * n, 125), generator=g).short().view(dtype)
    out = torch.full((n, 125), 7, dtype=dtype)
    kernels.spmm_(out, 2 * torch.arange(n + 1), torch.arange(2 * n).view(2, n).t().reshape(-1), x, None, None, True)
    expected = (x[:n].float() + x[n:].float()).to(dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert expected.isinf().any() and expected.isnan().any() and (expected.abs() < torch.finfo(dtype).tiny).any()


@needs_kernels
@pytest.mark.parametrize("width", [100, 101, 104, 300])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [*HALF, torch.float64])
def test_large_sums_go_past_the_caches(width, offset, dtype):
    """From 8 MB on, where rows are aligned; a row that is cut, empty rows; by two threads."""
    torch.set_num_threads(2)
    g = torch.Generator().manual_seed(0)
    n = (8 << 20) // (dtype.itemsize * width) + 10
    row = torch.cat([torch.randint(n - 5, (20_000,), generator=g), torch.full((5000,), 7)]).sort().values
    col, x = torch.randint(40, row.shape, generator=g), torch.randn(40, width, generator=g).to(dtype)
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(row, minlength=n).cumsum(0)])
    out = torch.full((n * width + offset,), 7.0, dtype=dtype)[offset:].view(n, width)
    OPS.spmm_(out, ptr, col, x, None, None, True)
    expected = torch.zeros(n, width, dtype=reference.accumulator(dtype))
    OPS.spmm_(expected, ptr, col, x, None, None, False)
    torch.testing.assert_close(out, expected.to(dtype), rtol=0, atol=0)
    assert not out[-5:].any()


@needs_kernels
@pytest.mark.parametrize("megabytes", [0, 1, 5])
def test_zeros(megabytes):
    """Small tensors and large ones, whose memory was used before."""
    for _ in range(2):
        out = ops.zeros(torch.empty(0), megabytes << 10, 256, dtype=torch.float32)
        assert out.shape == (megabytes << 10, 256) and not out.any()
        out.fill_(1)
        del out
    torch.library.opcheck(OPS.zero_.default, (torch.ones(3, 4),))
    with pytest.raises(RuntimeError, match="contiguous"):
        OPS.zero_(torch.ones(3, 4).t())


@pytest.mark.parametrize("dtype", [torch.float64, *HALF])
def test_what_is_not_a_number(kernels, dtype):
    """NaN and infinities come out where they do in the reference."""
    ptr, col = torch.tensor([0, 3, 5, 8, 10, 12]), torch.tensor([0, 1, 2, 2, 3, 0, 4, 2, 5, 5, 0, 2])
    row = reference.rows_of(ptr, col)
    perm = col.argsort(stable=True)
    src_ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(col, minlength=6).cumsum(0)])
    g = torch.Generator().manual_seed(0)
    x, share = torch.randn(6, 5, generator=g), torch.randn(5, 5, generator=g)
    x[1], x[3, 1:3], x[4], x[5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    x[1, 0] = x[2, 0] = 0.5
    share[0] = torch.inf  # what a gradient becomes if nobody attains the extremum, which is NaN
    seen = []
    for module in (kernels, reference):
        best, count, out = torch.full((5, 5), -torch.inf), torch.zeros(5, 5), torch.zeros(6, 5)
        acc = reference.accumulator(dtype)
        best, count, out = (t.to(acc) for t in (best, count, out))
        module.extremum_(best, count, ptr, col, x.to(dtype), True)
        module.extremum_grad_(out, src_ptr, row[perm], x.to(dtype), best.to(dtype), share.to(dtype))
        total = torch.zeros(5, 5, dtype=acc)
        module.spmm_(total, ptr, col, x.to(dtype), None, None, False)
        lowest = torch.full((5, 5), -torch.inf, dtype=acc)
        module.extremum_(lowest, count, ptr, col, x.to(dtype), False)
        # An attention score is a key here.
        for step in range(2):
            if step == 0:
                peak, norm, mean = (
                    torch.full((5, 5), -torch.inf, dtype=acc),
                    torch.zeros(5, 5, dtype=acc),
                    torch.zeros(5, 5, dtype=acc),
                )
            value = torch.ones(6, 5, dtype=dtype)
            module.attention_(
                peak, norm, mean, ptr, col, x.to(dtype), value, None, None, None, ADDITIVE, 1.0, None, 0, 0.0, 0
            )
        seen.append([best, count, out, total, lowest, norm, mean])
    for name, found, expected in zip(
        ("best", "count", "gradient", "sum", "lowest", "norm", "mean"), *seen, strict=True
    ):
        torch.testing.assert_close(
            found, expected, equal_nan=True, rtol=1e-2, atol=1e-2, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert all(t.isnan().any() for t in seen[0] if t is not seen[0][1])
    assert (seen[0][5][3] == 0).all(), "a destination all of whose edges are masked"


# Channels that are narrower and wider than a vector
@pytest.mark.parametrize(("kind", "channels", "dtype"), some(KINDS, [2, 8, 34], [torch.float64, *HALF], every=3))
def test_coefficients_of_large_scores_add_up(kernels, kind, channels, dtype):
    """Backward's are those of forward, which need its scores to the last digit; some largest ones are ties."""
    b, heads, g = kernel_check.random_block([3, 0, 33, 2, 64, 9, 9, 9], 60), 2, torch.Generator().manual_seed(0)
    (n, m, _), scale = b.sizes, 100 if dtype == torch.float16 else 1e5
    width, acc = heads * channels if kind != "additive" else heads, reference.accumulator(dtype)
    # Values without a product with the gradient, or GATv2's would have another one.
    value = (scale * torch.randn(n, heads * channels // 2, generator=g)).repeat_interleave(2, 1).to(dtype)
    key = value if kind == "gatv2" else (scale * torch.randn(n, width, generator=g)).to(dtype)
    query = (scale * torch.randn(m, width, generator=g)).to(dtype)
    att = torch.randn(heads * channels, generator=g).to(acc) if kind == "gatv2" else None
    settings = (KINDS[kind], 0.3, None, 0, 0.0, 0)
    shapes = ((heads, -torch.inf), (heads, 0), (heads * channels, 0))
    peak, total, out = (torch.full((m, w), v, dtype=acc) for w, v in shapes)
    kernels.attention_(peak, total, out, b.ptr, b.col, key, value, query, None, att, *settings)
    assert (total > 1).any() and peak.abs().max() > 1e2
    grad = torch.tensor([1.0, -1.0]).repeat(m, heads * channels // 2).to(dtype)
    d_value = torch.zeros(n, value.size(1), dtype=acc)
    kernels.attention_grad_(
        d_value, None if kind == "gatv2" else torch.zeros(n, width, dtype=acc), None, None, None, b.ptr, b.col,
        b.src_ptr, b.dst, b.perm, key, value, query, None, att, peak, total, torch.zeros_like(peak), grad, *settings,
    )  # fmt: skip
    torch.testing.assert_close(d_value.sum(0), 7 * grad[0].to(acc), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.5, 0.6, 0.999, 1.0])
def test_kernels_drop_what_the_reference_drops(kernels, p, dtype):
    """One edge for each destination, whose coefficient is 1: bit for bit the factors, forward and backward."""
    n, heads = 500, 19 if kernels is OPS else 3  # Triton has a program for each
    ids = torch.cat([torch.arange(100), -1 - torch.arange(100), torch.randint(-(2**62), 2**62, (300,))])
    ptr, col = torch.arange(n + 1), torch.arange(n)
    key, value = torch.zeros(n, heads, dtype=dtype), torch.ones(n, heads, dtype=dtype)
    for seed in (0, 1, 2**31, 2**32 + 1, 2**61 + 12345):
        factors = dropout_factors(ids, heads, p, seed, dtype, seed % 7)
        settings = (ADDITIVE, 1.0, ids, seed, p, seed % 7)
        peak, total, out = torch.full_like(key, -torch.inf), torch.zeros_like(key), torch.zeros_like(value)
        kernels.attention_(peak, total, out, ptr, col, key, value, None, None, None, *settings)
        assert torch.equal(out, factors)
        assert torch.equal(total, torch.ones_like(total))
        grads = torch.zeros_like(value), torch.zeros_like(key)
        kernels.attention_grad_(
            *grads, None, None, None, ptr, col, ptr, col, col, key, value, None, None, None, peak, 2 * total,
            torch.zeros_like(key), value, *settings,
        )  # fmt: skip
        assert torch.equal(grads[0], factors / 2)
        assert torch.equal(grads[1], factors / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits(kernels, dtype):
    """What kernels read is what PyTorch reads."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = bits.view(dtype if dtype != torch.float32 else torch.bfloat16).to(dtype).view(16, -1)
    out, each = torch.zeros(x.shape), torch.arange(17)
    kernels.spmm_(out, each, each[:-1], x, None, None, False)
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


# PyTorch's own checks.


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_opcheck(name):
    """Schema, fake tensors, autograd and AOT dispatch with shapes that are not known."""
    if name in ("attention_grad_", "additive_grad_") and not ops.KERNELS:
        pytest.skip("the reference differentiates scores by autograd, which is off under the modes of opcheck")
    done = 0
    for call in calls(block("mixed"), 2, 3):
        if call.name == name and "dropout" not in call.title and done < 4:
            args = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in cast(call, torch.float32).values())
            results = torch.library.opcheck(getattr(OPS, name).default, args)
            assert set(results.values()) == {"SUCCESS"}
            assert len(results) == 4
            done += 1
    assert done > 0


def attend_and_sum(ptr, col, key, value, att):
    """A model's worth of operators."""
    n, heads = ptr.numel() - 1, 2
    state = key.new_full((n, heads), -torch.inf), key.new_zeros(n, heads), key.new_zeros(n, value.size(1))
    ops.attention_(*state, ptr, col, value, value, key, None, att, GATV2, 0.2, None, 0, 0.0, 0)
    total, products = torch.zeros_like(state[2]), value.new_empty(col.numel(), heads)
    ops.spmm_(total, ptr, col, value, None, None, False)
    ops.sddmm_(products, ptr, col, state[2] * 2, value)
    return total + state[2] / state[1].clamp(min=1e-6).repeat_interleave(3, 1), products


@pytest.fixture
def inputs():
    b = block("mixed")
    n, m, _ = b.sizes
    g = torch.Generator().manual_seed(0)
    return b.ptr.int(), b.col.int(), *(torch.randn(*s, generator=g) for s in ((m, 6), (n, 6), (6,)))


def test_compile(inputs):
    compiled = torch.compile(attend_and_sum, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*inputs), attend_and_sum(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_export(inputs):
    class Model(torch.nn.Module):
        def forward(self, *args):
            return attend_and_sum(*args)

    program = torch.export.export(Model(), inputs)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {f"pyg_sar.{name}.default" for name in ("spmm_", "sddmm_", "attention_")} <= called
    for found, expected in zip(program.module()(*inputs), attend_and_sum(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


# Mistakes.


def arguments(name, kind=None):
    """Good arguments for an operator."""
    wanted = (c for c in calls(block("mixed"), 2, 3) if c.name == name and c.args.get("kind") == kind)
    call = next(c for c in wanted if "att" not in name + c.title or ("edge" in c.title and "query" in c.title))
    return cast(call, torch.float32)


def other(**changes):
    return lambda args: {k: f(args[k]) if callable(f) else f for k, f in changes.items()}


def wider(t):
    return torch.zeros(t.size(0), t.size(1) + 1, dtype=t.dtype)


def longer(t):
    return torch.cat([t, t[-1:]])


MISTAKES = [
    ("spmm_", None, other(x=lambda t: t.double()), "'out' of type Double"),
    ("spmm_", None, other(x=lambda t: t.int()), "rows of a floating-point type"),
    ("spmm_", None, other(x=lambda t: t[0]), "'x' to be a matrix (got [6])"),
    ("spmm_", None, other(x=lambda t: t[None]), "'x' to be a matrix"),
    ("spmm_", None, other(out=lambda t: t.bfloat16()), "'out' of type Float"),
    ("spmm_", None, other(x=lambda t: t.half(), once=True), "'out' of type Half"),
    ("spmm_", None, other(out=wider), "'x' of shape"),
    ("spmm_", None, other(rows=torch.arange(13)), "'rows' to be a CPU tensor of 14 numbers"),
    ("spmm_", None, other(rows=torch.arange(14).int()), "'rows' to be a CPU tensor of 14 numbers of type Long"),
    ("spmm_", None, other(out=longer), "'out' of shape"),
    ("spmm_", None, other(out=lambda t: t.t().contiguous().t()), "rows of 'out' to be contiguous"),
    ("spmm_", None, other(out=lambda t: t[:1].expand_as(t)), "rows of 'out' that do not overlap"),
    ("spmm_", None, other(weight=lambda t: torch.ones(182)), "'weight' to be a matrix (got [182])"),
    ("spmm_", None, other(weight=lambda t: torch.ones(3, 2)), "'weight' of shape"),
    ("spmm_", None, other(weight=lambda t: torch.ones(182, 4)), "rows of 4 equal heads"),
    ("spmm_", None, other(weight=lambda t: torch.ones(182, 0)), "rows of 0 equal heads"),
    ("spmm_", None, other(weight=lambda t: torch.ones(182, 2).double()), "'weight' of type Float"),
    ("spmm_", None, other(ptr=lambda t: t[:-2]), "lead from 0 to the number of edges, 182"),
    ("spmm_", None, other(ptr=lambda t: t + 1), "lead from 0 to the number of edges"),
    ("spmm_", None, other(ptr=lambda t: t[:0]), "at least one number"),
    ("spmm_", None, other(ptr=lambda t: t.short()), "indices of type int32 or int64"),
    ("spmm_", None, other(ptr=lambda t: t.int()), "'col' to be a CPU tensor"),
    ("spmm_", None, other(ptr=lambda t: t[None]), "'ptr' to be a CPU tensor"),
    ("spmm_", None, other(col=lambda t: t[:-1]), "lead from 0 to the number of edges, 181 (got 0 to 182)"),
    ("spmm_", None, other(col=lambda t: t[None]), "'col' to be a CPU tensor"),
    ("spmm_", None, other(perm=lambda t: torch.arange(5)), "'perm' to be a CPU tensor of 182 numbers"),
    ("sddmm_", None, other(out=lambda t: t[:-1]), "'out' of shape"),
    ("sddmm_", None, other(out=lambda t: torch.zeros(182, 5)), "rows of 5 equal heads"),
    ("sddmm_", None, other(out=lambda t: t[:, 0]), "'out' to be a matrix"),
    ("extremum_", None, other(x=lambda t: t[0]), "'x' to be a matrix"),
    ("extremum_grad_", None, other(x=lambda t: t[0]), "'x' to be a matrix"),
    ("attention_", ADDITIVE, other(value=lambda t: t[0]), "'value' to be a matrix"),
    ("attention_", ADDITIVE, other(peak=lambda t: t[0]), "'peak' to be a matrix"),
    ("attention_grad_", ADDITIVE, other(peak=lambda t: t[0]), "'peak' to be a matrix"),
    ("sddmm_", None, other(y=wider), "rows of 2 equal heads"),
    ("sddmm_", None, other(y=longer), "'y' of shape"),
    ("sddmm_", None, other(x=wider), "'x' of shape"),
    ("sddmm_", None, other(y=lambda t: t.half()), "'y' of type Float"),
    ("extremum_", None, other(best=longer), "'best' of shape"),
    ("extremum_", None, other(count=wider), "'count' of shape"),
    ("extremum_", None, other(best=lambda t: t.half()), "'best' of type Float"),
    ("extremum_grad_", None, other(best=wider), "'best' of shape"),
    ("extremum_grad_", None, other(share=longer), "'share' of shape"),
    ("extremum_grad_", None, other(x=longer), "'x' of shape"),
    ("attention_", DOT, other(kind=3), "Unknown score 3"),
    ("attention_", DOT, other(kind=-1), "Unknown score -1"),
    ("attention_", DOT, other(query=None), "needs 'query'"),
    ("attention_", GATV2, other(query=None), "needs 'query'"),
    ("attention_", GATV2, other(att=None), "'att' is for GATv2"),
    ("attention_", DOT, other(att=torch.ones(6)), "'att' is for GATv2"),
    ("attention_", GATV2, other(att=torch.ones(5)), "'att' to be a CPU tensor of 6 numbers"),
    ("attention_", GATV2, other(att=torch.ones(6).half()), "of type Float"),
    ("attention_", ADDITIVE, other(key=wider), "'key' of shape"),
    ("attention_", ADDITIVE, other(key=longer), "'key' of shape"),
    ("attention_", ADDITIVE, other(value=wider), "values of 2 equal heads"),
    ("attention_", ADDITIVE, other(edge=longer), "'edge' of shape"),
    ("attention_", ADDITIVE, other(query=longer), "'query' of shape"),
    ("attention_", ADDITIVE, other(peak=lambda t: t[:, :0]), "values of 0 equal heads"),
    ("attention_", ADDITIVE, other(total=wider), "'total' of shape"),
    ("attention_", ADDITIVE, other(out=lambda t: t.half()), "'out' of type Float"),
    ("attention_", ADDITIVE, other(e_id=torch.arange(182).int()), "'e_id' to be a CPU tensor"),
    ("attention_", ADDITIVE, other(e_id=torch.arange(7)), "'e_id' to be a CPU tensor of 182"),
    ("attention_grad_", DOT, other(d_key=None), "'d_key' is for keys"),
    ("attention_grad_", GATV2, other(d_key=torch.zeros(9, 6)), "'d_key' is for keys"),
    ("attention_grad_", DOT, other(kind=7), "Unknown score 7"),
    ("attention_grad_", DOT, other(src_ptr=torch.tensor([0, 182])), "transpose of the same block"),
    ("attention_grad_", DOT, other(perm=longer), "'perm' to be a CPU tensor"),
    ("attention_grad_", DOT, other(dst=lambda t: t[:-1], perm=lambda t: t[:-1]), "lead from 0 to the number of edges"),
    ("attention_grad_", DOT, other(peak=longer), "'peak' of shape"),
    ("attention_grad_", DOT, other(total=longer), "'total' of shape"),
    ("attention_grad_", DOT, other(inner=wider), "'inner' of shape"),
    ("additive_grad_", None, other(value=lambda t: t.t().contiguous().t()), "rows of 'value' to be contiguous"),
    ("additive_grad_", None, other(peak=longer), "'peak' of shape"),
    ("additive_grad_", None, other(total=longer), "'total' of shape"),
    ("additive_grad_", None, other(grad=lambda t: t.half()), "'grad' of type Float"),
    ("additive_grad_", None, other(d_key=wider), "'d_key' of shape"),
    ("additive_grad_", None, other(d_query=longer), "'d_query' of shape"),
    ("additive_grad_", None, other(d_edge=wider), "'d_edge' of shape"),
    ("additive_grad_", None, other(src_ptr=torch.tensor([0, 182])), "transpose of the same block"),
    ("attention_grad_", DOT, other(grad=lambda t: t.half()), "'grad' of type Float"),
    ("attention_grad_", DOT, other(d_query=longer), "'d_query' of shape"),
    ("attention_grad_", DOT, other(d_edge=wider), "'d_edge' of shape"),
    ("attention_grad_", GATV2, other(d_att=torch.zeros(12)[::2]), "'d_att' to be contiguous"),
    ("attention_grad_", GATV2, other(d_att=torch.zeros(5)), "'d_att' to be a CPU tensor"),
]


ACCEPTED: set[tuple[int, str, int | None]] = set()  # kernels, operators and scores whose good arguments were tried


@pytest.mark.parametrize(("name", "kind", "change", "message"), MISTAKES)
def test_mistakes_are_refused(kernels, name, kind, change, message):
    good = arguments(name, kind)
    if kernels is not OPS:
        message = message.replace("a CPU tensor", f"a {sys.modules['support.gpu'].DEVICE.upper()} tensor")
    assert block("mixed").sizes[2] == 182
    if (id(kernels), name, kind) not in ACCEPTED:
        getattr(kernels, name)(*good.values())
        ACCEPTED.add((id(kernels), name, kind))
        good = arguments(name, kind)
    bad = {**good, **change(good)}
    before = {k: v.clone() for k, v in bad.items() if isinstance(v, torch.Tensor)}
    with pytest.raises((RuntimeError, IndexError), match=re.escape(message)):
        getattr(kernels, name)(*bad.values())
    for key, value in before.items():
        torch.testing.assert_close(bad[key], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "channels"), [(1, 1), (2, 5), (3, 17), (4, 32), (2, 100), (1, 130), (2, 0)])
def test_row_products(kernels, heads, channels):
    for dtype in (torch.float64, torch.bfloat16):
        x, y = (rows_of(37, heads * channels, dtype, layout=way, seed=k) for k, way in enumerate(LAYOUTS) if k % 2)
        out = torch.full((37, heads), 77, dtype=reference.accumulator(dtype))
        kernels.row_products_(out, x, y)
        expected = (x.to(out.dtype) * y.to(out.dtype)).view(37, heads, channels).sum(-1)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("module", [OPS, reference, "triton"], ids=["ops", "reference", "triton"])
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_without_channels(module, name):
    """Nothing to compute but the normaliser of attention."""
    module = pytest.importorskip("support.gpu", reason="needs Triton").OPS if module == "triton" else module
    b = block(name)
    n, m, e = b.sizes
    for kind in KINDS.values():
        width = 2 if kind == ADDITIVE else 0
        value, key = torch.zeros(n, 0), torch.zeros(n, width)
        total, att = torch.zeros(m, 2), torch.zeros(0) if kind == GATV2 else None
        peak, out = torch.full((m, 2), -torch.inf), torch.zeros(m, 0)
        query = torch.zeros(m, width)
        module.attention_(peak, total, out, b.ptr, b.col, key, value, query, None, att, kind, 1.0, None, 0, 0.0, 0)
        assert torch.equal(total, b.ptr.diff().float().view(-1, 1).expand(-1, 2))
    out = torch.ones(e, 2)
    module.sddmm_(out, b.ptr, b.col, torch.zeros(m, 0), torch.zeros(n, 0))
    assert not out.any()
    module.spmm_(torch.zeros(m, 0), b.ptr, b.col, torch.zeros(n, 0), None, None, False)


# Loading.


def test_kernels_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("PYG_SAR_KERNELS", raising=False)
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "ops" / "__init__.py"))
    with pytest.warns(UserWarning, match=r"without its compiled kernels.*they were not built.*pip install") as caught:
        assert not ops.load()
    assert len(caught) == 1
    (tmp_path / "_kernels.abi3.so").write_bytes(b"no library")
    with pytest.warns(UserWarning, match=r"_kernels\.abi3\.so: .*(too short|invalid|header)") as caught:
        assert not ops.load()
    assert len(caught) == 1
    monkeypatch.setenv("PYG_SAR_KERNELS", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ops.load()


def test_kernels_for_gpus_may_be_missing(monkeypatch):
    """Chosen when the first CUDA tensor comes; the dispatcher knows all of them."""
    for schema in ops.SCHEMAS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyg_sar::{schema.partition('(')[0]}", "CUDA")
    monkeypatch.delenv("PYG_SAR_KERNELS", raising=False)
    monkeypatch.setattr(ops, "gpu", functools.cache(ops.gpu.__wrapped__))
    monkeypatch.setitem(sys.modules, "pyg_sar.ops.triton", None)
    monkeypatch.delattr(ops, "triton", raising=False)
    with pytest.warns(UserWarning, match=r"without its kernels, in plain PyTorch.*pip install triton") as caught:
        assert ops.gpu() is reference
    assert len(caught) == 1
    out = torch.zeros(1, 1)
    ops.on_gpu("spmm_")(out, torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 1), None, None, False)
    assert out.item() == 1
    monkeypatch.undo()
    monkeypatch.setattr(ops, "gpu", functools.cache(ops.gpu.__wrapped__))
    gpu = pytest.importorskip("support.gpu", reason="needs Triton")
    monkeypatch.delenv("PYG_SAR_KERNELS", raising=False)
    assert ops.gpu() is gpu.kernels
    monkeypatch.setattr(ops, "gpu", functools.cache(ops.gpu.__wrapped__))
    monkeypatch.setenv("PYG_SAR_KERNELS", "0")
    assert ops.gpu() is reference


PROGRAM = """
import sys, torch, torch_geometric.nn
sys.path.insert(0, sys.argv[1])
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pyg_sar
assert pyg_sar.__file__.startswith(sys.argv[1]), pyg_sar.__file__
conv = pyg_sar.nn.GATConv(4, 2)
x, edge_index = torch.randn(5, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
found = conv(x, pyg_sar.shard(edge_index, 5, 2))
found.sum().backward()
print(sum("compiled kernels" in str(w.message) for w in caught), pyg_sar.ops.KERNELS)
print(torch.allclose(found, torch_geometric.nn.GATConv.forward(conv, x, edge_index), atol=1e-6))
"""


def test_package_without_kernels(tmp_path):
    """One warning and the same numbers; none if it is asked for."""
    shutil.copytree(
        ROOT / "pyg_sar", tmp_path / "pyg_sar", ignore=shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    )
    runs = {}
    for name, value in (("missing", "1"), ("chosen", "0")):
        env = {**os.environ, "PYG_SAR_KERNELS": value}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
        runs[name] = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for name, count in (("missing", "1"), ("chosen", "0")):
        out, err = runs[name].communicate(timeout=120)
        assert runs[name].returncode == 0, err
        assert out.split() == [count, "False", "True"], name


# The walk alone.


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_edge_is_visited_once(tmp_path):
    """Up to 2^31 - 1 edges, of which it only takes the row pointer."""
    program = tmp_path / "walk"
    source = ROOT / "test" / "csrc" / "walk.cpp"
    subprocess.run(["c++", "-std=c++20", "-O1", source, "-o", program], check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
