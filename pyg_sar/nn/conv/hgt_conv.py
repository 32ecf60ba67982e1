r"""The heterogeneous graph transformer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.reverse import reverse
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.offload.passes import bring_home, force
from pyg_sar.offload.rows import HostRows
from pyg_sar.operations import FLIPPED
from pyg_sar.refusals import fail
from pyg_sar.rewire import join


class HGTConv(MessagePassing, torch_geometric.nn.HGTConv):
    r"""The heterogeneous graph transformer operator from the `"Heterogeneous Graph Transformer"
    <https://arxiv.org/abs/2003.01332>`_ paper.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.HGTConv`. On sharded graphs, one for each edge
    type, the softmax over the in-edges of all types runs online over the source shards; communicated are keys and
    values after the map of their edge type.

    Shapes:
        - **input:** by node type, features :math:`(|\mathcal{V}_t|, F_{in})`; by edge type, edge indices
          :math:`(2, |\mathcal{E}_t|)`
        - **output:** by node type that has in-edges of any type, features :math:`(|\mathcal{V}_t|, F_{out})`
    """

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor | None]:
        """Run the forward pass."""
        if not any(isinstance(it, ShardedEdgeIndex) for it in edge_index_dict.values()):
            return super().forward(x_dict, edge_index_dict)
        heads, width = self.heads, self.out_channels // self.heads
        at_home = next((x for x in x_dict.values() if isinstance(x, HostRows)), None)
        if at_home is not None:
            x_dict = {t: bring_home(x, at_home.place.of(t)) for t, x in x_dict.items()}
        projected = self.kqv_lin(x_dict)
        if at_home is not None:  # once, and not for each edge type
            projected = {t: force(rows) for t, rows in projected.items()}
        packed = {t: kqv.view(-1, 3, heads, width).unbind(1) for t, kqv in projected.items()}
        graphs = {edge_type: directed(it) for edge_type, it in edge_index_dict.items()}
        keys, queries, values = ({t: kqv[i] for t, kqv in packed.items()} for i in range(3))
        if any(g.origin is not None for g in graphs.values()):  # of a message-flow graph, with the first rows of some
            counts = {t: g.num_dst for (*_, t), g in graphs.items()}
            queries = {t: queries[t][:n] for t, n in counts.items()}
        q, first = self._cat(queries)
        if at_home is not None:
            k, v = (self.by_edge_type(*of, list(edge_index_dict)) for of in ((keys, self.k_rel), (values, self.v_rel)))
        else:
            k, v, _ = self._construct_src_node_feat(keys, values, edge_index_dict)
        graph = join(list(graphs.values()), first, [t for *_, t in graphs], q.size(0))
        scale = [self.p_rel["__".join(it)].expand(g.num_edges, -1) for it, g in graphs.items()]
        out = self.propagate(ShardedEdgeIndex(graph), k=(k, None), q=(None, q), v=(v, None), edge_attr=torch.cat(scale))
        parts = zip(first, out.split([len(rows) for rows in queries.values()]), strict=True)
        found = {t: rows for t, rows in parts if t in self.dst_node_types}
        mapped = self.out_lin({t: F.gelu(rows) for t, rows in found.items()})
        return {t: self.skipped(t, rows, x_dict[t][: len(rows)]) for t, rows in mapped.items()}

    def by_edge_type(self, rows: dict[str, Tensor], by: Any, edge_types: list[Any]) -> Tensor:
        """Return rows of sources after the maps of their edge types, one edge type after the other, as PyG does, but
        each type for itself.
        """
        numbers = [self.edge_types_map[it] for it in edge_types]
        if numbers != sorted(numbers):
            raise ValueError(
                f"Expected 'edge_index_dict' in the order of the layer's metadata for rows at home (got {edge_types}): "
                f"PyG's 'HGTConv' applies the weights of other edge types in another order"
            )
        weight = by.weight.view(self.heads, -1, *by.weight.shape[1:])
        every = ((rows[it[0]], weight[:, k]) for it, k in zip(edge_types, numbers, strict=True))
        return torch.cat([torch.einsum("nhd,hdf->nhf", x, of_type) for x, of_type in every])

    def skipped(self, node_type: str, out: Tensor, x: Tensor) -> Tensor:
        """Mix with the input where it is as wide."""
        if out.size(-1) != x.size(-1):
            return out
        alpha = self.skip[node_type].sigmoid()
        return alpha * out + (1 - alpha) * x


def directed(edge_index: ShardedEdgeIndex) -> ShardedGraph:
    """Return the graph of edges in their direction."""
    graph = edge_index.regroup()
    if edge_index.kind != FLIPPED:
        return graph
    if edge_index.of_flow:
        fail(graph, "A layer of a message-flow graph does not have all out-edges of its sources", "Flip none of them")
    return reverse(graph).graph
