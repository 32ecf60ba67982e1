r"""How many chunks fit a budget, by a dry run of the model on small graphs whose chunks have the same shape.

What is not at home is proportional to the rows of a chunk (with so many sources and edges for each), or to those of the
whole graph, such as the outputs of labelled nodes, but for what belongs to parameters. So a step on three small graphs
tells the rest: on one, on one whose chunks are half as large, and on one with twice as many chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_sar.csr import scaled
from pyg_sar.distributed.traffic import record_traffic
from pyg_sar.live import Live, few_objects, kept
from pyg_sar.offload.counts import Counts, TypedCounts, features, small_graph
from pyg_sar.offload.halo import MESSAGE
from pyg_sar.offload.home import Home
from pyg_sar.offload.place import CPU
from pyg_sar.offload.rows import HostRows
from pyg_sar.structure import tensors

# Rows of a chunk in the dry run: enough to outweigh parameters, or the peak would be elsewhere; and for a first guess.
ROWS, ROUGH = 2048, 512
FRESH = 4  # times as many rows as a chunk has or reads, so that most of those that the next one reads are others
WORK = 2**21  # edges of the dry run, but where this would leave few rows
FEWEST = 64  # rows of a chunk, on average
INDEX = 24  # bytes a node: its id, its degree, and its number while a chunk is made
MARGIN = 1.15  # for what allocators and libraries keep; on an accelerator, products keep a range more
PIECES = 8  # into which sources are cut where chunks alone do not fit


@dataclass(frozen=True)
class OffloadNeed:
    """What training with rows at home needs, in bytes."""

    chunks: int  # number of chunks
    slots: int | None  # source rows that are fetched at one time, None for all of a chunk
    loaded: int  # between steps, beside the data: parameters, the optimizer's state, what is derived of the graph
    step: int  # the peak of a step above that
    home: int  # the peak of the rows at home
    moved: int  # loaded from home and stored there by aggregations, in a step

    @property
    def total(self) -> int:
        """What the budget must hold."""
        return self.loaded + self.step


def plan_offload(
    model: Callable[[], torch.nn.Module], counts: Counts | TypedCounts, in_channels: Any, slots: int | None = None,
    home: str | None = None, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, rows: int = ROWS,
    dtype: torch.dtype = torch.float32, beside: bool = True, edges: Sequence[Any] = (),
) -> OffloadNeed:  # fmt: skip
    """Tell the memory of training with rows at home.

    Args:
        model: Makes the model, which is called as ``model(x, edge_index, *edges)`` and returns scores of classes.
        counts: Those of the graph and its chunks.
        in_channels: Number of features of a node; of several types, by type.
        slots: The most source rows that are fetched at one time; None for no limit.
        home: Where the rows of the dry run live: a folder, or None for memory.
        optimizer: Makes the optimizer of parameters.
        rows: Of a chunk in the dry run, at most.
        dtype: The type of the features.
        beside: Whether graph and homes are in the memory that is asked for; if not, as on an accelerator, what a range
            or a chunk needs of them is copied there.
        edges: Tensors of edges like those that the model takes, or these by edge type; integers are types of edges.
    """
    degree = counts.edges / max(counts.rows, 1)
    chunks = min(counts.chunks, math.ceil(FRESH * max(counts.ratio, 1)))
    rows = min(rows, counts.rows, max(round(WORK / max(chunks * degree, 1)), ROUGH))
    runs = []
    with few_objects(), torch.random.fork_rng(devices=[]):
        for own, many in ((rows, chunks), (max(rows // 2, 1), chunks), (rows, 2 * chunks)):
            factor = own / max(counts.rows, 1)
            few = None if slots is None else max(round(slots * factor), 1)
            place, edge_index, labelled = small_graph(counts, own, many, chunks, Home(home, CPU, None), few)
            x = features(place._replace(copies=not beside), in_channels, dtype)
            with scaled(factor):
                runs.append(run(model(), optimizer, x, edge_index, labelled, edges))
    one, half, twice = runs
    need = {}
    for k in one:
        per_node = max(twice[k] - one[k], 0) / (rows * chunks)
        per_row = (one[k] - half[k]) / max(rows - rows // 2, 1) - per_node * chunks
        constant = one[k] - per_row * rows - per_node * rows * chunks
        need[k] = round(constant + per_row * counts.rows + per_node * counts.nodes)
    derived = need.pop("derived") + INDEX * (counts.nodes + counts.halo)
    need["loaded"] += derived if beside else 0
    widest = need.pop("widest")  # of the halo rows of one aggregation, which are at home with their gradients
    need["home"] += 2 * widest * counts.halo
    need["step"] += 4 * MESSAGE if counts.halo else 0
    return OffloadNeed(counts.chunks, slots, **need)


def run(
    net: torch.nn.Module, optimizer: Callable[..., Any], x: Any, edge_index: Any, labelled: dict[str, int],
    edges: Sequence[Any] = (),
) -> dict[str, int]:  # fmt: skip
    """Train for a step, then count what another one needs."""
    every: list[Any] = list(tensors(edge_index))
    graphs = [it.graph for it in every]
    given = [like_edges(t, edge_index) for t in edges]
    learnt = [p for p in net.parameters() if p.requires_grad]
    state = optimizer(learnt) if learnt else None
    before = sum(sum(graph.memory().values()) for graph in graphs)

    def step() -> None:
        outs = labelled_rows(net(x, edge_index, *given), labelled)
        loss: Any = sum(map(loss_of, outs))
        if state is None:
            return
        loss.backward()
        del outs, loss  # not before: scripts keep both until then
        state.step()
        state.zero_grad()

    step()  # makes chunks, transposed blocks, self-loops and the optimizer's state
    with Live() as live, ExitStack() as stack:
        records = [stack.enter_context(record_traffic(it)) for it in every]
        step()
    derived = sum(sum(graph.memory().values()) for graph in graphs) - before
    layers = [layer for record in records for layer in record]
    moved = sum(t.forward_loaded + t.forward_stored + t.backward_loaded + t.backward_stored for t in layers)
    rows: Any = next(iter(tensors(x)))
    home = rows.place.home
    return {
        "loaded": sum(t.nbytes for t in kept(net, state)),
        "derived": derived,
        "step": live.peak,
        "home": home.peak,
        "widest": home.widest,
        "moved": moved,
    }


def labelled_rows(out: Any, labelled: dict[Any, int]) -> list[Tensor]:
    """Return the output of nodes that have labels, given rows, or rows by type."""
    typed = len(labelled) > 1
    outs = [rows for rows in (out.values() if typed and isinstance(out, dict) else [out]) if rows is not None]
    wrong = [type(rows).__name__ for rows in outs if not isinstance(rows, Tensor)]
    if wrong or not outs:
        what = "as a tensor, or by type" if typed else "as a tensor"
        raise TypeError(f"Expected the model to return rows of nodes, {what} (got {wrong[0] if wrong else 'none'})")
    counts = [labelled[rows.place.type if isinstance(rows, HostRows) else next(iter(labelled))] for rows in outs]
    pairs = zip(outs, counts, strict=True)
    return [rows[torch.arange(count) % len(rows)] for rows, count in pairs if count or not any(counts)]


def loss_of(rows: Tensor) -> Tensor:
    """Return a loss of scores of classes, or of other rows."""
    if rows.dim() != 2:
        return rows.float().square().sum()
    return F.cross_entropy(rows, torch.arange(len(rows)) % rows.size(1))


def like_edges(t: Any, edge_index: Any) -> Any:
    """Return a tensor of edges, or one for each edge type, as it might be of other edges."""
    if isinstance(t, dict):
        return {it: alike(t[it], edge_index[it].graph.num_edges) for it in t}
    return alike(t, edge_index.graph.num_edges)


def alike(t: Tensor, count: int) -> Tensor:
    """Return a tensor with so many rows of the same shape and type; of integers, with each of those that occur."""
    if t.is_floating_point():
        return t.new_ones(count, *t.shape[1:])
    most = int(t.max()) + 1 if t.numel() else 1
    return (torch.arange(count) % most).to(t.dtype).view(-1, *[1] * (t.dim() - 1)).expand(count, *t.shape[1:])


@few_objects()
def choose(
    model: Callable[[], torch.nn.Module], counts: Callable[[int], Counts | TypedCounts], in_channels: Any,
    budget: float, home: str | None = None, dtype: torch.dtype = torch.float32, beside: bool = True,
    most: Callable[[Sequence[int]], Sequence[int]] = lambda values: values,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam, edges: Sequence[Any] = (),
) -> OffloadNeed:  # fmt: skip
    """Return the fewest chunks with which all but the data and the rows at home fits ``budget`` bytes.

    ``counts`` returns the counts of the graph for a number of chunks, and ``most`` of every value the largest one on
    any worker: all try the same, or a model that communicates would wait for others. For the other arguments see
    :func:`plan_offload`.

    Raises:
        ValueError: If it never does.
    """
    count = 1
    while True:
        numbers, form = tree_flatten(counts(count))
        here = tree_unflatten(most(numbers), form)
        for slots in (None, -(-here.sources // PIECES)):
            for rows in (ROUGH, ROWS):  # what needs far more is not tried on so many rows: the dry run fits, too
                need = plan_offload(model, here, in_channels, slots, home, optimizer, rows, dtype, beside, edges)
                (excess,) = most([round(MARGIN * need.total) - int(2 * budget if rows == ROUGH else budget)])
                if excess > 0:
                    break
            else:
                return need
        # A chunk that is a k-th as long needs no less than a k-th, so fewer chunks would not fit either.
        times = MARGIN * need.step / max(budget - MARGIN * need.loaded, 1)
        last, bits = most([count >= (most_chunks := -(-here.nodes // FEWEST)), int(math.log2(max(times, 2)))])
        if last:
            raise ValueError(
                f"A step needs at least {round(MARGIN * need.total):,} bytes beside the rows at home: {need.loaded:,} "
                f"for parameters, the optimizer's state and what is derived of the graph, {need.step:,} for chunks of "
                f"{here.rows} rows, and what allocators keep (got a budget of {int(budget):,}). Raise the budget, or "
                f"make the model narrower."
            )
        count = min(count << bits, most_chunks)
