"""Layers on one worker's share of the graph, and on the whole graph, with their inputs."""

from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn
from support.layers import Case, inputs, leaf
from support.nasty_graph import NUM_NODES, Share, assignment, edges, share
from torch import Tensor


@dataclass
class Setup:
    """A layer on one worker's share of the graph, with its inputs; ``layer(x, *rest)`` runs it."""

    layer: Any
    x: Tensor
    rest: list[Any]
    share: Share

    def __call__(self) -> Tensor:
        return self.layer(self.x, *self.rest)

    def leaves(self) -> dict[str, Tensor]:
        """Return all tensors that require a gradient."""
        named = {
            "x": self.x,
            **{f"extra {k}": t for k, t in enumerate(self.rest[1:])},
            **dict(self.layer.named_parameters()),
        }
        return {name: t for name, t in named.items() if t.requires_grad}

    def loss(self) -> Tensor:
        """Return this worker's share of a number that does not depend on how the graph is cut."""
        out = self()
        g = torch.Generator().manual_seed(9)
        weight = torch.randn(NUM_NODES, *out.shape[1:], generator=g, dtype=torch.float64)
        return (out * weight[self.share.dst]).sum()

    def grads(self) -> dict[str, Tensor]:
        """Return all gradients and forget them."""
        found = {name: t.grad for name, t in self.leaves().items()}
        for t in self.leaves().values():
            t.grad = None
        return {name: g for name, g in found.items() if g is not None}


def setup(
    group: Any, case: Case, *, mode: int = 1, prefetch: int = 1, method: str = "random", seed: int = 0,
    comm_dtype: torch.dtype | None = None,
) -> Setup:  # fmt: skip
    """Give this worker its share of the graph and of random inputs."""
    edge_index = edges(seed=seed)
    mine = share(
        group, edge_index, assignment(method, group.size()), mode=mode, prefetch=prefetch, comm_dtype=comm_dtype
    )
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_NODES, 8, generator=g, dtype=torch.float64)
    extra = [leaf(e[mine.edge], case.learn) for e in inputs(case.roles, edge_index.size(1), torch.float64)]
    return Setup(case.build(), leaf(x[mine.src]), [mine.edge_index, *extra], mine)


def whole(case: Case, seed: int = 0) -> Setup:
    """Return PyG's layer on the whole graph with the same inputs."""
    everything = torch.arange(NUM_NODES)
    edge_index = edges(seed=seed)
    x = torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    extra = [leaf(e, case.learn) for e in inputs(case.roles, edge_index.size(1), torch.float64)]
    mine = Share(edge_index, everything, everything, torch.arange(edge_index.size(1)))  # type: ignore[arg-type]
    return Setup(case.build(torch_geometric.nn), leaf(x), [edge_index, *extra], mine)
