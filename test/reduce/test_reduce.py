"""Reductions against the generic one, against PyG where values are equal, and at low precision."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.any_message import Message
from support.layer_check import run
from support.layers import inputs, leaf
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.small_pieces import ordinary_ranges
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, RGCNConv, SAGEConv, TransformerConv
from torch_geometric.utils import scatter, softmax

from pyg_sar import nn, ops, shard
from pyg_sar.aggregate import aggregate, reduce_rows, simple
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.attention import pack
from pyg_sar.ops.dropout import dropout_factors
from pyg_sar.ops.reference import ADDITIVE, DOT, GATV2
from pyg_sar.reduce import Extremum, Needs, ProjectedSoftmax, Rows, Softmax, Sum, head_groups

MODES = (1, 2, 3)
H, C = 2, 3


def graph_of(group, mode) -> tuple[ShardedGraph, object]:
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    return mine.edge_index.graph, mine


def gradients(out, *leaves):
    """Output and gradients under a loss that weighs every entry differently."""
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)


def equal(found, expected, what):
    assert len(found) == len(expected)
    for k, (f, e) in enumerate(zip(found, expected, strict=True)):
        close(f, e, f"{what} {k}")


def error(found: Tensor, truth: Tensor) -> Tensor:
    return (found.double() - truth).square().sum()


# Oracles: the same numbers from `Message`, which lets autograd differentiate the message.


def weighted_sum(group, mode, heads):
    graph, _ = graph_of(group, mode)
    x = torch.randn(graph.num_src, *([H] if heads else []), C, dtype=torch.float64, requires_grad=True)
    w = torch.randn(graph.num_edges, *([H] if heads else []), dtype=torch.float64, requires_grad=True)

    def message(block, x, rows):
        return x[block.col] * rows.edge[0].unsqueeze(-1)

    oracle = gradients(aggregate(graph, Message(message, x.shape[1:]), x, edge=[w]), x, w)
    equal(gradients(aggregate(graph, Sum(learn_weight=True), x, edge=[w]), x, w), oracle, "learnt weights")
    constant = aggregate(graph, Sum(), x, edge=[w.detach()])
    equal(gradients(constant, x), oracle[:2], "constant weights")


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_weighted_sum_equals_the_generic_one(pool, mode, heads):
    pool.run(3, weighted_sum, mode, heads)


# The inputs of attention: the shapes of keys (besides the values), queries, mapped features of edges, and `att`.
KINDS = {"additive": ADDITIVE, "gatv2": GATV2, "dot": DOT}
VARIANTS = [(kind, query, edge) for kind in KINDS for query in (True, False) for edge in (True, False)
            if query or kind == "additive"]  # fmt: skip
PARAMETER = 0.3


def attention_inputs(kind, query, edge, num_src, num_dst, num_edges, generator=None):
    """Values, keys, and what `aggregate` is given besides; a map of edge features comes after `att`."""

    def rows(*shape):
        return leaf(torch.randn(*shape, generator=generator, dtype=torch.float64))

    width = H if kind == "additive" else H * C
    keys = rows(num_src, 0 if kind == "gatv2" else width)
    const = [rows(1, H, C)] if kind == "gatv2" else []
    return rows(num_src, H * C), keys, {
        "dst": [rows(num_dst, width)] if query else [],
        "edge": [rows(num_edges, 4)] if edge else [],
        "const": const + [rows(width, 4)] * edge,
    }  # fmt: skip


def scored(kind, block, x, rows):
    """Scores and values of all edges, by the formulas in the documentation of `Softmax`."""
    values = x[block.col, : H * C].view(-1, H, C)
    query = rows.dst[0][block.row] if rows.dst else 0
    edge = rows.edge[0] @ rows.const[-1].t() if rows.edge else 0
    if kind == "additive":
        return F.leaky_relu(x[block.col, H * C :] + query + edge, PARAMETER), values
    if kind == "gatv2":
        inner = F.leaky_relu(x[block.col] + query + edge, PARAMETER).view(-1, H, C)
        return (inner * rows.const[0]).sum(-1), values
    keys = x[block.col, H * C :] + edge
    return PARAMETER * (query * keys).view(-1, H, C).sum(-1), values + (edge.view(-1, H, C) if rows.edge else 0)


def attention(group, mode, kind, query, edge, p):
    """Softmax attention against two generic sums: numerator and normaliser."""
    graph, mine = graph_of(group, mode)
    values, keys, rest = attention_inputs(kind, query, edge, graph.num_src, graph.num_dst, graph.num_edges)

    def message(block, x, rows):
        score, values = scored(kind, block, x, rows)
        weight = score.exp()
        drop = dropout_factors(mine.edge[block.edges], H, p, 12345, torch.float64)
        return torch.cat([values * (weight * drop).unsqueeze(-1), weight.unsqueeze(-1)], -1)

    leaves = [t for t in (values, keys, *rest["dst"], *rest["edge"], *rest["const"]) if t.numel() > 0]
    drop = (p, 12345, lambda block: mine.edge[block.edges]) if p > 0 else None
    both = aggregate(graph, Message(message, (H, C + 1)), torch.cat([values, keys], 1), **rest)
    total = both[..., C:]
    oracle = both[..., :C] / torch.where(total > 0, total, 1)
    expected = gradients(oracle.flatten(1), *leaves)
    const = {"const": [t.reshape(-1) if t.dim() == 3 else t for t in rest["const"]]}
    for groups in ([slice(0, H)], [slice(0, 1), slice(1, H)]):
        reduce = Softmax(H, C, KINDS[kind], PARAMETER, graph.degree, drop, groups)
        found = aggregate(graph, reduce, pack(values, keys, H, groups, 1), **{**rest, **const})
        equal(gradients(found, *leaves), expected, f"attention in {len(groups)} groups")


@pytest.mark.parametrize("p", [0.0, 0.6])
@pytest.mark.parametrize(("kind", "query", "edge"), VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_attention_equals_the_generic_sum(pool, mode, kind, query, edge, p):
    pool.run(3, attention, mode, kind, query, edge, p)


PROJECTED = [(query, edge, p) for query in (True, False) for edge in (True, False) for p in (0.0, 0.6)]


@pytest.mark.parametrize(("query", "edge", "p"), PROJECTED)
@pytest.mark.parametrize("columns", [1, 2 * C, 128])
@pytest.mark.parametrize("blocks", [1, 3])
def test_features_projected_inside(monkeypatch, blocks, columns, query, edge, p):
    """One head at a time, two and all: the same as to project them first, gradients included."""
    monkeypatch.setattr("pyg_sar.reduce.base.COLUMNS", columns)
    monkeypatch.setattr(f"{__name__}.H", 3)
    graph = shard(edges(), NUM_NODES, blocks).graph
    _, _, rest = attention_inputs("additive", query, edge, NUM_NODES, NUM_NODES, graph.num_edges)
    x, weight, keys = (leaf(torch.randn(*s, dtype=torch.float64)) for s in ((NUM_NODES, 5), (9, 5), (3, 5)))
    leaves = (x, weight, keys, *rest["dst"], *rest["edge"], *rest["const"])
    drop = (p, 12345, graph.ids_of) if p > 0 else None
    packed = F.linear(x, torch.cat([weight, keys]))
    expected = aggregate(graph, Softmax(3, C, ADDITIVE, PARAMETER, graph.degree, drop), packed, **rest)
    rest["const"] += [weight, keys]
    reduce = ProjectedSoftmax(3, C, PARAMETER, graph.degree, drop, head_groups(3, C), blocks == 1)
    found = aggregate(graph, reduce, x, **rest)
    truth = gradients(expected, *leaves)
    equal(gradients(found, *leaves), truth, "projected")
    rest = {k: [t.detach() for t in ts] for k, ts in rest.items()}
    alone = aggregate(graph, reduce, x, **rest)
    equal(gradients(alone, x), truth[:2], "features alone")


class Largest(TorchDispatchMode):
    """The number of values in every new tensor that is not a view."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in old:
                self.sizes.append(t.numel())
        return out


