"""Every option of every layer, on 1 to 4 workers, equals PyG on the whole graph."""

import functools
import itertools

import pytest
import torch
import torch_geometric.nn
from support.cases import some
from support.layer_check import PAIRS, WORKERS, check_layer, settings
from support.layers import FULL, OPTIONS, Case
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share

import pyg_sar.nn

# A layer that sums, one with a maximum and one with a softmax, which go through every combination of settings.
KINDS = [FULL[0], FULL[2], FULL[7]]


def check(pool, workers, grid, case, device):
    done = pool.run(workers, check_layer, case, grid, torch.float64, device)
    assert done == [len(settings(grid, workers))] * workers


def test_kinds():
    assert [(case.layer, case.kwargs) for case in KINDS] == [
        ("SAGEConv", {"aggr": "mean"}), ("SAGEConv", {"aggr": "max"}), ("GATConv", {"heads": 3})
    ]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(range(4), 2)))
def test_pairs_hold_every_pair_of_values(a, b):
    values = [{s[k] for s in PAIRS} for k in (a, b)]
    assert {(s[a], s[b]) for s in PAIRS} == set(itertools.product(*values)) and all(len(v) == 3 for v in values)


@pytest.mark.parametrize(("workers", "case"), some(WORKERS, FULL, every=2), ids=str)
def test_pairs_of_settings(pool, workers, case, device):
    check(pool, workers, "pairs", case, device)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    "case", [*KINDS, *(pytest.param(it, marks=pytest.mark.grid) for it in FULL if it not in KINDS)], ids=str
)
def test_all_settings(pool, workers, case, device):
    check(pool, workers, "full", case, device)


@pytest.mark.parametrize(("case", "workers", "grid"), [
    *some(OPTIONS, [2, 3], ["one"], every=2),
    *(pytest.param(*it, "some", marks=pytest.mark.grid) for it in itertools.product(OPTIONS, (1, 2, 4))),
], ids=str)  # fmt: skip
def test_options(pool, workers, grid, case, device):
    check(pool, workers, grid, case, device)


def test_median(pool):
    check(pool, 2, "two", Case("SAGEConv", (8, 4), {"aggr": "median"}), "cpu")


def test_an_aggregation_that_fails_in_pyg():
    edge_index = torch.tensor([[0, 1, 1], [2, 2, 2]])  # PyG's median cannot begin with a node without in-edges
    layer, x = pyg_sar.nn.SAGEConv(8, 4, aggr="median"), torch.randn(3, 8)
    with pytest.raises(IndexError):
        layer(x, edge_index)
    it, median = pyg_sar.shard(edge_index, 3, 2), torch.zeros(3, 8)
    median[2] = x[[0, 1, 1]].median(0).values
    torch.testing.assert_close(layer(x, it), layer.lin_l(median) + layer.lin_r(x))
    layer.register_message_forward_hook(lambda module, inputs, out: None)  # somebody wants to see all messages
    with pytest.raises(RuntimeError, match="mean, max, min work on every graph"):
        layer(x, it)


@pytest.mark.parametrize("aggr", ["lstm", "gru"])
def test_an_aggregation_that_depends_on_the_largest_degree(aggr):
    kwargs = {"in_channels": 8, "out_channels": 8} if aggr == "gru" else {}
    layer, x = pyg_sar.nn.SAGEConv(8, 4, aggr=aggr, aggr_kwargs=kwargs), torch.randn(3, 8)
    edge_index = torch.tensor([[0, 2, 1, 0, 1], [0, 0, 2, 2, 2]])
    it = pyg_sar.shard(edge_index, 3, 2)
    torch.testing.assert_close(layer(x, it), layer(x, edge_index))
    layer.register_message_forward_hook(lambda module, inputs, out: None)
    with pytest.raises(NotImplementedError, match=r"'pyg_sar\.nn'"):
        layer(x, it)


class Doubled(pyg_sar.nn.SAGEConv):
    def message(self, x_j):
        return 2 * x_j


class Tripled(pyg_sar.nn.GATConv):
    def message(self, x_j, alpha):
        return 3 * alpha.unsqueeze(-1) * x_j


