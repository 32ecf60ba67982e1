"""Blocks are cut into pieces, for which messages live, and nothing that is computed depends on where they are cut."""

import copy
import gc
import weakref

import pytest
import torch
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, close, edges
from support.small_pieces import ORDINARY

import pyg_sar
from pyg_sar import csr, pieces
from pyg_sar.block import Block
from pyg_sar.nn import convert
from pyg_sar.reduce import Rows

EDGES = edges()
PADDING = 97  # edges of a run to the end, when all reductions are known


def block(row, num_dst):
    count = row.numel()
    return Block.from_coo(row, torch.arange(count) % 5, slice(0, 5), 5, num_dst, torch.arange(count).flip(0))


BLOCKS = {
    "all rows": torch.arange(40).repeat_interleave(3),
    "few rows": torch.tensor([3, 3, 3, 90, 90, 91, 200, 200]).repeat_interleave(4),
    "a hub": torch.tensor([0, 7, 8]).repeat_interleave(torch.tensor([2, 60, 3])),
    "a hub alone": torch.full((50,), 20),
    "rows without edges at both ends": torch.arange(30, 40).repeat_interleave(3),
}


@pytest.mark.parametrize("size", [1, 2, 7, 20, 64])
@pytest.mark.parametrize("name", BLOCKS)
def test_pieces_are_the_block(name, size):
    whole = block(BLOCKS[name], 300)
    found = pieces.cut(whole, size)
    assert [p.dst.start for p in found] == [0, *(p.dst.stop for p in found[:-1])] and found[-1].dst.stop == 300
    assert [p.edges.start for p in found] == [0, *(p.edges.stop for p in found[:-1])]
    assert found[-1].edges.stop == whole.num_edges and all(p.block.num_edges > 0 for p in found)
    assert torch.equal(torch.cat([p.block.row + p.dst.start for p in found]), whole.row)
    for field in ("col", "edges"):
        assert torch.equal(torch.cat([getattr(p.block, field) for p in found]), getattr(whole, field))
    largest = int(whole.degree.max())
    assert all(p.block.num_edges < size + largest and p.block.num_dst == p.dst.stop - p.dst.start for p in found)
    assert len(found) > 1 or whole.num_edges <= max(size, largest)


def test_pieces_have_as_many_edges_as_there_are_source_rows(monkeypatch):
    graph = pyg_sar.shard(EDGES, NUM_NODES, 1).graph
    (whole,) = graph.blocks
    for count, size in ((1, whole.num_src), (whole.num_src + 9, whole.num_src + 9)):
        monkeypatch.setattr(pieces, "EDGES", count)
        found = pieces.pieces(graph, whole)
        assert len(found) == -(-whole.num_edges // size) > 1 and found is pieces.pieces(graph, whole)
    before = graph.memory()["derived"]
    with csr.scaled(0.5):
        assert pieces.piece_size(graph) == (whole.num_src + 9) // 2
        assert graph.memory()["derived"] == before > 0
    assert pieces.piece_size(graph) == whole.num_src + 9


def test_gradients_of_a_block_are_those_of_its_pieces():
    whole = block(BLOCKS["all rows"], 40)
    dst, edge = torch.randn(40, 3), torch.randn(120, 2)
    ones, source = torch.ones(3), torch.zeros(5, 3)
    totals = pieces.Totals(source, Rows([dst, dst], [edge], [ones, ones, ones]))
    for piece in pieces.cut(whole, 30):
        some, shared = piece.rows(Rows([dst, dst], [edge])), torch.ones(3)
        grads = torch.ones(5, 3), Rows([some.dst[0], None], some.edge, [shared, None, shared])
        totals.add(grads, piece.dst, piece.edges)
        source += 1
    count = [len(pieces.cut(whole, 30))] * 3
    assert torch.equal(totals.d_x, source) and torch.equal(totals.others.dst[0], dst)
    assert totals.others.dst[1] is None and torch.equal(totals.others.edge[0], edge)
    assert [t if t is None else t.tolist() for t in totals.others.const] == [count, None, count]


def test_gradients_at_indices_add_up():
    x, none = torch.zeros(3, 2), torch.zeros(0, 2)
    totals = pieces.Totals(x, Rows([none], [x, x]))
    for src, dst in (([0, 2], [0, 0]), ([2], [0])):
        grad = torch.ones(len(src), 2)
        src = torch.tensor(src)
        totals.add((grad, Rows([grad], [grad, None])), torch.tensor(dst), src, src)
    assert totals.d_x.tolist() == totals.others.edge[0].tolist() == [[1, 1], [0, 0], [2, 2]]
    assert totals.others.dst[0].shape == (0, 2) and totals.others.edge[1] is None


LAYERS = {
    "softmax": lambda: gnn.GENConv(8, 6, edge_dim=3),
    "extrema": lambda: gnn.PNAConv(8, 6, ["max", "min", "std"], ["identity"], torch.ones(9, dtype=torch.int64), 3),
    "sums": lambda: gnn.GINEConv(gnn.Linear(8, 6), edge_dim=3),
    "updated edges": lambda: gnn.PDNConv(8, 6, 3, 5),
    "two passes": lambda: gnn.GeneralConv(8, 6, 3, attention=True, l2_normalize=True),
}


def results(layer, edge_index, x, a):
    x, a = x.clone().requires_grad_(), a.clone().requires_grad_()
    out = layer(x, edge_index, a)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()).sum().backward()
    return {"out": out.detach(), "x": x.grad, "a": a.grad, **{n: p.grad for n, p in layer.named_parameters()}}


