r"""Source rows on the device: on an accelerator in the slots of a buffer, where they stay as long as there is room.

Which slot a row takes is decided beforehand (:mod:`pyg_sar.offload.schedule`); a row that is in its slot already is not
loaded. Gradients are added up in slots as well, and stored when another row takes the slot. Without slots each piece is
loaded anew, and its gradient stored at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_sar.exchange import Meter
from pyg_sar.offload.halo import SourceRows
from pyg_sar.offload.place import Place
from pyg_sar.reduce.base import columns

NOBODY = -1  # is in a slot


class Slots:
    """The source rows of one pass over all chunks, and their gradients.

    Args:
        place: Where rows are computed on.
        source: The rows at home, as the device sees them; None if nobody reads them.
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
        held = self.held_by(self.held, which, slots, num_slots)
        new = (held.index_select(0, slots) != ids).nonzero().view(-1)
        ids, slots = ids.index_select(0, new), slots.index_select(0, new)
        held.index_copy_(0, slots, ids)
        return columns(self.rows, which).index_copy_(0, slots, fetch(source, ids, self.place, self.meter))

    def add(self, ids: Tensor, slots: Tensor | None, which: slice, grad: Tensor) -> None:
        """Add the gradients of some rows; or of all slots, in some of which they are, others being stored first."""
        assert self.total is not None
        if slots is None:
            add(self.total.columns(which), ids, grad, self.meter)
            return
        self.grads = self.buffer(self.total, len(grad)) if self.grads is None else self.grads
        held = self.held_by(self.held_grads, which, slots, len(grad))
        new = (held.index_select(0, slots) != ids).nonzero().view(-1)
        slots = slots.index_select(0, new)
        self.store(slots, which)
        held.index_copy_(0, slots, ids.index_select(0, new))
        columns(self.grads, which).add_(grad)

    def store(self, slots: Tensor, which: slice) -> None:
        """Add the gradients in some slots to those at home, and begin anew."""
        assert self.total is not None and self.grads is not None
        held = self.held_grads[which.start, which.stop]
        slots = slots.index_select(0, (held.index_select(0, slots) != NOBODY).nonzero().view(-1))
        ids, order = held.index_select(0, slots).sort()
        slots, grads = slots.index_select(0, order), columns(self.grads, which)
        add(self.total.columns(which), ids, grads.index_select(0, slots), self.meter)
        grads.index_fill_(0, slots, 0)

    def flush(self) -> None:
        """Store what is in slots."""
        for span, held in self.held_grads.items():
            self.store(torch.arange(len(held), device=held.device), slice(*span))

    def held_by(self, of_tiles: dict[Any, Tensor], which: slice, slots: Tensor, num_slots: int) -> Tensor:
        """Return which row of a tile is in each slot."""
        key = which.start, which.stop
        if key not in of_tiles:
            of_tiles[key] = slots.new_full((num_slots,), NOBODY)
        return of_tiles[key]

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
    total.add(index, grad)
    meter(loaded=grad.nbytes, stored=grad.nbytes)
