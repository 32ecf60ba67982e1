"""``torch.compile`` of models on sharded graphs: layers run as they are, what is between them is compiled."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.nasty_graph import NUM_NODES, assignment, backward, close, edges, share

from pyg_sar import nn, shard

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(torch.nn.Module):
    """Two layers with batch normalisation between them."""

    def __init__(self, first, second, norm):
        super().__init__()
        self.first, self.norm, self.second = first, norm, second

    def forward(self, x, edge_index):
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


class Chooses(Net):
    """Edges are chosen, and rows read by them, outside of layers."""

    def forward(self, x, edge_index):
        row, col = edge_index
        loops = x.new_zeros(x.size(0), 1).index_add(0, col, (row == col).to(x.dtype).unsqueeze(1))
        return super().forward(x + loops, edge_index[:, row != col])


class ByType(torch.nn.Module):
    """A layer that takes dictionaries."""

    def __init__(self):
        super().__init__()
        self.conv, self.lin = gnn.HeteroConv({("v", "to", "v"): gnn.SAGEConv(8, 8)}), torch.nn.Linear(8, 4)

    def forward(self, x, edge_index):
        return self.lin(self.conv({"v": x}, {("v", "to", "v"): edge_index})["v"].relu())


MODELS = {
    "SAGEConv": lambda: Net(gnn.SAGEConv(8, 8), gnn.SAGEConv(8, 4, aggr="max"), gnn.BatchNorm(8)),
    "GCNConv": lambda: Net(gnn.GCNConv(8, 8), gnn.GCNConv(8, 4), torch.nn.BatchNorm1d(8)),
    "GATConv": lambda: Net(gnn.GATConv(8, 4, heads=2), gnn.GATConv(8, 4), gnn.GraphNorm(8)),
    "replayed": lambda: Net(gnn.GraphConv(8, 8), gnn.AGNNConv(), gnn.LayerNorm(8)),
    "chooses": lambda: Chooses(gnn.GraphConv(8, 8), gnn.GraphConv(8, 4), gnn.PairNorm()),
    "by type": ByType,
}
OPTIONS = [{"backend": "eager"}, {"backend": "aot_eager", "dynamic": True}]


def gradients(model, x, edge_index, rows):
    x = x.clone().requires_grad_()
    out = model(x, edge_index)
    backward(out, rows, NUM_NODES)
    return out, x.grad, [p.grad for p in model.parameters()]


def check(group, names, options):
    whole, x = torch.arange(NUM_NODES), torch.randn(NUM_NODES, 8, dtype=torch.float64)
    for name in names:
        torch.manual_seed(0)
        reference = MODELS[name]().double()
        expected = gradients(reference, x, edges(), whole)
        torch.manual_seed(0)
        model = nn.convert(MODELS[name]().double(), group)
        if group is None:
            rows, it = whole, shard(edges(), NUM_NODES, 2)
        else:
            mine = share(group, edges(), assignment("random", group.size()))
            rows, it = mine.src, mine.edge_index
        torch._dynamo.reset()
        compiled = torch.compile(model, **options)
        for _ in range(2):
            model.zero_grad()
            out, d_x, d_p = gradients(compiled, x[rows], it, rows)
            close(out, expected[0][rows], f"{name}: output")
            close(d_x, expected[1][rows], f"{name}: gradient of x")
            for mine, theirs in zip(d_p, expected[2], strict=True):
                if group is not None:
                    dist.all_reduce(mine, group=group)
                close(mine, theirs, f"{name}: gradient of parameters")


@pytest.mark.parametrize(
    "options", [OPTIONS[0], *(pytest.param(o, marks=pytest.mark.grid) for o in OPTIONS[1:])], ids=str
)
def test_on_shards(options):
    check(None, MODELS, options)


def test_on_workers(pool):
    pool.run(2, check, ["GCNConv", "GATConv", "replayed"], OPTIONS[0])


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_layers_that_are_not_converted():
    model, x = Net(gnn.GATConv(8, 8), gnn.GATConv(8, 4), torch.nn.LayerNorm(8)), torch.randn(NUM_NODES, 8)
    torch._dynamo.reset()
    out = torch.compile(model, backend="eager")(x, shard(edges(), NUM_NODES, 2))
    torch.testing.assert_close(out, model(x, edges()))


@pytest.mark.parametrize("name", ["SAGEConv", "GATConv", "TAGConv"])
def test_layers_that_compile_themselves(name):
    layer, x = nn.convert(getattr(gnn, name)(8, 4)), torch.randn(NUM_NODES, 8)
    expected = layer(x, edges())
    torch._dynamo.reset()
    layer.compile(backend="eager")
    torch.testing.assert_close(layer(x, shard(edges(), NUM_NODES, 2)), expected)
    torch.testing.assert_close(layer(x, edges()), expected)


def test_a_compiled_layer_says_what_is_wrong():
    layer = torch.compile(nn.GCNConv(8, 4), backend="eager")
    with pytest.raises(ValueError, match="'GCNConv' got 'edge_weight'"):
        layer(torch.randn(NUM_NODES, 8), shard(edges(), NUM_NODES, 2), torch.rand(3))
