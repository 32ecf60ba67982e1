"""A pipeline of layers: exact with one chunk, and with more what a reference in plain PyG says."""

import functools
import gc
import importlib.util
import itertools
import os
import random
import re
import signal
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn
from support.cases import some
from support.pipelines import (
    BLOCKS,
    CLASSES,
    NODES,
    WIDTH,
    alone,
    blocks_of,
    close,
    edges_of,
    inputs,
    loss_of,
    start,
    steps,
)
from support.pool import Pool, RankError
from torch_geometric.nn import DeepGCNLayer, GENConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import softmax

import pyg_sar
from pyg_sar import checkpoint
from pyg_sar.distributed.stages import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:.*most wait")
KINDS = ["gcn", "sage", "gen", "gcn2", "gat", "two", "weighted"]


@functools.cache
def mesh_for(stages, parts):
    """A mesh of some workers, made once: each group has threads of its own, as long as the process lives."""
    return mesh_of(torch.arange(stages * parts).view(stages, parts))


def grads_of(pipe):
    """Gradients of all blocks, by the names of their states."""
    mine = {}
    for name, p in pipe.blocks.named_parameters():
        block, _, rest = name.partition(".")
        mine[f"{pipe.first + int(block)}.{rest}"] = p.grad
    return {name: grad for one in pipe.stages.gather(mine) for name, grad in one.items()}


def optimizer_of(parameters, norm):
    """Not Adam where a bias stands before a batch normalisation: it would make steps of the rounding of zeros."""
    return torch.optim.SGD(parameters, 0.1) if norm == "batch" else torch.optim.Adam(parameters, 0.01)


def trained(group, stages, parts, folder, kind, chunks, epochs, norm="layer", frozen=0, modes=(),
            labels=None, constant=False, **settings):  # fmt: skip
    """Losses, states and outputs of a pipeline whose first blocks may be frozen, and the gradients of the last step.

    The loss of a chunk without labels may be a constant.
    """
    mesh = mesh_for(stages, parts)
    if mesh is None:
        return None
    data, blocks = pyg_sar.load(folder, group=mesh.get_group("graph"), **dict(modes)), blocks_of(pyg_sar.nn, kind, norm)
    blocks[:frozen].requires_grad_(False)
    pipe = pyg_sar.Pipeline(blocks, data.edge_index, mesh, chunks, **settings)
    optimizer = optimizer_of(pipe.parameters(), norm)
    x, total, losses = start(data.x, kind), labels or int(inputs().train_mask.sum()), []

    def loss_fn(out, rows):
        mask = data.train_mask[rows]
        return torch.zeros(()) if constant and not mask.any() else loss_of(out, data.y[rows], mask, total)

    for _ in range(epochs):
        optimizer.zero_grad()
        loss = pipe.step(x, loss_fn, *edges_of(data, kind))
        optimizer.step()
        losses.append(loss.item())
    out, grads = pipe.eval()(x, *edges_of(data, kind)), grads_of(pipe)
    chunk_of = None if pipe.history is None else pipe.history.chunk_of[: data.num_nodes]
    return losses, pipe.state_dict(), out, data.n_id, chunk_of, pipe.stale, grads


