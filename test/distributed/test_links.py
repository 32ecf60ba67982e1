"""Link prediction: pairs of nodes on several workers against one process."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch_geometric.data import HeteroData

import pyg_sar
from pyg_sar.distributed import links
from pyg_sar.nn import convert
from pyg_sar.watch.mode import watching


def pairs():
    g = torch.Generator().manual_seed(5)
    return torch.cat([edges()[:, :60], torch.randint(NUM_NODES, (2, 70), generator=g)], 1)


LABELS = (torch.arange(130) < 60).double()


class Net(torch.nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.encode, self.decoder = gnn.GraphSAGE(8, 6, 2, 5), decoder
        self.relation = torch.nn.Parameter(torch.randn(5))
        self.net = torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def forward(self, x, edge_index, index):
        z = self.encode(x, edge_index)
        source, target = z[index[0]], z[index[1]]
        if self.decoder == "dot":
            return (source * target).sum(-1)
        if self.decoder == "DistMult":
            return (source * self.relation * target).sum(-1)
        return self.net(torch.cat([source, target], -1)).view(-1)


def check_layers(group, make):
    """Edges that the graph has not are those of layers, too."""
    torch.manual_seed(0)
    reference = make().double()
    model = convert(make().double(), group)
    model.load_state_dict(reference.state_dict())
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64)
    mine = share(group, edges(), assignment("random", group.size()))
    index, _ = pyg_sar.shard_links(pairs(), mine.src, group)
    out, expected = model(x[mine.src], index), reference(x, pairs())
    out.square().sum().backward()
    expected.square().sum().backward()
    close(out, expected[mine.src], "output")
    pyg_sar.sum_gradients(model, group)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, "gradient")


MODELS = {
    "GCN": partial(gnn.GCN, 8, 6, 2, 5),
    "GAT": partial(gnn.GAT, 8, 6, 2, 5),
    "GraphSAGE": partial(gnn.GraphSAGE, 8, 6, 2, 5),
    "EdgeCNN": partial(gnn.EdgeCNN, 8, 6, 2, 5),  # by replay
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_take_pairs_for_edges(pool, name):
    pool.run(3, check_layers, MODELS[name])


def check_asked(group):
    """Few ids travel at a time, however many are asked for, and what comes of it is what one message of all gives."""
    found, gathered, gather = [], [], links.all_gather
    mine = share(group, edges(), assignment("random", group.size()))
    for at_once in (12, 1 << 20):
        with mock.patch.multiple(
            links, IDS=at_once, all_gather=lambda t, group: (gathered.append(t.numel()), gather(t, group))[1]
        ):
            index, _ = pyg_sar.shard_links(pairs(), mine.src, group)
        routes = index.graph.exchange.routes
        found.append([index.graph.coo(), *routes.serve, torch.tensor(routes.num_src)])
    assert all(map(torch.equal, *found))
    whole = gathered.pop()
    assert max(gathered) <= 12 // group.size() < whole


def test_few_ids_travel_at_a_time(pool):
    pool.run(3, check_asked)


def check(group, decoder, method):
    torch.manual_seed(0)
    reference, model = Net(decoder).double(), Net(decoder).double()
    model.load_state_dict(reference.state_dict())
    convert(model, group)
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64)
    mine = share(group, edges(), assignment(method, group.size()))
    index, kept = pyg_sar.shard_links(pairs(), mine.src, group)
    score = model(x[mine.src], mine.edge_index, index)
    loss = F.binary_cross_entropy_with_logits(score, LABELS[kept], reduction="sum") / 130
    loss.backward()
    expected = F.binary_cross_entropy_with_logits(reference(x, edges(), pairs()), LABELS)
    expected.backward()
    close(pyg_sar.all_reduce(loss, group), expected.detach(), "loss")
    pyg_sar.sum_gradients(model, group)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, "gradient")
    # Those whose destinations are own ones would do.
    again, _ = pyg_sar.shard_links(pairs()[:, kept], mine.src, group)
    close(model(x[mine.src], mine.edge_index, again), score, "own pairs")
    return kept.tolist()


@pytest.mark.parametrize("decoder", ["dot", "DistMult", "MLP"])
@pytest.mark.parametrize(("size", "method"), [(1, "random"), (2, "random"), (3, "random"), (3, "empty")])
def test_decoders(pool, decoder, size, method):
    found = pool.run(size, check, decoder, method)
    assert sorted(i for kept in found for i in kept) == list(range(130))


def unknown(group, source):
    """One worker alone owns the destination, and asks for the source."""
    mine = share(group, edges(), assignment("random", group.size()))
    try:
        pyg_sar.shard_links(torch.tensor([[source], [0]]), mine.src, group)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("source", [NUM_NODES + 3, -1])
def test_an_unknown_source_is_an_error_on_all_workers(pool, source):
    for rank, error in enumerate(pool.run(3, unknown, source)):
        assert f"[rank {rank}] Sources of 'edge_label_index' are no nodes of any worker, such as [{source}]" in error
    with pytest.raises(ValueError, match="All workers together own 1 destinations of 2 pairs"):
        pyg_sar.shard_links(torch.tensor([[0, 1], [1, 7]]), torch.arange(3))
    with pytest.raises(ValueError, match=r"Expected 'edge_label_index' of type torch.int64 and shape \[2, \*\]"):
        pyg_sar.shard_links(torch.zeros(3, 2), torch.arange(3))


def negatives(group, scope):
    mine = share(group, edges(), assignment("random", group.size()))
    index, kept = pyg_sar.shard_links(pairs(), mine.src, group)
    g = torch.Generator().manual_seed(group.rank())
    found = pyg_sar.negative_sampling(index, mine.src, 100, scope, g, group)
    assert torch.equal(found[1], pairs()[1, kept].repeat_interleave(100))
    again, every = pyg_sar.shard_links(found, mine.src, group)
    assert len(every) == found.size(1)
    if scope == "local":
        assert torch.isin(found[0], mine.src).all()
        assert all(b.num_edges == 0 for q, b in enumerate(again.graph.blocks) if q != dist.get_rank(group))
    return found[0]


def test_negative_pairs(pool):
    drawn = torch.cat(pool.run(3, negatives, "global"))
    counts = torch.bincount(drawn, minlength=NUM_NODES)
    assert len(drawn) == 13_000 and len(counts) == NUM_NODES
    assert counts.min() > 140 and counts.max() < 290  # 213 +- 15
    pool.run(3, negatives, "local")
    index, _ = pyg_sar.shard_links(pairs(), torch.arange(NUM_NODES))
    with pytest.raises(ValueError, match="'global' or 'local'"):
        pyg_sar.negative_sampling(index, torch.arange(NUM_NODES), scope="near")


def negatives_of_others(group, scope):
    """One worker gives ids of other nodes, or in another order."""
    mine = share(group, edges(), assignment("random", group.size()))
    others = mine.src.flip(0) if group.rank() == 1 else mine.src
    return pyg_sar.negative_sampling(mine.edge_index, others, 1, scope, group=group).size(1)


def test_negative_pairs_of_other_ids(pool):
    for rank, (kind, error, message, _) in enumerate(pool.outcomes(2, negatives_of_others, "global")):
        assert (kind, error) == ("error", "ValueError")
        assert f"[rank {rank}] Expected 'n_id' to hold the global ids of the rows of 'index'" in message
    one, other = pool.outcomes(2, negatives_of_others, "local")
    assert one[0] == "ok" and other[1] == "ValueError"
    ids = torch.arange(20), torch.arange(30)
    index, _ = pyg_sar.shard_links(torch.tensor([[0, 19], [29, 3]]), ids)
    assert pyg_sar.negative_sampling(index, ids)[1].tolist() == [29, 3]
    flow = pyg_sar.message_flow_graphs(pyg_sar.shard(edges(), NUM_NODES), torch.arange(NUM_NODES) < 5, 1)
    layer, own = flow.edge_indices[0], torch.arange(NUM_NODES)[flow.node_rows]
    for n_id in (own, (own, own[:5])):
        assert pyg_sar.negative_sampling(layer, n_id)[1].equal(layer[1])
    for wrong in (*ids, ids[::-1]):
        with pytest.raises(ValueError, match="of 20 sources and 30 destinations here"):
            pyg_sar.negative_sampling(index, wrong)


def two_types(group):
    src, dst = torch.arange(20), torch.arange(30)
    mine = [ids[ids % group.size() == group.rank()] for ids in (src, dst)]
    g = torch.Generator().manual_seed(0)
    wanted = torch.stack([torch.randint(20, (50,), generator=g), torch.randint(30, (50,), generator=g)])
    a, b = torch.randn(20, 3, generator=g), torch.randn(30, 3, generator=g)
    index, kept = pyg_sar.shard_links(wanted, mine, group)
    out = (a[mine[0]][index[0]] * b[mine[1]][index[1]]).sum(-1)
    close(out, (a[wanted[0]] * b[wanted[1]]).sum(-1)[kept], "score", 1e-6)


def test_two_types_of_nodes(pool):
    pool.run(3, two_types)


def among_others(group, folder):
    types, told = ("a", "to", "b"), r"of types 'a' and 'b', .*Take '\(data\['a'\]\.n_id, data\['b'\]\.n_id\)'"
    with watching():
        data = pyg_sar.load(folder, group=group)
        pairs, a, b = data[types].edge_label_index, data["a"].n_id, data["b"].n_id
        pyg_sar.shard_links(pairs, (a, b), group)
        for wrong in (a, b, (b, a)):
            with pytest.raises(ValueError, match=told):
                pyg_sar.shard_links(pairs, wrong, group)


def test_pairs_among_ids_of_other_types(pool, tmp_path):
    data, types = HeteroData({"a": {"num_nodes": 20}, "b": {"num_nodes": 30}}), ("a", "to", "b")
    data[types].edge_index = data[types].edge_label_index = torch.stack([torch.arange(20), torch.arange(20)])
    pyg_sar.partition(data, 2, tmp_path / "graph", order="id")
    pool.run(2, among_others, str(tmp_path / "graph"))


def infer(group):
    torch.manual_seed(group.rank())  # rank 0's parameters count
    model = gnn.GraphSAGE(8, 6, 2, 5, norm="BatchNorm", dropout=0.5)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(1))
    mine = share(group, edges(), assignment("random", group.size()))
    out = pyg_sar.inference(model, x[mine.src], mine.edge_index, group=group)
    torch.manual_seed(0)
    expected = gnn.GraphSAGE(8, 6, 2, 5, norm="BatchNorm", dropout=0.5).eval()(x, edges())
    close(out, expected[mine.dst], "inference", 1e-5)
    assert type(model) is gnn.GraphSAGE and model.training and not out.requires_grad
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_inference(pool):
    pool.run(3, infer)


def masks(group):
    """What a layer makes of three graphs of the same pairs, of which the second has another order, and their seeds."""
    n_id = torch.arange(NUM_NODES)
    if group is not None:
        torch.manual_seed(group.rank())
        n_id = share(group, edges(), assignment("random", group.size())).src
    layer = convert(gnn.GATConv(8, 4, dropout=0.5, add_self_loops=False), group).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(0.1)
    x = torch.ones(NUM_NODES, 8, dtype=torch.float64)[n_id]
    state = torch.get_rng_state()
    graphs = [pyg_sar.shard_links(it, n_id, group)[0] for it in (pairs(), pairs().flip(1))]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    graphs.append(pyg_sar.shard_links(pairs(), n_id, group)[0])
    seeds = [graph.graph.seeds.seed for graph in graphs]
    return [layer(x, graph) for graph in graphs], seeds


def test_graphs_of_pairs_do_not_drop_alike(pool):
    results = pool.run(3, masks)
    for outs, _ in (masks(None), *results):
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(outs, 2))
    (_, seeds), *_ = results
    assert len(set(seeds)) == 3 and all(found == seeds for _, found in results)
