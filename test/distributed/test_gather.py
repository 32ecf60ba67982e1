"""Rows of all workers in the order of the graph."""

import re

import pytest
import torch
import torch.distributed as dist
from support.nasty_graph import NUM_NODES, assignment
from support.simulate import raised, simulate

from pyg_sar import accuracy, gather
from pyg_sar.distributed.gather import join

ROWS = torch.arange(NUM_NODES * 6).view(NUM_NODES, 2, 3)
TYPES = (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def shuffled(rank, size, method):
    """Nodes of a worker, in any order; the last of several may own nothing."""
    ids = torch.randperm(NUM_NODES, generator=torch.Generator().manual_seed(2))
    return ids[assignment(method, size)[ids] == rank]


def check(group, method):
    rank, size = dist.get_rank(group), group.size()
    all_ids = [shuffled(r, size, method) for r in range(size)]
    ids, last = all_ids[rank], size - 1
    for dtype in TYPES:
        rows = ROWS.remainder(5).to(dtype)
        found = gather(rows[ids], ids, group=group), gather(rows[ids].transpose(1, 2), ids, last, group)
        for out, dst, expected in zip(found, (0, last), (rows, rows.transpose(1, 2)), strict=True):
            assert torch.equal(out, expected) if rank == dst else out is None
    some = ids[ids % 3 == 1]
    x = ROWS[:, 0, 0].double().requires_grad_()
    out = gather(x[some], some, None, group)
    assert torch.equal(out, x[1::3]) and not out.requires_grad
    assert gather(x[some][:0], some[:0], None, group).shape == (0,)
    assert gather(x[some].new_empty(len(some), 0), some, None, group).shape == (len(x[1::3]), 0)
    assert torch.equal(join(some, group), torch.cat([i[i % 3 == 1] for i in all_ids]))


@pytest.mark.parametrize(("size", "method"), [(1, "random"), (2, "random"), (3, "empty")])
def test_rows_of_all_workers(pool, size, method):
    pool.run(size, check, method)


def test_simulated_workers():
    def work(rank):
        ids = shuffled(rank, 3, "empty")
        return gather(ROWS[ids], ids, dst=1)

    one, other, third = simulate(3, work)
    assert one is None and third is None and torch.equal(other, ROWS)


X = torch.zeros(3, 2)
WRONG = {
    "fewer ids": (lambda rank: gather(X, torch.arange(3 - rank)), r"rank 1 has rows of shape \[3, 2\]"),
    "a mask": (lambda rank: gather(X, torch.ones(3).bool()), "ids of type torch.bool and shape .3."),
    "types": (lambda rank: gather(X.to((torch.int, torch.bool)[rank]), torch.arange(3)), "type torch.bool"),
    "widths": (lambda rank: gather(X[:, rank:], torch.arange(3)), r"\['n', 2\].*\['n', 1\]"),
    "local ids": (lambda rank: gather(X, torch.arange(3)), r"rank 0 has \[0, 1, 2\] more than once"),
    "no such rank": (lambda rank: gather(X, torch.arange(3), 2), "'dst' 2 of 2 workers"),
    "other ranks": (lambda rank: gather(X, torch.arange(3), rank), "for rank 0.*for rank 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_an_error_on_all_workers(name):
    call, says = WRONG[name]
    for rank, error in enumerate(raised(2, call)):
        assert re.match(rf"\[rank {rank}\] Cannot gather: .*{says}", error), error


# Metrics of torchmetrics: of gathered rows on one rank, or on workers that all have some.

LOGITS = torch.randn(NUM_NODES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(4, (NUM_NODES,), generator=torch.Generator().manual_seed(1))


def measure(group, method):
    import torchmetrics.classification as metrics

    ids = shuffled(dist.get_rank(group), group.size(), method)
    scores, y = gather(LOGITS[ids], ids, group=group), gather(Y[ids], ids, group=group)
    found = []
    for make, options in ((metrics.MulticlassF1Score, {"average": "macro"}), (metrics.MulticlassAUROC, {})):
        whole = make(4, sync_on_compute=False, **options)
        whole.update(LOGITS, Y)
        if scores is not None:  # where the others do not come
            metric = make(4, sync_on_compute=False, **options)
            metric.update(scores, y)
            assert metric.compute() == whole.compute()
        if method != "empty":
            metric = make(4, process_group=group, **options)
            metric.update(LOGITS[ids], Y[ids])
            torch.testing.assert_close(metric.compute(), whole.compute())
            found.append(make.__name__)
    return found


@pytest.mark.parametrize(("size", "method"), [pytest.param(2, "random", marks=pytest.mark.grid), (3, "empty")])
def test_torchmetrics(pool, size, method):
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    found = pool.run(size, measure, method)
    assert found == [["MulticlassF1Score", "MulticlassAUROC"] * (method != "empty")] * size


def evaluate(group, method):
    """OGB's metrics of gathered rows: accuracy, which workers find together, too, and the area under the ROC curve."""
    from ogb.nodeproppred import Evaluator

    ids = shuffled(dist.get_rank(group), group.size(), method)
    pred = LOGITS[ids].argmax(-1, keepdim=True)
    found = [
        gather(rows, ids, group=group) for rows in (Y[ids].view(-1, 1), pred, Y[ids].view(-1, 1) % 2, LOGITS[ids, :1])
    ]
    together = accuracy(pred.view(-1), Y[ids], group=group)
    if found[0] is None:
        return together
    true, pred, odd, score = found
    area = Evaluator("ogbn-proteins")
    area.num_tasks = 1
    assert area.eval({"y_true": odd, "y_pred": score}) == area.eval(
        {"y_true": Y.view(-1, 1) % 2, "y_pred": LOGITS[:, :1]}
    )
    return Evaluator("ogbn-arxiv").eval({"y_true": true, "y_pred": pred})["acc"]


@pytest.mark.parametrize(("size", "method"), [(2, "random"), (3, "empty")])
def test_evaluators_of_ogb(pool, size, method):
    pytest.importorskip("ogb", reason="ogb is not installed")
    expected = float((LOGITS.argmax(-1) == Y).double().mean())
    assert pool.run(size, evaluate, method) == pytest.approx([expected] * size)
