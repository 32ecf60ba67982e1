"""What ``layers.py`` measures: cases, and the implementations that its child processes hold."""

import ctypes
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
import torch_geometric.typing
from harness.process_memory import peak, settle
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

import pyg_sar
from pyg_sar.aggregate import reduce_rows
from pyg_sar.rewire import by_type

FEATURES, RELATIONS, BASES = 100, 8, 4
BF16 = " bf16"  # ends the names of implementations that hold rows of this type
SCATTER = "PyG, torch-scatter"


@dataclass(frozen=True)
class Case:
    """A layer of PyG, by name and arguments.

    Args:
        name: Of the case.
        layer: Class in ``torch_geometric.nn``; ``SimpleConv`` is the plain sum over edges, which has no parameters.
        args: Of its constructor; functions make them.
        options: Of its constructor.
        inputs: Width of the input.
        width: Numbers that an edge reads of its source, at least.
        linear: Columns of all linear maps of the input together, 0 if their cost depends on the graph.
        messages: Rows of ``width`` numbers for each edge that PyG holds at its peak, as measured on a small graph.
    """

    name: str
    layer: str
    args: tuple = ()
    options: dict[str, Any] = field(default_factory=dict)
    inputs: int = FEATURES
    width: int = FEATURES
    linear: int = 0
    messages: float = 2.5

    @property
    def implementations(self) -> list[str]:
        """All that compute this case, our own first; ``gather`` and ``linear maps`` are bounds."""
        names = ["pyg_sar"]
        if self.layer in DGL_PARAMETERS and importlib.util.find_spec("dgl"):
            names.append("DGL")
        names += {
            "SimpleConv": ["torch CSR", "PyG CSR", "PyG", "pyg_sar" + BF16, "gather" + BF16],
            "SAGEConv": ["PyG CSR", "PyG"],
            "GCNConv": ["PyG CSR", "PyG"],
            "RGCNConv": ["PyG", "PyG FastRGCNConv"],
        }.get(self.layer, ["PyG"])
        if importlib.util.find_spec("torch_scatter"):
            names.insert(names.index("PyG") + 1, SCATTER)
        return [*names, *["linear maps"] * (self.linear > 0), "gather"]

    def make(self, nn: Any, **options: Any) -> torch.nn.Module:
        """Construct the layer; the same weights in every process."""
        torch.manual_seed(0)
        args = [arg() if callable(arg) else arg for arg in self.args]
        return getattr(nn, self.layer)(*args, **{**self.options, **options})


def cases(device: str = "cpu") -> list[Case]:
    """Return all cases, in the order of the table."""
    found = []
    options = {"add_self_loops": False}  # the graph has them
    sizes = [(f"gat-{heads}", heads, FEATURES) for heads in (2, 4, 8)]
    for name, heads, channels in [*sizes, *[("gat-4x32", 4, 32)] * (device == "cuda")]:
        width, args = heads * channels, (FEATURES, channels, heads)
        found.append(Case(name, "GATConv", args, options, width=width, linear=width, messages=4.5))
    args, width = (FEATURES, FEATURES, 2), 2 * FEATURES
    found += [
        Case("gatv2", "GATv2Conv", args, options, width=width, linear=2 * width, messages=6.5),
        # An edge reads keys and values. Without biases, because the gradient of the keys' one is 0.
        Case("transformer", "TransformerConv", args, {"bias": False}, width=2 * width, linear=4 * width, messages=3.5),
        Case("sage", "SAGEConv", args[:2], linear=2 * FEATURES),
        Case("gcn", "GCNConv", args[:2], {**options, "cached": True}, linear=FEATURES, messages=3.5),
        Case("gen", "GENConv", args[:2], {"num_layers": 1, "learn_t": True}, linear=FEATURES, messages=10),
    ]
    if device == "cuda":
        mlp = partial(torch_geometric.nn.MLP, [FEATURES] * 3, norm=None)
        found += [*relational_cases(), Case("gin", "GINConv", (mlp,), {"train_eps": True}, linear=2 * FEATURES)]
    return found + [Case(f"sum-{w}", "SimpleConv", ("sum",), inputs=w, width=w) for w in (100, 128, 256, 400)]


def relational_cases() -> list[Case]:
    """Return R-GCN, with bases and without."""
    args = FEATURES, FEATURES, RELATIONS
    return [
        Case("rgcn", "RGCNConv", args, {"num_bases": BASES}, linear=(BASES + 1) * FEATURES),
        Case("rgcn-no-bases", "RGCNConv", args),
    ]


