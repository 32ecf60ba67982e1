"""The public names and their arguments: what changes here is a line in the CHANGELOG, too."""

import inspect
from pathlib import Path
from typing import Any

import pyg_sar

KNOWN = Path(__file__).parent / "api.txt"


def arguments(value: Any) -> str:
    """Return the arguments of a function or class; those with defaults end in '='."""
    if not callable(value) or value is pyg_sar.CheckError:
        return ""
    names = []
    for p in inspect.signature(value).parameters.values():
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        names.append(star + p.name + ("" if p.default is p.empty else "="))
    return f"({', '.join(names)})"


def api() -> str:
    """Return a line for each public name. Arguments of layers are those of the release of PyG."""
    lines = [f"pyg_sar.{name}{arguments(getattr(pyg_sar, name))}" for name in sorted(pyg_sar.__all__)]
    return "\n".join([*lines, *(f"pyg_sar.nn.{name}" for name in sorted(pyg_sar.nn.__all__)), ""])


def test_public_names():
    assert api() == KNOWN.read_text(), f"python {__file__} writes it anew"


def test_typed():
    assert (Path(pyg_sar.__file__).parent / "py.typed").exists()


if __name__ == "__main__":
    KNOWN.write_text(api())
