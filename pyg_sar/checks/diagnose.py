r"""Says what differs between a step in one process and on workers, what that usually means, and what to do."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_sar.checks.record import LIBRARIES, Place, Record
from pyg_sar.checks.run import LEAST, Problem, Run, Team, largest

Found = tuple[str, BaseException | None]
# What to do about functions that see the rows of one worker alone, by a part of their names.
ADVICE = {
    "cross_entropy nll_loss mse_loss l1_loss huber_loss entropy kl_div margin embedding_loss": "Take the loss of every "
    "node or edge (`reduction=\"none\"`) and their mean over all workers by `pyg_sar.global_mean`.",
    "batch_norm instance_norm group_norm BatchNorm InstanceNorm GraphNorm PairNorm": "Take the layer of `pyg_sar.nn`, or "
    "`pyg_sar.nn.convert` the model: it normalises by the rows of all workers.",
    "one_hot max min amax amin unique bincount argmax": "What depends on the largest label or id of all nodes must be "
    "the same on all workers: take it from the whole graph, such as `data.num_classes`, before the step.",
    "svd eig qr pca": "Do it on the whole graph, before `pyg_sar.partition`.",
    "mean std var sum norm median softmax": "A mean over all workers is `pyg_sar.global_mean` (of a loss); within a "
    "model sum by `pyg_sar.global_sum`, which has a gradient, or use a layer of `pyg_sar.nn`.",
}
ELSE = "Do it on the whole graph before `pyg_sar.partition`, or through `pyg_sar.global_sum` or a layer of `pyg_sar.nn`."
WIDTHS = (
    "Usually a width or a number of classes was taken from a worker's own labels, such as `int(y.max()) + 1` or "
    "`F.one_hot(y)`, or only some of the workers call a layer or a sum.\n"
    "Take such numbers from the whole graph (`data.num_classes`), and call the same layers on every worker."
)


def diagnose(problem: Problem, one: Team) -> Found | None:
    """Compare with two workers; return what is wrong, and the error behind it if there is one."""
    (whole,) = one.runs
    if not whole.values:
        return "The step returned nothing that can be compared.\nReturn the loss, or (loss, output), or a dictionary.", None
    if all(grad is None for grad in whole.grads.values()):
        return (
            "No parameter of the model has a gradient after the step.\nIt did not call `loss.backward()`, cleared the "
            "gradients afterwards, or used another model than the one it was called with.\nSee that the step leaves "
            "gradients on its first argument."
        ), None
    team = problem.team(2)
    if any(run.error for run in team.runs):
        return errors(team)
    early = next((run.recorder.early for run in team.runs if run.recorder.early), "")
    if early:
        return (
            f"Gradients are read by {early} before `pyg_sar.sum_gradients`.\nUntil then they are a worker's share, whose "
            f"norm is not that of the gradient: clipping differs from one process.\nCall `pyg_sar.sum_gradients` right "
            f"after `loss.backward()`, and clip afterwards."
        ), None
    text = values(problem, whole, team) or gradients(problem, whole, team) or pygs_mean(whole)
    return (text, None) if text else None


def failure(run: Run) -> str:
    """Say that a step failed in one process."""
    assert run.error is not None
    return (
        f"The step fails on the small graph in one process already: {told(run.error)}.\nThe small graph has rows drawn "
        f"from those of `data`, other nodes and edges, and about 40 nodes of a type: what the step reads from elsewhere "
        f"(features, masks, numbers of nodes) does not fit it.\nTake all that belongs to nodes and edges from the `data` "
        f"that the step is called with, and the model from its first argument."
    )


def told(error: BaseException) -> str:
    """Return an error in one line, and where it was raised."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (*LIBRARIES, "pyg_sar"):
            place = Place(frame.f_code.co_filename, line)
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def errors(team: Team) -> Found:
    """Say which worker failed, if it was not for another one."""
    failed = [(rank, run.error) for rank, run in enumerate(team.runs) if run.error is not None]
    own = [(rank, e) for rank, e in failed if not (team.stuck and team.stuck in str(e))]
    together = own and any(text in str(own[0][1]) for text in ("that differ between workers", "called different things"))
    rank, error = (own or failed)[0]
    inside = next((f", in {run.recorder.running[-1]}" for run in team.runs if run.recorder.running), "")
    if not own or together:
        what = str(error).rpartition("(")[0] if together else team.stuck
        return (
            f"The workers do not find together{inside}: {(what or str(error)).strip()}.{apart(team)}\n{WIDTHS}"
        ), error
    ranks = "every worker" if len(own) == len(team.runs) else f"worker {rank} of {len(team.runs)}"
    first = f"The step runs in one process, but on {ranks} it raises{inside} {told(error)}.{apart(team)}"
    if frame_package(error) == "pyg_sar":
        return first, error  # which says itself what to do
    return (
        f"{first}\nUsually global ids are used as numbers of a worker's rows, or a width was taken from a worker's own "
        f"labels or numbers of nodes.\nTake rows by masks, compare ids with `data.n_id`, and take numbers of classes and "
        f"nodes from the whole graph (`data.num_classes`, `data.total_nodes`)."
    ), error


