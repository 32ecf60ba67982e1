r"""Streams a layer that knows nothing of it: its own code runs block by block.

PyG's ``propagate`` gathers rows, builds messages and aggregates them. Here it runs on the edges of one block at a time,
within a :class:`~pyg_sar.trace.Trace` that cuts its reductions by destination. What the blocks contribute is merged,
and a last run, on a made-up edge, makes of the results what the layer makes of them. Backward runs it on block after
block again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.dropout import dropout_factors
from pyg_sar.edge_index import Halo
from pyg_sar.graph import Block, ShardedGraph
from pyg_sar.reduce import Grads, Needs, Reduce, Rows
from pyg_sar.reference import accumulator
from pyg_sar.stream import aggregate
from pyg_sar.trace import NotStreamable, Reduction, Stop, Trace

PROPAGATE = torch_geometric.nn.MessagePassing.propagate


class Ref(NamedTuple):
    """Where an argument stands among the :class:`Inputs`."""

    kind: str  # "src", "table", "dst", "edge", "const"
    number: int


@dataclass
class Inputs:
    """The arguments of one ``propagate``, by what their rows stand for; nodes come first in them.

    Args:
        src: Rows of the own sources.
        table: The same of integers, which are fetched in one shot.
        dst: Rows of the own destinations.
        edge: Rows of the edges.
        const: What all edges share.
        spec: Every argument, as it is or as a :class:`Ref`; a pair of those for rows of sources and destinations.
    """

    src: list[Tensor] = field(default_factory=list)
    table: list[Tensor] = field(default_factory=list)
    dst: list[Tensor] = field(default_factory=list)
    edge: list[Tensor] = field(default_factory=list)
    const: list[Tensor] = field(default_factory=list)
    spec: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, value: Tensor) -> Ref:
        """Keep a tensor, once."""
        held = getattr(self, kind)
        for k, t in enumerate(held):
            if t is value:
                return Ref(kind, k)
        held.append(value)
        return Ref(kind, len(held) - 1)

    def packed(self, num_src: int) -> Tensor:
        """Return the rows of sources side by side."""
        if not self.src:
            like = next((t for t in (*self.dst, *self.edge) if t.is_floating_point()), torch.empty(0))
            return like.new_zeros(num_src, 1)
        return torch.cat([_flat(t) for t in self.src], 1) if len(self.src) > 1 else _flat(self.src[0])

    def unpacked(self, x: Tensor) -> list[Tensor]:
        """Return the rows of some sources as they were."""
        if not self.src:
            return []
        widths = [math.prod(t.shape[1:]) for t in self.src]
        return [c.view(c.size(0), *t.shape[1:]) for c, t in zip(x.split(widths, 1), self.src, strict=True)]


def bind(layer: Any, kwargs: dict[str, Any], graph: ShardedGraph, edge: frozenset[str]) -> Inputs:
    """Sort the arguments of ``propagate``; those named ``edge`` have a row for each edge."""
    asked, inputs, num_dst, flow = layer._user_args, Inputs(), graph.num_dst, graph.origin is not None
    for name, value in kwargs.items():
        lifted = [f"{name}_j" in asked, f"{name}_i" in asked]
        if any(lifted):
            if name in asked and isinstance(value, Tensor):
                lifted[1] = True  # as a whole it is read by 'update', which does so at the end
            inputs.spec[name] = _bind_nodes(inputs, layer.node_dim, value, lifted, num_dst, flow)
        elif name in asked:
            inputs.spec[name] = _bind_other(inputs, name, value, name in edge)
    floats = {t.dtype for t in inputs.src}
    if len(floats) > 1:
        raise NotStreamable(f"sources have rows of several types ({', '.join(sorted(map(str, floats)))})")
    return inputs


def _bind_nodes(inputs: Inputs, node_dim: int, value: Any, lifted: list[bool], num_dst: int, flow: bool) -> Any:
    pair = isinstance(value, (tuple, list))
    if flow and lifted[0] and not pair and value is not None:
        raise NotStreamable("a layer of a message flow needs rows of sources and destinations")
    ends: list[Ref | None] = []
    for side, t in enumerate(value if pair else (value, value)):
        if t is None or not lifted[side]:
            ends.append(None)
            continue
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.dim() < abs(node_dim):
            raise NotStreamable("rows of nodes are no tensors")
        if isinstance(t, torch.nn.Parameter):
            raise NotStreamable("it has a parameter for every node of the whole graph")
        t = t.movedim(node_dim, 0) if node_dim % t.dim() else t
        if side == 0:
            ends.append(inputs.add("src" if t.is_floating_point() else "table", t))
        else:
            ends.append(inputs.add("dst", t if pair or t.size(0) == num_dst else t[:num_dst]))
    return tuple(ends)


def _bind_other(inputs: Inputs, name: str, value: Any, is_edge: bool) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise NotStreamable(f"'{name}' is sparse")
        return inputs.add("edge" if is_edge else "const", value)
    if isinstance(value, (list, tuple, dict)):
        raise NotStreamable(f"'{name}' is a {type(value).__name__}")
    return value


@dataclass
class Program:
    """The reductions by destination in a layer's ``propagate``.

    Args:
        groups: Their numbers. Those of a group are merged in one pass, and need the results of the groups before.
        found: The reductions, without entries.
        hidden: Parameters that messages read, although they are none of the layer's.
        unused: Parameters of the layer that its ``propagate`` does not read, which get no gradient.
        drops: Whether messages are dropped out.
        softmax: Whether the first two groups are a softmax, in which the third one is linear: one pass merges them all.
    """

    groups: list[tuple[int, ...]] = field(default_factory=list)
    found: dict[int, Reduction] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)
    unused: list[Tensor] = field(default_factory=list)
    drops: bool = False
    softmax: bool = False


class Body:
    """``propagate`` of a layer on some edges.

    Args:
        layer: The layer.
        inputs: Its arguments on this worker.
        graph: The edges.
        program: What is known of it.
        seed: Seed of dropout; by default one is drawn when it is needed.
    """

    def __init__(
        self, layer: Any, inputs: Inputs, graph: ShardedGraph, program: Program, seed: int | None = None
    ) -> None:
        self.layer, self.inputs, self.graph, self.seed = layer, inputs, graph, seed
        unused = {id(p) for p in program.unused}
        parameters = (*layer.parameters(), *program.hidden)
        self.parameters = [p for p in parameters if p.requires_grad and id(p) not in unused]
        self.drops = True  # whether dropout drops
        self.tables = [Halo.apply(t, graph) for t in inputs.table]
        self.dropped = False
        self.device = graph.device.type
        self.casts, self.dtype = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def block(self, block: Block, x: Tensor, rows: Rows, cut: Any, **how: Any) -> None:
        """Run on the edges of a block, to the end of the aggregation at most."""
        tables = [t[block.ids] for t in self.tables]
        mask = functools.partial(self.mask, block) if self.drops else None
        trace = Trace(block.row, block.col.long(), block.num_dst, cut=cut, mask=mask, **how)
        self.run(trace, self.inputs.unpacked(x), tables, rows, (block.num_src, block.num_dst))

    def mask(self, block: Block, k: int, width: int, p: float) -> Tensor:
        """Return the factors of the ``k``-th dropout."""
        if self.seed is None:
            self.seed = self.graph.seeds.draw()
        seed = (self.seed + k * 0x9E3779B97F4A7C15) % (1 << 62)
        return dropout_factors(self.graph.ids_of(block), width, p, seed, torch.float32)

    def end(self, known: dict[int, Tensor]) -> Tensor:
        """Return what the layer makes of the results of all reductions, from a made-up edge."""
        graph, inputs = self.graph, self.inputs
        num_dst = max(graph.num_dst, 1)
        others = {num_dst, *(t.size(0) for t in (*self.parameters, *inputs.const) if t.dim() > 0)}
        count = next(n for n in range(97, 99 + len(others)) if n not in others)  # of edges, like nothing else
        zeros = torch.zeros(count, dtype=torch.int64, device=graph.device)
        src, table, edge = (
            [t.new_zeros(1, *t.shape[1:]).expand(n, *t.shape[1:]) for t in ts]
            for n, ts in ((num_dst, inputs.src), (num_dst, inputs.table), (count, inputs.edge))
        )
        dst = inputs.dst
        if graph.num_dst == 0:  # an edge needs a destination
            dst, known = [_padded(t) for t in dst], {k: _padded(t) for k, t in known.items()}
        trace = Trace(zeros, zeros.clone(), num_dst, known, _unexpected, ended=True)
        out = self.run(trace, src, table, Rows(dst, edge, inputs.const), (num_dst, num_dst))
        if not isinstance(out, Tensor) or out.dim() < abs(self.layer.node_dim):
            raise NotStreamable(f"it returns a {type(out).__name__}")
        dim = self.layer.node_dim % out.dim()
        return out if graph.num_dst > 0 else out.narrow(dim, 0, 0)

    def run(
        self, trace: Trace, src: Sequence[Tensor], table: Sequence[Tensor], rows: Rows, size: tuple[int, int]
    ) -> Any:
        """Run on some edges; None if it stopped."""
        held = {"src": src, "table": table, "dst": rows.dst, "edge": rows.edge, "const": rows.const}
        whole = self.layer._user_args if trace.ended else ()
        kwargs = {name: self.value(ref, held, trace, name in whole) for name, ref in self.inputs.spec.items()}
        with torch.autocast(self.device, self.dtype, self.casts), unchanged(self.layer, trace.ended), trace:
            if not trace.ended:
                self.layer.__dict__["update"] = _stop
            try:
                return PROPAGATE(self.layer, trace.edges, size=size, **kwargs)
            except Stop:
                return None
            finally:
                self.dropped |= trace.dropouts > 0

    def value(self, ref: Any, held: dict[str, Any], trace: Trace, whole: bool) -> Any:
        """Return an argument; of a pair that the layer reads as a whole, the destinations."""
        if isinstance(ref, Ref):
            t = held[ref.kind][ref.number]
            if ref.kind in ("src", "table", "dst"):
                t = nodes_at(t, self.layer.node_dim)
            if ref.kind in ("src", "table") or trace.ended:
                trace.tables.append(t)
            return t
        if isinstance(ref, tuple):
            pair = [self.value(r, held, trace, False) for r in (ref[1:] if whole else ref)]
            return pair[0] if whole else tuple(pair)
        return ref


def nodes_at(t: Tensor, node_dim: int) -> Tensor:
    """Return rows of nodes with these in the dimension where the layer has them."""
    return t.movedim(0, node_dim) if node_dim % t.dim() else t


class Pass(Reduce):
    """Merges some reductions of a body, of which none needs another one.

    ``rows.dst`` ends with the results of the reductions ``given``, ``rows.const`` with the body's parameters.
    """

    def __init__(self, body: Body, program: Program, keys: Sequence[int], given: Sequence[int]) -> None:
        self.body, self.keys, self.given = body, list(keys), list(given)
        self.found = program.found
        self.extrema = [k for k in self.keys if self.found[k].op != "sum"]
        self.saves_output = bool(self.extrema)
        self.checked = False  # whether backward has looked for tensors that it does not know

    def shape(self, k: int, num_dst: int) -> tuple[int, ...]:
        """Return the shape of the result of a reduction."""
        return (num_dst, *self.found[k].like.shape[1:])

    def check(self, k: int, found: Reduction) -> None:
        """Raise for a reduction that was not there, or was another one, when the layer was tried out."""
        known = self.found.get(k)
        if known is None or (known.op, known.like.shape[1:]) != (found.op, found.like.shape[1:]):
            raise RuntimeError(
                f"'{type(self.body.layer).__name__}' reduces something else than when it was first called. Make a new "
                f"layer where its code is to take another way, or use one that is not converted."
            )

    def check_sources(self, messages: list[Tensor], begin: int, known: list[Tensor]) -> None:
        """Raise if messages are made of something with a gradient that was not there when the layer was tried."""
        try:
            new = len(hidden(messages, begin, {id(t) for t in known}))
        except NotStreamable:
            new = 1
        if new:
            raise RuntimeError(
                f"Messages of '{type(self.body.layer).__name__}' read a tensor with a gradient that they did not read "
                f"when it was first called. Pass it to 'propagate', or use a layer that is not converted."
            )

    def known(self, rows: Rows) -> tuple[Rows, dict[int, Tensor]]:
        """Take results of other reductions apart from the rows."""
        count = len(rows.dst) - len(self.given)
        own = rows._replace(dst=rows.dst[:count], const=rows.const[: len(self.body.inputs.const)])
        return own, dict(zip(self.given, rows.dst[count:], strict=True))

    def init(self, x: Tensor, num_dst: int) -> dict[int, Any]:
        """Return nothing, of every reduction."""
        state: dict[int, Any] = {}
        for k in self.keys:
            like, shape = self.found[k].like, self.shape(k, num_dst)
            if k in self.extrema:
                lowest = -torch.inf if self.found[k].op == "amax" else torch.inf
                state[k] = x.new_full(shape, lowest, dtype=like.dtype), x.new_zeros(shape, dtype=like.dtype)
            else:
                state[k] = x.new_zeros(shape, dtype=accumulator(like.dtype))
        return state

    def step(self, state: dict[int, Any], block: Block, x: Tensor, rows: Rows) -> dict[int, Any]:
        """Merge the block."""
        own, known = self.known(rows)

        def cut(k: int, found: Reduction) -> None:
            self.check(k, found)
            if k not in state:
                return
            if k in self.extrema:
                state[k] = _merge(found.op, state[k], found.extremum(block.num_dst))
            else:
                found.add_to(state[k], block.rowptr)

        self.body.block(block, x, own, cut, known=known)
        return state

    def finish(self, state: dict[int, Any], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return results side by side, and how many entries attain extrema; without any these are 0."""
        for k in self.extrema:
            value, count = state[k]
            value = value.masked_fill(count == 0, 0)
            state[k] = value, count + (value == 0)
        results = [_flat(state[k][0] if k in self.extrema else state[k]) for k in self.keys]
        counts = tuple(state[k][1] for k in self.extrema)
        dtype = functools.reduce(torch.promote_types, (self.found[k].like.dtype for k in self.keys))
        return (torch.cat(results, 1) if len(results) > 1 else results[0]).to(dtype), counts

    def split_results(self, out: Tensor) -> dict[int, Tensor]:
        """Take results apart."""
        n = out.size(0)
        ends = accumulate((math.prod(self.shape(k, 1)) for k in self.keys), initial=0)
        return {
            k: out[:, a:b].reshape(self.shape(k, n)).to(self.found[k].like.dtype)
            for k, (a, b) in zip(self.keys, pairwise(ends), strict=True)
        }

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Share the gradients of extrema; return results, if they are needed, and gradients."""
        grads = self.split_results(out)
        for k, count in zip(self.extrema, saved, strict=True):
            grads[k] = grads[k] / count
        results = self.split_results(result) if self.extrema else {}
        return (*(results[k] for k in self.extrema), *grads.values())

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Run once more under autograd."""
        best = dict(zip(self.extrema, saved, strict=False))
        grads = dict(zip(self.keys, saved[len(best) :], strict=True))

        def cut(k: int, found: Reduction) -> tuple[Tensor, Tensor] | None:
            if k not in grads or not found.src.requires_grad:
                return None
            grad = found.read(grads[k]).to(found.src.dtype)
            return found.src, grad if k not in best else grad.masked_fill(found.src != found.read(best[k]), 0)

        return self.rebuild(block, x, rows, needs, cut)

    def rebuild(
        self, block: Block, x: Tensor | None, rows: Rows, needs: Needs, cut: Any,
        results: dict[int, Tensor] | None = None, expose: tuple[int, ...] = (),
    ) -> Grads:  # fmt: skip
        """Run under autograd and return gradients, given what is reduced and its gradient."""
        assert x is not None
        pairs: list[tuple[Tensor, Tensor]] = []

        def collect(k: int, found: Reduction) -> None:
            pair = cut(k, found)
            pairs.extend([] if pair is None else [pair])

        leaf = x.detach().requires_grad_(needs.source)
        fields = [[t.detach().requires_grad_(n) for t, n in zip(ts, ns, strict=True)]
                  for ts, ns in zip(rows, needs.rows, strict=True)]  # fmt: skip
        leaves, parameters = Rows(*fields), self.body.parameters
        copies = leaves.const[len(leaves.const) - len(parameters) :]
        with torch.enable_grad(), substituted(self.body.layer, parameters, copies) as used:
            leaves = leaves._replace(const=[*leaves.const[: len(leaves.const) - len(parameters)], *used])
            own, known = self.known(leaves)
            begin = begun()
            self.body.block(block, leaf, own, collect, known=known if results is None else results, expose=expose)
        if not self.checked:
            self.checked = bool(pairs)
            self.check_sources([s for s, _ in pairs], begin, [leaf, *leaves.dst, *leaves.edge, *leaves.const])
        wanted = [t for t in (leaf, *leaves.dst, *leaves.edge, *leaves.const) if t.requires_grad]
        if pairs and wanted:
            got = torch.autograd.grad([s for s, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
            found = dict(zip(map(id, wanted), got, strict=True))
        else:
            found = {}
        source = found.get(id(leaf))
        if source is None and needs.source:
            source = torch.zeros_like(x)
        return source, Rows(*([found.get(id(t)) for t in ts] for ts in leaves))


class SoftmaxPass(Pass):
    r"""Merges the maximum of scores, the sum of their exponentials and sums linear in the quotients, all at once.

    A block's results by its own maximum :math:`a` and normaliser :math:`b` count :math:`b e^{a - m}` in the whole.
    """

    def __init__(self, body: Body, program: Program) -> None:
        (self.peak,), (self.total,), keys = program.groups
        super().__init__(body, program, keys, ())
        self.saves_output = True

    def init(self, x: Tensor, num_dst: int) -> dict[int, Any]:
        """Return the state of destinations that have seen nothing."""
        state = super().init(x, num_dst)
        total = x.new_zeros(self.shape(self.total, num_dst), dtype=accumulator(self.found[self.total].like.dtype))
        return {**state, self.peak: torch.full_like(total, -torch.inf), self.total: total}

    def step(self, state: dict[int, Any], block: Block, x: Tensor, rows: Rows) -> dict[int, Any]:
        """Merge the block."""
        new: dict[int, Tensor] = {}

        def cut(k: int, found: Reduction) -> Tensor:
            self.check(k, found)
            if k == self.peak:
                new[k], _ = found.extremum(block.num_dst)
            else:
                new[k] = torch.zeros_like(state[k])
                found.add_to(new[k], block.rowptr)
            return new[k].to(found.like.dtype)  # this block's own result

        own, _ = self.known(rows)
        self.body.block(block, x, own, cut, known={})
        masked = new[self.peak] == -torch.inf  # all scores, if there are some
        new[self.total].masked_fill_(masked, 0)
        for k in self.keys:
            new[k].masked_fill_(heads(masked, new[k]), 0)
        peak = torch.maximum(state[self.peak], new[self.peak])
        finite = peak.masked_fill(peak == -torch.inf, 0)
        old = (state[self.peak] - finite).exp_()
        weight = new[self.total] * (new[self.peak] - finite).exp_()
        for k in self.keys:
            state[k].mul_(heads(old, state[k])).add_(new[k].mul_(heads(weight, new[k])))
        state[self.peak], state[self.total] = peak, state[self.total] * old + weight
        return state

    def finish(self, state: dict[int, Any], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise; a destination without edges gets 0."""
        peak, total = state.pop(self.peak), state.pop(self.total)
        total = total.masked_fill(total == 0, 1)
        for k in self.keys:
            state[k].div_(heads(total, state[k]))
        out, _ = super().finish(state, dtype)
        return out, (peak.masked_fill(peak == -torch.inf, 0), total)

    def prepare(self, saved: tuple[Tensor, ...], result: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        """Return maximum, normaliser and its gradient, and those of the sums."""
        peak, total = saved
        results, grads = self.split_results(result), self.split_results(out)
        inner = sum((fold(grads[k] * results[k], total) for k in self.keys), torch.zeros_like(total))
        return (peak, total, -inner / total, *grads.values())

    def grad(
        self, block: Block, x: Tensor | None, rows: Rows, saved: tuple[Tensor, ...], out: Tensor, needs: Needs
    ) -> Grads:
        """Run once more under autograd."""
        peak, total, *rest = saved
        grads = dict(zip((self.total, *self.keys), rest, strict=True))

        def cut(k: int, found: Reduction) -> tuple[Tensor, Tensor] | None:
            if k not in grads or not found.src.requires_grad:
                return None
            return found.src, found.read(grads[k]).to(found.src.dtype)

        like = {k: self.found[k].like.dtype for k in (self.peak, self.total)}
        known = {self.peak: peak.to(like[self.peak]), self.total: total.to(like[self.total])}
        return self.rebuild(block, x, rows, needs, cut, known, (self.total,))


def heads(weight: Tensor, like: Tensor) -> Tensor:
    """Return a factor for each destination and head in the shape of results, whose heads may lie side by side."""
    if like.shape[: weight.dim()] == weight.shape:
        return weight.reshape(*weight.shape, *[1] * (like.dim() - weight.dim()))
    n, h = weight.size(0), math.prod(weight.shape[1:])
    width = math.prod(like.shape[1:])
    if h == 0 or width % h:
        raise NotStreamable("sums have no column for each score")
    return weight.reshape(n, h, 1).expand(n, h, width // h).reshape(like.shape)


def fold(values: Tensor, like: Tensor) -> Tensor:
    """Add up what belongs to the same destination and head."""
    return values.reshape(*like.shape, math.prod(values.shape[1:]) // max(math.prod(like.shape[1:]), 1)).sum(-1)


def run(program: Program, body: Body) -> Tensor:
    """Stream a call."""
    graph, inputs = body.graph, body.inputs
    x, const = inputs.packed(graph.num_src), [*inputs.const, *body.parameters]
    if program.softmax:
        softmax = SoftmaxPass(body, program)
        known = softmax.split_results(aggregate(graph, softmax, x, inputs.dst, inputs.edge, const))
        for k in (softmax.peak, softmax.total):  # whatever they are: what is made of them is known
            known[k] = x.new_ones(softmax.shape(k, graph.num_dst), dtype=program.found[k].like.dtype)
        return body.end(known)
    known = {}
    for group in program.groups:
        merge = Pass(body, program, group, tuple(known))
        out = aggregate(graph, merge, x, [*inputs.dst, *known.values()], inputs.edge, const)
        known |= merge.split_results(out)
    return body.end(known)


@contextmanager
def unchanged(layer: torch.nn.Module, lost: bool = False) -> Iterator[None]:
    """Put attributes of a layer back, because what it keeps of messages would be that of a block.

    If they are ``lost``, something takes their place that says so when it is read: some layers look if they are there.
    """
    before = dict(layer.__dict__)
    try:
        yield
    finally:
        after = dict(layer.__dict__)
        layer.__dict__.clear()
        layer.__dict__.update(before)
        if lost:
            new = [name for name, value in after.items() if before.get(name) is not value]
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


Extremum = tuple[Tensor, Tensor]  # and by how many entries it is attained


def begun() -> int:
    """Return a number that is less than those of all operations that autograd will see from now on."""
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    assert node is not None
    return node._sequence_nr()


def hidden(outs: list[Tensor], begin: int, known: set[int]) -> list[Tensor]:
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


def _merge(op: str, one: Extremum, other: Extremum) -> Extremum:
    """Merge extrema of different entries."""
    (best, count), (new, more) = one, other
    better = (more > 0) & ((count == 0) | new.isnan() | ((new > best) if op == "amax" else (new < best)))
    count = torch.where(better, more, torch.where(new == best, count + more, count))
    return torch.where(better, new, best), count


def _flat(t: Tensor) -> Tensor:
    return t.reshape(t.size(0), math.prod(t.shape[1:]))


def _padded(t: Tensor) -> Tensor:
    """Return one row of zeros instead of none."""
    return torch.cat([t, t.new_zeros(1, *t.shape[1:])])


def _stop(*args: Any, **kwargs: Any) -> None:
    raise Stop


def _unexpected(k: int, found: Reduction) -> None:
    raise NotStreamable("it reduces more at its end than before")
