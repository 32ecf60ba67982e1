"""PyG's aggregations as readouts of the nodes of all workers, against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch_geometric.data import Data

from pyg_sar.nn import convert, describe

N, F = NUM_NODES, 6
READOUTS = {
    "sum": gnn.SumAggregation,
    "mean": gnn.MeanAggregation,
    "max": gnn.MaxAggregation,
    "min": gnn.MinAggregation,
    "std": gnn.StdAggregation,
    "softmax": lambda: gnn.SoftmaxAggregation(learn=True),
    "power mean": lambda: gnn.PowerMeanAggregation(learn=True),
    "attention": lambda: gnn.AttentionalAggregation(torch.nn.Linear(F, 1), torch.nn.Linear(F, F)),
    "Set2Set": lambda: gnn.Set2Set(F, 2),
    "several": lambda: gnn.MultiAggregation(["mean", "max", "std"]),
    "deep sets": lambda: gnn.DeepSetsAggregation(torch.nn.Linear(F, F), torch.nn.Linear(F, F)),
}


class Net(torch.nn.Module):
    def __init__(self, readout):
        super().__init__()
        self.conv, self.readout = gnn.SAGEConv(F, F, aggr=["mean", "max"]), readout

    def forward(self, x, edge_index, batch):
        return self.readout(self.conv(x, edge_index), batch)


def check(group, name, batched):
    torch.manual_seed(0)
    reference = Net(READOUTS[name]()).double()
    model = convert(copy.deepcopy(reference), group)
    assert describe(model).splitlines()[-1].endswith("reads out the rows of all workers")
    mine = share(group, edges(), assignment("empty", group.size()))
    x = torch.randn(N, F, dtype=torch.float64)
    x[5] = x[6]  # equal entries
    whole, part = x.clone().requires_grad_(), x[mine.src].clone().requires_grad_()
    batch = torch.arange(N) % 4 * 2 if batched else None  # examples 1, 3 and 5 are empty
    expected = reference(whole, edges(), batch)
    out = model(part, mine.edge_index, batch[mine.src] if batched else None)
    close(out, expected, f"{name}: output")
    weight = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weight).sum().backward()
    ((out * weight).sum() / group.size()).backward()  # every worker has the whole loss
    close(part.grad, whole.grad[mine.src], f"{name}: gradient of x")
    for (key, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(grad, group=group)
        close(grad, q[1].grad, f"{name}: gradient of {key}")


@pytest.mark.parametrize("name", READOUTS)
def test_readouts(pool, name):
    for batched in (True, False):
        pool.run(3, check, name, batched)


def refused(group, kind):
    layer = convert({"median": gnn.MedianAggregation, "mul": gnn.MulAggregation}[kind](), group)
    with pytest.raises(NotImplementedError, match=f"'{type(layer).__name__}' cannot read out the rows of all workers"):
        layer(torch.randn(5, 2), torch.zeros(5, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="'index' instead of 'ptr'"):
        layer(torch.randn(5, 2), ptr=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("kind", ["median", "mul"])
def test_what_cannot_be_merged_is_refused(pool, kind):
    pool.run(2, refused, kind)


def test_one_process_runs_pygs():
    layer, x, index = gnn.MedianAggregation(), torch.randn(5, 2), torch.tensor([0, 0, 1, 1, 1])
    assert torch.equal(convert(copy.deepcopy(layer))(x, index), layer(x, index))


class OfEdges(torch.nn.Module):
    """Aggregates edges by their destinations, beside a readout."""

    def __init__(self):
        super().__init__()
        self.aggr, self.readout = gnn.MeanAggregation(), gnn.SumAggregation()

    def forward(self, x, edge_index):
        src, dst = edge_index
        return self.aggr(x[src], dst, dim_size=x.size(0)), self.readout(x)


class OfData(OfEdges):
    """The same of a ``Data``, and of flipped edges."""

    def forward(self, data):
        _, dst = data.edge_index
        row, col = data.edge_index.flip(0)
        first = self.aggr(data.x[data.edge_index[0]], data.edge_index[1], dim_size=data.num_nodes)
        return first + self.aggr(data.x[col], row, dim_size=data.num_nodes) + 0 * len(dst), self.readout(data.x)


class ByHand(torch.nn.ModuleDict):
    """A script calls what is within it, so that no running module was given edges."""


def of_edges(group):
    mine = share(group, edges(), assignment("random", group.size()))
    x, model = (
        torch.randn(N, F, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        convert(OfEdges(), group),
    )
    found, expected = model(x[mine.src], mine.edge_index), OfEdges()(x, edges())
    close(found[0], expected[0][mine.dst], "edges")
    close(found[1], expected[1], "nodes")
    model, of_data = convert(OfData(), group), Data(x=x[mine.src], edge_index=mine.edge_index)
    found, expected = model(of_data), OfData()(Data(x=x, edge_index=edges()))
    close(found[0], expected[0][mine.dst], "edges of a Data")
    close(found[1], expected[1], "nodes of a Data")
    parts = convert(ByHand({"aggr": gnn.SoftmaxAggregation(learn=True)}).double(), group)
    (src, dst), (row, col) = mine.edge_index, edges()
    expected = gnn.SoftmaxAggregation(learn=True).double()(x[row], col, dim_size=N)
    close(parts["aggr"](x[mine.src][src], dst, dim_size=len(mine.dst)), expected[mine.dst], "edges by hand")
    kept, some = x[row][:, 0] > 0, x[mine.src][src][:, 0] > 0
    expected = gnn.SoftmaxAggregation().double()(x[row][kept], col[kept], dim_size=N)
    found = parts["aggr"](x[mine.src][src][some], mine.edge_index[:, some][1], dim_size=len(mine.dst))
    close(found, expected[mine.dst], "some edges by hand")
    with pytest.raises(ValueError, match=r"all workers number alike \(got \d of them here, and 5 to 6 on others\)"):
        model.readout(x[mine.src], torch.zeros(len(mine.src), dtype=torch.long), dim_size=5 + dist.get_rank(group))


def test_aggregations_of_edges(pool):
    pool.run(2, of_edges)


def gates(group):
    """With a normalisation over all nodes."""
    mine = share(group, edges(), assignment("random", group.size()))
    x, batch = torch.randn(N, F, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), torch.arange(N) // 40
    for norm in (torch.nn.BatchNorm1d(F), gnn.GraphNorm(F), gnn.PairNorm(), gnn.InstanceNorm(F)):
        torch.manual_seed(0)
        gate = torch.nn.Sequential(torch.nn.Linear(F, F), norm, torch.nn.ReLU(), torch.nn.Linear(F, 1))
        reference = gnn.AttentionalAggregation(gate).double()
        model = convert(copy.deepcopy(reference), group)
        close(model(x[mine.src], batch[mine.src]), reference(x, batch), str(norm))


def test_gates_with_normalisations(pool):
    pool.run(2, gates)


def test_what_optimises_or_looks_for_neighbours_is_refused():
    with pytest.raises(NotImplementedError, match="optimises over all nodes at once"):
        convert(gnn.EquilibriumAggregation(4, 4, [4]))
    for make in (lambda: gnn.SchNet(4, 4, 1, 4), lambda: gnn.GNNFF(4, 4, 1)):
        with pytest.raises(NotImplementedError, match="looks for neighbours among all nodes"):
            convert(make())


class OfSomeEdges(torch.nn.Module):
    """Aggregates some edges by their destinations, or all of them in another order, or twice."""

    def __init__(self, which, sized):
        super().__init__()
        self.aggr, self.which, self.sized = gnn.SumAggregation(), which, sized

    def forward(self, x, edge_index):
        src, dst = edge_index
        which = {"no loops": lambda: (src != dst).nonzero().view(-1), "sorted": lambda: dst.argsort(stable=True),
                 "twice": lambda: torch.arange(len(dst)).repeat(2)}[self.which]()  # fmt: skip
        return self.aggr(x[src[which]], dst[which], dim_size=x.size(0) if self.sized else None)


def of_some_edges(group, which, method):
    mine = share(group, edges(), assignment(method, group.size()))
    x = torch.randn(N, F, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for sized in (True, False):
        found, expected = (
            convert(OfSomeEdges(which, sized), group)(x[mine.src], mine.edge_index),
            OfSomeEdges(which, True)(x, edges())[mine.dst],
        )
        close(found, expected[: len(found)], which)


@pytest.mark.parametrize("which", ["no loops", "sorted", "twice"])
@pytest.mark.parametrize("method", ["random", "empty"])
def test_aggregations_of_some_edges(pool, which, method):
    pool.run(2, of_some_edges, which, method)
