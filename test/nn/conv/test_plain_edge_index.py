"""Layers on an ordinary ``edge_index``: through the kernels where that is the same, else PyG's own code."""

import gc
import weakref

import pytest
import torch
import torch_geometric.nn
from support.nasty_graph import NUM_NODES, close, edges
from torch.utils.checkpoint import checkpoint

from pyg_sar import nn, ops
from pyg_sar.nn.conv import message_passing
from pyg_sar.nn.conv import one_block as module
from pyg_sar.nn.conv.one_block import GRAPHS, one_block, pays

kernels = pytest.mark.skipif(not ops.KERNELS, reason="PYG_SAR_KERNELS=0")


def features(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def twins(name, *args, **kwargs):
    """Our layer and PyG's, with the same weights."""
    torch.manual_seed(0)
    ours, theirs = (
        getattr(nn, name)(*args, **kwargs).double(),
        getattr(torch_geometric.nn, name)(*args, **kwargs).double(),
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.fixture
def streamed(monkeypatch):
    """The sizes of the graphs that were streamed over."""
    calls = []

    def record(edge_index, num_nodes):
        calls.append(num_nodes)
        return one_block(edge_index, num_nodes)

    monkeypatch.setattr(message_passing, "one_block", record)
    return calls


def test_the_graph_is_made_once_and_lives_as_long_as_its_edges():
    edge_index = edges()
    graph = one_block(edge_index, (NUM_NODES, NUM_NODES))
    assert one_block(edge_index, (NUM_NODES, NUM_NODES)) is graph and len(graph.blocks) == 1
    assert one_block(edge_index, (NUM_NODES, NUM_NODES + 1)).bipartite
    seen, number = weakref.ref(graph), len(GRAPHS.of_tensors)
    del graph, edge_index
    gc.collect()
    assert seen() is None and len(GRAPHS.of_tensors) == number - 1


def test_edges_that_change_make_another_graph():
    edge_index, x = edges(), features(NUM_NODES, 8)
    ours, theirs = twins("SAGEConv", 8, 4)
    ours(x, edge_index)
    edge_index[0, :9] = 7
    close(ours(x, edge_index), theirs(x, edge_index), "after a change")


def through_data(t, rows):
    t.data[:] = rows


def by_another_storage(t, rows):
    t.data = rows.clone()


def through_numpy(t, rows):
    t.numpy()[:] = rows.numpy()


def with_two_swapped(rows):
    rows = rows.clone()
    rows[..., [3, 100]] = rows[..., [100, 3]]
    return rows


@kernels
@pytest.mark.parametrize("change", [through_data, by_another_storage, through_numpy])
@pytest.mark.parametrize("to", [lambda rows: rows.flip(0), lambda rows: rows.sort().values, with_two_swapped])
def test_edges_that_change_unseen_make_another_graph(change, to):
    """Versions of tensors do not count these changes."""
    edge_index, x, weight = edges(), features(NUM_NODES, 8), features(edges().size(1)).abs()
    ours, theirs = twins("GCNConv", 8, 4)
    ours(x, edge_index, weight)
    change(edge_index, to(edge_index))
    close(ours(x, edge_index, weight), theirs(x, edge_index, weight), "after a change")


@kernels
@pytest.mark.parametrize("change", [through_data, by_another_storage, through_numpy])
def test_types_of_edges_that_change_unseen(change):
    edge_index, x, edge_type = edges(), features(NUM_NODES, 8), torch.arange(edges().size(1)) % 3
    ours, theirs = twins("RGCNConv", 8, 4, 3)
    for rows in (edge_type, edge_type.sort().values, with_two_swapped(edge_type)):
        change(edge_type, rows)
        close(ours(x, edge_index, edge_type), theirs(x, edge_index, edge_type), "after a change")


def test_edges_that_are_laid_out_otherwise():
    pairs, x = edges().t().contiguous(), features(NUM_NODES, 8)
    ours, theirs = twins("SAGEConv", 8, 4)
    for _ in range(2):
        close(ours(x, pairs.t()), theirs(x, pairs.t()), "columns")
    for few in (torch.empty(2, 0, dtype=torch.long), torch.tensor([[1], [2]])):
        close(ours(x, few), theirs(x, few), "few edges")


@kernels
def test_wrong_edges_are_named(streamed):
    with pytest.raises(ValueError, match="Expected source ids"):
        nn.SAGEConv(8, 4).double()(features(3, 8), torch.tensor([[5], [0]]))
    assert streamed == [(3, 3)]


@kernels
@pytest.mark.parametrize("name", ["GATConv", "GATv2Conv"])
def test_self_loops_between_two_sets_of_nodes_are_pygs(streamed, name):
    ours, theirs = twins(name, (8, 6), 4)
    x, edge_index = (features(NUM_NODES, 8), features(47, 6)), edges(NUM_NODES, 47)
    close(ours(x, edge_index), theirs(x, edge_index), name)
    assert streamed == [(NUM_NODES, 47)]


@pytest.mark.parametrize(("name", "options"), [("SAGEConv", {"root_weight": False}), ("GATConv", {"heads": 2}),
                                               ("GATConv", {"add_self_loops": False})])  # fmt: skip
def test_number_of_destinations_without_features(name, options):
    x, edge_index = features(NUM_NODES, 8), edges(NUM_NODES, 47)
    ours, theirs = twins(name, 8, 4, **options)
    for size in (None, (NUM_NODES, 47)):
        close(ours((x, None), edge_index, size=size), theirs((x, None), edge_index, size=size), f"size {size}")


def test_a_layer_of_roots_that_returns_its_input():
    x, edge_index = features(NUM_NODES, 8), edges()
    ours, theirs = twins("SAGEConv", 8, 8, bias=False)
    ours.lin_r, theirs.lin_r = torch.nn.Identity(), torch.nn.Identity()
    given = x.clone()
    close(ours(x, edge_index), theirs(given, edge_index), "output")
    assert torch.equal(x, given)


def test_attention_dropout_follows_the_seed_of_torch():
    conv, x, edge_index = nn.GATConv(8, 4, dropout=0.5).double(), features(NUM_NODES, 8), edges()
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(conv(x, edge_index))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_attention_dropout_under_checkpoint():
    conv, edge_index, grads = nn.GATConv(8, 4, dropout=0.5).double(), edges(), []
    for run in (conv, lambda *args: checkpoint(conv, *args, use_reentrant=False)):
        x = features(NUM_NODES, 8).requires_grad_()
        torch.manual_seed(3)
        run(x, edge_index).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@kernels
def test_no_second_derivative():
    x = features(NUM_NODES, 8).requires_grad_()
    out = nn.GATConv(8, 4).double()(x, edges()).square().sum()
    with pytest.raises(RuntimeError, match=r"layer of 'torch_geometric\.nn'"):
        torch.autograd.grad(out, x, create_graph=True)


def compiled(conv, x, edge_index):
    return torch.compile(conv, backend="eager")(x, edge_index)


def in_inference(conv, x, edge_index):
    with torch.inference_mode():
        return conv(x, edge_index.clone())


def with_hook(conv, x, edge_index):
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    return conv(x, edge_index)


def without_kernels(conv, x, edge_index):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "KERNELS", False)
        return conv(x, edge_index)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at all
@pytest.mark.parametrize("how", [compiled, in_inference, with_hook, without_kernels])
@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
def test_what_is_left_to_pyg(streamed, name, how):
    ours, theirs = twins(name, 8, 4)
    x, edge_index = features(NUM_NODES, 8), edges()
    assert torch.equal(how(ours, x, edge_index), how(theirs, x, edge_index))
    assert streamed == []


@kernels
def test_hooks_on_linear_layers_run():
    """GATConv reads the weights of linear layers that do nothing else."""
    ours, theirs = twins("GATConv", 8, 4, heads=2)
    for conv in (ours, theirs):
        conv.lin.register_forward_hook(lambda module, inputs, out: 3 * out)
    x = features(NUM_NODES, 8)
    close(ours(x, edges()), theirs(x, edges()), "hooked")
    lazy = nn.GATConv(-1, 4).double()
    assert lazy(x, edges()).shape == (NUM_NODES, 4) and lazy.lin.weight.shape == (4, 8)


@kernels
@pytest.mark.parametrize("name", ["SAGEConv", "GCNConv", "GATConv", "GATv2Conv", "TransformerConv"])
def test_other_code_of_linear_layers_runs(name):
    """A 'forward' in place of a layer's own, as libraries put there, and hooks of all modules."""
    ours, theirs = twins(name, 8, 4)
    x = features(NUM_NODES, 8)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: 2 * out if isinstance(module, torch_geometric.nn.Linear) else None
    )
    try:
        close(ours(x, edges()), theirs(x, edges()), "hooks of all modules")
    finally:
        handle.remove()
    before = ours(x, edges())
    for conv in (ours, theirs):
        for lin in (m for m in conv.modules() if isinstance(m, torch_geometric.nn.Linear)):
            lin.forward = lambda x, forward=lin.forward: 3 * forward(x)
    out = ours(x, edges())
    close(out, theirs(x, edges()), "another forward")
    assert not torch.allclose(out, before)


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(("at_once", "ahead"), [(10**9, module.CALLS), (1, 1)])
def test_when_a_graph_pays_on_a_gpu(monkeypatch, at_once, ahead, captures):
    """After some calls with the same edges; while a CUDA graph is captured, only if it was made before."""
    monkeypatch.setattr(module, "EDGES", edges().size(1))
    monkeypatch.setattr(module, "EDGES_AT_ONCE", at_once)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    edge_index = edges()
    assert [pays(edge_index) for _ in range(10)] == [k >= ahead + captures for k in range(1, 11)]
    edge_index[0, 0] = 1
    assert pays(edge_index) == (ahead + captures == 1), "counted anew, because it changed"
    assert not pays(edges()[:, 1:]) and not pays(edges()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["SAGEConv", "GATConv"])
