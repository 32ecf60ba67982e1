r"""What the package's functions of autograd share."""

from __future__ import annotations

import torch


def once_differentiable() -> None:
    """Raise within a backward pass that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "Layers of 'pyg_sar.nn' have no second derivative. Call 'backward' or 'autograd.grad' without "
            "'create_graph=True', or use the layer of 'torch_geometric.nn' if the graph is not sharded."
        )
