r"""Opens a partition: every worker reads its own part, all agree on what they have, and each builds its graph."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_sar import watch
from pyg_sar.block import Block
from pyg_sar.caller import warn
from pyg_sar.data.attributes import integers, is_pairs
from pyg_sar.data.split import Topology
from pyg_sar.data.store import EDGE, NODE, EdgeType, Shard, read_part
from pyg_sar.distributed import guard
from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import Group, gather_objects, rank_of
from pyg_sar.distributed.peers import Peers
from pyg_sar.distributed.process_group import present
from pyg_sar.distributed.traffic import Log
from pyg_sar.distributed.transfer import Channel
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.exchange import Exchange, Local, Routes
from pyg_sar.graph import Seeds, ShardedGraph


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    group: Group = None,
    remat: bool = True,
    prefetch: int = 1,
    comm_dtype: torch.dtype | None = None,
    one_shot: bool = False,
    mmap: bool = True,
) -> Data | HeteroData:
    r"""Load this worker's part of a partitioned graph.

    All workers of ``group`` call it together, with the same arguments but for ``path`` and ``device``. Seed before
    (``torch.manual_seed(pyg_sar.init())``): rank 0's seed is that of attention dropout on all of them.

    .. code-block:: python

        with pyg_sar.process_group():
            data = pyg_sar.load("parts")
            out = model(data.x, data.edge_index)  # rows of this worker's nodes

    Tensors on the CPU are mapped from their files: what is not used takes no memory, the system can take back what is
    not changed, and changes are private to the process. Nobody must write to the files meanwhile: the numbers would
    change, and where a file became shorter the process would be killed (SIGBUS). ``mmap=False`` reads them once.

    Args:
        path (str): The folder written by :func:`pyg_sar.partition`.
        device (torch.device, optional): Where tensors are put. (default: :obj:`"cpu"`)
        group (ProcessGroup, optional): The workers, one for each part; not needed for a partition of one part.
            (default: :obj:`None`, all of them)
        remat (bool, optional): Whether backward fetches source rows again (mode 1) instead of keeping them (mode 2).
            (default: :obj:`True`)
        prefetch (int, optional): How many fetches are under way while a block is consumed; ``prefetch + 1`` blocks of
            other workers are alive at a time. (default: :obj:`1`)
        comm_dtype (torch.dtype, optional): A floating-point type, such as :obj:`torch.bfloat16`, to which wider rows
            and gradients are rounded when workers send them, and only then: sums stay as precise as ever.
            Results are then no longer exact. (default: :obj:`None`, nothing is rounded)
        one_shot (bool, optional): Whether all halo rows of a layer are fetched at once (mode 3), which is faster and
            takes more memory. (default: :obj:`False`)
        mmap (bool, optional): Whether tensors on the CPU stay in their files until they are used.
            (default: :obj:`True`)

    Returns:
        A :class:`torch_geometric.data.Data` with this worker's rows of every node-level and edge-level tensor.
        ``edge_index`` is a :class:`~pyg_sar.edge_index.ShardedEdgeIndex` :math:`(2, |\mathcal{E}_p|)`, of the edges
        that end at the worker's nodes. ``n_id`` :math:`(|\mathcal{V}_p|)` and ``e_id`` :math:`(|\mathcal{E}_p|)` are
        the ids of its rows in the whole graph, ``num_nodes`` is :math:`|\mathcal{V}_p|`, and ``total_nodes`` is the
        number of nodes of the whole graph. Lists of nodes or edges (``train_idx``, ``split_idx``) hold rows: those of
        this worker's nodes or edges among them. Of a heterogeneous graph, a :class:`torch_geometric.data.HeteroData`
        with these for every node and edge type.

    Raises:
        RuntimeError: On every worker, if any worker cannot read its part (the folder, a part or a file is missing or
            damaged) or has a ``prefetch`` below 0 or a ``comm_dtype`` that is not floating-point; if there are not as
            many parts as workers, or parts of different partitions; or if the workers' arguments differ.
    """
    rank = rank_of(group)
    shard: Shard | None = None
    mine: dict[str, Any] = {"seed": torch.initial_seed(), "remat": remat, "prefetch": prefetch, "one_shot": one_shot}
    mine |= {"comm_dtype": str(comm_dtype), "PYG_SAR_GUARDS": guard.ON}
    try:
        if prefetch < 0:
            raise ValueError(f"Expected 'prefetch' to be 0 or more (got {prefetch})")
        if comm_dtype is not None and not (isinstance(comm_dtype, torch.dtype) and comm_dtype.is_floating_point):
            raise ValueError(f"Expected 'comm_dtype' to be a floating-point type (got {comm_dtype})")
        torch.empty(0, device=device)  # which there may not be
        shard = read_part(path, rank, mmap=mmap)
        mine |= {"identity": shard.identity, "num_parts": shard.num_parts}
        topologies = [rows.topology for rows in shard.edges.values()]
        mine |= {"reads": [t.num_src for t in topologies], "serves": [[*map(len, t.serve)] for t in topologies]}
    except Exception as e:  # whatever it is, the others must hear of it
        mine["error"] = f"{type(e).__name__}: {e}"
    said = gather_objects(mine, group)
    _agree(said, rank)
    assert shard is not None
    if torch.device(device).type == "cuda":  # NCCL wants all workers in a group's first message
        all_reduce(torch.zeros(1, device=device), group)
    log, edges = Log(), {}
    for k, (it, rows) in enumerate(shard.edges.items()):
        seed = said[0]["seed"] + 0x9E3779B9 * k  # other masks of dropout for every edge type
        graph = assemble(rows.topology, rank, group, remat, prefetch, seed, comm_dtype, log)
        graph = graph.replace(ends=(it[0], it[-1])) if shard.typed else graph
        edges[it] = ShardedEdgeIndex(graph).replace(one_shot=one_shot)
    data = _data(shard, edges).to(str(device))
    # A single worker, such as that of a stage of a pipeline, has all rows, but in another order.
    if shard.num_parts > 1 or (watch.is_alone() and _is_permuted(shard)):
        _report(data, shard)
    return data


def _is_permuted(shard: Shard) -> bool:
    """Whether rows of a single part are in another order than in the graph."""
    return any(not torch.equal(ids := rows.attrs["n_id"], torch.arange(len(ids))) for rows in shard.nodes.values())


def _report(data: Any, shard: Shard) -> None:
    """Tell the watch what the tensors of a part are."""
    rows = []
    whole: Container[str] = () if shard.typed else shard.attrs
    watch.same_on_all(data.stores[0][name] for name in shard.alike)  # that of the graph
    for store in data.stores:
        ends = store._key[::2] if isinstance(store._key, tuple) else (store._key,)
        counts = [store[key].numel() for key in ("n_id", "e_id") if key in store]
        for key, value in store.items():
            if not isinstance(value, Tensor) or isinstance(value, ShardedEdgeIndex) or not value.dim():
                continue
            dim = data.__cat_dim__(key, value, store)
            if integers(value) and is_pairs((key,), value):
                watch.ids(value)
            elif key not in whole and isinstance(dim, int) and value.size(dim) in counts:
                rows.append((value, dim % value.dim(), ends))
    watch.loaded(data, rows)


def _agree(said: list[dict[str, Any]], rank: int) -> None:
    """Raise the same error on every worker unless all opened parts of one partition that fits them."""
    errors = [f"rank {r}: {its['error']}" for r, its in enumerate(said) if "error" in its]
    parts = {its["num_parts"] for its in said if "error" not in its}
    if errors and parts <= {len(said)}:
        raise RuntimeError(f"[rank {rank}] Could not load the partition. " + "; ".join(errors))
    started = os.environ.get("WORLD_SIZE", "1")
    if started != "1" and present() is None:
        apart = (
            f"This process is one of {started} workers that were started, but has not joined them: call "
            f"'pyg_sar.init()' before 'load'"
        )
        if parts != {1}:
            raise RuntimeError(f"{apart}. The partition has {max(parts)} parts.")
        warn(f"{apart}. Each of them will have the whole graph.")
    if parts != {len(said)}:
        found = ", ".join(map(str, sorted(parts)))
        raise RuntimeError(
            f"[rank {rank}] The partition has {found} parts, but there are {len(said)} workers. Start one worker for "
            f"each part ('--nproc-per-node'), or partition the graph anew with 'num_parts={len(said)}'. The stages "
            f"of a pipeline load all parts each, with 'group=mesh.get_group(\"graph\")'."
        )
    repairs = {
        "identity": "The parts come from different partitions; copy all of them from one run of the partitioner.",
        "PYG_SAR_GUARDS": "Set this variable alike on every rank.",
    }
    for name in ("identity", "remat", "prefetch", "comm_dtype", "PYG_SAR_GUARDS", "one_shot"):
        values = [its[name] for its in said]
        if len(set(values)) > 1:
            repair = repairs.get(name, f"Pass the same '{name}' to 'load' on every rank.")
            listed = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
            raise RuntimeError(f"[rank {rank}] The workers differ in '{name}' ({listed}). {repair}")
    for p, its in enumerate(said):
        for q, other in enumerate(said):
            reads, serves = ([counts[k] for counts in c] for c, k in ((its["reads"], q), (other["serves"], p)))
            if p != q and reads != serves:
                raise RuntimeError(
                    f"[rank {rank}] The parts do not fit together: part {p} reads {reads} rows of part {q}, which "
                    f"serves {serves}. Partition the graph again."
                )


def assemble(
    topology: Topology,
    rank: int,
    group: Group = None,
    remat: bool = True,
    prefetch: int = 1,
    seed: int = 0,
    comm_dtype: torch.dtype | None = None,
    log: Log | None = None,
) -> ShardedGraph:
    """Return the graph of worker ``rank``; a partition with a single part needs no process group."""
    ids, num_src, num_dst = topology.src_id, topology.src_id.numel(), topology.dst_id.numel()
    routes = Routes(rank, tuple(topology.serve), tuple(topology.num_src))
    starts = torch.tensor([0, *(c.numel() for c in topology.col)]).cumsum(0).tolist()
    blocks = tuple(
        Block(ptr, col.to(ptr.dtype), routes.ids[q], topology.num_src[q], slice(*starts[q : q + 2]), num_dst, rows)
        for q, (ptr, col, rows) in enumerate(zip(topology.rowptr, topology.col, topology.rows, strict=True))
    )
    if len(blocks) == 1:
        exchange: Exchange = Local(Routes.local([slice(0, num_src)], ids.device), log)
    else:
        exchange = Peers(routes, Channel(group, comm_dtype), prefetch, log)
    dst = slice(0, num_src) if topology.dst_id is ids else None
    return ShardedGraph(blocks, num_src, num_dst, exchange, remat, ids, topology.e_id, Seeds(seed), dst=dst)


def _data(shard: Shard, edges: dict[EdgeType, ShardedEdgeIndex]) -> Data | HeteroData:
    """Return a part as PyG's users know it."""
    data: Any = HeteroData()
    if shard.typed:
        rest, stores = data._global_store, data
    else:
        (edge_index,), (rows,) = edges.values(), shard.edges.values()
        data = Data(edge_index=edge_index, n_id=shard.nodes[NODE].attrs["n_id"], e_id=rows.topology.e_id)
        rest, stores = data._store, {NODE: data._store, EDGE: data._store}
    for t, nodes in shard.nodes.items():
        stores[t].update(nodes.attrs)
    for it, rows in shard.edges.items():
        stores[it].update({"edge_index": edges[it], "e_id": rows.topology.e_id, **rows.attrs})
    rest.update(shard.attrs)
    for t, nodes in shard.nodes.items():
        stores[t].num_nodes, stores[t].total_nodes = nodes.attrs["n_id"].numel(), nodes.total
    return data
