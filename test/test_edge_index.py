"""The tensor that stands for a sharded graph, and its operations: what they answer, exchange and refuse."""

import copy
import io
import pickle
import re
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
import torch_geometric.utils as U
from support.conv_zoo import F, Net, default, difference
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.explain.algorithm.utils import set_masks

import pyg_sar.nn
from pyg_sar import ShardedEdgeIndex, record_traffic, shard
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn import convert
from pyg_sar.operations import EDGES, FLIPPED, SOURCES

N = NUM_NODES
REFUSED = r"(?s)^\[rank 0\] .* cannot be computed exactly on the .* of a sharded graph: .*\. [A-Z][^.]*'.*\.$"


@pytest.fixture
def plain():
    return edges(N, N)


@pytest.fixture
def sharded(plain):
    return shard(plain, N, 3)


@pytest.fixture
def x():
    return torch.randn(N, 4, generator=torch.Generator().manual_seed(0))


# Properties


def test_it_is_a_tensor_without_storage(plain, sharded):
    with mock.patch.object(ShardedGraph, "coo", side_effect=AssertionError("numbers were made")):
        assert isinstance(sharded, torch.Tensor)
        assert sharded.shape == plain.shape and sharded.size(1) == plain.size(1) and len(sharded) == 2
        assert sharded.dim() == 2 and sharded.numel() == plain.numel() and sharded.ndim == 2
        assert sharded.dtype == torch.int64 and sharded.device == plain.device and sharded.layout == torch.strided
        assert not sharded.is_floating_point() and not sharded.requires_grad and not sharded.is_cuda
        assert sharded.is_contiguous() and sharded.stride() == plain.stride()
        name = f"ShardedEdgeIndex(edge_index, size=[2, {plain.size(1)}], blocks=3)"
        assert str(sharded) == repr(sharded) == f"{sharded}" == name
        assert {sharded: 1}[sharded] == 1
        for same in (sharded.to("cpu"), sharded.cpu(), sharded.to(torch.device("cpu"), torch.int64, copy=False)):
            assert same is sharded
        for same in (sharded.long(), sharded.contiguous(), sharded.detach(), sharded.clone(), copy.deepcopy(sharded)):
            assert same is sharded
    assert sharded.streams and sharded.graph.num_edges == plain.size(1)


def test_modes_are_other_tensors_of_the_same_edges(plain, sharded):
    assert len(sharded.merge().graph.blocks) == 1 and not sharded.replace(remat=False).graph.remat
    assert sharded.merge()[1].equal(plain[1])


def test_what_is_derived_has_no_blocks(sharded):
    derived = sharded[:, sharded[0] != sharded[1]]
    assert isinstance(derived, ShardedEdgeIndex) and not derived.streams
    with pytest.raises(AttributeError, match="has no blocks to stream"):
        _ = derived.graph


def test_to_another_device(sharded):
    moved = sharded.to("meta", non_blocking=True)
    assert moved.device.type == "meta" and moved.streams and moved.graph.num_edges == sharded.graph.num_edges
    derived = sharded.flip(0).to(device="meta")
    assert derived.device.type == "meta" and derived._data.device.type == "meta" and derived.kind == FLIPPED


def test_in_a_data_object(sharded, x):
    data = Data(x=x, edge_index=sharded)
    assert data.num_nodes == N and data.num_edges == sharded.size(1)
    assert f"edge_index=[2, {sharded.size(1)}]" in str(data)
    assert data.to("cpu").edge_index is sharded and copy.deepcopy(data).edge_index is sharded
    assert copy.copy(data).edge_index is sharded and data.clone().edge_index is sharded
    assert "edge_index" in data and data.has_self_loops()
    with pytest.raises(NotImplementedError, match=REFUSED):
        data.has_isolated_nodes()


@pytest.mark.parametrize("leave", [pickle.dumps, copy.copy, lambda it: torch.save(it, io.BytesIO())])
def test_it_does_not_leave_the_process(sharded, leave):
    for it in (sharded, sharded[0]):
        with pytest.raises(NotImplementedError, match=r"load the partition again instead"):
            leave(it)


def test_nor_in_a_data_object(sharded):
    with pytest.raises(NotImplementedError, match=r"load the partition again instead"):
        pickle.dumps(Data(edge_index=sharded))


def test_unpacking(plain, sharded):
    for row, col in (sharded, sharded.unbind(), sharded.unbind(dim=0), torch.unbind(sharded, -2),
                     (sharded[0], sharded[1]), (sharded[-2], sharded[-1]), (sharded.select(0, 0), sharded.select(0, 1)),
                     (sharded[0, :], sharded[1, :])):  # fmt: skip
        assert row.kind == SOURCES and row.shape == plain[0].shape
        assert not isinstance(col, ShardedEdgeIndex) and col.equal(plain[1])


