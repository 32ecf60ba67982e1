"""Message flows hold what the requested nodes depend on and nothing else, and compute what the whole graph does."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.layers import STACKS, inputs, leaf
from support.nasty_graph import NUM_NODES, Share, assignment, close, edges, share

import pyg_sar.nn
from pyg_sar import message_flow_graphs, record_traffic, shard
from pyg_sar.aggregate import reduce_rows
from pyg_sar.distributed.traffic import Traffic

EDGES = edges()
TARGETS = {
    "few": torch.tensor([3, 11, 17, 40, 59]),
    "one": torch.tensor([30]),  # most workers request nothing
    "lonely": torch.tensor([7]),  # no edges at all
    "all": torch.arange(NUM_NODES),
    "none": torch.tensor([], dtype=torch.long),
}
GRID = [
    *[(mode, method, prefetch, "few") for mode in (1, 2, 3) for method, prefetch in (("random", 0), ("empty", 1))],
    *[(1, "metis", 2, target) for target in ("one", "lonely", "all", "none")],
    *[(3, "empty", 0, target) for target in ("one", "none")],
]


def requested(target: str) -> torch.Tensor:
    return torch.zeros(NUM_NODES, dtype=torch.bool).index_fill(0, TARGETS[target], True)


def levels(target: str, num_layers: int) -> list[set[int]]:
    """The nodes that are computed before, between and after the layers, from the edges alone."""
    found = [set(TARGETS[target].tolist())]
    for _ in range(num_layers):
        found.insert(0, found[0] | {s for s, d in EDGES.t().tolist() if d in found[0]})
    return found


def pieces(num_parts: int, method: str, mode: int) -> Share:
    """The whole graph in one process, in pieces."""
    part = None if method == "contiguous" else assignment(method, num_parts)
    it = shard(EDGES, NUM_NODES, num_parts, assignment=part).replace(remat=mode == 1)
    nodes = torch.arange(NUM_NODES)
    return Share(it.merge() if mode == 3 else it, nodes, nodes, torch.arange(EDGES.size(1)))


# What it holds


def endpoints(layer):
    """Global ids of sources and destinations of the edges."""
    graph = layer.graph
    exchange = graph.exchange.one_shot()
    ((_, ids),) = exchange.pull([graph.n_id], exchange.order(1), Traffic().forward)
    source, row = graph.coo()
    return torch.stack([ids[source], graph.n_id[row]])


def contents(group, method, mode, target, num_layers):
    mine = share(group, EDGES, assignment(method, group.size()), mode=mode, prefetch=2, comm_dtype=torch.bfloat16)
    mask = requested(target)[mine.src]
    flow = message_flow_graphs(mine.edge_index, mask, num_layers)
    assert torch.equal(flow.node_rows[: mask.sum()], mask.nonzero().view(-1))
    assert torch.equal(mine.src[flow.node_rows], flow.edge_indices[0].graph.n_id)
    found = []
    for layer, positions in zip(flow.edge_indices, flow.edge_rows, strict=True):
        graph = layer.graph
        assert graph.seeds is mine.edge_index.graph.seeds and graph.remat == mine.edge_index.graph.remat
        assert torch.equal(graph.e_id, mine.edge[positions])
        assert torch.equal(endpoints(layer), EDGES[:, graph.e_id])
        assert all(block.col.dtype == block.rowptr.dtype == torch.int32 for block in graph.blocks)
        ours, theirs = (vars(it.graph.exchange) for it in (layer, mine.edge_index))
        assert all(ours.get(name) is theirs.get(name) for name in ("log", "group", "prefetch"))
        assert group.size() == 1 or ours["channel"].comm_dtype is theirs["channel"].comm_dtype is torch.bfloat16
        found.append((graph.n_id, graph.n_id[: graph.num_dst], graph.e_id))
    for (_, dst, _), (src, _, _) in itertools.pairwise(found):
        assert torch.equal(dst, src)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize(("workers", "method"), [(1, "random"), (2, "metis"), (3, "empty"), (4, "random")])
def test_exactly_what_the_requested_nodes_depend_on(pool, workers, method, mode, target):
    expected, part = levels(target, 3), assignment(method, workers)
    for rank, layers in enumerate(pool.run(workers, contents, method, mode, target, 3)):
        for k, (src, dst, e_id) in enumerate(layers):
            assert sorted(src.tolist()) == sorted(i for i in expected[k] if part[i] == rank)
            assert sorted(dst.tolist()) == sorted(i for i in expected[k + 1] if part[i] == rank)
            into = [e for e, d in enumerate(EDGES[1].tolist()) if d in expected[k + 1] and part[d] == rank]
            assert sorted(e_id.tolist()) == into


def traffic(group, mode):
    """Bytes of a layer of sums, forward and backward, and what they must be: a row for each reader of it."""
    rank, part = dist.get_rank(group), assignment("random", group.size())
    mine = share(group, EDGES, part, mode=mode)
    flow = message_flow_graphs(mine.edge_index, requested("few")[mine.src], 2)
    x = torch.randn(len(flow.node_rows), 8, requires_grad=True)
    with record_traffic(mine.edge_index) as records:
        h = reduce_rows(flow.edge_indices[0].graph, x, "sum")
        reduce_rows(flow.edge_indices[1].graph, h, "sum").sum().backward()
    found = [(t.forward_received, t.forward_sent, t.backward_received, t.backward_sent) for t in records]
    expected = []
    for into in levels("few", 2)[1:]:
        reads = {(s, int(part[d])) for s, d in EDGES.t().tolist() if d in into and part[s] != part[d]}
        received = 32 * sum(reader == rank for _, reader in reads)
        sent = 32 * sum(int(part[s]) == rank for s, _ in reads)
        expected.append((received, sent, sent, received))
    return found, expected


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 4])
def test_only_rows_that_are_needed_travel(pool, workers, mode):
    for found, expected in pool.run(workers, traffic, mode):
        assert found == expected


# What it computes

KINDS = STACKS[:3]  # a sum, a maximum, a softmax


def stack(nn, case):
    """Two layers."""
    return torch.nn.ModuleList(case.build(nn, seed=seed) for seed in range(2))


def run(convs, x, layers, extra, rows):
    """Output for the first rows, and all gradients; ``extra`` has an edge input for each layer, or none."""
    convs.zero_grad()
    h = x
    for conv, layer, more in zip(convs, layers, extra, strict=True):
        h = conv(h, layer, *more).tanh()
    h = h if rows is None else h[rows]
    weight = torch.randn(NUM_NODES, h.size(1), generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return h, weight


@functools.cache
def everything():
    return torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def expect(case, target):
    """PyG on the whole graph."""
    convs, x, (extra,) = stack(torch_geometric.nn, case), leaf(everything()), [edge_inputs(case)]
    h, weight = run(convs, x, [EDGES] * 2, extra, TARGETS[target])
    (h * weight[TARGETS[target]]).sum().backward()
    return h.detach(), x.grad, [[e.grad for e in more] for more in extra], [p.grad for p in convs.parameters()]


def edge_inputs(case):
    """Inputs of each of the two layers."""
    return [[leaf(e) for e in inputs(case.roles, EDGES.size(1), torch.float64)] for _ in range(2)]


def compare(mine, case, target, what, total, known):
    """Compare a flow over a share of the graph with PyG; ``total`` sums over the workers. Layers are made once for each
    target, and infer how they run on its flow.
    """
    if target not in known:
        known[target] = stack(pyg_sar.nn, case), expect(case, target)
    convs, (expected, d_x, d_extra, d_params) = known[target]
    flow = message_flow_graphs(mine.edge_index, requested(target)[mine.src], 2)
    x = leaf(everything()[mine.src[flow.node_rows]])
    extra = edge_inputs(case)
    local = [[leaf(e[mine.edge[p]]) for e in more] for more, p in zip(extra, flow.edge_rows, strict=True)]
    h, weight = run(convs, x, flow.edge_indices, local, None)
    ids = mine.src[requested(target)[mine.src]]
    out = torch.zeros(NUM_NODES, h.size(1), dtype=torch.float64)
    out[TARGETS[target]] = expected
    close(h, out[ids], f"{what}: output")
    (h * weight[ids]).sum().backward()
    found = torch.zeros_like(d_x)
    found[mine.src[flow.node_rows]] = x.grad
    close(total(found), d_x, f"{what}: x")
    for k, (more, grads) in enumerate(zip(local, d_extra, strict=True)):
        for e, grad in zip(more, grads, strict=True):
            if grad is not None:
                found = torch.zeros_like(grad)
                found[mine.edge[flow.edge_rows[k]]] = e.grad
                close(total(found), grad, f"{what}: edge input of layer {k}")
    for (key, p), grad in zip(convs.named_parameters(), d_params, strict=True):
        close(total(torch.zeros_like(p) if p.grad is None else p.grad), grad, f"{what}: {key}")


def check(group, case):
    def total(t):
        t = t.clone()
        dist.all_reduce(t, group=group)
        return t

    known = {}
    for mode, method, prefetch, target in GRID:
        mine = share(group, EDGES, assignment(method, group.size()), mode=mode, prefetch=prefetch)
        what = f"{case} {target} mode {mode} {method} prefetch {prefetch} rank {dist.get_rank(group)}"
        compare(mine, case, target, what, total, known)
    return len(GRID)


def some(workers, usual, others):
    """Every other layer on the usual number of workers, a sum, a maximum and a softmax on others, too; the rest is for
    the grid.
    """
    return [
        pytest.param(n, case, id=f"{n}-{case}",
                     marks=[] if (n == usual and k % 2 == 0) or (n in others and case in KINDS) else pytest.mark.grid)
        for (k, case), n in itertools.product(enumerate(STACKS), workers)
    ]  # fmt: skip


@pytest.mark.parametrize(("workers", "case"), some((1, 2, 4), 2, ()))
def test_equals_pyg_on_the_whole_graph(pool, workers, case):
    assert pool.run(workers, check, case) == [len(GRID)] * workers


@pytest.mark.parametrize(("num_parts", "case"), some((1, 3), None, (1, 3)))
def test_equals_pyg_in_pieces_of_one_process(num_parts, case):
    known = {}
    for mode, method, target in itertools.product((1, 2, 3), ("contiguous", "empty"), ("few", "lonely", "none")):
        mine, what = pieces(num_parts, method, mode), f"{case} {target} mode {mode} {method}"
        compare(mine, case, target, what, lambda t: t, known)


def constant(group, case):
    """Steps on features of which the first layer keeps what it can."""
    mine = share(group, EDGES, assignment("random", group.size()))
    mask = requested("few")[mine.src]
    flow, ids = message_flow_graphs(mine.edge_index, mask, 2), mine.src[mask]
    expected, _, _, d_params = expect(case, "few")
    convs, x = stack(pyg_sar.nn, case), everything()[mine.src[flow.node_rows]]
    flow.edge_indices[0].cache_features(x)
    extra = [
        [e.detach()[mine.edge[p]] for e in more] for more, p in zip(edge_inputs(case), flow.edge_rows, strict=True)
    ]
    out = torch.zeros(NUM_NODES, expected.size(1), dtype=torch.float64).index_copy(0, TARGETS["few"], expected)
    received = []
    for _ in range(2):
        with record_traffic(mine.edge_index) as records:
            h, weight = run(convs, x, flow.edge_indices, extra, None)
            (h * weight[ids]).sum().backward()
        received.append(sum(t.forward_received + t.backward_received for t in records))
        close(h, out[ids], f"{case}: output")
        for (key, p), grad in zip(convs.named_parameters(), d_params, strict=True):
            found = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(found, group=group)
            close(found, grad, f"{case}: {key}")
    return received


@pytest.mark.parametrize(("workers", "case"), some((1, 3), None, (1, 3)))
def test_constant_features(pool, workers, case):
    for first, second in pool.run(workers, constant, case):
        assert second <= first
    if workers > 1 and case is KINDS[0]:
        assert first > second, "the sum is kept"


def sums(group):
    """Sums over the rows of a flow against those over all rows, bit by bit."""
    mine = share(group, EDGES, assignment("random", group.size()))
    flow = message_flow_graphs(mine.edge_index, requested("few")[mine.src], 2)
    h, part = everything()[mine.src], everything()[mine.src[flow.node_rows]]
    for layer in flow.edge_indices:
        h, part = (reduce_rows(it.graph, t, "mean") for it, t in ((mine.edge_index, h), (layer, part)))
    assert len(part) == len(TARGETS["few"][torch.isin(TARGETS["few"], mine.src)])
    assert torch.equal(part, h[requested("few")[mine.src]])


@pytest.mark.parametrize("workers", [1, 3])
def test_sums_are_those_of_the_whole_graph_bit_for_bit(pool, workers):
    pool.run(workers, sums)


class GAT(torch.nn.Module):
    """Three layers with attention dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList(pyg_sar.nn.GATConv(8, 4, 2, dropout=0.5) for _ in range(3)).double()

    def forward(self, x, layers):
        for conv, edge_index in zip(self.convs, layers, strict=True):
            x = conv(x, edge_index).tanh()
        return x