def exact(kind, epochs, norm="layer", data=None):
    data, blocks = inputs() if data is None else data, blocks_of(torch_geometric.nn, kind, norm)
    optimizer, losses = optimizer_of(blocks.parameters(), norm), []
    for _ in range(epochs):
        optimizer.zero_grad()
        x = start(data.x, kind)
        for block in blocks:
            x = block(x, data.edge_index, *edges_of(data, kind))
        loss = loss_of(x, data.y, data.train_mask, int(data.train_mask.sum()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    blocks.eval()
    x = start(data.x, kind)
    for block in blocks:
        x = block(x, data.edge_index, *edges_of(data, kind))
    return losses, blocks, x.detach()


@pytest.fixture(scope="module")
def stages_pool():
    """Four workers, of which all take part in the making of groups, and some in a pipeline."""
    pool = Pool(4)
    yield lambda fn, *args: [found for found in pool.run(4, fn, *args, timeout=120) if found is not None]
    pool.close()


@pytest.fixture
def folders(tmp_path):
    made = {}
    for parts in (1, 2):
        made[parts] = str(tmp_path / str(parts))
        pyg_sar.partition(inputs(), parts, made[parts], method=torch.arange(NODES) * parts // NODES)
    return made


def compare(found, losses, blocks):
    """Losses, states and the gradients of the last step; a state is one that plain PyG loads."""
    grads = {name: p.grad for name, p in blocks.named_parameters()}
    for one in found:
        close(torch.tensor(one[0], dtype=torch.float64), torch.tensor(losses, dtype=torch.float64))
        for name, t in blocks.state_dict().items():
            close(one[1][name], t)
        assert one[6].keys() == grads.keys()
        for name, grad in grads.items():
            close(one[6][name], grad)
        blocks.load_state_dict(one[1], strict=True)


def compare_outputs(found, out):
    assert any(one[2] is not None for one in found)
    for one in found:
        if one[2] is not None:
            close(one[2], out[one[3]])


MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
# Chunks, alpha, and whether they are shuffled
SETTINGS = list(itertools.product((2, 5, 8), (1, 3), (True, False)))
MODES = [{"remat": False}, {"prefetch": 2}, {"one_shot": True}]


@pytest.mark.parametrize(("kind", "mesh"), some(KINDS, MESHES, every=4))
def test_one_chunk_is_exact(stages_pool, folders, kind, mesh):
    stages, parts = mesh
    losses, blocks, out = exact(kind, 5)
    found = stages_pool(trained, stages, parts, folders[parts], kind, 1, 5)
    compare_outputs(found, out)
    compare(found, losses, blocks)


def clipped(group, stages, parts, folder):
    mesh = mesh_for(stages, parts)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "gcn"), data.edge_index, mesh)
    total = int(inputs().train_mask.sum())
    pipe.step(data.x, lambda out, rows: loss_of(out, data.y[rows], data.train_mask[rows], total))
    return pipe.clip_grad_norm_(0.01), grads_of(pipe)


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_are_clipped_by_the_norm_of_all_stages(stages_pool, folders, mesh):
    data, blocks = inputs(), blocks_of(torch_geometric.nn, "gcn")
    x = data.x
    for block in blocks:
        x = block(x, data.edge_index)
    loss_of(x, data.y, data.train_mask, int(data.train_mask.sum())).backward()
    expected = torch.nn.utils.clip_grad_norm_(blocks.parameters(), 0.01)
    assert expected > 0.01
    for norm, grads in stages_pool(clipped, *mesh, folders[mesh[1]]):
        close(norm, expected)
        for name, p in blocks.named_parameters():
            close(grads[name], p.grad)


@pytest.mark.parametrize(("kind", "mesh"), some(KINDS, MESHES[1:], every=8))
def test_batch_norm_with_one_chunk(stages_pool, folders, kind, mesh):
    stages, parts = mesh
    losses, blocks, out = exact(kind, 5, "batch")
    found = stages_pool(trained, stages, parts, folders[parts], kind, 1, 5, "batch")
    compare_outputs(found, out)
    compare(found, losses, blocks)


@pytest.mark.parametrize("modes", MODES)
def test_modes_with_one_chunk(stages_pool, folders, modes):
    losses, blocks, _ = exact("gat", 3)
    compare(stages_pool(trained, 2, 2, folders[2], "gat", 1, 3, "layer", 0, tuple(modes.items())), losses, blocks)


# What chunks compute, in plain PyG: sources of stale edges are moved behind the fresh rows.


def normalised_sum(fresh, old, edge_index, stale):
    edges, weight = gcn_norm(edge_index, None, NODES, dtype=fresh.dtype)
    moved = torch.cat([stale, stale.new_zeros(edges.size(1) - stale.numel())])  # loops come last
    rows = torch.cat([fresh, old])[edges[0] + NODES * moved] * weight.unsqueeze(1)
    return torch.zeros_like(fresh).index_add(0, edges[1], rows)


def gcn(conv, fresh, old, edge_index, stale):
    return conv.lin(normalised_sum(fresh, old, edge_index, stale)) + conv.bias


def gcn2(conv, fresh, old, edge_index, stale):
    (fresh, first), old, eye = fresh, old[0], torch.eye(WIDTH, dtype=torch.float64)
    out, first = 0.8 * normalised_sum(fresh, old, edge_index, stale), 0.2 * first
    one = (1 - conv.beta) * eye + conv.beta * conv.weight1
    if conv.weight2 is None:
        return (out + first) @ one
    return out @ one + first @ ((1 - conv.beta) * eye + conv.beta * conv.weight2)


def any_conv(conv, fresh, old, edge_index, stale, *edges):
    moved = torch.stack([edge_index[0] + NODES * stale, edge_index[1]])
    return conv((torch.cat([fresh, old]), fresh), moved, *edges)


def projected(conv, x):
    """What attention reads of a source: its row times the weights, and its share of the score."""
    z = conv.lin(x).view(NODES, conv.heads, -1)
    return z, (z * conv.att_src).sum(-1)


def gat(conv, fresh, old, edge_index, stale):
    (z, score), loops = projected(conv, fresh), torch.arange(NODES)
    source = torch.cat([edge_index[0] + NODES * stale, loops])
    row = torch.cat([edge_index[1], loops])
    score = torch.cat([score, old[1]])[source] + (z * conv.att_dst).sum(-1)[row]
    weight = softmax(F.leaky_relu(score, 0.2), row, num_nodes=NODES)
    messages = torch.cat([z, old[0]])[source] * weight.unsqueeze(-1)
    return torch.zeros_like(z).index_add(0, row, messages).mean(1) + conv.bias


def read_rows(kind, conv, x):
    """What a site keeps of the rows that a block is called with."""
    rows = projected(conv, x) if kind == "gat" else x
    return tuple(t.detach() for t in rows) if isinstance(rows, tuple) else rows.detach()


def reference(kind, chunk_of, chunks, alpha, shuffle, epochs, data=None, frozen=0):
    """Train as `Pipeline` says that it does."""
    data, blocks = data or inputs(), blocks_of(torch_geometric.nn, kind)
    blocks[:frozen].requires_grad_(False)
    if kind in ("gcn", "gcn2", "gat"):  # which add loops of their own
        data.edge_index = torch_geometric.utils.remove_self_loops(data.edge_index)[0]
    aggregate = {"gcn": gcn, "gcn2": gcn2, "gat": gat}.get(kind, any_conv)
    optimizer, total = torch.optim.Adam(blocks.parameters(), lr=0.01), int(data.train_mask.sum())
    losses, history = [], None
    for epoch in range(epochs + 1):
        order = list(range(chunks))
        if shuffle:
            random.Random(f"0 {epoch}").shuffle(order)
        place = torch.zeros(chunks, dtype=torch.long)
        if epoch > 0:
            place[torch.tensor(order)] = torch.arange(chunks)
        stale = place[chunk_of[data.edge_index[0]]] > place[chunk_of[data.edge_index[1]]]
        x, seen = start(data.x, kind), []
        for k, block in enumerate(blocks):
            seen.append(read_rows(kind, block.conv, x))
            old = seen[k] if history is None else history[k]
            edges = data.edge_index, stale, *edges_of(data, kind)
            out = sum(aggregate(conv, x, old, *edges) for conv in (block.conv, block.other) if conv is not None)
            x = block.finish(x, out)
        if epoch % alpha == 0:
            history = seen
        if epoch > 0:
            optimizer.zero_grad()
            loss = loss_of(x, data.y, data.train_mask, total)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, blocks


def as_the_reference(found, kind, chunks, alpha, shuffle, epochs, **more):
    chunk_of = torch.empty(NODES, dtype=torch.long)
    for one in found:
        chunk_of[one[3]] = one[4]
    compare(found, *reference(kind, chunk_of, chunks, alpha, shuffle, epochs, **more))


@pytest.mark.parametrize(("case",), some(list(itertools.product(KINDS, SETTINGS, MESHES)), every=53))
def test_chunks_do_what_they_say(stages_pool, folders, case):
    kind, (chunks, alpha, shuffle), (stages, parts) = case
    settings = {"history": alpha, "shuffle": shuffle}
    epochs = 2 * alpha + 2
    found = stages_pool(with_settings, stages, parts, folders[parts], kind, chunks, epochs, settings)
    as_the_reference(found, kind, chunks, alpha, shuffle, epochs)
    if kind in ("sage", "gen", "two"):  # others have loops besides
        assert sum(one[5] for one in found[:parts]) > 0


@pytest.mark.grid
def test_four_stages_of_two(folders):
    """Exact with one chunk, and as the reference with five."""
    pool = Pool(8)
    for kind in KINDS:
        losses, blocks, _ = exact(kind, 5)
        compare(pool.run(8, trained, 4, 2, folders[2], kind, 1, 5, timeout=120), losses, blocks)
        settings = {"history": 2, "shuffle": True}
        found = pool.run(8, with_settings, 4, 2, folders[2], kind, 8, 6, settings, timeout=120)
        as_the_reference(found, kind, 8, 2, True, 6)
    pool.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_worker_without_nodes(stages_pool, tmp_path, stages):
    pyg_sar.partition(inputs(), 2, tmp_path / "parts", method=torch.zeros(NODES, dtype=torch.long))
    found = stages_pool(with_settings, stages, 2, str(tmp_path / "parts"), "sage", 5, 6, {"history": 2})
    as_the_reference(found, "sage", 5, 2, True, 6)


@pytest.mark.parametrize("stages", [2, 4])
def test_frozen_first_blocks(stages_pool, folders, stages):
    """Of which the first stage has nothing to learn; its neighbour sends zeros."""
    settings = {"history": 2, "frozen": BLOCKS // stages}
    found = stages_pool(with_settings, stages, 1, folders[1], "sage", 8, 6, settings)
    as_the_reference(found, "sage", 8, 2, True, 6, frozen=BLOCKS // stages)


def test_rows_that_are_carried_through_stages(stages_pool, folders):
    """GCNII's first rows have a gradient in each block, which stages add up in another order."""
    (expected,) = stages_pool(with_settings, 1, 1, folders[1], "gcn2", 8, 4, {"history": 2})
    for stages in (2, 4):
        for losses, state, *_ in stages_pool(with_settings, stages, 1, folders[1], "gcn2", 8, 4, {"history": 2}):
            close(torch.tensor(losses), torch.tensor(expected[0]), 1e-13)
            for name, t in expected[1].items():
                close(state[name], t, 1e-13)


def with_settings(group, stages, parts, folder, kind, chunks, epochs, settings):
    return trained(group, stages, parts, folder, kind, chunks, epochs, **settings)


# One process, one stage


class Rows(torch.nn.Module):
    """A block of two layers side by side, with dropout of rows, messages and attention."""

    def __init__(self, k):
        super().__init__()
        self.one = pyg_sar.nn.GATConv(WIDTH, WIDTH // 2, 2, dropout=0.3)
        self.two = pyg_sar.nn.SAGEConv(WIDTH, WIDTH, aggr="max")
        self.norm, self.last = torch.nn.LayerNorm(WIDTH), k == BLOCKS - 1

    def forward(self, x, edge_index):
        x = F.dropout(x, 0.2, self.training)
        return self.norm(self.one(x, edge_index) + self.two(x, edge_index)).relu() + x


def with_dropout(group, stages, folder, ends=(), chunks=5, **settings):
    """Losses and states; after the epochs ``ends`` another pipeline goes on."""
    mesh = mesh_for(stages, 1)
    if mesh is None:
        return None
    data, losses = pyg_sar.load(folder, group=mesh.get_group("graph")), []

    def make():
        torch.manual_seed(0)
        blocks = [Rows(k).double() for k in range(BLOCKS)]
        pipe = pyg_sar.Pipeline(blocks, data.edge_index, mesh, chunks, history=3, **settings)
        return pipe, torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.5)

    pipe, optimizer = make()
    with pipe.record() as seen:
        for epoch in range(1, 9):
            optimizer.zero_grad()
            losses.append(
                pipe.step(data.x, lambda out, rows: loss_of(out, data.y[rows], data.train_mask[rows], 20)).item()
            )
            optimizer.step()
            if epoch in ends:
                torch.manual_seed(epoch)
                where = {"path": f"{folder}-saves", "data": data, "group": mesh.get_group("stage")}
                pyg_sar.save_checkpoint(pipe=pipe, optimizer=optimizer, epoch=epoch, **where)
                pipe, optimizer = make()
                assert pyg_sar.load_checkpoint(pipe=pipe, optimizer=optimizer, **where)["epoch"] == epoch
    return losses, pipe.state_dict(), seen, pipe.stale


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.grid), 5])
def test_the_same_bits_for_any_number_of_stages_and_after_a_resume(stages_pool, folders, chunks):
    """With dropout, shuffled; within and at a refresh."""
    (expected,) = stages_pool(with_dropout, 1, folders[1], (), chunks)
    for stages, ends in ((2, ()), (4, ()), (1, (2, 3)), (2, (3, 5))):
        for losses, state, *_ in stages_pool(with_dropout, stages, folders[1], ends, chunks):
            assert losses == expected[0], (stages, ends)
            assert all(torch.equal(state[name], t) for name, t in expected[1].items())


