r"""How a call of a layer streams, once it is found out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.arguments import Call, bind, nodes_at
from pyg_sar.nn.body import Body, Program
from pyg_sar.nn.chunks import FEWEST, in_chunks, largest_degree
from pyg_sar.nn.passes import in_passes
from pyg_sar.nn.rows import start_rows

WAYS = ("kernel", "softmax", "passes", "chunks", "padded", "one shot", "refused")


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
        ordered: Whether results depend on the order of the edges of a destination.
    """

    way: str
    why: str = ""
    edge: frozenset[str] = frozenset()
    program: Program = dataclasses.field(default_factory=Program)
    aggr: str = ""
    weighted: bool = False
    const: dict[str, torch.Size] = dataclasses.field(default_factory=dict)
    ordered: bool = False

    def __str__(self) -> str:
        """Say it in a few words."""
        count = len(self.program.groups)
        return {
            "kernel": f"streams ({'weighted ' * self.weighted}{self.aggr} of source rows, by a kernel)",
            "softmax": "streams by replay (softmax, in one pass)",
            "passes": f"streams by replay (in {count} passes)" if count > 1 else "streams by replay",
            "chunks": f"runs in chunks of destinations ({self.why})",
            "padded": f"runs in chunks of destinations, padded to the largest degree ({self.why})",
            "one shot": f"runs in one shot ({self.why})",
            "refused": f"refused ({self.why})",
        }[self.way]

    def run(self, call: Call, graph: ShardedGraph, drops: bool = True, cells: int | None = None) -> Tensor:
        """Stream a call, with or without dropout; ``cells`` makes smaller chunks."""
        inputs = bind(call, graph, self.edge)
        if self.way != "kernel":
            chunked = self.way in ("chunks", "padded")
            seed = graph.seeds.draw() if drops and self.program.drops else None
            whole = graph.merge().replace(remat=graph.remat) if chunked else graph
            body = Body(call, inputs, whole, self.program, seed)
            body.drops = drops
            if not chunked:
                return in_passes(body)
            return in_chunks(body, max(largest_degree(graph), FEWEST) if self.way == "padded" else FEWEST, cells)
        weight = inputs.edge[0].view(-1) if self.weighted else None
        return nodes_at(start_rows(graph, inputs.src[0], self.aggr, weight)(), call.layer.node_dim)

    def fits(self, call: Call, graph: ShardedGraph) -> bool:
        """Whether arguments are still rows of edges, or shared by them; all workers must find the same."""
        for name, t in call.kwargs.items():
            if name in self.edge and t.size(0) != graph.num_edges and t.shape[:1] == (1,):
                return False  # any other number of rows is an error, which says so
            if name in self.const and t.shape != self.const[name]:
                return False
        return True