def dropped(group, mode):
    """Output and gradients on a flow, and on the whole graph with the same seeds."""
    mine, model, results = share(group, EDGES, assignment("random", group.size()), mode=mode), GAT(), []
    mask = requested("few")[mine.src]
    flow = message_flow_graphs(mine.edge_index, mask, 3)
    for rows, layers, chosen in ((flow.node_rows, flow.edge_indices, None), (slice(None), [mine.edge_index] * 3, mask)):
        mine.edge_index.graph.seeds.manual_seed(6)
        model.zero_grad()
        h = model(everything()[mine.src[rows]], layers)
        h = h if chosen is None else h[chosen]
        h.square().sum().backward()
        out = torch.zeros(NUM_NODES, 8, dtype=torch.float64)
        out[mine.src[mask]] = h.detach()
        found = [out, *(p.grad for p in model.parameters())]
        for t in found:
            dist.all_reduce(t, group=group)
        results.append(found)
    return results


@pytest.mark.parametrize("mode", [1, 3])
def test_attention_dropout_has_the_masks_of_the_whole_graph(pool, mode):
    one, two, four = (pool.run(workers, dropped, mode)[0] for workers in (1, 2, 4))
    assert one[0][0].abs().sum() > 0
    for results in (one, two, four):
        for found in results:
            for f, e in zip(found, one[1], strict=True):
                close(f, e, "with dropout")


