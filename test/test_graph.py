"""Index arithmetic: blocks, merging, ranges of destinations, what is kept, and sizes that nobody could allocate."""

from itertools import pairwise

import pytest
import torch
import torch_geometric.nn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.simulate import simulate
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import contains_self_loops, degree, remove_self_loops

from pyg_sar import ShardedEdgeIndex, csr, nn, rewire, shard
from pyg_sar.block import Block
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.reverse import reverse
from pyg_sar.exchange import Local, Routes
from pyg_sar.graph import Seeds, ShardedGraph, edge_ids
from pyg_sar.loops import with_self_loops
from pyg_sar.nn.replay.chunks import largest_degree
from pyg_sar.rewire import by_type, join, regroup


@pytest.fixture(params=[1, 2, 5], ids="{} shards".format)
def sharded(request) -> ShardedGraph:
    return shard(edges(), NUM_NODES, request.param).graph


def test_graph_holds_the_edges(sharded):
    assert torch.equal(sharded.coo(), edges())
    assert torch.equal(sharded.row, edges()[1])
    assert torch.equal(sharded.degree, degree(edges()[1], NUM_NODES, torch.long))
    assert torch.equal(sharded.merge().coo(), edges())
    assert sharded.merge() is sharded.merge()
    assert sharded.merge().merge().num_edges == sharded.num_edges == edges().size(1)


def test_self_loops_are_replaced_by_one_each(sharded):
    looped, loops = with_self_loops(sharded)
    rest, _ = remove_self_loops(edges())
    nodes = torch.arange(NUM_NODES)
    every, own = torch.arange(edges().size(1)), (edges()[0] == edges()[1]).nonzero().view(-1)
    order = loops.join(every, every.numel() + nodes)
    assert torch.equal(looped.coo(), torch.cat([edges(), nodes.expand(2, -1)], 1)[:, order])
    stays = torch.ones(every.numel() + NUM_NODES, dtype=torch.bool).index_fill_(0, own, False)
    assert torch.equal(order.sort().values, stays.nonzero().view(-1))
    assert torch.equal(loops.replaced[0], own) and torch.equal(loops.replaced[1], edges()[1][own])
    assert torch.equal(edges()[:, loops.kept], rest)
    assert torch.equal(edge_ids(looped), torch.cat([every, -1 - nodes])[order])
    for block in looped.blocks:  # the loop of a destination is the last of its edges in the block
        row, ends = block.row[block.loops(0)], block.degree.cumsum(0) - 1
        assert torch.equal(ends[row], block.loops(0).nonzero().view(-1))
    assert torch.equal(with_self_loops(looped)[0].coo(), looped.coo())
    assert contains_self_loops(edges()) and not contains_self_loops(rest)


def test_a_graph_without_self_loops_gets_them():
    rest, _ = remove_self_loops(edges())
    looped, loops = with_self_loops(shard(rest, NUM_NODES, 3).graph)
    assert loops.kept == slice(None) and looped.num_edges == rest.size(1) + NUM_NODES


def test_self_loops_of_ids_beyond_32_bits():
    it = shard(edges(), NUM_NODES, 2).graph
    it = it.replace(n_id=torch.arange(NUM_NODES) + 2**40, e_id=torch.arange(edges().size(1)) + 2**41)
    e_id = edge_ids(with_self_loops(it)[0])
    assert e_id.dtype == torch.int64
    assert torch.equal(e_id[e_id < 0].sort(descending=True).values, -1 - it.n_id)
    assert e_id.unique().numel() == e_id.numel()


def test_bipartite_graphs_have_no_self_loops():
    with pytest.raises(ValueError, match="add_self_loops=False"):
        with_self_loops(shard(edges(61, 47), (61, 47), 2).graph)


def test_types_are_kept_until_they_change(sharded):
    types = torch.randint(3, (sharded.num_edges,))
    typed = by_type(sharded, types, 3)
    assert by_type(sharded, types, 3) is typed
    assert by_type(sharded, types.clone(), 3) is not typed
    assert by_type(sharded, types, 4) is not typed
    before = by_type(sharded, types, 3)
    types[0] = (types[0] + 1) % 3
    assert by_type(sharded, types, 3) is not before


def test_types_and_destinations_make_pairs(sharded):
    types = torch.randint(3, (sharded.num_edges,))
    typed = by_type(sharded, types, 3)
    pair_type = torch.arange(3).repeat_interleave(torch.tensor(typed.ptr).diff())
    assert torch.equal(typed.dst[typed.graph.row], edges()[1])
    assert torch.equal(pair_type[typed.graph.row], types)
    assert typed.graph.num_dst == len(set(zip(edges()[1].tolist(), types.tolist(), strict=True)))
    for graph_of_type, kind in zip(typed.relations, range(3), strict=True):
        assert graph_of_type.num_edges == (types == kind).sum()


