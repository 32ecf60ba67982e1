r"""How much memory and traffic training will take, by a dry run of the model on a small graph of the same shape.

Everything that a worker holds is proportional to its numbers of rows and edges, except for what belongs to parameters.
So two steps on two small graphs whose numbers of nodes, edges and boundary rows relate as those of the real one tell
the rest: layers, exchange and autograd are the real ones, only messages are not sent, and every tensor that is made is
counted as long as it lives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar.csr import compress_doubly, scaled
from pyg_sar.data.load import assemble
from pyg_sar.data.split import Topology
from pyg_sar.data.store import read_meta
from pyg_sar.distributed.collectives import sum_gradients
from pyg_sar.distributed.group import connected
from pyg_sar.distributed.process_group import silent_group
from pyg_sar.distributed.traffic import Traffic, record_traffic
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.live import Live, few_objects, kept
from pyg_sar.offload.counts import Counts
from pyg_sar.offload.home import count_bytes
from pyg_sar.offload.plan import choose as choose_chunks


@dataclass(frozen=True)
class Share:
    """The counts of one worker, which decide what it needs."""

    nodes: int
    edges: int  # that end at its nodes
    inside: int  # those of these edges that also start there
    rows_in: tuple[int, ...]  # how many rows it reads from each other worker
    rows_out: tuple[int, ...]  # how many of its rows each other worker reads

    def scaled(self, factor: float) -> Share:
        """Return a share with fewer of everything."""
        nodes, edges, inside = (max(round(k * factor), 1) for k in (self.nodes, self.edges, self.inside))
        rows_in, rows_out = (tuple(round(k * factor) for k in rows) for rows in (self.rows_in, self.rows_out))
        return Share(nodes, max(edges, inside), inside, rows_in, tuple(min(k, nodes) for k in rows_out))


@dataclass(frozen=True)
class Need:
    """What the worker with the largest share needs, in bytes."""

    workers: int  # number of workers
    mode: int  # 1 rematerialise, 2 keep, 3 one-shot
    loaded: int  # between steps: topology, features, labels, parameters and the state of the optimizer
    step: int  # the peak of the first two steps above that
    received: int  # in a step
    kinds: dict[str, int]  # what the topology holds, see :meth:`ShardedGraph.memory`

    @property
    def total(self) -> int:
        """All of it."""
        return self.loaded + self.step


def from_partition(path: str | os.PathLike[str]) -> list[Share]:
    """Return the shares of a partition folder."""
    meta = read_meta(path)
    shares = []
    for p, (nodes, edges, row) in enumerate(zip(meta["nodes"], meta["edges"], meta["boundary"], strict=True)):
        column = [other[p] for q, other in enumerate(meta["boundary"]) if q != p]
        inside = round(edges * (1 - meta["cut_fraction"]))
        shares.append(Share(nodes, edges, inside, tuple(k for q, k in enumerate(row) if q != p), tuple(column)))
    return shares


def largest(shares: Sequence[Share]) -> Share:
    """Return a share as large as the largest of some in each respect: which of them needs most depends on the model."""
    by_edges = max(shares, key=lambda share: share.edges)
    rows_in = max((share.rows_in for share in shares), key=sum)
    rows_out = max((share.rows_out for share in shares), key=sum)
    return Share(max(share.nodes for share in shares), by_edges.edges, by_edges.inside, rows_in, rows_out)


def from_counts(nodes: int, edges: int, workers: int, boundary: float | None = None) -> Share:
    """Return the share of one of equal workers.

    Args:
        nodes: Number of nodes of the graph.
        edges: Number of its edges.
        workers: Number of workers.
        boundary: How many rows a worker reads for each of its own; by default as many as in a random partition, which
            is the worst case.
    """
    own, into = -(-nodes // workers), -(-edges // workers)
    if workers == 1:
        return Share(own, into, into, (), ())
    # A node with d neighbors has one among the n / N nodes of a worker but for a chance of (1 - 1 / N)^d.
    reads = 1 - (1 - 1 / workers) ** (edges / max(nodes, 1)) if boundary is None else boundary / (workers - 1)
    inside = into // workers if boundary is None else round(into / (1 + boundary))
    rows = (min(round(own * reads), own),) * (workers - 1)
    return Share(own, into, inside, rows, rows)


def chunk_counts(share: Share, chunks: int) -> Counts:
    """Return the counts of a share in chunks: its edges are random ones, the worst case, and all nodes labelled."""
    rows, edges = -(-share.nodes // chunks), max(-(-share.edges // chunks), 1)
    halo = sum(share.rows_in)
    readable = max(share.nodes + halo, 1)
    sources = min(max(round(readable * (1 - (1 - 1 / readable) ** edges)), 1), edges)
    return Counts(chunks, share.nodes, rows, sources, edges, share.nodes, halo)


def plan(
    model: Callable[[], torch.nn.Module],
    share: Share,
    in_channels: int,
    *,
    modes: Sequence[int] = (1, 2, 3),
    prefetch: int = 1,
    comm_dtype: torch.dtype | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    num_relations: int = 0,
    offload: int | str | None = None,
) -> list[Any]:
    r"""Tell the memory and traffic of training on a worker, for every mode, without graph and without other workers.

    Call it in a process that is in no process group. It counts what the compiled kernels take, in the first step, which
    makes what later ones keep, and in the second. The model's output is taken for class scores of all nodes.

    Args:
        model (callable): Makes the model, of layers of :mod:`pyg_sar.nn`; it is called as
            :obj:`model(x, edge_index)`, with :obj:`edge_type` too if there are relations.
        share (Share): The counts of the worker: ``from_counts(...)``, or ``largest(from_partition(...))``.
        in_channels (int): Number of features of a node.
        modes (list, optional): The modes. (default: all)
        prefetch (int, optional): As for :func:`pyg_sar.load`. (default: :obj:`1`)
        comm_dtype (torch.dtype, optional): As for :func:`pyg_sar.load`. (default: :obj:`None`)
        optimizer (callable, optional): Makes the optimizer of parameters. (default: :class:`torch.optim.Adam`)
        num_relations (int, optional): Number of edge types. (default: :obj:`0`, none)
        offload (int or str, optional): A budget, as for :func:`pyg_sar.offload`: tells of rows at home instead of
            modes. Edges are taken for random ones, of which a chunk reads most. (default: :obj:`None`)

    Returns:
        A list with one :class:`Need` for each mode, in bytes; with ``offload``, a list of one
        :class:`~pyg_sar.offload.plan.OffloadNeed`: that of the fewest chunks that fit.

    Raises:
        RuntimeError: In a process that is in a process group.
        ValueError: If no number of chunks fits ``offload``, or there are edge types with it.
    """
    if connected():
        raise RuntimeError("'plan' makes a process group of its own: call it before, or in another process")
    if offload is None:
        return _plan_modes(model, share, in_channels, modes, prefetch, comm_dtype, optimizer, num_relations)
    if num_relations:
        raise ValueError(
            f"Expected no 'num_relations' with 'offload' (got {num_relations}): a budget needs a model that "
            f"is called as 'model(x, edge_index)'"
        )
    budget = count_bytes(offload, "offload")
    return [choose_chunks(model, partial(chunk_counts, share), in_channels, budget, optimizer=optimizer)]


def _plan_modes(
    model: Callable[[], torch.nn.Module], share: Share, in_channels: int, modes: Sequence[int], prefetch: int,
    comm_dtype: torch.dtype | None, optimizer: Callable[..., torch.optim.Optimizer], num_relations: int,
) -> list[Need]:  # fmt: skip
    """Tell what every mode needs."""
    workers = len(share.rows_in) + 1
    size = max(4096, 32 * workers)  # rows outweigh parameters, or the peak would be in another place
    factors = [min(1.0, size / max(share.nodes, 1)) / k for k in (1, 2)]
    needs = []
    with silent_group(workers), few_objects():
        for mode in modes:
            runs = []
            for factor in factors:
                inputs = make_inputs(share.scaled(factor), in_channels, mode, prefetch, comm_dtype, num_relations)
                with scaled(factor):
                    runs.append(_run(model, optimizer, *inputs))
            (one, half), (f, h) = runs, factors
            whole = {k: round(half[k] + (one[k] - half[k]) * (1 - h) / (f - h)) for k in one}
            loaded, step, received = (whole.pop(k) for k in ("loaded", "step", "received"))
            needs.append(Need(workers, mode, loaded, step, received, whole))
    return needs


def choose(needs: Sequence[Need], budget: float) -> Need | None:
    """Return what receives least of what takes at most ``budget`` bytes, besides the libraries, or None if none does.

    A prefetch of one block hides most of the communication, and hardly adds to the peak, because blocks are narrow.
    """
    fitting = [need for need in needs if need.total <= budget]
    return min(fitting, key=lambda need: (need.received, need.total), default=None)


def make_inputs(
    share: Share, in_channels: int, mode: int, prefetch: int, comm_dtype: torch.dtype | None, relations: int
) -> tuple[Any, ...]:
    """Return the inputs of a model: features, a graph of these counts, and types of edges if there are relations."""
    generator = torch.Generator().manual_seed(0)

    def draw(high: int, count: int) -> Tensor:
        return torch.randint(max(high, 1), (count if high > 0 else 0,), generator=generator)

    sizes, outside = (share.nodes, *share.rows_in), share.edges - share.inside
    total = max(sum(share.rows_in), 1)
    counts = [share.inside, *(outside * rows // total for rows in share.rows_in)]
    col = [draw(size, count).int() for size, count in zip(sizes, counts, strict=True)]
    pointers = [compress_doubly(draw(share.nodes, c.numel()).sort().values, share.nodes) for c in col]
    rowptr, rows = map(list, zip(*pointers, strict=True))
    serve = [torch.empty(0, dtype=torch.int32)]
    serve += [torch.randperm(share.nodes, generator=generator)[:rows].sort().values.int() for rows in share.rows_out]
    ids, edges = torch.arange(share.nodes), sum(c.numel() for c in col)
    topology = Topology(ids, ids, torch.arange(edges), rowptr, col, serve, list(sizes), rows)
    graph = assemble(topology, 0, None, mode == 1, prefetch, comm_dtype=comm_dtype)
    edge_index = ShardedEdgeIndex(graph.merge() if mode == 3 else graph)
    return torch.zeros(share.nodes, in_channels), edge_index, *([draw(relations, edges)] if relations else [])


def _run(
    model: Callable[[], torch.nn.Module], optimizer: Callable[..., Any], x: Tensor, edge_index: Any, *types: Tensor
) -> dict[str, int]:
    """Train for two steps, of which the first makes transposed blocks, self-loops and the optimizer's state."""
    net, labels, most = model(), torch.arange(x.size(0)), 0
    state = optimizer(net.parameters())

    def held() -> int:
        return sum(edge_index.graph.memory().values()) + sum(t.nbytes for t in (x, *types, labels, *kept(net, state)))

    for _ in range(2):
        before = held()
        with Live(dry=True) as live, record_traffic(edge_index) as layers:
            out = net(x, edge_index, *types)
            F.cross_entropy(out, labels % out.size(1)).backward()
            del out
            sum_gradients(net)
            state.step()
            state.zero_grad()
        most = max(most, before + live.peak)
    loaded = held()
    return {"loaded": loaded, "step": most - loaded, "received": received(layers), **edge_index.graph.memory()}


def received(layers: Sequence[Traffic]) -> int:
    """Return the bytes that a worker received in a step."""
    return sum(t.forward_received + t.backward_received for t in layers)
