r"""What no pipeline of layers can do, and what its workers must have in common."""

from __future__ import annotations

import inspect
import warnings
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.blocks import even_cut, packed
from pyg_sar.caller import warn
from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.distributed.stages import Stages
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph

# Normalisations whose statistics are those of all rows, by the names of their classes or of what these derive from.
OVER_ALL_ROWS = {
    "_BatchNorm", "HeteroBatchNorm", "GraphNorm", "GraphSizeNorm", "InstanceNorm", "MeanSubtractionNorm", "PairNorm",
}  # fmt: skip


def check_loss(loss: Any) -> None:
    """Raise unless a loss is one number."""
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"[rank {rank_of()}] Expected 'loss_fn' to return a single number as a tensor (got {found})")


def described(blocks: Sequence[torch.nn.Module]) -> list[str]:
    """Return what workers compare of a model: parameters, and kinds and settings of modules."""
    told = []
    for k, block in enumerate(blocks):
        told += [f"block {k}: {name} {list(p.shape)}" for name, p in block.named_parameters()]
        for name, module in block.named_modules():
            plain = {
                key: v for key, v in vars(module).items() if key[0] != "_" and isinstance(v, bool | int | float | str)
            }
            told.append(f"block {k}: {name} {type(module).__name__} {plain}")
    return told


def fingerprint_of(graph: ShardedGraph) -> str:
    """Return what stages compare of a worker's share of the graph."""
    found = 0
    for t in (graph.n_id, *(t for block in graph.blocks for t in (block.rowptr, block.col))):
        found = found if t is None else zlib.crc32(t.contiguous().cpu().numpy().data, found)
    return f"with {graph.num_dst} nodes and {graph.num_edges} edges (checksum {found:08x})"


# Functions of torch that take a mean of losses unless they are told otherwise.
MEANS = {
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy",
    "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss",
    "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
}  # fmt: skip


