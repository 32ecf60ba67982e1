"""Every layer x mode x partition x prefetch on the ranks of a group, against PyG on the whole graph."""

import itertools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share
from torch import Tensor

import pyg_sar.nn

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


# Layers with their arguments and options, and what `check_layer` shall know of them.
S, C, A, R = "SAGEConv", "GCNConv", "GATConv", "RGCNConv"
V, D, F, G = "GATv2Conv", "TransformerConv", "FastRGCNConv", "GINConv"
FULL = [
    *((S, (8, 4), {"aggr": aggr}, {}) for aggr in ("mean", "sum", "max", "min")),
    (C, (8, 4), {}, {}),
    (C, (8, 4), {}, {"roles": "w"}),
    (C, (8, 4), {}, {"roles": "w", "edge_grad": False}),
    (A, (8, 4), {"heads": 3}, {}),
    (A, (8, 4), {"heads": 2, "edge_dim": 3}, {"roles": "a"}),
    (V, (8, 4), {"heads": 3}, {}),
    (V, (8, 4), {"heads": 2, "edge_dim": 3}, {"roles": "a"}),
    (D, (8, 4), {"heads": 3}, {}),
    (D, (8, 4), {"heads": 2, "edge_dim": 3, "beta": True}, {"roles": "a"}),
    (R, (8, 4, 5), {}, {"roles": "t"}),
    (R, (8, 4, 5), {"num_bases": 2}, {"roles": "t"}),
    (S, ((8, 6), 4), {}, {"bipartite": "same"}),
    (S, ((8, 6), 4), {}, {"bipartite": "two"}),
    (A, ((8, 6), 4), {"heads": 2}, {"bipartite": "same"}),
    (A, ((8, 6), 4), {"add_self_loops": False, "edge_dim": 3}, {"bipartite": "two", "roles": "a"}),
    (R, ((8, 6), 4, 5), {}, {"bipartite": "two", "roles": "t"}),
]
OPTIONS = [
    (S, (8, 4), {"normalize": True, "project": True}, {}),
    (S, (8, 4), {"root_weight": False, "bias": False}, {}),
    (S, (8, 10), {}, {}),
    (S, (8, 10), {"normalize": True, "project": True}, {}),
    (S, ((8, 6), 4), {}, {"bipartite": "same"}),
    (S, ((8, 6), 4), {"aggr": "max"}, {"bipartite": "two"}),
    (S, (8, 4), {"aggr": "sum"}, {"bipartite": "none"}),
    *((S, (8, 4), {"aggr": aggr}, {}) for aggr in ("std", "softmax", ["mean", "max", "std"])),
    (S, (8, 4), {"flow": "target_to_source"}, {}),
    (C, (8, 4), {"improved": True}, {"roles": "w"}),
    (C, (8, 4), {"improved": True}, {}),
    (C, (8, 4), {"add_self_loops": False}, {"roles": "w"}),
    (C, (8, 4), {"normalize": False}, {"roles": "w"}),
    (C, (8, 4), {"bias": False, "cached": True}, {}),
    (C, (8, 4), {"aggr": "mean"}, {"roles": "w"}),
    (C, (8, 4), {"aggr": "max"}, {"roles": "w"}),
    (C, (8, 4), {"flow": "target_to_source"}, {"roles": "w"}),
    (A, (8, 4), {"heads": 3, "concat": False, "residual": True}, {}),
    (A, (8, 4), {"add_self_loops": False, "bias": False, "negative_slope": 0.5}, {}),
    (A, (8, 4), {"residual": True}, {}),
    (A, (8, 4), {"heads": 2, "aggr": "mean"}, {}),
    (A, (8, 4), {"heads": 2, "aggr": "max"}, {}),
    *((A, (8, 4), {"edge_dim": 3, "fill_value": f}, {"roles": "a"}) for f in ("add", "max", "min", "mul", 2.0)),
    (A, (8, 4), {"edge_dim": 3, "fill_value": torch.tensor([1.0, -2.0, 0.5])}, {"roles": "a"}),
    (A, (8, 4), {"edge_dim": 3, "add_self_loops": False}, {"roles": "a", "edge_grad": False}),
    (A, (8, 4), {"edge_dim": 1}, {"roles": "w"}),
    (A, ((8, 6), 4), {"heads": 2, "residual": True}, {"bipartite": "same"}),
    (A, ((8, 6), 4), {"add_self_loops": False}, {"bipartite": "two"}),
    (A, ((8, 6), 4), {"add_self_loops": False}, {"bipartite": "none"}),
    (V, (8, 4), {"share_weights": True, "concat": False, "residual": True}, {}),
    (V, (8, 4), {"add_self_loops": False, "bias": False, "negative_slope": 0.5, "aggr": "mean"}, {}),
    (V, (8, 4), {"heads": 2, "aggr": "max"}, {}),
    (V, (8, 4), {"edge_dim": 3, "fill_value": "mul"}, {"roles": "a"}),
    (V, (8, 4), {"edge_dim": 1, "share_weights": True}, {"roles": "w"}),
    (V, (8, 4), {"edge_dim": 3, "add_self_loops": False}, {"roles": "a", "edge_grad": False}),
    (V, ((8, 6), 4), {"heads": 2, "residual": True}, {"bipartite": "same"}),
    (V, ((8, 6), 4), {"add_self_loops": False, "edge_dim": 3}, {"bipartite": "two", "roles": "a"}),
    (D, (8, 4), {"heads": 2, "concat": False, "root_weight": False}, {}),
    (D, (8, 4), {"heads": 2, "bias": False, "aggr": "mean"}, {}),
    (D, (8, 4), {"edge_dim": 3}, {"roles": "a", "edge_grad": False}),
    (D, ((8, 6), 4), {"heads": 2}, {"bipartite": "same"}),
    (D, ((8, 6), 4), {"edge_dim": 3, "heads": 2, "concat": False, "beta": True}, {"bipartite": "two", "roles": "a"}),
    *((G, (), {"nn": (8, 4), "aggr": aggr, "train_eps": True}, {}) for aggr in ("sum", "mean", "max", "std")),
    (G, (), {"nn": (8, 4)}, {"bipartite": "none"}),
    *((F, (8, 4, 5), {"aggr": aggr}, {"roles": "t"}) for aggr in ("mean", "sum")),
    (F, (8, 4, 5), {"num_bases": 2}, {"roles": "t"}),
    (F, (8, 4, 5), {"num_blocks": 2}, {"roles": "t"}),
    *((R, (8, 4, 5), {"aggr": aggr}, {"roles": "t"}) for aggr in ("sum", "max", "min")),
    (R, (8, 4, 5), {"num_blocks": 2}, {"roles": "t"}),
    (R, (8, 4, 5), {"num_blocks": 2, "aggr": "max"}, {"roles": "t"}),
    (R, (8, 4, 5), {"root_weight": False, "bias": False, "num_bases": 3}, {"roles": "t"}),
    (R, ((8, 6), 4, 5), {}, {"roles": "t", "bipartite": "same"}),
    (R, ((8, 6), 4, 5), {"num_bases": 2}, {"roles": "t", "bipartite": "two"}),
]


