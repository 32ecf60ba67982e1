r"""Sums over workers, of gradients above all, and the parameters they start from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pyg_sar import debugging
from pyg_sar.affine import merge_moments
from pyg_sar.caller import beyond, within
from pyg_sar.distributed import group as workers
from pyg_sar.distributed import guard, notices
from pyg_sar.distributed.agreement import SHAPES, agree, compare, describe, remember
from pyg_sar.distributed.group import Member, current, is_local, size_of, talking
from pyg_sar.ops.reference import accumulator
from pyg_sar.watch import ROWS, SAME, count_step, gives, is_known, same_on_all
from pyg_sar.watch.counts import refuse_tables


@gives(SAME)
def all_reduce(tensor: Tensor, group: Any = None) -> Tensor:
    """Sum a tensor over all workers, without a gradient; :func:`pyg_sar.global_sum` has one.

    Args:
        tensor (torch.Tensor): The tensor, of the same shape and type on all workers. It is not changed.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        The sum, of the same shape and type, the same on all workers.

    Raises:
        RuntimeError: On all workers, if their tensors have different shapes or types.
    """
    check_given("all_reduce", tensor, group)
    return summed(tensor, group)


def check_given(name: str, tensor: Tensor, group: Any) -> None:
    """Raise on all workers unless a script gives tensors of the same shape and type on all of them: others would be
    added up as they lie in memory, or end the process. Functions of this package give the same; simulated workers see
    for themselves.
    """
    if not guard.ON or size_of(group) == 1 or isinstance(current(group), Member):
        return
    _, frame = beyond(__name__, "pyg_sar.watch", "torch")
    if frame is not None and not within(frame, "pyg_sar"):
        given = [f"{tensor.dtype} of shape {list(tensor.shape)}"]
        agree(f"what they give to '{name}'", given, group, "Give tensors of one shape and type, also without rows.")


def summed(tensor: Tensor, group: Any = None) -> Tensor:
    """Return the sum of tensors of one shape and type over all workers, without a gradient."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)  # workers add up what lies in memory
    if size_of(group) > 1:
        with talking("summing over all of them", group):
            workers.all_reduce_(tensor, group)
    return tensor


class _Sum(torch.autograd.Function):
    """The sum over all workers is read by the losses of all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = current(group)
        return summed(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Sum.apply(grad, ctx.group), None


@gives(SAME)
def global_sum(tensor: Tensor, group: Any = None) -> Tensor:
    r"""Return the sum of a tensor over all workers, with its gradient.

    Sums that layers need of all nodes. All workers must call it together, and their losses must depend on it alike:
    backward is a sum over all of them, too.

    Args:
        tensor (torch.Tensor): This worker's share, of the same shape and type on all workers.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Raises:
        RuntimeError: On all workers, if their tensors have different shapes or types.
    """
    check_given("global_sum", tensor, group)
    return _Sum.apply(tensor, group)


@gives(SAME)
def global_max(tensor: Tensor, group: Any = None) -> Tensor:
    """Return the largest entries of a tensor on any worker, without a gradient."""
    return all_gather(tensor, group).amax(0)


def degree_histogram(edge_index: Any, group: Any = None) -> Tensor:
    r"""Return how many nodes of all workers have :math:`0, 1, 2, \ldots` in-edges, such as ``PNAConv`` asks for.

    Args:
        edge_index (ShardedEdgeIndex): The sharded graph.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
    """
    degree = edge_index.graph.degree
    size = int(global_max(torch.cat([degree, degree.new_zeros(1)]).max(), group)) + 1
    return all_reduce(torch.bincount(degree, minlength=size), group)


@gives(SAME)
def all_gather(tensor: Tensor, group: Any = None) -> Tensor:
    """Return the tensors of all workers, stacked in the order of ranks, without a gradient."""
    if size_of(group) == 1:
        return tensor.detach().unsqueeze(0)
    with talking("gathering from all of them", group):
        return torch.stack(workers.all_gather(tensor.detach().contiguous(), group))


def global_merge(count: Tensor, mean: Tensor, m2: Tensor, group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the moments of all workers' rows, in the same order everywhere: counts, means and sums of squared
    deviations; there is a count for each row of moments, or one for all.
    """
    # Double precision holds counts beyond 2^24 exactly.
    parts = all_gather(torch.cat([count.unsqueeze(-1).double(), mean, m2], -1), group)
    total, mean, m2 = merge_moments(parts[..., :1], *parts[..., 1:].chunk(2, -1))
    return total.squeeze(-1).long(), mean, m2


