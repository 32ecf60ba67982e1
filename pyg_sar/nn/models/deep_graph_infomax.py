r"""Embeddings of nodes that agree with a summary of the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch_geometric.nn.models.deep_graph_infomax import EPS

from pyg_sar.distributed.collectives import all_gather, all_reduce, global_sum
from pyg_sar.distributed.gather import join
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.distributed.loss import global_mean
from pyg_sar.operations import bind
from pyg_sar.ops.reference import accumulator


class DeepGraphInfomax(torch_geometric.nn.DeepGraphInfomax):
    r"""The Deep Graph Infomax model from the `"Deep Graph Infomax" <https://arxiv.org/abs/1809.10341>`_ paper.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.DeepGraphInfomax`. The summary must be one of
    the nodes of all workers: a mean ``z.mean(dim=0)`` in it becomes that; other functions take a pool of
    :mod:`pyg_sar.nn` or :func:`pyg_sar.global_sum`. The corruption is given the worker's rows: one that shuffles them
    does so within each part.

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None
    agreed = False  # whether the workers are known to have the same summary

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings of local nodes, those of the corrupted graph, and the summary of all nodes."""
        if size_of(self.group) == 1:
            return super().forward(*args, **kwargs)
        # PyG's own code with another summary.
        parts = SimpleNamespace(encoder=self.encoder, corruption=self.corruption, summary=self.summarise)
        return torch_geometric.nn.DeepGraphInfomax.forward(parts, *args, **kwargs)

    def summarise(self, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the summary of the nodes of all workers, or raise on all of them if it is none."""
        with MeanOfAll(z, self.group):
            summary = self.summary(z, *args, **kwargs)
        if not self.agreed:
            found, eps = all_gather(summary, self.group), 8 * torch.finfo(summary.dtype).eps
            if not found.allclose(found[:1].expand_as(found), eps, eps, equal_nan=True):
                raise ValueError(
                    f"[rank {rank_of(self.group)}] Expected a summary of the nodes of all workers, who have found "
                    f"different ones: take 'z.mean(dim=0)', a pool of 'pyg_sar.nn' or 'pyg_sar.global_sum' for it"
                )
            self.agreed = True
        return summary

    def loss(self, pos_z: Tensor, neg_z: Tensor, summary: Tensor) -> Tensor:
        """Return the mutual information objective over the nodes of all workers."""
        if size_of(self.group) == 1:
            return super().loss(pos_z, neg_z, summary)
        real, fake = (self.discriminate(z, summary, sigmoid=True) for z in (pos_z, neg_z))
        return global_mean(-torch.log(real + EPS), self.group) + global_mean(-torch.log(1 - fake + EPS), self.group)

    def test(self, *rows: Any, **kwargs: Any) -> float:
        """Return the accuracy of a logistic regression on the nodes of all workers, which every worker fits.

        Arguments are those of :class:`torch_geometric.nn.DeepGraphInfomax`, with this worker's rows.
        """
        rows = tuple(join(each, self.group) if isinstance(each, Tensor) else each for each in rows)
        kwargs = {name: join(each, self.group) if isinstance(each, Tensor) else each for name, each in kwargs.items()}
        return super().test(*rows, **kwargs)


class MeanOfAll(TorchFunctionMode):
    """Makes the mean of one tensor of local rows that of the rows of all workers."""

    def __init__(self, rows: Tensor, group: Any) -> None:
        super().__init__()
        self.rows, self.group = rows, group

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a mean of rows."""
        kwargs = kwargs or {}
        rows, dim, keepdim = bind(args, kwargs, "input", "dim", "keepdim")
        if func not in (torch.mean, Tensor.mean) or rows is not self.rows or dim not in (0, -rows.dim(), (0,), [0]):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            share = rows.sum(0, keepdim=bool(keepdim), dtype=accumulator(rows.dtype))
            count = all_reduce(share.new_tensor(rows.size(0), dtype=torch.float64), self.group)
            return (global_sum(share, self.group) / count.to(share.dtype)).to(rows.dtype)
