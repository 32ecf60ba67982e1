"""Node features that were declared constant: nothing travels for them after the first step, and all numbers stay."""

from unittest import mock

import pytest
import torch
import torch_geometric.nn
from support.layers import inputs, leaf
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share

import pyg_sar.nn
from pyg_sar import record_traffic, shard
from pyg_sar.aggregate import reduce_rows

LAYERS = {
    "sage": ("SAGEConv", (8, 4), {}, ""),
    "sage max": ("SAGEConv", (8, 4), {"aggr": "max"}, ""),
    "gcn": ("GCNConv", (8, 4), {}, ""),
    "gin": ("GINConv", (), {}, ""),
    "rgcn": ("RGCNConv", (8, 4, 5), {}, "t"),
    "rgcn with bases": ("RGCNConv", (8, 4, 5, 2), {}, "t"),
    "gat": ("GATConv", (8, 2), {"heads": 2}, ""),
    "gat, which transforms rows where they are read": ("GATConv", (8, 10), {"heads": 2}, ""),
}


def make(library, name):
    kind, args, kwargs, _ = LAYERS[name]
    torch.manual_seed(0)
    args = args or (torch.nn.Linear(8, 4),)
    return getattr(library, kind)(*args, **kwargs).double()


def train(layer, x, rest, rows, steps):
    """Outputs and gradients of some steps, in which parameters change."""
    found = []
    for _ in range(steps):
        layer.zero_grad()
        out = layer(x, *rest)
        backward(out, rows, NUM_NODES)
        found.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
        with torch.no_grad():
            for p in layer.parameters():
                p += 0.1 * torch.ones_like(p)
    return found


def constant(group, mode):
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for name, (*_, roles) in LAYERS.items():
        extra = inputs(roles, edges().size(1), torch.float64)
        expected = train(make(torch_geometric.nn, name), x, [edges(), *extra], torch.arange(NUM_NODES), 3)
        own, layer = x[mine.src], make(pyg_sar.nn, name)
        rest = [mine.edge_index, *(e[mine.edge] for e in extra)]
        found = train(layer, own, rest, mine.dst, 1)
        close(found[0][0], expected[0][0][mine.dst], f"{name}, not kept")
        layer = make(pyg_sar.nn, name)
        mine.edge_index.cache_features(own)
        with record_traffic(mine.edge_index) as first:
            found = train(layer, own, rest, mine.dst, 1)
        with record_traffic(mine.edge_index) as later:
            found += train(layer, own, rest, mine.dst, 2)
        assert first[0].forward_received > 0, name
        assert not any(r.forward_received or r.backward_received for r in later), name
        assert len(found) == 3
        for (out, *grads), (o, *g) in zip(found, expected, strict=True):
            close(out, o[mine.dst], name)
            for mine_grad, grad in zip(grads, g, strict=True):
                torch.distributed.all_reduce(mine_grad, group=group)
                close(mine_grad, grad, f"{name}, gradient")


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_nothing_travels_after_the_first_step(pool, workers, mode):
    pool.run(workers, constant, mode)


