r"""Offline partitioning: one ``Data`` becomes a partition folder with one part for each worker."""

from __future__ import annotations

import copy
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import transforms
from torch_geometric.data import Data, Dataset, HeteroData
from tqdm import tqdm

from pyg_sar.caller import warn
from pyg_sar.csr import Lookup
from pyg_sar.data.assign import assign
from pyg_sar.data.attributes import (
    Attribute,
    Path,
    add_counts,
    alike,
    check_levels,
    describe,
    full_name,
    leaves,
    meaning,
    names_split,
    plain,
    sort_attributes,
    take,
    trained,
    whole,
)
from pyg_sar.data.order import ORDERS, order_within
from pyg_sar.data.split import split
from pyg_sar.data.store import EDGE, NODE, EdgeRows, EdgeType, NodeRows, Shard, create, write_meta, write_part
from pyg_sar.distributed.shard import check_edge_index
from pyg_sar.operations import EdgeNumbers

Kind = str | EdgeType | None  # of an attribute: that of its nodes or edges, or none
INTEGERS = (int, np.integer)


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

    .. code-block:: python

        data = torch_geometric.datasets.Planetoid("data", "Cora")[0]
        report = pyg_sar.partition(data, 4, "parts")  # then start four workers, which call pyg_sar.load("parts")

    Every node-level and edge-level tensor is cut with its nodes and edges, as PyG tells them apart
    (:meth:`~torch_geometric.data.Data.is_node_attr`). Other tensors, and numbers, strings and lists of them, are copied
    into every part. Whatever else there is, is left out with a warning.

    Lists of nodes, which are integers that are named so (``train_idx``, ``idx_train``, ``seed_ids``, ``test_nodes``,
    ``split_idx["train"]``), become lists of rows: those of a part's nodes, in the order of the original, so that
    ``out[data.train_idx]`` means on each worker what it meant before. So do lists of edges (``train_edge_idx``). What
    has as many entries and otherwise the same name is cut alike (``train_y``; ``y`` beside ``y_index``). Pairs of nodes
    (``edge_label_index``) keep the ids of the whole graph, for :func:`pyg_sar.shard_links`.

    Tensors whose size denies what their name says, and integers that may be ids or not, are errors; ``levels`` is the
    way out.

    ``num_classes`` and ``num_relations`` of the whole graph are stored, too, where ``y`` and ``edge_type`` tell them by
    the rules of PyG's :class:`~torch_geometric.data.Dataset`, unless the graph has attributes of these names.

    METIS can balance one weight per node here (``pymetis`` has no multi-constraint partitioning), so it gets a sum:
    two fifths nodes, two fifths in-edges, one fifth labelled nodes (``train_mask``), which only the loss needs. FENNEL
    balances the same. The report says how well each came out.

    FENNEL, a streaming partitioner, is for graphs that METIS has no room for. It cuts more edges than METIS, but far
    fewer than a random assignment (``benchmarks/partition.py``). Use it with :obj:`order="fennel"` or :obj:`"id"`:
    the default runs METIS on the edges within each part.

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
        order (str, optional): Order of the rows of each part: :obj:`"locality"`, :obj:`"fennel"` (by 64 clusters, with
            little memory), or :obj:`"id"` for that of the graph. (default: :obj:`"locality"`)
        seed (int, optional): Seed of METIS, FENNEL and the random assignment. (default: :obj:`0`)
        overwrite (bool, optional): Whether to replace a partition that :obj:`out` holds. (default: :obj:`False`)
        progress (bool, optional): Whether to show a progress bar. (default: :obj:`False`)

    Returns:
        The report, which is also in ``meta.json``: nodes, in-edges and labelled nodes of each part, their balance
        (largest over mean), the edges cut, in ``boundary[p][q]`` how many rows part ``p`` reads from part ``q``, and in
        ``lists`` the names of lists of nodes or edges, which are lists of rows in the parts.

    Raises:
        ValueError: If an argument or the ``edge_index`` is invalid, if an attribute cannot be what its name says or may
            hold ids, if a data set holds several graphs, or if ``out`` holds something else than a partition.
        TypeError: If ``data`` is no graph of PyG, or ``method`` a dictionary for a graph without types.
        FileExistsError: If ``out`` exists and ``overwrite`` is not set.
        ImportError: If METIS is needed and ``pymetis`` is missing.
    """
    if not isinstance(num_parts, INTEGERS) or isinstance(num_parts, bool) or num_parts < 1:
        raise ValueError(f"'num_parts' must be an integer of at least 1, got {num_parts!r}.")
    if not isinstance(seed, INTEGERS) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"'seed' must be an integer of 64 bits, got {seed!r}.")
    if order not in (*ORDERS, "id"):
        raise ValueError(f"Unknown order {order!r}, expected {', '.join(ORDERS)} or id.")
    num_parts, seed = int(num_parts), int(seed)
    method = method if isinstance(method, (str, dict)) else torch.as_tensor(method)
    if isinstance(data, Dataset):
        data = single(data)
    if isinstance(method, dict) and not isinstance(data, HeteroData):
        raise TypeError("Expected a tensor with the part of each node, got a dict, which is for a HeteroData.")
    graph = _read(data, levels or {})
    with (
        create(out, overwrite) as folder,
        tqdm(total=num_parts + 2, desc="assigning nodes", disable=not progress) as bar,
    ):
        part, nodes = _place(graph, num_parts, method, order, seed, bar)
        identity, infos, labels = uuid.uuid4().hex, [], []
        for shard in _shards(graph, part, nodes, num_parts, identity):
            infos.append(write_part(folder, shard))
            labels.append(sum(int(graph.train[t][rows.attrs["n_id"]].sum()) for t, rows in shard.nodes.items()))
            bar.update()
        name = method if isinstance(method, str) else "given"
        report = {"method": name, "order": order, "seed": seed} | _report(infos, labels)
        told, report["lists"] = describe(zip(graph.stores.values(), graph.attributes.values(), strict=True))
        types = {"node_types": [*graph.num_nodes], "edge_types": [[*it] for it in graph.edges]} if graph.typed else {}
        write_meta(folder, {"identity": identity, "attributes": told} | types | report)
    return report


@dataclass(frozen=True, eq=False)
class _Graph:
    """A valid graph by types of nodes and edges; what belongs to the whole graph has the type None."""

    stores: dict[Kind, Any]  # PyG's
    num_nodes: dict[str, int]
    edges: dict[EdgeType, Tensor]
    attributes: dict[Kind, dict[Path, Attribute]]  # in the order of the stores
    train: dict[str, Tensor]  # whether each node is in the training set

    @property
    def typed(self) -> bool:
        return EDGE not in self.edges


def _read(data: Any, levels: dict[str, str]) -> _Graph:
    """Check a graph, and tell what its attributes are, and what PyG's data sets would compute of them."""
    data = _checked(data)
    if isinstance(data, HeteroData):
        nodes, edges, rest = dict(data.node_items()), dict(data.edge_items()), data._global_store
    else:
        nodes, edges, rest = {NODE: data._store}, {EDGE: data._store}, data._store
    stores: dict[Kind, Any] = {None: rest, **nodes, **edges}
    num_nodes = {t: store.num_nodes for t, store in nodes.items()}
    check_levels(levels, data.stores)
    for store in nodes.values():
        add_counts(store)
    if isinstance(data, HeteroData):
        found = {kind: sort_attributes(store, levels, None if kind else num_nodes) for kind, store in stores.items()}
        train = {t: trained(found[t], n) | trained(found[None], n, t) for t, n in num_nodes.items()}
    else:
        every = sort_attributes(rest, levels)
        kinds = {"graph": None, "node": NODE, "edge": EDGE}
        found = {kind: {path: a for path, a in every.items() if a.level == level} for level, kind in kinds.items()}
        train = {NODE: trained(every, num_nodes[NODE])}
    return _Graph(stores, num_nodes, {it: store.edge_index for it, store in edges.items()}, found, train)


