"""Any graph, cut in any way: nothing is lost on the way to a folder and back, and layers give PyG's numbers."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.data import store

MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
SOME = settings(MANY, max_examples=15, derandomize=True)
LAYERS = {
    "sum": lambda nn: nn.GINConv(torch.nn.Linear(2, 3)),
    "max": lambda nn: nn.SAGEConv(2, 3, aggr="max"),
    "softmax": lambda nn: nn.GATConv(2, 3, 2, edge_dim=1),
}


@st.composite
def graphs(draw):
    """Isolated nodes, parallel edges, loops, hubs; parts without nodes, without edges, or all in one."""
    nodes, parts = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    node = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=30))
    of = draw(st.lists(st.integers(0, parts - 1), min_size=nodes, max_size=nodes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def rows(count):
        return torch.randn(count, dtype=torch.float64, generator=generator)

    edge_index = torch.tensor(edges, dtype=torch.long).view(-1, 2).t()
    data = Data(x=rows((nodes, 2)), edge_index=edge_index, edge_attr=rows((len(edges), 1)))
    return data, parts, torch.tensor(of), draw(st.sampled_from(["locality", "id"]))


def cut(graph, folder):
    data, parts, of, order = graph
    pyg_sar.partition(data, parts, f"{folder}/graph", method=of, order=order)
    return f"{folder}/graph"


def nothing_is_lost(graph):
    data, parts, of, _ = graph
    with tempfile.TemporaryDirectory() as folder:
        path = cut(graph, folder)
        shards = [store.read_part(path, p, mmap=False) for p in range(parts)]
    ids = [shard.nodes[store.NODE].attrs["n_id"] for shard in shards]
    assert torch.cat(ids).sort().values.equal(torch.arange(data.num_nodes))
    seen = []
    for p, shard in enumerate(shards):
        assert bool((of[ids[p]] == p).all())
        assert shard.nodes[store.NODE].attrs["x"].equal(data.x[ids[p]])
        (rows,) = shard.edges.values()
        assert rows.attrs["edge_attr"].equal(data.edge_attr[rows.topology.e_id])
        seen.append(rows.topology.e_id)
        sources = []
        for q, other in enumerate(shards):
            (theirs,) = other.edges.values()
            read = ids[q] if p == q else ids[q][theirs.topology.serve[p].long()]
            assert read.numel() == rows.topology.num_src[q]
            sources.append(read[rows.topology.col[q].long()])
        assert torch.cat(sources).equal(data.edge_index[0, rows.topology.e_id])
    assert torch.cat(seen).sort().values.equal(torch.arange(data.num_edges))


def differentiated(conv, data):
    """What a layer gives, and the gradients of what it is given and of its parameters."""
    x, edge_attr = data.x.requires_grad_(), data.edge_attr.requires_grad_()
    edges = (edge_attr,) if getattr(conv, "edge_dim", None) else ()
    out = conv(x, data.edge_index, *edges)
    (out * torch.arange(1.0, out.size(1) + 1, dtype=out.dtype)).square().sum().backward()
    return out.detach(), x.grad, edge_attr.grad, [p.grad for p in conv.parameters()]


def of_worker(group, path, kind, remat, one_shot):
    data = pyg_sar.load(path, group=group, remat=remat, one_shot=one_shot)
    torch.manual_seed(0)
    conv = LAYERS[kind](pyg_sar.nn).double()
    out, x, edges, parameters = differentiated(conv, data)
    for grad in parameters:
        dist.all_reduce(grad, group=group)
    return data.n_id, data.e_id, out, x, edges, parameters


def is_what_pyg_says(pool, graph, kind, mode):
    data, parts, *_ = graph
    torch.manual_seed(0)
    expected = differentiated(LAYERS[kind](torch_geometric.nn).double(), data.clone())
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(parts, of_worker, cut(graph, folder), kind, mode == 1, mode == 3)
    for n_id, e_id, out, x, edges, parameters in found:
        close(out, expected[0][n_id])
        close(x, expected[1][n_id])
        if edges is not None:
            close(edges, expected[2][e_id])
        for grad, other in zip(parameters, expected[3], strict=True):
            close(grad, other)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


HOW_MANY = pytest.mark.parametrize("how_many", [SOME, pytest.param(MANY, marks=pytest.mark.grid)], ids=["some", "many"])


@HOW_MANY
def test_nothing_is_lost(how_many):
    how_many(given(graphs())(nothing_is_lost))()


@HOW_MANY
def test_layers(pool, how_many):
    @how_many
    @given(graphs(), st.sampled_from(sorted(LAYERS)), st.sampled_from([1, 2, 3]))
    def holds(graph, kind, mode):
        is_what_pyg_says(pool, graph, kind, mode)

    holds()
