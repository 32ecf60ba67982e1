"""Message flows hold what the requested nodes depend on and nothing else, and compute what the whole graph does."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from layer_check import inputs, leaf
from problem import NUM_NODES, Share, assignment, close, edges, share

import pyg_sar.nn
from pyg_sar import message_flow, record_traffic, shard
from pyg_sar.distributed.exchange import Traffic
from pyg_sar.nn.message_passing import reduce_rows

EDGES = edges()
TARGETS = {
    "few": torch.tensor([3, 11, 17, 40, 59]),
    "one": torch.tensor([30]),  # most workers request nothing
    "lonely": torch.tensor([7]),  # no edges at all
    "all": torch.arange(NUM_NODES),
    "none": torch.tensor([], dtype=torch.long),
}
GRID = [
    *itertools.product((1, 2, 3), ("random", "empty"), (0, 1), ("few",)),
    *itertools.product((1, 3), ("metis",), (2,), TARGETS),
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
    ((_, ids),) = graph.exchange.merge().pull(graph.n_id, Traffic().forward)
    source, row = graph.coo()
    return torch.stack([ids[source], graph.n_id[row]])


def contents(group, method, mode, target, num_layers):
    mine = share(group, EDGES, assignment(method, group.size()), mode=mode)
    flow = message_flow(mine.edge_index, requested(target)[mine.src], num_layers)
    assert torch.equal(mine.src[flow.rows[: requested(target)[mine.src].sum()]], mine.src[requested(target)[mine.src]])
    assert torch.equal(mine.src[flow.rows], flow.layers[0].graph.n_id)
    found = []
    for layer, positions in zip(flow.layers, flow.edges, strict=True):
        graph = layer.graph
        assert graph.seeds is mine.edge_index.graph.seeds and graph.remat == mine.edge_index.graph.remat
        assert torch.equal(graph.e_id, mine.edge[positions])
        assert torch.equal(endpoints(layer), EDGES[:, graph.e_id])
        assert all(block.col.dtype == block.rowptr.dtype == torch.int32 for block in graph.blocks)
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
    flow = message_flow(mine.edge_index, requested("few")[mine.src], 2)
    x = torch.randn(len(flow.rows), 8, requires_grad=True)
    with record_traffic(mine.edge_index) as records:
        h = reduce_rows(flow.layers[0].graph, x, "sum")
        reduce_rows(flow.layers[1].graph, h, "sum").sum().backward()
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

S, C, A, R = "SAGEConv", "GCNConv", "GATConv", "RGCNConv"
V, D, F, G = "GATv2Conv", "TransformerConv", "FastRGCNConv", "GINConv"
LAYERS = [
    *((S, (8, 8), {"aggr": aggr}, "") for aggr in ("mean", "max")),
    (S, (8, 8), {"project": True, "normalize": True}, ""),
    (S, (8, 8), {"aggr": "std"}, ""),  # in one shot
    *((C, (8, 8), options, "") for options in ({}, {"improved": True}, {"add_self_loops": False})),
    (C, (8, 8), {"normalize": False}, "w"),
    (G, (), {"nn": (8, 8), "train_eps": True}, ""),
    (A, (8, 4), {"heads": 2, "residual": True}, ""),
    (A, (8, 4), {"heads": 2, "aggr": "max"}, ""),  # in one shot
    (A, (8, 4), {"heads": 2, "edge_dim": 3, "fill_value": "mean"}, "a"),
    (A, (8, 4), {"heads": 2, "add_self_loops": False}, ""),
    (V, (8, 4), {"heads": 2}, ""),
    (V, (8, 4), {"heads": 2, "share_weights": True, "residual": True, "edge_dim": 3}, "a"),
    (D, (8, 4), {"heads": 2, "edge_dim": 3, "beta": True}, "a"),
    (R, (8, 8, 5), {}, "t"),
    (R, (8, 8, 5), {"num_bases": 2}, "t"),
    (R, (8, 8, 5), {"aggr": "max"}, "t"),
    (F, (8, 8, 5), {"num_blocks": 2}, "t"),
]


def stack(nn, name, args, kwargs):
    """Two layers."""
    torch.manual_seed(0)
    inner = [{"nn": torch.nn.Linear(*kwargs["nn"])} if "nn" in kwargs else {} for _ in range(2)]
    return torch.nn.ModuleList([getattr(nn, name)(*args, **{**kwargs, **more}) for more in inner]).double()


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


def expect(name, args, kwargs, roles, target):
    """PyG on the whole graph."""
    convs, x, (extra,) = stack(torch_geometric.nn, name, args, kwargs), leaf(everything()), [edge_inputs(roles)]
    h, weight = run(convs, x, [EDGES] * 2, extra, TARGETS[target])
    (h * weight[TARGETS[target]]).sum().backward()
    return h.detach(), x.grad, [[e.grad for e in more] for more in extra], [p.grad for p in convs.parameters()]


def edge_inputs(roles):
    """Inputs of each of the two layers."""
    return [[leaf(e) for e in inputs(roles, EDGES.size(1), torch.float64)] for _ in range(2)]


def compare(mine, name, args, kwargs, roles, target, what, total, known):
    """Compare a flow over a share of the graph with PyG; ``total`` sums over the workers."""
    if target not in known:
        known[target] = expect(name, args, kwargs, roles, target)
    expected, d_x, d_extra, d_params = known[target]
    flow = message_flow(mine.edge_index, requested(target)[mine.src], 2)
    convs, x = stack(pyg_sar.nn, name, args, kwargs), leaf(everything()[mine.src[flow.rows]])
    extra = edge_inputs(roles)
    local = [[leaf(e[mine.edge[p]]) for e in more] for more, p in zip(extra, flow.edges, strict=True)]
    h, weight = run(convs, x, flow.layers, local, None)
    ids = mine.src[requested(target)[mine.src]]
    out = torch.zeros(NUM_NODES, h.size(1), dtype=torch.float64)
    out[TARGETS[target]] = expected
    close(h, out[ids], f"{what}: output")
    (h * weight[ids]).sum().backward()
    found = torch.zeros_like(d_x)
    found[mine.src[flow.rows]] = x.grad
    close(total(found), d_x, f"{what}: x")
    for k, (more, grads) in enumerate(zip(local, d_extra, strict=True)):
        for e, grad in zip(more, grads, strict=True):
            if grad is not None:
                found = torch.zeros_like(grad)
                found[mine.edge[flow.edges[k]]] = e.grad
                close(total(found), grad, f"{what}: edge input of layer {k}")
    for (key, p), grad in zip(convs.named_parameters(), d_params, strict=True):
        close(total(torch.zeros_like(p) if p.grad is None else p.grad), grad, f"{what}: {key}")


def check(group, name, args, kwargs, roles):
    def total(t):
        t = t.clone()
        dist.all_reduce(t, group=group)
        return t

    known = {}
    for mode, method, prefetch, target in GRID:
        mine = share(group, EDGES, assignment(method, group.size()), mode=mode, prefetch=prefetch)
        what = f"{name} {kwargs} {target} mode {mode} {method} prefetch {prefetch} rank {dist.get_rank(group)}"
        compare(mine, name, args, kwargs, roles, target, what, total, known)
    return len(GRID)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "args", "kwargs", "roles"), LAYERS)
def test_equals_pyg_on_the_whole_graph(pool, workers, name, args, kwargs, roles):
    assert pool.run(workers, check, name, args, kwargs, roles) == [len(GRID)] * workers


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize(("name", "args", "kwargs", "roles"), LAYERS)
def test_equals_pyg_in_pieces_of_one_process(num_parts, name, args, kwargs, roles):
    known = {}
    for mode, method, target in itertools.product((1, 2, 3), ("contiguous", "empty"), ("few", "lonely", "none")):
        mine, what = pieces(num_parts, method, mode), f"{name} {kwargs} {target} mode {mode} {method}"
        compare(mine, name, args, kwargs, roles, target, what, lambda t: t, known)
