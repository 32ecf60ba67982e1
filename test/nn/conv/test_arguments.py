"""What a layer is called with must have the rows of this worker's edges and destinations."""

import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, edges, share
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.utils import scatter

from pyg_sar import nn, ops, shard

N, NUM_EDGES = NUM_NODES, edges().size(1)
ATTR, WEIGHT, TYPE = torch.randn(NUM_EDGES, 3), torch.rand(NUM_EDGES), torch.randint(5, (NUM_EDGES,))


class Shared(gnn.MessagePassing):
    """One row of edge features for all edges."""

    def forward(self, x, edge_index, edge_attr):
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j, edge_attr):
        return x_j + edge_attr[:, :1]


LAYERS = {
    "GCNConv": (lambda: nn.GCNConv(8, 4), "edge_weight", WEIGHT),
    "GCNConv without loops": (lambda: nn.GCNConv(8, 4, add_self_loops=False), "edge_weight", WEIGHT),
    "GATConv": (lambda: nn.GATConv(8, 4, edge_dim=3), "edge_attr", ATTR),
    "GATv2Conv": (lambda: nn.GATv2Conv(8, 4, edge_dim=3), "edge_attr", ATTR),
    "TransformerConv": (lambda: nn.TransformerConv(8, 4, edge_dim=3), "edge_attr", ATTR),
    "RGCNConv": (lambda: nn.RGCNConv(8, 4, 5), "edge_type", TYPE),
    "ChebConv": (lambda: nn.ChebConv(8, 4, 2), "edge_weight", WEIGHT),
    "GraphConv": (lambda: nn.convert(gnn.GraphConv(8, 4)), "edge_weight", WEIGHT),
    "GINEConv": (lambda: nn.convert(gnn.GINEConv(torch.nn.Linear(8, 4), edge_dim=3)), "edge_attr", ATTR),
}


def long(t):
    return torch.cat([t, t])


def short(t):
    return t[:-1]


@pytest.mark.parametrize("wrong", [long, short])
@pytest.mark.parametrize("name", LAYERS)
def test_edge_tensors_of_another_length(name, wrong):
    make, argument, rows = LAYERS[name]
    layer, x, it = make(), torch.randn(N, 8), shard(edges(), N, 2)
    given = {argument: wrong(rows)}
    says = rf"\[rank 0\] '{name.split()[0]}' got '{argument}' of shape {re.escape(str(list(given[argument].shape)))}"
    with pytest.raises(
        ValueError, match=says + rf", but expected a row for each of this worker's {NUM_EDGES} edges.*e_id"
    ):
        layer(x, it, **given)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        layer(x, edges(), **given)
    assert layer(x, it, **{argument: rows}).shape == (N, 4)  # what was wrong left nothing behind


def test_one_row_for_all_edges_is_no_mistake():
    layer, x, row = Shared(), torch.randn(N, 8), torch.randn(1, 3)
    torch.testing.assert_close(nn.convert(Shared())(x, shard(edges(), N, 2), row), layer(x, edges(), row))
    torch.manual_seed(0)
    reference, layer = (library.GENConv(8, 4, norm="layer", edge_dim=3) for library in (gnn, nn))
    layer.load_state_dict(reference.state_dict())
    for it in (edges(), shard(edges(), N, 2)):
        torch.testing.assert_close(layer(x, it, row), reference(x, edges(), row))


@pytest.mark.parametrize("layer", [nn.SAGEConv((8, 8), 4), nn.GINConv(torch.nn.Linear(8, 4)), nn.RGCNConv((8, 8), 4, 5),
                                   nn.GATv2Conv((8, 8), 4, add_self_loops=False)], ids=str)  # fmt: skip
@pytest.mark.parametrize(("num_dst", "given"), [(1, 3), (3, 1)])
def test_rows_of_other_destinations(layer, num_dst, given):
    """One row would be taken for all."""
    it = shard(torch.zeros(2, 4, dtype=torch.long), (N, num_dst), 2)
    more = {"edge_type": torch.zeros(4, dtype=torch.long)} if "RGCN" in str(layer) else {}
    with pytest.raises(ValueError, match=rf"got 'x' of shape \[{given}, 8\], .*{num_dst} destinations.*n_id"):
        layer((torch.randn(N, 8), torch.randn(given, 8)), it, **more)


