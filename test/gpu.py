"""The kernels for GPUs as a module of operators: on a GPU if there is one, else in Triton's interpreter, which
``conftest.py`` asks for.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

kernels = pytest.importorskip("pyg_sar.kernels", reason="needs Triton", exc_type=ImportError)
work = kernels.work
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    # The interpreter is as fast for many units at a time as for one: fewer steps with more units. Small pieces make
    # hubs of most rows, and hubs of the pieces of hubs.
    work.CUT, work.CELLS, work.ROWS = 8, 1 << 14, 1 << 10

OPS = SimpleNamespace(DEVICE=DEVICE, **{name: getattr(kernels, name) for name in kernels.__all__})
