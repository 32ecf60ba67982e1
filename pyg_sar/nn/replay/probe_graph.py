r"""The *probe graph*: a few nodes and edges on which layers are looked at. It is made once for each device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.distributed.shard import shard
from pyg_sar.graph import ShardedGraph

SRC, DST, EDGES, BLOCKS = 7, 5, 23, 3
FIRST = 2  # destinations that the first one of two workers owns
NUMBERS = 1 << 16  # random ones, of each kind, that are kept on the device


class Share(NamedTuple):
    """What a worker has of the probe graph: its graph, and which rows of the whole are its sources, destinations and
    edges.
    """

    graph: ShardedGraph
    rows: dict[str, Tensor]


class ProbeGraph:
    """The probe graph, of one set of nodes or of two.

    Attributes:
        size: The numbers of its sources and destinations.
        edge_index: Its edges.
        in_blocks: The graph in one block and in ``BLOCKS``.
        shares: Those of two workers.
        normal: Random numbers of mean 0 and variance 1, on the device, so that nobody waits for them to be copied.
        uniform: The same between 0 and 1.
    """

    def __init__(self, bipartite: bool, device: torch.device) -> None:
        self.bipartite, self.size = bipartite, (SRC, DST) if bipartite else (SRC, SRC)
        random = torch.Generator("cpu").manual_seed(1)
        edge_index = torch.stack([torch.randint(n, (EDGES,), generator=random, device="cpu") for n in self.size])
        edge_index[1][edge_index[1] == 2] = 3  # one destination has no edges
        edge_index[:, :2] = 1  # two self-loops, which are one edge twice
        self.edge_index = edge_index.to(device)
        self.in_blocks = {n: shard(self.edge_index, self.size if bipartite else SRC, n)._graph for n in (1, BLOCKS)}
        self.shares = [self._share(0, FIRST), self._share(FIRST, self.size[1])]
        self.normal, self.uniform = (
            make(NUMBERS, generator=random, dtype=torch.float32, device="cpu").to(device)
            for make in (torch.randn, torch.rand)
        )

    def _share(self, first: int, last: int) -> Share:
        """Return the share of a worker that owns some destinations, and all of their edges."""
        device = self.edge_index.device
        nodes = [torch.arange(a, b, device=device) for a, b in ((first, last), (0, first), (last, self.size[1]))]
        own, dst = nodes[0], torch.cat(nodes)  # its local nodes come first
        src = torch.arange(self.size[0], device=device) if self.bipartite else dst
        edges = ((self.edge_index[1] >= first) & (self.edge_index[1] < last)).nonzero().view(-1)
        ends = [nodes.argsort()[row] for nodes, row in zip((src, dst), self.edge_index[:, edges], strict=True)]
        graph = shard(torch.stack(ends), (self.size[0], len(own)), BLOCKS)._graph
        graph = graph.replace(dst=None if self.bipartite else slice(0, len(own)))
        largest = int(torch.bincount(self.edge_index[1]).max())
        graph.derived("largest degree", lambda: largest)
        return Share(graph, {"src": src, "dst": own, "edge": edges})


probe_graph = functools.cache(ProbeGraph)
