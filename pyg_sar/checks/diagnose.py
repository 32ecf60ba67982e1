r"""Says what differs between a step in one process and on workers, what that usually means, and what to do."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_sar.caller import raised_at
from pyg_sar.checks.record import CheckError, Record
from pyg_sar.checks.run import LEAST, Problem, Run, Team, largest, rows_of_all

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
# What a difference usually means, and what to do.
MEANS = {
    "nothing returned": "There is no loss that could be compared.\n"
    "Return the loss, or (loss, output), or a dictionary.",
    "no gradient": "It did not call `loss.backward()`, or cleared the gradients afterwards.\n"
    "See that the step leaves gradients on the model that it was called with.",
    "read early": "Until then they are a worker's share, whose norm is not that of the gradient.\n"
    "Call `pyg_sar.sum_gradients` right after `loss.backward()`, and clip afterwards.",
    "fails": "That graph has rows drawn from those of `data`, but other nodes and edges, about 40 nodes of a type: "
    "what the step reads from elsewhere (features, masks, numbers of nodes) does not fit it.\n"
    "Take all that belongs to nodes and edges from the `data` that the step is called with.",
    "not together": "Usually a width or a number of classes was taken from a worker's own labels, such as "
    "`int(y.max()) + 1` or `F.one_hot(y)`, or only some of the workers call a layer or a sum.\n"
    "Take such numbers from the whole graph (`data.num_classes`), and call the same layers on every worker.",
    "fails on workers": "Usually global ids are used as numbers of a worker's rows, or a width was taken from a "
    "worker's own labels.\nTake rows by masks, compare ids with `data.n_id`, and take numbers of classes and nodes "
    "from the whole graph (`data.num_classes`, `data.total_nodes`).",
    "other names": "It decides by what a worker holds.\nReturn the same on every worker.",
    "shares": "These are shares, which sum up to it: right for gradients, but a number that differs between workers "
    "misleads schedulers, early stopping and logs.\nReturn the same on all workers: take the mean by "
    "`pyg_sar.global_mean`, or sum up what you return by `pyg_sar.all_reduce`.",
    "values": "Usually a mean, or another number of all nodes, was taken from a worker's rows.\n" + ADVICE[MEAN],
    "random": "Draw them before the step and pass them in `data`, or by `torch.rand` with a row for each node or edge; "
    "what chooses nodes or edges for all workers belongs before `pyg_sar.partition`.",
    "summed often": "Call it once, after the last backward pass and before the optimizer's step.",
    "not summed": "`pyg_sar.sum_gradients` did not run: every worker has its share, and their models will drift "
    "apart.\nCall `pyg_sar.sum_gradients(model)` after `loss.backward()`, for all modules that train.",
    "summed before": "`pyg_sar.sum_gradients` ran before the last backward pass, whose share is not summed.\n"
    "Call it once, after the last backward pass.",
    "others summed": "Others were summed over workers, or they were changed afterwards by what a worker holds.\nGive "
    "`pyg_sar.sum_gradients` the module that holds all of them, and change gradients alike on all workers.",
    "grows": "It grows with the number of workers: a term of the loss that every worker adds in full, such as a "
    "penalty on weights, is summed as often as there are workers.\n"
    "Wrap that term in `pyg_sar.replicated`, or use the optimizer's `weight_decay`.",
    "averaged": "It was averaged over the workers, as DistributedDataParallel does, where shares must be summed.\n"
    "Use `pyg_sar.global_mean` and `pyg_sar.sum_gradients`, and divide nothing by the number of workers.",
    "gradients": "The numbers that the step returned are right, but not their gradients: usually a sum over workers "
    "has none where it needs one, or some loss is not shared out to workers.\n"
    "Use `pyg_sar.global_sum` within a model, and `pyg_sar.global_mean` for losses.",
}


def diagnose(problem: Problem, whole: Run) -> None:
    """Compare a step in one process with two workers, and raise what is wrong."""
    if not whole.values:
        raise CheckError(f"The step returned nothing.\n{MEANS['nothing returned']}")
    if all(grad is None for grad in whole.grads.values()):
        raise CheckError(f"No parameter of the model has a gradient after the step.\n{MEANS['no gradient']}")
    team = problem.team(2)
    if any(run.error for run in team.runs):
        errors(team)
    early = next((run.recorder.early for run in team.runs if run.recorder.early), "")
    if early:
        raise CheckError(f"Gradients are read by {early} before `pyg_sar.sum_gradients`.\n{MEANS['read early']}")
    values(problem, [whole, *team.runs])
    gradients(problem, [whole, *team.runs])


def failure(error: BaseException) -> str:
    """Say that a step failed in one process; errors of this library speak for themselves."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    *_, last = (frame for frame in frames if frame.f_code.co_name != "__torch_function__")  # which lets functions run
    if last.f_globals.get("__name__", "").startswith("pyg_sar."):
        return f"The step fails in one process already: {told(error)}."
    return f"The step fails on the small graph in one process already: {told(error)}.\n{MEANS['fails']}"


