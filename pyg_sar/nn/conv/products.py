r"""The linear layers, sums and products of layers with kernels: fused, or in place, wherever that is the same."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn.dense.linear import is_uninitialized_parameter

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.linear import linear
from pyg_sar.nn.replay.call import has_hooks


def weight_and_bias(lin: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return weight and bias of a linear layer that does nothing else, so that several can become one product."""
    if type(lin) is not torch_geometric.nn.Linear or is_uninitialized_parameter(lin.weight):
        return None
    if has_hooks(lin) or "forward" in lin.__dict__ or _has_any_global_hook():
        return None
    return lin.weight, lin.bias


def multiplies_edges(lin: Any, edge_attr: Any) -> bool:
    """Whether a linear layer of edge features is nothing but a matrix, or will be one, where there are features."""
    if lin is None or not isinstance(edge_attr, Tensor):
        return True
    if type(lin) is not torch_geometric.nn.Linear:  # to ask a parametrized one for its weight makes it anew
        return False
    return lin.bias is None if is_uninitialized_parameter(lin.weight) else is_matrix(lin)


def is_matrix(lin: Any) -> bool:
    """Whether a linear layer is nothing but its weight."""
    pair = weight_and_bias(lin)
    return pair is not None and pair[1] is None


def edge_weights(lin: Any, edge_attr: Tensor) -> Tensor:
    """Return the matrix of a linear layer of edge features, which is made now if it has waited for their width."""
    if is_uninitialized_parameter(lin.weight):
        lin(edge_attr[:0] if edge_attr.dim() > 1 else edge_attr[:0].unsqueeze(-1))
    return lin.weight


def project(lin: Any, x: Tensor) -> Tensor:
    """Return ``lin(x)``, by the faster product where the linear layer does nothing else."""
    pair = weight_and_bias(lin)
    return lin(x) if pair is None else linear(x, *pair)


def add(own: Tensor, term: Tensor) -> Tensor:
    """Return the sum, in the memory of ``own`` (which nobody else reads) if its type allows; not of rows at home."""
    fits = torch.promote_types(own.dtype, term.dtype) == own.dtype and is_elsewhere(own) >= is_elsewhere(term)
    return own.add_(term) if fits else own + term


def multiply(own: Tensor, factor: Tensor) -> Tensor:
    """Return the product, in the memory of ``own`` (which nobody else reads) if its type and backward allow."""
    alike = torch.promote_types(own.dtype, factor.dtype) == own.dtype
    return own.mul_(factor) if alike and not factor.requires_grad else own * factor