@pytest.mark.parametrize("cls", [Doubled, Tripled])
def test_a_message_of_ones_own_is_not_ignored(cls):
    torch.manual_seed(0)
    layer, x, edge_index = cls(8, 4), torch.randn(NUM_NODES, 8), edges()
    torch.testing.assert_close(layer(x, pyg_sar.shard(edge_index, NUM_NODES, 3)), layer(x, edge_index))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rgcn_has_the_type_that_pyg_gives_it(dtype):
    layer, types = pyg_sar.nn.RGCNConv(8, 4, 2).to(dtype), torch.tensor([0, 1])
    x, edge_index = torch.randn(3, 8, dtype=dtype), torch.tensor([[0, 1], [2, 2]])
    assert layer(x, pyg_sar.shard(edge_index, 3, 2), types).dtype == layer(x, edge_index, types).dtype


RGCN = [{}, {"num_bases": 2}, {"num_blocks": 2}, {"aggr": "sum"}]


@pytest.mark.parametrize("kind", RGCN, ids=str)
@pytest.mark.parametrize("parts", [1, 3, 20])
@pytest.mark.parametrize("remat", [True, False])
def test_rgcn_differentiates_by_the_types_that_forward_saw(parts, remat, kind):
    """Whoever changes them in between, as PyG allows, gets the gradients of what was computed."""
    edge_index, types = torch.randint(40, (2, 300)), torch.randint(3, (300,))
    ours, theirs = (library.RGCNConv(8, 4, 3, **kind).double() for library in (pyg_sar.nn, torch_geometric.nn))
    theirs.load_state_dict(ours.state_dict())
    found = []
    for layer, graph in ((ours, pyg_sar.shard(edge_index, 40, parts).replace(remat=remat)), (theirs, edge_index)):
        x, its = torch.linspace(-1, 1, 320, dtype=torch.double).view(40, 8).requires_grad_(), types.clone()
        out = layer(x, graph, its)
        its.zero_()
        out.square().sum().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    for key, expected in found[1].items():
        close(found[0][key], expected, key)


@pytest.mark.parametrize("kind", RGCN, ids=str)
@pytest.mark.parametrize("parts", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool])
def test_rgcn_takes_integers_of_any_size_for_types(parts, kind, dtype):
    """As many edges as relations: bytes could be a mask of these."""
    edge_index, types = torch.randint(40, (2, 9)), torch.randint(2, (9,))
    layer, x = pyg_sar.nn.RGCNConv(8, 4, 9, **kind).double(), torch.randn(40, 8).double()
    graph = pyg_sar.shard(edge_index, 40, parts)
    close(layer(x, graph, types.to(dtype)), layer(x, graph, types), "output")


@functools.cache
def of_many_relations(dtype, seed, ids=False, **kwargs):
    """What R-GCN of 100 relations is given in a low precision, PyG's output, and that in double precision."""
    torch.manual_seed(seed)
    edge_index, types = torch.randint(40, (2, 4000)), torch.randint(100, (4000,))
    layer = torch_geometric.nn.RGCNConv(40, 4, 100, **kwargs).to(dtype)
    weights = {name: p.clone() for name, p in layer.state_dict().items()}
    x = None if ids else torch.randn(40, 40).to(dtype)
    out = layer(x, edge_index, types)
    exact = layer.double()(x if ids else x.double(), edge_index, types)
    return weights, (x, edge_index, types), out, exact


@pytest.mark.parametrize(("dtype", "remat", "parts", "kind"), some(
    [torch.bfloat16, torch.float16], [True, False], [1, 3, 20], [*RGCN, {"ids": True}], every=4,
))  # fmt: skip
def test_rgcn_adds_many_relations_in_single_precision(parts, remat, dtype, kind):
    """PyG's error does not grow with the number of relations, either."""
    square = torch.zeros(2)
    for seed in range(3):
        weights, (x, edge_index, types), other, exact = of_many_relations(dtype, seed, **kind)
        layer = pyg_sar.nn.RGCNConv(40, 4, 100, **{k: v for k, v in kind.items() if k != "ids"}).to(dtype)
        layer.load_state_dict(weights)
        one = layer(x, pyg_sar.shard(edge_index, 40, parts).replace(remat=remat), types)
        square += torch.stack([(out.double() - exact).square().mean() for out in (one, other)])
    one, other = square.sqrt().tolist()
    assert one <= 2 * other


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("count", "kind", "used"), [
    (30, {"num_bases": 2}, "RelationSum"), (3000, {"num_bases": 2}, "BasisSum"), (3000, {}, "RelationSum"),
    (3000, {"num_bases": 9}, "RelationSum"), (3000, {"num_blocks": 2}, "RelationSum"),
])  # fmt: skip
@pytest.mark.parametrize("aggr", ["sum", "mean"])
@pytest.mark.parametrize("parts", [1, 3])
def test_rgcn_multiplies_the_fewest_rows(monkeypatch, fast, count, kind, used, aggr, parts):
    """In one process: a row for each basis and node, or one for each run of edges of a type."""
    torch.manual_seed(0)
    name, called = "FastRGCNConv" if fast else "RGCNConv", []
    ours, theirs = (
        getattr(library, name)(8, 4, 9, aggr=aggr, **kind).double() for library in (pyg_sar.nn, torch_geometric.nn)
    )
    theirs.load_state_dict(ours.state_dict())
    cls = pyg_sar.reduce.RelationSum  # and of bases, which begin alike
    monkeypatch.setattr(cls, "__init__", counted(cls.__init__, called))
    edge_index, types, found = torch.randint(40, (2, count)), torch.randint(9, (count,)), []
    for layer, graph in ((ours, pyg_sar.shard(edge_index, 40, parts)), (theirs, edge_index)):
        x = torch.linspace(-1, 1, 320, dtype=torch.double).view(40, 8).requires_grad_()
        out = layer(x, graph, types)
        out.square().sum().backward()
        found.append({"out": out, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}})
    assert called == [used]
    for key, expected in found[1].items():
        close(found[0][key], expected, key)