def test_checkpoints_that_do_not_fit(tmp_path):
    data = inputs()
    pipe = alone(data.edge_index, 4)
    with pytest.raises(ValueError, match="and not both"):
        pyg_sar.save_checkpoint(tmp_path / "one", pipe=pipe, model=pipe.blocks)
    pyg_sar.save_checkpoint(tmp_path / "one", pipe=pipe)
    with pytest.raises(
        RuntimeError,
        match=r"of \[4\] blocks, 1 workers a stage, 4 chunks: stage 0 with 40 nodes and .*, and this one.* 5 chunks",
    ):
        pyg_sar.load_checkpoint(tmp_path / "one", pipe=alone(data.edge_index, 5))
    with pytest.raises(ValueError, match=r"with 40 nodes and 164 edges \(checksum .* with 39 nodes"):
        other = data.edge_index[:, (data.edge_index < NODES - 1).all(0)]
        blocks = blocks_of(pyg_sar.nn, "sage")
        pyg_sar.Pipeline(blocks, pyg_sar.shard(other, NODES - 1), None, 4).restore(pipe.checkpoint())
    with pytest.raises(RuntimeError, match="it holds no model"):
        pyg_sar.load_checkpoint(tmp_path / "one", model=pipe.blocks)
    with pytest.raises(RuntimeError, match="it holds pipeline, blocks of a pipeline's pipeline, blocks, optimizer"):
        optimizer = torch.optim.Adam(pipe.parameters())
        pyg_sar.load_checkpoint(tmp_path / "one", pipe=pipe, optimizer=optimizer)
    other = alone(data.edge_index, 4)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with pytest.raises(RuntimeError, match="it holds no scheduler"):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        pyg_sar.load_checkpoint(tmp_path / "one", pipe=other, scheduler=scheduler)
    pyg_sar.save_checkpoint(tmp_path / "two", pipe=pipe, optimizer=optimizer)
    first, *rest = other.parameters()
    with pytest.raises(RuntimeError, match="its optimizer has groups of"):
        groups = [{"params": [first]}, {"params": rest}]
        pyg_sar.load_checkpoint(tmp_path / "two", pipe=other, optimizer=torch.optim.Adam(groups))
    assert all(torch.equal(before[name], t) for name, t in other.state_dict().items())  # nothing was loaded


