"""Checkpoints: what follows has the same bits, whatever ends the run before."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import graphs
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import checkpoint, durable
from pyg_sar.data.datasets import community_graph
from pyg_sar.distributed import values

ROOT = Path(__file__).resolve().parents[1]


class Net(torch.nn.Module):
    def __init__(self, data, group, table=True):
        super().__init__()
        self.table = pyg_sar.nn.NodeEmbedding(data, 4, group=group) if table else None
        width = data.num_features + (4 if self.table is not None else 0)
        self.convs = torch.nn.ModuleList(
            [pyg_sar.nn.GATConv(width, 8, 2, dropout=0.3), pyg_sar.nn.SAGEConv(16, data.num_classes)]
        )
        self.norm = pyg_sar.nn.BatchNorm(16, group=group)

    def forward(self, data):
        x = data.x if self.table is None else torch.cat([data.x, self.table().to(data.x.dtype)], 1)
        x = F.dropout(self.norm(self.convs[0](x, data.edge_index)).relu(), 0.5, self.training)
        return self.convs[1](x, data.edge_index)


def train(group, folder, saves, epochs, ends=(), keeps=True, drops=True, dtype=torch.float64):
    """Train from the newest checkpoint, save after the epochs ``ends``; return losses by epoch, and all parameters."""
    torch.manual_seed(1)
    data = pyg_sar.load(folder, group=group)
    model = Net(data, group, keeps).to(dtype)
    data.x = data.x.to(dtype)
    if not drops:
        model.convs[0].dropout = 0.0
        model.forward = lambda data: model.convs[1](model.convs[0](data.x, data.edge_index).relu(), data.edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rank = dist.get_rank(group)
    torch.manual_seed(2 + rank)
    random.seed(rank)
    np.random.seed(rank)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data, "group": group}
    found = pyg_sar.load_checkpoint(saves, **state)
    losses, drawn = dict(found["losses"]) if found else {}, None
    for epoch in range(1 + (found["epoch"] if found else 0), epochs + 1):
        optimizer.zero_grad()
        out = F.cross_entropy(model(data)[data.train_mask], data.y[data.train_mask], reduction="none")
        loss = pyg_sar.global_mean(out, group)
        loss.backward()
        pyg_sar.sum_gradients(model, group=group)
        optimizer.step()
        scheduler.step()
        losses[epoch], drawn = loss.item(), (random.random(), np.random.rand(), torch.rand(1).item())
        if epoch in ends:
            pyg_sar.save_checkpoint(saves, epoch=epoch, losses=losses, **state)
    return losses, [p.detach() for p in model.parameters()], drawn


@pytest.fixture
def folder(tmp_path):
    def make(parts):
        path = tmp_path / f"graph-{parts}"
        if not path.exists():
            pyg_sar.partition(graphs.citations(), parts, path)
        return path

    return make


@pytest.mark.parametrize("end", [1, 3, 4])
def test_goes_on_with_the_same_bits(pool, folder, tmp_path, end):
    """Dropout of rows and of attention, Adam, a scheduler, statistics, and a table of nodes."""
    expected = pool.run(2, train, folder(2), tmp_path / "none", 5)
    pool.run(2, train, folder(2), tmp_path / "saves", end, (end,))
    for found, (losses, parameters, drawn) in zip(
        pool.run(2, train, folder(2), tmp_path / "saves", 5), expected, strict=True
    ):
        assert found[0] == losses and found[2] == drawn
        assert all(torch.equal(a, b) for a, b in zip(found[1], parameters, strict=True))


def train_at_home(folder, saves, epochs, ends=()):
    """With rows in files, dropout of rows and of attention."""
    torch.manual_seed(1)
    data = pyg_sar.offload(pyg_sar.load(folder), chunks=3, home=str(folder))
    model = Net(data, None, table=False).double()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    found = pyg_sar.load_checkpoint(saves, model=model, optimizer=optimizer, data=data)
    for epoch in range(1 + (found["epoch"] if found else 0), epochs + 1):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if epoch in ends:
            pyg_sar.save_checkpoint(saves, model=model, optimizer=optimizer, data=data, epoch=epoch)
    return losses, [p.detach() for p in model.parameters()]


def tied(group, folder, saves):
    """A table of nodes that two layers have."""
    data = pyg_sar.load(folder, group=group)
    model = torch.nn.Module()
    model.table = pyg_sar.nn.NodeEmbedding(data.n_id, 4, group=group)
    model.decoder = torch.nn.Sequential(model.table)
    weight = model.table.weight.detach().clone()
    pyg_sar.save_checkpoint(saves, epoch=1, model=model, group=group)
    with torch.no_grad():
        model.table.weight.zero_()
    pyg_sar.load_checkpoint(saves, model=model, group=group)
    return torch.equal(model.table.weight, weight) and model.decoder[0].weight is model.table.weight


def test_a_table_of_two_layers(pool, folder, tmp_path):
    assert pool.run(2, tied, folder(2), tmp_path / "saves") == [True, True]


def other_parts(group, folder, other, saves):
    """Rows of a table find their nodes by their ids alone, without ``data``."""
    model = torch.nn.Module()
    model.table = pyg_sar.nn.NodeEmbedding(pyg_sar.load(folder, group=group).n_id, 1, group=group)
    with torch.no_grad():
        model.table.weight.copy_(model.table.n_id.unsqueeze(1))
    pyg_sar.save_checkpoint(saves, epoch=1, model=model, group=group)
    model.table = pyg_sar.nn.NodeEmbedding(pyg_sar.load(other, group=group).n_id, 1, group=group)
    with pytest.warns(UserWarning) if dist.get_rank(group) == 0 else pytest.MonkeyPatch.context():
        pyg_sar.load_checkpoint(saves, model=model, group=group)
    return torch.equal(model.table.weight.detach().view(-1), model.table.n_id.to(model.table.weight.dtype))


def test_a_table_of_another_partition(pool, tmp_path):
    data = community_graph(200, 2000, 4, 3)
    pyg_sar.partition(data, 2, tmp_path / "one", method="random", seed=0)
    pyg_sar.partition(data, 2, tmp_path / "other", method="random", seed=1)
    assert pool.run(2, other_parts, tmp_path / "one", tmp_path / "other", tmp_path / "saves") == [True, True]


def own_models(group, saves, how):
    """As blocks of a pipeline are, or models that nobody made alike."""
    torch.manual_seed(dist.get_rank(group))
    model = torch.nn.Linear(2, 3 + (how == "shapes") * dist.get_rank(group))
    try:
        pyg_sar.save_checkpoint(saves, model=model, group=group)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(("how", "says"), [
    ("values", "hold different values of ('bias', torch.float32, [3])"),
    ("shapes", "differ in the parameters of a checkpoint"),
])  # fmt: skip
def test_parameters_that_differ_are_not_saved(pool, tmp_path, how, says):
    for told in pool.run(2, own_models, tmp_path / "saves", how):
        assert says in told and "'pipe=pipe'" in told and "broadcast_parameters" in told
    assert not (tmp_path / "saves").exists()


def test_rows_at_home_go_on_with_the_same_bits(folder, tmp_path):
    expected, parameters = train_at_home(folder(1), tmp_path / "none", 5)
    train_at_home(folder(1), tmp_path / "saves", 2, (2,))
    losses, found = train_at_home(folder(1), tmp_path / "saves", 5)
    assert losses == expected[2:]
    assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers(pool, folder, tmp_path, workers):
    """The table of nodes finds its rows, and Adam what it knew of them; without dropout nothing else is random."""
    expected, _ = (p[0] for p in pool.run(2, train, folder(2), tmp_path / "none", 5, (), False, False))
    pool.run(2, train, folder(2), tmp_path / "saves", 3, (3,), False, False)
    told = pool.run(workers, resumed, folder(workers), tmp_path / "saves", False)
    for losses, _ in told:
        assert losses.keys() == expected.keys()
        assert max(abs(losses[k] - expected[k]) for k in losses) < 1e-10
    assert "is of 2 workers" in told[0][1]
    pool.run(2, train, folder(2), tmp_path / "tables", 3, (3,))
    for same, _ in pool.run(workers, rows_of, folder(workers), tmp_path / "tables"):
        assert same


def test_four_workers_then_two_then_three(pool, folder, tmp_path):
    """In single precision."""
    expected = pool.run(4, train, folder(4), tmp_path / "none", 6, (), False, False, torch.float32)[0][0]
    pool.run(4, train, folder(4), tmp_path / "saves", 2, (2,), False, False, torch.float32)
    pool.run(2, resumed, folder(2), tmp_path / "saves", False, 4, (4,), torch.float32)
    (losses, told), *_ = pool.run(3, resumed, folder(3), tmp_path / "saves", False, 6, (), torch.float32)
    assert "is of 2 workers" in told and losses.keys() == expected.keys()
    assert max(abs(losses[k] - expected[k]) for k in losses) < 1e-6 * max(expected.values())


def resumed(group, folder, saves, keeps, epochs=5, ends=(), dtype=torch.float64):
    with pytest.warns(UserWarning) if dist.get_rank(group) == 0 else pytest.MonkeyPatch.context() as told:
        losses, *_ = train(group, folder, saves, epochs, ends, keeps, False, dtype)
    return losses, str(told.pop(UserWarning).message) if isinstance(told, pytest.WarningsRecorder) else ""


def rows_of(group, folder, saves):
    """Whether the rows of the table are those that two workers have saved."""
    data = pyg_sar.load(folder, group=group)
    model = Net(data, group).double()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning) if dist.get_rank(group) == 0 else pytest.MonkeyPatch.context():
        pyg_sar.load_checkpoint(saves, model=model, optimizer=optimizer, data=data, group=group)
    whole, moments = {}, {}
    (it,) = Path(saves).iterdir()
    for file in it.glob("rank-*"):
        part = values.read(file)
        rows, ids = part["rows"]["table.weight"], part["rows"]["table.n_id"].tolist()
        (state,) = part["states"].values()
        whole |= dict(zip(ids, rows, strict=True))
        moments |= dict(zip(ids, state["exp_avg"], strict=True))
    n_id = data.n_id.tolist()
    same = torch.equal(torch.stack([whole[i] for i in n_id]), model.table.weight)
    known = optimizer.state[model.table.weight]["exp_avg"]
    return same and torch.equal(torch.stack([moments[i] for i in n_id]), known), len(n_id)


def alone(saves, **more):
    model = torch.nn.Linear(2, 2)
    return pyg_sar.save_checkpoint(saves, model=model, **more), model


def test_the_last_ones_are_kept(tmp_path):
    for epoch in range(5):
        alone(tmp_path / "saves", epoch=epoch, keep=3)
    assert sorted(p.name for p in (tmp_path / "saves").iterdir()) == [f"checkpoint-00000{k}" for k in (3, 4, 5)]
    assert pyg_sar.load_checkpoint(tmp_path / "saves")["epoch"] == 4


def test_no_checkpoint_yet(tmp_path):
    assert pyg_sar.load_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / ".checkpoint-000001.new").mkdir()
    assert pyg_sar.load_checkpoint(tmp_path) is None


@pytest.mark.parametrize("call", range(1, 6))
def test_a_crash_while_saving_leaves_the_last_one(tmp_path, monkeypatch, call):
    """At each of the calls that make something durable."""
    saves, (_, model) = tmp_path / "saves", alone(tmp_path / "saves", epoch=1)
    calls, sync = [], checkpoint.sync

    def crash(path):
        calls.append(path)
        if len(calls) == call:
            raise KeyboardInterrupt
        sync(path)

    with monkeypatch.context() as patch:
        for module in (checkpoint, durable):
            patch.setattr(module, "sync", crash)
        with pytest.raises(KeyboardInterrupt):
            alone(saves, epoch=2)
    other = torch.nn.Linear(2, 2)
    epoch = pyg_sar.load_checkpoint(saves, model=other)["epoch"]
    assert epoch == (2 if call == 5 else 1)  # the last call comes when it has its name
    if epoch == 1:
        assert torch.equal(other.weight, model.weight)
    alone(saves, epoch=3)
    assert not [p for p in saves.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("file", ["shared.safetensors", "rank-0000.safetensors", "checkpoint.json"])
def test_damaged_files(tmp_path, file):
    it, model = alone(tmp_path)
    content = bytearray((it / file).read_bytes())
    content[len(content) // 2] ^= 1
    (it / file).write_bytes(content)
    with pytest.raises(
        RuntimeError, match=r"Could not read '.*checkpoint-000001'.*Remove '.*checkpoint-000001' to go on from"
    ):
        pyg_sar.load_checkpoint(tmp_path, model=model)


@pytest.mark.parametrize("change", ["epoch", "removed", "pipe", "no folder", "other names"])
def test_what_is_damaged_is_never_passed_over(tmp_path, change):
    """Or training would begin again, or go on from another epoch."""
    (tmp_path / "checkpoint-²").mkdir()
    (tmp_path / "checkpoint-old").mkdir()
    alone(tmp_path, epoch=1)
    it, model = alone(tmp_path, epoch=3)
    file, expected = it / "checkpoint.json", "Could not read '.*checkpoint-000002'"
    if change == "epoch":
        file.write_text(file.read_text().replace('"epoch": 3', '"epoch": 7'))
        expected += ".*is damaged: its checksum is not that.*Remove '.*checkpoint-000002' to go on from"
    elif change == "removed":
        file.unlink()
        expected += (
            ".*checkpoint.json' is missing.*All workers must see its folder.*to go on from the checkpoint before"
        )
    elif change == "pipe":
        (it / "rank-0000.safetensors").unlink()
        os.mkfifo(it / "rank-0000.safetensors")
        expected += ".*rank-0000.safetensors' is missing, or is no file.*to go on from the checkpoint before"
    elif change == "no folder":
        tmp_path = file
        expected = "Could not look for checkpoints in '.*checkpoint.json'. rank 0: NotADirectoryError"
    else:
        assert pyg_sar.load_checkpoint(tmp_path, model=model)["epoch"] == 3
        return
    with pytest.raises(RuntimeError, match=expected):
        pyg_sar.load_checkpoint(tmp_path, model=model)


def test_what_does_not_fit(tmp_path):
    alone(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        pyg_sar.load_checkpoint(tmp_path, model=torch.nn.Linear(3, 2))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pyg_sar.save_checkpoint(tmp_path / "two", model=model, optimizer=optimizer)
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(3, 2))  # of which the first one fits
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
        pyg_sar.load_checkpoint(tmp_path / "two", model=other)
    assert all(map(torch.equal, before, other.parameters()))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        pyg_sar.load_checkpoint(tmp_path / "two", model=other[:1])
    assert all(map(torch.equal, before, other.parameters()))
    with torch.no_grad():
        model[0].weight.zero_()
    groups = [{"params": layer.parameters()} for layer in model]
    with pytest.raises(RuntimeError, match=r"its optimizer has groups of \[4\] parameters \(got \[2, 2\]\)"):
        pyg_sar.load_checkpoint(tmp_path / "two", model=model, optimizer=torch.optim.SGD(groups, lr=0.1))
    assert not model[0].weight.any()
    with pytest.raises(RuntimeError, match="it holds no optimizer"):
        pyg_sar.load_checkpoint(tmp_path, optimizer=torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))
    with pytest.raises(RuntimeError, match=r"rank 0: TypeError: .*got object.*pickle"):
        alone(tmp_path, what=object())
    assert [p.name for p in tmp_path.glob("checkpoint*")] == ["checkpoint-000001"]
    for wrong in ({"keep": 0}, {"every": 0}):
        with pytest.raises(ValueError, match="to be 1 or more"):
            pyg_sar.save_checkpoint(tmp_path, **wrong) if "keep" in wrong else pyg_sar.Checkpoints(tmp_path, **wrong)


class More(torch.nn.Module):
    """A module whose state is more than tensors."""

    def __init__(self, width):
        super().__init__()
        self.lin, self.lazy, self.count = torch.nn.Linear(width, 2), torch.nn.LazyLinear(2), 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_models_with_other_state(tmp_path):
    model = More(2)
    model.lazy(torch.rand(1, 3))
    model.count = 7
    pyg_sar.save_checkpoint(tmp_path, model=model)
    other = More(2)
    pyg_sar.load_checkpoint(tmp_path, model=other)
    assert other.count == 7 and torch.equal(other.lazy.weight, model.lazy.weight)
    wrong = More(3)
    before = wrong.lin.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for lin\.weight"):
        pyg_sar.load_checkpoint(tmp_path, model=wrong)
    assert torch.equal(wrong.lin.weight, before)


def with_data(group, saves, folder, saved, loaded):
    """Save with or without ``data``, and load with or without it; return how many drops were drawn."""
    data = pyg_sar.load(folder, group=group)
    model = torch.nn.Linear(2, 2)
    data.edge_index.graph.seeds.drawn = 5
    pyg_sar.save_checkpoint(saves, model=model, epoch=3, group=group, **({"data": data} if saved else {}))
    data.edge_index.graph.seeds.drawn = 0
    with torch.no_grad():
        model.weight.zero_()
    found = pyg_sar.load_checkpoint(saves, model=model, group=group, **({"data": data} if loaded else {}))
    assert found["epoch"] == 3 and model.weight.any()
    return data.edge_index.graph.seeds.drawn


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("saved", "loaded"), [(True, False), (False, True), (True, True)])
def test_data_is_optional(pool, folder, tmp_path, saved, loaded):
    assert pool.run(2, with_data, tmp_path / "saves", folder(2), saved, loaded) == [5 * (saved and loaded)] * 2


def test_data_of_another_number_of_graphs(tmp_path):
    model, seeds = torch.nn.Linear(2, 2), torch.ones(2, 2)
    data = [Data(edge_index=pyg_sar.shard(torch.tensor([[0, 1], [1, 0]]), 2)) for _ in range(2)]
    data[0].other = pyg_sar.shard(torch.tensor([[0, 1], [1, 0]]), 2)
    pyg_sar.save_checkpoint(tmp_path, model=model, data=data[0])
    with torch.no_grad():
        model.weight.copy_(seeds)
    with pytest.raises(RuntimeError, match=r"it was saved with 'data' of 2 graphs \(got 1\)"):
        pyg_sar.load_checkpoint(tmp_path, model=model, data=data[1])
    assert torch.equal(model.weight, seeds), "nothing was loaded"


def failing(group, saves):
    model = torch.nn.Linear(2, 2)
    more = {"what": object()} if dist.get_rank(group) == 0 else {}
    pyg_sar.save_checkpoint(saves, model=model, group=group, **more)


def test_all_raise_if_one_cannot_save(pool, tmp_path):
    outcomes = pool.outcomes(2, failing, tmp_path / "saves")
    assert all(o[:2] == ("error", "RuntimeError") and "rank 0: TypeError" in o[2] for o in outcomes), outcomes


def test_told_to_end(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        saves = pyg_sar.Checkpoints(tmp_path, every=3, model=torch.nn.Linear(2, 2))
        assert saves.restore() == 0
        assert [saves.step(epoch) for epoch in (1, 2, 3)] == [False] * 3
        os.kill(os.getpid(), signal.SIGTERM)
        assert saves.step(4, best=0.5)
        assert saves.restore() == 4 and saves.more["best"] == 0.5
    finally:
        signal.signal(signal.SIGTERM, before)


TWICE = """
import os, signal, sys, time
import pyg_sar
saves = pyg_sar.Checkpoints(sys.argv[1])
os.kill(os.getpid(), signal.SIGTERM)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""


