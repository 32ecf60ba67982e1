r"""Batch normalisation with the statistics of all workers' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.autograd import once_differentiable
from pyg_sar.distributed.collectives import all_gather, all_reduce
from pyg_sar.nn.together import together


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
    def over_all(self, x: Tensor) -> Tensor:
        """Normalise by the rows of all workers."""
        if x.dim() != 2 or x.size(1) != self.num_features:
            raise ValueError(f"Expected rows of shape [num_nodes, {self.num_features}] (got {list(x.shape)})")
        count, mean, m2 = merge(self.group, *moments(x))
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} rows on all workers together"
            )
        if self.training and self.track_running_stats:
            self.track(count, mean, m2)
        mean, rstd = mean.to(wide(x)), (m2 / count + self.eps).rsqrt().to(wide(x))
        return Normalize.apply(x, self.weight, self.bias, mean, rstd, count, self.group)

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
def rows_of_all(x: Tensor, group: Any) -> int:
    """Return the number of rows on all workers together."""
    return int(all_reduce(torch.tensor(x.size(0), device=x.device), group))


def moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of the local rows, in double precision."""
    n, guess = x.size(0), x.detach().sum(0, dtype=wide(x)) / max(x.size(0), 1)
    total, squares = torch.zeros(2, *guess.shape, dtype=torch.float64, device=x.device)
    for rows in pieces(x.detach()):
        deviation = rows - guess
        total += deviation.sum(0)
        squares += deviation.square_().sum(0)
    shift = total / max(n, 1)  # what the guess lacks
    return n, guess + shift, squares - shift * total


def wide(x: Tensor) -> torch.dtype:
    """Return a type of single precision at least."""
    return torch.promote_types(x.dtype, torch.float32)


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Return rows in pieces that stay in a cache while several operations pass over them; a GPU has more of it, and
    takes time to be told of each piece.
    """
    return x.split(max((2**17 if x.is_cpu else 2**24) // max(x.size(1), 1), 1))


def merge(group: Any, count: int, mean: Tensor, m2: Tensor) -> tuple[int, Tensor, Tensor]:
    """Merge the moments of all workers, in the same order everywhere (Chan, Golub & LeVeque 1979)."""
    # Double precision holds counts beyond 2^24 exactly.
    parts = all_gather(torch.cat([mean.new_tensor([count]), mean, m2]), group)
    counts, (means, m2s) = parts[:, 0], parts[:, 1:].chunk(2, 1)
    total = counts.sum()
    weight = (counts / total.clamp(min=1)).unsqueeze(1)
    center = (weight * means).sum(0)
    spread = m2s.sum(0) + (counts.unsqueeze(1) * (means - center).square()).sum(0)
    return int(total), center, spread


class Normalize(torch.autograd.Function):
    """Normalise by given statistics, whose gradient needs two sums over all workers' rows.

    Both passes make one tensor as long as the rows, and nothing else.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, count: int,
        group: Any,
    ) -> Tensor:  # fmt: skip
        """Normalise."""
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.group = count, group
        scale = rstd if weight is None else rstd * weight.to(mean.dtype)
        shift = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        out = torch.empty_like(x)
        for rows, into in zip(pieces(x), pieces(out), strict=True):
            torch.addcmul(shift, rows - mean, scale, out=into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Parameters get this worker's share, rows the exact gradient."""
        once_differentiable()
        x, weight, mean, rstd = ctx.saved_tensors
        d_bias, d_weight = torch.zeros(2, *mean.shape, dtype=torch.float64, device=mean.device)
        for rows, g in zip(pieces(x), pieces(grad), strict=True):
            d_bias += g.sum(0, dtype=mean.dtype)
            d_weight += (g * (rows - mean)).sum(0)
        d_weight *= rstd
        d_x = None
        if ctx.needs_input_grad[0]:
            # (g - mean of g - normalised row * mean of their product) * scale
            inner, product = all_reduce(torch.stack([d_bias, d_weight]), ctx.group) / ctx.count
            scale = (rstd if weight is None else rstd * weight).to(mean.dtype)
            inner, product = inner.to(mean.dtype), (product * rstd).to(mean.dtype)
            d_x = torch.empty_like(x)
            for rows, g, into in zip(pieces(x), pieces(grad), pieces(d_x), strict=True):
                torch.mul((g - inner).sub_((rows - mean).mul_(product)), scale, out=into)
        if weight is not None:
            d_weight, d_bias = d_weight.to(weight.dtype), d_bias.to(weight.dtype)
        wants = ctx.needs_input_grad
        return d_x, d_weight if wants[1] else None, d_bias if wants[2] else None, None, None, None, None
