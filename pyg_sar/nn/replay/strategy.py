r"""The execution strategy of a layer's call: how it runs on a sharded graph."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.aggregate import reduce_rows
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.call import Call, nodes_at
from pyg_sar.nn.replay.chunks import FEWEST, in_chunks, largest_degree
from pyg_sar.nn.replay.passes import in_one_pass, in_passes
from pyg_sar.nn.replay.runner import Reductions, Runner

NAMES = ("kernel", "softmax", "passes", "chunks", "padded", "one-shot", "refused")


@dataclass
class Strategy:
    """How a layer runs when it is called with arguments of some kind.

    Args:
        name: One of ``NAMES``, of which :mod:`~pyg_sar.nn.replay.choose` says what they mean.
        why: Why it does no better.
        edge: The arguments that have a row for each edge.
        nodes: Those for ``update`` alone that have a row for each destination.
        program: The reductions of a layer whose own code is run.
        aggr: The aggregation that a kernel does.
        weighted: Whether it weights the rows by an argument.
        const: The shapes of arguments that all edges share, and all workers.
        ordered: Whether results depend on the order of the edges of a destination.
    """

    name: str
    why: str = ""
    edge: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    program: Reductions = dataclasses.field(default_factory=Reductions)
    aggr: str = ""
    weighted: bool = False
    const: dict[str, torch.Size] = dataclasses.field(default_factory=dict)
    ordered: bool = False

    def __str__(self) -> str:
        """Say in a few words how the layer runs."""
        count = len(self.program.groups)
        return {
            "kernel": f"streams ({'weighted ' * self.weighted}{self.aggr} of source rows, by a kernel)",
            "softmax": "streams by replay (softmax, in one pass)",
            "passes": f"streams by replay (in {count} passes)" if count > 1 else "streams by replay",
            "chunks": f"runs in chunks of destinations ({self.why})",
            "padded": f"runs in chunks of destinations, padded to the maximum in-degree ({self.why})",
            "one-shot": f"runs one-shot ({self.why})",
            "refused": f"refused ({self.why})",
        }[self.name]

    @property
    def allows_own_code(self) -> bool:
        """Whether the layer's own code may run instead where all edges are one piece: what is dropped depends on ids of
        edges, which it does not know, and its quantiles, which run in chunks, fail if the first node has no in-edges.
        """
        return not self.program.drops and self.name != "chunks"

    def run(self, call: Call, graph: ShardedGraph, drops: bool = True, cells: int | None = None) -> Tensor:
        """Run a call, with or without dropout; ``cells`` makes smaller chunks."""
        call = dataclasses.replace(call, nodes=self.nodes)
        inputs = call.bind(graph, self.edge)
        if self.name == "kernel":
            weight = inputs.edge[0].view(-1) if self.weighted else None
            return nodes_at(reduce_rows(graph, inputs.src[0], self.aggr, weight), call.layer.node_dim)
        seed = graph.seeds.draw() if drops and self.program.drops else None
        if self.name in ("softmax", "passes"):
            runner = Runner(call, inputs, graph, self.program, seed, drops)
            out = in_one_pass(runner) if self.name == "softmax" else in_passes(runner)
        else:
            padding = max(largest_degree(graph), 1) if self.name == "padded" else FEWEST
            runner = Runner(call, inputs, graph.merge().replace(remat=graph.remat), self.program, seed, drops)
            out = in_chunks(runner, padding, cells)
        runner.release()
        return out

    def fits(self, call: Call, graph: ShardedGraph) -> bool:
        """Whether arguments are still rows of edges and nodes, or shared; all workers must find the same."""
        if self.name in ("one-shot", "refused"):  # which read all rows as they are, of which each worker has others
            return True
        for name, t in call.kwargs.items():
            if name in self.edge and t.size(0) != graph.num_edges and t.shape[:1] == (1,):
                return False  # any other number of rows is an error, which says so
            if name in self.const and t.shape != self.const[name]:
                return False
            if name in self.nodes and t.size(call.layer.node_dim % t.dim()) != graph.num_dst:
                return False
        return True
