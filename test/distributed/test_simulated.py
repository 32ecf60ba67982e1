"""Simulated workers: the same numbers as in one process, and an error at once where real ones would wait."""

import pytest
import torch
from support.nasty_graph import NUM_NODES, assignment, close, edges
from support.simulate import Cut
from support.simulate import simulate as run
from torch import Tensor
from torch_geometric.nn import Sequential

import pyg_sar
from pyg_sar.distributed.collectives import all_gather
from pyg_sar.distributed.group import Message, all_reduce_, current, gather_objects, rank_of, size_of, start
from pyg_sar.distributed.simulated import Member, Workers


def test_numbers_of_workers() -> None:
    assert (rank_of(), size_of(), current()) == (0, 1, None)
    assert run(3, lambda rank: (rank_of(), size_of(), rank)) == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    assert current() is None  # nothing is left behind


def test_collectives() -> None:
    def work(rank: int) -> tuple[float, list, list]:
        total = torch.tensor([float(rank + 1)])
        all_reduce_(total)
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(module.weight, rank + 5)
        pyg_sar.broadcast_parameters(module)
        assert module.weight.item() == 5
        return total.item(), all_gather(torch.tensor([rank])).tolist(), gather_objects(str(rank))

    assert run(3, work) == [(6.0, [[0], [1], [2]], ["0", "1", "2"])] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_a_layer_and_its_gradients(size: int) -> None:
    cut = Cut(edges(), assignment("random", size), size)
    x = torch.randn(NUM_NODES, 8, dtype=torch.float64)
    layer = pyg_sar.nn.GATConv(8, 4, heads=2).double()

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        own = x[cut.ids[rank]].requires_grad_()
        out = layer(own, cut.edge_index(rank))
        return cut.ids[rank], out.detach(), torch.autograd.grad(out.square().sum(), own)[0]

    whole = x.clone().requires_grad_()
    expected = layer(whole, edges())
    (grad,) = torch.autograd.grad(expected.square().sum(), whole)
    for ids, out, d_x in run(size, work):
        close(out, expected.detach()[ids], "out")
        close(d_x, grad[ids], "d_x")


def test_an_error_of_one_ends_the_others() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("mine")
        all_reduce_(torch.zeros(1))

    one, other = Workers(2).run(work)
    assert isinstance(other, ValueError)
    assert isinstance(one, RuntimeError) and "worker 1 ended while worker 0 waited" in str(one)


def test_workers_that_wait_for_each_other() -> None:
    def work(rank: int) -> None:
        member = current()
        assert isinstance(member, Member)
        if rank == 0:
            all_reduce_(torch.zeros(1))
        member.workers.take(rank, (0, rank, 7))

    for error in Workers(2).run(work):
        assert isinstance(error, RuntimeError)
        assert str(error) == "worker 0 waits for all others, in 'all_reduce'; worker 1 waits for a message of worker 0"


def test_what_was_gathered_is_not_kept() -> None:
    workers, total = Workers(3), torch.ones(2)

    def work(rank: int) -> None:
        for _ in range(3):
            all_reduce_(total.clone())
            gather_objects(rank)

    assert workers.run(work) == [None] * 3 and not workers.box


def test_different_collectives_and_shapes() -> None:
    def names(rank: int) -> None:
        gather_objects(1) if rank else all_reduce_(torch.zeros(1))

    def shapes(rank: int) -> None:
        all_reduce_(torch.zeros(rank + 1))

    for work, text in ((names, "different things: all_reduce, gather_objects"), (shapes, r"\[1\].*\[2\]")):
        with pytest.raises(RuntimeError, match=text):
            run(2, work)


def test_one_runs_at_a_time_and_draws_random_numbers_as_if_alone() -> None:
    running: list[int] = []

    def work(rank: int) -> list[float]:
        torch.default_generator.manual_seed(5)
        found = []
        for _ in range(3):
            running.append(rank)
            found += torch.rand(2).tolist()
            assert running.pop() == rank
            all_reduce_(torch.zeros(1))
        return found

    before = torch.get_rng_state()
    one, other = run(2, work)
    assert one == other
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_made_afterwards_has_its_own_code() -> None:
    """PyG finds the code of a ``Sequential`` under a random number, which is drawn again after simulated workers."""

    def made(layers: int) -> Tensor:
        lin = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(lin.weight, 2)
        return Sequential("x", [(lin, "x -> x")] * layers)(torch.ones(1))

    assert run(2, lambda rank: made(1).item()) == [2, 2]
    assert made(3).item() == 8


def test_messages_of_the_same_tag_keep_their_order() -> None:
    def work(rank: int) -> list[float]:
        rows = [torch.full((1,), float(k)) for k in range(3)]
        handles = start([Message(row, 1 - rank, 5, sends=rank == 0) for row in rows])
        if rank == 0:
            return []
        for row in rows:
            row.zero_()
        for handle in handles:
            handle.wait()
        return [row.item() for row in rows]

    assert run(2, work) == [[], [0.0, 1.0, 2.0]]
