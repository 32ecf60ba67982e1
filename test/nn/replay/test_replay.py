"""Layers that know nothing of sharded graphs, converted: they stream and compute what they do on the whole graph."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support import conv_zoo
from support.cases import some
from support.conv_zoo import CASES
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share
from torch_geometric.utils import scatter, softmax

import pyg_sar
from pyg_sar.nn import MessagePassing, convert, describe
from pyg_sar.nn.replay.choose import STRATEGIES
from pyg_sar.nn.replay.probe_graph import EDGES
from pyg_sar.nn.replay.trace import Trace
from pyg_sar.pieces import pieces


def check(problems):
    assert not any(problems), "\n".join(p for rank in problems for p in rank)


@pytest.mark.parametrize(
    ("size", "method"),
    [(2, "random"), *(pytest.param(n, m, marks=pytest.mark.grid)
                      for n, m in [(1, "all"), (2, "edgeless"), (3, "random"), (3, "empty"), (2, "contiguous")])],
)  # fmt: skip
def test_exact_or_refused(pool, size, method, device):
    names = [n for n in CASES if n not in conv_zoo.NOT_CONVERTED]
    names = [n for n in names if method in (*conv_zoo.converted(n).methods, "all")]
    check(pool.run(size, conv_zoo.check, names, method, True, device, timeout=200))


class Attention(gnn.MessagePassing):
    """What anybody may write: a message with a softmax."""

    def __init__(self, width=8, dropout=0.0):
        super().__init__(aggr="add", node_dim=0)
        self.lin, self.att, self.dropout = gnn.Linear(width, 6), torch.nn.Parameter(torch.randn(1, 2, 6)), dropout

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, 3), edge_attr=edge_attr).flatten(1)

    def message(self, x_i, x_j, edge_attr, index, ptr, size_i):
        score = (torch.cat([x_i, x_j], -1) * self.att).sum(-1) + edge_attr[:, :2]
        alpha = F.dropout(softmax(F.leaky_relu(score, 0.2), index, ptr, size_i), self.dropout, self.training)
        self.seen = alpha
        return x_j * alpha.unsqueeze(-1)


class EdgeNetwork(gnn.MessagePassing):
    """A message with a network on edge features."""

    def __init__(self):
        super().__init__(aggr=["mean", "std"])
        self.net = torch.nn.Sequential(torch.nn.Linear(11, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        self.out = torch.nn.Linear(8, 6)

    def forward(self, x, edge_index, edge_attr):
        return self.out(self.propagate(edge_index, x=x, edge_attr=edge_attr))

    def message(self, x_j, edge_attr):
        return self.net(torch.cat([x_j, edge_attr], -1))


class Range(gnn.Aggregation):
    """An aggregation of one's own, of which two reductions need another one."""

    def forward(self, x, index=None, ptr=None, dim_size=None, dim=-2):
        low = self.reduce(x, index, ptr, dim_size, dim, reduce="min")
        high = self.reduce(x, index, ptr, dim_size, dim, reduce="max")
        near = torch.exp(low.index_select(dim, index) - x)
        return torch.cat([high - low, self.reduce(near, index, ptr, dim_size, dim, reduce="mean")], -1)


class Spread(gnn.MessagePassing):
    def __init__(self):
        super().__init__(aggr=Range())
        self.lin = gnn.Linear(8, 6)

    def forward(self, x, edge_index, edge_attr):
        return self.lin(x) + self.propagate(edge_index, x=self.lin(x), w=edge_attr[:, :1])[:, 6:]

    def message(self, x_j, w):
        return x_j * w

    def update(self, out, x):
        return out + x.abs().sum(-1, keepdim=True)


class Streaming(MessagePassing, Spread):
    """Not converted, but a subclass of ours."""


LAYERS = {
    "softmax": (Attention, "streams by replay (softmax, in one pass)"),
    "network": (EdgeNetwork, "streams by replay"),
    "aggregation": (Spread, "streams by replay (in 2 passes)"),
    "subclass": (Streaming, "streams by replay (in 2 passes)"),
}


