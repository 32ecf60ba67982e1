import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from support.pool import Pool, RankError


def describe(group, x):
    y = x * (dist.get_rank(group) + 1)
    dist.all_reduce(y, group=group)
    return os.getpid(), dist.get_world_size(group), dist.get_world_size(), y


def exchange(group, fails):
    """Rank 0 raises, dies or sleeps; all others wait for what it never sends."""
    if dist.get_rank(group) == 0:
        fails()
    dist.recv(torch.empty(1), src=0, group=group)


def boom():
    raise ValueError("boom")


def leave():
    os._exit(3)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def sleep_for_long():
    time.sleep(100)


def boom_while_others_sleep(group):
    if dist.get_rank(group) == 0:
        boom()
    sleep_for_long()


def warn(group):
    warnings.warn("careless", stacklevel=1)


def draw(group):
    return torch.rand(3)


def unpicklable(group):
    return lambda: None


def pids(pool, world_size=2):
    return [result[0] for result in pool.run(world_size, describe, torch.ones(1))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_group_has_exactly_the_ranks_asked_for(pool, world_size):
    results = pool.run(world_size, describe, torch.arange(3.0))
    for _, size, default_size, y in results:
        assert (size, default_size) == (world_size, 4)
        assert torch.equal(y, torch.arange(3.0) * sum(range(world_size + 1)))


def test_workers_are_reused(pool):
    assert pids(pool) == pids(pool)


def test_large_tensors_travel_by_value(pool):
    x = torch.rand(1_000_000)
    for *_, y in pool.run(2, describe, x):
        torch.testing.assert_close(y, 3 * x)
        assert not y.is_shared()


def test_every_function_starts_from_the_same_seed(pool):
    first, second, third = *pool.run(2, draw), *pool.run(1, draw)
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def test_error_shows_every_rank_and_workers_are_replaced(pool):
    before = pids(pool, 4)
    with pytest.raises(RankError) as info:
        pool.run(3, exchange, boom)
    message = str(info.value)
    assert "rank 0 of 3 raised" in message
    assert "ValueError: boom" in message
    # Rank 0 has exited, so its peers do not wait for their timeout.
    assert "rank 1 of 3 raised" in message
    assert "rank 2 of 3 raised" in message
    assert message.count("dist.recv") == 2
    assert set(before).isdisjoint(pids(pool, 4))


def test_outcomes_of_an_error(pool):
    first, second = pool.outcomes(2, exchange, boom)
    assert first[:3] == ("error", "ValueError", "boom")
    assert second[:2] == ("error", "RuntimeError")
    assert max(first[3], second[3]) < 10


@pytest.mark.parametrize(("death", "code"), [(leave, 3), (crash, -signal.SIGSEGV)])
def test_death_is_noticed_at_once(pool, death, code):
    pool.run(2, describe, torch.ones(1))
    start = time.monotonic()
    first, second = pool.outcomes(2, exchange, death)
    assert time.monotonic() - start < 10
    assert first == ("died", code)
    assert second[:2] == ("error", "RuntimeError")


def test_outcomes_of_a_success(pool):
    before = pids(pool)
    assert [outcome[0] for outcome in pool.outcomes(2, describe, torch.ones(1))] == ["ok", "ok"]
    assert pids(pool) == before


def test_timeout_tells_where_each_rank_stood(pool):
    with pytest.raises(RankError, match="did not end within 1") as info:
        pool.run(2, exchange, sleep_for_long, timeout=1)
    assert "in sleep_for_long" in str(info.value)
    assert "in recv" in str(info.value)
    assert pool.outcomes(2, exchange, sleep_for_long, timeout=1) == [("timeout",), ("timeout",)]


def test_run_does_not_wait_for_others_after_an_error(pool):
    start = time.monotonic()
    with pytest.raises(RankError, match="boom") as info:
        pool.run(2, boom_while_others_sleep)
    assert time.monotonic() - start < 20
    assert "in sleep_for_long" in str(info.value)


def test_warnings_are_errors_in_workers(pool):
    with pytest.raises(RankError, match="UserWarning: careless"):
        pool.run(2, warn)


@pytest.mark.filterwarnings("ignore:careless")
def test_filters_of_a_test_reach_workers(pool):
    assert pool.run(2, warn) == [None, None]


def test_result_that_cannot_be_pickled_is_an_error(pool):
    with pytest.raises(RankError, match="unpicklable"):
        pool.run(1, unpicklable)


def test_grows_and_ends_cleanly():
    pool = Pool(size=1)
    assert len(pids(pool, 1)) == 1
    assert len(set(pids(pool, 3))) == 3
    pool.close()  # raises if a worker does not exit with 0
    pool.close()
    with pytest.raises(ValueError, match="at most 8"):
        pool.run(9, draw)
