r"""A tiny random problem, on which ways to stream a layer are looked for and checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from pyg_sar.distributed.assemble import shard
from pyg_sar.dropout import NoDropout
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.arguments import PAIR, Call, bind
from pyg_sar.nn.body import Body, Lost, Program, begun, hidden, substituted, unchanged
from pyg_sar.nn.chunks import FEWEST, LARGEST, Chunks
from pyg_sar.nn.passes import heads
from pyg_sar.nn.way import Strategy
from pyg_sar.reduce import Rows
from pyg_sar.trace import NotStreamable, Reduction

KERNELS: dict[type, str] = {
    torch_geometric.nn.SumAggregation: "sum",
    torch_geometric.nn.MeanAggregation: "mean",
    torch_geometric.nn.MaxAggregation: "max",
    torch_geometric.nn.MinAggregation: "min",
}
# What a block cannot tell of the whole graph, and what a chunk cannot.
WHOLE = {"size", "size_j", "adj_t"}
NUMBERS = {"edge_index", "edge_index_i", "edge_index_j"}
SRC, DST, EDGES, PARTS = 7, 5, 23, 3  # of the tiny graph
FEW = 8  # messages of a chunk there
VIEWS = ("View", "UnsafeView", "Reshape", "Split", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias", "Expand")
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


@contextmanager
def apart(layer: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Leave no traces, and refuse modules that look at all rows they get: in messages, at all edges of the graph."""

    def refuse(module: torch.nn.Module, args: Any) -> None:
        if hasattr(type(module), "group") or (isinstance(module, _BatchNorm) and module.training):
            raise NotStreamable(f"its messages go through {type(module).__name__}, which sees all of them")

    handle = register_module_forward_pre_hook(refuse)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            saved_tensors_hooks(lambda t: t, lambda t: t),  # not those of a checkpoint
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            unchanged(layer),
        ):
            yield
    finally:
        handle.remove()


