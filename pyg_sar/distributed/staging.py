r"""Memory of the host between a GPU and gloo, which sends from there and receives there.

Copies run in a stream of their own, beside what is computed. The host synchronises with a copy before gloo sends it;
what came is copied without waiting.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_sar.distributed.group import Group, Member


def is_staged(tensor: Tensor, group: Group) -> bool:
    """Whether a tensor is sent by way of the host."""
    others = tensor.is_cuda and dist.is_initialized() and not isinstance(group, Member)
    return others and "cuda:gloo" in dist.get_backend_config(group)


@functools.cache
def copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies from and to a device."""
    return torch.cuda.Stream(device)


def pinned(like: Tensor) -> Tensor:
    """Return memory of the host for a tensor."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in memory of the host, when it is there."""
    stream = copies(tensor.device)
    stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(stream):
        host = pinned(tensor).copy_(tensor, non_blocking=True)
    stream.synchronize()
    return host


class Landing:
    """Memory of the host in which a tensor arrives."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.host = tensor, pinned(tensor)
        # What is computed from now on does not read it, and need not be waited for.
        self.ready = torch.cuda.current_stream(tensor.device).record_event()

    def finish(self) -> None:
        """Copy what came; what is computed from now on waits for it, the host does not."""
        stream = copies(self.tensor.device)
        stream.wait_event(self.ready)
        with torch.cuda.stream(stream):
            self.tensor.copy_(self.host, non_blocking=True)
        self.tensor.record_stream(stream)
        torch.cuda.current_stream(self.tensor.device).wait_stream(stream)
