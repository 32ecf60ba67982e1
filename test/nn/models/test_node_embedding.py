"""Tables of nodes, of which workers hold their own rows, against ``torch.nn.Embedding`` in one process."""

import copy
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.node_tables import check_training
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.nn import GCNConv, NodeEmbedding, convert, whole_state_dict
from pyg_sar.nn.models import node_embedding

WORKERS = [(1, "random"), (2, "random"), (3, "empty")]
Y = torch.randint(4, (NUM_NODES,), generator=torch.Generator().manual_seed(3))
TYPES = torch.randint(3, (edges().size(1),), generator=torch.Generator().manual_seed(2))


def part_of(group, method="random"):
    return share(group, edges(), assignment(method, group.size()))


def same_rows(group, method, num_nodes, dtype):
    n_id = (assignment(method, group.size(), num_nodes) == group.rank()).nonzero().view(-1).flip(0)
    torch.manual_seed(0)
    expected, after = torch.nn.Embedding(num_nodes, 3, dtype=dtype).weight, torch.rand(2)
    torch.manual_seed(0)
    with mock.patch.object(node_embedding, "CHUNK", 40):
        table = NodeEmbedding(n_id, 3, group=group, dtype=dtype)
    assert torch.equal(torch.rand(2), after)
    assert torch.equal(table(), expected[n_id]) and torch.equal(table.whole(), expected)
    if group.rank() > 0:  # the seed of rank 0 counts
        torch.manual_seed(5)
        after = torch.rand(2)
    torch.manual_seed(5 if group.rank() else 0)
    assert torch.equal(NodeEmbedding(n_id, 3, group=group, dtype=dtype).whole(), expected)
    assert torch.equal(torch.rand(2), after)


@pytest.mark.parametrize(("size", "method"), WORKERS)
def test_rows_begin_as_in_one_process(pool, size, method):
    for num_nodes in (4, 61, 97):
        for dtype in (torch.float32, torch.float64):
            pool.run(size, same_rows, method, num_nodes, dtype)


def test_what_is_drawn_by_the_number_of_rows():
    def xavier(rows, generator):
        torch.nn.init.xavier_uniform_(rows, generator=generator)

    def bounded(rows, generator):
        a = (6 / (table.num_nodes + table.embedding_dim)) ** 0.5
        rows.uniform_(-a, a, generator=generator)

    expected = torch.empty(97, 3)
    table = NodeEmbedding(torch.arange(97), 3)
    for draw in (xavier, bounded):  # in one piece
        torch.manual_seed(0)
        xavier(expected, None)
        torch.manual_seed(0)
        table.draw(draw)
        assert torch.allclose(table.weight, expected, rtol=1e-6)
    with mock.patch.object(node_embedding, "CHUNK", 40):
        with pytest.raises(ValueError, match=r"^\[rank 0\] Expected 'fill' to draw rows by its generator, alike"):
            table.draw(xavier)
        torch.manual_seed(0)
        table.draw(bounded)
    assert torch.allclose(table.weight, expected, rtol=1e-6)


class Net(torch.nn.Module):
    """R-GCN whose features are learnt."""

    def __init__(self, table):
        super().__init__()
        self.table, self.first, self.second = table, gnn.RGCNConv(6, 5, 3), gnn.RGCNConv(5, 4, 3, num_bases=2)

    def forward(self, rows, edge_index, edge_type):
        return self.second(self.first(self.table(rows), edge_index, edge_type).relu(), edge_index, edge_type)


def train(group, method):
    mine = part_of(group, method)
    torch.manual_seed(0)
    reference = Net(torch.nn.Embedding(NUM_NODES, 6)).double()
    torch.manual_seed(0)
    model = convert(Net(NodeEmbedding(mine.src, 6, group=group)).double(), group)

    def whole(net, step):
        return F.cross_entropy(net(torch.arange(NUM_NODES), edges(), TYPES), Y)

    def own(net, step):
        out = net(None, mine.edge_index, TYPES[mine.edge])
        return pyg_sar.global_mean(F.cross_entropy(out, Y[mine.dst], reduction="none"), group)

    check_training(group, (reference, model), (whole, own))


@pytest.mark.parametrize(("size", "method"), WORKERS)
def test_rgcn_on_an_embedding(pool, size, method):
    pool.run(size, train, method)


