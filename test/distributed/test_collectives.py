"""Sums of gradients, losses and metrics over workers that differ in what they hold."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import some
from support.layers import TRAFFIC
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.setup import setup, whole
from torch.nn.parallel import DistributedDataParallel

from pyg_sar import accuracy, all_reduce, broadcast_parameters, degree_histogram, global_mean, global_sum, sum_gradients
from pyg_sar.distributed import collectives
from pyg_sar.distributed.group import gather_objects
from pyg_sar.nn import SAGEConv

GRADS = {
    "everywhere": lambda rank: True,
    "on one rank only": lambda rank: rank == 1,
    "on all but one": lambda rank: rank != 0,
    "nowhere": lambda rank: False,
}


class Mixed(torch.nn.Module):
    """Parameters of several types and shapes, some of which are frozen."""

    def __init__(self):
        super().__init__()
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            for name in GRADS:
                key = f"{name.replace(' ', '_')}_{str(dtype)[6:]}"
                self.register_parameter(key, torch.nn.Parameter(torch.ones(3, 2, dtype=dtype)))
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.ones(0, 4))
        self.transposed = torch.nn.Parameter(torch.ones(4, 2).t())
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("counter", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))


def sum_mixed(group):
    rank, model = dist.get_rank(group), Mixed()
    for name, p in model.named_parameters():
        wants = next((f for key, f in GRADS.items() if name.startswith(key.replace(" ", "_"))), GRADS["everywhere"])
        if p.requires_grad and wants(rank):
            p.grad = torch.full_like(p, rank + 1)
    kept = model.scalar.grad
    sum_gradients(model, group)
    assert model.scalar.grad is kept  # whoever holds it sees the sum
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def sum_half(group, dtype, large):
    """Each worker has a large gradient of one number, of which the small ones of two others are one unit together."""
    p = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    p.grad = torch.ones_like(p)
    p.grad[dist.get_rank(group)] = large
    sum_gradients(p, group)
    return p.grad.tolist()


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_gradients_of_half_precision_are_added_in_single(pool, dtype, large):
    assert pool.run(3, sum_half, dtype, large) == [[large + 2] * 3] * 3


def test_sum_of_gradients_that_some_workers_lack(pool):
    sums = {"everywhere": 6.0, "on one rank only": 2.0, "on all but one": 5.0, "nowhere": None}
    for grads in pool.run(3, sum_mixed):
        assert grads.pop("frozen") is None
        for name, p in Mixed().named_parameters():
            if name == "frozen":
                continue
            expected = next((v for key, v in sums.items() if name.startswith(key.replace(" ", "_"))), 6.0)
            if expected is None:
                assert grads[name] is None, name
            else:
                assert torch.equal(grads[name], torch.full_like(p, expected)), name
                assert grads[name].dtype == p.dtype


def count_reductions(group):
    model, calls = Mixed(), []
    real = dist.all_reduce
    with mock.patch.object(dist, "all_reduce", lambda t, **kw: calls.append(t.dtype) or real(t, **kw)):
        sum_gradients(model, group)
    return calls


def test_one_reduction_for_single_precision_and_one_for_double(pool):
    for calls in pool.run(2, count_reductions):
        assert sorted(map(str, calls)) == ["torch.float32", "torch.float64"]


def differ(group, what):
    torch.manual_seed(dist.get_rank(group))
    odd = dist.get_rank(group) == 1
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5 if odd and what == "shape" else 4))
    if what == "frozen":
        model[int(odd)].requires_grad_(False)  # as many numbers on every rank, but not the same ones
    if what == "type" and odd:
        model.double()
    broadcast_parameters(model, group) if what != "frozen" else sum_gradients(model, group)


@pytest.mark.parametrize("what", ["shape", "type", "frozen"])
def test_models_that_differ_are_refused_everywhere(pool, what):
    for rank, outcome in enumerate(pool.outcomes(3, differ, what)):
        assert outcome[:2] == ("error", "RuntimeError")
        assert f"[rank {rank}] The workers differ in" in outcome[2]
        assert "ranks [0, 2]" in outcome[2]
        assert "weight" in outcome[2]
        assert "data.num_classes" in outcome[2] and "pyg_sar.nn.NodeEmbedding(data, channels)" in outcome[2]


def broadcast(group):
    torch.manual_seed(dist.get_rank(group))
    model = Mixed()
    for t in (*model.parameters(), *model.buffers()):
        t.data.fill_(dist.get_rank(group) % 2 + 3)
    model.batch_norm = torch.nn.BatchNorm1d(3)
    model.batch_norm.num_batches_tracked += dist.get_rank(group)
    torch.nn.init.normal_(model.batch_norm.weight)
    pointer = model.scalar.data_ptr()
    broadcast_parameters(model, group)
    assert model.scalar.data_ptr() == pointer  # optimisers hold it
    return model.state_dict()


def test_parameters_and_buffers_become_those_of_rank_0(pool):
    first, *others = pool.run(3, broadcast)
    assert first["counter"] == 3
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            assert torch.equal(other[name], value), name


def reduce_once(group):
    x = torch.full((2,), dist.get_rank(group) + 1.0, requires_grad=True)
    total = all_reduce(x, group)
    assert not total.requires_grad
    gathered = collectives.all_gather(x.view(2, 1).t(), group)
    return x.detach(), total, gathered, gather_objects(dist.get_rank(group), group)


def test_all_reduce_and_gather_leave_their_input_alone(pool):
    for rank, (x, total, gathered, objects) in enumerate(pool.run(3, reduce_once)):
        assert x.tolist() == [rank + 1.0] * 2
        assert total.tolist() == [6.0, 6.0]
        assert gathered.tolist() == [[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 3.0]]]
        assert objects == [0, 1, 2]


def lose(group, function):
    """Rank 1 ends while the others wait for it."""
    if dist.get_rank(group) == 1:
        raise ValueError("boom")
    model = torch.nn.Linear(2, 2)
    {
        "all_reduce": lambda: all_reduce(torch.ones(1), group),
        "global_mean": lambda: global_mean(torch.ones(1), group),
        "sum_gradients": lambda: sum_gradients(model, group),
        "broadcast_parameters": lambda: broadcast_parameters(model, group),
        "accuracy": lambda: accuracy(torch.ones(1), torch.ones(1), None, group),
    }[function]()


@pytest.mark.parametrize("function", ["all_reduce", "global_mean", "sum_gradients", "broadcast_parameters", "accuracy"])
def test_a_lost_worker_is_named(pool, function):
    first, second, third = pool.outcomes(3, lose, function, timeout=20)
    assert second[1:3] == ("ValueError", "boom")
    for rank, outcome in ((0, first), (2, third)):
        assert outcome[1] == "LostWorkers"
        assert f"[rank {rank}] Lost the other workers while" in outcome[2]


DIFFER = {
    "a number without rows": (torch.tensor(0.75, dtype=torch.float64), torch.tensor(0)),
    "a type as wide": (torch.ones(2), torch.ones(2, dtype=torch.int32)),
    "a narrower type": (torch.tensor(0.75), torch.tensor(0)),
    "another shape": (torch.ones(2, 3), torch.ones(3, 2)),
    "another length": (torch.ones(3), torch.ones(4)),
}


def unlike(group, function, name):
    found = DIFFER[name][dist.get_rank(group) % 2]
    with pytest.raises(
        RuntimeError, match=rf"The workers differ in what they give to '{function.__name__}': ranks \[0"
    ):
        function(found, group)
    return function(torch.ones(2, requires_grad=True), group).tolist()


@pytest.mark.parametrize("function", [all_reduce, global_sum])
@pytest.mark.parametrize("name", DIFFER)
def test_tensors_of_scripts_that_differ(pool, function, name):
    assert pool.run(3, unlike, function, name) == [[3.0, 3.0]] * 3


# Workers without labels, edges or nodes, in a whole model.


def poor(group, lacks):
    """The last worker holds no labels, edges or nodes; the gradients are those of the whole graph nevertheless."""
    last = group.size() - 1
    edge_index, n = edges(), NUM_NODES
    part = assignment("empty" if lacks == "nodes" else "random", group.size())
    if lacks == "edges":
        edge_index = edge_index[:, (part[edge_index[1]] != last) & (part[edge_index[0]] != last)]
    labelled = torch.arange(n) % 3 == 0
    if lacks == "labels":
        labelled &= part != last
    g = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, n, 8, generator=g, dtype=torch.float64)
    torch.manual_seed(0)
    model = torch.nn.ModuleList([SAGEConv(8, 8), SAGEConv(8, 8, aggr="max"), SAGEConv(8, 8)]).double()
    never = torch.nn.Parameter(torch.ones(1))
    model.register_parameter("never", never)

    def forward(x, edge_index):
        for conv in model:
            x = conv(x, edge_index).relu()
        return x

    expected = torch.autograd.grad(
        (forward(x, edge_index) - target)[labelled].square().mean(), [p for p in model.parameters() if p is not never]
    )
    mine = share(group, edge_index, part)
    values = (forward(x[mine.src], mine.edge_index) - target[mine.src])[labelled[mine.src]].square()
    global_mean(values, group).backward()
    sum_gradients(model, group)
    for p, e in zip([p for p in model.parameters() if p is not never], expected, strict=True):
        close(p.grad, e, lacks)
    assert never.grad is None
    return len(mine.src), mine.edge_index.size(1), values.numel()


@pytest.mark.parametrize(("lacks", "what"), [("nodes", 0), ("edges", 1), ("labels", 2)])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_workers_that_lack_something(pool, workers, lacks, what):
    assert pool.run(workers, poor, lacks)[-1][what] == 0


# DistributedDataParallel averages over workers, where `sum_gradients` sums: multiply the loss by their number.


class Network(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, torch.nn.LazyLinear(3).double()

    def forward(self, x, *rest):
        return self.head(self.layer(x, *rest).relu())


def wrapped(group, mode):
    size = group.size()
    for name, case in TRAFFIC.items():
        grads = {}
        for way in ("ddp", "sum", "whole"):
            it = whole(case) if way == "whole" else setup(group, case, mode=mode)
            it.layer = model = Network(it.layer)
            it()  # the lazy layer gets its shape
            torch.manual_seed(1)
            model.head.reset_parameters()
            if way == "ddp":
                it.layer = DistributedDataParallel(copy.deepcopy(model), process_group=group)
                for _ in range(2):  # buckets are rebuilt after the first pass
                    it.layer.zero_grad()
                    (it.loss() * size).backward()
                model = it.layer.module
            else:
                it.loss().backward()
            if way == "sum":
                sum_gradients(model, group)
            grads[way] = {n: p.grad for n, p in model.named_parameters()}
        for key, value in grads["whole"].items():
            close(grads["sum"][key], value, f"{name} {key}, summed")
            close(grads["ddp"][key], value, f"{name} {key}, averaged")


def without_shapes(group):
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank(group)}.*'lin_l.weight' .*Run the model once before"):
        broadcast_parameters(SAGEConv(-1, 4), group)


def test_lazy_layers_that_never_ran_are_refused(pool):
    pool.run(2, without_shapes)


@pytest.mark.parametrize(("workers", "mode"), some([2, 4], [1, 2, 3], every=2))
def test_distributed_data_parallel(pool, workers, mode):
    pool.run(workers, wrapped, mode)


def histogram(group):
    mine = share(group, edges(), assignment("empty", group.size()))
    return degree_histogram(mine.edge_index, group).tolist()


def test_degree_histogram(pool):
    expected = torch.bincount(torch.bincount(edges()[1], minlength=NUM_NODES)).tolist()
    assert pool.run(3, histogram) == [expected] * 3


class Strided(torch.nn.Module):
    """Parameters and buffers whose order in memory differs between workers."""

    def __init__(self, rank):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4) if rank else torch.randn(4, 3).t())
        self.register_buffer("prior", torch.tensor([0.5]).expand(64))
        self.register_buffer("small", torch.arange(6, dtype=torch.int16).view(2, 3) + rank)


def strided(group):
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    model = Strided(rank)
    broadcast_parameters(model, group)
    return {name: t.clone() for name, t in model.state_dict().items()}, all_reduce(model.weight.t() * 2.0, group)


def test_parameters_in_any_order_of_memory(pool):
    (first, total), (other, same) = pool.run(2, strided)
    torch.manual_seed(0)
    assert torch.equal(first["weight"], torch.randn(4, 3).t())
    for name, value in first.items():
        assert torch.equal(other[name], value), name
    torch.testing.assert_close(total, 4 * first["weight"].t())
    assert torch.equal(total, same)


def sparse(group):
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"The gradient of 'weight' is sparse.*NodeEmbedding"):
        sum_gradients(table, group=group)


def test_sparse_gradients_are_refused(pool):
    pool.run(2, sparse)
