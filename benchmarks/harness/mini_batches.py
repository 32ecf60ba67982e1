"""Mini-batches as PyG's ``NeighborLoader`` makes them, drawn on the device."""

import torch
from torch import Tensor


class Neighbors:
    """Draws the neighbors of nodes, with replacement; an edge that is drawn twice counts once.

    Args:
        edge_index: ``(2, |E|)``.
        num_nodes: ``|V|``.
        fanouts: Neighbors of a node, from the batch outwards.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, fanouts: list[int]) -> None:
        self.src, self.fanouts = edge_index[0, edge_index[1].argsort()], fanouts
        self.degree = torch.bincount(edge_index[1], minlength=num_nodes)
        self.ptr = torch.cat([self.degree.new_zeros(1), self.degree.cumsum(0)])
        self.number = torch.full((num_nodes,), -1, device=edge_index.device)

    def draw(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nodes that a batch needs, itself first, and the edges among them by their numbers there."""
        nodes, taken, first = batch, [], 0
        for fanout in self.fanouts:
            edges, dst = self.edges_into(nodes[first:], fanout)
            self.number[nodes] = torch.arange(nodes.numel(), device=nodes.device)
            new = self.src[edges].unique()
            first, nodes = nodes.numel(), torch.cat([nodes, new[self.number[new] < 0]])
            taken.append((edges, dst))
        edges, dst = (torch.cat(parts) for parts in zip(*taken, strict=True))
        self.number[nodes] = torch.arange(nodes.numel(), device=nodes.device)
        found = torch.stack([self.number[self.src[edges]], self.number[dst]])
        self.number[nodes] = -1
        return nodes, found

    def edges_into(self, nodes: Tensor, fanout: int) -> tuple[Tensor, Tensor]:
        """Return so many edges into each node, or all where there are fewer, and their destinations."""
        degree, steps = self.degree[nodes, None], torch.arange(fanout, device=nodes.device)
        drawn = (torch.rand(nodes.numel(), fanout, device=nodes.device, dtype=torch.float64) * degree).long()
        place = torch.where(degree <= fanout, steps, drawn)
        edges = (self.ptr[nodes, None] + place)[(steps < degree)].unique()
        return edges, torch.bucketize(edges, self.ptr, right=True) - 1