def test_on_a_gpu(monkeypatch, streamed, name):
    """PyG's layer first, then the kernels; the same numbers."""
    monkeypatch.setattr(module, "EDGES", 1)
    ours, theirs = (layer.cuda() for layer in twins(name, 8, 4))
    x, edge_index = features(NUM_NODES, 8).cuda(), edges().cuda()
    for _ in range(module.CALLS + 1):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outs = [layer(leaf, edge_index) for layer, leaf in zip((ours, theirs), leaves, strict=True)]
        for out in outs:
            out.square().sum().backward()
        close(outs[0], outs[1], name)
        close(leaves[0].grad, leaves[1].grad, name)
    assert streamed and not any(streamed[0] != each for each in streamed)


@pytest.mark.parametrize("name", ["GCNConv", "SAGEConv", "GATConv"])
def test_edges_of_another_type(name):
    """PyG's own code takes them."""
    ours, theirs = twins(name, 8, 4)
    x = features(NUM_NODES, 8)
    close(ours(x, edges().int()), theirs(x, edges()), "output")


def test_functions_of_parameters():
    """Of 'torch.func', which has no rule for the kernels' gradients."""
    ours, theirs = twins("GCNConv", 8, 4)
    x, grads = features(NUM_NODES, 8), []
    for layer in (ours, theirs):

        def loss(parameters, layer=layer):
            return torch.func.functional_call(layer, parameters, (x, edges())).square().sum()

        grads.append(torch.func.grad(loss)(dict(layer.named_parameters())))
    for name, grad in grads[0].items():
        close(grad, grads[1][name], name)
