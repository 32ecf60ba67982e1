"""What only a GPU shows; the exactness of layers on one is in test_layers_exact.py, that of kernels in kernels/."""

import warnings

import pytest
import torch
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, close, edges

import pyg_sar

pytestmark = pytest.mark.gpu
LAYERS = [("SAGEConv", {}), ("GCNConv", {"cached": True}), ("GATConv", {"heads": 2}), ("GATv2Conv", {"heads": 2}),
          ("TransformerConv", {"heads": 2}), ("RGCNConv", {"num_relations": 3})]  # fmt: skip


WITH_EDGES = [*LAYERS, ("GCNConv", {"weights": 1}), ("GATConv", {"heads": 2, "edge_dim": 3}),
              ("GATv2Conv", {"heads": 2, "edge_dim": 3}), ("TransformerConv", {"heads": 2, "edge_dim": 3})]  # fmt: skip


def problem(name, kwargs, parts=1, device="cuda", dtype=torch.float32):
    """Return a function that runs a layer forward and backward, its input and its parameters."""
    torch.manual_seed(0)
    kwargs, edge_index = dict(kwargs), edges().to(device)
    width = kwargs.pop("weights", 0) or kwargs.get("edge_dim", 0)
    layer = getattr(pyg_sar.nn, name)(8, 4, **kwargs).to(device, dtype)
    graph = pyg_sar.shard(edge_index, NUM_NODES, parts)
    x = torch.randn(NUM_NODES, 8).to(device, dtype).requires_grad_()
    extra = [torch.arange(edge_index.size(1)).to(device) % 3] if name == "RGCNConv" else []
    if width:
        extra = [torch.rand(edge_index.size(1), width).to(device, dtype).squeeze(1).requires_grad_()]

    def step():
        out = layer(x, graph, *extra)
        out.square().sum().backward()
        return out

    return step, [x, *layer.parameters()], (layer, edge_index, extra)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("name", "kwargs"), WITH_EDGES)
def test_the_host_never_waits(name, kwargs, parts):
    """After the first steps, in which what is made once is made."""
    step, _, _ = problem(name, kwargs, parts)
    for _ in range(2):
        step()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize(("name", "kwargs"), WITH_EDGES)
def test_cuda_graph(name, kwargs):
    """One shard can be captured, and runs again on other features; PyG's means of features of edges, for self-loops,
    are never the same twice, in the last digit.
    """
    step, tensors, _ = problem(name, kwargs, dtype=torch.float64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for t in tensors:
        t.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    with torch.no_grad():
        tensors[0].mul_(2).add_(1)
    for t in tensors:
        t.grad.zero_()
    graph.replay()
    found = [out.detach().clone(), *(t.grad.clone() for t in tensors)]
    for t in tensors:
        t.grad.zero_()
    for mine, expected in zip(found, [step().detach(), *(t.grad for t in tensors)], strict=True):
        close(mine, expected, name)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("name", "kwargs"), LAYERS)
def test_autocast(name, kwargs, parts):
    """As types go in PyG, and its numbers to the precision of bfloat16."""
    step, tensors, (layer, edge_index, extra) = problem(name, kwargs, parts)
    with torch.autocast("cuda", torch.bfloat16):
        found = step()
        reference = getattr(torch_geometric.nn, name)(8, 4, **kwargs).cuda()
        reference.load_state_dict(layer.state_dict())
        expected = reference(tensors[0], edge_index, *extra)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05)
    assert all(t.grad is not None and t.grad.isfinite().all() for t in tensors)


def test_dropout_is_not_captured():
    """Every replay would drop the same edges."""
    layer, graph = pyg_sar.nn.GATConv(8, 4, dropout=0.5).cuda(), pyg_sar.shard(edges().cuda(), NUM_NODES)
    x = torch.randn(NUM_NODES, 8, device="cuda")
    layer(x, graph)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x, graph)
