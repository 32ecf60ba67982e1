r"""Offline partitioning of a ``HeteroData``: one assignment of the nodes of all types."""

from __future__ import annotations

import copy
import os
import uuid
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from tqdm import tqdm

from pyg_sar.distributed import store
from pyg_sar.distributed.attributes import (
    Attribute,
    Path,
    Rows,
    add_counts,
    check_levels,
    describe,
    plain,
    sort_attributes,
    take,
    trained,
)
from pyg_sar.distributed.hetero import EdgeType, HeteroShard, write_part
from pyg_sar.distributed.order import order_within
from pyg_sar.distributed.partition import assign, report_of
from pyg_sar.distributed.split import split

Kind = str | EdgeType | None  # of an attribute: that of its nodes or edges, or none


def homogeneous(data: HeteroData) -> tuple[Data, dict[str, slice]]:
    """Return all nodes and edges as if they were of one type, and where the nodes of every type are."""
    types = data.node_types
    ends = list(accumulate((data[t].num_nodes for t in types), initial=0))
    spans = {t: slice(a, b) for t, (a, b) in zip(types, pairwise(ends), strict=True)}
    edges = [torch.empty(2, 0, dtype=torch.long)]
    for source, relation, target in data.edge_types:
        edge_index = data[source, relation, target].edge_index
        edges.append(edge_index + torch.tensor([[spans[source].start], [spans[target].start]]))
    return Data(edge_index=torch.cat(edges, 1), num_nodes=ends[-1]), spans


def sort_all(data: HeteroData, levels: dict[str, str]) -> dict[Kind, dict[Path, Attribute]]:
    """Tell what the attributes of all types are, and those of the graph."""
    check_levels(levels, data.stores)
    counts = {t: data[t].num_nodes for t in data.node_types}
    found: dict[Kind, dict[Path, Attribute]] = {None: sort_attributes(data._global_store, {}, levels, counts)}
    for t, count in counts.items():
        add_counts(data[t])
        found[t] = sort_attributes(data[t], {"node": count}, levels)
    for it in data.edge_types:
        found[it] = sort_attributes(data[it], {"edge": data[it].num_edges}, levels)
    return found


def write(
    data: HeteroData, num_parts: int, out: str | os.PathLike[str], levels: dict[str, str], method: Any, order: str,
    seed: int, overwrite: bool, progress: bool,
) -> dict[str, Any]:  # fmt: skip
    """Cut a heterogeneous graph into parts, see :func:`pyg_sar.partition`."""
    data = checked(data)
    whole, spans = homogeneous(data)
    attributes = sort_all(data, levels)
    sizes = {t: span.stop - span.start for t, span in spans.items()}
    labelled = {t: trained(attributes[t], n) | trained(attributes[None], n, t) for t, n in sizes.items()}
    whole.train_mask = torch.cat([*labelled.values()]) if spans else None
    with (
        store.create(out, overwrite) as folder,
        tqdm(total=num_parts + 2, desc="assigning nodes", disable=not progress) as bar,
    ):
        given = isinstance(method, dict)
        if given:
            method = torch.cat([torch.as_tensor(method[t]).view(-1) for t in spans])
        part = assign(whole, num_parts, method, seed)
        bar.update()
        bar.set_description("ordering rows")
        nodes = order_within(part, whole.edge_index, num_parts, seed) if order == "locality" else None
        parts = {t: part[span] for t, span in spans.items()}
        rows = {t: within(nodes, span) for t, span in spans.items()}
        bar.update()
        bar.set_description("writing parts")
        identity, infos, labels = uuid.uuid4().hex, [], []
        cuts = {
            it: split(data[it].edge_index, parts[it[0]], parts[it[2]], num_parts, rows[it[0]], rows[it[2]])
            for it in data.edge_types
        }
        ids = {t: _ids(parts[t], rows[t], num_parts) for t in spans}
        for p in range(num_parts):
            topologies = {it: next(cut) for it, cut in cuts.items()}
            own = {t: Rows(ids[t][p]) for t in spans}
            shard = HeteroShard(
                part=p,
                num_parts=num_parts,
                identity=identity,
                num_nodes=sizes,
                topologies=topologies,
                node_attrs={t: {"n_id": ids[t][p], **take(attributes[t], {"node": own[t]})} for t in spans},
                edge_attrs={it: take(attributes[it], {"edge": Rows(t.e_id)}) for it, t in topologies.items()},
                graph_attrs=take(attributes[None], own),
            )
            infos.append(write_part(folder, shard))
            labels.append(int(sum(labelled[t][ids[t][p]].sum() for t in spans)))
            bar.update()
        name = "given" if given or isinstance(method, Tensor) else method
        report = {"method": name, "order": order, "seed": seed} | report_of(infos, labels)
        types = {"node_types": list(spans), "edge_types": [list(it) for it in data.edge_types]}
        stores = [data._global_store, *data.node_stores, *data.edge_stores]
        told, report["lists"] = describe(zip(stores, attributes.values(), strict=True))
        store.write_meta(folder, {"identity": identity, "attributes": told} | types | report)
    return report


def within(nodes: Tensor | None, span: slice) -> Tensor | None:
    """Return the order of the nodes of one type among all nodes."""
    return None if nodes is None else nodes[(nodes >= span.start) & (nodes < span.stop)] - span.start


def _ids(part: Tensor, nodes: Tensor | None, num_parts: int) -> list[Tensor]:
    """Return the nodes of every part, in the order of rows."""
    nodes = torch.arange(part.numel()) if nodes is None else nodes
    return [nodes[part[nodes] == p] for p in range(num_parts)]


def checked(data: HeteroData) -> HeteroData:
    """Return a copy of valid data."""
    data = copy.copy(data)
    for t in data.node_types:
        if data[t].num_nodes is None:
            raise ValueError(f"The number of nodes of type '{t}' is unknown. Set 'data[{t!r}].num_nodes'.")
        data[t].num_nodes = int(data[t].num_nodes)
    for it in data.edge_types:
        data[it].edge_index = plain(data[it].get("edge_index"))
        check_edges(data, it)
    return data


def check_edges(data: HeteroData, it: EdgeType) -> None:
    """Raise unless the edges of a type join nodes of its types."""
    edge_index = data[it].get("edge_index")
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.long or edge_index.dim() != 2:
        raise ValueError(
            f"Edge type {it} needs an 'edge_index' [2, num_edges] of type torch.int64, got {edge_index!r}."
        )
    for row, t in ((0, it[0]), (1, it[2])):
        count = data[t].num_nodes if t in data.node_types else 0
        if edge_index.numel() and not 0 <= int(edge_index[row].min()) <= int(edge_index[row].max()) < count:
            raise ValueError(
                f"Row {row} of the 'edge_index' of {it} must hold nodes 0 to {count - 1} of type '{t}', got "
                f"{int(edge_index[row].min())} to {int(edge_index[row].max())}."
            )