def told(error: BaseException) -> str:
    """Return an error in one line, and where it was raised."""
    place = raised_at(error)
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def errors(team: Team) -> NoReturn:
    """Say which worker failed, unless it failed because of another one."""
    failed = [(rank, run.error) for rank, run in enumerate(team.runs) if run.error is not None]
    own = [(rank, e) for rank, e in failed if not (team.stuck and team.stuck in str(e))]
    rank, error = (own or failed)[0]
    inside = next((f", in {run.recorder.running[-1]}" for run in team.runs if run.recorder.running), "")
    unlike = any(text in str(error) for text in ("' of tensors that differ", "called different things"))
    if not own or unlike:
        why = str(error.__cause__ or error) if unlike else team.stuck
        what = f"The workers do not find together{inside}: {why}.{apart(team)}\n{MEANS['not together']}"
    else:
        ranks = "every worker" if len(own) == len(team.runs) else f"worker {rank} of {len(team.runs)}"
        what = f"The step runs in one process, but on {ranks} it raises{inside} {told(error)}.{apart(team)}"
        if not (isinstance(error, NotImplementedError) or str(error).startswith("[rank")):  # which say what to do
            what += f"\n{MEANS['fails on workers']}"
    raise CheckError(what) from error


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


def values(problem: Problem, runs: list[Run]) -> None:
    """Raise which numbers that the step returned, or which buffers, differ, and where that begins."""
    whole, *workers = runs
    names = set(whole.values)
    odd = next((set(run.values) for run in workers if set(run.values) != names), None)
    if odd is not None:
        what = f"The step returned {sorted(names)} in one process, but {sorted(odd)} on a worker."
        raise CheckError(f"{what}\n{MEANS['other names']}")
    wrong = [n for n in whole.values if not problem.agrees(runs, [run.values[n] for run in runs])]
    buffers = [n for n, b in whole.buffers.items() if not all(problem.same(run.buffers[n], b) for run in workers)]
    if not wrong and not buffers:
        return
    what = differs(problem, runs, wrong[0]) if wrong else f"The buffer '{buffers[0]}' differs from one process."
    refuse_random(whole, what)
    start = culprit(problem, runs)
    if start is not None:
        means = f"That begins at {quoted(start)}, which sees the rows of one worker alone.\n{advice(start)}"
    else:
        means = MEANS["shares" if wrong and problem.sums_up([run.values[wrong[0]] for run in runs]) else "values"]
    if all("sum" not in run.recorder.events for run in workers):
        means += " Gradients are not summed either: call `pyg_sar.sum_gradients(model)` after backward."
    raise CheckError(f"{what}\n{means}")


def refuse_random(whole: Run, what: str) -> None:
    """Raise that random numbers make a comparison impossible, if some were drawn."""
    if whole.recorder.random:
        raise CheckError(
            f"{what}\nThe step draws random numbers from {whole.recorder.random}, which on workers are others than in "
            f"one process: nothing can be compared.\n{MEANS['random']}"
        )