def _checked(data: Any) -> Data | HeteroData:
    """Return a graph with numbers of nodes and valid edges."""
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(
            f"Expected a torch_geometric.data.Data or HeteroData, got {type(data).__name__}, which is not supported."
        )
    data = copy.copy(data)
    typed = isinstance(data, HeteroData)
    num_nodes = {t: _count(t, store) for t, store in (data.node_items() if typed else [(NODE, data._store)])}
    for it, store in data.edge_items() if typed else [(EDGE, data._store)]:
        store.edge_index = _edges(it, store, num_nodes)
    return data


def _count(node_type: str, store: Any) -> int:
    """Set and return the number of nodes of a type."""
    count = store.num_nodes
    if count is None and node_type != NODE:
        raise ValueError(f"The number of nodes of type '{node_type}' is unknown. Set 'data[{node_type!r}].num_nodes'.")
    store.num_nodes = count = whole(0 if count is None else count)
    return count


def _edges(edge_type: EdgeType, store: Any, num_nodes: dict[str, int]) -> Tensor:
    """Return valid edges of a type."""
    of = "" if edge_type == EDGE else f" of {edge_type}"
    if isinstance(store.get("edge_index"), EdgeNumbers):
        raise ValueError("The graph is a part that 'pyg_sar.load' returned. Cut the graph that it was made of.")
    edge_index = plain(store.get("edge_index"))
    if not isinstance(edge_index, Tensor):
        raise ValueError(
            f"The graph needs an 'edge_index'{of} [2, num_edges], but holds {[*store.keys()]}. To convert 'adj_t': "
            "edge_index, data.edge_weight = torch_geometric.utils.to_edge_index(data.adj_t); data.edge_index = "
            "edge_index.flip(0). A graph of several types is a HeteroData."
        )
    for t in (edge_type[0], edge_type[2]):
        if t not in num_nodes:
            raise ValueError(
                f"Edges{of} join nodes of type '{t}', of which there are none. Set 'data[{t!r}].num_nodes'."
            )
    source, target = num_nodes[edge_type[0]], num_nodes[edge_type[2]]
    check_edge_index(edge_index, source, target, f"'edge_index'{of}")
    return edge_index