@pytest.mark.skipif(not ops.KERNELS, reason="PYG_SAR_KERNELS=0: plain PyTorch copies rows")
def test_nothing_as_wide_as_all_heads_lives_beside_the_output():
    n, heads, channels = 400, 6, 100
    conv = nn.GATConv(16, channels, heads, add_self_loops=False)
    x, edge_index = torch.randn(n, 16, requires_grad=True), edges(n)
    conv(x, edge_index)  # makes the graph
    with Largest() as forward:
        out = conv(x, edge_index)
    grad = torch.ones_like(out)
    with Largest() as backward:
        out.backward(grad)
    assert sorted(forward.sizes)[-2:] == [n * channels, out.numel()]
    assert max(backward.sizes) == n * channels


def frozen_queries(group):
    """Gradients that nobody wants are not made, and leave the others as they are."""
    graph, _ = graph_of(group, 1)
    for kind in KINDS:
        values, keys, rest = attention_inputs(kind, True, True, graph.num_src, graph.num_dst, graph.num_edges)
        reduce = Softmax(H, C, KINDS[kind], PARAMETER, graph.degree)
        out = aggregate(graph, reduce, torch.cat([values, keys], 1), **rest)
        both = torch.cat([values, keys], 1).detach().requires_grad_()
        alone = aggregate(graph, reduce, both, **{k: [t.detach() for t in ts] for k, ts in rest.items()})
        expected = torch.cat(gradients(out, values, keys)[1:], 1)
        assert torch.equal(gradients(alone, both)[1], expected), kind


