"""Layers that need all edges of a destination at once: they run on some destinations at a time."""

import weakref

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.cases import some
from support.conv_zoo import InOrder
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share
from torch_geometric.utils import softmax, to_dense_batch

import pyg_sar
from pyg_sar.nn import convert
from pyg_sar.nn.replay.choose import STRATEGIES
from pyg_sar.nn.replay.chunks import FEWEST

E = edges().size(1)


class Top(gnn.Aggregation):
    """The two largest of all messages, which have the highest scores."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        dense, mask = dense_of(x, index, dim_size)
        score = dense.sum(-1).masked_fill(~mask, -torch.inf)
        best = score.topk(min(2, score.size(1)), 1).indices
        return dense.gather(1, best.unsqueeze(-1).expand(-1, -1, dense.size(-1))).sum(1)


def dense_of(x, index, dim_size):
    order = index.argsort(stable=True)
    return to_dense_batch(x[order], index[order], batch_size=dim_size)


class Layer(gnn.MessagePassing):
    """Messages of rows at both ends and of edge features; ``update`` reads rows again, and drops some."""

    def __init__(self, aggr, dropout=0.0):
        super().__init__(aggr=aggr)
        self.lin, self.edge, self.dropout, self.seen = gnn.Linear(8, 4), torch.nn.Linear(3, 4), dropout, None

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), a=edge_attr)

    def message(self, x_i, x_j, a):
        out = torch.tanh(x_j + x_i * self.edge(a))
        if self.seen is not None:
            self.seen(out)
        return F.dropout(out, self.dropout, self.training)

    def update(self, out, x):
        return F.dropout(out.view(out.size(0), -1, 4).sum(1), self.dropout, self.training) + x


LAYERS = {
    "median": (lambda: Layer("median"), "runs in chunks of destinations (it calls"),
    "mul": (lambda: Layer("mul"), "runs in chunks of destinations (it reduces by 'prod'"),
    "lstm": (
        lambda: Layer(gnn.LSTMAggregation(4, 4)),
        "runs in chunks of destinations, padded to the maximum in-degree (",
    ),
    "own": (lambda: Layer(Top()), "runs in chunks of destinations (it calls"),
    "several": (lambda: Layer(["median", "mean", "max"]), "runs in chunks of destinations (it calls"),
}


def strategy_of(layer):
    return ", ".join(str(s) for s in STRATEGIES[layer].values())


def rows(dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(n, k, generator=g, dtype=dtype).requires_grad_() for n, k in ((NUM_NODES, 8), (E, 3))]


def whole(make):
    """What PyG's own code computes, with edges in the order of destinations."""
    torch.manual_seed(0)
    layer, (x, a) = make().double(), rows()
    order = edges()[1].argsort(stable=True)
    out = layer(x, edges()[:, order], a[order])
    backward(out, torch.arange(NUM_NODES), NUM_NODES)
    return out, x.grad, a.grad, layer


def compare(group, name, mode, method):
    make, strategy = LAYERS[name]
    out, x_grad, a_grad, reference = whole(make)
    torch.manual_seed(0)
    layer = convert(make().double())
    mine = share(group, edges(), assignment(method, group.size()), mode=mode)
    x, a = (t.detach()[rows].requires_grad_() for t, rows in zip(rows(), (mine.src, mine.edge), strict=True))
    found = layer(x, mine.edge_index, a)
    backward(found, mine.dst, NUM_NODES)
    close(found, out[mine.dst], "output")
    close(x.grad, x_grad[mine.src], "gradient of x")
    close(a.grad, a_grad[mine.edge], "gradient of edges")
    pyg_sar.sum_gradients(layer, group)
    for (parameter, p), q in zip(layer.named_parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, f"gradient of {parameter}")
    with torch.no_grad():
        close(layer.eval()(x, mine.edge_index, a), out[mine.dst], "evaluation")
    found = strategy_of(layer)
    assert all(part.startswith(strategy) for part in found.split("), ") if part.startswith("runs")), found


@pytest.mark.parametrize(("name", "mode"), some(LAYERS, [1, 2, 3], every=3))
def test_equals_pyg(pool, name, mode):
    pool.run(3, compare, name, mode, "random")


@pytest.mark.parametrize("name", LAYERS)
def test_where_a_worker_has_nothing(pool, name):
    pool.run(3, compare, name, 1, "empty")


def run(layer, parts, x, a, seed=None):
    it = pyg_sar.shard(edges(), NUM_NODES, parts)
    if seed is not None:
        it.graph.seeds.manual_seed(seed)
    return layer(x, it, a)


