r"""PyG's aggregations as readouts: over the rows of all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.autograd import zeros_of
from pyg_sar.distributed.collectives import all_reduce, global_max, global_sum
from pyg_sar.distributed.group import rank_of
from pyg_sar.nn.replay.trace import NotStreamable, Reduction, Trace
from pyg_sar.nn.together import given_here, together
from pyg_sar.operations import DESTINATIONS, EDGES, SOURCES, EdgeNumbers, shares


class Readout:
    """What stands before an aggregation of PyG that reads out nodes: with other workers its reductions are over theirs,
    too, and every worker gets the results.
    """

    group: Any = None

    def __call__(
        self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, dim_size: int | None = None,
        dim: int = -2, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Aggregate rows by their graph of a batch, which all workers number alike; rows of edges by destinations."""
        if not together(self.group) or of_edges(index, dim_size, self.group):
            return super().__call__(x, index, ptr, dim_size, dim, **kwargs)  # type: ignore[misc]
        return self.over_all(x, index, ptr, dim_size, dim, **kwargs)

    @torch.compiler.disable
    def over_all(
        self, x: Tensor, index: Tensor | None, ptr: Tensor | None, dim_size: int | None, dim: int, **kwargs: Any
    ) -> Tensor:
        """Aggregate the rows of all workers."""
        name, given = type(self).__name__, index is not None
        if index is None and ptr is not None:
            raise NotImplementedError(f"'{name}' reads out the rows of all workers: pass 'index' instead of 'ptr'")
        if index is None:
            index, dim_size = torch.zeros(x.size(dim), dtype=torch.int64, device=x.device), 1
        if dim_size is None:
            dim_size = int(global_max(torch.cat([index, index.new_full((1,), -1)]).max(), self.group)) + 1
        elif given:
            most, least = global_max(index.new_tensor([dim_size, -dim_size]), self.group).tolist()
            if most != -least:
                raise ValueError(
                    f"[rank {rank_of(self.group)}] '{name}' reads out the graphs of a batch, which all workers number "
                    f"alike (got {dim_size} of them here, and {-least} to {most} on others). For edges by their "
                    f"destinations give it 'edge_index[1]', or take a MessagePassing layer."
                )
        try:
            with Everywhere(index, dim_size, self.group):
                return super().__call__(x, index, None, dim_size, dim, **kwargs)  # type: ignore[misc]
        except NotStreamable as error:
            raise NotImplementedError(
                f"'{name}' cannot read out the rows of all workers, because {error}. Sums, means, extrema, and what is "
                f"made of them, can: softmax, attention, Set2Set."
            ) from error


@torch.compiler.disable
def of_edges(index: Tensor | None, dim_size: int | None, group: Any) -> bool:
    """Whether rows are those of edges: the index is 'edge_index[1]', or has the destinations of edges that a running
    module was given, as far as any worker can tell: one without edges, or nodes, asks the others.

    Those of some edges, or in another order, are told by how many they are, and by how many rows are made of them.
    """
    if isinstance(index, EdgeNumbers):  # sources, onto which PyG's own code adds exactly, if at all
        return True
    if index is not None and index in DESTINATIONS:
        return True
    here = [it for held in given_here() for it in shares(*held)]
    if index is None or not here:
        return False
    edges = any(ends is not None and torch.equal(ends, index) for ends in map(destinations, here))
    some, counts = index.numel() > 0, {n for it in here for n in (it._graph.num_src, it._graph.num_dst)}
    if not edges and index.numel() not in counts:
        edges = index.numel() > max(counts) or dim_size in {it._graph.num_dst for it in here}
    of_nodes, of_them = global_max(index.new_tensor([some and not edges, some and edges]), group).tolist()
    if of_them and of_nodes:
        raise ValueError(
            f"[rank {rank_of(group)}] An aggregation within a module that was given edges has {index.numel()} rows on "
            f"this worker, and seems to be one of edges on some workers, of nodes on others. Give it 'dim_size', the "
            f"number of this worker's nodes for edges, or take a MessagePassing layer for these."
        )
    return bool(of_them)


def destinations(it: EdgeNumbers) -> Tensor | None:
    """Return the destinations of edges, if they are known."""
    if it.kind == SOURCES:
        return it._ends
    if it._data is None:
        return it._graph.row
    return it._data[1] if it.kind == EDGES else it._data[0]


class Everywhere(Trace):
    """Makes reductions by graph those of all workers, who run the same code."""

    def __init__(self, index: Tensor, num_graphs: int, group: Any) -> None:
        super().__init__(index, index.new_empty(0), num_graphs, {}, self.of_all, ended=True)
        self.group = group

    def of_all(self, k: int, found: Reduction) -> Tensor:
        """Return the result of all workers, with its gradient."""
        return global_sum(found.total(self.num_dst), self.group) if found.op == "sum" else self.extremum(found)

    def extremum(self, found: Reduction) -> Tensor:
        """Return extrema, whose gradient equal entries share as in torch."""
        sign = 1 if found.op == "amax" else -1
        best, count = found._replace(src=found.src.detach()).extremum(self.num_dst)
        top = global_max(best * sign, self.group) * sign
        top = top.masked_fill(all_reduce(count, self.group) == 0, 0)
        hits = found.src.detach() == found.read(top)
        count = all_reduce(found._replace(src=hits.to(top.dtype)).total(self.num_dst), self.group) + (top == 0)
        zeros = torch.where(hits, zeros_of(found.src) / found.read(count), 0)
        return top + global_sum(found._replace(src=zeros).total(self.num_dst), self.group)

    def drop(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Drop as ever."""
        return func(*args, **kwargs)
