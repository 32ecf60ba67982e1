"""Looking for what is wrong."""

import pytest
import torch
import torch.distributed as dist

import pyg_sar
from pyg_sar import ops
from pyg_sar.debugging import NUMBERS

CONVS = {
    "sage": lambda: pyg_sar.nn.SAGEConv(4, 4), "max": lambda: pyg_sar.nn.SAGEConv(4, 4, aggr="max"),
    "gat": lambda: pyg_sar.nn.GATConv(4, 4, add_self_loops=False), "gatv2": lambda: pyg_sar.nn.GATv2Conv(4, 4),
}  # fmt: skip


def step(kind, shards):
    torch.manual_seed(0)
    edge_index = torch.randint(10, (2, 40))
    conv, x = CONVS[kind]().double(), torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    conv(x, pyg_sar.shard(edge_index, 10, shards)).square().sum().backward()
    return [x.grad, *(p.grad for p in conv.parameters())]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", CONVS)
def test_what_is_right_stays_as_it_is(kind, shards):
    expected = step(kind, shards)
    with pyg_sar.debug():
        for a, b in zip(step(kind, shards), expected, strict=True):
            assert torch.equal(a, b)


def call(name, col=(0, 1), ptr=(0, 1, 2), rows=None):
    x, out, col, ptr = torch.ones(2, 4), torch.zeros(2, 4), torch.tensor(col), torch.tensor(ptr)
    rows = None if rows is None else torch.tensor(rows)
    if name == "spmm_":
        ops.spmm_(out, ptr, col, x, None, None, False, rows)
    else:
        ops.extremum_(out, torch.zeros(2, 4), ptr, col, x, True, rows)


WRONG = [
    {"col": (0, 2)},
    {"col": (-1, 0)},
    {"ptr": (0, 3, 2)},
    {"ptr": (0, 1, 3)},
    {"ptr": (1, 1, 2)},
    {"rows": (0, 2)},
]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["spmm_", "extremum_"])
def test_numbers_that_would_read_beyond_memory(name, wrong):
    with pyg_sar.debug():
        call(name)
        with pytest.raises(IndexError, match=rf"'{name}' got .*(expected 0 to 1|does not ascend from 0 to 2)"):
            call(name, **wrong)


def test_every_operator_with_numbers_is_known():
    operators = {schema.partition("(")[0] for schema in ops.SCHEMAS if "Tensor col" in schema or "Tensor row" in schema}
    assert operators == set(NUMBERS)
    for schema in ops.SCHEMAS:
        for words in NUMBERS.get(schema.partition("(")[0], {}).items():
            assert all(f" {word}" in schema for word in words)


def with_nan(group):
    conv = torch.nn.Linear(2, 2)
    with pyg_sar.debug():
        loss = conv(torch.ones(1, 2)).sum()
        (loss * (float("nan") if dist.get_rank(group) == 1 else 1.0)).backward()
        pyg_sar.sum_gradients(conv, group=group)


def test_gradients_that_are_no_numbers(pool):
    for outcome in pool.outcomes(2, with_nan):
        assert outcome[:2] == ("error", "FloatingPointError"), outcome
        assert "The gradient of 'weight' on rank 1 has a NaN or an infinity, and those of 1 other" in outcome[2]


def test_last_calls_are_printed(capfd, monkeypatch):
    from pyg_sar.distributed import notices

    class Store:
        def set(self, key, value):
            pass

    board = notices.Notices(Store(), 0, 1)
    monkeypatch.setattr(notices, "CURRENT", board)
    for k in range(30):
        notices.calls(f"call of {k}")
    with pytest.raises(ValueError), pyg_sar.debug():
        raise ValueError
    board.over.set()
    told = capfd.readouterr().err
    assert "[rank 0] The last calls:" in told and "call 30, step 0: call of 29" in told and "call of 9\n" not in told


def test_sparse_gradients_of_tables():
    table = pyg_sar.nn.NodeEmbedding(torch.arange(5), 2, sparse=True)
    with pyg_sar.debug():
        table(torch.tensor([1, 2])).sum().backward()
        pyg_sar.sum_gradients(table)
        table(torch.tensor([1, 2])).log().sum().mul(torch.nan).backward()
        with pytest.raises(FloatingPointError, match="The gradient of 'weight'"):
            pyg_sar.sum_gradients(table)
