"""LINKX, whose weights of nodes workers share, against PyG in one process."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, edges, share
from support.node_tables import check_training

import pyg_sar
from pyg_sar.nn import LINKX, convert

Y = torch.randint(4, (NUM_NODES,), generator=torch.Generator().manual_seed(3))


def train(group, method, depth):
    mine = share(group, edges(), assignment(method, group.size()))
    x = torch.randn(NUM_NODES, 7, dtype=torch.float64)
    weight = torch.rand(edges().size(1), dtype=torch.float64)
    torch.manual_seed(0)
    reference, after = gnn.LINKX(NUM_NODES, 7, 6, 4, 2, depth, depth).double(), torch.rand(1)
    torch.manual_seed(0)
    model = LINKX(mine.src, 7, 6, 4, 2, depth, depth, group=group).double()
    assert torch.equal(torch.rand(1), after) and repr(model) == repr(reference)

    def whole(net, step):
        return F.cross_entropy(net(x if step else None, edges(), weight if step else None), Y)

    def own(net, step):
        out = net(x[mine.src] if step else None, mine.edge_index, weight[mine.edge] if step else None)
        return pyg_sar.global_mean(F.cross_entropy(out, Y[mine.dst], reduction="none"), group)

    check_training(group, (reference, model), (whole, own))


@pytest.mark.parametrize(
    ("size", "method", "depth"), [(1, "random", 2), (2, "random", 1), (3, "random", 2), (3, "empty", 2)]
)
def test_training(pool, size, method, depth):
    pool.run(size, train, method, depth)


def refused(group):
    mine = share(group, edges(), assignment("random", group.size()))
    for count in (NUM_NODES, len(mine.src)):
        with pytest.raises(
            NotImplementedError, match=r"'LINKX' \(0\).*because it has weights for each node of the whol"
        ):
            convert(torch.nn.Sequential(gnn.LINKX(count, 7, 6, 4, 2)))
        with pytest.raises(
            NotImplementedError, match=r"'LINKX' in 'LINKX'.*because it has weights for each node of the"
        ):
            gnn.LINKX(count, 7, 6, 4, 2).eval()(None, mine.edge_index)
        with pytest.raises(NotImplementedError, match=r"A parameter of shape .* cannot be rows of nodes"):
            convert(gnn.models.linkx.SparseLinear(count, 6))(mine.edge_index)


def test_pygs_own_is_refused_by_several_workers(pool):
    pool.run(2, refused)
