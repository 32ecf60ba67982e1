"""Layers that look as if they could be streamed, on the probe graph or at their first call, and cannot."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, close, edges, share
from torch_geometric.utils import scatter, softmax

import pyg_sar
from pyg_sar.nn import convert, describe
from pyg_sar.nn.replay.choose import STRATEGIES
from pyg_sar.nn.replay.probe_graph import EDGES

E = edges().size(1)


class Layer(gnn.MessagePassing):
    """Sums up what a function makes of messages."""

    def __init__(self, function, update=None, aggr="sum"):
        super().__init__(aggr=aggr)
        self.function, self.after = function, update
        self.lin, self.drop = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def forward(self, x, edge_index, w=None, c=None):
        return self.propagate(edge_index, x=x, w=w, c=c)

    def message(self, x_j, w, c):
        return self.function(self, x_j, w, c)

    def update(self, out):
        return out if self.after is None else self.after(self, out)


def rows(seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(NUM_NODES, 4, generator=g, dtype=torch.float64)).requires_grad_()


def weights(kind="normal"):
    g = torch.Generator().manual_seed(1)
    w = torch.randn(E, generator=g, dtype=torch.float64)
    return {"normal": w, "mask": torch.arange(E) < 30, "types": torch.arange(E) // 100}[kind]


def same(layer, *args, x=None, parts=3):
    """Compare with the layer's own code on an ordinary ``edge_index``."""
    x = rows() if x is None else x
    found = layer(x, pyg_sar.shard(edges(), NUM_NODES, parts), *args)
    expected = layer(x, edges(), *args)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    wanted = [x, *(p for p in layer.parameters() if p.requires_grad)]
    one, other = (torch.autograd.grad(out.sum(), wanted, allow_unused=True) for out in (found, expected))
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


def layer(function, update=None, **kwargs):
    torch.manual_seed(0)
    return convert(Layer(function, update, **kwargs).double())


UNNOTICED = {
    "weights made positive": (lambda self, x, w, c: x * w.relu().view(-1, 1), "normal", 1),
    "a mask": (lambda self, x, w, c: x * w.view(-1, 1), "mask", 1),
    "one of many types": (lambda self, x, w, c: x * (w == 0).view(-1, 1), "types", 1),
    "values clamped": (lambda self, x, w, c: x.clamp(-10, 10), "normal", 20),
    "a sum of all edges": (lambda self, x, w, c: x * (w / w.abs().sum()).view(-1, 1), "normal", 1),
    "a decision": (lambda self, x, w, c: x * (w - w.min() if w.min() < 0 else w).view(-1, 1), "normal", 1),
}


@pytest.mark.parametrize("name", UNNOTICED)
def test_what_changes_nothing_on_the_probe_graph(name):
    function, kind, scale = UNNOTICED[name]
    it = layer(function)
    if name in ("a sum of all edges", "a decision"):
        with pytest.raises(NotImplementedError, match="'Layer' cannot run on a share of the graph: it calls"):
            same(it, weights(kind))
    else:
        same(it, weights(kind), x=rows(scale=scale))


def test_what_changes_negative_weights_alone():
    def function(self, x, w, c):
        order = torch.arange(len(x), dtype=x.dtype).view(-1, 1)
        return torch.where(w.view(-1, 1) > 0, x, x * order)

    with pytest.raises(NotImplementedError, match="on some destinations alone its messages would differ"):
        same(layer(function), weights())


def test_updates():
    same(layer(lambda self, x, w, c: x, lambda self, out: out.clamp(-5, 5)), x=rows(scale=20))
    for update in (lambda self, out: self.drop(out), lambda self, out: out @ F.dropout(self.lin.weight[:1], 0.5).t()):
        it = layer(lambda self, x, w, c: x, update)
        outs = torch.cat([it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3)) for _ in range(4)], 1)
        assert len({tuple(col) for col in outs.t().tolist()}) == outs.size(1)  # drops, and every time others


def test_dropout_in_place():
    it = layer(lambda self, x, w, c: F.dropout(x, 0.5, self.training, inplace=True))
    out = it(torch.ones(NUM_NODES, 50, dtype=torch.float64), pyg_sar.shard(edges(), NUM_NODES, 3))
    degree = torch.bincount(edges()[1], minlength=NUM_NODES)
    assert (out != degree.unsqueeze(1)).double().mean() > 0.5