@pytest.mark.parametrize("name", ["median", "lstm"])
@pytest.mark.parametrize("cells", [1, 7, 100])
def test_messages_of_one_chunk_are_alive(monkeypatch, name, cells):
    monkeypatch.setattr("pyg_sar.nn.replay.chunks.CELLS", cells)
    torch.manual_seed(0)
    layer, (x, a) = convert(LAYERS[name][0]().double()), rows()
    run(layer, 3, x, a)
    alive, most, seen = [], [], []

    def message(out):
        alive.append(weakref.ref(out))
        most.append(sum(ref() is not None for ref in alive))
        seen.append(out.size(0))

    layer.seen = message
    out = run(layer, 3, x, a)
    backward(out, torch.arange(NUM_NODES), NUM_NODES)
    degree = torch.bincount(edges()[1], minlength=NUM_NODES)
    made = int(degree.max()) if name == "lstm" else FEWEST
    assert max(most) == 1
    assert max(seen) <= made + max(cells, int(degree.max()))
    assert sum(seen) == 2 * E + made * len(seen)
    expected, x_grad, a_grad, _ = whole(LAYERS[name][0])
    close(out, expected, "output")
    close(x.grad, x_grad, "gradient of x")
    close(a.grad, a_grad, "gradient of edges")


def test_dropout_is_the_same_however_the_graph_is_cut():
    torch.manual_seed(0)
    layer, found = convert(Layer("median", 0.4).double()), []
    for parts in (1, 2, 3):
        x, a = rows()
        torch.manual_seed(7)  # of 'update'
        out = run(layer, parts, x, a, seed=5)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, a, *layer.parameters()])))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            close(two, one, "dropout")
    assert not torch.equal(run(layer, 2, x, a, seed=6), found[1][0])


def test_maximum_in_degree_is_that_of_the_whole_graph():
    """A message-flow graph has few destinations: padding is for all."""
    torch.manual_seed(0)
    layer, (x, _) = convert(gnn.SAGEConv(8, 4, aggr="lstm").double()), rows()
    expected = InOrder(layer)(x, edges())
    degree = torch.bincount(edges()[1], minlength=NUM_NODES)
    few = (degree > 0) & (degree < degree.max())
    flow = pyg_sar.message_flow_graphs(pyg_sar.shard(edges(), NUM_NODES, 2), few, 1)
    own = x[flow.node_rows]
    out = layer((own, own[: int(few.sum())]), flow.edge_indices[0])
    close(out, expected[few], "output of a message-flow graph")


def test_edges_that_were_added_have_no_order():
    torch.manual_seed(0)
    layer, (x, _) = convert(gnn.SAGEConv(8, 4, aggr="lstm").double()), rows()
    it = pyg_sar.shard(edges(), NUM_NODES, 2)
    row, col = it
    with pytest.raises(NotImplementedError, match="needs all edges in their order, but some were added or left out"):
        layer(x, it[:, row != col])
    unordered = convert(gnn.SAGEConv(8, 4, aggr="median").double())
    kept = edges()[:, edges()[0] != edges()[1]]
    close(unordered(x, it[:, row != col]), unordered(x, kept), "output")


def test_what_depends_on_other_destinations_is_refused():
    class Largest(gnn.Aggregation):
        def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
            return self.reduce(x / torch.linalg.vector_norm(x), index, ptr, dim_size, dim)

    layer, (x, a) = convert(Layer(Largest()).double()), rows()
    with pytest.raises(NotImplementedError, match=r"\[rank 0\] 'Layer' cannot run on a share of the graph"):
        run(layer, 2, x, a)
    assert strategy_of(layer).startswith("refused (")


class Counted(gnn.MessagePassing):
    """Few messages are not zero, so that hardly a median is; these depend on how many edges there are."""

    def __init__(self, sign):
        super().__init__(aggr="median")
        self.sign = sign

    def forward(self, x, edge_index, a):
        return self.propagate(edge_index, x=x, a=a)

    def message(self, x_j, a):
        return x_j * (self.sign * a > 1) / len(x_j)


class Relative(gnn.MessagePassing):
    """Messages are divided by the largest degree, which all chunks must see."""

    def __init__(self):
        super().__init__(aggr="median")

    def forward(self, x, edge_index, a):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index):
        degree = torch.bincount(index)
        return x_j * degree[index, None] / degree.max()


@pytest.mark.parametrize("sign", [1, -1])
def test_messages_that_count_edges_are_refused(sign):
    layer, (x, _) = convert(Counted(sign)), rows()
    with pytest.raises(NotImplementedError, match="on some destinations alone its messages would differ"):
        run(layer, 2, x, torch.rand(E, 1, dtype=torch.float64))