class ByDestination(gnn.MessagePassing):
    def forward(self, x, edge_index, scale):
        return self.propagate(edge_index, x=x, scale=scale)

    def message(self, x_j, scale_i):
        return x_j.tanh() * scale_i


def test_rows_read_by_destination_alone():
    x, scale, it = torch.randn(N, 8), torch.randn(2 * N, 1), shard(edges(), N, 2)
    layer = nn.convert(ByDestination())
    with pytest.raises(ValueError, match=r"got 'scale' of shape \[122, 1\], but expected .*61 destinations"):
        layer(x, it, scale)
    torch.testing.assert_close(layer(x, it, scale[:N]), ByDestination()(x, edges(), scale[:N]))


def test_operations_on_edges_of_another_length():
    row = shard(edges(), N, 2)[0]
    with pytest.raises(ValueError, match=rf"'scatter_add_' got .*\[{2 * NUM_EDGES}\].*{NUM_EDGES} edges.*e_id"):
        torch.zeros(N).scatter_add_(0, row, long(WEIGHT))
    for choose in (lambda mask: row[mask], lambda mask: shard(edges(), N, 2)[:, mask]):
        with pytest.raises(ValueError, match=rf"mask of edges has shape \[{2 * NUM_EDGES}\].*{NUM_EDGES} edges"):
            choose(long(WEIGHT) > 0.5)


def the_whole_graphs(group):
    """What happens if a tensor was not cut."""
    mine = share(group, edges(), assignment("empty", group.size()))
    for name, (make, argument, rows) in LAYERS.items():
        says = rf"^\[rank {dist.get_rank(group)}\] '{name.split()[0]}' got '{argument}' of shape"
        with pytest.raises(ValueError, match=says):
            make()(torch.randn(mine.src.numel(), 8), mine.edge_index, **{argument: rows})


def test_tensors_of_the_whole_graph_on_workers(pool):
    pool.run(3, the_whole_graphs)


@pytest.mark.parametrize("layer", ["SAGEConv", "GINConv", "GENConv"])
def test_forward_of_ones_own(layer):
    """It may give 'propagate' rows instead of a pair."""

    def forward(self, x, edge_index):
        more = {"edge_attr": None} if layer == "GENConv" else {}
        return self.propagate(edge_index, x=x, **more) + x

    def subclass(library):  # of a name of its own, by which PyG finds what it has generated
        cls = type(f"Own{layer}", (getattr(library, layer),), {"forward": forward})
        return cls(*{"GINConv": (torch.nn.Linear(8, 8),)}.get(layer, (8, 8)))

    x = torch.randn(N, 8, dtype=torch.float64)
    expected = subclass(gnn)(x, edges())
    for parts in (1, 2):
        torch.testing.assert_close(subclass(nn)(x, shard(edges(), N, parts)), expected, rtol=0, atol=1e-10)


EDGE_LAYERS = ("GATConv", "GATv2Conv", "TransformerConv")


def with_edges(library, name, **kwargs):
    torch.manual_seed(0)
    return getattr(library, name)(8, 4, 2, edge_dim=3, **kwargs).double()


@pytest.mark.parametrize("name", EDGE_LAYERS)
@pytest.mark.parametrize("parts", [0, 3])
def test_layers_that_wait_for_the_width_of_edges(name, parts):
    """Weights are drawn in the order in which PyG draws them."""
    x, attr, found = torch.randn(N, 8), torch.randn(NUM_EDGES, 3), []
    for library, it in ((gnn, edges()), (nn, shard(edges(), N, parts) if parts else edges())):
        torch.manual_seed(0)
        conv = getattr(library, name)((-1, -1), 4, edge_dim=-1)
        found.append(conv((x, x), it, attr))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EDGE_LAYERS)
