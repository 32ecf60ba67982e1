"""Products of rows with a matrix, by oneDNN, also where MKL is faster, and by MKL, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from pyg_sar import linear as module
from pyg_sar.linear import by_onednn, linear, linear_grad, product

needs_onednn = pytest.mark.skipif(not module.HAS_ONEDNN, reason="oneDNN is not faster on processors like this one")

# Rows, columns, and columns of the result: none, one, some more than are multiplied at a time, and odd ones.
SHAPES = [
    (0, 5, 3),
    (4, 0, 3),
    (4, 5, 0),
    (1, 1, 1),
    (7, 100, 1),
    (1023, 3, 129),
    (1024, 16, 16),
    (2500, 47, 100),
    (300, 1500, 20),
    (20_000, 12, 40),
    (20_000, 40, 12),
]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(autouse=True, params=["mkl", pytest.param("onednn", marks=needs_onednn)])
def by(request, monkeypatch):
    """Who multiplies."""
    monkeypatch.setattr(module, "BY_ONEDNN", request.param == "onednn")
    for fewest in ("FEWEST_ROWS", "FEWEST_WEIGHTS"):
        monkeypatch.setattr(module, fewest, 1)  # oneDNN knows no empty products
    return request.param


only_onednn = pytest.mark.parametrize("by", [pytest.param("onednn", marks=needs_onednn)], indirect=True)


def test_who_is_faster(monkeypatch):
    cpuinfo = module.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        assert (module.family_of_amd() > 0) == ("AuthenticAMD" in cpuinfo.read_text())
    names = {
        "Intel64 Family 6 Model 143, GenuineIntel": 0,
        "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD": 25,
        "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC": 26,
        "": 0,
    }
    monkeypatch.setattr(module.Path, "exists", lambda path: False)
    for name, family in names.items():
        monkeypatch.setattr(module.platform, "processor", lambda name=name: name)
        assert module.family_of_amd() == family


@only_onednn
def test_small_products_run_by_mkl(monkeypatch):
    monkeypatch.setattr(module, "FEWEST_ROWS", 1024)
    monkeypatch.setattr(module, "FEWEST_WEIGHTS", 128 * 128)
    assert by_onednn(torch.empty(1024, 64), torch.empty(256, 64))
    assert not by_onednn(torch.empty(1023, 64), torch.empty(256, 64))
    assert not by_onednn(torch.empty(1024, 64), torch.empty(255, 64))
    assert not by_onednn(torch.empty(1024, 0), torch.empty(255, 0))


def inputs(shape, dtype=torch.float32, requires_grad=False):
    n, i, o = shape
    tensors = [torch.randn(*s, dtype=torch.float64) for s in ((n, i), (o, i), (o,), (n, o))]
    return [t.to(dtype).requires_grad_(requires_grad and k < 3) for k, t in enumerate(tensors)]


def near(found, exact, plain):
    """The error is at most twice that of PyTorch's product in the same precision (and some rounding of the largest)."""
    assert found.shape == exact.shape
    error, reference = ((t.double() - exact).abs().max() if t.numel() else 0 for t in (found, plain))
    largest = exact.abs().max() if exact.numel() else 0
    assert error <= 2 * reference + 2 * torch.finfo(found.dtype).eps * largest


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_gradients(shape, dtype, bias):
    *given, grad = inputs(shape, dtype, requires_grad=True)
    given = given[: 2 + bias]
    exact = [t.detach().double().requires_grad_() for t in given]
    results = [
        (out.detach(), *torch.autograd.grad(out, tensors, grad.to(out.dtype)))
        for out, tensors in ((linear(*given), given), (F.linear(*exact), exact), (F.linear(*given), given))
    ]
    for found, expected, plain in zip(*results, strict=True):
        near(found, expected, plain)


@only_onednn
def test_who_multiplies(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "onednn", lambda *args: calls.append(args) or F.linear(*args))
    x, weight, *_ = inputs((5, 4, 3))
    linear(x, weight)
    assert len(calls) == 1
    linear(x.double(), weight.double())
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    product(x.unsqueeze(0)[0, :0], weight)
    assert linear(x.view(1, 5, 4), weight).shape == (1, 5, 3)
    assert len(calls) == 1 and not by_onednn(x.half(), weight.half())


