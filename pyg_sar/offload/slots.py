r"""Source rows on the device: on an accelerator in the slots of a buffer, where they stay as long as there is room.

Which slot a row takes is decided beforehand (:mod:`pyg_sar.offload.schedule`); a row that is in its slot already is not
loaded. Gradients are added up in slots as well, and stored when another row takes the slot. Without slots each piece is
loaded anew, and its gradient stored at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_sar.exchange import Meter
from pyg_sar.offload.halo import SourceRows
from pyg_sar.offload.rows import Place
from pyg_sar.reduce.base import columns

NOBODY = -1  # is in a slot


class Slots:
    """The source rows of one pass over all chunks, and their gradients.

    Args:
        place: Where rows are computed on.
        source: The rows at home; None if nobody reads them.
        total: Their gradients at home; None if nobody wants them.
        meter: Counts bytes.
    """

    def __init__(self, place: Place, source: SourceRows | None, total: SourceRows | None, meter: Meter) -> None:
        self.place, self.source, self.total, self.meter = place, source, total, meter
        self.rows: Tensor | None = None  # the buffers, on the device
        self.grads: Tensor | None = None
        # By the first and the last column of a tile, which row is in each slot.
        self.held: dict[tuple[int | None, int | None], Tensor] = {}
        self.held_grads: dict[tuple[int | None, int | None], Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        """The shape of a row."""
        assert self.source is not None
        return self.source.local.shape[1:]

    def load(self, ids: Tensor, slots: Tensor | None, which: slice, num_slots: int) -> Tensor:
        """Return columns of some rows; or of the buffer, in which those that are not in their slots yet are loaded."""
        assert self.source is not None
        source = self.source.columns(which)
        if slots is None:
            return fetch(source, ids, self.place, self.meter)
        self.rows = self.buffer(self.source, num_slots) if self.rows is None else self.rows
        held = self.held.setdefault((which.start, which.stop), torch.full((num_slots,), NOBODY))
        new = held[slots] != ids
        ids, slots = ids[new], slots[new]
        held[slots] = ids
        rows = columns(self.rows, which)
        return rows.index_copy_(0, slots.to(rows.device), fetch(source, ids, self.place, self.meter))

    def add(self, ids: Tensor, slots: Tensor | None, which: slice, grad: Tensor) -> None:
        """Add the gradients of some rows; or of all slots, in some of which they are, others being stored first."""
        assert self.total is not None
        if slots is None:
            add(self.total.columns(which), ids, grad, self.meter)
            return
        self.grads = self.buffer(self.total, len(grad)) if self.grads is None else self.grads
        held = self.held_grads.setdefault((which.start, which.stop), torch.full((len(grad),), NOBODY))
        new = held[slots] != ids
        self.store(slots[new], which)
        held[slots[new]] = ids[new]
        columns(self.grads, which).add_(grad)

    def store(self, slots: Tensor, which: slice) -> None:
        """Add the gradients in some slots to those at home, and begin anew."""
        assert self.total is not None and self.grads is not None
        held = self.held_grads[which.start, which.stop]
        slots = slots[held[slots] != NOBODY]
        ids, order = held[slots].sort()
        there = slots[order].to(self.grads.device)
        grads = columns(self.grads, which)
        add(self.total.columns(which), ids, grads.index_select(0, there), self.meter)
        grads.index_fill_(0, there, 0)

    def flush(self) -> None:
        """Store what is in slots."""
        for span, held in self.held_grads.items():
            self.store(torch.arange(len(held)), slice(*span))

    def buffer(self, rows: SourceRows, num_slots: int) -> Tensor:
        """Return zeros: rows that nobody reads are multiplied, too, and must be numbers."""
        shape = (num_slots, *rows.local.shape[1:])
        return torch.zeros(shape, dtype=rows.local.dtype, device=self.place.device)


def fetch(rows: SourceRows, index: Tensor, place: Place, meter: Meter) -> Tensor:
    """Return rows from home."""
    found = rows.select(index)
    meter(loaded=found.nbytes)
    return found.to(place.device, non_blocking=True)  # no copy in a dry run: these are new


def add(total: SourceRows, index: Tensor, grad: Tensor, meter: Meter) -> None:
    """Add gradients of rows to those at home, which are loaded and stored."""
    total.add(index, grad.to(total.local.device, total.local.dtype))
    meter(loaded=grad.nbytes, stored=grad.nbytes)