LINEAR = torch.nn.Linear
CONVERTED = {  # from a tensor that stands for both, or several
    "GraphConv": lambda: torch_geometric.nn.GraphConv(8, 4),
    "CGConv": lambda: torch_geometric.nn.CGConv(8),
    "EdgeConv": lambda: torch_geometric.nn.EdgeConv(LINEAR(16, 4)),
    "GeneralConv": lambda: torch_geometric.nn.GeneralConv(8, 4, heads=2, attention=True),
    "FeaStConv": lambda: torch_geometric.nn.FeaStConv(8, 4, heads=2),  # adds self-loops
    "MFConv": lambda: torch_geometric.nn.MFConv(8, 4),
    "PointNetConv": lambda: torch_geometric.nn.PointNetConv(LINEAR(11, 4)),
    "PointTransformerConv": lambda: torch_geometric.nn.PointTransformerConv(8, 4),
}


def converted(group, name):
    mine = share(group, EDGES, assignment("random", group.size()))
    torch.manual_seed(0)
    layer = CONVERTED[name]().double()
    pos = torch.randn(NUM_NODES, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    given = [everything(), pos] if name.startswith("Point") else [everything()]
    expected = layer(*given, EDGES)
    mask = requested("few")[mine.src]
    flow = message_flow_graphs(mine.edge_index, mask, 1)
    inputs = [leaf(t[mine.src[flow.node_rows]]) for t in given]
    every = [leaf(t) for t in given]
    layer(*every, EDGES)[TARGETS["few"]].square().sum().backward()
    expected_grads = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    out = pyg_sar.nn.convert(layer, group)(*inputs, flow.edge_indices[0])
    close(out, expected[mine.src[mask]], name)
    out.square().sum().backward()
    for t, whole in zip(inputs, every, strict=True):
        found = torch.zeros_like(whole)
        found[mine.src[flow.node_rows]] = t.grad
        dist.all_reduce(found, group=group)
        close(found, whole.grad, f"{name}: gradient")
    for p, grad in zip(layer.parameters(), expected_grads, strict=True):
        found = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(found, group=group)
        close(found, grad, f"{name}: gradient of a parameter")
    assert "streams" in pyg_sar.nn.describe(layer)


# On three workers one has no edges, which FeaStConv refuses.
@pytest.mark.parametrize(
    ("workers", "name"), [(n, name) for name in CONVERTED for n in (1, 3) if (name, n) != ("FeaStConv", 3)]
)
def test_converted_layers_take_a_tensor(pool, name, workers):
    pool.run(workers, converted, name)


class Remembers(torch_geometric.nn.MessagePassing):
    """Is called with a pair of what is no pair of rows of both ends."""

    def forward(self, x: "torch.Tensor | tuple[torch.Tensor, torch.Tensor]", edge_index, state):
        return self.propagate(edge_index, x=x, h=(state[0], None), c=(state[1], None))

    def message(self, x_j, h_j, c_j):
        return torch.cat([x_j, h_j, c_j], -1)


def test_another_pair_stays():
    flow, x = message_flow_graphs(shard(EDGES, NUM_NODES, 3), requested("few"), 1), everything()
    layer, rows = Remembers(), x[flow.node_rows]
    expected = layer((x, x), EDGES, (x + 1, 2 * x))[TARGETS["few"]]
    found = pyg_sar.nn.convert(layer)(rows, flow.edge_indices[0], (rows + 1, 2 * rows))
    close(found, expected, "output")


def test_a_pair_of_all_rows_has_destinations_first():
    """As heterogeneous models pass it."""
    flow, x = message_flow_graphs(shard(EDGES, NUM_NODES, 3), requested("few"), 1), everything()
    layer = pyg_sar.nn.SAGEConv(8, 4).double()
    rows = x[flow.node_rows]
    assert len(rows) > 5
    close(layer((rows, rows), flow.edge_indices[0]), layer(x, EDGES)[TARGETS["few"]], "output")
    with pytest.raises(ValueError, match="5 destinations"):
        layer((rows, rows[:-1]), flow.edge_indices[0])


def test_rgcn_without_features():
    torch.manual_seed(0)
    types = torch.randint(5, (EDGES.size(1),))
    layer = pyg_sar.nn.RGCNConv(NUM_NODES, 4, 5).double()
    expected = layer(None, EDGES, types)[TARGETS["few"]]
    flow = message_flow_graphs(shard(EDGES, NUM_NODES, 3), requested("few"), 1)
    for x in (None, flow.node_rows):
        close(layer(x, flow.edge_indices[0], types[flow.edge_rows[0]]), expected, "node ids")


def test_modes_and_devices_of_a_layer():
    x, layer = everything(), pyg_sar.nn.GCNConv(8, 4).double()
    expected = layer(x, EDGES)[TARGETS["few"]]
    flow = message_flow_graphs(shard(EDGES, NUM_NODES, 3), requested("few"), 1)
    (edge_index,) = flow.edge_indices
    for it in (edge_index, edge_index.merge(), edge_index.replace(remat=False)):
        close(layer(x[flow.node_rows], it), expected, "output")
    moved = edge_index.to("meta").graph
    assert moved.blocks[0].col.is_meta and moved.source_degree.is_meta


def test_in_inference_mode():
    x, layer = everything(), pyg_sar.nn.SAGEConv(8, 4).double()
    with torch.inference_mode():
        flow = message_flow_graphs(shard(EDGES, NUM_NODES, 2), requested("few"), 1)
        close(layer(x[flow.node_rows], flow.edge_indices[0]), layer(x, EDGES)[TARGETS["few"]], "inference")
    layer(x[flow.node_rows], flow.edge_indices[0]).sum().backward()


# What it refuses


@pytest.fixture
def layer_of_flow():
    return message_flow_graphs(shard(EDGES, NUM_NODES, 2), requested("few"), 1).edge_indices[0]


PYG = [
    ("SAGEConv", (8, 4), {}),
    ("GATConv", (8, 4), {"heads": 2}),
    ("GATv2Conv", (8, 4), {"heads": 2}),
    ("GraphConv", (8, 4), {"aggr": "mean"}),
]


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("name", "args", "kwargs"), PYG)
def test_layers_of_pyg_take_a_pair(name, args, kwargs, num_parts):
    torch.manual_seed(0)
    layer, x = getattr(torch_geometric.nn, name)(*args, **kwargs).double(), leaf(everything())
    out = layer(x, EDGES)[TARGETS["few"]]
    (expected,) = torch.autograd.grad(out.square().sum(), x)
    flow = message_flow_graphs(shard(EDGES, NUM_NODES, num_parts), requested("few"), 1)
    h = x[flow.node_rows]
    found = layer((h, h[: flow.edge_indices[0].graph.num_dst]), flow.edge_indices[0])
    close(found, out, name)
    close(torch.autograd.grad(found.square().sum(), x)[0], expected, name)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "why"),
    [
        ("SAGEConv", (8, 4), {}, "no in-edges of the sources"),
        ("GCNConv", (8, 4), {}, "self-loop"),
        ("GCNConv", (8, 4), {"add_self_loops": False}, "no in-edges of the sources"),  # degrees of sources
        ("GATConv", (8, 4), {"add_self_loops": False}, "no in-edges of the sources"),
        ("TAGConv", (8, 4), {"normalize": False}, "no in-edges of the sources"),  # several hops
        ("SAGEConv", (8, 4), {"flow": "target_to_source"}, "all out-edges"),
    ],
)
def test_layers_of_pyg_that_would_be_wrong_are_refused(layer_of_flow, name, args, kwargs, why):
    layer, x = getattr(torch_geometric.nn, name)(*args, **kwargs), torch.randn(layer_of_flow.graph.num_src, 8)
    with pytest.raises(NotImplementedError, match=why):
        layer(x, layer_of_flow)


