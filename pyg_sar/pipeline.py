r"""A pipeline of layers: consecutive blocks of a model on each stage, chunks of nodes from one stage to the next.

It is the training of the `"GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism"
<https://arxiv.org/abs/2308.10087>`_ paper, as exact as that can be made: the gradient is that of what forward computed,
histories (:mod:`pyg_sar.distributed.history`) are constants. Chunks come in one order forward, and in reverse order
backward, when everybody who read a row as a fresh one has been differentiated::

    S = 3, K = 4        0  1  2  3  4  5  6  7  8  9 10 11      2 (K + S - 1) slots, of which each stage idles 2 (S - 1)
    stage 0            F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0
    stage 1             . F0 F1 F2 F3  .  . B3 B2 B1 B0  .
    stage 2             .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pyg_sar import running, watch
from pyg_sar.autograd import nodes_behind
from pyg_sar.blocks import Values, call, packed, unpacked
from pyg_sar.distributed.agreement import agree, checksum
from pyg_sar.distributed.collectives import all_reduce, sum_gradients
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.distributed.history import History, PipelineChunk
from pyg_sar.distributed.stages import Shape, Stages
from pyg_sar.distributed.traffic import Traffic, record_traffic
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.offload.schedule import ranges
from pyg_sar.pipeline_checks import LooksForMeans, check, check_loss, check_step, described, fingerprint_of
from pyg_sar.watch.mode import watching


@dataclass
class Record:
    """What a worker did while :meth:`Pipeline.record` listened.

    Args:
        between: Bytes between stages, and the seconds in which it waited for them.
        within: The same between the workers of its stage, for each aggregation.
        parameters: Bytes of gradients of parameters that it sent, as many as it received: what a sum of so many numbers
            on a ring takes.
        computed: Seconds of each chunk, by ``"forward"`` or ``"backward"`` and its number (-1: all nodes); waiting
            within the stage included.
    """

    between: Traffic
    within: list[Traffic]
    parameters: int = 0
    computed: list[tuple[str, int, float]] = field(default_factory=list)


class Pipeline:
    r"""Trains consecutive blocks of a model on *stages*, chunk by chunk.

    Every row goes to one worker for each boundary between stages and pass, whatever the number of layers. To keep all
    stages busy the nodes are cut into chunks, which may read rows of later chunks as an earlier epoch left them (their
    *history*). **With more than one chunk this is an approximation**: in epoch :math:`t` destination :math:`v` reads
    source :math:`u` of this epoch if the chunk of :math:`u` comes no later than that of :math:`v`, else of epoch
    :math:`\alpha \lfloor (t - 1) / \alpha \rfloor`, a constant. Before the first epoch an exact pass without gradients
    fills the history. The gradient is the exact one of this forward pass. The result depends on parts, chunks, seed and
    :math:`\alpha`, not on the number of stages. With one chunk it is the exact one.

    .. code-block:: python

        mesh = pyg_sar.stage_mesh(4)
        data = pyg_sar.load("parts/2", group=mesh.get_group("graph"))
        pipe = pyg_sar.Pipeline(model.blocks, data.edge_index, mesh, chunks=16)
        optimizer = torch.optim.Adam(pipe.parameters())
        for epoch in range(100):
            optimizer.zero_grad()
            loss = pipe.step(data.x, lambda out, rows: F.cross_entropy(out, data.y[rows], reduction="sum") / total)
            optimizer.step()

    Args:
        blocks (list): Modules of which each is called with the result of the one before: as :obj:`block(x)`, or as
            :obj:`block(x, edge_index, *edges)` if its ``forward`` takes more than one argument. ``x`` is a tensor, or a
            tuple of tensors, with a row for each node.
        edge_index (ShardedEdgeIndex): Of the data that was loaded with ``group=mesh.get_group("graph")``, or that of
            :func:`pyg_sar.shard`.
        mesh (DeviceMesh, optional): What :func:`pyg_sar.stage_mesh` returned. (default: :obj:`None`, one stage)
        chunks (int, optional): The number of chunks; with fewer than two for each stage most of them wait.
            (default: :obj:`1`, exact)
        history (int, optional): :math:`\alpha`, the number of epochs after which history is replaced.
            (default: :obj:`10`)
        shuffle (bool, optional): Whether chunks come in another order in each epoch. (default: :obj:`True`)
        cut (list, optional): The number of blocks of each stage, such as :func:`pyg_sar.balanced_cut` returns.
            (default: :obj:`None`, as equal as possible)
        seed (int, optional): Of the orders, and of all random numbers within blocks. (default: :obj:`0`)
        comm_dtype (torch.dtype, optional): As for :func:`pyg_sar.load`, between stages. (default: :obj:`None`)

    Attributes:
        stale (float): The share of this worker's edges that read history in the last epoch.
        blocks (torch.nn.ModuleList): Those of this stage.
    """

    def __init__(
        self, blocks: Sequence[torch.nn.Module], edge_index: Any, mesh: Any = None, chunks: int = 1,
        history: int = 10, shuffle: bool = True, cut: Sequence[int] | None = None, seed: int = 0,
        comm_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.stages = Stages(mesh, comm_dtype)
        self.group = None if mesh is None else mesh.get_group("graph")
        settings = {
            "chunks": chunks, "history": history, "shuffle": shuffle, "cut": cut, "seed": seed, "comm_dtype": comm_dtype
        }  # fmt: skip
        told = [f"{name}={value}" for name, value in settings.items()] + described(blocks)
        agree("the settings of a pipeline", told, self.group)
        if self.stages.size > 1:
            agree("the settings of a pipeline", told, self.stages.channel.group)
        self.cut = check(blocks, edge_index, self.stages, self.group, chunks, history, cut)
        self.edge_index, self.shuffle, self.alpha, self.seed = edge_index, shuffle, history, seed
        if self.stages.size > 1:
            which = [f"part {rank_of(self.group)} {self.fingerprint}"]
            agree("the graph, which all stages load", which, self.stages.channel.group)
        first = sum(self.cut[: self.stages.rank])
        self.first, self.blocks = first, torch.nn.ModuleList(list(blocks)[first : first + self.cut[self.stages.rank]])
        for module in self.blocks.modules():
            if getattr(module, "group", self) is None:  # statistics are those of all workers of the stage
                state: Any = module
                state.group = self.group
        self.epoch, self.stale, self.means = 0, 0.0, LooksForMeans()
        self.seen: Record | None = None
        self.shapes: dict[int, list[Shape]] = {}  # of what each stage sends on
        graph = edge_index.graph
        self.history: History | None = None
        if chunks > 1:
            rowptr = torch.nn.functional.pad(graph.degree.cumsum(0), (1, 0))
            self.history = History(graph, [(r.start, r.stop) for r in ranges(rowptr, chunks)])

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of this stage."""
        return self.blocks.parameters()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        r"""Clip the norm of the gradients of all stages together, between :meth:`step` and the optimizer's, and return
        what it was. :func:`torch.nn.utils.clip_grad_norm_` sees the gradients of one stage.

        Args:
            max_norm (float): The largest norm of all gradients.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).double() ** 2
        norm = (all_reduce(square, self.stages.channel.group) if self.stages.size > 1 else square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def train(self, mode: bool = True) -> Pipeline:
        """Set the blocks to training, or to evaluation."""
        self.blocks.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the blocks to evaluation."""
        return self.train(False)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all blocks, by the names of a ``torch.nn.ModuleList`` of them, on every worker."""
        mine = {
            f"{self.first + int(name.partition('.')[0])}.{name.partition('.')[2]}": t.detach()
            for name, t in self.blocks.state_dict().items()
        }
        return {name: t for one in self.stages.gather(mine) for name, t in one.items()}

    def tell(self, value: Any) -> Any:
        """Return on all stages what the last one gives: a number, a string, a tensor, or a list of these."""
        return self.stages.tell(value, self.stages.size - 1)

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Count what this worker sends, receives, waits for and computes within the context.

        Yields:
            Record: The counts, complete when the context is left.
        """
        with record_traffic(self.edge_index) as within:
            before, seen = (self.seen, self.stages.traffic), Record(Traffic(), within)
            self.seen, self.stages.traffic = seen, seen.between
            try:
                yield seen
            finally:
                self.seen, self.stages.traffic = before

    @contextmanager
    def timed(self, way: str, it: PipelineChunk | None) -> Iterator[None]:
        """Count the seconds of a chunk."""
        start = time.perf_counter()
        yield
        if self.seen is not None:
            self.seen.computed.append((way, -1 if it is None else it.number, time.perf_counter() - start))

    @cached_property
    def fingerprint(self) -> str:
        """What all stages have alike of the graph, and checkpoints too."""
        return fingerprint_of(self.edge_index.graph)

    def identity(self) -> str:
        """Return what histories depend on, and which stage this is."""
        chunks = 1 if self.history is None else len(self.history.chunks)
        shape = f"{self.cut} blocks, {size_of(self.group)} workers a stage, {chunks} chunks: stage {self.stages.rank}"
        return f"{shape} {self.fingerprint}"

    def checkpoint(self) -> dict[str, Any]:
        """Return what this worker needs to go on besides parameters and optimizer: the epoch, and all histories."""
        sites = {} if self.history is None else self.history.sites
        rows = {
            f"{block} {call} {tile}": rows.history
            for (block, call), site in sites.items()
            for tile, rows in enumerate(site)
        }
        shapes = [[k, *map(list, s)] for k, s in self.shapes.items()]
        return {"of": self.identity(), "epoch": self.epoch, "history": rows, "shapes": shapes}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`checkpoint` returned, with the same bits.

        Raises:
            ValueError: If it is of other stages, workers, chunks or nodes.
        """
        if state["of"] != self.identity():
            raise ValueError(f"It is of a pipeline of {state['of']}, and this one of {self.identity()}")
        self.epoch = state["epoch"]
        self.shapes = {k: [(shape, dtype) for shape, dtype in shapes] for k, *shapes in state["shapes"]}
        if self.history is not None:
            self.history.restore({tuple(map(int, key.split())): rows for key, rows in state["history"].items()})

    def __call__(self, x: Tensor | Values, *edges: Tensor) -> Any:
        """Return what the model gives, exactly and without gradients, on the last stage; ``None`` on the others."""
        with torch.no_grad():
            self.stages.begin()
            out = self.walk(x, edges)
        return unpacked(out) if self.stages.last else None

    def step(self, x: Tensor | Values, loss_fn: Callable[[Any, slice], Tensor], *edges: Tensor) -> Tensor:
        """Run the forward and the backward pass of an epoch; gradients are complete afterwards.

        Args:
            x (torch.Tensor or tuple): The features of this worker's nodes; other stages than the first read none.
            loss_fn (callable): Returns this worker's share of the loss of a chunk, given the output and the range of
                its rows; called on the last stage.
            *edges (torch.Tensor): Tensors with a row for each edge, for blocks that take some.

        Returns:
            The loss, without gradient, the same on all workers.

        Raises:
            ValueError: If a loss is no number, a block returns other rows, or tensors are those of other edges.
            RuntimeError: If there are no gradients.
        """
        check_step(x, edges, self.edge_index.graph.num_edges, self.history is not None)
        before, seeds = self.epoch, self.edge_index.graph.seeds
        drawn = seeds.seed, seeds.drawn
        try:
            with self.watched():
                if self.epoch == 0 and self.history is not None:
                    self.fill(self.history, x, edges)
                self.epoch += 1
                self.stages.begin()
                with torch.random.fork_rng(devices=[]):
                    loss = self.forward_and_backward(x, loss_fn, edges)
        except BaseException:  # who tries it again does the same
            self.epoch = before
            raise
        finally:  # those of the graph are others' too
            seeds.seed, seeds.drawn = drawn
        sum_gradients(self.blocks, group=self.group)
        if self.seen is not None:
            size, numbers = size_of(self.group), [p for p in self.parameters() if p.grad is not None]
            self.seen.parameters += 2 * (size - 1) * sum(p.nbytes for p in numbers) // size
        return loss

    def looks_for_means(self) -> AbstractContextManager[Any]:
        """Look at what the first losses are made by, where they are those of some of the rows."""
        some = self.history is not None or size_of(self.group) > 1
        return self.means if some and self.epoch == 1 else nullcontext()

    def watched(self) -> AbstractContextManager[None]:
        """Watch the first step of chunks, which have a part of the rows also in a process of its own."""
        first = self.epoch == 0 and self.history is not None and (watch.current() is None or watch.is_alone())
        return watching(part=True) if first else nullcontext()

    def forward_and_backward(
        self, x: Tensor | Values, loss_fn: Callable[[Any, slice], Tensor], edges: Sequence[Tensor]
    ) -> Tensor:
        """Run all chunks of an epoch, or all rows at once; return the loss."""
        if self.history is None:
            return self.passes(x, loss_fn, edges, [None])
        order = list(range(len(self.history.chunks)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        self.history.begin(order)
        self.stale = self.history.stale_share()
        loss = self.passes(x, loss_fn, edges, [self.history.chunks[k] for k in order])
        self.history.end(self.epoch % self.alpha == 0)
        return loss

    def fill(self, history: History, x: Tensor | Values, edges: Sequence[Tensor]) -> None:
        """Run an exact pass without gradients, of which all sites keep their rows."""
        self.stages.begin()
        history.begin(None)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self.walk(x, edges, history.whole)
        history.end(refresh=True)

    def walk(self, x: Tensor | Values, edges: Sequence[Tensor], it: PipelineChunk | None = None) -> Values:
        """Run all rows through all stages, one after the other; return what this one made of them."""
        self.hear()
        values = packed(x) if self.stages.first else tuple(self.receive(None, self.stages.rank - 1)())
        out = self.run(values, self.edge_index, edges, it)
        self.send_on(out, None)
        self.describe(out)
        self.stages.settle()
        return out

    def hear(self) -> None:
        """Wait until all stages before this one know what they send on; the first time."""
        for k in range(self.stages.rank):
            if k not in self.shapes:
                self.shapes[k] = self.stages.tell(None, k)

    def describe(self, out: Values) -> None:
        """Tell what this stage sends on, and hear it of those after it; the first time."""
        for k in range(self.stages.rank, self.stages.size - 1):
            if k not in self.shapes:
                self.shapes[k] = self.stages.tell(shapes_of(out), k)

    def send_on(self, out: Values, it: PipelineChunk | None) -> None:
        """Send what this stage made to the next one, if there is one, which expects rows like those of before."""
        if self.stages.last:
            return
        found = shapes_of(out)
        known = self.shapes.get(self.stages.rank, found)
        if found != known:
            raise ValueError(
                f"[rank {rank_of()}] Stage {self.stages.rank} makes rows of {found}, and of {known} before. Rows "
                f"between stages must have the same widths and types in each call: also within 'torch.autocast', or "
                f"without."
            )
        self.stages.send([t.detach() for t in out], self.stages.rank + 1, name_of(it))

    def receive(self, it: PipelineChunk | None, of: int) -> Callable[[], list[Tensor]]:
        """Start to receive a chunk, or all nodes: rows of the stage before, or gradients of the next one."""
        span, shapes = self.span_of(it), self.shapes[min(of, self.stages.rank)]
        return self.stages.receive(shapes, span.stop - span.start, of, name_of(it))

    def span_of(self, it: PipelineChunk | None) -> slice:
        """Return where the rows of a chunk are, or all nodes."""
        return slice(0, self.edge_index.graph.num_dst) if it is None else it.span

    def passes(
        self, x: Tensor | Values, loss_fn: Callable[[Any, slice], Tensor], edges: Sequence[Tensor],
        chunks: Sequence[PipelineChunk | None],
    ) -> Tensor:  # fmt: skip
        """Run all chunks forward, then backward in reverse order; return the loss. None is all nodes."""
        made: list[tuple[Values, Values]] = []  # of each chunk what this stage read, and what backward begins with
        self.hear()
        total = self.forward_pass(x, loss_fn, edges, chunks, made)
        self.stages.settle()
        self.backward_pass(chunks, made)
        self.stages.settle()
        return self.tell(all_reduce(total, self.group) if self.stages.last else total)

    def forward_pass(
        self, x: Tensor | Values, loss_fn: Callable[[Any, slice], Tensor], edges: Sequence[Tensor],
        chunks: Sequence[PipelineChunk | None], made: list[tuple[Values, Values]],
    ) -> Tensor:  # fmt: skip
        """Run all chunks forward, and send on what comes of them; return the loss."""
        total = torch.zeros((), dtype=torch.float64)
        under_way = None if self.stages.first else self.receive(chunks[0], self.stages.rank - 1)
        for k, it in enumerate(chunks):
            if under_way is None:
                values = given = packed(x) if it is None else tuple(t[it.span] for t in packed(x))
            else:
                values = tuple(t.requires_grad_(t.is_floating_point()) for t in under_way())
                given = tuple(Arrived.apply(t) for t in values)
                if k + 1 < len(chunks):  # before this one is computed: a message starts when it is expected
                    under_way = self.receive(chunks[k + 1], self.stages.rank - 1)
            with self.timed("forward", it):
                out = self.run(given, self.edge_index, edges, it)
                if self.stages.last:
                    with watch.allow_local(), running.within(running.LOSS), self.looks_for_means():
                        loss = loss_fn(unpacked(out), self.span_of(it))
                    check_loss(loss)
                    total += loss.detach().double()
            del given
            self.send_on(out, it)
            if self.stages.last:  # rows of which no label speaks take part in backward: others have read them
                made.append((values, (loss, *unread(loss, out))))
            else:
                made.append((values, out))
            self.describe(out)
        return total

    def backward_pass(self, chunks: Sequence[PipelineChunk | None], made: list[tuple[Values, Values]]) -> None:
        """Run all chunks backward, let go of what was ``made`` of each, and send on the gradients of what it read."""
        order = list(last_first(len(chunks)))
        coming = None if self.stages.last else self.receive(chunks[order[0]], self.stages.rank + 1)
        for k, after in zip_longest(order, order[1:]):
            values, out = made[k]
            made[k] = (), ()
            grads: Sequence[Tensor | None]
            if coming is None:  # the loss, and rows that it is not made of
                grads = [None, *map(torch.zeros_like, out[1:])]
            else:
                grads = coming()
                coming = None if after is None else self.receive(chunks[after], self.stages.rank + 1)
            wanted: Any = [(t, grad) for t, grad in zip(out, grads, strict=True) if t.requires_grad]
            if wanted:
                with self.timed("backward", chunks[k]):
                    torch.autograd.backward([t for t, _ in wanted], [grad for _, grad in wanted])
            if not self.stages.first:
                self.stages.send([zeros_if_none(t) for t in values], self.stages.rank - 1, name_of(chunks[k]))
            del values, out, grads, wanted

    def run(self, values: Values, edge_index: Any, edges: Sequence[Tensor], it: PipelineChunk | None) -> Values:
        """Run the blocks of this stage, on all rows or on a chunk."""
        if it is not None:
            edge_index, edges = ShardedEdgeIndex(it.graph), [t[it.edges] for t in edges]
        values = self.marked(values, it)
        for k, block in enumerate(self.blocks, self.first):
            if torch.is_grad_enabled() or it is not None:  # what is drawn depends on neither stages nor chunks before
                number = -1 if it is None else it.number
                seed_generators(checksum((self.seed, self.epoch, number, rank_of(self.group), k)))
                edge_index.graph.seeds.manual_seed(checksum((self.seed, self.epoch, k)))
            with nullcontext() if it is None or self.history is None else self.history.within(k):
                out = self.marked(packed(call(block, values, edge_index, edges)), it)
            for t in out:
                if t.size(0) != values[0].size(0):
                    raise ValueError(
                        f"[rank {rank_of()}] Expected block {k} to return a row for each of {values[0].size(0)} nodes "
                        f"(got {list(t.shape)})"
                    )
            values = out
        return values

    def marked(self, values: Values, it: PipelineChunk | None) -> Values:
        """Report that these are some of all rows, if they are."""
        some = it is not None or size_of(self.group) > 1
        return tuple(map(watch.rows, values)) if some else values


class Arrived(torch.autograd.Function):
    """Rows that came of another stage. They are no leaf, so that a block may change them in place, and no copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """Return the rows."""
        return rows.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient."""
        return grad


def name_of(it: PipelineChunk | None) -> str:
    """Return what messages call a chunk, or all nodes."""
    return "all nodes" if it is None else f"chunk {it.number}"


def shapes_of(rows: Values) -> list[Shape]:
    """Return what the next stage must know of rows before they come."""
    return [(list(t.shape[1:]), t.dtype) for t in rows]


def unread(loss: Tensor, rows: Values) -> Values:
    """Return those of several outputs that a loss is not made of."""
    left = {t.grad_fn for t in rows}
    for node in nodes_behind([loss]):
        left.discard(node)
        if not left:
            break
    return tuple(t for t in rows if t.grad_fn in left)


def last_first(count: int) -> Iterator[int]:
    """Return the order of chunks in backward, in which those that read a row come before the chunk whose row it is."""
    return reversed(range(count))


def zeros_if_none(t: Tensor) -> Tensor:
    """Return the gradient of a tensor, and let go of it."""
    grad, t.grad = t.grad, None
    return torch.zeros_like(t) if grad is None else grad


def seed_generators(seed: int) -> None:
    """Seed the generators in use. :func:`torch.manual_seed` writes down a stack for each kind of device there is not,
    which small chunks would notice.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