def narrow_cases() -> list[Case]:
    """Return attention whose heads are narrower than vectors, as in the layers of most examples."""
    found = []
    for heads, channels in ((8, 8), (1, 7)):
        width, args, loops = heads * channels, (FEATURES, channels, heads), {"add_self_loops": False}
        found += [
            Case(f"gat-{heads}x{channels}", "GATConv", args, loops, width=width, linear=width, messages=4.5),
            Case(f"gatv2-{heads}x{channels}", "GATv2Conv", args, loops, width=width, linear=2 * width, messages=6.5),
        ]
    return found


# What DGL calls the parameters of PyG's layers.
DGL_PARAMETERS = {
    "GATConv": {"lin.weight": "fc.weight", "att_src": "attn_l", "att_dst": "attn_r", "bias": "bias"},
    "GATv2Conv": {"lin_l.weight": "fc_src.weight", "lin_l.bias": "fc_src.bias", "lin_r.weight": "fc_dst.weight",
                  "lin_r.bias": "fc_dst.bias", "att": "attn"},
    "SAGEConv": {"lin_l.weight": "fc_neigh.weight", "lin_l.bias": "fc_self.bias", "lin_r.weight": "fc_self.weight"},
    "GCNConv": {"lin.weight": "weight", "bias": "bias"},
    "RGCNConv": {"weight": "linear_r.W", "comp": "linear_r.coeff", "root": "loop_weight", "bias": "h_bias"},
    "SimpleConv": {},
}  # fmt: skip
TRANSPOSED = {("GCNConv", "lin.weight")}