def test_degrees_of_sources_by_hand_are_refused(layer_of_flow):
    src, dst = layer_of_flow
    degree = torch.zeros(layer_of_flow.graph.num_src).scatter_add(0, dst, torch.ones(len(dst)))
    with pytest.raises(NotImplementedError, match="no in-edges of the sources"):
        degree[src]
    with pytest.raises(NotImplementedError, match="all out-edges"):
        torch.zeros(layer_of_flow.graph.num_src).scatter_add(0, src, torch.ones(len(dst)))


def test_gcn_refuses_weights_that_it_would_have_to_normalise(layer_of_flow):
    weight, x = torch.rand(layer_of_flow.size(1)), torch.randn(layer_of_flow.graph.num_src, 8)
    with pytest.raises(ValueError, match=r"'pyg-sar partition --gcn-norm'.*'normalize=False'"):
        pyg_sar.nn.GCNConv(8, 4)(x, layer_of_flow, weight)


def test_rows_of_all_nodes_are_refused(layer_of_flow):
    with pytest.raises(ValueError, match=r"'x\[flow\.node_rows\]'"):
        pyg_sar.nn.SAGEConv(8, 4)(torch.randn(NUM_NODES, 8), layer_of_flow)


@pytest.mark.parametrize(
    ("edge_index", "error", "why"),
    [
        (EDGES, TypeError, "'pyg_sar.load'"),
        (shard(EDGES, (NUM_NODES, NUM_NODES)), ValueError, "between two sets of nodes"),
        (
            message_flow_graphs(shard(EDGES, NUM_NODES), requested("all"), 1).edge_indices[0],
            ValueError,
            "a layer of a message-flow graph",
        ),
    ],
)
def test_other_graphs_are_refused(edge_index, error, why):
    with pytest.raises(error, match=why):
        message_flow_graphs(edge_index, requested("few"), 1)