def frame_package(error: BaseException | None) -> str:
    """Return whose code raised an error."""
    frames = list(traceback.walk_tb(error.__traceback__ if error else None))
    return frames[-1][0].f_globals.get("__name__", "").partition(".")[0] if frames else ""


def apart(team: Team) -> str:
    """Return where the workers first made tensors of different widths."""
    for one, other in zip(*(run.recorder.records for run in team.runs), strict=False):
        if one.key != other.key:
            return ""
        shapes = [[list(t.shape[1:]) for t in r.tensors] for r in (one, other)]
        if shapes[0] != shapes[1]:
            widths = " and ".join(str([list(t.shape) for t in r.tensors])[1:-1] for r in (one, other))
            return f" {quoted(one)} makes {widths} of them."
        scalars = [[t.item() for t in r.tensors if t.dim() == 0 and not t.is_floating_point()] for r in (one, other)]
        if scalars[0] != scalars[1] and "max" in one.what:
            return f" {quoted(one)} makes {scalars[0][0]} and {scalars[1][0]} of them."
    return ""


def quoted(record: Record) -> str:
    """Return what was called, and where."""
    what = record.what if record.module else f"'{record.what}'"
    return f"{what} ({record.place})"


def values(problem: Problem, whole: Run, team: Team) -> str:
    """Say which numbers that the step returned, or which buffers, differ, and where that begins."""
    names = [set(run.values) for run in (whole, *team.runs)]
    if any(name != names[0] for name in names):
        return (
            f"The step returned {', '.join(sorted(names[0]))} in one process, but {', '.join(sorted(names[1]))} on a "
            f"worker.\nIt decides by what a worker holds.\nReturn the same on every worker."
        )
    wrong = [n for n in whole.values if not problem.agrees(whole, team, whole.values[n], [r.values[n] for r in team.runs])]
    buffers = [n for n, b in whole.buffers.items() if not all(problem.same(r.buffers[n], b) for r in team.runs)]
    if not wrong and not buffers:
        return ""
    what = differs(problem, whole, team, wrong[0]) if wrong else f"The buffer '{buffers[0]}' differs from one process."
    if whole.recorder.random:
        return f"{what}\n{drawn(whole)}"
    start = culprit(problem, whole, team)
    if start is not None:
        share = shares(problem, whole, team, wrong)
        return f"{what}\n{begins(start)}{share}\n{advice(start)}{unsummed(team)}"
    return (
        f"{what}\nUsually a mean, or another number of all nodes, was taken from a worker's rows.\n"
        f"{ADVICE['mean std var sum norm median softmax']}{unsummed(team)}"
    )


def drawn(whole: Run) -> str:
    """Say that random numbers make a comparison impossible."""
    return (
        f"The step draws random numbers from {whole.recorder.random}, which on workers are others than in one process: "
        f"nothing can be compared.\nDraw them before the step and pass them in `data`, or by `torch.rand` with a row for "
        f"each node or edge; what chooses nodes or edges for all workers belongs before `pyg_sar.partition`."
    )