def _place(
    graph: _Graph, num_parts: int, method: str | Tensor | dict[str, Tensor], order: str, seed: int, bar: tqdm[Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the part of every node, and all nodes part by part in the order of rows, by type."""
    reads_edges = order != "id" or (isinstance(method, str) and method in ("metis", "fennel"))
    whole, spans = _joined(graph, reads_edges)
    if isinstance(method, dict):
        parts = {t: torch.as_tensor(part).view(-1) for t, part in method.items()}
        found, expected = {t: part.numel() for t, part in parts.items()}, dict(graph.num_nodes)
        if found != expected:
            raise ValueError(f"Expected 'method' to have the part of each node, by type: {expected} (got {found})")
        method = torch.cat([parts[t] for t in spans])
    part = assign(whole, num_parts, method, seed)
    bar.update()
    bar.set_description("ordering rows")
    if order == "id":
        nodes = torch.argsort(part, stable=True)
    else:
        nodes = order_within(part, whole.edge_index, num_parts, order, seed)
    rows = {NODE: nodes}
    if graph.typed:
        rows = {t: nodes[(nodes >= span.start) & (nodes < span.stop)] - span.start for t, span in spans.items()}
    bar.update()
    bar.set_description("writing parts")
    return {t: part[span] for t, span in spans.items()}, rows


def _joined(graph: _Graph, with_edges: bool) -> tuple[Data, dict[str, slice]]:
    """Return all nodes, and perhaps edges, as if they were of one type, and where the nodes of every type are."""
    ends = list(accumulate(graph.num_nodes.values(), initial=0))
    spans = {t: slice(a, b) for t, (a, b) in zip(graph.num_nodes, pairwise(ends), strict=True)}
    if graph.typed:
        edges = [torch.empty(2, 0, dtype=torch.long)]
        for (source, _, target), edge_index in graph.edges.items() if with_edges else ():
            edges.append(edge_index + torch.tensor([[spans[source].start], [spans[target].start]]))
        edge_index = torch.cat(edges, 1)
    else:
        edge_index = graph.edges[EDGE]
    train = torch.cat([torch.empty(0, dtype=torch.bool), *graph.train.values()])
    return Data(edge_index=edge_index, num_nodes=ends[-1], train_mask=train), spans


def _shards(
    graph: _Graph, part: dict[str, Tensor], nodes: dict[str, Tensor], num_parts: int, identity: str
) -> Iterator[Shard]:
    """Yield what each worker holds, one at a time."""
    cuts = {
        (s, r, t): split(edge_index, part[s], part[t], num_parts, nodes[s], nodes[t])
        for (s, r, t), edge_index in graph.edges.items()
    }
    ids = {t: nodes[t].split(part[t].bincount(minlength=num_parts).tolist()) for t in nodes}
    attributes = graph.attributes
    for p in range(num_parts):
        own, ends = {t: Lookup(ids[t][p]) for t in ids}, {}
        of_nodes, of_edges = {}, {}
        for t, rows in own.items():
            of_nodes[t] = NodeRows(graph.num_nodes[t], {"n_id": rows.n_id, **take(attributes[t], {"node": rows})})
        for it, cut in cuts.items():
            topology = next(cut)
            ends[it] = Lookup(topology.e_id)
            of_edges[it] = EdgeRows(graph.edges[it].size(1), topology, take(attributes[it], {"edge": ends[it]}))
        rest = take(attributes[None], own if graph.typed else {"node": own[NODE], "edge": ends[EDGE]})
        yield Shard(p, num_parts, identity, of_nodes, of_edges, rest, alike(attributes[None]))


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
    split: int | None = None,
) -> Data | HeteroData:
    r"""Apply PyG's transforms of edges, in the order of the arguments, and choose the type of features and a split.

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
        split (int, optional): Which column to keep of masks :math:`(|\mathcal{V}|, S)` that hold :math:`S` splits.
            (default: :obj:`None`, all)

    Returns:
        The transformed graph; what does not change shares its memory with ``data``.

    Raises:
        ValueError: If edges are none, if added self-loops would lack an edge attribute, if ``x`` cannot have that type,
            or is too large for it, if there is no such split, if a transform is asked of a heterogeneous graph that
            is not for it, or if edges come into another order, and an attribute holds ids of edges.
    """
    if isinstance(data, HeteroData) and (self_loops or gcn_norm or features is not None):
        raise ValueError("Of these, only 'to_undirected' and 'split' are for a HeteroData; apply others before.")
    if split is not None:
        data = _one_split(data, split)
    if to_undirected or self_loops or gcn_norm:
        given = data = _checked(data)
        if to_undirected:
            data = _undirected(data)
        if self_loops or gcn_norm:
            data = _with_loops(data, self_loops, gcn_norm)
        _check_edge_ids(given, data)
    if features is not None:
        x = plain(data.x)
        if not isinstance(x, Tensor) or x.layout != torch.strided or not features.is_floating_point:
            kind = x.layout if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"Node features 'x' (got {kind}) cannot be stored as {features}.")
        data = copy.copy(data)
        data.x = _converted(x, features)
    return data


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return features of another type, which must have room for them."""
    out = x.to(dtype)
    if (lost := out.isinf() & ~x.isinf()).any():
        raise ValueError(
            f"Node features 'x' reach {float(x[lost].abs().max()):.4g}, but {dtype} ends at "
            f"{torch.finfo(dtype).max:.4g}: they would become infinite. Scale them, or take a type of a wider range, "
            "such as bfloat16."
        )
    if not (x.is_floating_point() or x.is_complex() or torch.equal(out.to(x.dtype), x)):
        warn(f"Node features 'x' are integers up to {int(x.max())}, some of which {dtype} rounds: ids become others.")
    return out


def _undirected(data: Data | HeteroData) -> Data | HeteroData:
    """Return the graph with each edge in both directions; of edges that become one, PyG adds attributes up."""
    out = transforms.ToUndirected()(copy.copy(data))
    after = {store._key: store for store in out.edge_stores}
    for store in data.edge_stores:
        merged = not store.is_bipartite() and after[store._key].num_edges < 2 * store.num_edges
        every = [key for key, value in store.items() if key != "edge_index" and store.is_edge_attr(key)
                 and isinstance(value, Tensor)]  # fmt: skip
        kinds = [key for key in every if not store[key].is_floating_point()]
        if merged and every and not kinds:
            warn(f"Edges that are there in both directions, or several times, became one, whose {', '.join(every)} is "
                 "a sum. PyG's 'to_undirected(reduce=...)' combines them otherwise.")  # fmt: skip
        if merged and kinds:
            raise ValueError(
                f"Edges that are there in both directions would become one, whose {', '.join(kinds)} would be a sum. "
                "Remove it from the graph, or make it undirected before with PyG's 'to_undirected(reduce=...)'."
            )
    return out


def _with_loops(data: Data, self_loops: bool, gcn_norm: bool) -> Data:
    """Return the graph with self-loops, and perhaps normalised weights."""
    edges = {key: data.__cat_dim__(key, data[key]) for key in data.edge_attrs() if isinstance(data[key], Tensor)}
    before = data.edge_index
    if self_loops:
        data = transforms.AddRemainingSelfLoops()(copy.copy(data))
    if gcn_norm:
        data = copy.copy(data)
        if isinstance(weight := data.get("edge_weight"), Tensor) and not weight.is_floating_point():
            data.edge_weight = weight.float()  # of an adjacency of zeros and ones
        data = transforms.GCNNorm()(data)
    # PyG puts self-loops at the end, also those that were there before.
    moved = not torch.equal(before, data.edge_index)
    stay = [key for key in edges if moved and key not in ("edge_index", "edge_weight")]
    lost = [key for key, dim in edges.items() if key in stay or data[key].size(dim) != data.num_edges]
    if lost:
        raise ValueError(
            f"The added self-loops have no {', '.join(lost)}, which every edge must have, in the order of edges with "
            "loops. Remove it from the graph, or add loops yourself with PyG's 'AddSelfLoops(attr=...)'."
        )
    return data


def _check_edge_ids(before: Data | HeteroData, after: Data | HeteroData) -> None:
    """Raise if edges have other numbers than before, and an attribute holds numbers of edges."""
    edges = {store._key: store.edge_index for store in after.edge_stores}
    if all(torch.equal(store.edge_index, edges[store._key]) for store in before.edge_stores):
        return
    names = [full_name(store, ".".join(path)) for store in before.stores for key, value in store.items()
             for path, leaf in leaves((key,), plain(value)) if meaning(store, path, leaf)[0] == "edge_ids"]  # fmt: skip
    if names:
        raise ValueError(
            f"{', '.join(names)} should hold ids of edges by its name, but PyG's transforms put edges into another "
            "order. Apply them before you number edges, or give each edge a mask."
        )


def _one_split(data: Data | HeteroData, column: int) -> Data | HeteroData:
    """Keep one column of the masks of several splits; a mask of one dimension is for all of them."""
    data = copy.copy(data)
    masks = [(store, key, plain(store[key])) for store in data.node_stores for key in store
             if key.endswith("_mask") and names_split(key)]  # fmt: skip
    masks = [found for found in masks if isinstance(found[2], Tensor) and found[2].dim() == 2]
    splits = min((mask.size(1) for *_, mask in masks), default=0)
    if not 0 <= column < splits:
        told = f"has {splits} splits, numbered from 0" if splits else "has no mask of several splits"
        raise ValueError(f"Got split={column}, but the graph {told}. Take one of them, or leave it out.")
    for store, key, mask in masks:
        store[key] = mask[:, column].clone()
    return data


def _report(infos: list[dict[str, Any]], labelled: list[int]) -> dict[str, Any]:
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
