"""What is told of a pipeline before it runs, against pipelines that run."""

import warnings

import pytest
import torch
from support.cases import some
from support.pool import Pool

import pyg_sar
from pyg_sar import ops
from pyg_sar.data.datasets import dataset
from pyg_sar.distributed.stages import mesh_of
from pyg_sar.live import Live
from pyg_sar.pipeline_planner import plan_pipeline
from pyg_sar.planner import from_counts, from_partition, received

NODES, WIDTH, BLOCKS = 3000, 64, 6


class Block(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        layer = {"gcn2": lambda a, b: pyg_sar.nn.GCN2Conv(a, 0.2), "sage": pyg_sar.nn.SAGEConv}[kind]
        self.conv, self.norm, self.first = layer(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), kind == "gcn2"

    def forward(self, x, edge_index):
        if not self.first:
            return self.norm(self.conv(x, edge_index)).relu() + x
        h, first = x if isinstance(x, tuple) else (x, x)
        return self.norm(self.conv(h, first, edge_index)).relu() + h, first


def model(kind):
    torch.manual_seed(0)
    return torch.nn.ModuleList(Block(kind) for _ in range(BLOCKS))


def trained(group, folder, kind, stages, parts, chunks):
    """Bytes that travel in the second step, what is held after it, and the peak of both above that, of one worker."""
    mesh = mesh_of(torch.arange(stages * parts).view(stages, parts))
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"), remat=False)
    given = sum(data.edge_index.graph.memory().values())
    with Live() as live:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*stages most wait where there are only")
            pipe = pyg_sar.Pipeline(model(kind), data.edge_index, mesh, chunks)
        optimizer = torch.optim.Adam(pipe.parameters())
        for _ in range(2):
            with pipe.record() as seen:
                pipe.step(data.x, lambda out, rows: sum(t.sum() for t in (out if isinstance(out, tuple) else (out,))))
            optimizer.step()
            optimizer.zero_grad()
    held = given + live.now + (data.x.nbytes if mesh.get_local_rank("stage") == 0 else 0)
    return received([seen.between]), received(seen.within), seen.parameters, held, live.peak - live.now


@pytest.fixture(scope="module")
def stages_pool():
    pool = Pool(4)
    yield lambda *args: [found for found in pool.run(4, trained, *args, timeout=120) if found is not None]
    pool.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for parts in (1, 2):
        made[parts] = str(tmp_path_factory.mktemp("parts") / str(parts))
        pyg_sar.partition(dataset(f"Community/{NODES}/40000"), parts, made[parts])
    return made


@pytest.mark.skipif(not ops.KERNELS, reason="PYG_SAR_KERNELS=0: plain PyTorch holds messages, too")
@pytest.mark.parametrize(
    ("kind", "shape"), some(["gcn2", "sage"], [(2, 2, 1), (2, 2, 6), (1, 2, 6), (4, 1, 6), (2, 1, 1)], every=5)
)
def test_prediction(stages_pool, folders, kind, shape):
    """Traffic to the byte; memory of every stage within 15%."""
    stages, parts, chunks = shape
    found = stages_pool(folders[parts], kind, stages, parts, chunks)
    shares = from_partition(folders[parts])
    need = plan_pipeline(lambda: model(kind), shares, WIDTH, stages, chunks=chunks)
    between, within, parameters = (sum(one[k] for one in found) for k in range(3))
    assert (need.between, need.within, need.parameters) == (between, within, parameters)
    rank = max(range(parts), key=lambda r: shares[r].nodes + sum(shares[r].rows_in))
    assert need.each[0] == pytest.approx(found[rank][3:], rel=0.15)
    totals = [max(sum(one[3:]) for one in found[k * parts :][:parts]) for k in range(stages)]
    assert [sum(one) for one in need.each] == pytest.approx(totals, rel=0.15)
    assert (need.stages, need.workers, need.waiting) == (stages, parts, (stages - 1) / (chunks + stages - 1))
    assert need.total == max(map(sum, need.each)) and need.moved == between + within + parameters


def refuse(group):
    with pytest.raises(RuntimeError, match="call it before, or in another process"):
        plan_pipeline(lambda: model("sage"), [from_counts(100, 1000, 1)], WIDTH, 2)


def test_refuses(pool):
    pool.run(2, refuse)
    with pytest.raises(ValueError, match="a block for each of the 7 stages"):
        plan_pipeline(lambda: model("sage"), [from_counts(100, 1000, 1)], WIDTH, 7)


def test_features_have_no_gradient():
    """The first site reads features here, and rows of another width; the second one, rows of its own block."""
    layers = [pyg_sar.nn.SAGEConv(8, 16), pyg_sar.nn.SAGEConv(16, 16)]
    shares = [from_counts(1000, 10000, 2, boundary=0.5)] * 2
    need = plan_pipeline(lambda: layers, shares, 8, 1, chunks=3)
    assert need.within == 2 * 250 * (8 * 4 + 2 * 16 * 4) and need.between == 0


class Hidden(torch.nn.Module):
    """Prints the same for any width."""

    def __init__(self, width):
        super().__init__()
        self.into, self.out = (torch.nn.Parameter(torch.ones(size)) for size in ((WIDTH, width), (width, WIDTH)))

    def forward(self, x, edge_index):
        return (x @ self.into).relu() @ self.out


def test_stages_that_print_alike():
    blocks = [Hidden(width) for width in (8, 8, 512, 8)]
    need = plan_pipeline(lambda: blocks, [from_counts(1000, 10000, 1)], WIDTH, 4, chunks=8)
    assert all(more > less + 500_000 for more, less in zip(need.each[2], need.each[1], strict=True))
