"""All tensors are on one device, for which the host does not wait: on a GPU of pretence, see ``pretend.py``."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support import conv_zoo
from support.cases import some
from support.conv_zoo import CASES
from support.layer_check import check_layer
from support.layers import FULL, OPTIONS, inputs, leaf
from support.nasty_graph import NUM_NODES, close, edges
from support.pool import Pool
from support.simulated_accelerator import DEVICE, here, pretence
from test_cuda import WITH_EDGES, problem
from test_training import Model
from torch.utils._python_dispatch import _disable_current_modes

import pyg_sar
from pyg_sar.data.datasets import community_graph

# Nothing can be computed here of the fused cells of recurrent networks, which torch has on accelerators alone.
CELLS = {"GatedGraphConv", "Set2Set", "GraphSAGE", "LSTMAggregation", "GRUAggregation", "LCMAggregation",
         "SAGEConv lstm"}  # fmt: skip


@pytest.fixture(scope="module")
def machines() -> Iterator[Pool]:
    """Processes in which autograd knows of the device from the beginning."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, and torch knows one kind of accelerator at a time")
    pool = Pool(2)
    yield pool
    pool.close()


def mistakes(group):
    """The pretence notices what would fail on a GPU, and waiting."""
    with pretence() as it:
        x, mask = torch.randn(4, 3).to(DEVICE).requires_grad_(), torch.tensor([True, False, True, True], device=DEVICE)
        weight = torch.nn.Linear(3, 2).to(DEVICE).weight
        assert x.device == weight.device == torch.device(DEVICE, 0) and isinstance(weight, torch.nn.Parameter)
        for wrong in (lambda: x + torch.randn(4, 3), lambda: x @ torch.randn(3, 2), lambda: x[:, :1] * torch.ones(1)):
            with pytest.raises(RuntimeError, match="different devices"):
                wrong()
        it.waits.clear()
        ((x @ weight.t()) * torch.tensor(2.0)).relu().sum().backward()
        assert x.grad.device == x.device and not it.waits
        y = x.detach().clone().masked_fill_(mask.unsqueeze(1), 0)
        assert not it.waits
        for wait in (y.sum().item, y.nonzero, lambda: y[mask], lambda: y.cpu(), lambda: y[torch.tensor([1])],
                     lambda: mask.repeat_interleave(torch.tensor([1, 0, 1, 2], device=DEVICE).abs()),
                     lambda: torch.tensor([1], device=DEVICE), mask.unique, lambda: bool(mask.any())):  # fmt: skip
            it.waits.clear()
            wait()
            assert it.waits
    return torch.equal(y.here, x.here * ~mask.here.unsqueeze(1))


def test_mistakes(machines):
    assert machines.run(1, mistakes) == [True]


def layers(group, which, grid):
    with pretence():
        for case in which:
            check_layer(group, case, grid, device=DEVICE)


@pytest.mark.parametrize(
    ("which", "grid"), [(FULL, "one"), pytest.param([*FULL, *OPTIONS], "two", marks=pytest.mark.grid)]
)
def test_layers(machines, which, grid):
    machines.run(2, layers, which, grid, timeout=400)


class Types(gnn.MessagePassing):
    """Messages that read integers of sources, and no rows."""

    def __init__(self):
        super().__init__(aggr="add", node_dim=0)
        self.rows = torch.nn.Embedding(3, 4)

    def forward(self, types, edge_index):
        return self.propagate(edge_index, types=types)

    def message(self, types_j):
        return self.rows(types_j).tanh()


def integers(group):
    types, layer = torch.arange(NUM_NODES) % 3, Types().double()
    expected = layer(types, edges())
    with pretence():
        layer = pyg_sar.nn.convert(layer.to(DEVICE))
        out = layer(types.to(DEVICE), pyg_sar.shard(edges().to(DEVICE), NUM_NODES, 2))
        close(out.cpu(), expected, "output")
    return pyg_sar.nn.describe(layer)


def test_messages_of_integers(machines):
    (told,) = machines.run(1, integers)
    assert "streams" in told and "one-shot" not in told, told


def layers_of_pyg(group, names, converts):
    with pretence():
        return conv_zoo.check(group, names, "random", converts, DEVICE)