def in_tiles(group):
    """Rows that are read in column tiles, twice: fetched, and as they were kept."""
    graph = (mine := share(group, edges(), assignment("random", group.size()))).edge_index.graph
    x = torch.randn(NUM_NODES, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = x[mine.src]
    mine.edge_index.cache_features(own)
    weight = torch.rand(edges().size(1), dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    src, dst = edges()
    expected = torch.zeros_like(x).index_add_(0, dst, x[src] * weight.unsqueeze(1))
    with mock.patch("pyg_sar.reduce.base.COLUMNS", 2), record_traffic(mine.edge_index) as records:
        for _ in range(2):
            close(reduce_rows(graph, own, "sum", weight[mine.edge]), expected[mine.dst], "sum")
    return [r.forward_received > 0 for r in records]


def test_kept_rows_are_cut_as_tiles_are(pool):
    assert pool.run(2, in_tiles) == [[True, False]] * 2


def test_changes_in_place_are_noticed_and_other_tensors_are_not_kept():
    edge_index = shard(edges(), NUM_NODES, 3)
    x, conv = torch.randn(NUM_NODES, 8), pyg_sar.nn.SAGEConv(8, 10)
    edge_index.cache_features(x)
    before = conv(x, edge_index)
    torch.testing.assert_close(conv(x, edge_index), before, rtol=0, atol=0)
    x.mul_(2)
    torch.testing.assert_close(conv(x, edge_index), conv(x.clone(), edge_index), rtol=0, atol=0)
    with torch.no_grad():
        assert not torch.allclose(conv(x, edge_index), before)
    assert len(edge_index.graph.cached) == 1


def forget(group, mode):
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    x, constants = torch.randn(len(mine.src), 8), mine.edge_index.graph.cached
    mine.edge_index.cache_features(x)
    for conv in (pyg_sar.nn.SAGEConv(8, 4), pyg_sar.nn.GATConv(8, 8, 2)):
        conv(x, mine.edge_index).sum().backward()
    ((_, owners),) = constants.values()
    kept = sum(map(len, owners.values()))
    del x, owners
    return kept, len(constants)


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_what_was_kept_ends_with_its_tensor(pool, mode):
    assert pool.run(2, forget, mode) == [(2, 0)] * 2


def one_way(group, mode):
    """Rank 0 reads nothing from others, and serves all the same."""
    edge_index = torch.tensor([[0, 0, 1, 2, 0], [0, 1, 2, 2, 2]])
    mine = share(group, edge_index, torch.tensor([0, 1, 1]), mode=mode)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))[mine.src]
    torch.manual_seed(0)
    conv = pyg_sar.nn.GATConv(8, 8, 2).double()
    expected = conv(x, mine.edge_index)
    mine.edge_index.cache_features(x)
    for _ in range(3):
        out = conv(x, mine.edge_index)
        out.sum().backward()
        close(out, expected, "one way")


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_workers_that_read_nothing_stay_with_the_others(pool, mode):
    pool.run(2, one_way, mode)


def test_a_changed_aggregate_is_made_again_and_others_do_not_pile_up():
    edge_index, x = shard(edges(), NUM_NODES, 3), torch.randn(NUM_NODES, 8)
    conv = pyg_sar.nn.GINConv(torch.nn.Sequential(torch.nn.ELU(inplace=True), torch.nn.Linear(8, 4)))
    expected = conv((x, None), edge_index)
    edge_index.cache_features(x)
    for _ in range(3):
        torch.testing.assert_close(conv((x, None), edge_index), expected)
    kept, rgcn = [], pyg_sar.nn.RGCNConv(8, 4, 5)
    for _ in range(4):
        rgcn(x, edge_index, torch.randint(5, (edges().size(1),)))
        kept.append(edge_index.graph.memory()["cached"])
    assert kept[1] == pytest.approx(kept[3], rel=0.2)


def test_kept_in_inference_mode_serves_training():
    edge_index, x = shard(edges(), NUM_NODES, 3), torch.randn(NUM_NODES, 8)
    edge_index.cache_features(x)
    for conv in (pyg_sar.nn.SAGEConv(8, 4), pyg_sar.nn.GATConv(8, 8, 2)):
        with torch.inference_mode():
            expected = conv(x, edge_index).clone()
        out = conv(x, edge_index)
        out.sum().backward()
        torch.testing.assert_close(out.detach(), expected)


@pytest.mark.parametrize("x", [leaf(torch.randn(NUM_NODES, 2)), torch.randn(NUM_NODES - 1, 2), torch.tensor(1.0)])
def test_refuses_what_is_no_constant_of_all_nodes(x):
    with pytest.raises(ValueError, match="one row for each of this worker's 61 nodes"):
        shard(edges(), NUM_NODES).cache_features(x)
