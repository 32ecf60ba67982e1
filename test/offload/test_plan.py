"""Budgets of training on rows at home: what a dry run tells, and what the system enforces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from support.cases import some
from support.small_pieces import ordinary_ranges
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar import nn, offload, ops
from pyg_sar.data.datasets import community_graph
from pyg_sar.live import Live
from pyg_sar.offload.counts import counts_of, counts_of_data
from pyg_sar.offload.move import graphs_of
from pyg_sar.offload.plan import plan_offload

HIDDEN, CLASSES, TYPES = 64, 8, 3


class Net(torch.nn.Module):
    def __init__(self, kind, in_channels):
        super().__init__()
        widths = [in_channels, HIDDEN, HIDDEN]
        if kind == "gat":
            convs = [nn.GATConv(a, HIDDEN // 4, 4) for a in widths[:2]] + [nn.GATConv(HIDDEN, CLASSES)]
        elif kind == "rgcn":
            convs = [nn.RGCNConv(a, b, TYPES) for a, b in zip(widths, [HIDDEN, HIDDEN, CLASSES], strict=True)]
        else:
            layer = {"sage": nn.SAGEConv, "gcn": nn.GCNConv}[kind]
            convs = [layer(a, b) for a, b in zip(widths, [HIDDEN, HIDDEN, CLASSES], strict=True)]
        self.convs = torch.nn.ModuleList(convs)
        self.norms = torch.nn.ModuleList(nn.BatchNorm(HIDDEN) for _ in range(2))

    def forward(self, x, edge_index, *edges):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index, *edges)).relu()
        return self.convs[-1](x, edge_index, *edges)


@pytest.fixture(scope="module")
def data():
    """Nodes whose neighbors are near."""
    torch.manual_seed(0)
    n, degree = 20_000, 6
    dst = torch.arange(n).repeat_interleave(degree)
    src = (dst + torch.randint(-400, 400, (n * degree,))).clamp(0, n - 1)
    edge_index = pyg_sar.shard(torch.stack([src, dst]), n)
    return Data(x=torch.randn(n, 32), y=torch.arange(n) % CLASSES, train_mask=torch.arange(n) % 10 == 0,
                edge_index=edge_index)  # fmt: skip


def peak(data, model, *edges):
    """The most bytes of tensors in a step, other than rows at home."""
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with Live() as live:
            out = model(data.x, data.edge_index, *edges)[data.train_mask]
            F.cross_entropy(out, data.y[data.train_mask]).backward()
            del out
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize(("kind", "chunks"), some(["sage", "gcn", "gat"], [2, 5, 16], every=5))
@ordinary_ranges()
def test_plan_tells_what_a_step_takes(data, kind, chunks):
    model = Net(kind, 32)
    graph, labelled = data.edge_index.graph, int(data.train_mask.sum())
    need = plan_offload(lambda: Net(kind, 32), counts_of(graph, chunks, labelled), 32)
    there = offload(data, chunks=chunks)
    found = peak(there, model)
    assert 0.95 * found <= need.step <= 1.15 * found + 2**19
    assert abs(need.home - there.x.place.home.peak) <= 0.05 * need.home
    with pyg_sar.record_traffic(data.edge_index) as layers:
        peak(there, model)
    moved = sum(t.forward_loaded + t.forward_stored + t.backward_loaded + t.backward_stored for t in layers) / 2
    assert abs(need.moved - moved) <= 0.2 * moved


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize("kind", ["sage", pytest.param("gat", marks=pytest.mark.grid)])
@ordinary_ranges()
def test_budget(data, kind, tmp_path):
    model = Net(kind, 32)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    whole = peak(data, model.train())
    model.load_state_dict(before)
    state = torch.get_rng_state()
    there = offload(data, whole // 5, model, home=str(tmp_path))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(there.x.place.ranges) > 2
    assert peak(there, model) <= whole // 5


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.grid
@ordinary_ranges()
def test_budget_of_types_of_edges(data):
    types = torch.arange(data.edge_index.size(1)) % TYPES
    typed = Data(**data.to_dict(), edge_type=types)
    model = Net("rgcn", 32)
    whole = peak(typed, model, types)
    there = offload(typed, whole // 3, model, edges=["edge_type"])
    assert len(there.x.place.ranges) > 2
    found = peak(there, model, types)
    assert found <= whole // 3
    counts = counts_of(data.edge_index.graph, len(there.x.place.ranges), int(data.train_mask.sum()))
    need = plan_offload(lambda: Net("rgcn", 32), counts, 32, there.x.place.slots, edges=[types])
    assert 0.95 * found <= need.step <= 1.15 * found
    with pytest.raises(ValueError, match=r"'edges' to name tensors with \d+ rows \(got 'what', NoneType\)"):
        offload(typed, "1GB", model, edges=["what"])


def test_budget_of_other_data():
    """In double precision, in several source shards, and where few nodes have neighbors."""
    edge_index = torch.stack([torch.arange(300), torch.arange(300) % 30])
    for parts in (1, 3):
        data = Data(x=torch.randn(300, 32, dtype=torch.float64), edge_index=pyg_sar.shard(edge_index, 300, parts))
        model = Net("sage", 32).double()
        there = offload(data, "100MB", model)
        expected = model(data.x, data.edge_index)
        torch.testing.assert_close(model(there.x, there.edge_index)[torch.arange(300)], expected)
    del data.x
    with pytest.raises(TypeError, match=r"Expected features 'data.x'"):
        offload(data, "100MB", model)


class Rest(torch.nn.Module):
    """What returns numbers of nodes, learns nothing, or has nothing to learn."""

    def __init__(self, kind):
        super().__init__()
        self.conv = nn.TransformerConv(8, 64, 8) if kind == "wide" else nn.SAGEConv(8, 1)
        if kind == "nothing to learn":
            self.conv = nn.convert(pyg.SimpleConv("mean"))
        self.conv.requires_grad_(kind != "frozen")
        self.kind = kind

    def forward(self, x, edge_index):
        out = self.conv(x, edge_index)
        return (out,) if self.kind == "tuple" else out.squeeze(-1) if self.kind == "numbers" else out


@pytest.mark.parametrize("kind", ["wide", "numbers", "frozen", "nothing to learn", "tuple"])
def test_budget_of_models_of_other_kinds(kind):
    """The wide one has weights that are no parameters, as many rows of them as there are nodes in a dry run."""
    edge_index = torch.stack([torch.arange(600), torch.arange(600) % 60])
    data = Data(x=torch.randn(600, 8), edge_index=pyg_sar.shard(edge_index, 600))
    if kind == "tuple":
        with pytest.raises(TypeError, match=r"to return rows of nodes, as a tensor \(got tuple\)"):
            offload(data, "100MB", Rest(kind))
        return
    model = Rest(kind)
    there = offload(data, "100MB", model)
    torch.testing.assert_close(model(there.x, there.edge_index)[torch.arange(600)], model(data.x, data.edge_index))


@pytest.mark.parametrize("hub", [pytest.param(False, marks=pytest.mark.grid), True])
@ordinary_ranges()
def test_budget_that_nothing_fits(hub):
    """Also where all edges end at one node, and the other chunk stays long."""
    edges = torch.randint(200, (2, 900))
    edges[1] *= not hub
    edge_index = pyg_sar.shard(edges, 200)
    data = Data(x=torch.randn(200, 32), edge_index=edge_index)
    with pytest.raises(ValueError, match=r"needs at least [\d,]+ bytes .* \(got a budget of 1,000\)"):
        offload(data, "1KB", Net("sage", 32))


@pytest.mark.grid
@ordinary_ranges()
def test_pieces_are_taken_where_chunks_read_nearly_all():
    torch.manual_seed(0)
    n = 4000
    dst = torch.arange(n).repeat_interleave(60)
    edge_index = pyg_sar.shard(torch.stack([torch.randint(n, dst.shape), dst]), n)
    data = Data(x=torch.randn(n, 128), edge_index=edge_index, train_mask=torch.arange(n) < 10)
    model = nn.SAGEConv(128, 256)
    budget = 2_600_000
    there = offload(data, budget, model)
    assert there.x.place.slots is not None and there.x.place.slots < n // 4
    there.y = torch.zeros(n, dtype=torch.long)
    whole = offload(Data(x=data.x, edge_index=edge_index), chunks=len(there.x.place.ranges))
    whole.y, whole.train_mask = there.y, there.train_mask
    assert peak(there, model) < min(budget, 0.9 * peak(whole, model))


NODES = {"paper": 12_000, "author": 8_000, "venue": 300}
DEGREES = {("author", "writes", "paper"): 5, ("paper", "rev_writes", "author"): 4, ("paper", "cites", "paper"): 6,
           ("venue", "rev_in", "paper"): 1, ("paper", "in", "venue"): 40}  # fmt: skip
CHANNELS = {"paper": 32, "author": 16, "venue": 8}


class Typed(torch.nn.Module):
    """For papers alone."""

    def __init__(self, kind):
        super().__init__()
        self.lins = torch.nn.ModuleDict({t: torch.nn.Linear(width, HIDDEN) for t, width in CHANNELS.items()})
        make = {
            "hgt": lambda: pyg.HGTConv(HIDDEN, HIDDEN, (list(NODES), list(DEGREES)), 4),
            "sage": lambda: pyg.HeteroConv({it: pyg.SAGEConv((HIDDEN, HIDDEN), HIDDEN) for it in DEGREES}),
        }
        self.convs = torch.nn.ModuleList(nn.convert(make[kind]()) for _ in range(2))
        self.lin = torch.nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, edge_index):
        x = {t: self.lins[t](rows).relu() for t, rows in x.items()}
        for conv in self.convs:
            x = {t: rows.relu() for t, rows in conv(x, edge_index).items()}
        return self.lin(x["paper"])


@pytest.fixture
def typed():
    torch.manual_seed(0)
    data = HeteroData()
    for t, n in NODES.items():
        data[t].x = torch.randn(n, CHANNELS[t])
    data["paper"].y = torch.arange(NODES["paper"]) % CLASSES
    data["paper"].train_mask = torch.arange(NODES["paper"]) % 10 == 0
    for (s, r, t), degree in DEGREES.items():
        dst = torch.arange(NODES[t]).repeat_interleave(degree)
        src = (dst * NODES[s] // NODES[t] + torch.randint(-200, 200, dst.shape)).clamp(0, NODES[s] - 1)
        data[s, r, t].edge_index = pyg_sar.shard(torch.stack([src, dst]), (NODES[s], NODES[t]))
    return data


def peak_of_types(data, model):
    """The same of papers, given those of each type."""
    papers = data["paper"]
    return peak(Data(x=data.x_dict, edge_index=data.edge_index_dict, y=papers.y, train_mask=papers.train_mask), model)


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize("kind", ["sage", pytest.param("hgt", marks=pytest.mark.grid)])
@ordinary_ranges()
def test_plan_of_types_of_nodes(typed, kind):
    need = plan_offload(lambda: Typed(kind), counts_of_data(typed, graphs_of(typed), 5), CHANNELS)
    there = offload(typed, chunks=5)
    found = peak_of_types(there, Typed(kind))
    assert 0.95 * found <= need.step <= 1.15 * found + 2**19
    assert abs(need.home - there["paper"].x.place.home.peak) <= 0.05 * need.home


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.grid
@ordinary_ranges()
def test_budget_of_types_of_nodes(typed):
    model = Typed("sage")
    whole = peak_of_types(typed, model)
    there = offload(typed, whole // 4, model)
    assert len(there["paper"].x.place.ranges) > 2
    assert peak_of_types(there, model) <= whole // 4


LIMITED = """
import resource, sys
import torch
import torch.nn.functional as F
import pyg_sar
from pyg_sar import nn

