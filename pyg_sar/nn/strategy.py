r"""Finds out how a layer streams.

Its ``propagate`` is run on a tiny random graph and watched. What seems possible is then *checked* there: outputs and
all gradients over several blocks must be those of the layer's own code on the whole. Of these ways, the first takes
effect that passes on all workers:

1. ``kernel``: messages are source rows, perhaps weighted, and are summed up or alike: compiled kernels do that;
2. ``softmax``: its reductions are a softmax and sums that are linear in it: one pass, with a running maximum;
3. ``passes``: its code runs block by block, as often as its reductions need each other;
4. ``one shot``: rows of all blocks are fetched together and its code runs as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.distributed.assemble import shard
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay import PROPAGATE, Body, Program, begun, bind, heads, hidden, nodes_at, run, unchanged
from pyg_sar.nn.rows import start_rows
from pyg_sar.reduce import Rows
from pyg_sar.trace import NotStreamable, Reduction

WAYS = ("kernel", "softmax", "passes", "one shot")
KERNELS: dict[type, str] = {
    torch_geometric.nn.SumAggregation: "sum",
    torch_geometric.nn.MeanAggregation: "mean",
    torch_geometric.nn.MaxAggregation: "max",
    torch_geometric.nn.MinAggregation: "min",
}
# What a block cannot tell of the whole graph.
WHOLE = {"size", "size_j", "adj_t"}
SRC, DST, EDGES, PARTS = 7, 5, 23, 3  # of the tiny graph
VIEWS = ("View", "UnsafeView", "Reshape", "Split", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias", "Expand")
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


@dataclass
class Strategy:
    """How a layer streams when it is called with arguments of some kind.

    Args:
        way: One of ``WAYS``.
        why: Why it does no better.
        edge: The arguments that have a row for each edge.
        program: The reductions of a layer whose own code is run.
        aggr: The aggregation that a kernel does.
        weighted: Whether it weights the rows by an argument.
        const: The shapes of arguments that all edges share, and all workers.
    """

    way: str
    why: str = ""
    edge: frozenset[str] = frozenset()
    program: Program = dataclasses.field(default_factory=Program)
    aggr: str = ""
    weighted: bool = False
    const: dict[str, torch.Size] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Say it in a few words."""
        count = len(self.program.groups)
        return {
            "kernel": f"streams ({'weighted ' * self.weighted}{self.aggr} of source rows, by a kernel)",
            "softmax": "streams by replay (softmax, in one pass)",
            "passes": f"streams by replay (in {count} passes)" if count > 1 else "streams by replay",
            "one shot": f"runs in one shot ({self.why})",
        }[self.way]

    def run(self, layer: Any, graph: ShardedGraph, kwargs: dict[str, Any], drops: bool = True) -> Tensor:
        """Stream a call, with or without dropout."""
        inputs = bind(layer, kwargs, graph, self.edge)
        if self.way != "kernel":
            seed = graph.seeds.draw() if drops and self.program.drops else None
            body = Body(layer, inputs, graph, self.program, seed)
            body.drops = drops
            return run(self.program, body)
        weight = inputs.edge[0].view(-1) if self.weighted else None
        return nodes_at(start_rows(graph, inputs.src[0], self.aggr, weight)(), layer.node_dim)

    def fits(self, graph: ShardedGraph, kwargs: dict[str, Any]) -> bool:
        """Whether arguments are still rows of edges, or shared by them; all workers must find the same."""
        for name, t in kwargs.items():
            if name in self.edge and t.size(0) != graph.num_edges and t.shape[:1] == (1,):
                return False  # any other number of rows is an error, which says so
            if name in self.const and t.shape != self.const[name]:
                return False
        return True


STRATEGIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def strategy(layer: Any, graph: ShardedGraph, kwargs: dict[str, Any], size: Any = None) -> Strategy:
    """Return how a layer streams; it is found out once for arguments of a kind, by all workers together."""
    plans = STRATEGIES.setdefault(layer, {})
    counts = graph.bipartite and size is not None  # perhaps as many destinations as have edges here
    key = (graph.bipartite, graph.origin is None, counts, *state(layer, graph), *kinds(layer, kwargs))
    if counts:
        plans.setdefault(key, Strategy("one shot", "it counts the nodes of two sets"))
    plan = plans.get(key)
    if plan is None or not plan.fits(graph, kwargs) or not still(plan, layer, graph, kwargs):
        plan = plans[key] = find(layer, graph, kwargs)
    return plan


