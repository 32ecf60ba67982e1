"""Calls of every operator on every kind of block, and the comparison of the compiled kernels with the reference."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.ops import reference
from pyg_sar.ops.reference import ADDITIVE, DOT, GATV2

OF_BLOCKS = ("spmm_", "sddmm_", "extremum_", "extremum_grad_", "attention_", "attention_grad_", "additive_grad_")
OF_ROWS = ("row_products_", "moments_", "column_products_", "column_affine_", "dropout_rows_")
SCHEMAS = {name: getattr(torch.ops.pyg_sar, name).default._schema for name in (*OF_BLOCKS, *OF_ROWS)}
KINDS = {"additive": ADDITIVE, "gatv2": GATV2, "dot": DOT}
# Rows have the type that is asked for, all other numbers that of the accumulator.
ROWS = {"x", "y", "key", "value", "query", "edge", "grad", "share"}
ONCE = ("spmm_ once", "spmm_ once to shared columns")
HALF = (torch.float32, torch.bfloat16, torch.float16)

# In-degrees of the destinations. A unit of work is 1024 edges, and a row with more of them is cut.
BLOCKS = {
    "mixed": ([3, 0, 0, 7, 1, 5, 33, 2, 64, 0, 4, 31, 32, 0], 9),
    "around a unit": ([0, 1024, 2, 1025, 0, 1023, 9, 2048, 0], 40),
    "hub": ([2, 3100, 31, 0], 25),
    "one node": ([2], 1),
    "no edges": ([0, 0, 0], 4),
    "no rows": ([], 3),
    "nothing": ([], 0),
}


class Block(NamedTuple):
    """CSR by destination and by source; ``perm`` holds the positions of the latter's edges in the former."""

    ptr: Tensor
    col: Tensor
    row: Tensor
    src_ptr: Tensor
    dst: Tensor
    perm: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.src_ptr.numel() - 1, self.ptr.numel() - 1, self.col.numel()

    def to(self, index: torch.dtype) -> Block:
        return Block(*(t.to(index) for t in self))


def block(name: str, seed: int = 0) -> Block:
    return random_block(*BLOCKS[name], seed)


def random_block(degrees: list[int], num_src: int, seed: int = 0) -> Block:
    """Random columns, a third of them 0: edges that appear more than once, self-loops, and a source that is a hub."""
    g = torch.Generator().manual_seed(seed)
    row = torch.arange(len(degrees)).repeat_interleave(torch.tensor(degrees, dtype=torch.long))
    col = torch.randint(max(num_src, 1), row.shape, generator=g) * (torch.rand(row.shape, generator=g) > 0.33)
    perm = col.argsort(stable=True)
    src_ptr, ptr = (
        torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(t, minlength=n).cumsum(0)])
        for t, n in ((col, num_src), (row, len(degrees)))
    )
    return Block(ptr, col, row, src_ptr, row[perm], perm)


class Call(NamedTuple):
    title: str
    name: str
    args: dict[str, Any]


