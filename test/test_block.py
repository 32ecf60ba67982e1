"""Blocks: row pointers, transposes, some of the destinations, and what few of them take."""

import copy
import dataclasses

import pytest
import torch
from support.cases import some
from support.layers import inputs, leaf
from support.nasty_graph import NUM_NODES, assignment, edges
from support.simulate import Cut, simulate
from torch_geometric.nn import GINEConv
from torch_geometric.utils import degree

from pyg_sar import csr, nn, shard
from pyg_sar.block import Block
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.process_group import silent_group
from pyg_sar.graph import ShardedGraph
from pyg_sar.loops import with_self_loops
from pyg_sar.rewire import regroup

ALWAYS, NEVER = 0, 1 << 40  # whether blocks hold the destinations with edges alone


@pytest.fixture(params=[(n, when) for n in (1, 2, 5) for when in (ALWAYS, NEVER)], ids=str)
def sharded(request, monkeypatch) -> ShardedGraph:
    shards, when = request.param
    monkeypatch.setattr(csr, "SPARSE", when)
    graph = shard(edges(), NUM_NODES, shards).graph
    assert all((b.dst is None) == (when == NEVER) for b in graph.blocks)
    return graph


def test_edges_of_a_graph(sharded):
    assert torch.equal(sharded.coo(), edges())
    for derived in (sharded, with_self_loops(sharded)[0], sharded.merge()):
        assert torch.equal(derived.degree, degree(derived.coo()[1], NUM_NODES, torch.long))
        assert torch.equal(regroup(derived, derived.coo()).coo(), derived.coo())
    assert torch.equal(sharded.loops, degree(edges()[0, edges()[0] == edges()[1]], NUM_NODES, torch.long))


def test_transpose(sharded):
    for b in sharded.blocks:
        ptr, dst, perm = b.transpose
        assert torch.equal(dst, b.row[perm])
        source = torch.arange(b.num_src).repeat_interleave(ptr.diff())
        assert torch.equal(b.col[perm].long(), source)
        assert all(one is other for one, other in zip(b.transpose, b.transpose, strict=True))
        other = dataclasses.replace(b)
        assert all(map(torch.equal, other.by_source, (ptr, dst)))
        assert "perm" not in vars(other) and other.perm.equal(perm)


def test_rows_of_a_block(sharded):
    for b in sharded.blocks:
        for start, end in ((0, 61), (0, 0), (61, 61), (7, 30)):
            part = b.rows(start, end)
            inside = (b.row >= start) & (b.row < end)
            assert part.num_dst == end - start
            assert torch.equal(part.col, b.col[inside])
            assert torch.equal(part.row + start, b.row[inside])


def test_chosen_rows_of_a_block(sharded):
    row = torch.tensor([44, 60, 44, 3, 60, 60])
    few = Block.from_coo(
        row, torch.tensor([5, 1, 7, 0, 0, 60]), slice(0, NUM_NODES), NUM_NODES, NUM_NODES, row.argsort()
    )
    none = Block.from_coo(row[:0], row[:0], slice(0, 0), 0, NUM_NODES, row[:0])
    assert few.dst is not None or csr.SPARSE > NUM_NODES
    for part in (*sharded.blocks, few, none):
        for rows in (torch.tensor([44, 3, 60, 5]), torch.arange(NUM_NODES), torch.empty(0, dtype=torch.long)):
            chosen = part.choose(rows)
            wanted = [(part.row == row).nonzero().view(-1) for row in rows]
            row = torch.arange(rows.numel()).repeat_interleave(torch.tensor([len(w) for w in wanted], dtype=torch.long))
            wanted = torch.cat([*wanted, row[:0]])
            assert chosen.num_dst == rows.numel() and torch.equal(chosen.row, row)
            assert torch.equal(chosen.col, part.col[wanted]) and torch.equal(chosen.edges, part.edges[wanted])


# What few destinations take.

