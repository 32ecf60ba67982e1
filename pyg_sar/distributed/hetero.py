r"""A part of a heterogeneous graph on disk: for every edge type a topology of its own.

It holds, by the numbers of node and edge types in ``part.json``:

.. code-block:: text

    OUT/part_0/node_0.safetensors    ids of a node type, and its tensors of all levels
    OUT/part_0/graph_0.safetensors   the :class:`~pyg_sar.distributed.split.Topology` of an edge type
    OUT/part_0/edge_0.safetensors    its tensors of all levels
    OUT/part_0/attrs.safetensors     tensors of the graph
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyg_sar.distributed import store
from pyg_sar.distributed.split import Topology

EdgeType = tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class HeteroShard:
    """What one worker holds of a partitioned heterogeneous graph.

    Args:
        part: Number of this part.
        num_parts: Number of parts.
        identity: Name of the partition.
        num_nodes: Number of nodes of each type in the whole graph.
        topologies: By edge type, the edges that end at this part's nodes.
        node_attrs: By node type, its attributes, and ids as ``n_id``.
        edge_attrs: By edge type, its attributes.
        graph_attrs: Attributes of the graph.
    """

    part: int
    num_parts: int
    identity: str
    num_nodes: dict[str, int]
    topologies: dict[EdgeType, Topology]
    node_attrs: dict[str, dict[str, Any]]
    edge_attrs: dict[EdgeType, dict[str, Any]]
    graph_attrs: dict[str, Any]


def write_part(folder: Path, shard: HeteroShard) -> dict[str, Any]:
    """Write one part into a folder of :func:`pyg_sar.distributed.store.create`."""
    path = folder / f"part_{shard.part}"
    path.mkdir()
    groups = {f"node_{k}": attrs for k, attrs in enumerate(shard.node_attrs.values())}
    groups |= {f"graph_{k}": store.topology_tensors(t) for k, t in enumerate(shard.topologies.values())}
    groups |= {f"edge_{k}": attrs for k, attrs in enumerate(shard.edge_attrs.values())}
    each = [store.counts_of(t, shard.part) for t in shard.topologies.values()]
    parts = range(shard.num_parts)
    counts = {
        "nodes": sum(attrs["n_id"].numel() for attrs in shard.node_attrs.values()),
        **{key: [sum(c[key][q] for c in each) for q in parts] for key in ("edges", "rows_in", "rows_out")},
    }
    info = store.FORMAT | {key: getattr(shard, key) for key in ("part", "num_parts", "identity")}
    info |= {
        "node_types": shard.num_nodes,
        "edge_types": [[*it] for it in shard.topologies],
        "counts": counts,
        "counts_by_type": each,
    }
    return store.write_files(path, info, {**groups, "attrs": shard.graph_attrs})


def read_part(folder: str | os.PathLike[str], part: int) -> HeteroShard:
    """Read one part, see :func:`pyg_sar.distributed.store.read_part`."""
    info, path = store.read_info(folder, part), Path(folder) / f"part_{part}"
    node_attrs = {t: store.load_file(path, f"node_{k}", info, True) for k, t in enumerate(info["node_types"])}
    topologies, edge_attrs = {}, {}
    for k, (it, counts) in enumerate(zip(map(tuple, info["edge_types"]), info["counts_by_type"], strict=True)):
        tensors = store.load_file(path, f"graph_{k}", info, True)
        source, target = (node_attrs[t]["n_id"] for t in (it[0], it[2]))
        topologies[it] = store.topology_of(tensors, counts, part, source, target)
        store.check_counts(path, store.counts_of(topologies[it], part), counts)
        edge_attrs[it] = store.load_file(path, f"edge_{k}", info, True)
    attrs = store.load_file(path, "attrs", info, True)
    head = (info["part"], info["num_parts"], info["identity"], info["node_types"])
    return HeteroShard(*head, topologies, node_attrs, edge_attrs, attrs)
