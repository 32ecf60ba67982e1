"""Message-flow graphs of heterogeneous graphs: what they hold, what they compute, and what they refuse."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.cases import some
from support.hetero_models import EDGES, KINDS, NODES, WIDTH, graph
from support.nasty_graph import close

import pyg_sar
from pyg_sar import message_flow_graphs
from pyg_sar.nn import convert, describe

TARGETS = {
    "few": {"paper": [3, 11, 17, 40], "venue": [1, 4]},
    "one": {"paper": [30]},  # most workers request nothing
    "source": {"author": [0, 5]},
    "all": {t: list(range(NODES[t])) for t in ("author", "paper", "venue")},
    "none": {"paper": []},
}
CITES = ("paper", "cites", "paper")


def masks(target, ids=None):
    """Of all nodes, or of those of these ids."""
    found = {t: torch.zeros(NODES[t], dtype=torch.bool) for t in TARGETS[target]}
    for t, nodes in TARGETS[target].items():
        found[t][nodes] = True
    return found if ids is None else {t: mask[ids[t]] for t, mask in found.items()}


def levels(target, num_layers):
    """The nodes of each type that are computed before, between and after the layers, from the edges alone."""
    data, found = graph(), [{t: set(nodes) for t, nodes in TARGETS[target].items()}]
    for _ in range(num_layers):
        before = {t: set(nodes) for t, nodes in found[0].items()}
        for (s, _, t), edges in data.edge_index_dict.items():
            if t in found[0]:
                before.setdefault(s, set()).update(i for i, j in edges.t().tolist() if j in found[0][t])
        found.insert(0, before)
    return found


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    for n in (1, 2, 3):
        part = {t: torch.randint(n, (NODES[t],), generator=torch.Generator().manual_seed(n)) for t in NODES}
        pyg_sar.partition(graph(), n, folder / str(n), method=part)
    return str(folder)


# What they hold


def contents(group, folder, target):
    data = pyg_sar.load(folder, group=group)
    flow = message_flow_graphs(data.edge_index_dict, masks(target, data.n_id_dict), 2)
    assert all(torch.equal(rows[: len(m.nonzero())], m.nonzero().view(-1))
               for t, m in masks(target, data.n_id_dict).items() for rows in [flow.node_rows[t]])  # fmt: skip
    found, before = [], {t: data[t].n_id[rows] for t, rows in flow.node_rows.items()}
    for edges, rows in zip(flow.edge_indices, flow.edge_rows, strict=True):
        after = {}
        for it, edge_index in edges.items():
            g = edge_index.graph
            assert torch.equal(g.n_id, before[it[0]]), "the sources of all edge types are the same rows"
            assert torch.equal(g.e_id, data[it].e_id[rows[it]])
            assert torch.equal(before[it[2]][g.row], graph()[it].edge_index[1][g.e_id])
            assert g.bipartite == (it[0] != it[2])
            assert after.setdefault(it[2], g.num_dst) == g.num_dst
        assert {*edges} == {it for it in EDGES if it[2] in after}
        found.append({t: ids.tolist() for t, ids in before.items()})
        before = {t: before[t][:count] for t, count in after.items()}
    return [*found, {t: ids.tolist() for t, ids in before.items()}]


@pytest.mark.parametrize(("target", "workers"), some(TARGETS, [1, 3], every=2))
def test_exactly_what_the_requested_nodes_depend_on(pool, parts, workers, target):
    found = pool.run(workers, contents, f"{parts}/{workers}", target)
    for k, expected in enumerate(levels(target, 2)):
        assert all(layers[k].keys() == expected.keys() for layers in found)
        for t, nodes in expected.items():
            assert sorted(itertools.chain(*(layers[k][t] for layers in found))) == sorted(nodes)


# What they compute


class Net(torch.nn.Module):
    """Two layers behind a map of each type, some edge types with features."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.layers = gnn.HeteroDictLinear(WIDTH, 8), torch.nn.ModuleList([make(), make()])

    def forward(self, x, edge_indices, edge_attrs):
        x = self.lin({t: rows for t, rows in x.items() if t != "alone"})
        for layer, edge_index, edge_attr in zip(self.layers, edge_indices, edge_attrs, strict=True):
            more = {"edge_attr_dict": edge_attr} if isinstance(layer, gnn.HeteroConv) else {}
            x = {t: rows.tanh() for t, rows in layer(x, edge_index, **more).items() if rows is not None}
        return x


def of_types(*layers, aggr="sum"):
    return lambda: gnn.HeteroConv({it: layers[k % len(layers)]() for k, it in enumerate(EDGES)}, aggr=aggr)


