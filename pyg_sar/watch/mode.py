r"""The mode of torch that follows rows through the first training step, and refuses by name what mixes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.data.data import BaseData

from pyg_sar.caller import beyond, spoken, within
from pyg_sar.distributed import guard
from pyg_sar.distributed.group import is_local, rank_of, size_of
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.operations import shares
from pyg_sar.structure import tensors
from pyg_sar.watch import LOSS, ROWS, SAME, current, install, is_allowed, is_alone, resting, rules
from pyg_sar.watch.counts import DIVISOR, Count
from pyg_sar.watch.kinds import ENDS, IDS, SHARE, Call, Kind, LocalUse
from pyg_sar.watch.origins import Known, Origins
from pyg_sar.watch.rules import BEFORE, CLIPS, COUNTED, LINKS, NORM, REPLICATED, SUM_UP, WIDTH

STEPS = 2  # sums of each parameter's gradients: a training step, what follows it, and the beginning of the next one
CALLS = 100_000  # after which it ends in any case, such as where something else sums gradients
TYPES = {"int", "float", "complex"}  # which are methods that return tensors, too
ARRAYS = {"numpy", "array", "tolist"}
NUMBERS = {"item", "format", *TYPES, *ARRAYS}
POOLS = ("torch_geometric.nn.pool", "torch_geometric.nn.aggr")
METRICS = ("torch_geometric.nn", "sklearn", "ogb")  # where rows leave torch to become a number
LIBRARIES = ("torch", "torch_geometric", "sklearn", "ogb", "numpy", "scipy")  # which scripts call
MODES = ("pyg_sar.watch", "pyg_sar.debugging")  # which stand between a script and torch
KNOWING = ("pyg_sar", "torchmetrics")  # who takes the rows of all workers together
CONVERT = "'pyg_sar.nn.convert(model)' gives a model of PyG its exact form, if there is one"
POOL = "Take the pooling of this name in 'pyg_sar.nn', or convert the module that does it ('pyg_sar.nn.convert')"
GATHER = "Take the rows of all workers ('pyg_sar.gather(...)'), or a metric that does, such as 'pyg_sar.accuracy(...)'"
MEANT = "Where this worker's rows are meant, say 'with pyg_sar.allow_local():'"
NUMBER = f"of a sum over rows gives the number of this worker alone. {SUM_UP}, or 'pyg_sar.accuracy(...)'"
TABLES = "takes a norm of the gradient of a table of nodes, of which each worker has its own: others get another norm"
TOGETHER = (
    "Clip the other parameters alone, or by a norm of all: to the squares of theirs add those of the tables, "
    "'pyg_sar.all_reduce(table.weight.grad.pow(2).sum())'"
)
ARRAY = f"gives the numbers of this worker's rows alone; a metric of these is that of one worker. {GATHER}"
BY_IDS = "All workers have the same table: read it by 'data.n_id', or take 'pyg_sar.nn.NodeEmbedding(data, channels)'"
REST = (
    "each worker changes them by its share of the gradient alone, so that they become others. Give it all modules that "
    "train: 'pyg_sar.sum_gradients(model, predictor)'"
)
POSITION = (
    "chooses rows by where they stand among those of this worker, which are others than in the whole graph. Of a mask "
    "for all nodes 'mask[data.n_id]' are this worker's rows; 'torch.isin(data.n_id, ids)' is a mask of those of its "
    "nodes whose ids are in a list, and 'x.split(k)' takes all rows in pieces"
)


GROUPS = (
    "groups rows by where they stand among those of this worker, which are others than in the whole graph; edges stand "
    "in another order, too, by the owners of their sources. What ends at a node has its number in 'edge_index[1]'"
)


class Watch(TorchFunctionMode):
    """Follows rows through the functions of torch that this thread calls.

    Args:
        alone: Whether there is no other worker: all rows are there, in the order of the part, and what is wrong is to
            choose them by ids, or by position.
    """

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone
        self.kinds = WeakIdKeyDictionary()
        self.values = WeakIdKeyDictionary()  # of shares: those that others add to in place are shares no more
        self.clipped: WeakIdKeyDictionary | None = None  # what was clipped since a backward pass, and where
        self.own: WeakIdKeyDictionary = WeakIdKeyDictionary()  # gradients that were not summed
        self.trained: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters that functions read
        self.left: WeakIdKeyDictionary = WeakIdKeyDictionary()  # those whose gradients were not summed, and versions
        self.losses: list[Tensor] = []  # those that were differentiated since the last step
        self.calls = self.aside = 0
        self.steps: WeakIdKeyDictionary = WeakIdKeyDictionary()  # how often gradients of parameters were summed
        self.over = self.ordered = False
        self.warned: set[str] = set()
        self.sizes: set[int] = set()  # numbers of nodes and edges
        self.positions: WeakIdKeyDictionary = WeakIdKeyDictionary()  # the numbers of all nodes of this worker
        self.origins = Origins()

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a function run, and look at what it was given and what it returned."""
        nothing = self.alone and not self.sizes  # of which the order of rows is another one
        if torch.compiler.is_compiling() or self.aside or self.over or nothing:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        self.over = self.calls > CALLS
        call = Call(func, args, kwargs or {}, self.kind)
        try:
            rules.refuse_ids(call, self.origins.ids)
        except LocalUse as local:
            self.refuse_ids(local)
        except Exception:  # of a call that is put in another way than expected nothing is known
            pass
        out = func(*args, **(kwargs or {}))
        self.look(call, out)
        return out

    def kind(self, tensor: Tensor) -> Kind | None:
        """Return what a tensor is, if that is known."""
        known = self.kinds.get(tensor)
        if known is None:
            if not isinstance(tensor, torch.nn.Parameter):
                return None
            if is_local(tensor):
                return Kind(ROWS)
            self.trained[tensor] = True
            return Kind(SAME)
        if known.what == SHARE and not torch.equal(tensor, self.values[tensor]):
            return None
        return known

    def mark(self, tensor: Tensor, kind: Kind | None, origin: Known = ()) -> None:
        """Remember what a tensor is, and from which partition, if it has rows."""
        if isinstance(tensor, ShardedEdgeIndex):
            return
        shared = kind is not None and kind.what == SHARE
        if kind is None or (shared and (is_allowed() or tensor.layout != torch.strided)):
            self.kinds.pop(tensor, None)
            return
        self.kinds[tensor] = kind
        if shared:
            self.values[tensor] = tensor.detach().clone()
        elif origin and kind.what in (ROWS, ENDS):
            self.origins.known[tensor] = origin

    def mark_rows(self, tensor: Tensor, dim: int, of: Tensor | None = None) -> None:
        """Remember that a dimension of a tensor counts rows, unless a function that will say so itself is running."""
        self.sizes.add(tensor.size(dim))
        if not self.aside:
            self.mark(tensor, Kind(ROWS, dim), () if of is None else self.origins.known.get(of, ()))

    def mark_ids(self, tensor: Tensor) -> None:
        """Remember that a tensor holds numbers of nodes in the whole graph."""
        self.mark(tensor, Kind(IDS))

    def mark_same(self, tensors: Iterable[Tensor]) -> None:
        """Remember that tensors have the same numbers on all workers."""
        for t in tensors:
            self.mark(t, Kind(SAME))

    def load(self, data: Any, rows: Iterable[tuple[Tensor, int, Any]]) -> None:
        """Remember what loaded data has."""
        origins = self.origins.load(data)
        for t, dim, kinds in rows:
            self.sizes.add(t.size(dim))
            self.mark(t, Kind(ROWS, dim), tuple(origins[kind] for kind in dict.fromkeys(kinds)))
        for store in () if self.alone else data.node_stores:
            store.num_nodes = Count(store.num_nodes)

    def look(self, call: Call, out: Any) -> None:
        """Remember what the results of a call are, or refuse it."""
        results = call.args[:1] if call.name == "setitem" else tuple(tensors(out))
        found: list[Kind | None] = [None] * len(results)
        placed = ""
        origin = () if call.end_to_end() else self.together(read_by(call), call.kwargs, compares=True)
        tables = "norm" in call.name and any(t in self.own for t, _ in call.kinds)
        try:
            if tables and call.name.startswith("foreach"):
                raise LocalUse(TABLES, TOGETHER)
            found = [
                rules.assigned(call, self.sizes) if call.name == "setitem" else rules.kind_of(call, t) for t in results
            ]
            if not self.ordered and rules.by_position(call, self.sizes):
                placed = POSITION
            elif any(rules.by_groups(call, t, self.sizes) for t in results):
                placed = GROUPS
        except LocalUse as local:
            self.refuse(LocalUse(TABLES, TOGETHER) if tables else local)
        except Exception:  # as above
            pass
        self.check(call, found, placed)
        self.clip(call)
        if call.name == "arange" and any(isinstance(n, Count) for n in (*call.args, *call.kwargs.values())):
            self.positions[out] = True
        for tensor, kind in zip(results, found, strict=True):
            self.mark(tensor, kind, origin)
            if call.name in rules.SAME_IDS and call.args and call.args[0] in self.origins.ids:
                self.origins.ids[tensor] = True

    def check(self, call: Call, found: list[Kind | None], placed: str) -> None:
        """Refuse, or warn of, what is local because of who does it, where it ends, or how rows are ``placed``."""
        name, rows, whole = call.name, ROWS in call.whats, call.kinds[:1] and call.kinds[0][1] == Kind(SAME)
        leaves = name in NUMBERS and (name not in TYPES or getattr(call.func, "__name__", "").startswith("__"))
        if leaves and SHARE in call.whats:
            self.warn(name, NUMBER)
        elif placed:
            self.warn(name, placed)
        elif isinstance(rules.divisor(call), Count):
            self.warn(name, DIVISOR)
        elif (number := rules.told_apart(call)) > 0 and number not in self.sizes:
            self.warn(name, f"tells apart {rules.NUMBERED}. {rules.GLOBAL}")
        elif why := rules.taken_for_all(call):
            self.warn(name, why)
        elif (
            name == "embedding"
            and call.arg(0, "input") in self.positions
            and call.kind(call.arg(1, "weight")) == Kind(SAME)
        ):
            self.refuse(LocalUse("reads a table by where nodes stand among those of this worker", BY_IDS))
        elif name == "backward" and whole:
            self.refuse(LocalUse(f"differentiates what {COUNTED}", REPLICATED))
        elif name == "backward" and LOSS in call.whats and not is_allowed():
            self.losses.append(call.kinds[0][0].detach().double().sum())
        elif rows and name in ARRAYS and Path().through(*METRICS):
            self.refuse(LocalUse(f"takes the numbers of nodes or edges of this worker alone ('{name}')", GATHER))
        elif rows and name in ARRAYS and call.args[0] not in self.origins.ids:
            self.warn(name, ARRAY)
        elif rows and any(kind is not None and kind.what == SHARE for kind in found) and Path().through(*POOLS):
            self.refuse(LocalUse("reads out nodes or edges of this worker alone", POOL))
        elif name == "randperm" and self.transforms():
            self.refuse(LocalUse("draws among the nodes or edges of this worker alone ('randperm')", BEFORE))

    def clip(self, call: Call) -> None:
        """Remember what is clipped between a backward pass and the sum of its gradients."""
        if call.name == "backward":
            self.clipped = WeakIdKeyDictionary()
        elif self.clipped is not None and not is_allowed() and any(part in call.name for part in CLIPS):
            at = Path()
            for tensor, _ in call.kinds if not at.known else ():
                self.clipped[tensor] = f"{at.file}, line {at.line}"

    def transforms(self) -> bool:
        """Whether a transform of PyG is running on loaded data."""
        frames = [frame for frame in Path().inner if within(frame, "torch_geometric.transforms")]
        found = [data for frame in frames if isinstance(data := frame.f_locals.get("data"), BaseData)]
        kinds = (self.kind(t) for data in found for store in data.stores for t in tensors(dict(store)))
        return any(kind is not None and kind.what == ROWS for kind in kinds)  # not of a whole graph, which others have

    def refuse(self, local: LocalUse) -> None:
        """Raise, unless this is meant, or done by code that knows what it does."""
        if self.alone or is_allowed() or (at := Path()).known:
            return
        advice = local.advice
        if at.through("torch_geometric.transforms"):
            advice = BEFORE
        elif at.through("sklearn", "ogb"):
            advice = GATHER
        elif at.through(*POOLS):
            advice = POOL
        elif at.through("torch_geometric.nn.norm"):
            advice = NORM
        elif at.through("torch_geometric.nn.models") and advice != WIDTH:
            advice = CONVERT
        text = self.told(local, advice, at)
        if local.sure:
            raise NotImplementedError(text) from None
        warnings.warn_explicit(text, UserWarning, at.file, at.line)

    def refuse_ids(self, local: LocalUse) -> None:
        """Raise where rows are chosen by ids, also by the messages of a layer."""
        if not (is_allowed() or (at := Path()).is_ours):
            raise NotImplementedError(self.told(local, local.advice, at)) from None

    def refuse_pairs(self, pairs: Tensor, *values: Any) -> None:
        """Raise for pairs of the whole graph in place of edges between rows."""
        rows = (kind.what == ROWS for t in tensors(values) if (kind := self.kind(t)) is not None)
        if not (self.over or is_allowed()) and self.kind(pairs) == Kind(IDS) and any(rows):
            local = LocalUse("takes pairs of nodes of the whole graph for edges between the rows of this worker", LINKS)
            raise NotImplementedError(self.told(local, local.advice, Path("pyg_sar")))

    def told(self, local: LocalUse, advice: str, at: Path) -> str:
        """Return the words for what is wrong."""
        return f"[rank {rank_of()}] {at.file}, line {at.line}: {at.entry} {local.why}. {advice}. {MEANT}."

    def warn(self, name: str, why: str) -> None:
        """Say once that what a script does itself is about this worker's rows."""
        if (self.alone and why != POSITION) or why in self.warned or is_allowed():
            return
        at = Path()
        if at.known or at.entry != "this" or at.through("torch.utils.data"):
            return
        self.warned.add(why)
        text = f"[rank {rank_of()}] '{name}' {why}. {MEANT}. This is said once."
        warnings.warn_explicit(text, UserWarning, at.file, at.line)

    def run(self, what: str, function: Callable, args: Any, kwargs: Any) -> Any:
        """Run a function that knows what it does, and remember what it returns."""
        origin = self.together(args, kwargs)
        self.aside += 1
        try:
            out = function(*args, **kwargs)
            given = {kind.what for t in tensors(args, kwargs) if (kind := self.kind(t)) is not None}
            known = what != ROWS or ROWS in given or next(shares(args, kwargs), None) is not None
            dim = getattr(args[0], "node_dim", 0) if what == ROWS else 0
            for t in tensors(out):
                self.mark(t, Kind(what, dim % max(t.dim(), 1)) if known else None, origin)
        finally:
            self.aside -= 1
        return out

    def together(self, *values: Any, compares: bool = False) -> Known:
        """Return the origins of the rows that a function is given; refuse those of two partitions."""
        if self.aside or is_allowed() or self.over:
            return ()
        try:
            return self.origins.join(*values, compares=compares)
        except LocalUse as local:
            raise NotImplementedError(self.told(local, local.advice, Path("pyg_sar"))) from None

    def count_step(self, parameters: Sequence[Tensor], tables: Sequence[Tensor]) -> tuple[int, float]:
        """Count a training step, and refuse gradients that were clipped before they are summed; return how many losses
        were differentiated, and their sum.
        """
        if self.over:
            return self.resume(parameters)
        self.own = WeakIdKeyDictionary({p.grad: True for p in tables if p.grad is not None})
        (clipped, losses), self.clipped, self.losses = (self.clipped, self.losses), None, []
        gradients = [p.grad for p in parameters if p.grad is not None]
        if clipped and not self.alone and (place := next((clipped[g] for g in gradients if g in clipped), "")):
            raise RuntimeError(
                f"[rank {rank_of()}] {place}: gradients are clipped, or their norm is taken, before they are summed: "
                f"they are this worker's share. Call 'pyg_sar.sum_gradients' right after 'backward', and clip "
                f"afterwards. {MEANT}."
            )
        self.look_at_the_rest(parameters)
        for p in (*parameters, *tables):
            self.steps[p] = self.steps.get(p, 0) + 1
        if self.steps and min(self.steps.values()) >= STEPS:
            self.leave()
        return len(losses), float(torch.stack(losses).sum()) if losses else 0.0

    def resume(self, parameters: Sequence[Tensor]) -> tuple[int, float]:
        """Watch again if there are parameters that were not trained before: those of another model, with other code.

        What was not seen meanwhile may have changed everything but which tensors have rows.
        """
        self.leave()  # if it could not before
        if all(p in self.steps for p in parameters):
            return 0, 0.0
        for tensor, kind in list(self.kinds.items()):
            if kind.what not in (ROWS, ENDS, IDS):
                del self.kinds[tensor]
        self.calls, self.over, self.clipped, self.losses = 0, False, None, []
        self.left = WeakIdKeyDictionary()
        for p in parameters:
            self.steps[p] = self.steps.get(p, 0) + 1
        install(self)
        _push_mode(self)
        return 0, 0.0

    def look_at_the_rest(self, parameters: Sequence[Tensor]) -> None:
        """Warn of parameters that an optimizer changed by gradients that were never summed."""
        summed = {id(p.grad) for p in parameters}
        others = [p for p in self.trained if p.grad is not None and not is_local(p)]  # which tables become later
        others = [p for p in others if p.dim() == 0 or p.size(0) not in self.sizes]  # a worker's own, such as of edges
        rest = [p for p in others if id(p.grad) not in summed and not guard.is_summed(p)]
        changed = [list(p.shape) for p in rest if self.left.get(p, p._version) != p._version]
        if changed and not (self.alone or is_allowed()):
            which = ", ".join(map(str, changed[:3])) + (", ..." if len(changed) > 3 else "")
            text = f"[rank {rank_of()}] 'sum_gradients' was not given parameters that were changed, of shapes {which}"
            at = Path("pyg_sar")
            warnings.warn_explicit(f"{text}: {REST}. {MEANT}.", UserWarning, at.file, at.line)
        self.left = WeakIdKeyDictionary({p: p._version for p in rest})

    def leave_if_over(self) -> bool:
        """Leave the stack of modes if there is nothing more to watch; return whether that is so."""
        if self.over:
            self.leave()
        return self.over

    def leave(self) -> None:
        """Leave the stack of modes, wherever others stand above."""
        self.over = True
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return  # within a function that it called; the next one of this package will try again
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        install(None, self)


