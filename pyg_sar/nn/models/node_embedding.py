r"""Tables with a row for each node, of which a worker holds those of its local nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.storage import NodeStorage

from pyg_sar import watch
from pyg_sar.distributed.gather import gather
from pyg_sar.distributed.group import gather_objects, rank_of
from pyg_sar.edge_index import ShardedEdgeIndex

CHUNK = 2**22  # numbers that are drawn at a time


class NodeEmbedding(torch.nn.Module):
    r"""An embedding of every node, such as ``torch.nn.Embedding(num_nodes, embedding_dim)``, of which a worker holds
    the rows of its local nodes.

    .. code-block:: python

        self.embedding = pyg_sar.nn.NodeEmbedding(data, 64)
        x = self.embedding()  # a row for each of this worker's nodes, as data.x has

    The parameter ``weight`` is this worker's alone: its gradient is complete after ``backward``, and
    :func:`pyg_sar.sum_gradients` and :func:`pyg_sar.broadcast_parameters` leave it out. Every optimizer that looks at
    each number for itself works, sparse ones included. What looks at all numbers does not: a norm of gradients, such as
    :func:`torch.nn.utils.clip_grad_norm_` takes, is that of one worker.

    For every number of workers the rows begin as those of :class:`torch.nn.Embedding` in one process with the seed of
    rank 0 (on the CPU), and random numbers go on as there. Every worker draws all of them, piece by piece, and keeps
    its own. For other numbers call :meth:`draw`: functions of :mod:`torch.nn.init` see the local rows alone.

    The ``state_dict`` holds the local rows and ``n_id``, without which rows cannot be told apart: to load it into
    another part of the graph raises. :func:`whole_state_dict` has all rows in the order of the graph, as PyG in one
    process; such tables of all nodes are loaded by any number of workers.

    Args:
        nodes (torch_geometric.data.Data or torch.Tensor): The loaded data, or the data of one type of node, such as
            ``data["user"]``; or ``n_id``, the global ids of the local nodes. All workers together own
            :math:`0 \ldots |\mathcal{V}| - 1`.
        embedding_dim (int): The size of each row.
        sparse (bool, optional): Whether the gradient is a sparse tensor of the rows that were read, for
            :class:`torch.optim.SparseAdam` and the like. (default: :obj:`False`)
        group (ProcessGroup, optional): The workers, which make the table together. (default: :obj:`None`, all of them)
        device (torch.device, optional): Where the rows are. (default: :obj:`None`)
        dtype (torch.dtype, optional): Their type. (default: :obj:`None`)

    Shapes:
        - **input:** rows of local nodes, as an index or a mask, row 0 or 1 of :func:`pyg_sar.shard_links`, or nothing
        - **output:** :math:`(*, D)`, or :math:`(n, D)` for all local nodes

    Raises:
        TypeError: If ``nodes`` is neither.
        ValueError: On all workers, if they do not own every node once.
    """

    n_id: Tensor

    def __init__(
        self, nodes: Any, embedding_dim: int, sparse: bool = False, group: Any = None,
        device: torch.device | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        n_id = ids_of(nodes)
        self.embedding_dim, self.sparse, self.group = embedding_dim, sparse, group
        self.num_nodes = count_nodes(n_id, group)
        self.weight = torch.nn.Parameter(torch.empty(n_id.numel(), embedding_dim, device=device, dtype=dtype))
        self.register_buffer("n_id", n_id.to(self.weight.device))
        self.mark()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from the standard normal distribution; all workers call it together."""
        self.draw(lambda rows, generator: rows.normal_(generator=generator))

    @torch.no_grad()
    def draw(self, fill: Callable[[Tensor, torch.Generator], Any]) -> None:
        """Fill the local rows with what ``fill``, called for some rows after the others, would give them in one
        process.

        Pieces have multiples of 16 rows, and the last one at least 16: so the normal numbers, which torch draws by 16,
        are those of the whole.

        Args:
            fill (callable): ``fill(rows, generator)`` draws some rows in place. What depends on the number of nodes
                asks the table and not the rows: of :func:`torch.nn.init.xavier_uniform_` the bound is
                ``a = (6 / (emb.num_nodes + emb.embedding_dim)) ** 0.5``, and ``fill`` calls
                ``rows.uniform_(-a, a, generator=generator)``.

        Raises:
            ValueError: If the table is drawn in several pieces, and rows depend on how many there are.
        """
        mine = torch.get_rng_state()
        generator = torch.Generator()
        generator.set_state(gather_objects(mine, self.group)[0])
        alike = torch.equal(generator.get_state(), mine)
        rows, place = self.n_id.cpu().sort()
        step = 16 * math.ceil(CHUNK / 16 / max(self.embedding_dim, 1))
        bounds = [*range(0, max(self.num_nodes - 15, 1), step), self.num_nodes]
        ends = torch.searchsorted(rows, torch.tensor(bounds)).tolist()
        if len(bounds) > 2:
            self.check_pieces(fill)
        for (start, end), (a, b) in zip(pairwise(bounds), pairwise(ends), strict=True):
            piece = torch.empty(end - start, self.embedding_dim, dtype=self.weight.dtype, device="cpu")
            fill(piece, generator)
            self.weight[place[a:b].to(self.weight.device)] = piece[rows[a:b] - start].to(self.weight.device)
        if alike:  # else nobody has them go on as on rank 0
            torch.set_rng_state(generator.get_state())

    def check_pieces(self, fill: Callable[[Tensor, torch.Generator], Any]) -> None:
        """Raise if what some rows get depends on how many are drawn together."""
        few, more = (torch.empty(n, self.embedding_dim, dtype=self.weight.dtype, device="cpu") for n in (16, 64))
        for rows in (few, more):
            fill(rows, torch.Generator().manual_seed(0))
        if not torch.equal(few, more[:16]):
            raise ValueError(
                f"[rank {rank_of(self.group)}] Expected 'fill' to draw rows by its generator, alike however many: a "
                f"table of {self.num_nodes} nodes is drawn in pieces, and 'torch.nn.init.xavier_uniform_' and others "
                f"choose a bound by the number of rows. Compute it from 'num_nodes' and 'embedding_dim' of the table."
            )

    def forward(self, rows: Tensor | None = None) -> Tensor:
        """Return the rows of all local nodes, or of some."""
        if rows is None and not self.sparse:
            return watch.rows(self.weight, of=self.n_id)
        if isinstance(rows, ShardedEdgeIndex):
            if self.sparse:
                raise NotImplementedError(
                    f"[rank {rank_of(self.group)}] The gradient of rows that other workers read is not sparse; use "
                    f"'sparse=False'."
                )
            return self.weight[rows]
        every = partial(torch.arange, self.weight.size(0), device=self.weight.device)
        if rows is None:
            rows = every()
        elif rows.dtype == torch.bool:
            if rows.shape != self.n_id.shape:
                raise ValueError(
                    f"[rank {rank_of(self.group)}] Expected a mask with an entry for each of this worker's "
                    f"{self.n_id.numel()} nodes (got {list(rows.shape)}). Take that of the data that 'load' returned."
                )
            rows = rows.nonzero().view(-1)
        elif rows.shape == self.n_id.shape and torch.equal(rows, self.n_id) and not torch.equal(rows, every()):
            raise ValueError(
                f"[rank {rank_of(self.group)}] Expected rows of this worker's nodes, 0 to {self.n_id.numel() - 1}, but "
                f"got their global ids, 'n_id'. Call the embedding without them for the rows of all local nodes."
            )
        return watch.rows(F.embedding(rows, self.weight, sparse=self.sparse), of=self.n_id)

    @torch.no_grad()
    def whole(self, rows: Tensor | None = None) -> Tensor:
        r"""Return the rows of all nodes in the order of the graph, :math:`(|\mathcal{V}|, *)`; all workers call it
        together, and all get them.

        Args:
            rows (torch.Tensor, optional): Other rows of the local nodes, such as outputs, or what an optimizer keeps of
                ``weight``. (default: :obj:`None`, ``weight``)
        """
        whole = gather(self.weight if rows is None else rows, self.n_id, None, self.group)
        assert whole is not None  # which it is where one worker alone gets them
        return whole

    def become(self, n_id: Tensor, table: Tensor) -> None:
        """Be the table of another graph, given the ids of the local nodes and all rows."""
        self.num_nodes, self.n_id = table.size(0), n_id
        self.weight = torch.nn.Parameter(table[n_id].to(self.weight), self.weight.requires_grad)
        self.mark()

    def mark(self) -> None:
        """Have others know that the tensors are this worker's alone (:func:`~pyg_sar.distributed.group.is_local`)."""
        self.weight.is_local = self.n_id.is_local = True  # type: ignore[attr-defined]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark()  # which copies of parameters lack

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state, errors = dict(state_dict), args[-1]
        weight, n_id = (state.get(prefix + name) for name in ("weight", "n_id"))
        whole = [self.num_nodes, *self.weight.shape[1:]]
        error = ""
        if n_id is not None and not torch.equal(n_id.cpu(), self.n_id.cpu()):
            error = (
                f"the rows of {n_id.numel()} nodes that are not this worker's {self.n_id.numel()}, or in another order "
                f"(see 'n_id'). They were saved of another part: save 'pyg_sar.nn.whole_state_dict(model)' instead"
            )
        elif n_id is None and weight is not None and list(weight.shape) != whole:
            error = f"shape {list(weight.shape)}. Without 'n_id', a table of all nodes is expected, {whole}"
        if error:
            errors.append(f"[rank {rank_of(self.group)}] '{prefix}weight' has {error}.")
            return
        if n_id is None and weight is not None:
            state[prefix + "weight"] = weight[self.n_id.to(weight.device)]
            state[prefix + "n_id"] = self.n_id
        super()._load_from_state_dict(state, prefix, *args)
        self.mark()

    def extra_repr(self) -> str:
        """Show sizes."""
        return f"{self.weight.size(0)} of {self.num_nodes} nodes, {self.embedding_dim}"


