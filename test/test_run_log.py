"""What a run tells: lines as PyG's, and scalars of each worker."""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch_geometric.logging
import torch_geometric.nn
from support import graphs
from torch_geometric.transforms import AddRemainingSelfLoops

import pyg_sar
from pyg_sar.report import layers, scalars

NAMES = ("exposed communication", "seconds")


def test_it_prints_what_pyg_does(capsys):
    told = {"Epoch": 7, "Loss": 0.123456, "Val": 1.0, "Done": True, "Name": "gat"}
    torch_geometric.logging.log(**told)
    expected = capsys.readouterr().out
    pyg_sar.RunLog()(**told)
    assert capsys.readouterr().out == expected == "Epoch: 007, Loss: 0.1235, Val: 1.0000, Done: True, Name: gat\n"


def test_tensors_of_a_number_are_printed_as_numbers(capsys):
    pyg_sar.RunLog()(Epoch=torch.tensor(7), Loss=torch.tensor([0.5], dtype=torch.float64))
    assert capsys.readouterr().out == "Epoch: 007, Loss: 0.5000\n"


def test_ranges_of_a_profile(capsys):
    log = pyg_sar.RunLog()
    with torch.profiler.profile() as seen:
        for _ in range(3):
            torch.ones(2) + 1
            log(Loss=1.0)
    assert [e.name for e in seen.events() if e.name.startswith("step")][:2] == ["step 2", "step 3"]


def test_steps_that_were_made_again_count_once(tmp_path):
    for steps in (range(1, 6), range(4, 9)):  # it went on from a checkpoint of step 3
        log = pyg_sar.RunLog(tmp_path)
        for step in steps:
            log(Epoch=step, Loss=10.0 * len(steps) * step + steps[0])
        log.writer.close()
    told = scalars(tmp_path / "rank-0")["values/Loss"]
    assert [step for step, _ in told] == [*range(1, 9)]
    assert [value % 10 for _, value in told] == [1, 1, 1, 4, 4, 4, 4, 4]


def test_words_are_no_scalars(tmp_path):
    log = pyg_sar.RunLog(tmp_path)
    log(Epoch=3, Loss=torch.tensor([0.5]), Name="gat", Val=None, Done=True, Test=np.float32(0.25))
    told = scalars(tmp_path / "rank-0")
    assert {name: told[name] for name in told if name.startswith("values/")} == {
        "values/Loss": [(3, 0.5)], "values/Done": [(3, 1.0)], "values/Test": [(3, 0.25)]
    }  # fmt: skip


def test_several_logs_of_one_graph(tmp_path):
    """One after the other, and beside each other, each gets all records."""
    data = graphs.citations()[0]
    data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes)
    layer = pyg_sar.nn.SAGEConv(data.num_features, 2).double()
    for k in range(3):
        log = pyg_sar.RunLog(tmp_path / str(k), data)
        both = pyg_sar.RunLog(tmp_path / f"{k} again", data)
        layer(data.x, data.edge_index).sum().backward()
        assert [len(each.records[0]) for each in (log, both)] == [1, 1]
        log(Loss=1.0)
        assert [len(each.records[0]) for each in (log, both)] == [0, 1]
    assert len(data.edge_index.graph.exchange.log.listeners) == 2


def test_edges_that_loops_were_added_to(tmp_path):
    data = graphs.citations()[0]
    data.edge_index = pyg_sar.shard(data.edge_index, data.num_nodes)
    data = AddRemainingSelfLoops()(data)
    log = pyg_sar.RunLog(tmp_path / "log", data)
    with pyg_sar.record_traffic(data.edge_index) as layers:
        pyg_sar.nn.SAGEConv(data.num_features, 2).double()(data.x, data.edge_index)
    assert len(layers) == len(log.records[0]) == 1
    pyg_sar.save_checkpoint(tmp_path / "saves", model=torch.nn.Linear(1, 1), data=data)
    out = pyg_sar.nn.LabelPropagation(2, 0.9)(data.y, data.edge_index)
    assert out.shape == (data.num_nodes, int(data.y.max()) + 1)


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
    model = pyg_sar.nn.convert(torch_geometric.nn.GAT(graphs.FEATURES, 8, 2, graphs.CLASSES).double())
    log = pyg_sar.RunLog(folder, data, group)
    for epoch in range(1, 4):
        with pyg_sar.record_traffic(data.edge_index) as layers:
            out = model(data.x, data.edge_index)
            pyg_sar.global_mean(out.square().sum(-1), group).backward()
        log(Epoch=10 * epoch, Loss=1 / epoch)
    return [(t.forward_received + t.backward_received, t.saved) for t in layers]


def test_scalars_of_each_worker(pool, tmp_path: Path):
    pyg_sar.partition(graphs.citations(), 2, tmp_path / "parts")
    counted = pool.run(2, run, str(tmp_path / "parts"), str(tmp_path / "log"))
    for rank, counts in enumerate(counted):
        bytes_of, saved = zip(*counts, strict=True)
        found = scalars(tmp_path / "log" / f"rank-{rank}")
        assert [step for step, _ in found["time/seconds"]] == [10, 20, 30]
        assert found["values/Loss"] == [(10, 1.0), (20, 0.5), (30, pytest.approx(1 / 3))]
        assert "values/Epoch" not in found and len(bytes_of) == 2 and min(bytes_of) > 0
        each = [found[f"aggregations/{k} received"][-1][1] for k in range(2)]
        assert each == pytest.approx([count / 2**20 for count in bytes_of])
        each = [found[f"aggregations/{k} saved"][-1][1] for k in range(2)]
        assert each == pytest.approx([count / 2**20 for count in saved]) and max(saved) > 0
        assert layers(tmp_path / "log" / f"rank-{rank}") == ["convs.0", "convs.1"]
        assert "aggregations/2 received" not in found  # counts of one epoch are not those of the next
        assert found["traffic/received"][-1][1] == pytest.approx(sum(bytes_of) / 2**20)
        assert all(0 <= w <= t for (_, w), (_, t) in zip(*(found[f"time/{n}"] for n in NAMES), strict=True))
        assert found["memory/peak"][-1][1] > 50
