"""Models of PyG, converted, on several workers against themselves on the whole graph."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share

import pyg_sar
from pyg_sar.nn import convert

DEGREES = torch.bincount(torch.bincount(edges()[1], minlength=NUM_NODES))
PNA = {"aggregators": ["mean", "max", "sum"], "scalers": ["identity", "amplification"], "deg": DEGREES}
MODELS = {
    "GCN": lambda: gnn.GCN(8, 6, 3, 4, norm="BatchNorm", jk="cat"),
    "GraphSAGE": lambda: gnn.GraphSAGE(8, 6, 3, 4, norm="GraphNorm", act="elu"),
    "GIN": lambda: gnn.GIN(8, 6, 2, 4, norm="batch_norm"),
    "GAT": lambda: gnn.GAT(8, 6, 3, 4, heads=2, norm=gnn.PairNorm(), jk="max"),
    "GATv2": lambda: gnn.GAT(8, 6, 2, 4, v2=True, heads=2, norm="LayerNorm", norm_kwargs={"mode": "graph"}),
    "GAT with InstanceNorm": lambda: gnn.GAT(8, 6, 2, 4, norm="InstanceNorm", jk="lstm"),
    "PNA": lambda: gnn.PNA(8, 6, 2, 4, **PNA, norm=gnn.MeanSubtractionNorm()),
    "EdgeCNN": lambda: gnn.EdgeCNN(8, 6, 2, 4, norm="DiffGroupNorm", norm_kwargs={"groups": 2}),
    "Sequential": lambda: gnn.Sequential("x, edge_index", [
        (gnn.SAGEConv(8, 6), "x, edge_index -> x"), torch.nn.BatchNorm1d(6), torch.nn.ReLU(),
        (gnn.GraphConv(6, 6), "x, edge_index -> x"), (gnn.GraphSizeNorm(), "x -> x"), gnn.Linear(6, 4),
    ]),
    "DeepGCNLayer": lambda: gnn.Sequential("x, edge_index", [
        (gnn.DeepGCNLayer(gnn.TransformerConv(8, 8), gnn.LayerNorm(8), torch.nn.ReLU(), "res+"), "x, edge_index -> x"),
        (gnn.DeepGCNLayer(gnn.GENConv(8, 8, norm="layer"), gnn.BatchNorm(8), torch.nn.ReLU(), "res"),
         "x, edge_index -> x"),
    ]),
}  # fmt: skip


def check(group, name, mode):
    torch.manual_seed(0)
    reference = MODELS[name]().double()
    model = copy.deepcopy(reference)
    kept = dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())
    assert convert(model, group) is model
    assert (dict(model.named_modules()), dict(model.named_parameters()), list(model.state_dict())) == kept
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64)
    for _ in range(2):  # the first step moves running statistics
        whole, part = x.clone().requires_grad_(), x[mine.src].clone().requires_grad_()
        reference.zero_grad(), model.zero_grad()
        expected, out = reference(whole, edges()), model(part, mine.edge_index)
        close(out, expected[mine.dst], f"{name}: output")
        backward(expected, torch.arange(NUM_NODES), NUM_NODES)
        backward(out, mine.dst, NUM_NODES)
        close(part.grad, whole.grad[mine.src], f"{name}: gradient of x")
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None or not p.grad.any(), key
                continue
            grad = torch.zeros_like(q) if p.grad is None else p.grad.clone()
            dist.all_reduce(grad, group=group)
            close(grad, q.grad, f"{name}: gradient of {key}")
    reference.eval(), model.eval()
    close(model(x[mine.src], mine.edge_index), reference(x, edges())[mine.dst], f"{name}: evaluation")


@pytest.mark.parametrize(("name", "mode"), some(MODELS, [1, 3], every=2))
def test_models_of_pyg(pool, name, mode):
    pool.run(3, check, name, mode)


def test_a_converted_model_works_on_an_ordinary_edge_index():
    for name, make in MODELS.items():
        torch.manual_seed(0)
        reference, x = make().double(), torch.randn(NUM_NODES, 8, dtype=torch.float64)
        model = convert(copy.deepcopy(reference))
        close(model(x, edges()), reference(x, edges()), name)


def test_hooks_and_optimizers_stay():
    model, seen = gnn.GCN(8, 6, 2, 4, norm="BatchNorm"), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.convs[0].register_forward_hook(lambda *_: seen.append(1))
    before = model.convs[1].lin.weight.clone()
    convert(convert(model))(torch.randn(NUM_NODES, 8), pyg_sar.shard(edges(), NUM_NODES, 2)).sum().backward()
    optimizer.step()
    assert seen == [1] and (model.convs[1].lin.weight != before).any()
    assert type(model.convs[0]) is pyg_sar.nn.GCNConv and type(model.norms[0].module) is pyg_sar.nn.BatchNorm1d


def test_it_prints_what_becomes_of_layers(capsys):
    convert(MODELS["Sequential"](), verbose=True)
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert [line[1:] for line in lines] == [
        ["SAGEConv", "streams"],
        ["BatchNorm1d", "sees the rows of all workers"],
        ["GraphConv", "streams by replay or runs one-shot: see when run"],
        ["GraphSizeNorm", "sees the rows of all workers"],
    ]


class Mine(gnn.SAGEConv):
    def message(self, x_j):
        return 2 * x_j


def test_a_subclass_of_a_layer_that_streams_runs_its_own_code():
    torch.manual_seed(0)
    layer, x = Mine(8, 4), torch.randn(NUM_NODES, 8)
    expected = layer(x, edges())
    assert isinstance(convert(layer), Mine)
    close(layer(x, pyg_sar.shard(edges(), NUM_NODES, 2)), expected, "output", 1e-5)
    assert pyg_sar.nn.describe(layer) == "(model)  Mine  streams by replay"


def test_why_a_layer_ran_one_shot():
    """Something that holds for one call is told beside how it streams otherwise."""
    layers = [pyg_sar.nn.TransformerConv(8, 4, 2), pyg_sar.nn.SAGEConv(8, 4), convert(gnn.GraphConv(8, 4))]
    x, it = torch.randn(NUM_NODES, 8), pyg_sar.shard(edges(), NUM_NODES, 2)
    layers[0](x, it, return_attention_weights=True)
    for layer in layers[1:]:
        layer.register_message_forward_hook(lambda *_: None)
        layer(x, it)
    assert [pyg_sar.nn.describe(layer).split("  ")[-1] for layer in layers] == [
        "streams, runs one-shot (it was asked for what its messages leave behind)",
        "streams, runs one-shot (its messages have hooks)",
        "runs one-shot (its messages have hooks)",
    ]


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (gnn.TopKPooling(8), r"'TopKPooling' \(1\).*compares all nodes"),
        (gnn.GPSConv(8, None), r"'GPSConv' \(1\).*attends over all nodes"),
        (gnn.SuperGATConv(8, 4), r"'SuperGATConv' \(1\).*averages its training loss .* or call 'eval\(\)' before"),
        (gnn.WLConv(), r"'WLConv' \(1\).*numbers the colours of all nodes"),
        (torch.nn.SyncBatchNorm(8), r"'SyncBatchNorm' \(1\).*Take 'torch\.nn\.BatchNorm1d'"),
    ],
)
def test_what_needs_all_rows_is_refused_and_nothing_changed(layer, says):
    model = torch.nn.Sequential(gnn.GCNConv(8, 8), layer)
    with pytest.raises(NotImplementedError, match=says):
        convert(model)
    assert type(model[0]) is gnn.GCNConv


class Scores(gnn.SimpleConv):
    """Has a module by whose name our layers have a method."""

    def __init__(self):
        super().__init__()
        self.pair = torch.nn.Bilinear(8, 8, 4)

    def forward(self, x, edge_index):
        return self.pair(x, super().forward(x, edge_index))


def test_names_that_are_taken():
    model = torch.nn.Sequential(gnn.GCNConv(8, 8), Scores())
    with pytest.raises(ValueError, match=r"'Scores' \(1\) has a 'pair', .* Give it another name"):
        convert(model)
    assert type(model[0]) is gnn.GCNConv


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv", "GraphConv"])
def test_a_propagate_that_somebody_put_there(name, before):
    x, results = torch.randn(NUM_NODES, 8), []
    for ours in (False, True):
        torch.manual_seed(0)
        layer = getattr(gnn, name)(8, 4)
        layer = convert(layer) if ours and not before else layer
        own = layer.propagate
        layer.propagate = lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs)
        results.append((convert(layer) if ours and before else layer)(x, edges()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("explained", [False, True])
def test_a_propagate_that_pyg_put_there(explained):
    layer = gnn.SAGEConv(8, 4)
    layer.explain = True
    layer.explain = explained or None
    assert "propagate" in layer.__dict__
    convert(layer)
    assert "propagate" not in layer.__dict__


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_layers_in_torchscript_are_refused_and_other_modules_are_not():
    rowwise = torch.jit.script(torch.nn.Linear(8, 8))
    assert convert(torch.nn.Sequential(gnn.GCNConv(8, 8), rowwise))[1] is rowwise
    with pytest.raises(NotImplementedError, match=r"compiled by TorchScript.*torch\.compile"):
        convert(torch.nn.Sequential(rowwise, torch.jit.script(gnn.GCNConv(8, 8))))


def test_what_is_refused_in_training_alone():
    layer, x = gnn.SuperGATConv(8, 4).eval(), torch.randn(NUM_NODES, 8)
    sharded = pyg_sar.shard(edges(), NUM_NODES, 2)
    torch.testing.assert_close(pyg_sar.inference(layer.train(), x, sharded), layer.eval()(x, edges()))
    assert convert(layer).training is False
    with pytest.raises(NotImplementedError, match=r"'SuperGATConv' in .* training loss"):
        layer.train()(x, sharded)


class Tied(torch.nn.Module):
    """Both layers have the same weights; a map that torch may compile stands between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = gnn.GraphConv(8, 8), gnn.GENConv(8, 8, norm="layer")
        self.again, self.between = gnn.GraphConv(8, 8), torch.nn.Linear(8, 8)
        self.again.lin_rel = self.first.lin_rel

    def forward(self, x, edge_index):
        return self.again(self.between(self.second(self.first(x, edge_index), edge_index)).tanh(), edge_index)


