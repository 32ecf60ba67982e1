"""The layers of ``pyg_sar.nn``: configurations of each, for all tests that go through layers."""

from dataclasses import dataclass, field
from typing import Any

import torch
from support.nasty_graph import NUM_NODES
from torch import Tensor

import pyg_sar.nn


@dataclass(frozen=True)
class Case:
    """A layer, what it is called with, and for ``TRAFFIC`` what travels.

    Args:
        layer: Name of the layer.
        args: Its arguments.
        kwargs: Its options; ``nn`` is the shape of a linear layer.
        roles: Inputs after ``edge_index``, as :func:`inputs` has them.
        learn: Whether these require a gradient.
        pair: One input for sources and destinations (""), two ("same"), no second one ("none"), two node sets ("two").
        case: 1 if backward does without the source rows, else 2 (SAR paper).
        width: Numbers in a row that travels.
    """

    layer: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    roles: str = ""
    learn: bool = True
    pair: str = ""
    case: int = 1
    width: int = 8

    def __str__(self) -> str:
        return f"{self.layer} {self.kwargs}"

    def build(self, library: Any = pyg_sar.nn, dtype: torch.dtype = torch.float64, seed: int = 4) -> Any:
        """Return the layer with the same weights at every call."""
        torch.manual_seed(seed)
        inner = {"nn": torch.nn.Linear(*self.kwargs["nn"])} if "nn" in self.kwargs else {}
        return getattr(library, self.layer)(*self.args, **{**self.kwargs, **inner}).to(dtype)

    def case_in(self, mode: int) -> int:
        """Return the case in a mode: in mode 1 sums of R-GCN fetch rows again, in others they are kept."""
        return 2 if self.layer == "RGCNConv" and mode == 1 else self.case

    def shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the numbers of sources and destinations, and the widths of their rows."""
        width = self.args[0] if self.args else self.kwargs["nn"][0]
        counts = NUM_NODES, 47 if self.pair == "two" else NUM_NODES
        return counts, width if isinstance(width, tuple) else (width, width)


def inputs(roles: str, num_edges: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs after ``edge_index``: "w" edge weights, "a" edge attributes, "t" edge types."""
    g = torch.Generator().manual_seed(5)
    make = {
        "w": lambda: torch.rand(num_edges, generator=g, dtype=torch.float64).to(dtype),
        "a": lambda: torch.randn(num_edges, 3, generator=g, dtype=torch.float64).to(dtype),
        "t": lambda: torch.randint(5, (num_edges,), generator=g),
    }
    return [make[role]() for role in roles]


def leaf(x: Tensor, grad: bool = True) -> Tensor:
    return x.detach().clone().requires_grad_(grad and x.is_floating_point())


