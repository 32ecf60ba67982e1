"""Random layers, written as source code from what people write in messages, aggregations and updates."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from pathlib import Path
from typing import Any

HEAD = """
import torch
import torch.nn.functional as F
from torch.nn import Linear, Parameter
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_remaining_self_loops, add_self_loops, degree, remove_self_loops, scatter, softmax


class Layer(MessagePassing):
    def __init__(self):
        super().__init__({init})
        self.lin0, self.lin1, self.lin2 = Linear(4, 4), Linear(4, 4), Linear({width}, 4)
        self.score, self.norm, self.flag = Linear(4, 1), torch.nn.LayerNorm(4), True
        self.mlp = torch.nn.Sequential(Linear(4, 6), torch.nn.ReLU(), Linear(6, 4))
        self.weight, self.fold = Parameter(torch.randn(4, 4)), Parameter(torch.randn(8, 4))
        self.att, self.gate = Parameter(torch.randn(4)), Parameter(torch.{gate}(1))
        self.table = Parameter(torch.randn(3, 4))
"""
# What is made of rows: {a} and {b} are wide (4 columns), {n} has a single one, {r} is a reduction.
# fmt: off
ONE = """{a}.relu() | {a}.tanh() | {a}.abs() | F.leaky_relu({a}, 0.2) | {a}.square().tanh() | F.normalize({a}, dim=-1)
{a} - {a}.mean(-1, keepdim=True) | {a}.softmax(-1) | {a}.cumsum(-1) | {a}.flip(-1) | {a}.roll(1, -1)
{a}.sort(-1).values | self.lin1({a}) | {a} @ self.weight | torch.einsum('ec,cd->ed', {a}, self.weight)
{a}.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4) | {a}[:, [2, 0, 3, 1]] | torch.cat([{a}[:, 2:], {a}[:, :2]], -1)
torch.stack([{a}, {a}.relu()], 1).sum(1) | {a}.clamp(-1, 1) | F.layer_norm({a}, (4,)) | self.norm({a}) | self.mlp({a})
torch.where({a} > 0, {a}, 0.1 * {a}) | {a}.masked_fill({a} < -1, 0.5) | {a}.clone().mul_(2) | {a} * self.gate
{a} * self.att | {a}.detach() | {a}.unsqueeze(1).expand(-1, 3, -1).mean(1) | ({a}.exp() + 1).log()
{a}.topk(2, -1).values.repeat(1, 2) | {a}.gather(1, {a}.argsort(-1)) | {a} if self.flag else {a}.relu()
{a}.t().contiguous().t() | {a}.unbind(-1)[0].unsqueeze(-1) * {a} | sum({a}.chunk(2, -1)).repeat(1, 2)
{a}.reshape({a}.size(0), -1) | torch.zeros_like({a}) + {a} | {a}.new_ones({a}.size(0), 4) * {a} | {a} * self.table[1]
F.linear({a}, self.weight) | torch.outer({a}[:, 0], self.att) | torch.addmm(self.att, {a}, self.weight)
{a}.masked_select({a} == {a}).view(-1, 4) | F.dropout({a}, 0.5, training=False) | F.glu(torch.cat([{a}, {a}], -1))
F.one_hot({a}.argmax(-1), 4) * {a} | {a}.index_select(1, torch.tensor([3, 1, 0, 2])) | {a}.type_as(self.att)"""
TWO = """{a} + {b} | {a} - {b} | ({a} * {b}).tanh() | torch.maximum({a}, {b}) | torch.where({a} > {b}, {a}, {b})
torch.cat([{a}, {b}], -1) @ self.fold | torch.lerp({a}, {b}, 0.3) | torch.stack([{a}, {b}], -1).amax(-1)
{a} + self.gate * {b} | torch.addcmul({a}, {b}, self.att) | {a} * {b}.sigmoid()
torch.cdist({a}.unsqueeze(1), {b}.unsqueeze(1)).squeeze(1) * {a}"""
NARROW = """({a} * self.att).sum(-1, keepdim=True) | {a}.mean(-1, keepdim=True) | {a}.amax(-1, keepdim=True)
{a}[:, :1] | self.score({a}) | ({a} @ self.att).unsqueeze(-1) | {a}.sum(-1)[:, None]
F.cosine_similarity({a}, self.att.expand_as({a})).view(-1, 1)"""
SCORES = """softmax({n}, index, ptr, size_i) | softmax({n}, index, num_nodes=size_i) | {n}.tanh() | {n} * self.gate
softmax(F.leaky_relu({n}, 0.2), index, ptr, size_i) | softmax({n} * self.gate, index, ptr, size_i) | 1 - {n}
softmax({n}, index, ptr, size_i) + self.gate | softmax({n}, index, num_nodes=dim_size) * {n} | {n} + self.gate"""
BOTH = """{a} * {n} | {a} / ({n}.abs() + 1) | {a} + {n} | {n} * {a} | torch.where({n} > 0, {a}, -{a}) | {a}.mul({n})
({a}.t() * {n}.view(-1)).t() | {a}.masked_fill({n} > 0.5, 0.1) | torch.einsum('ec,e->ec', {a}, {n}.view(-1))"""
GROUPED = """{a} - scatter({a}, index, 0, dim_size=size_i, reduce='{r}')[index] | softmax({a}, index, ptr, size_i)
scatter({a}, index, 0, dim_size=size_i, reduce='{r}').index_select(0, index) | softmax({a}, index, ptr, size_i) * {a}
{a} / (degree(index, size_i, {a}.dtype)[index].view(-1, 1) + 1)
{a}.new_zeros(size_i, 4).index_add_(0, index, {a})[index].tanh()
{a} * (scatter({a}.square(), index, 0, dim_size=size_i, reduce='sum') + 1).rsqrt()[index]
{a}.new_full((size_i, 4), 0.0).index_reduce_(0, index, {a}, 'amax', include_self=False)[index]"""
OF_EDGES = """{a} * weight.view(-1, 1) | {a} + edge_attr | {a} * edge_attr.sigmoid() | self.lin1(edge_attr) + {a}
{a} + self.table[etype] | torch.cat([{a}, edge_attr], -1) @ self.fold | {a} * (weight > 0).view(-1, 1)
F.embedding(etype, self.table) * {a} | torch.einsum('ec,e->ec', {a}, weight) | {a} * F.one_hot(etype, 4)
torch.where((etype == 2).view(-1, 1), {a}, edge_attr) | self.table.index_select(0, etype) * {a}"""
# What sees other edges of a worker, or their order and numbers: exact, or refused.
ACROSS = """{a} - {a}.mean(0) | {a} / ({a}.abs().max() + 1) | {a}.cumsum(0).tanh() | {a}.flip(0) | {a} + {a}[:1]
{a}.roll(1, 0) | {a} * {a}.size(0) / 100 | {a} / len({a}) | ({a} @ ({a}.t() @ {a})).tanh() | {a}.softmax(0)
torch.arange({a}.size(0)).view(-1, 1) * {a} | {a}.sort(0).values | {a}[{a}[:, 0].argsort()] | {a}[index.argsort()]
{a} * index.view(-1, 1) | {a} * (index == 3).view(-1, 1) | {a} if {a}.sum() > 0 else {a}.relu()
{a} * (index.unique().numel() + 1) | F.normalize({a}, dim=0) | {a} / {a}.norm() | F.layer_norm({a}, {a}.shape)
F.batch_norm({a}, None, None, training=True) | torch.cat([{a}[1:], {a}[:1]]) | {a} - {a}.quantile(0.5, 0)
{a} - scatter({a}, index, 0)[index] | ({a}.unsqueeze(0) - {a}.unsqueeze(1)).mean(1) | {a} * ({a} > {a}.mean(0))
{a}.t().softmax(-1).t() | {a}.transpose(0, 1).mean(1) + {a} | {a} + torch.logsumexp({a}, 0)"""
LINES = ["""{o} = {a}.clone()
{o}[weight > 0] = 0""", """m = weight > 0
{o} = torch.zeros_like({a})
{o}[m] = self.lin1({a}[m])""", """{o} = torch.zeros_like({a})
for k in range(3):
    {o} = {o} + (etype == k).view(-1, 1) * ({a} * self.table[k])""", """{o} = torch.zeros_like({a})
