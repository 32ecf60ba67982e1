"""Workers that part say so at once, with the names of both layers; those that do not are left in peace."""

import copy
import gc
from contextlib import suppress
from itertools import chain
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.cases import some
from support.messages import started
from support.nasty_graph import NUM_NODES, assignment, edges, share
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pyg_sar
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed import guard
from pyg_sar.distributed.group import ABANDONED
from pyg_sar.distributed.simulated import Workers
from pyg_sar.edge_index import ShardedEdgeIndex

X = torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(0))


class Net(torch.nn.Module):
    """Two equal layers and a head."""

    def __init__(self, nn=pyg_sar.nn, kind="GATConv", classes=3):
        super().__init__()
        self.convs = torch.nn.ModuleList([getattr(nn, kind)(8, 8), getattr(nn, kind)(8, 8)])
        self.head = torch.nn.Linear(8, classes)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.head(x)


def workers(size, work, method="random", mode=1, models=None, **options):
    """Run ``work(rank, model, x, edge_index)`` on simulated workers whose models are alike."""
    part = assignment(method, size)
    topologies = list(split(edges(), part, part, size))
    torch.manual_seed(0)
    model = Net(**options)
    models = models or [copy.deepcopy(model) for _ in range(size)]

    def run(rank):
        graph = ShardedEdgeIndex(assemble(topologies[rank], rank, remat=mode == 1))
        return work(rank, models[rank], X[topologies[rank].src_id], graph.merge() if mode == 3 else graph)

    return Workers(size).run(run)


def errors(found):
    """Return the messages of workers, all of which raised."""
    for rank, error in enumerate(found):
        assert isinstance(error, RuntimeError), error
        assert str(error).startswith(f"[rank {rank}] ")
        assert "Lost the other workers" not in str(error)
    return list(map(str, found))


def swapped(rank, model, x, edge_index):
    first, second = reversed(model.convs) if rank == 1 else model.convs

    class Swapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, edge_index):
            return second(first(x, edge_index), edge_index)

    return Swapped()(x, edge_index)


@pytest.mark.parametrize(
    ("size", "mode", "nn", "kind"),
    [
        (2, 1, pyg_sar.nn, "GATConv"),
        (3, 1, pyg_sar.nn, "GATConv"),
        (4, 1, pyg_sar.nn, "SAGEConv"),
        (2, 2, pyg_sar.nn, "GATConv"),
        (4, 3, pyg_sar.nn, "GATConv"),
        (3, 1, torch_geometric.nn, "GATConv"),
        (4, 1, torch_geometric.nn, "SAGEConv"),
    ],
)
def test_two_equal_layers_in_another_order(size, mode, nn, kind):
    for text in errors(workers(size, swapped, mode=mode, nn=nn, kind=kind)):
        assert f"'model.convs.0' ({kind})" in text and f"'model.convs.1' ({kind})" in text
        assert "must call the same layers in the same order" in text


def order(group):
    part = assignment("random", group.size())
    mine = share(group, edges(), part)
    torch.manual_seed(0)
    return swapped(dist.get_rank(group), Net(), X[mine.src], mine.edge_index)


def test_processes_hear_of_it_at_once(pool):
    """Also those who run what most others run."""
    for rank, outcome in enumerate(pool.outcomes(4, order, timeout=20)):
        assert outcome[:2] == ("error", "RuntimeError"), outcome
        assert outcome[2].startswith(f"[rank {rank}] This worker runs layer 'model.convs.{int(rank == 1)}' (GATConv)")
        assert f"'model.convs.{int(rank != 1)}' (GATConv)" in outcome[2]
        assert outcome[3] < 10  # the timeout of the group is 30 seconds; the machine may be busy


@pytest.mark.parametrize("nn", [pyg_sar.nn, torch_geometric.nn])
@pytest.mark.parametrize("mode", [1, 3])
def test_widths_of_labels(mode, nn):
    def work(rank, model, x, edge_index):
        torch.nn.Module.__init__(model)
        model.last = nn.GCNConv(8, 5 if rank == 1 else 7)
        model.forward = lambda *given: model.last(*given)
        return model(x, edge_index)

    for rank, text in enumerate(errors(workers(3, work, mode=mode))):
        mine, theirs = (5, 7) if rank == 1 else (7, 5)
        assert f"runs layer 'last' (GCNConv) on rows of {mine} columns" in text and f"rows of {theirs} columns" in text
        assert "must not be taken from a worker's own labels" in text


