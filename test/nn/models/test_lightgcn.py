"""LightGCN on users and items, whose embeddings workers share, against PyG in one process."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import assignment, close, share
from support.node_tables import check_training

import pyg_sar
from pyg_sar.nn import LightGCN, convert

USERS, ITEMS = 17, 12
NODES = USERS + ITEMS


def ratings():
    """Users and the items that they like, as a graph from the ones to the others and back."""
    g = torch.Generator().manual_seed(0)
    liked = torch.stack([torch.randint(USERS, (90,), generator=g), torch.randint(USERS, NODES, (90,), generator=g)])
    return liked, torch.cat([liked, liked.flip(0)], 1)


def models(group, method):
    mine = share(group, ratings()[1], assignment(method, group.size(), NODES))
    torch.manual_seed(0)
    reference = gnn.LightGCN(NODES, 5, 2).double()
    torch.manual_seed(0)
    return reference, LightGCN(mine.src, 5, 2, group=group).double(), mine


def recommends(group, method, regularise):
    reference, model, mine = models(group, method)

    def step_of(net, step, edge_index):
        g = torch.Generator().manual_seed(step)
        pos = ratings()[0][:, torch.randperm(90, generator=g)[:30]]
        neg = torch.stack([pos[0], torch.randint(USERS, NODES, (30,), generator=g)])
        pairs = torch.cat([pos, neg], 1)
        pos_rank, neg_rank = net(edge_index, pairs).chunk(2)
        node_id = pairs.unique() if regularise == "some" else None
        return net.recommendation_loss(pos_rank, neg_rank, node_id, lambda_reg=0.1)

    losses = (lambda net, step: step_of(net, step, ratings()[1]), lambda net, step: step_of(net, step, mine.edge_index))
    check_training(group, (reference, model), losses)
    users = torch.arange(USERS)[dist.get_rank(group) :: group.size()]
    items = torch.arange(NODES - 1, USERS - 1, -1)
    for chosen in ((None, None), (users, items)):
        found, expected = (net.recommend(e, None, *chosen, k=3) for net, e in
                           ((model, mine.edge_index), (reference, ratings()[1])))  # fmt: skip
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("size", "method", "regularise"), [(1, "random", "all"), (2, "random", "some"), (3, "empty", "some")]
)
def test_recommendation(pool, size, method, regularise):
    pool.run(size, recommends, method, regularise)


def predicts(group, method):
    reference, model, mine = models(group, method)
    g = torch.Generator().manual_seed(1)
    pairs, weight = torch.randint(NODES, (2, 40), generator=g), torch.rand(180, generator=g).double()
    label, pos_weight = torch.randint(2, (40,), generator=g), torch.tensor(3.0).double()
    index, kept = pyg_sar.shard_links(pairs, mine.src, group)

    def whole(net, step):
        return net.link_pred_loss(net(ratings()[1], pairs, weight), label, pos_weight=pos_weight)

    def own(net, step):
        return net.link_pred_loss(net(mine.edge_index, index, weight[mine.edge]), label[kept], pos_weight=pos_weight)

    check_training(group, (reference, model), (whole, own))
    found = model.predict_link(mine.edge_index, index, prob=True)
    close(found, reference.predict_link(ratings()[1], pairs, prob=True)[kept], "prediction")
    close(model(mine.edge_index), reference(ratings()[1])[mine.edge], "scores of edges")
    with pytest.raises(ValueError, match=r"\[rank \d\] Expected a negative pair for each positive one, of the same us"):
        model.recommendation_loss(found, found[: -1 if dist.get_rank(group) == 0 else None])
    with pytest.raises(RuntimeError, match="The workers differ in the ids of nodes"):
        model.recommendation_loss(found, found, torch.arange(3 + dist.get_rank(group)))


def test_link_prediction(pool):
    pool.run(3, predicts, "empty")


def refused(group):
    mine = share(group, ratings()[1], assignment("random", group.size(), NODES))
    for count in (NODES, len(mine.src)):
        with pytest.raises(NotImplementedError, match=r"'LightGCN'.*because it has weights for each node of the whole"):
            convert(gnn.LightGCN(count, 5, 2))
        with pytest.raises(NotImplementedError, match=r"'LightGCN'.*because it has weights for each node of the whole"):
            gnn.LightGCN(count, 5, 2)(mine.edge_index)
    return True


def test_pygs_own_is_refused_by_several_workers(pool):
    pool.run(2, refused)
    model = gnn.LightGCN(NODES, 5, 2)
    expected = model(ratings()[1])
    close(convert(model)(pyg_sar.shard(ratings()[1], NODES, 2)), expected, "in one process", 1e-6)


def walks(group):
    mine = share(group, ratings()[1], assignment("random", group.size(), NODES))
    model = object.__new__(gnn.Node2Vec)  # its constructor needs another package
    torch.nn.Module.__init__(model)
    with pytest.raises(
        NotImplementedError, match=r"'Node2Vec' \(0\).*because it learns from random walks over the who"
    ):
        convert(torch.nn.Sequential(model))
    module = gnn.models.node2vec
    module.WITH_PYG_LIB, had = True, module.WITH_PYG_LIB
    module.torch, torch_had = Fake(), module.torch
    try:
        for num_nodes in (None, NODES):
            with pytest.raises(
                NotImplementedError, match=r"'Node2Vec' in 'Node2Vec'.*because it learns from random wal"
            ):
                gnn.Node2Vec(mine.edge_index, 4, 2, 2, num_nodes=num_nodes)
    finally:
        module.WITH_PYG_LIB, module.torch = had, torch_had


class Fake:
    """The other package."""

    class ops:
        class pyg:
            random_walk = None

    def __getattr__(self, name):
        return getattr(torch, name)


def test_random_walks_are_refused(pool):
    pool.run(2, walks)
