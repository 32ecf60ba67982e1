r"""Input features that never change (``edge_index.cache_features``): their halo rows are fetched once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from pyg_sar.exchange import Exchange, Meter, Schedule
from pyg_sar.graph import ShardedGraph
from pyg_sar.running import About


def pull_cached(
    graph: ShardedGraph, x: Tensor, exchange: Exchange, tiles: Iterable[Tensor], order: Schedule, meter: Meter,
    about: About | None,
) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
    """Yield what ``exchange.pull`` does for the tiles of the cached input features ``x``: the halo rows are fetched in
    one tile at the first call, kept with the graph for all later ones, and cut as the tiles are.
    """

    def fetch() -> dict[int, Tensor]:
        # The local rows would keep the cached tensor alive.
        return {q: rows for q, rows in exchange.pull([x], exchange.order(1), meter, about) if rows is not x}

    kept = graph.recall(x, graph.exchange, "rows", fetch)
    start = 0
    for tile, shards in zip(tiles, order, strict=True):
        columns = slice(start, start := start + tile.size(-1))
        whole = tile.shape[1:] == x.shape[1:]
        for q in shards:
            yield q, tile if q not in kept else kept[q] if whole else kept[q][..., columns]
