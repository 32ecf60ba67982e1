"""Training on rows at home by several workers, against PyG in one process."""

import copy
import os
import re
import signal

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from support.nasty_graph import NUM_NODES, assignment, close, share
from support.offloaded import IN, LAYERS, WithoutEdges, inputs, network
from torch_geometric.data import Data

import pyg_sar
from pyg_sar import nn, offload
from pyg_sar.nn import convert
from pyg_sar.offload import halo, slots
from pyg_sar.offload.home import Home
from pyg_sar.offload.move import move, place_of
from pyg_sar.offload.passes import host
from pyg_sar.offload.rows import HostRows

CPU = torch.device("cpu")
# Workers, how nodes are assigned to them, chunks of each, the most source rows at a time, homes in files, and the mode.
WAYS = {
    "two": (2, "random", (2, 2), None, False, 1),
    "files, pieces, one-shot": (2, "metis", (5, 1), 7, True, 3),
    "one is empty": (3, "empty", (17, 2, 3), 4, False, 2),
}


def part(group, method, mode=1, dtype=torch.float64):
    """Return a worker's share of the inputs, and where its nodes and edges are in them."""
    data, given = inputs(dtype)
    mine = share(group, data.edge_index, assignment(method, group.size()), mode=mode)
    given = {k: t.detach()[mine.edge].requires_grad_(t.requires_grad) for k, t in given.items()}
    rows = {k: data[k].detach()[mine.src] for k in ("x", "y", "mask")}
    return Data(edge_index=mine.edge_index, n_id=mine.src, **rows), given, mine


def at_home(data, count, home=None, slots=None):
    data = move(data, place_of(data.edge_index.graph, Home(home, CPU, None), count, slots))
    data.x.requires_grad_()
    return data


def loss_of(out, data, group):
    return pyg_sar.global_mean(F.cross_entropy(out[data.mask], data.y[data.mask], reduction="none"), group)


def check(group, kind, way, folder, dtype=torch.float64):
    """Two steps, compared in all numbers."""
    size, method, counts, slots, files, mode = WAYS[way]
    norm = ("batch", "layer")[(list(LAYERS).index(kind) + size) % 2]
    data, given, mine = part(group, method, mode)
    data = at_home(data, counts[group.rank()], folder if files else None, slots)
    whole, whole_given = inputs()
    model, reference = convert(network(kind, norm), group), network(kind, norm)
    steps = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, reference)]
    for _ in range(2):
        for t in (data.x, whole.x, *given.values(), *whole_given.values()):
            t.grad = None
        out, expected = model(data.x, data.edge_index, given), reference(whole.x, whole.edge_index, whole_given)
        assert isinstance(out, HostRows)
        loss, expected_loss = loss_of(out, data, group), F.cross_entropy(expected[whole.mask], whole.y[whole.mask])
        close(out[torch.arange(len(mine.src))], expected[mine.src], "output")
        close(loss, expected_loss, "loss")
        for step in steps:
            step.zero_grad()
        loss.backward()
        expected_loss.backward()
        pyg_sar.sum_gradients(model, group)
        close(host(data.x.grad), whole.x.grad[mine.src], "gradient of rows")
        for key, t in given.items():
            whole_grad = whole_given[key].grad
            close(t.grad, None if whole_grad is None else whole_grad[mine.edge], f"gradient of {key}")
        for (key, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True):
            close(p.grad, q[1].grad, f"gradient of {key}")
        for (key, b), c in zip(model.named_buffers(), reference.buffers(), strict=True):
            close(b, c, key)
        for step in steps:
            step.step()