def train(
    rank, model, x, edge_index, steps=3, lr=0.01, optimizer=torch.optim.Adam, summing="once", told=False, passes=1,
    none=True, broadcast=False, **options,
):  # fmt: skip
    """Train, and return the step that is the first to raise with its error."""
    if broadcast:
        pyg_sar.broadcast_parameters(model)
    it = optimizer(model.parameters(), lr=lr, **options)
    for step in range(steps):
        try:
            it.zero_grad(set_to_none=none)
            for _ in range(passes):
                model(x, edge_index).square().sum().backward()
                for _ in range({"twice": 2, "each": 1}.get(summing, 0)):
                    pyg_sar.sum_gradients(model)
            if summing == "once":
                pyg_sar.sum_gradients(model, optimizer=it if told else None)
            it.step()
        except RuntimeError as error:
            error.step = step
            raise
    return [p.detach().clone() for p in model.parameters()]


def trained(found):
    """Return the parameters, those of all workers being the same."""
    for result in found:
        assert isinstance(result, list), result
        assert all(torch.equal(p, q) for p, q in zip(result, found[0], strict=True))
    return found[0]


@pytest.mark.parametrize("kind", ["GATConv", "GCNConv"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_no_sum_of_gradients(size, optimizer, kind):
    found = workers(size, lambda *given: train(*given, summing="never", optimizer=optimizer), kind=kind)
    for error, text in zip(found, errors(found), strict=True):
        assert error.step == 1
        assert f"parameters of layer 'convs.0' ({kind}) are not those of worker" in text
        assert "Was 'pyg_sar.sum_gradients(model)' left out?" in text and "broadcast_parameters(model)" in text


def test_one_worker_evaluates():
    """As if a worker forgot 'train()', or evaluated while others train."""

    def work(rank, model, x, edge_index):
        model.train(rank > 0)(x, edge_index)

    for text in errors(workers(2, work)):
        assert "layer 'convs.0' (GATConv)" in text and ", in evaluation mode)" in text


def test_other_seeds():
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(Net())
    for error in (found := workers(3, train, models=models)):
        assert error.step == 0
    for text in errors(found):
        assert "different values of 'convs.0.att_src', 'convs.0.att_dst', 'convs.0.lin.weight' and" in text
        assert "ranks [0] have others than the rest" in text and "'pyg_sar.broadcast_parameters(model)'" in text
    trained(workers(3, lambda *given: train(*given, broadcast=True), models=models))


@pytest.mark.parametrize("fused", [False, True])
def test_another_learning_rate(fused):
    def rates(told):
        return lambda rank, *given: train(rank, *given, lr=0.01 * (1 + (rank == 1)), told=told, fused=fused)

    for error in (found := workers(3, rates(True))):
        assert error.step == 0
    for text in errors(found):
        assert "lr=0.01 on ranks [0, 2], lr=0.02 on ranks [1]" in text
    for error in (found := workers(3, rates(False))):
        assert error.step == 1
    for text in errors(found):
        assert "parameters of layer 'convs.0' (GATConv)" in text and "learning rate" in text


def test_another_learning_rate_beside_layers():
    def work(rank, model, x, edge_index):
        return train(rank, model.head, x, edge_index, lr=0.01 * (1 + rank))

    with mock.patch.object(
        torch.nn.Linear, "forward", lambda self, x, _=None: torch.nn.functional.linear(x, self.weight)
    ):
        for error in (found := workers(2, work)):
            assert error.step == 1
    for text in errors(found):
        assert "different values of 'weight'" in text and "learning rate" in text


@pytest.mark.parametrize(
    ("how", "passes", "text"),
    [("twice", 1, "called twice for one backward pass"), ("each", 2, "added to the gradient of 'convs.0.att_src'")],
)
@pytest.mark.parametrize("method", ["random", "empty"])
@pytest.mark.parametrize("none", [True, False])
def test_gradients_are_summed_again(how, passes, text, method, none):
    found = workers(3, lambda *given: train(*given, summing=how, passes=passes, none=none), method)
    assert all(text in error for error in errors(found))
    assert all(error.step == 0 for error in found)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("forgets", ["the sum", "the rate"])
def test_steps_that_keep_the_sum_of_weights(momentum, forgets):
    """As those of a softmax's scores are, whose gradients add up to zero over the classes."""

    def work(rank, model, x, edge_index):
        layer = pyg_sar.nn.GCNConv(8, 3)
        pyg_sar.broadcast_parameters(layer)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1 * (1 + rank * (forgets == "the rate")), momentum=momentum)
        for _ in range(3):
            optimizer.zero_grad()
            out = layer(x, edge_index)
            pyg_sar.global_mean(torch.nn.functional.cross_entropy(out, labels(out), reduction="none")).backward()
            if forgets == "the rate":
                pyg_sar.sum_gradients(layer)
            optimizer.step()

    assert all("The parameters of layer 'GCNConv' are not those of worker" in text for text in errors(workers(2, work)))


def labels(out):
    return torch.arange(out.size(0)) % out.size(1)


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_optimizers_that_step_at_different_times(size, steps):
    """What one of them accumulates is summed in each step of the other; that is wrong if it is used."""

    def work(rank, model, x, edge_index):
        first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in (model.convs, model.head))
        for step in range(6):
            out = model(x, edge_index)
            pyg_sar.global_mean(torch.nn.functional.cross_entropy(out, labels(out), reduction="none")).backward()
            pyg_sar.sum_gradients(model)
            second.step()
            second.zero_grad()
            if step % 3 == 2:
                if steps:
                    first.step()
                first.zero_grad()
        return [p.detach() for p in model.parameters()]

    found = workers(size, work)
    if steps:
        assert all("A backward pass added to the gradient of 'convs.0" in text for text in errors(found))
    else:
        trained(found)


