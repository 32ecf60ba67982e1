"""The order of rows: a permutation that brings neighbors together, and that ``n_id`` takes back."""

from collections import OrderedDict

import pytest
import torch
from support.sample_graphs import GRAPHS, put_together, random_edges, read_part
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.data import store
from pyg_sar.data.datasets import community_graph
from pyg_sar.data.order import ORDERS, fennel_order, order_within


def cliques(count=20, size=32):
    """Cliques that nothing joins, their nodes shuffled, and the clique of each node."""
    block = torch.combinations(torch.arange(size)).t()
    edge_index = torch.cat([block + size * c for c in range(count)], 1)
    name = torch.randperm(count * size, generator=torch.Generator().manual_seed(0))
    return name[edge_index], name.argsort() // size


def is_permutation(order, num_nodes):
    return order.dtype == torch.int64 and order.sort().values.equal(torch.arange(num_nodes))


ODD = {
    "one edge": (1000, [[3], [900]]),
    "directed star": (1000, [list(range(1, 1000)), [0] * 999]),
    "directed path": (1000, [list(range(999)), list(range(1, 1000))]),
    "pairs": (1000, [list(range(0, 1000, 2)), list(range(1, 1000, 2))]),
    "many self-loops": (1000, [list(range(1000)), list(range(1000))]),
    "many duplicates": (1000, [[5, 7, 7] * 500, [7, 5, 7] * 500]),
    "dense and isolated": (1000, torch.combinations(torch.arange(60)).t().tolist()),
    "a leaf and a node": (33, [[0], [32]]),
}


@pytest.mark.parametrize("name", [*GRAPHS, *ODD])
def test_it_is_a_permutation(name):
    num_nodes, edges = ODD[name] if name in ODD else GRAPHS[name]
    edge_index = torch.tensor(edges, dtype=torch.long)
    before = edge_index.clone()
    for order in ORDERS.values():
        assert is_permutation(order(edge_index, num_nodes, 0), num_nodes)
    assert edge_index.equal(before)


def test_same_seed_same_order():
    edge_index = random_edges(500, 4000)
    first = pyg_sar.locality_order(edge_index, 500, seed=3)
    assert pyg_sar.locality_order(edge_index, 500, seed=3).equal(first)
    assert not pyg_sar.locality_order(edge_index, 500, seed=4).equal(first)


def test_direction_loops_and_duplicates_do_not_count():
    edge_index = random_edges(500, 4000)
    expected = pyg_sar.locality_order(edge_index, 500)
    loops = torch.arange(500).expand(2, -1)
    assert pyg_sar.locality_order(torch.cat([edge_index.flip(0), edge_index, loops], 1), 500).equal(expected)


@pytest.mark.parametrize("edge_index", [torch.tensor([[0], [9]]), torch.tensor([[-1], [3]]), torch.zeros(2, 3)])
def test_bad_edges(edge_index):
    with pytest.raises(ValueError, match="Expected"):
        pyg_sar.locality_order(edge_index, 9)


def test_cliques_stay_together():
    edge_index, clique = cliques()
    order = pyg_sar.locality_order(edge_index, clique.numel())
    assert clique[order].diff().ne(0).sum() == 19


def test_an_order_within_parts_knows_the_edges_within_parts_alone():
    edge_index, clique = cliques()
    across = random_edges(640, 5000)
    across = across[:, clique[across[0]] % 3 != clique[across[1]] % 3]
    nodes = order_within((clique % 3).int(), torch.cat([edge_index, across], 1), 4)
    assert is_permutation(nodes, 640)
    assert (clique % 3)[nodes].equal((clique % 3).sort().values)
    assert clique[nodes].diff().ne(0).sum() == 19