# What it answers. In one process the numbers are those of the whole graph.


def numbers(it):
    return it._data


def test_gather(plain, sharded, x):
    row = sharded[0]
    expected = x[plain[0]]
    for found in (x[row], x[row.view(-1)], x.index_select(0, row), x.index_select(-2, row)):
        assert found.equal(expected)
    for found in (
        torch.index_select(x, 0, row),
        torch.index_select(x, index=row, dim=0),
        x.t().index_select(1, row).t(),
    ):
        assert found.equal(expected)
    for found, columns in ((x[row, :], slice(None)), (x[row, 1], 1), (x[row, ...], ...), (x[row, 1:3], slice(1, 3))):
        assert found.equal(x[plain[0], columns])
    assert x.t()[:, row].equal(x.t()[:, plain[0]])
    for values in (torch.arange(N), torch.arange(N) % 2 == 0, torch.randn(N, 2, 3), torch.randn(N, dtype=torch.cfloat)):
        assert values[row].equal(values[plain[0]])


def test_scatter(plain, sharded):
    weight = torch.randn(plain.size(1), 3)
    index, ids = (i.view(-1, 1).expand_as(weight) for i in (sharded[0], plain[0]))
    start = torch.randn(N, 3)
    expected = start.scatter_add(0, ids, weight)
    torch.testing.assert_close(start.scatter_add(0, index, weight), expected)
    torch.testing.assert_close(torch.scatter_add(start, dim=0, index=index, src=weight), expected)
    inplace = start.clone()
    assert inplace.scatter_add_(0, index, weight) is inplace
    torch.testing.assert_close(inplace, expected)
    torch.testing.assert_close(start.t().scatter_add(-1, sharded[0].expand(3, -1), weight.t()), expected.t())
    degree = torch.zeros(N, dtype=torch.long).scatter_add_(0, sharded[0], torch.ones(plain.size(1), dtype=torch.long))
    assert degree.equal(torch.bincount(plain[0], minlength=N))


def test_index_add(plain, sharded):
    weight, start = torch.randn(plain.size(1), 3), torch.randn(N, 3)
    expected = start.index_add(0, plain[0], weight, alpha=2)
    torch.testing.assert_close(start.index_add(0, sharded[0], weight, alpha=2), expected)
    torch.testing.assert_close(torch.index_add(start, dim=0, index=sharded[0], source=weight, alpha=2), expected)
    torch.testing.assert_close(start.t().index_add(-1, sharded[0], weight.t(), alpha=2), expected.t())
    inplace = start.clone()
    assert inplace.index_add_(0, sharded[0], weight, alpha=2) is inplace
    torch.testing.assert_close(inplace, expected)
    degree = torch.zeros(N, dtype=torch.long).index_add_(0, sharded[0], torch.ones(plain.size(1), dtype=torch.long))
    assert degree.equal(torch.bincount(plain[0], minlength=N))
    for wrong in (weight[:-1], torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"'index_add' got a source of shape .* for each of this worker's"):
            start.index_add(0, sharded[0], wrong)


def test_compare(plain, sharded):
    (row, col), loops = sharded, plain[0] == plain[1]
    assert (row == col).equal(loops) and (col == row).equal(loops) and torch.eq(row, col).equal(loops)
    assert (row != col).equal(~loops) and row.ne(col).equal(~loops) and (col != row).equal(~loops)
    assert torch.eq(row, other=col).equal(loops) and torch.ne(input=col, other=row).equal(~loops)
    assert bool((row == sharded[0]).all())
    some = plain[1] > 5
    (row, col), loops = sharded[:, some], loops[some]
    assert (row == col).equal(loops) and (sharded[0][some] != plain[1][some]).equal(~loops)
    assert (row.clone() == col).equal(loops) and (sharded.flip(0)[1] == plain[1]).equal(plain[0] == plain[1])


def test_flip(plain, sharded):
    for it in (
        sharded.flip(0),
        sharded.flip([0]),
        sharded.flip((-2,)),
        torch.flip(sharded, [0]),
        sharded.flip(dims=(0,)),
        torch.flip(input=sharded, dims=[0]),
        sharded[[1, 0]],
        sharded[[1, 0], :],
    ):
        assert it.kind == FLIPPED and numbers(it).equal(plain.flip(0))
        row, col = it
        assert row.equal(plain[1]) and col.kind == SOURCES
        back = it.flip([0])
        assert back.kind == EDGES and numbers(back).equal(plain)


