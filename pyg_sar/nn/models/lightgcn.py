r"""LightGCN with a sharded table of nodes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.distributed.collectives import all_reduce
from pyg_sar.distributed.group import rank_of
from pyg_sar.distributed.links import own_rows, shard_links
from pyg_sar.distributed.loss import global_mean, with_gradient_of
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.nn.convert import convert
from pyg_sar.nn.models.node_embedding import NodeEmbedding


class LightGCN(torch_geometric.nn.LightGCN):
    r"""The LightGCN model from the `"LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation"
    <https://arxiv.org/abs/2002.02126>`_ paper.

    .. math::
        \textbf{x}_i = \sum_{l=0}^{L} \alpha_l \textbf{x}^{(l)}_i, \quad
        \mathbf{x}^{(l+1)}_i = \sum_{j \in \mathcal{N}(i)} \frac{1}{\sqrt{\deg(i)\deg(j)}}\mathbf{x}^{(l)}_j

    Arguments are those of :class:`torch_geometric.nn.LightGCN` but for ``nodes`` in place of the number of nodes. Each
    worker has the embeddings of its local nodes, a :class:`NodeEmbedding`. Pairs are global ids, the same on all
    workers; each worker ranks those whose *first* node (the user) it owns, in their order. So the training step is
    PyG's:

    .. code-block:: python

        pairs = torch.cat([pos, neg], dim=1)  # of the same users, drawn alike on all workers
        pos_rank, neg_rank = model(data.edge_index, pairs).chunk(2)
        loss = model.recommendation_loss(pos_rank, neg_rank, node_id=pairs.unique())

    Losses are means over the pairs of all workers: values are the same on each, gradients a worker's share.

    Args:
        nodes (torch_geometric.data.Data or torch.Tensor): The loaded data or ``n_id``, as for :class:`NodeEmbedding`.
        embedding_dim (int): The dimensionality of node embeddings.
        num_layers (int): The number of layers.
        alpha (float or torch.Tensor, optional): The weights of layers. (default: :obj:`None`, uniform)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
        **kwargs (optional): Arguments of :class:`torch_geometric.nn.LGConv`.
    """

    def __init__(
        self,
        nodes: Any,
        embedding_dim: int,
        num_layers: int,
        alpha: float | Tensor | None = None,
        group: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(0, embedding_dim, num_layers, alpha, **kwargs)
        self.embedding = NodeEmbedding(nodes, embedding_dim, group=group)
        self.num_nodes, self.group = self.embedding.num_nodes, group
        convert(self.convs, group)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from PyG's uniform distribution; all workers call it together."""
        if self.num_nodes > 0:  # else PyG's constructor calls it, before there is a table
            bound = math.sqrt(3.0) * math.sqrt(2.0 / (self.num_nodes + self.embedding_dim))
            self.embedding.draw(lambda rows, generator: rows.uniform_(-bound, bound, generator=generator))

    def forward(
        self, edge_index: Any, edge_label_index: Tensor | None = None, edge_weight: Tensor | None = None
    ) -> Tensor:
        r"""Rank pairs of nodes.

        Args:
            edge_index (torch.Tensor): The graph.
            edge_label_index (torch.Tensor, optional): The pairs :math:`(2, |\mathcal{P}|)`: global ids, of which the
                result has those whose first node is this worker's own; or what :func:`pyg_sar.shard_links` returned,
                which are all ranked. (default: :obj:`None`, the edges of ``edge_index``)
            edge_weight (torch.Tensor, optional): The weight of each edge of ``edge_index``.
        """
        sharded = isinstance(edge_index, ShardedEdgeIndex)
        if sharded and edge_label_index is not None and not isinstance(edge_label_index, ShardedEdgeIndex):
            # A pair goes to the owner of its destination, and its rank is the same the other way round.
            edge_label_index, _ = shard_links(edge_label_index.flip(0), self.embedding.n_id, self.group)
        return super().forward(edge_index, edge_label_index, edge_weight)

    @torch.no_grad()
    def recommend(
        self,
        edge_index: Any,
        edge_weight: Tensor | None = None,
        src_index: Tensor | None = None,
        dst_index: Tensor | None = None,
        k: int = 1,
        sorted: bool = True,
    ) -> Tensor:
        r"""Return the top-:math:`k` nodes for each of some nodes, as global ids.

        All workers call it together, and each gets the answers that it asks for: users may be divided among them. Each
        has the final embeddings of all nodes meanwhile.

        Args:
            edge_index (torch.Tensor): The graph.
            edge_weight (torch.Tensor, optional): The weight of each edge.
            src_index (torch.Tensor, optional): Global ids of the nodes to recommend to. (default: :obj:`None`, all)
            dst_index (torch.Tensor, optional): Global ids of the possible choices. (default: :obj:`None`, all)
            k (int, optional): Number of recommendations. (default: :obj:`1`)
            sorted (bool, optional): Whether to sort them by score. (default: :obj:`True`)
        """
        out = self.embedding.whole(self.get_embedding(edge_index, edge_weight))
        src, dst = (out if ids is None else out[ids] for ids in (src_index, dst_index))
        top = (src @ dst.t()).topk(k, dim=-1, sorted=sorted).indices
        return top if dst_index is None else dst_index[top]

    def link_pred_loss(self, pred: Tensor, edge_label: Tensor, **kwargs: Any) -> Tensor:
        r"""Return the mean binary cross entropy of the pairs of all workers.

        Args:
            pred (torch.Tensor): The ranks of this worker's pairs.
            edge_label (torch.Tensor): Their labels.
            **kwargs (optional): Arguments of :class:`torch.nn.BCEWithLogitsLoss`.
        """
        loss = torch.nn.BCEWithLogitsLoss(reduction="none", **kwargs)
        return global_mean(loss(pred, edge_label.to(pred.dtype)), self.group)

    def recommendation_loss(
        self,
        pos_edge_rank: Tensor,
        neg_edge_rank: Tensor,
        node_id: Tensor | None = None,
        lambda_reg: float = 1e-4,
        **kwargs: Any,
    ) -> Tensor:
        r"""Return the mean Bayesian Personalized Ranking (BPR) loss of the pairs of all workers.

        Args:
            pos_edge_rank (torch.Tensor): The ranks of this worker's positive pairs.
            neg_edge_rank (torch.Tensor): Those of as many negative pairs, of the same users one by one.
            node_id (torch.Tensor, optional): Global ids of nodes, the same on all workers, whose embeddings are
                regularised. (default: :obj:`None`, all nodes)
            lambda_reg (float, optional): The :math:`L_2` regularisation strength. (default: :obj:`1e-4`)
            **kwargs (optional): As of PyG, which does not use them.
        """
        rows = None if node_id is None else own_rows(node_id, self.embedding.n_id, self.group)
        norm = self.embedding(rows).square().sum()
        differ = pos_edge_rank.shape != neg_edge_rank.shape
        count, differ = all_reduce(norm.new_tensor([pos_edge_rank.numel(), differ], dtype=torch.int64), self.group)
        if differ:
            raise ValueError(
                f"[rank {rank_of(self.group)}] Expected a negative pair for each positive one, of the same user (got "
                f"{list(pos_edge_rank.shape)} and {list(neg_edge_rank.shape)} ranks here). Give the model both at once."
            )
        share = (lambda_reg * norm - F.logsigmoid(pos_edge_rank - neg_edge_rank).sum()) / count
        return with_gradient_of(share, all_reduce(share, self.group))
