r"""Input features that never change (``edge_index.cache_features``): their halo rows are fetched once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from pyg_sar.exchange import Exchange, Meter, Schedule, Wrapped
from pyg_sar.graph import ShardedGraph
from pyg_sar.running import About


def cached(exchange: Exchange, graph: ShardedGraph, x: Tensor) -> Exchange:
    """Return the exchange of the local rows ``x`` of a graph: one that fetches once, if ``x`` is a cached input."""
    return Cached(exchange, graph, x) if graph.is_constant(x) and not exchange.alone else exchange


class Cached(Wrapped):
    """Fetches the rows of ``x`` in one tile, and keeps them with the graph for all later calls."""

    def __init__(self, exchange: Exchange, graph: ShardedGraph, x: Tensor) -> None:
        super().__init__(exchange)
        self.graph, self.x = graph, x

    def pull(
        self, tiles: Iterable[Tensor], order: Schedule, meter: Meter, about: About | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield what is kept of the halo rows, cut as the tiles are."""

        def fetch() -> dict[int, Tensor]:
            # The local rows would keep the cached tensor alive.
            blocks = self.exchange.pull([self.x], self.exchange.order(1), meter, about)
            return {q: rows for q, rows in blocks if rows is not self.x}

        kept = self.graph.recall(self.x, self.graph.exchange, "rows", fetch)
        start = 0
        for tile, shards in zip(tiles, order, strict=True):
            columns = slice(start, start := start + tile.size(-1))
            whole = tile.shape[1:] == self.x.shape[1:]
            for q in shards:
                yield q, tile if q not in kept else kept[q] if whole else kept[q][..., columns]