def sparse_adam(net):
    return [torch.optim.SparseAdam([net.weight], 0.01)]


def sparse_sgd(net):
    return [torch.optim.SGD([net.weight], 0.1)]


def train_sparse(group, method, make):
    mine = part_of(group, method)
    torch.manual_seed(0)
    reference = torch.nn.Embedding(NUM_NODES, 4, sparse=True).double()
    torch.manual_seed(0)
    table = NodeEmbedding(mine.src, 4, sparse=True, group=group).double()

    def chosen(step):
        return torch.arange(NUM_NODES) % 3 == step

    def whole(net, step):
        return F.cross_entropy(net(chosen(step).nonzero().view(-1)), Y[chosen(step)])

    def own(net, step):
        rows = chosen(step)[mine.src]
        rows = rows.nonzero().view(-1) if step else rows  # an index or a mask
        return pyg_sar.global_mean(F.cross_entropy(net(rows), Y[mine.src][rows], reduction="none"), group)

    check_training(group, (reference, table), (whole, own), make)
    assert table.weight.grad.is_sparse and torch.equal(table(), table.weight)


@pytest.mark.parametrize("make", [sparse_adam, sparse_sgd])
def test_sparse_optimizers(pool, make):
    pool.run(3, train_sparse, "empty", make)


def read_by_links(group):
    mine = part_of(group)
    table = NodeEmbedding(mine.src, 4, group=group).double()
    pairs = edges()[:, :50]
    index, kept = pyg_sar.shard_links(pairs, mine.src, group)
    close(table(index[0]), table.whole()[pairs[0, kept]], "rows of sources")
    close(table(index[1]), table.whole()[pairs[1, kept]], "rows of destinations")
    with pytest.raises(NotImplementedError, match=r"\[rank \d\] The gradient of rows that other workers read"):
        NodeEmbedding(mine.src, 4, sparse=True, group=group)(index[0])
    with pytest.raises(ValueError, match=rf"\[rank \d\] Expected rows .* 0 to {len(mine.src) - 1}, but got their glob"):
        table(mine.src)


def test_rows_of_others_are_read_by_links(pool):
    pool.run(2, read_by_links)


def save(group, method):
    model = Net(NodeEmbedding(part_of(group, method).src, 6, group=group))
    return model.state_dict(), whole_state_dict(model)


def load(group, method, saved, whole):
    mine = part_of(group, method)
    model = Net(NodeEmbedding(mine.src, 6, group=group))
    before = dict(whole)
    model.load_state_dict(whole)
    assert torch.equal(model.table(), whole["table.weight"][mine.src]) and whole == before
    again = whole_state_dict(model)
    assert list(again) == list(whole) and all(torch.equal(again[name], whole[name]) for name in whole)
    model.load_state_dict(model.state_dict())  # of this part
    errors = []
    for state in (
        saved,
        {**whole, "table.weight": whole["table.weight"][1:]},
        {**whole, "table.weight": torch.ones(7)},
    ):
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(state)
        errors.append(str(error.value))
    assert torch.equal(model.table.whole(), whole["table.weight"])
    assert (
        f"[rank {group.rank()}] 'table.weight' has the rows of {len(saved['table.n_id'])} nodes that are" in errors[0]
    )
    assert "save 'pyg_sar.nn.whole_state_dict(model)' instead" in errors[0]
    assert f"has shape [{NUM_NODES - 1}, 6]. Without 'n_id', a table of all nodes is expected, [61, 6]" in errors[1]
    assert "has shape [7]" in errors[2]


def test_saved_and_loaded_whole_by_any_number_of_workers(pool):
    for size, method, other in ((2, "random", 3), (1, "random", 2), (3, "empty", 1), (2, "contiguous", 2)):
        saved, whole = pool.run(size, save, method)[0]
        reference = Net(torch.nn.Embedding(NUM_NODES, 6))
        reference.load_state_dict(whole)
        pool.run(other, load, "random", saved, reference.state_dict())


