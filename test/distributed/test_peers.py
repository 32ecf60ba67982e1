"""What travels, what is alive, and how workers that lose each other end."""

import os
import weakref
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import some
from support.layers import TRAFFIC, Case
from support.messages import started
from support.nasty_graph import assignment, edges, share
from support.setup import setup

from pyg_sar import record_traffic
from pyg_sar.aggregate import aggregate, reduce_rows
from pyg_sar.distributed import transfer
from pyg_sar.distributed.peers import OneShot, OneShotSink, Peers, PeerSink
from pyg_sar.distributed.transfer import Channel
from pyg_sar.exchange import Routes
from pyg_sar.reduce import Extremum

MODES = (1, 2, 3)


def boundary(part, rank):
    """How many rows a worker reads from others, and how many reads of its own rows there are, from the edges alone."""
    src, dst = edges()
    reads = torch.unique(torch.stack([src, part[dst]])[:, part[src] != part[dst]], dim=1)
    return int((reads[1] == rank).sum()), int((part[reads[0]] == rank).sum())


def sizes(traffic):
    """Everything in a record but times, what is saved, and whose it is."""
    counts = {name: value for name, value in vars(traffic).items() if name not in ("saved", "layer")}
    return {name: value for name, value in counts.items() if not name.endswith("wait")}


def measure(group, mode, method):
    """Traffic of every layer, and what it must be."""
    rank, results = dist.get_rank(group), {}
    reads, serves = boundary(assignment(method, group.size()), rank)
    for name, case in TRAFFIC.items():
        it = setup(group, case, mode=mode, method=method)
        with record_traffic(it.share.edge_index) as records:
            it.loss().backward()
        (found,) = records
        row, again = case.width * 8, case.case_in(mode) == 2 and mode == 1
        expected = {
            "case": case.case_in(mode),
            "forward_received": reads * row,
            "forward_sent": serves * row,
            "backward_received": (serves + again * reads) * row,
            "backward_sent": (reads + again * serves) * row,
            **{f"{direction}_{what}": 0 for direction in ("forward", "backward") for what in ("loaded", "stored")},
        }
        results[name] = sizes(found), expected
        assert (found.forward_wait > 0) == (reads + serves > 0)
    return results


@pytest.mark.parametrize(("workers", "mode", "method"), some([2, 4], MODES, ["random", "empty"], every=2))
def test_every_layer_moves_the_boundary_rows_and_nothing_else(pool, workers, mode, method):
    for results in pool.run(workers, measure, mode, method):
        for name, (found, expected) in results.items():
            assert found == expected, name


SAVING = {
    **{name: TRAFFIC[name] for name in ("sage", "sage max", "gat")},
    "gatv2": Case("GATv2Conv", (8, 4), {"heads": 3}),
    "gatv2 shared": Case("GATv2Conv", (8, 4), {"heads": 3, "share_weights": True}),
    "transformer": Case("TransformerConv", (8, 4), {"heads": 3}),
    "rgcn bases": Case("RGCNConv", (8, 4, 5), {"num_bases": 2}, roles="t"),
}


def saves(group, mode):
    """Numbers saved by layers, for each own and each remote row."""
    found = {}
    for name, case in SAVING.items():
        it = setup(group, case, mode=mode)
        with record_traffic(it.share.edge_index) as records:
            it.loss()
            with torch.no_grad():
                it.loss()
        found[name] = records[0].saved / 8
        assert records[1].saved == 0
    return found, len(it.share.src), it.share.edge_index.graph.exchange.routes.num_halo


@pytest.mark.parametrize("mode", MODES)
def test_what_is_saved(pool, mode):
    """Beside parameters: of sums nothing, of maxima output and ties, of attention output, largest score and normaliser;
    own rows, and remote ones where they are kept. Rows that were projected are projected again where none are kept.
    """
    for found, own, remote in pool.run(3, saves, mode):
        kept = 0 if mode == 1 else own + remote
        softmax = 12 * own + 2 * 3 * own  # 3 heads of 4
        assert found == {
            "sage": 0,
            "sage max": 8 * (kept or own) + 2 * 8 * own,
            "gat": 15 * kept + softmax,
            "gatv2": 12 * kept + softmax,
            "gatv2 shared": 12 * (kept or own) + softmax,
            "transformer": 24 * kept + softmax,
            "rgcn bases": 8 * (kept or own),
        }


