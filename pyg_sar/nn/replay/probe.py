r"""A random problem on a small *probe graph*, on which strategies for a layer are looked for and verified."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import SIMPLE
from pyg_sar.autograd import nodes_behind
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.call import Call, Ends, Ref, aggregation_of
from pyg_sar.nn.replay.isolate import unchanged
from pyg_sar.nn.replay.passes import heads
from pyg_sar.nn.replay.probe_graph import EDGES, NUMBERS, Share, probe_graph
from pyg_sar.nn.replay.runner import Reductions, Runner, hidden_parameters, sequence_number
from pyg_sar.nn.replay.trace import NotStreamable, Reduction
from pyg_sar.reduce import Rows

WHOLE = {"size", "size_j", "adj_t"}  # what a block cannot tell of the whole graph
VIEWS = ("View", "UnsafeView", "Reshape", "Split", "Transpose", "Permute", "Unsqueeze", "Squeeze", "Alias", "Expand")
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


class Problem:
    """A call of a layer on the probe graph, with random arguments of the same kind as those of a call on a graph.

    Arguments named ``edge`` have a row for each edge: of both signs if ``signed``, else positive, because they may be
    weights. Where a layer cannot run on some edges at a time with such arguments, it raises ``NotStreamable``.
    """

    def __init__(self, call: Call, graph: ShardedGraph, edge: frozenset[str], signed: bool = False) -> None:
        functions = ("edge_update",) if call.updates else ("message", "aggregate")
        asked = {name for function in functions for name in call.layer.inspector.get_param_names(function)}
        for name in asked & (WHOLE | call.lifted):
            raise NotStreamable(f"its messages ask for '{name}' as a whole")
        call.bind(graph, edge)
        self.layer, self.edge, self.device, self.signed = call.layer, edge, graph.device, signed
        self.side_effects: list[str] = []  # of the layer's code
        self.is_positive = False
        self.random = torch.Generator("cpu").manual_seed(1)
        self.bipartite = graph.bipartite or graph.origin is not None
        self.probe_graph = probe_graph(self.bipartite, graph.device)
        self.taken = 0  # of its random numbers
        self.call = call.map(self.like, edge, self.bipartite)

    def like(self, kind: str, value: Any) -> Any:
        """Return random rows like an argument's; of integers, some that are there.

        They are about as long as 1, however wide they are. Products of two such rows, of scores for example, are then
        sums of terms whose sizes add up to 1, too, and are rounded by at most as many units of the last place as there
        are terms (by their root, as a rule): ``TOLERANCE`` is that of rows of all widths up to 10,000. Longer rows
        would have scores that grow with their width: these are rounded in proportion, and a softmax of them chooses a
        single edge, so that its gradient is nothing but rounding.
        """
        if not isinstance(value, Tensor):
            return value
        if kind == "const":
            return value.detach().clone()
        num_src, num_dst = self.probe_graph.size
        count = {"src": num_src, "dst": num_dst, "edge": EDGES}[kind]
        dim = (0 if kind == "edge" else self.layer.node_dim) % value.dim()
        shape = [count if d == dim else n for d, n in enumerate(value.shape)]
        if value.is_floating_point():
            rows = self.numbers(math.prod(shape), kind != "edge" or self.signed).view(shape) + 0.1
            return (rows / math.sqrt(max(rows.numel() // count, 1))).to(value.device, value.dtype)
        if value.size(dim) == 0:
            return value.new_zeros(shape)
        some = self.numbers(count, False).double() * value.size(dim)  # which in single precision might be that size
        return value.index_select(dim, some.long().to(value.device))

    def numbers(self, count: int, signed: bool) -> Tensor:
        """Return so many random numbers, of mean 0 and variance 1 or from 0 to 1: some that are kept on the device and
        were not taken yet, as long as there are any.
        """
        first, self.taken = self.taken, self.taken + count
        if self.taken <= NUMBERS:
            return (self.probe_graph.normal if signed else self.probe_graph.uniform)[first : self.taken]
        make = torch.randn if signed else torch.rand
        return make(count, generator=self.random, dtype=torch.float32, device="cpu").to(self.device)

    def positive(self) -> Problem:
        """Return the problem with positive numbers, of which logarithms and roots exist."""
        if self.is_positive:
            raise NotStreamable("it makes no finite numbers of random ones")

        def make(kind: str, value: Any) -> Any:
            given = kind != "const" and isinstance(value, Tensor) and value.is_floating_point()
            return value.abs() + 0.1 if given else value

        other = copy.copy(self)
        other.call, other.is_positive = self.call.map(make, self.edge, self.bipartite), True
        return other

    def shuffled(self) -> Problem:
        """Return the problem with other rows and numbers of what all edges share; itself if they share nothing."""
        found = []

        def make(kind: str, value: Any) -> Any:
            if kind != "const" or not isinstance(value, Tensor) or value.dim() == 0:
                return value
            found.append(value)
            rows = value[torch.randperm(len(value), generator=self.random, device="cpu").to(value.device)]
            if not rows.is_floating_point():
                return rows
            more = torch.rand(rows.shape, generator=self.random, dtype=torch.float64, device="cpu")
            return rows * (1 + more.to(rows) / 8)

        other = copy.copy(self)
        other.call = self.call.map(make, self.edge, self.bipartite)
        return other if found else self

    def leaves(self) -> Call:
        """Return a call with gradients of its own."""
        return self.call.map(lambda kind, value: leaf(value), self.edge, self.bipartite)

    def of(self, share: Share) -> Call:
        """Return the call of a worker that has a share of the probe graph."""

        def choose(kind: str, value: Any) -> Any:
            if kind == "const" or not isinstance(value, Tensor):
                return value
            return value.index_select((0 if kind == "edge" else self.layer.node_dim) % value.dim(), share.rows[kind])

        return self.call.map(choose, self.edge, self.bipartite)

    def run_whole(self, call: Call) -> Tensor:
        """Run the layer's own code on all edges; some of it asks for them in the order of destinations."""
        edges, size = self.probe_graph.edge_index.clone(), self.probe_graph.size
        order = edges[1].argsort(stable=True)
        if call.backwards:
            edges, size = edges.flip(0), size[::-1]
        update, ends = self.layer.update, {k: v[1] for k, v in call.kwargs.items() if type(v) is Ends}

        def of_destinations(out: Any, **given: Any) -> Any:
            return update(out, **{name: ends.get(name, value) for name, value in given.items()})

        with unchanged(self.layer, update=of_destinations):
            try:
                return call.run(edges, size, call.kwargs)
            except ValueError:
                kwargs = {name: t[order] if name in self.edge else t for name, t in call.kwargs.items()}
                out = call.run(edges[:, order], size, kwargs)
                return out[order.argsort()] if call.updates else out