def copies(group):
    rank = group.rank()
    mine = part_of(group)
    table = NodeEmbedding(mine.src, 6, group=group)
    model = Net(table)
    of_group = pyg_sar.inference(model, None, mine.edge_index, TYPES[mine.edge], group=group)
    assert table.group is group
    table.group = None  # groups cannot be copied by others
    assert torch.equal(of_group, pyg_sar.inference(model, None, mine.edge_index, TYPES[mine.edge], group=group))
    for net in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).double()):
        weight = net.table.weight
        with torch.no_grad():
            weight.fill_(rank + 1), net.first.bias.fill_(rank + 1)
        pyg_sar.broadcast_parameters(net, group)
        assert (weight == rank + 1).all() and (net.first.bias == 1).all() and torch.equal(net.table.n_id, mine.src)
        (net.table().sum() + net.first.bias.sum()).backward()
        pyg_sar.sum_gradients(net, group)
        assert (weight.grad == 1).all() and (net.first.bias.grad == 2).all()
        net.zero_grad()
    out = pyg_sar.inference(model, None, mine.edge_index, TYPES[mine.edge], group=group)
    assert torch.equal(
        out, pyg_sar.inference(copy.deepcopy(model), None, mine.edge_index, TYPES[mine.edge], group=group)
    )
    model.load_state_dict(model.state_dict(), assign=True)
    assert table.weight.is_local


def test_other_workers_do_not_touch_rows_and_copies_stay_their_own(pool):
    pool.run(2, copies)


def wrong(group, nodes):
    own = part_of(group).src
    given = {"whole": Data(edge_index=edges(), num_nodes=NUM_NODES), "others": 1 - own * 0, "number": NUM_NODES}[nodes]
    NodeEmbedding(given, 4, group=group)


@pytest.mark.parametrize(
    ("nodes", "error", "says"),
    [
        (
            "whole",
            "ValueError",
            "own each of 122 nodes once, with ids from 0 to 121 (got rank 0: 61 from 0 to 60, rank",
        ),
        ("others", "ValueError", "own each of 61 nodes once"),
        ("number", "TypeError", "Expected the loaded data (of one type of node), or 'n_id'"),
    ],
)
def test_ids_that_are_not_the_own_ones(pool, nodes, error, says):
    for outcome in pool.outcomes(2, wrong, nodes):
        assert outcome[:2] == ("error", error) and says in outcome[2]


def test_data_of_one_process_and_of_types():
    hetero = HeteroData()
    hetero["user"].n_id = torch.tensor([2, 0, 1])
    hetero["user"].num_nodes = 3
    whole = NodeEmbedding(Data(edge_index=edges(), num_nodes=NUM_NODES), 4)
    assert whole.n_id.tolist() == list(range(NUM_NODES)) and torch.equal(whole(whole.n_id), whole())
    assert NodeEmbedding(hetero["user"], 4).n_id.tolist() == [2, 0, 1]
    with pytest.raises(TypeError, match="of one type of node"):
        NodeEmbedding(hetero, 4)


def plain_table(group, layer):
    mine = part_of(group)
    rows = torch.nn.Embedding(len(mine.src), 6).weight
    with pytest.raises(NotImplementedError, match=r"\[rank \d\] A parameter of shape .*'pyg_sar.nn.NodeEmbedding' is"):
        layer(rows, mine.edge_index)
    layer(rows * 1, mine.edge_index)
    layer(NodeEmbedding(mine.src, 6, group=group)(), mine.edge_index)


@pytest.mark.parametrize(
    "layer", [GCNConv(6, 2), gnn.GraphConv(6, 2), convert(gnn.LGConv())], ids=["ours", "", "replay"]
)
def test_a_table_that_is_no_workers_own_is_refused(pool, layer):
    pool.run(2, plain_table, layer)
    assert layer(torch.nn.Embedding(NUM_NODES, 6).weight, pyg_sar.shard(edges(), NUM_NODES, 2)).size(0) == NUM_NODES


@pytest.mark.parametrize("length", [3, NUM_NODES + 1])
def test_a_mask_of_other_nodes(length):
    table = NodeEmbedding(torch.arange(NUM_NODES), 4)
    assert table(torch.arange(NUM_NODES) < 5).shape == (5, 4)
    with pytest.raises(ValueError, match=rf"mask with an entry for each of this worker's {NUM_NODES} nodes"):
        table(torch.ones(length, dtype=torch.bool))
