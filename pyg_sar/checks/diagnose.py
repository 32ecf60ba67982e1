r"""Says what differs between a step in one process and on workers, what that usually means, and what to do."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_sar.caller import raised_at
from pyg_sar.checks.record import Record
from pyg_sar.checks.run import LEAST, Problem, Run, Team, largest

MEAN = "mean std var sum norm median softmax"
# What to do about functions, and modules, that see the rows of one worker alone, by a part of their names.
ADVICE = {
    "cross_entropy nll_loss mse_loss l1_loss huber_loss entropy kl_div margin embedding_loss": "Take the loss of every "
    'node or edge (`reduction="none"`), and their mean over all workers by `pyg_sar.global_mean`.',
    "batch_norm batchnorm instance_norm instancenorm graphnorm pairnorm": "Take the layer of `pyg_sar.nn`, or "
    "`pyg_sar.nn.convert` the model: it normalises by the rows of all workers.",
    MEAN: "A mean over all workers is `pyg_sar.global_mean` (of a loss); within a model sum by `pyg_sar.global_sum`, "
    "which has a gradient, or use a layer of `pyg_sar.nn`.",
    "one_hot max min amax amin unique bincount argmax": "What depends on the largest label or id of all nodes must be "
    "the same on all workers: take it from the whole graph, such as `data.num_classes`, before the step.",
    "svd eig qr pca": "Do it on the whole graph, before `pyg_sar.partition`.",
}
ELSE = "Do it on the whole graph before `pyg_sar.partition`, by `pyg_sar.global_sum`, or by a layer of `pyg_sar.nn`."


class Finding(NamedTuple):
    """What is wrong.

    Args:
        what: What differs.
        means: What that usually means.
        do: What to do.
        cause: The error behind it, if there is one.
    """

    what: str
    means: str
    do: str
    cause: BaseException | None = None

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.what, self.means, self.do)))


def diagnose(problem: Problem, one: Team) -> Finding | None:
    """Compare a step in one process with two workers, and return what is wrong."""
    (whole,) = one.runs
    if not whole.values:
        return Finding(
            "The step returned nothing.",
            "There is no loss that could be compared.",
            "Return the loss, or (loss, output), or a dictionary.",
        )
    if all(grad is None for grad in whole.grads.values()):
        return Finding(
            "No parameter of the model has a gradient after the step.",
            "It did not call `loss.backward()`, or cleared the gradients afterwards.",
            "See that the step leaves gradients on the model that it was called with.",
        )
    team = problem.team(2)
    if any(run.error for run in team.runs):
        return errors(team)
    early = next((run.recorder.early for run in team.runs if run.recorder.early), "")
    if early:
        return Finding(
            f"Gradients are read by {early} before `pyg_sar.sum_gradients`.",
            "Until then they are a worker's share, whose norm is not that of the gradient.",
            "Call `pyg_sar.sum_gradients` right after `loss.backward()`, and clip afterwards.",
        )
    return values(problem, whole, team) or gradients(problem, whole, team)


def failure(error: BaseException) -> Finding:
    """Say that a step failed in one process; errors of this library speak for themselves."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    *_, last = (frame for frame in frames if frame.f_code.co_name != "__torch_function__")  # which lets functions run
    if last.f_globals.get("__name__", "").startswith("pyg_sar."):
        return Finding(f"The step fails in one process already: {told(error)}.", "", "", error)
    return Finding(
        f"The step fails on the small graph in one process already: {told(error)}.",
        "That graph has rows drawn from those of `data`, but other nodes and edges, about 40 nodes of a type: what the "
        "step reads from elsewhere (features, masks, numbers of nodes) does not fit it.",
        "Take all that belongs to nodes and edges from the `data` that the step is called with.",
        error,
    )