def compare(group, name, mode, size=NUM_NODES):
    make, strategy = LAYERS[name]
    torch.manual_seed(0)
    reference = make().double()
    layer = copy.deepcopy(reference)
    convert(layer)
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    x, a = torch.randn(NUM_NODES, 8).double(), torch.randn(edges().size(1), 3).double()
    one, other = [x.requires_grad_(), a.requires_grad_()], [x.detach()[mine.src], a.detach()[mine.edge]]
    expected = reference(one[0], edges(), one[1])
    backward(expected, torch.arange(NUM_NODES), NUM_NODES)
    out = layer(other[0].requires_grad_(), mine.edge_index, other[1].requires_grad_())
    backward(out, mine.dst, NUM_NODES)
    close(out, expected[mine.dst], "output")
    close(other[0].grad, x.grad[mine.src], "gradient of x")
    close(other[1].grad, a.grad[mine.edge], "gradient of edges")
    pyg_sar.sum_gradients(layer, group)
    for p, q in zip(layer.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, "gradient of a parameter")
    with torch.no_grad():
        close(layer.eval()(other[0], mine.edge_index, other[1]), expected[mine.dst], "evaluation")
    assert describe(layer).splitlines()[0].split(maxsplit=2)[2] == strategy, describe(layer)


@pytest.mark.parametrize(("name", "mode"), some(LAYERS, [1, 2, 3], every=2))
def test_layers_of_ones_own(pool, name, mode):
    pool.run(3, compare, name, mode)


def run(layer, parts, width=8, seed=0):
    torch.manual_seed(seed)
    x, a = torch.randn(NUM_NODES, width), torch.randn(edges().size(1), 3)
    return layer(x, edges() if parts == 0 else pyg_sar.shard(edges(), NUM_NODES, parts), a)


def strategy_of(layer):
    (found,) = STRATEGIES[layer].values()
    return str(found)


def test_messages_are_made_for_a_piece_of_a_block(monkeypatch):
    layer, seen = convert(Attention()), []
    run(layer, 3).sum().backward()
    init = Trace.__init__
    monkeypatch.setattr(
        Trace, "__init__", lambda self, row, *args, **kw: (seen.append(len(row)), init(self, row, *args, **kw))[1]
    )
    torch.manual_seed(0)
    run(layer, 3).sum().backward()
    graph = pyg_sar.shard(edges(), NUM_NODES, 3).graph
    counts = [piece.block.num_edges for block in graph.blocks for piece in pieces(graph, block)]
    # It is looked at again, whether it still is a softmax; the end runs on padding edges.
    assert seen == [EDGES, *counts, 97, *counts] and len(counts) > 3


def test_what_a_message_keeps_is_not_that_of_a_block():
    layer = convert(Attention())
    run(layer, 3)
    with pytest.raises(NotImplementedError, match=r"'Attention.seen' was made of messages"):
        layer.seen.mean()
    assert repr(copy.deepcopy(layer).seen).startswith("<")
    run(layer, 0)
    assert layer.seen.size(0) == edges().size(1)


def test_dropout_is_the_same_however_the_graph_is_cut():
    torch.manual_seed(0)
    layer, found = convert(Attention(dropout=0.4)), []
    run(layer, 2)  # infers how, and draws a seed
    for parts in (1, 2, 3):
        torch.manual_seed(0)
        x, a = torch.randn(NUM_NODES, 8, requires_grad=True), torch.randn(edges().size(1), 3, requires_grad=True)
        it = pyg_sar.shard(edges(), NUM_NODES, parts)
        it.graph.seeds.manual_seed(5)
        out = layer(x, it, a)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, a, *layer.parameters()])))
        again = layer(x, it, a)
        assert not torch.equal(out, again)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            close(two, one, "dropout", 1e-4)
    layer.eval()
    close(run(layer, 3), run(layer, 0), "evaluation", 1e-5)


def test_dropout_drops_as_many_as_it_says():
    class Drop(gnn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j):
            return F.dropout(x_j, 0.3)

    x = torch.ones(NUM_NODES, 500, requires_grad=True)
    it = pyg_sar.shard(edges(), NUM_NODES, 3)
    out = convert(Drop())(x, it)
    out.sum().backward()
    close(out.sum() / edges().size(1) / 500, torch.tensor(1.0), "share", 0.02)
    close(x.grad.sum(), out.sum(), "gradient", 1e-5)  # the same entries in backward


class Odd(gnn.MessagePassing):
    """A layer that cannot be replayed, for one reason or another."""

    def __init__(self, message, **kwargs):
        super().__init__(**kwargs)
        self.lin, self.norm, self.messages = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), message

    def forward(self, x, edge_index, edge_attr):
        self.hidden = self.lin(x).mean()
        return self.propagate(edge_index, x=x, a=edge_attr)

    def message(self, x_i, x_j, a, index):
        return self.messages(self, x_i, x_j, a, index)


