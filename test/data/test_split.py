import pytest
import torch
from support.sample_graphs import GRAPHS, graph, put_together, random_edges

from pyg_sar.data.split import split


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_parts_hold_every_edge_once(name, num_parts):
    num_nodes, edge_index = graph(name)
    part = torch.randint(num_parts, (num_nodes,), generator=torch.Generator().manual_seed(1))
    parts = list(split(edge_index, part, part, num_parts))
    assert len(parts) == num_parts
    assert put_together(parts).equal(edge_index)
    for p, topology in enumerate(parts):
        assert part[topology.src_id].eq(p).all()
        assert topology.dst_id is topology.src_id
        assert topology.src_id.equal(topology.src_id.sort().values)
        assert topology.serve[p].numel() == 0


def test_edges_keep_their_order_among_those_of_a_block_and_destination():
    edge_index = random_edges(20, 300)
    part = torch.arange(20) % 4
    for topology in split(edge_index, part, part, 4):
        source, target = edge_index[:, topology.e_id]
        key = (part[source] * 20 + target) * 300 + topology.e_id
        assert key.equal(key.sort().values)


def test_rows_and_edges_follow_a_given_order_of_nodes():
    edge_index = random_edges(20, 300)
    part = torch.arange(20) % 4
    nodes = torch.arange(19, -1, -1).view(5, 4).t().flip(0).flatten()
    assert part[nodes].equal(part.sort().values)
    parts = list(split(edge_index, part, part, 4, nodes))
    assert put_together(parts).equal(edge_index)
    for p, topology in enumerate(parts):
        assert topology.src_id.equal(nodes[5 * p : 5 * p + 5])
        source, target = edge_index[:, topology.e_id]
        key = (part[source] * 20 + nodes.argsort()[target]) * 300 + topology.e_id
        assert key.equal(key.sort().values)
        assert all(rows.equal(rows.sort().values) for rows in topology.serve)


def test_types_are_the_ones_to_store():
    edge_index = random_edges(20, 300)
    part = (torch.arange(20) % 4).int()
    for topology in split(edge_index, part, part, 4):
        assert topology.src_id.dtype == topology.e_id.dtype == torch.int64
        arrays = [*topology.rowptr, *topology.col, *topology.serve]
        assert {array.dtype for array in arrays} == {torch.int32}


def test_bipartite():
    source_part, target_part = torch.arange(9) % 3, torch.arange(7) % 3
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(n, (50,), generator=generator) for n in (9, 7)])
    parts = list(split(edge_index, source_part, target_part, 3))
    assert put_together(parts).equal(edge_index)
    assert torch.cat([part.dst_id for part in parts]).sort().values.equal(torch.arange(7))
