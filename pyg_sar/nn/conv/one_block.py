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
from pyg_sar.ops import reference

GRAPHS = Memo()  # of every edge_index, as long as it is unchanged
# On a GPU a graph takes as long as some layers do, and mini-batches bring a new edge_index in every step; small graphs
# never pay, where the host is what takes time (benchmarks/gpu_break_even.py).
EDGES, EDGES_AT_ONCE = 1 << 21, 1 << 22  # of an edge_index that becomes a graph, and that becomes one at the first call
CALLS = 8  # with the same edge_index, of those between, before it becomes one


def has_kernels(edge_index: Any, x: Any) -> bool:
    """Whether an ordinary ``edge_index`` can be streamed by compiled kernels, and a graph of it pays."""
    if type(edge_index) is not Tensor or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # of 'torch.func', which has no kernels
        return False
    rows = [t for t in rows_in(x) if t is not None]
    return (
        edge_index.layout == torch.strided
        and edge_index.dtype == torch.int64
        and (ops.KERNELS if edge_index.is_cpu else edge_index.is_cuda and ops.gpu() is not reference)
        and not edge_index.is_inference()  # nobody counts its changes
        and len(rows) > 0
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided for t in rows)
        and all(t.device == edge_index.device for t in rows)
        and (edge_index.is_cpu or pays(edge_index))
    )


def rows_in(x: Any) -> tuple[Any, ...]:
    """Return rows of sources and, of a pair, of destinations."""
    return tuple(x) if isinstance(x, PAIR) else (x,)


def pays(edge_index: Tensor) -> bool:
    """Whether a graph of an ``edge_index`` on a GPU pays in this call; while a CUDA graph is captured, none is made."""
    if edge_index.dim() != 2 or edge_index.size(1) < EDGES:
        return False
    calls = GRAPHS.get("calls", lambda: [0], of=edge_index)
    calls[0] += 1
    ahead = 1 if edge_index.size(1) >= EDGES_AT_ONCE else CALLS
    return calls[0] >= ahead + torch.cuda.is_current_stream_capturing()


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