def test_attention_of_constants(pool):
    pool.run(2, frozen_queries)


def dropped_messages(group, mode):
    """Dropout inside a message that is rebuilt in backward: the mask is a function of the edge's id."""
    graph, mine = graph_of(group, mode)
    g = torch.Generator().manual_seed(0)
    x_all = torch.randn(NUM_NODES, H, generator=g, dtype=torch.float64)
    scale_all = torch.randn(H, generator=g, dtype=torch.float64)

    def body(x_j, scale, ids):
        return (x_j * scale).tanh() * dropout_factors(ids, H, 0.5, 77, torch.float64)

    def message(block, x, rows):
        return body(x[block.col], rows.const[0], mine.edge[block.edges])

    src, dst = edges()
    x, scale = leaf(x_all), leaf(scale_all)
    whole = scatter(body(x[src], scale, torch.arange(src.numel())), dst, 0, NUM_NODES)
    weight = torch.randn(NUM_NODES, H, generator=g, dtype=torch.float64)
    expected = torch.autograd.grad((whole * weight).sum(), (x, scale))

    mine_x, mine_scale = leaf(x_all[mine.src]), leaf(scale_all)
    out = aggregate(graph, Message(message, (H,)), mine_x, const=[mine_scale])
    d_x, d_scale = torch.autograd.grad((out * weight[mine.dst]).sum(), (mine_x, mine_scale))
    dist.all_reduce(d_scale, group=group)
    close(out, whole[mine.dst], "output")
    close(d_x, expected[0][mine.src], "d x")
    close(d_scale, expected[1], "d scale")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_dropout_in_a_rematerialised_message(pool, workers, mode):
    pool.run(workers, dropped_messages, mode)


def test_gradients_of_all_reductions_numerically():
    """By finite differences, in one process with three shards."""
    edge_index = edges()[:, :150]
    graph = shard(edge_index, NUM_NODES, 3).graph
    g = torch.Generator().manual_seed(0)
    x, w = (leaf(torch.randn(*shape, generator=g, dtype=torch.float64)) for shape in ((NUM_NODES, H * C), (150,)))
    checks = [
        (lambda x: aggregate(graph, Sum(), x), (x,)),
        (lambda x, w: aggregate(graph, Sum(True), x, edge=[w]), (x, w)),
        (lambda x: aggregate(graph, Extremum(-1), x), (x,)),
    ]
    for function, leaves in checks:
        torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("kind", "query", "edge"), VARIANTS)
def test_gradients_of_attention_numerically(kind, query, edge, p):
    graph = shard(edges()[:, :150], NUM_NODES, 3).graph
    g = torch.Generator().manual_seed(0)
    values, keys, rest = attention_inputs(kind, query, edge, NUM_NODES, NUM_NODES, 150, g)
    drop = (p, 5, lambda block: torch.arange(150)[block.edges]) if p > 0 else None
    counts = [len(rest[k]) for k in ("dst", "edge", "const")]

    def function(values, keys, *flat):
        dst, edge, const = torch.utils._pytree.tree_unflatten(flat, structure)
        x = torch.cat([values, keys], 1)
        reduce = Softmax(H, C, KINDS[kind], PARAMETER, graph.degree, drop)
        return aggregate(graph, reduce, x, dst=dst, edge=edge, const=const)

    flat, structure = torch.utils._pytree.tree_flatten(tuple(rest[k] for k in ("dst", "edge", "const")))
    assert sum(counts) == len(flat)
    torch.autograd.gradcheck(function, (values, keys, *flat), fast_mode=True)


# Maxima and minima.


