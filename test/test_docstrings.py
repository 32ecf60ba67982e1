"""Every public name says what it takes, returns and raises."""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import pyg_sar


def public() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes that users import, and what they call of an ``edge_index``."""
    for package in (pyg_sar, pyg_sar.nn):
        for name in package.__all__:
            if getattr(it := getattr(package, name), "__module__", "").startswith("pyg_sar"):
                yield f"{package.__name__}.{name}", it
    for name in ("cache_features", "merge", "replace", "graph", "regroup"):
        it = inspect.getattr_static(pyg_sar.ShardedEdgeIndex, name)
        yield f"ShardedEdgeIndex.{name}", getattr(it, "fget", it)


def entry(it: Any) -> Callable[..., Any] | None:
    """Return the function that takes the arguments: of a class, its own constructor."""
    if inspect.isclass(it):
        return None if dataclasses.is_dataclass(it) else vars(it).get("__init__")
    return inspect.unwrap(it)


def raises(function: Callable[..., Any]) -> bool:
    """Whether a function itself raises something."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))


NAMES = dict(public())


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_takes_returns_and_raises(name):
    it, function = NAMES[name], entry(NAMES[name])
    text = inspect.getdoc(it) or ""
    assert text, "there is no docstring"
    if function is None:
        return
    taken = [p for key, p in inspect.signature(function).parameters.items() if key != "self"]
    if taken:
        assert "Args:" in text or re.search(r"Arguments (and ``state_dict`` )?are those of", " ".join(text.split()))
    for p in taken if "Args:" in text else []:
        assert f"{p.name} (" in text or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL), f"nothing is said of '{p.name}'"
    if not inspect.isclass(it) and inspect.signature(function).return_annotation not in (None, "None"):
        assert "Returns:" in text or "Yields:" in text or text.startswith("Return")
    if raises(function):
        assert "Raises:" in text