@pytest.mark.grid  # layers of this package never wait by default, see below; these take a minute
@pytest.mark.parametrize("converts", [False, True])
def test_layers_of_pyg(machines, converts):
    names = [n for n, case in CASES.items() if "random" in case.methods and n not in CELLS]
    if converts:  # which takes some time; that options stream as well is shown on the CPU
        names = [n for n in names if n in conv_zoo.LAYERS]
    problems = machines.run(2, layers_of_pyg, names, converts, timeout=400)
    assert not any(problems), "\n".join(p for rank in problems for p in rank)


def job(group, folder, device):
    """What a script does besides calling layers; returns numbers."""
    torch.manual_seed(0)
    data = pyg_sar.load(folder, device, group)
    assert all(t.device.type == device for t in (data.x, data.y, data.n_id, data.e_id, data.train_mask))
    x, graph, num_features = data.x.double(), data.edge_index, data.x.size(1)
    model = torch.nn.ModuleList([torch.nn.Linear(num_features, 8, bias=False), Model(pyg_sar.nn, "gat", dropout=0.3)])
    for norm in model[1].norms:
        norm.module.group = group
    pyg_sar.broadcast_parameters(model.double().to(device), group)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        with pyg_sar.record_traffic(graph) as traffic:
            out = model[1](model[0](x), graph)
        losses = F.cross_entropy(out[data.train_mask], data.y[data.train_mask] % 3, reduction="none")
        loss = pyg_sar.global_mean(losses, group)
        loss.backward()
        pyg_sar.sum_gradients(model, group)
        optimizer.step()
        found += [loss, torch.tensor([t.saved + t.forward_sent + t.backward_received for t in traffic])]
    flow, conv = pyg_sar.message_flow_graphs(graph, data.val_mask, 2), pyg_sar.nn.SAGEConv(num_features, num_features)
    conv, y = conv.double().to(device), x[flow.node_rows]
    for layer in flow.edge_indices:
        y = conv(y, layer)
    assert pyg_sar.negative_sampling(graph, data.n_id, group=group).device.type == device  # which draws its own numbers
    pairs = torch.randint(200, (2, 500), generator=torch.Generator().manual_seed(0)).to(device)
    index, mine = pyg_sar.shard_links(pairs, data.n_id, group)
    pools = [getattr(pyg_sar.nn, f"global_{kind}_pool")(out, data.y, group=group) for kind in ("add", "mean", "max")]
    told = pyg_sar.accuracy(out.argmax(-1), data.y % 3, data.test_mask, group)
    torch.manual_seed(1)  # a GPU has drawn masks of dropout from a generator of its own
    inferred = pyg_sar.inference(torch.nn.Linear(3, 2).double().to(device), out, group=group)
    found += [y, (out[index[0]] * out[index[1]]).sum(-1), mine, *pools, torch.tensor(told), inferred]
    found += [pyg_sar.global_sum(x.sum(), group), pyg_sar.degree_histogram(graph, group)]
    return [t.detach().cpu() for t in (*found, *(p.grad for p in model.parameters()))]


def pretended(group, folder):
    with pretence():
        return job(group, folder, DEVICE)


@pytest.mark.parametrize("where", [DEVICE, pytest.param("cuda", marks=pytest.mark.gpu)])
def test_jobs(pool, request, tmp_path, where):
    pyg_sar.partition(community_graph(200, 2000), 2, folder := tmp_path / "graph")
    if where == "cuda":
        there = pool.run(2, job, folder, where)
    else:
        there = request.getfixturevalue("machines").run(2, pretended, folder)
    for expected, found in zip(pool.run(2, job, folder, "cpu"), there, strict=True):
        for k, (one, other) in enumerate(zip(expected, found, strict=True)):
            close(other, one, f"number {k}")


def waits(step, it):
    """Return where the host waits in a step after some others, in which what is made once is made."""
    for _ in range(2):
        step()
    it.waits.clear()
    step()
    return list(it.waits)


