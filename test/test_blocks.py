"""How blocks are called, and how many each stage gets."""

import itertools
import time

import pytest
import torch
from support import graphs

import pyg_sar
from pyg_sar.blocks import balanced_cut, even_cut, least_maximum
from pyg_sar.distributed.stages import mesh_of


@pytest.mark.parametrize("seed", range(20))
def test_least_maximum(seed):
    """Against all ways to cut."""
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.rand(7, generator=generator).tolist()
    for stages in range(1, 8):
        cut = least_maximum(seconds, stages)

        def slowest(cuts):
            return max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cuts, 7)))

        best = min(map(slowest, itertools.combinations(range(1, 7), stages - 1)))
        assert len(cut) == stages and sum(cut) == 7 and min(cut) > 0
        assert slowest(list(itertools.accumulate(cut))[:-1]) == pytest.approx(best)


def test_even_cut():
    assert even_cut(7, 3) == [3, 2, 2] and even_cut(3, 3) == [1, 1, 1]
    with pytest.raises(ValueError, match="a block for each of the 4 stages"):
        even_cut(3, 4)


class Slow(torch.nn.Module):
    """Takes so long."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.norm = seconds, pyg_sar.nn.BatchNorm(4)

    def forward(self, x, edge_index):
        assert not self.training and edge_index.size(1) > 0
        time.sleep(self.seconds)
        return self.norm(x)


def test_modes_of_blocks_stay():
    block = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    block[1].eval()
    it = pyg_sar.shard(torch.tensor([[0, 1], [1, 0]]), 2)
    assert balanced_cut([block, block], torch.ones(2, 4), it, 1) == [2]
    assert block.training and block[0].training and not block[1].training

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    blocks = [block, Fails()]
    with pytest.raises(ZeroDivisionError):
        balanced_cut(blocks, torch.ones(2, 4), it, 1)
    assert block.training and not block[1].training and blocks[1].training


def measured(group, folder, seconds):
    mesh = mesh_of(torch.arange(2).view(2, 1))
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    of_mine = seconds[torch.distributed.get_rank(group)]
    blocks = [Slow(each) for each in of_mine]
    cut = balanced_cut(blocks, torch.zeros(data.num_nodes, 4), data.edge_index, 2, mesh=mesh)
    assert all(block.training for block in blocks)
    assert all(bool((block.norm.module.running_mean == 0).all()) for block in blocks)
    return cut


def test_by_measured_seconds(pool, tmp_path):
    """The slowest worker of each block decides, so that all get the same cut; nothing of the model changes."""
    pyg_sar.partition(graphs.citations(), 1, tmp_path / "one")
    seconds = [0.3, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]
    assert pool.run(2, measured, str(tmp_path / "one"), seconds) == [[1, 3]] * 2
    seconds = [0.0, 0.0, 0.2, 0.0], [0.0, 0.2, 0.0, 0.0]
    assert pool.run(2, measured, str(tmp_path / "one"), seconds) == [[2, 2]] * 2
