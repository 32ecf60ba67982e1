r"""Rows of all workers in one place, for metrics and for what is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.distributed import staging
from pyg_sar.distributed.group import Message, current, gather_objects, rank_of, size_of, start, talking
from pyg_sar.watch import SAME, gives


@gives(SAME)
@torch.no_grad()
def gather(rows: Tensor, n_id: Tensor, dst: int | None = 0, group: Any = None) -> Tensor | None:
    r"""Return the rows of all workers in the order of the graph, on one worker or on all, without a gradient.

    .. code-block:: python

        score = pyg_sar.gather(out[data.test_mask], data.n_id[data.test_mask])
        y = pyg_sar.gather(data.y[data.test_mask], data.n_id[data.test_mask])
        if score is not None:  # rank 0
            print(roc_auc_score(y, score))

    All workers call it together; some may have no rows. With the ids of all nodes, row :math:`i` is that of node
    :math:`i`. Only where the result is returned is there memory for more than the local rows.

    Args:
        rows (torch.Tensor): This worker's rows :math:`(n, *)`, of any type.
        n_id (torch.Tensor): Their global ids :math:`(n)`, such as ``data.n_id``; each is there once, on one worker.
        dst (int, optional): The rank that gets the result, or :obj:`None` for all of them. (default: :obj:`0`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        The rows in ascending order of their ids; :obj:`None` on ranks that do not get them.

    Raises:
        ValueError: On all workers, if rows and ids do not fit, ids occur twice, or rows of workers differ in type or
            width.
    """
    if is_elsewhere(rows):  # rows at home
        rows = rows[torch.arange(rows.size(0), device=rows.device)]
    counts = agree_on_rows(rows, n_id, dst, group)
    ids, order = torch.cat([n_id[:0], *(part for _, part in arrivals(n_id, counts, dst, group))]).sort()
    twice = ids[1:][ids[1:] == ids[:-1]][:5].tolist()
    refuse([f"{t} more than once" if t else "" for t in gather_objects(twice, group)], "every id once", group)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    whole = rows.new_empty(order.numel(), *rows.shape[1:])
    begin = 0  # of the rows of the next worker, in `place`
    for q, part in arrivals(rows, counts, dst, group):
        whole[place[begin : begin + counts[q]]] = part
        begin += counts[q]
    return whole if dst in (None, rank_of(group)) else None


def join(rows: Tensor, group: Any = None) -> Tensor:
    """Return the rows of all workers, one worker's after the other's, on all of them, without a gradient."""
    counts = gather_objects(rows.size(0), group)
    begin = sum(counts[: rank_of(group)])
    whole = gather(rows, torch.arange(begin, begin + rows.size(0), device=rows.device), None, group)
    assert whole is not None
    return whole


def agree_on_rows(rows: Tensor, n_id: Tensor, dst: int | None, group: Any) -> list[int]:
    """Return how many rows each worker has, or raise on all of them."""
    shape, size, wrong = list(rows.shape), size_of(group), ""
    if not shape or n_id.dtype != torch.int64 or list(n_id.shape) != shape[:1]:
        wrong = f"rows of shape {shape} with ids of type {n_id.dtype} and shape {list(n_id.shape)}"
    elif dst is not None and not 0 <= dst < size:
        wrong = f"'dst' {dst} of {size} workers"
    kind = f"rows of type {rows.dtype} and shape {['n', *shape[1:]]} for {'all' if dst is None else f'rank {dst}'}"
    said = gather_objects((wrong, kind, shape[:1]), group)
    refuse([w for w, _, _ in said], "rows [n, *] with an int64 id for each of them, and a rank or None", group)
    kinds = [k for _, k, _ in said]
    refuse(kinds if len(set(kinds)) > 1 else [], "the same on all workers", group)
    return [count for _, _, (count,) in said]


def refuse(found: list[str], expected: str, group: Any) -> None:
    """Raise if there is something wrong with what any of the workers has."""
    if wrong := "; ".join(f"rank {r} has {what}" for r, what in enumerate(found) if what):
        raise ValueError(f"[rank {rank_of(group)}] Cannot gather: expected {expected} (got: {wrong})")


def arrivals(rows: Tensor, counts: list[int], dst: int | None, group: Any) -> Iterator[tuple[int, Tensor]]:
    """Send the local rows to those that get them, and yield those of all workers if this is one, the own ones first.

    At step :math:`t` worker :math:`p` receives from :math:`p + t` and sends to :math:`p - t`.
    """
    rank, size, device = rank_of(group), size_of(group), rows.device
    if staging.is_staged(rows, current(group)):
        rows = rows.cpu()
    takers = range(size) if dst is None else (dst,)
    if rank in takers:
        yield rank, rows.to(device)
    for step in range(1, size):
        source, target = (rank + step) % size, (rank - step) % size
        into = rows.new_empty(counts[source] if rank in takers else 0, *rows.shape[1:])
        out = rows if target in takers else rows[:0]
        both = ((into, source, False), (out.contiguous(), target, True))
        # As bytes: not every backend sends every type.
        messages = [Message(t.view(-1).view(torch.uint8), p, step, sends) for t, p, sends in both if t.numel() > 0]
        with talking("gathering rows", group):
            for work in start(messages, group) if messages else []:
                work.wait()
        if rank in takers:
            yield source, into.to(device)
