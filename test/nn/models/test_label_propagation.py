"""Label propagation on several workers against PyG on the whole graph."""

import pytest
import torch
import torch_geometric.nn as gnn
from support.cases import some
from support.nasty_graph import NUM_NODES, assignment, close, edges
from support.simulate import Cut, simulate

import pyg_sar

G = torch.Generator().manual_seed(0)
CLASSES = torch.randint(0, 5, (NUM_NODES,), generator=G)
MASK = torch.rand(NUM_NODES, generator=G) < 0.4
WEIGHT = torch.rand(edges().size(1), generator=G, dtype=torch.float64)
STEPS = {"clamped": None, "a step of its own": lambda out: out / 2}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("size", "method", "step", "given"), some(
    [1, 2, 3, 4], ["random", "empty"], STEPS,
    ["classes", "a column of classes", "soft labels", "several classes", "weights", "no mask"], every=3,
))  # fmt: skip
def test_equals_pyg(size, method, step, given):
    several = torch.randint(0, 2, (NUM_NODES, 3), generator=G)
    others = {"a column of classes": CLASSES.view(-1, 1), "several classes": several}
    y = torch.rand(NUM_NODES, 3, generator=G) if given == "soft labels" else others.get(given, CLASSES)
    mask = None if given == "no mask" else MASK
    weight = WEIGHT if given == "weights" else None
    reference, model = gnn.LabelPropagation(7, 0.8), pyg_sar.nn.LabelPropagation(7, 0.8)
    expected = reference(y, edges(), mask, weight, STEPS[step])
    close(model(y, edges(), mask, weight, STEPS[step]), expected, "whole")
    cut = Cut(edges(), assignment(method, size), size)

    def work(rank):
        ids, topology = cut.ids[rank], cut.topologies[rank]
        own = None if weight is None else weight[topology.e_id]
        return model(y[ids], cut.edge_index(rank), None if mask is None else mask[ids], own, STEPS[step])

    for rank, out in enumerate(simulate(size, work)):
        close(out, expected[cut.ids[rank]], "out")


def test_classes_that_one_worker_alone_has():
    part = (CLASSES == 4).long()
    cut = Cut(edges(), part, 2)
    model = pyg_sar.nn.convert(gnn.LabelPropagation(2, 0.5))
    assert type(model) is pyg_sar.nn.LabelPropagation
    found = simulate(2, lambda rank: model(CLASSES[cut.ids[rank]], cut.edge_index(rank), MASK[cut.ids[rank]]))
    expected = gnn.LabelPropagation(2, 0.5)(CLASSES, edges(), MASK)
    for ids, out in zip(cut.ids, found, strict=True):
        assert out.shape == (len(ids), 5)
        close(out, expected[ids], "out")
