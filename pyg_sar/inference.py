r"""Full-graph inference."""

from __future__ import annotations

from typing import Any

import torch

from pyg_sar.distributed.collectives import broadcast_parameters
from pyg_sar.distributed.group import copied
from pyg_sar.nn.convert import convert


@torch.no_grad()
def inference(model: torch.nn.Module, *args: Any, group: Any = None, **kwargs: Any) -> Any:
    r"""Run a model that was trained elsewhere, by sampling for example, on the whole graph: exactly, without dropout.

    .. code-block:: python

        model.load_state_dict(torch.load("graphsage.pt"))
        out = pyg_sar.inference(model, data.x, data.edge_index)

    The model is not changed. All workers call it together; rank 0's parameters and buffers count.

    Args:
        model (torch.nn.Module): A model of PyG's layers or your own.
        *args (optional): What it is called with.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
        **kwargs (optional): What it is called with.

    Returns:
        The output for this worker's rows.
    """
    model = convert(copied(model).eval(), group)
    broadcast_parameters(model, group)
    return model(*args, **kwargs)
