r"""What moves the rows of loaded data out of the memory of the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pyg_sar.offload import hop, passes
from pyg_sar.offload.home import Home
from pyg_sar.offload.rows import HostRows, Place

__all__ = ["hop", "offload", "passes"]


def offload(data: Any, chunks: int, home: str | None = None) -> Any:
    """x"""
    graph = data.edge_index.graph
    device = graph.device
    n_id = torch.arange(graph.num_src) if graph.n_id is None else graph.n_id
    place = Place(Home(home, device), device, hop.spans(graph, chunks), n_id)
    out = copy.copy(data)
    for key, value in data.node_attrs() and ((k, data[k]) for k in data.node_attrs()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            out[key] = HostRows(place, value)
    return out