MODELS = {
    "native": of_types(
        lambda: gnn.SAGEConv((8, 8), 8, "max"), lambda: gnn.GATConv((8, 8), 4, 2, add_self_loops=False, edge_dim=2),
        lambda: gnn.GATv2Conv((8, 8), 8, add_self_loops=False, edge_dim=2), aggr="mean",
    ),
    "attention": of_types(
        lambda: gnn.TransformerConv((8, 8), 4, 2, edge_dim=2), lambda: gnn.GINEConv(gnn.Linear(8, 8), edge_dim=2),
        lambda: gnn.GINConv(gnn.Linear(8, 8)),
    ),
    "converted": of_types(
        lambda: gnn.ResGatedGraphConv((8, 8), 8, edge_dim=2), lambda: gnn.GraphConv((8, 8), 8),
        lambda: gnn.CGConv((8, 8), 2), lambda: gnn.GeneralConv((8, 8), 8, 2, attention=True), aggr="max",
    ),
    "self-loops": lambda: gnn.HeteroConv({
        **{it: gnn.SAGEConv((8, 8), 8) for it in EDGES}, CITES: gnn.GATConv(8, 4, 2, edge_dim=2),
    }),
    "gcn": lambda: gnn.HeteroConv({**{it: gnn.SAGEConv((8, 8), 8) for it in EDGES}, CITES: gnn.GCNConv(8, 8)}),
    "HGTConv": lambda: gnn.HGTConv(8, 8, KINDS, 2),
}  # fmt: skip


def attributes(data, name, rows=None):
    """Features of the edge types whose layer takes some."""
    takes = ("GAT", "GATv2", "Transformer", "GINE", "ResGated", "CG")
    layer = MODELS[name]()
    if not isinstance(layer, gnn.HeteroConv):
        return {}
    convs = {it: type(layer.convs[it]).__name__ for it in EDGES}
    kept = {it: data[it].edge_attr for it in EDGES if convs[it].startswith(takes)}
    return kept if rows is None else {it: attr[rows[it]] for it, attr in kept.items() if it in rows}


