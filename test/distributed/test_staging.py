"""Messages of CUDA tensors through memory of the host, which tests without a GPU stand in for."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.layer_check import check_layer, settings
from support.layers import Case

from pyg_sar.distributed import staging


def through_the_host(group):
    """Every message is copied before it is sent, and after it came."""
    sent, landed = [], []

    class Landing:
        def __init__(self, tensor):
            self.tensor, self.host = tensor, torch.full_like(tensor, 77)

        def finish(self):
            assert self.tensor is not None
            landed.append(self.host.nbytes)
            self.tensor.copy_(self.host)
            self.tensor = None  # once

    def to_host(tensor):
        sent.append(tensor.nbytes)
        return tensor.clone()

    with mock.patch.multiple(staging, is_staged=lambda tensor, group: True, to_host=to_host, Landing=Landing):
        done = check_layer(group, Case("GATConv", (8, 4), {"heads": 2}))
    return done, sum(sent), sum(landed), 0 not in sent + landed


@pytest.mark.parametrize("workers", [2, 3])
def test_through_the_host(pool, workers):
    done, sent, landed, some = zip(*pool.run(workers, through_the_host), strict=True)
    assert done == (len(settings("some", workers)),) * workers
    assert sum(sent) == sum(landed) > 0
    assert all(some), "nothing empty is copied"


def test_what_is_staged(pool):
    assert not staging.is_staged(torch.ones(1), None)
    assert pool.run(2, backends) == ["cpu:gloo,cuda:gloo"] * 2


def backends(group):
    return str(dist.get_backend_config(group))


@pytest.mark.gpu
def test_copies():
    """There and back, while the device computes, and memory is not used anew before."""
    x = torch.arange(1_000_000, device="cuda")
    host = staging.to_host(x + 1)
    assert host.is_pinned() and torch.equal(host, torch.arange(1, 1_000_001))
    into = torch.zeros_like(x)
    landing = staging.Landing(into)
    landing.host.copy_(host)
    landing.finish()
    assert torch.equal(into * 2, 2 * x + 2)


def test_nothing_is_staged_without_a_group():
    assert not dist.is_initialized()
    assert not staging.is_staged(mock.Mock(is_cuda=True), None)