def by_kernels(group, name, kwargs, parts):
    from support import gpu

    execute = gpu.interpreter.GridExecutor.__call__

    def launch(self, *given, **settings):
        with _disable_current_modes(), np.errstate(all="ignore"):
            execute(self, *here(given), **here(settings))

    with pretence(gpu.kernels) as it, mock.patch.object(gpu.interpreter.GridExecutor, "__call__", launch):
        return waits(problem(name, kwargs, parts, DEVICE)[0], it)


@pytest.mark.parametrize(("case",), some(WITH_EDGES, every=3))
def test_kernels_never_wait(machines, case):
    pytest.importorskip("triton")
    name, kwargs = case
    assert machines.run(1, by_kernels, name, kwargs, 1 if "edge_dim" in kwargs else 3) == [[]]


def step_of(case):
    """Return a function that runs a layer forward and backward on three shards."""
    counts, widths = case.shape()
    layer, edge_index = case.build(dtype=torch.float32).to(DEVICE), edges(*counts)
    graph = pyg_sar.shard(edge_index.to(DEVICE), counts if case.pair == "two" else NUM_NODES, 3)
    src, dst = (torch.randn(n, w).to(DEVICE).requires_grad_() for n, w in zip(counts, widths, strict=True))
    x = (src, None if case.pair == "none" else dst) if case.pair else src
    extra = [leaf(t.to(DEVICE), case.learn) for t in inputs(case.roles, edge_index.size(1), torch.float32)]
    return lambda: layer(x, graph, *extra).square().sum().backward()


def of_layers(group, which):
    with pretence() as it:
        return {str(case): waits(step_of(case), it) for case in which}


def test_layers_never_wait(machines):
    """But for the one that looks how far scores lie apart, once for each of three blocks, forward and backward."""
    (found,) = machines.run(1, of_layers, FULL)
    assert {name.split()[0]: len(places) for name, places in found.items() if places} == {"GENConv": 6}


def by_their_own_code(group):
    """One that runs by a kernel, one with a softmax, and one in passes: the first two are looked at in each call."""
    found = {}
    with pretence() as it:
        graph = pyg_sar.shard(edges(NUM_NODES, NUM_NODES).to(DEVICE), NUM_NODES, 3)
        x, attr = (torch.randn(n, 3).to(DEVICE) for n in (NUM_NODES, graph.size(1)))
        for layer, more in (
            (gnn.GraphConv(3, 4), ()),
            (gnn.GENConv(3, 4, edge_dim=3, learn_t=True), (attr,)),
            (gnn.GINEConv(torch.nn.Linear(3, 4)), (attr,)),
        ):
            layer = pyg_sar.nn.convert(layer).to(DEVICE)
            places = waits(lambda layer=layer, more=more: layer(x, graph, *more).sum().backward(), it)
            found[pyg_sar.nn.describe(layer)] = places
    return found


def test_converted_layers_never_wait(machines):
    (found,) = machines.run(1, by_their_own_code)
    assert not any(found.values())
    assert all(word in how for word, how in zip(("kernel", "softmax", "replay"), found, strict=True))


@pytest.mark.grid
def test_options_that_wait(machines):
    """Those whose code changes the graph itself; a number that is on the CPU; and softmax by columns."""
    (found,) = machines.run(1, of_layers, OPTIONS, timeout=200)
    waiting = {name for name, places in found.items() if places}
    assert waiting == {
        "GCNConv {'flow': 'target_to_source'}", "GCNConv {'aggr': 'max'}",
        "GATConv {'heads': 2, 'aggr': 'max'}", "GATv2Conv {'heads': 2, 'aggr': 'max'}",
        "GATConv {'edge_dim': 3, 'fill_value': tensor([ 1.0000, -2.0000,  0.5000])}",
        *(f"GENConv {{{options}}}" for options in (
            "'norm': 'batch', 'learn_t': True, 'learn_msg_scale': True",
            "'norm': 'layer', 'num_layers': 1, 't': -1.5", "'norm': 'layer', 'num_layers': 1, 'learn_t': True",
            "'norm': 'layer', 'num_layers': 1, 't': 500.0, 'learn_t': True",
            "'norm': 'layer', 'num_layers': 1, 'aggr': 'softmax_sg', 't': 0.1, 'msg_norm': True",
        )),
    }  # fmt: skip