def calls(b: Block, heads: int, channels: int, seed: int = 0, base: float = 1.0) -> Iterator[Call]:
    """Every operator with every choice of optional arguments, in double precision; sums start around ``base``."""
    g = torch.Generator().manual_seed(seed)
    n, m, e = b.sizes
    width = heads * channels

    def rows(count: int, width: int = width) -> Tensor:
        return torch.randn(count, width, generator=g, dtype=torch.float64)

    for weights, by_source in itertools.product((0, 1, heads), (False, True)):
        ptr, col, perm = (b.src_ptr, b.dst, b.perm) if by_source else (b.ptr, b.col, None)
        weight = rows(e, weights) if weights else None
        yield Call(
            f"spmm_ {weights} weights {'by source' if by_source else ''}", "spmm_",
            {"out": base * rows(len(ptr) - 1), "ptr": ptr, "col": col, "x": rows(m if by_source else n),
             "weight": weight, "perm": perm, "once": False},
        )  # fmt: skip
    args = {"out": base * rows(m), "ptr": b.ptr, "col": b.col, "x": rows(n), "weight": rows(e, heads)}
    yield Call(ONCE[0], "spmm_", {**args, "perm": None, "once": True})
    args = {"out": base * rows(n, channels), "ptr": b.src_ptr, "col": b.dst, "x": rows(m), "weight": rows(e, heads)}
    yield Call(ONCE[1], "spmm_", {**args, "perm": b.perm, "once": True})
    yield Call(
        "sddmm_", "sddmm_", {"out": base * rows(e, heads), "ptr": b.ptr, "col": b.col, "y": rows(m), "x": rows(n)}
    )
    # All heads share the columns of one operand.
    args = {"out": base * rows(m), "ptr": b.ptr, "col": b.col, "x": rows(n, channels), "weight": rows(e, heads)}
    yield Call("spmm_ from shared columns", "spmm_", {**args, "perm": None, "once": False})
    args = {"out": base * rows(n, channels), "ptr": b.src_ptr, "col": b.dst, "x": rows(m), "weight": rows(e, heads)}
    yield Call("spmm_ to shared columns", "spmm_", {**args, "perm": b.perm, "once": False})
    args = {"out": base * rows(e, heads), "ptr": b.ptr, "col": b.col, "y": rows(m), "x": rows(n, channels)}
    yield Call("sddmm_ with shared columns", "sddmm_", args)
    for largest in (True, False):
        x = rows(n).mul(2).round()  # there are ties
        best, count = torch.full((m, width), -torch.inf, dtype=torch.float64), rows(m).zero_()
        if largest:  # a second block
            best, count = rows(m).mul(2).round(), rows(m).mul(3).round().abs()
        args = {"best": best, "count": count, "ptr": b.ptr, "col": b.col, "x": x, "largest": largest}
        yield Call(f"extremum_ {largest}", "extremum_", args)
    args = {
        "out": base * rows(n),
        "ptr": b.src_ptr,
        "row": b.dst,
        "x": x,
        "best": rows(m).mul(2).round(),
        "share": rows(m),
    }
    yield Call("extremum_grad_", "extremum_grad_", args)

    for kind, with_query, with_edge, dropout in itertools.product(KINDS, (True, False), (False, True), (0.0, 0.4)):
        if not with_query and kind != "additive":
            continue
        each = heads if kind == "additive" else width
        value = rows(n)
        inputs = {
            "key": value if kind == "gatv2" else rows(n, each),
            "value": value,
            "query": rows(m, each) if with_query else None,
            "edge": rows(e, each) if with_edge else None,
            "att": rows(1, width)[0] if kind == "gatv2" else None,
        }
        settings = {
            "kind": KINDS[kind],
            "parameter": 0.2 if kind != "dot" else channels**-0.5,
            "e_id": torch.randint(-(2**62), 2**62, (e,), generator=g) if dropout else None,
            "seed": 2**61 + 12345,
            "dropout": dropout,
            "head": 3,
        }
        title = f"attention_ {kind}{' query' * with_query}{' edge' * with_edge}{' dropout' * (dropout > 0)}"
        peak, total, out = (
            torch.full((m, heads), -torch.inf, dtype=torch.float64),
            rows(m, heads).zero_(),
            rows(m).zero_(),
        )
        yield Call(
            title,
            "attention_",
            {"peak": peak, "total": total, "out": out, "ptr": b.ptr, "col": b.col, **inputs, **settings},
        )
        if dropout == 0:  # a second block, whose scores are above and below those of the first
            state = {"peak": 3 * rows(m, heads), "total": rows(m, heads).abs() + 1, "out": rows(m)}
            yield Call(title + " again", "attention_", {**state, "ptr": b.ptr, "col": b.col, **inputs, **settings})
        # What the coefficients are relative to, from the same scores, each of them twice: next to a coefficient of 1
        # `inner` could not be any number.
        reference.attention_(peak, total, out, b.ptr, b.col, **inputs, **settings)
        total = 2 * total
        for wanted in ("all", "none") if dropout == 0 else ("all",):
            grads = {
                "d_value": base * rows(n),
                "d_key": None if kind == "gatv2" else base * rows(n, each),
                "d_query": base * rows(m, each) if with_query and wanted == "all" else None,
                "d_edge": base * rows(e, each) if with_edge and wanted == "all" else None,
                "d_att": base * rows(1, width)[0] if kind == "gatv2" and wanted == "all" else None,
            }
            arguments = {
                **grads, "ptr": b.ptr, "col": b.col, "src_ptr": b.src_ptr, "dst": b.dst, "perm": b.perm, **inputs,
                "peak": peak, "total": total, "inner": rows(m, heads), "grad": rows(m), **settings,
            }  # fmt: skip
            yield Call(f"{title} gradient {wanted}", "attention_grad_", arguments)
            if kind == "additive":
                names = [a.name for a in SCHEMAS["additive_grad_"].arguments if a.name in arguments]
                yield Call(f"{title} gradient {wanted} alone", "additive_grad_", {k: arguments[k] for k in names})


