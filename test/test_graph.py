"""Index arithmetic: blocks, merging, self-loops, edge types, and sizes that nobody could allocate."""

import pytest
import torch
from problem import NUM_NODES, close, edges
from torch_geometric.utils import contains_self_loops, degree, remove_self_loops

from pyg_sar import Block, ShardedGraph, graph, nn, shard
from pyg_sar.distributed.assemble import _local_first
from pyg_sar.distributed.exchange import Local
from pyg_sar.graph import compress


@pytest.fixture(params=[1, 2, 5], ids="{} shards".format)
def sharded(request) -> ShardedGraph:
    return shard(edges(), NUM_NODES, request.param).graph


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_compress(num_rows):
    row = torch.arange(num_rows).repeat_interleave(torch.arange(num_rows) % 3)
    ptr = compress(row, num_rows)
    assert ptr.dtype == torch.int32
    assert ptr.tolist() == [0, *torch.cumsum(torch.arange(num_rows) % 3, 0).tolist()]


def test_graph_holds_the_edges(sharded):
    assert torch.equal(sharded.coo(), edges())
    assert torch.equal(sharded.row, edges()[1])
    assert torch.equal(sharded.degree, degree(edges()[1], NUM_NODES, torch.long))
    assert torch.equal(sharded.merge().coo(), edges())
    assert sharded.merge() is sharded.merge()
    assert sharded.merge().merge().num_edges == sharded.num_edges == edges().size(1)


def test_transpose(sharded):
    for block in sharded.blocks:
        ptr, dst, perm = block.transpose
        assert torch.equal(dst, block.row[perm])
        source = torch.arange(block.num_src).repeat_interleave(ptr.diff())
        assert torch.equal(block.col[perm].long(), source)
        assert block.transpose is block.transpose


def test_rows_of_a_block(sharded):
    for block in sharded.blocks:
        for start, end in ((0, 61), (0, 0), (61, 61), (7, 30)):
            part = block.rows(start, end)
            inside = (block.row >= start) & (block.row < end)
            assert part.num_dst == end - start
            assert torch.equal(part.col, block.col[inside])
            assert torch.equal(part.row + start, block.row[inside])


def test_self_loops_are_replaced_by_one_each(sharded):
    looped, keep = sharded.with_self_loops()
    rest, _ = remove_self_loops(edges())
    nodes = torch.arange(NUM_NODES).expand(2, -1)
    assert torch.equal(looped.coo(), torch.cat([rest, nodes], 1))
    assert torch.equal(keep, edges()[0] != edges()[1])
    kept = keep.nonzero().view(-1)
    assert torch.equal(looped.e_id, torch.cat([kept, -1 - torch.arange(NUM_NODES)]))
    assert torch.equal(looped.with_self_loops()[0].coo(), looped.coo())
    assert contains_self_loops(edges()) and not contains_self_loops(rest)


def test_self_loops_of_ids_beyond_32_bits():
    it = shard(edges(), NUM_NODES, 2).graph
    it = it.replace(n_id=torch.arange(NUM_NODES) + 2**40, e_id=torch.arange(edges().size(1)) + 2**41)
    e_id = it.with_self_loops()[0].e_id
    assert e_id.dtype == torch.int64
    assert torch.equal(e_id[-NUM_NODES:], -1 - it.n_id)
    assert e_id.unique().numel() == e_id.numel()


def test_bipartite_graphs_have_no_self_loops():
    with pytest.raises(ValueError, match="add_self_loops=False"):
        shard(edges(61, 47), (61, 47), 2).graph.with_self_loops()


def test_types_are_kept_until_they_change(sharded):
    types = torch.randint(3, (sharded.num_edges,))
    typed = sharded.by_type(types, 3)
    assert sharded.by_type(types, 3) is typed
    assert sharded.by_type(types.clone(), 3) is not typed
    assert sharded.by_type(types, 4) is not typed
    before = sharded.by_type(types, 3)
    types[0] = (types[0] + 1) % 3
    assert sharded.by_type(types, 3) is not before


def test_types_and_destinations_make_pairs(sharded):
    types = torch.randint(3, (sharded.num_edges,))
    typed = sharded.by_type(types, 3)
    pair_type = torch.arange(3).repeat_interleave(torch.tensor(typed.ptr).diff())
    assert torch.equal(typed.dst[typed.graph.row], edges()[1])
    assert torch.equal(pair_type[typed.graph.row], types)
    assert typed.graph.num_dst == len(set(zip(edges()[1].tolist(), types.tolist(), strict=True)))
    for graph_of_type, kind in zip(typed.relations, range(3), strict=True):
        assert graph_of_type.num_edges == (types == kind).sum()


def test_types_die_with_their_tensor(sharded):
    types = torch.zeros(sharded.num_edges, dtype=torch.long)
    sharded.by_type(types, 1)
    assert len(sharded._typed) == 1
    del types
    assert len(sharded._typed) == 0


def test_replace_shares_seeds_and_nothing_that_was_computed(sharded):
    other = sharded.replace(remat=False)
    assert other.seeds is sharded.seeds
    assert other._typed is not sharded._typed
    assert sharded.remat and not other.remat


# Sizes beyond 2^31 by arithmetic.


class Long(torch.Tensor):
    """Row numbers of more edges than int32 can count."""

    def numel(self):
        return 2**31


def test_pointers_are_wide_for_many_edges():
    few = torch.tensor([0, 0, 2])
    ptr = compress(few.as_subclass(Long), 3)
    assert ptr.dtype == torch.int64
    assert ptr.tolist() == [0, 2, 2, 3]


@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv"])
def test_layers_with_wide_pointers(monkeypatch, name):
    """Every step works with int64 pointers and columns, as it will with more edges."""
    torch.manual_seed(0)
    conv = getattr(nn, name)(8, 4).double()
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(conv(x, edges()).square().sum(), x)
    narrow = graph.compress
    monkeypatch.setattr(graph, "compress", lambda row, n: narrow(row, n).long())
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
    ids = _local_first(sizes, 1)
    assert ids == [
        slice(1_900_000_000, 3_900_000_000),
        slice(0, 1_900_000_000),
        slice(3_900_000_000, 5_700_000_000),
    ]
    blocks = [
        Block(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([n - 1], dtype=torch.int32), i, n, slice(k, k + 1))
        for k, (n, i) in enumerate(zip(sizes, ids, strict=True))
    ]
    it = ShardedGraph(tuple(blocks), sizes[1], 1, Local(ids))
    source = [3_899_999_999, 1_899_999_999, 5_699_999_999]
    assert it.coo()[0].tolist() == source
    total, row = sum(sizes), torch.zeros(3, dtype=torch.long)
    one = Block.from_coo(row, it.coo()[0], slice(0, total), total, 1, torch.arange(3))
    assert one.source.tolist() == source
    assert one.rowptr.dtype == one.col.dtype == torch.int64  # torch wants the same type of both


def test_types_times_nodes_beyond_32_bits():
    """Pairs are numbered by type * num_dst + destination."""
    it = shard(torch.tensor([[0, 1, 1], [0, 1, 1]]), 2, 1).graph
    pair = it.replace(num_dst=2**30).by_type(torch.tensor([3, 900, 900], dtype=torch.int32), 1000)
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
        shard(torch.tensor([[0, 1], [1, 2]]), 3, 2).graph.by_type(types, 5)