def test_arguments_that_change():
    it = layer(lambda self, x, w, c: x * c)
    same(it, None, 1.0), same(it, None, 2.0), same(it, None, True)
    it = layer(lambda self, x, w, c: (x @ c.t()).tanh())
    for n in (1, 4, 3):
        same(it, None, torch.randn(n, 4, dtype=torch.float64))
    for parts in (1, 3):
        it = layer(lambda self, x, w, c: (x * w.view(-1, 1)).tanh())
        for n in (1, E, 1):
            same(it, torch.rand(n, dtype=torch.float64), parts=parts)


def test_layers_that_change():
    it = layer(lambda self, x, w, c: x if self.first else x.sigmoid())
    for it.first in (True, False):
        same(it)
    it = layer(lambda self, x, w, c: x * self.scale)
    it.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    same(it)
    it.scale.fill_(3)
    same(it)
    it.aggr_module = gnn.MaxAggregation()
    same(it)
    it = layer(lambda self, x, w, c: self.drop(x)).eval()
    same(it)
    it.drop.train()  # as for Monte Carlo dropout
    graph = pyg_sar.shard(edges(), NUM_NODES, 3)
    assert not torch.equal(it(rows(), graph), it(rows(), graph))
    it = layer(lambda self, x, w, c: F.dropout(x, self.p))
    it.p = 0.0
    same(it)
    it.p = 0.5
    assert not torch.equal(it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3)), it(rows(), edges()))


class Hop(gnn.MessagePassing):
    """Messages that are rows at first, and later what ``change`` makes of them."""

    def __init__(self, change, **options):
        super().__init__(aggr="sum", **options)
        self.change = change

    def forward(self, x, edge_index, hop):
        return self.propagate(edge_index, x=x, hop=hop)

    def message(self, x_j, index, size_i, hop):
        return self.change(x_j, index, size_i) if hop else x_j


CHANGES = {
    "centred": lambda x, index, size: x - 0.5 * scatter(x, index, 0, size, "mean")[index],
    "sigmoid": lambda x, index, size: x.sigmoid(),
}


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("how", CHANGES)
def test_rows_that_come_to_be_changed(how, parts, flow):
    """A number tells the messages, which is no part of the kind of a call."""
    it = convert(Hop(CHANGES[how], flow=flow))
    same(it, 0, parts=parts)
    same(it, 1, parts=parts)


def test_a_softmax_that_is_none_any_more():
    """On one piece, where what is dropped makes it run by blocks."""

    class Attention(Layer):
        def message(self, x_j, x_i, index, size_i):
            a = F.dropout(softmax((x_j * x_i).sum(-1), index, num_nodes=size_i), 1e-12)
            return (a * a if self.squared else a).unsqueeze(-1) * x_j

    it = convert(Attention(None).double())
    for it.squared in (False, True):
        same(it, parts=1)


@pytest.mark.parametrize("heads", [3, 6, 11, EDGES])
def test_a_mean_over_as_many_heads_as_a_block_has_edges(heads):
    lins = [torch.randn(4, 4, dtype=torch.float64) for _ in range(heads)]
    it = layer(lambda self, x, w, c: torch.stack([(x @ lin).tanh() for lin in lins]).mean(0))
    same(it)
    assert describe(it).endswith("streams by replay")


def test_autocast_and_then_not():
    it, graph = layer(lambda self, x, w, c: self.lin(x).tanh()).float(), pyg_sar.shard(edges(), NUM_NODES, 3)
    x = rows().float()
    with torch.autocast("cpu", torch.bfloat16):
        it(x, graph)
    close(it(x, graph), it(x, edges()), "without autocast", 1e-5)


def test_what_messages_leave_behind():
    def count(self, x, w, c):
        self.n += x.size(0)
        return x

    it = layer(count)
    it.register_buffer("n", torch.zeros(1))
    it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    assert it.n == E
    it = layer(lambda self, x, w, c: (self.kept.append(x.sum()), x)[1])
    it.kept = []
    with pytest.raises(NotImplementedError, match="it calls 'sum' across edges"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))


def test_hooks_of_parameters_see_one_gradient():
    it = layer(lambda self, x, w, c: self.lin(x).tanh())
    same(it)
    seen = []
    it.lin.weight.register_hook(lambda g: (seen.append(g), g * 2)[1])
    same(it)
    assert len(seen) == 2


def test_tensors_that_were_not_there_before():
    it = layer(lambda self, x, w, c: (x * self.gain).tanh())
    outer = torch.ones(1, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        it.gain = outer * 2
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    it.gain = outer * 2
    with pytest.raises(RuntimeError, match=r"read a tensor with a gradient that they did not .*Pass it to 'propagate'"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3)).sum().backward()


