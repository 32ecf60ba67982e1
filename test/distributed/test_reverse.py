"""The same edges the other way round, and layers whose messages flow from destinations to sources."""

import copy

import pytest
import torch
import torch_geometric.nn as gnn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share
from torch_geometric.utils import remove_self_loops, softmax

import pyg_sar
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.reverse import reverse
from pyg_sar.distributed.simulated import Workers
from pyg_sar.halo import fetch_halo
from pyg_sar.nn import convert
from pyg_sar.nn.replay.choose import STRATEGIES
from pyg_sar.rewire import regroup

NUM_DST = 47


def whole(two):
    return edges(NUM_NODES, NUM_DST) if two else edges()


def cut(group, method, mode, two=False):
    part = assignment(method, group.size())
    dst_part = assignment(method, group.size(), NUM_DST) if two else None
    return share(group, whole(two), part, mode=mode, dst_part=dst_part)


def check_edges(graph, turned, src, dst, edge, two):
    """The graph has the out-edges of the own sources, and rows of edges and nodes are brought to them."""
    coo, there = whole(two), turned.bring(edge.clone())
    owned = torch.zeros(NUM_NODES, dtype=torch.bool).index_fill(0, src, True)
    assert sorted(there.tolist()) == owned[coo[0]].nonzero().view(-1).tolist()
    assert turned.graph.num_dst == graph.num_src and turned.graph.num_src == graph.num_dst
    source, row = turned.graph.coo()
    assert torch.equal(src[row], coo[0, there])
    rows = fetch_halo(dst.double().view(-1, 1), turned.graph)
    assert torch.equal(rows[source].view(-1).long(), coo[1, there])
    assert torch.equal(turned.graph.e_id, there)
    assert torch.equal(turned.take_back(there.view(-1, 1)).view(-1), edge)
    weight = torch.randn(len(edge), 2, requires_grad=True)
    (grad,) = torch.autograd.grad(turned.take_back(turned.bring(weight).square()).sum(), weight)
    close(grad, 2 * weight, "gradient there and back", 1e-6)


def on_workers(group, method, mode, two):
    mine = cut(group, method, mode, two)
    graph = mine.edge_index.graph
    assert reverse(graph) is reverse(graph)
    check_edges(graph, reverse(graph), mine.src, mine.dst, mine.edge, two)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("method", ["random", "empty"])
def test_edges(pool, method, mode, two):
    pool.run(3, on_workers, method, mode, two)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_edges_within_a_process(parts, two):
    graph = pyg_sar.shard(whole(two), (NUM_NODES, NUM_DST) if two else NUM_NODES, parts).graph
    ids = [torch.arange(n) for n in (NUM_NODES, NUM_DST if two else NUM_NODES, whole(two).size(1))]
    check_edges(graph, reverse(graph), *ids, two)
    assert len(reverse(graph).graph.blocks) == parts


def relations(group, seed):
    """Some relations have the same edges on one worker, none for example, and others on another; step after step."""
    g = torch.Generator().manual_seed(seed)
    coo, kinds = torch.randint(10, (2, 20), generator=g), torch.randint(4, (20,), generator=g)
    part, x = torch.randint(group.size(), (10,), generator=g), torch.randn(10, 2, generator=g, dtype=torch.float64)
    reference = gnn.RGCNConv(2, 2, 4, flow="target_to_source", aggr="sum").double()
    with torch.no_grad():
        for p in reference.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    expected, mine = reference(x, coo, kinds), share(group, coo, part)
    for layer in (pyg_sar.nn.RGCNConv(2, 2, 4, flow="target_to_source", aggr="sum").double(), convert(reference)):
        layer.load_state_dict(reference.state_dict())
        for _ in range(3):
            close(layer(x[mine.src], mine.edge_index, kinds[mine.edge]), expected[mine.src], "output")


def test_relations_that_some_workers_have_alike(pool):
    for seed in range(6):
        pool.run(2 + seed % 2, relations, seed)


def test_as_many_are_kept(pool, monkeypatch):
    monkeypatch.setattr("pyg_sar.distributed.reverse.KEPT", 1)  # in threads: processes are others
    coo, part = edges(), assignment("random", 2)

    def work(rank):
        graph = pyg_sar.ShardedEdgeIndex(assemble(list(split(coo, part, part, 2))[rank], rank)).graph
        none, some = (regroup(graph, graph.coo()[:, :count]) for count in (0, 40))
        made = [reverse(it if rank else none).graph.num_edges for it in (none, some, none)]
        return made, len(none.memo.values["reversed"])

    (here, kept), (there, _) = Workers(2).run(work)
    assert [a + b for a, b in zip(here, there, strict=True)] == [0, 40, 0] and kept == 1


class Layer(gnn.MessagePassing):
    """Updates edges by both ends, attends over them, and reads its rows again at the end."""

    def __init__(self, aggr="add"):
        super().__init__(aggr=aggr, flow="target_to_source")
        self.lin, self.att = gnn.Linear(8, 4), gnn.Linear(11, 1)

    def forward(self, x, edge_index, edge_attr):
        rows = tuple(map(self.lin, x)) if isinstance(x, tuple) else self.lin(x)
        score = self.edge_updater(edge_index, x=rows, a=edge_attr)
        own = rows[1] if isinstance(x, tuple) else rows
        return self.propagate(edge_index, x=rows, score=score) + own

    def edge_update(self, x_i, x_j, a):
        return self.att(torch.cat([x_i, 2 * x_j, a], -1)).tanh()

    def message(self, x_j, score, index, ptr, size_i):
        return x_j * softmax(score, index, ptr, size_i)


