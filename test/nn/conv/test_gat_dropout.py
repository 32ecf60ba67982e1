"""Attention dropout: one mask for forward and backward, modes and numbers of workers, and another one at every call."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.nasty_graph import NUM_NODES, assignment, close, edges, share
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import scatter, softmax

from pyg_sar import shard
from pyg_sar.nn import GATConv
from pyg_sar.ops.dropout import dropout_factors
from pyg_sar.ops.reference import ADDITIVE
from pyg_sar.reduce import Rows, Softmax

P = 0.6


def layer(**options):
    torch.manual_seed(0)
    return GATConv(8, 4, heads=3, dropout=P, **options).double()


@pytest.mark.parametrize("p", [-0.5, 1.5, float("nan")])
def test_what_is_no_probability(p):
    conv = GATConv(8, 4, dropout=p)
    with pytest.raises(ValueError, match=r"Expected a dropout probability between 0 and 1 \(got "):
        conv(torch.randn(NUM_NODES, 8), shard(edges(), NUM_NODES, 2))


def features():
    return torch.randn(NUM_NODES, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attributes():
    return torch.randn(edges().size(1), 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def losses(group, mode, method, prefetch):
    """Loss and gradients of three calls, and the output in evaluation."""
    mine = share(group, edges(), assignment(method, group.size()), mode=mode, prefetch=prefetch)
    conv, results = layer(edge_dim=2), []
    attr = attributes()[mine.edge]
    for _ in range(3):
        x = features()[mine.src].requires_grad_()
        conv.zero_grad()
        loss = conv(x, mine.edge_index, attr).square().sum()
        loss.backward()
        d_x = torch.zeros(NUM_NODES, 8, dtype=torch.float64)
        d_x[mine.src] = x.grad
        sums = [loss.detach(), d_x, *(p.grad for p in conv.parameters())]
        for t in sums:
            dist.all_reduce(t, group=group)
        results.append(sums)
    conv.eval()
    with torch.no_grad():
        close(conv(x, mine.edge_index, attr), conv(features(), edges(), attributes())[mine.dst], "evaluation")
    return results


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(1, losses, 1, "contiguous", 1)[0]


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize(("workers", "method"), [(1, "random"), (2, "metis"), (3, "empty"), (4, "random")])
def test_same_numbers_however_the_graph_is_cut(pool, alone, workers, method, mode):
    for results in pool.run(workers, losses, mode, method, workers % 3):
        for call, (found, expected) in enumerate(zip(results, alone, strict=True)):
            for k, (f, e) in enumerate(zip(found, expected, strict=True)):
                close(f, e, f"call {call}, {k}")


def test_every_call_draws_anew(alone):
    assert len({call[0].item() for call in alone}) == 3


def test_one_process_with_shards_draws_the_same_mask():
    found = []
    for shards in (1, 2, 5):
        graph = shard(edges(), NUM_NODES, shards)
        graph.graph.seeds.manual_seed(8)
        for it in (graph, graph.merge(), graph.replace(remat=False)):
            it.graph.seeds.manual_seed(8)
            found.append(layer()(features(), it))
    for out in found:
        close(out, found[0], "output")


@pytest.mark.parametrize("loops", [False, True])
def test_equals_pyg_formula_under_the_same_mask(loops):
    """Coefficients are normalised over all edges, then dropped and scaled, as PyG does."""
    conv, x = layer(add_self_loops=loops), features().requires_grad_()
    graph = shard(edges(), NUM_NODES, 3)
    graph.graph.seeds.manual_seed(8)
    out = conv(x, graph)
    graph.graph.seeds.manual_seed(8)
    seed = graph.graph.seeds.draw()

    edge_index, ids = edges(), torch.arange(edges().size(1))
    if loops:  # a loop's id is -1 - node
        keep, nodes = edge_index[0] != edge_index[1], torch.arange(NUM_NODES)
        edge_index = torch.cat([edge_index[:, keep], nodes.expand(2, -1)], 1)
        ids = torch.cat([ids[keep], -1 - nodes])
    src, dst = edge_index
    z = conv.lin(x).view(-1, 3, 4)
    score = F.leaky_relu((z * conv.att_src).sum(-1)[src] + (z * conv.att_dst).sum(-1)[dst], 0.2)
    alpha = softmax(score, dst, num_nodes=NUM_NODES) * dropout_factors(ids, 3, P, seed, torch.float64)
    expected = scatter(alpha.unsqueeze(-1) * z[src], dst, 0, NUM_NODES).flatten(1) + conv.bias
    close(out, expected, "output")
    leaves = (x, *conv.parameters())
    for f, e in zip(*(torch.autograd.grad(o.square().sum(), leaves) for o in (out, expected)), strict=True):
        close(f, e, "gradient")


@pytest.mark.parametrize("change", [{}, {"remat": False}, "merge"])
def test_gradient_is_that_of_the_forward_pass(change):
    """By finite differences, the mask held fixed by its seed."""
    graph = shard(edges(), NUM_NODES, 3)
    graph = graph.merge() if change == "merge" else graph.replace(**change)
    conv = layer()

    def function(x, *weights):
        graph.graph.seeds.manual_seed(4)
        names = [name for name, _ in conv.named_parameters()]
        return torch.func.functional_call(conv, dict(zip(names, weights, strict=True)), (x, graph))

    leaves = [features().requires_grad_(), *(p.detach().clone().requires_grad_() for p in conv.parameters())]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_expectation_is_the_output_without_dropout():
    conv, x, graph = layer(), features(), shard(edges(), NUM_NODES, 2)
    with torch.no_grad():
        mean = sum(conv(x, graph) for _ in range(100)) / 100
        spread = torch.stack([conv(x, graph) for _ in range(50)]).std(0) / 10
        exact = conv.eval()(x, graph)
    off = ((mean - exact) / spread.clamp(min=1e-9)).abs()
    assert off.max() < 7  # 732 values, and the spread is an estimate itself
    assert off.mean() < 1.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_are_not_rounded_to_half_precision(dtype):
    """1 / 0.9 has no short form: rounded, it would scale all outputs by the same error."""
    graph = shard(edges(), NUM_NODES).graph
    reduce, (block,) = Softmax(1, 4, ADDITIVE, 0.2, graph.degree, (0.1, 5, graph.ids_of)), graph.blocks
    found = []
    for cast in (dtype, torch.float32):
        x = torch.cat([torch.ones(NUM_NODES, 4), torch.zeros(NUM_NODES, 1)], 1).to(cast)
        found.append(reduce.step(reduce.init(x, NUM_NODES), block, x, Rows())[2])  # sums before they are rounded
    assert torch.equal(*found)


def test_nothing_is_drawn_in_evaluation_or_without_dropout():
    graph = shard(edges(), NUM_NODES, 2)
    layer().eval()(features(), graph)
    GATConv(8, 4).double()(features(), graph)
    assert graph.graph.seeds.drawn == 0


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_extreme_rates(p):
    torch.manual_seed(0)
    conv, x, graph = GATConv(8, 4, dropout=p).double(), features().requires_grad_(), shard(edges(), NUM_NODES, 2)
    out = conv(x, graph)
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    expected = conv.eval()(x, edges()) if p == 0 else conv.bias.expand_as(out)
    close(out, expected, "output")


def test_recomputation_by_checkpoint_is_refused():
    conv = GATConv(4, 4, dropout=0.5)
    x, sharded = torch.randn(5, 4, requires_grad=True), shard(torch.tensor([[0, 1], [2, 3]]), 5, 2)
    out = checkpoint(conv, x, sharded, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint"):
        out.sum().backward()