ODD = {
    "a tensor with a gradient that is no argument": lambda self, x_i, x_j, a, index: x_j * self.hidden,
    "it calls 'sort' on 'index', which cannot be split by blocks": lambda self, x_i, x_j, a, index: x_j[
        index.sort().indices
    ],
    "it calls 'sum' across edges": lambda self, x_i, x_j, a, index: x_j * a.sum(),
    "differ, and on some destinations alone": lambda self, x_i, x_j, a, index: x_j * torch.einsum("ij->j", a)[:1],
    "its messages go through BatchNorm1d": lambda self, x_i, x_j, a, index: self.norm(x_j),
    "it reduces into something else": lambda self, x_i, x_j, a, index: (
        x_j + torch.ones(1000, 8).scatter_add_(0, index[:, None].expand_as(x_j), x_j)[index]
    ),
}


@pytest.mark.parametrize("reason", ODD)
def test_what_cannot_be_replayed_is_exact_or_refused(reason):
    torch.manual_seed(0)
    layer = convert(Odd(ODD[reason]))
    refused = any(word in reason for word in ("sort", "sum", "differ"))
    try:
        found = run(layer, 3)
    except NotImplementedError:
        found = None
    assert reason in strategy_of(layer)
    assert refused == (found is None)
    if found is not None:
        close(found, run(layer, 0), "output", 1e-5)


def test_random_numbers_are_not_drawn_again():
    layer = convert(Odd(lambda self, x_i, x_j, a, index: x_j * torch.rand_like(x_j)))
    run(layer, 3)
    assert strategy_of(layer) == "runs one-shot (it draws random numbers)"


def fail_on_one(group):
    def message(self, x_i, x_j, a, index):
        if group.rank() == 1:
            raise ValueError("no")
        return x_j

    layer = convert(Odd(message))
    mine = share(group, edges(), assignment("random", group.size()))
    try:
        layer(torch.randn(len(mine.src), 8), mine.edge_index, torch.randn(len(mine.edge), 3))
    except ValueError:
        assert group.rank() == 1
    return strategy_of(layer)


def test_workers_agree(pool):
    assert pool.run(3, fail_on_one) == [
        "runs one-shot (it does not stream on another worker)",
        "runs one-shot (on the probe graph it raises ValueError: no)",
        "runs one-shot (it does not stream on another worker)",
    ]


def less_on_one(group):
    """A weighted sum, to which the last worker adds something; it then needs no kernel, nor reductions in blocks."""
    found = []
    for last in (lambda x, index: x.tanh(), lambda x, index: x.median(0).values[None] + x):
        layer = convert(Odd(lambda self, x_i, x_j, a, index, last=last: last(x_j, index) if group.rank() else x_j))
        mine = share(group, edges(), assignment("random", group.size()))
        with contextlib.suppress(NotImplementedError):  # of a median of all edges
            layer(torch.randn(len(mine.src), 8), mine.edge_index, torch.randn(len(mine.edge), 3))
        found.append(strategy_of(layer))
    return found


def test_workers_take_the_best_that_all_have(pool):
    for found in pool.run(2, less_on_one):
        assert found[0] == "streams by replay" and found[1].startswith("refused")


def test_only_what_is_asked_for_is_verified(monkeypatch):
    """The strategies after the first that passes are verified where another worker lacks that one."""
    from pyg_sar.nn.replay import verify

    seen, difference = [], verify.difference
    monkeypatch.setattr(verify, "difference", lambda it, on: (seen.append(it.name), difference(it, on))[1])
    for layer in (gnn.SimpleConv(), Attention(), gnn.SimpleConv(aggr="median")):
        layer = convert(layer)
        run(layer, 3) if isinstance(layer, Attention) else layer(
            torch.randn(NUM_NODES, 8), pyg_sar.shard(edges(), NUM_NODES, 3)
        )
    assert seen == ["kernel", "softmax", "softmax", "chunks"]  # with features of edges on two problems


@pytest.mark.parametrize("aggr", ["LSTMAggregation", "GRUAggregation"])
def test_no_destination_has_more_than_one_edge(aggr):
    """PyG then pads to one edge, and a state that walked on over padding would be another one."""
    torch.manual_seed(0)
    layer, x = gnn.SimpleConv(getattr(gnn.aggr, aggr)(2, 3)), torch.randn(5, 2)
    edge_index = torch.stack([torch.arange(4), torch.arange(1, 5)])
    close(convert(copy.deepcopy(layer))(x, pyg_sar.shard(edge_index, 5, 2)), layer(x, edge_index), "output", 1e-6)


def test_medians_where_the_first_node_has_no_edges():
    """PyG's own fail on such a graph, in what order rows of a part may be."""
    x, edge_index = torch.arange(8.0).view(4, 2), torch.tensor([[1, 2, 0, 3], [0, 0, 3, 3]])
    order = torch.tensor([1, 0, 2, 3])  # who stands at each place, and where each stands
    layer = convert(gnn.SAGEConv(2, 3, aggr="median"))
    for parts in (1, 2):
        found = layer(x[order], pyg_sar.shard(order[edge_index], 4, parts))
        close(found[order], layer(x, edge_index), "output", 1e-6)


