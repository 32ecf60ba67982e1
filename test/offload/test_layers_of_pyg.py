"""Every layer of PyG, converted, on rows at home, against PyG in one process."""

from typing import Any

import pytest
import torch
from support import conv_zoo as zoo
from support.nasty_graph import close
from torch import Tensor
from torch.utils._pytree import tree_map

from pyg_sar import HostRows, ShardedEdgeIndex
from pyg_sar.offload.home import Home
from pyg_sar.offload.move import place_of
from pyg_sar.offload.passes import host

TAKES = "it takes rows by their numbers"
REFUSED = {
    "ARMAConv": "'unsqueeze' cannot be computed range by range",
    "MFConv": TAKES,
    "GCNConv decomposed": TAKES,
    "GraphSAGE": "'lstm' cannot be computed range by range",
    "GroupAddRev": "'untyped_storage' cannot be computed range by range",
    "CorrectAndSmooth unscaled": "the numbers of rows are needed to take them",
    "MetaLayer": "it reads rows of other workers by pairs of nodes",
}
IN_MEMORY = {"HEATConv"}  # which writes what it makes of rows to an ordinary tensor of all


def runs(case: zoo.Case) -> bool:
    """Whether a layer runs on a sharded graph of one set of nodes, and learns."""
    graph = not (case.two or "dict" in case.given or zoo.HYPER in case.given or "neg_edge_index" in case.given)
    return graph and not case.says and "y=" not in case.given and "ids" not in case.given


NAMES = [name for name, case in zoo.CASES.items() if runs(case)]
LATER = [pytest.param(name, marks=pytest.mark.grid) for k, name in enumerate(NAMES) if k % 4 and name not in REFUSED]


class GoHome(torch.autograd.Function):
    """Rows at home in place of ordinary ones, whose gradient comes back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Any) -> HostRows:
        return HostRows(place, rows.detach())

    @staticmethod
    def backward(ctx: Any, grad: HostRows) -> Any:
        return host(grad), None


class AtHome(torch.nn.Module):
    """A layer on rows at home, cut in four."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.named_parameters(*args, **kwargs)

    def forward(self, **given: Any) -> Tensor:
        (edge_index,) = (t for t in given.values() if isinstance(t, ShardedEdgeIndex))
        place, n = place_of(edge_index.graph, Home(None, torch.device("cpu"), None), 4), edge_index.graph.num_src

        def move(t: Any) -> Any:
            goes = isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 1 and t.size(0) == n
            return GoHome.apply(t, place) if goes else t

        out = zoo.output(self.layer(**tree_map(move, given)))
        self.stayed = isinstance(out, HostRows)
        return out[torch.arange(len(out))]


@pytest.mark.parametrize("name", [*(n for k, n in enumerate(NAMES) if k % 4 == 0 or n in REFUSED), *LATER])
def test_layers_of_pyg(name: str) -> None:
    case = zoo.converted(name, None)
    with zoo.default(case.dtype):
        layer = AtHome(zoo.layer_of(case))
        case = case._replace(make=lambda: layer)
        if name in REFUSED:
            with pytest.raises(NotImplementedError, match=REFUSED[name]):
                zoo.forward_and_backward(case, zoo.in_one_process(case, 1))
            return
        expected, found = zoo.whole(name), zoo.forward_and_backward(case, zoo.in_one_process(case, 1))
    assert layer.stayed == (name not in IN_MEMORY)
    close(found.out, expected.out, "output", case.tol)
    for grads, others in ((found.node_grads, expected.node_grads), (found.param_grads, expected.param_grads)):
        assert grads.keys() == others.keys()
        for key, grad in grads.items():
            close(grad, others[key], f"gradient of {key}", case.tol)