class LooksForMeans(TorchFunctionMode):
    """Warns where a loss of some of the rows takes a mean over these: such losses are added up."""

    told = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and look at its name and its arguments."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if not self.told and (name in MEANS or name == "mean") and self.is_mean(func, name, args, kwargs):
            self.told = True
            warn(
                f"[rank {rank_of()}] '{name}' takes a mean over the rows of a chunk, or of one worker, and a pipeline "
                f"adds up the losses of all of them. Take a sum, and divide it by the number of labels in the whole "
                f"graph. This is said once."
            )
        return func(*args, **kwargs)

    def is_mean(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Tell whether a call takes a mean over rows."""
        if name == "mean":
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            rows = args[0] if args else kwargs.get("input")
            over_rows = dim is None or 0 in (dim if isinstance(dim, (list, tuple)) else (dim,))
            return isinstance(rows, Tensor) and rows.dim() > 0 and rows.requires_grad and over_rows
        try:
            return inspect.signature(func).bind(*args, **kwargs).arguments.get("reduction", "mean") == "mean"
        except (TypeError, ValueError):  # torch will say it better
            return False


def check_step(x: Any, edges: Sequence[Tensor], num_edges: int, in_chunks: bool) -> None:
    """Raise for what no step can be made of."""
    if not torch.is_grad_enabled():
        raise RuntimeError(f"[rank {rank_of()}] Expected gradients in 'step'. Without, call the pipeline itself.")
    if in_chunks and any(map(is_elsewhere, packed(x))):
        raise ValueError(f"[rank {rank_of()}] Rows at home go through a pipeline as a whole. Take 'chunks=1'.")
    for k, t in enumerate(edges):
        if t.dim() == 0 or t.size(0) != num_edges:
            raise ValueError(
                f"[rank {rank_of()}] Expected tensor {k} of edges to have a row for each of this worker's {num_edges} "
                f"edges (got {list(t.shape)}). Take it from the loaded data."
            )
        if t.requires_grad:  # of which each stage would have a share
            raise ValueError(
                f"[rank {rank_of()}] Tensor {k} of edges needs a gradient, which a pipeline does not give. Detach it, "
                f"or make it within a block, of the block's own parameters."
            )


def check(
    blocks: Sequence[torch.nn.Module], edge_index: Any, stages: Stages, group: Any, chunks: int, history: int,
    cut: Sequence[int] | None,
) -> list[int]:  # fmt: skip
    """Raise for what no pipeline can do; return the number of blocks of each stage."""
    rank, count = f"[rank {rank_of()}]", len(blocks)
    check_graph(edge_index, group)
    for name, value in (("chunks", chunks), ("history", history)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{rank} Expected '{name}' to be 1 or more (got {value!r})")
    if chunks > 1:
        check_chunks(chunks, int(all_reduce(torch.tensor(edge_index.graph.num_dst), group)), stages.size)
    cut = even_cut(count, stages.size) if cut is None else cut
    if len(cut) != stages.size or sum(cut) != count or min(cut) < 1:
        raise ValueError(f"{rank} Expected 'cut' to be {stages.size} numbers of blocks that sum to {count} (got {cut})")
    seen: dict[Any, int] = {}
    for k, block in enumerate(blocks):
        stage = next(s for s in range(stages.size) if k < sum(cut[: s + 1]))
        for name, p in block.named_parameters():
            if seen.setdefault(p, stage) != stage:
                raise ValueError(
                    f"{rank} Parameter '{name}' of block {k} is that of a block of another stage, too, where it would "
                    f"learn something else. Bring both to one stage ('cut'), or give each block its own."
                )
        for name, module in block.named_modules() if chunks > 1 else ():
            check_module(module, f"'{name}' of block {k}")
    return list(cut)


def check_graph(edge_index: Any, group: Any) -> None:
    """Raise unless this is the graph of one set of nodes, with a part for each worker of a stage."""
    sharded = isinstance(edge_index, ShardedEdgeIndex) and edge_index.streams
    if not sharded or edge_index.graph.bipartite or edge_index.graph.origin is not None:
        raise TypeError(
            f"[rank {rank_of()}] Expected the 'edge_index' of one set of nodes that 'pyg_sar.load' returned, neither "
            f"that of a type of edges nor of a layer of a message-flow graph"
        )
    workers = edge_index.graph.exchange.routes.size
    if workers != size_of(group):
        raise ValueError(
            f"[rank {rank_of()}] Expected a graph of {size_of(group)} parts, one for each worker of a stage (got "
            f"{workers}). Load it with 'group=mesh.get_group(\"graph\")'."
        )


def check_chunks(chunks: int, nodes: int, stages: int) -> None:
    """Raise for more chunks than nodes; warn of too few to keep stages busy."""
    if chunks > nodes:
        raise ValueError(f"[rank {rank_of()}] Expected at most a chunk for each of {nodes} nodes (got {chunks} chunks)")
    if chunks < 2 * stages:
        warnings.warn(
            f"[rank {rank_of()}] Of {stages} stages most wait where there are only {chunks} chunks. Take {2 * stages} "
            f"or more, or 'chunks=1', which is exact.",
            UserWarning,
            stacklevel=4,
        )


def check_module(module: torch.nn.Module, where: str) -> None:
    """Raise for a module that needs more than a chunk."""
    names = {kind.__name__ for kind in type(module).__mro__}
    if names & OVER_ALL_ROWS or ("LayerNorm" in names and getattr(module, "mode", "node") == "graph"):
        raise ValueError(
            f"[rank {rank_of()}] '{type(module).__name__}' ({where}) looks at all rows, of which a chunk is a part. "
            f"Take LayerNorm(mode='node'), or 'chunks=1'."
        )
    if getattr(module, "cached", False) and getattr(module, "caches", True):
        raise ValueError(
            f"[rank {rank_of()}] 'cached=True' of {where} would keep the edges of one chunk for all. Take "
            f"'cached=False', or 'chunks=1'."
        )