def inputs(roles: str, num_edges: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs after ``edge_index``: "w" edge weights, "a" edge attributes, "t" edge types."""
    g = torch.Generator().manual_seed(5)
    make = {
        "w": lambda: torch.rand(num_edges, generator=g, dtype=torch.float64).to(dtype),
        "a": lambda: torch.randn(num_edges, 3, generator=g, dtype=torch.float64).to(dtype),
        "t": lambda: torch.randint(5, (num_edges,), generator=g),
    }
    return [make[role]() for role in roles]


def make(package: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Construct a layer; the argument ``nn`` is the shape of a linear layer."""
    inner = {"nn": torch.nn.Linear(*kwargs["nn"])} if "nn" in kwargs else {}
    return getattr(package, name)(*args, **{**kwargs, **inner})


def shape(args: tuple[Any, ...], kwargs: dict[str, Any], bipartite: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the numbers of sources and destinations, and the widths of their rows."""
    width = args[0] if args else kwargs["nn"][0]
    counts = NUM_NODES, 47 if bipartite == "two" else NUM_NODES
    return counts, width if isinstance(width, tuple) else (width, width)


def leaf(x: Tensor, grad: bool = True) -> Tensor:
    return x.detach().clone().requires_grad_(grad and x.is_floating_point())


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
    group: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roles: str = "",
    bipartite: str = "",
    grid: str = "some",
    edge_grad: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> int:
    """Compare ``pyg_sar.nn.<name>`` with PyG's; ``bipartite`` is "same" (two inputs), "none" or "two" (node sets)."""
    (num_src, num_dst), widths = shape(args, kwargs, bipartite)
    edge_index = edges(num_src, num_dst)
    torch.manual_seed(0)
    reference = make(torch_geometric.nn, name, args, kwargs).to(dtype)
    layer = make(pyg_sar.nn, name, args, kwargs).to(dtype)
    layer.load_state_dict(reference.state_dict(), strict=True)
    reference.load_state_dict(layer.state_dict(), strict=True)
    layer.to(device)
    x_all = tuple(torch.randn(n, w).to(dtype) for n, w in zip((num_src, num_dst), widths, strict=True))
    extra_all = inputs(roles, edge_index.size(1), dtype)

    def nodes(src: Tensor, dst: Tensor) -> Any:
        if not bipartite:
            return leaf(x_all[0][src])
        return leaf(x_all[0][src]), None if bipartite == "none" else leaf(x_all[1][dst])

    everything = slice(None)
    expected = run(
        reference, nodes(everything, everything), edge_index, [leaf(e, edge_grad) for e in extra_all],
        torch.arange(num_dst), num_dst,
    )  # fmt: skip
    plain = run(layer, nodes(everything, everything), edge_index, [leaf(e, edge_grad) for e in extra_all],
                torch.arange(num_dst), num_dst, device)  # fmt: skip
    for key, value in expected.items():
        close(plain[key], value, f"{name} {kwargs} plain edge_index: {key}")
    size = dist.get_world_size(group)
    for mode, method, prefetch in settings(grid, size):
        part = assignment(method, size)
        dst_part = assignment("random", size, num_dst, seed=8) if bipartite == "two" else None
        mine = share(group, edge_index, part, mode=mode, prefetch=prefetch, dst_part=dst_part)
        # Rows travel two columns at a time, or all at once.
        with mock.patch("pyg_sar.reduce.base.COLUMNS", 2 if method == "random" else 128):
            found = run(
                layer, nodes(mine.src, mine.dst), mine.edge_index, [leaf(e[mine.edge], edge_grad) for e in extra_all],
                mine.dst, num_dst, device,
            )  # fmt: skip
        what = f"{name} {kwargs} mode {mode} {method} prefetch {prefetch} rank {dist.get_rank(group)} of {size}"
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
