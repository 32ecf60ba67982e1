r"""Products of rows with a matrix, and their gradients.

On a CPU, PyTorch multiplies by MKL, which runs its code for AVX2 on processors that are not Intel's. Those of AMD's
from Zen 5 on (family 26) compute 512 bits at a time, twice as many: there large products in single precision run by
oneDNN, which every PyTorch for these processors contains. All else runs by PyTorch's own products, and everything if
``torch.backends.mkldnn.enabled`` is False: on Zen 4, on Intel's, and where products are small, MKL is as fast as
oneDNN, which multiplies a piece at a time here, or up to 12 times as fast.

The comments give shapes for ``N`` rows of ``I`` columns that become ``O`` columns.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.autograd import once_differentiable
from pyg_sar.ops import empty
from pyg_sar.watch import ROWS, gives

ROWS_AT_A_TIME, SUMMANDS_AT_A_TIME = 1024, 256
EDGES_AT_A_TIME, NUMBERS_ON_GPU = 1 << 16, 1 << 25  # 256 MiB in double precision
SMALLEST = 64  # length that oneDNN is given: shorter ones are filled up
FEWEST_ROWS, FEWEST_WEIGHTS = 1024, 128 * 128  # of a large product
HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and "AVX512" in torch.backends.cpu.get_cpu_capability()
)


def family_of_amd() -> int:
    """The family of the processor, if it is one of AMD's, or 0."""
    cpus, text = Path("/proc/cpuinfo"), platform.processor()
    if cpus.exists():
        with cpus.open() as lines:
            text = lines.read(4096)  # of the first one: the file has a page for each
    found = re.search(r"family\D*(\d+)", text, re.IGNORECASE)
    return int(found[1]) if found and "AuthenticAMD" in text else 0


BY_ONEDNN = HAS_ONEDNN and family_of_amd() >= 26


