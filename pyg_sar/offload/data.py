r"""The one call that users make: rows of loaded data leave the memory that is computed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pyg_sar.distributed.agreement import agree, on_all
from pyg_sar.distributed.group import copied
from pyg_sar.graph import ShardedGraph
from pyg_sar.offload.home import Home, count_bytes
from pyg_sar.offload.move import graphs_of, ids_of, move, place_of, place_of_types

Graphs = Mapping[Any, ShardedGraph]


def offload(
    data: Any, budget: int | str | None = None, model: torch.nn.Module | None = None, *,
    device: torch.device | str = "cpu", home: str | None = None, chunks: int | None = None,
    limit: int | str | None = None, edges: Sequence[str] = (),
) -> Any:  # fmt: skip
    r"""Keep rows of nodes in host memory or in files, and compute on some of them at a time.

    It implements the destination loop of the `"HongTu: Scalable Full-Graph GNN Training on Multiple GPUs"
    <https://arxiv.org/abs/2311.14898>`_ paper, for any model, exactly. Nodes are cut into chunks. Functions that treat
    each row by itself run on one range of rows after the other; an aggregation runs on one range of destinations with
    all their in-edges, and fetches the rows that these read, in pieces where they are many. Nothing is kept between the
    passes but rows at home: backward computes a chunk again when its gradient comes (of sums, only what follows them).

    .. code-block:: python

        data = pyg_sar.offload(pyg_sar.load("parts/products"), "2GiB", model, home="/scratch")
        out = model(data.x, data.edge_index)[data.train_mask]
        loss = pyg_sar.global_mean(F.cross_entropy(out, data.y[data.train_mask], reduction="none"))

    ``data.x`` and other floating-point rows of nodes become :class:`pyg_sar.HostRows`. ``out[mask]``, ``out[index]``,
    sums and means over all rows are ordinary tensors. Batch normalisation takes its statistics over all rows. A
    function that mixes rows raises. The mask of ``F.dropout`` is a function of the row's global id.

    Of heterogeneous data the rows of all types of nodes go home; each type of edges has so many chunks of destinations.
    Layers take the edges of the data that is returned, and may take ordinary rows beside those at home.

    Of several workers each keeps its local rows at home, and, while a layer runs, the rows that it reads of others:
    they come once, and their gradients go back once, as in memory. All workers call this together. Statistics are those
    of all workers' rows; sums, means, ``out[mask]`` and losses are a worker's share, as in memory.

    Args:
        data (Data or HeteroData): What :func:`pyg_sar.load` returned, or data each ``edge_index`` of which is that of
            :func:`pyg_sar.shard`.
        budget (int or str, optional): Bytes, or such as :obj:`"2GiB"`, that a step of a worker may take beside the data
            and the rows at home. The fewest chunks are taken that fit, as a dry run of ``model`` tells, with several
            workers the same number on each. (default: :obj:`None`)
        model (torch.nn.Module, optional): The model for which the budget is; called as
            :obj:`model(x, edge_index, *edges)`, a copy of it; of heterogeneous data, with dictionaries of these.
            (default: :obj:`None`)
        device (torch.device, optional): Where rows are computed on, where ``model`` is, and where labels and masks go.
            (default: :obj:`"cpu"`)
        home (str, optional): A folder for files with the rows, on a disk with room for several times the rows of all
            layers. They have no name, and are gone when the process ends. (default: :obj:`None`, memory)
        chunks (int, optional): The number of chunks, instead of a budget; workers may take different ones.
            (default: :obj:`None`)
        limit (int or str, optional): Bytes that rows may take at home, in files and in pinned memory with the index
            tensors of chunks, and in pinned memory with the features, which are copied there.
            (default: :obj:`None`, what there is)
        edges (list, optional): With a budget, the names of the tensors of edges that the model takes, such as
            :obj:`["edge_type"]`. (default: none)

    Returns:
        Data: The same data with its rows at home.

    Raises:
        TypeError: If ``edge_index`` is not sharded, or there is a budget without a model.
        ValueError: If there are neither chunks nor a budget, or both, or one of them is wrong or too small; or if
            edges join other numbers of nodes than the data has, or are not on the CPU.
        OSError: If there is no such folder, or no room.
        RuntimeError: On all of several workers, if one of them raises, or if they ask for different kinds.
    """
    kind = f"{'chunks' if budget is None else 'a budget'}, homes in {'memory' if home is None else 'files'}"
    stores = getattr(data, "edge_stores", [data])
    known = (getattr(getattr(store, "edge_index", None), "graph", None) for store in stores)
    exchange = next((graph.exchange for graph in known if graph is not None), None)
    graphs, rows, there = everywhere(exchange, partial(check, data, budget, model, home, chunks, limit, device, edges))
    graph = next(iter(graphs.values()))
    if not graph.exchange.alone:
        agree("how rows are kept at home", [kind], graph.exchange.group)
    if chunks is not None:
        return moved(data, graphs, rows, chunks, None, there)
    from pyg_sar.offload.counts import counts_of_data  # which workers in memory do without
    from pyg_sar.offload.plan import choose

    assert model is not None
    features = features_of(data)
    widths = {key: x.size(1) for key, x in features.items()}
    need = choose(
        lambda: copied(model).cpu(), lambda count: counts_of_data(data, graphs, count), widths.get(None, widths),
        count_bytes(budget, "budget"), home, next(iter(features.values())).dtype, there == graph.device,
        graph.exchange.all_reduce_max, edges=[data[name] if None in graphs else data.collect(name) for name in edges],
    )  # fmt: skip
    return moved(data, graphs, rows, need.chunks, need.slots, there)


def moved(data: Any, graphs: Graphs, rows: Home, chunks: int, slots: int | None, device: torch.device) -> Any:
    """Return the data with its rows at home."""
    if None in graphs:
        work = partial(move, data, place_of(graphs[None], rows, chunks, slots, device))
    else:
        work = partial(move, data, place_of_types(ids_of(data), graphs, rows, chunks, slots, device), graphs)
    return everywhere(next(iter(graphs.values())).exchange, work)


def features_of(data: Any) -> dict[Any, Any]:
    """Return the features of nodes, by type; raise where there are none."""
    found = {store._key: store.get("x") for store in data.node_stores}
    for key, x in found.items():
        if not isinstance(x, torch.Tensor) or x.dim() != 2:
            of = "'data.x'" if key is None else f"of '{key}', 'x'"
            raise TypeError(
                f"Expected features {of} [num_nodes, channels] with the 'budget'; give 'chunks' without them"
            )
    return found


def everywhere(exchange: Any, work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns here; raise on all workers if it raises on one, as where there is no room."""
    if exchange is None or exchange.alone:
        return work()
    return on_all(work, "move rows home", exchange.group, mine=True)


