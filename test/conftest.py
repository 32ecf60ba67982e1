"""Fixtures that all tests share.

A multi-rank test is a function at the top level of its module, ``fn(group, *args)``, which each
rank runs in a process of its own, and a test that has the pool run it::

    import torch
    import torch.distributed as dist


    def total(group, x):
        x = x + dist.get_rank(group)
        dist.all_reduce(x, group=group)
        return x


    def test_total(pool):
        for y in pool.run(2, total, torch.zeros(3)):
            assert y.tolist() == [1.0, 1.0, 1.0]

``pool.run`` raises if any rank does, so ``fn`` may assert as well; ``pool.outcomes`` is for tests
of the errors themselves. See ``pool.py``.

Helpers of several tests live in modules in this folder and are imported by their bare name. Test
modules below it are imported in the same way: give each a name that no other one has, and no folder
an ``__init__.py``.
"""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.pool import Pool


def pytest_configure(config: pytest.Config) -> None:
    """One thread, here and in processes that tests start: problems are small, and where several test runs share the
    cores, as in `.ci/run`, threads would spend most of their time on waiting for each other.
    """
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if not torch.cuda.is_available():  # whether Triton compiles or interprets is decided when it is imported
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what `few_objects` froze, or libraries would complain of leaks


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Disks are slow. That partitions are durable is tested by itself, in `test_store.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_pieces() -> None:
    """Not before Triton was told to interpret."""
    from support.small_pieces import make_small

    make_small()


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> None:
    """Garbage collections, which many tests and all dry runs ask for, look at what this module makes alone: libraries
    and collected tests are millions of objects, which take a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(params=["compiled", "triton"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """Operators of both sets of kernels. A test of bits or of rounding has a parameter ``dtype``."""
    if request.param == "triton":
        gpu = pytest.importorskip("support.gpu", reason="needs Triton")
        if "bits" in request.node.name or "round" in request.node.name:
            gpu.needs_rounding(request.node.callspec.params["dtype"])
        return gpu.OPS
    from pyg_sar import ops  # not before Triton was told to interpret

    if not ops.KERNELS:
        pytest.skip("the kernels were not built, or are turned off")
    return torch.ops.pyg_sar


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a ``device`` runs on the CPU and, if there is one, on a GPU."""
    if "device" in metafunc.fixturenames:
        more = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []
        metafunc.parametrize("device", ["cpu", *more])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
