"""Both sets of kernels."""

import pytest
import torch

from pyg_sar import ops


@pytest.fixture(params=["compiled", "triton"])
def kernels(request):
    """Both sets of kernels."""
    if request.param == "triton":
        gpu = pytest.importorskip("support.gpu", reason="needs Triton")
        if "bits" in request.node.name or "round" in request.node.name:
            gpu.needs_rounding(request.node.callspec.params["dtype"])
        return gpu.OPS
    if not ops.KERNELS:
        pytest.skip("the kernels were not built, or are turned off")
    return torch.ops.pyg_sar
