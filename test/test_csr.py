"""Row pointers, and edges that are sorted piece by piece."""

import pytest
import torch

from pyg_sar.csr import compress, compress_doubly, sorting


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_compress(num_rows):
    row = torch.arange(num_rows).repeat_interleave(torch.arange(num_rows) % 3)
    ptr = compress(row, num_rows)
    assert ptr.dtype == torch.int32
    assert ptr.tolist() == [0, *torch.cumsum(torch.arange(num_rows) % 3, 0).tolist()]


def test_row_pointers_lead_over_few_rows_alone():
    for few in (4, 5):
        row = torch.arange(few).repeat_interleave(3) * 4
        ptr, rows = compress_doubly(row, 20)
        if few == 5:
            assert rows is None and ptr.equal(compress(row, 20))
        else:
            assert (ptr.tolist(), rows.tolist()) == ([0, 3, 6, 9, 12], [0, 4, 8, 12])
        assert ptr.dtype == torch.int32 and compress_doubly(row, 20, torch.int64)[0].dtype == torch.int64
    ptr, rows = compress_doubly(row[:0], 20)
    assert (ptr.tolist(), rows.tolist()) == ([0], [])
    ptr, rows = compress_doubly(row + 2**40, 2**41)
    assert ptr.dtype == rows.dtype == torch.int64 and rows.tolist() == [2**40 + k for k in range(0, 20, 4)]


@pytest.mark.parametrize("count", [0, 1, 16, 17, 1000])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_pieces_that_are_sorted_are_in_the_order_of_all(count, size):
    numbers = torch.randint(size, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    order = sorting(numbers, size)  # 16 at a time, as :mod:`support.small_pieces` has it
    assert order.dtype == torch.int32 and order.long().equal(numbers.argsort(stable=True))


class Long(torch.Tensor):
    """Row numbers of more edges than int32 can count."""

    def numel(self):
        return 2**31


def test_pointers_are_wide_for_many_edges():
    few = torch.tensor([0, 0, 2])
    ptr = compress(few.as_subclass(Long), 3)
    assert ptr.dtype == torch.int64
    assert ptr.tolist() == [0, 2, 2, 3]