def test_choose(plain, sharded):
    mask, some = plain[0] < 9, torch.tensor([5, 3, 3])
    for which in (mask, some):
        assert numbers(sharded[:, which]).equal(plain[:, which])
        assert numbers(sharded[..., which]).equal(plain[:, which])
        assert numbers(sharded[0][which]).equal(plain[0][which])
        assert numbers(sharded[0, which]).equal(plain[0, which]) and sharded[1, which].equal(plain[1, which])
    assert numbers(sharded.index_select(1, some)).equal(plain[:, some])
    assert numbers(sharded[0].index_select(0, some)).equal(plain[0, some])
    assert sharded[:] is sharded and sharded[:, :] is sharded and sharded[...] is sharded


def test_join(plain, sharded):
    loops = torch.arange(N).expand(2, -1)
    for it in (
        torch.cat([sharded, loops], 1),
        torch.cat([sharded, loops], dim=-1),
        torch.concat((sharded, loops), dim=1),
    ):
        assert it.kind == EDGES and numbers(it).equal(torch.cat([plain, loops], 1))
    assert numbers(torch.cat([sharded.flip(0), loops], 1)).equal(torch.cat([plain.flip(0), loops], 1))
    assert numbers(torch.cat([sharded, sharded], 1)).equal(torch.cat([plain, plain], 1))
    row, col = sharded
    assert numbers(torch.cat([row, row])).equal(torch.cat([plain[0], plain[0]]))
    assert numbers(torch.stack([row, col])).equal(plain)
    assert torch.stack([row, col], dim=0).kind == EDGES and torch.stack((col, row)).kind == FLIPPED


def test_write_own_rows(plain, sharded):
    loops = sharded[0] == sharded[1]
    found, value = torch.zeros(N), torch.randn(int(loops.sum()))
    found[sharded[0][loops]] = value
    expected = torch.zeros(N)
    expected[plain[0][loops]] = value
    assert found.equal(expected)


def test_new_tensors_and_copies(plain, sharded):
    row = sharded[0]
    for new in (
        row.new_zeros(3),
        torch.zeros_like(row),
        torch.ones_like(row, dtype=torch.float),
        row.new_full((2,), 4),
    ):
        assert type(new) is torch.Tensor
    derived = sharded[:, row != sharded[1]]
    assert numbers(torch.clone(input=derived)).equal(numbers(derived))
    duplicate = derived.clone()
    duplicate[1].add_(1)
    assert numbers(derived).equal(plain[:, plain[0] != plain[1]])
    assert copy.deepcopy(derived) is not derived and numbers(copy.deepcopy(row)).equal(plain[0])
    assert row.expand(2, -1).kind == row.unsqueeze(0).squeeze(0).kind == row.reshape(-1, 1).kind == SOURCES
    assert sharded.view(2, -1).kind == EDGES


# What it refuses

