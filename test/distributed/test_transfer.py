"""Messages and their tags."""

import copy
from unittest import mock

import torch
import torch_geometric.nn as gnn
from support.layers import TRAFFIC
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from support.setup import setup

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


def test_rows_in_another_order_of_memory(pool):
    pool.run(2, over_time)
