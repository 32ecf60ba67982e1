"""``benchmarks/timeline.py`` sees the waiting that the library counts, and whom it is for."""

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pyg_sar
from pyg_sar.data.datasets import community_graph
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.edge_index import ShardedEdgeIndex

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness.timeline import COLLECTIVES, GRADIENTS, KINDS, POSTING, WAITING, Span, Step, late, watch


def step(group, topologies, features, pause):
    """Run a layer of attention; rank 1 comes late to its backward pass."""
    rank = dist.get_rank(group)
    graph = assemble(topologies[rank], rank, group)
    x = features[graph.n_id].requires_grad_()
    layer = pyg_sar.nn.GATConv(features.size(1), 8)
    dist.barrier(group)
    with pyg_sar.record_traffic(ShardedEdgeIndex(graph)) as layers, watch() as seen:
        out = layer(x, ShardedEdgeIndex(graph))
        pyg_sar.all_reduce(torch.ones(()), group)
        time.sleep(pause * rank)
        out.sum().backward()
    waited = sum(t.forward_wait + t.backward_wait for t in layers)
    return seen.as_json(), waited


def test_watch(pool):
    """Rank 0 waits for rank 1, which waits for nobody."""
    data = community_graph(300, 2000, 16)
    part, pause = torch.arange(300).int() % 2, 1.0
    topologies = list(split(data.edge_index, part, part, 2))
    rows = pool.run(2, step, topologies, data.x, pause)
    steps = [Step.from_json(seen) for seen, _ in rows]
    for seen, (_, waited) in zip(steps, rows, strict=True):
        assert seen.seconds(*WAITING) == pytest.approx(waited, abs=0.05)
        assert {span.kind for span in seen.spans} == set(KINDS)
        assert sum(span.kind == POSTING for span in seen.spans) == 4  # two shards, in forward and in backward
        assert sum(span.kind == GRADIENTS for span in seen.spans) == 2  # one is sent, one comes
        assert sum(span.kind == COLLECTIVES for span in seen.spans) == 2  # a script's tensors are compared before
        assert seen.seconds(*KINDS) <= seen.end - seen.start
    assert late(steps[0], steps, 0) > 0.8 * pause
    assert late(steps[1], steps, 1) < 0.5 * pause


def test_late():
    """Only the wait for what the peer has not yet started counts."""
    waits = [("receiving", 1.0, 4.0, 0.5), ("sending", 5.0, 6.0, 0.5)]
    own = Step(0, 9, [Span(GRADIENTS, start, end, (way, 1, 1), at) for way, start, end, at in waits])
    began = {"sending": 3.0, "receiving": 9.0}  # two seconds after the wait began; after the wait had ended
    peer = Step(0, 9, [Span(GRADIENTS, at, at, (way, 0, 1), at) for way, at in began.items()])
    assert late(own, [own, peer], 0) == 2.0 + 1.0