ROW = {
    "add": lambda row, x: row + 1,
    "add to": lambda row, x: 5 * x.size(0) + row,
    "add in place": lambda row, x: row.add_(1),
    "multiply": lambda row, x: row * 2,
    "divide": lambda row, x: row // 2,
    "negate": lambda row, x: -row,
    "mod": lambda row, x: row % 3,
    "float": lambda row, x: row.float(),
    "int32": lambda row, x: row.to(torch.int32),
    "type": lambda row, x: row.type(torch.float),
    "to other": lambda row, x: row.to(x),
    "sort": lambda row, x: row.sort(),
    "argsort": lambda row, x: torch.argsort(row),
    "unique": lambda row, x: row.unique(),
    "bincount": lambda row, x: torch.bincount(row),
    "max": lambda row, x: int(row.max()) + 1,
    "min": lambda row, x: row.min(),
    "sum": lambda row, x: row.sum(),
    "cumsum": lambda row, x: row.cumsum(0),
    "nonzero": lambda row, x: row.nonzero(),
    "list": lambda row, x: row.tolist(),
    "numpy": lambda row, x: row.numpy(),
    "asarray": lambda row, x: np.asarray(row),
    "torch.tensor": lambda row, x: torch.tensor(row),
    "pointer": lambda row, x: row.data_ptr(),
    "storage": lambda row, x: row.untyped_storage(),
    "dlpack": lambda row, x: torch.from_dlpack(row),
    "data": lambda row, x: row.data,
    "item": lambda row, x: row[row == row][0].item(),
    "constant": lambda row, x: row == 3,
    "not constant": lambda row, x: row != 3,
    "scalar": lambda row, x: row == torch.tensor(3),
    "all pairs": lambda row, x: row.view(-1, 1) == row.view(1, -1),
    "less": lambda row, x: row < 5,
    "less than": lambda row, x: torch.arange(len(row)) < row,
    "equal": lambda row, x: row.equal(row),
    "contains": lambda row, x: 3 in row,
    "isin": lambda row, x: torch.isin(row, torch.arange(5)),
    "first": lambda row, x: row[0],
    "slice": lambda row, x: row[:5],
    "iterate": lambda row, x: [int(i) for i in row],
    "chunk": lambda row, x: row.chunk(2),
    "repeat": lambda row, x: row.repeat(2),
    "where": lambda row, x: torch.where(row == row, row, 0),
    "write to": lambda row, x: row.__setitem__(0, 1),
    "embedding": lambda row, x: torch.nn.functional.embedding(row, x),
    "one hot": lambda row, x: torch.nn.functional.one_hot(row),
    "index itself": lambda row, x: row[row],
    "select itself": lambda row, x: row.index_select(0, row),
    "too few rows": lambda row, x: x[:-1][row],
    "too many rows": lambda row, x: torch.cat([x, x])[row],
    "wrong dimension": lambda row, x: x.t()[row],
    "wrong dimension by name": lambda row, x: x.index_select(1, row),
    "one node": lambda row, x: row == torch.full_like(row, 3),
    "nodes of other edges": lambda row, x: row == torch.arange(len(row)) % N,
    "scalar rows": lambda row, x: x.sum()[row],
    "two indices": lambda row, x: x[0, row],
    "a new dimension": lambda row, x: x[row, None],
    "two tensors": lambda row, x: x[row, torch.zeros(len(row), dtype=torch.long)],
    "matrix of indices": lambda row, x: x[row.view(-1, 1)],
    "gather": lambda row, x: x[:, 0].gather(0, row),
    "take": lambda row, x: x.take(row),
    "add a matrix of indices": lambda row, x: torch.zeros(N).index_add_(0, row.view(-1, 1), torch.ones(len(row))),
    "add onto too few": lambda row, x: torch.zeros(N - 1).index_add_(0, row, torch.ones(len(row))),
    "index_put": lambda row, x: x.index_put((row,), torch.zeros(4)),
    "write rows": lambda row, x: x[:-1].__setitem__(row, 0.0),
    "write to others": lambda row, x: torch.zeros(N).__setitem__(row, row),
    "scatter": lambda row, x: torch.zeros(N).scatter_(0, row, 1.0),
    "scatter max": lambda row, x: torch.zeros(N).scatter_reduce_(0, row, torch.ones(len(row)), "amax"),
    "scatter ids": lambda row, x: torch.zeros(N, dtype=torch.long).scatter_add_(0, torch.arange(len(row)) % N, row),
    "scatter too few": lambda row, x: torch.zeros(N - 1).scatter_add_(0, row, torch.ones(len(row))),
    "operator": lambda row, x: torch.ops.aten.sort(row),
    "operator of the same name": lambda row, x: torch.ops.aten.index_select(x, 0, row),
    "overload": lambda row, x: torch.ops.aten.index_select.default(x, 0, row),
}
BOTH = {
    "transpose": lambda it, x: it.t(),
    "property": lambda it, x: it.T,
    "flatten": lambda it, x: it.view(-1),
    "reshape": lambda it, x: it.reshape(-1, 2),
    "static graphs": lambda it, x: it.unsqueeze(0),
    "one edge": lambda it, x: it[:, 0],
    "first edges": lambda it, x: it[:, :5],
    "first sources": lambda it, x: it[0, :5],
    "first destinations": lambda it, x: it[1, :5],
    "entry": lambda it, x: it[0, 0],
    "rows by list": lambda it, x: it[[1, 1]],
    "rows and edges by list": lambda it, x: it[[1, 0], 3],
    "add onto both": lambda it, x: torch.zeros(2, N).index_add_(1, it, torch.ones(it.shape)),
    "rows by tensor": lambda it, x: it.index_select(0, torch.tensor([1, 0])),
    "new dimension": lambda it, x: it[None],
    "column": lambda it, x: it.select(1, 0),
    "columns": lambda it, x: it.unbind(1),
    "flip columns": lambda it, x: it.flip(1),
    "flip both": lambda it, x: it.flip([0, 1]),
    "max": lambda it, x: it.max(),
    "unique": lambda it, x: it.unique(dim=1),
    "compare": lambda it, x: it == it.flip(0),
    "index by edges": lambda it, x: x[it],
    "sparse": lambda it, x: torch.sparse_coo_tensor(it, torch.ones(it.size(1)), (N, N)),
    "write": lambda it, x: it.__setitem__(0, 1),
    "offset": lambda it, x: it + torch.tensor([[1], [1]]),
    "undirected": lambda it, x: torch.cat([it, it.flip(0)], 1),
    "stack rows": lambda it, x: torch.cat([it, it], 0),
    "other edges": lambda it, x: torch.cat([it, torch.tensor([[0], [1]])], 1),
    "some loops": lambda it, x: torch.cat([it, torch.arange(5).expand(2, -1)], 1),
    "other graph": lambda it, x: torch.cat([it, shard(edges(N, N, 1), N, 2)], 1),
    "sources and destinations": lambda it, x: torch.cat([it[0], it[1]]),
    "two rows of sources": lambda it, x: torch.stack([it[0], it[0]]),
    "rows as columns": lambda it, x: torch.stack([it[0], it[1]], dim=1),
    "three rows": lambda it, x: torch.stack([it[0], it[1], it[1]]),
    "sources of two graphs": lambda it, x: it[0] == shard(edges(N, N), N, 2)[0],
    "add by edges": lambda it, x: torch.zeros(2, N).scatter_add_(1, it, torch.ones(it.shape)),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", ROW)
def test_sources_refuse(sharded, x, name):
    with pytest.raises(NotImplementedError, match=REFUSED):
        ROW[name](sharded[0], x)


@pytest.mark.parametrize("name", BOTH)
def test_edges_refuse(sharded, x, name):
    with pytest.raises(NotImplementedError, match=REFUSED):
        BOTH[name](sharded, x)


def test_what_bypasses_torch_functions_is_refused(sharded, x):
    """As the kernels of other libraries do, and TorchScript."""
    for it in (sharded, sharded[0]):
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(NotImplementedError, match=REFUSED):
            torch.sort(it)
    with pytest.raises(NotImplementedError, match=REFUSED):
        gnn.GraphConv(4, 4)(x, EdgeIndex(sharded, sparse_size=(N, N)))


def test_a_failed_lookup_names_its_cause_not_that_of_its_explanation(sharded, x):
    """PyG asks for the largest number when an ``index_select`` fails."""
    with pytest.raises(NotImplementedError, match=r"reads dimension -2 of a tensor of shape \[60, 4\]"):
        gnn.SAGEConv(4, 4)(x[:-1], sharded)


def test_a_table_of_all_nodes_is_refused():
    layer, plain = gnn.LINKX(N, F, 8, F, 1).eval(), edges()
    sources = shard(plain, N, 2)
    assert layer(None, sources).allclose(layer(None, plain))  # this worker has all nodes
    one_of_two = ShardedEdgeIndex(sources.graph.replace(num_src=N - 1))
    with pytest.raises(NotImplementedError, match="reads dimension"):
        layer(None, one_of_two)


# What scripts do with the graph around their layers: it is exact, or it is refused by the name of what they called

EXACT = {
    "print": lambda data: str(data).replace("Sharded", ""),
    "has_self_loops": lambda data: data.has_self_loops(),
    "to_dict": lambda data: sorted(data.to_dict()),
    "sizes": lambda data: (data.num_edges, data.num_nodes, len(data.edge_index), data.edge_index.size(1)),
    "copies": lambda data: [T.NormalizeFeatures()(it).x for it in (copy.copy(data), copy.deepcopy(data), data.cpu())],
    "GCNNorm": lambda data: T.GCNNorm()(data).edge_weight,
    "AddSelfLoops": lambda data: T.AddSelfLoops()(data).num_edges,
    "remove_self_loops": lambda data: U.remove_self_loops(data.edge_index, data.x[data.edge_index[0]])[1],
    "degree": lambda data: [U.degree(row, data.num_nodes) for row in data.edge_index],
    "mean": lambda data: U.scatter(data.x[data.edge_index[1]], data.edge_index[0], 0, N, reduce="mean"),
    "dropout_edge": lambda data: torch.manual_seed(0) and U.dropout_edge(data.edge_index)[1],
    "pairs": lambda data: (data.x[data.edge_index[0]] * data.x[data.edge_index[1]]).sum(-1),
}
WHOLE, ASK = "to the whole graph, before 'partition'", "of the whole graph, before 'partition'"
COUNT, AGAIN, ROWS = "'data.num_nodes' nodes", "load the partition again", "Its rows are 'edge_index[0]'"
SUMS = "sums and means alone, of 'data.num_nodes' rows"
CALLS = {
    "Data.validate": (lambda data: data.validate(), ASK),
    "Data.is_undirected": (lambda data: data.is_undirected(), ASK),
    "Data.has_isolated_nodes": (lambda data: data.has_isolated_nodes(), ASK),
    "Data.coalesce": (lambda data: data.coalesce(), WHOLE),
    "Data.subgraph": (lambda data: data.subgraph(torch.arange(3)), "Sample before 'partition'"),
    "ToUndirected": (lambda data: T.ToUndirected()(data), WHOLE),
    "ToSparseTensor": (lambda data: T.ToSparseTensor()(data), WHOLE),
    "SIGN": (lambda data: T.SIGN(2)(data), WHOLE),
    "RandomLinkSplit": (lambda data: T.RandomLinkSplit()(data), "pyg_sar.shard_links"),
    "to_undirected": (lambda data: U.to_undirected(data.edge_index), WHOLE),
    "add_self_loops": (lambda data: U.add_self_loops(data.edge_index), COUNT),
    "degree": (lambda data: U.degree(data.edge_index[0]), COUNT),
    "softmax": (lambda data: U.softmax(data.edge_index[1] * 0.1, data.edge_index[0], num_nodes=N), SUMS),
    "scatter": (lambda data: U.scatter(data.edge_index[1], data.edge_index[0], reduce="max"), SUMS),
    "to_dense_adj": (lambda data: U.to_dense_adj(data.edge_index), WHOLE),
    "sort_edge_index": (lambda data: U.sort_edge_index(data.edge_index), WHOLE),
    "coalesce": (lambda data: U.coalesce(data.edge_index), WHOLE),
    "k_hop_subgraph": (lambda data: U.k_hop_subgraph(0, 1, data.edge_index), "pyg_sar.message_flow_graphs"),
    "negative_sampling": (lambda data: U.negative_sampling(data.edge_index), "pyg_sar.negative_sampling"),
    "to_networkx": (lambda data: U.to_networkx(data), AGAIN),
    "copying or saving": (lambda data: torch.save(data, io.BytesIO()), AGAIN),
    "numpy": (lambda data: data.edge_index.cpu().numpy(), AGAIN),
    "max": (lambda data: data.edge_index.max(), COUNT),
    "unique": (lambda data: data.edge_index.unique(), "Do this before 'partition'"),
    "t": (lambda data: data.edge_index.t(), ROWS),
    "indexing": (lambda data: data.edge_index[:, :10], ROWS),
    "Line": (
        lambda data: torch.sparse_coo_tensor(data.edge_index, torch.ones(data.num_edges), (N, N)),
        "Do this before 'partition'",
    ),
}


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return torch.testing.assert_close(found, expected)
    if isinstance(expected, list):
        return [same(*pair) for pair in zip(found, expected, strict=True)]
    assert found == expected


@pytest.mark.parametrize("name", EXACT)
def test_what_scripts_do_is_exact(name, plain, sharded, x):
    same(*(EXACT[name](Data(x=x, edge_index=it, num_nodes=N)) for it in (sharded, plain)))


@pytest.mark.parametrize("name", CALLS)
def test_what_scripts_do_is_refused_by_its_name(name, sharded, x):
    call, advice = CALLS[name]
    told = rf"^\[rank 0\] '?{name}\b.* cannot be .*{re.escape(advice)}.*\.(\n|$)"  # Python 3.14 adds lines
    with pytest.raises(NotImplementedError, match=told):
        call(Data(x=x, edge_index=sharded, num_nodes=N))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers(plain, sharded):
    x = torch.randn(N, F)
    for layer in (gnn.SAGEConv(F, F), gnn.GCNConv(F, F)):
        close = torch.compile(layer, backend="eager")(x, sharded)
        torch.testing.assert_close(close, layer(x, plain))
    with pytest.raises(NotImplementedError, match="'BatchNorm1d' in"):
        torch.compile(Net(torch.nn.BatchNorm1d(F)), backend="eager")(x, sharded)


# On several workers


def cut(group, seed=0):
    return share(group, edges(seed=seed), assignment("random", dist.get_world_size(group)))


def refuse_with_rank(group):
    with pytest.raises(NotImplementedError, match=rf"^\[rank {dist.get_rank(group)}\]"):
        cut(group).edge_index.max()
    with pytest.raises(NotImplementedError, match=rf"'Data.has_self_loops' .* other workers may have .*{ASK}"):
        Data(edge_index=cut(group).edge_index).has_self_loops()  # of which each would know its own
    with pytest.raises(NotImplementedError, match=rf"^\[rank {dist.get_rank(group)}\]"):
        cut(group).edge_index.merge()[0].sort()


def refuse_traces_and_explanations(group):
    mine = cut(group)
    for layer in (gnn.GCNConv(4, 4), pyg_sar.nn.GCNConv(4, 4), convert(gnn.FAConv(4))):
        given = (torch.randn(len(mine.src), 4), torch.randn(len(mine.src), 4), mine.edge_index)
        given = given[1:] if isinstance(layer, gnn.GCNConv) else given
        with warnings.catch_warnings(), pytest.raises(NotImplementedError, match=r"cannot be traced.* in one process"):
            warnings.simplefilter("ignore")  # torch's own opinion of it
            torch.jit.trace(layer, given)
        set_masks(layer, torch.nn.Parameter(torch.ones(mine.edge_index.size(1))), mine.edge_index)
        with pytest.raises(NotImplementedError, match=r"'.*Conv' cannot be explained on a share"):
            layer(*given)


def exchange_anything(group):
    """Numbers of any type travel, sums are added to what is there, and own rows are written."""
    mine, plain = cut(group), edges()
    row = mine.edge_index[0]
    for values in (torch.arange(N), torch.arange(N) % 3 == 0, torch.randn(N, 2, 3), torch.randn(N).bfloat16()):
        for it in (row, mine.edge_index.merge()[0]):
            assert values[mine.src][it].equal(values[plain[0]][mine.edge])
    start, weight = torch.randn(N, 2), torch.randn(plain.size(1), 2)
    index = row.view(-1, 1).expand(-1, 2)
    expected = start.scatter_add(0, plain[0].view(-1, 1).expand(-1, 2), weight)
    found = start[mine.src].scatter_add(0, index, weight[mine.edge])
    torch.testing.assert_close(found, expected[mine.src])
    loops = row == mine.edge_index[1]
    assert loops.equal((plain[0] == plain[1])[mine.edge])
    out = torch.zeros(mine.src.numel())
    out[row[loops]] = 1.0
    assert out.equal(torch.isin(mine.src, plain[0][plain[0] == plain[1]]).float())
    with pytest.raises(NotImplementedError, match="other workers own"):
        out[row] = 1.0


def deep(x, first, second, layers):
    for k, layer in enumerate(layers):
        x = layer(x, second if k == 1 else first).tanh()
    return x


def train_in_many_ways(group):
    """One ``edge_index`` in several layers, two graphs in one model, gradients of inputs alone, recomputation."""
    one, two = cut(group), cut(group, seed=1)
    with default(torch.float64):
        torch.manual_seed(0)
        layers = [
            gnn.GCNConv(F, F, cached=True),
            gnn.SAGEConv(F, F),
            gnn.GATConv(F, F),
            gnn.DirGNNConv(gnn.SAGEConv(F, F)),
        ]
        x = torch.randn(N, F)
        weight = torch.randn(N, F)
    everything = x.clone().requires_grad_()
    expected = deep(everything, edges(), edges(seed=1), copy.deepcopy(layers))
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), everything)
    mine = x[one.src].requires_grad_()
    args = (mine, one.edge_index, two.edge_index, layers)
    ways = {
        "plain": lambda: deep(*args),
        "again, from the cache": lambda: deep(*args),
        "copied with its cache": lambda: deep(*args[:3], copy.deepcopy(layers)),
        "recomputed": lambda: checkpoint(deep, *args, use_reentrant=False),
    }
    problems = []
    for name, way in ways.items():
        out = way()
        (grad,) = torch.autograd.grad((out * weight[one.src]).sum(), mine)
        problems += [
            difference(name, out, expected[one.src], 1e-10),
            difference(name, grad, expected_grad[one.src], 1e-10),
        ]
    with torch.no_grad():
        problems.append(difference("no_grad", deep(*args), expected[one.src], 1e-10))
    return [p for p in problems if p]


