"""Messages and their tags."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn as gnn
from support.layers import TRAFFIC
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.setup import setup

from pyg_sar.distributed.group import ABANDONED
from pyg_sar.distributed.transfer import Channel
from pyg_sar.nn import convert


def tags(group):
    """Tags of the messages of two layers, of one layer twice, and of their gradients."""
    seen, make = [], Channel.tag

    def tag(channel, what, tensor):
        seen.append((what, make(channel, what, tensor)))
        return seen[-1][1]

    with mock.patch.object(Channel, "tag", tag), mock.patch("pyg_sar.reduce.base.COLUMNS", 4):
        it = setup(group, TRAFFIC["sage sum"])
        (it() + it()).sum().backward()
    return seen


def test_messages_of_different_calls_differ(pool):
    """Also those of the two halves of a row."""
    for seen in pool.run(2, tags):
        halves = lambda what: [f"{what} {k}" for k in (0, 0, 1, 1)]  # noqa: E731
        assert [what for what, _ in seen] == halves("source rows") * 2 + halves("gradients") * 2
        assert len({tag for _, tag in seen}) == 16
        assert all(0 <= tag < 2**31 for _, tag in seen)


def over_time(group):
    """Rows of nodes at some points of time, which lie in another order in memory."""
    torch.manual_seed(0)
    x = torch.randn(NUM_NODES, 5, 7, dtype=torch.float64)
    reference = gnn.SAGEConv(5, 4, aggr="max").double()
    conv = convert(copy.deepcopy(reference))
    abandoned = len(ABANDONED)
    for mode in (1, 3):
        mine = share(group, edges(), assignment("random", group.size()), mode=mode)
        part = x[mine.src].requires_grad_()
        out = conv(part.permute(2, 0, 1), mine.edge_index)
        whole = x.clone().requires_grad_()
        expected = reference(whole.permute(2, 0, 1), edges())
        close(out, expected[:, mine.dst], "output")
        expected.sum().backward()
        out.sum().backward()
        close(part.grad, whole.grad[mine.src], "gradient")
    assert len(ABANDONED) == abandoned  # all messages were waited for


def test_rows_in_another_order_of_memory(pool):
    pool.run(2, over_time)


def caught(group):
    """All workers raise between the start of an aggregation and its end, and go on."""
    reference = gnn.SAGEConv(6, 4).double()
    x = torch.randn(NUM_NODES, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine = share(group, edges(), assignment("random", group.size()))
    wrong = convert(gnn.SAGEConv((6, 5), 4).double())
    torch.nn.init.ones_(wrong.lin_l.weight)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mat2"):  # of rows of destinations, multiplied meanwhile
            wrong(x[mine.src], mine.edge_index)
        dist.barrier(group)
    conv = convert(copy.deepcopy(reference))
    for theirs, ours in zip(conv.parameters(), reference.parameters(), strict=True):
        dist.broadcast(ours.data, group=group, group_src=0)
        theirs.data.copy_(ours.data)
    close(conv(x[mine.src], mine.edge_index), reference(x, edges())[mine.dst], "output")


def test_workers_go_on_after_an_error_that_all_of_them_catch(pool):
    """What was under way must not lose the connection."""
    pool.run(2, caught, timeout=60)
