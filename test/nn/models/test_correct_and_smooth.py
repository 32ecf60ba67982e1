"""Correct and smooth on several workers against PyG on the whole graph."""

import pytest
import torch
import torch_geometric.nn as gnn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, close, edges
from support.simulate import Cut, raised, simulate

import pyg_sar

G = torch.Generator().manual_seed(0)
SOFT = torch.randn(NUM_NODES, 4, generator=G, dtype=torch.float64).softmax(-1)
CLASSES = torch.randint(0, 4, (NUM_NODES,), generator=G)
MASK = torch.rand(NUM_NODES, generator=G) < 0.4
WEIGHT = torch.rand(edges().size(1), generator=G, dtype=torch.float64)


@pytest.mark.parametrize(("size", "method", "case"), some(
    [1, 2, 3, 4], ["random", "empty", "labels on one"],
    ["autoscale", "scale", "weights", "soft labels", "ids", "converted"], every=2,
))  # fmt: skip
def test_equals_pyg(size, method, case):
    settings = {"autoscale": False, "scale": 3.0} if case == "scale" else {}
    reference, model = (cls(5, 0.8, 4, 0.6, **settings) for cls in (gnn.CorrectAndSmooth, pyg_sar.nn.CorrectAndSmooth))
    if case == "converted":
        model = pyg_sar.nn.convert(gnn.CorrectAndSmooth(5, 0.8, 4, 0.6))
        assert type(model) is pyg_sar.nn.CorrectAndSmooth
    y = SOFT.flip(0) if case == "soft labels" else CLASSES
    weight = WEIGHT if case == "weights" else None
    part = (~MASK).long() % size if method == "labels on one" else assignment(method, size)
    cut = Cut(edges(), part, size)
    expected = reference(SOFT, y[MASK], MASK, edges(), weight)
    close(model(SOFT, y[MASK], MASK, edges(), weight), expected, "whole")

    def work(rank):
        ids = cut.ids[rank]
        mask = MASK[ids].nonzero().view(-1) if case == "ids" else MASK[ids]
        own = None if weight is None else weight[cut.topologies[rank].e_id]
        return model(SOFT[ids], y[ids][mask], mask, cut.edge_index(rank), own)

    for rank, out in enumerate(simulate(size, work)):
        close(out, expected[cut.ids[rank]], "out")


def test_labels_of_all_nodes():
    model, cut = pyg_sar.nn.CorrectAndSmooth(2, 0.5, 2, 0.5), Cut(edges(), assignment("random", 2), 2)

    def work(rank):
        ids = cut.ids[rank]
        return model(SOFT[ids], CLASSES[ids], MASK[ids], cut.edge_index(rank))

    for rank, text in enumerate(raised(2, work)):
        assert f"[rank {rank}] Expected 'y_true' to have a row for each of" in text
        assert "pass y[mask]" in text