def test_types_die_with_their_tensor(sharded):
    types = torch.zeros(sharded.num_edges, dtype=torch.long)
    by_type(sharded, types, 1)
    assert len(sharded.memo.of_tensors) == 1
    del types
    assert len(sharded.memo.of_tensors) == 0


def test_replace_shares_seeds_and_nothing_that_was_computed(sharded):
    other = sharded.replace(remat=False)
    assert other.seeds is sharded.seeds
    assert other.memo is not sharded.memo
    assert sharded.remat and not other.remat


def made_of(it: ShardedGraph) -> dict[str, ShardedGraph]:
    """What can be made of a graph and is kept by it, by name."""
    types = by_type(it, TYPES, 2)
    return {
        "one shot": it.merge(),
        "self-loops": with_self_loops(it)[0],
        "other edges": regroup(it, it.coo()[:, 1:]),
        "types": types.graph,
        "relation": types.relations[0],
        "reversed": reverse(it).graph,
        "joined": join([it, OTHER], {"a": 0, "b": 61}, ["a", "b"], 108),
        "of the reversed": with_self_loops(reverse(it).graph)[0],
    }


TYPES = torch.arange(edges().size(1)) % 2
OTHER = shard(edges(61, 47), (61, 47), 3).graph


def test_what_is_made_is_kept_and_counted():
    it = shard(edges(), NUM_NODES, 3).graph
    before, made = it.memory(), made_of(it)
    assert made.keys() == made_of(it).keys() and all(made_of(it)[name] is found for name, found in made.items())
    _, loops = with_self_loops(it)
    assert loops.order is loops.order and largest_degree(it) == it.degree.max()
    after = it.memory()
    assert {kind: size for kind, size in after.items() if size != before[kind]}.keys() == {"derived"}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for one in made.values() for t in one._tensors()["blocks"]}  # fmt: skip
    assert after["derived"] - before["derived"] > sum(storages.values()) - before["blocks"]
    for name, one in made.items():  # what is made of it in turn, its transposed blocks among them
        size = sum(it.memory().values())
        more = [t.nbytes for block in one.blocks for t in (*block.transpose, one.degree)]
        assert sum(it.memory().values()) >= size + max(more), name


def test_a_graph_joined_with_one_that_died_is_made_anew():
    it, dies = shard(edges(), NUM_NODES, 3).graph, shard(edges(), NUM_NODES, 3).graph
    ends = {"a": 0}, ["a", "a"], NUM_NODES
    joined = join([it, dies], *ends)
    assert join([it, dies], *ends) is joined
    assert join([it, dies], {"b": 0}, ["b", "b"], NUM_NODES) is not joined  # numbers may be alike on one worker alone
    assert join([it, it], *ends) is not joined
    del dies
    assert join([it, OTHER], *ends).num_edges == it.num_edges + OTHER.num_edges


def test_ids_of_other_edges(monkeypatch):
    """They are distinct; of two sets of nodes, there may be more destinations than sources."""
    topologies = list(split(edges(20, 61) % torch.tensor([[20], [61]]), torch.arange(20) % 2, torch.arange(61) % 2, 2))

    def work(rank):
        it = assemble(topologies[rank], rank)
        return regroup(it, it.coo()[:, ::2]).e_id

    ids = torch.cat(simulate(2, work))
    assert ids.unique().numel() == ids.numel()
    it = shard(edges(), NUM_NODES, 2).graph
    monkeypatch.setattr(rewire, "MAX_IN_DEGREE", int(it.degree.max()))
    regroup(it, it.coo()[:, 1:])
    monkeypatch.setattr(rewire, "MAX_IN_DEGREE", int(it.degree.max()) - 1)
    with pytest.raises(ValueError, match=f"{it.degree.max()} in-edges after edges were added or left out, but at most"):
        regroup(it, it.coo().flip(1))


# Ranges of destinations