def told(error: BaseException) -> str:
    """Return an error in one line, and where it was raised."""
    place = raised_at(error)
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def errors(team: Team) -> Finding:
    """Say which worker failed, unless it failed because of another one."""
    failed = [(rank, run.error) for rank, run in enumerate(team.runs) if run.error is not None]
    own = [(rank, e) for rank, e in failed if not (team.stuck and team.stuck in str(e))]
    rank, error = (own or failed)[0]
    inside = next((f", in {run.recorder.running[-1]}" for run in team.runs if run.recorder.running), "")
    unlike = any(text in str(error) for text in ("' of tensors that differ", "called different things"))
    if not own or unlike:
        what = str(error.__cause__ or error) if unlike else team.stuck
        return Finding(
            f"The workers do not find together{inside}: {what}.{apart(team)}",
            "Usually a width or a number of classes was taken from a worker's own labels, such as `int(y.max()) + 1` "
            "or `F.one_hot(y)`, or only some of the workers call a layer or a sum.",
            "Take such numbers from the whole graph (`data.num_classes`), and call the same layers on every worker.",
            error,
        )
    ranks = "every worker" if len(own) == len(team.runs) else f"worker {rank} of {len(team.runs)}"
    what = f"The step runs in one process, but on {ranks} it raises{inside} {told(error)}.{apart(team)}"
    if isinstance(error, NotImplementedError) or str(error).startswith("[rank"):
        return Finding(what, "", "", error)  # which says itself what to do
    return Finding(
        what,
        "Usually global ids are used as numbers of a worker's rows, or a width was taken from a worker's own labels.",
        "Take rows by masks, compare ids with `data.n_id`, and take numbers of classes and nodes from the whole graph "
        "(`data.num_classes`, `data.total_nodes`).",
        error,
    )


def apart(team: Team) -> str:
    """Return where the workers first made tensors of different widths, or took another maximum."""
    for one, other in zip(*(run.recorder.records for run in team.runs), strict=False):
        if one.key != other.key:
            return ""
        shapes = [[list(t.shape[1:]) for t in r.tensors] for r in (one, other)]
        if shapes[0] != shapes[1]:
            widths = " and ".join(str([list(t.shape) for t in r.tensors])[1:-1] for r in (one, other))
            return f" {quoted(one)} makes {widths} of them."
        mine, others = (
            [t.item() for t in r.tensors if t.dim() == 0 and not t.is_floating_point()] for r in (one, other)
        )
        if mine != others and "max" in one.what:
            return f" {quoted(one)} makes {mine[0]} and {others[0]} of them."
    return ""


def quoted(record: Record) -> str:
    """Return what was called, and where."""
    return f"{record.what if record.module else repr(record.what)} ({record.place})"


def values(problem: Problem, whole: Run, team: Team) -> Finding | None:
    """Say which numbers that the step returned, or which buffers, differ, and where that begins."""
    names = set(whole.values)
    odd = next((set(run.values) for run in team.runs if set(run.values) != names), None)
    if odd is not None:
        return Finding(
            f"The step returned {sorted(names)} in one process, but {sorted(odd)} on a worker.",
            "It decides by what a worker holds.",
            "Return the same on every worker.",
        )
    each = {n: [run.values[n] for run in team.runs] for n in names}
    wrong = [n for n, value in whole.values.items() if not problem.agrees(whole, team, value, each[n])]
    buffers = [n for n, b in whole.buffers.items() if not all(problem.same(r.buffers[n], b) for r in team.runs)]
    if not wrong and not buffers:
        return None
    what = differs(problem, whole, team, wrong[0]) if wrong else f"The buffer '{buffers[0]}' differs from one process."
    if whole.recorder.random:
        return drawn(whole, what)
    start, more = culprit(problem, whole, team), unsummed(team)
    if start is not None:
        begins = f"That begins at {quoted(start)}, which sees the rows of one worker alone."
        return Finding(what, begins, advice(start) + more)
    if wrong and shared(problem, whole, team, wrong[0]):
        return Finding(
            what,
            "These are shares, which sum up to it: right for gradients, but a number that differs between workers "
            "misleads schedulers, early stopping and logs.",
            "Return the same on all workers: take the mean by `pyg_sar.global_mean`, or sum up what you return by "
            f"`pyg_sar.all_reduce`.{more}",
        )
    return Finding(
        what, "Usually a mean, or another number of all nodes, was taken from a worker's rows.", ADVICE[MEAN] + more
    )