def find(layer: Any, graph: ShardedGraph, kwargs: dict[str, Any]) -> Strategy:
    """Find out how a layer streams."""
    largest = graph.exchange.largest
    rows = {name: t for name, t in kwargs.items() if isinstance(t, Tensor) and name not in lifted(layer)}
    sizes = [0 if t.dim() == 0 else t.size(0) for t in rows.values()]
    other = [
        isinstance(t, torch.nn.Parameter) or n != graph.num_edges for t, n in zip(rows.values(), sizes, strict=True)
    ]
    no, most, least = torch.tensor(largest([*other, *sizes, *(-n for n in sizes)])).view(3, -1).tolist()
    edge = frozenset(name for name, n in zip(rows, no, strict=True) if not n)
    found = candidates(layer, graph, kwargs, edge)
    (worst,) = largest([WAYS.index(found[0].way)])
    plan = next((s for s in found if WAYS.index(s.way) >= worst), found[-1])
    alike = [name for name, n, m in zip(rows, most, least, strict=True) if n == -m and name not in edge]
    plan.const = {name: rows[name].shape for name in alike}
    return plan


def still(plan: Strategy, layer: Any, graph: ShardedGraph, kwargs: dict[str, Any]) -> bool:
    """Whether a layer would do what a kernel does in its place: its code may depend on what it has become meanwhile."""
    if plan.way != "kernel":
        return True
    try:
        with apart(layer):
            tiny = Tiny(layer, graph, kwargs, plan.edge)
            probe = tiny.probe()
            probe.explore()
            return tiny.by_kernel(probe) is plan.weighted
    except Exception:  # whatever it is, the layer's code will raise it again
        return False


def state(layer: torch.nn.Module, graph: ShardedGraph) -> Iterator[Any]:
    """Yield what the code of a layer depends on besides its arguments."""
    device = graph.device.type
    yield torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    yield tuple((type(module), module.training) for module in layer.modules())
    yield tuple(p.dtype for p in layer.parameters())


