"""Training on rows at home, chunk by chunk, against PyG in one process."""

import copy
import gc
import os
import sys
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from support.cases import some
from support.nasty_graph import NUM_NODES
from support.offloaded import DEGREES, HIDDEN, IN, LAYERS, OUT, Longest, inputs, leaf, network
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import nn, offload, ops
from pyg_sar.loops import with_self_loops
from pyg_sar.nn.convert import convert
from pyg_sar.nn.replay import by_chunks as replay_by_chunks
from pyg_sar.offload import chunks as by_chunks
from pyg_sar.offload import slots
from pyg_sar.offload.dropout import dropout_rows
from pyg_sar.offload.home import Home, count_bytes
from pyg_sar.offload.move import move, place_of
from pyg_sar.offload.passes import force, host
from pyg_sar.offload.place import Place
from pyg_sar.offload.rows import PROBE, HostRows, record, row_wise
from pyg_sar.offload.schedule import count_loads

CHUNKS = [1, 2, 5, 17]


def numbers(model, data, given, x, steps=1):
    """Train, and return losses, and gradients and buffers after the last step."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        model.zero_grad()
        x.grad = None
        for t in given.values():
            t.grad = None
        out = model(x, data.edge_index, given)
        loss = F.cross_entropy(out[data.mask], data.y[data.mask])
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    grad = host(x.grad) if isinstance(x, HostRows) else x.grad
    edge = [t.grad for t in given.values() if t.grad is not None]
    return [out[:].detach() if not isinstance(out, HostRows) else out[data.mask | ~data.mask].detach(), *losses, grad,
            *edge, *(p.grad for p in model.parameters()), *model.buffers()]  # fmt: skip


def on_chunks(model, count, home=None, steps=1, dtype=torch.float64, slots=None, keeps=False):
    """With ``keeps`` source rows stay in slots, as on an accelerator."""
    data, given = inputs(dtype)
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    place = place_of(data.edge_index.graph, Home(home, torch.device("cpu"), None), count, slots)
    data = move(data, place._replace(copies=keeps))
    data.x.requires_grad_()
    return numbers(convert(model), data, given, data.x, steps)


def in_memory(model, steps=1, dtype=torch.float64):
    data, given = inputs(dtype)
    return numbers(model, data, given, data.x, steps)


def equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "count"), some(LAYERS, CHUNKS, every=4))
def test_equals_pyg(kind, count):
    norm = ("batch", "layer", "none")[(list(LAYERS).index(kind) + count) % 3]
    equal(on_chunks(network(kind, norm), count), in_memory(network(kind, norm)))


PIECES = [(1, 20), (4, 7), (5, 1), (4, None)]


@pytest.mark.parametrize(("kind", "pieces", "keeps"), some(LAYERS, PIECES, [False, True], every=17))
def test_source_pieces(kind, pieces, keeps, tmp_path):
    """Of so many rows that a chunk is read in several pieces; in slots and not; homes in memory and in files."""
    count, slots = pieces
    norm = ("batch", "layer", "none")[(list(LAYERS).index(kind) + count) % 3]
    home = str(tmp_path) if slots == 7 else None
    equal(on_chunks(network(kind, norm), count, home, slots=slots, keeps=keeps), in_memory(network(kind, norm)))


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_every_normalisation_and_files(kind, norm, tmp_path):
    equal(on_chunks(network(kind, norm), 3, str(tmp_path), steps=2), in_memory(network(kind, norm), steps=2))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [
    lambda: pyg.GCN(IN, HIDDEN, 3, OUT, norm="batch", jk="cat"), lambda: pyg.GAT(IN, HIDDEN, 2, OUT, heads=2, jk="max"),
    lambda: pyg.GraphSAGE(IN, HIDDEN, 2, OUT, norm="layer_norm", norm_kwargs={"mode": "node"}),
    lambda: pyg.PNA(IN, HIDDEN, 2, OUT, aggregators=["mean", "std"], scalers=["identity"], deg=DEGREES),
])  # fmt: skip
def test_models_of_pyg(make):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = make().double()

        def forward(self, x, edge_index, given):
            return self.model(x, edge_index)

    equal(on_chunks(Model(), 4), in_memory(Model()))


@pytest.mark.parametrize("kind", ["sage", "gat", "gcn"])
def test_single_precision(kind):
    """The error is at most twice PyG's."""
    exact = in_memory(network(kind, "batch"))
    found = on_chunks(network(kind, "batch", torch.float32), 5, dtype=torch.float32)
    plain = in_memory(network(kind, "batch", torch.float32), dtype=torch.float32)
    for f, p, e in zip(found, plain, exact, strict=True):
        error, reference = ((t.double() - e).abs().max() for t in (f, p))
        assert error <= 2 * reference + 1e-6 * e.abs().max() + 1e-7  # gradients that a normalisation makes zero


def small(count=3, num_nodes=NUM_NODES, home=None):
    data, _ = inputs()
    data.edge_index = pyg_sar.shard(data.edge_index % num_nodes, num_nodes)
    data.x, data.y, data.mask = data.x[:num_nodes].detach(), data.y[:num_nodes], data.mask[:num_nodes]
    return offload(data, chunks=count, home=home)


UNIT = torch.finfo(torch.bfloat16).eps / 2  # what rounding to bfloat16 changes a number by, at most


def under_autocast(kind, where, cast=True):
    """Output and gradients of PyG, of this package in memory, or of rows at home by some chunks."""
    dtype = torch.float32 if cast else torch.float64
    (data, given), model = inputs(dtype), network(kind, "batch", dtype)
    if where != "PyG":
        data.edge_index, model = pyg_sar.shard(data.edge_index, NUM_NODES), convert(model)
    if where in CHUNKS:
        data = offload(data, chunks=where)
        data.x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = model(data.x, data.edge_index, given)
    assert out.dtype == (torch.bfloat16 if cast else dtype)
    out = out[data.mask]
    F.cross_entropy(out.double(), data.y[data.mask]).backward()
    grad = host(data.x.grad) if where in CHUNKS else data.x.grad
    return [out.detach(), grad, *(p.grad for p in model.parameters())]


