r"""Heterogeneous graph attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor

from pyg_sar.aggregate import is_elsewhere
from pyg_sar.distributed.collectives import global_sum
from pyg_sar.distributed.group import size_of
from pyg_sar.nn.conv.message_passing import MessagePassing
from pyg_sar.operations import sharded, shares
from pyg_sar.ops.reference import accumulator
from pyg_sar.refusals import fail


class HANConv(MessagePassing, torch_geometric.nn.HANConv):
    r"""The heterogeneous graph attention operator from the `"Heterogenous Graph Attention Network"
    <https://arxiv.org/abs/1903.07293>`_ paper.

    Arguments and ``state_dict`` are those of :class:`torch_geometric.nn.HANConv`. On sharded graphs, one for each edge
    type (meta-path), the attention among neighbors streams, and the attention among edge types takes its mean over the
    nodes of all workers.

    Args:
        group (ProcessGroup, optional): The workers; an attribute. (default: :obj:`None`, all of them)
    """

    group: Any = None

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any],
        return_semantic_attention_weights: bool = False,
    ) -> Any:  # fmt: skip
        """Run the forward pass."""
        flow = next((it for it in sharded(edge_index_dict) if it.of_flow), None)
        if flow is not None:
            what = "'HANConv' weights edge types by a mean over all nodes, which a message-flow graph does not have"
            fail(flow._graph, what, "Take the graph of all edges")
        alone = size_of(self.group) == 1 or next(shares(edge_index_dict), None) is None
        if alone and not any(map(is_elsewhere, x_dict.values())):
            return super().forward(x_dict, edge_index_dict, return_semantic_attention_weights)
        rows = {t: self.proj[t](x).view(-1, self.heads, self.out_channels // self.heads) for t, x in x_dict.items()}
        outs: dict[str, list[Tensor]] = {t: [] for t in x_dict}
        for edge_type, edge_index in edge_index_dict.items():
            name, pair = "__".join(edge_type), (rows[edge_type[0]], rows[edge_type[-1]])
            alpha = [(x * lin[name]).sum(-1) for x, lin in zip(pair, (self.lin_src, self.lin_dst), strict=True)]
            if any(map(is_elsewhere, pair)):  # whose rows are fetched together; under autocast scores are wider
                pair = tuple(x.to(torch.promote_types(x.dtype, alpha[0].dtype)) for x in pair)
            out = self.propagate(edge_index, x=pair, alpha=tuple(alpha))
            outs[edge_type[-1]].append(F.relu(out))
        found = {t: self.mix(outs[t]) for t in outs}
        mixed, weights = ({t: pair[i] for t, pair in found.items()} for i in (0, 1))
        return (mixed, weights) if return_semantic_attention_weights else mixed

    def mix(self, outs: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Weight edge types by a mean over all nodes."""
        if not outs:
            return None, None
        rows = [torch.tanh(self.k_lin(out)) for out in outs]
        share = torch.stack([t.sum(0, dtype=accumulator(t.dtype)) for t in rows])
        count = global_sum(share.new_tensor(float(len(outs[0]))), self.group).clamp(min=1)
        mean = (global_sum(share, self.group) / count).to(rows[0].dtype)
        weights = F.softmax((self.q * mean).sum(-1), 0)
        weighted = [weight * out for weight, out in zip(weights, outs, strict=True)]
        return functools.reduce(torch.add, weighted), weights
