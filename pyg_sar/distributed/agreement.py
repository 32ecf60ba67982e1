r"""What workers must have in common before they go on together, and before their gradients are summed; and what is
remembered of gradients that were.
"""

from __future__ import annotations

import math
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from pyg_sar.distributed import guard
from pyg_sar.distributed.group import Group, all_gather, gather_objects, host, is_local, rank_of, size_of, talking

# What is wrong with a gradient that was summed before.
TROUBLES = {
    1: "'sum_gradients' was called twice for one backward pass: the gradient of '{}' would count once for every "
    "worker. Call it once, after 'backward' and before 'optimizer.step()'.",
    2: "A backward pass added to the gradient of '{}', which was summed already and would count once for every worker. "
    "Of passes that accumulate gradients, call 'sum_gradients' once, after the last one.",
}
ROUNDING = 1e-5  # by how much losses may differ: what is made of parameters alone, on another processor
LOSSES = (
    "A mean by 'pyg_sar.global_mean' is the same on all of them, but not what stands beside it if it counts nodes or "
    "labels of one worker ('data.total_nodes' are those of all, and 'pyg_sar.global_sum(...)' adds up what each has), "
    "or what is drawn behind a readout, as by dropout (seed torch alike on all of them right before). Where losses are "
    "meant to differ, call 'backward' within 'with pyg_sar.allow_local():'."
)
SHAPES = (
    "Make them all alike: widths are not those of a worker's own labels ('data.num_classes' is the same on all), nor "
    "are there rows for a worker's nodes alone, which a 'pyg_sar.nn.NodeEmbedding(data, channels)' has."
)
CALLS = count()  # of `sum_gradients`


class Mark(NamedTuple):
    """What is remembered of a parameter whose gradient was summed."""

    grad: weakref.ref[Tensor]
    changes: int  # how often the gradient had been changed
    state: tuple[int, float]  # that of the parameter
    call: int  # the number of the call
    dirty: bool = False  # whether the gradient had been summed before, and is wrong if it is used


class Statement(NamedTuple):
    """What a worker says of itself before gradients are summed, each as one integer; of all workers, the columns."""

    guards: Any  # whether they are on
    parameters: Any  # a checksum of names, types and shapes
    settings: Any = 0  # one of the optimizer's numbers
    trouble: Any = 0  # what is wrong with a gradient, see `TROUBLES`, and with which one
    which: Any = 0
    totals: Any = 0  # the sum of the parameters' totals, and that of the losses since the last call, see `bits`
    loss: Any = 0
    passes: Any = 0  # the number of backward passes since then


def on_all(work: Callable[[], Any], doing: str, group: Group, mine: bool = False) -> Any:
    """Return what ``work`` returns on every worker, or only here; raise on all if it raises on one."""
    found, error = None, ""
    try:
        found = work()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    said = gathered((None if mine else found, error), group)
    if any(error for _, error in said):
        told = "; ".join(f"rank {r}: {error}" for r, (_, error) in enumerate(said) if error)
        fail(f"Could not {doing}. {told}", group)
    return found if mine else [value for value, _ in said]


def agree(what: str, mine: Sequence[Any], group: Group = None, advice: str = "Make them all alike.") -> None:
    """Raise on every worker unless ``mine`` is the same on all: gloo would abort, or add up what does not belong."""
    if size_of(group) == 1:
        return
    with talking("comparing what they have in common", group):
        said = torch.stack(all_gather(torch.tensor(checksum(mine), device=host(group)), group)).tolist()
    if not differs(said):
        return
    everything = [set(map(str, one)) for one in gathered(mine, group)]
    odd = sorted({m for one in everything for m in one if any(m not in other for other in everything)})
    some = f"({', '.join(odd[:3]) or 'in another order'}{', ...' if len(odd) > 3 else ''})"
    fail(f"The workers differ in {what}: {apart(said)} {some}. {advice}", group)


def compare(
    named: dict[str, Tensor], optimizer: torch.optim.Optimizer | None, losses: tuple[int, float], group: Group
) -> list[float]:
    """Raise on every worker unless all of them sum the gradients of the same parameters, once, and have the same values
    of them, of the losses that are known, and of the optimizer's numbers; return the sums of the parameters' values.
    """
    tensors, numbers = list(named.values()), dict(settings(optimizer))
    described = describe(named)
    totals = guard.totals(tensors) if guard.ON else []
    mine = Statement(int(guard.ON), checksum(described))
    if guard.ON:
        passes, loss = losses
        mine = Statement(
            1, mine.parameters, checksum(numbers), *trouble(tensors), bits(sum(totals)), bits(loss), passes
        )
    with talking("comparing what gradients they sum", group):
        found = torch.stack(all_gather(torch.tensor(mine, device=host(group)), group)).tolist()
    said = Statement(*zip(*found, strict=True))
    if differs(said.guards):
        fail(f"The workers differ in PYG_SAR_GUARDS: {apart(said.guards)}. Set it to 0 on all, or on none.", group)
    if differs(said.parameters):
        agree("the parameters that require a gradient", described, group, SHAPES)
    if differs(said.settings):
        fail(f"The workers' optimizers differ: {listed(gathered(numbers, group))}. Give all the same numbers.", group)
    if worst := max(said.trouble):
        fail(TROUBLES[worst].format(list(named)[said.which[said.trouble.index(worst)]]), group)
    if differs(said.loss):
        look_at_losses([number(loss) for loss in said.loss], said.passes, group)
    if differs(said.totals):
        look(named, totals, group)
    return totals