class Problem:
    """Inputs of a case: ``x``, ``edge_index`` sorted by destination, ``edge_type``, and the gradient of the output."""

    def __init__(self, case: Case, path: str, dtype: torch.dtype) -> None:
        # Clones, because what was loaded is a mapped file.
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        self.case, self.edge_index, self.edge_type = case, tensors["edge_index"], tensors["edge_type"]
        self.num_nodes, self.device = tensors["x"].size(0), "cpu"
        x = noise(self.num_nodes, case.inputs, 0, self.device) if case.layer == "SimpleConv" else tensors["x"]
        self.x = x.to(dtype)
        self.dtype = dtype

    def extra(self) -> list[Tensor]:
        """Arguments of the layer after ``edge_index``."""
        return [self.edge_type] if self.case.layer == "RGCNConv" else []

    def grad(self, out: Tensor) -> Tensor:
        """Return the gradient of the output ``out``, the same in every process but for its type."""
        return noise(*out.shape, 1, self.device).to(self.dtype)

    def csr(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """Return the transposed adjacency matrix, as PyG's layers want it, or with other numbers.

        Those of 32 bits are faster, but the gradient of torch's mean multiplies two of them, and is wrong.
        """
        row, col = self.edge_index[1], self.edge_index[0]
        ptr = torch.zeros(self.num_nodes + 1, dtype=dtype, device=self.device)
        ptr[1:] = torch.bincount(row, minlength=self.num_nodes).cumsum(0)
        ones = torch.ones(col.numel(), dtype=self.dtype, device=self.device)
        return torch.sparse_csr_tensor(ptr, col.to(dtype), ones, (self.num_nodes,) * 2, check_invariants=False)

    def block(self) -> Any:
        """Return the edges as ``pyg_sar`` walks them."""
        graph = pyg_sar.shard(self.edge_index, self.num_nodes, 1).graph
        return (by_type(graph, self.edge_type, RELATIONS).graph if self.extra() else graph).blocks[0]


def noise(rows: int, columns: int, seed: int, device: str) -> Tensor:
    """Draw numbers that are the same in bfloat16, so that all types have one reference."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device=device).bfloat16().float()


def clock(device: str) -> float:
    """Return the time in milliseconds, when all that was asked for is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


class Job:
    """One implementation of a case, with everything that it needs for a step.

    Args:
        problem: Its inputs.
        call: Computes the output from ``x``.
        parameters: By PyG's names.
        transposed: Names of those that are the other way round.
    """

    def __init__(
        self, problem: Problem, call: Callable[[Tensor], Tensor], parameters: dict[str, Tensor],
        transposed: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.problem, self.call, self.parameters, self.transposed = problem, call, parameters, transposed
        self.x = problem.x.requires_grad_()
        self.grad_out: Tensor | None = None

    def ready(self) -> bool:
        """Answer when everything is made."""
        return True

    def clear(self) -> None:
        for leaf in (self.x, *self.parameters.values()):
            leaf.grad = None

    def check(self, path: str) -> dict[str, float]:
        """Return the errors of the output and of all gradients against a reference."""
        self.clear()
        out = self.call(self.x)
        self.grad_out = self.problem.grad(out)
        out.backward(self.grad_out)
        found = {"out": out.detach(), "x": self.x.grad}
        for name, parameter in self.parameters.items():
            found[name] = parameter.grad.t() if name in self.transposed else parameter.grad
        reference = load_file(path)
        return {name: error(tensor, reference[name]) for name, tensor in found.items()}

    def repeat(self) -> tuple[float, float]:
        """Return the milliseconds of one forward and one backward pass."""
        self.clear()
        if self.grad_out is None:
            with torch.no_grad():
                self.grad_out = self.problem.grad(self.call(self.x))
        start = clock("cpu")
        out = self.call(self.x)
        middle = clock("cpu")
        out.backward(self.grad_out)
        end = clock("cpu")
        return middle - start, end - middle

    def memory(self) -> tuple[float, float]:
        """Return the peak of one forward and backward pass in MiB: above the inputs, and above what it returns, too."""
        self.call(self.x).sum().backward()  # what is made once and kept
        self.clear()
        before = settle(self.problem.device)
        out = self.call(self.x)
        grad_out = torch.ones_like(out)
        out.backward(grad_out)
        above = peak(self.problem.device) - before
        held = [out, grad_out, self.x.grad, *(p.grad for p in self.parameters.values())]
        return above, above - sum(t.nbytes for t in held) / 2**20


def error(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the error by that of the reference.

    Single entries say little: among millions of scores some round to the other side of LeakyReLU's kink, and change the
    gradients of their rows.
    """
    reference = reference.view(value.shape)
    return float((value.double() - reference).norm() / reference.norm())


class Gather:
    """Reads the rows that an aggregation must read, in its order."""

    def __init__(self, problem: Problem, library: str) -> None:
        self.function = ctypes.CDLL(library).gather
        self.function.argtypes = [*[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_int64, ctypes.c_int]
        self.function.restype = ctypes.c_uint64
        block, width = problem.block(), problem.case.width
        self.passes = [(block.col, block.num_src), (block.transpose[1], block.num_dst)]
        self.passes = [(index.int(), noise(rows, width, 0, "cpu").to(problem.dtype)) for index, rows in self.passes]
        self.ahead = 8

    def ready(self) -> int:
        """Find how many edges ahead rows are best asked for."""
        times = {}
        for self.ahead in (1, 2, 4, 8, 12, 16):
            times[self.ahead] = min(sum(self.repeat()) for _ in range(2))
        self.ahead = min(times, key=times.__getitem__)
        return self.ahead

    def repeat(self) -> list[float]:
        """Return the milliseconds of the forward and of the backward pass."""
        return [self.run(*each) for each in self.passes]

    def run(self, index: Tensor, rows: Tensor) -> float:
        start, row = time.perf_counter(), rows.size(1) * rows.element_size()
        threads = torch.get_num_threads()
        self.function(index.data_ptr(), index.numel(), rows.data_ptr(), row, self.ahead, threads)
        return 1e3 * (time.perf_counter() - start)


class Linear(Job):
    """All linear maps of a case's input as one."""

    def __init__(self, problem: Problem) -> None:
        weight = noise(problem.case.linear, problem.case.inputs, 0, problem.device).requires_grad_()
        super().__init__(problem, lambda x: F.linear(x, weight), {"weight": weight})


class Reference:
    """PyG in double precision, a range of destinations at a time: row ``i`` needs the edges into ``i`` alone."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def write(self, path: str) -> bool:
        """Write the output and all gradients."""
        problem, case = self.problem, self.problem.case
        edge_index, extra, options = problem.edge_index, problem.extra(), {}
        if case.layer == "GCNConv":  # the one layer that needs degrees of sources
            edge_index, weight = gcn_norm(
                edge_index, None, problem.num_nodes, add_self_loops=False, dtype=problem.dtype
            )
            extra, options = [weight], {"normalize": False, "cached": False}
        layer = case.make(torch_geometric.nn, **options).double().to(problem.device)
        x, outs = problem.x.requires_grad_(), []
        grad = None
        for rows, edges in self.ranges():
            out = layer(x, edge_index[:, edges], *(e[edges] for e in extra))
            grad = problem.grad(out) if grad is None else grad
            out[rows].backward(grad[rows])
            outs.append(out[rows].detach())
        gradients = {name: p.grad for name, p in layer.named_parameters()}
        save_file({"out": torch.cat(outs), "x": x.grad, **gradients}, path)
        return True

    def ranges(self) -> list[tuple[slice, slice]]:
        """Return ranges of destinations whose messages take about 2 GiB, and their edges."""
        problem = self.problem
        degree = torch.bincount(problem.edge_index[1], minlength=problem.num_nodes)
        ptr = [0, *degree.cumsum(0).tolist()]
        count = 1 + int(2 * pyg_memory(problem.case, ptr[-1])) // 2**31
        bounds = [problem.num_nodes * k // count for k in range(count + 1)]
        return [(slice(a, b), slice(ptr[a], ptr[b])) for a, b in pairwise(bounds) if a < b]


def pyg_memory(case: Case, edges: int) -> float:
    """Return about how many bytes PyG needs for the messages of a case in float32."""
    return case.messages * edges * case.width * 4


def needs(case: Case, implementation: str, edges: int) -> float:
    """Return about how many bytes an implementation needs for its messages, 0 if it keeps none."""
    if implementation == "PyG FastRGCNConv":
        return 2 * edges * FEATURES * FEATURES * 4  # a matrix for each edge, and its gradient
    return pyg_memory(case, edges) if implementation in ("PyG", SCATTER) else 0


def make_job(case: Case, implementation: str, path: str, library: str) -> Any:
    """Make what a child process holds."""
    dtype = torch.bfloat16 if implementation.endswith(BF16) else torch.float32
    if implementation == "reference":
        return Reference(Problem(case, path, torch.float64))
    problem = Problem(case, path, dtype)
    kind = implementation.removesuffix(BF16)
    if kind == "gather":
        return Gather(problem, library)
    if kind == "linear maps":
        return Linear(problem)
    return {"pyg_sar": ours, "DGL": dgl_job, "torch CSR": torch_csr}.get(kind, pyg)(problem, kind)


def ours(problem: Problem, kind: str) -> Job:
    edge_index = pyg_sar.shard(problem.edge_index, problem.num_nodes, 1)
    if problem.case.layer == "SimpleConv":
        return Job(problem, lambda x: reduce_rows(edge_index.graph, x, "sum"), {})
    layer, extra = problem.case.make(pyg_sar.nn).to(problem.device), problem.extra()
    return Job(problem, lambda x: layer(x, edge_index, *extra), dict(layer.named_parameters()))


def pyg(problem: Problem, kind: str) -> Job:
    torch_geometric.typing.WITH_TORCH_SCATTER = kind == SCATTER  # which PyG asks whenever it reduces
    nn, extra = torch_geometric.nn, problem.extra()
    layer = problem.case.make(nn)
    if kind == "PyG FastRGCNConv":
        fast = nn.FastRGCNConv(*problem.case.args, **problem.case.options)
        fast.load_state_dict(layer.state_dict())
        layer = fast
    layer.to(problem.device)
    adjacency = problem.csr() if kind == "PyG CSR" else problem.edge_index
    return Job(problem, lambda x: layer(x, adjacency, *extra), dict(layer.named_parameters()))


def torch_csr(problem: Problem, kind: str) -> Job:
    adjacency = problem.csr(torch.int32)
    return Job(problem, lambda x: adjacency @ x, {})


def dgl_job(problem: Problem, kind: str) -> Job:
    import dgl
    import dgl.nn.pytorch as nn

    case, (src, dst) = problem.case, problem.edge_index
    # DGL multiplies by the weights of relations faster where edges are sorted by relation.
    order = problem.edge_type.argsort(stable=True) if problem.extra() else slice(None)
    graph = dgl.graph((src[order].int(), dst[order].int()), num_nodes=problem.num_nodes)
    if case.layer == "SimpleConv":
        return Job(problem, lambda x: dgl.ops.copy_u_sum(graph, x), {})
    extra: list[Tensor] = []
    if case.layer == "RGCNConv":
        bases = case.options.get("num_bases")
        layer = nn.RelGraphConv(*case.args, regularizer="basis" if bases else None, num_bases=bases)
        extra = [problem.edge_type[order], relation_norm(problem)[order]]
    elif case.layer == "SAGEConv":
        layer = nn.SAGEConv(*case.args, "mean")
    else:
        layer = getattr(nn, {"GCNConv": "GraphConv"}.get(case.layer, case.layer))(*case.args)
    named, weights = dict(layer.named_parameters()), case.make(torch_geometric.nn).state_dict()
    parameters = {name: named[theirs] for name, theirs in DGL_PARAMETERS[case.layer].items() if name in weights}
    transposed = frozenset(name for layer_name, name in TRANSPOSED if layer_name == case.layer)
    with torch.no_grad():
        for name, parameter in parameters.items():
            weight = weights[name]
            parameter.copy_(weight.t() if name in transposed else weight.view(parameter.shape))
    options = {"presorted": True} if extra else {}
    return Job(problem, lambda x: layer(graph, x, *extra, **options).flatten(1), parameters, transposed)


def relation_norm(problem: Problem) -> Tensor:
    """Return what makes DGL's sum the mean over each relation's in-edges."""
    pair = problem.edge_type * problem.num_nodes + problem.edge_index[1]
    count = torch.bincount(pair, minlength=RELATIONS * problem.num_nodes)
    return (1 / count[pair]).unsqueeze(1)
