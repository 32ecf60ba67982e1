r"""Which source rows are loaded when, and into which slots of a buffer, while destination chunks are computed in turn.

Index arithmetic only. A chunk *accesses* the source rows of its edges, in source pieces if the buffer does not hold
them all. All accesses are known, and are the same in every layer and epoch; so what stays in the buffer is decided
once, and no decision loads fewer rows. The order of chunks is chosen as in Algorithm 4 of `"HongTu: Scalable Full-Graph
GNN Training on Multiple GPUs" <https://arxiv.org/abs/2311.14898>`_.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

ROW_COST = 4  # of a destination, in edges: a row is read and multiplied, where an edge only adds one


class Access(NamedTuple):
    """One access to the rows of a chunk, or of a source piece of it.

    Args:
        slots: The slot of every row of the access, in the order of the rows.
        loads: How many of these rows were not in the buffer and are loaded. They take slots whose rows need not stay.
    """

    slots: Tensor
    loads: int


def accesses(rows: Sequence[Tensor], num_rows: int, num_slots: int) -> Iterator[Access]:
    r"""Yield the accesses of one pass, which begins with an empty buffer, such that no other choice loads fewer rows.

    Rows that the next access does not read make room, those used latest first: `"A Study of Replacement Algorithms for
    a Virtual-Storage Computer" <https://doi.org/10.1147/sj.52.0078>`_ (Belady, 1966). A row keeps its slot while it
    stays. Slots that have been free for longest are taken first, so that rows can be loaded early.

    Args:
        rows: The rows of each access, ascending.
        num_rows: Number of all rows.
        num_slots: Number of rows that the buffer holds.

    Raises:
        ValueError: If an access has more rows than there are slots.
    """
    check_slots(rows, num_slots)
    never = len(rows)
    held, free = torch.empty(0, dtype=torch.int64), torch.arange(num_slots)
    slot = torch.full((num_rows,), -1)
    use = torch.full((num_rows,), never)  # the next access of each row
    for t, (ids, uses) in enumerate(zip(rows, next_uses(rows, num_rows), strict=True)):
        load = ids[slot[ids] < 0]
        slot[load], free = free[: load.numel()], free[load.numel() :]
        use[ids], held = uses, torch.cat([held, load])
        yield Access(slot[ids], load.numel())
        room = num_slots - rows[t + 1].numel() if t + 1 < never else 0
        stays = chosen(use[held], t + 1, never, room)
        gone, held = held[~stays].sort().values, held[stays]
        free, slot[gone] = torch.cat([free, slot[gone]]), -1


def count_loads(rows: Sequence[Tensor], num_rows: int, num_slots: int) -> int:
    """Return how many rows are loaded in one pass, see :func:`accesses`, of which all arguments are."""
    return sum(access.loads for access in accesses(rows, num_rows, num_slots))


def check_slots(rows: Sequence[Tensor], num_slots: int) -> None:
    """Raise if an access does not fit into the buffer."""
    sizes = [ids.numel() for ids in rows]
    most = max(sizes, default=0)
    if most > num_slots:
        raise ValueError(
            f"Access {sizes.index(most)} reads {most} rows, expected at most as many as the buffer has slots "
            f"({num_slots}). Give it {most} slots, or cut the rows by 'source_pieces'."
        )


def next_uses(rows: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """Return, for every row of every access, the next access that reads it; ``len(rows)`` if there is none."""
    use, uses = torch.full((num_rows,), len(rows)), []
    for t in reversed(range(len(rows))):
        uses.append(use[rows[t]])
        use[rows[t]] = t
    return uses[::-1]


def chosen(use: Tensor, now: int, never: int, room: int) -> Tensor:
    """Return which rows stay, given the access that reads each of them next (``never``: none does): those of access
    ``now``, and, as long as there is room, those of the others that are used soonest.
    """
    stays = (use == now) & (use < never)
    others = ((use > now) & (use < never)).nonzero().view(-1)
    stays[others[use[others].argsort(stable=True)[:room]]] = True
    return stays


def ranges(rowptr: Tensor, num_chunks: int) -> list[slice]:
    """Cut destinations into ranges of about equal cost, that of their edges and of ``ROW_COST`` edges for each row.

    No range costs more than its share and the half of its two outermost rows. Some are empty if there are more than
    there are destinations.

    Args:
        rowptr: CSR row pointer over the destinations.
        num_chunks: Number of ranges.

    Raises:
        ValueError: If no range is asked for.
    """
    if num_chunks < 1:
        raise ValueError(f"Expected at least one chunk (got {num_chunks}). Give a positive 'num_chunks'.")
    cost = rowptr.long() + ROW_COST * torch.arange(rowptr.numel())  # of all rows before each
    share = int(cost[-1]) * torch.arange(num_chunks + 1) // num_chunks
    end = torch.searchsorted(cost, share)
    before = (end - 1).clamp(min=0)
    end = torch.where(share - cost[before] < cost[end] - share, before, end)  # the nearer one
    return [slice(*ends) for ends in pairwise(end.tolist())]


def source_pieces(ids: Tensor, num_slots: int) -> tuple[Tensor, ...]:
    """Cut the rows of a chunk into the fewest source pieces that the buffer holds, of equal lengths but for one row."""
    return ids.tensor_split(max(-(-ids.numel() // num_slots), 1))


def overlaps(rows: Sequence[Tensor], others: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return how many rows each of ``rows`` has in common with each of ``others``, ``[len(rows), len(others)]``."""
    number = torch.arange(len(others)).repeat_interleave(torch.tensor([ids.numel() for ids in others]))
    every, read = torch.cat(list(others)), torch.zeros(num_rows, dtype=torch.bool)
    counts = []
    for ids in rows:
        read[ids] = True
        counts.append(torch.bincount(number[read[every]], minlength=len(others)))
        read[ids] = False
    return torch.stack(counts)


def greedy_order(shared: Tensor) -> list[int]:
    """Return an order of batches in which each shares rows with the last, given how many any two have in common.

    Algorithm 4, phase 2: it begins with the first batch, and appends that which has most rows in common with the last.
    """
    counts, order, left = shared.tolist(), [0], list(range(1, len(shared)))
    while left:
        order.append(max(left, key=counts[order[-1]].__getitem__))
        left.remove(order[-1])
    return order


def best_order(rows: Sequence[Tensor], num_rows: int, num_slots: int) -> list[int]:
    """Return the order of chunks in which fewest rows are loaded, as given or greedy.

    Args:
        rows: The rows of each chunk, ascending.
        num_rows: Number of all rows.
        num_slots: Number of rows that the buffer holds; chunks that have more are cut into source pieces.
    """

    def loads(order: list[int]) -> int:
        return count_loads([piece for c in order for piece in source_pieces(rows[c], num_slots)], num_rows, num_slots)

    return min([list(range(len(rows))), greedy_order(overlaps(rows, rows, num_rows))], key=loads)
