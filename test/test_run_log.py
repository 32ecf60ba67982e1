"""What a run tells: lines as PyG's, and scalars of each worker."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch_geometric.logging
from support import graphs

import pyg_sar
from pyg_sar.report import scalars

NAMES = ("exposed communication", "seconds")


def test_it_prints_what_pyg_does(capsys):
    told = {"Epoch": 7, "Loss": 0.123456, "Val": 1.0, "Done": True, "Name": "gat"}
    torch_geometric.logging.log(**told)
    expected = capsys.readouterr().out
    pyg_sar.RunLog()(**told)
    assert capsys.readouterr().out == expected == "Epoch: 007, Loss: 0.1235, Val: 1.0000, Done: True, Name: gat\n"


def test_it_says_what_is_missing(tmp_path):
    with (
        mock.patch.dict(sys.modules, {"torch.utils.tensorboard": None}),
        pytest.raises(ImportError, match="pip install tensorboard"),
    ):
        pyg_sar.RunLog(tmp_path)


def run(group, parts, folder):
    """Train for three epochs, and return the bytes of each aggregation of the last one as they were counted."""
    data = pyg_sar.load(parts, group=group)
    torch.manual_seed(0)
    convs = [pyg_sar.nn.SAGEConv(a, b).double() for a, b in ((graphs.FEATURES, 8), (8, graphs.CLASSES))]
    log = pyg_sar.RunLog(folder, data, group)
    for epoch in range(1, 4):
        with pyg_sar.record_traffic(data.edge_index) as layers:
            out = convs[1](convs[0](data.x, data.edge_index).relu(), data.edge_index)
            pyg_sar.global_mean(out.square().sum(-1), group).backward()
        log(Epoch=10 * epoch, Loss=1 / epoch)
    return [t.forward_received + t.backward_received for t in layers]


def test_scalars_of_each_worker(pool, tmp_path: Path):
    pyg_sar.partition(graphs.citations(), 2, tmp_path / "parts")
    counted = pool.run(2, run, str(tmp_path / "parts"), str(tmp_path / "log"))
    for rank, bytes_of in enumerate(counted):
        found = scalars(tmp_path / "log" / f"rank-{rank}")
        assert [step for step, _ in found["time/seconds"]] == [10, 20, 30]
        assert found["values/Loss"] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]
        assert "values/Epoch" not in found and len(bytes_of) == 2 and min(bytes_of) > 0
        each = [found[f"aggregations/{k} received"][-1][1] for k in range(2)]
        assert each == pytest.approx([count / 2**20 for count in bytes_of])
        assert "aggregations/2 received" not in found  # counts of one epoch are not those of the next
        assert found["traffic/received"][-1][1] == pytest.approx(sum(bytes_of) / 2**20)
        assert all(0 <= w <= t for (_, w), (_, t) in zip(*(found[f"time/{n}"] for n in NAMES), strict=True))
        assert found["memory/peak"][-1][1] > 50
