"""Schedules of a buffer of rows: never more loads than needed, and the right rows in the right slots."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from pyg_sar.offload.schedule import (
    ROW_COST,
    accesses,
    best_order,
    count_loads,
    greedy_order,
    overlaps,
    ranges,
    source_pieces,
)


def random_graph(seed: int, num_dst: int, num_src: int, degree: int) -> tuple[Tensor, Tensor]:
    """Return the row pointer and the sources of a graph whose first destination is a hub."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.randint(0, degree + 1, (num_dst,), generator=generator)
    count[:1] = 5 * degree
    rowptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return rowptr, torch.randint(0, num_src, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)


def rows_of_chunks(seed: int, num_rows: int, num_chunks: int, degree: int = 2) -> list[Tensor]:
    rowptr, col = random_graph(seed, num_rows, num_rows, degree)
    return [col[rowptr[c.start] : rowptr[c.stop]].long().unique() for c in ranges(rowptr, num_chunks)]


def least_loads(rows: list[Tensor], num_slots: int) -> int:
    """Return the fewest loads, by trying all that the buffer can hold behind each access."""
    found = {frozenset[int](): 0}  # the loads that it takes at least to hold these rows
    for ids in (frozenset(t.tolist()) for t in rows):
        after: dict[frozenset[int], int] = {}
        for held, loads in found.items():
            for size in range(min(len(held - ids), num_slots - len(ids)) + 1):
                for stays in combinations(held - ids, size):
                    key = ids.union(stays)
                    after[key] = min(after.get(key, 1 << 30), loads + len(ids - held))
        found = after
    return min(found.values())


def play(rows: Sequence[Tensor], num_rows: int, num_slots: int) -> int:
    """Load what is not in its slot yet, and see that rows stay where they are; return how many are loaded."""
    held, slot, total = torch.full((num_slots,), -1), torch.full((num_rows,), -1), 0
    for k, (ids, access) in enumerate(zip(rows, accesses(rows, num_rows, num_slots), strict=True)):
        assert access.slots.unique().numel() == ids.numel(), "each row has a slot of its own"
        new = held[access.slots] != ids
        assert access.loads == int(new.sum())
        before = slot[ids]
        assert (new | (before == access.slots)).all(), "a row stays where it was loaded"
        assert new.logical_not().equal((before >= 0) & (held[before] == ids)), "it is not loaded to a second slot"
        held[access.slots], slot[ids], total = ids, access.slots, total + access.loads
        assert k > 0 or access.loads == ids.numel()
    return total


@pytest.mark.parametrize("num_rows", [5, 9, 12])
@pytest.mark.parametrize("seed", range(6))
def test_no_decision_loads_less(seed, num_rows):
    """Compared with an exhaustive search."""
    rows = rows_of_chunks(seed, num_rows, num_chunks=2 + seed)
    most = max(t.numel() for t in rows)
    for num_slots in range(most, num_rows + 1):
        expected = least_loads(rows, num_slots)
        assert play(rows, num_rows, num_slots) == count_loads(rows, num_rows, num_slots) == expected


