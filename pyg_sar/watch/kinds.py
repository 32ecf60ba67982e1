r"""What the numbers of a tensor stand for on one of several workers.

* :data:`ROWS`: a row for each node or edge that this worker holds; :data:`ENDS`: the numbers of its own destinations,
  by which rows may be added up. Whatever keeps rows apart keeps them rows. What mixes them sees a share of the graph.
* :data:`IDS`: numbers of nodes in the whole graph, such as pairs that shall be predicted. They are the same on every
  worker, and choose no rows of one.
* :data:`SHARE`: a sum over this worker's rows. It is additive: linear functions may go on with it until the sums of all
  workers are added up, and anything else would be another number than that of the whole graph.
* :data:`SAME`: made of parameters, constants and sums of all workers, the same on every worker.
* :data:`LOSS`: has the value for the whole graph and, as its gradient, the share of this worker, which is true of every
  smooth function of losses. What is the same on every worker has its whole gradient on every one, too.

Of all other tensors nothing is known, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pyg_sar.operations import OPERATORS
from pyg_sar.structure import tensors
from pyg_sar.watch import ROWS

ENDS, IDS, SHARE = "destinations", "ids", "share"


class Kind(NamedTuple):
    """What the numbers of a tensor are: one of the above."""

    what: str
    dim: int = 0  # of rows, the dimension that counts them
    size: int = 0  # of a share, the number of rows that it is the sum of, if that is known


class LocalUse(Exception):
    """Why a function sees only a share of the graph, or, if not ``sure``, seems to do so, and what to do instead."""

    def __init__(self, why: str, advice: str, sure: bool = True) -> None:
        super().__init__(why)
        self.why, self.advice, self.sure = why, advice, sure


SPELLINGS = {"add": "radd iadd", "sub": "rsub isub subtract", "mul": "rmul imul multiply", "pow": "ipow",
             "div": "truediv true_divide divide idiv itruediv floor_divide floordiv", "rdiv": "rtruediv rfloordiv",
             "cat": "concat concatenate", "outer": "ger"}  # fmt: skip
ALIASES = {alias: name for name, aliases in SPELLINGS.items() for alias in aliases.split()}


def name_of(func: Callable) -> str:
    """Return what a function is called, whether it is one of torch, a method, a property, an operator or in place."""
    if isinstance(func, OPERATORS):  # of other libraries, perhaps, where names mean other things
        return ""
    name = getattr(func, "__name__", "")
    name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
    return ALIASES.get(name.strip("_"), name.strip("_"))


class Call:
    """A call of a function of torch, and what its tensors are."""

    def __init__(self, func: Callable, args: Any, kwargs: Any, kind: Callable[[Tensor], Kind | None]) -> None:
        self.func, self.args, self.kwargs, self.name = func, args, kwargs, name_of(func)
        self.kinds = [(t, kind(t)) for t in tensors(args, kwargs)]
        self.whats = {k.what for _, k in self.kinds if k is not None}

    def arg(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument, given by position or by name, of which torch has two for a dimension."""
        default = self.kwargs.get("axis", default) if name == "dim" else default
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)

    def kind(self, value: Any) -> Kind | None:
        """Return what an argument is."""
        return next((k for t, k in self.kinds if t is value), None)

    def rows(self, value: Any) -> int | None:
        """Return which dimension of an argument counts rows, if one does."""
        kind = self.kind(value)
        return kind.dim if kind is not None and kind.what in (ROWS, ENDS) else None

    def first(self) -> tuple[Tensor, Kind]:
        """Return the argument of most dimensions that has rows."""
        found = [(t, k) for t, k in self.kinds if k is not None and k.what in (ROWS, ENDS)]
        return max(found, key=lambda pair: pair[0].dim())

    def end_to_end(self) -> bool:
        """Whether this puts rows one after the other, or looks at each tensor by itself: they may be those of different
        graphs.
        """
        if self.name in ("grad", "pad_sequence") or self.name.startswith("foreach"):
            return True
        if self.name not in ("cat", "vstack", "row_stack", "hstack") or not self.whats & {ROWS, ENDS}:
            return False
        t, kind = self.first()
        if self.name in ("vstack", "row_stack") and t.dim() == 1:
            return False
        across = 1 if self.name == "hstack" and t.dim() > 1 else 0
        return bool((self.arg(1, "dim", 0) if self.name == "cat" else across) % t.dim() == kind.dim)