def test_masked_scores():
    class Masked(gnn.MessagePassing):
        def forward(self, x, edge_index, mask):
            return self.propagate(edge_index, x=x, mask=mask)

        def message(self, x_j, mask, index, size_i):
            return x_j * softmax(x_j.sum(-1) + mask, index, num_nodes=size_i).unsqueeze(-1)

    first = torch.zeros(NUM_NODES, dtype=torch.long)
    first[edges()[1]] = torch.arange(E)  # one edge of every destination counts
    mask = torch.where((torch.arange(E) % 3 == 0) | torch.isin(torch.arange(E), first), 0.0, -torch.inf).double()
    it = convert(Masked())
    same(it, mask)
    assert "softmax" in str(*STRATEGIES[it].values())


def test_not_quite_a_softmax():
    class Sparse(gnn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_j, index, size_i):
            alpha = softmax(x_j.sum(-1), index, num_nodes=size_i)
            return x_j * alpha.masked_fill(alpha < 1e-4, 0).unsqueeze(-1)

    it = convert(Sparse())
    same(it, x=rows(scale=5))
    assert str(*STRATEGIES[it].values()) == "streams by replay (in 3 passes)"


def test_not_a_number():
    x = rows().detach()
    x[3, 1] = torch.nan
    it = layer(lambda self, x, w, c: x * 2, aggr="max")
    torch.testing.assert_close(it(x, pyg_sar.shard(edges(), NUM_NODES, 3)), it(x, edges()), equal_nan=True)


class Half(gnn.MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def propagate(self, edge_index, x):
        return super().propagate(edge_index, x=x) / 2


def test_a_propagate_of_ones_own_is_kept():
    it = convert(Half())
    assert type(it) is Half and "a 'propagate' of its own" in pyg_sar.nn.describe(it)
    close(it(rows(), edges()), Half()(rows(), edges()), "ordinary")
    close(it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3)), Half()(rows(), edges()), "sharded")


def test_a_patched_message():
    it = convert(gnn.SAGEConv(4, 4).double())
    it.message = lambda x_j: 2 * x_j
    same(it)


def test_a_first_call_under_checkpoint():
    it = layer(lambda self, x, w, c: self.lin(x).tanh())
    x, graph = rows(), pyg_sar.shard(edges(), NUM_NODES, 3)
    torch.utils.checkpoint.checkpoint(it, x, graph, use_reentrant=False).sum().backward()
    (expected,) = torch.autograd.grad(it(x, edges()).sum(), [x])
    close(x.grad, expected, "gradient")


def test_nothing_lives_on():
    it, graph = layer(lambda self, x, w, c: self.lin(x).tanh()), pyg_sar.shard(edges(), NUM_NODES, 3)
    it(rows(), graph)
    gc.collect()
    gc.disable()
    try:
        x = rows()
        out = it(x, graph)
        out.sum().backward()
        seen = [weakref.ref(x), weakref.ref(out), weakref.ref(it)]
        del x, out
        assert [r() is None for r in seen] == [True, True, False]
    finally:
        gc.enable()
    assert it in STRATEGIES
    del it
    gc.collect()
    assert seen[2]() is None


def test_inputs_do_not_outlive_backward():
    graph, seen = pyg_sar.shard(edges(), NUM_NODES, 3), []
    for aggr in ("sum", "median"):
        it = layer(lambda self, x, w, c: self.lin(x).tanh(), aggr=aggr)
        it(rows(), graph)
        x = rows().tanh()
        seen.append(weakref.ref(x))
        loss = it(x, graph).square().sum()
        del x
        loss.backward()
    gc.collect()
    assert [r() for r in seen] == [None, None]


def test_messages_that_come_to_draw_random_numbers():
    for aggr in ("sum", "median"):
        it = layer(lambda self, x, w, c: (x + c * torch.randn_like(x) if c > 0 else x).tanh(), aggr=aggr)
        graph = pyg_sar.shard(edges(), NUM_NODES, 3)
        it(rows(), graph, None, 0.0)
        with pytest.raises(RuntimeError, match="Messages of 'Layer' draw random numbers, which they did not when"):
            it(rows(), graph, None, 0.1)


