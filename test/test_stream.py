"""The streaming loop as a citizen of autograd: every layer x mode on several workers."""

import copy
import weakref
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.any_message import Message
from support.cases import some
from support.layers import TRAFFIC, Case
from support.nasty_graph import assignment, close, edges, share
from support.setup import setup, whole
from torch.multiprocessing.reductions import StorageWeakRef

from pyg_sar import shard
from pyg_sar.aggregate import aggregate, aggregate_async, reduce_rows
from pyg_sar.context import Backward
from pyg_sar.distributed.transfer import Channel, Transfer
from pyg_sar.linear import linear_grad, product
from pyg_sar.nn import GATConv, GCNConv, RGCNConv, SAGEConv
from pyg_sar.reduce import Extremum, Sum, Tile

MODES = (1, 2, 3)
every_mode = pytest.mark.parametrize("mode", MODES)


def same(found, expected, what):
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        close(found[name], value, f"{what}: {name}")


def backward_twice(group, mode):
    for name, case in TRAFFIC.items():
        it = setup(group, case, mode=mode)
        loss = it.loss()
        loss.backward(retain_graph=True)
        first = it.grads()
        assert "x" in first
        loss.backward()
        same(it.grads(), first, name)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@every_mode
def test_backward_twice_gives_the_same(pool, mode):
    pool.run(3, backward_twice, mode)


def some_gradients(group, mode, columns):
    with mock.patch("pyg_sar.reduce.base.COLUMNS", columns):
        for name, case in TRAFFIC.items():
            it = setup(group, case, mode=mode)
            it.loss().backward()
            expected = it.grads()
            for chosen in (["x"], *([n] for n in expected), [n for n in expected if n != "x"]):
                got = torch.autograd.grad(it.loss(), [it.leaves()[n] for n in chosen])
                same(dict(zip(chosen, got, strict=True)), {n: expected[n] for n in chosen}, f"{name} {chosen}")
            assert it.grads() == {}


@pytest.mark.parametrize(("mode", "columns"), some(MODES, [2, 128], every=2))
def test_gradients_of_inputs_only_and_of_parameters_only(pool, mode, columns):
    pool.run(3, some_gradients, mode, columns)


def frozen(group, mode):
    """What needs no gradient changes none of the others."""
    with mock.patch("pyg_sar.reduce.base.COLUMNS", 2):
        for name, case in TRAFFIC.items():
            it = setup(group, case, mode=mode)
            it.loss().backward()
            expected, leaves = it.grads(), it.leaves()
            for left, leaf in leaves.items():
                leaf.requires_grad_(False)
                it.loss().backward()
                same(it.grads(), {n: g for n, g in expected.items() if n != left}, f"{name} without {left}")
                leaf.requires_grad_(True)


@every_mode
def test_frozen_inputs_and_parameters(pool, mode):
    pool.run(2, frozen, mode)


def meanwhile(group):
    """Return what happens one after the other in a layer of two parts."""
    it, events = setup(group, TRAFFIC["sage"]), []

    def tell(name, function):
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    with (
        mock.patch("pyg_sar.reduce.base.COLUMNS", 2),
        mock.patch("pyg_sar.sources.product", tell("make", product)),
        mock.patch("pyg_sar.sources.linear_grad", tell("take", linear_grad)),
        mock.patch.object(Channel, "swap", tell("send", Channel.swap)),
        mock.patch.object(Transfer, "wait", tell("wait", Transfer.wait)),
        mock.patch.object(SAGEConv, "root", tell("root", SAGEConv.root)),
    ):
        loss = it.loss()
        forward = list(events)
        events.clear()
        it.layer.lin_r.weight.register_hook(lambda grad: events.append("root"))
        loss.backward()
    return forward, events


def test_rows_are_made_and_others_computed_while_messages_travel(pool):
    # To send and to receive are waited for one after the other.
    for forward, backward in pool.run(2, meanwhile):
        assert forward == ["make", "send", "make", "send", "root", "wait", "wait", "wait", "wait"]
        assert backward == ["send", "send", "wait", "wait", "take", "root", "wait", "wait", "take"]


