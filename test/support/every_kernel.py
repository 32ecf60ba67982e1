"""Runs every kernel for GPUs a few times, for tools that watch a whole process: see ``benchmarks/gpu.sh sanitize``."""

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import gpu
from support.kernel_check import block, calls, execute, rows_of

for name, shape in (("mixed", (4, 8)), ("hub", (2, 100))):
    for call in itertools.islice(calls(block(name), *shape), 0, None, 4):
        execute(gpu.OPS, call, torch.float32)
x, grad = (rows_of(1025, 70, torch.float32, seed=k) for k in range(2))
vectors = [rows_of(1, 70, torch.float32, seed=k)[0] for k in range(4)]
gpu.OPS.row_products_(torch.zeros(1025, 2), x, grad)
gpu.OPS.moments_(*torch.zeros(2, 70, dtype=torch.float64), x)
gpu.OPS.column_products_(*torch.zeros(2, 70, dtype=torch.float64), x, grad, vectors[0])
gpu.OPS.column_affine_(torch.zeros_like(x), x, *vectors[:3], grad, vectors[3])
gpu.OPS.dropout_rows_(torch.zeros_like(x), x, torch.arange(1025), 2**61 + 1, 0.3)
print("every kernel ran")
