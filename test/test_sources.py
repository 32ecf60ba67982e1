"""Local rows and their gradients, tile by tile."""

import pytest
import torch
import torch.nn.functional as F
from support.nasty_graph import close

from pyg_sar.sources import LocalGrads, LocalRows, ProjectedGrads, ProjectedRows

TILES = [slice(0, 2), slice(2, 5)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wants", [(True, True, True), (True, False, False), (False, True, True)])
def test_projected_rows_tile_by_tile(wants, bias):
    inputs = [torch.rand(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 3), (5, 3), (5,))][
        : 2 + bias
    ]
    rows, grad = ProjectedRows(*inputs), torch.rand(7, 5, dtype=torch.float64)
    whole = F.linear(*inputs)
    assert rows.like.shape == (0, 5)
    expected = torch.autograd.grad(whole, inputs, grad)
    with torch.no_grad():
        close(torch.cat([rows.tile(tile) for tile in TILES], 1), whole, "rows")
        grads = ProjectedGrads(rows, wants[: 2 + bias], TILES)
        for k in (1, 0):
            grads.add_grad(k, grad[:, TILES[k]])
    for found, value, want in zip(grads.grads(), expected, wants, strict=False):
        close(found, value, "gradient") if want else None
        assert (found is not None) == want


def test_local_rows():
    x = torch.rand(7, 5)
    assert LocalRows(x).like.shape == (0, 5)
    assert LocalRows(x).tile(slice(None)) is x
    assert torch.equal(LocalRows(x).tile(TILES[1]), x[:, 2:])
    whole, cut = LocalGrads(x.shape, [slice(None)]), LocalGrads(x.shape, TILES)
    whole.add_grad(0, x)
    for k in (0, 1):
        cut.add_grad(k, x[:, TILES[k]])
    assert whole.grads()[0] is x
    assert torch.equal(cut.grads()[0], x)
    assert LocalGrads(x.shape, TILES).grads() == [None]