def test_clusters_of_fennel_are_ranges():
    """Eight chunks read fewer rows than in the order as given."""
    edge_index, clique = cliques(count=40)
    n = clique.numel()
    edge_index = torch.cat([edge_index, edge_index.flip(0), random_edges(n, n)], 1)

    def read(order):
        source, row = order.argsort()[edge_index]
        return sum(source[row // (n // 8) == chunk].unique().numel() for chunk in range(8))

    assert read(fennel_order(edge_index, n)) < 0.6 * read(torch.arange(n))


def misses(edge_index, order, cache=400):
    """Share of the gathered rows that a cache of the rows used last does not hold."""
    source, row = order.argsort()[edge_index]
    held, missed = OrderedDict(), 0
    for r in source[row.argsort(stable=True)].tolist():
        missed += r not in held
        held[r] = None
        held.move_to_end(r)
        if len(held) > cache:
            held.popitem(last=False)
    return missed / source.numel()


def test_gathered_rows_are_nearer_and_more_often_in_a_cache():
    edge_index = community_graph(4000, 80_000).edge_index
    old, new = torch.arange(4000), pyg_sar.locality_order(edge_index, 4000)
    distance = [order.argsort()[edge_index].diff(dim=0).abs().double().mean() for order in (old, new)]
    assert distance[1] < 0.7 * distance[0]
    assert misses(edge_index, new) < 0.85 * misses(edge_index, old)


# Partitions


def data():
    generator = torch.Generator().manual_seed(0)
    edge_index = random_edges(300, 2000)
    return Data(x=torch.randn(300, 3, generator=generator), edge_index=edge_index, edge_attr=torch.arange(2000.0))


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("method", ["metis", "random", "contiguous", torch.arange(300) % 3 // 2])
def test_ids_lead_back_to_the_graph(tmp_path, method, num_parts):
    if isinstance(method, torch.Tensor):
        num_parts += 1  # the last one is empty
    whole = data()
    report = pyg_sar.partition(whole, num_parts, tmp_path / "graph", method=method)
    assert report["order"] == store.read_meta(tmp_path / "graph")["order"] == "locality"
    shards = [read_part(tmp_path / "graph", p) for p in range(num_parts)]
    assert put_together([shard.topology for shard in shards]).equal(whole.edge_index)
    for shard in shards:
        n_id, e_id = shard.topology.src_id, shard.topology.e_id
        assert shard.node_attrs["x"].equal(whole.x[n_id])
        assert shard.edge_attrs["edge_attr"].equal(whole.edge_attr[e_id])
        row = torch.full((300,), -1).scatter_(0, n_id, torch.arange(n_id.numel()))
        it = shard.topology
        for ptr, rows, e in zip(it.rowptr, it.rows, e_id.split([c.numel() for c in it.col]), strict=True):
            rows = torch.arange(n_id.numel()) if rows is None else rows.long()
            assert row[whole.edge_index[1, e]].equal(rows.repeat_interleave(ptr.diff()))
    assert any(not shard.topology.src_id.equal(shard.topology.src_id.sort().values) for shard in shards)


def sum_over_edges(group, folder):
    it = pyg_sar.load(folder, group=group)
    conv = pyg_sar.nn.SAGEConv(3, 2, aggr="sum").double()
    for k, parameter in enumerate(conv.parameters()):
        torch.nn.init.constant_(parameter, 1 + k)
    return it.n_id, it.x, conv(it.x.double(), it.edge_index).detach()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_layer_gives_the_same_rows_in_either_order(pool, tmp_path, workers):
    found = {}
    for order in ("locality", "fennel", "id"):
        pyg_sar.partition(data(), workers, tmp_path / order, method="random", order=order)
        shares = pool.run(workers, sum_over_edges, tmp_path / order)
        n_id, x, out = (torch.cat(rows) for rows in zip(*shares, strict=True))
        assert x.equal(data().x[n_id])
        found[order] = torch.empty_like(out).index_copy_(0, n_id, out)
        assert all(ids.equal(ids.sort().values) for ids, *_ in shares) == (order == "id")
    torch.testing.assert_close(found["locality"], found["id"])
    torch.testing.assert_close(found["fennel"], found["id"])


def test_unknown_order(tmp_path):
    with pytest.raises(ValueError, match="Unknown order 'degree', expected locality, fennel or id"):
        pyg_sar.partition(data(), 2, tmp_path / "graph", order="degree")
    assert list(tmp_path.iterdir()) == []