@pytest.mark.parametrize("aggr", ["sum", pytest.param("median", marks=pytest.mark.grid)])
def test_parameters_with_as_many_rows_as_edges(aggr, monkeypatch):
    """Of a piece, or a chunk; what is made of them alone is none of the edges either."""
    monkeypatch.setattr("pyg_sar.pieces.EDGES", 50)
    for size in range(3, 70):
        if size <= EDGES + 1:  # of the probe graph; how it runs is not inferred again for larger ones
            it = layer(lambda self, x, w, c: (x * (2 * self.mix).softmax(0).max() * self.mix.norm()).tanh(), aggr=aggr)
        it.mix = torch.nn.Parameter(torch.randn(size, dtype=torch.float64))
        same(it)
        assert "refused" not in str(*STRATEGIES[it].values())


@pytest.mark.parametrize("after", [False, True])
def test_numbers_that_are_none_on_the_probe_graph(after):
    """Logarithms of random numbers, of which the mean is none."""
    update = (lambda self, out: out - out.mean(0)) if after else None
    it = layer(lambda self, x, w, c: x.log() + x.flip(-1).log(), update)
    x = rows().detach().abs().add(0.1).requires_grad_()
    if not after:
        same(it, x=x)
        return
    with pytest.raises(NotImplementedError, match="its output on a worker's share would differ"):
        it(x, pyg_sar.shard(edges(), NUM_NODES, 3))


@pytest.mark.parametrize(
    "make", [lambda: gnn.GeneralConv((-1, -1), 4), lambda: gnn.GINEConv(gnn.Linear(4, 4), edge_dim=-1)]
)
def test_weights_that_are_made_at_the_first_call(make):
    """In the order of PyG, once; afterwards the layer streams."""
    x, attr, found = torch.randn(NUM_NODES, 4), torch.randn(E, 3), []
    for convert_it in (False, True):
        torch.manual_seed(0)
        it = convert(make()) if convert_it else make()
        edge = {"edge_attr": attr} if isinstance(it, gnn.GINEConv) else {}
        graph = pyg_sar.shard(edges(), NUM_NODES, 3) if convert_it else edges()
        found.append([it((x, x), graph, **edge) for _ in range(2)] + [torch.rand(1)])
    torch.testing.assert_close(found[1], found[0])
    assert any("streams" in str(strategy) for strategy in STRATEGIES[it].values())


@pytest.mark.parametrize("norm", ["BatchNorm1d in evaluation", "LayerNorm by node", "BatchNorm1d"])
def test_normalisations_in_messages(norm):
    inner = {"LayerNorm by node": lambda: gnn.LayerNorm(4, mode="node")}.get(norm, lambda: torch.nn.BatchNorm1d(4))()
    it = convert(gnn.EdgeConv(torch.nn.Sequential(torch.nn.Linear(8, 4), inner)).double())
    it = it.eval() if "evaluation" in norm else it
    it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    assert str(*STRATEGIES[it].values()).startswith("runs one-shot" if norm == "BatchNorm1d" else "streams")
    if norm != "BatchNorm1d":
        same(it)


def alone_and_together(group):
    """One worker knows how the layer runs on a graph of its own, and nothing of how it does with others."""
    mine = share(group, edges(), torch.arange(NUM_NODES) % 2)
    for it in (convert(gnn.SimpleConv("sum")), layer(lambda self, x, w, c: self.lin(x).tanh())):
        x = torch.randn(NUM_NODES, 4, dtype=torch.float64)
        if group.rank() == 0:
            it(x, pyg_sar.shard(edges(), NUM_NODES, 2))
        it(x[mine.src], mine.edge_index)


def test_what_one_worker_knows_alone(pool):
    pool.run(2, alone_and_together)


def drop_edges(group):
    """One worker has no in-edges, so that its edges are the same in every step."""
    mine = share(group, edges(), (edges()[1].bincount(minlength=NUM_NODES) == 0).long())
    x = torch.randn(len(mine.src), 4)
    mine.edge_index.cache_features(x)
    it = convert(gnn.SimpleConv("sum"))
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        it(x, mine.edge_index[:, torch.rand(mine.edge_index.size(1), generator=g) > 0.3])


def test_kept_aggregates_are_no_matter_of_one_worker(pool):
    pool.run(2, drop_edges)


def test_a_layer_whose_reductions_change():
    it = layer(lambda self, x, w, c: (x @ self.map).tanh())
    it.map = torch.ones(4, 2, dtype=torch.float64)
    same(it)
    it.map = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="'Layer' reduces something else than when it was first called"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))