def whole_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    r"""Return a ``state_dict`` with the rows of all nodes in each :class:`NodeEmbedding`, in the order of the graph.

    All workers call it together, and all get it; one of them may then save it. It loads into the model of PyG in one
    process, and into this one on any number of workers.

    .. code-block:: python

        state = pyg_sar.nn.whole_state_dict(model)
        if rank == 0:
            torch.save(state, "model.pt")

    Args:
        module (torch.nn.Module): The model.
    """
    state = module.state_dict()
    for name, table in module.named_modules(remove_duplicate=False):
        if isinstance(table, NodeEmbedding):
            prefix = f"{name}." if name else ""
            state[prefix + "weight"] = table.whole()
            del state[prefix + "n_id"]
    return state


def ids_of(nodes: Any) -> Tensor:
    """Return the global ids of the local nodes; data that was not loaded from a partition has all of them."""
    if isinstance(nodes, (Data, NodeStorage)):
        nodes = nodes["n_id"] if "n_id" in nodes else torch.arange(nodes.num_nodes)
    if type(nodes) is not Tensor or nodes.dtype != torch.int64 or nodes.dim() != 1:
        found = f"{nodes.dtype} of shape {list(nodes.shape)}" if isinstance(nodes, Tensor) else repr(nodes)
        raise TypeError(
            f"Expected the loaded data (of one type of node), or 'n_id', the global ids of this worker's nodes (got "
            f"{found})"
        )
    return nodes


def count_nodes(n_id: Tensor, group: Any) -> int:
    """Return how many nodes all workers own; raise on all of them unless they own each once."""
    ends = (int(n_id.min()), int(n_id.max())) if n_id.numel() > 0 else (0, -1)
    said = gather_objects(
        (n_id.numel(), *ends, n_id.unique().numel(), int(n_id.sum()), int((n_id * n_id).sum())), group
    )
    total, different, ids, squares = (sum(one[k] for one in said) for k in (0, 3, 4, 5))
    inside = all(first >= 0 and last < total for _, first, last, *_ in said)
    missing = total * (total - 1) // 2 - ids, (total * (total - 1) * (2 * total - 1) // 6 - squares) % 2**64
    if not inside or different < total or any(missing):
        counts = ", ".join(f"rank {r}: {one[0]} from {one[1]} to {one[2]}" for r, one in enumerate(said))
        raise ValueError(
            f"[rank {rank_of(group)}] Expected all workers together to own each of {total} nodes once, with ids from 0 "
            f"to {total - 1} (got {counts}). Pass the loaded data, or its 'n_id'."
        )
    return total