@gives(ROWS)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, under autograd."""
    if not by_onednn(x, weight) or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return Linear.apply(x, weight, bias)


class Linear(torch.autograd.Function):
    """A product of rows with a matrix, of which neither pass runs by PyTorch's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Multiply the gradient by the matrix, and by the rows."""
        once_differentiable()
        (x, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        d_x = empty(x, *x.shape) if needs[0] else None
        d_weight = torch.empty_like(weight) if needs[1] else None
        d_bias = x.new_empty(weight.size(0)) if needs[2] else None
        linear_grad(x, grad, weight, d_x, d_weight, d_bias, add=False)
        return d_x, d_weight, d_bias


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies them, where it is the faster one."""
    large = x.dim() == 2 and x.size(0) >= FEWEST_ROWS and weight.numel() >= FEWEST_WEIGHTS
    alike = x.dtype == weight.dtype == torch.float32 and x.is_cpu and weight.is_cpu
    alike = alike and type(x) in (Tensor, torch.nn.Parameter)  # not what only stands for rows
    return BY_ONEDNN and large and alike and bool(torch.backends.mkldnn.enabled)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight, bias)``, not under autograd, or write it over ``out``.

    MKL multiplies some rows at a time, up to 1.5 times as fast where rows of the result are no multiple of 64 bytes.
    """
    if not x.is_cpu:
        return F.linear(x, weight, bias) if out is None else times(x, weight, bias, out)
    out = empty(x, x.size(0), weight.size(0)) if out is None else out
    if by_onednn(x, weight):
        multiply(out, x, weight, bias)
        return out
    for rows, into in zip(x.split(ROWS_AT_A_TIME), out.split(ROWS_AT_A_TIME), strict=True):
        times(rows, weight, bias, into)
    return out


def times(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write ``F.linear(x, weight, bias)`` over ``out``."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def linear_grad(
    x: Tensor, grad: Tensor, weight: Tensor, d_x: Tensor | None, d_weight: Tensor | None,
    d_bias: Tensor | None = None, *, add: bool = True,
) -> None:  # fmt: skip
    """Add to the gradient of ``x``, or write it, and write those of weight and bias, given that of
    ``F.linear(x, weight, bias)``.
    """
    grad = grad.to(x.dtype)  # [N, O]
    fast = by_onednn(x, weight)
    if d_x is not None and fast:
        multiply(d_x, grad, weight.t(), add=add)
    elif d_x is not None:
        d_x.addmm_(grad, weight, beta=1 if add else 0)
    if d_weight is not None and fast and grad.size(1) <= x.size(1):
        multiply(d_weight, grad.t(), x.t(), long=1)
    elif d_weight is not None and fast:  # oneDNN copies its first factor in another order: the narrower one
        transposed = torch.empty_like(d_weight.t(), memory_format=torch.contiguous_format)
        multiply(transposed, x.t(), grad.t(), long=1)
        d_weight.copy_(transposed.t())
    elif d_weight is not None:
        torch.mm(grad.t(), x, out=d_weight)
    if d_bias is not None:
        torch.sum(grad, 0, out=d_bias)


def multiply(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, add: bool = False, long: int = 0
) -> None:
    """Write ``F.linear(x, weight, bias)`` over ``out``, or add it, by oneDNN: what it makes at a time stays in a cache.

    It adds up products one after the other: a long sum of them has twice the error of MKL's, which adds up sums. Where
    there are many sums to add up, these may be longer. ``long`` is the dimension of ``x`` that has any length.
    """
    step = SUMMANDS_AT_A_TIME if x.size(1) < 64 * SUMMANDS_AT_A_TIME else 2 * SUMMANDS_AT_A_TIME
    sizes = [lengths(x.size(0), ROWS_AT_A_TIME), step] if long == 0 else [ROWS_AT_A_TIME, lengths(x.size(1), step)]
    for rows, into in zip(x.split(sizes[0]), out.split(sizes[0]), strict=True):
        pairs = zip(rows.split(sizes[1], 1), weight.split(sizes[1], 1), strict=True)
        for k, (one, other) in enumerate(pairs):
            one, other = (filled(one, 0), other) if long == 0 else (filled(one, 1), filled(other, 1))
            terms = onednn(one, dense(other), None if k else bias)[: into.size(0)]
            if add or k:
                into.add_(terms)
            else:
                into.copy_(terms)


def lengths(count: int, most: int) -> list[int]:
    """Cut a length into ``most`` as often as that goes, then into powers of two, and a rest that is smaller than these:
    few different ones, because oneDNN keeps memory for every shape that it has met.
    """
    sizes, rest = [most] * (count // most), count % most
    while rest >= SMALLEST:
        sizes.append(1 << (rest.bit_length() - 1))
        rest -= sizes[-1]
    return [*sizes, rest] if rest else sizes


def filled(x: Tensor, dim: int) -> Tensor:
    """Return a matrix with zeros behind, if a dimension is the rest of :func:`lengths`."""
    more = max(SMALLEST - x.size(dim), 0)
    return x if not more else F.pad(x, (0, more) if dim else (0, 0, 0, more))


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``F.linear(x, weight, bias)`` by what PyTorch's compiler calls, here with nothing fused to it."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def dense(weight: Tensor) -> Tensor:
    """Return a matrix without gaps: with them, oneDNN takes a thousand times as long."""
    return weight if weight.is_contiguous() or weight.t().is_contiguous() else weight.contiguous()


def embed(edge: Tensor, weight: Tensor) -> Tensor:
    """Map the features of edges, ``[num_edges, D]`` or ``[num_edges]``, by a matrix ``[*, D]``."""
    return edge.view(edge.size(0), -1).to(weight.dtype) @ weight.t()


def embed_grad(grad: Tensor, edge: Tensor, weight: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of features, if they are ``wanted``, and of the matrix.

    The latter is one sum over all edges of a block: in double precision (where it is narrow) it has no larger error
    than PyG's way. Some edges at a time are made double, or the features of all would live once more, twice as large.
    A GPU takes more of them, or it would wait for launches.
    """
    features = edge.view(edge.size(0), -1)
    dtype = torch.float64 if grad.size(1) <= 64 else grad.dtype
    d_weight = torch.zeros_like(weight, dtype=dtype)
    at_a_time = EDGES_AT_A_TIME
    if grad.is_cuda:
        at_a_time = max(at_a_time, NUMBERS_ON_GPU // max(grad.size(1) + features.size(1), 1))
    for some, of in zip(grad.split(at_a_time), features.split(at_a_time), strict=True):
        d_weight.addmm_(some.to(dtype).t(), of.to(dtype))
    d_edge = (grad.to(weight.dtype) @ weight).to(edge.dtype).view_as(edge) if wanted else None
    return d_edge, d_weight.to(weight.dtype)