# What must not raise.


def diverged(rank, model, x, edge_index):
    return train(rank, model, x * torch.nan, edge_index) and []


def checkpointed(rank, model, x, edge_index):
    """Layers run once more in the backward pass."""
    forward = model.forward
    model.forward = lambda *given: checkpoint(forward, *given, use_reentrant=False)
    return train(rank, model, x, edge_index)


def two_models(rank, model, x, edge_index):
    """One is trained against the other; neither of them forgets what it was given by the other's loss."""
    other = copy.deepcopy(model)
    one, two = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, other))
    for _ in range(3):
        for it, mine, sign in ((one, model, 1), (two, other, -1)):
            it.zero_grad()
            (sign * other(model(x, edge_index).repeat(1, 3)[:, :8], edge_index).square().sum()).backward()
            pyg_sar.sum_gradients(mine, optimizer=it)
            it.step()
    return [p.detach().clone() for p in chain(model.parameters(), other.parameters())]


def two_optimizers(rank, model, x, edge_index):
    """The gradients of both parts are summed together, but those of one part are not used."""
    parts = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model.convs, model.head)]
    for step in range(6):
        parts[step % 2].zero_grad()
        model(x, edge_index).square().sum().backward()
        pyg_sar.sum_gradients(model.head, model.convs.parameters())
        parts[step % 2].step()
    return [p.detach().clone() for p in model.parameters()]


def head_alone(rank, model, x, edge_index, separate):
    """Nobody uses the gradients of the layers, nor sets them to zero."""
    it = torch.optim.SGD(model.head.parameters(), lr=0.01)
    for step in range(4):
        it.zero_grad()
        (model(x, edge_index) if step % 2 else model.head(x)).square().sum().backward()
        for part in (model.convs, model.head) if separate else (model,):
            pyg_sar.sum_gradients(part)
        it.step()
    return [p.detach().clone() for p in model.parameters()]


