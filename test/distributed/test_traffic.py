"""The log of what layers send."""

from support.layers import TRAFFIC
from support.setup import setup

from pyg_sar import record_traffic


def record_nested(group):
    it = setup(group, TRAFFIC["sage"])
    with record_traffic(it.share.edge_index) as outer:
        it()
        with record_traffic(it.share.edge_index) as inner:
            it()
        it()
    it()
    return len(outer), len(inner)


def test_records_nest_and_end(pool):
    assert pool.run(2, record_nested) == [(3, 1)] * 2