def extrema(group, mode, values):
    """Equal values in several shards; nodes without in-edges; the zeros of a ReLU."""
    graph, mine = graph_of(group, mode)
    g = torch.Generator().manual_seed(3)
    infinite = torch.tensor([-torch.inf, 1, torch.inf], dtype=torch.float64)
    make = {
        "ties": lambda: torch.randint(-1, 2, (NUM_NODES, 16), generator=g).double(),
        "equal": lambda: torch.ones(NUM_NODES, 16, dtype=torch.float64),
        "relu": lambda: torch.randn(NUM_NODES, 16, generator=g, dtype=torch.float64).relu(),
        "negative": lambda: -torch.rand(NUM_NODES, 16, generator=g, dtype=torch.float64),
        "infinite": lambda: infinite[torch.randint(3, (NUM_NODES, 16), generator=g)],
    }
    x_all, (src, dst) = make[values](), edges()
    weight = torch.randn(NUM_NODES, 16, generator=g, dtype=torch.float64)
    for sign, name in ((1, "max"), (-1, "min")):
        x = leaf(x_all)
        whole = scatter(x[src], dst, 0, NUM_NODES, name)
        (whole * weight).sum().backward()
        mine_x = leaf(x_all[mine.src])
        out = aggregate(graph, Extremum(sign), mine_x)
        (out * weight[mine.dst]).sum().backward()
        assert torch.equal(out, whole[mine.dst])
        close(mine_x.grad, x.grad[mine.src], f"{name} of {values}")
        assert torch.equal(mine_x.grad == 0, x.grad[mine.src] == 0)
    return out[torch.isin(mine.dst, dst, invert=True)]


@pytest.mark.parametrize("values", ["ties", "equal", "relu", "negative", "infinite"])
@pytest.mark.parametrize("mode", MODES)
def test_extrema_share_gradients_as_in_pyg(pool, mode, values):
    rows = torch.cat(pool.run(4, extrema, mode, values))
    assert len(rows) > 5, "nodes without in-edges"
    assert not rows.any()


def split_tie(group, mode):
    """Rank 0 reads the same maximum from all three; exact thirds, by PyG's rule that zeros count once more."""
    mine = share(group, torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.arange(3), mode=mode)
    found = []
    for value in (5.0, 0.0):
        x = torch.full((1, 1), value, requires_grad=True)
        aggregate(mine.edge_index.graph, Extremum(1), x).sum().backward()
        found.append(x.grad.item())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_tie_across_three_workers(pool, mode):
    assert pool.run(3, split_tie, mode) == [pytest.approx([1 / 3, 1 / 4])] * 3


# Attention with extreme scores.


def test_scores_far_apart_neither_overflow_nor_vanish():
    """An additive score whose slope is 1 is the key itself."""
    src, dst = edges()
    graph = shard(edges(), NUM_NODES, 4).graph
    g = torch.Generator().manual_seed(0)
    terms = torch.randn(NUM_NODES, 1, generator=g) * 1000
    values = leaf(torch.randn(NUM_NODES, 2, generator=g))
    out = aggregate(graph, Softmax(1, 2, ADDITIVE, 1.0, graph.degree), torch.cat([values, terms], 1))
    alpha = softmax(terms[src], dst, num_nodes=NUM_NODES)
    expected = scatter(alpha * values[src], dst, 0, NUM_NODES)
    close(out, expected, "output", 1e-5)
    (d_out,), (d_expected,) = (torch.autograd.grad(o.square().sum(), values) for o in (out, expected))
    close(d_out, d_expected, "gradient", 1e-4)


@pytest.mark.parametrize("kind", ["gatv2", "dot"])
def test_products_far_apart_neither_overflow_nor_vanish(kind):
    """Scores of up to some thousands, in double precision because their gradients are as large."""
    src, dst = edges()
    graph = shard(edges(), NUM_NODES, 4).graph
    g = torch.Generator().manual_seed(0)
    values, keys, rest = attention_inputs(kind, True, False, NUM_NODES, NUM_NODES, 0, g)
    loud = {"dst": [rest["dst"][0].detach() * 1000], "const": rest["const"]}
    x = torch.cat([values, keys], 1)
    out = aggregate(graph, Softmax(H, C, KINDS[kind], PARAMETER, graph.degree), x, **loud)
    whole = SimpleNamespace(row=dst, col=src)
    score, rows = scored(kind, whole, x, Rows(**loud))
    assert score.abs().max() > 1000
    expected = scatter(softmax(score, dst, num_nodes=NUM_NODES).unsqueeze(-1) * rows, dst, 0, NUM_NODES)
    leaves = [t for t in (values, keys) if t.numel() > 0]
    equal(gradients(out, *leaves), gradients(expected.flatten(1), *leaves), "far apart")


def test_masked_edges_count_for_nothing():
    """A score of minus infinity, in a block of its own; a destination without any edge gets 0."""
    graph = shard(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 1]]), 3, 3).graph
    values = leaf(torch.tensor([[1.0], [10.0], [3.0]]))
    keys = torch.tensor([[0.5], [-torch.inf], [0.5]])
    out = aggregate(graph, Softmax(1, 1, ADDITIVE, 1.0, graph.degree), torch.cat([values, keys], 1))
    assert out.flatten().tolist() == [2.0, 1.0, 0.0]
    out.sum().backward()
    assert values.grad.flatten().tolist() == [1.5, 0.0, 0.5]