LAYERS = {
    "sum": (lambda: nn.SAGEConv(8, 4), ""),
    "weighted sum": (lambda: nn.GCNConv(8, 4), "w"),
    "sums of bases": (lambda: nn.RGCNConv(8, 4, 5, num_bases=2), "t"),
    "typed sum": (lambda: nn.RGCNConv(8, 4, 5), "t"),
    "extremum": (lambda: nn.SAGEConv(8, 4, aggr="max"), ""),
    "softmax": (lambda: nn.GATConv(8, 4, heads=3, dropout=0.4, edge_dim=3), "a"),
    "softmax of rows": (lambda: nn.GATv2Conv(8, 4, heads=2, edge_dim=3), "a"),
    "softmax of products": (lambda: nn.TransformerConv(8, 4, heads=2, edge_dim=3), "a"),
    "any code": (lambda: nn.convert(GINEConv(torch.nn.Linear(8, 4), edge_dim=3)), "a"),
}


def results(make, roles, workers, mode):
    """Outputs and gradients of every worker."""
    torch.manual_seed(0)
    layer, x = make().double(), torch.randn(NUM_NODES, 8, dtype=torch.float64)
    extra = inputs(roles, edges().size(1), torch.float64)
    cut = Cut(edges(), assignment("random", workers), workers)

    def work(rank):
        it, conv, topology = cut.edge_index(rank), copy.deepcopy(layer), cut.topologies[rank]
        it = it.merge() if mode == 3 else it.replace(remat=mode == 1)
        given = [leaf(t[topology.e_id], t.is_floating_point()) for t in extra]
        out = conv(own := leaf(x[topology.src_id]), it, *given)
        wanted = [own, *(t for t in given if t.requires_grad), *conv.parameters()]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), wanted)]

    return [t for share in simulate(workers, work) for t in share]


@pytest.mark.parametrize(("name", "way"), some(LAYERS, [(1, 1), (2, 1), (3, 2), (3, 3)], every=2))
def test_layers_compute_the_same_bits(monkeypatch, name, way):
    (workers, mode), found = way, []
    for when in (ALWAYS, NEVER):
        monkeypatch.setattr(csr, "SPARSE", when)
        found.append(results(*LAYERS[name], workers, mode))
    assert len(found[0]) == len(found[1]) >= 3 * workers
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_topology_is_proportional_to_own_rows_and_edges():
    """Not to the nodes of the graph, of which there are 10 000: a row pointer for each worker would be as long."""
    workers, num_nodes, num_edges = 32, 10_000, 30_000
    part, edge_index = torch.arange(num_nodes) * workers // num_nodes, torch.randint(num_nodes, (2, num_edges))
    topology = next(iter(split(edge_index, part, part, workers)))
    ids = topology.src_id.clone()  # a view of all ids until it is stored
    with silent_group(workers):
        graph = assemble(dataclasses.replace(topology, src_id=ids, dst_id=ids), 0)
        pointers = [t for b in graph.blocks for t in (b.rowptr, b.dst) if t is not None]
        assert sum(t.nbytes for t in pointers) < 8 * graph.num_edges + 4 * workers < 4 * num_nodes
        for b in graph.blocks:
            assert b.transpose[0].numel() <= b.num_edges + 1 or b is graph.blocks[0]
        assert graph.degree.sum() == graph.num_edges
        assert sum(graph.memory().values()) < 60 * (graph.num_dst + graph.num_edges)


# Sizes beyond 2^31 by arithmetic.


def test_transposes_have_the_type_of_blocks(monkeypatch):
    """Also where rows, and not edges, are many."""
    row, col = torch.tensor([0, 1, 5]), torch.tensor([3, 0, 1])
    for num_src, num_dst in ((4, 6), (4, 20), (20, 6)):
        monkeypatch.setattr(csr, "MAX", 10)
        made = Block.from_coo(row, col, slice(0, num_src), num_src, num_dst, torch.arange(3))
        expected = torch.int32 if max(num_src, num_dst) <= 10 else torch.int64
        assert {t.dtype for t in (made.rowptr, made.col, *made.transpose)} == {expected}


def test_places_of_edges_are_narrow_where_they_can_be(monkeypatch):
    monkeypatch.setattr(csr, "MAX", 10)
    row, col = torch.tensor([0, 1, 5]), torch.tensor([3, 0, 1])
    for first, expected in ((0, torch.int32), (8, torch.int32), (9, torch.int64)):
        made = Block.from_coo(row, col, slice(0, 4), 4, 6, first + torch.arange(3))
        assert made.edges.dtype == expected and made.edges.tolist() == [first, first + 1, first + 2]