class State(gnn.MessagePassing):
    """Messages that depend on what the layer is like when it is called."""

    def __init__(self, aggr):
        super().__init__(aggr=aggr)
        self.lin, self.drop, self.more = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), {"scale": 1.0}
        self.register_buffer("gain", torch.ones(4))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x, edge_index, times=1.0):
        self.times = times
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        out = torch.tanh(self.lin(x_j) * self.times * self.gain * self.frozen * self.more["scale"])
        return self.drop(out) if self.training else out


def two_calls(it, edge_index, x):
    return it(x, edge_index, 1.0) + it(x, edge_index, 3.0)


def mode_after(it, edge_index, x):
    out = it.train()(x, edge_index)
    it.eval()
    return out


def buffer_after(it, edge_index, x):
    out = it(x, edge_index)
    it.gain = it.gain * 3
    return out


def dictionary_after(it, edge_index, x):
    out = it(x, edge_index)
    it.more["scale"] = 5.0
    return out


def weights_of_others(it, edge_index, x):
    fast = {name: (p * 2).detach().requires_grad_() for name, p in it.lin.named_parameters(prefix="lin")}
    return torch.func.functional_call(it, fast, (x, edge_index)) + sum(p.sum() for p in it.lin.parameters())


@pytest.mark.parametrize("run", [two_calls, mode_after, buffer_after, dictionary_after, weights_of_others])
@pytest.mark.parametrize("aggr", ["sum", "softmax", "median"])
def test_backward_runs_the_layer_as_it_was(run, aggr):
    found = []
    for parts in (0, 1, 3):
        torch.manual_seed(0)
        it, x = convert(State(aggr).double()).eval(), rows()
        if run is mode_after:
            it.drop.p = 0.0  # masks are others on an ordinary edge_index
            it.message = lambda x_j, it=it: State.message(it, x_j) * (2 if it.training else 1)
        out = run(it, edges() if parts == 0 else pyg_sar.shard(edges(), NUM_NODES, parts), x)
        found.append((out, *torch.autograd.grad(out.square().sum(), [x, *it.lin.parameters()])))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            close(two, one, "as it was", 1e-9)


def test_state_does_not_keep_what_was_computed():
    it, graph, alive = convert(State("sum").double()), pyg_sar.shard(edges(), NUM_NODES, 3), []
    for _ in range(4):
        it.last = it(rows(), graph)
        alive.append(weakref.ref(it.last))
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, False, True]


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_a_frozen_parameter_that_changes_before_backward(aggr):
    it = convert(State(aggr).double())
    out = it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    with torch.no_grad():
        it.frozen.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_a_first_call_touches_no_hook(aggr):
    it, seen = convert(State(aggr).double()), []
    it.lin.weight.register_hook(lambda g: seen.append(1))
    with torch.no_grad():
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    assert not seen
    it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3)).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["EdgeConv", "NNConv"])
def test_parameters_that_were_computed(name, frozen):
    """As 'torch.func.functional_call' gives them to a layer for one call, in another way than the first time."""
    if name == "EdgeConv":
        it, more = convert(gnn.EdgeConv(torch.nn.Linear(8, 3))).double(), ()
    else:
        it, more = convert(gnn.NNConv(4, 3, torch.nn.Linear(1, 12))).double(), (weights().view(-1, 1),)
    graph = pyg_sar.shard(edges(), NUM_NODES, 3)
    it(rows(), graph, *more).sum().backward()
    it.requires_grad_(not frozen)
    results = []
    for edge_index in (edges(), graph):
        x, z = rows(), torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        given = {key: p * z for key, p in it.named_parameters()}
        out = torch.func.functional_call(it, given, (x, edge_index, *more))
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, z])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [lambda: gnn.EdgeConv(torch.nn.Linear(8, 3)), lambda: gnn.GCNConv(4, 3)])
def test_what_messages_know_nothing_of_is_refused(make):
    it, graph = convert(make()).double(), pyg_sar.shard(edges(), NUM_NODES, 3)
    told = pytest.raises(NotImplementedError, match=r"'torch.vmap' and .* go through layer '\w+Conv' on a sharded")
    with torch.autograd.forward_ad.dual_level(), told:
        it(rows(), graph)
    with told:
        torch.vmap(lambda x: it(x, graph))(torch.stack([rows(), rows(1)]))
    with told:
        torch.func.grad(lambda x: it(x, graph).sum())(rows())