def differs(problem: Problem, whole: Run, team: Team, name: str) -> str:
    """Say how a returned value differs."""
    expected, found = whole.values[name], [run.values[name] for run in team.runs]
    if expected.numel() == 1 and all(t.numel() == 1 for t in found):
        each = ", ".join(f"{t.item():.6g}" for t in found)
        return f"'{name}' is {each} on two workers, and {expected.item():.6g} in one process."
    rows = problem.rows(whole, team, expected, found)
    if rows is None:
        shapes = " and ".join(str(list(t.shape)) for t in found)
        return f"'{name}' differs: it is of shape {shapes} on workers, {list(expected.shape)} in one process."
    off = (rows.double() - expected.double()).abs().flatten(1) if rows.dim() > 1 else (rows - expected).abs().view(-1, 1)
    bad = int((off.amax(1) > problem.tolerance * largest([expected])).sum())
    return f"{bad} of {len(rows)} rows of '{name}' differ from those in one process, by up to {off.max().item():.3g}."


def shares(problem: Problem, whole: Run, team: Team, wrong: list[str]) -> str:
    """Say if the returned numbers of workers sum up to that of one process."""
    for name in wrong:
        found, expected = [run.values[name] for run in team.runs], whole.values[name]
        if expected.numel() == 1 and problem.same(torch.stack([t.double().view(()) for t in found]).sum(), expected.view(())):
            return f" The values of '{name}' on workers are shares, which sum up to it."
    return ""


def culprit(problem: Problem, whole: Run, team: Team) -> Record | None:
    """Return the first call whose numbers are neither those of one process, nor a worker's rows or share of them."""
    each = [dict(numbered(run)) for run in team.runs]
    for key, record in numbered(whole):
        others = [found.get(key) for found in each]
        if any(other is None or len(other.tensors) != len(record.tensors) for other in others):
            continue
        for k, expected in enumerate(record.tensors):
            if not problem.agrees(whole, team, expected, [o.tensors[k] for o in others if o is not None], True):
                return record
    return None


def numbered(run: Run) -> Iterator[tuple[Any, Record]]:
    """Yield records with keys that tell the first call at a place from the second one."""
    count: Counter = Counter()
    for record in run.recorder.records:
        count[record.key] += 1
        yield (record.key, count[record.key]), record


def begins(record: Record) -> str:
    """Say where numbers become others."""
    return f"That begins at {quoted(record)}, which sees the rows of one worker alone."


def advice(record: Record) -> str:
    """Say what to do about a call."""
    return next((text for names, text in ADVICE.items() if any(n in record.what for n in names.split())), ELSE)


def unsummed(team: Team) -> str:
    """Say so if gradients were not summed either."""
    missing = all("sum" not in run.recorder.events for run in team.runs)
    return " The gradients are not summed either: call `pyg_sar.sum_gradients(model)` after backward." if missing else ""


def gradients(problem: Problem, whole: Run, team: Team) -> str:
    """Say which gradients differ, and why."""
    floor = LEAST * largest(list(whole.grads.values()))

    def equal(found: Tensor | None, expected: Tensor | None) -> bool:
        if found is None or expected is None:
            return largest([found, expected]) <= problem.tolerance * max(floor, 1e-30)
        return problem.same(found, expected, max(largest([expected]), floor))

    one, *others = team.runs
    names = list(whole.grads)
    wrong = [n for n in names if not all(equal(run.grads[n], whole.grads[n]) for run in team.runs)]
    if not wrong:
        return ""
    if whole.recorder.random:
        return f"The gradient of '{wrong[0]}' differs.\n{drawn(whole)}"
    if any(not equal(run.grads[n], one.grads[n]) for run in others for n in names):
        return unlike(wrong, team)
    events = one.recorder.events
    sums, passes = events.count("sum"), events.count("backward")
    factors = {n: factor(one.grads[n], whole.grads[n]) for n in wrong}
    what = f"The gradient of {listed(wrong)} {size(factors[wrong[0]])} on two workers as in one process."
    if sums > 1:
        return (
            f"{what}\n`pyg_sar.sum_gradients` ran {sums} times after {passes} backward passes: what was summed before is "
            f"summed once more.\nCall it once, after the last backward pass and before the optimizer's step."
        )
    return f"{what}\n{growth(problem, whole, one, wrong, factors)}"


