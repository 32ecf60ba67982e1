r"""Message-flow graphs: what it takes to compute some nodes exactly, layer by layer (appendix B of the SAR paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.block import ordinary_mode
from pyg_sar.distributed.group import gather_objects
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Origin, ShardedGraph, edge_ids, positions
from pyg_sar.watch import ordered, together


@dataclass(frozen=True, eq=False)
class MessageFlowGraphs:
    r"""The layers of a graph that compute some nodes, see :func:`message_flow_graphs`.

    Args:
        edge_indices (list): The edges of each layer, the first layer first. Its destinations are the first of its
            sources, and the sources of the next layer.
        node_rows (torch.Tensor): The rows of this worker that are read: the requested nodes first, in their order, then
            those that each earlier layer adds.
        edge_rows (list): For each layer, where this worker's edge tensors hold its edges.
    """

    edge_indices: list[ShardedEdgeIndex]
    node_rows: Tensor
    edge_rows: list[Tensor]


@torch.no_grad()
@ordinary_mode
def message_flow_graphs(edge_index: ShardedEdgeIndex, mask: Tensor, num_layers: int) -> MessageFlowGraphs:
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

    All workers call it together, each for its local nodes; a worker may request none. The mode (``remat``,
    ``prefetch``, ``merge()``) is that of ``edge_index``, and can be changed on each of the layers, too. Layers of
    :mod:`pyg_sar.nn` take a single tensor ``x``; those of PyG take the pair ``(x, x[:num_dst])`` one-shot, or raise.
    Tensors of edges are ``edge_attr[flow.edge_rows[k]]`` for layer ``k``; make these of ``edge_type`` once, or
    relations are grouped anew at every call. A :class:`~pyg_sar.nn.BatchNorm` in training, normalisations over all
    nodes (:class:`~pyg_sar.nn.GraphNorm` and others) and readouts take the rows that are computed, which are not those
    of the whole graph.

    Args:
        edge_index (ShardedEdgeIndex): The sharded graph, in any mode.
        mask (torch.Tensor): Which of the local nodes are requested, :math:`(n)` booleans.
        num_layers (int): The number of layers of the model.

    Returns:
        A :class:`MessageFlowGraphs`: the edges of each layer, and the rows of nodes and of edges that they read.

    Raises:
        TypeError: If ``edge_index`` is not sharded.
        ValueError: On every worker, if any worker's arguments are wrong, or ``num_layers`` differs between workers.
    """
    if not isinstance(edge_index, ShardedEdgeIndex):
        raise TypeError(
            f"Expected a sharded 'edge_index' (got {type(edge_index).__name__}). Take it from 'pyg_sar.load' or "
            f"'pyg_sar.shard(edge_index, num_nodes)'."
        )
    graph = edge_index.graph
    together(edge_index, mask)
    check_arguments(graph, mask, num_layers)
    rows = mask.nonzero().view(-1)
    layers, edges = [], []
    for _ in range(num_layers):  # from the last one
        layer, rows, places = layer_into(graph, rows)
        layers.append(ShardedEdgeIndex(layer))
        edges.append(places)
    ordered()
    return MessageFlowGraphs(layers[::-1], rows, edges[::-1])


def layer_into(graph: ShardedGraph, rows: Tensor) -> tuple[ShardedGraph, Tensor, Tensor]:
    """Return the layer whose destinations are ``rows``, its local sources and the positions of its edges."""
    exchange, n = graph.exchange, graph.num_src
    chosen = [block.choose(rows) for block in graph.blocks]
    used = rows.new_zeros(n + exchange.routes.num_halo, dtype=torch.bool)
    for block in chosen:
        used[block.source] = True
    local, halo = used[:n], used[n:]  # views
    served = exchange.exchange_used_rows(halo)
    for own in served:
        local[own.long()] = True
    # Known rows keep their places, so that rows in one order serve all layers.
    added = local.index_fill(0, rows, False).nonzero().view(-1)
    sources = torch.cat([rows, added])
    number = torch.full_like(used, -1, dtype=torch.int64)
    order = torch.cat([sources, halo.nonzero().view(-1) + n])
    number[order] = torch.arange(order.numel(), device=rows.device)
    edges = torch.cat([positions(block) for block in chosen])
    blocks, start = [], 0
    for block in chosen:
        blocks.append(block.renumber(number, slice(start, start := start + block.num_edges)))
    layer = graph.replace(
        blocks=tuple(blocks),
        num_src=sources.numel(),
        num_dst=rows.numel(),
        dst=slice(0, rows.numel()),
        exchange=exchange.restrict(halo, served, number),
        n_id=sources if graph.n_id is None else graph.n_id[sources],
        e_id=edges if graph.e_id is None else edge_ids(graph)[edges],
        origin=Origin(graph, sources),
    )
    return layer, sources, edges


def check_arguments(graph: ShardedGraph, mask: Any, num_layers: Any) -> None:
    """Raise the same error on every worker unless all can go on."""
    error, exchange = "", graph.exchange
    if graph.bipartite or graph.origin is not None:
        kind = "one between two sets of nodes" if graph.bipartite else "a layer of a message-flow graph"
        error = f"expected the 'edge_index' of a whole graph with one set of nodes (got {kind})"
    elif not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (graph.num_src,):
        found = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        error = f"expected 'mask' to hold a boolean for each of its {graph.num_src} nodes (got {found})"
    elif mask.device != graph.device:
        error = f"expected 'mask' on {graph.device} (got {mask.device})"
    elif not isinstance(num_layers, int) or num_layers < 1:
        error = f"expected 'num_layers' to be an integer of at least 1 (got {num_layers})"
    said = [(error, num_layers)] if exchange.alone else gather_objects((error, num_layers), exchange.group)
    rank = exchange.routes.rank
    errors = [f"rank {r}: {e}" for r, (e, _) in enumerate(said) if e]
    if errors:
        raise ValueError(f"[rank {rank}] Could not make the message-flow graphs. " + "; ".join(errors))
    if len({layers for _, layers in said}) > 1:
        listed = ", ".join(f"rank {r}: {layers}" for r, (_, layers) in enumerate(said))
        raise ValueError(f"[rank {rank}] The workers differ in 'num_layers' ({listed}). Make them all alike.")
