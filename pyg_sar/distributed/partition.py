r"""Offline partitioning: one ``Data`` becomes a partition folder with one part for each worker."""

from __future__ import annotations

import copy
import os
import sys
import uuid
from typing import Any

import torch
from torch import Tensor
from torch_geometric import transforms
from torch_geometric.data import Data, Dataset, HeteroData
from tqdm import tqdm

from pyg_sar.distributed import store
from pyg_sar.distributed.attributes import (
    Attribute,
    Path,
    Rows,
    add_counts,
    check_levels,
    describe,
    in_any,
    plain,
    sort_attributes,
    take,
    trained,
)
from pyg_sar.distributed.metis import metis
from pyg_sar.distributed.order import order_within
from pyg_sar.distributed.split import split
from pyg_sar.distributed.streaming import fennel


def partition(
    data: Data | HeteroData | Dataset,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    levels: dict[str, str] | None = None,
    method: str | Tensor | dict[str, Tensor] = "metis",
    order: str = "locality",
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    r"""Cut a graph into parts and write them into a partition folder.

    Every node-level and edge-level tensor travels with its nodes and edges, as PyG tells them apart
    (:meth:`~torch_geometric.data.Data.is_node_attr`). Other tensors, and numbers, strings and lists of them, are copied
    into every part. Whatever else there is, is left out with a warning.

    Lists of nodes, which are integers that are named so (``train_idx``, ``idx_train``, ``seed_ids``, ``test_nodes``,
    ``split_idx["train"]``), become lists of rows: those of a part's own nodes, in the order of the original, so that
    ``out[data.train_idx]`` means on each worker what it meant before. So do lists of edges (``train_edge_idx``). What
    has as many entries and otherwise the same name is cut alike (``train_y``; ``y`` beside ``y_index``). Pairs of nodes
    (``edge_label_index``) keep the ids of the whole graph, with a warning, for :func:`pyg_sar.links`.

    Tensors whose size denies what their name says, and integers that may be ids or not, are errors; ``levels`` is the
    way out.

    ``num_classes`` and ``num_relations`` of the whole graph are stored, too, where ``y`` and ``edge_type`` tell them by
    the rules of PyG's :class:`~torch_geometric.data.Dataset`, unless the graph has attributes of these names.

    METIS can balance one weight per node here (``pymetis`` has no multi-constraint partitioning), so it gets a sum:
    two fifths nodes, two fifths in-edges, one fifth labelled nodes (``train_mask``). FENNEL balances the same. The
    report says how well each came out.

    FENNEL, a streaming partitioner, is for graphs that METIS has no room for. It cuts more edges than METIS, but far
    fewer than a random assignment (``benchmarks/partition.py``). Use it with :obj:`order="id"`: the other order runs
    METIS on the edges within each part.

    The rows of a part are in the order of :func:`pyg_sar.locality_order`, so that layers find most of the rows they
    gather in a cache. ``n_id`` of the loaded data tells which node each row is.

    Peak memory, above ``data`` itself and the attributes of one part, is 18 times the bytes of ``edge_index`` where
    METIS sees all edges (9 to 10 times if both directions of every edge are stored): to partition, or to order the rows
    of a single part. With other methods and :obj:`order="id"` it is 1.1 to 1.2 times, 2.6 times for a single part.
    ``benchmarks/partition.py`` measures it on random graphs, METIS's worst case, of 1M nodes and 10M edges, in 8 parts
    unless single.

    Args:
        data (torch_geometric.data.Data, HeteroData or Dataset): The graph, or a data set that holds one; it is not
            modified. All node types of a heterogeneous graph are assigned together, and their weights are balanced
            together.
        num_parts (int): Number of parts; some stay empty if there are more than nodes.
        out (str): The folder to write. Nothing is left there if this function fails.
        levels (dict, optional): What attributes are, by name (``paper.year``, ``paper__cites__paper.time`` in a
            heterogeneous graph), where size and name do not tell: :obj:`"node"` or :obj:`"edge"` (a row for each),
            :obj:`"graph"` (the same in all parts), :obj:`"node_ids"` or :obj:`"edge_ids"`. (default: :obj:`None`)
        method (str or torch.Tensor, optional): :obj:`"metis"`, :obj:`"fennel"` (little memory), :obj:`"random"`,
            :obj:`"contiguous"` (equal ranges of nodes), or an integer tensor :obj:`[num_nodes]` with the part of each
            node, by node type for a heterogeneous graph. (default: :obj:`"metis"`)
        order (str, optional): Order of the rows of each part: :obj:`"locality"`, or :obj:`"id"` for that of the graph.
            (default: :obj:`"locality"`)
        seed (int, optional): Seed of METIS, FENNEL and the random assignment. (default: :obj:`0`)
        overwrite (bool, optional): Whether to replace a partition that :obj:`out` holds. (default: :obj:`False`)
        progress (bool, optional): Whether to show a progress bar. (default: :obj:`False`)

    Returns:
        The report, which is also in ``meta.json``: nodes, in-edges and labelled nodes of each part, their balance
        (largest over mean), the edges cut, in ``boundary[p][q]`` how many rows part ``p`` reads from part ``q``, and in
        ``lists`` the names of lists of nodes or edges, which are lists of rows in the parts.
    """
    if not isinstance(num_parts, int) or num_parts < 1:
        raise ValueError(f"'num_parts' must be an integer of at least 1, got {num_parts!r}.")
    if order not in ("locality", "id"):
        raise ValueError(f"Unknown order {order!r}, expected locality or id.")
    if isinstance(data, Dataset):
        data = single(data)
    if isinstance(data, HeteroData):
        from pyg_sar.distributed.partition_hetero import write  # which needs what is here

        return write(data, num_parts, out, levels or {}, method, order, seed, overwrite, progress)
    if isinstance(method, dict):
        raise TypeError("Expected a tensor with the part of each node, got a dict, which is for a HeteroData.")
    data = _checked(data)
    attributes = _attributes(data, levels or {})
    with (
        store.create(out, overwrite) as folder,
        tqdm(total=num_parts + 2, desc="assigning nodes", disable=not progress) as bar,
    ):
        part = assign(data, num_parts, method, seed)
        bar.update()
        bar.set_description("ordering rows")
        nodes = order_within(part, data.edge_index, num_parts, seed) if order == "locality" else None
        bar.update()
        bar.set_description("writing parts")
        labelled, identity = _labelled(data), uuid.uuid4().hex
        infos, labels = [], []
        for p, topology in enumerate(split(data.edge_index, part, part, num_parts, nodes)):
            rows = {"node": Rows(topology.src_id), "edge": Rows(topology.e_id)}
            shard = store.Shard(
                part=p,
                num_parts=num_parts,
                identity=identity,
                num_nodes=data.num_nodes,
                num_edges=data.num_edges,
                topology=topology,
                node_attrs=take(attributes, rows, "node"),
                edge_attrs=take(attributes, rows, "edge"),
                graph_attrs=take(attributes, rows, "graph"),
            )
            infos.append(store.write_part(folder, shard))
            labels.append(int(labelled[topology.src_id].sum()))
            bar.update()
        name = "given" if isinstance(method, Tensor) else method
        report = {"method": name, "order": order, "seed": seed} | report_of(infos, labels)
        told, report["lists"] = describe([(data._store, attributes)])
        store.write_meta(folder, {"identity": identity, "attributes": told} | report)
    return report


def single(dataset: Dataset) -> Data | HeteroData:
    """Return the only graph of a data set, with the number of classes that the data set tells.

    Raises:
        ValueError: If the data set holds more graphs than one, or none.
    """
    if len(dataset) != 1:
        raise ValueError(
            f"'{type(dataset).__name__}' holds {len(dataset)} graphs, expected a data set of one graph. Choose one of "
            "them, or make one graph of them: torch_geometric.data.Batch.from_data_list(list(dataset))."
        )
    data = copy.copy(dataset[0])
    # Where labels are not integers, PyG counts their values, with a warning: 'add_counts' does that only if it may.
    y = None if isinstance(data, HeteroData) else data.get("y", data.get("train_y"))
    if isinstance(y, Tensor) and not y.is_floating_point() and "num_classes" not in data and dataset.num_classes:
        data.num_classes = dataset.num_classes
    return data


def prepare(
    data: Data | HeteroData,
    *,
    to_undirected: bool = False,
    self_loops: bool = False,
    gcn_norm: bool = False,
    features: torch.dtype | None = None,
) -> Data | HeteroData:
    """Apply PyG's transforms that change edges, and choose the type of features, in the order of the arguments.

    Args:
        data (torch_geometric.data.Data): The graph; it is not modified.
        to_undirected (bool, optional): Whether to add reverse edges and merge duplicates
            (:class:`~torch_geometric.transforms.ToUndirected`). (default: :obj:`False`)
        self_loops (bool, optional): Whether to add a self-loop to every node without one
            (:class:`~torch_geometric.transforms.AddRemainingSelfLoops`). (default: :obj:`False`)
        gcn_norm (bool, optional): Whether to add self-loops and store the normalised :obj:`edge_weight`
            (:class:`~torch_geometric.transforms.GCNNorm`), for layers with :obj:`normalize=False`.
            (default: :obj:`False`)
        features (torch.dtype, optional): The floating-point type to store the node features :obj:`x` in;
            :obj:`torch.bfloat16` halves their memory and bytes. Train on them in a model of that type or under
            :class:`torch.autocast`. (default: :obj:`None`, the type that they have)
    """
    if isinstance(data, HeteroData) and (self_loops or gcn_norm or features is not None):
        raise ValueError("Of the transforms, only 'to_undirected' is for a HeteroData; apply others before.")
    if to_undirected:
        data = transforms.ToUndirected()(copy.copy(data))
    if isinstance(data, HeteroData):
        return data
    edges = {key: data.__cat_dim__(key, data[key]) for key in data.edge_attrs() if isinstance(data[key], Tensor)}
    if self_loops:
        data = transforms.AddRemainingSelfLoops()(copy.copy(data))
    if gcn_norm:
        data = transforms.GCNNorm()(copy.copy(data))
    lost = [key for key, dim in edges.items() if data[key].size(dim) != data.num_edges]
    if lost:
        raise ValueError(
            f"The added self-loops have no {', '.join(lost)}, which every edge must have. Remove it from the graph, or "
            "add loops yourself with PyG's 'AddSelfLoops(attr=...)'."
        )
    if features is not None:
        x = plain(data.x)
        if not isinstance(x, Tensor) or not features.is_floating_point:
            raise ValueError(f"Node features 'x' (got {type(x).__name__}) cannot be stored as {features}.")
        data = copy.copy(data)
        data.x = x.to(features)
    return data


def assign(data: Data, num_parts: int, method: str | Tensor = "metis", seed: int = 0) -> Tensor:
    """Return the part of every node, an ``int32`` tensor ``[num_nodes]``; see :func:`partition`."""
    num_nodes = data.num_nodes
    if isinstance(method, Tensor):
        return _given(method, num_nodes, num_parts)
    if method in ("metis", "fennel"):
        return _balanced(data, num_parts, method, seed)
    if method == "random":
        return (torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed)) % num_parts).int()
    if method == "contiguous":
        return (torch.arange(num_nodes) * num_parts // max(num_nodes, 1)).int()
    raise ValueError(f"Unknown method {method!r}, expected metis, fennel, random, contiguous, or a tensor [num_nodes].")


def _given(part: Tensor, num_nodes: int, num_parts: int) -> Tensor:
    whole = not part.is_floating_point() and not part.is_complex() and part.dtype != torch.bool
    if not whole or part.shape != (num_nodes,):
        raise ValueError(
            f"An assignment must hold one integer for each node, shape [{num_nodes}], got {part.dtype} of shape "
            f"{list(part.shape)}."
        )
    if num_nodes and (part.min() < 0 or part.max() >= num_parts):
        raise ValueError(
            f"An assignment to {num_parts} parts must hold numbers from 0 to {num_parts - 1}, got {int(part.min())} to "
            f"{int(part.max())}. Correct it, or change the number of parts."
        )
    return part.cpu().int()


def _balanced(data: Data, num_parts: int, method: str, seed: int) -> Tensor:
    if num_parts == 1 or data.num_nodes <= num_parts:
        return assign(data, num_parts, "contiguous")
    weights = balanced_weights(data)
    if method == "fennel":
        return fennel(data.edge_index, weights, num_parts, seed)
    part = metis(data.edge_index, data.num_nodes, num_parts, seed, weights.numpy())
    return assign(data, num_parts, "random", seed) if part is None else part


def balanced_weights(data: Data) -> Tensor:
    """Return what METIS and FENNEL balance: each node's weighted shares of the nodes, in-edges and labels."""
    degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    weight = torch.full((data.num_nodes,), 2.0, dtype=torch.double)
    for count, importance in ((degree, 2), (_labelled(data), 1)):
        weight += importance * count / count.double().mean().clamp(min=1e-9)
    return (100 * weight).round().long()


def _labelled(data: Data) -> Tensor:
    """Return whether each node is in the training set, of any split if there are several."""
    mask = plain(data.get("train_mask"))
    if mask is None or mask.dtype != torch.bool:
        return torch.zeros(data.num_nodes, dtype=torch.bool)
    return in_any(mask)


def _checked(data: Data) -> Data:
    """Return a copy of valid data."""
    if not isinstance(data, Data):
        raise TypeError(
            f"Expected a torch_geometric.data.Data or HeteroData, got {type(data).__name__}, which is not supported."
        )
    data, edge_index = copy.copy(data), plain(data.edge_index)
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"The graph needs an 'edge_index' [2, num_edges], but holds {data.keys()}. To convert 'adj_t': "
            "data.edge_index = torch_geometric.utils.to_edge_index(data.adj_t)[0].flip(0)."
        )
    if edge_index.dtype != torch.long or edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            "'edge_index' must be torch.int64 of shape [2, num_edges], got "
            f"{edge_index.dtype} of shape {list(edge_index.shape)}."
        )
    data.edge_index, data.num_nodes = edge_index, int(data.num_nodes or 0)
    if edge_index.numel() and (edge_index.min() < 0 or edge_index.max() >= data.num_nodes):
        raise ValueError(
            f"'edge_index' must hold nodes 0 to {data.num_nodes - 1}, got {int(edge_index.min())} to "
            f"{int(edge_index.max())}. Correct it, or set 'data.num_nodes'."
        )
    return data