def count_bytes(group):
    """Each exchange has one record, whose backward side is as large as its forward side."""
    mine = cut(group)
    halo = mine.edge_index.graph.exchange.routes.num_halo
    x = torch.randn(mine.src.numel(), F, requires_grad=True)
    with record_traffic(mine.edge_index) as records:
        gnn.SAGEConv(F, F)(x, mine.edge_index).sum().backward()
        gnn.SAGEConv(F, F, flow="target_to_source", aggr="sum")(x, mine.edge_index).sum().backward()
    assert len(records) == 2
    fetched, sent = records
    assert (
        fetched.forward_received == fetched.backward_sent == sent.forward_sent == sent.backward_received == halo * F * 4
    )
    assert fetched.forward_sent == fetched.backward_received == sent.forward_received == sent.backward_sent


def batch_norm_between(group):
    """The repair that the refusal names."""
    mine = cut(group)
    with default(torch.float64):
        torch.manual_seed(0)
        reference, x = Net(torch.nn.BatchNorm1d(F)), torch.randn(N, F)
        net = Net(pyg_sar.nn.BatchNorm1d(F, group=group))
    net.load_state_dict(reference.state_dict())
    return difference("output", net(x[mine.src], mine.edge_index), reference(x, edges())[mine.src], 1e-10)