def look_at_losses(losses: Sequence[float], passes: Sequence[int], group: Group) -> None:
    """Raise if the losses of workers differ by more than rounding; not of those that left out backward passes, as one
    may without rows.
    """
    for number in set(passes):
        alike = [loss for loss, its in zip(losses, passes, strict=True) if its == number and math.isfinite(loss)]
        if alike and max(alike) - min(alike) > ROUNDING * max(map(abs, alike)):
            each = ", ".join(f"{loss:.6g} on rank {r}" for r, loss in enumerate(losses))
            fail(f"The workers differentiate different losses: {each}. {LOSSES}", group)


def describe(named: dict[str, Tensor]) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return name, type and shape of tensors."""
    return [(name, t.dtype, list(t.shape)) for name, t in named.items()]


def look(named: dict[str, Tensor], totals: Sequence[float], group: Group) -> None:
    """Raise if the values of parameters differ by more than rounding."""
    bounds = [guard.bound(t) for t in named.values()]
    everything = gathered((totals, bounds), group)
    odd = []
    for k, name in enumerate(named):
        bound = max(bounds[k] for _, bounds in everything)
        others = [0 if guard.alike(totals[k], everything[0][0][k], bound) else 1 for totals, _ in everything]
        odd += [(name, others)] if any(others) else []
    if odd:
        names = ", ".join(f"'{name}'" for name, _ in odd[:3])
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        advice = guard.STEPS if any(t in guard.SUMMED for t in named.values()) else f"{guard.START} {guard.NEVER}"
        fail(f"The workers hold different values of {names}{more}: {apart(odd[0][1])}. {advice}", group)


def trouble(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return what is wrong with one of the gradients, and with which of them."""
    for k, tensor in enumerate(tensors):
        mark, grad = guard.SUMMED.get(tensor), tensor.grad
        if mark is None:
            continue
        if mark.dirty and state_of(tensor) != mark.state:
            return 2, k
        again = False
        if grad is not None and mark.grad() is grad:
            changes = changes_of(grad) - mark.changes
            # Two of them may be a change to zeros and the next backward pass.
            again = changes == 0 or (changes == 1 and bool(grad.any()))
            if again and not has_stepped(mark.call):
                return 1 + changes, k
        guard.SUMMED[tensor] = mark._replace(dirty=again)
    return 0, 0


def has_stepped(call: int) -> bool:
    """Whether some parameter changed since its gradient was summed by this or a later call: a gradient of others that
    is never used may be summed as often as one likes.
    """
    # Simulated workers add to it meanwhile.
    known = [(ref(), mark.state) for ref, mark in list(guard.SUMMED.data.items()) if mark.call >= call]
    return any(t is not None and state_of(t) != state for t, state in known)


def state_of(tensor: Tensor, total: float | None = None) -> tuple[int, float]:
    """Return what changes with a parameter; tables of nodes may be too large to be summed up."""
    if is_local(tensor):
        return changes_of(tensor), 0.0
    return changes_of(tensor), guard.totals([tensor])[0] if total is None else total


def remember(tensors: Sequence[Tensor], totals: Sequence[float], tables: Sequence[Tensor]) -> None:
    """Remember that gradients were summed, or are complete, as those of tables of nodes; without guards there are no
    sums of parameters.
    """
    call = next(CALLS)
    totals = [*totals, *[0.0] * len(tables)]
    for tensor, total in zip([*tensors, *tables], totals, strict=True) if guard.ON else ():
        if tensor.grad is not None:
            before = guard.SUMMED.get(tensor)
            dirty = before is not None and before.dirty
            mark = Mark(weakref.ref(tensor.grad), changes_of(tensor.grad), state_of(tensor, total), call, dirty)
            guard.SUMMED[tensor] = mark


def changes_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


def settings(optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, str]]:
    """Yield the numbers by which an optimizer steps, without the last digits, which a scheduler may round."""
    groups = [] if optimizer is None else optimizer.param_groups
    for k, group in enumerate(groups):
        for name, value in group.items():
            if name == "params":
                continue
            numbers = value if isinstance(value, (tuple, list)) else (value,)
            numbers = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in numbers]
            if all(isinstance(v, (int, float)) for v in numbers):
                text = ", ".join(f"{v:.12g}" for v in numbers)
                yield name if len(groups) == 1 else f"{name} of group {k}", text


def listed(numbers: Sequence[dict[str, str]]) -> str:
    """Return the numbers that differ, with those who have them."""
    texts = []
    for name in dict.fromkeys(name for one in numbers for name in one):
        said = [one.get(name, "none") for one in numbers]
        if differs(said):
            texts.append(", ".join(f"{name}={v} on ranks {ranks(said, v)}" for v in dict.fromkeys(said)))
    return "; ".join(texts[:3])


def differs(said: Sequence[Any]) -> bool:
    """Whether not all have said the same."""
    return any(one != said[0] for one in said)


def ranks(said: Sequence[Any], value: Any) -> list[int]:
    """Return who has said something."""
    return [rank for rank, one in enumerate(said) if one == value]


def apart(said: Sequence[Any]) -> str:
    """Return who differs from whom."""
    return f"ranks {ranks(said, said[0])} have others than the rest"


def bits(value: float) -> int:
    """Return the bits of a number as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def number(value: int) -> float:
    """Return the number of some :func:`bits`."""
    return float(struct.unpack("<d", struct.pack("<q", value))[0])


def checksum(value: Any) -> int:
    """Return a number by which values can be compared."""
    return zlib.crc32(repr(value).encode())


def gathered(value: Any, group: Group) -> list[Any]:
    """Return the values of all workers."""
    return gather_objects(value, group, "comparing what they have in common")


def fail(why: str, group: Group) -> NoReturn:
    """Raise."""
    raise RuntimeError(f"[rank {rank_of(group)}] {why}")
