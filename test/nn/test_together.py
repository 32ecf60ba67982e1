"""What looks at the rows of all workers leaves them alone where a model runs on a graph that this process holds."""

import copy
import functools

import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch_geometric.data import Data

from pyg_sar import nn, shard

V = ("v", "to", "v")


class Net(torch.nn.Module):
    """Something that looks at all rows stands before the layer, within it, after it and at the end."""

    def __init__(self, norm):
        super().__init__()
        self.before, self.after = norm, copy.deepcopy(norm)
        self.conv = gnn.GINConv(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)))
        self.read = gnn.SoftmaxAggregation(learn=True)

    def forward(self, x, edge_index):
        return self.read(self.after(self.conv(self.before(x), edge_index)), dim=-2)


class OfData(Net):
    def forward(self, data):
        return super().forward(data.x, data.edge_index)


class ByType(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = gnn.HANConv(8, 8, (["v"], [V]), heads=2)

    def forward(self, x_dict, edge_index_dict):
        return self.conv(x_dict, edge_index_dict)["v"]


class ByAnotherName(Net):
    """Edges are not called 'edge_index'."""

    def forward(self, x, adj):
        return super().forward(x, adj)


class Adjusted(torch.nn.Module):
    """Rows whose names begin as those of edges do."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, adj_rows, pool=gnn.global_mean_pool):
        adjusted = 2 * adj_rows
        return self.norm(adjusted) + pool(adjusted, None)


class Pools(torch.nn.Module):
    def forward(self, x, edge_index, library=nn, **group):
        pools = library.global_add_pool, library.global_mean_pool, library.global_max_pool
        return torch.cat([pool(x, None, **group) for pool in pools])


def modules():
    """Models, and what they are called with, given rows and edges."""
    torch.manual_seed(0)
    for norm in (torch.nn.BatchNorm1d(8), gnn.BatchNorm(8), gnn.GraphNorm(8), gnn.PairNorm(), gnn.InstanceNorm(8)):
        yield Net(norm), lambda x, it: (x, it)
    yield ByAnotherName(gnn.GraphNorm(8)), lambda x, it: (x, it)
    yield OfData(gnn.BatchNorm(8)), lambda x, it: (Data(x=x, edge_index=it),)
    yield ByType(), lambda x, it: ({"v": x}, {V: it})


def one_alone(group):
    """Rank 0 runs models on a graph of its own while the others do not; then all of them on their shares of one."""
    torch.manual_seed(1)
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64)
    mine = share(group, edges(), assignment("random", group.size()))
    for reference, given in modules():
        reference = reference.double()
        model = nn.convert(copy.deepcopy(reference), group)
        whole = reference(*given(x, edges()))
        if dist.get_rank(group) == 0:
            for it in (edges(), shard(edges(), NUM_NODES, 2)):
                alone = nn.convert(copy.deepcopy(reference), group)
                close(alone(*given(x, it)), whole, f"{reference} alone")
        expected = reference(*given(x, edges()))
        for _ in range(2):
            out = model(*given(x[mine.src], mine.edge_index))
        close(out, expected[mine.src] if out.size(0) > 1 else expected, f"{reference} together")
    pools, whole = Pools(), Pools()(x, edges(), gnn)
    cheb, cheb_of_pyg = nn.ChebConv(8, 4, 3).double(), gnn.ChebConv(8, 4, 3).double()
    cheb_of_pyg.load_state_dict(cheb.state_dict())
    cheb.group = group
    if dist.get_rank(group) == 0:
        for it in (edges(), shard(edges(), NUM_NODES, 2)):
            close(pools(x, it, group=group), whole, "pools alone")
            close(cheb(x, it), cheb_of_pyg(x, edges()), "ChebConv alone")
    close(pools(x[mine.src], mine.edge_index, group=group), whole, "pools together")
    for norm in (torch.nn.BatchNorm1d(8), gnn.GraphNorm(8), gnn.PairNorm()):
        reference = Adjusted(norm).double()
        model = nn.convert(copy.deepcopy(reference), group)
        found = model(x[mine.src], functools.partial(nn.global_mean_pool, group=group))
        close(found, reference(x)[mine.src], f"{norm} of adjusted rows")
    close(nn.BatchNorm1d(8, group=group).double()(x[mine.src]), torch.nn.BatchNorm1d(8).double()(x)[mine.src], "rows")


def test_one_worker_alone(pool):
    pool.run(2, one_alone, timeout=25)
