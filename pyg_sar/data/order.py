r"""The order of rows within a part: neighbors near each other, so that gathered rows are still in a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_sar.data.fennel import fennel
from pyg_sar.data.metis import metis
from pyg_sar.distributed.shard import check_edge_index

# Twice or half as many hardly change what benchmarks/locality.py counts.
LEAF = 32
CLUSTERS = 64  # of FENNEL: as many as there may be chunks of rows at home


def locality_order(edge_index: Tensor, num_nodes: int, seed: int = 0) -> Tensor:
    r"""Order nodes such that sums over in-edges find most of their source rows in a cache.

    The graph is bisected recursively, until 32 nodes are left, with the multilevel scheme of
    `"A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs"
    <https://doi.org/10.1137/S1064827595287997>`_ (METIS), and the nodes are listed leaf by leaf. Clusters of every
    size are then ranges of the order. So there is no cache size to choose: the same order serves all levels of the
    memory hierarchy and all widths of rows.

    To apply it in one process:

    .. code-block:: python

        order = pyg_sar.locality_order(edge_index, num_nodes)
        x, y = x[order], y[order]
        edge_index = order.argsort()[edge_index]

    The edges count in both directions, without self-loops and duplicates. Peak memory is 9 to 18
    times the bytes of ``edge_index``, as in :func:`pyg_sar.partition` by METIS.

    Args:
        edge_index (torch.Tensor): The edges :math:`(2, |\mathcal{E}|)`.
        num_nodes (int): The number of nodes :math:`|\mathcal{V}|`.
        seed (int, optional): Seed of METIS; the same seed gives the same order. (default: :obj:`0`)

    Returns:
        The old number of every node in the new order :math:`(|\mathcal{V}|)`, a permutation.

    Raises:
        ValueError: If ``edge_index`` is not of this shape, of type ``torch.int64``, or holds other nodes.
        ImportError: If ``pymetis`` is missing.
    """
    check_edge_index(edge_index, num_nodes, num_nodes)
    num_leaves = -(-num_nodes // LEAF)
    leaf = metis(edge_index, num_nodes, num_leaves, seed, recursive=True) if num_leaves > 1 else None
    order = torch.arange(num_nodes) if leaf is None else torch.argsort(leaf, stable=True)
    return order.to(edge_index.device)


def fennel_order(edge_index: Tensor, num_nodes: int, seed: int = 0) -> Tensor:
    """Order nodes by clusters of FENNEL: for graphs that METIS has no room for."""
    clusters = fennel(edge_index, torch.ones(num_nodes, dtype=torch.int64), CLUSTERS, seed)
    return clusters.argsort(stable=True)


# What the rows of a part can be ordered by, besides their ids.
ORDERS: dict[str, Callable[[Tensor, int, int], Tensor]] = {"locality": locality_order, "fennel": fennel_order}


def order_within(part: Tensor, edge_index: Tensor, num_parts: int, order: str = "locality", seed: int = 0) -> Tensor:
    """Return all nodes part by part, those of a part in one of the ``ORDERS``, of the edges within it."""
    row = torch.empty_like(part, dtype=torch.long)
    nodes = []
    for p in range(num_parts):
        mine = part == p
        own = mine.nonzero().view(-1)
        row[own] = torch.arange(own.numel())
        inside = row[edge_index[:, mine[edge_index].all(0)]]
        nodes.append(own[ORDERS[order](inside, own.numel(), seed)])
    return torch.cat(nodes)