class Probe:
    """Runs a layer's own code on all edges of the probe graph, again and again, and sees what it does."""

    def __init__(self, problem: Problem) -> None:
        graph, call, self.program = problem.probe_graph.in_blocks[1], problem.leaves(), Reductions()
        inputs = call.bind(graph, problem.edge)
        self.runner = Runner(call, inputs, graph, self.program, 0)
        self.runner.probes = True
        (self.block,) = graph.blocks
        self.x = leaf(inputs.packed(graph))
        edge = [e[self.block.edges] for e in inputs.edge]
        self.rows = Rows(*([leaf(t) for t in ts] for ts in (inputs.dst, edge, inputs.const)))
        self.values: dict[int, Tensor] = {}
        self.messages: list[Tensor] = []

    def hidden(self, outs: list[Tensor], begin: int) -> list[Tensor]:
        """Return parameters of others that results were made of since the beginning."""
        rows = (self.x, *self.rows.dst, *self.rows.edge, *self.rows.const)
        known = {id(t) for t in (*rows, *self.runner.parameters, *self.program.hidden)}
        return hidden_parameters(outs, begin, known)

    def reduced(self) -> frozenset[Ref]:
        """Return the arguments of which messages are made."""
        read = {id(node.variable) for node in nodes_behind(self.messages) if hasattr(node, "variable")}
        rows = {Ref(kind, k): t for kind, ts in zip(Rows._fields, self.rows, strict=True) for k, t in enumerate(ts)}
        rows |= {Ref("src", k): self.x for k in range(len(self.runner.inputs.src))}
        return frozenset(ref for ref, t in rows.items() if id(t) in read)

    def cut(self, known: dict[int, Tensor]) -> dict[int, Reduction]:
        """Return the reductions that come next."""
        found: dict[int, Reduction] = {}
        self.runner.run_block(self.block, self.x, self.rows, found.__setitem__, known=known)
        return found

    def explore(self) -> None:
        """Find all reductions, and what they reduce."""
        program = self.program
        begin = sequence_number()
        while found := self.cut(dict(self.values)):
            program.hidden += self.hidden([f.src for f in found.values()], begin)
            program.groups.append(tuple(found))
            for k, f in found.items():
                self.messages.append(f.src)
                grads = f.src.requires_grad
                program.found[k] = f._replace(entries=f.entries[:0], src=f.src.detach()[:0].requires_grad_(grads))
                self.values[k] = self.value(f)
        if self.runner.call.updates:
            out = self.runner.run_block(self.block, self.x, self.rows, found.__setitem__, known=self.values)
            if not isinstance(out, Tensor) or out.shape[:1] != (EDGES,):
                raise NotStreamable(f"it makes a {type(out).__name__} of edges")
            program.updated = out.detach()[:0]
            program.hidden += self.hidden([out], begin)
        elif not program.groups:
            raise NotStreamable("it has no reduction by destination")
        program.drops, program.reduced = self.runner.dropped, self.reduced()

    def operations(self, program: Reductions) -> list[str]:
        """Return the names of the operations that messages are made by, in the order of autograd's graph, given all
        results but the last ones, of any value.
        """
        found: dict[int, Reduction] = {}
        likes = {k: program.found[k].like for group in program.groups[:-1] for k in group}
        known = {k: like.new_ones(self.block.num_dst, *like.shape[1:]) for k, like in likes.items()}
        how: dict[str, Any] = {"known": known, "expose": tuple(known)}
        self.runner.run_block(self.block, self.x, self.rows, found.__setitem__, **how)
        stack: list[Any] = [found[k].src.grad_fn for k in sorted(found)]
        names, seen = [], set()
        while stack:
            node = stack.pop()
            names.append("" if node is None else node.name())
            if node is not None and node not in seen:
                seen.add(node)
                stack += [following for following, _ in node.next_functions]
        return names

    def value(self, found: Reduction) -> Tensor:
        """Return a result."""
        num_dst = self.block.num_dst
        with torch.no_grad():
            if found.op == "sum":
                return found.total(num_dst)
            best, count = found.extremum(num_dst)
            return best.masked_fill(count == 0, 0)

    def kernel(self) -> bool | None:
        """Return whether messages are weighted rows, or plain ones; None if they are neither, or more is done to them.

        How they were made counts: other operations might happen to change nothing here.
        """
        layer, inputs, base = self.runner.layer, self.runner.inputs, torch_geometric.nn.MessagePassing
        own = any(
            getattr(type(layer), f) is not getattr(base, f) or f in layer.__dict__ for f in ("aggregate", "update")
        )
        aggr = next(iter(aggregation_of(layer)), "")
        if own or aggr not in SIMPLE or len(inputs.src) != 1 or inputs.table or self.program.drops:
            return None
        x, weights = self.x, [e for e in self.rows.edge if e.numel() == EDGES]
        nodes_first = layer.node_dim % inputs.src[0].dim() == 0
        made = [m.grad_fn for m in self.messages if m.grad_fn is not None]  # a mean counts messages, too
        if len(made) != 1:
            return None
        if is_rows(made[0], x):
            return False
        if made[0].name() != "MulBackward0" or not nodes_first or aggr not in ("sum", "mean"):
            return None
        one, other = (function for function, _ in made[0].next_functions)
        for rows, weight in ((one, other), (other, one)):
            if len(inputs.edge) == 1 and weights and is_rows(rows, x) and is_view(weight, weights[0]):
                return True
        return None

    @torch.no_grad()
    def is_softmax(self) -> bool:
        r"""Whether reductions are :math:`m = \max_j s_j`, :math:`l = \sum_j e^{s_j - m}` and sums linear in
        :math:`e^{s_j - m} / l`.
        """
        groups, found = self.program.groups, self.program.found
        if [len(group) for group in groups[:2]] != [1, 1] or len(groups) != 3:
            return False
        (row_max,), (normaliser,), sums = groups
        ops = [found[k].op for k in (row_max, normaliser, *sums)]
        if ops != ["amax", *["sum"] * (len(ops) - 1)] or found[row_max].src.requires_grad:
            return False
        m = self.values[row_max]
        more = torch.rand_like(m) + 0.5
        total = self.value(self.cut({row_max: m})[normaliser])
        if not close(self.value(self.cut({row_max: m + more})[normaliser]) * more.exp(), total):
            return False
        if total.shape != more.shape:
            return False
        total = total.masked_fill(total == 0, 1)
        one = self.cut({row_max: m, normaliser: total})
        try:
            for factor in (more, more * 1e5, more * 1e-5):  # small and large shares alike
                other = self.cut({row_max: m, normaliser: total * factor})
                pairs = [(self.value(one[k]), self.value(other[k])) for k in sums]
                if not all(close(y * heads(factor, y), x) for x, y in pairs):
                    return False
        except NotStreamable:
            return False
        return True


def is_rows(node: Any, x: Tensor) -> bool:
    """Whether a node of autograd's graph stands for rows chosen from ``x`` and for nothing else."""
    node = behind_views(node)
    return node is not None and node.name() == "IndexSelectBackward0" and is_view(node.next_functions[0][0], x)


def is_view(node: Any, x: Tensor) -> bool:
    """Whether a node of autograd's graph stands for the entries of ``x`` in another shape."""
    return getattr(behind_views(node), "variable", None) is x


def behind_views(node: Any) -> Any:
    """Return the node of which views were made."""
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node


def leaf(value: Any) -> Any:
    """Return a value with a gradient of its own."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether numbers are the same up to rounding."""
    tol = TOLERANCE.get(expected.dtype, 0.1)
    if torch.is_autocast_enabled(expected.device.type):
        tol = max(tol, 0.1)
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    found, expected = found.detach().double(), expected.detach().double()
    scale = expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=tol, atol=tol * (scale + 1e-3), equal_nan=True)