def _attributes(data: Data, levels: dict[str, str]) -> dict[Path, Attribute]:
    """Tell what the attributes are, and those that PyG's data sets would compute of all labels and edge types."""
    check_levels(levels, [data._store])
    add_counts(data._store)
    found = sort_attributes(data._store, {"node": data.num_nodes, "edge": data.num_edges}, levels)
    data.train_mask = trained(found, data.num_nodes)  # which is balanced
    return found


def report_of(infos: list[dict[str, Any]], labelled: list[int]) -> dict[str, Any]:
    """Return what :func:`partition` does, of the parts' counts."""
    counts = [info["counts"] for info in infos]
    edges = [sum(count["edges"]) for count in counts]
    sizes = {"nodes": [count["nodes"] for count in counts], "edges": edges, "labelled": labelled}
    cut = sum(edges) - sum(count["edges"][p] for p, count in enumerate(counts))
    boundary = [count["rows_in"] for count in counts]
    return {
        "num_parts": len(infos),
        "num_nodes": sum(sizes["nodes"]),
        "num_edges": sum(edges),
        **sizes,
        "balance": {key: max(size) * len(size) / sum(size) if any(size) else 1.0 for key, size in sizes.items()},
        "cut": cut,
        "cut_fraction": cut / max(sum(edges), 1),
        "boundary": boundary,
        "boundary_rows": sum(map(sum, boundary)),
        "bytes": [sum(file["bytes"] for file in info["files"].values()) for info in infos],
    }


if __name__ == "__main__":
    from pyg_sar.__main__ import main

    sys.exit(main(["partition", *sys.argv[1:]]))