for k in range(3):
    m = etype == k
    if m.any():
        {o}[m] = {a}[m] * self.table[k]""", """{o} = {a} * 1
{o}[:, 0] = {o}[:, 1] * 2""", """self.kept = {a}.detach()
{o} = {a} * 2""", """with torch.no_grad():
    s = {a}.norm(dim=-1, keepdim=True)
{o} = {a} / (s + 1)"""]
AGGREGATE = ["return scatter(inputs, index, dim=self.node_dim, dim_size=dim_size, reduce='{r}')",
"return super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size) * self.att",
"""w = softmax(self.score(inputs), index, ptr, dim_size)
return scatter(w * inputs, index, 0, dim_size=dim_size, reduce='{r}')""",
"""m = scatter(inputs, index, 0, dim_size=dim_size, reduce='max')
return scatter((inputs - m[index]).exp(), index, 0, dim_size=dim_size, reduce='sum').add(1e-9).log() + m""",
"""one = scatter(inputs, index, 0, dim_size=dim_size, reduce='mean')
other = scatter(inputs.relu(), index, 0, dim_size=dim_size, reduce='max')
return torch.cat([one, other], -1) @ self.fold""", """a = softmax(self.score(inputs), index, num_nodes=dim_size)
b = scatter(a * inputs, index, 0, dim_size=dim_size, reduce='sum')
c = softmax((inputs * b[index]).sum(-1, keepdim=True), index, num_nodes=dim_size)
return scatter(c * inputs, index, 0, dim_size=dim_size, reduce='sum')"""]
UPDATE = """aggr_out.relu() | self.lin2(aggr_out) | F.normalize(aggr_out, dim=-1) | self.lin2(aggr_out) + x
aggr_out * self.gate | self.lin2(aggr_out).tanh() * x"""
LOOPS = """add_self_loops(edge_index, num_nodes=x.size(0)) | remove_self_loops(edge_index)
add_remaining_self_loops(edge_index, num_nodes=x.size(0))"""
RETURNS = ["return {call}", "return {call} + x", "for _ in range(2):\n    x = {call}\nreturn x",
           "return self.lin1({call}).tanh()", "out = {call}\nreturn torch.cat([out, x], -1)"]
AGGR = ["add"] * 6 + ["mean"] * 3 + ["max"] * 2 + ["min", "mul", "std", "var", "softmax", "median", ["add", "max"]]
# fmt: on
GIVEN = "x_j x_i h_j h_i edge_attr weight etype index ptr size_i dim_size alpha aggr_out x"
EDGES = ("edge_attr", "weight", "etype")


class Writer:
    """Writes a layer, of the random numbers of a seed; perhaps one that looks ``across`` edges."""

    def __init__(self, seed: int, across: bool) -> None:
        self.random, self.across = random.Random(seed), 0.3 if across else 0.0

    def choose(self, text: str, **names: str) -> str:
        """Return one of several expressions."""
        return self.random.choice(re.split(r" \| |\n", text)).format(**names)

    def expressions(self, rows: list[str]) -> tuple[list[str], str]:
        """Return lines that make something of rows of edges, and what is made in the end."""
        wide, narrow, lines = rows[:], [], []
        for k in range(self.random.randint(0, 6)):
            a, b, n = wide[self.random.randrange(len(wide))], wide[-1], (narrow or ["1"])[-1]
            names = {"a": a, "b": b, "n": n, "o": f"v{k}", "r": self.random.choice(["sum", "mean", "max", "min"])}
            if self.random.random() < self.across:
                lines.append(f"v{k} = {self.choose(ACROSS, **names)}")
            elif (kind := self.random.random()) < 0.1:
                lines += self.random.choice(LINES).format(**names).split("\n")
            elif kind < 0.35:
                lines.append(f"v{k} = {self.choose(SCORES if narrow and kind < 0.2 else NARROW, **names)}")
                narrow.append(f"v{k}")
                continue
            else:
                kinds = [ONE, ONE, TWO, GROUPED, OF_EDGES, *[BOTH] * (len(narrow) > 0)]
                lines.append(f"v{k} = {self.choose(self.random.choice(kinds), **names)}")
            wide.append(f"v{k}")
        return lines, self.choose(BOTH, a=wide[-1], n=narrow[-1]) if narrow else wide[-1]

    def layer(self) -> tuple[str, list[str]]:
        """Return the source of a layer, and which tensors of edges it takes."""
        aggr, rows = self.random.choice(AGGR), self.random.choice([["x_j"], ["x_j", "x_i"], ["h_j"], ["x_j", "h_i"]])
        updates, several = self.random.random() < 0.15, isinstance(aggr, list)
        flow = ", flow='target_to_source'" if self.random.random() < 0.1 else ""
        lines, out = self.expressions(rows)
        methods = [method("message", [*lines, f"return {'alpha * ' * updates}({out})"])]
        if updates:
            lines, out = self.expressions(["x_j"] if self.random.random() < 0.5 else ["x_j", "x_i"])
            lines.append(f"return {self.choose(SCORES, n=f'self.score({out})')}")
            methods.append(method("edge_update", lines))
        if not several and self.random.random() < 0.2:
            text = self.random.choice(AGGREGATE).format(r=self.random.choice(["sum", "mean", "max"]))
            methods.append(method("aggregate", text.split("\n"), "inputs, index, ptr=None, dim_size=None"))
        if several or self.random.random() < 0.3:
            methods.append(method("update", [f"return {'self.lin2(aggr_out)' if several else self.choose(UPDATE)}"]))
        edges = [name for name in EDGES if uses(name, "\n".join(methods))]
        lines = ["x = self.lin0(x)"] * (self.random.random() < 0.5)
        named = ["x=x", *(f"{name}={name}" for name in edges)]
        if any("h" in name for name in rows):
            lines.append(self.choose("h = self.lin1(x) | h = x.tanh() | h = (x @ self.weight).relu()"))
            named.append("h=h")
        if not edges and self.random.random() < 0.3:
            lines.append(f"edge_index, _ = {self.choose(LOOPS)}")
        if updates:
            given = [f"{name}={name}" for name in ("x", *edges) if name == "x" or uses(name, methods[1])]
            lines.append(f"alpha = self.edge_updater(edge_index, {', '.join(given)})")
            named.append("alpha=alpha")
        call = f"self.propagate(edge_index, {', '.join(named)})"
        lines += self.random.choice(RETURNS).format(call=call).split("\n")
        head = HEAD.format(init=f"aggr={aggr!r}{flow}", width=8 if several else 4, gate=self.choose("zeros | ones"))
        return "\n".join([head, method("forward", lines, ", ".join(["x, edge_index", *edges])), *methods]), edges


def uses(name: str, text: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def method(name: str, lines: list[str], given: str = "") -> str:
    """Return the source of a method, which asks for what it reads."""
    text = "".join(f"        {line}\n" for line in lines)
    given = given or ", ".join(name for name in GIVEN.split() if uses(name, text))
    return f"    def {name}(self, {given}):\n{text}"


def load(source: str, path: Path) -> Any:
    """Return the layer's class, from a file of its own, as PyG wants to read its source."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where PyG looks for what annotations mean
    spec.loader.exec_module(module)
    return module.Layer
