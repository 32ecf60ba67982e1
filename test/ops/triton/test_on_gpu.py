"""What the interpreter of Triton does not show: kernels as they are compiled for the GPU at hand."""

import itertools

import pytest
import torch
from support import gpu
from support.gpu import DEVICE
from support.kernel_check import LAYOUTS, block, calls, check_double, check_precision, execute

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (2, 5), (2, 8), (3, 17), (2, 32), (4, 32), (2, 100), (1, 128), (1, 130)]
BLOCKS = [("mixed", shape) for shape in SHAPES] + [("hub", (2, 16)), ("hub", (17, 2)), ("around a unit", (3, 5))]
WAYS = list(itertools.product(LAYOUTS, (torch.int32, torch.int64)))


@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.grid) for k in (1, 2, 3))])
@pytest.mark.parametrize(("name", "shape"), BLOCKS)
def test_double_precision(name, shape, first):
    """Every operator and choice of arguments, a quarter of them at a time; rows lie in all ways."""
    compared = 0
    for k, call in enumerate(calls(block(name), *shape)):
        if k % 4 == first:
            layout, index = WAYS[(k // 4 + first) % len(WAYS)]
            compared += check_double(gpu.OPS, call, index, layout)
    assert compared > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "shape"), [("mixed", (2, 32)), ("mixed", (1, 128)), ("mixed", (3, 17)), ("hub", (2, 16))]
)
def test_precision(dtype, name, shape):
    """The error of every operator is at most twice that of plain PyTorch on the same GPU, where it adds up the edges of
    a row one after the other, too: of some draws, for either may be lucky.
    """
    assert check_precision(gpu.OPS, dtype, 16, [(name, shape)], step=2, plain=gpu.PLAIN) > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "shape"), [("mixed", (4, 32)), ("hub", (2, 100))])
def test_the_same_bits_in_every_run(name, shape, dtype):
    for call in itertools.islice(calls(block(name), *shape), 0, None, 3):
        one, other = (execute(gpu.OPS, call, dtype) for _ in range(2))
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=0, atol=0, equal_nan=True, msg=f"{call.title}: {key}")


def test_device():
    assert DEVICE == "cuda"
