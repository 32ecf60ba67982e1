r"""Finds out how a layer streams.

Its ``propagate`` is run on a tiny random graph and watched. What seems possible is then *checked* there: outputs and
all gradients over several blocks must be those of the layer's own code on the whole. Of these ways, the first takes
effect that passes on all workers:

1. ``kernel``: messages are source rows, perhaps weighted, and are summed up or alike: compiled kernels do that;
2. ``softmax``: its reductions are a softmax and sums that are linear in it: one pass, with a running maximum;
3. ``passes``: its code runs block by block, as often as its reductions need each other;
4. ``chunks``: rows of all blocks are fetched together, and its code runs on some destinations at a time;
5. ``padded``: the same, as if some destination of every chunk had as many edges as any in the graph;
6. ``one shot``: rows of all blocks are fetched together and its code runs as it is;
7. ``refused``: what it computes for a node depends on the edges of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.arguments import Call
from pyg_sar.nn.tiny import Tiny, apart
from pyg_sar.nn.way import WAYS, Strategy
from pyg_sar.trace import Mixed, NotStreamable

STRATEGIES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def strategy(call: Call, graph: ShardedGraph, size: Any = None) -> Strategy:
    """Return how a call streams; it is found out once for arguments of a kind, by all workers together."""
    plans = STRATEGIES.setdefault(call.layer, {})
    counts = graph.bipartite and size is not None  # perhaps as many destinations as have edges here
    key = (call.updates, graph.bipartite, graph.origin is None, counts, *state(call.layer, graph), *kinds(call))
    if counts:
        plans.setdefault(key, Strategy("one shot", "it counts the nodes of two sets"))
    plan = plans.get(key)
    if plan is None or not plan.fits(call, graph) or not still(plan, call, graph):
        plan = plans[key] = find(call, graph)
    return plan


def find(call: Call, graph: ShardedGraph) -> Strategy:
    """Find out how a call streams."""
    edge, const = rows_of_edges(call, graph)
    plan = agree(candidates(call, graph, edge), graph.exchange.largest)
    plan.const = const
    return plan


def rows_of_edges(call: Call, graph: ShardedGraph) -> tuple[frozenset[str], dict[str, torch.Size]]:
    """Return the names of arguments that have a row for each edge on all workers, and the shapes of others that are the
    same on all of them.
    """
    largest = graph.exchange.largest
    rows = {name: t for name, t in call.kwargs.items() if isinstance(t, Tensor) and name not in call.lifted}
    sizes = [0 if t.dim() == 0 else t.size(0) for t in rows.values()]
    other = [
        isinstance(t, torch.nn.Parameter) or n != graph.num_edges for t, n in zip(rows.values(), sizes, strict=True)
    ]
    no, most, least = torch.tensor(largest([*other, *sizes, *(-n for n in sizes)])).view(3, -1).tolist()
    edge = frozenset(name for name, n in zip(rows, no, strict=True) if not n)
    alike = [name for name, n, m in zip(rows, most, least, strict=True) if n == -m and name not in edge]
    return edge, {name: rows[name].shape for name in alike}


def agree(found: list[Strategy], largest: Callable[[list[int]], list[int]]) -> Strategy:
    """Return the best way that all workers have found; everybody has found the last one."""
    least = 0
    while True:
        plan = next(s for s in found if WAYS.index(s.way) >= least)
        mine = WAYS.index(plan.way)
        worst, best = largest([mine, -mine])
        if worst == -best:
            return plan
        least = worst


def still(plan: Strategy, call: Call, graph: ShardedGraph) -> bool:
    """Whether a layer would do what a kernel does in its place: its code may depend on what it has become meanwhile."""
    if plan.way != "kernel":
        return True
    try:
        with apart(call.layer, graph.device):
            tiny = Tiny(call, graph, plan.edge)
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
    yield parametrize._cache_enabled > 0  # weights are then made of others before they are read


def kinds(call: Call) -> Iterator[Any]:
    """Yield what all workers know alike of arguments: not how many rows they have."""
    for name, value in call.kwargs.items():
        for v in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(v, Tensor) and v.dim() > 0:
                rows = call.layer.node_dim % v.dim() if name in call.lifted else 0
                yield name, v.dtype, tuple(n for dim, n in enumerate(v.shape) if dim != rows)
            else:
                # Numbers may be other ones on other workers: of nodes, for example.
                yield name, type(v), v if isinstance(v, (bool, str)) else None


def candidates(call: Call, graph: ShardedGraph, edge: frozenset[str]) -> list[Strategy]:
    """Return the ways that pass on a tiny graph, the best one first, and what always is one."""
    others = "another worker found that it does not stream"
    last = [Strategy("one shot", others, edge), Strategy("refused", others)]
    try:
        with apart(call.layer, graph.device):
            tiny = Tiny(call, graph, edge)
            found: list[Strategy] = []
            try:
                why = tiny.sift(tiny.ways(), found)
            except NotStreamable as error:
                if tiny.spoilt:
                    raise
                why = str(error)
            if not found:
                differs = tiny.sift(tiny.chunks(why), found, Tiny(call, graph, edge, signed=True))
                if not found:
                    return [Strategy("refused", f"{why}, and on some destinations alone {differs}")]
            return [*found, *last]
    except Mixed as error:
        return [Strategy("refused", str(error))]
    except NotStreamable as error:
        last[0].why = str(error)
    except Exception as error:  # the layer's own: with few edges, or of made-up values
        last[0].why = f"on a tiny graph it raises {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    return last