class OwnMessage(TransformerConv):
    """Streams by its own code once it is converted."""

    def message(self, query_i, key_j, value_j, edge_attr, index, ptr, size_i):
        return super().message(query_i, key_j, value_j, edge_attr, index, ptr, size_i) * 1


ATTENTION = [
    (GATConv, (16, 8), {"heads": 3}, ""),
    (GATConv, (32, 4), {"heads": 2, "edge_dim": 3}, "a"),
    (GATv2Conv, (16, 8), {"heads": 3}, ""),
    (GATv2Conv, (16, 20), {"heads": 2, "edge_dim": 3}, "a"),
    (TransformerConv, (16, 8), {"heads": 3}, ""),
    (TransformerConv, (16, 20), {"heads": 2, "edge_dim": 3}, "a"),
    (OwnMessage, (16, 8), {"heads": 2, "edge_dim": 3}, "a"),
]


def large(layer, args, kwargs, roles, dtype, scale):
    """PyG's layer and ours with large inputs, of a graph without multi-edges, whose scores would be equal."""
    torch.manual_seed(0)
    edge_index = edges()[:, edges()[0] != edges()[1]].unique(dim=1).contiguous()
    reference = layer(*args, **kwargs).to(dtype)
    ours = nn.convert(copy.deepcopy(reference))
    x = (scale * torch.randn(NUM_NODES, args[0], dtype=torch.float64)).to(dtype)
    rest = [scale * t for t in inputs(roles, edge_index.size(1), torch.float64)]
    return reference, ours, x, [t.to(dtype) for t in rest], edge_index


def errors_of_large_scores(group, dtype, scale, mode):
    """Squared errors of each layer's output and gradients, ours and PyG's, of this worker's rows."""
    found = {}
    for case, (layer, args, kwargs, roles) in enumerate(ATTENTION):
        reference, ours, x, rest, edge_index = large(layer, args, kwargs, roles, dtype, scale)
        mine = share(group, edge_index, assignment("random", group.size()), mode=mode)
        everything = torch.arange(NUM_NODES)
        theirs = run(reference, leaf(x), edge_index, [leaf(t) for t in rest], everything, NUM_NODES)
        exact = copy.deepcopy(reference).double()
        truth = run(exact, leaf(x.double()), edge_index, [leaf(t.double()) for t in rest], everything, NUM_NODES)
        got = run(ours, leaf(x[mine.src]), mine.edge_index, [leaf(t[mine.edge]) for t in rest], mine.dst, NUM_NODES)
        for key in ("out", "dx0", *(["de0"] if rest else [])):
            rows = mine.edge if key == "de0" else mine.dst
            found[case, key] = [error(t, truth[key][rows]) for t in (got[key], theirs[key][rows])]
    return found


@pytest.mark.parametrize(
    ("workers", "mode", "dtype", "scale"),
    [
        (1, 1, torch.float32, 1e4),
        (2, 1, torch.float32, 1e6),
        (3, 2, torch.float32, 1e4),
        (3, 3, torch.float32, 1e6),
        (2, 2, torch.bfloat16, 10),
        (2, 1, torch.float16, 10),
    ],
)
def test_error_of_large_scores_at_most_twice_that_of_pyg(pool, workers, mode, dtype, scale):
    """Scores of up to 1e12 in single precision: what backward rebuilds must not depend on how large they are."""
    parts = pool.run(workers, errors_of_large_scores, dtype, scale, mode)
    for key in parts[0]:
        mine, his = (sum(part[key][k] for part in parts).sqrt().item() for k in range(2))
        assert mine <= 2 * his + 1e-30, (ATTENTION[key[0]], key[1], mine, his)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("layer", "args", "kwargs", "roles"), ATTENTION)