def nobody_asks(group):
    """Return how many messages began and were waited for in a backward pass that no source row is asked for."""
    it, counts = setup(group, TRAFFIC["gat"]), Counter()
    swap, wait = Channel.swap, Transfer.wait

    def begin(*args):
        transfers = swap(*args)
        counts["begun"] += len(transfers)
        return transfers

    def end(transfer):
        counts["waited for"] += 1
        wait(transfer)

    loss = it.loss()
    with mock.patch.object(Channel, "swap", begin), mock.patch.object(Transfer, "wait", end):
        torch.autograd.grad(loss, [it.layer.att_dst])
    return counts


def test_gradients_that_nobody_asks_for_are_waited_for(pool):
    for counts in pool.run(3, nobody_asks):
        assert counts["begun"] == counts["waited for"] > 0


def accumulate(group, mode):
    """Two graphs, two inputs and one layer: apart, in turn, nested and summed."""
    for name, case in TRAFFIC.items():
        first, second = (setup(group, case, mode=mode, seed=s) for s in (0, 1))
        second.layer = first.layer
        parts = []
        for it in (first, second):
            it.loss().backward()
            parts.append(it.grads())
        weights = {n for n in parts[0] if n != "x" and not n.startswith("extra")}
        both = {n: parts[0][n] + parts[1][n] if n in weights else parts[0][n] for n in parts[0]}

        first.loss().backward()
        second.loss().backward()
        same(first.grads(), both, f"{name}, accumulated")
        second.grads()
        loss = first.loss()
        (loss + second.loss()).backward()
        same(first.grads(), both, f"{name}, one backward")
        second.grads()


@every_mode
def test_several_graphs_and_accumulation(pool, mode):
    pool.run(3, accumulate, mode)


def twice_in_one_model(group, mode):
    """The same layer twice in one forward pass, as in PyG on the whole graph."""
    for name, case in TRAFFIC.items():
        width, heads = (4, {"heads": 2}) if "heads" in case.kwargs else (8, {})
        square = Case(case.layer, (8, width, *case.args[2:]), {**case.kwargs, **heads}, case.roles, case.learn)
        results = []
        for it in (setup(group, square, mode=mode), whole(square)):
            inner = it.layer
            it.layer = torch.nn.Module()
            it.layer.inner, it.layer.forward = inner, lambda x, *rest, f=inner: f(f(x, *rest).relu(), *rest)
            it.loss().backward()
            results.append((it.share, it.grads()))
        (mine, found), (_, expected) = results
        for key, value in expected.items():
            if key == "x":
                value = value[mine.src]
            elif key.startswith("extra"):
                value = value[mine.edge]
            else:
                dist.all_reduce(found[key], group=group)
            close(found[key], value, f"{name} {key}")


@every_mode
def test_same_layer_twice(pool, mode):
    pool.run(3, twice_in_one_model, mode)


def in_place(group, mode):
    """Changing an output in place gives PyG's gradients or torch's own error."""
    for name, case in TRAFFIC.items():
        for bias in (True, False):
            plain = Case(case.layer, case.args, {**case.kwargs, "bias": bias}, case.roles, case.learn)
            it = setup(group, plain, mode=mode)
            it().relu().sum().backward()
            expected = it.grads()
            it().relu_().sum().backward()
            same(it.grads(), expected, f"{name} bias={bias}")


@every_mode
def test_outputs_may_be_changed_in_place(pool, mode):
    pool.run(2, in_place, mode)