SOME = ("sage", "sage, max", "gcn", "gat", "rgcn", "edge", "pna")


@pytest.mark.parametrize("kind", [k if k in SOME else pytest.param(k, marks=pytest.mark.grid) for k in LAYERS])
def test_autocast(kind):
    """Backward, which is outside, computes again what forward computed: in memory this is as far from the truth."""
    truth, *known, found = (under_autocast(kind, *how) for how in (("PyG", False), ("PyG",), ("memory",), (5,)))
    for k, value in enumerate(truth):
        if value is None or value.norm() < 1e-9:
            continue  # a bias before a normalisation: all is rounding
        one, *others = (float((it[k].double() - value).norm() / value.norm()) for it in (found, *known))
        assert one <= 2 * max(others) + (UNIT if k == 0 else 8 * UNIT), k


def test_autocast_of_parameters_that_are_used_again():
    """Copies of parameters that were made without gradients, for passes over rows, are not those of the rest."""
    lin, rows = torch.nn.Linear(IN, IN), torch.ones(12, IN)
    edge_index = pyg_sar.shard(torch.arange(12).repeat(2, 1), 12)
    at_home = offload(Data(x=rows, edge_index=edge_index), chunks=3).x
    with torch.autocast("cpu", torch.bfloat16):
        lin(lin(at_home)[torch.arange(12)]).sum().backward()
    expected = [p.grad.clone() for p in lin.parameters()]
    lin.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        lin(lin(rows)).sum().backward()
    for a, b in zip(expected, (p.grad for p in lin.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=8 * UNIT, atol=8 * UNIT)


@pytest.mark.parametrize("num_nodes", [1, 3, 5, 6])
def test_fewer_nodes_than_chunks(num_nodes):
    data, results = small(num_nodes=num_nodes), []
    for x, edge_index in ((data.x, data.edge_index), (data.x.host, data.edge_index.graph.coo())):
        torch.manual_seed(0)
        conv = nn.GATConv(IN, HIDDEN, 2).double()
        out = F.elu(conv(x, edge_index))
        out = out[torch.arange(num_nodes)]
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in conv.parameters())])
    equal(*results)


def test_attention_drops_the_same_edges():
    """As in memory, and in every number of chunks."""
    results = []
    for count in (None, 1, 4):
        data, _ = inputs()
        torch.manual_seed(0)  # of the graph's seeds, too
        data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
        data = data if count is None else offload(data, chunks=count)
        conv = nn.GATConv(IN, HIDDEN, 2, dropout=0.5).double()
        conv(data.x, data.edge_index)[data.mask].square().sum().backward()
        results.append([p.grad for p in conv.parameters()])
    equal(results[1], results[0])
    equal(results[2], results[0])