class Rare(gnn.MessagePassing):
    """A parameter that few messages read, and another one that makes some of them wider."""

    def __init__(self, aggr, wide):
        super().__init__(aggr=aggr)
        self.lins, self.wide = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)), wide

    def forward(self, x, edge_index, t):
        return self.propagate(edge_index, x=x, t=t)

    def message(self, x_j, t):
        if self.wide:
            return x_j[:, :1] * (F.one_hot(t) + 1)
        out = torch.zeros_like(x_j)
        for k, lin in enumerate(self.lins):
            if (t == k).any():
                out = torch.where((t == k).view(-1, 1), lin(x_j), out)
        return out


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_parameters_that_few_messages_read(monkeypatch, aggr):
    """Neither the probe graph nor the first chunk shows what a rare type of edges does."""
    monkeypatch.setattr("pyg_sar.nn.replay.chunks.CELLS", 20)
    t = torch.zeros(E, dtype=torch.long)
    it = convert(Rare(aggr, False).double())
    same(it, t)
    t[edges()[1] == torch.bincount(edges()[1], minlength=NUM_NODES).argmax()] = 1
    same(it, t)
    same(it, torch.zeros(E, dtype=torch.long))


def test_chunks_that_differ_from_each_other(monkeypatch):
    monkeypatch.setattr("pyg_sar.nn.replay.chunks.CELLS", 20)
    t = torch.zeros(E, dtype=torch.long)
    it = convert(Rare("median", True).double())
    it(rows(), pyg_sar.shard(edges(), NUM_NODES, 2), t)
    t[edges()[1] == torch.bincount(edges()[1], minlength=NUM_NODES).argmax()] = 2
    with pytest.raises(RuntimeError, match="All must be alike"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 2), t)


class Updated(gnn.MessagePassing):
    """Says of edges what a function makes of their sources, destinations' numbers and types."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x, edge_index, t):
        return self.edge_updater(edge_index, x=x, t=t)

    def edge_update(self, x_j, index, t):
        return self.make(x_j, index, t)


def test_updated_edges_that_differ_from_each_other():
    """One block has a type that the other has not."""
    it = convert(Updated(lambda x_j, index, t: x_j[:, :1] * (F.one_hot(t) + 1)).double())
    sharded, t = pyg_sar.shard(edges(), NUM_NODES, 2), torch.zeros(E, dtype=torch.long)
    it(rows(), sharded, t)
    t[sharded.graph.blocks[1].edges] = 2
    with pytest.raises(RuntimeError, match="All must be alike"):
        it(rows(), sharded, t)


def test_updated_edges_that_must_be_sorted():
    """The probe graph's are not, unlike those of a block."""

    def make(x_j, index, t):
        if (index.diff() < 0).any():
            raise ValueError("not sorted")
        return x_j * (t + 1).view(-1, 1)

    it, x, t = convert(Updated(make).double()), rows(), torch.arange(E)
    torch.testing.assert_close(it(x, pyg_sar.shard(edges(), NUM_NODES, 2), t), x[edges()[0]] * (t + 1).view(-1, 1))


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_messages_that_come_to_mix_edges(aggr):
    it = layer(lambda self, x, w, c: x / x.abs().max().clamp(min=100.0), aggr=aggr)
    with pytest.raises(NotImplementedError, match="it calls 'max' across edges"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))


UPDATES_OF_ALL = {
    "count": lambda self, out: out / out.size(0),
    "mean": lambda self, out: out - out.mean(0),
    "largest": lambda self, out: out / (1 + out.abs().max()),
}


@pytest.mark.parametrize("aggr", ["sum", "median"])
@pytest.mark.parametrize("name", UPDATES_OF_ALL)
def test_an_update_that_mixes_nodes_is_refused(name, aggr):
    it = layer(lambda self, x, w, c: x.tanh(), UPDATES_OF_ALL[name], aggr=aggr)
    with pytest.raises(NotImplementedError, match="its output on a worker's share would differ"):
        it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))


class Sized(Layer):
    def message(self, x_j, size_i, dim_size):
        return torch.tanh(x_j / size_i) / dim_size