def test_copies_and_pickles():
    torch.manual_seed(0)
    layer = convert(EdgeNetwork())
    expected = run(layer, 3)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer) and other.net is not layer.net
        close(run(other, 3), expected, "output", 1e-6)
        close(run(other, 0), expected, "output", 1e-5)


def test_parameters_that_are_not_the_layers_own():
    outside = torch.nn.Parameter(torch.randn(8))
    layer, grads = convert(Odd(lambda self, x_i, x_j, a, index: x_j * outside)), []
    for parts in (3, 0):
        outside.grad = None
        run(layer, parts).square().sum().backward()
        grads.append(outside.grad)
    assert strategy_of(layer) == "streams by replay"
    close(*grads, "gradient", 1e-4)


def test_autocast():
    torch.manual_seed(0)
    layer, found = convert(EdgeNetwork()), []
    for parts in (3, 0):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = run(layer, parts)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        found.append([out, *(p.grad for p in layer.parameters())])
    for one, other in zip(*found, strict=True):
        close(one.float(), other.float(), "autocast", 0.05)
    assert strategy_of(layer) == "streams by replay"


def test_checkpoint_and_frozen_parameters():
    torch.manual_seed(0)
    layer = convert(EdgeNetwork())
    layer.out.requires_grad_(False)
    layer.net[0].weight.requires_grad_(False)
    grads = []
    for wrap in (False, True):
        layer.zero_grad()
        torch.manual_seed(0)
        x, a = torch.randn(NUM_NODES, 8, requires_grad=True), torch.randn(edges().size(1), 3)
        it = pyg_sar.shard(edges(), NUM_NODES, 2)
        out = torch.utils.checkpoint.checkpoint(layer, x, it, a, use_reentrant=False) if wrap else layer(x, it, a)
        out.square().sum().backward()
        grads.append([x.grad, layer.net[0].bias.grad])
        assert layer.net[0].weight.grad is None
    for one, other in zip(*grads, strict=True):
        close(one, other, "checkpoint", 1e-6)


class Unread(gnn.MessagePassing):
    """Of rows of sources, of destinations and of edges, messages read some, or others later."""

    def __init__(self, reads, **kwargs):
        super().__init__(**{"aggr": "sum", **kwargs})
        self.reads = reads

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, x_i, edge_attr):
        return sum((x_j, x_i, edge_attr)[k].tanh() for k in self.reads)


def grads(layer, edge_index, dst, edge, x):
    """Which inputs have a gradient: sources, destinations, edges."""
    given = [t.clone().requires_grad_() for t in (x, x[dst] + 1, x[edge % NUM_NODES])]
    layer((given[0], given[1]), edge_index, given[2]).square().sum().backward()
    return [t.grad is not None for t in given]


def check_unread(group):
    mine = share(group, edges(), assignment("empty", group.size()), dst_part=assignment("empty", group.size()))
    for kwargs in ({}, {"aggr": "softmax"}, {"aggr": "median"}):
        for reads in ([0], [0, 1], [0, 2], [1], [2]):
            layer, x = convert(Unread(reads, **kwargs)), torch.randn(mine.src.numel(), 8)
            found = grads(layer, mine.edge_index, torch.arange(mine.dst.numel()), mine.edge, x)
            assert found == [k in reads for k in range(3)], (kwargs, reads, found)


def test_what_is_not_read_has_no_gradient(pool):
    """As in PyG, where it has none; zeros would say that the loss depends on it."""
    x, edge = torch.randn(NUM_NODES, 8), torch.arange(edges().size(1))
    assert grads(Unread([0]), edges(), slice(None), edge, x) == [True, False, False]
    pool.run(2, check_unread)


def test_edge_features_that_attention_ignores_have_no_gradient():
    layer = convert(gnn.GATConv(8, 4, flow="target_to_source"))
    x, attr = torch.randn(NUM_NODES, 8, requires_grad=True), torch.randn(edges().size(1), 3, requires_grad=True)
    layer(x, pyg_sar.shard(edges(), NUM_NODES, 2), attr).sum().backward()
    assert attr.grad is None and x.grad is not None


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_what_is_read_later_is_not_left_out(aggr, reads):
    layer, x = convert(Unread([0], aggr=aggr)), torch.randn(NUM_NODES, 8)
    it, edge = pyg_sar.shard(edges(), (NUM_NODES, NUM_NODES), 2), torch.arange(edges().size(1))
    grads(layer, it, slice(None), edge, x)
    layer.reads = [0, reads]
    with pytest.raises(RuntimeError, match=r"did not read when it was first called.* a new layer"):
        grads(layer, it, slice(None), edge, x)


