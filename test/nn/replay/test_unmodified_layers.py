"""Every layer of PyG as it is, on a sharded graph: it computes what it does on the whole graph, or it refuses."""

import importlib.util
from pathlib import Path

import pytest
import torch_geometric
import torch_geometric.nn as gnn
from support import conv_zoo
from support.conv_zoo import ABSTRACT, AGGREGATIONS, CASES, LAYERS, NOT_RUNNABLE


def test_every_layer_has_its_case():
    """A new release of PyG may bring new layers: they need a case in ``conv_zoo``."""
    assert set(gnn.conv.classes) - {*LAYERS, *NOT_RUNNABLE, *ABSTRACT} == set()
    assert set(gnn.aggr.classes) - {*AGGREGATIONS, *ABSTRACT} == set()


@pytest.mark.parametrize("name", NOT_RUNNABLE)
def test_what_cannot_run_lacks_a_package(name):
    with pytest.raises(ImportError):
        NOT_RUNNABLE[name][1]()


@pytest.mark.grid
def test_the_page_is_current():
    path = Path(__file__).parents[3] / "docs" / "results" / "make_layers.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert page.PATH.read_text() == page.text(), "run docs/results/make_layers.py"
    facts = page.FACTS / f"{torch_geometric.__version__}.json"
    if not facts.exists():
        pytest.skip("nothing is known of this release of PyG")
    assert facts.read_text() == page.written(), "run docs/results/make_layers.py"


@pytest.mark.parametrize(
    ("size", "method"),
    [
        (3, "random"),
        *(
            pytest.param(*it, marks=pytest.mark.grid)
            for it in (
                (1, "all"),
                (2, "random"),
                (2, "empty"),
                (3, "empty"),
                *((n, m) for n in (2, 3) for m in ("edgeless", "contiguous")),
            )
        ),
    ],
)
def test_exact_or_refused(pool, size, method, device):
    names = [name for name, case in CASES.items() if method in (*case.methods, "all")]
    problems = pool.run(size, conv_zoo.check, names, method, False, device, timeout=200)
    assert not any(problems), "\n".join(p for rank in problems for p in rank)