@torch.no_grad()
def sum_gradients(
    *modules: torch.nn.Module | Tensor | Iterable[Any],
    group: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    r"""Sum the gradients of all parameters over the workers, in one all-reduce for single precision, in which those of
    half precision are added, too, and one for double.

    Call it once after ``loss.backward()``, or after the last backward pass of several that accumulate. A parameter
    without a gradient here counts as zero; one that has a gradient on no worker keeps none. Those of
    :class:`pyg_sar.nn.NodeEmbedding` are each worker's own and left out.

    :class:`torch.nn.parallel.DistributedDataParallel` can take its place. It averages where this sums: multiply the
    loss by the number of workers.

    Args:
        *modules (torch.nn.Module, torch.nn.Parameter or iterable of these): The model, or what it is made of.
        group (ProcessGroup, optional): The workers; may also come last without its name. (default: :obj:`None`, all of
            them)
        optimizer (torch.optim.Optimizer, optional): Its numbers, such as the learning rate, are compared.
            (default: :obj:`None`)

    Raises:
        RuntimeError: On every worker, unless all of them have the same parameters of the same values and
            ``requires_grad``, and the same numbers of the optimizer; or if gradients were summed before; or, in the
            first two steps, if they were clipped before, or losses by ``global_mean`` differ.
        NotImplementedError: If a gradient is sparse, other than those of a node embedding.
    """
    if modules and workers.is_group(modules[-1]):
        *modules, group = modules  # type: ignore[assignment]
    every = {name: p for name, p in parameters_of(*modules).items() if p.requires_grad}
    named = {name: p for name, p in every.items() if not is_local(p)}
    tables = [p for p in every.values() if is_local(p)]
    losses = count_step([*named.values()], tables)
    if notices.LOOKS:
        debugging.look(every, group)
    if size_of(group) == 1:
        return
    refuse_tables(*modules)
    if sparse := [name for name, p in named.items() if p.grad is not None and p.grad.layout != torch.strided]:
        raise NotImplementedError(
            f"[rank {workers.rank_of(group)}] The gradient of '{sparse[0]}' is sparse, which is not summed over "
            f"workers. Take 'sparse=False', or 'pyg_sar.nn.NodeEmbedding(data, channels, sparse=True)', whose rows are "
            f"each worker's own."
        )
    totals = compare(named, optimizer, losses, group)
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in named.values():
        kinds[accumulator(parameter.dtype), parameter.device].append(parameter)
    for alike in kinds.values():
        sum_flat(alike, group)
    remember([*named.values()], totals, tables)
    notices.stepped()


def parameters_of(*modules: Any) -> dict[str, Tensor]:
    """Return the parameters of modules, parameters and iterables of these by their names, each of them once."""
    found: dict[str, Tensor] = {}
    for k, it in enumerate(modules):
        named: dict[str, Tensor] = {}
        if isinstance(it, torch.nn.Module):
            named |= it.named_parameters()
        elif isinstance(it, Tensor):
            named = {"parameter": it}
        elif isinstance(it, Iterable) and not isinstance(it, (str, dict)):
            named = parameters_of(*it)
        else:
            raise TypeError(f"Expected modules or parameters whose gradients shall be summed (got {type(it).__name__})")
        found |= {name if len(modules) == 1 else f"{k}.{name}": p for name, p in named.items()}
    first = {id(p): name for name, p in reversed(found.items())}
    return {name: p for name, p in found.items() if first[id(p)] == name}


def sum_flat(parameters: list[Tensor], group: Any) -> None:
    """Sum the gradients of parameters that are added up in one type, and count the workers that have one."""
    some = parameters[0].new_tensor([p.grad is not None for p in parameters], dtype=accumulator(parameters[0].dtype))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([some, *(g.reshape(-1) for g in grads)])  # in the type of 'some'
    with talking("summing gradients", group):
        workers.all_reduce_(flat, group)
    counts, *sums = flat.split([len(parameters), *(p.numel() for p in parameters)])
    for parameter, count, total in zip(parameters, counts.tolist(), sums, strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = total.view_as(parameter).to(parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(total.view_as(parameter))


@torch.no_grad()
def broadcast_parameters(module: torch.nn.Module, group: Any = None) -> None:
    """Copy the parameters and buffers of rank 0 to every worker; lazy layers must have been run once in training mode.

    The rows of a :class:`~pyg_sar.nn.NodeEmbedding` stay, because each worker has those of its local nodes.

    Args:
        module (torch.nn.Module): The model, alike on all workers.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Raises:
        RuntimeError: On every worker, if the names, shapes or types of parameters differ between workers.
        ValueError: If parameters of lazy layers have no shape yet, a module was made for ``data.num_nodes`` nodes, or a
            buffer holds rows of nodes or edges.
    """
    if size_of(group) == 1:
        return
    refuse_tables(module)
    for name, buffer in module.named_buffers():
        if is_known(buffer, ROWS) and not is_local(buffer):
            raise ValueError(
                f"[rank {workers.rank_of(group)}] The buffer '{name}' of shape {list(buffer.shape)} has a row for each "
                f"node or edge of this worker, and would get those of rank 0. Keep it as an attribute "
                f"('self.{name.rpartition('.')[2]} = ...') or pass it to 'forward'."
            )
    every = dict([*module.named_parameters(), *module.named_buffers()])
    if lazy := [name for name, t in every.items() if is_lazy(t)]:
        raise ValueError(
            f"[rank {workers.rank_of(group)}] '{lazy[0]}' is a parameter of a lazy layer, which has no shape yet. Run "
            f"the model once before, behind 'convert': 'with torch.no_grad(): model(data.x, data.edge_index)'."
        )
    named = {name: t for name, t in every.items() if not is_local(t)}
    agree("their parameters and buffers", describe(named), group, SHAPES)
    for tensor in named.values():
        flat = tensor.detach().contiguous()  # workers may have it in another order of memory
        with talking("waiting for the parameters of rank 0", group):
            workers.broadcast_(flat, group)
        if 0 in tensor.stride():  # numbers that share their memory
            tensor.data = flat
        elif not tensor.is_contiguous():
            tensor.copy_(flat)
    same_on_all(named.values())