def random_states(device: torch.device) -> Tensor:
    """Return the states of the generators from which a layer may draw random numbers."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return torch.cat(states)


def footprint(layer: torch.nn.Module) -> list[Any]:
    """Return what messages may leave behind where nobody notices: in buffers, submodules, lists and dictionaries."""
    found: list[Any] = [(id(b), b._version) for b in layer.buffers()]
    for module in layer.modules():
        for name, value in module.__dict__.items():
            if isinstance(value, (list, dict, set)):
                found.append((name, len(value), *map(id, value.values() if isinstance(value, dict) else value)))
            elif module is not layer:
                found.append((name, id(value)))
    return found


class Tiny:
    """A random problem whose arguments are of the same kind, on which ways are looked for and checked.

    Args:
        call: The call.
        graph: The graph of it.
        edge: The arguments that have a row for each edge.
        signed: Whether rows of edges are of both signs; if not they are positive, because they may be weights.
    """

    def __init__(self, call: Call, graph: ShardedGraph, edge: frozenset[str], signed: bool = False) -> None:
        for name in call.asked_by_messages & (WHOLE | call.lifted):
            raise NotStreamable(f"its messages ask for '{name}' as a whole")
        bind(call, graph, edge)  # raises if these do not stream
        self.call, self.layer, self.edge, self.device, self.spoilt = call, call.layer, edge, graph.device, False
        self.random, self.signed = torch.Generator().manual_seed(1), signed
        self.size = (SRC, DST) if graph.bipartite or graph.origin is not None else (SRC, SRC)
        edge_index = torch.stack([torch.randint(n, (EDGES,), generator=self.random) for n in self.size])
        edge_index[1][edge_index[1] == 2] = 3  # one destination has no edges
        edge_index[:, :2] = 1  # two self-loops, which are one edge twice
        self.edge_index = edge_index.to(self.device)
        self.kwargs = {name: self.like(name, value) for name, value in call.kwargs.items()}

    def like(self, name: str, value: Any) -> Any:
        """Return made-up values of the same kind."""
        node_dim, sources = self.layer.node_dim, f"{name}_j" in self.call.asked
        if name in self.call.lifted and isinstance(value, (tuple, list)):
            return tuple(self.rows(v, n, node_dim) for v, n in zip(value, self.size, strict=True))
        if name in self.call.lifted:
            return self.rows(value, self.size[0 if sources else 1], node_dim)
        if name in self.edge:
            return self.rows(value, EDGES, 0)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def rows(self, value: Any, count: int, dim: int) -> Any:
        """Return random rows; for those of integers, some that are there.

        They are about as long as 1, however wide they are. Products of two such rows, of scores for example, are then
        sums of terms whose sizes add up to 1, too, and are rounded by at most as many units of the last place as there
        are terms (by their root, as a rule): ``TOLERANCE`` is that of rows of all widths up to 10,000. Longer rows
        would have scores that grow with their width: these are rounded in proportion, and a softmax of them chooses a
        single edge, so that its gradient is nothing but rounding.
        """
        if not isinstance(value, Tensor):
            return value
        dim = dim % value.dim()
        shape = [count if d == dim else n for d, n in enumerate(value.shape)]
        if value.is_floating_point():
            make = torch.rand if count == EDGES and not self.signed else torch.randn
            rows = make(shape, generator=self.random, dtype=torch.float64) + 0.1
            width = max(rows.numel() // max(count, 1), 1)
            return (rows / math.sqrt(width)).to(value.device, value.dtype)
        if value.size(dim) == 0:
            return value.new_zeros(shape)
        some = torch.randint(value.size(dim), (count,), generator=self.random)
        return value.index_select(dim, some.to(value.device))

    def graph(self, parts: int) -> ShardedGraph:
        """Return the graph in some blocks."""
        size = self.size[0] if self.size[0] == self.size[1] else self.size
        return shard(self.edge_index, size, parts)._graph

    def leaves(self) -> Call:
        """Return a call with gradients of its own."""
        return dataclasses.replace(self.call, kwargs={name: leaf(value) for name, value in self.kwargs.items()})

    def probe(self) -> Probe:
        """Return what runs the layer's code."""
        graph = self.graph(1)
        call = self.leaves()
        return Probe(Body(call, bind(call, graph, self.edge), graph, Program(), 0))

    def sift(self, ways: Iterator[Strategy], found: list[Strategy], other: Tiny | None = None) -> str:
        """Add those that pass, on another problem as well if there is one, and return why others do not."""
        why = ""
        for plan in ways:
            if wrong := self.check(plan) or (other.check(plan) if other else ""):
                why = f"its {wrong} would differ"
            else:
                found.append(plan)
        return why

    @contextmanager
    def unspoilt(self) -> Iterator[None]:
        """Raise for code that leaves something behind, or draws random numbers, which no run may do."""
        drawn, before, kept = random_states(self.device), footprint(self.layer), dict(self.layer.__dict__)
        buffers = {name: b.clone() for name, b in self.layer.named_buffers()}
        try:
            yield
        finally:
            # Of messages it is known what a layer keeps. Somebody may read what it keeps of edges.
            new = [v for name, v in self.layer.__dict__.items() if isinstance(v, Lost) and kept.get(name) is not v]
            left = footprint(self.layer) != before or (self.call.updates and len(new) > 0)
            for name, b in self.layer.named_buffers():
                b.data.copy_(buffers.get(name, b))
            self.spoilt = left or not torch.equal(drawn, random_states(self.device))
        if self.spoilt:
            raise NotStreamable("its messages leave something behind" if left else "it draws random numbers")

    def ways(self) -> Iterator[Strategy]:
        """Yield what seems possible block by block, the best one first."""
        probe = self.probe()
        with self.unspoilt():
            probe.explore()
        program = probe.program
        weighted = None if self.call.updates else self.by_kernel(probe)
        if weighted is not None:
            aggr = KERNELS[type(self.layer.aggr_module)]
            yield Strategy("kernel", edge=self.edge, aggr=aggr, weighted=weighted)
        if not self.call.updates and probe.is_softmax():
            groups = [*program.groups[:2], sum(program.groups[2:], ())]
            yield Strategy("softmax", "", self.edge, dataclasses.replace(program, groups=groups, softmax=True))
        yield Strategy("passes", "", self.edge, program)

    def chunks(self, why: str) -> Iterator[Strategy]:
        """Yield what seems possible with all edges of a destination at once, given why it does not stream."""
        if NUMBERS & set(self.call.asked):
            self.spoilt = True
            raise NotStreamable(why)
        probe, begin = self.probe(), begun()
        with self.unspoilt():
            out = Chunks(probe.body, FEW, FEWEST).step(None, probe.block, probe.x, probe.rows)
        program = Program(hidden=probe.hidden([out], begin), drops=probe.body.dropped)
        numbers = torch.arange(EDGES, device=self.device)
        for way in ("chunks", "padded"):
            plan = Strategy(way, why, self.edge, program)
            one, other = (
                plan.run(self.leaves(), self.graph(PARTS).replace(e_id=ids), False, FEW) for ids in (numbers, -numbers)
            )
            plan.ordered = not close(one, other)
            yield plan

    def same_on_shares(self, plan: Strategy, expected: Tensor) -> bool:
        """Whether two workers, each with some of the destinations and all their edges, find what one finds."""
        found = torch.full_like(expected, torch.nan)
        two = self.size[0] != self.size[1]
        for first, last in ((0, 2), (2, self.size[1])):
            # Their own nodes come first.
            own = torch.arange(first, last, device=self.device)
            dst = torch.cat([own, torch.arange(first, device=self.device)])
            dst = torch.cat([dst, torch.arange(last, self.size[1], device=self.device)])
            src = torch.arange(self.size[0], device=self.device) if two else dst
            edges = ((self.edge_index[1] >= first) & (self.edge_index[1] < last)).nonzero().view(-1)
            numbers = src.argsort(), dst.argsort()
            edge_index = torch.stack([n[row] for n, row in zip(numbers, self.edge_index[:, edges], strict=True)])
            call = dataclasses.replace(
                self.call, kwargs={k: self.chosen(k, v, src, own, edges) for k, v in self.kwargs.items()}
            )
            graph = shard(edge_index, (self.size[0], len(own)), PARTS)._graph.replace(bipartite=two)
            LARGEST[graph] = int(torch.bincount(self.edge_index[1]).max())
            out = plan.run(call, graph, False, FEW).detach()
            dim = 0 if self.call.updates else self.layer.node_dim
            found.index_copy_(dim % found.dim(), edges if self.call.updates else own, out)
        return close(found, expected)

    def chosen(self, name: str, value: Any, src: Tensor, dst: Tensor, edges: Tensor) -> Any:
        """Return what a worker has of an argument, given its sources, destinations and edges."""
        dim = self.layer.node_dim
        if name in self.call.lifted and isinstance(value, PAIR):
            pairs = zip(value, (src, dst), strict=True)
            return tuple(v.index_select(dim, rows) if isinstance(v, Tensor) else v for v, rows in pairs)
        if name in self.call.lifted and isinstance(value, Tensor):
            return value.index_select(
                dim, src if f"{name}_j" in self.call.asked or len(src) == value.size(dim) else dst
            )
        return value[edges] if name in self.edge else value

    def by_kernel(self, probe: Probe) -> bool | None:
        """Return whether messages are weighted rows, or plain ones; None if they are neither, or more is done to them.

        How they were made counts: other operations might happen to change nothing here.
        """
        layer, inputs, base = self.layer, probe.body.inputs, torch_geometric.nn.MessagePassing
        own = any(
            getattr(type(layer), f) is not getattr(base, f) or f in layer.__dict__ for f in ("aggregate", "update")
        )
        aggr = KERNELS.get(type(layer.aggr_module))
        if own or aggr is None or len(inputs.src) != 1 or inputs.table or probe.program.drops:
            return None
        x, weights = probe.x, [e for e in probe.rows.edge if e.numel() == EDGES]
        nodes_first = layer.node_dim % inputs.src[0].dim() == 0
        for node in (m.grad_fn for m in probe.messages):
            if is_rows(node, x):
                return False
            if node is None or node.name() != "MulBackward0" or not nodes_first or aggr not in ("sum", "mean"):
                continue
            one, other = (function for function, _ in node.next_functions)
            for rows, weight in ((one, other), (other, one)):
                if len(inputs.edge) == 1 and weights and is_rows(rows, x) and is_view(weight, weights[0]):
                    return True
        return None

    def whole(self, call: Call) -> Tensor:
        """Run the layer's own code on all edges; some of it asks for them in the order of destinations."""
        edges, size = (self.edge_index.flip(0), self.size[::-1]) if call.backwards else (self.edge_index, self.size)
        try:
            return call.run(edges, size, call.kwargs)
        except ValueError:
            order = self.edge_index[1].argsort(stable=True)
            kwargs = {name: t[order] if name in self.edge else t for name, t in call.kwargs.items()}
            out = call.run(edges[:, order], size, kwargs)
            return out[order.argsort()] if call.updates else out

    def check(self, plan: Strategy) -> str:
        """Compare with the layer's own code; return what differs."""
        own = [p for p in self.layer.parameters() if p.requires_grad]
        copies = [p.detach().requires_grad_() for p in own]  # whose hooks are nobody's
        with substituted(self.layer, own, copies):
            return self.compare(plan, own, copies)

    def compare(self, plan: Strategy, own: list[Tensor], copies: list[Tensor]) -> str:
        """Compare outputs and gradients; parameters of the layer are copies."""
        one, other = self.leaves(), self.leaves()
        with NoDropout():
            expected = self.whole(one)
            found = plan.run(other, self.graph(PARTS), False, FEW)
            if expected.shape != found.shape or not close(found, expected):
                return "output"
            if plan.way != "kernel" and not self.same_on_shares(plan, expected.detach()):
                return "output on a worker's share"
        parameters = [*copies, *(p for p in plan.program.hidden if p.requires_grad)]
        grad = torch.randn(expected.shape, generator=self.random, dtype=torch.float64).to(expected)
        pairs = []
        for out, call in ((found, other), (expected, one)):
            wanted = [t for t in tensors(call.kwargs) if t.requires_grad] + parameters
            pairs.append(torch.autograd.grad(out, wanted, grad, allow_unused=True) if out.requires_grad else [])
        if len(pairs[0]) != len(pairs[1]):
            return "gradients"
        there = pairs[1][-len(parameters) :] if parameters else ()
        plan.program.unused = [p for p, g in zip(own, there, strict=False) if g is None]
        dead = {id(t) for t, g in zip(wanted, pairs[1], strict=False) if g is None}
        plan.program.unread = frozenset(
            (name, side)
            for name, value in one.kwargs.items()
            for side, t in enumerate(value if isinstance(value, tuple) else (value, value))
            if id(t) in dead
        )
        for a, b in zip(*pairs, strict=True):
            like = a if a is not None else b
            if like is not None and not close(*(torch.zeros_like(like) if g is None else g for g in (a, b))):
                return "gradients"
        return ""


