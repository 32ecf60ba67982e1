"""What cuts reductions out of code; that layers then compute what they did is shown in ``test_replay.py``."""

import pytest
import torch

from pyg_sar.nn.replay.trace import NotStreamable, Trace

ROW, COL, SRC = torch.tensor([0, 2, 2, 1]), torch.tensor([0, 1, 2, 0]), torch.ones(4, 2)


def changed(x):
    zeros = x.new_zeros(3, 2)
    zeros[1:] += 1
    return zeros


ZEROS = {
    "new": lambda x: x.new_zeros(3, 2),
    "of the same shape": lambda x: torch.zeros_like(x[:3]),
    "computed": lambda x: changed(x) * 0,
    "changed and back": lambda x: changed(x).zero_(),
}
OTHERS = {
    "ones": lambda x: x.new_ones(3, 2),
    "through a view": changed,
    "in place": lambda x: torch.zeros(3, 2).add_(1),
}


def cut_of(make):
    """Return the sums that are cut out of a sum by destination, which begins with what ``make`` returns."""
    found = []
    with Trace(ROW, COL, 3, {}, lambda k, reduction: found.append(reduction)):
        make(SRC).index_add(0, ROW, SRC)
    return found


@pytest.mark.parametrize(
    ("what", "function"),
    [("edge_index", lambda it: it.edges.sum()), ("index", lambda it: it.row.sort()),
     ("edge_index_j", lambda it: torch.bincount(it.col)),
     ("edge_index_j", lambda it: torch.zeros(3, 2).index_add(0, it.col, SRC))],
)  # fmt: skip
def test_what_cannot_be_split_is_named(what, function):
    says = f"it calls '\\w+' on '{what}', which cannot be split by blocks"
    with Trace(ROW, COL, 3, {}, lambda k, reduction: None) as trace, pytest.raises(NotStreamable, match=says):
        function(trace)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*ZEROS, *OTHERS])
def test_what_a_sum_begins_with(name, inference):
    with torch.inference_mode(inference):
        if name in OTHERS:
            with pytest.raises(NotStreamable, match="adds to what is there already"):
                cut_of(OTHERS[name])
        else:
            assert [it.op for it in cut_of(ZEROS[name])] == ["sum"]