def change_too_early(group, mode):
    """What backward reads was changed between forward and backward."""
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    graph = mine.edge_index.graph
    x = torch.rand(len(mine.src), 3, requires_grad=True)
    refused = 0
    for reduce, change in ((Extremum(1), "out"), (Extremum(1), "x")):
        h = x * 1
        out = aggregate(graph, reduce, h)
        loss = out.sum()
        with torch.no_grad():
            (out if change == "out" else h).mul_(2)
        try:
            (got,) = torch.autograd.grad(loss, x)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            refused += 1
        else:  # backward has a copy of its own
            (expected,) = torch.autograd.grad(aggregate(graph, reduce, x * 1).sum(), x)
            close(got, expected, change)
    return refused


@every_mode
def test_changes_of_what_backward_reads_are_noticed(pool, mode):
    assert pool.run(2, change_too_early, mode) == [1 if mode == 3 else 2] * 2


def sums_read_nothing(group):
    """Case 1 does not read its input again, so that it may be changed."""
    mine = share(group, edges(), assignment("random", group.size()))
    x = torch.rand(len(mine.src), 3, requires_grad=True)
    h = x * 1
    loss = aggregate(mine.edge_index.graph, Sum(), h).sum()
    h.data.zero_()
    with torch.no_grad():
        h.zero_()
    loss.backward()
    close(x.grad, torch.autograd.grad(aggregate(mine.edge_index.graph, Sum(), x).sum(), x)[0], "x")


def test_sums_do_not_keep_their_input(pool):
    pool.run(2, sums_read_nothing)


def twice_differentiable(group, mode):
    for case in TRAFFIC.values():
        it = setup(group, case, mode=mode)
        with pytest.raises(RuntimeError, match="no second derivative"):
            # The gradient of the output is a constant: torch's own check would let it pass, and be wrong.
            torch.autograd.grad(it().sum(), it.x, create_graph=True)


@every_mode
def test_second_derivatives_are_refused(pool, mode):
    pool.run(2, twice_differentiable, mode)


def infer_first(group, mode, context):
    """What inference leaves behind on the graph must serve training."""
    for name, case in TRAFFIC.items():
        expected, it = setup(group, case, mode=mode), setup(group, case, mode=mode)
        with context():
            out = it()
        assert not out.requires_grad
        loss = expected.loss()
        close(out, expected(), name)
        loss.backward()
        it.loss().backward()
        same(it.grads(), expected.grads(), name)


@every_mode
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_before_training(pool, mode, context):
    pool.run(2, infer_first, mode, context)


def test_edge_types_made_in_inference_mode():
    edge_index = edges()
    types = torch.zeros(edge_index.size(1), dtype=torch.long)
    conv, graph, x = RGCNConv(8, 4, 2), shard(edge_index, 61, 2), torch.rand(61, 8)
    with torch.inference_mode():
        close(conv(x, graph, types.clone()), conv(x, edge_index, types), "output", 1e-5)


def layouts(group, mode):
    """Inputs that are not contiguous, and a batch of node features on one graph."""
    n, part = 61, assignment("random", group.size())
    whole_x = torch.rand(2, 8, n, dtype=torch.float64)
    mine = share(group, edges(), part, mode=mode)
    ways = {
        "transposed": (whole_x[0].t(), whole_x[0][:, mine.src].t()),
        "strided": (whole_x.movedim(-1, 0)[:, 0], whole_x[:, :, mine.src].movedim(-1, 0)[:, 0]),
        "expanded": (torch.ones(n, 8).double(), torch.ones(1, 1).double().expand(len(mine.src), 8)),
        "batch": (whole_x.mT.contiguous(), whole_x[:, :, mine.src].mT),
    }
    for conv in (SAGEConv(8, 4), SAGEConv(8, 4, aggr="max"), GCNConv(8, 4), GATConv(8, 4)):
        conv = conv.double()
        for way, (x, x_mine) in ways.items():
            if way == "batch" and isinstance(conv, GATConv):
                continue
            x_mine = x_mine.detach().requires_grad_()
            out, expected = conv(x_mine, mine.edge_index), conv(x, edges())
            close(out, expected.index_select(-2, mine.dst), f"{conv} {way}")
            out.sum().backward()
            assert x_mine.grad.shape == x_mine.shape


