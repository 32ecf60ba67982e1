"""What no pipeline of layers can do, in one process; what workers must have in common is in `test_pipeline.py`."""

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn
from support.pipelines import NODES, WIDTH, alone, blocks_of, inputs, steps

import pyg_sar


def norm_named(name):
    given = {"PairNorm": (), "MeanSubtractionNorm": (), "GraphSizeNorm": ()}
    return getattr(torch_geometric.nn, name)(*given.get(name, (WIDTH,)))


WRONG = {
    "chunks": (lambda: {"chunks": 0}, "'chunks' to be 1 or more"),
    "history": (lambda: {"history": 0}, "'history' to be 1 or more"),
    "cut": (lambda: {"cut": [3]}, "'cut' to be 1 numbers of blocks that sum to 4"),
    "norm": (lambda: {"blocks": blocks_of(pyg_sar.nn, "sage", "batch")}, "'BatchNorm.*looks at all rows"),
    "cached": (lambda: {"blocks": [torch_geometric.nn.SGConv(WIDTH, WIDTH, cached=True)]}, "'cached=True'.*'chunks=1'"),
    "graph norm": (lambda: {"blocks": [torch_geometric.nn.LayerNorm(WIDTH)]}, "'LayerNorm'.*looks at all rows"),
    "no blocks": (lambda: {"blocks": []}, "Expected a block for each.*Take fewer stages"),
    "nodes": (lambda: {"chunks": NODES + 1}, "at most a chunk for each of 40 nodes"),
    **{
        name: (lambda norm=norm: {"blocks": [norm]}, f"'{name}'.*looks at all rows")
        for name in ("GraphNorm", "PairNorm", "InstanceNorm", "MeanSubtractionNorm", "GraphSizeNorm")
        for norm in [norm_named(name)]
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_what_no_pipeline_can_do(what):
    given, error = WRONG[what]
    settings = {"blocks": blocks_of(pyg_sar.nn, "sage"), "chunks": 3, **given()}
    with pytest.raises(ValueError, match=error):
        pyg_sar.Pipeline(edge_index=pyg_sar.shard(inputs().edge_index, NODES), mesh=None, **settings)


def test_graphs_that_no_pipeline_takes():
    whole = pyg_sar.shard(inputs().edge_index, NODES)
    flow = pyg_sar.message_flow_graphs(whole, torch.arange(NODES) < 5, 2)
    of_types = pyg_sar.shard(torch.tensor([[0, 1], [2, 0]]), (4, 3))
    for edge_index in (inputs().edge_index, of_types, flow.edge_indices[0], flow.edge_indices):
        for chunks in (1, 3):
            with pytest.raises(TypeError, match="'edge_index' of one set of nodes"):
                pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), edge_index, chunks=chunks)


def test_cached_where_it_has_no_effect():
    blocks = torch.nn.ModuleList(pyg_sar.nn.GCNConv(WIDTH, WIDTH, cached=True) for _ in range(2)).double()
    steps(alone(inputs().edge_index, 3, blocks=blocks), inputs(), 2)


class Reads(torch.nn.Module):
    """Adds something that is of all rows to each."""

    def __init__(self, read):
        super().__init__()
        self.lin, self.read = torch.nn.Linear(WIDTH, WIDTH), read

    def forward(self, x, edge_index):
        return self.lin(x) + self.read(x)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("read", [
    lambda x: torch_geometric.nn.global_mean_pool(x, None), lambda x: pyg_sar.nn.global_mean_pool(x, None),
    lambda x: torch_geometric.nn.aggr.MeanAggregation()(x), lambda x: x.mean(0),
])  # fmt: skip
def test_what_reads_out_a_chunk(read, after):
    """In a process of its own, too; where rows come from a layer, and where they are what a block is called with."""
    data, blocks = inputs(), torch.nn.ModuleList([Reads(read)]).double()
    if after:
        blocks.insert(0, pyg_sar.nn.SAGEConv(WIDTH, WIDTH).double())
    with pytest.raises(
        NotImplementedError, match=r"all rows, of which a chunk|nodes or edges,? of (which )?this worker"
    ):
        steps(alone(data.edge_index, 3, blocks=blocks), data, 1)
    steps(alone(data.edge_index, 1, blocks=blocks), data, 1)


class OntoSources(torch.nn.Module):
    """Adds what destinations have onto the sources of their edges, or sends messages the other way round."""

    def __init__(self, turned):
        super().__init__()
        self.conv = pyg_sar.nn.SAGEConv(WIDTH, WIDTH, flow="target_to_source").double() if turned else None

    def forward(self, x, edge_index):
        if self.conv is not None:
            return self.conv(x, edge_index)
        return torch_geometric.utils.scatter(x[edge_index[1]], edge_index[0], dim_size=x.size(0))


@pytest.mark.parametrize("turned", [False, True])
def test_sources_of_other_chunks(turned):
    data, blocks = inputs(), [OntoSources(turned)]
    data.x.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"Block 0 .*(adds onto the sources|other rows).*'chunks=1'"):
        alone(data.edge_index, 3, blocks=blocks).step(data.x, lambda out, rows: out.sum())
    alone(data.edge_index, 1, blocks=blocks).step(data.x, lambda out, rows: out.sum())


def test_edges_that_need_a_gradient():
    data, blocks = inputs(), blocks_of(pyg_sar.nn, "weighted")
    with pytest.raises(ValueError, match="Tensor 0 of edges needs a gradient"):
        alone(data.edge_index, 3, blocks=blocks).step(
            data.x, lambda out, rows: out.sum(), data.edge_weight.requires_grad_()
        )