WRONG = {
    "shape": (lambda mask: mask[1:], 2, r"rank 1: expected 'mask' to hold a boolean for each of its \d+ nodes"),
    "dtype": (lambda mask: mask.long(), 2, r"rank 1: .*torch\.int64 of shape"),
    "kind": (lambda mask: None, 2, "rank 1: .*NoneType"),
    "zero layers": (lambda mask: mask, 0, r"rank 1: .*at least 1 \(got 0\)"),
    "other layers": (lambda mask: mask, 3, r"differ in 'num_layers' \(rank 0: 2, rank 1: 3, rank 2: 2\)"),
}


def wrong_on_one(group, what, mode):
    mine = share(group, EDGES, assignment("random", group.size()), mode=mode)
    change, num_layers, why = WRONG[what]
    odd, mask = dist.get_rank(group) == 1, requested("few")[mine.src]
    with pytest.raises(ValueError, match=rf"^\[rank {dist.get_rank(group)}\] (?s:.*){why}"):
        message_flow_graphs(mine.edge_index, change(mask) if odd else mask, num_layers if odd else 2)


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("what", WRONG)
def test_all_workers_hear_of_a_wrong_argument(pool, what, mode):
    pool.run(3, wrong_on_one, what, mode)


def steps(group, method):
    """Gradients of the flow of all labels, and of those of every fourth label together."""
    mine = share(group, EDGES, assignment(method, group.size()))
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([pyg_sar.nn.SAGEConv(8, 8), pyg_sar.nn.SAGEConv(8, 3)]).double()
    x, mask = torch.randn(NUM_NODES, 8).double()[mine.src], (torch.arange(NUM_NODES) % 3 > 0)[mine.src]
    place, found = torch.arange(len(mask)) % 4, []
    quarters = [mask & (place == k) for k in range(4)]
    assert torch.equal(sum(quarter.int() for quarter in quarters), mask.int()), "disjoint, and all of them"
    for masks in ([mask], quarters):
        convs.zero_grad()
        for flow in [message_flow_graphs(mine.edge_index, one, 2) for one in masks]:
            h = convs[0](x[flow.node_rows], flow.edge_indices[0]).relu()
            convs[1](h, flow.edge_indices[1]).square().sum().backward()
        pyg_sar.sum_gradients(convs, group)
        found.append([p.grad.clone() for p in convs.parameters()])
    for one, other in zip(*found, strict=True):
        close(other, one, "gradient of a parameter")


@pytest.mark.parametrize(("size", "method"), [(1, "random"), (2, "random"), (3, "empty")])
def test_steps_on_disjoint_labels_have_the_gradient_of_all(pool, size, method):
    pool.run(size, steps, method)