def differs(problem: Problem, runs: list[Run], name: str) -> str:
    """Say how a returned value differs."""
    found = [run.values[name] for run in runs]
    expected, *parts = found
    if all(t.numel() == 1 for t in found):
        each = ", ".join(f"{t.item():.6g}" for t in parts)
        return f"'{name}' is {each} on two workers, and {expected.item():.6g} in one process."
    rows = rows_of_all(runs, found)
    if rows is None:
        shapes = " and ".join(str(list(t.shape)) for t in parts)
        return f"'{name}', of shape {shapes} on two workers and {list(expected.shape)} in one process, differs."
    off = (rows.double() - expected.double()).abs().view(len(rows), -1).amax(1)
    bad = int((off > problem.tolerance * largest([expected])).sum())
    return f"{bad} of {len(rows)} rows of '{name}' differ from those in one process, by up to {off.max().item():.3g}."


def culprit(problem: Problem, runs: list[Run]) -> Record | None:
    """Return the first call whose numbers are neither those of one process, nor a worker's rows or share of them."""
    each = [numbered(run) for run in runs]
    for key, record in each[0].items():
        found = [records[key].tensors for records in each if key in records]
        if len(found) < len(runs) or len(set(map(len, found))) > 1:
            continue
        if not all(problem.agrees(runs, list(given), inner=True) for given in zip(*found, strict=True)):
            return record
    return None


def numbered(run: Run) -> dict[Any, Record]:
    """Return records by keys that tell the first call at a place from the second one."""
    count: Counter = Counter()
    found = {}
    for record in run.recorder.records:
        count[record.key] += 1
        found[record.key, count[record.key]] = record
    return found


def advice(record: Record) -> str:
    """Say what to do about a call."""
    name = record.what.rpartition("(")[2].lower()
    return next((text for names, text in ADVICE.items() if any(n in name for n in names.split())), ELSE)


def gradients(problem: Problem, runs: list[Run]) -> None:
    """Raise which gradients differ, and why."""
    whole, one, *others = runs
    floor = LEAST * largest(list(whole.grads.values()))

    def equal(found: Tensor | None, expected: Tensor | None) -> bool:
        if found is None or expected is None:
            return largest([found, expected]) <= problem.tolerance * floor
        return problem.same(found, expected, max(largest([expected]), floor))

    wrong = [n for n, grad in whole.grads.items() if not all(equal(run.grads[n], grad) for run in (one, *others))]
    if not wrong:
        return
    refuse_random(whole, f"The gradient of {listed(wrong)} differs.")
    if any(not equal(run.grads[n], one.grads[n]) for run in others for n in wrong):
        what = f"The gradient of {listed(wrong)} is another one on each worker."
        raise CheckError(f"{what}\n{MEANS[unlike(one.recorder.events)]}")
    factors = [factor(one.grads[n], whole.grads[n]) for n in wrong]
    what = f"The gradient of {listed(wrong)} {size(factors)} on two workers as in one process."
    sums, passes = (one.recorder.events.count(name) for name in ("sum", "backward"))
    if sums > 1:
        means = f"`pyg_sar.sum_gradients` ran {sums} times after {passes} backward passes: it adds up sums again."
        raise CheckError(f"{what}\n{means}\n{MEANS['summed often']}")
    if grows(problem, whole, one, wrong):
        if None in factors:
            what = f"A part of the gradient of {listed(wrong)} is twice as large on two workers as in one process."
        raise CheckError(f"{what}\n{MEANS['grows']}")
    averaged = all(f is not None and abs(f - 0.5) < 1e-3 for f in factors)
    raise CheckError(f"{what}\n{MEANS['averaged' if averaged else 'gradients']}")


def unlike(events: list[str]) -> str:
    """Return why gradients differ between workers."""
    if "sum" not in events:
        return "not summed"
    late = "backward" in events[len(events) - events[::-1].index("sum") :]
    return "summed before" if late else "others summed"


def grows(problem: Problem, whole: Run, two: Run, names: list[str]) -> bool:
    """Whether gradients grow by the same with every worker."""
    three = problem.team(3).runs[0]
    return three.error is None and all(linear(problem, [r.grads[n] for r in (whole, two, three)]) for n in names)


def linear(problem: Problem, grads: list[Tensor | None]) -> bool:
    """Whether a gradient grows by the same from one run to the next."""
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
