r"""Losses and metrics over the nodes of all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar import running
from pyg_sar.autograd import Valued
from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.ops.reference import accumulator
from pyg_sar.watch import LOSS, gives


@gives(LOSS)
def with_gradient_of(share: Tensor, value: Tensor) -> Tensor:
    """Return the value of a loss for the whole graph with the gradient of this worker's share of it."""
    return Valued.apply(share, value)


@gives(LOSS)
def global_mean(
    values: Tensor, group: Any = None, *, weight: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    r"""Return the mean of the values of all workers, for use as a loss.

    .. math::
        \frac{1}{N} \sum_{p} \sum_{i \in \mathcal{V}_p} \ell_i \quad \textrm{or, with weights,} \quad
        \frac{\sum_{p} \sum_{i \in \mathcal{V}_p} \ell_i}{\sum_{p} \sum_{i \in \mathcal{V}_p} w_i}

    Its value is the same on every worker; its gradient is this worker's share, so that
    :func:`~pyg_sar.sum_gradients` after ``backward`` gives the gradient of the mean over the whole graph. A worker may
    hold no values.

    ``weight`` divides and does not multiply: the losses of torch are multiplied already. With it, the mean is that of
    :func:`torch.nn.functional.cross_entropy` and ``nll_loss`` for the same ``weight`` (also with ``label_smoothing``),
    and ``mask`` leaves out what their ``ignore_index`` does. What torch divides by the number of values needs neither:
    ``binary_cross_entropy_with_logits``, also with ``weight`` or ``pos_weight``, ``mse_loss``, classes given as
    probabilities.

    .. code-block:: python

        # F.cross_entropy(out, y)
        global_mean(F.cross_entropy(out, y, reduction="none"))
        # F.cross_entropy(out, y, weight=w)
        global_mean(F.cross_entropy(out, y, weight=w, reduction="none"), weight=w[y])
        # F.cross_entropy(out, y), where y has entries of -100, the default of ignore_index
        global_mean(F.cross_entropy(out, y, reduction="none"), mask=y != -100)
        # both
        global_mean(F.cross_entropy(out, y, weight=w, reduction="none"), weight=w[y.clamp(min=0)], mask=y != -100)
        # (losses * w).sum() / w.sum()
        global_mean(losses * w, weight=w)

    Args:
        values (torch.Tensor): For example the losses of this worker's labelled nodes (``reduction="none"``), of any
            shape.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
        weight (torch.Tensor, optional): What each value, or each row of values, has been multiplied by, without a
            gradient. (default: :obj:`None`, one)
        mask (torch.Tensor, optional): Which values, or rows of values, count. (default: :obj:`None`, all of them)

    Raises:
        ValueError: In the ``loss_fn`` of a pipeline; if ``values`` are a single number, or are made by a loss of torch
            whose own mean would be another one, because of ``weight`` or ``ignore_index``; this is seen where they
            require a gradient. On all workers, if some that ``mask`` leaves out are NaN, such as losses of labels that
            are.
    """
    if running.is_within(running.LOSS):
        raise ValueError(
            f"[rank {rank_of(group)}] A pipeline adds up what 'loss_fn' returns, which must be this worker's share: "
            f"take F.cross_entropy(..., reduction='sum') / total, of all workers' labels, instead of 'global_mean'."
        )
    check(values, group, weight, mask)
    loss = nll_loss(values)
    if loss is not None:
        check_weight(loss, values, weight, group)
    ignored = torch.zeros((), device=values.device) if loss is None else ignored_values(loss, values, mask)
    broken = torch.zeros((), device=values.device)
    if mask is not None:
        mask = like_rows(mask, values)
        if values.requires_grad:
            broken = (~mask & values.isnan()).sum()
        values = torch.where(mask, values, 0)
    # Half precision would overflow. Counts beyond 2^24 must stay exact, so all are sent in double precision.
    kind = accumulator(values.dtype)
    share = values.sum(dtype=kind)
    if weight is not None:
        weight = like_rows(weight, values)
        count = (weight if mask is None else torch.where(mask, weight, 0)).sum(dtype=torch.float64)
    else:
        count = share.new_full((), values.numel(), dtype=torch.float64) if mask is None else mask.sum().double()
    total = all_reduce(torch.stack([share.double(), count, ignored.double(), broken.double()]), group)
    captured = total.is_cuda and torch.cuda.is_current_stream_capturing()  # then nobody can look
    if mask is not None and not captured and total[3] > 0:
        raise ValueError(
            f"[rank {rank_of(group)}] {int(total[3])} of 'values' that 'mask' leaves out are NaN, and gradients would "
            f"be, too: leave them out before, such as F.mse_loss(out[mask], y[mask], ...)"
        )
    if loss is not None and not captured and total[2] > 0:
        raise ValueError(
            f"[rank {rank_of(group)}] {int(total[2])} of 'values' are those of 'ignore_index', which torch leaves out "
            f"of its mean: pass 'mask', such as mask=y != ignore_index"
        )
    return with_gradient_of(share / total[1].to(kind), (total[0] / total[1]).to(kind))


def like_rows(each: Tensor, values: Tensor) -> Tensor:
    """Return what is there for each row of values for each value."""
    return each.view(*each.shape, *(1 for _ in values.shape[each.dim() :])).expand_as(values)


def check(values: Tensor, group: Any, weight: Tensor | None, mask: Tensor | None) -> None:
    """Raise unless everything is of the type and shape that it must be."""
    if isinstance(group, Tensor):
        raise TypeError("Expected 'group' to be a process group (got a tensor: pass 'weight' and 'mask' by name)")
    if values.dim() == 0:
        raise ValueError("Expected one value for each node (got a single number: pass reduction='none' to the loss)")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"Expected 'mask' to be of type torch.bool (got {mask.dtype}: pass values[ids] instead)")
    if weight is not None and weight.requires_grad:
        raise ValueError("Expected 'weight' without a gradient: only 'values' get one")
    for name, each in (("weight", weight), ("mask", mask)):
        if each is not None and each.shape != values.shape[: each.dim()]:
            raise ValueError(
                f"[rank {rank_of(group)}] Expected '{name}' to have an entry for each value, or row of values, of "
                f"shape {list(values.shape)} (got {list(each.shape)}; weights w of classes are w[y] here)"
            )