@pytest.mark.parametrize("parts", [0, 3])
def test_layers_of_edge_features_that_do_more_than_multiply(name, parts):
    x, attr = torch.randn(N, 8, dtype=torch.float64), ATTR.double()
    for make in (lambda: torch.nn.Linear(3, 8), lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh())):
        found = []
        for library, it in ((gnn, edges()), (nn, shard(edges(), N, parts) if parts else edges())):
            conv = with_edges(library, name)
            torch.manual_seed(1)
            conv.lin_edge = make().double()
            found.append(conv(x, it, attr))
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


def test_a_bias_of_values_alone():
    x, found = torch.randn(N, 8, dtype=torch.float64), []
    for library, it in ((gnn, edges()), (nn, shard(edges(), N, 3))):
        torch.manual_seed(0)
        conv = library.TransformerConv(8, 4)
        conv.lin_key = gnn.Linear(8, 4, bias=False)
        found.append(conv.double()(x, it))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("parts", [0, 3])
def test_weights_in_a_column(loops, parts):
    x, weight = torch.randn(N, 8, dtype=torch.float64), WEIGHT.double().view(-1, 1)
    expected = with_seed(lambda: gnn.GCNConv(8, 4, add_self_loops=loops).double())(x, edges(), weight)
    conv = with_seed(lambda: nn.GCNConv(8, 4, add_self_loops=loops).double())
    found = conv(x, shard(edges(), N, parts) if parts else edges(), weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def with_seed(make):
    torch.manual_seed(0)
    return make()


def test_edge_features_beside_a_sparse_matrix():
    dense = torch.zeros(N, N)
    dense[edges()[1], edges()[0]] = 1.0
    matrix = dense.to_sparse()
    attr = torch.randn(matrix._nnz(), 3, dtype=torch.float64)
    x = torch.randn(N, 8, dtype=torch.float64)
    found = [with_edges(library, "TransformerConv")(x, matrix, attr) for library in (gnn, nn)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_fast_rgcn_has_the_type_that_pyg_gives_it(aggr):
    x, convs = torch.randn(N, 8).bfloat16(), []
    for library in (gnn, nn):
        convs.append([with_seed(lambda library=library: library.FastRGCNConv(8, 8, 5, aggr=aggr)).bfloat16()] * 2)
    graphs = edges(), shard(edges(), N, 3)
    expected, found = (b(a(x, it, TYPE).relu(), it, TYPE) for (a, b), it in zip(convs, graphs, strict=True))
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def parameter_of_edges(group):
    mine = share(group, edges(), torch.arange(N) % group.size())
    weight = torch.nn.Parameter(torch.ones(len(mine.edge)))
    with pytest.raises(NotImplementedError, match="cannot be rows of nodes or edges"):
        nn.GCNConv(8, 4)(torch.randn(len(mine.src), 8), mine.edge_index, weight)


def test_a_parameter_for_each_edge(pool):
    pool.run(2, parameter_of_edges)


@pytest.mark.parametrize("parts", [1, 3])
def test_heterogeneous_attention_on_flipped_edges(parts):
    x, found = torch.randn(N, 8, dtype=torch.float64), []
    for library, it in ((gnn, edges()), (nn, shard(edges(), N, parts))):
        torch.manual_seed(0)
        types = [("v", "to", "v"), ("v", "from", "v")]
        conv = library.HGTConv(8, 8, (["v"], types), heads=2).double()
        found.append(conv({"v": x}, dict(zip(types, (it, it.flip(0)), strict=True)))["v"])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


def test_heterogeneous_attention_on_flipped_edges_of_two_sets():
    it = edges() % torch.tensor([[40], [N]])
    x, found = {"u": torch.randn(40, 8, dtype=torch.float64), "v": torch.randn(N, 8, dtype=torch.float64)}, []
    for library, one in ((gnn, it), (nn, shard(it, (40, N), 3))):
        torch.manual_seed(0)
        types = [("u", "to", "v"), ("v", "from", "u")]
        conv = library.HGTConv(8, 8, (["u", "v"], types), heads=2).double()
        found.append(conv(x, dict(zip(types, (one, one.flip(0)), strict=True))))
    for t in x:
        torch.testing.assert_close(found[1][t], found[0][t], rtol=0, atol=1e-10)


class Unaggregated(gnn.MessagePassing):
    """Adds up messages, which are not the same twice, by code of its own."""

    def __init__(self):
        super().__init__(aggr=None)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j + 0 * torch.rand_like(x_j)

    def aggregate(self, inputs, index, dim_size):
        return scatter(inputs, index, 0, dim_size)


def test_layers_without_an_aggregation():
    x = torch.randn(N, 8)
    torch.testing.assert_close(nn.convert(Unaggregated())(x, shard(edges(), N, 3)), Unaggregated()(x, edges()))


@pytest.mark.parametrize("name", ["TransformerConv", "FAConv", "RGATConv"])
def test_weights_of_attention(name):
    x = torch.randn(N, 8, dtype=torch.float64)
    make = {
        "TransformerConv": lambda: (gnn.TransformerConv(8, 4, 2), ()), "FAConv": lambda: (gnn.FAConv(8), (x,)),
        "RGATConv": lambda: (gnn.RGATConv(8, 4, 5), ()),
    }[name]  # fmt: skip
    found = []
    for it in (edges(), shard(edges(), N, 3)):
        torch.manual_seed(0)
        conv, more = make()
        conv = nn.convert(conv.double())
        given = {"edge_type": TYPE} if name == "RGATConv" else {}
        out, (_, weights) = conv(x, *more, it, **given, return_attention_weights=True)
        found.append((out, weights.sort(0).values))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["GCNConv", "GATConv", "LGConv"])
def test_medians_where_the_first_node_has_no_edges(name):
    it = edges()[:, edges()[1] > 0]
    args = () if name == "LGConv" else (8, 4)
    torch.manual_seed(0)
    conv = getattr(gnn, name)(*args, aggr="median").double()
    x = torch.randn(N, 8, dtype=torch.float64)
    if name == "LGConv":  # of which PyG's own code fails
        it = edges()
        it[1, 0] = 0
    expected = conv(x, it)
    torch.testing.assert_close(nn.convert(conv)(x, shard(it, N, 3)), expected, rtol=0, atol=1e-10)


HALF = (torch.float16, torch.bfloat16)
ORDINARY = pytest.param(0, marks=pytest.mark.skipif(not ops.KERNELS, reason="an ordinary edge_index is PyG's"))
NORMALISED = {
    "GCNConv": lambda library: library.GCNConv(2, 2, bias=False),
    "GCN2Conv": lambda library: library.GCN2Conv(2, alpha=0.1),
}


def into_node_0(count):
    return torch.stack([torch.arange(1, count), torch.zeros(count - 1, dtype=torch.int64)])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("parts", [1, 4])
def test_degrees_of_weights_in_half_precision(name, parts, dtype):
    """A sum of ones in half precision ends at 256 or 2048."""
    n, make = 5000, NORMALISED[name]
    it, weight = into_node_0(n), torch.ones(n - 1, dtype=dtype)
    x = torch.ones(n, 2, dtype=torch.float64)
    args = () if name == "GCNConv" else (x,)
    expected = with_seed(lambda: make(gnn).double())(x, *args, it, weight.double())
    found = with_seed(lambda: make(nn).double())(x, *args, shard(it, n, parts), weight)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("parts", [ORDINARY, 1, 2])
def test_sums_beyond_half_precision(name, parts, learns):
    """What degrees are taken of may be more than 65504, in-degrees and sums of rows."""
    n, make = 70_001, NORMALISED[name]
    it, weight, x = into_node_0(n), torch.ones(n - 1, dtype=torch.float16), torch.full((n, 2), 10.0)
    args = () if name == "GCNConv" else (x,)
    expected = with_seed(lambda: make(gnn))(x, *args, it)
    layer = with_seed(lambda: make(nn)).half()
    args = tuple(t.half() for t in args)
    weight.requires_grad_(learns)
    out = layer(x.half(), *args, shard(it, n, parts) if parts else it, weight if learns else None)
    torch.testing.assert_close(out.float(), expected, rtol=5e-3, atol=1e-3)
    if learns:
        out[0].sum().backward()
        assert weight.grad.isfinite().all() and weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("parts", [ORDINARY, 1, 2])
def test_weights_that_are_no_numbers_of_edges(name, parts):
    layer, x, it = NORMALISED[name](nn), torch.randn(N, 2), shard(edges(), N, parts) if parts else edges()
    args = () if name == "GCNConv" else (x,)
    for weight in (torch.ones(NUM_EDGES, dtype=torch.int64), torch.ones(NUM_EDGES, dtype=torch.bool)):
        with pytest.raises(ValueError, match=rf"'edge_weight' of {weight.dtype}"):
            layer(x, *args, it, weight)
    for normalize in (True, False):
        layer.normalize = normalize
        with pytest.raises(ValueError, match=rf"one weight for each edge.*\[{NUM_EDGES}, 2\]"):
            layer(x, *args, it, torch.ones(NUM_EDGES, 2))


@pytest.mark.parametrize("driver", ["propagate", "edge_updater"])
@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "GINConv"])
def test_a_propagate_of_ones_own(name, driver):
    """It is called, also by a class that inherits it."""
    if driver == "edge_updater" and name not in ("GATConv", "GATv2Conv"):
        pytest.skip("it updates no edges")

    def subclass(library):
        def twice(self, *args, **kwargs):
            return 2 * getattr(super(own, self), driver)(*args, **kwargs)

        own = type(f"Twice{name}", (getattr(library, name),), {driver: twice})
        args = (torch.nn.Linear(8, 8),) if name == "GINConv" else (8, 8)
        return type(f"More{name}", (own,), {})(*args).double()

    x = torch.randn(N, 8, dtype=torch.float64)
    expected = with_seed(lambda: subclass(gnn))(x, edges())
    layer = with_seed(lambda: subclass(nn))
    for it in (edges(), shard(edges(), N, 1), shard(edges(), N, 3)):
        torch.testing.assert_close(layer(x, it), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex128])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_rows_that_are_no_real_numbers(dtype, parts):
    x = torch.randint(5, (N, 4)).to(dtype)
    expected = gnn.GINConv(torch.nn.Identity())(x, edges())
    found = nn.GINConv(torch.nn.Identity())(x, shard(edges(), N, parts) if parts else edges())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