def test_rows_of_a_graph(sharded):
    for it in (sharded, sharded.merge(), with_self_loops(sharded)[0]):
        ranges = [(0, 20), (20, 20), (20, NUM_NODES)]
        for start, end in ranges:
            some, rows = it.rows(start, end), it.edge_rows(start, end)
            assert some.exchange is it.exchange and some.num_edges == rows.numel() == it.degree[start:end].sum()
            assert torch.equal(some.coo(), it.coo()[:, rows] - torch.tensor([[0], [start]]))
            assert torch.equal(edge_ids(some), edge_ids(it)[rows])
            assert torch.equal(some.source_degree, it.degree)
            assert torch.equal(some.dst_rows(torch.arange(NUM_NODES)), torch.arange(start, end))
            looped = with_self_loops(some)[0]
            assert torch.equal(looped.degree, with_self_loops(it)[0].degree[start:end])
            assert torch.equal(looped.source_degree, with_self_loops(it)[0].degree)
        some = it.rows(10, 50).rows(5, 20)
        assert torch.equal(some.coo(), it.rows(15, 30).coo()) and some.dst == slice(15, 30)
        with pytest.raises(ValueError, match="a range of the 61 destinations"):
            it.rows(3, 62)


LAYERS = {
    "SAGEConv": (nn.SAGEConv(8, 6), []),
    "SAGEConv, max": (nn.SAGEConv(8, 6, aggr="max"), []),
    "GATConv": (nn.GATConv(8, 4, 2, edge_dim=3, dropout=0.4), ["attr"]),
    "GCNConv": (nn.GCNConv(8, 6), []),
    "RGCNConv": (nn.RGCNConv(8, 6, 3), ["type"]),
}
CONVERTED = {
    "GraphConv": (nn.convert(torch_geometric.nn.GraphConv(8, 6)), ["weight"]),
    "CGConv": (nn.convert(torch_geometric.nn.CGConv(8, dim=3)), ["attr"]),
}


