"""Values as bytes, without pickle."""

import pickle
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from pyg_sar.distributed import values

TENSOR = torch.arange(6.0).view(2, 3)
VALUES = [
    None, True, 0, -(2**70), 0.1, float("inf"), "text\n", [], (), {}, [1, (2, [3])], {1: "one", ("a", 2): {None: []}},
    TENSOR, TENSOR.t(), TENSOR[:1], torch.tensor(3, dtype=torch.int8), torch.empty(0, 4), torch.bfloat16,
    Counter([30, 60]),
    {"state": {0: {"step": torch.tensor(2.0), "exp_avg": TENSOR}}, "param_groups": [{"betas": (0.9, 0.999)}]},
]  # fmt: skip


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        same(list(one.items()), list(other.items()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    else:
        assert one == other


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:20])
def test_values_come_back(value, tmp_path):
    same(values.from_bytes(values.to_bytes(value)), value)
    values.write(tmp_path / "file", value)
    same(values.read(tmp_path / "file"), value)


def test_numbers_of_numpy():
    found = values.from_bytes(values.to_bytes([np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)]))
    assert found == [0.5, 0.5, 3, True] and list(map(type, found)) == [float, float, int, bool]


def test_tensors_that_are_yet_to_be_conjugated_or_negated():
    z = torch.randn(3, dtype=torch.complex64)
    for it in (z.conj(), z.conj().imag):
        assert it.is_conj() or it.is_neg()
        assert torch.equal(values.from_bytes(values.to_bytes(it)), it)


def test_tensors_of_one_memory():
    """What occurs twice is written once, and views of one memory apart."""
    one, other, row = values.from_bytes(values.to_bytes((TENSOR, TENSOR, TENSOR[1])))
    assert one is other and torch.equal(row, TENSOR[1])
    assert len(values.to_bytes([torch.zeros(1000)] * 3)) < 6000


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: None, b"bytes", defaultdict(list)])
def test_what_could_only_be_pickled(value):
    with pytest.raises(TypeError, match=r"got .*pickle can run code"):
        values.to_bytes([value])


def test_nothing_is_unpickled(monkeypatch):
    monkeypatch.setattr(pickle, "loads", pytest.fail)
    monkeypatch.setattr(torch, "load", pytest.fail)
    for text in ('{"dtype": "nn"}', '{"code": "import os"}', '{"tensor": "5"}', '{"a": 1, "b": 2}'):
        with pytest.raises((ValueError, KeyError, AttributeError)):
            values.from_bytes(save({}, metadata={"value": text}))


def test_damaged_bytes_raise_or_give_a_value():
    """Whatever a peer sends: an error, no crash."""
    data, rng, errors = bytearray(values.to_bytes({"a": [TENSOR, 1]})), random.Random(0), 0
    expected = (ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError)
    for _ in range(500):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            values.from_bytes(bytes(damaged))
        except expected:
            errors += 1
    assert errors > 100
