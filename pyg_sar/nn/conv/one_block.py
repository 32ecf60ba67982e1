r"""An ordinary ``edge_index`` as a graph of a single block, over which the kernels run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar import ops
from pyg_sar.distributed.shard import shard
from pyg_sar.graph import Seeds, ShardedGraph
from pyg_sar.memo import Memo
from pyg_sar.nn.replay.call import PAIR

GRAPHS = Memo()  # of every edge_index, as long as it is unchanged


def has_kernels(edge_index: Any, x: Any) -> bool:
    """Whether an ordinary ``edge_index`` can be streamed by compiled kernels."""
    if not ops.KERNELS or type(edge_index) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    rows = [t for t in (x if isinstance(x, PAIR) else (x,)) if t is not None]
    return (
        edge_index.layout == torch.strided
        and edge_index.is_cpu
        and not edge_index.is_inference()  # nobody counts its changes
        and len(rows) > 0
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.is_cpu and t.layout == torch.strided for t in rows)
    )


def sizes(x: Any, size: Any, node_dim: int) -> tuple[int, int]:
    """Return the numbers of sources and destinations, as PyG finds them."""
    src, dst = x if isinstance(x, PAIR) else (x, x)
    if dst is not None:
        num_dst = dst.size(node_dim)
    else:
        num_dst = src.size(node_dim) if size is None or size[1] is None else size[1]
    return src.size(node_dim), num_dst


def one_block(edge_index: Tensor, num_nodes: tuple[int, int]) -> ShardedGraph:
    """Return the graph of an ordinary ``edge_index``, made once as long as that lives unchanged."""

    def make() -> ShardedGraph:
        same = num_nodes[0] == num_nodes[1]
        graph = shard(edge_index.detach(), num_nodes[0] if same else num_nodes)._graph  # all of it: nothing to refuse
        return graph.replace(seeds=Seeds(None))

    return GRAPHS.get(num_nodes, make, of=edge_index)