def test_bytes_between_stages(stages_pool, folders):
    """N rows to one other worker for each boundary and pass; and twice that for the gradients of two tensors."""
    for stages in (2, 4):
        for chunks in (1, 5):
            found = stages_pool(with_dropout, stages, folders[1], (), chunks)
            sent = sum(one[2].between.forward_sent + one[2].between.backward_sent for one in found)
            received = sum(one[2].between.forward_received + one[2].between.backward_received for one in found)
            passes = 8 + 8 + (chunks > 1)  # eight epochs, and the pass that fills the history
            assert sent == received == passes * (stages - 1) * NODES * WIDTH * 8


def counted(group, stages, parts, folder, chunks):
    """Bytes of two steps, the rows that this worker reads of others, and the bytes of its parameters."""
    mesh = mesh_for(stages, parts)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"), remat=False)
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "gen"), data.edge_index, mesh, chunks)
    pipe.step(data.x, lambda out, rows: out.sum())
    with pipe.record() as seen:
        for _ in range(2):
            pipe.blocks.zero_grad()
            pipe.step(data.x, lambda out, rows: out.sum())
    parameters = sum(p.nbytes for p in pipe.parameters() if p.grad is not None)
    return seen, data.edge_index.graph.exchange.routes.num_halo, parameters, pipe.stages.first


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.grid), 5])
def test_bytes_within_stages_and_of_parameters(stages_pool, folders, chunks):
    """A boundary row once forward and its gradient once back, in every site but the first: features have none."""
    for stages in (1, 2):
        for seen, halo, parameters, first in stages_pool(counted, stages, 2, folders[2], chunks):
            sites = BLOCKS // stages
            row = halo * WIDTH * 8
            assert sum(t.forward_received for t in seen.within) == 2 * sites * row
            sent = sum(t.backward_sent for t in seen.within)
            assert sent == 2 * (sites - first) * row
            assert seen.parameters == 2 * parameters
            assert len(seen.computed) == 2 * 2 * chunks and all(0 < seconds < 60 for *_, seconds in seen.computed)


def cached(group, folder):
    """Bytes of rows that come in the second step, and rows that this worker reads of the other one."""
    mesh = mesh_for(1, 2)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"), remat=False)
    data.edge_index.cache_features(data.x)
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), data.edge_index, mesh)
    pipe.step(data.x, lambda out, rows: out.sum())
    pipe.blocks.zero_grad()
    with pipe.record() as seen:
        pipe.step(data.x, lambda out, rows: out.sum())
    return sum(t.forward_received for t in seen.within), data.edge_index.graph.exchange.routes.num_halo


def test_features_that_never_change_come_once(stages_pool, folders):
    for received, halo in stages_pool(cached, folders[2]):
        assert received == (BLOCKS - 1) * halo * WIDTH * 8


class Ring(torch.nn.Module):
    """A layer on one of several equal rings, as torch's own schedule calls it, or on all of them."""

    def __init__(self, k):
        super().__init__()
        self.conv, self.last = pyg_sar.nn.SAGEConv(WIDTH, WIDTH), k == BLOCKS - 1

    def forward(self, x, edge_index=None):
        if edge_index is None:
            row = torch.arange(len(x))
            edge_index = torch.stack([(row + 1) % len(x), row])
        x = self.conv(x, edge_index)
        return x if self.last else x.tanh()