def test_told_to_end_twice(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    words = [sys.executable, "-c", TWICE, str(tmp_path)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "goes on\n" and done.returncode == -signal.SIGTERM, done.stderr


KILLER = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import pyg_sar
import train
count, sums = 0, pyg_sar.sum_gradients

def killing(*args, **kwargs):
    global count
    sums(*args, **kwargs)
    count += 1
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1" and attempt < len({steps}) and count == {steps}[attempt]:
        os.kill(os.getpid(), signal.SIGKILL)

train.pyg_sar.sum_gradients = killing
with pyg_sar.process_group(timeout=60) as rank:
    train.main(train.parser.parse_args(sys.argv[1:]), rank)
"""


@pytest.mark.grid
@pytest.mark.parametrize("steps", [[3], [1, 2]])
def test_restarted_by_the_launcher(tmp_path, steps):
    """A worker is killed in some step, once or twice; what is saved at the end are the bits of a run without."""
    script, parts = tmp_path / "script.py", tmp_path / "parts"
    pyg_sar.partition(community_graph(300, 2000, 8, 3), 2, parts)
    script.write_text(KILLER.format(examples=str(ROOT / "examples"), steps=steps))
    options = ["--model", "gat", "--hidden", 4, "--heads", 2, "--attention-dropout", 0.3, "--epochs", 4]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def run(command, name):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *command]
        words = [*torchrun, parts, *options, "--save", tmp_path / name]
        done = subprocess.run([*map(str, words)], env=env, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return (tmp_path / name).read_bytes(), done

    expected, _ = run([ROOT / "examples" / "train.py"], "whole")
    options += ["--checkpoint", tmp_path / "saves", "--resume"]
    found, done = run(["--max-restarts", 2, script], "resumed")
    assert found == expected
    told = json.loads((max((tmp_path / "saves").iterdir()) / "checkpoint.json").read_text())
    assert told["epoch"] == 4 and told["workers"] == 2
    epochs = re.findall(r"^Epoch: (\d+)", done.stdout, re.M)
    assert epochs == ["001", "002", "003", "004"]  # none ended twice: each is told after its last exchange


def test_what_was_loaded_keeps_no_file(tmp_path):
    """Which is removed later: NFS would not have it."""
    values.write(tmp_path / "value", {"a": torch.arange(5000)})
    found = values.read(tmp_path / "value")
    assert str(tmp_path / "value") not in Path("/proc/self/maps").read_text() and found["a"][-1] == 4999


def test_processes_that_are_forked_later_end(tmp_path):
    """By a first SIGTERM, as multiprocessing has them end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        checkpoints = pyg_sar.Checkpoints(tmp_path)
        ready, tells = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tells, b".")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)  # while it is forked, Python forgets signals
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not checkpoints.told
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_given_is_looked_at_before_files_are_written(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)] * 2
    for call in (
        lambda: pyg_sar.save_checkpoint(tmp_path, model=model, optimizer=optimizers),
        lambda: pyg_sar.load_checkpoint(tmp_path, model=model, optimizer=optimizers),
    ):
        with pytest.raises(TypeError, match=r"Expected one optimizer \(got list\)"):
            call()
    with pytest.raises(TypeError, match="integer"):
        pyg_sar.save_checkpoint(tmp_path, model=model, epoch=0.5)
    assert list(tmp_path.iterdir()) == []
    pyg_sar.save_checkpoint(tmp_path, model=model, epoch=np.int64(3))
    assert pyg_sar.load_checkpoint(tmp_path, model=model)["epoch"] == 3
