"""What workers read of each other in the store."""

import re
import threading
import time

import pytest
import torch

from pyg_sar.distributed import notices
from pyg_sar.distributed.notices import EVERYBODY, NOBODY, LostWorkers, Notices


class Store:
    """A store in memory, as torch's are for one group."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def boards(monkeypatch):
    """Three workers, whose signs come fast."""
    monkeypatch.setattr(notices, "INTERVAL", 0.02)
    monkeypatch.setattr(notices, "SILENT", 0.1)
    store = Store()
    found = [Notices(store, rank, 3) for rank in range(3)]
    yield found
    for board in found:
        board.over.set()


def test_a_worker_that_ended(boards):
    zero, one, two = boards
    one.steps, one.calls, one.doing = 7, 40, "layer 'conv2' (SAGEConv) on rows of 16 columns"
    try:
        raise ValueError("boom")
    except ValueError as error:
        one.end(error)
    two.end(LostWorkers("[rank 2] Lost the other workers"))  # because of rank 1
    why = zero.why()
    assert why.startswith(
        "rank 1 ended in step 7, layer 'conv2' (SAGEConv) on rows of 16 columns (call 40, test_notices"
    )
    assert why.endswith("ValueError: boom") and "rank 2" not in why


def test_the_layer_that_raised(boards):
    class Boom(torch.nn.Module):
        def forward(self, x):
            raise ValueError("boom")

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Boom())
    with pytest.raises(ValueError) as told:
        model(torch.ones(1, 2))
    boards[1].end(told.value)
    assert "layer '1' (Boom) (call 0" in boards[0].why()


def test_a_worker_that_is_silent(boards):
    boards[2].over.set()
    time.sleep(0.05)
    why = boards[0].why()
    assert why.startswith("rank 2 stopped answering, last heard of in its first lines (call 0, step 0")
    assert "it was killed, or its host" in why and "rank 1" not in why


def test_workers_that_run_different_code(boards):
    boards[1].calls, boards[1].doing = 41, "gathering from all of them"
    boards[0].calls, boards[0].doing = 40, "layer 'conv1' on rows of 4 columns"
    why = boards[0].why()
    assert re.match("the workers ran different code: rank 1 is in gathering from all of them .call 41, step 0, ", why)
    assert (
        "; this one is in layer 'conv1' on rows of 4 columns (call 40" in why and "same layers in the same order" in why
    )


def test_workers_in_the_same_call(boards):
    for board in boards:
        board.calls, board.doing = 40, "layer 'conv1' on rows of 4 columns"
    time.sleep(0.05)
    why = boards[0].why()
    assert why.startswith("all workers are in layer 'conv1' on rows of 4 columns (call 40, step 0")
    assert "several threads" in why and "different code" not in why


def test_a_store_that_is_gone(boards, monkeypatch):
    def gone(*args):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Store, "check", gone)
    assert "the store of the group does not answer" in boards[0].why()


def leave(board, found, *args):
    try:
        board.leave(*args)
        found[board.rank] = time.monotonic()
    except RuntimeError as error:
        found[board.rank] = str(error)


def leaving(boards, *args):
    found = {}
    threads = [threading.Thread(target=leave, args=(board, found, *args)) for board in boards]
    for thread in threads:
        thread.start()
    return found, threads


def test_all_leave_together(boards):
    found, threads = leaving(boards[:2], 10.0)
    time.sleep(0.3)
    assert not found  # the third one works alone, for longer than many signs
    last, more = leaving(boards[2:], 10.0)
    for thread in threads + more:
        thread.join(5)
    assert set(found) | set(last) == {0, 1, 2} and all(isinstance(v, float) for v in found.values())


def test_leaving_while_others_wait_for_this_one(boards):
    boards[1].waits, boards[2].waits = EVERYBODY, EVERYBODY
    boards[2].doing = "summing gradients"
    found, (thread,) = leaving(boards[:1], 10.0)
    thread.join(5)
    assert "This worker has left" in found[0] and "waits for it" in found[0] and "different code" in found[0]


def test_leaving_while_others_wait_for_a_third_one(boards):
    """It works alone, then all go on."""
    boards[1].waits = EVERYBODY
    found, (thread,) = leaving(boards[:1], 10.0)
    time.sleep(0.5)
    assert not found
    boards[1].waits = None
    more = leaving(boards[1:], 10.0)[1]
    for it in (thread, *more):
        it.join(5)
    assert isinstance(found[0], float)


@pytest.mark.parametrize(("first", "second"), [(2, 1), ([1, 2], [1, 2]), (2, NOBODY)])
def test_leaving_while_others_talk_among_themselves(boards, monkeypatch, first, second):
    """In a group without this one, for longer than many signs."""
    monkeypatch.setattr(notices, "STUCK", 1)
    boards[1].waits, boards[2].waits = first, second
    found, (thread,) = leaving(boards[:1], 10.0)
    time.sleep(2.0)
    assert not found
    more = leaving(boards[1:], 10.0)[1]
    for it in (thread, *more):
        it.join(5)
    assert isinstance(found[0], float)


@pytest.mark.parametrize("waits", [0, [0, 1], 2])
def test_leaving_while_one_waits_for_one_that_waits_for_this_one(boards, monkeypatch, waits):
    monkeypatch.setattr(notices, "STUCK", 1)
    boards[1].waits, boards[2].waits = waits, [0, 2]
    found, (thread,) = leaving(boards[:1], 10.0)
    thread.join(5)
    assert "This worker has left" in found[0] and "waits for it" in found[0]


@pytest.mark.parametrize(
    ("args", "text"), [((0.2,), "stopped answering"), ((10.0, 0.2), "Waited for 0.2 s for others")]
)
def test_leaving_without_others(boards, args, text):
    if len(args) == 1:
        boards[1].over.set()
    found, (thread,) = leaving(boards[:1], *args)
    thread.join(5)
    assert text in found[0]


def test_leaving_when_another_one_ended(boards):
    boards[1].end(ValueError("boom"))
    found, (thread,) = leaving(boards[:1], 10.0)
    thread.join(5)
    assert re.search("has finished, but rank 1 ended in step 0.*ValueError: boom", found[0])


def test_signs_tell_the_line_of_the_last_call(boards, monkeypatch):
    """And not that which another thread runs: its frames may be gone while they are read."""
    monkeypatch.setattr(notices, "CURRENT", boards[0])
    notices.calls("conv")
    boards[0].over.set()
    writer = threading.Thread(target=boards[0].write)
    writer.start()
    writer.join()
    assert boards[1].signs()[0].line.endswith(', `notices.calls("conv")`')
