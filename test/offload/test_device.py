"""Rows at home that a device computes on: the simulated accelerator, whose memory is counted."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from support.nasty_graph import NUM_NODES, close
from support.offloaded import IN, LAYERS, inputs, network
from support.pool import Pool
from support.simulated_accelerator import DEVICE, pretence
from support.small_pieces import ordinary_ranges
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import nn, offload
from pyg_sar.data.datasets import community_graph
from pyg_sar.nn import convert
from pyg_sar.offload.counts import counts_of
from pyg_sar.offload.passes import host
from pyg_sar.offload.plan import plan_offload


@pytest.fixture(scope="module")
def machines():
    """Processes in which autograd knows of the device from the beginning."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, and torch knows one kind of accelerator at a time")
    pool = Pool(1)
    yield pool
    pool.close()


def equals(group, kind, folder, device=DEVICE):
    data, given = inputs()
    whole, whole_given = inputs()
    norm = ("batch", "layer")[list(LAYERS).index(kind) % 2]
    with pretence() if device == DEVICE else nullcontext():
        reference = network(kind, norm)
        expected = reference(whole.x, whole.edge_index, whole_given)
        F.cross_entropy(expected[whole.mask], whole.y[whole.mask]).backward()
        data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
        data.x = data.x.detach()
        data = offload(data, chunks=4, device=device, home=folder)
        data.x.requires_grad_()
        model = convert(network(kind, norm).to(device))
        out = model(data.x, data.edge_index, given)
        assert data.y.device.type == data.mask.device.type == out.device.type == data.x.device.type == device
        taken = out[data.mask]
        F.cross_entropy(taken, data.y[data.mask]).backward()
        close(taken.cpu(), expected[whole.mask], "output")
        close(host(data.x.grad), whole.x.grad, "gradient of rows")
        for key, t in given.items():
            close(t.grad, whole_given[key].grad, f"gradient of {key}")
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(p.grad.cpu(), q.grad, f"gradient of {key}")
        for (key, p), q in zip(model.named_buffers(), reference.buffers(), strict=True):
            close(p.cpu(), q, key)


SOME = ("sage", "gcn, weights", "gat, edges", "rgcn")


@pytest.mark.parametrize("kind", [k if k in SOME else pytest.param(k, marks=pytest.mark.grid) for k in LAYERS])
def test_equals_pyg(machines, kind, tmp_path):
    machines.run(1, equals, kind, str(tmp_path) if kind == "gat" else None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_equals_pyg_on_a_gpu(pool, kind, tmp_path):
    pool.run(1, equals, kind, str(tmp_path) if kind == "gat" else None, "cuda")


def table(group, device=DEVICE):
    """The gradients of rows on the device, which are a parameter, beside rows at home."""
    data, _ = inputs()
    rows, features = torch.randn(2, NUM_NODES, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with pretence() if device == DEVICE else nullcontext():
        reference, every = pyg.GraphConv(2 * IN, 4).double(), rows.clone().requires_grad_()
        layer = copy.deepcopy(reference)
        expected = reference(torch.cat([every + features, features * every], -1), data.edge_index)
        expected.square().sum().backward()
        edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
        data = offload(Data(x=features, edge_index=edge_index), chunks=3, device=device)
        own = nn.NodeEmbedding(data, IN).double().to(device)
        with torch.no_grad():
            own.weight.copy_(rows)
        out = convert(layer.to(device))(torch.cat([own() + data.x, data.x * own()], -1), data.edge_index)
        (out * out).sum(-1)[torch.arange(NUM_NODES)].sum().backward()
        close(own.weight.grad.cpu(), every.grad, "gradient of the table")
    return own.weight.grad.device.type


@pytest.mark.parametrize("where", [DEVICE, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tables_on_the_device(request, where):
    workers = request.getfixturevalue("machines" if where == DEVICE else "pool")
    assert workers.run(1, table, where) == [where]


class Net(torch.nn.Module):
    def __init__(self, kind, widths):
        super().__init__()
        layer = {"sage": nn.SAGEConv, "gat": nn.GATConv, "rgcn": lambda a, b: nn.RGCNConv(a, b, TYPES)}[kind]
        self.convs = torch.nn.ModuleList(layer(a, b) for a, b in itertools.pairwise(widths))
        self.norms = torch.nn.ModuleList(nn.BatchNorm(b) for b in widths[1:-1])

    def forward(self, x, edge_index, *edges):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index, *edges)).relu()
        return self.convs[-1](x, edge_index, *edges)


def peaks(group, kind, chunks):
    """Bytes on the device in a step, of rows in memory and of rows at home for some numbers of chunks."""
    found = []
    for count in (None, *chunks):
        with pretence() as it, ordinary_ranges():
            data = graph()
            model = Net(kind, WIDTHS).to(DEVICE)
            data = data.to(DEVICE) if count is None else offload(data, chunks=count, device=DEVICE)
            edges = [data.edge_type] if kind == "rgcn" else []
            for _ in range(2):
                before, it.peak = it.held, it.held
                out = model(data.x, data.edge_index, *edges)[data.train_mask]
                F.cross_entropy(out, data.y[data.train_mask]).backward()
                del out
            found.append(it.peak - before)
    return found


def graph():
    found = community_graph(4000, 40_000, 32, 4)
    edge_index = pyg_sar.shard(found.edge_index, 4000)
    types = torch.arange(edge_index.size(1)) % TYPES
    return Data(x=found.x, y=found.y, train_mask=found.train_mask, edge_index=edge_index, edge_type=types)


WIDTHS, TYPES = [32, 64, 64, 4], 3


@pytest.mark.parametrize("kind", ["sage", "gat", "rgcn"])
@pytest.mark.grid
def test_plan_tells_what_the_device_holds(machines, kind):
    data, chunks = graph(), (2, 8, 32)
    edges = [data.edge_type] if kind == "rgcn" else []
    ((memory, *found),) = machines.run(1, peaks, kind, chunks, timeout=120)
    assert memory > (5 if kind == "sage" else 2) * found[-1], (memory, found)
    for count, peak in zip(chunks, found, strict=True):
        counts = counts_of(data.edge_index.graph, count, int(data.train_mask.sum()))
        with ordinary_ranges():
            told = plan_offload(lambda: Net(kind, WIDTHS), counts, 32, beside=False, edges=edges).step
        assert 0.95 * peak <= told <= 1.15 * peak, (count, peak, told)


def planned(group):
    """A budget for the device, on which the model is."""
    with pretence():
        model = Net("sage", WIDTHS).to(DEVICE)
        data = offload(graph(), 2**22, model, device=DEVICE)
        model(data.x, data.edge_index)[data.train_mask].sum().backward()
    return len(data.x.place.ranges), next(model.parameters()).grad.device.type


@pytest.mark.grid
def test_budget_of_a_device(machines):
    ((count, device),) = machines.run(1, planned, timeout=120)
    assert count >= 1 and device == DEVICE