def check(
    data: Any, budget: Any, model: Any, home: Any, chunks: Any, limit: Any, device: Any, edges: Sequence[str]
) -> tuple[Graphs, Home, torch.device]:
    """Return the graphs of data, a home for its rows, and the device; raise unless everything is right."""
    graphs, there = graphs_of(data), torch.empty(0, device=device).device  # with its number
    if (budget is None) == (chunks is None):
        raise ValueError(f"Expected either a 'budget' with a 'model', or 'chunks' (got {budget!r} and {chunks!r})")
    if chunks is not None and (type(chunks) is not int or chunks < 1):
        raise ValueError(f"Expected 'chunks' to be a positive integer (got {chunks!r})")
    rows = Home(home, there, None if limit is None else count_bytes(limit, "limit"))
    if chunks is not None:
        return graphs, rows, there
    count_bytes(budget, "budget")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"Expected a 'model' with the 'budget', which depends on its layers (got {type(model).__name__})"
        )
    features_of(data)
    for name in edges:
        for store in [store for store in data.edge_stores if name in store] or data.edge_stores:
            it, count = store.get(name), graphs[store._key].num_edges
            if not isinstance(it, torch.Tensor) or it.size(0) != count:
                found = list(it.shape) if isinstance(it, torch.Tensor) else type(it).__name__
                raise ValueError(f"Expected 'edges' to name tensors with {count} rows (got '{name}', {found})")
    return graphs, rows, there