class Gated(gnn.MessagePassing):
    """Attention and what comes beside it, which does nothing at first."""

    def __init__(self, beside):
        super().__init__(aggr="sum")
        self.lin, self.gamma, self.beside = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(1)), beside
        self.step = 0

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=self.lin(x), step=self.step)

    def message(self, x_i, x_j, index, size_i, step):
        shares = softmax((x_i * x_j).sum(-1, keepdim=True), index, num_nodes=size_i)
        return self.beside(self, shares, step) * x_j


BESIDE = {
    "a weight": lambda self, shares, step: shares + self.gamma,
    "a threshold": lambda self, shares, step: (shares - self.gamma).relu(),
    "later steps": lambda self, shares, step: torch.where(shares > 0.2, shares, 0.0) if step > 1 else shares,
    "an attribute": lambda self, shares, step: shares.sqrt() if self.step > 1 else shares,
}


@pytest.mark.parametrize("beside", BESIDE)
def test_shares_of_a_softmax_that_are_changed_later(beside):
    torch.manual_seed(0)
    layer = Gated(BESIDE[beside])
    converted = convert(copy.deepcopy(layer))
    for step in range(4):
        for it in (layer, converted):
            it.step = step
            it.gamma.data.fill_(0.1 * step)
        found, expected = run(converted, 3), run(layer, 0)
        close(found, expected, f"step {step}", 1e-5)
        for one, other in zip(*(torch.autograd.grad(out.square().sum(), tuple(it.parameters()), allow_unused=True)
                                for out, it in ((found, converted), (expected, layer))), strict=True):  # fmt: skip
            assert (one is None) == (other is None)
            if one is not None:
                close(one, other, f"gradient, step {step}", 1e-4)


class Centered(gnn.MessagePassing):
    """Two reductions, of which the second one may need the first."""

    def __init__(self):
        super().__init__()
        self.center = False

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs, index, dim_size):
        total = scatter(inputs, index, 0, dim_size, "sum")
        return total + scatter((inputs - total[index] * self.center if self.center else inputs).tanh(), index, 0,
                               dim_size, "sum")  # fmt: skip


def test_reductions_that_need_each_other_later():
    layer = convert(Centered())
    close(run(layer, 3), run(layer, 0), "at first", 1e-5)
    layer.center = True
    with pytest.raises(RuntimeError, match=r"'Centered' reduces something else than when it was first called"):
        run(layer, 3)


class Mixed(gnn.MessagePassing):
    """What it adds to each node at its end is of all nodes, once its weight is not zero."""

    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j.tanh()

    def update(self, out):
        return out + self.gamma * (out - out.mean(0))


def test_nodes_that_are_mixed_later():
    with pytest.raises(NotImplementedError, match=r"'Mixed' cannot run on a share of the graph"):
        run(convert(Mixed()), 3)


class Turned(gnn.MessagePassing):
    """Reads an aggregate on its side, in another one."""

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x)

    def aggregate(self, inputs, index, dim_size):
        total = scatter(inputs.tanh(), index, 0, dim_size, "sum").T
        return scatter(inputs - total.T[index], index, 0, dim_size, "max")


def test_what_is_turned_is_unknown_still():
    layer = convert(Turned())
    close(run(layer, 3), run(layer, 0), "output", 1e-5)
    assert strategy_of(layer) == "streams by replay (in 2 passes)"


def test_layers_stream_after_an_explanation():
    layers = [convert(gnn.GINConv(torch.nn.Linear(8, 8))), convert(gnn.EdgeConv(torch.nn.Linear(16, 8)))]
    it = pyg_sar.shard(edges(), NUM_NODES, 3)
    for layer in layers:
        for explain in (True, False):
            layer.explain = explain
        with pyg_sar.record_traffic(it) as told:
            layer(torch.randn(NUM_NODES, 8, requires_grad=True), it).sum().backward()
        assert [one.case for one in told] in ([1], [2])


def test_torchs_default_device_does_not_matter():
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        layer, x, edge_index = convert(Attention()), torch.randn(NUM_NODES, 8), pyg_sar.shard(edges(), NUM_NODES, 2)
        edge_attr = torch.randn(edge_index.size(1), 3)
        with torch.device(device):
            found.append(layer(x, edge_index, edge_attr))
        assert "streams" in describe(layer)
    close(*found, "output")
