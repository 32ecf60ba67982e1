"""Routes, what layers ask of an exchange, and the exchange of a single process."""

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from support.layers import TRAFFIC, inputs, leaf
from support.nasty_graph import NUM_NODES, assignment, edges, share

from pyg_sar import ShardedEdgeIndex, shard
from pyg_sar.exchange import Local, LocalSink, Routes

# What worker 1 of three reads and serves: it owns four rows, and reads two of worker 0 and three of worker 2.
ROUTES = Routes(1, (torch.tensor([0, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([1])), (2, 4, 3))


def test_what_follows_from_routes():
    assert (ROUTES.size, ROUTES.num_halo, ROUTES.others) == (3, 5, [2, 0])
    assert ROUTES.spans == [slice(0, 2), slice(2, 2), slice(2, 5)]
    assert ROUTES.ids == [slice(4, 6), slice(0, 4), slice(6, 9)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_who_is_read_serves_at_the_same_step(size):
    routes = [Routes(rank, (), (0,) * size) for rank in range(size)]
    for reader in routes:
        for step, q in enumerate(reader.others):
            assert routes[q].client(routes[q].others[step]) == reader.rank


def test_joined_routes():
    joined, numbers = ROUTES.join([ROUTES, ROUTES])
    assert joined.num_src == (4, 8, 6)
    assert [rows.tolist() for rows in joined.serve] == [[0, 3, 4, 7], [], [1, 5]]
    assert numbers[0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 14]
    assert numbers[1].tolist() == [4, 5, 6, 7, 10, 11, 15, 16, 17]


def test_restricted_routes():
    """Local row 1 and halo rows 0 and 4 are left out; indices stay as small as they are."""
    number = torch.tensor([0, -1, 1, 2, -1, 3, 4, 5, -1])
    served = [torch.tensor(rows, dtype=torch.int32) for rows in ([3], [], [2])]
    routes = ROUTES.restrict(number[4:] >= 0, served, number)
    assert routes.num_src == (1, 3, 2)
    assert [rows.tolist() for rows in routes.serve] == [[2], [], [1]]
    assert {rows.dtype for rows in routes.serve} == {torch.int32}


def test_routes_on_another_device():
    """Index tensors move, ranges stay."""
    moved = Routes(0, ROUTES.serve[:1], (4,), (torch.tensor([1, 3]), slice(0, 2))).to("meta")
    assert all(t.device.type == "meta" for t in (moved, moved.serve[0], moved.shards[0]))
    assert moved.shards[1] == slice(0, 2)
    local = Routes.local([slice(0, 2)], "meta")
    assert local.device.type == local.serve[0].device.type == "meta"
    uncut = Routes(0, local.serve, (2,))
    _, numbers = uncut.join([uncut])
    assert numbers[0].device.type == "meta"


def homed(exchange):
    """Return an exchange whose rows have a home elsewhere, and how many are loaded from there and stored there."""
    rows, elsewhere = Counter(), copy.copy(exchange)

    def moved(where, some):
        rows[where] += some.size(0)
        return some.clone()

    def sink(meter, receiver, about=None):
        stored = SimpleNamespace(add_grad=lambda tile, grad: receiver.add_grad(tile, moved("stored", grad)))
        return exchange.sink(meter, stored, about)

    elsewhere.pull = lambda *args: ((q, moved("loaded", x)) for q, x in exchange.pull(*args))
    elsewhere.sink = sink
    return elsewhere, rows


def trained(case, edge_index, x, extra):
    """Output and gradients of a layer."""
    layer, x = case.build(), x.clone().requires_grad_()
    out = layer(x, edge_index, *extra)
    for e in extra:
        e.grad = None
    out.square().sum().backward()
    return [out, x.grad, *(t.grad.clone() for t in [*layer.parameters(), *extra] if t.requires_grad)]


def compare(edge_index, edge, seed, again):
    """Layers on a graph whose rows are homed elsewhere compute the same numbers, and load and store what they must."""
    graph = edge_index.graph
    x = torch.randn(graph.num_src, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for name, case in TRAFFIC.items():
        extra = [leaf(e[edge], case.learn) for e in inputs(case.roles, edges().size(1), torch.float64)]
        elsewhere, rows = homed(graph.exchange)
        found = trained(case, ShardedEdgeIndex(graph.replace(exchange=elsewhere)), x, extra)
        for got, expected in zip(found, trained(case, edge_index, x, extra), strict=True):
            assert torch.equal(got, expected), name
        read = sum(block.num_src for block in graph.blocks)
        assert rows == {"loaded": read * (1 + (again and case.case_in(1) == 2)), "stored": graph.num_src}, name


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_rows_are_read_and_sent_as_often_as_needed(mode):
    edge_index = shard(edges(), NUM_NODES, 3).replace(remat=mode == 1, one_shot=mode == 3)
    compare(edge_index, slice(None), 0, mode == 1)


def homed_on_workers(group, mode):
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    compare(mine.edge_index, mine.edge, group.rank(), mode == 1)


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_so_they_are_on_workers(pool, mode):
    pool.run(3, homed_on_workers, mode)


def test_local_rows_of_several_exchanges():
    """Shards in one process may hold any rows."""
    assigned = assignment("random", 2)
    shards = [(assigned == q).nonzero().view(-1) for q in range(2)]
    one = Local(Routes.local(shards))
    joined, numbers = one.join([one, one])
    assert joined.routes.num_src == (2 * NUM_NODES,) and joined.alone
    assert torch.equal(torch.cat(numbers), torch.arange(2 * NUM_NODES))
    for q, rows in enumerate(joined.routes.shards):
        assert torch.equal(rows, torch.cat([shards[q], NUM_NODES + shards[q]]))
    last = joined.routes.shards[1]
    number = torch.full((2 * NUM_NODES,), -1).index_copy(0, last, torch.arange(last.numel()))
    fewer = joined.restrict(number[:0], joined.exchange_used_rows(number[:0]), number).routes
    assert fewer.shards == (slice(0, 0), slice(0, last.numel())) and fewer.num_src == (last.numel(),)


def test_gradients_of_each_column_tile():
    """Of two shards of one process, which share a row, in three tiles."""
    found = []
    receiver = SimpleNamespace(add_grad=lambda tile, grad: found.append((tile, grad.flatten().tolist())))
    sink = LocalSink(Routes(0, (), (2,), (torch.tensor([0, 1]), torch.tensor([1]))), receiver)
    for tile in range(3):
        sink.push(0, torch.full((2, 1), tile + 1.0))
        sink.push(1, torch.full((1, 1), 10.0))
    assert found == [(0, [1, 11]), (1, [2, 12]), (2, [3, 13])]