@pytest.mark.parametrize("chunks", [1, 3])
def test_edges_of_others(chunks):
    data, blocks = inputs(), blocks_of(pyg_sar.nn, "weighted")
    for wrong in (data.edge_weight[:-1], torch.cat([data.edge_weight] * 2)):
        with pytest.raises(ValueError, match=r"tensor 0 of edges to have a row for each of this worker's 164 edges"):
            alone(data.edge_index, chunks, blocks=blocks).step(data.x, lambda out, rows: out.sum(), wrong)


def test_steps_without_gradients():
    data = inputs()
    with torch.no_grad(), pytest.raises(RuntimeError, match="Expected gradients in 'step'"):
        alone(data.edge_index, 3).step(data.x, lambda out, rows: out.sum())


def test_rows_at_home_in_chunks():
    data = inputs()
    data.edge_index = pyg_sar.shard(data.edge_index, NODES)
    data = pyg_sar.offload(data, chunks=2)
    with pytest.raises(ValueError, match="Rows at home go through a pipeline as a whole"):
        alone(inputs().edge_index, 3).step(data.x, lambda out, rows: out.sum())


MEANS = {
    "cross_entropy": lambda out, y: F.cross_entropy(out, y),
    "mse_loss": lambda out, y: F.mse_loss(out, torch.zeros_like(out)),
    "mean": lambda out, y: out.square().sum(1).mean(),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_of_chunks(name):
    """Once; of all rows they are right, and so are means of columns and sums."""
    data = inputs()
    pipe = alone(data.edge_index, 3)
    with pytest.warns(UserWarning, match=f"'{name}' takes a mean over the rows of a chunk, or of one worker") as told:
        pipe.step(data.x, lambda out, rows: MEANS[name](out, data.y[rows]))
    assert len(told) == 1 and told[0].filename == __file__
    pipe.step(data.x, lambda out, rows: MEANS[name](out, data.y[rows]))
    alone(data.edge_index, 1).step(data.x, lambda out, rows: MEANS[name](out, data.y[rows]))
    alone(data.edge_index, 3).step(
        data.x, lambda out, rows: F.cross_entropy(out, data.y[rows], reduction="sum") + out.mean(1).sum()
    )


class Shorter(torch.nn.Module):
    def forward(self, x):
        return x[:-1]


@pytest.mark.filterwarnings("ignore:.*chooses rows by where they stand")
def test_steps_that_are_wrong():
    data = inputs()
    with pytest.raises(ValueError, match=r"'loss_fn' to return a single number as a tensor \(got \[\d+\]\)"):
        alone(data.edge_index, 3).step(data.x, lambda out, rows: out.sum(1))
    with pytest.raises(ValueError, match="Expected block 0 to return a row for each"):
        alone(data.edge_index, 3, blocks=[Shorter()]).step(data.x, lambda out, rows: out.sum())


@pytest.mark.parametrize("chunks", [1, 3])
def test_seeds_of_the_graph_stay(chunks):
    data = inputs()
    pipe = alone(data.edge_index, chunks)
    seeds = pipe.edge_index.graph.seeds
    seeds.manual_seed(7)
    first = seeds.draw()
    pipe.step(data.x, lambda out, rows: out.sum())
    second = seeds.draw()
    seeds.manual_seed(7)
    assert [seeds.draw(), seeds.draw()] == [first, second]


@pytest.mark.parametrize("chunks", [1, 3])
def test_losses_of_all_workers(chunks):
    """A pipeline adds up those of chunks and workers, which 'global_mean' has done for the latter."""
    data = inputs()
    pipe = alone(data.edge_index, chunks)
    with pytest.raises(ValueError, match=r"A pipeline adds up what 'loss_fn' returns.*instead of 'global_mean'"):
        pipe.step(data.x, lambda out, rows: pyg_sar.global_mean(out.square().sum(1)))
    assert pyg_sar.global_mean(torch.ones(3)) == 1


class Uneven(torch.nn.Module):
    """Aggregates twice for long chunks."""

    def __init__(self):
        super().__init__()
        self.conv = pyg_sar.nn.SAGEConv(WIDTH, WIDTH).double()

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return self.conv(x, edge_index) if len(x) > 20 else x


class Undecided(Uneven):
    """Reads more columns without gradients, as in the pass that fills the history."""

    def forward(self, x, edge_index):
        return self.conv(x if torch.is_grad_enabled() else F.pad(x, (0, 1)), edge_index)


class Twice(Uneven):
    """Aggregates once more with gradients, for each chunk."""

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        return self.conv(x, edge_index) if torch.is_grad_enabled() else x


class Checkpointed(Uneven):
    def forward(self, x, edge_index):
        return torch.utils.checkpoint.checkpoint(self.conv, x, edge_index, use_reentrant=False)


def test_blocks_that_take_another_way():
    data = inputs()
    with pytest.raises(ValueError, match="Block 0 aggregated 1 times for a chunk, and 2 times for others"):
        alone(data.edge_index, 3, blocks=[Uneven()]).step(data.x, lambda out, rows: out.sum())
    with pytest.raises(ValueError, match="Block 0 aggregated 2 times for a chunk, and 1 times for others"):
        alone(data.edge_index, 3, blocks=[Twice()]).step(data.x, lambda out, rows: out.sum())
    undecided = Undecided()
    undecided.conv = pyg_sar.nn.convert(torch_geometric.nn.SimpleConv())
    with pytest.raises(ValueError, match=r"Block 0 aggregates rows of shape \[6\], and of shape \[7\] before"):
        alone(data.edge_index, 3, blocks=[undecided]).step(data.x, lambda out, rows: out.sum())
    with pytest.raises(RuntimeError, match="Block 0 of a pipeline is recomputed in backward"):
        alone(data.edge_index, 3, blocks=[Checkpointed()]).step(data.x, lambda out, rows: out.sum())
