r"""The number of this worker's nodes, as scripts know it (``data.num_nodes``): where it is taken for that of all."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pyg_sar.distributed.group import is_local, rank_of
from pyg_sar.watch import current, is_allowed

# Copies and pickles are ordinary integers; of what torch.load reads with 'weights_only', it must call this.
torch.serialization.add_safe_globals([int])

DIVISOR = "divides by the number of this worker's nodes. That of all workers is 'data.total_nodes'"


class Count(int):
    """A number of nodes of this worker. The watch hears of what an integer is divided by, and sees it in calls of
    torch; copies and pickles are ordinary integers.
    """

    def __rtruediv__(self, other: Any) -> Any:
        """Divide as an integer does."""
        if (watch := current()) is not None:
            watch.warn("/", DIVISOR)
        return other / int(self)

    def __radd__(self, other: Any) -> Any:
        """Add as an integer does, but stay what it is in the sum of a single number, which ``data.num_nodes`` is."""
        return self if other == 0 else other + int(self)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Say how to make it again."""
        return int, (int(self),)


def refuse_tables(*modules: Any) -> None:
    """Raise if one of the modules was made for as many nodes as this worker has: it would have a row for each of them,
    which are other nodes on other workers, while all workers have the same parameters.
    """
    watches = current() is not None and not is_allowed()
    found = [it for it in modules if isinstance(it, torch.nn.Module)] if watches else []
    for name, inner in (pair for module in found for pair in module.named_modules()):
        parameters = [p for p in inner.parameters(recurse=False) if not (is_local(p) or is_lazy(p))]
        for key, count in vars(inner).items():
            if isinstance(count, Count) and any(count in p.shape for p in parameters):
                raise ValueError(
                    f"[rank {rank_of()}] '{name or type(inner).__name__}' was made for the {count} nodes of this "
                    f"worker ('{key}'), which are others on each, but all workers have the same parameters. Take "
                    f"'pyg_sar.nn.NodeEmbedding(data, channels)' for a row for each node, or 'data.total_nodes' and "
                    f"read its rows by 'data.n_id'; if it only keeps this number, 'int(data.num_nodes)'."
                )