def less(edge_index, edge_attr):
    """As many layers of PyG begin."""
    return remove_self_loops(edge_index, edge_attr)


def compare(group, aggr, mode, method, kind):
    two = kind == "two"
    torch.manual_seed(0)
    reference = Layer(aggr).double()
    layer = convert(copy.deepcopy(reference))
    mine = cut(group, method, mode, two)
    g = torch.Generator().manual_seed(1)
    x, y, a = (
        torch.randn(n, k, generator=g).double() for n, k in ((NUM_NODES, 8), (NUM_DST, 8), (len(whole(two)[0]), 3))
    )
    leaves = [t.clone().requires_grad_() for t in (x, y, a)]
    own = [t[rows].clone().requires_grad_() for t, rows in zip((x, y, a), (mine.src, mine.dst if two else mine.dst[:0],
                                                                          mine.edge), strict=True)]  # fmt: skip
    outs = []
    for module, (one, other, attr), it in ((reference, leaves, whole(two)), (layer, own, mine.edge_index)):
        if two:  # rows at the beginning and at the end of messages, for which PyG's own code does not work
            one, other = other, one
        if two and module is reference:
            module.flow, it = "source_to_target", it.flip(0)
        if kind == "less":
            it, attr = less(it, attr)
        elif kind == "flipped":
            module.flow, it = "source_to_target", it.flip(0)
        outs.append(module((one, other) if two else one, it, attr))
    expected, found = outs
    backward(expected, torch.arange(NUM_NODES), NUM_NODES)
    backward(found, mine.src, NUM_NODES)
    close(found, expected[mine.src], "output")
    for what, mine_, all_, rows in zip("xya", own, leaves, (mine.src, mine.dst, mine.edge), strict=True):
        if all_.grad is not None:
            close(mine_.grad, all_.grad[rows], f"gradient of {what}")
    pyg_sar.sum_gradients(layer, group)
    for p, q in zip(layer.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, "gradient of a parameter")
    return [str(s) for s in STRATEGIES[layer].values()]


WAYS = {
    "add": {"streams by replay", "streams by replay (softmax, in one pass)"},
    "max": {"streams by replay", "streams by replay (in 3 passes)"},
}


@pytest.mark.parametrize(("aggr", "how"), some(WAYS, [
    (1, "random", ""), (2, "random", ""), (3, "random", ""), (1, "empty", ""), (1, "random", "two"),
    (1, "random", "less"), (1, "empty", "flipped"),
], every=2))  # fmt: skip
def test_layers(pool, aggr, how):
    for ways in pool.run(3, compare, aggr, *how):
        assert set(ways) == WAYS[aggr]


def some_know_more(group):
    """Edges that change on one worker alone."""
    layer, mine = convert(gnn.SAGEConv(8, 4, aggr="max", flow="target_to_source")), cut(group, "random", 1)
    x, outs = torch.randn(len(mine.src), 8), []
    for step in range(3):
        keep = torch.ones(len(mine.edge), dtype=torch.bool)
        if group.rank() == 1:
            keep[step] = False
        outs.append(layer(x, mine.edge_index[:, keep]))
    return len(outs)


def test_edges_that_change_on_one_worker(pool):
    assert pool.run(3, some_know_more) == [3, 3, 3]


PYG = {
    "FAConv": lambda: gnn.FAConv(8, flow="target_to_source"),
    "GATConv": lambda: gnn.GATConv(8, 4, 2, flow="target_to_source"),
    "GATv2Conv": lambda: gnn.GATv2Conv(8, 4, 2, flow="target_to_source", add_self_loops=False),
    "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(8, 4, flow="target_to_source"),
    "TransformerConv": lambda: gnn.TransformerConv(8, 4, 2, flow="target_to_source"),
}


@pytest.mark.parametrize("name", PYG)
def test_pairs_mean_what_they_mean_in_pyg(name):
    """The code that PyG generates for a class, and the code from which it does not, differ in this."""
    torch.manual_seed(0)
    reference = PYG[name]().double()
    layer, x = convert(copy.deepcopy(reference)), torch.randn(NUM_NODES, 8).double()
    args = (x, x + 1) if name == "FAConv" else (x,)
    expected = reference(*args, edges())
    close(layer(*args, edges()), expected, "on an ordinary edge_index")
    for parts in (1, 3):
        close(layer(*args, pyg_sar.shard(edges(), NUM_NODES, parts)), expected, "sharded")


def test_a_layer_keeps_its_flow():
    layer = convert(Layer())
    x, a = torch.randn(NUM_NODES, 8), torch.randn(edges().size(1), 3)
    layer(x, pyg_sar.shard(edges(), NUM_NODES, 2), a)
    assert layer.flow == "target_to_source"
    with pytest.raises((RuntimeError, ValueError)):
        layer(x, pyg_sar.shard(edges(), NUM_NODES, 2), a[:-1])
    assert layer.flow == "target_to_source"