def test_messages_that_know_the_largest_degree():
    layer, (x, a) = Relative(), rows()
    expected = layer(x, edges()[:, edges()[1].argsort(stable=True)], a)
    close(run(convert(layer), 2, x, a), expected, "output")
    assert "padded to the maximum in-degree" in strategy_of(layer)


def refused_everywhere(group):
    mine = share(group, edges(), assignment("empty", group.size()))
    layer = convert(Layer(gnn.EquilibriumAggregation(4, 4, [4])))
    x, a = torch.randn(len(mine.src), 8), torch.randn(len(mine.edge), 3)
    try:
        layer(x, mine.edge_index, a)
    except NotImplementedError as error:
        return str(error)
    return ""


def test_refused_on_all_workers(pool):
    for rank, error in enumerate(pool.run(3, refused_everywhere)):
        assert error.startswith(f"[rank {rank}] 'Layer' cannot run on a share of the graph")


class Updated(gnn.MessagePassing):
    """Attention that is computed by ``edge_updater``."""

    def __init__(self, how="softmax", dropout=0.0):
        super().__init__(aggr="add")
        self.lin, self.att, self.how, self.dropout = gnn.Linear(8, 4), torch.nn.Linear(11, 2), how, dropout

    def forward(self, x, edge_index, edge_attr):
        x = self.lin(x)
        alpha = self.edge_updater(edge_index, x=x, a=edge_attr)
        return torch.cat([self.propagate(edge_index, x=x, w=alpha[:, k]) for k in (0, 1)], 1)

    def edge_update(self, x_i, x_j, a, index, ptr, size_i):
        alpha = self.att(torch.cat([x_i, x_j, a], -1))
        if self.how == "softmax":
            alpha = softmax(alpha, index, ptr, size_i)
        elif self.how == "median":  # of all edges of a destination
            dense, mask = dense_of(alpha, index, size_i)
            alpha = alpha - dense.masked_fill(~mask.unsqueeze(-1), torch.nan).nanmedian(1).values[index]
        elif self.how == "all":
            alpha = alpha / torch.linalg.vector_norm(alpha)
        elif self.how == "kept":
            self.kept = alpha
        return F.dropout(alpha, self.dropout, self.training)

    def message(self, x_j, w):
        return x_j * w.unsqueeze(-1)


UPDATES = {
    "": "streams by replay",
    "softmax": "streams by replay (in 2 passes)",
    "median": "runs in chunks of destinations (",
    "kept": "runs one-shot (its messages leave something behind)",
}


def compare_updates(group, how, mode, method):
    torch.manual_seed(0)
    layer = convert(Updated(how).double())
    reference = whole(lambda: Updated(how))
    mine = share(group, edges(), assignment(method, group.size()), mode=mode)
    x, a = (t.detach()[rows].requires_grad_() for t, rows in zip(rows(), (mine.src, mine.edge), strict=True))
    found = layer(x, mine.edge_index, a)
    backward(found, mine.dst, NUM_NODES)
    close(found, reference[0][mine.dst], "output")
    close(x.grad, reference[1][mine.src], "gradient of x")
    close(a.grad, reference[2][mine.edge], "gradient of edges")
    pyg_sar.sum_gradients(layer, group)
    for (parameter, p), q in zip(layer.named_parameters(), reference[3].parameters(), strict=True):
        close(p.grad, q.grad, f"gradient of {parameter}")
    assert any(str(s).startswith(UPDATES[how]) for s in STRATEGIES[layer].values()), strategy_of(layer)


@pytest.mark.parametrize(
    ("how", "way"), some(UPDATES, [(1, "random"), (2, "random"), (3, "random"), (1, "empty")], every=2)
)
def test_edges_are_updated_in_the_same_ways(pool, how, way):
    pool.run(3, compare_updates, how, *way)


def test_edges_that_are_updated_by_others_are_refused():
    x, a = rows()
    with pytest.raises(NotImplementedError, match=r"\[rank 0\] 'Updated' cannot run on a share of the graph"):
        run(convert(Updated("all").double()), 2, x, a)


def test_dropout_of_updated_edges():
    torch.manual_seed(0)
    layer, found = convert(Updated(dropout=0.4).double()), []
    for parts in (1, 2, 3):
        x, a = rows()
        out = run(layer, parts, x, a, seed=5)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, a, *layer.parameters()])))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            close(two, one, "dropout")