def read_by(call: Call) -> Any:
    """Return the arguments that a call reads: not what it writes over as a whole."""
    key = call.args[1] if call.name == "setitem" else None
    whole = call.name == "copy" or key is Ellipsis or (isinstance(key, slice) and key == slice(None))
    return call.args[1:] if whole else call.args


class Path:
    """Who called: frames of libraries, and beyond these the one of a script, or of this package."""

    def __init__(self, *more: str) -> None:
        inner, frame = beyond(*MODES, *LIBRARIES, *more)
        self.inner = [f for f in inner if not within(f, *MODES)]
        self.is_ours = frame is None or within(frame, *KNOWING)
        # Message passing of a layer is exact, or refused, for other reasons.
        passes = any(f and f.f_code.co_name in ("propagate", "edge_updater") for f in (*self.inner, frame))
        self.known = frame is None or self.is_ours or passes
        self.file, self.line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def through(self, *names: str) -> bool:
        """Whether modules of these names take part."""
        return any(within(frame, *names) for frame in self.inner)

    @property
    def entry(self) -> str:
        """What the script called of another library than torch, if it did."""
        of_others = (f for f in reversed(self.inner) if not within(f, "torch") and f.f_code.co_name != "wrapper")
        frame = next(of_others, None)
        return "this" if frame is None else f"'{spoken(frame)}'"


@contextmanager
def watching(part: bool = False) -> Iterator[None]:
    """Watch this thread while a block runs, at most, unless somebody has switched it off: for what one of several
    workers does, or one with a ``part`` of the rows; else for what depends on the order of rows.
    """
    before = resting()
    if guard.ON:
        if is_alone():
            current().leave()
        watch = Watch(alone=not part and size_of() == 1)
        install(watch)
        _push_mode(watch)
    try:
        yield
    finally:
        if (watch := current()) is not None:
            watch.leave()
        install(None, before)