def rings():
    """Four rings of ten nodes."""
    row = torch.arange(NODES)
    return torch.stack([row // 10 * 10 + (row + 1) % 10, row])


def by_torch(group, stages):
    """Gradients by `torch.distributed.pipelining`."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = mesh_for(stages, 1)
    if mesh is None:
        return None
    rank, each = mesh.get_local_rank("stage"), BLOCKS // stages
    torch.manual_seed(0)
    blocks = [Ring(k).double() for k in range(BLOCKS)]
    module = torch.nn.Sequential(*blocks[rank * each : (rank + 1) * each])
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = ScheduleGPipe(
        stage, 4, loss_fn=lambda out, y: F.cross_entropy(out, y, reduction="sum"), scale_grads=False
    )
    data = inputs()
    schedule.step(*([data.x] if rank == 0 else []), **({"target": data.y} if rank == stages - 1 else {}))
    theirs = {name: p.grad for name, p in module.named_parameters()}
    edge_index = pyg_sar.shard(rings(), NODES)
    torch.manual_seed(0)
    ours = pyg_sar.Pipeline([Ring(k).double() for k in range(BLOCKS)], edge_index, mesh, 4)
    ours.step(data.x, lambda out, rows: F.cross_entropy(out, data.y[rows], reduction="sum"))
    assert ours.stale == 0
    for name, p in ours.blocks.named_parameters():
        close(p.grad, theirs[name])
    return len(theirs)


@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_of_the_schedule_of_torch(stages_pool, stages):
    """Chunks that are graphs of their own, of one shape: what torch's pipeline can do."""
    assert all(count > 0 for count in stages_pool(by_torch, stages))


def with_nan(group, folder):
    """Losses of both stages if a feature is no number."""
    mesh = mesh_for(2, 1)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    data.x[0] = torch.nan
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), data.edge_index, mesh, 4)
    losses = []
    for _ in range(2):
        pipe.blocks.zero_grad()
        losses.append(pipe.step(data.x, lambda out, rows: out.sum()).item())
    return losses


def test_numbers_that_are_none_reach_all_stages(stages_pool, folders):
    found = stages_pool(with_nan, folders[1])
    assert len(found) == 2 and all(loss != loss for losses in found for loss in losses)


def test_rows_that_travel_in_bfloat16(stages_pool, folders):
    exact, *_ = stages_pool(with_dropout, 2, folders[1])
    rounded, *_ = stages_pool(with_narrow_rows, folders[1])
    assert rounded[2].between.forward_sent * 4 == exact[2].between.forward_sent
    assert 0 < max(abs(a - b) for a, b in zip(exact[0], rounded[0], strict=True)) < 0.05 * max(exact[0])


def with_narrow_rows(group, folder):
    return with_dropout(group, 2, folder, comm_dtype=torch.bfloat16)