def kinds(layer: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield what all workers know alike of arguments: not how many rows they have."""
    for name, value in kwargs.items():
        for v in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(v, Tensor) and v.dim() > 0:
                rows = layer.node_dim % v.dim() if name in lifted(layer) else 0
                yield name, v.dtype, tuple(n for dim, n in enumerate(v.shape) if dim != rows)
            else:
                yield name, type(v), v if isinstance(v, (bool, int, float, str)) else None


def lifted(layer: Any) -> set[str]:
    """Return the names of arguments that have rows of nodes."""
    return {name[:-2] for name in layer._user_args if name.endswith(("_i", "_j"))}


def candidates(layer: Any, graph: ShardedGraph, kwargs: dict[str, Any], edge: frozenset[str]) -> list[Strategy]:
    """Return the ways that pass on a tiny graph, the best one first; the last one always does."""
    last = Strategy("one shot", "another worker found that it does not stream", edge)
    found = []
    try:
        with apart(layer):
            tiny = Tiny(layer, graph, kwargs, edge)
            for plan in tiny.ways():
                if not (wrong := tiny.check(plan)):
                    found.append(plan)
                elif not found:
                    last.why = f"replayed, its {wrong} would differ"
    except NotStreamable as error:
        last.why = str(error)
    except Exception as error:  # the layer's own: with few edges, or of made-up values
        last.why = f"on a tiny graph it raises {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return [*found, last]


@contextmanager
def apart(layer: torch.nn.Module) -> Iterator[None]:
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
            torch.random.fork_rng(devices=[]),
            unchanged(layer),
        ):
            yield
    finally:
        handle.remove()


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


class NoDropout(TorchFunctionMode):
    """Nothing is dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the input of dropout."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "dropout":
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


class Tiny:
    """A random problem whose arguments are of the same kind, on which ways are looked for and checked."""

    def __init__(self, layer: Any, graph: ShardedGraph, kwargs: dict[str, Any], edge: frozenset[str]) -> None:
        asked = {name for f in ("message", "aggregate") for name in layer.inspector.get_param_names(f)}
        for name in asked & (WHOLE | lifted(layer)):
            raise NotStreamable(f"its messages ask for '{name}' as a whole")
        bind(layer, kwargs, graph, edge)  # raises if these do not stream
        self.layer, self.edge, self.device = layer, edge, graph.device
        self.random = torch.Generator().manual_seed(1)
        self.size = (SRC, DST) if graph.bipartite or graph.origin is not None else (SRC, SRC)
        edge_index = torch.stack([torch.randint(n, (EDGES,), generator=self.random) for n in self.size])
        edge_index[1].clamp_(min=1)  # one destination has no edges
        edge_index[:, :2] = 1  # two self-loops, which are one edge twice
        self.edge_index = edge_index.to(self.device)
        self.kwargs = {name: self.like(name, value) for name, value in kwargs.items()}

    def like(self, name: str, value: Any) -> Any:
        """Return made-up values of the same kind."""
        node_dim, sources = self.layer.node_dim, f"{name}_j" in self.layer._user_args
        if name in lifted(self.layer) and isinstance(value, (tuple, list)):
            return tuple(self.rows(v, n, node_dim) for v, n in zip(value, self.size, strict=True))
        if name in lifted(self.layer):
            return self.rows(value, self.size[0 if sources else 1], node_dim)
        if name in self.edge:
            return self.rows(value, EDGES, 0)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def rows(self, value: Any, count: int, dim: int) -> Any:
        """Return random rows; for those of integers, some that are there. Rows of edges may be weights: positive."""
        if not isinstance(value, Tensor):
            return value
        dim = dim % value.dim()
        shape = [count if d == dim else n for d, n in enumerate(value.shape)]
        if value.is_floating_point():
            make = torch.rand if count == EDGES else torch.randn
            return make(shape, generator=self.random, dtype=torch.float64).to(value.device, value.dtype) + 0.1
        if value.size(dim) == 0:
            return value.new_zeros(shape)
        some = torch.randint(value.size(dim), (count,), generator=self.random)
        return value.index_select(dim, some.to(value.device))

    def graph(self, parts: int) -> ShardedGraph:
        """Return the graph in some blocks."""
        size = self.size[0] if self.size[0] == self.size[1] else self.size
        return shard(self.edge_index, size, parts).graph

    def leaves(self) -> dict[str, Any]:
        """Return the arguments with gradients."""
        return {name: leaf(value) for name, value in self.kwargs.items()}

    def probe(self) -> Probe:
        """Return what runs the layer's code."""
        graph = self.graph(1)
        return Probe(Body(self.layer, bind(self.layer, self.leaves(), graph, self.edge), graph, Program(), 0))

    def ways(self) -> Iterator[Strategy]:
        """Yield what seems possible, the best one first."""
        probe, drawn = self.probe(), torch.get_rng_state()
        buffers = {name: b.clone() for name, b in self.layer.named_buffers()}
        before = footprint(self.layer)
        try:
            probe.explore()
        finally:
            left = footprint(self.layer) != before
            for name, b in self.layer.named_buffers():
                b.data.copy_(buffers.get(name, b))
        if left:
            raise NotStreamable("its messages leave something behind")
        if not torch.equal(drawn, torch.get_rng_state()):
            raise NotStreamable("it draws random numbers")
        program = probe.program
        weighted = self.by_kernel(probe)
        if weighted is not None:
            aggr = KERNELS[type(self.layer.aggr_module)]
            yield Strategy("kernel", edge=self.edge, aggr=aggr, weighted=weighted)
        if probe.is_softmax():
            groups = [*program.groups[:2], sum(program.groups[2:], ())]
            yield Strategy("softmax", "", self.edge, dataclasses.replace(program, groups=groups, softmax=True))
        yield Strategy("passes", "", self.edge, program)

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

    def check(self, plan: Strategy) -> str:
        """Compare with the layer's own code; return what differs."""
        one, other = self.leaves(), self.leaves()
        with NoDropout():
            expected = PROPAGATE(self.layer, self.edge_index, size=self.size, **one)
            found = plan.run(self.layer, self.graph(PARTS), other, False)
        if expected.shape != found.shape or not close(found, expected):
            return "output"
        parameters = [p for p in (*self.layer.parameters(), *plan.program.hidden) if p.requires_grad]
        grad = torch.randn(expected.shape, generator=self.random, dtype=torch.float64).to(expected)
        pairs = []
        for out, leaves in ((found, other), (expected, one)):
            wanted = [t for t in tensors(leaves) if t.requires_grad] + parameters
            pairs.append(torch.autograd.grad(out, wanted, grad, allow_unused=True) if out.requires_grad else [])
        if len(pairs[0]) != len(pairs[1]):
            return "gradients"
        there = pairs[1][-len(parameters) :] if parameters else ()
        plan.program.unused = [p for p, g in zip(parameters, there, strict=False) if g is None]
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
            known = {id(t) for t in (self.x, *self.rows.dst, *self.rows.edge, *self.rows.const, *self.body.parameters)}
            program.hidden += hidden([f.src for f in found.values()], begin, known | {id(t) for t in program.hidden})
            program.groups.append(tuple(found))
            for k, f in found.items():
                self.messages.append(f.src)
                grads = f.src.requires_grad
                program.found[k] = f._replace(entries=f.entries[:0], src=f.src.detach()[:0].requires_grad_(grads))
                self.values[k] = self.value(f)
        if not program.groups:
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
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=tol, atol=tol * (scale + 1e-3), equal_nan=True)


def tensors(kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments."""
    for value in kwargs.values():
        for v in value if isinstance(value, tuple) else (value,):
            if isinstance(v, Tensor):
                yield v