def attention_weights(group):
    """The weights of the edges that stay come first, in the order of the edges, then those of the self-loops."""
    mine, (src, dst) = cut(group), edges()
    with default(torch.float64):
        torch.manual_seed(0)
        x, attr = torch.randn(N, F), torch.randn(src.numel(), 3)
        layers = [gnn.GATConv(F, 4, 2, edge_dim=3), gnn.GATv2Conv(F, 4, 2, edge_dim=3)]
        layers.append(gnn.TransformerConv(F, 4, 2, edge_dim=3))
    stays = src != dst
    position = torch.cat([(stays.cumsum(0) - 1)[mine.edge][stays[mine.edge]], int(stays.sum()) + mine.dst])
    problems = []
    for layer in layers:
        out, (_, alpha) = layer(x, edges(), attr, return_attention_weights=True)
        found, (edge_index, weights) = layer(
            x[mine.src], mine.edge_index, attr[mine.edge], return_attention_weights=True
        )
        expected = alpha[mine.edge] if isinstance(layer, gnn.TransformerConv) else alpha[position]
        problems += [difference("output", found, out[mine.dst], 1e-10), difference("weights", weights, expected, 1e-10)]
        assert edge_index.size(1) == weights.size(0) and isinstance(edge_index, ShardedEdgeIndex)
    return [p for p in problems if p]


