r"""Statistics of the rows of all workers, for each graph of a batch, for what PyG does to whole graphs."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.distributed.collectives import all_reduce, global_max, global_sum
from pyg_sar.distributed.group import rank_of
from pyg_sar.nn.norm.columns import Coefficients, NormaliseColumns, global_moments
from pyg_sar.nn.together import knows_all_rows, together
from pyg_sar.ops.reference import accumulator
from pyg_sar.watch import ROWS, gives

AT_A_TIME = 1 << 14  # rows that are added up in the type of sums


class PerGraph:
    """Which graph of a batch each of the local rows belongs to, and how many rows all workers have of every graph.

    Workers number graphs alike. Without ``batch`` there is one graph; without ``batch_size`` there are as many as the
    largest number on any worker says. Sums are made in at least single precision.

    Raises:
        ValueError: If there is more than a row of numbers for each node; on all workers, if these have other numbers of
            graphs, or more graphs than that.
    """

    def __init__(self, x: Tensor, batch: Tensor | None, batch_size: int | None, group: Any) -> None:
        if x.dim() > 2:
            raise ValueError(
                f"[rank {rank_of(group)}] Expected a row of numbers for each node, [n, channels] (got {list(x.shape)})"
            )
        self.group = group
        self.batch = x.new_zeros(x.size(0), dtype=torch.long) if batch is None else batch
        if batch is None:
            batch_size = 1
        else:
            here, given = int(batch.max()) + 1 if batch.numel() > 0 else 0, -1 if batch_size is None else batch_size
            count, most, least = global_max(batch.new_tensor([here, given, -given]), group).tolist()
            if most != -least or 0 <= most < count:  # on all workers alike, also where some were given none
                raise ValueError(
                    f"[rank {rank_of(group)}] Expected the number of graphs of a batch, which all workers number alike "
                    f"(got {batch_size} here, up to {most} on all workers, and graphs up to {count - 1})"
                )
            batch_size = count if batch_size is None else batch_size
        self.size = batch_size
        count = torch.bincount(self.batch, minlength=batch_size)
        self.count = all_reduce(count, group).to(accumulator(x.dtype)).view(-1, *[1] * (x.dim() - 1))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of rows for every graph, with its gradient."""
        return global_sum(sum_by(self.batch, values, self.size), self.group)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of rows for every graph, with its gradient."""
        return self.sum(values) / self.count.clamp(min=1)

    def of_rows(self, values: Tensor) -> Tensor:
        """Return for each row the value of its graph."""
        return values.index_select(0, self.batch)


def sum_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the sums of the rows of each index, in the type of sums.

    Rows that are added one after the other lose digits, and from 2^24 on whole rows: so sums of some are added up in
    double precision.
    """
    kind, step = values.dtype, max(AT_A_TIME, size)
    total = values.new_zeros(size, *values.shape[1:])
    if values.is_floating_point():
        kind, total = accumulator(values.dtype), total.double()
    for some, rows in zip(index.split(step), values.split(step), strict=True):
        total = total + total.new_zeros(total.shape, dtype=kind).index_add(0, some, rows.to(kind))
    return total.to(kind)


class NormalisesPerGraph:
    """What stands before a normalisation of PyG: with other workers all of their rows count.

    Rows are scaled and shifted by ``coefficients``, whose arguments are those of the graph as a whole, or, for a batch,
    have a row for every graph.
    """

    group: Any = None  # of workers
    coefficients: Coefficients
    keeps_type = False  # whether rows of one graph keep their type, whatever that of parameters is

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        if not together(self.group) and not is_elsewhere(x):
            return super().forward(x, batch, batch_size)  # type: ignore[misc]
        return self.over_all(x, batch, batch_size)

    @torch.compiler.disable
    @gives(ROWS)
    @knows_all_rows
    def over_all(self, x: Tensor, batch: Tensor | None, batch_size: int | None) -> Tensor:
        """Normalise by the rows of all workers."""
        parameters = [*self.parameters(recurse=False)]  # type: ignore[attr-defined]
        if batch is None and is_elsewhere(x):
            return x.normalise(self.coefficients, parameters, self.track)  # type: ignore[attr-defined]
        dtype = functools.reduce(torch.promote_types, (p.dtype for p in parameters), x.dtype)
        if batch is None:
            x = x if self.keeps_type else x.to(dtype)
            moments = global_moments(x, self.group)
            self.track(*moments)
            return NormaliseColumns.apply(x, moments, self.group, self.coefficients, *parameters)
        per_graph = PerGraph(x, batch, batch_size, self.group)
        mean = per_graph.mean(x)
        x = x - per_graph.of_rows(mean)
        m2 = per_graph.sum(x * x)
        self.track(per_graph.count, mean, m2)
        scale, shift = self.coefficients(per_graph.count.clamp(min=1), mean, m2, *parameters)
        return (x * per_graph.of_rows(scale) + per_graph.of_rows(shift)).to(dtype)

    def track(self, count: Any, mean: Tensor, m2: Tensor) -> None:
        """Note the moments, if a normalisation does."""