@functools.cache
def is_output(name: str, arg: str) -> bool:
    info = next(a for a in SCHEMAS[name].arguments if a.name == arg).alias_info
    return info is not None and info.is_write


def packed(t: Tensor) -> Tensor:
    """Rows that stand apart, the first one not where the memory begins."""
    wide = t.new_full((t.size(0), t.size(1) + 3), 77)
    wide[:, 1:-2] = t
    return wide[:, 1:-2]


def misaligned(t: Tensor) -> Tensor:
    """Rows without gaps, one number behind an aligned address."""
    flat = torch.cat([t.new_full((1,), 77), t.reshape(-1)])
    return flat[1:].view(t.shape)


def columns(t: Tensor) -> Tensor:
    """Rows whose numbers stand apart."""
    return t.t().contiguous().t()


def doubly(call: Call) -> Call:
    """The same call with doubly compressed rows."""
    ptr = call.args["ptr"]
    rows = ptr.diff().nonzero().view(-1)
    return call._replace(args={**call.args, "ptr": torch.cat([ptr[:1], ptr[rows + 1]]), "rows": rows})


# How what is read and what is written lie in memory.
LAYOUTS = {
    "plain": (None, None),
    "packed": (packed, packed),
    "misaligned": (misaligned, misaligned),
    "columns": (columns, packed),
}


def rows_of(n, width, dtype, mean=0.0, layout="plain", seed=0):
    """Random rows around a mean, which lie in memory in one of the ways."""
    x = mean + torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    move = LAYOUTS[layout][0] or (lambda t: t)
    return move(x.to(dtype))


def execute(
    module: Any, call: Call, dtype: torch.dtype, index: torch.dtype = torch.int64, layout: str = "plain"
) -> dict[str, Tensor]:
    """Return what the operator wrote, given its arguments in other types and layouts."""
    args: dict[str, Any] = {}
    for name, value in cast(call, dtype).items():
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                value = value if name == "e_id" else value.to(index)
            elif value.dim() == 2 and (move := LAYOUTS[layout][is_output(call.name, name)]) is not None:
                value = move(value)
            elif is_output(call.name, name):
                value = value.clone()
        args[name] = value
    getattr(module, call.name)(*args.values())
    outputs = {k: v for k, v in args.items() if v is not None and is_output(call.name, k)}
    if layout != "plain":
        for name, value in outputs.items():
            if value.dim() == 2 and value.numel() > 0:  # what lies next to the rows is untouched
                assert value._base.flatten()[0] == 77, f"{call.title}: wrote in front of '{name}'"
    return outputs