def unlike(wrong: list[str], team: Team) -> str:
    """Say why gradients differ between workers."""
    what = f"The gradient of {listed(wrong)} is another one on each worker."
    events = team.runs[0].recorder.events
    if "sum" not in events:
        return (
            f"{what}\n`pyg_sar.sum_gradients` did not run: every worker has its share of the gradient, and their models "
            f"will drift apart.\nCall `pyg_sar.sum_gradients(model)` after `loss.backward()`, for all modules that train."
        )
    if "backward" in events[len(events) - events[::-1].index("sum") :]:
        return (
            f"{what}\n`pyg_sar.sum_gradients` ran before the last backward pass, whose share is not summed.\n"
            f"Call it once, after the last backward pass."
        )
    return (
        f"{what}\nThey were summed over workers for other parameters only, or changed afterwards by what a worker holds.\n"
        f"Give `pyg_sar.sum_gradients` the module that holds all of them, and change gradients alike on all workers."
    )


def growth(problem: Problem, whole: Run, two: Run, wrong: list[str], factors: dict[str, float | None]) -> str:
    """Say what a gradient means that grows with the number of workers, or does not."""
    three = problem.team(3).runs[0]
    if three.error is None and all(linear(problem, [r.grads[n] for r in (whole, two, three)]) for n in wrong):
        every = all(f is not None and abs(f - 2) < 1e-3 for f in factors.values()) and len(wrong) > 1
        more = ", or the whole loss is one that every worker has in full," if every else ""
        return (
            f"It grows with the number of workers: a term of the loss that every worker adds{more} such as a penalty on "
            f"weights, is summed by `sum_gradients` as often as there are workers.\nWrap that term in "
            f"`pyg_sar.replicated`, or use the optimizer's `weight_decay`."
        )
    if all(f is not None and abs(f - 0.5) < 1e-3 for f in factors.values()):
        return (
            "It was averaged over the workers, as DistributedDataParallel does, where shares must be summed.\n"
            "Use `pyg_sar.global_mean` and `pyg_sar.sum_gradients`, and divide nothing by the number of workers."
        )
    return (
        "The numbers are right, but not their gradients: usually a sum over workers has none where it needs one, or some "
        "loss is not shared out to workers.\nUse `pyg_sar.global_sum` within a model, `pyg_sar.global_mean` for losses."
    )


def linear(problem: Problem, grads: list[Tensor | None]) -> bool:
    """Whether a gradient grows by the same with every worker."""
    one, two, three = (torch.zeros(()) if g is None else g.double() for g in grads)
    by = (two - one, three - two)
    return problem.same(by[1], by[0], largest([*by]) + 1e-3 * largest([one])) and largest([by[0]]) > 0


def factor(found: Tensor | None, expected: Tensor | None) -> float | None:
    """Return by which factor a gradient differs, if there is one."""
    if found is None or expected is None or not largest([expected]):
        return None
    found, expected = found.double(), expected.double()
    ratio = float((found * expected).sum() / expected.square().sum())
    return ratio if torch.allclose(found, ratio * expected, rtol=0, atol=1e-4 * largest([found])) else None


def size(ratio: float | None) -> str:
    """Say how large a gradient is."""
    if ratio is None:
        return "is not the same"
    return "is twice as large" if abs(ratio - 2) < 1e-3 else f"is {ratio:.4g} times as large"


def listed(names: list[str]) -> str:
    """Return some names."""
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


def pygs_mean(whole: Run) -> str:
    """Say if a mean is another one than PyG's."""
    if not whole.recorder.means:
        return ""
    return (
        f"`pyg_sar.global_mean` of a loss with `weight` or `ignore_index` ({whole.recorder.means}) is not PyG's mean.\n"
        f"PyG divides by the sum of the weights of all labels that count, not by their number.\n"
        f"Give `pyg_sar.global_mean` these weights."
    )
