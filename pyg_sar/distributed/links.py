r"""Pairs of nodes, such as the edges that link prediction is about, held by the workers that own their destinations."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_sar import watch
from pyg_sar.block import cut
from pyg_sar.csr import Lookup
from pyg_sar.distributed.agreement import agree
from pyg_sar.distributed.collectives import all_gather, all_reduce, global_max
from pyg_sar.distributed.group import host, rank_of, size_of
from pyg_sar.distributed.peers import Peers
from pyg_sar.distributed.transfer import Channel
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.exchange import Exchange, Local, Routes
from pyg_sar.graph import Seeds, ShardedGraph

Ids = Tensor | Sequence[Tensor]  # of one type of nodes, or of sources and destinations
IDS = 1 << 20  # that workers ask each other for at a time


def shard_links(edge_label_index: Tensor, n_id: Ids, group: Any = None) -> tuple[ShardedEdgeIndex, Tensor]:
    r"""Return the pairs whose destinations this worker owns, in the form of a sharded ``edge_index``.

    With it code for one process goes on to work: ``z[index[0]]`` fetches rows of other workers, and its gradient sends
    theirs to their owners; ``z[index[1]]`` are local rows.

    .. code-block:: python

        index, mine = pyg_sar.shard_links(edge_label_index, data.n_id)
        score = (z[index[0]] * z[index[1]]).sum(-1)
        loss = pyg_sar.global_mean(F.binary_cross_entropy_with_logits(score, edge_label[mine], reduction="none"))

    Layers take it as they take ``edge_index``: pairs may as well be edges that the graph has not, as in a test.

    All workers call it together. Communicated are the ids of all sources that are not a worker's own, to all workers,
    and later the rows of each of them once.

    Args:
        edge_label_index (torch.Tensor): Global ids of sources and destinations :math:`(2, |\mathcal{P}|)`, the same
            on all workers or at least those whose destinations are this worker's own; others are left out.
        n_id (torch.Tensor or tuple): Global ids of the local rows, as in the loaded data; of sources and destinations,
            if these are nodes of two types.
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        The pairs, and their positions in ``edge_label_index``.

    Raises:
        ValueError: On all workers, if a source is no node of any of them, or pairs are nobody's; or, in the first
            steps, if ids are those of another type of nodes than the pairs of loaded data.
    """
    src_id, dst_id = both(n_id)
    if edge_label_index.dim() != 2 or edge_label_index.size(0) != 2 or edge_label_index.dtype != torch.int64:
        found = f"{edge_label_index.dtype}, {list(edge_label_index.shape)}"
        raise ValueError(f"Expected 'edge_label_index' of type torch.int64 and shape [2, *] (got {found})")
    watch.pairs_of(edge_label_index, (src_id, dst_id))
    destinations = Lookup(dst_id)
    sources = destinations if src_id is dst_id else Lookup(src_id)
    row = destinations.rows(edge_label_index[1])
    mine = (row >= 0).nonzero().view(-1)
    check_owned(mine.numel(), edge_label_index, group)
    source, row = edge_label_index[0, mine], row[mine]
    col = sources.rows(source)
    asked = source[col < 0].unique()
    owner, serve = ask(asked, sources, group)
    rank, size = (rank_of(group), size_of(group)) if serve else (0, 1)
    # Local-first numbers: those that were asked for follow the own ones, by their owners.
    part, others = torch.full_like(col, rank), torch.searchsorted(asked, source[col < 0])
    part[col < 0], col[col < 0] = owner[others], src_id.numel() + owner.argsort(stable=True).argsort()[others]
    counts = torch.bincount(owner, minlength=size).tolist()
    counts[rank] = src_id.numel()
    routes = Routes(rank, tuple(serve), tuple(counts))
    blocks = cut(torch.stack([col, row]), part, routes.ids, dst_id.numel())
    exchange: Exchange = Peers(routes, Channel(group)) if serve else Local(Routes.local(routes.ids, src_id.device))
    dst = slice(0, dst_id.numel()) if isinstance(n_id, Tensor) else None
    graph = ShardedGraph(
        blocks, src_id.numel(), dst_id.numel(), exchange, n_id=src_id, e_id=mine, dst=dst,
        seeds=seeds(edge_label_index, group),
    )  # fmt: skip
    return ShardedEdgeIndex(graph), mine


def both(n_id: Ids) -> Sequence[Tensor]:
    """Return the ids of sources and of destinations."""
    return (n_id, n_id) if isinstance(n_id, Tensor) else n_id


def seeds(pairs: Tensor, group: Any) -> Seeds:
    """Return seeds for a graph of pairs: those that PyTorch draws, or, of several workers, ones that all of them share
    and that differ for other pairs and at another state of its generator. That state stays: scripts for one process
    draw nothing here.
    """
    if size_of(group) == 1:
        return Seeds(None)
    generator = torch.Generator().set_state(torch.get_rng_state())
    seed = int(torch.randint(1 << 62, (), generator=generator, device="cpu")) ^ (checksum(pairs) << 29)
    return Seeds(int(global_max(torch.tensor(seed, device=host(group)), group)))


def checksum(ids: Tensor) -> int:
    """Return a number of 32 bits that tells ids from others."""
    return zlib.crc32(ids.cpu().contiguous().numpy().tobytes())


def check_owned(count: int, pairs: Tensor, group: Any) -> None:
    """Raise if destinations are nobody's: all workers together own as many as the one that was given most."""
    owned = int(all_reduce(torch.tensor(count, device=pairs.device), group))
    most = int(global_max(torch.tensor(pairs.size(1), device=pairs.device), group))
    if owned < most:
        raise ValueError(
            f"All workers together own {owned} destinations of {most} pairs. Expected global ids, which 'n_id' holds, "
            f"and the same pairs on all workers: draw them with one seed, or on one worker."
        )


