r"""What the compiled kernels of attention hold while they run, in bytes: for plans, which do not run them."""

from __future__ import annotations

from typing import Any

from pyg_sar.ops.reference import ADDITIVE, DOT, GATV2, accumulator

HEADS, TILE = 16, 512  # heads at a time, and bytes of a row of these, at most: see csrc/attention.inl


def workspace(operator: Any, args: Any) -> int:
    """Return the bytes of the buffers of ``attend_grad`` and ``gatv2_grad``: for the heads at hand, numbers of each
    edge and destination, and copies of rows if these are not all heads. Other operators hold next to nothing.
    """
    if operator._schema.name not in ("pyg_sar::attention_grad_", "pyg_sar::additive_grad_"):
        return 0
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False))
    value, peak, edges = given["value"], given["peak"], given["col"].numel()
    (num_dst, heads), kind = peak.shape, given.get("kind", ADDITIVE)
    width = value.size(1) // max(heads, 1) * value.itemsize  # bytes of a head
    step = min(max(TILE // max(width, 1), 1), heads, HEADS)
    if kind == GATV2:
        numbers = 2 * ((step + 1) // 2) * edges
    else:
        two = kind == DOT and given["d_edge"] is not None
        facts = 3 if kind == DOT else 4 if "inner" in given else 5
        numbers = step * (edges * (2 if two else 1) + num_dst * facts)
    copied = 0 if step == heads else num_dst if kind == ADDITIVE else value.size(0) + num_dst  # rows
    return numbers * accumulator(value.dtype).itemsize + copied * step * width