S, C, A, R = "SAGEConv", "GCNConv", "GATConv", "RGCNConv"
V, D, F, G = "GATv2Conv", "TransformerConv", "FastRGCNConv", "GINConv"
E, ROWWISE = "GENConv", {"norm": "layer", "num_layers": 1}
# Every way to aggregate.
FULL = [
    *(Case(S, (8, 4), {"aggr": aggr}) for aggr in ("mean", "sum", "max", "min")),
    Case(C, (8, 4)),
    Case(C, (8, 4), roles="w"),
    Case(C, (8, 4), roles="w", learn=False),
    Case(A, (8, 4), {"heads": 3}),
    Case(A, (8, 4), {"heads": 2, "edge_dim": 3}, roles="a"),
    Case(V, (8, 4), {"heads": 3}),
    Case(V, (8, 4), {"heads": 2, "edge_dim": 3}, roles="a"),
    Case(D, (8, 4), {"heads": 3}),
    Case(D, (8, 4), {"heads": 2, "edge_dim": 3, "beta": True}, roles="a"),
    Case(R, (8, 4, 5), roles="t"),
    Case(R, (8, 4, 5), {"num_bases": 2}, roles="t"),
    Case(E, (8, 4), {**ROWWISE, "t": 2.0, "learn_t": True}),
    Case(S, ((8, 6), 4), pair="same"),
    Case(S, ((8, 6), 4), pair="two"),
    Case(A, ((8, 6), 4), {"heads": 2}, pair="same"),
    Case(A, ((8, 6), 4), {"add_self_loops": False, "edge_dim": 3}, pair="two", roles="a"),
    Case(R, ((8, 6), 4, 5), pair="two", roles="t"),
]
# All other options.
OPTIONS = [
    Case(S, (8, 4), {"normalize": True, "project": True}),
    Case(S, (8, 4), {"root_weight": False, "bias": False}),
    Case(S, (8, 10)),
    Case(S, (8, 10), {"normalize": True, "project": True}),
    Case(S, ((8, 6), 4), pair="same"),
    Case(S, ((8, 6), 4), {"aggr": "max"}, pair="two"),
    Case(S, (8, 4), {"aggr": "sum"}, pair="none"),
    *(Case(S, (8, 4), {"aggr": aggr}) for aggr in ("std", "softmax", ["mean", "max", "std"])),
    Case(S, (8, 4), {"flow": "target_to_source"}),
    Case(C, (8, 4), {"improved": True}, roles="w"),
    Case(C, (8, 4), {"improved": True}),
    Case(C, (8, 4), {"add_self_loops": False}, roles="w"),
    Case(C, (8, 4), {"normalize": False}, roles="w"),
    Case(C, (8, 4), {"bias": False, "cached": True}),
    Case(C, (8, 4), {"aggr": "mean"}, roles="w"),
    Case(C, (8, 4), {"aggr": "max"}, roles="w"),
    Case(C, (8, 4), {"flow": "target_to_source"}, roles="w"),
    Case(A, (8, 4), {"heads": 3, "concat": False, "residual": True}),
    Case(A, (8, 4), {"add_self_loops": False, "bias": False, "negative_slope": 0.5}),
    Case(A, (8, 4), {"residual": True}),
    Case(A, (8, 4), {"heads": 2, "aggr": "mean"}),
    Case(A, (8, 4), {"heads": 2, "aggr": "max"}),
    *(Case(A, (8, 4), {"edge_dim": 3, "fill_value": f}, roles="a") for f in ("add", "max", "min", "mul", 2.0)),
    Case(A, (8, 4), {"edge_dim": 3, "fill_value": torch.tensor([1.0, -2.0, 0.5])}, roles="a"),
    Case(A, (8, 4), {"edge_dim": 3, "add_self_loops": False}, roles="a", learn=False),
    Case(A, (8, 4), {"edge_dim": 1}, roles="w"),
    Case(A, ((8, 6), 4), {"heads": 2, "residual": True}, pair="same"),
    Case(A, ((8, 6), 4), {"add_self_loops": False}, pair="two"),
    Case(A, ((8, 6), 4), {"add_self_loops": False}, pair="none"),
    Case(V, (8, 4), {"share_weights": True, "concat": False, "residual": True}),
    Case(V, (8, 4), {"add_self_loops": False, "bias": False, "negative_slope": 0.5, "aggr": "mean"}),
    Case(V, (8, 4), {"heads": 2, "aggr": "max"}),
    Case(V, (8, 4), {"edge_dim": 3, "fill_value": "mul"}, roles="a"),
    Case(V, (8, 4), {"edge_dim": 1, "share_weights": True}, roles="w"),
    Case(V, (8, 4), {"edge_dim": 3, "add_self_loops": False}, roles="a", learn=False),
    Case(V, ((8, 6), 4), {"heads": 2, "residual": True}, pair="same"),
    Case(V, ((8, 6), 4), {"add_self_loops": False, "edge_dim": 3}, pair="two", roles="a"),
    Case(D, (8, 4), {"heads": 2, "concat": False, "root_weight": False}),
    Case(D, (8, 4), {"heads": 2, "bias": False, "aggr": "mean"}),
    Case(D, (8, 4), {"edge_dim": 3}, roles="a", learn=False),
    Case(D, ((8, 6), 4), {"heads": 2}, pair="same"),
    Case(D, ((8, 6), 4), {"edge_dim": 3, "heads": 2, "concat": False, "beta": True}, pair="two", roles="a"),
    *(Case(G, (), {"nn": (8, 4), "aggr": aggr, "train_eps": True}) for aggr in ("sum", "mean", "max", "std")),
    Case(G, (), {"nn": (8, 4)}, pair="none"),
    Case(E, (8, 8), {**ROWWISE, "t": -1.5}),
    Case(E, (8, 8), {**ROWWISE, "t": 500.0, "learn_t": True}),  # columns in which no exponents can be compared
    Case(E, (8, 4), {**ROWWISE, "aggr": "softmax_sg", "t": 0.1, "msg_norm": True}),
    *(Case(E, (8, 4), {**ROWWISE, "aggr": aggr}) for aggr in ("mean", "sum", "max", "powermean", ["max", "softmax"])),
    Case(E, (8, 8), {**ROWWISE, "aggr": "softmax", "aggr_kwargs": {"learn": True, "channels": 8}}),
    Case(E, (8, 4), {**ROWWISE, "edge_dim": 3, "learn_t": True}, roles="a"),
    Case(E, ((8, 6), 4), {**ROWWISE, "learn_t": True}, pair="two"),
    Case(E, (8, 4), {"norm": "batch", "learn_t": True, "learn_msg_scale": True}),
    Case(E, (8, 4), {**ROWWISE, "flow": "target_to_source"}),
    *(Case(F, (8, 4, 5), {"aggr": aggr}, roles="t") for aggr in ("mean", "sum")),
    Case(F, (8, 4, 5), {"num_bases": 2}, roles="t"),
    Case(F, (8, 4, 5), {"num_blocks": 2}, roles="t"),
    *(Case(R, (8, 4, 5), {"aggr": aggr}, roles="t") for aggr in ("sum", "max", "min")),
    Case(R, (8, 4, 5), {"num_blocks": 2}, roles="t"),
    Case(R, (8, 4, 5), {"num_blocks": 2, "aggr": "max"}, roles="t"),
    Case(R, (8, 4, 5), {"root_weight": False, "bias": False, "num_bases": 3}, roles="t"),
    Case(R, ((8, 6), 4, 5), roles="t", pair="same"),
    Case(R, ((8, 6), 4, 5), {"num_bases": 2}, roles="t", pair="two"),
]
# One configuration of each way to stream, and what of it travels.
TRAFFIC = {
    "sage": Case(S, (8, 4), width=4),
    "sage sum": Case(S, (8, 10), {"aggr": "sum"}),
    "sage max": Case(S, (8, 4), {"aggr": "max"}, case=2),
    "gcn": Case(C, (8, 4), width=4),
    "gcn weighted": Case(C, (8, 4), roles="w", learn=False, width=4),
    "gcn learnt": Case(C, (8, 4), roles="w", case=2, width=4),
    "gat": Case(A, (8, 4), {"heads": 3}, case=2, width=15),
    "gat edges": Case(A, (8, 4), {"heads": 2, "edge_dim": 3}, roles="a", case=2, width=10),
    "gen": Case(E, (8, 4), {**ROWWISE, "learn_t": True}, case=2, width=4),
    "rgcn": Case(R, (8, 4, 5), roles="t"),
    "rgcn max": Case(R, (8, 4, 5), {"aggr": "max"}, roles="t", case=2),
}
# Configurations of two layers on end, as wide outside as inside.
STACKS = [
    *(Case(S, (8, 8), {"aggr": aggr}) for aggr in ("mean", "max")),
    Case(A, (8, 4), {"heads": 2, "residual": True}),
    Case(S, (8, 8), {"project": True, "normalize": True}),
    *(Case(C, (8, 8), options) for options in ({}, {"improved": True}, {"add_self_loops": False})),
    Case(C, (8, 8), {"normalize": False}, roles="w"),
    Case(G, (), {"nn": (8, 8), "train_eps": True}),
    Case(A, (8, 4), {"heads": 2, "edge_dim": 3, "fill_value": "mean"}, roles="a"),
    Case(A, (8, 4), {"heads": 2, "add_self_loops": False}),
    Case(V, (8, 4), {"heads": 2}),
    Case(V, (8, 4), {"heads": 2, "share_weights": True, "residual": True, "edge_dim": 3}, roles="a"),
    Case(D, (8, 4), {"heads": 2, "edge_dim": 3, "beta": True}, roles="a"),
    Case(R, (8, 8, 5), roles="t"),
    Case(R, (8, 8, 5), {"num_bases": 2}, roles="t"),
    Case(R, (8, 8, 5), {"aggr": "max"}, roles="t"),
    Case(F, (8, 8, 5), {"num_blocks": 2}, roles="t"),
    Case(E, (8, 8), {**ROWWISE, "learn_t": True}),
    Case(S, (8, 8), {"aggr": "std"}),  # one-shot
    Case(A, (8, 4), {"heads": 2, "aggr": "max"}),
]