class Probe:
    """Runs a body again and again on all edges of a tiny graph."""

    def __init__(self, body: Body) -> None:
        self.body, self.program = body, Program()
        (self.block,), inputs = body.graph.blocks, body.inputs
        self.x = leaf(inputs.packed(body.graph.num_src))
        edge = [e[self.block.edges] for e in inputs.edge]
        self.rows = Rows(*([leaf(t) for t in ts] for ts in (inputs.dst, edge, inputs.const)))
        self.values: dict[int, Tensor] = {}
        self.messages: list[Tensor] = []

    def hidden(self, outs: list[Tensor], begin: int) -> list[Tensor]:
        """Return parameters of others that results were made of since the beginning."""
        rows = (self.x, *self.rows.dst, *self.rows.edge, *self.rows.const)
        return hidden(outs, begin, {id(t) for t in (*rows, *self.body.parameters, *self.program.hidden)})

    def cut(self, known: dict[int, Tensor], **how: Any) -> dict[int, Reduction]:
        """Return the reductions that come next."""
        found: dict[int, Reduction] = {}
        self.body.block(self.block, self.x, self.rows, found.__setitem__, known=known, **how)
        return found

    def explore(self) -> None:
        """Find all reductions, and what they reduce."""
        program = self.program
        begin = begun()
        while True:
            found = self.cut(dict(self.values))
            if not found:
                break
            program.hidden += self.hidden([f.src for f in found.values()], begin)
            program.groups.append(tuple(found))
            for k, f in found.items():
                self.messages.append(f.src)
                grads = f.src.requires_grad
                program.found[k] = f._replace(entries=f.entries[:0], src=f.src.detach()[:0].requires_grad_(grads))
                self.values[k] = self.value(f)
        if self.body.call.updates:
            out = self.body.block(self.block, self.x, self.rows, found.__setitem__, known=self.values)
            if not isinstance(out, Tensor) or out.shape[:1] != (EDGES,):
                raise NotStreamable(f"it makes a {type(out).__name__} of edges")
            program.updated = out.detach()[:0]
            program.hidden += self.hidden([out], begin)
        elif not program.groups:
            raise NotStreamable("it has no reduction by destination")
        program.drops = self.body.dropped

    def value(self, found: Reduction) -> Tensor:
        """Return a result."""
        num_dst = self.block.num_dst
        with torch.no_grad():
            if found.op == "sum":
                return found.total(num_dst)
            best, count = found.extremum(num_dst)
            return best.masked_fill(count == 0, 0)

    @torch.no_grad()
    def is_softmax(self) -> bool:
        r"""Whether reductions are :math:`m = \max_j s_j`, :math:`l = \sum_j e^{s_j - m}` and sums linear in
        :math:`e^{s_j - m} / l`.
        """
        groups, found = self.program.groups, self.program.found
        if len(groups) != 3 or len(groups[0]) != 1 or len(groups[1]) != 1:
            return False
        (peak,), (total,), sums = groups
        if (
            found[peak].op != "amax"
            or found[peak].src.requires_grad
            or any(found[k].op != "sum" for k in (total, *sums))
        ):
            return False
        values = {peak: self.values[peak]}
        more = torch.rand_like(values[peak]) + 0.5
        b = self.value(self.cut(values)[total])
        if not close(self.value(self.cut({peak: values[peak] + more})[total]) * more.exp(), b):
            return False
        b = b.masked_fill(b == 0, 1)
        if b.shape != more.shape:
            return False
        one = self.cut({**values, total: b})
        try:
            for factor in (more, more * 1e5, more * 1e-5):  # small and large shares alike
                other = self.cut({**values, total: b * factor})
                pairs = [(self.value(one[k]), self.value(other[k])) for k in sums]
                if not all(close(y * heads(factor, y), x) for x, y in pairs):
                    return False
        except NotStreamable:
            return False
        return True


def is_rows(node: Any, x: Tensor) -> bool:
    """Whether a node of autograd's graph stands for rows chosen from ``x`` and for nothing else."""
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "IndexSelectBackward0" and is_view(node.next_functions[0][0], x)


def is_view(node: Any, x: Tensor) -> bool:
    """Whether a node of autograd's graph stands for the entries of ``x`` in another shape."""
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and getattr(node, "variable", None) is x


def leaf(value: Any) -> Any:
    """Return a value, or a pair of them, with gradients of its own."""
    if isinstance(value, tuple):
        return tuple(map(leaf, value))
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers are the same up to rounding."""
    tol = TOLERANCE.get(expected.dtype, 0.1)
    if torch.is_autocast_enabled(expected.device.type):
        tol = max(tol, 0.1)
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=tol, atol=tol * (scale + 1e-3), equal_nan=True)


def tensors(kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments."""
    for value in kwargs.values():
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, Tensor):
                yield v
