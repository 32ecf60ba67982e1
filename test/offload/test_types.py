"""Rows of nodes of several types at home, against PyG on the whole graph."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from support.cases import some
from support.hetero_models import EDGES, MODELS, NODES, WIDTH, check, graph, make, ordinary
from support.offloaded import Longest, WithoutEdges
from torch_geometric.data import HeteroData

import pyg_sar
from pyg_sar import nn, offload, ops
from pyg_sar.nn import convert
from pyg_sar.offload.passes import host
from pyg_sar.offload.rows import HostRows

# Workers, chunks and whether homes are in files.
WAYS = [(1, 1, False), (1, 4, True), (1, 60, False), (2, 3, True), (3, 5, False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for parts in (1, 2, 3):
        found[parts] = tmp_path_factory.mktemp("types") / "g"
        pyg_sar.partition(graph(), parts, found[parts], method="random")
    return found


@pytest.mark.parametrize(("name", "way"), some(MODELS, WAYS, every=3))
def test_models_equal_pyg(pool, folders, tmp_path, name, way):
    size, chunks, files = way
    pool.run(size, check, folders[size], name, 1, "cpu", {"chunks": chunks, "home": str(tmp_path) if files else None})
    assert list(tmp_path.iterdir()) == []


def planned(group, folder):
    data = pyg_sar.load(folder, group=group)
    model = convert(make("HGTConv", graph()), group).float()
    for t in data.node_types:
        data[t].x = data[t].x.float()
    wide = pyg_sar.offload(data, "1GiB", WithoutEdges(model))
    return [len(wide["paper"].x.place.ranges), wide["paper"].x.place.chunks]


@pytest.mark.grid
def test_budget_on_workers(pool, folders):
    assert pool.run(2, planned, folders[2]) == [[1, 1]] * 2


def sharded(data=None):
    """The graph in one process."""
    data = graph() if data is None else data
    for it, store in data.edge_items():
        store.edge_index = pyg_sar.shard(store.edge_index, (data[it[0]].num_nodes, data[it[2]].num_nodes))
    return data


def equal(found, expected):
    found = ordinary(found) if isinstance(found, HostRows) else found
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def reduced(aggr, *rows):
    """As :class:`~torch_geometric.nn.HeteroConv` does, and as people write it."""
    out = getattr(torch, aggr)(torch.stack(rows, dim=0), dim=0)
    out = out[0] if isinstance(out, tuple) else out
    other = getattr(torch.stack(rows), aggr)(0)
    return out + (other[0] if isinstance(other, tuple) else other)


@pytest.mark.parametrize("aggr", ["sum", "mean", "max", "min", "std", "prod", "biased"])
def test_stacked_rows_are_reduced(aggr):
    data, whole = offload(sharded(), chunks=3), graph()
    x, y = data["paper"].x.requires_grad_(), whole["paper"].x.requires_grad_()
    if aggr == "biased":
        out, expected = (torch.var(input=torch.stack([t, t.tanh()]), dim=0, unbiased=False) for t in (x, y))
    else:
        out, expected = reduced(aggr, x, x.tanh(), x * x), reduced(aggr, y, y.tanh(), y * y)
    equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    equal(x.grad, y.grad)


@pytest.mark.parametrize("wrong", [
    lambda t: t + 1, lambda t: -t, lambda t: t**2, lambda t: t > 0, lambda t: t == 0, lambda t: torch.sum(t, 1),
    lambda t: t.sum(), lambda t: t[0], len, lambda t: t.sum(0, keepdim=True), lambda t: t.std(0, False), torch.tanh,
])  # fmt: skip
def test_what_stacked_rows_are_not(wrong):
    x = offload(sharded(), chunks=3)["paper"].x
    with pytest.raises(NotImplementedError, match="a dimension in front of the rows is reduced at once"):
        wrong(torch.stack([x, x]))
    with pytest.raises(AttributeError, match="no 'shape': a dimension in front"):
        _ = torch.stack([x, x]).shape


def test_types_one_after_the_other():
    data, whole = offload(sharded(), chunks=3), graph()
    types = ("paper", "author", "paper")
    x, y = ({t: d[t].x.requires_grad_() for t in types} for d in (data, whole))
    out, expected = (torch.cat([rows[t][:, :3] for t in types]).sin() for rows in (x, y))
    assert isinstance(out, HostRows) and out.shape == expected.shape
    equal(out, expected)
    sizes = [NODES[t] for t in types]
    for rows in (out, expected):
        first, _, last = rows.split(sizes)
        assert len(first) == sizes[0]
        (first * last.cos()).sum().backward()
    for t in ("paper", "author"):
        equal(x[t].grad, y[t].grad)
    for wrong in ([1, len(out) - 1], len(out)):
        with pytest.raises(NotImplementedError, match="split into the types"):
            out.split(wrong)
    drops = torch.nn.functional.dropout(out, 0.5)
    a, b = (ordinary(drops)[at : at + NODES["paper"]] == 0 for at in (0, sizes[0] + sizes[1]))
    assert not torch.equal(a, b), "the same nodes, at two places"


def test_rows_of_several_types_are_those_that_torch_gives():
    data, whole = offload(sharded(), chunks=3), graph()
    for of in (lambda x, y: [x.argmax(1, keepdim=True), y[:, :1]], lambda x, y: [x[:, :3].float(), y[:, :3]]):
        out, expected = (torch.cat(of(d["paper"].x, d["author"].x), -2) for d in (data, whole))
        assert out.dtype == expected.dtype
        equal(out, expected)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([data["paper"].x[:, :3], data["author"].x[:, :1]])
    with pytest.raises(NotImplementedError, match="all are rows at home of types of the same data"):
        torch.cat([data["paper"].x, graph()["paper"].x])
    other = offload(sharded(), chunks=3)
    with pytest.raises(NotImplementedError, match="all are rows at home of types of the same data"):
        torch.cat([data["paper"].x, other["paper"].x])


def test_what_shares_memory_is_not_changed():
    data = offload(sharded(), chunks=3)
    joined = torch.cat([data["author"].x, data["paper"].x[:, :6]])
    one, _ = joined.split([NODES["author"], NODES["paper"]])
    half = joined[:, :3]
    for wrong in (one, joined, half):
        with pytest.raises(NotImplementedError, match="it changes a part of rows, or what shares their memory"):
            wrong.mul_(2)
    del half, joined
    equal(one.mul_(2), 2 * graph()["author"].x)


def test_a_type_whose_rows_are_in_memory():
    """Such as a table of nodes that learns."""
    data, whole = offload(sharded(), chunks=3), graph()
    convs = {("author", "writes", "paper"): pyg.GATv2Conv((6, 8), 4, add_self_loops=False),
             ("paper", "rev_writes", "author"): pyg.SAGEConv((8, 6), 4, aggr="max"),
             ("venue", "rev_in", "paper"): pyg.GraphConv((3, 8), 4),
             ("paper", "in", "venue"): pyg.GATConv((8, 3), 4, add_self_loops=False),
             ("paper", "cites", "paper"): pyg.TransformerConv((8, 8), 4)}  # fmt: skip
    torch.manual_seed(0)
    model = pyg.HeteroConv(convs, aggr="sum").double()
    results = []
    for d, net in ((data, convert(copy.deepcopy(model))), (whole, model)):
        tables = {t: torch.nn.Parameter(graph()[t].x) for t in ("author", "venue")}
        out = net({**d.x_dict, **tables}, d.edge_index_dict)
        sum(rows.square().sum() for rows in out.values()).backward()
        results.append([out["paper"], out["author"], *(p.grad for p in (*tables.values(), *net.parameters()))])
    for found, expected in zip(*results, strict=True):
        equal(found, expected)


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize("kind", ["sage", "rgcn"])
def test_sums_of_rows_in_memory_are_at_home(kind):
    n, data = 400, HeteroData()
    data["user"].x, row = torch.randn(n, 6), torch.arange(n)
    data["group"].num_nodes = 8
    data["group", "has", "user"].edge_index = torch.stack([row // 50, row])
    data = offload(sharded(data), chunks=20)
    conv = {"sage": lambda: nn.SAGEConv((6, 6), 4), "rgcn": lambda: nn.RGCNConv((6, 6), 4, 2)}[kind]()
    table, types = torch.nn.Parameter(torch.randn(8, 6)), () if kind == "sage" else (row % 2,)

    def step():
        conv((table, data["user"].x), data["group", "has", "user"].edge_index, *types)[::40].sum().backward()

    step()
    longest = Longest.of(step)
    assert longest.rows < 60, longest.what
    assert table.grad.abs().sum() > 0


def test_hgt_with_a_table_of_nodes():
    data, whole = offload(sharded(), chunks=3), graph()
    model = pyg.HGTConv(WIDTH, 8, ([*NODES], [*EDGES]), 2).double()
    results = []
    for d, net in ((data, convert(copy.deepcopy(model))), (whole, model)):
        table = torch.nn.Parameter(graph()["author"].x)
        out = net({**d.x_dict, "author": table}, d.edge_index_dict)
        sum(rows.square().sum() for rows in out.values() if rows is not None).backward()
        results.append([out["paper"], out["author"], table.grad, *(p.grad for p in net.parameters())])
    for found, expected in zip(*results, strict=True):
        equal(found, expected)
    backwards = dict(reversed(data.edge_index_dict.items()))
    with pytest.raises(ValueError, match="'edge_index_dict' in the order of the layer's metadata"):
        convert(model)(data.x_dict, backwards)


def test_attention_over_edge_types_within_autocast():
    data, whole = offload(sharded(), chunks=3), graph()
    model = pyg.HANConv(WIDTH, 8, ([*NODES], [*EDGES]), 2).double()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (
            net(d.x_dict, d.edge_index_dict) for net, d in ((convert(copy.deepcopy(model)), data), (model, whole))
        )
    for t in expected:
        if expected[t] is not None:
            torch.testing.assert_close(ordinary(found[t]).double(), expected[t].double(), rtol=0.05, atol=0.05)


def test_self_loops_within_a_type():
    """Also where edges were sharded as between two sets of nodes."""
    data, whole = offload(sharded(), chunks=3), graph()
    cites = ("paper", "cites", "paper")
    for layer in (lambda: pyg.GATConv(8, 4), lambda: pyg.GCNConv(8, 4), lambda: pyg.APPNP(2, 0.1)):
        model = layer().double()
        found, expected = (net(d["paper"].x, d[cites].edge_index) for net, d in
                           ((convert(copy.deepcopy(model)), data), (model, whole)))  # fmt: skip
        equal(found, expected)


@pytest.mark.parametrize("layer", [pyg.LEConv, pyg.ResGatedGraphConv, pyg.FiLMConv])
def test_rows_that_messages_read_at_one_end_alone(layer):
    """Of another number than at the other end, where they have no row for each node."""
    torch.manual_seed(0)
    conv, whole = layer((8, 3), 4).double(), graph()
    expected = conv((whole["paper"].x, whole["venue"].x), torch.tensor([[46, 30, 46], [4, 4, 0]]))
    data = sharded()
    data["paper", "in", "venue"].edge_index = pyg_sar.shard(torch.tensor([[46, 30, 46], [4, 4, 0]]), (47, 5))
    data = offload(data, chunks=2)
    pair = data["paper"].x, data["venue"].x
    equal({"out": ordinary(convert(conv)(pair, data["paper", "in", "venue"].edge_index))}, {"out": expected})


@pytest.mark.parametrize("name", ["HGTConv", "HANConv"])
def test_homes_hold_nothing_behind_backward(name):
    data, model = offload(sharded(), chunks=3), convert(make(name, graph()))
    out = model(data.x_dict, data.edge_index_dict, {})
    loss = sum(rows[::5].square().sum() for rows in out.values() if rows is not None)
    del out
    loss.backward()
    assert data["paper"].x.place.home.held == 0
    assert loss > 0


def test_copies_of_data():
    data = offload(sharded(), chunks=3)
    other = copy.deepcopy(data)
    other["paper"].x.mul_(2)
    equal(data["paper"].x, graph()["paper"].x)
    equal(other["paper"].x, 2 * graph()["paper"].x)
    with pytest.raises(RuntimeError, match="are data support the deepcopy protocol"):
        copy.deepcopy(data["paper"].x.tanh())


def test_ordinary_rows_are_not_changed_by_rows_at_home():
    x = offload(sharded(), chunks=3)["paper"].x
    for wrong in (lambda t: t.add_(x), lambda t: torch.add(x, 1, out=t), lambda t: t.mul_(x)):
        with pytest.raises(NotImplementedError, match="or one that is not at home"):
            wrong(torch.ones(x.shape, dtype=x.dtype))


def test_messages_against_the_direction_of_edges():
    data, whole = offload(sharded(), chunks=4), graph()
    cites = ("paper", "cites", "paper")
    net = pyg.HeteroConv({cites: pyg.DirGNNConv(pyg.GATConv(8, 5, add_self_loops=False))}).double()
    found, expected = (m(d.x_dict, {cites: d[cites].edge_index}) for m, d in ((convert(net), data), (net, whole)))
    equal(found["paper"], expected["paper"])


@pytest.mark.skipif(not ops.KERNELS, reason="plain PyTorch makes rows for edges")
@pytest.mark.parametrize("name", ["HeteroConv", "HGTConv", "HANConv"])
def test_no_tensor_is_as_long_as_the_nodes_of_a_type(name):
    """Nodes are linked to those of their own number and of the next one."""
    n, data = 300, HeteroData()
    for t, width in WIDTH.items():
        data[t].x = torch.randn(n, width, dtype=torch.float64)
    row = torch.arange(n)
    for it in EDGES:
        data[it].edge_index = torch.stack([torch.cat([row, row.roll(1)]), row.repeat(2)])
    data, model = offload(sharded(data), chunks=10), convert(make(name, graph()))

    def step():
        out = model(data.x_dict, data.edge_index_dict, {})
        sum(rows[::40].square().sum() for rows in out.values()).backward()

    step()
    longest = Longest.of(step)
    most = len(EDGES) * 2 * n if name == "HGTConv" else 0  # a number of each edge, for each head
    assert longest.rows in (most, *range(n // 2)), longest.what


def test_errors():
    data = graph()
    with pytest.raises(TypeError, match=r"sharded 'edge_index' of \('author', 'writes', 'paper'\) \(got Tensor\)"):
        offload(data, chunks=3)
    wrong = sharded()
    wrong["author", "writes", "paper"].edge_index = pyg_sar.shard(torch.zeros(2, 3, dtype=torch.long), (31, 46))
    with pytest.raises(ValueError, match=r"\('author', 'writes', 'paper'\) to join 47 nodes of 'paper', .* \(got 46\)"):
        offload(wrong, chunks=3)
    lonely = HeteroData({"a": {"x": torch.ones(5, 2)}})
    lonely["a", "to", "b"].edge_index = pyg_sar.shard(torch.zeros(2, 3, dtype=torch.long), (5, 4))
    with pytest.raises(ValueError, match=r"Expected nodes of 'b', .* Set their 'num_nodes'"):
        offload(lonely, chunks=2)
    assert lonely.node_types == ["a"]
    with pytest.raises(ValueError, match="data with edges"):
        offload(HeteroData({"a": {"x": torch.ones(3, 2)}}), chunks=3)
    data = sharded()
    without = sharded()
    del without["author"].x
    with pytest.raises(TypeError, match="Expected features of 'author', 'x'"):
        offload(without, "2GiB", torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'edges' to name tensors with 160 rows \(got 'edge_attr', \[3, 2\]\)"):
        data["author", "writes", "paper"].edge_attr = torch.ones(3, 2)
        offload(data, "2GiB", torch.nn.Linear(2, 2), edges=["edge_attr"])
    with pytest.raises(ValueError, match=r"'edges' to name tensors .* \(got 'edge_atr', NoneType\)"):
        offload(sharded(), "2GiB", torch.nn.Linear(2, 2), edges=["edge_atr"])
    data = sharded()
    there = offload(data, chunks=3)
    assert not isinstance(data["paper"].x, HostRows) and data["author", "writes", "paper"].edge_index.graph.ends is None
    rows, conv = there["author"].x, convert(pyg.SAGEConv((6, 8), 4).double())
    with pytest.raises(ValueError, match="an 'edge_index' of the data that"):
        conv((rows, there["paper"].x), data["author", "writes", "paper"].edge_index)
    same = HeteroData({t: {"x": torch.ones(5, 2)} for t in "ab"})
    same["a", "to", "b"].edge_index = torch.zeros(2, 4, dtype=torch.long)
    same = offload(sharded(same), chunks=2)
    with pytest.raises(ValueError, match=r"of one type of nodes \(got 5 of 'a' and 5 of 'b' rows\)"):
        same["a"].x + same["b"].x
    assert host(same["a"].x) is not None
