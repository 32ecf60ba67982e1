r"""Infers the execution strategy of a layer's call, at the first call with arguments of some kind.

The layer's ``propagate`` is *probed*: it runs on a small random graph, and a trace sees what it does. Each candidate is
then *verified* there: outputs and all gradients over several blocks must be those of the layer's own code on the whole.
The workers *agree* on the first strategy that passes on all of them:

1. ``kernel``: messages are source rows, perhaps weighted, and are summed up or alike: compiled kernels do that;
2. ``softmax``: its reductions are a softmax and sums that are linear in it: one pass, with a running maximum;
3. ``passes``: its code runs block by block, as often as its reductions need each other;
4. ``chunks``: rows of all blocks are fetched together, and its code runs on some destinations at a time;
5. ``padded``: the same, as if some destination of every chunk had the maximum in-degree of the graph;
6. ``one-shot``: rows of all blocks are fetched together and its code runs as it is;
7. ``refused``: what it computes for a node depends on the edges of others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.call import PAIR, Call, Ends, aggregation_of
from pyg_sar.nn.replay.chunks import FEWEST, Chunks, largest_degree
from pyg_sar.nn.replay.isolate import isolated, side_effects
from pyg_sar.nn.replay.probe import Probe, Problem, close
from pyg_sar.nn.replay.probe_graph import BLOCKS, EDGES, SRC
from pyg_sar.nn.replay.runner import Reductions, sequence_number
from pyg_sar.nn.replay.strategy import NAMES, Strategy
from pyg_sar.nn.replay.trace import MixesEdges, NotStreamable, ReadsRows
from pyg_sar.nn.replay.verify import FEW, passing

RowsOf = tuple[frozenset[str], frozenset[str], dict[str, torch.Size]]
STRATEGIES: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of every layer, by the kind of call
CHUNKS_CANNOT = {"edge_index", "edge_index_i", "edge_index_j"}  # tell messages which nodes they are about


def choose(
    call: Call, graph: ShardedGraph, size: Any, own_code: bool = False, rows: RowsOf | None = None
) -> Strategy:  # fmt: skip
    """Return the strategy of a call; all workers infer it together, once for arguments of a kind. With ``own_code`` the
    layer's own code runs in its place, if that is allowed. What :func:`rows_of` says is known of a chunk of a graph.
    """
    inferred = STRATEGIES.setdefault(call.layer, {})
    counts = graph.bipartite and size is not None  # perhaps as many destinations as have edges here
    kind = (counts, *kind_of(call, graph))
    if counts:
        inferred.setdefault(kind, Strategy("one-shot", "it counts the nodes of two sets"))
    strategy = inferred.get(kind)
    trusted = own_code and strategy is not None and strategy.allows_own_code
    if strategy is None or not strategy.fits(call, graph) or not (trusted or still_valid(strategy, call, graph)):
        edge, nodes, const = rows_of(call, graph) if rows is None else rows
        with closing(candidates(replace(call, nodes=nodes), graph, edge)) as found:
            strategy = inferred[kind] = agree(found, graph.exchange.all_reduce_max)
        strategy.const = const
    return strategy


def still_valid(strategy: Strategy, call: Call, graph: ShardedGraph) -> bool:
    """Whether a layer would still do what a kernel does in its place, or has sums that are linear in a softmax.

    Its code may depend on anything that changed meanwhile, of which no version number tells. So such a layer is probed
    at every call: its ``propagate`` runs once or twice on the 23 edges of the probe graph, which takes 2 to 3 ms on a
    CPU, however large the graph is. What counts are operations and not numbers, by which workers might differ. Other
    strategies run the layer's code as it is now, and notice where it mixes edges. The layers of :mod:`pyg_sar.nn` need
    no probe.
    """
    if strategy.name not in ("kernel", "softmax"):
        return True
    try:
        with isolated(call.layer, graph.device):
            probe = Probe(Problem(replace(call, nodes=strategy.nodes), graph, strategy.edge))
            if strategy.name == "softmax":
                return probe.operations(strategy.program) == strategy.program.operations
            probe.explore()
            return probe.kernel() is strategy.weighted
    except Exception:  # whatever it is, the layer's code will raise it again
        return False


def kind_of(call: Call, graph: ShardedGraph) -> Iterator[Any]:
    """Yield what a strategy depends on that all workers know alike: not how many rows arguments have."""
    device = graph.device.type
    yield from (call.updates, graph.bipartite, graph.origin is None)
    # Workers that have inferred something together know it together: others, or one alone, may be in another group.
    yield None if graph.exchange.alone else id(graph.exchange.group)
    yield torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    yield tuple((type(module), module.training) for module in call.layer.modules())
    yield tuple(p.dtype for p in call.layer.parameters())
    yield parametrize._cache_enabled > 0  # weights are then made of others before they are read
    for name, value in call.kwargs.items():
        yield type(value) is Ends
        for v in value if isinstance(value, PAIR) else (value,):
            if isinstance(v, Tensor) and v.dim() > 0:
                rows = call.layer.node_dim % v.dim() if name in call.lifted else 0
                yield name, v.dtype, tuple(n for dim, n in enumerate(v.shape) if dim != rows)
            else:
                # Numbers may be other ones on other workers: of nodes, for example.
                yield name, type(v), v if isinstance(v, (bool, str)) else None


def rows_of(call: Call, graph: ShardedGraph) -> RowsOf:
    """Return the names of arguments that have a row for each edge on all workers, and of those for ``update`` that have
    one for each destination, and the shapes of others that are the same on all of them.
    """
    rows = {name: t for name, t in call.kwargs.items() if isinstance(t, Tensor) and name not in call.lifted}
    for_update, node_dim, said = call.for_update, call.layer.node_dim, []
    for name, t in rows.items():
        shared, size = isinstance(t, torch.nn.Parameter) or t.dim() == 0, t.size(0) if t.dim() else 0
        nodes = name in for_update and not shared and t.size(node_dim % t.dim()) == graph.num_dst
        said.append((shared or size != graph.num_edges, not nodes, size, -size))
    found = graph.exchange.all_reduce_max([n for one in said for n in one])
    no_edge, no_node, most, least = (found[k::4] for k in range(4))
    nodes = frozenset(name for name, no in zip(rows, no_node, strict=True) if not no)
    edge = frozenset(name for name, no in zip(rows, no_edge, strict=True) if not no) - nodes
    alike = [name for name, n, m in zip(rows, most, least, strict=True) if n == -m and name not in edge | nodes]
    return edge, nodes, {name: rows[name].shape for name in alike}


def candidates(call: Call, graph: ShardedGraph, edge: frozenset[str]) -> Generator[Strategy, None, None]:
    """Yield the strategies that pass on the probe graph, the best one first, and those that always do. Each one is
    verified when it is asked for: the first will mostly do.
    """
    others = "it does not stream on another worker"
    last = [Strategy("one-shot", others, edge), Strategy("refused", others)]
    try:
        with isolated(call.layer, graph.device):
            floats = any(call.kwargs[name].is_floating_point() for name in edge)
            problems = [Problem(call, graph, edge, signed) for signed in (False, True)[: 1 + floats]]
            problem, why = problems[0], ""
            try:
                why = yield from passing(by_blocks(problem), *problems)
            except NotStreamable as error:
                if problem.side_effects:
                    raise
                if isinstance(error, ReadsRows) and not graph.exchange.alone and is_of_layer(error.read, call):
                    raise MixesEdges(f"{error}: a table of all nodes is a 'pyg_sar.nn.NodeEmbedding'") from None
                why = str(error)
            if why and (differs := (yield from passing(by_chunks(problems, why), *problems))):
                last = [Strategy("refused", f"{why}, and on some destinations alone {differs}")]
    except MixesEdges as error:
        last = [Strategy("refused", str(error))]
    except NotStreamable as error:
        last[0].why = str(error)
    except Exception as error:  # the layer's own: with few edges, or of random values
        last[0].why = f"on the probe graph it raises {type(error).__name__}: {str(error).partition(chr(10))[0][:100]}"
    yield from last


def is_of_layer(t: Tensor, call: Call) -> bool:
    """Whether all workers hold a tensor alike, or the parameter that it was made like."""
    given = [p.shape for p in call.kwargs.values() if isinstance(p, torch.nn.Parameter)]
    return any(t is own for own in (*call.layer.parameters(), *call.layer.buffers())) or t.shape in given


def by_blocks(problem: Problem) -> Iterator[Strategy]:
    """Yield what seems possible block by block, the best one first."""
    probe, updates = Probe(problem), problem.call.updates
    with side_effects(problem.layer, problem.device, lasting=updates) as problem.side_effects:
        probe.explore()
    rows: dict[str, Any] = {"edge": problem.edge, "nodes": problem.call.nodes}
    weighted = None if updates else probe.kernel()
    if weighted is not None:
        yield Strategy("kernel", **rows, aggr=aggregation_of(problem.layer)[0], weighted=weighted)
    if not updates and probe.is_softmax():
        probe.program.operations = probe.operations(probe.program)
        yield Strategy("softmax", **rows, program=probe.program)
    yield Strategy("passes", **rows, program=probe.program)


def by_chunks(problems: list[Problem], why: str) -> Iterator[Strategy]:
    """Yield what seems possible with all edges of a destination at once, given why it does not stream."""
    problem, some = problems[0], False
    if CHUNKS_CANNOT & set(problem.call.asked):
        raise NotStreamable(why)
    probes, begin = [Probe(problem) for problem in problems], sequence_number()
    probe = probes[0]
    with side_effects(problem.layer, problem.device, lasting=problem.call.updates) as problem.side_effects:
        out = Chunks(probe.runner, FEW, FEWEST).step(None, probe.block, probe.x, probe.rows)
    program = Reductions(hidden=probe.hidden([out], begin), drops=probe.runner.dropped)
    ids = torch.arange(EDGES, device=problem.device)
    for name, padding in (("chunks", FEWEST), ("padded", largest_degree(probe.runner.graph))):
        if not all(same_messages(probe, padding) for probe in probes):
            continue
        some, strategy = True, Strategy(name, why, problem.edge, problem.call.nodes, program)
        graphs = (problem.probe_graph.in_blocks[BLOCKS].replace(e_id=e_id) for e_id in (ids, -ids))
        strategy.ordered = not close(*(strategy.run(problem.leaves(), graph, False, FEW) for graph in graphs))
        yield strategy
    if not some:
        raise MixesEdges(f"{why}, and on some destinations alone its messages would differ")


def same_messages(probe: Probe, padding: int) -> bool:
    """Whether messages are the same in small chunks and in one of all edges: a median, for one, shows few of them."""
    some, every = (messages_of(probe, cells, padding) for cells in (FEW, SRC * EDGES))
    return some is None or every is None or close(some, every)


def messages_of(probe: Probe, cells: int, padding: int) -> Tensor | None:
    """Return the messages that chunks of about so many make, if there is one for each edge."""
    runner, chunks = probe.runner, Chunks(probe.runner, cells, padding)
    runner.messages = []
    chunks.step(None, probe.block, probe.x, probe.rows)
    edges = [chunk.edges for chunk in chunks.chunks(probe.block, runner.graph.ids_of(probe.block))]
    made, dim = runner.messages, 0 if runner.call.updates else runner.layer.node_dim
    if not all(isinstance(t, Tensor) and t.dim() >= abs(dim) for t in made):
        return None
    made = [t.movedim(dim, 0) for t in made]
    if [len(t) for t in made] != [len(of_chunk) for of_chunk in edges]:
        return None
    real = torch.cat([of_chunk[padding:] for of_chunk in edges])
    return torch.cat([t[padding:] for t in made])[real.argsort()]


def agree(found: Iterator[Strategy], largest: Callable[[list[int]], list[int]]) -> Strategy:
    """Return the best strategy that all workers find; each of them finds the last one."""
    strategy = next(found)
    while True:
        mine = NAMES.index(strategy.name)
        worst, best = largest([mine, -mine])
        if worst == -best:
            return strategy
        while NAMES.index(strategy.name) < worst:
            strategy = next(found)