def nll_loss(values: Tensor) -> Any:
    """Return the step of autograd that is torch's ``nll_loss`` if values are made of one, by simple steps."""
    nodes: list[Any] = [values.grad_fn]
    for node in nodes:
        name = "" if node is None else node.name()
        if name.startswith("NllLoss"):
            return node if remembers(node) else None
        if name.startswith(("Add", "Mul", "View", "Index")):  # label smoothing, rows of pixels, chosen rows
            nodes += [inner for inner, _ in node.next_functions]
    return None


def remembers(node: Any) -> bool:
    """Whether a step of autograd still has its inputs, which it drops after backward."""
    try:
        return node._saved_target is not None
    except RuntimeError:
        return False


def check_weight(loss: Any, values: Tensor, weight: Tensor | None, group: Any) -> None:
    """Raise if values were multiplied by weights and would not be divided by them, or the other way round."""
    if loss._saved_weight is not None and weight is None:
        raise ValueError(
            f"[rank {rank_of(group)}] 'values' are multiplied by weights of classes, and torch divides by the sum of "
            f"these: pass weight=w[y] to 'global_mean', too (weight=torch.ones_like(values) is their plain mean)"
        )
    if loss._saved_weight is None and weight is not None and loss is values.grad_fn:
        raise ValueError(
            f"[rank {rank_of(group)}] 'weight' divides and does not multiply: pass the weights of classes to the loss, "
            f"too, as in F.cross_entropy(out, y, weight=w, reduction='none'), or multiply its values by 'weight'"
        )


def ignored_values(loss: Any, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return how many values count that torch leaves out."""
    ignored = loss._saved_target == (loss._saved_ignore_index + 2**63) % 2**64 - 2**63  # which has lost its sign
    if ignored.numel() != values.numel():  # some were chosen
        return ignored.new_zeros(())
    return ignored.sum() if mask is None else (ignored & like_rows(mask, values).reshape_as(ignored)).sum()


@gives(LOSS)
def replicated(term: Tensor, group: Any = None) -> Tensor:
    r"""Mark a term of the loss that every worker adds alike, because it does not depend on nodes.

    Its value stays; its gradient is divided by the number of workers, so that :func:`~pyg_sar.sum_gradients` counts it
    once. Such terms are penalties on weights, and divergences of their distributions:

    .. code-block:: python

        loss = pyg_sar.global_mean(losses) + pyg_sar.replicated(1e-4 * model.rel_emb.pow(2).mean())

    A term that depends on nodes, if only through the output of a layer, is a :func:`global_mean` or is made of a
    :func:`~pyg_sar.global_sum`. The term must be the same on all workers: random numbers in it would differ.

    Args:
        term (torch.Tensor): The term.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        The term, of the same shape and value.
    """
    return with_gradient_of(term / size_of(group), term.detach())


def accuracy(pred: Tensor, y: Tensor, mask: Tensor | None = None, group: Any = None) -> float:
    """Return the fraction of right predictions among the (masked) nodes of all workers.

    Args:
        pred (torch.Tensor): The predicted class of each local node, :math:`(|V|)`.
        y (torch.Tensor): The class of each local node, :math:`(|V|)`.
        mask (torch.Tensor, optional): The nodes that count, :math:`(|V|)`. (default: :obj:`None`, all of them)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        A number from 0 to 1, the same on all workers; 0 if no worker has a node that counts.

    Raises:
        ValueError: If ``pred`` and ``y`` have other shapes than each other.
    """
    if pred.shape != y.shape:
        raise ValueError(
            f"[rank {rank_of(group)}] Expected a predicted class for each entry of 'y' (got {list(pred.shape)} and "
            f"{list(y.shape)}). Take 'pred.argmax(-1)', or 'y.view(-1)'."
        )
    hit = pred == y
    hit = hit if mask is None else hit[mask]
    both = all_reduce(torch.tensor([int(hit.sum()), hit.numel()], device=hit.device), group).tolist()
    return both[0] / max(both[1], 1)