class Defaults(gnn.MessagePassing):
    """What a call leaves out."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j, weight=None, negate: bool = False):
        assert weight is None
        return -x_j if negate else x_j

    def update(self, out, residual: float = 0.5):
        return out * residual


class DefaultsOfEdges(gnn.MessagePassing):
    """The same of an update of edges."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x, e=self.edge_updater(edge_index, x=x))

    def message(self, x_j, e):
        return x_j * e

    def edge_update(self, x_i, double: bool = False):
        return x_i * 2 if double else x_i


class Ours(nn.MessagePassing, Defaults):
    """Below the base class of this package."""


@pytest.mark.parametrize(("make", "reference"), [
    *((lambda cls=cls: nn.convert(cls()), cls) for cls in (Defaults, DefaultsOfEdges)), (Ours, Defaults),
])  # fmt: skip
def test_defaults_of_what_is_not_given(make, reference):
    x = torch.randn(N, 4, dtype=torch.float64)
    expected = reference()(x, edges())
    for edge_index in (edges(), shard(edges(), N, 1), shard(edges(), N, 3)):
        torch.testing.assert_close(make()(x, edge_index), expected, rtol=1e-10, atol=1e-10)


def hooked(layer):
    layer.aggr_module.register_forward_hook(lambda module, args, out: 2 * out)


