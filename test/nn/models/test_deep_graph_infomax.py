"""Deep Graph Infomax on several workers against PyG on the whole graph."""

import copy

import pytest
import torch
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges
from support.simulate import Cut, raised, simulate

import pyg_sar
from pyg_sar.nn import convert

X = torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Learnt(torch.nn.Module):
    """A summary with parameters."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    def forward(self, z, *args):
        return self.lin(z.mean(0)).sigmoid()


SUMMARIES = {
    "of PyG's example": lambda z, *args, **kwargs: z.mean(dim=0).sigmoid(),
    "torch.mean": lambda z, *args: torch.mean(z, -2),
    "learnt": Learnt(),
    "pool of PyG": lambda z, *args: gnn.global_mean_pool(z, None),
    "pool of pyg_sar": lambda z, *args: pyg_sar.nn.global_max_pool(z, None).sigmoid(),
}


def corrupt(x, edge_index):
    return x.flip(-1), edge_index


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SUMMARIES)
def test_losses_and_gradients(name, size):
    torch.manual_seed(0)
    encoder = gnn.Sequential("x, edge_index", [(gnn.GCNConv(8, 4), "x, edge_index -> x"), torch.nn.PReLU(4)])
    reference = gnn.DeepGraphInfomax(4, encoder, copy.deepcopy(SUMMARIES[name]), corrupt).double()
    model = convert(copy.deepcopy(reference))
    assert list(model.state_dict()) == list(reference.state_dict())
    cut = Cut(edges(), assignment("empty", size), size)
    whole = X.clone().requires_grad_()
    z, _, summary = found = reference(whole, edges())
    expected = reference.loss(*found)
    expected.backward()

    def work(rank):
        mine, x = copy.deepcopy(model), X[cut.ids[rank]].requires_grad_()
        for _ in range(2):
            mine.zero_grad()
            x.grad = None
            found = mine(x, cut.edge_index(rank))
            loss = mine.loss(*found)
            loss.backward()
        pyg_sar.sum_gradients(mine)
        return loss.detach(), found[0].detach(), found[2].detach(), x.grad, [p.grad for p in mine.parameters()]

    for ids, (loss, part, found, d_x, grads) in zip(cut.ids, simulate(size, work), strict=True):
        close(loss, expected.detach(), "loss")
        close(part, z.detach()[ids], "embeddings")
        close(found, summary.detach(), "summary")
        close(d_x, whole.grad[ids], "gradient of x")
        for grad, p in zip(grads, reference.parameters(), strict=True):
            close(grad, p.grad, "gradient")


@pytest.mark.parametrize("summary", [lambda z, *args: z.relu().mean(0), lambda z, *args: z.amax(0)])
def test_a_summary_of_one_worker_is_refused(summary):
    cut = Cut(edges(), assignment("random", 3), 3)
    model = pyg_sar.nn.DeepGraphInfomax(4, pyg_sar.nn.GCNConv(8, 4), summary, corrupt).double()
    for rank, error in enumerate(raised(3, lambda rank: model(X[cut.ids[rank]], cut.edge_index(rank)))):
        assert error.startswith(f"[rank {rank}] Expected a summary of the nodes of all workers")


@pytest.mark.parametrize("size", [1, 3])
def test_scores(size):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    train, y, part = torch.arange(NUM_NODES) % 2 == 0, (X[:, 0] > 0.3).long(), assignment("empty", size)
    model = gnn.DeepGraphInfomax(8, torch.nn.Identity(), SUMMARIES["learnt"], corrupt)
    expected = model.test(X[train], y[train], X[~train], y[~train], max_iter=200)
    convert(model)

    def work(rank):
        mine = part == rank
        return model.test(X[train & mine], y[train & mine], X[~train & mine], test_y=y[~train & mine], max_iter=200)

    assert simulate(size, work) == [expected] * size
    assert 0.5 < expected < 1