@pytest.mark.parametrize("how", ["disjoint", "acyclic"])
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_exact_where_nothing_is_stale(how, chunks):
    data = inputs()
    row = torch.arange(NODES).repeat(2)
    if how == "disjoint":  # of equal sizes, as chunks are
        source = row // 5 * 5 + (row + torch.arange(2).repeat_interleave(NODES) * 2 + 1) % 5
    else:
        source = (torch.rand(2 * NODES) * (row + 1)).long()
    data.edge_index = torch.stack([source, row])
    pipe = alone(data.edge_index, chunks, shuffle=how == "disjoint")
    assert [it.span.stop for it in pipe.history.chunks] == [NODES // chunks * (k + 1) for k in range(chunks)]
    expected, *_ = exact("sage", 4, data=data)
    close(torch.tensor(steps(pipe, data)), torch.tensor(expected))
    assert pipe.stale == 0


UNLIKE = ["gcn", "sage", "sage max", "gat", "gatv2", "gin"]


def of_widths(nn, kind):
    """Layers that widen, and layers that narrow; the first one reads features without gradients."""
    torch.manual_seed(0)
    make = {
        "gcn": nn.GCNConv,
        "sage": nn.SAGEConv,
        "sage max": lambda a, b: nn.SAGEConv(a, b, aggr="max"),
        "gat": lambda a, b: nn.GATConv(a, b, 2, concat=False),
        "gatv2": lambda a, b: nn.GATv2Conv(a, b, 2, concat=False),
        "gin": lambda a, b: nn.GINConv(torch.nn.Linear(a, b)),
    }[kind]
    return torch.nn.ModuleList(make(a, b) for a, b in itertools.pairwise([WIDTH, 16, 17, 5, 3])).double()


@pytest.mark.parametrize("kind", UNLIKE)
def test_layers_of_other_widths(kind):
    """On an acyclic graph in order, where all is exact."""
    data, row = inputs(), torch.arange(NODES).repeat(2)
    data.edge_index = torch.stack([(torch.rand(2 * NODES) * row).long(), row])[:, 2:]
    data.edge_index = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    pipe, blocks = alone(data.edge_index, 4, blocks=of_widths(pyg_sar.nn, kind)), of_widths(torch_geometric.nn, kind)
    x = data.x
    for block in blocks:
        x = block(x, data.edge_index)
    x.square().sum().backward()
    pipe.step(data.x, lambda out, rows: out.square().sum())
    assert pipe.stale == 0
    found = dict(pipe.blocks.named_parameters())
    for name, p in blocks.named_parameters():
        close(found[name].grad, p.grad)


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_are_those_of_the_frozen_history(turned, monkeypatch):
    """Finite differences; with the backward pass in the order of the forward pass they are not."""
    data = inputs()
    pipe = alone(data.edge_index, 4, shuffle=True, history=1)
    steps(pipe, data, 2)
    state = pipe.checkpoint()
    total = int(data.train_mask.sum())

    def loss():
        pipe.restore(state)
        return pipe.step(data.x, lambda out, r: loss_of(out, data.y[r], data.train_mask[r], total)).item()

    if turned:
        monkeypatch.setattr("pyg_sar.pipeline.last_first", lambda count: range(count))
    for p in pipe.parameters():
        p.grad = None
    loss()
    grads = [(p, p.grad.clone()) for p in pipe.parameters() if p.grad is not None]
    differences = []
    for p, grad in grads:
        flat = p.data.view(-1)
        for k in (0, flat.numel() // 2):
            kept, step = flat[k].item(), 1e-5
            flat[k] = kept + step
            above = loss()
            flat[k] = kept - step
            below = loss()
            flat[k] = kept
            differences.append(abs((above - below) / (2 * step) - grad.view(-1)[k].item()))
    assert (max(differences) < 1e-6) != turned
    assert pipe.stale > 0.2


@pytest.mark.parametrize(
    ("size", "constant"), some([(3, (1, 2)), (3, (2, 2)), (NODES, (1, 1))], [False, True], every=2)
)
def test_chunks_without_rows_edges_or_labels(stages_pool, tmp_path, size, constant):
    data, (chunks, (stages, parts)) = inputs(), size
    data.edge_index = data.edge_index[:, data.edge_index[1] > 30]
    data.edge_weight, data.train_mask = data.edge_weight[: data.num_edges], torch.arange(NODES) < 2
    pyg_sar.partition(data, parts, tmp_path / "parts", method=torch.arange(NODES) // 39 % parts)
    found = stages_pool(trained_on, stages, parts, str(tmp_path / "parts"), chunks, constant)
    as_the_reference(found, "sage", chunks, 10, True, 4, data=data)


def trained_on(group, stages, parts, folder, chunks, constant):
    """On two labels; of two parts one has a single node."""
    return trained(group, stages, parts, folder, "sage", chunks, 4, labels=2, constant=constant)


def test_a_loss_that_is_not_made_of_the_rows_of_a_chunk():
    """Such as one that is the sum of all weights' squares: others have read the rows."""
    data, found = inputs(), []
    for made_of_rows in (True, False):
        pipe = alone(data.edge_index, 4)

        def loss(out, rows, pipe=pipe, made_of_rows=made_of_rows):
            share = sum(p.square().sum() for p in pipe.parameters()) / 4 + (0 * out.sum() if made_of_rows else 0)
            return share + (out.square().sum() if rows.stop == NODES else 0)

        pipe.step(data.x, loss)
        found.append([p.grad for p in pipe.parameters()])
    for a, b in zip(*found, strict=True):
        close(a, b)


class Two(torch.nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_sar.nn.SAGEConv(WIDTH, n) for n in (3, 2))

    def forward(self, x, edge_index):
        return tuple(conv(x, edge_index) for conv in self.convs)


def test_a_loss_that_is_made_of_one_of_two_outputs():
    """Of the first in some chunks, and of the second in others; edges go from earlier chunks to later ones."""
    data, found = inputs(), []
    edge_index = torch.stack([data.edge_index.min(0).values, data.edge_index.max(0).values])
    for always in (True, False):
        torch.manual_seed(0)
        blocks = torch.nn.ModuleList([*blocks_of(pyg_sar.nn, "sage")[:2], Two()]).double()
        pipe = alone(edge_index, 4, blocks=blocks)

        def loss(out, rows, always=always):
            early = torch.arange(rows.start, rows.stop) < NODES // 2
            parts = [t[which].square().sum() for t, which in zip(out, (early, ~early), strict=True)
                     if always or which.any()]  # fmt: skip
            return sum(parts)

        pipe.step(data.x, loss)
        assert pipe.stale == 0
        found.append([p.grad for p in pipe.parameters()])
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_a_step_that_was_interrupted_leaves_no_gradients():
    data, found = inputs(), []
    for interrupted in (False, True):
        pipe = alone(data.edge_index, 4)
        steps(pipe, data, 1)
        if interrupted:
            hook = pipe.blocks[0].conv.lin_r.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                steps(pipe, data, 1)
            hook.remove()
        pipe.blocks.zero_grad()
        pipe.step(data.x, lambda out, rows: out.square().sum())
        found.append([p.grad for p in pipe.parameters()])
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_rows_of_another_type_between_stages(monkeypatch):
    pipe = alone(inputs().edge_index, 1)
    monkeypatch.setattr(pipe.stages, "size", 2)
    pipe.shapes[0] = [([WIDTH], torch.bfloat16)]
    with pytest.raises(ValueError, match=r"rows of \[\(\[6\], torch.float32\)\], and of \[\(\[6\], torch.bfloat16\)\]"):
        pipe.send_on((torch.zeros(NODES, WIDTH),), "all nodes")


class InPlace(torch.nn.Module):
    """A layer on rows that it changes."""

    def __init__(self):
        super().__init__()
        self.conv = pyg_sar.nn.SAGEConv(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.conv(x.relu_() + x, edge_index)


def in_place(group, stages, folder):
    """Gradients of the features and of a layer that changes what came of the stage before."""
    mesh = mesh_for(stages, 1)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    torch.manual_seed(0)
    pipe = pyg_sar.Pipeline([pyg_sar.nn.SAGEConv(WIDTH, WIDTH).double(), InPlace().double()], data.edge_index, mesh)
    pipe.step(data.x, lambda out, rows: out.square().sum())
    return grads_of(pipe)


def test_blocks_that_change_what_came(stages_pool, folders):
    (one,) = stages_pool(in_place, 1, folders[1])
    for two in stages_pool(in_place, 2, folders[1]):
        assert two.keys() == one.keys()
        for name, grad in one.items():
            close(two[name], grad)


def test_chunks_of_data_that_was_loaded_one_shot(stages_pool, folders):
    settings = {"history": 2, "modes": {"one_shot": True}}
    found = stages_pool(with_settings, 2, 2, folders[2], "sage", 5, 6, settings)
    as_the_reference(found, "sage", 5, 2, True, 6)


def test_gradients_of_features():
    data = inputs()
    blocks = blocks_of(pyg_sar.nn, "sage")
    blocks[0].requires_grad_(False)
    pipe = alone(data.edge_index, 3, blocks=blocks)
    data.x.requires_grad_()
    steps(pipe, data, 1)
    assert all(p.grad is None for p in blocks[0].parameters()) and data.x.grad.abs().sum() > 0
    one = alone(data.edge_index, 1, blocks=blocks_of(pyg_sar.nn, "sage"))
    data.x.grad = None
    steps(one, data, 1)
    found, data.x.grad = data.x.grad, None
    x = data.x
    for block in blocks_of(torch_geometric.nn, "sage"):
        x = block(x, data.edge_index)
    loss_of(x, data.y, data.train_mask, int(data.train_mask.sum())).backward()
    close(found, data.x.grad)


MODELS = {
    "gcn": torch_geometric.nn.GCN, "sage": torch_geometric.nn.GraphSAGE, "gin": torch_geometric.nn.GIN,
    "gat": torch_geometric.nn.GAT,
}  # fmt: skip


@pytest.mark.parametrize("act_first", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_of_models_of_pyg(kind, act_first):
    data = inputs()
    torch.manual_seed(0)
    model = MODELS[kind](WIDTH, WIDTH, 3, CLASSES, norm="LayerNorm", norm_kwargs={"mode": "node"}, act_first=act_first)
    model = model.double()
    expected = model(data.x, data.edge_index)
    blocks = pyg_sar.nn.blocks(pyg_sar.nn.convert(model))
    close(alone(data.edge_index, 1, blocks=blocks)(data.x), expected.detach())
    assert {id(p) for p in blocks.parameters()} == {id(p) for p in model.parameters()}
    steps(alone(data.edge_index, 3, blocks=blocks), data, 1)
    with pytest.raises(ValueError, match="without 'jk'"):
        pyg_sar.nn.blocks(MODELS[kind](WIDTH, WIDTH, 3, CLASSES, jk="cat"))
    with pytest.raises(TypeError, match="got Linear"):
        pyg_sar.nn.blocks(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["gcn", "sage", "gcn2", "resgcn"])
def test_the_model_of_the_example(kind):
    """In plain PyG its forward is the loop over the blocks of the pipeline."""
    path = Path(__file__).parents[1] / "examples" / "models.py"
    spec = importlib.util.spec_from_file_location("models", path)
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    data, made = inputs(), []
    for nn in (torch_geometric.nn, pyg_sar.nn):
        torch.manual_seed(0)
        made.append(models.DeepGNN(nn, kind, WIDTH, 8, CLASSES, 4).double())
    with torch.no_grad():
        expected = made[0].eval()(data.x, data.edge_index)
    pipe = alone(data.edge_index, 1, blocks=pyg_sar.nn.convert(made[1]).blocks)
    close(pipe.eval()(data.x), expected)


def residuals():
    """Blocks whose ``forward`` takes any arguments."""
    torch.manual_seed(0)
    made = [
        DeepGCNLayer(GENConv(WIDTH, WIDTH, learn_t=True, aggr="softmax", norm="layer"), torch.nn.LayerNorm(WIDTH))
        for _ in range(3)
    ]
    return torch.nn.ModuleList(made).double()


def test_deep_gcn_layers():
    data, expected = inputs(), residuals()
    pipe = alone(data.edge_index, 1, blocks=pyg_sar.nn.convert(residuals()))
    x = data.x
    for block in expected:
        x = block(x, data.edge_index)
    close(pipe(data.x), x.detach())
    steps(alone(data.edge_index, 3, blocks=pyg_sar.nn.convert(residuals())), data, 2)


def failing(group, folder, where, how):
    """The second stage raises or is killed in some phase."""
    mesh = mesh_for(2, 1)
    if mesh is None:
        return None
    rank, calls = mesh.get_local_rank("stage"), []
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), data.edge_index, mesh, 4)

    turn = {"first pass": 1, "evaluation": 1}.get(where, 3)

    def fail(*_):
        calls.append(0)
        if len(calls) == turn and rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom")

    if where in ("forward", "first pass"):
        pipe.blocks[0].register_forward_pre_hook(fail)
    elif where == "backward":
        next(pipe.blocks[0].conv.parameters()).register_hook(fail)
    for _ in range(2):
        pipe.step(data.x, lambda out, rows: out.sum())
        if where == "between steps":
            calls += [0, 0]
            fail()
    if where == "evaluation":
        pipe.blocks[0].register_forward_pre_hook(fail)
        pipe(data.x)
        pipe.tell(None)
    return None


LOST = {  # phase, and what the other stage waits for
    "first pass": r"rows of (all nodes|chunk \d), stage 0 to 1|waiting for what stage 1 tells",
    "forward": r"(rows|gradients) of chunk \d, stage \d to \d",
    "backward": r"gradients of chunk \d, stage \d to \d",
    "between steps": r"(rows|gradients) of chunk \d, stage \d to \d",
    "evaluation": r"rows of all nodes, stage 0 to 1|waiting for what stage 1 tells",
}


@pytest.mark.parametrize(("where", "how"), some(LOST, ["raises", "killed"], every=3))
def test_a_stage_that_fails(folders, where, how):
    pool = Pool(4)
    try:
        first, second, *_ = pool.outcomes(4, failing, folders[1], where, how)
    finally:
        pool._kill()
    assert second[:2] == (("died", -signal.SIGKILL) if how == "killed" else ("error", "ValueError")), second
    assert first[:2] == ("error", "LostWorkers") and first[3] < 20, first
    assert re.search(LOST[where], first[2]), first


def one_raises(group, folder):
    """One of two workers of the last stage raises in a block."""
    mesh = mesh_for(2, 2)
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), data.edge_index, mesh, 4)
    pipe.step(data.x, lambda out, rows: out.sum())
    if dist.get_rank() == 3:
        pipe.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    pipe.step(data.x, lambda out, rows: out.sum())


def test_one_worker_of_a_stage_that_raises(folders):
    pool = Pool(4)
    try:
        *others, last = pool.outcomes(4, one_raises, folders[2])
    finally:
        pool._kill()
    assert last[:2] == ("error", "ZeroDivisionError"), last
    assert all(one[:2] == ("error", "LostWorkers") and one[3] < 20 for one in others), others
    assert "rows of chunk" in others[2][2] or "layer" in others[2][2], others


def twice_in_one_chunk(group, folder):
    """One of two workers of a stage aggregates twice for its first chunk."""
    mesh = mesh_for(1, 2)
    if mesh is None:
        return None
    data, blocks = pyg_sar.load(folder, group=mesh.get_group("graph")), blocks_of(pyg_sar.nn, "sage")
    pipe, calls = pyg_sar.Pipeline(blocks, data.edge_index, mesh, 4), []

    def again(module, args, out):
        calls.append(0)
        return module.forward(*args) if len(calls) == 3 and dist.get_rank() == 1 else out

    blocks[0].conv.register_forward_hook(again)
    pipe.step(data.x, lambda out, rows: out.sum())


def test_a_layer_that_is_called_twice_in_one_chunk(folders):
    pool = Pool(4)
    try:
        found = pool.outcomes(4, twice_in_one_chunk, folders[2])[:2]
    finally:
        pool._kill()
    assert all(one[0] == "error" and one[3] < 20 for one in found), found
    assert any(re.search("This worker runs layer 'conv'|Block 0 aggregated 2 times", one[2]) for one in found), found


def differing(group, folders, what):
    """The second stage is started with something else than the first one."""
    mesh = mesh_for(2, 1)
    if mesh is None:
        return None
    odd = mesh.get_local_rank("stage") == 1
    blocks = blocks_of(pyg_sar.nn, "sage")
    settings = {"chunks": 4, "history": 10, "shuffle": True, "seed": 0, "comm_dtype": None}
    other = {"chunks": 5, "history": 1, "shuffle": False, "seed": 1, "comm_dtype": torch.bfloat16}
    if odd and what in other:
        settings[what] = other[what]
    if odd and what == "model":
        blocks[1].conv.project = True
    folder = folders["other" if odd and what == "folder" else 1]
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    pyg_sar.Pipeline(blocks, data.edge_index, mesh, **settings)


DIFFERS = {"chunks": "chunks=4.*chunks=5", "history": "history=1,? .*history=10|history=1", "shuffle": "shuffle=False",
           "seed": "seed=0, seed=1", "comm_dtype": "comm_dtype=None", "model": "SAGEConv .*'project': True",
           "folder": "the graph, which all stages load.*part 0 with 40 nodes"}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERS)