class Drops(pyg.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return F.dropout(x_j.tanh(), 0.5, self.training)


def test_messages_drop_the_same_edges():
    results = []
    for count in (1, 4):
        data = small(count)
        data.x.requires_grad_()
        layer = convert(Drops())
        layer(data.x, data.edge_index)[data.mask].square().sum().backward()
        results.append([host(data.x.grad)])
    equal(*results)
    assert results[0][0].abs().sum() > 0


def test_rounded_products_mix_no_rows():
    """On a GPU that multiplies in TensorFloat-32 a product of few rows may be rounded otherwise."""
    whole = torch.ones(PROBE, 3)
    parts, others = [whole[:2] + 2e-3, whole[2:]], [whole[:2] + 0.2, whole[2:]]
    assert not row_wise(whole, parts)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert row_wise(whole, parts) and not row_wise(whole, others)
        assert not row_wise(whole.double(), [p.double() for p in parts])
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_layers_are_looked_at_once_for_all_chunks(monkeypatch):
    """Those that run by kernels are, in each call."""
    data, layer, calls, choose = small(4), convert(pyg.GraphConv(IN, HIDDEN).double()), [], replay_by_chunks.choose
    monkeypatch.setattr(replay_by_chunks, "choose", lambda *args, **how: calls.append(args) or choose(*args, **how))
    for _ in range(2):
        layer(data.x, data.edge_index)[data.mask].sum().backward()
    assert "kernel" in nn.describe(layer) and len(calls) == 2


def test_backward_runs_a_layer_in_the_mode_of_forward():
    results = []
    for mode in (True, False):
        data = small(3)
        data.x.requires_grad_()
        layer = convert(Drops())
        out = layer(data.x, data.edge_index)[data.mask]
        layer.train(mode)
        out.square().sum().backward()
        results.append([host(data.x.grad)])
    equal(*results)


def test_dropout_of_no_rows_and_of_rows_that_are_columns_in_memory():
    for x in (torch.ones(0, 3, 2), torch.ones(3, 5).t()):
        x.requires_grad_()
        out = dropout_rows(x, 0.5, 1, torch.arange(len(x)))
        out.backward(torch.ones_like(x))
        assert out.shape == x.shape and torch.equal(x.grad, out)


def test_dropout_of_rows():
    """It is a function of the row, so the same in every number of chunks, and in backward."""
    results = []
    for count in (1, 4):
        torch.manual_seed(0)  # from which the graph's seed is
        data = small(count)
        data.x.requires_grad_()
        x = F.dropout(data.x, 0.25)
        out = x[data.mask]
        out.sum().backward()
        results.append([out.detach(), host(data.x.grad)])
        kept = out.detach() != 0
        assert torch.equal(kept, host(data.x.grad)[data.mask] != 0)
        torch.testing.assert_close(out[kept], data.x.host[data.mask][kept] / 0.75)
        assert 0.6 < kept.double().mean() < 0.9
        assert F.dropout(data.x, 0.25, training=False) is data.x
        assert torch.dropout(data.x, p=0.25, train=False) is data.x
        assert not torch.equal(F.dropout(data.x, 0.25)[data.mask], F.dropout(data.x, 0.25)[data.mask])
    equal(*results)


FUNCTIONS = {
    "relu": lambda x: x.relu(),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (IN,)),
    "cat": lambda x: torch.cat([x, x.tanh()], 1),
    "stack": lambda x: torch.stack([x, -x], 1).amax(1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(dim=1),
    "norm": lambda x: x.norm(dim=1, keepdim=True),
    "view": lambda x: x.view(-1, 2, 4),
    "reshape": lambda x: x.reshape(x.size(0), 4, 2).sum(2),
    "heads": lambda x: x.view(x.size(0), -1, 2).view(x.size(0), -1),
    "columns": lambda x: x[:, 2:5],
    "one": lambda x: x[:, 3],
    "split": lambda x: x[..., :4] * x[..., 4:],
    "scalar": lambda x: 2 * x**2 - 1 / (1 + x.abs()),
    "matrix": lambda x: x @ torch.ones(IN, 3, dtype=x.dtype),
    "add": lambda x: x + 1,
    "where": lambda x: torch.where(x > 0, x, 0.5 * x),
    "rows": lambda x: x * torch.arange(1.0, len(x) + 1, dtype=x.dtype).unsqueeze(1),
    "float": lambda x: x.float().double(),
    "relu inplace": lambda x: (lambda y: F.relu(y, inplace=True) + y)(x + 0),
    "max": lambda x: torch.stack([x, 1 - x], -1).max(-1)[0],
    "zeros": lambda x: torch.zeros_like(x) + x,
    "in place": lambda x: (x + 0).mul_(2).add_(x).relu_(),
    "clamp": lambda x: x.clamp(min=-0.5),
    "mm": lambda x: F.linear(x, torch.ones(2, IN, dtype=x.dtype)),
    "roll of columns": lambda x: x.roll(2, 1),
    "renorm of rows": lambda x: x.renorm(2, 0, 1.0),
    "classes": lambda x: F.one_hot((x > 0).long().argmax(1), IN) * x,
    "table": lambda x: F.embedding((x > 0).long().argmax(1), torch.eye(IN, dtype=x.dtype)) * x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_rows(name):
    data, every = small(4), torch.arange(NUM_NODES)
    data.x.requires_grad_()
    plain = data.x.host.clone().requires_grad_()
    before = data.x.host.clone()
    out, expected = FUNCTIONS[name](data.x), FUNCTIONS[name](plain)
    assert isinstance(out, HostRows) and out.shape == expected.shape and out.dtype == expected.dtype
    assert out.requires_grad
    out = out[every]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(host(data.x.grad), plain.grad, rtol=1e-10, atol=1e-10)
    assert torch.equal(data.x.host, before)


class Twice(torch.autograd.Function):
    """A function whose gradient nobody would find in what is recorded within."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


MIXES = {
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0)[0],
    "t": lambda x: x.t(),
    "gram": lambda x: x @ x.t(),
    "randn_like": lambda x: torch.randn_like(x),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "bool": lambda x: bool(x),
    "std": lambda x: x.std(0),
    "loss": lambda x: F.mse_loss(x, x + 1),
    "setitem": lambda x: x.__setitem__(0, 1.0),
    "chunk": lambda x: x.chunk(2),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 1e-9, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout, inplace": lambda x: F.dropout(x, inplace=True),
    "out": lambda x: torch.add(x, x, out=x + 1),
    "new dimension": lambda x: x[None],
    "sum of columns and rows": lambda x: x.sum((0, 1), keepdim=True),
    "function": lambda x: Twice.apply(x).tanh(),
    "function of what is pending": lambda x: Twice.apply(x.relu())[:3],
    "columns": lambda x: x.index_select(1, torch.tensor([0])),
    "as PyG reads sources": lambda x: x.index_select(-2, torch.tensor([0])),
    "hook": lambda x: x.relu().register_hook(print),
    "retained gradient": lambda x: x.relu().retain_grad(),
    "gradient of what is pending": lambda x: torch.autograd.grad(x.sum(), x.relu()),
    "booleans, cumsum": lambda x: (x > 9).cumsum(0),
    "booleans, flip": lambda x: (x > 9).flip(0),
    "booleans, sort": lambda x: (x > 9).sort(0)[0],
    "integers, cummax": lambda x: (x > 9).long().cummax(0)[0],
    "integers, roll": lambda x: (x.detach() * 0).argmax(1).roll(1, 0),
    "roll by a multiple": lambda x: x.roll(30, 0),
    "roll of all numbers": lambda x: x.roll(1),
    "renorm of columns": lambda x: x.renorm(2, 1, 1e9),
    "classes": lambda x: F.one_hot((x > 0).long().argmax(1)),
    "torch.batch_norm": lambda x: torch.batch_norm(x, None, None, x[:9].mean(0), x[:9].var(0), False, 0.1, 1e-5, True),
    "rows of nothing but zeros, cumsum": lambda x: (x.detach() * 0).cumsum(0),
    "rows of nothing but zeros, norm": lambda x: F.normalize(x.detach() * 0, dim=0),
}


@pytest.mark.parametrize("name", MIXES)
def test_functions_that_mix_rows_are_refused(name):
    data = small(4)
    data.x.requires_grad_()
    with pytest.raises((NotImplementedError, TypeError), match="rows at home"):
        MIXES[name](data.x)


@pytest.mark.parametrize("view", [
    lambda h: h[:, :2], lambda h: h.view(-1, 2, IN // 2), lambda h: h.chunk(2, 1)[1], lambda h: h.unsqueeze(1),
    lambda h: h.detach(), lambda h: h.data,
], ids=["columns", "view", "chunk", "unsqueeze", "detach", "data"])  # fmt: skip
def test_no_part_of_rows_is_changed(view):
    """Where torch would change the whole, or nobody has it any more."""
    data = small(4)
    h = data.x * 2
    with pytest.raises(NotImplementedError, match=r"'mul_' cannot .* it changes a part of rows"):
        view(h).mul_(3)
    torch.testing.assert_close(host(view(data.x * 2).mul_(3)), view(host(data.x) * 6))
    assert torch.equal(host(h), host(data.x) * 2)


def test_data_that_learns():
    """As leaves of torch: optimizers change them, and nobody else while they need a gradient."""
    data, found = small(4), []
    for x in (data.x, host(data.x).clone()):
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            x.mul_(2)
        optimizer = torch.optim.Adam([x], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x.sin().square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            x += x.grad.sign()
        found.append(x.detach()[torch.arange(NUM_NODES)])
    torch.testing.assert_close(*found)


def test_rows_that_change_before_backward():
    data, _ = inputs()
    data.edge_index, data.x = pyg_sar.shard(data.edge_index, NUM_NODES), data.x.detach()
    there = offload(data, chunks=3)
    there.x.requires_grad_()
    for loss in (there.x.sin()[:5].sum(), nn.GATConv(IN, 4).double()(there.x, there.edge_index)[:5].sum()):
        data.x.mul_(2)
        with pytest.raises(RuntimeError, match=r"Rows at home of shape \[61, 8\] were changed in place after"):
            loss.backward()
    out, before = there.x.sin()[:5], host(there.x)[:5].clone()
    layer = nn.SAGEConv(IN, 4, aggr="max").double()(there.x, there.edge_index)[:5].sum()
    with torch.no_grad():
        there.x += 1  # in memory of its own, which the layer finds in the place of the other
    torch.testing.assert_close(torch.autograd.grad(out.sum(), there.x)[0][torch.arange(5)], before.cos())
    with pytest.raises(RuntimeError, match="were changed in place after"):
        layer.backward()


def test_rows_of_two_graphs():
    one, other = small(2), small(2, 40)
    for function in (torch.add, F.mse_loss, lambda x, y: torch.cat([x, y], 1)):
        for pair in ((one.x, other.x), (other.x, one.x)):
            with pytest.raises(ValueError, match=r"Expected rows at home of one graph \(got \d+ and \d+ rows\)"):
                function(*pair)


@pytest.mark.parametrize("num_nodes", [1, 4, 8])
def test_as_many_nodes_as_something_else(num_nodes):
    """Weights that are no parameters, and numbers, of which there might be one for each node."""
    data = small(2, num_nodes)
    weight = torch.randn(num_nodes, IN, dtype=torch.float64, requires_grad=True)
    eps, found = torch.ones(1, dtype=torch.float64, requires_grad=True), []
    for x in (data.x, host(data.x)):
        out = F.linear(x * (1 + eps), weight * 2)
        found.append([out[torch.arange(num_nodes)], *torch.autograd.grad(out.sum(0).square().sum(), [weight, eps])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_what_all_share_where_a_range_is_a_row():
    """The first range; its gradient is not that of the row itself, to which those of others are added."""
    data = small(NUM_NODES)
    assert data.x.place.ranges[0] == (0, 1)
    a, b, found = *(torch.randn(1, IN, dtype=torch.float64, requires_grad=True) for _ in range(2)), []
    weight = torch.randn(NUM_NODES, IN, dtype=torch.float64)
    for x in (data.x, host(data.x)):
        out = (x + a + b)[torch.arange(NUM_NODES)]
        found.append(torch.autograd.grad((out.square() * weight).sum(), [a, b]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_new_tensors_are_ordinary():
    data = small(4)
    zeros = data.x.new_zeros(NUM_NODES, 3)
    assert type(zeros) is torch.Tensor and zeros.dtype == torch.float64 and zeros.shape == (NUM_NODES, 3)
    assert host(torch.cat([data.x, zeros], 1))[:, IN:].eq(0).all()


def test_sums_over_rows():
    data = small(4)
    data.x.requires_grad_()
    plain = data.x.host.clone().requires_grad_()
    values = []
    for x in (data.x, plain):
        x.grad = None
        y = x.sin()
        value = y.sum() + (y.mean(0) * torch.arange(IN)).sum() + 3 * y.mean() + y.square().sum(0).max()
        value.backward()
        values.append(value.detach())
    torch.testing.assert_close(*values)
    torch.testing.assert_close(host(data.x.grad), plain.grad)


def test_a_tensor_that_changes_is_not_read_as_it_is_then():
    data, factor = small(3), torch.ones(NUM_NODES, 1, dtype=torch.float64)
    data.x.requires_grad_()
    y = data.x * factor
    out = y[:5]
    later = data.x + factor
    factor.zero_()
    with pytest.raises(RuntimeError, match=r"shape \[61, 1\] was changed in place after 'mul'"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match=r"changed in place after 'add'"):
        later[:5]


def test_rows_that_change_before_they_are_read():
    data, _ = inputs()
    data.edge_index, data.x = pyg_sar.shard(data.edge_index, NUM_NODES), data.x.detach()
    there = offload(data, chunks=3)
    twice = there.x * 2
    data.x.mul_(10)
    with pytest.raises(RuntimeError, match=r"shape \[61, 8\] was changed in place after 'mul'"):
        twice[:5]


def test_numbers_of_rows_that_change_before_backward():
    data, index = small(3), torch.tensor([0, 1, 2])
    data.x.requires_grad_()
    out = data.x.sin()[index]
    index += 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_rows_whose_width_depends_on_values():
    """As that of classes does, where five rows, and others, have the same."""
    data = small(4)

    def widths(x):
        return x.new_zeros(len(x), 2 if len(x) in (2, 3, 5) or bool((x[0] > 100).all()) else 1)

    data.x.host[slice(*data.x.place.ranges[-1])] = 1000
    with pytest.raises(RuntimeError, match=r"makes rows of shape \[1\] of some rows at home and of \[2\] of others"):
        host(record(widths, (data.x,), {}))


def test_sums_in_half_precision_round_once():
    data = small(12)
    x = HostRows(data.x.place, torch.rand(NUM_NODES, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert torch.equal(x.sum(0), x.host.float().sum(0).bfloat16())
    assert torch.equal(x.sum(0, dtype=torch.float64), x.host.double().sum(0))
    assert torch.equal(x.mean(0), x.host.float().mean(0).bfloat16())
    assert torch.equal(x.mean(), x.host.float().mean().bfloat16())
    large = HostRows(data.x.place, torch.full((NUM_NODES, 4), 2000.0).half()).requires_grad_()
    mean = large.mean(0)
    mean.sum().backward()
    assert mean.eq(2000).all() and host(large.grad).eq(torch.tensor(1 / NUM_NODES).half()).all()


def test_all_rows_in_one_place():
    """As the evaluators of OGB ask for them."""
    data = small(4)
    pred = (data.x * 2).argmax(-1, keepdim=True)
    there = host(data.x).mul(2).argmax(-1, keepdim=True)
    assert torch.equal(pyg_sar.gather(pred, torch.arange(NUM_NODES)), there)
    assert pyg_sar.accuracy(pred.view(-1), data.y) == (there.view(-1) == data.y).float().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_mean_loss_of_all_rows(masked, dtype):
    """As of ordinary rows: half precision is added up in single."""
    data, layer = small(4), torch.nn.Linear(IN, 3).to(dtype)
    y, mask, found = torch.arange(NUM_NODES) % 3, data.mask if masked else None, []
    for x in (HostRows(data.x.place, data.x.host.to(dtype)), data.x.host.to(dtype)):
        layer.zero_grad()
        loss = pyg_sar.global_mean(F.cross_entropy(layer(x), y, reduction="none"), mask=mask)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in layer.parameters())])
    tolerance = 1e-6 if dtype == torch.float32 else UNIT
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2 * tolerance, atol=tolerance)


def test_gradients_in_half_precision_do_not_depend_on_the_number_of_chunks():
    """Those that chunks and ranges share are added up in single precision."""
    square = torch.zeros(3, 2)
    for seed in range(12):
        torch.manual_seed(seed)
        edge_index, x, y = torch.randint(400, (2, 4000)), torch.randn(400, 8), torch.randint(4, (400,))
        model = torch.nn.ModuleList([torch.nn.Linear(8, 8), nn.GATv2Conv(8, 4)]).bfloat16()
        grads = []
        for count, dtype in ((None, torch.float64), (1, torch.bfloat16), (50, torch.bfloat16)):
            net = copy.deepcopy(model).to(dtype)
            data = Data(x=x.bfloat16().to(dtype), edge_index=pyg_sar.shard(edge_index, 400))
            data = data if count is None else offload(data, chunks=count)
            out = net[1](net[0](data.x), data.edge_index)
            (F.cross_entropy(out, y, reduction="none").sum() / 400).backward()
            grads.append(torch.stack([p.grad.double().flatten()[:4] for p in (net[1].att, net[1].bias)]))
        square += torch.stack([(grad - grads[0]).square().mean(1) for grad in grads])
    _, whole, chunks = square.sqrt()
    assert (chunks <= 1.5 * whole).all(), "what each chunk rounds to is half precision still"


def test_chunks_around_a_hub():
    """No range is empty, which functions of rows would have to know how to take."""
    edge_index = torch.stack([torch.arange(NUM_NODES).repeat(50), torch.zeros(50 * NUM_NODES, dtype=torch.int64)])
    for num_nodes, count in ((NUM_NODES, 4), (1, 3)):
        data = Data(x=torch.ones(num_nodes, 4), edge_index=pyg_sar.shard(edge_index % num_nodes, num_nodes))
        data = offload(data, chunks=count)
        assert all(a < b for a, b in data.x.place.ranges)
        out = nn.GraphNorm(4)(F.dropout(data.x, 0.5))[torch.arange(num_nodes)]
        assert out.shape == (num_nodes, 4) and torch.isfinite(out).all()


def test_rows_that_are_taken():
    """By masks, numbers (also twice) and ranges, of which gradients come back."""
    data = small(4)
    data.x.requires_grad_()
    plain = data.x.host.clone().requires_grad_()
    for index in (data.mask, torch.tensor([3, 3, 0, 60]), [1, 1, 2], slice(5, 50, 3), 4):
        (data.x.tanh()[index] ** 2).sum().backward()
        (plain.tanh()[index] ** 2).sum().backward()
    torch.testing.assert_close(host(data.x.grad), plain.grad)
    assert data.x[:] is data.x and data.x[:, :] is data.x and data.x[...] is data.x


def test_what_was_computed_without_gradients():
    data = small(4)
    data.x.requires_grad_()
    with torch.no_grad():
        still = data.x.tanh()
    moves = data.x.tanh()
    assert not still.requires_grad and moves.requires_grad
    with torch.no_grad():
        assert not moves[:3].requires_grad
    (moves * still + moves.detach()).sum().backward()
    torch.testing.assert_close(host(data.x.grad), data.x.host.tanh() * (1 - data.x.host.tanh() ** 2))


@pytest.mark.parametrize("same", [
    lambda x: x.to(x.dtype), lambda x: x.contiguous(), lambda x: x.double(), lambda x: x.type_as(x), torch.real,
])  # fmt: skip
def test_what_torch_returns_as_it_is(same):
    x = small().x.requires_grad_()
    assert same(x) is x
    h = x.tanh()
    assert same(h) is h and x.place.home.held == 0
    assert same(h.float()) is not h


def test_no_second_derivative():
    data = small()
    data.x.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(data.x.tanh().sum(), data.x, create_graph=True)


def test_evaluation_uses_running_statistics():
    data, given = inputs()
    model = network("sage", "batch")
    expected = model.eval()(data.x, data.edge_index, given).detach()
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    data = offload(data, chunks=3)
    with torch.no_grad():
        out = convert(model)(data.x, data.edge_index, given)
    torch.testing.assert_close(out[torch.arange(NUM_NODES)], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize("kind", [
    *("sage", "gat", "edge", "updates"),
    *(pytest.param(it, marks=pytest.mark.grid) for it in ("gcn", "gatv2", "both ways")),
])  # fmt: skip
def test_no_tensor_is_as_long_as_the_graph(kind):
    """Neighbors are near: a chunk of ten reads a tenth of the rows, and one row more on each side."""
    n = 400
    edge_index = torch.stack([torch.arange(n).roll(1), torch.arange(n)])
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    data = Data(x=torch.randn(n, IN, dtype=torch.float64), edge_index=pyg_sar.shard(edge_index, n))
    data.y, data.mask = torch.arange(n) % OUT, torch.arange(n) % 40 == 0
    data, model = offload(data, chunks=10), convert(network(kind, "batch"))
    given = {"edge_attr": leaf(2 * n, 3).detach()}

    def step():
        F.cross_entropy(model(data.x, data.edge_index, given)[data.mask], data.y[data.mask]).backward()

    step()  # makes chunks
    longest = Longest.of(step)
    assert longest.rows <= 2 * (n // 10 + 2) + 20, longest.what  # edges, and a piece for padding


@pytest.fixture
def no_garbage_collection():
    gc.disable()
    yield
    gc.enable()


def test_homes_die(no_garbage_collection):
    """Nothing at home is left after a step, without waiting for Python to look for circles, and nothing grows."""
    data = small(3)
    model, home = convert(network("gat", "batch")), data.x.place.home
    peaks = []
    for _ in range(20):
        loss = F.cross_entropy(model(data.x, data.edge_index, {})[data.mask], data.y[data.mask])
        loss.backward()
        assert home.held == 0  # although the loss lives
        peaks.append(home.peak)
    assert len(set(peaks[1:])) == 1


def test_files_are_closed(tmp_path):
    """Chunks take one file each, whatever number of index tensors they have, and steps leave none."""
    gc.collect()  # files of other tests
    data = small(3, home=str(tmp_path))
    model, count, open_files = convert(network("gat", "batch")), 0, []
    for _ in range(4):
        F.cross_entropy(model(data.x, data.edge_index, {})[data.mask], data.y[data.mask]).backward()
        open_files.append(len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else count)
    assert len(set(open_files)) == 1
    chunks = by_chunks.chunks(data.x.place, with_self_loops(data.edge_index.graph)[0], True)
    homes = {it.ids.edges.untyped_storage().data_ptr() for it in chunks}
    for it in chunks:
        (block,) = it.graph.blocks
        for t in (it.ids.edges, block.rowptr, block.col, *block.transpose):
            assert t.untyped_storage().data_ptr() == it.ids.edges.untyped_storage().data_ptr()
    assert len(homes) == 3 and data.x.place.home.held > 0 and list(tmp_path.iterdir()) == []


def test_interrupted(monkeypatch):
    """Training goes on after an interrupt within a pass."""
    data = small(3)
    model = convert(network("sage", "batch"))

    def step():
        model.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index, {})[data.mask], data.y[data.mask]).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected, fetch, calls = step(), slots.fetch, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return fetch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(slots, "fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
    equal(step(), expected)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_traffic(kind, keeps):
    """One record for each layer, with the bytes of the rows that chunks read and write, as the schedule counts them."""
    data, _ = inputs()
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    place = place_of(data.edge_index.graph, Home(None, torch.device("cpu"), None), 4)
    data = move(data, place._replace(copies=keeps))
    data.x.requires_grad_()
    sage, gat = nn.SAGEConv(IN, 6, root_weight=False), nn.GATConv(IN, 6, add_self_loops=False)
    conv = (sage if kind == "sage" else gat).double()
    with pyg_sar.record_traffic(data.edge_index) as layers:
        conv(data.x, data.edge_index)[data.mask].sum().backward()
    (it,) = layers
    chunks = by_chunks.chunks(data.x.place, data.edge_index.graph, True)
    (pieces,) = zip(*(chunk.pieces for chunk in chunks), strict=True)
    loads = count_loads(pieces, NUM_NODES, max(map(len, pieces)))
    assert loads < sum(map(len, pieces))
    read, width = loads if keeps else sum(map(len, pieces)), {"sage": 6, "gat": 7}[kind]
    rows, n = 8 * read * width, 8 * NUM_NODES
    queries = n if kind == "gat" else 0
    assert (it.case, it.forward_loaded, it.forward_stored) == (1 + (kind == "gat"), rows + queries, 6 * n)
    again = rows + queries if kind == "gat" else 0  # in case 2 rows are read again
    assert (it.backward_loaded, it.backward_stored) == (again + 6 * n + rows, rows + queries)


@pytest.mark.parametrize("kind", ["sage", "gat", "gat with dropout"])
def test_no_index_is_brought_before_it_is_read(kind, monkeypatch):
    """Forward brings no transposes, and only dropout has ids of edges brought."""
    data, _ = inputs()
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    place = place_of(data.edge_index.graph, Home(None, torch.device("cpu"), None), 3)
    data = move(data, place._replace(copies=True))
    drop = 0.5 if kind == "gat with dropout" else 0.0
    sage, gat = nn.SAGEConv(IN, 6, root_weight=False), nn.GATConv(IN, 6, add_self_loops=False, dropout=drop)
    conv, brought, bring = (sage if kind == "sage" else gat).double(), set(), Place.bring
    monkeypatch.setattr(Place, "bring", lambda self, t: (brought.add(t.data_ptr()), bring(self, t))[1])
    loss = conv(data.x, data.edge_index)[data.mask].sum()
    graphs = [it.graph for it in by_chunks.chunks(data.x.place, data.edge_index.graph, True)]
    (blocks,) = zip(*(graph.blocks for graph in graphs), strict=True)

    def which(*tensors):
        return {t.data_ptr() in brought for t in tensors}

    assert which(*(block.col for block in blocks)) == {True}
    assert which(*(t for block in blocks for t in block.transpose)) == {False}
    assert which(*(graph.e_id.edges for graph in graphs)) == {drop > 0}
    loss.backward()
    assert which(*(t for block in blocks for t in block.transpose)) == {True}
    assert which(*(graph.e_id.edges for graph in graphs)) == {drop > 0}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("home", ["memory", "files"])
def test_ids_are_made_where_messages_are_dropped(home, dropout, tmp_path):
    data = small(3, home=str(tmp_path) if home == "files" else None)
    convs = [nn.GATConv(IN, 4, dropout=dropout).double()] + [nn.GCNConv(IN, 4).double()] * (dropout == 0)
    for conv in convs:
        conv(data.x, data.edge_index)[data.mask].sum().backward()
    looped = with_self_loops(data.edge_index.graph)[0]
    graphs = looped, *(it.graph for it in by_chunks.chunks(data.x.place, looped, True))
    made = ["ids" in vars(graph.e_id) for graph in graphs]
    assert made == [dropout > 0, *[dropout > 0 and home == "memory"] * 3]


def test_chunks_are_in_the_order_that_loads_fewer():
    """Chunks 0 and 2, and 1 and 3, read the same half of the rows: the greedy order loads each half once."""
    n, conv = 16, nn.SAGEConv(IN, IN, root_weight=False).double()
    first = torch.arange(n) // 4 % 2 * 8  # of the rows that a destination reads
    edge_index = torch.stack([(first.view(-1, 1) + torch.arange(8)).view(-1), torch.arange(n).repeat_interleave(8)])
    data = Data(x=torch.randn(n, IN, dtype=torch.float64), edge_index=pyg_sar.shard(edge_index, n))
    place = place_of(data.edge_index.graph, Home(None, torch.device("cpu"), None), 4)
    expected = conv(data.x, edge_index)
    in_order = [(0, 4), (4, 8), (8, 12), (12, 16)]
    for keeps, loads, spans in ((False, 4, in_order), (True, 2, [in_order[c] for c in (0, 2, 1, 3)])):
        moved = move(data, place._replace(copies=keeps))
        with pyg_sar.record_traffic(moved.edge_index) as layers:
            out = conv(moved.x, moved.edge_index)
        torch.testing.assert_close(out[torch.arange(n)], expected, rtol=1e-10, atol=1e-10)
        assert layers[0].forward_loaded == loads * 8 * IN * 8
        assert [it.span for it in by_chunks.chunks(moved.x.place, data.edge_index.graph, True)] == spans


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kind", ["sage", "sage, max", "gat", "transformer", "edge"])
def test_source_rows_die_before_others_are_loaded(kind, keeps, monkeypatch, no_garbage_collection):
    """Of what was loaded nothing is left but the slots."""
    (data, given), model, fetch = inputs(), convert(network(kind, "batch")), slots.fetch
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    place = place_of(data.edge_index.graph, Home(None, torch.device("cpu"), None), 4, 9)
    data = move(data, place._replace(copies=keeps))
    loaded, alive = [], []

    def watched(*args):
        alive.append(sum(ref() is not None for ref in loaded))
        out = fetch(*args)
        loaded.append(weakref.ref(out))
        return out

    monkeypatch.setattr(slots, "fetch", watched)
    monkeypatch.setattr(by_chunks, "fetch", watched)
    F.cross_entropy(model(data.x, data.edge_index, given)[data.mask], data.y[data.mask]).backward()
    assert len(alive) > 12 and max(alive) == 0, alive


def test_sums_keep_no_source_rows():
    """In case 1 what an aggregation reads dies before backward."""
    data, made = small(3), []
    given = by_chunks.ByChunks.forward

    def forward(ctx, place, graph, program, kinds, x, *others):
        made.append(weakref.ref(x.host))
        return given(ctx, place, graph, program, kinds, x, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_chunks.ByChunks, "forward", staticmethod(forward))
        for conv, alive in ((nn.SAGEConv(IN, 2), False), (nn.GATConv(IN, 2), True)):
            out = conv.double()((data.x * 1), data.edge_index)
            assert (made[-1]() is not None) == alive
            del out


def test_chunks_are_made_once(monkeypatch):
    data, calls, chunk = small(3), [], by_chunks.chunk
    monkeypatch.setattr(by_chunks, "chunk", lambda *args: calls.append(args) or chunk(*args))
    for _ in range(3):
        nn.GCNConv(IN, 2).double()(data.x, data.edge_index)[data.mask].sum().backward()
    assert len(calls) == 3


def test_chunks_die_with_their_home(no_garbage_collection):
    base, _ = inputs()
    base.edge_index = pyg_sar.shard(base.edge_index, NUM_NODES)
    homes = []
    for _ in range(2):
        data = offload(base, chunks=3)
        nn.GCNConv(IN, 2).double()(data.x, data.edge_index)[data.mask].sum().backward()
        homes.append(weakref.ref(data.x.place.home))
        del data
    assert [home() for home in homes] == [None, None]


def test_what_cannot_be_offloaded():
    data, _ = inputs()
    with pytest.raises(TypeError, match=r"sharded 'edge_index' \(got Tensor\)"):
        offload(data, chunks=3)
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="'chunks' to be a positive integer"):
            offload(data, chunks=wrong)
    with pytest.raises(FileNotFoundError):
        offload(data, chunks=3, home="no/such/folder")
    two = copy.copy(data)
    two.edge_index = pyg_sar.shard(torch.zeros(2, 4, dtype=torch.long), (NUM_NODES, 3))
    with pytest.raises(ValueError, match="one set of nodes"):
        offload(two, chunks=3)
    for wrong, what in ((torch.nn.Parameter(data.x.detach()), "parameter"), (data.x * 2, "result of a model")):
        learnt = copy.copy(data)
        learnt.x = wrong
        with pytest.raises(ValueError, match=rf"Expected 'x' to be data \(got a {what}"):
            offload(learnt, chunks=3)
    none = copy.copy(data)
    none.x = torch.arange(NUM_NODES)
    with pytest.raises(ValueError, match=r"rows \[n, \*\] of nodes, such as features 'data.x', to move home \(got .*x"):
        offload(none, chunks=3)
    for p in (2, -0.1, float("nan")):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(offload(data, chunks=3).x, p)
    model = network("sage", "none")
    for given in ({}, {"budget": 100, "chunks": 2, "model": model}):
        with pytest.raises(ValueError, match="either a 'budget' with a 'model', or 'chunks'"):
            offload(data, **given)
    with pytest.raises(TypeError, match=r"Expected a 'model' .* \(got NoneType\)"):
        offload(data, 100)
    for wrong in (0, -3, 2.5, "2 GiBs", "GiB", "-1GiB", "infGiB", True):
        with pytest.raises(ValueError, match="'budget' to be a positive number of bytes, or such as '2GiB'"):
            offload(data, wrong, model)
        with pytest.raises(ValueError, match="'limit' to be a positive number of bytes"):
            offload(data, chunks=2, limit=wrong)
    assert isinstance(data.x, torch.Tensor) and not isinstance(data.x, HostRows)


@pytest.mark.parametrize(
    ("text", "count"), [("7", 7), ("2GiB", 2**31), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("9B", 9), (12, 12)]
)
def test_bytes(text, count):
    assert count_bytes(text, "budget") == count


def test_room_for_rows():
    data, _ = inputs()
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    data = offload(data, chunks=3, limit=100)
    with pytest.raises(OSError, match="100"):
        data.x.tanh()[data.mask]


@pytest.mark.parametrize("first", [torch.nn.Linear(IN, IN), pyg.SAGEConv(IN, IN)])
def test_rows_without_a_gradient(first):
    """Destinations that no message reads, which a function made, or a layer."""
    torch.manual_seed(0)
    second, found = pyg.SAGEConv(IN, 4, aggr="std", project=True, root_weight=False), []
    layers = torch.nn.ModuleList([first, second]).double()
    for data in (inputs()[0], small()):
        one, other = convert(copy.deepcopy(layers))
        for pair in (False, True):
            h = one(data.x, data.edge_index) if hasattr(one, "aggr_module") else one(data.x)
            other((data.x * 2, h) if pair else h, data.edge_index).sum().backward()
        found.append([p.grad for p in (*one.parameters(), *other.parameters())])
    equal(found[1], found[0])


def test_layers_that_look_for_what_messages_left():
    data, plain = small(), inputs()[0]
    layer, kinds = convert(pyg.RGATConv(IN, 4, 2)).double(), torch.arange(plain.edge_index.size(1)) % 2
    found, expected = layer(data.x, data.edge_index, kinds), layer(plain.x, plain.edge_index, kinds)
    torch.testing.assert_close(found[data.mask], expected[plain.mask], rtol=1e-10, atol=1e-10)


class InMemory(torch.autograd.Function):
    """Rows at home as ordinary ones, whose gradient is ordinary, too."""

    @staticmethod
    def forward(ctx, rows):
        return host(rows).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("make", [
    lambda: pyg.GCNConv(IN, 4, normalize=False, bias=False), lambda: pyg.GATConv(IN, 4, bias=False),
    lambda: pyg.SAGEConv(IN, 4, "median", root_weight=False, bias=False), lambda: lambda x, edge_index: x * 2,
])  # fmt: skip
def test_functions_that_give_ordinary_gradients(make):
    data, plain = small(), inputs()[0]
    data.x.requires_grad_()
    torch.manual_seed(0)
    layer = make()
    layer = layer.double() if isinstance(layer, torch.nn.Module) else layer
    expected = layer(plain.x, plain.edge_index)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weight).sum().backward()
    layer = convert(layer) if isinstance(layer, torch.nn.Module) else layer
    out = InMemory.apply(force(layer(data.x, data.edge_index)))
    (out * weight).sum().backward()
    equal([out.detach(), host(data.x.grad)], [expected.detach(), plain.x.grad])


class Pair(NamedTuple):
    sources: torch.Tensor
    destinations: torch.Tensor


class Scaled(pyg.MessagePassing):
    """Takes a pair of its own type; what its update reads has as many rows as a chunk has destinations."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x, edge_index):
        scale = torch.arange(1.0, self.count + 1, dtype=torch.float64)
        return self.propagate(edge_index, x=Pair(x, x), scale=scale)

    def message(self, x_j, x_i):
        return (x_j - x_i).relu()

    def update(self, out, scale):
        return out * scale.mean()


def test_arguments_are_what_they_are_of_the_whole_graph():
    data, plain = small(4), inputs()[0]
    a, b = data.x.place.ranges[1]
    layer = Scaled(b - a)
    expected = layer(plain.x, plain.edge_index)
    out = convert(layer)(data.x, data.edge_index)
    torch.testing.assert_close(out[torch.arange(NUM_NODES)], expected, rtol=1e-10, atol=1e-10)


def test_layers_that_cannot_run_on_chunks():
    data = small()
    layer = convert(pyg.SAGEConv(IN, 4, aggr="lstm")).double()
    with pytest.raises(NotImplementedError, match="chunks of rows at home"):
        layer(data.x, data.edge_index)


@pytest.mark.parametrize(("kind",), some(LAYERS, every=2))
def test_in_inference_mode_as_without_gradients(kind):
    data, given = inputs(torch.float64)
    model = convert(network(kind, "batch")).eval()
    data.edge_index = pyg_sar.shard(data.edge_index, NUM_NODES)
    data = pyg_sar.offload(data, chunks=3)
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            outputs.append(model(data.x, data.edge_index, given)[torch.arange(NUM_NODES)])
    assert outputs[0].abs().sum() > 0
    torch.testing.assert_close(outputs[1].clone(), outputs[0], rtol=0, atol=0)
    torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=0)


def test_functions_that_change_rows_in_inference_mode():
    data = pyg_sar.offload(Data(x=torch.ones(9, 2), edge_index=pyg_sar.shard(torch.zeros(2, 4).long(), 9)), chunks=2)
    with torch.inference_mode():
        x = data.x * 2
        assert x.add_(3) is x and float(x[torch.arange(9)].sum()) == 90
        with pytest.raises(NotImplementedError, match="changes something else than its first argument"):
            torch.add(data.x, 1, out=data.x * 2)
