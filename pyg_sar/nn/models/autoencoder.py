r"""Graph autoencoders, whose losses and scores are those of the pairs and nodes of all workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch_geometric.nn
from torch import Tensor
from torch_geometric.nn.models.autoencoder import EPS, MAX_LOGSTD

from pyg_sar.distributed.gather import join
from pyg_sar.distributed.group import rank_of, size_of
from pyg_sar.distributed.links import non_edges, own_generator, shard_links
from pyg_sar.distributed.loss import global_mean
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.watch import refuse_pairs


class GAE(torch_geometric.nn.GAE):
    r"""The Graph Auto-Encoder from the `"Variational Graph Auto-Encoders" <https://arxiv.org/abs/1611.07308>`_ paper.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.GAE`. Pairs are given as
    :func:`pyg_sar.shard_links` returns them, positive ones may be ``data.edge_index``.

    .. code-block:: python

        pairs, _ = pyg_sar.shard_links(pos_edge_label_index, data.n_id)
        loss = model.recon_loss(model.encode(data.x, data.edge_index), pairs)

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None

    def recon_loss(self, z: Tensor, pos_edge_index: Any, neg_edge_index: Any = None) -> Tensor:
        r"""Return the binary cross entropy over the pairs of all workers.

        Args:
            z (torch.Tensor): The latent variables of the local nodes.
            pos_edge_index (ShardedEdgeIndex): The pairs that are edges.
            neg_edge_index (ShardedEdgeIndex, optional): The pairs that are none. (default: :obj:`None`, as many, drawn
                from all pairs of different nodes that are not in ``pos_edge_index``)
        """
        if self.whole(z, pos_edge_index, neg_edge_index):
            return super().recon_loss(z, pos_edge_index, neg_edge_index)
        if neg_edge_index is None:
            pairs, n_id = non_edges(pos_edge_index, self.group)
            neg_edge_index, _ = shard_links(pairs, n_id, self.group)
        real, fake = (self.decoder(z, pairs, sigmoid=True) for pairs in (pos_edge_index, neg_edge_index))
        return global_mean(-torch.log(real + EPS), self.group) + global_mean(-torch.log(1 - fake + EPS), self.group)

    def test(self, z: Tensor, pos_edge_index: Any, neg_edge_index: Any) -> tuple[float, float]:
        r"""Return the area under the ROC curve and the average precision over the pairs of all workers, on all of them.

        Args:
            z (torch.Tensor): The latent variables of the local nodes.
            pos_edge_index (ShardedEdgeIndex): The pairs that are edges.
            neg_edge_index (ShardedEdgeIndex): The pairs that are none.
        """
        if self.whole(z, pos_edge_index, neg_edge_index):
            return super().test(z, pos_edge_index, neg_edge_index)
        pairs = pos_edge_index, neg_edge_index
        # PyG's own code, given what was decoded already.
        told = SimpleNamespace(decoder=lambda z, decoded, sigmoid: decoded[0])
        decoded = [join(self.decoder(z, pair, sigmoid=True), self.group).unsqueeze(0) for pair in pairs]
        return torch_geometric.nn.GAE.test(told, z, *decoded)

    def whole(self, z: Tensor, *pairs: Tensor | None) -> bool:
        """Whether pairs are those of the whole graph, in one process; raise if nobody knows whose they are."""
        plain = [pair for pair in pairs if not (pair is None or isinstance(pair, ShardedEdgeIndex))]
        for pair in plain:
            refuse_pairs(pair, z)
        if size_of(self.group) == 1:
            return len(plain) > 0
        if plain:
            raise TypeError(
                f"[rank {rank_of(self.group)}] Expected pairs of nodes as 'pyg_sar.shard_links' returns them, which "
                f"has them shared out among the workers (got a tensor of shape {list(plain[0].shape)})"
            )
        return False


class VGAE(GAE, torch_geometric.nn.VGAE):
    r"""The Variational Graph Auto-Encoder from the `"Variational Graph Auto-Encoders"
    <https://arxiv.org/abs/1611.07308>`_ paper, see :class:`GAE`.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.VGAE`. Each worker draws the noise of its local
    nodes, so that it depends on how the graph is cut.
    """

    def reparametrize(self, mu: Tensor, logstd: Tensor) -> Tensor:
        """Draw latent variables."""
        if not (self.training and size_of(self.group) > 1):
            return super().reparametrize(mu, logstd)
        return mu + noise_like(logstd, self.group) * torch.exp(logstd)

    def kl_loss(self, mu: Tensor | None = None, logstd: Tensor | None = None) -> Tensor:
        """Return the mean of the divergence over the nodes of all workers, of the last encoding unless given."""
        if size_of(self.group) == 1:
            return super().kl_loss(mu, logstd)
        mu = self.__mu__ if mu is None else mu
        logstd = self.__logstd__ if logstd is None else logstd.clamp(max=MAX_LOGSTD)
        return -0.5 * global_mean(torch.sum(1 + 2 * logstd - mu**2 - logstd.exp() ** 2, dim=1), self.group)


class ARGA(GAE, torch_geometric.nn.ARGA):
    r"""The Adversarially Regularized Graph Auto-Encoder from the `"Adversarially Regularized Graph Autoencoder for
    Graph Embedding" <https://arxiv.org/abs/1802.04407>`_ paper, see :class:`GAE`.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.ARGA`.
    """

    def reg_loss(self, z: Tensor) -> Tensor:
        """Return how well the discriminator tells the latent variables of all workers from noise."""
        if size_of(self.group) == 1:
            return super().reg_loss(z)
        return global_mean(-torch.log(torch.sigmoid(self.discriminator(z)) + EPS), self.group)

    def discriminator_loss(self, z: Tensor) -> Tensor:
        """Return the loss of the discriminator over the nodes of all workers."""
        if size_of(self.group) == 1:
            return super().discriminator_loss(z)
        real = torch.sigmoid(self.discriminator(noise_like(z, self.group)))
        fake = torch.sigmoid(self.discriminator(z.detach()))
        return global_mean(-torch.log(real + EPS), self.group) + global_mean(-torch.log(1 - fake + EPS), self.group)


class ARGVA(ARGA, torch_geometric.nn.ARGVA):
    r"""The Adversarially Regularized Variational Graph Auto-Encoder from the `"Adversarially Regularized Graph
    Autoencoder for Graph Embedding" <https://arxiv.org/abs/1802.04407>`_ paper, see :class:`VGAE`.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.ARGVA`.
    """

    def __init__(
        self, encoder: torch.nn.Module, discriminator: torch.nn.Module, decoder: torch.nn.Module | None = None
    ) -> None:
        super().__init__(encoder, discriminator, decoder)
        self.VGAE.__class__ = VGAE  # which another one would draw the weights again for

    def __setattr__(self, name: str, value: Any) -> None:
        """Have the autoencoder that draws and compares distributions do so with the same workers."""
        super().__setattr__(name, value)
        if name == "group":
            self.VGAE.group = value


def noise_like(x: Tensor, group: Any) -> Tensor:
    """Return normal noise that is another one on each worker."""
    return torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=own_generator(x.device, group))