def check(group, folder, name, target, mode):
    data, whole = pyg_sar.load(folder, group=group, remat=mode == 1, one_shot=mode == 3), graph()
    reference = Net(MODELS[name]).double()
    model = convert(copy.deepcopy(reference), group)
    every = {t: x.clone().requires_grad_() for t, x in whole.x_dict.items()}
    out = reference(every, [whole.edge_index_dict] * 2, [attributes(whole, name)] * 2)
    weights = {t: torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).double() for t, n in NODES.items()}
    wanted = {t: masks(target).get(t, torch.zeros(n, dtype=torch.bool)) for t, n in NODES.items()}
    sum((rows[wanted[t]] * weights[t][wanted[t]]).sum() for t, rows in out.items()).backward()

    ids = data.n_id_dict
    mine = masks(target, ids)
    flow = message_flow_graphs(data.edge_index_dict, mine, 2)
    x = {t: rows.clone().requires_grad_() for t, rows in data.x_dict.items()}
    attrs = [attributes(data, name, rows) for rows in flow.edge_rows]
    found = model({t: x[t][rows] for t, rows in flow.node_rows.items()}, flow.edge_indices, attrs)
    assert found.keys() == mine.keys()
    loss = 0.0
    for t, rows in found.items():
        own = ids[t][mine[t]]
        close(rows, out[t][own], f"{name}: output {t}")
        loss = loss + (rows * weights[t][own]).sum()
    loss.backward()
    for t in flow.node_rows:
        grad = torch.zeros_like(every[t]) if every[t].grad is None else every[t].grad
        close(x[t].grad, grad[ids[t]], f"{name}: gradient of {t}")
    assert all(
        x[t].grad is None and not every[t].grad.any()
        for t in x.keys() - flow.node_rows.keys()
        if every[t].grad is not None
    )
    for (key, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        dist.all_reduce(grad, group=group)
        close(grad, torch.zeros_like(grad) if q[1].grad is None else q[1].grad, f"{name}: gradient of {key}")
    assert "one-shot" not in describe(model).replace("or runs one-shot: see when run", "")


@pytest.mark.parametrize(("name", "way"), some(MODELS, [(1, 1), (2, 3), (3, 1)], every=3))
def test_equals_pyg_on_the_whole_graph(pool, parts, name, way):
    workers, mode = way
    for target in ("few", "one"):
        pool.run(workers, check, f"{parts}/{workers}", name, target, mode)


@pytest.mark.parametrize("target", ["source", "all", "none"])
def test_other_requests(pool, parts, target):
    for name in ("native", "HGTConv"):
        pool.run(2, check, f"{parts}/2", name, target, 2)


def kept(group, folder):
    """The first layer keeps its sums of features that never change."""
    data = pyg_sar.load(folder, group=group)
    mine = masks("few", data.n_id_dict)
    flow = message_flow_graphs(data.edge_index_dict, mine, 1)
    x = {t: data[t].x[rows] for t, rows in flow.node_rows.items()}
    torch.manual_seed(0)
    conv = gnn.HeteroConv({it: gnn.SAGEConv((WIDTH[it[0]], WIDTH[it[2]]), 4) for it in EDGES})
    convert(conv.double())
    out = conv(x, flow.edge_indices[0])
    for it, edge_index in flow.edge_indices[0].items():
        edge_index.cache_features(x[it[0]])
    again = [conv(x, flow.edge_indices[0]) for _ in range(2)]
    with pyg_sar.record_traffic(data[CITES].edge_index) as records:
        conv(x, flow.edge_indices[0])
    assert sum(t.forward_received for t in records) == 0
    for other in again:
        for t, rows in out.items():
            close(other[t], rows, t)


def test_features_that_never_change(pool, parts):
    pool.run(2, kept, f"{parts}/2")


# What they refuse


def sharded():
    data = graph()
    sizes = {it: (NODES[it[0]], NODES[it[2]]) if it[0] != it[2] else NODES[it[0]] for it in EDGES}
    return {it: pyg_sar.shard(data[it].edge_index, sizes[it], 2) for it in EDGES}


@pytest.fixture(scope="module")
def flow():
    return message_flow_graphs(sharded(), masks("few"), 1)


def test_semantic_attention_is_refused(flow):
    x = {t: torch.randn(len(rows), 8) for t, rows in flow.node_rows.items()}
    with pytest.raises(NotImplementedError, match="mean over all nodes"):
        pyg_sar.nn.HANConv(8, 8, KINDS)(x, flow.edge_indices[0])


def test_edges_the_other_way_round_are_refused(flow):
    x = {t: torch.randn(len(rows), 8) for t, rows in flow.node_rows.items()}
    flipped = {it: edge_index.flip(0) for it, edge_index in flow.edge_indices[0].items()}
    with pytest.raises(NotImplementedError, match="all out-edges"):
        pyg_sar.nn.HGTConv(8, 8, KINDS)(x, flipped)


def test_layers_of_pyg_that_are_not_converted_are_refused(flow):
    x = {t: torch.randn(len(rows), 8) for t, rows in flow.node_rows.items()}
    conv = gnn.HeteroConv({it: gnn.SAGEConv((8, 8), 8) for it in EDGES})
    with pytest.raises(NotImplementedError, match="message-flow graph"):
        conv(x, flow.edge_indices[0])


def test_rows_of_all_nodes_are_refused(flow):
    conv = convert(gnn.HeteroConv({it: gnn.SAGEConv((8, 8), 8) for it in EDGES}))
    with pytest.raises(ValueError, match=r"row for each of this worker's.*'x\[flow\.node_rows\]'"):
        conv({t: torch.randn(NODES[t], 8) for t in flow.node_rows}, flow.edge_indices[0])


WRONG = {
    "no graph": (lambda e, m: ({**e, CITES: graph()[CITES].edge_index}, m), TypeError, "Tensor in a dictionary"),
    "no edge types": (lambda e, m: ({}, m), TypeError, "NoneType"),
    "one mask": (lambda e, m: (e, m["paper"]), ValueError, "dictionary by node type"),
    "no types": (lambda e, m: (e, {}), ValueError, "got none"),
    "no edges": (lambda e, m: ({("author", "writes", "paper"): e["author", "writes", "paper"]},
                               {"author": torch.ones(31, dtype=torch.bool)}), ValueError, "got none at 'author'"),
    "unknown": (lambda e, m: (e, {"papers": m["paper"]}), ValueError, r"'author', 'paper', 'venue'.*'papers'"),
    "short": (lambda e, m: (e, {"paper": m["paper"][1:]}), ValueError, r"'mask\['paper'\]'.* 47 nodes.*\[46\]"),
    "numbers": (lambda e, m: (e, {"paper": [1]}), ValueError, "got list"),
    "names": (lambda e, m: ({"cites": e[CITES]}, m), ValueError, r"\(source type, relation, destination type\)"),
    "sets": (lambda e, m: ({("author", "to", "paper"): e[CITES]}, m), ValueError,
             "between two sets of nodes .got one with one set"),
    "sizes": (lambda e, m: ({**e, CITES: pyg_sar.shard(graph()[CITES].edge_index, 48)}, m), ValueError,
              "47 and 48 of type 'paper'"),
    "a layer": (lambda e, m: (message_flow_graphs(e, m, 1).edge_indices[0], m), ValueError,
                "a layer of a message-flow graph"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what):
    change, error, why = WRONG[what]
    with pytest.raises(error, match=why):
        message_flow_graphs(*change(sharded(), masks("few")), 2)


def differ(group, folder):
    data = pyg_sar.load(folder, group=group)
    edges = data.edge_index_dict
    if dist.get_rank(group) == 1:
        del edges[CITES]
    with pytest.raises(ValueError, match="differ in the edge types"):
        message_flow_graphs(edges, masks("few", data.n_id_dict), 1)


def test_workers_with_other_edge_types(pool, parts):
    pool.run(2, differ, f"{parts}/2")