def in_chunks(layer, x, it, edge, seeds, recompute):
    """The output of a layer, one range of destinations after the other; one of them is empty."""

    def run(x, start, end):
        chunk, rows = it.rows(start, end), it.edge_rows(start, end)
        with it.seeds.replay(seeds):
            return layer((x, chunk.dst_rows(x)), ShardedEdgeIndex(chunk), *(t[rows] for t in edge))

    ends = [0, it.num_dst // 3, it.num_dst // 3, it.num_dst]
    if recompute:
        return torch.cat([checkpoint(run, x, a, b, use_reentrant=False) for a, b in pairwise(ends)])
    return torch.cat([run(x, a, b) for a, b in pairwise(ends)])


def check_chunks(layers, it, src, edge, recompute):
    """Compare outputs and gradients, given the global ids of rows."""
    generator = torch.Generator().manual_seed(1)
    x, attr = (
        torch.rand(n, f, dtype=torch.float64, generator=generator) for n, f in ((NUM_NODES, 8), (edges().size(1), 3))
    )
    of_edges = {"attr": attr[edge], "type": edge % 3, "weight": attr[edge, 0]}
    for name, (layer, names) in layers.items():
        torch.manual_seed(0)
        layer.double().reset_parameters()
        rows, tensors, seeds = x[src].requires_grad_(), [of_edges[n] for n in names], []
        leaves = [rows, *(t.requires_grad_() for t in tensors if t.is_floating_point()), *layer.parameters()]
        with it.seeds.replay(seeds):
            whole = layer(rows, ShardedEdgeIndex(it), *tensors)
        expected = torch.autograd.grad(whole.square().sum(), leaves)
        out = in_chunks(layer, rows, it, tensors, seeds, recompute)
        close(out, whole, name, 1e-12)
        for found, grad in zip(torch.autograd.grad(out.square().sum(), leaves), expected, strict=True):
            close(found, grad, f"{name}, gradient", 1e-12)


def on_workers(group, mode, recompute):
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    check_chunks(LAYERS, mine.edge_index.graph, mine.src, mine.edge, recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_layers_over_ranges_of_destinations_equal_the_whole(pool, mode, recompute):
    pool.run(3, on_workers, mode, recompute)


@pytest.mark.parametrize(("shards", "mode", "recompute"), some([1, 3], [1, 2, 3], [False, True], every=2))
def test_layers_of_one_process_over_ranges_of_destinations_equal_the_whole(shards, mode, recompute):
    it = shard(edges(), NUM_NODES, shards).replace(remat=mode == 1, one_shot=mode == 3).graph
    check_chunks(LAYERS | CONVERTED, it, torch.arange(NUM_NODES), torch.arange(it.num_edges), recompute)


def test_seeds_are_drawn_again():
    seeds, drawn = Seeds(1), []
    with seeds.replay(drawn):
        first = [seeds.draw(), seeds.draw()]
    with seeds.replay(drawn):
        assert [seeds.draw() for _ in range(3)] == [*first, drawn[2]]
    assert drawn[:2] == first and len({*drawn, seeds.draw()}) == 4


# Sizes beyond 2^31 by arithmetic.


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv"])
def test_layers_with_wide_pointers(monkeypatch, name):
    """Every step works with int64 pointers and columns, as it will with more edges."""
    torch.manual_seed(0)
    conv = getattr(nn, name)(8, 4).double()
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(conv(x, edges()).square().sum(), x)
    narrow = csr.lead_over
    monkeypatch.setattr(csr, "lead_over", lambda rows, count, n, dtype: narrow(rows, count, n, torch.int64))
    for shards in (1, 3):
        it = shard(edges(), NUM_NODES, shards)
        assert all(b.rowptr.dtype == b.col.dtype == torch.int64 for b in it.graph.blocks)
        for way in (it, it.merge(), it.replace(remat=False)):
            (found,) = torch.autograd.grad(conv(x, way).square().sum(), x)
            close(found, expected, name)
        assert all(t.dtype == torch.int64 for b in it.graph.blocks for t in b.transpose)


def test_local_first_numbers_beyond_32_bits():
    """Three shards of two billion rows each: only the edges have memory."""
    sizes = [2_000_000_000, 1_900_000_000, 1_800_000_000]
    ids = Routes(1, (), tuple(sizes)).ids
    assert ids == [
        slice(1_900_000_000, 3_900_000_000),
        slice(0, 1_900_000_000),
        slice(3_900_000_000, 5_700_000_000),
    ]
    blocks = [
        Block(
            torch.tensor([0, 1], dtype=torch.int32), torch.tensor([n - 1], dtype=torch.int32), i, n, slice(k, k + 1), 1
        )
        for k, (n, i) in enumerate(zip(sizes, ids, strict=True))
    ]
    it = ShardedGraph(tuple(blocks), sizes[1], 1, Local(Routes.local(ids)), dst=slice(0, 1))
    source = [3_899_999_999, 1_899_999_999, 5_699_999_999]
    assert it.coo()[0].tolist() == source
    total, row = sum(sizes), torch.zeros(3, dtype=torch.long)
    one = Block.from_coo(row, it.coo()[0], slice(0, total), total, 1, torch.arange(3))
    assert one.source.tolist() == source
    assert one.rowptr.dtype == one.col.dtype == torch.int64  # torch wants the same type of both


def test_types_times_nodes_beyond_32_bits():
    """Pairs are numbered by type * num_dst + destination."""
    it = shard(torch.tensor([[0, 1, 1], [0, 1, 1]]), 2, 1).graph
    pair = by_type(it.replace(num_dst=2**30), torch.tensor([3, 900, 900], dtype=torch.int32), 1000)
    assert pair.dst.tolist() == [0, 1]
    assert (pair.ptr[3], pair.ptr[4], pair.ptr[900], pair.ptr[901]) == (0, 1, 1, 2)


def test_ranges_of_shards_beyond_single_precision():
    last = 2**24
    graph = shard(torch.tensor([[0, last], [0, 0]]), (last + 1, 1), 2).graph
    assert graph.num_edges == 2 and graph.blocks[1].ids == slice(last // 2, last + 1)


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (torch.zeros(3, dtype=torch.long), "an integer for each of this worker's 2 edges"),
        (torch.zeros(2), "an integer for each"),
        (torch.tensor([0, 5]), "from 0 to 4"),
        (torch.tensor([-1, 0]), "from 0 to 4"),
    ],
)
def test_bad_edge_types(types, says):
    with pytest.raises(ValueError, match=says):
        by_type(shard(torch.tensor([[0, 1], [1, 2]]), 3, 2).graph, types, 5)


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (nn.SAGEConv(4, 4), {"blocks": 4, "transposes": 4}),
        (nn.GCNConv(4, 4), {"blocks": 4, "derived": 8}),  # a block with loops, and its transpose
        (nn.GATConv(4, 4), {"blocks": 4, "derived": 12}),
        (nn.GATConv(4, 4, dropout=0.5), {"blocks": 4, "derived": 20}),
        (nn.GATConv(4, 4, add_self_loops=False), {"blocks": 4, "transposes": 8}),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, torch.nn.Module) else "",
)
def test_bytes_an_edge_takes(layer, kept):
    """Besides its id, of which a loaded graph has 8, in the file until somebody reads them."""
    num_nodes, num_edges = 100, 100_000
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(0))
    (topology,) = split(edge_index, *[torch.zeros(num_nodes, dtype=torch.int64)] * 2, 1)
    graph = assemble(topology, 0)
    layer(torch.randn(num_nodes, 4, requires_grad=True), ShardedEdgeIndex(graph)).sum().backward()
    found = {kind: count / num_edges for kind, count in graph.memory().items()}
    expected = dict.fromkeys(found, 0) | {"ids": 8} | kept
    assert found == pytest.approx(expected, abs=0.2)
