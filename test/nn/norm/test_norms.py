"""Normalisations over whole graphs on several workers against PyG on all rows."""

import pytest
import torch
import torch.distributed as dist
import torch_geometric.nn
from support.nasty_graph import close

import pyg_sar.nn

F = 5
SIZES = {"uneven": [0, 1, 30, 2], "one has all": [0, 0, 0, 8]}
NORMS = {
    "GraphNorm": [(F,)],
    "GraphSizeNorm": [()],
    "InstanceNorm": [(F,), (F, 1e-2, 0.3, True, True)],
    "LayerNorm": [(F,), (F, 1e-2, False), (F, 1e-5, True, "node")],
    "MeanSubtractionNorm": [()],
    "PairNorm": [(), (2.0, True)],
}
CASES = [(name, args) for name, many in NORMS.items() for args in many]


def cut(group, rows, sizes):
    last = group.size() - 1
    return rows.split([*sizes[:last], sum(sizes[last:])])[dist.get_rank(group)]


def step(norm, x, grad, batch, *size):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    out = norm(x) if batch is None else norm(x, batch, *size)
    out.backward(grad)
    return out.detach(), x.grad, {n: p.grad for n, p in norm.named_parameters()}


def check(group, name, args, method, examples):
    sizes, dtype = SIZES[method], torch.float64
    reference, ours = getattr(torch_geometric.nn, name)(*args).to(dtype), getattr(pyg_sar.nn, name)(*args).to(dtype)
    g = torch.Generator().manual_seed(1)
    for p in reference.parameters():
        p.data = torch.randn(F, generator=g, dtype=dtype)
    ours.load_state_dict(reference.state_dict(), strict=True)
    ours.group = group
    n = sum(sizes)
    batch = torch.randint(examples, (n,), generator=g).sort().values if examples else None
    given = [] if batch is None else [examples]
    mine = None if batch is None else cut(group, batch, sizes)
    for _ in range(2):
        x, grad = torch.randn(2, n, F, generator=g, dtype=dtype) * 3 + 1
        out, d_x, d_p = step(reference, x, grad, batch, *given)
        for size in ([], given) if given and batch.max() == examples - 1 else (given,):
            before = {k: b.clone() for k, b in ours.named_buffers()}
            found, d_found, d_p_found = step(ours, cut(group, x, sizes), cut(group, grad, sizes), mine, *size)
            close(found, cut(group, out, sizes), "output")
            close(d_found, cut(group, d_x, sizes), "gradient of x")
            for key, value in d_p.items():
                dist.all_reduce(d_p_found[key], group=group)
                close(d_p_found[key], value, f"gradient of {key}")
            for key, value in reference.named_buffers():
                close(dict(ours.named_buffers())[key].double(), value.double(), key)
            if size != given:  # the same step once more
                for key, value in ours.named_buffers():
                    value.copy_(before[key])
    reference.eval(), ours.eval()
    x = torch.randn(n, F, generator=g, dtype=dtype)
    expected, found = (norm(*arguments) for norm, arguments in (
        (reference, (x,) if batch is None else (x, batch, examples)),
        (ours, (cut(group, x, sizes),) if batch is None else (cut(group, x, sizes), mine, examples)),
    ))  # fmt: skip
    close(found, cut(group, expected, sizes), "output in evaluation")


def equal_rows(group):
    """As behind a ReLU that lets nothing pass."""
    for x in (torch.zeros(6, F, dtype=torch.float64), torch.ones(6, F, dtype=torch.float64)):
        reference, ours = (library.LayerNorm(F, mode="graph").double() for library in (torch_geometric.nn, pyg_sar.nn))
        ours.group = group
        grad = torch.arange(6.0 * F, dtype=torch.float64).view(6, F)
        expected, found = step(reference, x, grad, None), step(ours, *(cut(group, t, [3, 3]) for t in (x, grad)), None)
        for one, other in zip(expected[:2], found[:2], strict=True):
            close(other, cut(group, one, [3, 3]), "output or gradient")


def test_rows_that_are_all_equal(pool):
    pool.run(2, equal_rows)


@pytest.mark.parametrize("examples", [0, 3])
@pytest.mark.parametrize("method", SIZES)
@pytest.mark.parametrize(("name", "args"), CASES)
def test_on_several_workers(pool, name, args, method, examples):
    for workers in (2, 4):
        pool.run(workers, check, name, args, method, examples)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_without_workers_it_is_pygs(name, args):
    x = torch.randn(7, F)
    close(getattr(pyg_sar.nn, name)(*args)(x), getattr(torch_geometric.nn, name)(*args)(x), name, 1e-6)


def of_halves(group, name):
    """Rows of bfloat16 and parameters of single precision, as behind a layer under autocast."""
    reference, ours = (getattr(module, name)(F) for module in (torch_geometric.nn, pyg_sar.nn))
    ours.group = group
    x = torch.randn(20, F, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = reference(x)
    found = ours(x[10 * dist.get_rank(group) :][:10])
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected[10 * dist.get_rank(group) :][:10], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["GraphNorm", "InstanceNorm", "LayerNorm"])
def test_the_type_is_that_of_pyg(pool, name):
    pool.run(2, of_halves, name)
