r"""What users pass on: a tensor ``[2, num_edges]`` that stands for a sharded graph.

Layers of :mod:`pyg_sar.nn` recognise a :class:`ShardedEdgeIndex` and stream. In any other PyG layer it behaves as the
``edge_index`` of the whole graph would, one-shot: :mod:`pyg_sar.operations` answers what the layer does with it.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_sar.graph import ShardedGraph
from pyg_sar.operations import FLIPPED, EdgeNumbers, refuse_whole_graph
from pyg_sar.rewire import regroup


class ShardedEdgeIndex(EdgeNumbers):
    r"""The edges that end on this worker, in place of ``edge_index``.

    Args:
        graph (ShardedGraph): This worker's share of the graph.

    It has no storage of its own; numbers are made when an operation asks for them.
    """

    @property
    def graph(self) -> ShardedGraph:
        """Return the sharded graph, which layers stream over; only the ``edge_index`` as it was loaded has one.

        Raises:
            AttributeError: If this was derived by an operation on a sharded ``edge_index``.
        """
        refuse_whole_graph(self)
        if self._data is not None:
            raise AttributeError(
                f"This {self.kind} was derived by an operation on a sharded 'edge_index' and has no blocks to stream"
            )
        return self._graph

    @property
    def streams(self) -> bool:
        """Whether the edges are those of the sharded graph, so that layers can stream."""
        return self._data is None

    def regroup(self, aggr: torch.nn.Module | None = None) -> ShardedGraph:
        """Return the graph of these edges, which may have been derived by adding or leaving out some, or by flipping.

        Args:
            aggr (torch.nn.Module, optional): An aggregation of which whoever asks knows more than the audit.
                (default: :obj:`None`)
        """
        refuse_whole_graph(self, () if aggr is None else aggr.modules())
        if self._data is None:
            return self._graph
        return regroup(self._graph, self._data.flip(0) if self.kind == FLIPPED else self._data)

    def merge(self) -> ShardedEdgeIndex:
        """Return ``replace(one_shot=True)``: the same edges in mode 3."""
        return self.replace(one_shot=True)

    def replace(self, remat: bool | None = None, one_shot: bool = False) -> ShardedEdgeIndex:
        """Return the same edges in mode 1 (``remat=True``), 2 (``remat=False``) or 3 (``one_shot=True``) of SAR.

        Args:
            remat (bool, optional): Whether backward fetches source rows again instead of keeping them.
                (default: :obj:`None`, as it is)
            one_shot (bool, optional): Whether all halo rows are fetched at once; this cannot be undone.
                (default: :obj:`False`)
        """
        graph = self.graph.merge() if one_shot else self.graph
        return ShardedEdgeIndex(graph if remat is None else graph.replace(remat=remat))

    def cache_features(self, x: Tensor) -> None:
        """Keep what layers fetch or sum up of node features that never change, instead of doing so in every step.

        Layers of :mod:`pyg_sar.nn` that are given this very tensor communicate for it once: ``SAGEConv`` (unless it
        projects features before), ``GINConv``, ``RGCNConv``, and ``GCNConv`` that normalises edges without weights keep
        its aggregate, ``GATConv`` (not under autocast) and ``RGCNConv`` with bases the rows of other workers, as long
        as the tensor lives. All workers call it alike.
        Changes in place, of the tensor or of an aggregate, are noticed (but those of ``x.data``), and must be made by
        all of them, too.

        Args:
            x (torch.Tensor): The local rows, such as ``data.x``.

        Raises:
            ValueError: If ``x`` has a gradient, or another number of rows.
        """
        graph = self.graph
        if x.requires_grad or x.is_inference() or x.dim() == 0 or x.size(0) != graph.num_src:
            raise ValueError(
                f"Expected an ordinary tensor without gradient that has one row for each of this worker's "
                f"{graph.num_src} nodes (got shape {list(x.shape)}, requires_grad={x.requires_grad})"
            )
        graph.cached[x] = x._version, WeakKeyDictionary()