def own_rows(node_id: Tensor, n_id: Tensor, group: Any = None) -> Tensor:
    """Return which of the nodes of global ids, the same on all workers, are local rows, those of the ids ``n_id``."""
    agree("the ids of nodes", [f"{node_id.numel()} with checksum {checksum(node_id):08x}"], group)
    rows = Lookup(n_id).rows(node_id)
    return rows[rows >= 0]


def ask(asked: Tensor, sources: Lookup, group: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the worker that owns each of the ids that are asked for, and the local rows that each worker asks for.

    Some ids at a time: those of all workers would be as many as there are nodes, or more.
    """
    counts = all_gather(torch.tensor([asked.numel()], device=asked.device), group).view(-1, 1)
    rank, most, size = rank_of(group), int(counts.max()), max(IDS // len(counts), 1)
    owner, serve = [asked[:0]], [[asked[:0]] for _ in counts]
    for start in range(0, most, size):
        place = torch.arange(start, min(start + size, most), device=asked.device)
        some = asked[start : start + size]
        by_worker = all_gather(F.pad(some, (0, len(place) - len(some)), value=-1), group)
        rows = sources.rows(by_worker)
        owners = all_reduce(torch.where(rows >= 0, rank + 1, 0), group) - 1
        lost = by_worker[(owners < 0) & (place < counts)]
        if lost.numel() > 0:
            raise ValueError(
                f"[rank {rank}] Sources of 'edge_label_index' are no nodes of any worker, such as "
                f"{lost.unique()[:5].tolist()}. Expected global ids, which 'n_id' holds."
            )
        owner.append(owners[rank, : len(some)])
        for mine, of_worker in zip(serve, rows, strict=True):
            mine.append(of_worker[of_worker >= 0])
    return torch.cat(owner), [torch.cat(mine) for mine in serve] if size_of(group) > 1 else []


def negative_sampling(
    index: ShardedEdgeIndex,
    n_id: Ids,
    num_neg: int = 1,
    scope: str = "global",
    generator: torch.Generator | None = None,
    group: Any = None,
) -> Tensor:
    r"""Draw negative pairs for :func:`shard_links`: the destinations of given pairs with random sources.

    Sources are uniform over the nodes of all workers, or of this one: then no rows are communicated, but negatives are
    those of a part, which are nearer to each other than others are. Unlike PyG's, a pair may be an edge, for a
    destination with :math:`d` in-edges with probability :math:`d / |\mathcal{V}|`: edges are not left out.

    Args:
        index (ShardedEdgeIndex): The positive pairs of :func:`shard_links`, or the graph's ``edge_index``.
        n_id (torch.Tensor or tuple): Global ids of the local rows, as for :func:`shard_links`; they are
            :math:`0 \ldots |\mathcal{V}| - 1` on all workers together.
        num_neg (int, optional): The number of negative pairs for each positive one. (default: :obj:`1`)
        scope (str, optional): :obj:`"global"` or :obj:`"local"`. (default: :obj:`"global"`)
        generator (torch.Generator, optional): Where random numbers come from; seed it differently on every worker.
            (default: :obj:`None`, PyTorch's own)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        Global ids :math:`(2, k \cdot |\mathcal{P}|)`, those of one positive pair after another; :func:`shard_links`
        makes pairs of them by which rows can be read.

    Raises:
        ValueError: If ``scope`` is neither of the two, or :obj:`"local"` on a worker that owns no sources; on all
            workers (of the scope), if ``n_id`` are not the ids of the rows of ``index``.
    """
    src_id, dst_id = both(n_id)
    if scope not in ("global", "local"):
        raise ValueError(f"Expected 'scope' to be 'global' or 'local' (got {scope!r})")
    others = not are_ids_of(index.graph, src_id, dst_id)
    total = src_id.numel()
    if scope == "global":
        total, others = all_reduce(torch.tensor([total, others], device=src_id.device), group).tolist()
    if others:
        raise ValueError(
            f"[rank {rank_of(group)}] Expected 'n_id' to hold the global ids of the rows of 'index' on all workers: of "
            f"{index.graph.num_src} sources and {index.graph.num_dst} destinations here (got {src_id.numel()} and "
            f"{dst_id.numel()}). Take 'data.n_id', or '(data[source].n_id, data[destination].n_id)' of two types."
        )
    destination = dst_id[index.graph.row].repeat_interleave(num_neg)
    if scope == "local":
        place = torch.randint(max(src_id.numel(), 1), destination.shape, generator=generator, device=src_id.device)
        if src_id.numel() == 0 < destination.numel():
            raise ValueError("This worker owns no sources to draw from; use scope='global'")
        return watch.ids(torch.stack([src_id[place], destination]))
    source = torch.randint(max(total, 1), destination.shape, generator=generator, device=src_id.device)
    return watch.ids(torch.stack([source, destination]))


def are_ids_of(graph: ShardedGraph, src_id: Tensor, dst_id: Tensor) -> bool:
    """Tell whether ids are those of a graph's sources and destinations, as far as it knows them."""
    known = torch.arange(graph.num_src, device=graph.device) if graph.n_id is None else graph.n_id
    if graph.bipartite:
        return torch.equal(src_id, known) and dst_id is not src_id and len(dst_id) == graph.num_dst
    found = dst_id[: graph.num_dst] if dst_id is src_id else dst_id  # of a layer of a message-flow graph
    return torch.equal(src_id, known) and torch.equal(found, graph.dst_rows(known))


def non_edges(index: ShardedEdgeIndex, group: Any = None) -> tuple[Tensor, Tensor]:
    r"""Draw as many pairs of different nodes as ``index`` has on all workers, uniformly among those that it has not.

    If nearly all pairs are edges, fewer are found. What is drawn depends on torch's generator and the rank.

    Returns:
        Global ids :math:`(2, k)` of pairs whose destinations this worker owns, and the global ids of its nodes.
    """
    graph, rank = index.graph, rank_of(group)
    n, device = graph.num_dst, graph.device
    n_id = torch.arange(n, device=device) if graph.n_id is None else graph.n_id
    counts = all_gather(torch.tensor([n, graph.num_edges], device=device), group)
    total, wanted = counts.sum(0).tolist()
    begin = int(counts[:rank, 0].sum())
    share = wanted * (begin + n) // max(total, 1) - wanted * begin // max(total, 1)
    # A pair as one number; those of a node with itself count as edges.
    taken = torch.cat([n_id[index[0]] * n + index[1], n_id * n + torch.arange(n, device=device)])
    generator, drawn = own_generator(device, group), taken[:0]
    for _ in range(3):
        more = torch.randint(max(total * n, 1), (share - drawn.numel(),), generator=generator, device=device)
        drawn = torch.cat([drawn, more[~torch.isin(more, taken)]]).unique()
    row = drawn % max(n, 1)
    return torch.stack([drawn // max(n, 1), n_id[row]]), n_id


def own_generator(device: torch.device, group: Any = None) -> torch.Generator:
    """Return a generator whose numbers are others on each worker, even if torch's own one is seeded alike on all."""
    seed = int(torch.randint(1 << 62, (), device="cpu"))
    return torch.Generator(device).manual_seed(seed + rank_of(group))