folder, home, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = pyg_sar.load(folder)
torch.manual_seed(0)
layers = [nn.SAGEConv(64, 256), nn.SAGEConv(256, 256), nn.SAGEConv(256, 16)]
norms = [nn.BatchNorm(256), nn.BatchNorm(256)]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convs, self.norms = torch.nn.ModuleList(layers), torch.nn.ModuleList(norms)

    def forward(self, x, edge_index):
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)

model = Net()
torch.mm(torch.ones(512, 512), torch.ones(512, 512))
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
limit = held + budget + 2**25
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if home != "none":
    data = pyg_sar.offload(data, chunks=16, home=home)
for _ in range(2):
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
print(loss.item())
"""


@pytest.mark.skipif(sys.platform != "linux" or not ops.KERNELS, reason="needs Linux's limits, and kernels")
@pytest.mark.grid
def test_budget_that_the_system_enforces(tmp_path):
    """In memory a step takes 200 MB, of which a fifth is allowed; homes are files, which do not count."""
    torch.manual_seed(0)
    folder, home, script = tmp_path / "parts", tmp_path / "home", tmp_path / "script.py"
    home.mkdir()
    script.write_text(LIMITED)
    pyg_sar.partition(community_graph(24_000, 240_000, 64, 16), 1, folder)
    # Freed memory goes back to the system at once, or it would count.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072",
           "PYTHONPATH": str(Path(pyg_sar.__file__).parents[1]), "OMP_NUM_THREADS": "2"}  # fmt: skip

    def run(*args):
        command = [sys.executable, script, folder, *args]
        return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=120)

    budget = 40 * 2**20
    free, failed = run("none", 2**34), run("none", budget)
    assert free.returncode == 0, free.stderr
    assert failed.returncode != 0 and "can't allocate memory" in failed.stderr
    done = run(home, budget)
    assert done.returncode == 0, done.stderr
    loss, found = float(free.stdout), float(done.stdout)
    assert abs(found - loss) <= 1e-5 * abs(loss)
    assert list(home.iterdir()) == []
