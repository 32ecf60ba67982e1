"""Messages and their tags."""

from unittest import mock

from support.layers import TRAFFIC
from support.setup import setup

from pyg_sar.distributed.transfer import Channel


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