def steps(model, graphs):
    """Accumulate the gradients of several graphs."""
    model.zero_grad()
    torch.manual_seed(1)
    for edge_index, n in graphs:
        model(torch.randn(n, 8), edge_index).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_models_live_on(copied):
    torch.manual_seed(0)
    reference = Tied()
    model = convert(copy.deepcopy(reference))
    assert model.again.lin_rel is model.first.lin_rel
    sizes = NUM_NODES, 50, NUM_NODES
    plain = [(edges(n, n, seed), n) for seed, n in enumerate(sizes)]
    sharded = [(pyg_sar.shard(it, n, 3), n) for it, n in plain]
    expected = steps(reference, plain)
    for found in (steps(model, sharded), steps(copied(model), sharded), steps(model, plain)):
        for one, other in zip(found, expected, strict=True):
            close(one, other, "gradient", 1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at all
def test_rows_between_layers_are_compiled():
    torch.manual_seed(0)
    model = convert(Tied())
    it, x = pyg_sar.shard(edges(), NUM_NODES, 2), torch.randn(NUM_NODES, 8)
    expected = model(x, it)
    compiled = torch.compile(model, backend="eager")  # layers break its graph
    for _ in range(2):
        out = compiled(x, it)
        close(out, expected, "compiled", 1e-6)
        out.sum().backward()


class Grouped(torch.nn.Module):
    """What is called ``group`` here is no group of workers."""

    def __init__(self, own):
        super().__init__()
        self.conv, self.norm = gnn.SAGEConv(8, 8), pyg_sar.nn.BatchNorm(8, group=own)

    def forward(self, x, edge_index):
        return self.group([self.norm(self.conv(x, edge_index)), x])

    def group(self, rows):
        return torch.stack(rows).sum(0)


def test_only_groups_of_workers_are_replaced():
    own, other = object(), object()
    model = convert(Grouped(own))
    assert model(torch.randn(NUM_NODES, 8), edges()).shape == (NUM_NODES, 8) and model.norm.module.group is own
    assert (
        "group" not in vars(model) and convert(model, other).norm.module.group is other and "group" not in vars(model)
    )


class Stateful(gnn.MessagePassing):
    """Holds what cannot be pickled, and makes it anew."""

    def __init__(self):
        super().__init__()
        self.twice = lambda x: 2 * x

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return self.twice(x_j)

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "twice"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.twice = lambda x: 2 * x


def test_layers_with_a_state_of_their_own_are_pickled():
    layer, x, edge_index = convert(Stateful()), torch.randn(5, 2), torch.tensor([[0, 1, 2], [1, 2, 2]])
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x, edge_index), layer(x, edge_index))