def test_stages_that_differ(stages_pool, folders, tmp_path, what):
    data = inputs()
    data.edge_index = data.edge_index.flip(0)
    folders["other"] = str(tmp_path / "other")
    pyg_sar.partition(data, 1, folders["other"], order="id")
    with pytest.raises(RankError, match=f"(?s)workers differ in .*({DIFFERS[what]})"):
        stages_pool(differing, folders, what)


def refused(group):
    """What two stages of two workers cannot be."""
    mesh, blocks = mesh_for(2, 2), blocks_of(pyg_sar.nn, "sage")
    whole = pyg_sar.shard(inputs().edge_index, NODES)
    with pytest.raises(ValueError, match=r"a graph of 2 parts.*\(got 1\). Load it with 'group=mesh"):
        pyg_sar.Pipeline(blocks, whole, mesh)
    mesh = mesh_for(4, 1)
    with pytest.raises(ValueError, match=r"Expected a block for each of the 4 stages \(got 3\). Take fewer stages"):
        pyg_sar.Pipeline(blocks[:3], whole, mesh)
    with pytest.warns(UserWarning, match="Of 4 stages most wait where there are only 7 chunks. Take 8 or more"):
        pyg_sar.Pipeline(blocks, whole, mesh, 7)
    blocks[3].conv.lin_l.weight = blocks[0].conv.lin_l.weight
    with pytest.raises(ValueError, match=r"Parameter 'conv.lin_l.weight' of block 3 is that of .* another stage"):
        pyg_sar.Pipeline(blocks, whole, mesh)
    return True