def cast(call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments in the types that an operator on rows of ``dtype`` takes."""
    args = {}
    for name, value in call.args.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            row = (
                name in ROWS
                or (name, call.name) == ("best", "extremum_grad_")
                or (name == "out" and call.title in ONCE)
            )
            value = value.to(dtype if row else reference.accumulator(dtype))
        args[name] = value
    return args


def normalised(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn the state of an online softmax, which may be scaled at will, into what is made of it."""
    if "peak" not in found:
        return found
    total, out = found["total"], found["out"]
    lse = torch.where(total > 0, found["peak"] + total.log(), 0)
    size = out.size(1) // max(total.size(1), 1)
    return {"lse": lse, "out": out / total.where(total > 0, 1).repeat_interleave(size, 1)}


def check_double(module: Any, call: Call, index: torch.dtype, layout: str) -> int:
    """Compare one call in double precision; returns how many numbers were compared."""
    expected = execute(reference, call, torch.float64)
    found = execute(module, call, torch.float64, index, layout)
    compared = 0
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-10, equal_nan=True,
            msg=lambda m, name=name: f"{call.title} {index} {layout}: {name}: {m}",
        )  # fmt: skip
        compared += value.numel()
    return compared


# Heads and channels for each block.
SHAPES = {
    "mixed": ((1, 1), (1, 130), (2, 5), (3, 17), (2, 100), (17, 3), (3, 8)),
    "around a unit": ((3, 5), (17, 1)),
    "hub": ((1, 17), (17, 2)),
}
ALL = [(name, shape) for name in BLOCKS for shape in SHAPES.get(name, ((2, 3),))]
FEW = [(name, shape) for name in BLOCKS for shape in (SHAPES[name][1::2] if name in SHAPES else [(2, 3)])]


def check_all_double(module: Any) -> int:
    """Every call on every block and shape, in both types of indices; layouts in turn."""
    compared = 0
    layouts = itertools.cycle(LAYOUTS)
    for name, (heads, channels) in ALL:
        for index in (torch.int32, torch.int64):
            for call in calls(block(name), heads, channels):
                compared += check_double(module, call, index, next(layouts))
    return compared


def check_few_double(module: Any) -> int:
    """Every call on every block and some shapes; types of indices and layouts in turn."""
    compared = 0
    how = itertools.cycle(itertools.product((torch.int32, torch.int64), LAYOUTS))
    for name, (heads, channels) in FEW:
        for call in calls(block(name), heads, channels):
            compared += check_double(module, call, *next(how))
    return compared


def check_precision(
    module: Any,
    dtype: torch.dtype,
    seeds: int = 2,
    shapes: Any = (("mixed", (3, 17)), ("hub", (2, 16)), ("around a unit", (1, 8))),
    step: int = 1,
    plain: Any = reference,
) -> int:
    """Compare errors against double precision, relative to the numbers at hand, with those of plain PyTorch.

    The root mean square over all blocks and seeds may be twice as large, or nothing if that is exact. Every
    ``step``-th call is compared, on every block and with every seed others.
    """
    errors: dict[tuple[str, str], list[float]] = {}
    for k, (name, (heads, channels)) in enumerate(shapes):
        for seed in range(seeds):
            first = (k + seed) % step
            for call in itertools.islice(calls(block(name, seed), heads, channels, seed, base=0), first, None, step):
                args = cast(call, dtype)
                exact = {
                    key: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for key, v in args.items()
                }
                truth = normalised(execute(reference, call._replace(args=exact), torch.float64))
                results = [normalised(execute(m, call, dtype)) for m in (module, plain)]
                given = {} if call.name == "attention_" else args
                call_types = {k: v.dtype for k, v in given.items() if isinstance(v, Tensor)}
                for key, value in truth.items():
                    sums = errors.setdefault((call.title, key), [0.0, 0.0])
                    scale = value.masked_fill(value.isinf(), 0).square().sum().item()
                    for it, result in enumerate(results):
                        assert result[key].dtype == call_types.get(key, torch.float32), call.title
                        off = (result[key].double() - value).masked_fill(result[key] == value, 0)  # infinities are
                        sums[it] += off.square().sum().item() / scale
    for what, (mine, theirs) in errors.items():
        assert mine**0.5 <= 2 * theirs**0.5, f"{dtype} {what}: error {mine**0.5}, the reference's is {theirs**0.5}"
    return len(errors)