@every_mode
def test_layouts(pool, mode):
    pool.run(2, layouts, mode)


class Watched(Sum):
    """A sum with learnt weights that notes what is alive of the tensors it knows whenever it sees others."""

    def __init__(self):
        super().__init__(learn_weight=True)
        self.known, self.alive = [], []

    def note(self, event, **tensors):
        self.alive.append((event, {name for name, ref in self.known if ref() is not None}))
        self.known += [(name, weakref.ref(t)) for name, t in tensors.items()]

    def init(self, x, num_dst):
        state = super().init(x, num_dst)
        self.note("init", state=state)
        return state

    def step(self, state, block, x, rows):
        self.note("step", x=x)
        return super().step(state, block, x, rows)

    def finish(self, state, dtype):
        out = state.clone()
        self.note("finish", out=out)
        return out, ()

    def prepare(self, saved, out):
        prepared = out.clone()
        self.note("prepare", grad=out, prepared=prepared)
        return (prepared,)

    def grad(self, block, x, *args):
        self.note("grad", x=x)
        d_x, d_rows = super().grad(block, x, *args)
        self.known += [("d_x", weakref.ref(d_x)), ("d_weight", weakref.ref(d_rows.edge[0]))]
        return d_x, d_rows


def test_nothing_outlives_its_block_or_its_tile():
    graph, reduce = shard(edges(), 61, 3).graph, Watched()
    x, weight = torch.rand(61, 4, requires_grad=True), torch.rand(graph.num_edges, requires_grad=True)
    push = Backward.push

    def noted(run, q, d_x):
        reduce.note("push")
        push(run, q, d_x)

    with mock.patch("pyg_sar.reduce.base.COLUMNS", 2), mock.patch.object(Backward, "push", noted):
        aggregate(graph, reduce, x, edge=[weight]).sum().backward()
    state, grads = {"state"}, {"grad", "prepared"}
    expected = {"init": set(), "step": state, "finish": state, "prepare": set(), "grad": grads, "push": grads | {"d_x"}}
    forward, backward = ["init", *["step"] * 3, "finish"], ["prepare", *["grad", "push"] * 3]
    assert [event for event, _ in reduce.alive] == 2 * forward + 2 * backward
    for event, alive in reduce.alive:
        assert alive == expected[event], event


class Condensed(Sum):
    """A sum that saves its output, of which backward reads nothing after `condense`."""

    saves_output = True

    def __init__(self):
        super().__init__()
        self.output, self.dead = None, []

    def condense(self, saved, result, out):
        assert result.shape == out.shape
        return saved

    def grad(self, *args):
        self.dead.append(self.output.expired())
        return super().grad(*args)


@pytest.mark.parametrize("retain", [True, False])
def test_the_output_dies_when_backward_begins(retain):
    """Unless somebody may run backward again."""
    graph, reduce = shard(edges(), 61, 3).graph, Condensed()
    x = torch.rand(61, 4, requires_grad=True)
    out = aggregate(graph, reduce, x)
    reduce.output = StorageWeakRef(out.untyped_storage())
    loss = out.sum()
    del out
    loss.backward(retain_graph=retain)
    assert reduce.dead == [not retain] * 3
    if retain:
        loss.backward()
        assert reduce.dead[3:] == [True] * 3


class Half(Message):
    """Rows times a constant, in two tiles that read half of it each."""

    optional = frozenset({0})

    def __init__(self, columns=slice(0, 4)):
        self.columns = columns
        super().__init__(lambda block, x, rows: x[block.col] * rows.const[0], (columns.stop - columns.start,))

    def tiles(self, like, rows, num_blocks):
        halves = slice(0, 2), slice(2, 4)
        return [Tile(k, Half(half), half, half, like[:, half]) for k, half in enumerate(halves)]

    def narrow(self, rows):
        return rows._replace(const=[None if t is None else t[self.columns] for t in rows.const])