def test_messages_that_count_nodes_are_refused():
    with pytest.raises(NotImplementedError, match="its output on a worker's share would differ"):
        convert(Sized(None).double())(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_code_that_asks_for_the_flow(aggr):
    it = layer(lambda self, x, w, c: x if self.flow == "source_to_target" else x.tanh(), aggr=aggr)
    it.flow = "target_to_source"
    same(it, parts=2)


def test_padding_edges_are_edges_of_the_graph(monkeypatch):
    """Nodes without in-edges fill chunks of their own, in front of which stands a padding edge."""
    monkeypatch.setattr("pyg_sar.nn.replay.chunks.CELLS", 4)

    class Direction(gnn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return (x_j - x_i) / (x_j - x_i).norm(dim=-1, keepdim=True)  # infinite for a self-loop

    it, x = convert(Direction(aggr="mul").double()), torch.randn(20, 2, requires_grad=True).double()
    edge_index = torch.tensor([[0, 1, 2, 3], [10, 10, 11, 11]])
    one, other = (
        torch.autograd.grad(it(x, e)[[10, 11]].sum(), x)[0] for e in (edge_index, pyg_sar.shard(edge_index, 20, 2))
    )
    close(other, one, "gradient")


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_weights_that_are_made_once(aggr):
    it = convert(Layer(lambda self, x, w, c: self.lin(x).tanh(), lambda self, out: self.lin(out), aggr).double())
    torch.nn.utils.parametrizations.weight_norm(it.lin)
    it(rows(), pyg_sar.shard(edges(), NUM_NODES, 3))
    found = []
    for edge_index in (edges(), pyg_sar.shard(edges(), NUM_NODES, 3)):
        with torch.nn.utils.parametrize.cached():
            found.append(torch.autograd.grad(it(rows(), edge_index).square().sum(), list(it.parameters())))
    for one, other in zip(*found, strict=True):
        close(other, one, "gradient")


def number(group):
    it = convert(Layer(lambda self, x, w, c: torch.tanh(x) * c))
    mine = share(group, edges(), torch.arange(NUM_NODES) % group.size())
    x = torch.randn(len(mine.src), 4)
    it(x, mine.edge_index, None, 5)
    return it(x, mine.edge_index, None, 5 + (group.rank() > 0)).shape[1]


def test_numbers_that_workers_do_not_share(pool):
    assert pool.run(3, number) == [4, 4, 4]


class ByIndex(gnn.MessagePassing):
    """Reads what nodes have by the number of a destination, as an argument, an attribute or what messages return."""

    def __init__(self, how, aggr="sum"):
        super().__init__(aggr=aggr)
        self.how, self.table = how, torch.nn.Parameter(torch.rand(3))

    def forward(self, x, edge_index, batch):
        self.batch = batch
        return self.propagate(edge_index, x=x, batch=batch)

    def message(self, x_j, batch, index):
        if self.how == "aggregate":
            return x_j
        batch = self.batch if self.how == "attribute" else batch
        return x_j * self.table[batch[index]].unsqueeze(-1)

    def aggregate(self, inputs, index, batch, dim_size):
        if self.how == "aggregate":
            inputs = inputs * self.table[batch.index_select(0, index)].unsqueeze(-1)
        return super().aggregate(inputs, index, dim_size=dim_size)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("how", "aggr"), [("argument", "sum"), ("attribute", "sum"), ("argument", "median"),
                                           ("attribute", "median"), ("aggregate", "sum")])  # fmt: skip
def test_rows_of_nodes_by_the_number_of_a_destination(parts, how, aggr):
    """Blocks and chunks have numbers of their own; ids of graphs are alike for the first of them."""
    layer, x, batch = ByIndex(how, aggr), rows(), torch.arange(NUM_NODES) // (NUM_NODES // 2)
    expected = layer.double()(x, edges(), batch)
    try:
        found = convert(layer)(x, pyg_sar.shard(edges(), NUM_NODES, parts), batch)
    except NotImplementedError as error:
        assert how == "aggregate" and "ask for this name with '_i' behind it" in str(error)
        return
    close(found, expected, how)


class OfTable(ByIndex):
    """Reads a parameter with a row for each node."""

    def __init__(self, how):
        super().__init__(how)
        self.table = torch.nn.Parameter(torch.ones(NUM_NODES))

    def message(self, x_j, batch, index):
        return x_j * (batch if self.how == "argument" else self.table)[index].unsqueeze(-1)


def by_table(group, how):
    mine, layer = share(group, edges(), torch.arange(NUM_NODES) % group.size()), convert(OfTable(how), group)
    x = torch.randn(len(mine.src), 4)
    given = layer.table if how == "argument" else None
    with pytest.raises(NotImplementedError, match=r"a table of all nodes is a 'pyg_sar.nn.NodeEmbedding'"):
        layer(x, mine.edge_index, given)


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_parameters_by_the_number_of_a_destination_are_refused(pool, how):
    pool.run(2, by_table, how)


class Residual(gnn.MessagePassing):
    """Reads rows of nodes in its update alone."""

    def forward(self, x, edge_index, h):
        return self.propagate(edge_index, x=x, h=h)

    def update(self, out, h):
        return out + h


def other_graph(group):
    """Of the first graph workers have as many nodes, of the second not."""
    layer = convert(Residual(), group)
    for part in (torch.arange(NUM_NODES - 1) % 2, (torch.arange(NUM_NODES) >= 10).long()):
        edge_index = edges()[:, (edges() < len(part)).all(0)]
        mine = share(group, edge_index, part)
        x = torch.arange(4.0 * len(part), dtype=torch.float64).view(-1, 4)
        found = layer(x[mine.src], mine.edge_index, x[mine.src].sin())
        close(found, Residual()(x, edge_index, x.sin())[mine.dst], "output")


def test_rows_of_nodes_that_were_as_many_on_all_workers(pool):
    assert NUM_NODES % 2 == 1
    pool.run(2, other_graph, timeout=20)


class Gated(gnn.MessagePassing):
    """Reads rows, a number of each, and a matrix that was made, in its update alone."""

    def __init__(self, aggr):
        super().__init__(aggr=aggr)
        self.lin, self.gru = torch.nn.Linear(4, 4), torch.nn.GRUCell(4, 4)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, h=self.lin(x), x=x, norm=x.norm(dim=1), mix=self.lin.weight.tanh())

    def message(self, h_j):
        return h_j.tanh()

    def update(self, out, x, norm, mix):
        return self.gru(out @ mix, x) * norm.view(-1, 1)