@pytest.mark.parametrize(
    "fn",
    [
        refuse_with_rank,
        refuse_traces_and_explanations,
        exchange_anything,
        train_in_many_ways,
        count_bytes,
        batch_norm_between,
        attention_weights,
    ],
)
def test_on_workers(pool, fn):
    for size in (2, 3):
        assert not any(pool.run(size, fn))


def feast(group):
    part = torch.zeros(N, dtype=torch.long)
    part[[7, 16]] = 1  # no edge ends there
    mine = share(group, edges(), part)
    gnn.FeaStConv(F, F, add_self_loops=False)(torch.randn(mine.src.numel(), F), mine.edge_index)


def test_the_others_are_told_that_one_worker_refused(pool):
    others, refused = pool.outcomes(2, feast)
    assert refused[:2] == ("error", "NotImplementedError") and "[rank 1]" in refused[2] and "pyg_sar.nn" in refused[2]
    assert others[:2] == ("error", "LostWorkers") and "look for the first error among all ranks" in others[2]


def two_sets_of_equal_size(group):
    nodes, plain = torch.arange(N - 1), edges()
    plain = plain[:, (plain < N - 1).all(0)]
    mine = share(group, plain, nodes % 2, dst_part=nodes // 30)
    with pytest.raises(NotImplementedError, match="two sets of nodes"):
        gnn.GATConv((F, F), F)((torch.randn(30, F), torch.randn(30, F)), mine.edge_index)


def test_self_loops_between_two_sets_of_equal_size_are_refused(pool):
    pool.run(2, two_sets_of_equal_size)


@pytest.mark.parametrize("layer", [gnn.GATConv, pyg_sar.nn.GATConv])
def test_self_loops_between_two_sets_in_one_process_are_refused(layer, plain):
    sharded = shard(plain, (N, N), 2)
    with pytest.raises((NotImplementedError, ValueError), match="add_self_loops=False"):
        layer((F, F), F)((torch.randn(N, F), torch.randn(N, F)), sharded)


def penalised(group):
    """PyG's own layer has second derivatives on a sharded graph, too."""
    mine = share(group, edges(), assignment("random", group.size()))
    torch.manual_seed(0)
    layer, whole = gnn.GCNConv(4, 3).double(), torch.randn(NUM_NODES, 4, dtype=torch.float64)
    found = []
    for x, edge_index in ((whole.clone(), edges()), (whole[mine.src], mine.edge_index)):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(layer(x, edge_index).tanh().sum(), x, create_graph=True)
        layer.zero_grad()
        grad.square().sum().backward()
        found.append([x.grad, [p.grad.clone() for p in layer.parameters()]])
    (x_grad, expected), (own, grads) = found
    close(own, x_grad[mine.src], "rows")
    for grad, other in zip(grads, expected, strict=True):
        dist.all_reduce(grad, group=group)
        close(grad, other, "parameter")


@pytest.mark.parametrize("workers", [1, 3])
def test_second_derivatives(pool, workers):
    pool.run(workers, penalised)
