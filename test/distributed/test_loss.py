"""Losses and metrics over the nodes of all workers against torch's own over all nodes."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.nasty_graph import NUM_NODES, assignment, close
from support.simulate import raised, simulate

from pyg_sar import accuracy, global_mean, global_sum, replicated, sum_gradients


def mean_of(group, held, dtype):
    """Mean of 0, 1, 2, ... of which rank r holds ``held[r]``."""
    rank = dist.get_rank(group)
    start = sum(held[:rank])
    values = torch.arange(start, start + held[rank], dtype=dtype, requires_grad=True)
    mean = global_mean(values * 2, group)
    mean.backward()
    return mean.detach(), values.grad


@pytest.mark.parametrize("held", [[2, 3, 1], [0, 4, 0], [0, 0, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_global_mean_and_its_gradient(pool, held, dtype):
    n = sum(held)
    for k, (mean, grad) in zip(held, pool.run(3, mean_of, held, dtype), strict=True):
        assert mean.dtype == dtype
        close(mean, torch.tensor(n - 1.0, dtype=dtype), "mean", 1e-6)
        close(grad, torch.full((k,), 2 / n, dtype=dtype), "gradient", 1e-6)


def test_global_mean_alone():
    x = torch.rand(5, requires_grad=True)
    mean = global_mean(x)
    mean.backward()
    close(mean, x.mean(), "mean", 1e-6)
    close(x.grad, torch.full((5,), 0.2), "gradient", 1e-6)
    assert global_mean(torch.tensor([True, False, True, True])).item() == 0.75
    assert global_mean(torch.rand(0)).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_global_mean_of_many_values_in_half_precision(dtype):
    """Neither their sum nor their count fits."""
    x = torch.full((70_000,), 3.0, dtype=dtype, requires_grad=True)
    mean = global_mean(x)
    mean.backward()
    assert mean.item() == 3.0
    close(x.grad.double(), torch.full((70_000,), 1 / 70_000).double(), "gradient", 1e-6)


class Many(torch.Tensor):
    """Values that nobody could hold."""

    count = 2**24 + 1

    def numel(self):
        return self.count


def mean_of_many(group):
    values = torch.ones(1, dtype=torch.float64).as_subclass(Many)
    seen, real = [], dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda t, **kw: (real(t, **kw), seen.append(t.clone()))[0]):
        global_mean(values, group)
    return seen[0].as_subclass(torch.Tensor)


def test_counts_of_values_are_exact_beyond_single_precision(pool):
    for both in pool.run(3, mean_of_many):
        assert both.dtype == torch.float64
        assert both[1].item() == 3 * (2**24 + 1)


def metric(group, masks):
    rank = dist.get_rank(group)
    pred, y = torch.arange(4) % 2, torch.zeros(4, dtype=torch.long)
    mask = torch.tensor(masks[rank]).bool() if masks else None
    return accuracy(pred, y, mask, group)


def test_accuracy(pool):
    assert pool.run(3, metric, None) == [0.5] * 3
    assert pool.run(3, metric, [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]) == [0.75] * 3
    assert pool.run(3, metric, [[0, 0, 0, 0]] * 3) == [0.0] * 3


def test_predictions_of_another_shape():
    with pytest.raises(ValueError, match=r"\[rank 0\] Expected a predicted class.*got \[4\] and \[4, 1\]"):
        accuracy(torch.zeros(4), torch.zeros(4, 1))


# The means that torch and PyG take, each of 61 nodes of 4 classes, some of which have no label.

G = torch.Generator().manual_seed(0)
Y = torch.randint(4, (NUM_NODES,), generator=G)
PARTIAL = torch.where(torch.arange(NUM_NODES) % 3 == 0, -100, Y)
W = torch.tensor([1.0, 20.0, 0.3, 0.0], dtype=torch.float64)
TASKS = torch.randint(2, (NUM_NODES, 4), generator=G).double()
KNOWN = torch.rand(NUM_NODES, 4, generator=G) < 0.6
SOFT = torch.rand(NUM_NODES, 4, generator=G, dtype=torch.float64).softmax(-1)
NODES = torch.rand(NUM_NODES, generator=G, dtype=torch.float64)


def entropy(out, y, **kwargs):
    return F.cross_entropy(out, y, reduction="none", **kwargs)


def multi_label(out, y, **kwargs):
    return F.binary_cross_entropy_with_logits(out, y, reduction="none", **kwargs)


# What a worker with the nodes `i` says, and what torch says of all.
MEANS = {
    "plain": (lambda out, i: global_mean(entropy(out, Y[i])), lambda out: F.cross_entropy(out, Y)),
    "weight": (
        lambda out, i: global_mean(entropy(out, Y[i], weight=W), weight=W[Y[i]]),
        lambda out: F.cross_entropy(out, Y, weight=W),
    ),
    "ignore_index": (
        lambda out, i: global_mean(entropy(out, PARTIAL[i]), mask=PARTIAL[i] != -100),
        lambda out: F.cross_entropy(out, PARTIAL),
    ),
    "both, smoothed": (
        lambda out, i: global_mean(
            entropy(out, PARTIAL[i], weight=W, label_smoothing=0.1),
            weight=W[PARTIAL[i].clamp(min=0)],
            mask=PARTIAL[i] != -100,
        ),
        lambda out: F.cross_entropy(out, PARTIAL, weight=W, label_smoothing=0.1),
    ),
    "nll_loss": (
        lambda out, i: global_mean(
            F.nll_loss(out.log_softmax(-1), Y[i], W, ignore_index=2, reduction="none"), weight=W[Y[i]], mask=Y[i] != 2
        ),
        lambda out: F.nll_loss(out.log_softmax(-1), Y, W, ignore_index=2),
    ),
    "probabilities": (
        lambda out, i: global_mean(entropy(out, SOFT[i], weight=W)),
        lambda out: F.cross_entropy(out, SOFT, weight=W),
    ),
    "several tasks": (
        lambda out, i: global_mean(multi_label(out, TASKS[i], pos_weight=W)),
        lambda out: F.binary_cross_entropy_with_logits(out, TASKS, pos_weight=W),
    ),
    "tasks of which some are known": (
        lambda out, i: global_mean(multi_label(out, TASKS[i]), mask=KNOWN[i]),
        lambda out: F.binary_cross_entropy_with_logits(out[KNOWN], TASKS[KNOWN]),
    ),
    "rows of tasks": (
        lambda out, i: global_mean(multi_label(out, TASKS[i]), mask=KNOWN[i, 0]),
        lambda out: F.binary_cross_entropy_with_logits(out[KNOWN[:, 0]], TASKS[KNOWN[:, 0]]),
    ),
    "weights of nodes": (
        lambda out, i: global_mean(entropy(out, Y[i]) * NODES[i], weight=NODES[i]),
        lambda out: (entropy(out, Y) * NODES).sum() / NODES.sum(),
    ),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MEANS)
def test_means_of_torch(name, size):
    ours, torchs = MEANS[name]
    part = assignment("empty", size)
    x = torch.randn(NUM_NODES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = torchs(whole)
    (grad,) = torch.autograd.grad(expected, whole)

    def work(rank):
        ids = (part == rank).nonzero().view(-1)
        out = x[ids].requires_grad_()
        loss = ours(out, ids)
        return ids, loss.detach(), torch.autograd.grad(loss, out)[0]

    for ids, loss, found in simulate(size, work):
        close(loss, expected.detach(), "loss")
        close(found, grad[ids], "gradient")


def test_zero_total_weight_and_infinite_values():
    out, y = torch.randn(3, 4, requires_grad=True), torch.full((3,), 3)
    assert global_mean(entropy(out, y, weight=W.float()), weight=W.float()[y]).isnan()
    masked = global_mean(entropy(out, y), mask=y != 3)
    masked.backward()
    assert masked.isnan() and out.grad.eq(0).all()  # as torch, where all labels are to be ignored
    assert global_mean(torch.tensor([1.0, torch.inf], requires_grad=True)) == torch.inf


LABELS = torch.tensor([0, 1, 2, 3, 0, -100])
CLASSES, WEIGHT = LABELS.clamp(min=0), W.float()
REFUSED = {
    "weighted": (lambda out: global_mean(entropy(out, CLASSES, weight=WEIGHT)), "pass weight=w"),
    "weighted, chosen": (lambda out: global_mean(entropy(out, CLASSES, weight=WEIGHT)[CLASSES > 0]), "pass weight=w"),
    "weighted, smoothed": (
        lambda out: global_mean(entropy(out, CLASSES, weight=WEIGHT, label_smoothing=0.1)),
        "pass weight=w",
    ),
    "not weighted": (lambda out: global_mean(entropy(out, CLASSES), weight=WEIGHT[CLASSES]), "does not multiply"),
    "weights of classes": (
        lambda out: global_mean(entropy(out, CLASSES, weight=WEIGHT), weight=WEIGHT),
        r"\[4\]; .*w\[y\]",
    ),
    "ignored": (lambda out: global_mean(entropy(out, LABELS)), "^.rank 0. 1 of 'values' are those of 'ignore_index'"),
    "ignored, masked otherwise": (lambda out: global_mean(entropy(out, LABELS), mask=CLASSES == 0), "pass 'mask'"),
    "ids as mask": (lambda out: global_mean(entropy(out, CLASSES), mask=CLASSES), r"pass values\[ids\]"),
    "mask by position": (lambda out: global_mean(entropy(out, CLASSES), CLASSES == 0), "'weight' and 'mask' by name"),
    "a mean": (lambda out: global_mean(F.cross_entropy(out, CLASSES)), "reduction='none'"),
    "a learnt weight": (lambda out: global_mean(out[:, 0], weight=out[:, 1]), "without a gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_mean_is_refused(name):
    call, says = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=says):
        call(torch.randn(6, 4, requires_grad=True))


def test_what_is_meant_is_not_refused():
    out = torch.randn(6, 4, requires_grad=True)
    weighted = entropy(out, CLASSES, weight=WEIGHT)
    close(global_mean(weighted, weight=torch.ones_like(weighted)), weighted.mean(), "plain mean", 1e-6)
    close(global_mean(entropy(out[:5], LABELS[:5])), F.cross_entropy(out, LABELS), "chosen before", 1e-6)
    weighted.sum().backward()
    close(global_mean(weighted), weighted.mean(), "of a loss that was used", 1e-6)
    pixels = entropy(out.view(3, 4, 2), CLASSES.view(3, 2), weight=WEIGHT)
    expected = F.cross_entropy(out.view(3, 4, 2), CLASSES.view(3, 2), weight=WEIGHT)
    close(global_mean(pixels, weight=WEIGHT[CLASSES.view(3, 2)]), expected, "pixels", 1e-6)


def test_masked_values_that_are_no_numbers_are_an_error_on_all():
    """Their gradients would be none, either."""

    def work(rank):
        y = torch.tensor([1.0, torch.nan if rank == 1 else 0.0])
        values = F.mse_loss(torch.ones(2, requires_grad=True), y, reduction="none")
        return global_mean(values, mask=~y.isnan()), global_mean(values.detach(), mask=~y.isnan())

    assert all("1 of 'values' that 'mask' leaves out are NaN" in error for error in raised(3, work))
    scores = torch.tensor(
        [[0.0, 1.0], [0.0, -torch.inf]], requires_grad=True
    )  # a class that is none of the second node
    mean = global_mean(
        F.cross_entropy(scores, torch.tensor([0, 1]), reduction="none"), mask=torch.tensor([True, False])
    )
    mean.backward()
    assert mean.isfinite() and scores.grad.isfinite().all()


def test_ignored_values_of_one_worker_are_an_error_on_all():
    def work(rank):
        global_mean(entropy(torch.randn(2, 4, requires_grad=True), LABELS[4 - 2 * rank : 6 - 2 * rank]))

    errors = raised(3, work)
    assert all(f"[rank {r}] 1 of 'values' are those of 'ignore_index'" in error for r, error in enumerate(errors))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_over_nodes_counts_once(size):
    x = torch.arange(4.0, dtype=torch.float64).view(-1, 1)
    weight = torch.full((3, 1), 2.0, dtype=torch.float64)

    def losses(weight, x):
        out = torch.nn.functional.linear(x, weight)
        return out.square().mean(1), torch.nn.functional.l1_loss(out, x.expand(-1, 3), reduction="sum")

    def work(rank):
        mine = torch.nn.Parameter(weight.clone())
        each, total = losses(mine, x[rank::size])
        loss = global_mean(each) + replicated(0.1 * global_sum(total))
        loss.backward()
        sum_gradients(mine)
        return loss.detach(), mine.grad

    whole = torch.nn.Parameter(weight)
    each, total = losses(whole, x)
    loss = each.mean() + 0.1 * total
    loss.backward()
    for value, grad in simulate(size, work):
        close(value, loss.detach(), "replicated")
        close(grad, whole.grad, "replicated")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_term_that_does_not_depend_on_nodes_counts_once(size):
    x = torch.arange(4.0, dtype=torch.float64)

    def work(rank):
        model = torch.nn.Linear(1, 3).double()
        torch.nn.init.constant_(model.weight, 2.0), torch.nn.init.constant_(model.bias, -1.0)
        mine = x[rank::size].view(-1, 1)
        loss = global_mean(model(mine).square()) + replicated(model.weight.pow(2).mean() + model.bias.exp().sum())
        loss.backward()
        sum_gradients(model)
        return loss.detach(), model.weight.grad, model.bias.grad

    torch.manual_seed(0)
    model = torch.nn.Linear(1, 3).double()
    torch.nn.init.constant_(model.weight, 2.0), torch.nn.init.constant_(model.bias, -1.0)
    loss = model(x.view(-1, 1)).square().mean() + model.weight.pow(2).mean() + model.bias.exp().sum()
    expected = [loss.detach(), *torch.autograd.grad(loss, [model.weight, model.bias])]
    for found in simulate(size, work):
        for one, other in zip(found, expected, strict=True):
            close(one, other, "replicated")


@pytest.mark.parametrize("size", [1, 3])
def test_learnt_weights_of_losses(size):
    """By the uncertainty of tasks: each worker would count the whole loss in the gradient of its weight."""
    x = torch.arange(4.0, dtype=torch.float64).view(-1, 1)

    def losses(model, x):
        return model(x).square().mean(1), model(x).abs().sum(1)

    def made():
        torch.manual_seed(0)
        return torch.nn.Linear(1, 3).double(), torch.nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def work(rank):
        model, s = made()
        terms = (replicated(torch.exp(-k)) * global_mean(t) + replicated(k)
                 for k, t in zip(s, losses(model, x[rank::size]), strict=True))  # fmt: skip
        sum(terms).backward()
        sum_gradients([s, *model.parameters()])
        return s.grad, model.weight.grad

    model, s = made()
    sum(torch.exp(-k) * t.mean() + k for k, t in zip(s, losses(model, x), strict=True)).backward()
    for grad_s, grad in simulate(size, work):
        close(grad_s, s.grad, "weights")
        close(grad, model.weight.grad, "model")