def test_large_scores_in_double_precision(layer, args, kwargs, roles, parts):
    """Of features around 1e30, whose exponentials nobody can tell from 0 and 1: the numbers of PyG."""
    reference, ours, x, rest, edge_index = large(layer, args, kwargs, roles, torch.float64, 1e30)
    everything, found = torch.arange(NUM_NODES), []
    for module, it in ((ours, shard(edge_index, NUM_NODES, parts)), (reference, edge_index)):
        found.append(run(module, leaf(x), it, [leaf(t) for t in rest], everything, NUM_NODES))
    for key, value in found[1].items():
        if value is not None:
            off = (found[0][key] - value).abs().max() / value.abs().max().clamp(min=1e-10)
            assert off < 1e-12, key


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
@pytest.mark.parametrize(("layer", "args", "kwargs", "roles"), [case for case in ATTENTION if case[3]])
def test_scores_that_are_no_numbers(layer, args, kwargs, roles, value):
    """Of some edges of a destination, of those of one block, and of all: what PyG makes of them, NaN included."""
    edge_index = torch.tensor([[0, 3, 6, 0, 3, 1, 4, 7, 8, 2, 2, 5], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4]])
    loops = {} if issubclass(layer, TransformerConv) else {"add_self_loops": False}
    reference = layer(*args, **kwargs, **loops).double()
    for p in reference.parameters():
        p.data.abs_()  # or infinities of either sign are added up
    ours, x = nn.convert(copy.deepcopy(reference)), torch.rand(9, args[0], dtype=torch.float64)
    for which in ([0], [1, 4], [0, 1, 2], [0, 1, 2, 9, 10], [11]):
        features = torch.ones(12, 3, dtype=torch.float64)
        features[which] = value
        results = [
            run(module, leaf(x), it, [leaf(features)], torch.arange(9), 9)
            for module, it in ((reference, edge_index), *((ours, shard(edge_index, 9, k)) for k in (1, 3)))
        ]
        assert results[0]["out"].isnan().any() or value == -torch.inf
        for found in results[1:]:
            for key, expected in results[0].items():
                torch.testing.assert_close(found[key], expected, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}")


def test_attention_to_a_hub_in_half_precision():
    """The running sums are in single precision; those of PyG overflow here."""
    n = 70_000
    edge_index = torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)])
    conv = nn.GATConv(4, 4, add_self_loops=False).half()
    conv.lin.weight.data.copy_(torch.eye(4))
    x = torch.full((n, 4), 2.0, dtype=torch.float16)
    assert conv(x, shard(edge_index, n, 4))[0].tolist() == [2.0] * 4


# Precision: errors against double precision, at most twice those of PyG.

LAYERS = [
    (SAGEConv, (16, 8), {}, ""),
    (SAGEConv, (16, 8), {"aggr": "sum"}, ""),
    (SAGEConv, (16, 8), {"aggr": "max"}, ""),
    (GCNConv, (16, 8), {}, ""),
    (GCNConv, (16, 8), {}, "w"),
    (GATConv, (16, 8), {"heads": 3}, ""),
    (GATConv, (16, 8), {"edge_dim": 3}, "a"),
    (GATConv, (16, 8), {"heads": 3, "negative_slope": 1.0}, ""),
    (GATConv, (16, 8), {"edge_dim": 3, "negative_slope": 1.0}, "a"),
    (RGCNConv, (16, 8, 5), {}, "t"),
    (RGCNConv, (16, 8, 5), {"num_bases": 2}, "t"),
]


