"""Frames are told apart by whose code they run."""

import warnings

import torch

from pyg_sar import caller
from pyg_sar.data import attributes


def test_a_warning_names_the_line_that_called_the_package():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.nn.Module.apply(torch.nn.ReLU(), lambda module: attributes.warn("something"))
    assert [warning.filename for warning in said] == [__file__]


class Outer(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 1)


def test_running_modules_come_from_the_innermost_outwards():
    found = []

    def look(x):
        found.extend((module, dict(variables)) for module, variables in caller.running_modules())
        return x

    model = Outer(Outer(look))
    model(torch.zeros(1))
    modules = list(dict.fromkeys(module for module, _ in found))
    assert modules == [model.inner, model]
    assert found[0][1]["x"] == 1


def test_an_error_is_where_the_user_wrote_it():
    try:
        torch.nn.Linear(2, 2)(torch.zeros(3, 3))
    except RuntimeError as error:
        place = caller.raised_at(error)
    assert place.file == __file__ and "torch.nn.Linear(2, 2)" in str(place)
