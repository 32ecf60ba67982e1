"""Which combinations of settings run by default, and which ones in the grid alone."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest


def some(*lists: Collection[Any], every: int) -> list[Any]:
    """Return all combinations, of which one in ``every`` runs by default, as on diagonals of a table: each value of a
    list is there if another list has at least ``every`` values.
    """
    numbers = itertools.product(*(range(len(values)) for values in lists))
    cases = zip(itertools.product(*lists), numbers, strict=True)
    return [one if sum(n) % every == 0 else pytest.param(*one, marks=pytest.mark.grid) for one, n in cases]