def drawn(whole: Run, what: str) -> Finding:
    """Say that random numbers make a comparison impossible."""
    return Finding(
        what,
        f"The step draws random numbers from {whole.recorder.random}, which on workers are others than in one process: "
        "nothing can be compared.",
        "Draw them before the step and pass them in `data`, or by `torch.rand` with a row for each node or edge; what "
        "chooses nodes or edges for all workers belongs before `pyg_sar.partition`.",
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
        return f"'{name}', of shape {shapes} on two workers and {list(expected.shape)} in one process, differs."
    off = (rows.double() - expected.double()).abs().view(len(rows), -1).amax(1)
    bad = int((off > problem.tolerance * largest([expected])).sum())
    return f"{bad} of {len(rows)} rows of '{name}' differ from those in one process, by up to {off.max().item():.3g}."


def shared(problem: Problem, whole: Run, team: Team, name: str) -> bool:
    """Whether the returned numbers of workers sum up to that of one process."""
    found, expected = [run.values[name].double() for run in team.runs], whole.values[name].double()
    alike = all(t.shape == expected.shape for t in found)
    return alike and problem.same(torch.stack(found).sum(0), expected, largest([*found, expected]))


def culprit(problem: Problem, whole: Run, team: Team) -> Record | None:
    """Return the first call whose numbers are neither those of one process, nor a worker's rows or share of them."""
    each = [dict(numbered(run)) for run in team.runs]
    for key, record in numbered(whole):
        others = [found[key] for found in each if key in found]
        if len(others) < len(each) or any(len(other.tensors) != len(record.tensors) for other in others):
            continue
        for k, expected in enumerate(record.tensors):
            if not problem.agrees(whole, team, expected, [other.tensors[k] for other in others], inner=True):
                return record
    return None


def numbered(run: Run) -> Iterator[tuple[Any, Record]]:
    """Yield records with keys that tell the first call at a place from the second one."""
    count: Counter = Counter()
    for record in run.recorder.records:
        count[record.key] += 1
        yield (record.key, count[record.key]), record


def advice(record: Record) -> str:
    """Say what to do about a call."""
    name = record.what.rpartition("(")[2].lower()
    return next((text for names, text in ADVICE.items() if any(n in name for n in names.split())), ELSE)


def unsummed(team: Team) -> str:
    """Say so if gradients were not summed either."""
    missing = all("sum" not in run.recorder.events for run in team.runs)
    return " Gradients are not summed either: call `pyg_sar.sum_gradients(model)` after backward." if missing else ""


def gradients(problem: Problem, whole: Run, team: Team) -> Finding | None:
    """Say which gradients differ, and why."""
    floor = LEAST * largest(list(whole.grads.values()))

    def equal(found: Tensor | None, expected: Tensor | None) -> bool:
        if found is None or expected is None:
            return largest([found, expected]) <= problem.tolerance * floor
        return problem.same(found, expected, max(largest([expected]), floor))

    one, *others = team.runs
    wrong = [n for n, grad in whole.grads.items() if not all(equal(run.grads[n], grad) for run in team.runs)]
    if not wrong:
        return None
    if whole.recorder.random:
        return drawn(whole, f"The gradient of {listed(wrong)} differs.")
    if any(not equal(run.grads[n], one.grads[n]) for run in others for n in wrong):
        return unlike(wrong, one.recorder.events)
    factors = [factor(one.grads[n], whole.grads[n]) for n in wrong]
    what = f"The gradient of {listed(wrong)} {size(factors)} on two workers as in one process."
    sums, passes = (one.recorder.events.count(name) for name in ("sum", "backward"))
    if sums > 1:
        return Finding(
            what,
            f"`pyg_sar.sum_gradients` ran {sums} times after {passes} backward passes: it adds up sums again.",
            "Call it once, after the last backward pass and before the optimizer's step.",
        )
    return growth(problem, whole, one, wrong, factors, what)


def unlike(wrong: list[str], events: list[str]) -> Finding:
    """Say why gradients differ between workers."""
    what = f"The gradient of {listed(wrong)} is another one on each worker."
    if "sum" not in events:
        return Finding(
            what,
            "`pyg_sar.sum_gradients` did not run: every worker has its share, and their models will drift apart.",
            "Call `pyg_sar.sum_gradients(model)` after `loss.backward()`, for all modules that train.",
        )
    if "backward" in events[len(events) - events[::-1].index("sum") :]:
        return Finding(
            what,
            "`pyg_sar.sum_gradients` ran before the last backward pass, whose share is not summed.",
            "Call it once, after the last backward pass.",
        )
    return Finding(
        what,
        "Others were summed over workers, or they were changed afterwards by what a worker holds.",
        "Give `pyg_sar.sum_gradients` the module that holds all of them, and change gradients alike on all workers.",
    )


def growth(problem: Problem, whole: Run, two: Run, wrong: list[str], factors: list[float | None], what: str) -> Finding:
    """Say what a gradient means that grows with the number of workers, or does not."""
    three = problem.team(3).runs[0]
    if three.error is None and all(linear(problem, [r.grads[n] for r in (whole, two, three)]) for n in wrong):
        if None in factors:
            what = f"A part of the gradient of {listed(wrong)} is twice as large on two workers as in one process."
        return Finding(
            what,
            "It grows with the number of workers: a term of the loss that every worker adds in full, such as a penalty "
            "on weights, is summed as often as there are workers.",
            "Wrap that term in `pyg_sar.replicated`, or use the optimizer's `weight_decay`.",
        )
    if all(f is not None and abs(f - 0.5) < 1e-3 for f in factors):
        return Finding(
            what,
            "It was averaged over the workers, as DistributedDataParallel does, where shares must be summed.",
            "Use `pyg_sar.global_mean` and `pyg_sar.sum_gradients`, and divide nothing by the number of workers.",
        )
    return Finding(
        what,
        "The numbers that the step returned are right, but not their gradients: usually a sum over workers has none "
        "where it needs one, or some loss is not shared out to workers.",
        "Use `pyg_sar.global_sum` within a model, and `pyg_sar.global_mean` for losses.",
    )


def linear(problem: Problem, grads: list[Tensor | None]) -> bool:
    """Whether a gradient grows by the same with every worker."""
    one, two, three = (torch.zeros(()) if g is None else g.double() for g in grads)
    first, second = two - one, three - two
    return largest([first]) > 0 and problem.same(second, first, largest([first, second]) + 1e-3 * largest([one]))


def factor(found: Tensor | None, expected: Tensor | None) -> float | None:
    """Return by which factor a gradient differs, if there is one."""
    if found is None or expected is None or not largest([expected]):
        return None
    found, expected = found.double(), expected.double()
    ratio = float((found * expected).sum() / expected.square().sum())
    return ratio if torch.allclose(found, ratio * expected, rtol=0, atol=1e-4 * largest([found])) else None


def size(factors: list[float | None]) -> str:
    """Say how large gradients are."""
    first = factors[0]
    if first is None or any(f is None or abs(f - first) > 1e-3 for f in factors):
        return "is not the same"
    return "is twice as large" if abs(first - 2) < 1e-3 else f"is {first:.4g} times as large"


def listed(names: list[str]) -> str:
    """Return some names."""
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