@pytest.mark.parametrize(("parts", "kind", "used"), [
    (8, {"num_bases": 2}, True), (9, {"num_bases": 2}, False), (16, {}, True), (17, {}, False),
])  # fmt: skip
def test_rgcn_keeps_sums_where_runs_of_many_blocks_would_be_multiplied(monkeypatch, parts, kind, used):
    torch.manual_seed(0)
    ours, theirs, called = (*(lib.RGCNConv(8, 4, 9, **kind).double() for lib in (pyg_sar.nn, torch_geometric.nn)), [])
    theirs.load_state_dict(ours.state_dict())
    cls = pyg_sar.reduce.RelationSum  # and of bases, which begin alike
    monkeypatch.setattr(cls, "__init__", counted(cls.__init__, called))
    edge_index, types, x = torch.randint(40, (2, 900)), torch.randint(9, (900,)), torch.randn(40, 8).double()
    for remat in (True, False):
        called.clear()
        graph = pyg_sar.shard(edge_index, 40, parts).replace(remat=remat)
        close(ours(x, graph, types), theirs(x, edge_index, types), "output")
        assert bool(called) == (used and (remat or "num_bases" in kind))


def counted(init, called):
    """Note which reductions are made."""

    def run(self, *args):
        called.append(type(self).__name__)
        init(self, *args)

    return run


def test_rgcn_refuses_features_beside_node_ids():
    layer, sharded = pyg_sar.nn.RGCNConv((3, 8), 4, 2), pyg_sar.shard(torch.tensor([[0, 1], [2, 2]]), 3, 2)
    with pytest.raises(ValueError, match="node ids of both"):
        layer((None, torch.randn(3, 8)), sharded, torch.tensor([0, 1]))


def featureless(group, kwargs):
    """R-GCN without features: every node selects its row of the weights by its global id."""
    torch.manual_seed(0)
    edge_index = edges()
    types = torch.randint(5, (edge_index.size(1),))
    reference = torch_geometric.nn.RGCNConv(NUM_NODES, 4, 5, **kwargs).double()
    layer = pyg_sar.nn.RGCNConv(NUM_NODES, 4, 5, **kwargs).double()
    layer.load_state_dict(reference.state_dict())
    expected = reference(torch.arange(NUM_NODES), edge_index, types)
    backward(expected, torch.arange(NUM_NODES), NUM_NODES)
    for mode in (1, 2, 3):
        layer.zero_grad()
        mine = share(group, edge_index, assignment("random", group.size()), mode=mode)
        for x in (None, mine.src):
            out = layer(x, mine.edge_index, types[mine.edge])
            close(out, expected[mine.dst], f"{kwargs} mode {mode}")
        backward(out, mine.dst, NUM_NODES)
        pyg_sar.sum_gradients(layer, group)
        for (name, p), q in zip(layer.named_parameters(), reference.parameters(), strict=True):
            close(p.grad, q.grad, f"{kwargs} mode {mode} {name}")


@pytest.mark.parametrize("kwargs", [{}, {"num_bases": 2}, {"aggr": "max"}, {"aggr": "max", "num_bases": 2}])
def test_rgcn_without_features(pool, kwargs):
    pool.run(3, featureless, kwargs)