def sum_in_bf16(group, mode, prefetch):
    """A sum over rows that travel in bfloat16, and its gradient; each with what it must be, from the edges alone."""
    part, (src, dst) = assignment("random", group.size()), edges()
    mine = share(group, edges(), part, mode=mode, prefetch=prefetch, comm_dtype=torch.bfloat16)
    x, grad = torch.randn(2, len(part), 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = x[mine.src].requires_grad_()
    out = reduce_rows(mine.edge_index.graph, own, "sum")
    out.backward(grad[mine.dst])
    near = (part[src] == part[dst]).unsqueeze(1)
    total = torch.zeros_like(x).index_add(0, dst, torch.where(near, x[src], x.bfloat16().double()[src]))
    total_grad = torch.zeros_like(x)
    for reader in range(group.size()):
        there = part[dst] == reader
        read = torch.zeros_like(x).index_add(0, src[there], grad[dst[there]])
        total_grad += torch.where((part == reader).unsqueeze(1), read, read.bfloat16().double())
    return (out, total[mine.dst]), (own.grad, total_grad[mine.src])


@pytest.mark.parametrize(("mode", "prefetch"), [(1, 0), (1, 1), (2, 2), (3, 1)])
def test_bf16_on_the_wire_rounds_what_travels_and_nothing_else(pool, mode, prefetch):
    for pairs in pool.run(3, sum_in_bf16, mode, prefetch):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def traffic_and_gradients(group, mode, comm_dtype):
    """Traffic and gradients of every layer."""
    found = {}
    for name, case in TRAFFIC.items():
        it = setup(group, case, mode=mode, comm_dtype=comm_dtype)
        with record_traffic(it.share.edge_index) as records:
            it.loss().backward()
        found[name] = sizes(records[0]), it.grads()
    return found


@pytest.mark.parametrize("mode", MODES)
def test_bf16_on_the_wire_in_every_layer(pool, mode):
    wide, narrow = (pool.run(3, traffic_and_gradients, mode, comm_dtype) for comm_dtype in (None, torch.bfloat16))
    for exact, rough in zip(wide, narrow, strict=True):
        for name, (traffic, grads) in exact.items():
            found, rough_grads = rough[name]
            assert found == {k: n if k == "case" else n // 4 for k, n in traffic.items()}, name
            for key, grad in grads.items() if "max" not in name else ():  # there another row may win by rounding
                error = (rough_grads[key] - grad).norm() / grad.norm()
                assert error < 2**-6, (name, key)  # a rounded number is off by up to 2^-9


def test_one_worker_moves_nothing(pool):
    (results,) = pool.run(1, measure, 1, "random")
    for name, (found, _) in results.items():
        assert sum(found.values()) == found["case"], name


def measure_constants(group):
    """Traffic where the features, or all but the edge weights, are constants."""
    mine = share(group, edges(), assignment("random", group.size()))
    x, weight = torch.randn(len(mine.src), 8), torch.rand(len(mine.edge))
    root = TRAFFIC["sage sum"].build(dtype=torch.float32)
    found = {}
    with record_traffic(mine.edge_index) as records:
        root(x, mine.edge_index).sum().backward()
        reduce_rows(mine.edge_index.graph, x, "max")
        with torch.no_grad():
            root(x.clone().requires_grad_(), mine.edge_index)
        reduce_rows(mine.edge_index.graph, x, "sum", weight.requires_grad_()).sum().backward()
    reads, serves = boundary(assignment("random", group.size()), dist.get_rank(group))
    for name, record in zip(("sage", "max", "no_grad", "weights"), records, strict=True):
        assert record.forward_received == reads * 8 * 4
        found[name] = record.backward_received, record.backward_sent
    assert weight.grad is not None
    return found, (reads * 8 * 4, serves * 8 * 4)


def test_inputs_without_gradient_cause_no_backward_traffic(pool):
    for found, once in pool.run(3, measure_constants):
        assert found["sage"] == found["max"] == found["no_grad"] == (0, 0)
        assert found["weights"] == once  # the weights' gradient needs the rows, but no gradient of rows goes home


class Memory(bytearray):
    """Memory of a tensor that can be watched by a weak reference, however many views of it there are."""


class Watch:
    """Counts the remote blocks that are alive whenever another one is made."""

    def __init__(self):
        self.rows, self.grads, self.peak, self.widest = [], [], {"rows": 0, "grads": 0}, 0
        self.pushing = False

    @contextmanager
    def __call__(self):
        self.peak = {"rows": 0, "grads": 0}
        make = Channel.buffer

        def buffer(channel, rows, like, dtype=None):
            size = make(channel, rows, like, dtype)
            if size.numel() == 0:
                return size
            memory = Memory(size.numel() * size.element_size())
            self.widest = max(self.widest, size.size(1))
            kind = "grads" if self.pushing else "rows"
            getattr(self, kind).append(weakref.ref(memory))
            self.peak[kind] = max(self.peak[kind], self.alive(kind))
            return torch.frombuffer(memory, dtype=size.dtype).view_as(size)

        def watched(push):
            def pushing(sink, q, grad):
                self.pushing = True
                push(sink, q, grad)
                self.pushing = False

            return pushing

        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(Channel, "buffer", buffer))
            for sink in (PeerSink, OneShotSink):
                patches.enter_context(mock.patch.object(sink, "push", watched(sink.push)))
            yield

    def alive(self, kind="rows"):
        return sum(ref() is not None for ref in getattr(self, kind))


def watch_blocks(group, name, mode, prefetch, columns=128):
    it, watch = setup(group, TRAFFIC[name], mode=mode, prefetch=prefetch), Watch()
    with mock.patch("pyg_sar.reduce.base.COLUMNS", columns):
        with watch():
            loss = it.loss()
        forward, kept = watch.peak, watch.alive()
        with watch():
            loss.backward(retain_graph=True)
        backward, left = watch.peak, watch.alive()
    del loss
    assert watch.widest <= columns + (name == "gat")  # and the key of a head
    return forward, kept, backward, left, watch.alive() + watch.alive("grads")


@pytest.mark.parametrize("columns", [4, 128])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("name", ["gat", "sage sum", "sage max", "gcn learnt"])
def test_blocks_alive_in_mode_1(pool, name, prefetch, columns):
    """Not more than prefetch + 1 of the 3 remote blocks, and as many gradients of blocks under way; if rows are cut,
    of their parts.
    """
    again = TRAFFIC[name].case == 2
    for forward, kept, backward, left, end in pool.run(4, watch_blocks, name, 1, prefetch, columns):
        assert forward == {"rows": prefetch + 1, "grads": 0}
        assert kept == 0
        assert backward == {"rows": again * (prefetch + 1), "grads": prefetch + 1}
        assert (left, end) == (0, 0)


@pytest.mark.parametrize(("mode", "blocks"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("name", ["gat", "sage"])
def test_blocks_alive_in_modes_2_and_3(pool, name, mode, blocks):
    """Case 2 keeps all of them until backward, case 1 none."""
    needed = TRAFFIC[name].case == 2
    for _, kept, backward, left, end in pool.run(4, watch_blocks, name, mode, 1):
        assert kept == left == needed * blocks  # the graph is retained
        assert backward["rows"] == 0
        assert end == 0


def watch_inference(group, mode, context):
    graph, watch = share(group, edges(), assignment("random", group.size()), mode=mode).edge_index.graph, Watch()
    x = torch.rand(graph.num_src, 8, requires_grad=True)
    with watch(), context():
        out = aggregate(graph, Extremum(1), x)
    assert not out.requires_grad
    return watch.peak["rows"], watch.alive()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(pool, context):
    """In mode 2 either, although the input requires a gradient."""
    assert pool.run(4, watch_inference, 2, context) == [(2, 0)] * 4


def lonely(group, mode):
    """Only rank 0 reads, from rank 1; rank 2 has nothing to say to anybody."""
    edge_index, part = torch.tensor([[1, 1, 2, 0], [0, 0, 2, 0]]), torch.arange(3)
    mine = share(group, edge_index, part, mode=mode)
    x = torch.full((1, 2), float(dist.get_rank(group) + 1), requires_grad=True)
    with record_traffic(mine.edge_index) as records, started(transfer) as sent:
        reduce_rows(mine.edge_index.graph, x, "sum").sum().backward()
    return x.grad[0, 0].item(), len(sent), records[0].forward_received, records[0].backward_received


@pytest.mark.parametrize("mode", MODES)
def test_nothing_empty_travels(pool, mode):
    assert pool.run(3, lonely, mode) == [(1.0, 2, 8, 0), (2.0, 2, 0, 8), (1.0, 0, 0, 0)]


def test_order_of_blocks():
    """Local blocks come first where others are fetched, to hide the first of these, and last where gradients travel
    before them.
    """
    peers = Peers(Routes(1, (), (2, 4, 3)), SimpleNamespace(group=None))
    early, late = [1, 2, 0], [2, 0, 1]
    assert peers.order(2) == [early, early]
    assert peers.order(2, backward=True) == [early, late]
    assert peers.order(2, backward=True, fetches=False) == [late, late]


class Note(Channel):
    """A channel that sends nothing and notes what it is asked for."""

    def __init__(self, comm_dtype=None):
        super().__init__(None, comm_dtype)
        self.begun, self.swaps = [], []

    def begin(self, about, peers, device, meter):
        super().begin(None, peers, device, meter)
        self.begun.append((about, list(peers)))

    def swap(self, out, dst, into, src, what, meter):
        self.swaps.append((dst, src))
        return []


def of_three(kind, prefetch=1, comm_dtype=None, num_src=(2, 2, 2)):
    """Worker 0 of three, which owns two rows and serves both to each worker from which it reads."""
    rows = torch.arange(2)
    serve = [rows[:0] if q == 0 or n == 0 else rows for q, n in enumerate(num_src)]
    return kind(Routes(0, tuple(serve), num_src), Note(comm_dtype), prefetch)


@pytest.mark.parametrize(("prefetch", "under_way"), [(0, [0, 0, 0]), (1, [1, 1, 0]), (2, [2, 1, 0])])
def test_blocks_under_way_while_one_is_consumed(prefetch, under_way):
    """As many as are prefetched, of those that are left; while the local block is consumed, too."""
    peers = of_three(Peers, prefetch)
    found = []
    for consumed, _ in enumerate(peers.pull([torch.ones(2, 1)], peers.order(1), vars)):
        found.append(len(peers.channel.swaps) - consumed)
    assert found == under_way


def test_who_hears_of_a_turn():
    """Those with whom rows are exchanged, once in each pass."""
    about = object()
    for kind in (Peers, OneShot):
        exchange = of_three(kind, num_src=(2, 0, 2))
        list(exchange.pull([torch.ones(2, 1)] * 2, exchange.order(2), vars, about))
        sink = exchange.sink(vars, SimpleNamespace(add_grad=lambda *given: None), about)
        if kind is OneShot:
            sink.push(0, torch.ones(4, 1))
            sink.push(0, torch.ones(4, 1))
        turns = 1 if kind is Peers else 2
        assert exchange.channel.begun == [(about if turn == 0 else None, [2]) for turn in range(turns)] * 2


def test_used_rows_are_told_in_a_turn_of_their_own():
    exchange = of_three(Peers)
    exchange.exchange_used_rows(torch.tensor([True, False, True, True]))
    assert (exchange.channel.turn, exchange.channel.begun) == (1, [(None, [1, 2])])


def test_rows_of_others_keep_the_type_in_which_rows_are_sent():
    exchange = of_three(Peers, comm_dtype=torch.bfloat16)
    assert exchange.reroute(exchange.routes).channel.comm_dtype == torch.bfloat16
    assert exchange.reroute(exchange.routes, exact=True).channel.comm_dtype is None


def largest(group):
    exchange = share(group, edges(), assignment("random", group.size())).edge_index.graph.exchange
    return exchange.all_reduce_max([dist.get_rank(group), 7])


def test_largest_values_of_all_workers(pool):
    assert pool.run(2, largest) == [[1, 7]] * 2


# Workers that lose each other; the pool tells who did not end.


def impatient(group):
    return dist.new_group(range(group.size()), timeout=timedelta(seconds=1))


def fail(group, where, mode, name="gat"):
    """Rank 1 raises or exits in its forward or backward pass."""
    it, rank = setup(group, TRAFFIC[name], mode=mode), dist.get_rank(group)
    end = os._exit if where.startswith("exit") else None

    def boom(*args):
        raise ValueError("boom") if end is None else end(3)

    def second(x, *args, **kwargs):
        x = type(it.layer).forward(it.layer, x, *args)
        if rank == 1 and where.endswith("forward"):
            boom()
        if rank == 1:
            x.register_hook(boom)
        return it.layer.forward_again(x, *args)

    again = Case("GATConv", (12, 4), TRAFFIC[name].kwargs).build()
    it.layer.forward_again = again.forward
    it.layer.forward = second
    it().sum().backward()


@pytest.mark.parametrize(
    ("where", "mode"), some(["forward", "backward", "exit in forward", "exit in backward"], (1, 3), every=2)
)
def test_others_end_with_the_first(pool, where, mode):
    """Long before the timeout of 30 seconds, in which the pool would cut them off."""
    outcomes = pool.outcomes(4, fail, where, mode, timeout=20)
    first = outcomes.pop(1)
    assert first == ("died", 3) if where.startswith("exit") else first[:3] == ("error", "ValueError", "boom")
    for outcome in outcomes:
        assert outcome[:2] == ("error", "LostWorkers")
        assert "Lost the other workers while" in outcome[2]
        assert "the first error among all ranks" in outcome[2]


def disagree(group, what, mode):
    """Rank 1 does something else than the others."""
    group = impatient(group) if what == "layers" else group  # others need not wait
    odd = dist.get_rank(group) == 1
    size = {"width": (12, torch.float32), "type": (8, torch.float64), "bytes": (4, torch.float64)}
    width, dtype = size.get(what, (8, torch.float32)) if odd else (8, torch.float32)
    mine = share(group, edges(), assignment("random", 4), mode=3 if what == "mode" and odd else mode)
    x = torch.randn(len(mine.src), width, dtype=dtype, requires_grad=not (odd and what == "requires_grad"))
    graph = mine.edge_index.graph
    for _ in range(1 if odd and what == "layers" else 2):
        out = reduce_rows(graph, x, "max" if what == "mode" else "sum")
    out.sum().backward() if out.requires_grad else None
    return out


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("width", 1),
        ("type", 1),
        ("requires_grad", 3),
        ("layers", 1),
        *(pytest.param(*it, marks=pytest.mark.grid) for it in (("width", 3), ("bytes", 1), ("requires_grad", 1))),
    ],
)
def test_workers_that_disagree_end(pool, what, mode):
    """With an error on those that wait for another, never an abort, and never a result from somebody else's bytes."""
    outcomes = pool.outcomes(4, disagree, what, mode, timeout=20)
    if what == "layers":  # it has done all that it wanted, perhaps
        assert outcomes.pop(1)[0] in ("error", "ok")
    for rank, outcome in enumerate(outcomes):
        assert outcome[:2] == ("error", "LostWorkers" if what == "layers" else "RuntimeError"), outcome
        assert "inputs of the same width, 'dtype' and 'requires_grad'" in outcome[2]
        assert "worker " in outcome[2]
        assert what == "layers" or outcome[2].startswith(f"[rank {rank}] This worker runs rows of ")


def test_workers_in_different_modes_end(pool):
    outcomes = pool.outcomes(4, disagree, "mode", 1, timeout=20)
    for rank, outcome in enumerate(outcomes):
        assert outcome[:2] == ("error", "RuntimeError"), outcome
        mine, theirs = (3, 1) if rank == 1 else (1, 3)
        assert outcome[2].startswith(f"[rank {rank}] This worker runs ")
        assert all(f"gradients of rows, mode {mode})" in outcome[2] for mode in (mine, theirs))