def hooked_before(layer):
    layer.aggr_module.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))


def replaced(layer):
    layer.aggr_module = gnn.MaxAggregation()


def patched(layer):
    layer.aggr_module.forward = gnn.MeanAggregation().forward


@pytest.mark.parametrize(("name", "change"), some(
    ["SAGEConv", "GCNConv", "GATConv", "GATv2Conv", "TransformerConv", "GraphConv"],
    [hooked, hooked_before, replaced, patched], every=2,
))  # fmt: skip
def test_aggregations_that_were_changed(name, change):
    """Also after calls without."""
    torch.manual_seed(0)
    reference, x = getattr(gnn, name)(8, 4).double(), torch.randn(N, 8, dtype=torch.float64)
    ours = getattr(nn, name)(8, 4).double() if hasattr(nn, name) else nn.convert(getattr(gnn, name)(8, 4).double())
    ours.load_state_dict(reference.state_dict())
    graphs = [edges(), shard(edges(), N, 1), shard(edges(), N, 3)]
    for changed in (False, True):
        if changed:
            change(ours)
            change(reference)
        expected = reference(x, edges())
        for edge_index in graphs:
            torch.testing.assert_close(ours(x, edge_index), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("aggr", [gnn.MaxAggregation(), "max"])
def test_aggregations_that_are_given_as_modules_have_kernels(aggr):
    layer = nn.convert(gnn.SimpleConv(aggr=aggr))
    layer(torch.randn(N, 4), shard(edges(), N, 3))
    assert "streams (max of source rows, by a kernel)" in nn.describe(layer)


@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv", "TransformerConv"])
def test_weights_of_edges_that_are_made_anew(name):
    """Once in a call: a spectral norm goes on with each of them."""
    layers = []
    for library in (nn, gnn):
        torch.manual_seed(0)
        layer = getattr(library, name)(8, 4, edge_dim=3).double()
        torch.nn.utils.parametrizations.spectral_norm(layer.lin_edge)
        layers.append(layer)
    x, attr = torch.randn(N, 8, dtype=torch.float64), ATTR.double()
    for _ in range(2):
        ours, theirs = (layer(x, edges(), attr) for layer in layers)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Made(TorchDispatchMode):
    """Counts the tensors that are made, as large as the features of all edges or larger."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def places(tree):
            found = (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.shape[:1] == (NUM_EDGES,))
            return {t.untyped_storage().data_ptr(): t.numel() for t in found}

        out = func(*args, **(kwargs or {}))
        self.count += sum(n >= NUM_EDGES * 16 for place, n in places(out).items() if place not in places(args))
        return out


@pytest.mark.parametrize("learns", [False, True])
def test_features_of_edges_without_a_gradient_get_none(learns, monkeypatch):
    """Backward puts them into the order of the block, and makes nothing else that is as large: the gradient of their
    map is summed piece by piece.
    """
    monkeypatch.setattr("pyg_sar.linear.EDGES_AT_A_TIME", 37)
    x, results = torch.randn(N, 8, dtype=torch.float64), []
    for library, graph in ((nn, shard(edges(), N, 1)), (gnn, edges())):
        torch.manual_seed(0)
        layer = library.GATConv(8, 128, 4, edge_dim=16, add_self_loops=False).double()  # more than one group of heads
        attr = torch.ones(NUM_EDGES, 16, dtype=torch.float64).cumsum(0).sin().requires_grad_(learns)
        out = layer(x, graph, attr).sin().sum()
        made = Made()
        with made if ops.KERNELS else nullcontext():  # plain PyTorch makes more
            out.backward()
        results.append([layer.lin_edge.weight.grad, layer.att_edge.grad, *[attr.grad] * learns])
        if library is nn and ops.KERNELS:
            assert made.count == 1 if not learns else made.count > 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lin", [torch.nn.Linear(8, 4), torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())])
def test_cached_features_and_another_linear_layer(lin):
    """Which may not be applied to sums instead of rows."""
    layer, reference = nn.GCNConv(8, 4), gnn.GCNConv(8, 4)
    layer.lin = reference.lin = lin
    x, graph = torch.randn(N, 8), shard(edges(), N, 3)
    graph.cache_features(x)
    torch.testing.assert_close(layer(x, graph), reference(x, edges()))