def by_hand(rank, model, x, edge_index):
    """Gradients of two losses, clipped; steps that torch does not count."""
    for _ in range(3):
        for p in model.parameters():
            p.grad = None
        total = [torch.zeros_like(p) for p in model.parameters()]
        for power in (1, 2):
            model(x, edge_index).pow(power).sum().backward()
            pyg_sar.sum_gradients(list(model.parameters()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for t, p in zip(total, model.parameters(), strict=True):
                t += p.grad
                p.grad.zero_()
        for t, p in zip(total, model.parameters(), strict=True):
            p.data -= 0.01 * t
            p.grad.data.zero_()
    return [p.detach().clone() for p in model.parameters()]


def frozen(rank, model, x, edge_index):
    model.convs[0].requires_grad_(False)
    torch.nn.utils.parametrizations.spectral_norm(model.head)
    return train(rank, model, x, edge_index)


def lazy(rank, model, x, edge_index):
    """The parameters that a first run makes differ until they are broadcast, and the run may call a layer again."""
    torch.nn.Module.__init__(model)
    model.conv, model.head = pyg_sar.nn.GINConv(torch.nn.LazyLinear(8)), pyg_sar.nn.SAGEConv(-1, 8)
    model.forward = lambda x, edge_index: model.head(model.conv(model.conv(x, edge_index), edge_index), edge_index)
    for _ in range(2):
        model(x, edge_index)
    with torch.no_grad():
        for p in model.parameters():
            p += rank
    return train(rank, model, x, edge_index, broadcast=True)


def evaluated(rank, model, x, edge_index):
    """In between, all sorts of calls without gradients."""
    state = {name: p.detach() for name, p in model.named_parameters()}
    for _ in range(2):
        with torch.no_grad():
            model(x, edge_index)
        torch.func.functional_call(model, state, (x, edge_index))
        train(rank, model, x, edge_index, steps=1)
        with torch.inference_mode():
            model.eval()(x, edge_index)
        model.train().convs[0](x, edge_index)
    flow = pyg_sar.message_flow_graphs(edge_index, torch.arange(x.size(0)) % 2 == 0, 2)
    out = x[flow.node_rows]
    for conv, layer in zip(model.convs, flow.edge_indices, strict=True):
        out = conv(out, layer)
    return [p.detach().clone() for p in model.parameters()]


def table_alone(rank, model, x, edge_index):
    """Features of nodes are learnt, and the model that reads them is not."""
    graph = edge_index.graph
    table = pyg_sar.nn.NodeEmbedding(torch.arange(len(x)) if graph.n_id is None else graph.n_id, x.size(1)).to(x.dtype)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(table(), edge_index).square().sum().backward()
        pyg_sar.sum_gradients(model, table)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


RECIPES = {
    "table alone": table_alone,
    "accumulated": lambda *given: train(*given, passes=3),
    "accumulated on zeros": lambda *given: train(*given, passes=2, none=False),
    "no step": lambda *given: train(*given, lr=0.0, none=False, optimizer=torch.optim.SGD),
    "fused": lambda *given: train(*given, fused=True, told=True),
    "foreach": lambda *given: train(*given, foreach=True, told=True, none=False),
    "diverged": diverged,
    "checkpointed": checkpointed,
    "two models": two_models,
    "two optimizers": two_optimizers,
    "head alone": lambda *given: head_alone(*given, separate=False),
    "head alone, separately": lambda *given: head_alone(*given, separate=True),
    "by hand": by_hand,
    "frozen": frozen,
    "lazy": lazy,
    "evaluated": evaluated,
}


@pytest.mark.parametrize(("name", "size"), some(RECIPES, [2, 3], every=2))
def test_no_false_alarm(name, size):
    """The last of three workers owns nothing."""
    trained(workers(size, RECIPES[name], "empty" if size == 3 else "random"))


@pytest.mark.parametrize("mode", [1, 2, 3])
def test_no_false_alarm_in_modes(mode):
    trained(workers(3, train, mode=mode))


def averaged(group):
    mine = share(group, edges(), assignment("random", group.size()))
    model = Net()
    return train(dist.get_rank(group), DistributedDataParallel(model, process_group=group), X[mine.src],
                 mine.edge_index, summing="never")  # fmt: skip


def test_distributed_data_parallel_does_not_alarm(pool):
    trained(pool.run(2, averaged))


def test_rounding_does_not_alarm():
    """As on other processors: the last digits of some values."""

    def work(rank, model, x, edge_index):
        trained = train(rank, model, x, edge_index, steps=1)
        with torch.no_grad():
            for p in model.parameters():
                p *= 1 + rank * torch.finfo(p.dtype).eps
        assert rank == 0 or not torch.equal(trained[2], model.convs[0].lin.weight)
        return train(rank, model, x, edge_index, steps=1) and []

    trained(workers(2, work))


# The switch.


def headers_of(size, on):
    with mock.patch.object(guard, "ON", on), started(guard) as sent:
        trained(workers(size, lambda *given: train(*given, steps=1)))
    return len(sent)


def test_one_header_for_each_aggregation_and_peer():
    assert headers_of(3, False) == 0
    assert headers_of(3, True) == 3 * 2 * (2 + 2)  # workers, layers, messages from and to the others


def test_ranks_that_differ_in_the_switch(pool, tmp_path):
    data = torch_geometric.data.Data(x=X, edge_index=edges())
    pyg_sar.partition(data, 2, tmp_path / "graph")
    for rank, outcome in enumerate(pool.outcomes(2, switched, tmp_path / "graph")):
        assert f"[rank {rank}] The workers differ in 'PYG_SAR_GUARDS' (rank 0: True, rank 1: False)" in outcome[2]
    for rank, outcome in enumerate(pool.outcomes(2, switched, None)):
        assert f"[rank {rank}] The workers differ in PYG_SAR_GUARDS: ranks [0] have others" in outcome[2]


def switched(group, folder):
    with mock.patch.object(guard, "ON", dist.get_rank(group) == 0):
        pyg_sar.sum_gradients(torch.nn.Linear(2, 2), group) if folder is None else pyg_sar.load(folder, group=group)


def test_what_cannot_be_summed():
    for wrong in (3, "model", {"a": 1}):
        with pytest.raises(TypeError, match="modules or parameters"):
            pyg_sar.sum_gradients(wrong)


def test_several_modules_and_parameters():
    def work(rank, model, x, edge_index):
        model(x, edge_index).square().sum().backward()
        pyg_sar.sum_gradients(model.convs[0], model.convs[1].parameters(), [model.head, model.head.weight])
        return [p.grad for p in model.parameters()]

    def at_once(rank, model, x, edge_index):
        model(x, edge_index).square().sum().backward()
        pyg_sar.sum_gradients(model)
        return [p.grad for p in model.parameters()]

    for one, other in zip(trained(workers(2, work)), trained(workers(2, at_once)), strict=True):
        assert torch.equal(one, other)


def test_parameters_that_only_evaluate():
    """Loaded on one worker alone."""

    def work(rank, model, x, edge_index):
        if rank == 1:
            for p in model.parameters():
                p.data += 1
        with torch.no_grad():
            return model.eval()(x, edge_index)

    assert all(
        "are not those of worker" in text and "broadcast_parameters" in text for text in errors(workers(2, work))
    )


def test_lazy_layers_may_be_made_in_evaluation():
    def work(rank, model, x, edge_index):
        torch.nn.Module.__init__(model)
        torch.manual_seed(rank)
        model.one, model.two = (pyg_sar.nn.GATConv(-1, 8) for _ in range(2))
        model.forward = lambda x, edge_index: model.two(model.one(x, edge_index), edge_index)
        with torch.no_grad():
            model.eval()(x, edge_index)
        return []

    assert workers(2, work) == [[], []]


def test_parameters_that_were_drawn_anew():
    def work(rank, model, x, edge_index):
        train(rank, model, x, edge_index)
        torch.manual_seed(rank)
        for conv in model.convs:
            conv.reset_parameters()
        train(rank, model, x, edge_index)

    assert all(
        "'pyg_sar.broadcast_parameters(model)' after 'reset_parameters()'" in text for text in errors(workers(2, work))
    )


@pytest.mark.parametrize("arrives", [True, False])
def test_a_header_that_did_not_arrive_keeps_its_memory(arrives):
    """A message is written there whenever it comes, also after a wait that was in vain."""
    turn = mock.Mock(mine=bytearray(guard.SIZE), group=None)
    header = guard.Header(turn, 1)
    came = header.came = mock.Mock(**({} if arrives else {"wait.side_effect": RuntimeError}))
    header.sent = mock.Mock()
    before = len(ABANDONED)
    with suppress(RuntimeError):  # whose traceback would keep the header
        header.hear()
    del header
    assert [kept[0] for kept in ABANDONED[before:]] == ([] if arrives else [came])
    del ABANDONED[before:]


def test_turns_do_not_wait_for_the_garbage_collector():
    """Which training loops switch off."""

    def work(rank, model, x, edge_index):
        for _ in range(5):
            model(x, edge_index).sum().backward()

    gc.collect()
    gc.disable()
    try:
        workers(2, work)
        alive = sum(isinstance(it, guard.Turn) for it in gc.get_objects())
    finally:
        gc.enable()
    assert alive <= 2  # the last one of each worker
