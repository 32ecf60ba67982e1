"""Every layer x mode x partition x prefetch on the ranks of a group, against PyG on the whole graph."""

import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_geometric.nn
from support.layers import Case, inputs, leaf
from support.nasty_graph import assignment, backward, close, edges, share, with_one_loop
from torch import Tensor

METHODS = ("metis", "random", "empty")
WORKERS = (1, 2, 3, 4)
# Nine combinations of mode, partition, prefetch and workers that hold every pair of values of any two of them (an
# orthogonal array): a layer meets the exchange only through its few verbs, which do not know of the layer.
PAIRS = [(1, "metis", 0, 2), (1, "random", 1, 4), (1, "empty", 2, 3), (2, "metis", 1, 3), (2, "random", 2, 2),
         (2, "empty", 0, 4), (3, "metis", 2, 4), (3, "random", 0, 3), (3, "empty", 1, 2)]  # fmt: skip


def settings(grid: str, workers: int) -> list[tuple[int, str, int]]:
    """Return the combinations of mode, partition and prefetch that a grid has for a number of workers."""
    if grid == "pairs":
        return [(1, "metis", 1)] if workers == 1 else [s[:3] for s in PAIRS if s[3] == workers]
    return {
        "full": list(itertools.product((1, 2, 3), METHODS, (0, 1, 2))),
        "some": [(1, "metis", 1), (1, "empty", 0), (2, "random", 2), (3, "empty", 1)],
        "two": [(1, "random", 1), (3, "contiguous", 0)],
        "one": [(1, "metis", 1) if workers == 2 else (3, "empty", 1)],
    }[grid]


def run(
    layer: Any, x: Any, edge_index: Tensor, extra: list[Tensor], rows: Tensor, total: int, device: str = "cpu",
    cast: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Forward, perhaps under autocast, and backward on a device; returns the output and all gradients by name."""
    layer.zero_grad()
    nodes = x if isinstance(x, tuple) else (x,)
    there = [None if t is None else t.to(device) for t in nodes]
    given = tuple(there) if isinstance(x, tuple) else there[0]
    with torch.autocast(device, torch.bfloat16, enabled=cast):
        out = layer(given, edge_index.to(device), *(t.to(device) for t in extra)).cpu()
    backward(out, rows, total)
    return {
        "out": out.detach(),
        **{f"dx{k}": t.grad for k, t in enumerate(nodes) if t is not None},
        **{f"de{k}": t.grad for k, t in enumerate(extra)},
        **{f"d{name}": None if p.grad is None else p.grad.cpu() for name, p in layer.named_parameters()},
    }


def check_layer(
    group: Any, case: Case, grid: str = "some", dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> int:
    """Compare a layer with PyG's; return the number of settings."""
    (num_src, num_dst), widths = case.shape()
    weighted = case.layer == "GCNConv" and case.roles == "w"
    edge_index = edges(num_src, num_dst)
    if device != "cpu" and weighted and (case.kwargs.get("aggr") == "max" or "flow" in case.kwargs):
        edge_index = with_one_loop(edge_index)
    reference, layer = case.build(torch_geometric.nn, dtype), case.build(dtype=dtype)
    layer.load_state_dict(reference.state_dict(), strict=True)
    reference.load_state_dict(layer.state_dict(), strict=True)
    for module in layer.to(device).modules():
        if hasattr(module, "group"):  # statistics are over these workers alone
            module.group = group
    x_all = tuple(torch.randn(n, w).to(dtype) for n, w in zip((num_src, num_dst), widths, strict=True))
    extra_all = inputs(case.roles, edge_index.size(1), dtype)

    def nodes(src: Tensor, dst: Tensor) -> Any:
        if not case.pair:
            return leaf(x_all[0][src])
        return leaf(x_all[0][src]), None if case.pair == "none" else leaf(x_all[1][dst])

    everything = slice(None)
    expected = run(
        reference, nodes(everything, everything), edge_index, [leaf(e, case.learn) for e in extra_all],
        torch.arange(num_dst), num_dst,
    )  # fmt: skip
    if device == "cpu" or not weighted:  # as an ordinary edge_index goes through PyG's code, too
        plain = run(layer, nodes(everything, everything), edge_index, [leaf(e, case.learn) for e in extra_all],
                    torch.arange(num_dst), num_dst, device)  # fmt: skip
        for key, value in expected.items():
            close(plain[key], value, f"{case} plain edge_index: {key}")
    size = dist.get_world_size(group)
    for mode, method, prefetch in settings(grid, size):
        part = assignment(method, size)
        dst_part = assignment("random", size, num_dst, seed=8) if case.pair == "two" else None
        mine = share(group, edge_index, part, mode=mode, prefetch=prefetch, dst_part=dst_part)
        # Rows travel two columns at a time, or all at once.
        with mock.patch("pyg_sar.reduce.base.COLUMNS", 2 if method == "random" else 128):
            found = run(
                layer, nodes(mine.src, mine.dst), mine.edge_index, [leaf(e[mine.edge], case.learn) for e in extra_all],
                mine.dst, num_dst, device,
            )  # fmt: skip
        what = f"{case} mode {mode} {method} prefetch {prefetch} rank {dist.get_rank(group)} of {size}"
        for key, value in expected.items():
            got = found[key]
            if key.startswith("dx"):
                value = None if value is None else value[mine.src if key == "dx0" else mine.dst]
            elif key[:2] == "de" and key[2:].isdecimal():
                value = None if value is None else value[mine.edge]
            elif key == "out":
                value = value[mine.dst]
            elif value is not None:
                got = torch.zeros_like(value) if got is None else got.clone()
                dist.all_reduce(got, group=group)
            close(got, value, f"{what}: {key}")
    return len(settings(grid, size))
