"""Slots: what is loaded, and the gradients of rows that come, go and come back."""

from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.offload import chunks, halo
from pyg_sar.offload.halo import SourceRows, add_across
from pyg_sar.offload.home import Home
from pyg_sar.offload.place import Place
from pyg_sar.offload.schedule import accesses
from pyg_sar.offload.slots import Slots

N, F, SLOTS = 40, 3, 14


@pytest.mark.parametrize("add", [lambda total, *rows: total.index_add_(0, *rows), add_across], ids=["CPU", "GPU"])
def test_gradients_add_up(monkeypatch, add):
    """A row that goes and comes back to another slot is in one at a time: who adds across the bus relies on it."""
    again = []

    def add_to(total, index, rows):
        assert len(index) == len(index.unique())
        again.append(bool(total.index_select(0, index).any()))
        add(total, index, rows)

    monkeypatch.setattr(halo, "add_to", add_to)
    place = SimpleNamespace(device=torch.device("cpu"), home=Home(None, torch.device("cpu"), None))
    for seed in range(30):
        torch.manual_seed(seed)
        pieces = [torch.randperm(N)[: 5 + (seed + k) % 9].sort().values for k in range(12)]
        x, total, expected = torch.randn(N, F).double(), torch.zeros(N, F).double(), torch.zeros(N, F).double()
        slots = Slots(place, SourceRows(x, None), SourceRows(total, None), lambda **counted: None)
        for ids, access in zip(pieces, accesses(pieces, N, SLOTS), strict=True):
            rows = slots.load(ids, access.slots, slice(None), SLOTS)
            assert torch.equal(rows[access.slots], x[ids])
            d_rows = torch.zeros(SLOTS, F).double().index_copy_(0, access.slots, torch.randn(len(ids), F).double())
            slots.add(ids, access.slots, slice(None), d_rows)
            expected.index_add_(0, ids, d_rows[access.slots])
        slots.flush()
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    assert any(again), "rows came back"


def test_gradients_are_there_before_others_read_them(monkeypatch):
    """A device that writes rows at home by itself is waited for in front of what the host does with them."""
    told, given = [], chunks.sum_halo
    monkeypatch.setattr(Place, "settle", lambda place: told.append("settle"))
    monkeypatch.setattr(chunks, "sum_halo", lambda *args: (told.append("sum"), given(*args)))
    edge_index = pyg_sar.shard(torch.randint(N, (2, 100)), N)
    data = pyg_sar.offload(Data(x=torch.randn(N, F), edge_index=edge_index), chunks=3)
    pyg_sar.nn.GATConv(F, 2)(data.x.requires_grad_(), edge_index).sum().backward()
    assert told == ["settle", "sum"]
