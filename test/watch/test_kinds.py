"""What rows become, by what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.watched import LINEAR, C, graph, losses, net, passes
from torch import Tensor
from torch_geometric.utils import degree, scatter, softmax

import pyg_sar
from pyg_sar.watch import LOSS, ROWS, SAME, current
from pyg_sar.watch.kinds import ENDS, SHARE, Kind
from pyg_sar.watch.mode import watching


def filled(t: Tensor, row: Tensor) -> Tensor:
    """Return a tensor of which one row was set."""
    t[1] = row
    return t


def test_a_mask_filled_by_a_list_of_rows(parts: str) -> None:
    def work(data: Any) -> None:
        mask, index = torch.zeros(data.num_nodes, dtype=torch.bool), data.train_mask.nonzero().view(-1)
        mask[index] = True
        data.x[mask]
        seen = torch.zeros(C)
        seen[data.y] = 1.0
        assert current().kind(seen) is None and current().kind(mask) is None  # type: ignore[union-attr]

    passes(f"{parts}/one", work)


def test_sums_of_another_type_are_sums(parts: str) -> None:
    found = passes(f"{parts}/one", lambda data: pyg_sar.all_reduce(data.train_mask.sum().float()))
    assert found[0] == found[1] == graph().train_mask.sum()


def test_destinations_that_are_left_out_are_counted(parts: str) -> None:
    def work(data: Any) -> None:
        ends = torch.where(data.edge_type == 0, data.edge_index[1], data.num_nodes)
        count = torch.zeros(data.num_nodes + 1).scatter_add_(0, ends, torch.ones(len(ends)))[:-1]
        assert torch.cat([data.x, count[:, None]], 1).shape == (data.num_nodes, 9)

    passes(f"{parts}/one", work)


# What rows become, by what is done with them.
KINDS: dict[str, tuple[Callable[[Any], Tensor], Kind | None]] = {
    "transposed": (lambda d: d.x.t(), Kind(ROWS, 1)),
    "heads": (lambda d: d.x.view(-1, 2, 4).transpose(0, 1), Kind(ROWS, 1)),
    "flat": (lambda d: d.x.flatten(), Kind(ROWS)),
    "new dimensions": (lambda d: d.x[None, :, 0, None], Kind(ROWS, 1)),
    "masked": (lambda d: d.x[d.train_mask], Kind(ROWS)),
    "masked columns": (lambda d: d.x[..., torch.tensor([0, 2])], Kind(ROWS)),
    "one row": (lambda d: d.x[0], None),
    "one row by a number of numpy": (lambda d: d.x[np.int64(0)], None),
    "one column by a number of numpy": (lambda d: d.x.t()[np.int64(0)], Kind(ROWS)),
    "stacked by another name": (lambda d: torch.stack([d.x, d.x], axis=1), Kind(ROWS)),
    "joined by another name": (lambda d: torch.cat([d.x, d.x], axis=1), Kind(ROWS)),
    "quantiles": (lambda d: torch.quantile(d.x, torch.tensor([0.1, 0.5]), dim=1), Kind(ROWS, 1)),
    "each row's median": (lambda d: torch.quantile(d.x, 0.5, dim=1), Kind(ROWS)),
    "rows times a vector": (lambda d: d.x @ torch.ones(8), Kind(ROWS)),
    "a vector times columns": (lambda d: torch.ones(8) @ d.x.t(), Kind(ROWS)),
    "numbers times a vector": (lambda d: torch.outer(d.x[:, 0], torch.ones(3)), Kind(ROWS)),
    "a vector times numbers": (lambda d: torch.outer(torch.ones(3), d.x[:, 0]), Kind(ROWS, 1)),
    "own destinations": (lambda d: d.edge_index[1][d.edge_type == 0], Kind(ENDS)),
    "read by sources": (lambda d: d.x[d.edge_index[0]], Kind(ROWS)),
    "read by destinations": (lambda d: d.x.index_select(0, d.edge_index[1]), Kind(ROWS)),
    "sequences of layers": (lambda d: torch.nn.LSTM(8, 4, batch_first=True)(torch.stack([d.x, d.x], 1))[0], Kind(ROWS)),
    "a cell": (lambda d: torch.nn.GRUCell(8, 8)(d.x, d.x), Kind(ROWS)),
    "a table": (lambda d: F.embedding(d.y, LINEAR.weight), Kind(ROWS)),
    "sums of rows": (lambda d: d.x.sum(-1), Kind(ROWS)),
    "stacked": (lambda d: torch.stack([d.x, d.x]).mean(0), Kind(ROWS)),
    "a layer": (lambda d: net(d), Kind(ROWS)),
    "a normalisation": (lambda d: pyg_sar.nn.BatchNorm(8)(d.x), Kind(ROWS)),
    "GraphNorm": (lambda d: pyg_sar.nn.GraphNorm(8)(d.x), Kind(ROWS)),
    "eval": (lambda d: torch.nn.BatchNorm1d(8).eval()(d.x), Kind(ROWS)),
    "statistics that are known": (lambda d: F.batch_norm(d.x, torch.zeros(8), torch.ones(8)), Kind(ROWS)),
    "degrees": (lambda d: degree(d.edge_index[1], d.num_nodes), Kind(ROWS)),
    "softmax": (lambda d: softmax(d.edge_attr, d.edge_index[1]), Kind(ROWS)),
    "sums by destination": (lambda d: scatter(d.edge_attr, d.edge_index[1], 0, d.num_nodes, "mean"), Kind(ROWS)),
    "one-hot": (lambda d: F.one_hot(d.y, C).float(), Kind(ROWS)),
    "in place": (lambda d: torch.zeros(d.num_nodes).masked_fill_(d.train_mask, 1.0), Kind(ROWS)),
    "assigned": (lambda d: assigned(d), Kind(ROWS)),
    "a sum": (lambda d: d.x.sum(0) * 2 + 1, Kind(SHARE, size=20)),
    "a sum of classes": (lambda d: torch.bincount(d.y, minlength=C), Kind(SHARE)),
    "contracted": (lambda d: d.x.t() @ d.x, Kind(SHARE, size=20)),
    "by letters": (lambda d: torch.einsum("nf,ng->fg", d.x, d.x), Kind(SHARE, size=20)),
    "a loss's sum": (lambda d: F.mse_loss(d.x, d.x, reduction="sum"), Kind(SHARE, size=20)),
    "a loss": (lambda d: pyg_sar.global_mean(losses(d)).log() * 2, Kind(LOSS)),
    "a weight": (lambda d: LINEAR.weight.square().mean(), Kind(SAME)),
    "the sum of all": (lambda d: pyg_sar.all_reduce(d.x.sum(0)), Kind(SAME)),
    "a readout": (lambda d: pyg_sar.nn.global_mean_pool(d.x, d.batch).relu(), Kind(SAME)),
    "by name": (lambda d: torch.matmul(input=d.x, other=torch.ones(8, 2)), None),
    "questions": (lambda d: (d.x > 0).any(0), None),
    "a sum that is written over": (lambda d: filled(filled(torch.zeros(3, 8), d.x.sum(0)), torch.ones(8)), None),
    "the sum of all in its place": (lambda d: (s := d.x.sum(0)).copy_(pyg_sar.all_reduce(s)), Kind(SAME)),
    "lengths of groups": (lambda d: torch.segment_reduce(d.x, "sum", lengths=d.y.bincount(minlength=C)), None),
    "a window along columns": (lambda d: F.conv2d(d.x[None, None], torch.ones(2, 1, 1, 3)), Kind(ROWS, 2)),
    "tensordot": (lambda d: torch.tensordot(torch.ones(3, 8), d.x, dims=([1], [1])), Kind(ROWS, 1)),
    "tensordot of rows": (lambda d: torch.tensordot(d.x, d.x, dims=([0], [0])), Kind(SHARE)),
    "a sum expanded": (lambda d: d.x.sum(0).expand_as(d.x), Kind(SHARE, size=20)),
    "a sum in a list": (lambda d: filled(torch.zeros(3, 8), d.x.sum(0)), Kind(SHARE)),
}


def assigned(data: Any) -> Tensor:
    out = torch.zeros(data.num_nodes)
    out[data.train_mask] = 1.0
    return out


@pytest.mark.filterwarnings("ignore:.*chooses rows by where they stand")
def test_kinds(parts: str) -> None:
    def work(data: Any) -> dict[str, Kind | None]:
        watch = current()
        assert watch is not None
        return {name: watch.kind(make(data)) for name, (make, _) in KINDS.items()}

    for found in passes(f"{parts}/one", work):
        assert found == {name: kind for name, (_, kind) in KINDS.items()}


def test_what_others_add_up_in_place_is_no_share_any_more(pool: Any, parts: str) -> None:
    pool.run(2, add_up, f"{parts}/one")


def add_up(group: Any, path: str) -> None:
    with watching():
        data = pyg_sar.load(path, group=group)
        total = data.x.sum(0)
        dist.all_reduce(total, group=group)
        total.sqrt()