class As(torch.nn.Module):
    """A layer whose output has the type of its input, which PyG's RGCNConv forgets."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *rest):
        return self.layer(x, *rest).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("layer", "args", "kwargs", "roles"), LAYERS)
@ordinary_ranges()
def test_error_at_most_twice_that_of_pyg(layer, args, kwargs, roles, dtype):
    """Root mean square of eight random graphs with hubs, for the output and every gradient.

    With LeakyReLU's kink the median: a score that rounds to its other side is an outlier of either.
    """
    kink = layer is GATConv and "negative_slope" not in kwargs
    n, e, errors = 200, 4000, {}
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        edge_index = torch.randint(n, (2, e), generator=g)
        edge_index[1, :400] = 3
        edge_index[1, 400:1300] = torch.arange(10, 16).repeat_interleave(150)
        torch.manual_seed(seed)
        x = torch.randn(n, 16).to(dtype)
        rest = inputs(roles, e, dtype)
        reference = As(layer(*args, **kwargs).to(dtype))
        with torch.no_grad():  # biases start at zero
            reference.layer.get_parameter("bias" if layer is not SAGEConv else "lin_l.bias").normal_()
        weights = reference.state_dict()
        ours = As(getattr(nn, layer.__name__)(*args, **kwargs).to(dtype))
        exact = As(layer(*args, **kwargs).double())
        for other in (ours, exact):
            other.load_state_dict(weights)

        def results(model, edge_index, dtype, x=x, rest=rest):
            cast = [leaf(t.to(dtype) if t.is_floating_point() else t) for t in (x, *rest)]
            return run(model, cast[0], edge_index, cast[1:], torch.arange(n), n)

        truth, theirs = results(exact, edge_index, torch.float64), results(reference, edge_index, dtype)
        for graph in (shard(edge_index, n, 3), shard(edge_index, n, 1)):
            found = results(ours, graph, dtype)
            for key, value in truth.items():
                if value is not None:
                    assert found[key].dtype == dtype, key
                    mine, his = errors.setdefault((key, len(graph.graph.blocks)), ([], []))
                    mine.append(error(found[key], value))
                    his.append(error(theirs[key], value))
    for key, pair in errors.items():
        mine, his = ((e.median() if kink else e.mean()).sqrt() for e in map(torch.stack, pair))
        assert mine <= 2 * his, (key, mine, his)


def low_precision(group, dtype, mode):
    """All layers with rows communicated in half precision: types as in one process, and nearly the same numbers."""
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    for layer, args, kwargs, roles in LAYERS:
        torch.manual_seed(0)
        conv = getattr(nn, layer.__name__)(*args, **kwargs).to(dtype)
        x_all, rest = torch.randn(NUM_NODES, 16).to(dtype), inputs(roles, edges().size(1), dtype)
        x = leaf(x_all[mine.src])
        out = conv(x, mine.edge_index, *(t[mine.edge] for t in rest))
        out.sum().backward()
        expected = conv(x_all, edges(), *rest)[mine.dst]
        assert out.dtype == expected.dtype and x.grad.dtype == dtype
        close(out.float(), expected.float(), layer.__name__, 0.05)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_across_workers(pool, dtype, mode):
    pool.run(3, low_precision, dtype, mode)


def mixed_precision(group):
    """Layers in single precision under autocast: types as in PyG, and its numbers to that precision."""
    mine = share(group, edges(), assignment("random", group.size()))
    for layer, args, kwargs, roles in LAYERS:
        torch.manual_seed(0)
        conv = getattr(nn, layer.__name__)(*args, **kwargs)
        x_all, rest = torch.randn(NUM_NODES, 16), inputs(roles, edges().size(1), torch.float32)
        x = leaf(x_all[mine.src])
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = conv(x, mine.edge_index, *(t[mine.edge] for t in rest)), conv(x_all, edges(), *rest)
        out.float().sum().backward()
        assert out.dtype == expected.dtype
        assert all(p.grad.dtype == torch.float32 for p in (x, *conv.parameters()))
        close(out.float(), expected[mine.dst].float(), layer.__name__, 0.05)


def test_autocast(pool):
    pool.run(2, mixed_precision)


@pytest.mark.parametrize("aggr", ["sum", "max"])
def test_rows_of_one_number_are_not_cut(monkeypatch, aggr):
    """Rows without columns, more of them than travel columns at a time."""
    monkeypatch.setattr("pyg_sar.reduce.base.COLUMNS", 2)
    x, (src, dst) = torch.randn(NUM_NODES, dtype=torch.float64), edges()
    expected = x.new_zeros(NUM_NODES).scatter_reduce(
        0, dst, x[src], f"a{aggr}" if aggr == "max" else aggr, include_self=False
    )
    equal([reduce_rows(shard(edges(), NUM_NODES, 3).graph, x, aggr)], [expected], aggr)


def test_sums_that_are_written_once_leave_nothing_of_the_memory():
    """Also where few destinations have edges, and the operator writes only these."""
    graph = shard(torch.tensor([[1, 2, 2], [0, 0, 5]]), NUM_NODES, 1).graph
    (block,), x = graph.blocks, torch.rand(NUM_NODES, 3)
    assert block.dst is not None
    found = Sum(overwrite=True).step(x.new_full((NUM_NODES, 3), torch.nan), block, x, Rows())
    assert torch.equal(found, Sum().step(torch.zeros(NUM_NODES, 3), block, x, Rows()))


def test_messages_are_summed_in_single_precision_at_least():
    """257 of each of three blocks: in bfloat16 each of these would be 256."""
    edge_index = torch.stack([torch.arange(3 * 257) % 3, torch.zeros(3 * 257, dtype=torch.int64)])
    graph, x = shard(edge_index, 3, 3).graph, torch.ones(3, 1, dtype=torch.bfloat16)
    out = aggregate(graph, Message(lambda block, x, rows: x[block.col], (1,)), x)
    assert out.dtype == x.dtype and out[0].item() == x.new_tensor(3 * 257).item()


@pytest.mark.parametrize("blocks", [1, 3])
def test_means_of_many_rows_in_half_precision(blocks):
    """Of which neither the sum nor the count is a number of half precision."""
    count = 70_000
    edge_index = torch.stack([torch.arange(count) % 3, torch.zeros(count, dtype=torch.int64)])
    graph, x = shard(edge_index, 3, blocks).graph, leaf(torch.full((3, 1), 2.0, dtype=torch.float16))
    aggregate(graph, reduction := simple(graph, "mean", None), x)[0].sum().backward()
    assert aggregate(graph, reduction, x)[0].item() == 2
    close(x.grad.float(), torch.full((3, 1), 1 / 3), "gradient", 1e-2)
    attention = nn.GATConv(1, 1, aggr="mean", add_self_loops=False, bias=False).half()
    out = attention(x.detach().requires_grad_(), ShardedEdgeIndex(graph))
    assert out.dtype == x.dtype and out[0].item() != 0


def test_which_sums_are_cut():
    """Not those of heads, whose weights belong to columns; several sums over the same rows are."""
    like, one, many = torch.empty(0, 300), [torch.empty(5)], [torch.empty(5, 2)]
    for reduce, edge, count in ((Sum(), [], 3), (Sum(), one, 3), (Sum(), many, 1), (Sum(sums=2), many, 3)):
        assert len(reduce.tiles(like, Rows(edge=edge), 2)) == count
        assert len(reduce.tiles(like, Rows(edge=edge), 1)) == 1


def test_gradients_of_rows_are_of_their_type():
    """Though they are summed in a wider one: as such they travel."""
    graph = shard(edges(), NUM_NODES, 3).graph
    block, x = graph.blocks[0], torch.randn(graph.blocks[0].num_src, H * C + H, dtype=torch.bfloat16)
    attention = Softmax(H, C, ADDITIVE, PARAMETER, graph.degree)
    for reduce in (Sum(), Sum(count=graph.degree), Extremum(1), attention):
        (tile,) = reduce.tiles(x[:0], Rows(), 1)
        out, saved = tile.finish(tile.step(tile.init(graph.num_dst), block, x, Rows()))
        saved = reduce.condense(saved, out if reduce.saves_output else None, torch.ones_like(out))
        saved = reduce.prepare(saved, torch.ones_like(out))
        d_x, _ = tile.grad(block, x, Rows(), saved, torch.ones_like(out), Needs(True, Rows()))
        assert out.dtype == d_x.dtype == x.dtype, reduce


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch sums the gradients of keys in their own type")
@pytest.mark.parametrize("blocks", [1, 3])
def test_gradients_of_what_is_made_inside_are_summed_in_single_precision_at_least(blocks):
    """All destinations weigh rows 0 and 1 evenly: in bfloat16 their sums of halves would end at 128."""
    edge_index = torch.stack([torch.arange(1800) % 2, torch.arange(1800) // 2])
    graph = shard(edge_index, 900, blocks).graph
    x, keys = (leaf(t.to(torch.bfloat16)) for t in (torch.tensor([1.0, -1.0] * 450).view(-1, 1), torch.zeros(1, 1)))
    reduce = ProjectedSoftmax(1, 1, PARAMETER, graph.degree, None, [slice(0, 1)], blocks == 1)
    query, weight = torch.full_like(x, 2.0), torch.ones_like(keys)
    aggregate(graph, reduce, x, dst=[query.detach()], const=[weight, keys]).sum().backward()
    assert x.grad[:2, 0].tolist() == [450, 450] and keys.grad.item() == 900


@pytest.mark.parametrize("blocks", [1, 3])
def test_values_of_one_group_of_heads_are_alive(monkeypatch, blocks):
    """And their gradients; besides them the keys of the block."""
    known, most, grad_of_heads = [], [], ProjectedSoftmax.grad_of_heads

    def note(made):
        known.append(weakref.ref(made))
        return made

    def product(*args):
        most.append(sum(ref() is not None for ref in known))
        return note(F.linear(*args))

    def grad(reduce, value, d_key, block, key, rows, saved, out, *args):
        d_value, others = grad_of_heads(reduce, value, d_key, block, key, rows, saved, note(out), *args)
        return note(d_value), others

    monkeypatch.setattr("pyg_sar.reduce.projected_softmax.product", product)
    monkeypatch.setattr(ProjectedSoftmax, "grad_of_heads", grad)
    graph, groups = shard(edges(), NUM_NODES, blocks).graph, [slice(k, k + 1) for k in range(3)]
    x, weight, keys = (leaf(torch.randn(*shape)) for shape in ((NUM_NODES, 5), (9, 5), (3, 5)))
    reduce = ProjectedSoftmax(3, C, PARAMETER, graph.degree, None, groups, blocks == 1)
    aggregate(graph, reduce, x, const=[weight, keys]).sum().backward()
    assert most == [0, 1, 1, 1] * (2 * blocks)


def test_more_ties_than_half_precision_counts():
    """Zeros behind a ReLU, of which a hub reads more than 65,504."""
    n = 70_000
    graph = shard(torch.stack([torch.arange(n), torch.zeros(n, dtype=torch.long)]), n, 1).graph
    x = leaf(torch.zeros(n, 1, dtype=torch.float16))
    aggregate(graph, Extremum(1), x)[0].backward(torch.full((1,), 1000, dtype=torch.float16))
    assert torch.equal(x.grad, torch.full((n, 1), 1000 / (n + 1), dtype=torch.float16))
