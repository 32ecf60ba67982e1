r"""Batch normalisation with the statistics of all workers' rows."""

from __future__ import annotations

from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.collectives import all_gather, all_reduce, grouped
from pyg_sar.stream import once_differentiable


class BatchNorm1d(torch.nn.BatchNorm1d):
    r"""Batch normalisation from the `"Batch Normalization: Accelerating Deep Network Training by Reducing Internal
    Covariate Shift" <https://arxiv.org/abs/1502.03167>`_ paper over the rows of all workers.

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Arguments, running statistics and ``state_dict`` are those of :class:`torch.nn.BatchNorm1d`. Without a process group
    it is that layer. Counts, means and squared deviations of the workers are merged by the formula of Chan et al., so
    that a large mean costs no digits; a worker may hold no rows at all. (:class:`torch.nn.SyncBatchNorm` refuses CPU
    tensors.)

    Args:
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """

    def __init__(self, *args: Any, group: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows ``[n, channels]``."""
        whole = self.training or self.running_mean is None
        if not whole or not grouped(self.group):
            return super().forward(x)
        if x.dim() != 2 or x.size(1) != self.num_features:
            raise ValueError(f"Expected rows of shape [num_nodes, {self.num_features}] (got {list(x.shape)})")
        count, mean, m2 = merge(self.group, *moments(x))
        if count <= 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got {count} rows on all workers together"
            )
        if self.training and self.track_running_stats:
            self.track(count, mean, m2)
        return Normalize.apply(x, self.weight, self.bias, mean, (m2 / count + self.eps).rsqrt(), count, self.group)

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
        if not grouped(module.group):
            return super().forward(x)
        if self.training and self.allow_single_element and rows_of_all(x, module.group) <= 1:
            return torch.nn.functional.batch_norm(
                x, module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps
            )
        return module(x)


def rows_of_all(x: Tensor, group: Any) -> int:
    """Return the number of rows on all workers together."""
    return int(all_reduce(torch.tensor(x.size(0), device=x.device), group))


def moments(x: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations of the own rows, in single precision at least."""
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    if x.size(0) == 0:
        return 0, x.new_zeros(x.size(1)), x.new_zeros(x.size(1))
    var, mean = torch.var_mean(x, 0, correction=0)
    return x.size(0), mean, var * x.size(0)


def merge(group: Any, count: int, mean: Tensor, m2: Tensor) -> tuple[int, Tensor, Tensor]:
    """Merge the moments of all workers, in the same order everywhere (Chan, Golub & LeVeque 1979)."""
    # Double precision holds counts beyond 2^24 exactly.
    parts = all_gather(torch.cat([mean.new_tensor([count], dtype=torch.float64), mean.double(), m2.double()]), group)
    counts, (means, m2s) = parts[:, 0], parts[:, 1:].chunk(2, 1)
    total = counts.sum()
    weight = (counts / total.clamp(min=1)).unsqueeze(1)
    center = (weight * means).sum(0)
    spread = m2s.sum(0) + (counts.unsqueeze(1) * (means - center).square()).sum(0)
    return int(total), center.to(mean.dtype), spread.to(mean.dtype)


class Normalize(torch.autograd.Function):
    """Normalise by given statistics, whose gradient needs two sums over all workers' rows.

    Forward makes its output and nothing else as long as the rows, backward one tensor besides the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, count: int,
        group: Any,
    ) -> Tensor:  # fmt: skip
        """Normalise."""
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.count, ctx.group = count, group
        out = (x - mean).mul_(rstd)
        if weight is not None:
            out.mul_(weight.to(out.dtype))
        if bias is not None:
            out.add_(bias.to(out.dtype))
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Parameters get this worker's share, rows the exact gradient."""
        once_differentiable()
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        normal = (x - mean).mul_(rstd)
        product = grad * normal
        d_bias, d_weight = grad.sum(0), product.sum(0)
        d_x = None
        if ctx.needs_input_grad[0]:
            sums = (all_reduce(torch.stack([d_bias, d_weight]).double(), ctx.group) / ctx.count).to(grad.dtype)
            d_x = torch.sub(grad, sums[0], out=product).sub_(normal.mul_(sums[1])).mul_(rstd)
            d_x = (d_x if weight is None else d_x.mul_(weight.to(d_x.dtype))).to(x.dtype)
        if weight is not None:
            d_weight, d_bias = d_weight.to(weight.dtype), d_bias.to(weight.dtype)
        wants = ctx.needs_input_grad
        return d_x, d_weight if wants[1] else None, d_bias if wants[2] else None, None, None, None, None
