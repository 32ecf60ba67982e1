r"""Runs a layer's own ``propagate`` on some edges of a sharded graph.

PyG's ``propagate`` gathers rows, builds messages and aggregates them: a :class:`Runner` has it do so on the edges of a
block, in :mod:`~pyg_sar.nn.replay.passes`, or into some destinations, in :mod:`~pyg_sar.nn.replay.chunks`. What the
layer makes of the aggregate comes of a last run, on padding edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.autograd import nodes_behind, random_states
from pyg_sar.block import Block
from pyg_sar.graph import ShardedGraph
from pyg_sar.halo import fetch_halo
from pyg_sar.nn.replay.call import Call, Inputs, Ref, nodes_at
from pyg_sar.nn.replay.isolate import State, substituted, unchanged
from pyg_sar.nn.replay.trace import Dropout, NoMixing, NotStreamable, Reduction, Stop, Trace
from pyg_sar.ops.dropout import dropout_factors
from pyg_sar.reduce import Grads, Needs, Rows

Pair = tuple[Tensor, Tensor]  # and its gradient


@dataclass
class Reductions:
    """The reductions by destination in a layer's ``propagate``.

    Args:
        groups: Their numbers. Those of a group are merged in one pass, and need the results of the groups before.
        found: The reductions, without entries.
        hidden: Parameters that messages read, although they are none of the layer's.
        unused: Parameters of the layer that its ``propagate`` did not read, which get no gradient unless it does.
        unread: Names of arguments, and which one of a pair, of which results do not depend: they get no gradient.
        reduced: What reductions read, perhaps in vain: it gets a gradient, for who knows what will be made of these.
        drops: Whether messages are dropped out.
        operations: Of a softmax, the operations that messages are made by.
        updated: What becomes of edges if the call updates them, without any.
    """

    groups: list[tuple[int, ...]] = field(default_factory=list)
    found: dict[int, Reduction] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)
    unused: list[Tensor] = field(default_factory=list)
    unread: frozenset[tuple[str, int]] = frozenset()
    reduced: frozenset[Ref] = frozenset()
    drops: bool = False
    operations: list[str] = field(default_factory=list)
    updated: Tensor | None = None


class Runner:
    """A call of a layer with its arguments on this worker, on some edges of a graph, and what is known of it.

    Dropout drops, if it ``drops``, by ``seed``; without one it is drawn when it is needed.
    """

    def __init__(
        self, call: Call, inputs: Inputs, graph: ShardedGraph, program: Reductions, seed: int | None, drops: bool = True
    ) -> None:
        self.call, self.inputs, self.graph, self.program, self.seed = call, inputs, graph, program, seed
        self.layer = layer = call.layer
        self.parameters = [p for p in (*layer.parameters(), *program.hidden) if p.requires_grad]
        unused, first = {id(p) for p in program.unused}, len(inputs.const)
        self.optional = frozenset(first + k for k, p in enumerate(self.parameters) if id(p) in unused)
        self.unread = inputs.only(program.unread) - program.reduced
        self.source_unread = 0 < len(inputs.src) == sum(ref.kind == "src" for ref in self.unread)
        self.drops = drops
        self.dropped = False  # whether a run asked for dropout
        self.probes = False  # whether random numbers are looked for elsewhere
        self.messages: list[Any] = []  # which chunks made, if it probes
        self.tables = [fetch_halo(t, graph) for t in inputs.table]
        self.device = graph.device.type
        self.casts, self.dtype = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)
        self.state = State(layer)
        frozen = (p for p in layer.parameters() if not p.requires_grad)
        self.versions = [(t, t._version) for t in (*frozen, *inputs.table) if not t.is_inference()]

    def release(self) -> None:
        """Let go of the arguments: backward has what it reads of them from autograd, which lets go of it afterwards."""
        self.call = replace(self.call, kwargs={})
        like = [t.new_empty(0, *t.shape[1:]) for t in self.inputs.src]
        self.inputs = Inputs(src=like, spec=self.inputs.spec)

    def rows(self) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """Return the rows of sources, destinations and edges, and what these share; without gradients those that are
        unread, so that the rest of a model does as it would in one process.
        """
        dst, edge, const = (
            [t.detach() if Ref(kind, k) in self.unread else t for k, t in enumerate(getattr(self.inputs, kind))]
            for kind in Rows._fields
        )
        x = self.inputs.packed(self.graph)
        return x.detach() if self.source_unread else x, dst, edge, [*const, *self.parameters]

    def run_block(self, block: Block, x: Tensor, rows: Rows, cut: Any, keys: Sequence[int] = (), **how: Any) -> Any:
        """Run on the edges of a block, to the end of the aggregation at most; return what becomes of edges.

        Raises:
            RuntimeError: If a result is asked for that is not known, before all reductions ``keys`` were met.
        """
        mask = self.mask(lambda: self.graph.ids_of(block)) if self.drops else None
        tables, kwargs = self.arguments(self.inputs.unpacked(x), [t[block.ids] for t in self.tables], rows)
        how |= {"tables": tables, "backwards": self.call.backwards, "shared": self.shared(rows)}
        trace = Trace(block.row, block.col.long(), block.num_dst, cut=cut, mask=mask, **how)
        size = block.num_src, block.num_dst
        with self.drawing_nothing():
            try:
                return self.run(trace, trace.edges, kwargs, size, self.call.updates, update=_end)
            except End:
                return None
            except Stop:
                if not trace.met.issuperset(keys):
                    raise self.changed() from None
                return None

    def changed(self) -> RuntimeError:
        """Return the error for a layer whose reductions are others than when it was probed."""
        return RuntimeError(
            f"'{type(self.layer).__name__}' reduces something else than when it was first called. Make a new layer "
            f"where its code changes, or use one that is not converted."
        )

    def run_chunk(
        self, edges: Tensor, ids: Tensor, x: Tensor, table: Sequence[Tensor], rows: Rows, num_dst: int
    ) -> Any:
        """Return the aggregate of all edges into some destinations, given the ids of edges for their dropout."""
        mode = Dropout(edges.size(1), self.mask(lambda: ids) if self.drops else None)
        _, kwargs = self.arguments(self.inputs.unpacked(x), table, rows)
        name = "edge_update" if self.call.updates else "message"
        make = getattr(self.layer, name)

        def message(**given: Any) -> Any:
            holds = [*self.shared(rows), *self.layer.parameters(), *self.layer.__dict__.values()]
            with NoMixing(edges.size(1), self.shared(rows), given.get("index"), num_dst, holds):
                made = make(**given)
            if self.probes:
                self.messages.append(made)
            return made

        stubs: dict[str, Any] = {name: message, "update": lambda out, **_: out}
        given = edges.flip(0) if self.call.backwards else edges
        with self.drawing_nothing():
            return self.run(mode, given, kwargs, (x.size(0), num_dst), True, **stubs)

    def shared(self, rows: Rows) -> list[Tensor]:
        """Return what all edges share."""
        return [*rows.const, *self.layer.buffers()]

    @contextmanager
    def drawing_nothing(self) -> Iterator[None]:
        """Raise for random numbers that messages draw: on each run of the same edges they would be others."""
        if self.probes or (self.device == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.drawn = random_states(self.graph.device)
        yield
        if not torch.equal(self.drawn, random_states(self.graph.device)):
            raise RuntimeError(
                f"Messages of '{type(self.layer).__name__}' draw random numbers, which they did not when it was first "
                f"called: backward would draw others. Draw them before 'propagate', use 'F.dropout', or make a new "
                f"layer where its code changes."
            )

    def put(self, some: Tensor, out: Tensor, place: Any) -> None:
        """Write what was made of some messages to its place among what is made of all."""
        if (some.shape[1:], some.dtype) != (out.shape[1:], out.dtype):
            raise RuntimeError(
                f"'{type(self.layer).__name__}' makes {some.dtype} of shape {list(some.shape[1:])} of some messages, "
                f"and {out.dtype} of shape {list(out.shape[1:])} of others. All must be alike."
            )
        out[place] = some

    def finish(self, known: dict[int, Tensor], aggregated: Tensor | None = None) -> Tensor:
        """Return what the layer makes of the results of all reductions, or of the aggregate, from padding edges."""
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
        tables, kwargs = self.arguments(src, table, Rows(dst, edge, inputs.const), True)
        how: Any = {"tables": tables, "backwards": self.call.backwards, "ended": True}
        trace = Trace(zeros, zeros.clone(), num_dst, known, _unexpected, **how)
        stubs: dict[str, Callable] = {}
        if aggregated is not None:
            out = nodes_at(aggregated, node_dim)
            stubs = {"message": lambda **_: None, "aggregate": lambda *_, **__: out}
        out = self.run(trace, trace.edges, kwargs, (num_dst, num_dst), aggregated is None, **stubs)
        if not isinstance(out, Tensor) or out.dim() < abs(node_dim):
            raise NotStreamable(f"it returns a {type(out).__name__}")
        return out if graph.num_dst > 0 else out.narrow(node_dim % out.dim(), 0, 0)

    def run(
        self, mode: Any, edges: Tensor, kwargs: dict[str, Any], size: tuple[int, int], lost: bool,
        **stubs: Callable,
    ) -> Any:  # fmt: skip
        """Run in a mode, with some methods replaced, and perhaps lose what messages leave on the layer."""
        # What autocast made of weights before has their gradient, but not those of the copies here.
        autocast = torch.autocast(self.device, self.dtype, self.casts, cache_enabled=False)
        with autocast, unchanged(self.layer, lost, **stubs), mode:
            return self.call.run(edges, size[::-1] if self.call.backwards else size, kwargs)

    def mask(self, ids: Callable[[], Tensor]) -> Callable[[int, int, float], Tensor]:
        """Return what makes the factors of the ``k``-th dropout of edges, given what returns their ids."""

        def mask(k: int, width: int, p: float) -> Tensor:
            self.dropped = True
            if self.seed is None:
                self.seed = self.graph.seeds.draw()
                self.drawn = random_states(self.graph.device)
            seed = (self.seed + k * 0x9E3779B97F4A7C15) % (1 << 62)
            return dropout_factors(ids(), width, p, seed, torch.float32)

        return mask

    def arguments(
        self, src: Sequence[Tensor], table: Sequence[Tensor], rows: Rows, ended: bool = False
    ) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the rows that may be read by source, and all arguments; of pairs that the layer reads as a whole, when
        it has ``ended``, the destinations.
        """
        held = {"src": src, "table": table, **rows._asdict()}
        made: dict[Ref, Tensor] = {}

        def value(spec: Any) -> Any:
            if isinstance(spec, Ref) and spec not in made:
                t = held[spec.kind][spec.number]
                made[spec] = t if spec.kind in ("edge", "const") else nodes_at(t, self.layer.node_dim)
            return made[spec] if isinstance(spec, Ref) else spec

        whole, kwargs = self.call.asked if ended else (), {}
        for name, spec in self.inputs.spec.items():
            if type(spec) is tuple:
                kwargs[name] = value(spec[1]) if name in whole else tuple(map(value, spec))
            else:
                kwargs[name] = value(spec)
        return [t for ref, t in made.items() if ended or ref.kind in ("src", "table")], kwargs

    def rebuild(self, x: Tensor, rows: Rows, needs: Needs, run: Callable[[Tensor, Rows], list[Pair]]) -> Grads:
        """Return the gradients of rows, None for what is not read; ``run`` runs on rows without their history, under
        autograd, and returns what it made that has a gradient, and that.
        """
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
        copies = substituted(self.layer, self.parameters, const[own:])
        with torch.enable_grad(), self.state.restored(), copies as used:
            begin, leaves = sequence_number(), Rows(dst, edge, [*const[:own], *used])
            pairs = run(leaf, leaves)
        messages, grads = ([pair[k] for pair in pairs] for k in (0, 1))
        self.check_sources(messages, begin, leaf, leaves)
        wanted = [t for t in (leaf, *leaves.dst, *leaves.edge, *leaves.const) if t.requires_grad]
        made = torch.autograd.grad(messages, wanted, grads, allow_unused=True) if pairs and wanted else ()
        found = dict(zip(map(id, wanted), made, strict=False))
        return found.get(id(leaf)), Rows(*([found.get(id(t)) for t in ts] for ts in leaves))

    def check_sources(self, messages: Sequence[Tensor], begin: int, x: Tensor, rows: Rows) -> None:
        """Raise if messages are made of something with a gradient that was not there when the layer was probed."""
        known = {id(t) for kind, ts in zip(rows._fields, rows, strict=True) for k, t in enumerate(ts)
                 if Ref(kind, k) not in self.unread}  # fmt: skip
        try:
            new = bool(hidden_parameters(messages, begin, known if self.source_unread else known | {id(x)}))
        except NotStreamable:
            new = True
        if new:
            raise RuntimeError(
                f"Messages of '{type(self.layer).__name__}' read a tensor with a gradient that they did not read "
                f"when it was first called. Pass it to 'propagate', make a new layer where its code changes, or use "
                f"one that is not converted."
            )


def sequence_number() -> int:
    """Return a number that is less than those of all operations that autograd will see from now on."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    assert node is not None
    return node._sequence_nr()


def hidden_parameters(outs: Sequence[Tensor], begin: int, known: set[int]) -> list[Tensor]:
    """Return parameters that a message reads besides those known; raise for what is made of some."""
    found = []
    for node in nodes_behind(outs):
        if hasattr(node, "variable"):
            if id(node.variable) not in known:
                found.append(node.variable)
                known.add(id(node.variable))
        elif node._sequence_nr() < begin:
            raise NotStreamable("its messages read a tensor with a gradient that is no argument")
    return found


def _padded(t: Tensor) -> Tensor:
    """Return one row of zeros instead of none."""
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


class End(Stop):
    """Nothing is left of an aggregation."""


def _end(*args: Any, **kwargs: Any) -> None:
    raise End


def _unexpected(k: int, found: Reduction) -> None:
    raise NotStreamable("it reduces more at its end than before")
