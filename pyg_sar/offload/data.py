r"""The one call that users make: rows of loaded data leave the memory that is computed on."""

from __future__ import annotations

import copy
from typing import Any

import torch

from pyg_sar.offload.home import Home
from pyg_sar.offload.move import graph_of, move, place_of

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def offload(
    data: Any, budget: int | str | None = None, model: torch.nn.Module | None = None, *, home: str | None = None,
    chunks: int | None = None, limit: int | str | None = None,
) -> Any:  # fmt: skip
    r"""Keep rows of nodes in host memory or in files, and compute on some of them at a time.

    It implements the destination loop of the `"HongTu: Scalable Full-Graph GNN Training on Multiple GPUs"
    <https://arxiv.org/abs/2311.14898>`_ paper, for any model, exactly. Nodes are cut into chunks. Functions that treat
    each row by itself run on one range of rows after the other; an aggregation runs on one range of destinations with
    all their in-edges, and fetches the rows that these read, in pieces where they are many. Nothing is kept between the
    passes but rows at home: backward computes a chunk again when its gradient comes (of sums, only what follows them).

    .. code-block:: python

        data = pyg_sar.offload(pyg_sar.load("parts/products"), "2GiB", model, home="/scratch")
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    ``data.x`` and other floating-point rows of nodes become :class:`pyg_sar.HostRows`. ``out[mask]``, ``out[index]``,
    sums and means over all rows are ordinary tensors. Batch normalisation takes its statistics over all rows. A
    function that mixes rows raises. The mask of ``F.dropout`` is a function of the row's global id.

    Args:
        data (Data): What :func:`pyg_sar.load` returned in a single process, or a ``Data`` whose ``edge_index`` is that
            of :func:`pyg_sar.shard`.
        budget (int or str, optional): Bytes, or such as :obj:`"2GiB"`, that a step may take beside the data and the
            rows at home. The fewest chunks are taken that fit, as a dry run of ``model`` tells. (default: :obj:`None`)
        model (torch.nn.Module, optional): The model for which the budget is; called as :obj:`model(x, edge_index)`, a
            copy of it. (default: :obj:`None`)
        home (str, optional): A folder for files with the rows, on a disk with room for several times the rows of all
            layers. They have no name, and are gone when the process ends. (default: :obj:`None`, memory)
        chunks (int, optional): The number of chunks, instead of a budget. (default: :obj:`None`)
        limit (int or str, optional): Bytes that rows may take at home. (default: :obj:`None`, what there is)

    Returns:
        Data: The same data with its rows at home.

    Raises:
        TypeError: If ``edge_index`` is not sharded, or there is a budget without a model.
        ValueError: If there are neither chunks nor a budget, or both, or one of them is wrong or too small; or if nodes
            are of two sets.
        NotImplementedError: If there are several workers, or the graph is not on the CPU.
        OSError: If there is no such folder, or no room.
    """
    graph = graph_of(data)
    if (budget is None) == (chunks is None):
        raise ValueError(f"Expected either a 'budget' with a 'model', or 'chunks' (got {budget!r} and {chunks!r})")
    if chunks is not None and (type(chunks) is not int or chunks < 1):
        raise ValueError(f"Expected 'chunks' to be a positive integer (got {chunks!r})")
    rows = Home(home, graph.device, None if limit is None else count_bytes(limit, "limit"))
    if chunks is not None:
        return move(data, place_of(graph, rows, chunks))
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"Expected a 'model' with the 'budget', which depends on its layers (got {type(model).__name__})"
        )
    from pyg_sar.offload.plan import choose, counts_of  # which workers in memory do without

    x, mask = getattr(data, "x", None), getattr(data, "train_mask", None)
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        raise TypeError(
            "Expected features 'data.x' [num_nodes, channels] with the 'budget'; give 'chunks' without them"
        )
    labelled = graph.num_src if mask is None else int(mask.sum())
    need = choose(
        lambda: copy.deepcopy(model), lambda count: counts_of(graph, count, labelled), x.size(1),
        count_bytes(budget, "budget"), home, x.dtype,
    )  # fmt: skip
    return move(data, place_of(graph, rows, need.chunks, need.slots))


def count_bytes(value: int | str | None, name: str) -> int:
    """Return a number of bytes; raise for what is none."""
    found: Any = value
    if isinstance(value, str):
        number = value.rstrip("KMGTiB ")
        unit = value[len(number) :].strip()
        try:
            found = int(float(number) * UNITS[unit or "B"])
        except (KeyError, ValueError):
            found = None
    if type(found) is not int or found <= 0:
        raise ValueError(f"Expected '{name}' to be a positive number of bytes, or such as '2GiB' (got {value!r})")
    return found