CASES = [
    (kind, way) if k % len(WAYS) == w and k % 2 == 0 else pytest.param(kind, way, marks=pytest.mark.grid)
    for k, kind in enumerate(LAYERS)
    for w, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_equals_pyg(pool, kind, way, tmp_path):
    pool.run(WAYS[way][0], check, kind, way, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def by_short_messages(group, kind, way, folder):
    before, halo.MESSAGE = halo.MESSAGE, 100
    try:
        check(group, kind, way, folder)
    finally:
        halo.MESSAGE = before


@pytest.mark.parametrize("kind", ["sage", "rgcn", *(pytest.param(k, marks=pytest.mark.grid) for k in ("gat", "edge"))])
def test_halo_rows_in_many_messages(pool, kind, tmp_path):
    pool.run(3, by_short_messages, kind, "one is empty", str(tmp_path))


def dropped(group, count):
    """Rows, messages and attention that are dropped."""
    data, _, mine = part(group, "random")
    data = at_home(data, count)
    torch.manual_seed(group.rank())  # which is not what masks come from
    conv = nn.GATConv(IN, 4, 2, dropout=0.5).double()
    torch.manual_seed(0)
    conv.reset_parameters()
    out = conv(F.dropout(data.x, 0.25), data.edge_index)
    out = out[torch.arange(len(mine.src))]
    out.square().sum().backward()
    return mine.src, out.detach(), host(data.x.grad)


def test_dropout_is_the_same_for_all_workers_and_chunks(pool):
    found = []
    for size, count in ((1, 1), (2, 3), (3, 1)):
        results = pool.run(size, dropped, count)
        ids, out, grad = (torch.cat(parts) for parts in zip(*results, strict=True))
        order = ids.argsort()
        found.append((out[order], grad[order]))
    for out, grad in found[1:]:
        close(out, found[0][0], "output")
        close(grad, found[0][1], "gradient")
    assert (found[0][1] == 0).double().mean() > 0.2


def sage():
    return nn.SAGEConv(IN, 6)


def gat():
    return nn.GATConv(IN, 6)


def bytes_of(group, make, count):
    data, _, _ = part(group, "random")
    if count is not None:
        data = at_home(data, count)
    data.x.requires_grad_()
    conv = make().double()
    with pyg_sar.record_traffic(data.edge_index) as layers:
        conv(data.x, data.edge_index)[data.mask].sum().backward()
    (it,) = layers
    return it.forward_sent, it.forward_received, it.backward_sent, it.backward_received


@pytest.mark.parametrize("make", [sage, gat])
def test_rows_cross_once(pool, make):
    """The same bytes as in memory in mode 1, whatever the number of chunks."""
    expected = pool.run(3, bytes_of, make, None)
    for count in (1, 6):
        assert pool.run(3, bytes_of, make, count) == expected
    assert all(sent > 0 for sent, *_ in expected)


def budgets(group):
    """A budget gives all workers the same chunks, of the worker that needs most."""
    n, g = 4000, torch.Generator().manual_seed(0)
    edge_index = torch.stack([torch.randint(n, (40000,), generator=g), torch.randint(n, (40000,), generator=g)])
    mine = share(group, edge_index, (torch.arange(n) > 1500).long())
    data = Data(x=torch.randn(len(mine.src), 64), edge_index=mine.edge_index, y=mine.src % 4)
    torch.manual_seed(0)
    model = convert(network("sage", "none").float(), group)
    model.convs[0] = nn.SAGEConv(64, 6)
    few = offload(data, 2**26, WithoutEdges(model))
    many = offload(data, 2**21, WithoutEdges(model))
    return [len(d.x.place.ranges) for d in (few, many)]


def test_budgets(pool):
    one, two = pool.run(2, budgets)
    assert one == two and one[0] < one[1]


def refused(group, what):
    data, _, _ = part(group, "random")
    rank = group.rank()
    if what == "chunks":
        offload(data, chunks=(2, 0)[rank])
    elif what == "kinds":
        offload(data, chunks=2, home=(None, "/tmp")[rank])
    elif what == "folder":
        offload(data, chunks=2, home=("/tmp", "/no/such/folder")[rank])
    elif what == "in memory":
        data = offload(data, chunks=2, home=None)
        x = data.x if rank == 0 else data.x.host
        nn.SAGEConv(IN, 4).double()(x, data.edge_index)


@pytest.mark.parametrize(("what", "texts"), [
    ("chunks", ["Could not move rows home. rank 1: ValueError: .*'chunks' to be a positive integer"] * 2),
    ("kinds", ["differ in how rows are kept at home: .*chunks, homes in files, chunks, homes in memory"] * 2),
    ("folder", ["Could not move rows home. .*/no/such/folder"] * 2),
    ("in memory", ["rows at home", "rows at home"]),
])  # fmt: skip
def test_workers_that_part(pool, what, texts):
    """All raise at once, with what the others did."""
    for (kind, *told), text in zip(pool.outcomes(2, refused, what), texts, strict=True):
        assert kind == "error" and re.search(text, told[1]), told
        assert told[2] < 10


def fails(group, direction, how):
    """A worker raises, or is killed, between two chunks."""
    data, _, _ = part(group, "random")
    data = at_home(data, 4)
    conv, calls = nn.GATConv(IN, 6).double(), []
    if group.rank() == 1:
        fetch = slots.fetch

        def broken(*args):
            calls.append(args)
            if len(calls) == (2 if direction == "forward" else 6):
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("boom")
            return fetch(*args)

        slots.fetch = broken
    for _ in range(2):
        conv(data.x, data.edge_index)[data.mask].sum().backward()


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_worker_that_fails_in_a_pass(pool, direction, how):
    """The other one hears of it at the next rows or gradients that it waits for."""
    (kind, _, message, seconds), (other, *own) = pool.outcomes(2, fails, direction, how)
    assert (other, own[0]) == (("died", -signal.SIGKILL) if how == "killed" else ("error", "ValueError"))
    assert kind == "error" and "Lost the other workers" in message and seconds < 20, message


def test_halo_rows_die(pool):
    pool.run(2, homes)


def homes(group):
    """Nothing is left at home after a step; halo rows live as long as one pass of a layer."""
    data, _, _ = part(group, "random")
    data = at_home(data, 3)
    model, home, peaks = convert(network("gat", "batch"), group), data.x.place.home, []
    for _ in range(4):
        loss_of(model(data.x, data.edge_index, {}), data, group).backward()
        data.x.grad = None
        assert home.held == 0
        peaks.append(home.peak)
    assert len(set(peaks[1:])) == 1


NORMS = {
    "batch": lambda: pyg.BatchNorm(IN),
    "graph": lambda: pyg.GraphNorm(IN),
    "instance": lambda: pyg.InstanceNorm(IN, affine=True, track_running_stats=True),
    "pair": lambda: pyg.PairNorm(),
    "mean": lambda: pyg.MeanSubtractionNorm(),
    "layer": lambda: pyg.LayerNorm(IN),
}


def normalised(group, name):
    """Rows that lie far from zero; the last worker has none."""
    data, _, mine = part(group, "empty")
    whole, _ = inputs()
    torch.manual_seed(0)
    norm, reference = (NORMS[name]().double() for _ in range(2))
    norm = convert(torch.nn.Sequential(norm), group)
    data.x = data.x * 0.1 + 10
    data = at_home(data, 3)
    whole.x = (whole.x.detach() * 0.1 + 10).requires_grad_()
    weight = torch.randn(NUM_NODES, IN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out, expected = norm(data.x), reference(whole.x)
    taken = out[torch.arange(len(mine.src))]
    (taken * weight[mine.src]).sum().backward()
    (expected * weight).sum().backward()
    pyg_sar.sum_gradients(norm, group)
    close(taken, expected[mine.src], "output", 1e-9)
    close(host(data.x.grad), whole.x.grad[mine.src], "gradient", 1e-8)
    for p, q in zip(norm.parameters(), reference.parameters(), strict=True):
        close(p.grad, q.grad, "gradient of a parameter", 1e-9)
    for p, q in zip(norm.buffers(), reference.buffers(), strict=True):
        close(p, q, "statistics", 1e-9)


@pytest.mark.parametrize("name", NORMS)
def test_normalisations_see_all_workers(pool, name):
    for size in (1, 3):
        pool.run(size, normalised, name)


def tables(group):
    """Rows of a table of nodes, which is a parameter, meet rows at home; links need ordinary rows."""
    data, _, mine = part(group, "random")
    whole, _ = inputs()
    rows = torch.randn(NUM_NODES, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    reference, every = pyg.GCNConv(2 * IN, 4).double(), rows.clone().requires_grad_()
    for p in reference.parameters():
        torch.nn.init.uniform_(p, generator=torch.Generator().manual_seed(4))
    conv = copy.deepcopy(convert(reference, group))
    table = nn.NodeEmbedding(data, IN, group=group).double()
    data = at_home(data, 3)
    with torch.no_grad():
        table.weight.copy_(rows[mine.src])
    out = conv(torch.cat([table() + data.x, data.x * table()], -1), data.edge_index)
    expected = reference(torch.cat([every + whole.x, whole.x * every], -1), whole.edge_index)
    loss_of(out, data, group).backward()
    F.cross_entropy(expected[whole.mask], whole.y[whole.mask]).backward()
    close(out[torch.arange(len(mine.src))], expected[mine.src], "output")
    close(table.weight.grad, every.grad[mine.src], "gradient of the table")
    close(host(data.x.grad), whole.x.grad[mine.src], "gradient of rows")
    index, _ = pyg_sar.shard_links(torch.tensor([[0, 1, 2], [3, 4, 5]]), data.n_id, group=group)
    for take in (lambda: out[index[0]], lambda: out.index_select(0, index[0])):
        with pytest.raises(NotImplementedError, match=r"z\[torch.arange\(len\(z\)\)\]"):
            take()


def test_tables_of_nodes_beside_rows_at_home(pool):
    pool.run(2, tables)
