r"""Batch normalisation with the statistics of all workers' rows."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import rank_of
from pyg_sar.nn.norm.columns import NormaliseColumns, global_moments, standardise
from pyg_sar.nn.together import knows_all_rows, together
from pyg_sar.watch import ROWS, SAME, gives, is_known

CONSTANT = 1e-6  # variance by squared mean, below which rows may be constants of nodes, which are no readout
COUNTED_TWICE = (
    "BatchNorm1d has rows that are the same on all workers, as readouts are, and counts each of them once for every "
    "worker: running variances are not those of PyG. Call it behind the model, not within it, and "
    "leave it out of 'pyg_sar.nn.convert': torch.nn.BatchNorm1d, and PyG's BatchNorm, are exact there."
)


class BatchNorm1d(torch.nn.BatchNorm1d):
    r"""Batch normalisation from the `"Batch Normalization: Accelerating Deep Network Training by Reducing Internal
    Covariate Shift" <https://arxiv.org/abs/1502.03167>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments, running statistics and ``state_dict`` are those of :class:`torch.nn.BatchNorm1d`. Without a process
    group, and in a model that is running on an ordinary ``edge_index``, it is that layer. Counts, means and squared
    deviations of the workers are merged by the formula of Chan et al., so that a large mean costs no digits; a worker
    may hold no rows at all. (:class:`torch.nn.SyncBatchNorm` refuses CPU tensors.)

    Args:
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """

    group: Any = None

    def __init__(self, *args: Any, group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        whole = self.training or self.running_mean is None
        return self.over_all(x) if whole and together(self.group) else super().forward(x)

    @torch.compiler.disable
    @gives(ROWS)
    @knows_all_rows
    def over_all(self, x: Tensor) -> Tensor:
        """Normalise by the rows of all workers."""
        if is_elsewhere(x):  # rows at home know those of all workers
            return super().forward(x)
        if x.dim() != 2 or x.size(1) != self.num_features:
            raise ValueError(f"Expected rows of shape [num_nodes, {self.num_features}] (got {list(x.shape)})")
        count, mean, m2 = moments = global_moments(x, self.group)
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} rows on all workers together"
            )
        if self.training and self.track_running_stats:
            self.track(count, mean, m2)
            if is_known(x, SAME) and bool((m2 > CONSTANT * count * mean.square()).any()):
                warnings.warn(f"[rank {rank_of(self.group)}] {COUNTED_TWICE}", stacklevel=2)
        coefficients = partial(standardise, self.eps)
        return NormaliseColumns.apply(x, moments, self.group, coefficients, self.weight, self.bias)

    @torch.no_grad()
    def track(self, count: int, mean: Tensor, m2: Tensor) -> None:
        """Move the running statistics towards the present ones; like PyTorch, with the unbiased variance."""
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((m2 / (count - 1)).to(self.running_var.dtype), momentum)


class BatchNorm(torch_geometric.nn.BatchNorm):
    r"""PyG's :class:`~torch_geometric.nn.norm.BatchNorm` over the rows of all workers, see :class:`BatchNorm1d`.

    Args:
        in_channels (int): Size of each row.
        eps (float, optional): Added to the variance. (default: :obj:`1e-5`)
        momentum (float, optional): Weight of new statistics in the running ones; :obj:`None` averages all of them.
            (default: :obj:`0.1`)
        affine (bool, optional): Whether to learn a scale and a shift. (default: :obj:`True`)
        track_running_stats (bool, optional): Whether to keep running statistics. (default: :obj:`True`)
        allow_single_element (bool, optional): Whether a single row, for which there is no variance, uses the running
            statistics. (default: :obj:`False`)
        device (torch.device, optional): Where parameters and buffers are made. (default: :obj:`None`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """

    def __init__(
        self,
        in_channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        allow_single_element: bool = False,
        device: torch.device | None = None,
        group: Any = None,
    ) -> None:
        super().__init__(in_channels, eps, momentum, affine, track_running_stats, allow_single_element)
        self.module = BatchNorm1d(in_channels, eps, momentum, affine, track_running_stats, device=device, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        module = self.module
        if not together(module.group):
            return super().forward(x)
        if self.training and self.allow_single_element and rows_of_all(x, module.group) <= 1:
            return torch.nn.functional.batch_norm(
                x, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps
            )
        return module(x)


@torch.compiler.disable
@knows_all_rows
def rows_of_all(x: Tensor, group: Any) -> int:
    """Return the number of rows on all workers together."""
    return int(all_reduce(torch.tensor(x.size(0), device=x.device), group))