@only_onednn
def test_matrices_have_no_gaps(monkeypatch):
    """Or its reference implementation would multiply."""
    weights, given = [], module.onednn
    monkeypatch.setattr(module, "onednn", lambda x, weight, bias: weights.append(weight) or given(x, weight, bias))
    wide = torch.randn(600, 700)
    for weight in (wide[:, :300], wide.t()[:, 10:400], wide[:1].expand(9, 700), torch.tensor(2.0).expand(5, 300)):
        linear(torch.randn(3, weight.size(1)), weight)
    linear_grad(wide[:, :20], torch.randn(600, 30)[:, :9], wide[:9, :20], torch.zeros(600, 20), torch.zeros(9, 20))
    assert len(weights) > 9 and all(w.is_contiguous() or w.t().is_contiguous() for w in weights)


@pytest.mark.parametrize("order", ["columns", "transposed", "expanded", "steps", "unaligned"])
def test_rows_that_lie_apart(order):
    """As columns of wider rows do, and gradients of a sum."""
    weight, wide = torch.randn(6, 8), torch.randn(40, 33)
    x = {
        "columns": wide[:, 5:13],
        "transposed": torch.randn(8, 40).t(),
        "expanded": torch.randn(1, 1).expand(40, 8),
        "steps": wide[::2, ::4][:, :8],
        "unaligned": wide.view(-1)[1:321].view(40, 8),
    }[order]
    torch.testing.assert_close(product(x, weight), x @ weight.t())
    d_x, d_weight = torch.ones(len(x), 8), torch.empty(6, 8)
    grad = torch.randn(1, 6).expand(len(x), 6)
    linear_grad(x, grad, weight, d_x, d_weight)
    torch.testing.assert_close(d_x, 1 + grad @ weight)
    torch.testing.assert_close(d_weight, grad.t() @ x)


@pytest.mark.parametrize("add", [False, True])
def test_gradients_are_added_or_written(dtype, add):
    x, weight, _, grad = inputs((2100, 7, 5), dtype)
    source = torch.full_like(x, 3 if add else torch.nan)
    linear_grad(x, grad, weight, source, None, add=add)
    torch.testing.assert_close(source, grad @ weight + (3 if add else 0))


def test_product_into_given_memory(dtype):
    """Columns of wider rows; only these are written."""
    x, weight, bias, _ = inputs((2100, 7, 5), dtype)
    out = torch.full((2100, 9), torch.nan, dtype=dtype)
    product(x, weight, bias, out[:, 2:7])
    torch.testing.assert_close(out[:, 2:7], F.linear(x, weight, bias))
    assert out[:, :2].isnan().all() and out[:, 7:].isnan().all()


def test_threads(by):
    """Results are the same each time, and by oneDNN for any number of threads; MKL cuts long sums for each thread."""
    x, weight, bias, grad = inputs((5000, 100, 68))
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 1, 2, 3):
            torch.set_num_threads(count)
            source, d_weight = torch.empty_like(x), torch.empty_like(weight)
            linear_grad(x, grad, weight, source, d_weight, add=False)
            found.append((product(x, weight, bias), source, d_weight))
    finally:
        torch.set_num_threads(threads)
    pairs = zip(found[:3], found[3:], strict=True) if by == "mkl" else ((found[0], other) for other in found[1:])
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def test_other_devices():
    x, weight = torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta")
    assert linear(x, weight).shape == product(x, weight).shape == (3, 5)


@only_onednn
def test_no_second_derivative():
    x, weight, *_ = inputs((5, 4, 3), requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x, weight).square().sum(), x, retain_graph=True)
    assert not grad.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear(x, weight).square().sum(), x, create_graph=True)


@only_onednn
def test_few_shapes(monkeypatch):
    """OneDNN keeps memory for every shape that it has met, and graphs, chunks and relations have any number of rows."""
    shapes, given = set(), module.onednn
    monkeypatch.setattr(module, "onednn", lambda x, w, bias: shapes.add((x.shape, w.shape)) or given(x, w, bias))
    for count in range(1, 3000, 37):
        x, weight, bias, grad = inputs((count, 10, 7))
        product(x, weight, bias)
        linear_grad(x, grad, weight, torch.zeros_like(x), torch.zeros_like(weight))
    assert len(shapes) == 5 + 5 + 3  # rows of two products, 64 to 1024, and summands of one, 64 to 256
