r"""Runs the own code of a layer that knows nothing of sharded graphs on some of its edges.

PyG's ``propagate`` gathers rows, builds messages and aggregates them: for a :class:`Body` it does so on the edges of a
block, in :mod:`~pyg_sar.nn.passes`, or into some destinations, in :mod:`~pyg_sar.nn.chunks`. What the layer makes of
the aggregate comes of a last run, on made-up edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.dropout import dropout_factors
from pyg_sar.edge_index import Halo
from pyg_sar.graph import Block, ShardedGraph
from pyg_sar.nn.arguments import Call, Inputs, Ref, nodes_at
from pyg_sar.reduce import Grads, Needs, Rows
from pyg_sar.trace import Apart, Dropout, NotStreamable, Reduction, Stop, Trace


@dataclass
class Program:
    """The reductions by destination in a layer's ``propagate``.

    Args:
        groups: Their numbers. Those of a group are merged in one pass, and need the results of the groups before.
        found: The reductions, without entries.
        hidden: Parameters that messages read, although they are none of the layer's.
        unused: Parameters of the layer that its ``propagate`` did not read, which get no gradient unless it does.
        unread: Names of arguments, and which one of a pair, of which results do not depend: they get no gradient.
        drops: Whether messages are dropped out.
        updated: What becomes of edges if the call updates them, without any.
        softmax: Whether the first two groups are a softmax, in which the third one is linear: one pass merges them all.
    """

    groups: list[tuple[int, ...]] = field(default_factory=list)
    found: dict[int, Reduction] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)
    unused: list[Tensor] = field(default_factory=list)
    unread: frozenset[tuple[str, int]] = frozenset()
    drops: bool = False
    updated: Tensor | None = None
    softmax: bool = False


class Body:
    """A call of a layer, on some edges.

    Args:
        call: The call.
        inputs: Its arguments on this worker.
        graph: The edges.
        program: What is known of it.
        seed: Seed of dropout; by default one is drawn when it is needed.
    """

    def __init__(
        self, call: Call, inputs: Inputs, graph: ShardedGraph, program: Program, seed: int | None = None
    ) -> None:
        self.call, self.inputs, self.graph, self.program, self.seed = call, inputs, graph, program, seed
        self.layer = layer = call.layer
        self.parameters = [p for p in (*layer.parameters(), *program.hidden) if p.requires_grad]
        unused, first = {id(p) for p in program.unused}, len(inputs.const)
        self.optional = frozenset(first + k for k, p in enumerate(self.parameters) if id(p) in unused)
        self.unread = inputs.only(program.unread)
        self.drops = True  # whether dropout drops
        self.tables = [Halo.apply(t, graph) for t in inputs.table]
        self.dropped = False
        self.device = graph.device.type
        self.casts, self.dtype = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        self.state = State(layer)
        frozen = (p for p in layer.parameters() if not p.requires_grad)
        self.versions = [(t, t._version) for t in (*frozen, *inputs.table) if not t.is_inference()]

    def given(self) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Return the rows of sources, destinations and edges, and what these share; without gradients those that are
        unread, so that the rest of a model does as it would in one process.
        """
        kinds = ([t.detach() if Ref(kind, k) in self.unread else t for k, t in enumerate(getattr(self.inputs, kind))]
                 for kind in ("dst", "edge", "const"))  # fmt: skip
        dst, edge, const = kinds
        x = self.inputs.packed(self.graph.num_src)
        return x.detach() if self.source_unread else x, dst, edge, [*const, *self.parameters]

    @property
    def source_unread(self) -> bool:
        """Whether nothing of the rows of sources is read."""
        return 0 < len(self.inputs.src) == sum(ref.kind == "src" for ref in self.unread)

    def block(self, block: Block, x: Tensor, rows: Rows, cut: Any, **how: Any) -> Any:
        """Run on the edges of a block, to the end of the aggregation at most; return what becomes of edges."""
        mask = self.mask(self.graph.ids_of(block)) if self.drops else None
        trace = Trace(block.row, block.col.long(), block.num_dst, cut=cut, mask=mask, **how)
        trace.edges_are(backwards=self.call.backwards)
        trace.tables, kwargs = self.arguments(x, [t[block.ids] for t in self.tables], rows)
        try:
            return self.run(trace, trace.edges, kwargs, (block.num_src, block.num_dst), self.call.updates, update=_stop)
        except Stop:
            return None
        finally:
            self.dropped |= trace.dropouts > 0

    def some(self, edges: Tensor, ids: Tensor, x: Tensor, table: Sequence[Tensor], rows: Rows, num_dst: int) -> Any:
        """Return the aggregate of all edges into some destinations, given the ids of edges for their dropout."""
        mode = Dropout(edges.size(1), self.mask(ids) if self.drops else None)
        _, kwargs = self.arguments(x, table, rows)
        name = "edge_update" if self.call.updates else "message"
        make = getattr(self.layer, name)

        def message(**given: Any) -> Any:
            with Apart(edges.size(1)):
                return make(**given)

        stubs: dict[str, Any] = {name: message, "update": lambda out, **_: out}
        try:
            given = edges.flip(0) if self.call.backwards else edges
            return self.run(mode, given, kwargs, (x.size(0), num_dst), True, **stubs)
        finally:
            self.dropped |= mode.dropouts > 0

    def put(self, some: Tensor, out: Tensor, place: Any) -> None:
        """Write what was made of some messages to its place among what is made of all."""
        if (some.shape[1:], some.dtype) != (out.shape[1:], out.dtype):
            raise RuntimeError(
                f"'{type(self.layer).__name__}' makes {some.dtype} of shape {list(some.shape[1:])} of some messages, "
                f"and {out.dtype} of shape {list(out.shape[1:])} of others. All must be alike."
            )
        out[place] = some

    def end(self, known: dict[int, Tensor], aggregated: Tensor | None = None) -> Tensor:
        """Return what the layer makes of the results of all reductions, or of the aggregate, from made-up edges."""
        graph, inputs = self.graph, self.inputs
        num_dst = max(graph.num_dst, 1)
        others = {num_dst, *(t.size(0) for t in (*self.parameters, *inputs.const) if t.dim() > 0)}
        count = next(n for n in range(97, 99 + len(others)) if n not in others)  # of edges, like nothing else
        zeros = torch.zeros(count, dtype=torch.int64, device=graph.device)
        src, table, edge = (
            [t.new_zeros(1, *t.shape[1:]).expand(n, *t.shape[1:]) for t in ts]
            for n, ts in ((num_dst, inputs.src), (num_dst, inputs.table), (count, inputs.edge))
        )
        dst, node_dim = inputs.dst, self.layer.node_dim
        if graph.num_dst == 0:  # an edge needs a destination
            dst, known = [_padded(t) for t in dst], {k: _padded(t) for k, t in known.items()}
            aggregated = None if aggregated is None else _padded(aggregated)
        trace = Trace(zeros, zeros.clone(), num_dst, known, _unexpected, ended=True)
        trace.edges_are(backwards=self.call.backwards)
        trace.tables, kwargs = self.arguments(src, table, Rows(dst, edge, inputs.const), True)
        stubs: dict[str, Callable] = {}
        if aggregated is not None:
            out = nodes_at(aggregated, node_dim)
            stubs = {"message": lambda **_: None, "aggregate": lambda *_, **__: out}
        out = self.run(trace, trace.edges, kwargs, (num_dst, num_dst), aggregated is None, **stubs)
        if not isinstance(out, Tensor) or out.dim() < abs(node_dim):
            raise NotStreamable(f"it returns a {type(out).__name__}")
        return out if graph.num_dst > 0 else out.narrow(node_dim % out.dim(), 0, 0)

    def run(
        self, mode: Any, edges: Tensor, kwargs: dict[str, Any], size: tuple[int, int], lost: bool = False,
        **stubs: Callable,
    ) -> Any:  # fmt: skip
        """Run in a mode, with some methods replaced, and perhaps lose what messages leave on the layer."""
        # What autocast made of weights before has their gradient, but not those of the copies here.
        autocast = torch.autocast(self.device, self.dtype, self.casts, cache_enabled=False)
        with autocast, unchanged(self.layer, lost, **stubs), mode:
            return self.call.run(edges, size[::-1] if self.call.backwards else size, kwargs)

    def mask(self, ids: Tensor) -> Callable[[int, int, float], Tensor]:
        """Return what makes the factors of the ``k``-th dropout of edges with these ids."""

        def mask(k: int, width: int, p: float) -> Tensor:
            if self.seed is None:
                self.seed = self.graph.seeds.draw()
            seed = (self.seed + k * 0x9E3779B97F4A7C15) % (1 << 62)
            return dropout_factors(ids, width, p, seed, torch.float32)

        return mask

    def arguments(
        self, x: Tensor | Sequence[Tensor], table: Sequence[Tensor], rows: Rows, ended: bool = False
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the rows that may be read by source, and all arguments; of pairs that the layer reads as a whole, when
        it has ``ended``, the destinations.
        """
        src = self.inputs.unpacked(x) if isinstance(x, Tensor) else x
        held = {"src": src, "table": table, "dst": rows.dst, "edge": rows.edge, "const": rows.const}
        made: dict[Ref, Tensor] = {}
        whole = self.call.asked if ended else ()
        kwargs = {name: self.value(ref, held, made, name in whole) for name, ref in self.inputs.spec.items()}
        return [t for ref, t in made.items() if ended or ref.kind in ("src", "table")], kwargs

    def value(self, ref: Any, held: dict[str, Sequence[Tensor]], made: dict[Ref, Tensor], whole: bool = False) -> Any:
        """Return an argument; of a pair that is read as a whole, the destinations."""
        if isinstance(ref, Ref):
            if ref not in made:
                t = held[ref.kind][ref.number]
                made[ref] = nodes_at(t, self.layer.node_dim) if ref.kind in ("src", "table", "dst") else t
            return made[ref]
        if isinstance(ref, tuple):
            return self.value(ref[1], held, made) if whole else tuple(self.value(r, held, made) for r in ref)
        return ref

    @contextmanager
    def leaves(self, x: Tensor, rows: Rows, needs: Needs) -> Iterator[tuple[Tensor, Rows]]:
        """Yield rows to run on under autograd, apart from what they are made of, parameters of the layer as well."""
        if any(t._version != version for t, version in self.versions):
            raise RuntimeError(
                f"A frozen parameter, or an integer argument, of '{type(self.layer).__name__}' was modified by an "
                f"inplace operation between its forward and backward pass, which needs it once more."
            )
        # Those that are unread have a gradient here to be noticed if they are read.
        leaf = x.detach().requires_grad_(needs.source or self.source_unread)
        dst, edge, const = (
            [t.detach().requires_grad_(ns[k] or Ref(kind, k) in self.unread) for k, t in enumerate(ts)]
            for kind, ts, ns in zip(rows._fields, rows, needs.rows, strict=True)
        )
        own = len(const) - len(self.parameters)
        with (
            torch.enable_grad(),
            self.state.restored(),
            substituted(self.layer, self.parameters, const[own:]) as used,
        ):
            yield leaf, Rows(dst, edge, [*const[:own], *used])

    def check_sources(self, messages: Sequence[Tensor], begin: int, x: Tensor, rows: Rows) -> None:
        """Raise if messages are made of something with a gradient that was not there when the layer was tried."""
        known = {id(t) for kind, ts in zip(rows._fields, rows, strict=True) for k, t in enumerate(ts)
                 if Ref(kind, k) not in self.unread}  # fmt: skip
        try:
            new = len(hidden(messages, begin, known if self.source_unread else known | {id(x)}))
        except NotStreamable:
            new = 1
        if new:
            raise RuntimeError(
                f"Messages of '{type(self.layer).__name__}' read a tensor with a gradient that they did not read "
                f"when it was first called. Pass it to 'propagate', make a new layer where its code is to take another "
                f"way, or use one that is not converted."
            )


class State:
    """What a layer and its submodules were like when they were called: attributes, modes, parameters and buffers.

    Of lists and dictionaries it keeps what was in them, and nothing that would keep alive what was computed.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self.modules = [(m, {k: _copied(v) for k, v in m.__dict__.items() if _plain(v)}) for m in layer.modules()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them be like that again."""
        now = [dict(module.__dict__) for module, _ in self.modules]
        try:
            for module, then in self.modules:
                module.__dict__.update({name: _copied(value) for name, value in then.items()})
            yield
        finally:
            for (module, _), values in zip(self.modules, now, strict=True):
                module.__dict__.clear()
                module.__dict__.update(values)


def _plain(value: Any) -> bool:
    """Whether no value, or none in a list or dictionary, was computed with a gradient."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else (value,)
    return not any(isinstance(v, Tensor) and v.grad_fn is not None for v in values)


def _copied(value: Any) -> Any:
    """Return another list or dictionary with the same in it."""
    return value.copy() if type(value) in (dict, list, set) else value


def gradients(outs: Sequence[Tensor], grads: Sequence[Tensor], x: Tensor, rows: Rows) -> Grads:
    """Return the gradients of leaves, None for what does not read them."""
    wanted = [t for t in (x, *rows.dst, *rows.edge, *rows.const) if t.requires_grad]
    found: dict[int, Tensor | None] = {}
    if outs and wanted:
        found = dict(zip(map(id, wanted), torch.autograd.grad(outs, wanted, grads, allow_unused=True), strict=True))
    return found.get(id(x)), Rows(*([found.get(id(t)) for t in ts] for ts in rows))


@contextmanager
def unchanged(layer: torch.nn.Module, lost: bool = False, **stubs: Any) -> Iterator[None]:
    """Put attributes of a layer back, because what it keeps of messages would be that of a block; meanwhile some are
    ``stubs``.

    If they are ``lost``, something takes their place that says so when it is read: some layers look if they are there.
    """
    before = dict(layer.__dict__)
    layer.__dict__.update(stubs)
    try:
        yield
    finally:
        after = dict(layer.__dict__)
        layer.__dict__.clear()
        layer.__dict__.update(before)
        if lost:
            new = [name for name, value in after.items() if before.get(name) is not value and name not in stubs]
            layer.__dict__.update({name: Lost(f"{type(layer).__name__}.{name}") for name in new})


class Lost:
    """In place of what messages left on a layer."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        """Refuse to be read."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error()

    def error(self) -> NotImplementedError:
        """Say why."""
        return NotImplementedError(
            f"'{self.__dict__['name']}' was made of messages, which do not stay on a sharded graph. Compute it from "
            f"the layer's inputs and outputs, or on the whole graph."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with."""
        raise next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Lost)).error()

    def __add__(self, other: Any = None) -> Any:
        """Refuse to be computed with."""
        raise self.error()

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = __getitem__ = __add__


def begun() -> int:
    """Return a number that is less than those of all operations that autograd will see from now on."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    assert node is not None
    return node._sequence_nr()


def hidden(outs: Sequence[Tensor], begin: int, known: set[int]) -> list[Tensor]:
    """Return parameters that a message reads besides those known; raise for what is made of some."""
    stack, seen, found = [out.grad_fn for out in outs], set(), []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            if id(node.variable) not in known:
                found.append(node.variable)
                known.add(id(node.variable))
        elif node._sequence_nr() < begin:
            raise NotStreamable("its messages read a tensor with a gradient that is no argument")
        stack += [following for following, _ in node.next_functions]
    return found


@contextmanager
def substituted(
    layer: torch.nn.Module, parameters: Sequence[Tensor], copies: Sequence[Tensor]
) -> Iterator[list[Tensor]]:
    """Have a layer read copies of its parameters, whose hooks shall not see the gradient of a block; yield these, and
    parameters of others as they are.
    """
    by_id = {id(p): copy for p, copy in zip(parameters, copies, strict=True)}
    slots = [(m, name, p) for m in layer.modules() for name, p in m._parameters.items() if id(p) in by_id]
    own = {id(p) for *_, p in slots}
    try:
        for module, name, p in slots:
            module._parameters[name] = by_id[id(p)]  # type: ignore[assignment]
        yield [by_id[id(p)] if id(p) in own else p for p in parameters]
    finally:
        for module, name, p in slots:
            module._parameters[name] = p
        for module in {module for module, *_ in slots if isinstance(module, torch.nn.RNNBase)}:
            module._init_flat_weights()  # a list of them


def _padded(t: Tensor) -> Tensor:
    """Return one row of zeros instead of none."""
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


def _stop(*args: Any, **kwargs: Any) -> None:
    raise Stop


def _unexpected(k: int, found: Reduction) -> None:
    raise NotStreamable("it reduces more at its end than before")