@pytest.mark.parametrize("name", LAYERS)
def test_any_size_is_exact(monkeypatch, name):
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    x, a = torch.randn(NUM_NODES, 8).double(), torch.rand(EDGES.size(1), 3).double()
    expected = results(copy.deepcopy(layer), EDGES, x, a)
    counts = set()
    for size in (1, 2 * NUM_NODES, EDGES.size(1) - 1):
        monkeypatch.setattr(pieces, "EDGES", size)
        graph = pyg_sar.shard(EDGES, NUM_NODES, 1)
        counts.add(len(pieces.pieces(graph.graph, graph.graph.blocks[0])))
        for what, t in results(convert(copy.deepcopy(layer)), graph, x, a).items():
            close(t, expected[what], what) if t is not None else pytest.fail(what)
    assert len(counts) == 3


def watched(message):
    """Return a layer with a message of its own."""

    class Layer(gnn.MessagePassing):
        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

    Layer.message = message
    return convert(Layer())


def test_messages_live_for_a_piece(monkeypatch):
    monkeypatch.setattr(pieces, "EDGES", 1)
    alive, most = weakref.WeakSet(), []

    def message(self, x_j):
        out = x_j.sigmoid()
        alive.add(out.untyped_storage())
        if x_j.size(0) != PADDING:
            most.append(sum(storage.nbytes() for storage in alive))
        return out

    degree, width = 50, 4
    edge_index = torch.stack([torch.arange(40 * degree) % 40, torch.arange(40 * degree) // degree])
    layer, it = watched(message), pyg_sar.shard(edge_index, 40, 1)
    x = torch.randn(40, width).requires_grad_()
    layer(x, it)
    most.clear()
    gc.collect()
    alive.clear()  # those of the probe graph
    gc.disable()  # nothing may wait for it
    try:
        layer(x, it).sum().backward()
    finally:
        gc.enable()
    assert most == [4 * width * degree] * 2 * 40  # pieces of a destination each, in forward and backward


@pytest.mark.parametrize("drops", [False, True])
def test_edges_of_one_piece_run_the_layers_own_code(monkeypatch, drops):
    """Unless it drops some, which depend on their ids; and only if there are no more of them."""
    monkeypatch.setattr(pieces, "EDGES", ORDINARY)
    seen = []

    def message(self, x_j):
        if x_j.size(0) != PADDING:
            seen.append((x_j.size(0), torch.is_grad_enabled() and x_j.requires_grad))
        return torch.nn.functional.dropout(x_j.sigmoid(), 0.5, drops)

    layer, it = watched(message), pyg_sar.shard(EDGES, NUM_NODES, 1)
    x, count = torch.randn(NUM_NODES, 4).requires_grad_(), EDGES.size(1)
    layer(x, it)
    seen.clear()
    layer(x, it).sum().backward()
    assert seen == ([(count, False), (count, True)] if drops else [(count, True)])
    monkeypatch.setattr(pieces, "EDGES", count - 1)
    seen.clear()
    layer(x, it).sum().backward()
    assert len(seen) == 4 and max(n for n, _ in seen) < count