def test_stages_that_cannot_be(stages_pool):
    assert stages_pool(refused) == [True] * 4


def owned(group, folder):
    """How many blocks live on, and how many are this stage's."""
    mesh = mesh_for(2, 1)
    if mesh is None:
        return None
    data, blocks = pyg_sar.load(folder, group=mesh.get_group("graph")), list(blocks_of(pyg_sar.nn, "sage"))
    known = [weakref.ref(block) for block in blocks]
    pipe = pyg_sar.Pipeline(blocks, data.edge_index, mesh, 4)
    del blocks
    gc.collect()
    return sum(ref() is not None for ref in known), len(pipe.blocks)


def test_blocks_of_other_stages_are_freed(stages_pool, folders):
    assert stages_pool(owned, folders[1]) == [(2, 2), (2, 2)]


def killed_while_saving(group, folder, saves):
    """The second stage dies before its part of a checkpoint is on the disk."""
    mesh = mesh_for(2, 1)
    if mesh is None:
        return None
    data = pyg_sar.load(folder, group=mesh.get_group("graph"))
    pipe = pyg_sar.Pipeline(blocks_of(pyg_sar.nn, "sage"), data.edge_index, mesh, 4)
    pipe.step(data.x, lambda out, rows: out.sum())
    where = {"path": saves, "pipe": pipe, "group": mesh.get_group("stage")}
    pyg_sar.save_checkpoint(epoch=1, **where)
    if mesh.get_local_rank("stage") == 1:
        checkpoint.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
    pyg_sar.save_checkpoint(epoch=2, **where)


def test_killed_while_saving(folders, tmp_path):
    pool = Pool(4)
    try:
        first, second, *_ = pool.outcomes(4, killed_while_saving, folders[1], str(tmp_path / "saves"))
    finally:
        pool._kill()
    assert second[:2] == ("died", -signal.SIGKILL) and first[:2] == ("error", "LostWorkers"), (first, second)
    assert first[3] < 20
    assert [f.name for f in (tmp_path / "saves").iterdir() if not f.name.startswith(".")] == ["checkpoint-000001"]


def no_mesh(group):
    with pytest.raises(ValueError, match=r"a number of stages that divides the 4 workers \(got 3\)"):
        pyg_sar.stage_mesh(3)
    mesh = pyg_sar.stage_mesh(2)
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]] and mesh.mesh_dim_names == ("stage", "graph")
    here = dist.get_rank()
    assert (mesh.get_local_rank("stage"), mesh.get_local_rank("graph")) == (here // 2, here % 2)
    for name in ("stage", "graph"):
        timeout = mesh.get_group(name)._get_backend(torch.device("cpu")).options._timeout
        assert timeout == dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    return True


def test_mesh(stages_pool):
    assert stages_pool(no_mesh) == [True] * 4
    with pytest.raises(RuntimeError, match="call 'stage_mesh' within"):
        pyg_sar.stage_mesh(2)
