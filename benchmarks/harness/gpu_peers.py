"""Fused layers of others, which ``gpu_layers.py`` measures where they can be imported: Turbo-GNN's GATv2 and graph
transformer (``pip install --pre turbo-gnn``), and dgNN's GAT (built from https://github.com/dgSPARSE/dgNN).
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from harness.layer_jobs import FEATURES, Case, Job, Problem
from torch import Tensor

TURBO, DGNN = "Turbo-GNN", "dgNN"
# Turbo-GNN takes a graph as it is, here symmetric, or as a directed one, and can tune its forward pass.
PEERS = {
    "GATConv": [DGNN],
    **{layer: [TURBO + how for how in ("", ", directed", ", tuned", ", directed, tuned")]
       for layer in ("GATv2Conv", "TransformerConv")},
}  # fmt: skip
MODULES = {TURBO: "turbo_gnn", DGNN: "dgNN"}
WIDTHS = (32, 64, 128, 256)  # of heads that Turbo-GNN has kernels for
KEPT: dict[Any, Any] = {}  # graphs of the last problem, made once


def peers(case: Case) -> list[str]:
    """Return the names of what can be imported."""
    return [name for name in PEERS.get(case.layer, []) if importlib.util.find_spec(MODULES[name.split(",")[0]])]


def cases() -> list[Case]:
    """Return attention with heads of widths that Turbo-GNN has kernels for."""
    found = []
    for kind, layer, options in (("gatv2", "GATv2Conv", {"add_self_loops": False}),
                                 ("transformer", "TransformerConv", {"bias": False})):  # fmt: skip
        for heads, channels in ((4, 32), (2, 128)):
            width = heads * channels * (2 if kind == "transformer" else 1)
            args = FEATURES, channels, heads
            found.append(Case(f"{kind}-{heads}x{channels}", layer, args, options, width=width))
    return found


def job(problem: Problem, name: str) -> Job:
    """Make a job of a peer, with the parameters of PyG's layer."""
    parameters = dict(problem.case.make(torch_geometric.nn).to(problem.device).named_parameters())
    call = dgnn(problem, parameters) if name == DGNN else turbo(problem, parameters, name)
    return Job(problem, call, parameters)


def kept(problem: Problem, key: Any, make: Callable[[], Any]) -> Any:
    """Make something of a graph once."""
    if KEPT.get("of") is not problem.edge_index:
        KEPT.clear()
        KEPT["of"] = problem.edge_index
    if key not in KEPT:
        KEPT[key] = make()
    return KEPT[key]


def dgnn(problem: Problem, p: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    from dgNN.layers.gatconv_layer import GATConv

    _, channels, heads = problem.case.args
    layer = GATConv(problem.case.inputs, channels, heads).to(problem.device)

    block = kept(problem, DGNN, problem.block)
    graph = block.rowptr, block.col, *block.transpose

    def call(x: Tensor) -> Tensor:
        own = {"W": p["lin.weight"].t(), "attn_l": p["att_dst"], "attn_r": p["att_src"], "bias": p["bias"]}
        return torch.func.functional_call(layer, own, (*graph, x)).flatten(1)

    return call


def turbo(problem: Problem, p: dict[str, Tensor], name: str) -> Callable[[Tensor], Tensor]:
    """Heads of other widths are widened by zeros of the weights, which changes no result."""
    import turbo_gnn

    _, channels, heads = problem.case.args
    wide = next(w for w in WIDTHS if w >= channels) - channels

    def rows(x: Tensor, linear: str) -> Tensor:
        weight = F.pad(p[f"{linear}.weight"].view(heads, channels, -1), (0, 0, 0, wide)).flatten(0, 1)
        bias = p.get(f"{linear}.bias")
        bias = bias if bias is None else F.pad(bias.view(heads, channels), (0, wide)).flatten()
        return F.linear(x, weight, bias).view(-1, heads, channels + wide)

    def gatv2(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        att = F.pad(p["att"][0], (0, wide))
        return rows(x, "lin_r"), {"x_neighbors": rows(x, "lin_l"), "attention_weights": att, "negative_slope": 0.2}

    def transformer(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        # What it calls Q belongs to the sources, what it calls K to the destinations.
        return x, {
            "Q": rows(x, "lin_key"),
            "K": rows(x, "lin_query"),
            "V": rows(x, "lin_value"),
            "scale": channels**-0.5,
        }

    if problem.case.layer == "GATv2Conv":
        inputs, aggregate, kernel = gatv2, turbo_gnn.gatv2_aggr, turbo_gnn.GATv2AggrKernel
    else:
        inputs, aggregate = transformer, turbo_gnn.graph_transformer_aggr
        kernel = turbo_gnn.GraphTransformerAggrKernel
    directed, options = "directed" in name, {}
    graph = graph_of(problem, directed)
    if "tuned" in name:
        key = "tuned", problem.case.name
        best, options = kept(problem, key, lambda: tuned(problem, inputs, aggregate, kernel))
        graph = best if directed else with_buckets_of(best, graph)

    def call(x: Tensor) -> Tensor:
        first, more = inputs(x)
        out = aggregate(graph, first, **more, **options).view(-1, heads, channels + wide)[..., :channels].flatten(1)
        return out + (p["bias"] if "bias" in p else F.linear(x, p["lin_skip.weight"]))

    return call


def graph_of(problem: Problem, directed: bool) -> Any:
    """Return Turbo-GNN's graph, with 32-bit indices and buckets as it makes them."""
    from turbo_gnn import AdjacencyForwardBackwardWithNodeBuckets

    def make() -> Any:
        more = {"is_directed": True} if directed else {}
        of_edges = AdjacencyForwardBackwardWithNodeBuckets.from_edge_list
        graph = of_edges(problem.edge_index, problem.num_nodes, index_dtype=torch.int32, **more)
        assert graph.is_directed == directed, "the graph is not symmetric"
        return graph

    return kept(problem, ("graph", directed), make)


def tuned(problem: Problem, inputs: Any, aggregate: Any, kernel: Any) -> tuple[Any, dict[str, Any]]:
    """Have it tune its forward pass, and return the graph in buckets and the settings that it found."""
    from turbo_gnn import AutotuneConfig

    graph = graph_of(problem, True).repartition()  # a new one, by which it remembers
    with torch.no_grad():
        first, more = inputs(problem.x)
        aggregate(graph, first, **more, autotune=True, autotune_config=AutotuneConfig(warmup=1, iters=2))
    found = kernel._get_or_create()._inline_cache.lookup(graph, first.shape[-1])
    return found["graph_repr"], dict(found["kernel_config"])


def with_buckets_of(best: Any, graph: Any) -> Any:
    """Return a symmetric graph in the same buckets."""
    names = ("forward_light_nodes", "forward_heavy_nodes", "backward_light_nodes", "backward_heavy_nodes")
    lists = graph.forward_indptr, graph.forward_indices, graph.backward_indptr, graph.backward_indices
    return type(graph)(*lists, *(getattr(best, name) for name in names), is_directed=False)
