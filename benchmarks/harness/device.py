"""What benchmarks on a GPU share: a graph that is made there, and the time that the device takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def power_law_graph(nodes: int, edges: int, device: str = "cuda", loops: bool = True) -> Tensor:
    """Return an undirected graph as ``edge_index``, sorted by destination: the ends of an edge are drawn by popularity,
    that of the k-th node falls with the root of k; perhaps with a self-loop at every node.
    """
    g = torch.Generator(device).manual_seed(0)
    half = (nodes * torch.rand(2, edges // 2, generator=g, device=device, dtype=torch.float64).square()).long()
    half = torch.randperm(nodes, generator=g, device=device)[half.clamp(max=nodes - 1)]
    more = [torch.arange(nodes, device=device)] if loops else []
    src, dst = (torch.cat([*it, *more]) for it in (half, half.flip(0)))
    key = (dst * nodes + src).sort().values
    return torch.stack([key % nodes, key // nodes])


def events(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds that the device takes, and the result."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), result
