r"""Message-flow graphs: what it takes to compute some nodes exactly, layer by layer (appendix B of the SAR paper)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from pyg_sar.block import Block, ordinary_mode
from pyg_sar.distributed.group import gather_objects
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Origin, ShardedGraph, edge_ids, positions
from pyg_sar.watch import ordered, together

Edges = TypeVar("Edges")
Rows = TypeVar("Rows")
EdgeType = tuple[str, str, str]


@dataclass(frozen=True, eq=False)
class MessageFlowGraphs(Generic[Edges, Rows]):
    r"""The layers of a graph that compute some nodes, see :func:`message_flow_graphs`.

    Of a heterogeneous graph each of these is a dictionary: by edge type, and ``node_rows`` by node type.

    Args:
        edge_indices (list): The edges of each layer, the first layer first. Its destinations are the first of its
            sources, and the sources of the next layer.
        node_rows (torch.Tensor): The rows of this worker that are read: the requested nodes first, in their order, then
            those that each earlier layer adds.
        edge_rows (list): For each layer, where this worker's edge tensors hold its edges.
    """

    edge_indices: list[Edges]
    node_rows: Rows
    edge_rows: list[Rows]


@overload
def message_flow_graphs(
    edge_index: ShardedEdgeIndex, mask: Tensor, num_layers: int
) -> MessageFlowGraphs[ShardedEdgeIndex, Tensor]: ...


@overload
def message_flow_graphs(
    edge_index: dict[EdgeType, ShardedEdgeIndex], mask: dict[str, Tensor], num_layers: int
) -> MessageFlowGraphs[dict[EdgeType, ShardedEdgeIndex], dict[Any, Tensor]]: ...


@torch.no_grad()
@ordinary_mode
def message_flow_graphs(edge_index: Any, mask: Any, num_layers: int) -> MessageFlowGraphs[Any, Any]:
    r"""Find the rows and edges of each layer that the outputs of some nodes depend on.

    A model of these layers then computes the same numbers for these nodes as on the whole graph, without computing
    others in vain. It pays where few nodes are requested, layers are few and the graph is sparse; their neighbourhood
    soon is the whole graph.

    .. code-block:: python

        flow = pyg_sar.message_flow_graphs(data.edge_index, data.train_mask, num_layers=len(convs))
        features = data.x[flow.node_rows]
        flow.edge_indices[0].cache_features(features)  # if they never change

        x = features  # in each epoch the same tensor
        for k, conv in enumerate(convs):
            x = conv(x, flow.edge_indices[k])
            x = x.relu() if k + 1 < len(convs) else x
        losses = F.cross_entropy(x, data.y[data.train_mask], reduction="none")

    A heterogeneous graph has a dictionary of each, by edge type or node type. Each layer has the edge types of which
    the outputs depend on any, by their types of nodes:

    .. code-block:: python

        paper = data["paper"]
        flow = pyg_sar.message_flow_graphs(data.edge_index_dict, {"paper": paper.train_mask}, num_layers=len(convs))
        x = {t: data[t].x[rows] for t, rows in flow.node_rows.items()}
        for k, conv in enumerate(convs):  # HeteroConv, HGTConv
            x = conv(x, flow.edge_indices[k])
        losses = F.cross_entropy(x["paper"], paper.y[paper.train_mask], reduction="none")

    All workers call it together, each for its local nodes; a worker may request none. The mode (``remat``,
    ``prefetch``, ``merge()``) is that of ``edge_index``, and can be changed on each of the layers, too. Layers of
    :mod:`pyg_sar.nn`, and converted ones that take pairs of rows, take a single tensor ``x``; those of PyG take the
    pair ``(x, x[:num_dst])`` one-shot, or raise. Tensors of edges are ``edge_attr[flow.edge_rows[k]]`` for layer ``k``;
    make these of ``edge_type`` once, or relations are grouped anew at every call. A :class:`~pyg_sar.nn.BatchNorm` in
    training, normalisations over all nodes (:class:`~pyg_sar.nn.GraphNorm` and others) and readouts take the rows that
    are computed, which are not those of the whole graph.

    Args:
        edge_index (ShardedEdgeIndex): The sharded graph, in any mode; of a heterogeneous one a dictionary by edge type.
        mask (torch.Tensor): Which of the local nodes are requested, :math:`(n)` booleans; of a heterogeneous graph a
            dictionary by node type, without those of which none are.
        num_layers (int): The number of layers of the model.

    Returns:
        A :class:`MessageFlowGraphs`: the edges of each layer, and the rows of nodes and of edges that they read.

    Raises:
        TypeError: If ``edge_index`` is not sharded.
        ValueError: On every worker, if any worker's arguments are wrong, or differ from those of others.
    """
    typed = isinstance(edge_index, dict)
    edges: dict[Any, Any] = edge_index if typed else {None: edge_index}
    for it in edges.values() or [None]:
        if not isinstance(it, ShardedEdgeIndex):
            raise TypeError(
                f"Expected a sharded 'edge_index', or a dictionary of these by edge type (got "
                f"{type(it).__name__}{' in a dictionary' if typed and edges else ''}). Take it from 'pyg_sar.load' or "
                f"'pyg_sar.shard(edge_index, num_nodes)'."
            )
    together(edge_index, mask)
    graphs = {key: it.graph for key, it in edges.items()}
    check_arguments(graphs, mask, num_layers)
    masks = mask if typed else {None: mask}
    rows = {kind: of_kind.nonzero().view(-1) for kind, of_kind in masks.items()}
    layers, places = [], []
    for _ in range(num_layers):  # from the last one
        found, rows, edge_rows = layer_into({key: g for key, g in graphs.items() if ends_of(key)[1] in rows}, rows)
        layers.append({key: ShardedEdgeIndex(graph) for key, graph in found.items()})
        places.append(edge_rows)
    ordered()
    if typed:
        return MessageFlowGraphs(layers[::-1], rows, places[::-1])
    return MessageFlowGraphs([it[None] for it in layers[::-1]], rows[None], [it[None] for it in places[::-1]])


def ends_of(key: Any) -> tuple[Any, Any]:
    """Return the types of the sources and of the destinations of an edge type; None if there is one type of nodes."""
    return (None, None) if key is None else (key[0], key[2])


def num_nodes(graphs: dict[Any, ShardedGraph]) -> Iterator[tuple[Any, int]]:
    """Yield the types of nodes at both ends of each edge type, and how many local rows they have there."""
    for key, graph in graphs.items():
        yield from zip(ends_of(key), (graph.num_src, graph.num_dst), strict=True)


def layer_into(
    graphs: dict[Any, ShardedGraph], rows: dict[Any, Tensor]
) -> tuple[dict[Any, ShardedGraph], dict[Any, Tensor], dict[Any, Tensor]]:
    """Return the layer whose destinations are ``rows``, by edge type, its local sources by node type, and the positions
    of its edges by edge type.
    """
    needs: dict[Any, Need] = {}
    read: dict[Any, Tensor] = {}
    for key, graph in graphs.items():
        src, dst = ends_of(key)
        needs[key] = Need.of(graph, rows[dst])
        read[src] = needs[key].local | read[src] if src in read else needs[key].local
    # Known rows keep their places, so that rows in one order serve all layers.
    sources = dict(rows)
    for kind, used in read.items():
        known = rows.get(kind, used.new_empty(0, dtype=torch.int64))
        sources[kind] = torch.cat([known, used.index_fill(0, known, False).nonzero().view(-1)])
    layers, edges = {}, {}
    for key, graph in graphs.items():
        src, dst = ends_of(key)
        layers[key], edges[key] = needs[key].layer(graph, sources[src], rows[dst].numel(), sources[dst].numel())
    return layers, sources, edges


@dataclass(frozen=True, eq=False)
class Need:
    """What some destinations of a graph read.

    Args:
        blocks: The edges that end at them.
        local: Which local sources any worker reads for its own.
        halo: Which halo rows are read here.
        served: The local rows that each worker reads.
    """

    blocks: list[Block]
    local: Tensor
    halo: Tensor
    served: list[Tensor]

    @classmethod
    def of(cls, graph: ShardedGraph, rows: Tensor) -> Need:
        """Find it, together with the other workers."""
        n, chosen = graph.num_src, [block.choose(rows) for block in graph.blocks]
        used = rows.new_zeros(n + graph.exchange.routes.num_halo, dtype=torch.bool)
        for block in chosen:
            used[block.source] = True
        local, halo = used[:n], used[n:]  # views
        served = graph.exchange.exchange_used_rows(halo)
        for own in served:
            local[own.long()] = True
        return cls(chosen, local, halo, served)

    def layer(self, graph: ShardedGraph, sources: Tensor, num_dst: int, given: int) -> tuple[ShardedGraph, Tensor]:
        """Return the graph of these destinations, the first ones of ``given`` rows, and of ``sources``, which others
        may read beside them; and the positions of its edges.
        """
        n = graph.num_src
        number = torch.full((n + self.halo.numel(),), -1, device=sources.device)
        order = torch.cat([sources, self.halo.nonzero().view(-1) + n])
        number[order] = torch.arange(order.numel(), device=sources.device)
        edges = torch.cat([positions(block) for block in self.blocks])
        blocks, start = [], 0
        for block in self.blocks:
            blocks.append(block.renumber(number, slice(start, start := start + block.num_edges)))
        layer = graph.replace(
            blocks=tuple(blocks),
            num_src=sources.numel(),
            num_dst=num_dst,
            dst=None if graph.bipartite else slice(0, num_dst),
            exchange=graph.exchange.restrict(self.halo, self.served, number),
            n_id=sources if graph.n_id is None else graph.n_id[sources],
            e_id=edges if graph.e_id is None else edge_ids(graph)[edges],
            origin=Origin(graph, sources, given=given),
        )
        return layer, edges


def check_arguments(graphs: dict[Any, ShardedGraph], mask: Any, num_layers: Any) -> None:
    """Raise the same error on every worker unless all can go on."""
    exchange = next(iter(graphs.values())).exchange
    error = wrong_graph(graphs) or wrong_mask(graphs, mask)
    if not error and (not isinstance(num_layers, int) or num_layers < 1):
        error = f"expected 'num_layers' to be an integer of at least 1 (got {num_layers})"
    mine = error, num_layers, list(graphs), sorted(map(str, mask)) if isinstance(mask, dict) else None
    said = [mine] if exchange.alone else gather_objects(mine, exchange.group)
    rank = exchange.routes.rank
    errors = [f"rank {r}: {e}" for r, (e, *_) in enumerate(said) if e]
    if errors:
        raise ValueError(f"[rank {rank}] Could not make the message-flow graphs. " + "; ".join(errors))
    for k, what in enumerate(("'num_layers'", "the edge types", "the node types of 'mask'"), 1):
        values = [it[k] for it in said]
        if any(value != values[0] for value in values):
            listed = ", ".join(f"rank {r}: {value}" for r, value in enumerate(values))
            raise ValueError(f"[rank {rank}] The workers differ in {what} ({listed}). Make them all alike.")


def wrong_graph(graphs: dict[Any, ShardedGraph]) -> str:
    """Return what is wrong with the graphs, if anything is."""
    for key, graph in graphs.items():
        whole = "the 'edge_index' of a whole graph" if key is None else f"that of a whole graph for {key!r}"
        if key is not None and not (isinstance(key, tuple) and len(key) == 3):
            return f"expected edge types (source type, relation, destination type) in 'edge_index' (got {key!r})"
        src, dst = ends_of(key)
        if graph.origin is not None:
            return f"expected {whole} (got a layer of a message-flow graph)"
        if graph.bipartite != (src != dst):
            sets = ("with one set of nodes", "between two sets of nodes")
            return f"expected {whole} {sets[src != dst]} (got one {sets[graph.bipartite]})"
    counts: dict[Any, int] = {}
    for kind, count in num_nodes(graphs):
        if counts.setdefault(kind, count) != count:
            return f"expected graphs of the same nodes (got {counts[kind]} and {count} of type {kind!r})"
    return ""


def wrong_mask(graphs: dict[Any, ShardedGraph], mask: Any) -> str:
    """Return what is wrong with the mask, or with those of types of nodes, if anything is."""
    known, device, typed = dict(num_nodes(graphs)), next(iter(graphs.values())).device, None not in graphs
    if typed and not isinstance(mask, dict):
        return f"expected 'mask' to be a dictionary by node type (got {type(mask).__name__})"
    if typed and not mask:
        return "expected a mask of some node type in 'mask' (got none)"
    if typed and not {ends_of(key)[1] for key in graphs} & {*mask} and {*mask} <= {*known}:
        return f"expected edges that end at nodes of the types in 'mask' (got none at {', '.join(map(repr, mask))})"
    for kind, of_kind in mask.items() if typed else [(None, mask)]:
        if kind not in known:
            return f"expected masks of node types {', '.join(map(repr, known))} in 'mask' (got one of {kind!r})"
        name, count = f"'mask[{kind!r}]'" if typed else "'mask'", known[kind]
        if not isinstance(of_kind, Tensor):
            return f"expected {name} to be a tensor of {count} booleans (got {type(of_kind).__name__})"
        if of_kind.dtype != torch.bool or of_kind.shape != (count,):
            found = f"{of_kind.dtype} of shape {list(of_kind.shape)}"
            return f"expected {name} to hold a boolean for each of its {count} nodes (got {found})"
        if of_kind.device != device:
            return f"expected {name} on {device} (got {of_kind.device})"
    return ""
