"""FENNEL: parts of equal weight, and a cut that is far from that of chance."""

import pytest
import torch
from support.sample_graphs import GRAPHS, graph, random_edges
from torch_geometric.data import Data

from pyg_sar.data import fennel as streaming_module
from pyg_sar.data.assign import assign
from pyg_sar.data.datasets import community_graph
from pyg_sar.data.fennel import fennel


def cut(edge_index, part):
    return (part[edge_index[0]] != part[edge_index[1]]).double().mean()


def check(part, weights, num_parts):
    """Every node has a part, and none is too heavy."""
    assert part.dtype == torch.int32 and part.shape == weights.shape
    assert part.numel() == 0 or 0 <= part.min() <= part.max() < num_parts
    load = torch.zeros(num_parts, dtype=torch.int64).index_add_(0, part, weights)
    assert load.max() <= 1.03 * weights.sum() / num_parts + 1 + weights.max()


@pytest.mark.parametrize("num_parts", [2, 3, 8, 100])
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "no nodes"])
def test_odd_graphs(name, num_parts):
    num_nodes, edge_index = graph(name)
    before = edge_index.clone()
    weights = 1 + torch.arange(num_nodes) % 3
    check(fennel(edge_index, weights, num_parts), weights, num_parts)
    assert edge_index.equal(before)


@pytest.mark.parametrize("num_parts", [4, *(pytest.param(n, marks=pytest.mark.grid) for n in (2, 16))])
def test_it_cuts_far_less_than_chance(num_parts):
    data = community_graph(4000, 80_000)
    part = assign(data, num_parts, "fennel")
    assert cut(data.edge_index, part) < 0.8 * (1 - 1 / num_parts)
    assert cut(data.edge_index, part) < 1.2 * cut(data.edge_index, assign(data, num_parts, "metis"))
    assert torch.bincount(part).max() < 1.3 * 4000 / num_parts


def test_cliques_stay_whole():
    block = torch.combinations(torch.arange(25)).t()
    name = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    edge_index = name[torch.cat([block + 25 * c for c in range(40)], 1)]
    assert cut(edge_index, fennel(edge_index, torch.ones(1000, dtype=torch.int64), 2)) < 0.05


@pytest.mark.parametrize("num_parts", [2, 7])
def test_hubs_weigh_what_they_weigh(num_parts):
    """All edges end at a few nodes, which must not share a part because all their neighbors do."""
    edge_index = random_edges(1000, 20_000)
    edge_index[1] %= 8
    weights = 1 + torch.bincount(edge_index[1], minlength=1000)
    part = fennel(edge_index, weights, num_parts)
    check(part, weights, num_parts)
    assert part[:8].unique().numel() > 1


def test_a_node_heavier_than_a_part():
    weights = torch.ones(100, dtype=torch.int64)
    weights[3] = 1000
    part = fennel(random_edges(100, 500), weights, 4)
    check(part, weights, 4)
    assert (part == part[3]).sum() < 25, "the part with the heavy node takes fewer others"


def test_without_edges_parts_are_equal():
    part = fennel(torch.empty(2, 0, dtype=torch.int64), torch.ones(1000, dtype=torch.int64), 4)
    assert torch.bincount(part).max() <= 258


def test_direction_and_loops_do_not_count():
    edge_index = community_graph(500, 4000).edge_index
    one_way = edge_index[:, edge_index[0] < edge_index[1]]
    weights = torch.ones(500, dtype=torch.int64)
    expected = fennel(one_way, weights, 4)
    assert fennel(one_way.flip(0), weights, 4).equal(expected)
    ptr, neighbor = streaming_module._neighbors(
        torch.cat([one_way, torch.arange(500).expand(2, -1)], 1), torch.arange(500)
    )
    assert neighbor.numel() == ptr[-1] == 2 * one_way.size(1)


def test_neighbors_in_chunks(monkeypatch):
    """Every list holds its neighbors, whatever the size of the chunks."""
    edge_index = random_edges(40, 300)
    turn = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int()
    for size in (7, 300, 1 << 20):
        monkeypatch.setattr(streaming_module, "CHUNK", size)
        ptr, neighbor = streaming_module._neighbors(edge_index, turn)
        source, destination = turn[edge_index[:, edge_index[0] != edge_index[1]]].long()
        for node in range(40):
            expected = torch.cat([destination[source == node], source[destination == node]]).sort().values
            assert neighbor[ptr[node] : ptr[node + 1]].sort().values.tolist() == expected.tolist()


def test_wide_batches_are_cut(monkeypatch):
    """Scores of a batch, one for each node and part, stay within bounds."""
    monkeypatch.setattr(streaming_module, "CHUNK", 64)
    batches = streaming_module._batches(10_000, 16)
    assert max(end - start for start, end in batches) == 4
    assert [start for start, _ in batches[1:]] == [end for _, end in batches[:-1]] and batches[-1][1] == 10_000


def test_the_number_of_threads_does_not_matter():
    data, found = community_graph(3000, 60_000), []
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(assign(data, 4, "fennel"))
    torch.set_num_threads(threads)
    assert found[0].equal(found[1])


@pytest.mark.parametrize("num_parts, expected", [(1, [5]), (5, [1] * 5), (9, [0, 0, 0, 0, 1, 1, 1, 1, 1])])
def test_no_more_nodes_than_parts(num_parts, expected):
    part = assign(Data(edge_index=random_edges(5, 20), num_nodes=5), num_parts, "fennel")
    assert sorted(torch.bincount(part, minlength=num_parts).tolist()) == expected