@pytest.mark.parametrize("num_chunks", [1, 7, 40])
def test_rows_are_where_the_schedule_says(num_chunks):
    rows = rows_of_chunks(1, 300, num_chunks, degree=8)
    most, once = max(t.numel() for t in rows), torch.cat(rows).unique().numel()
    for num_slots in (most, (most + 300) // 2, 300, 400):
        loads = play(rows, 300, num_slots)
        assert once <= loads <= sum(t.numel() for t in rows)
    assert loads == once, "with room for all rows each is loaded once"


def test_empty_accesses():
    empty, some = torch.empty(0, dtype=torch.long), torch.tensor([1, 3])
    for rows, loads in (([], 0), ([empty], 0), ([some, empty, some], 2), ([empty, some, empty], 2)):
        assert count_loads(rows, 5, 2) == loads


def test_slots_that_are_free_for_longest_are_taken_first():
    """Rows can then be loaded while the access before is computed."""
    rows = torch.arange(8).split(2)
    assert [access.slots.tolist() for access in accesses(rows, 8, 4)] == [[0, 1], [2, 3]] * 2


def test_an_access_must_fit():
    rows = [torch.tensor([2]), torch.tensor([0, 1, 4])]
    with pytest.raises(ValueError, match=r"Access 1 reads 3 rows.*slots \(2\). Give it 3 slots, or cut"):
        count_loads(rows, 5, 2)


@pytest.mark.parametrize("num_chunks", [1, 3, 8, 50, 200])
def test_ranges_have_equal_cost(num_chunks):
    rowptr, _ = random_graph(0, 120, 120, 9)
    chunks = ranges(rowptr.int(), num_chunks)
    assert len(chunks) == num_chunks
    assert [i for chunk in chunks for i in range(chunk.start, chunk.stop)] == list(range(120)), "all rows, in order"
    cost = rowptr.diff() + ROW_COST
    for chunk in chunks:
        rows = cost[chunk]
        outer = rows[[0, -1]].sum() / 2 if len(rows) else 0
        assert rows.sum() <= cost.sum() / num_chunks + 1 + outer
    if num_chunks <= 8:
        assert all(cost[chunk].sum() >= cost.sum() / num_chunks - 1 - cost.max() for chunk in chunks)


def test_ranges_of_few_rows():
    assert ranges(torch.tensor([0]), 3) == [slice(0, 0)] * 3
    two = ranges(torch.tensor([0, 5, 10]), 5)
    assert sum(chunk.start == chunk.stop for chunk in two) == 3 and two[-1].stop == 2
    with pytest.raises(ValueError, match=r"at least one chunk \(got 0\). Give a positive 'num_chunks'"):
        ranges(torch.tensor([0, 1]), 0)


@pytest.mark.parametrize("num_slots", [1, 4, 10, 11])
def test_source_pieces(num_slots):
    ids = torch.arange(10) * 3
    pieces = source_pieces(ids, num_slots)
    assert torch.cat(pieces).equal(ids) and len(pieces) == -(-10 // num_slots)
    assert max(p.numel() for p in pieces) <= num_slots
    assert max(p.numel() for p in pieces) - min(p.numel() for p in pieces) <= 1
    (none,) = source_pieces(ids[:0], num_slots)
    assert none.numel() == 0


def test_pieces_of_one_chunk_fit_where_it_does_not():
    rows = rows_of_chunks(0, 100, num_chunks=5, degree=6)
    pieces = [piece for ids in rows for piece in source_pieces(ids, 20)]
    assert len(pieces) > len(rows)
    play(pieces, 100, 20)


def test_rows_in_common():
    rows, others = rows_of_chunks(0, 80, 4, degree=5), rows_of_chunks(1, 80, 6, degree=5)
    sets = [[set(ids.tolist()) for ids in one] for one in (rows, others)]
    assert overlaps(rows, others, 80).tolist() == [[len(a & b) for b in sets[1]] for a in sets[0]]


def test_greedy_order_follows_shared_rows():
    shared = torch.tensor([[9, 1, 2, 5], [1, 9, 4, 0], [2, 4, 9, 3], [5, 0, 3, 9]])
    assert greedy_order(shared) == [0, 3, 2, 1]
    assert greedy_order(shared[:1, :1]) == [0]


def test_best_order_never_loads_more():
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    path = [torch.arange(4 * k, 4 * k + 8) for k in range(16)]  # each shares four rows with the next
    order = best_order([path[c] for c in shuffled], 68, 8)
    gaps = [abs(shuffled[a] - shuffled[b]) for a, b in pairwise(order)]
    assert gaps.count(1) >= 13 and sorted(order) == list(range(16))
    assert best_order(path, 68, 5) == list(range(16)), "also in source pieces"


def test_given_order_stays_where_the_greedy_one_loads_more():
    rows = [torch.tensor(ids) for ids in ([2, 3, 4, 5], [0, 1, 4, 6], [1, 3, 5, 6], [3, 5, 7, 8])]
    greedy = greedy_order(overlaps(rows, rows, 9))
    loads = [count_loads([rows[c] for c in order], 9, 4) for order in (range(4), greedy)]
    assert loads == [11, 12] and best_order(rows, 9, 4) == [0, 1, 2, 3]
