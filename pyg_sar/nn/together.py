r"""Whether the rows that a module normalises or reads out are those of all workers, or of an ordinary graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from pyg_sar import running
from pyg_sar.caller import running_modules
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.operations import sharded, shares


def together(group: Any) -> bool:
    """Whether a module that looks at all rows must ask the other workers for theirs.

    It must, unless a module that is running was given an ordinary ``edge_index``, or that of :func:`pyg_sar.shard`, and
    none a share of a graph: then the rows are those of a graph that this process holds as a whole, and the others may
    do something else. A module that is called on rows alone cannot know, and asks.

    Raises:
        NotImplementedError: On a chunk of a pipeline, which has a part of the rows.
    """
    if running.is_within(running.CHUNK):
        raise NotImplementedError(
            f"[rank {rank_of()}] A block of a pipeline normalises or reads out all rows, of which a chunk is a part. "
            f"Take what looks at each row alone (LayerNorm(mode='node')), do it after the pipeline, or take 'chunks=1'."
        )
    return size_of(group) > 1 and not on_an_ordinary_graph()


@torch.compiler.disable
def on_an_ordinary_graph() -> bool:
    """Whether the modules that are running were given edges of graphs that this process holds, and no share of one."""
    ordinary = False
    for edges, values in given_here():
        if next(shares(edges, values), None) is not None:
            return False
        ordinary |= len(edges) > 0 or next(sharded(edges, values), None) is not None
    return ordinary


def given_here() -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the edges that each running module was given under a name that is for edges, and all that it was given."""
    for _, variables in running_modules():
        edges = [edge_index for name, value in variables.items() for edge_index in edges_in(name, value)]
        yield edges, list(variables.values())


def edges_in(name: str, value: Any) -> Iterator[Any]:
    """Yield the edges that a variable holds: a ``Data``, or what may be edges and has a name that begins with
    ``edge_index`` or ``adj``.
    """
    if isinstance(value, BaseData):
        yield from (store["edge_index"] for store in value.edge_stores if "edge_index" in store)
    elif name.startswith(("edge_index", "adj")):
        yield from (it for it in (value.values() if isinstance(value, dict) else (value,)) if may_be_edges(name, it))


def may_be_edges(name: str, value: Any) -> bool:
    """Whether a value is a list of pairs or a sparse matrix, or a dense one that is called just that: ``adjusted`` rows
    are none.
    """
    if not isinstance(value, Tensor):
        return isinstance(value, SparseTensor)
    pairs = value.dim() == 2 and value.size(0) == 2 and not (value.is_floating_point() or value.is_complex())
    return pairs or value.layout != torch.strided or name == "adj"


_here = threading.local()  # how many functions are running that look at all rows by themselves


def knows_all_rows(function: Any) -> Any:
    """Hide a function, which looks at the rows of all workers by itself, from a trace of the code that calls it."""

    @functools.wraps(function)
    def unseen(*args: Any, **kwargs: Any) -> Any:
        _here.aside = getattr(_here, "aside", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _here.aside -= 1

    return unseen


def aside() -> bool:
    """Whether such a function is running."""
    return getattr(_here, "aside", 0) > 0
