r"""Opens a partition: every worker reads its own part, and all agree on what they have."""

from __future__ import annotations

import os

import torch
from torch_geometric.data import Data, HeteroData

from pyg_sar import watch
from pyg_sar.distributed import guard, hetero
from pyg_sar.distributed.assemble import assemble
from pyg_sar.distributed.collectives import all_reduce, gather_objects
from pyg_sar.distributed.exchange import Log
from pyg_sar.distributed.group import Group, rank_of
from pyg_sar.distributed.split import Topology
from pyg_sar.distributed.store import Shard, read_info, read_part
from pyg_sar.edge_index import ShardedEdgeIndex


def load(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    group: Group = None,
    remat: bool = True,
    prefetch: int = 1,
    wire: torch.dtype | None = None,
) -> Data | HeteroData:
    r"""Load this worker's part of a partitioned graph.

    All workers of ``group`` call it together. Seed them alike before (:func:`torch.manual_seed`): rank 0's seed is that
    of attention dropout.

    Tensors on the CPU are mapped from their files: what is not used takes no memory, the system can take back what is
    not changed, and changes are private to the process.

    Args:
        path (str): The folder written by :func:`pyg_sar.partition`.
        device (torch.device, optional): Where tensors are put. (default: :obj:`"cpu"`)
        group (ProcessGroup, optional): The workers, one for each part; not needed for a partition of one part.
            (default: :obj:`None`, all of them)
        remat (bool, optional): Whether backward fetches source rows again (mode 1) instead of keeping them (mode 2).
            (default: :obj:`True`)
        prefetch (int, optional): How many fetches are under way while a block is consumed; ``prefetch + 1`` remote
            blocks are alive at a time. (default: :obj:`1`)
        wire (torch.dtype, optional): A floating-point type, such as :obj:`torch.bfloat16`, to which wider rows and
            gradients are rounded where they travel between workers, and only there: sums stay as precise as ever.
            Results are then no longer exact. (default: :obj:`None`, nothing is rounded)

    Returns:
        A :class:`torch_geometric.data.Data` with this worker's rows of every node-level and edge-level tensor, with
        ``edge_index`` (a :class:`~pyg_sar.edge_index.ShardedEdgeIndex`), ``n_id`` and ``e_id`` (global ids of rows).
        Lists of nodes or edges (``train_idx``, ``split_idx``) hold rows, those of this worker's own among them.
        Of a heterogeneous graph, a :class:`torch_geometric.data.HeteroData` with these for every node and edge type.

    Raises:
        RuntimeError: On every worker, if any worker cannot read its part, or the parts do not belong together.
    """
    rank = rank_of(group)
    shard: Shard | hetero.HeteroShard | None = None
    error = ""
    try:
        if prefetch < 0:
            raise ValueError(f"Expected 'prefetch' to be 0 or more (got {prefetch})")
        if wire is not None and not wire.is_floating_point:
            raise ValueError(f"Expected 'wire' to be a floating-point type (got {wire})")
        shard = hetero.read_part(path, rank) if "node_types" in read_info(path, rank) else read_part(path, rank)
    except Exception as e:  # whatever it is, the others must hear of it
        error = f"{type(e).__name__}: {e}"
    settings = torch.initial_seed(), remat, prefetch, str(wire), guard.ON
    mine = error, *((shard.identity, shard.num_parts) if shard else ("", 0)), *settings
    said = gather_objects(mine, group)
    _agree(said, rank)
    assert shard is not None
    if torch.device(device).type == "cuda":  # NCCL wants all workers in a group's first message
        all_reduce(torch.zeros(1, device=device), group)
    log, seed = Log(), said[0][3]

    def edge_index(topology: Topology, number: int = 0) -> ShardedEdgeIndex:
        seeds = seed + 0x9E3779B9 * number  # other masks of dropout for every edge type
        return ShardedEdgeIndex(assemble(topology, rank, group, remat, prefetch, seeds, wire, log))

    if isinstance(shard, Shard):
        return watch.loaded(_data(shard, edge_index(shard.topology)).to(str(device)), shard.graph_attrs)
    edges = {it: edge_index(topology, k) for k, (it, topology) in enumerate(shard.topologies.items())}
    return watch.loaded(_hetero_data(shard, edges).to(str(device)), ())


def _agree(said: list[tuple[str, str, int, int, bool, int, str, bool]], rank: int) -> None:
    """Raise the same error on every worker unless all opened parts of one partition that fits them."""
    errors = [f"rank {r}: {error}" for r, (error, *_) in enumerate(said) if error]
    parts = {num_parts for error, _, num_parts, *_ in said if not error}
    if errors and parts <= {len(said)}:
        raise RuntimeError(f"[rank {rank}] Could not load the partition. " + "; ".join(errors))
    if parts != {len(said)}:
        found = ", ".join(map(str, sorted(parts)))
        raise RuntimeError(
            f"[rank {rank}] The partition has {found} parts, but there are {len(said)} workers. Start one worker for "
            f"each part ('--nproc-per-node'), or partition the graph anew with 'num_parts={len(said)}'."
        )
    for name, column in (("identity", 1), ("remat", 4), ("prefetch", 5), ("wire", 6), ("PYG_SAR_GUARDS", 7)):
        values = [s[column] for s in said]
        if len(set(values)) > 1:
            why = (
                "The parts come from different partitions; copy all of them from one run of the partitioner."
                if name == "identity"
                else "Set this variable alike on every rank."
                if name == "PYG_SAR_GUARDS"
                else f"Pass the same '{name}' to 'load' on every rank."
            )
            listed = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values))
            raise RuntimeError(f"[rank {rank}] The workers differ in '{name}' ({listed}). {why}")


def _data(shard: Shard, edge_index: ShardedEdgeIndex) -> Data:
    topology = shard.topology
    data = Data(edge_index=edge_index, n_id=topology.src_id, e_id=topology.e_id)
    for key, value in {**shard.node_attrs, **shard.edge_attrs, **shard.graph_attrs}.items():
        data[key] = value
    data.num_nodes = topology.src_id.numel()
    data.total_nodes = shard.num_nodes
    return data


def _hetero_data(shard: hetero.HeteroShard, edges: dict[hetero.EdgeType, ShardedEdgeIndex]) -> HeteroData:
    data = HeteroData()
    for key, value in shard.graph_attrs.items():
        setattr(data, key, value)  # the constructor takes a dictionary for a type of nodes
    for t, attrs in shard.node_attrs.items():
        for key, value in attrs.items():
            data[t][key] = value
        data[t].num_nodes = attrs["n_id"].numel()
        data[t].total_nodes = shard.num_nodes[t]
    for it, attrs in shard.edge_attrs.items():
        data[it].edge_index, data[it].e_id = edges[it], shard.topologies[it].e_id
        for key, value in attrs.items():
            data[it][key] = value
    return data