def test_gradients_of_optional_constants_are_those_of_all_tiles():
    graph = shard(edges(), 61, 3).graph
    x, factor = torch.rand(61, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(aggregate(graph, Half(), x, const=[factor]).square().sum(), factor)
    (expected,) = torch.autograd.grad((aggregate(graph, Sum(), x) * factor).square().sum(), factor)
    close(found, expected, "factor")


def test_an_optional_constant_that_no_block_reads_has_no_gradient():
    graph = shard(edges(), 61, 3).graph
    x, unread = torch.rand(61, 4, requires_grad=True), torch.rand(2, requires_grad=True)
    reduce = Message(lambda block, x, rows: x[block.col], (4,))
    for optional in (False, True):
        reduce.optional = frozenset({0} if optional else ())
        (grad,) = torch.autograd.grad(aggregate(graph, reduce, x, const=[unread]).sum(), unread, allow_unused=True)
        assert grad is None if optional else grad.tolist() == [0, 0]


def test_messages_that_read_nothing_give_no_gradient():
    graph, x = shard(edges(), 61, 3).graph, torch.rand(61, 4, requires_grad=True)
    out = aggregate(graph, Message(lambda block, x, rows: torch.ones(block.num_edges, 4), (4,)), x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.any() and not grad.any()


def test_rows_take_the_wider_type_of_weights():
    graph, x = shard(edges(), 61, 3).graph, torch.rand(61, 2)
    weight = torch.rand(graph.num_edges, dtype=torch.float64)
    close(reduce_rows(graph, x, "sum", weight), reduce_rows(graph, x.double(), "sum", weight), "sum")


def test_messages_are_made_without_autocast():
    """As backward makes them again."""
    graph, x = shard(edges(), 61, 3).graph, torch.rand(61, 4, dtype=torch.float32)
    weight = torch.rand(4, 4, dtype=torch.float32)
    reduce = Message(lambda block, x, rows: x[block.col] @ rows.const[0], (4,))
    expected = aggregate(graph, reduce, x, const=[weight])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(aggregate(graph, reduce, x, const=[weight]), expected)


@pytest.mark.parametrize(("reduce", "fetches"), [(Sum(), False), (Extremum(1), True)])
def test_backward_has_an_order_of_its_own(reduce, fetches):
    """In which gradients are pushed, and rows fetched in case 2 alone."""
    graph, x = shard(edges(), 61, 3).graph, torch.rand(61, 4, requires_grad=True)
    asked = copy.copy(graph.exchange)
    asked.order = mock.Mock(wraps=asked.order)
    with mock.patch("pyg_sar.reduce.base.COLUMNS", 2):
        aggregate(graph.replace(exchange=asked), reduce, x).sum().backward()
    assert [call.args for call in asked.order.call_args_list] == [(2,), (2, True, fetches)]


def test_an_aggregation_is_waited_for_once():
    graph, x = shard(edges(), 61, 2).graph, torch.rand(61, 4)
    pending = aggregate_async(graph, Sum(), x)
    assert torch.equal(pending.wait(), aggregate(graph, Sum(), x))
    with pytest.raises(RuntimeError, match="'wait' was called twice"):
        pending.wait()


def wrong_rows(group, mode):
    mine = share(group, edges(), assignment("random", group.size()), mode=mode)
    graph, x = mine.edge_index.graph, torch.rand(len(mine.src), 2)
    for arguments, says in (
        ((x[1:],), f"{len(x)} source rows"),
        ((x, [x[1:]]), f"{len(x)} destinations"),
        ((x, [], [x]), f"{graph.num_edges} edges"),
    ):
        with pytest.raises(ValueError, match=f"rank {dist.get_rank(group)}.*{says}"):
            aggregate(graph, Sum(), *arguments)


@every_mode
def test_tensors_of_the_wrong_length_are_refused_with_the_rank(pool, mode):
    pool.run(2, wrong_rows, mode)