@pytest.mark.parametrize("aggr", ["sum", "median"])
def test_updates_that_read_rows_of_nodes(aggr):
    torch.manual_seed(0)
    it = convert(Gated(aggr).double())
    same(it)
    assert ("in chunks" if aggr == "median" else "streams by replay") in describe(it)


ALONG_OTHERS = {
    "topk": lambda x: x.topk(2, -1).values.repeat(1, 2),
    "topk of the last dimension": lambda x: x.topk(4).values,
    "sort of the last dimension": lambda x: x.sort().values + x.gather(1, x.argsort()),
    "other names": lambda x: x.flip(dims=[-1]) - x.mean(axis=-1, keepdims=True),
    "two numbers": lambda x: torch.max(x, x.sin()) - torch.min(x, other=x.cos()),
    "counts": lambda x: x * (x > 0).count_nonzero(1).view(-1, 1),
}


@pytest.mark.parametrize("name", ALONG_OTHERS)
def test_messages_that_mix_what_is_of_an_edge(name):
    it = layer(lambda self, x, w, c: ALONG_OTHERS[name](x))
    same(it)
    assert describe(it).endswith("streams by replay")


class InVain(gnn.MessagePassing):
    """Makes weights, of which it makes nothing."""

    def __init__(self):
        super().__init__()
        self.score = torch.nn.Linear(4, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, h=x.tanh())

    def message(self, x_j, h_i, index, ptr, size_i):
        softmax(self.score(h_i), index, ptr, size_i)
        return x_j.sin()


def test_what_is_reduced_in_vain():
    torch.manual_seed(0)
    it, found = convert(InVain().double()), []
    for edge_index in (pyg_sar.shard(edges(), NUM_NODES, 3), edges()):
        out = it(x := rows(), edge_index)
        found.append((out, *torch.autograd.grad(out.sum(), [x, *it.parameters()], allow_unused=True)))
    for one, other in zip(*found, strict=True):
        close(one, other, "output or gradient")


class FromSources(gnn.MessagePassing):
    """Weights edges by what their sources say alone."""

    def __init__(self, make):
        super().__init__()
        self.make, self.score = make, torch.nn.Linear(4, 1)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, alpha=self.edge_updater(edge_index, x=x))

    def edge_update(self, x_j, index, ptr, size_i):
        return softmax(self.score(self.make(x_j, index)), index, ptr, size_i)

    def message(self, x_j, alpha):
        return x_j * alpha


def test_updated_edges_of_sources_alone():
    torch.manual_seed(0)
    it = convert(FromSources(lambda x_j, index: x_j).double())
    same(it)
    assert {strategy.name for strategy in STRATEGIES[it].values()} == {"passes", "kernel"}
    it = convert(FromSources(lambda x_j, index: x_j * index.view(-1, 1)).double())
    with pytest.raises(NotImplementedError, match="calls 'mul' on 'index'"):
        same(it)
