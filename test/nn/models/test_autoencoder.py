"""Autoencoders on several workers against PyG on the whole graph."""

import copy
import threading
from unittest import mock

import pytest
import torch
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges
from support.simulate import Cut, raised, simulate
from torch_geometric.utils import negative_sampling

import pyg_sar
from pyg_sar.distributed.links import non_edges
from pyg_sar.nn import convert

G = torch.Generator().manual_seed(0)
X = torch.randn(NUM_NODES, 8, generator=G, dtype=torch.float64)
NOISE = torch.randn(NUM_NODES, 4, generator=G, dtype=torch.float64)
POSITIVE = edges()[:, :90]
NEGATIVE = torch.randint(NUM_NODES, (2, 70), generator=G)


class Two(torch.nn.Module):
    """An encoder of means and deviations."""

    def __init__(self):
        super().__init__()
        self.mean, self.deviation = gnn.GCNConv(8, 4), gnn.GraphConv(8, 4)

    def forward(self, x, edge_index):
        return self.mean(x, edge_index), self.deviation(x, edge_index)


class Bilinear(torch.nn.Module):
    """A decoder with parameters."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, z, edge_index, sigmoid=True):
        value = (self.lin(z[edge_index[0]]) * z[edge_index[1]]).sum(-1)
        return value.sigmoid() if sigmoid else value


def critic():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))


MODELS = {
    "GAE": lambda: gnn.GAE(gnn.GCNConv(8, 4)),
    "GAE with a decoder": lambda: gnn.GAE(gnn.SAGEConv(8, 4), Bilinear()),
    "VGAE": lambda: gnn.VGAE(Two()),
    "ARGA": lambda: gnn.ARGA(gnn.GCNConv(8, 4), critic()),
    "ARGVA": lambda: gnn.ARGVA(Two(), critic()),
}


def losses(model, x, edge_index, positive, negative):
    """The sum of all that the model has."""
    z = model.encode(x, edge_index)
    loss = model.recon_loss(z, positive, negative)
    if hasattr(model, "kl_loss"):
        loss = loss + 0.1 * model.kl_loss() + 0.01 * model.kl_loss(z, z.tanh())
    if hasattr(model, "reg_loss"):
        loss = loss + model.reg_loss(z) + model.discriminator_loss(z)
    return loss, z


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(name, size):
    torch.manual_seed(0)
    reference = MODELS[name]().double()
    model = convert(copy.deepcopy(reference))
    assert list(model.state_dict()) == list(reference.state_dict())
    cut = Cut(edges(), assignment("empty", size), size)
    whole = X.clone().requires_grad_()
    with mock.patch.object(torch, "randn_like", lambda x: NOISE.clone()):
        expected, z = losses(reference, whole, edges(), POSITIVE, NEGATIVE)
    expected.backward()

    def work(rank):
        mine, ids = copy.deepcopy(model), cut.ids[rank]
        x = X[ids].requires_grad_()
        positive, negative = (pyg_sar.shard_links(pairs, ids)[0] for pairs in (POSITIVE, NEGATIVE))
        loss, part = losses(mine, x, cut.edge_index(rank), positive, negative)
        loss.backward()
        pyg_sar.sum_gradients(mine)
        return loss.detach(), part.detach(), x.grad, [p.grad for p in mine.parameters()]

    patches = {"noise_like": lambda x, group: NOISE[cut.ids[pyg_sar.distributed.group.rank_of()]]}
    with (
        mock.patch.object(torch, "randn_like", lambda x: NOISE[cut.ids[0]]),
        mock.patch.multiple("pyg_sar.nn.models.autoencoder", **patches),
    ):
        found = simulate(size, work)
    for ids, (loss, part, d_x, grads) in zip(cut.ids, found, strict=True):
        close(loss, expected.detach(), "loss")
        close(part, z.detach()[ids], "latent variables")
        close(d_x, whole.grad[ids], "gradient of x")
        for grad, p in zip(grads, reference.parameters(), strict=True):
            close(grad, p.grad, "gradient")


def test_groups_of_workers_are_those_of_the_model_within():
    model = convert(MODELS["ARGVA"]())
    model.group = group = object()
    assert model.VGAE.group is group


def test_the_graph_itself_and_a_shard_of_one_process():
    torch.manual_seed(0)
    reference = gnn.GAE(gnn.GCNConv(8, 4)).double()
    model = convert(copy.deepcopy(reference))
    z = reference.encode(X, edges())
    expected = reference.recon_loss(z, edges(), NEGATIVE).detach()
    cut = Cut(edges(), assignment("random", 2), 2)

    def work(rank):
        negative, _ = pyg_sar.shard_links(NEGATIVE, cut.ids[rank])
        return model.recon_loss(z[cut.ids[rank]], cut.edge_index(rank), negative).detach()

    whole = pyg_sar.shard(edges(), NUM_NODES, 2)
    negative, _ = pyg_sar.shard_links(NEGATIVE, torch.arange(NUM_NODES))
    found = [*simulate(2, work), model.recon_loss(z, whole, negative), model.recon_loss(z, edges(), NEGATIVE)]
    for loss in found:
        close(loss, expected, "loss")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_negative_pairs_are_drawn_from_those_of_all_nodes(size):
    cut = Cut(edges(), assignment("empty", size), size)
    model = convert(gnn.GAE(gnn.GCNConv(8, 4)).double())

    def work(rank):
        pairs, n_id = non_edges(cut.edge_index(rank))
        assert torch.equal(n_id, cut.ids[rank]) and torch.isin(pairs[1], n_id).all()
        return pairs, model.recon_loss(X[cut.ids[rank]], cut.edge_index(rank)).detach()

    torch.manual_seed(0)
    found = simulate(size, work)
    pairs = torch.cat([pairs for pairs, _ in found], 1)
    assert pairs.size(1) == pairs.unique(dim=1).size(1) and (pairs[0] != pairs[1]).all()
    assert 0.85 * edges().size(1) < pairs.size(1) <= edges().size(1)  # PyG draws more and leaves some out
    assert not (pairs.T.unsqueeze(1) == edges().T).all(-1).any()
    assert len(pairs[0].unique()) > 50
    losses = torch.stack([loss for _, loss in found])
    draws = [gnn.GAE.recon_loss(model, X, edges(), negative_sampling(edges(), NUM_NODES)) for _ in range(30)]
    expected = torch.stack(draws)
    assert (losses == losses[0]).all() and (losses[0] - expected.mean()).abs() < 5 * expected.std()


def test_a_complete_graph_has_no_negative_pairs():
    pairs = torch.ones(5, 5).nonzero().t().contiguous()
    found, _ = non_edges(pyg_sar.shard(pairs, 5))
    assert found.shape == (2, 0)


def test_noise_differs_between_workers_that_are_seeded_alike():
    lock = threading.Lock()  # they have one generator here

    def work(rank):
        model, zeros = pyg_sar.nn.VGAE(torch.nn.Identity()), torch.zeros(3, 4)
        assert torch.equal(model.eval().reparametrize(zeros, zeros), zeros)
        with lock:
            torch.manual_seed(0)
            return model.train().reparametrize(zeros, zeros)

    one, other = simulate(2, work)
    assert (one != other).all()


@pytest.mark.parametrize("size", [1, 3])
def test_scores(size):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    model = gnn.GAE(torch.nn.Identity())
    expected = model.test(X, POSITIVE, NEGATIVE)
    cut = Cut(edges(), assignment("empty", size), size)
    convert(model)

    def work(rank):
        ids = cut.ids[rank]
        return model.test(X[ids], *(pyg_sar.shard_links(pairs, ids)[0] for pairs in (POSITIVE, NEGATIVE)))

    for found in simulate(size, work):
        assert found == pytest.approx(expected, abs=1e-12)


def test_what_would_be_local_is_refused():
    class Mine(gnn.GAE):
        pass

    with pytest.raises(NotImplementedError, match=r"'Mine' .*averages its losses over nodes and pairs"):
        convert(Mine(gnn.GCNConv(8, 4)))
    whole = pyg_sar.shard(edges(), NUM_NODES)
    with pytest.raises(NotImplementedError, match=r"'VGAE' in 'VGAE' .*averages its losses"):
        gnn.VGAE(Two().double()).encode(X, whole)
    cut = Cut(edges(), assignment("random", 2), 2)
    model = pyg_sar.nn.GAE(gnn.GCNConv(8, 4))

    def work(rank):
        model.recon_loss(X[cut.ids[rank]], POSITIVE)

    for rank, error in enumerate(raised(2, work)):
        assert error.startswith(f"[rank {rank}] Expected pairs of nodes as 'pyg_sar.shard_links' returns them")
