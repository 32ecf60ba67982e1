"""Every layer of PyG as it is, on a sharded graph: it computes what it does on the whole graph, or it refuses."""

import conv_zoo
import pytest
import torch_geometric.nn as gnn
from conv_zoo import AGGREGATIONS, CASES, LAYERS, NOT_RUNNABLE


def test_every_layer_has_its_case():
    known = {*LAYERS, *NOT_RUNNABLE}
    assert set(gnn.conv.classes) - known == set(), "new in this release of PyG: give them a case"
    assert set(gnn.aggr.classes) - {*AGGREGATIONS, "Aggregation"} == set()


@pytest.mark.parametrize(
    ("size", "method"), [(1, "all"), *((n, m) for n in (2, 3) for m in ("random", "empty", "edgeless", "contiguous"))]
)
def test_exact_or_refused(pool, size, method):
    names = [name for name, case in CASES.items() if method in (*case.methods, "all")]
    problems = pool.run(size, conv_zoo.check, names, method, timeout=200)
    assert not any(problems), "\n".join(p for rank in problems for p in rank)
