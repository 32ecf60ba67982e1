"""The formulas of ``benchmarks/paper.py`` against what workers hold and receive."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import pyg_sar
from pyg_sar.distributed.assemble import assemble
from pyg_sar.distributed.datasets import community_graph
from pyg_sar.distributed.split import split
from pyg_sar.edge_index import ShardedEdgeIndex

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))
sys.path.append(str(ROOT / "examples"))

import paper  # noqa: E402
from models import GNN  # noqa: E402

PARTS, FEATURES, CLASSES = 3, 20, 7


def storages(*values):
    """Return the bytes of all memory behind tensors, by its address; slices and None have none."""
    tensors = [t for t in values if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def index_tensors(graph):
    made = [graph.n_id, graph.e_id, graph.__dict__.get("degree")]
    for block in graph.blocks:
        made += [block.rowptr, block.col, block.ids, block.edges, *block.__dict__.get("transpose", ())]
    looped, keep = graph.__dict__.get("_looped", (None, None))
    return storages(*made, keep) | (index_tensors(looped) if looped else {})


def step(group, topologies, features, kind, mode):
    """Return what one worker has, what it keeps for backward, and what it receives."""
    rank = torch.distributed.get_rank(group)
    own = topologies[rank].src_id.clone()  # a slice of all ids, which a part that is read from its file is not
    topology = dataclasses.replace(topologies[rank], src_id=own, dst_id=own)
    graph = assemble(topology, rank, group, remat=mode == 1)
    own_edges, remote = graph.blocks[rank].num_edges, graph.exchange.num_halo
    share = paper.Share(PARTS, graph.num_dst, graph.num_edges, remote, own_edges)
    serve = storages(*graph.exchange.serve)
    edge_index = ShardedEdgeIndex(graph.merge() if mode == 3 else graph)
    torch.manual_seed(0)
    hidden = {"sage": 256, "gat": 128}[kind]
    model = GNN(pyg_sar.nn, kind, FEATURES, hidden, CLASSES, dropout=0.0)
    for norm in model.norms:
        norm.module.group = group
    x, kept = features[graph.n_id], {}
    known = storages(x, *model.parameters())

    lengths = {share.own, share.own + remote, *(block.num_src for block in graph.blocks)}

    def pack(tensor):
        if len(tensor) in lengths:  # products of parameters are kept, too, of which the formulas know nothing
            kept.update(storages(tensor))
        return tensor

    with pyg_sar.record_traffic(edge_index) as layers:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(x, edge_index)
        index = sum(size for where, size in kept.items() if where not in known)
        out.sum().backward()
    received = sum(t.forward_received + t.backward_received for t in layers)
    held = sum((index_tensors(edge_index.graph) | serve).values())
    return share, held, index, received


@pytest.mark.parametrize("kind", ["sage", "gat"])
@pytest.mark.parametrize("mode", [1, 2, 3])
def test_formulas(pool, kind, mode):
    """Index tensors and traffic are exact over all workers, what is kept for backward is within 2%."""
    data = community_graph(600, 4000, FEATURES, CLASSES)
    part = torch.arange(600).int() % PARTS
    topologies = list(split(data.edge_index, part, part, PARTS))
    rows = pool.run(PARTS, step, topologies, data.x, kind, mode)
    model = paper.layers(kind, FEATURES, CLASSES)
    shares, held, kept, received = zip(*rows, strict=True)
    assert sum(held) == sum(paper.topology(share, kind == "gat", mode == 3) for share in shares)
    assert sum(received) == sum(paper.traffic(share, model, mode) for share in shares) > 0
    expected = sum(sum(paper.saved(share, layer, mode)) for share in shares for layer in model)
    assert sum(kept) == pytest.approx(expected, rel=0.02)


def test_table(tmp_path, monkeypatch, capsys):
    """It says what was assumed."""
    monkeypatch.setattr(sys, "argv", ["paper.py", "--parts", "64", "--boundary", "0.25", "--out", str(tmp_path)])
    paper.main(paper.parse())
    text = (tmp_path / "paper.md").read_text()
    assert capsys.readouterr().out == text and text.startswith("**Calculated, not measured**")
    assert "reads 0.25 of others" in text and "| ogbn-papers100M | gat | 64 | 1,735,312 | 433,828 |" in text
