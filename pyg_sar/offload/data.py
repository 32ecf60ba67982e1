r"""What moves the rows of loaded data out of the memory of the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.offload.chunks import spans
from pyg_sar.offload.home import Home
from pyg_sar.offload.rows import HostRows, Place


def offload(data: Any, chunks: int, home: str | None = None, limit: int | None = None) -> Any:
    r"""Keep rows of nodes in host memory or in files, and compute on some of them at a time.

    It implements the destination loop of the `"HongTu: Scalable Full-Graph GNN Training on Multiple GPUs"
    <https://arxiv.org/abs/2311.14898>`_ paper, for any model, exactly. Nodes are cut into ``chunks`` ranges. Functions
    that treat each row by itself run on one range after the other; an aggregation runs on one range of destinations
    with all their in-edges, and fetches the rows that these read. Nothing is kept between the passes but rows at home:
    backward computes a range again when its gradient comes (of sums, only what follows them).

    .. code-block:: python

        data = pyg_sar.offload(pyg_sar.load("parts/products"), chunks=16, home="/scratch")
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])

    ``data.x`` and other floating-point rows of nodes become :class:`~pyg_sar.offload.rows.HostRows`. ``out[mask]``,
    ``out[index]``, sums and means over all rows are ordinary tensors. Batch normalisation takes its statistics over all
    rows. A function that mixes rows raises. The mask of ``F.dropout`` is a function of the row's global id.

    Args:
        data (Data): What :func:`pyg_sar.load` returned in a single process, or a ``Data`` whose ``edge_index`` is that
            of :func:`pyg_sar.shard`.
        chunks (int): The number of ranges.
        home (str, optional): A folder for files with the rows, on a disk with room for several times the rows of all
            layers. They have no name, and are gone when the process ends. (default: :obj:`None`, memory)
        limit (int, optional): Bytes that rows may take at home. (default: :obj:`None`, what there is)

    Returns:
        Data: The same data with its rows at home.

    Raises:
        TypeError: If ``edge_index`` is not sharded.
        ValueError: If ``chunks`` is no positive integer, or nodes are of two sets.
        NotImplementedError: If there are several workers, or the graph is not on the CPU.
        OSError: If there is no such folder, or no room.
    """
    it = getattr(data, "edge_index", None)
    if not isinstance(it, ShardedEdgeIndex):
        raise TypeError(
            f"Expected data with a sharded 'edge_index' (got {type(it).__name__}). Take it from 'pyg_sar.load', or set "
            f"'data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes)'. Heterogeneous data stays in memory."
        )
    graph = it.graph
    if type(chunks) is not int or chunks < 1:
        raise ValueError(f"Expected 'chunks' to be a positive integer (got {chunks!r})")
    if graph.bipartite or graph.origin is not None:
        raise ValueError("Expected the 'edge_index' of a whole graph with one set of nodes")
    if not graph.exchange.alone:
        raise NotImplementedError(
            f"[rank {graph.exchange.routes.rank}] Rows are moved to host memory by a single worker (got "
            f"{graph.exchange.routes.size}). Partition into one part and start one process."
        )
    if graph.device.type != "cpu":
        raise NotImplementedError(f"Rows are computed on by the CPU as yet (got an 'edge_index' on {graph.device})")
    n_id = torch.arange(graph.num_src) if graph.n_id is None else graph.n_id
    place = Place(Home(home, graph.device, limit), graph.device, spans(graph, chunks), n_id)
    out = copy.copy(data)
    for key in data.node_attrs():
        value = data[key]
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
            out[key] = HostRows(place, value.detach()).requires_grad_(value.requires_grad)
    return out
