"""A correct training step passes; what users forget, or do as in one process, is named."""

import copy
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch_geometric import transforms
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar import ops

CLASSES, WIDTH = 5, 16


def graph(seed: int = 0, num_nodes: int = 300, **more: Any) -> Data:
    g = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(num_nodes, WIDTH, generator=g),
        y=torch.randint(CLASSES, (num_nodes,), generator=g),
        edge_index=torch.randint(num_nodes, (2, 2000), generator=g),
        edge_attr=torch.rand(2000, 3, generator=g),
        train_mask=torch.rand(num_nodes, generator=g) < 0.1,
        num_classes=CLASSES,
        **more,
    )


class Net(torch.nn.Module):
    """GAT, batch normalisation, dropout and GCN; what comes in between, and what labels are for, may be wrong."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x, norm: Any = None) -> None:
        super().__init__()
        self.conv1 = pyg_sar.nn.GATConv(WIDTH, 8, heads=2, edge_dim=3, dropout=0.5)
        self.norm = (norm or pyg_sar.nn.BatchNorm)(16)
        self.conv2 = pyg_sar.nn.GCNConv(16, CLASSES, cached=True)
        self.between = between

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.between(self.conv1(x, edge_index, edge_attr))
        x = F.dropout(self.norm(x).relu(), 0.5, self.training)
        return self.conv2(x, edge_index)


def losses(model: torch.nn.Module, data: Any, **options: Any) -> tuple[Tensor, Tensor]:
    model.train()
    out = model(data.x, data.edge_index, data.edge_attr)
    options = {"reduction": "none"} | options
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask], **options), out


def correct(model: torch.nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    values, out = losses(model, data)
    loss = pyg_sar.global_mean(values)
    loss.backward()
    pyg_sar.sum_gradients(model)
    return loss, out


def finish(loss: Tensor, model: torch.nn.Module) -> Tensor:
    loss.backward()
    pyg_sar.sum_gradients(model)
    return loss


def refused(step: Any, data: Any = None, model: torch.nn.Module | None = None) -> str:
    """Return what the check says."""
    with pytest.raises(pyg_sar.CheckError) as caught:
        pyg_sar.check(step, graph() if data is None else data, Net() if model is None else model)
    return str(caught.value)


def test_a_correct_step() -> None:
    model = Net()
    report = pyg_sar.check(correct, graph(), model)
    assert report.compared[:3] == ["loss", "output 1", "conv1.att_src"] and report.dtype == torch.float64
    assert report.seconds < 10


@pytest.mark.parametrize("leave", [Tensor.float, Tensor.half])
def test_a_step_that_rounds_to_another_type(leave: Callable[[Tensor], Tensor]) -> None:
    def step(model: torch.nn.Module, data: Any) -> Tensor:
        target = (data.y == 1).float()
        return finish(
            pyg_sar.global_mean(F.mse_loss(leave(model(data.x, data.edge_index)[:, 0]), target, reduction="none")),
            model,
        )

    def biased(model: torch.nn.Module, data: Any) -> Tensor:
        return finish(leave(model(data.x, data.edge_index)[:, 0]).float().pow(2).mean(), model)

    for seed in range(8):
        torch.manual_seed(seed)
        model = pyg_sar.nn.GATConv(WIDTH, 8)
        pyg_sar.check(step, graph(), model)
    assert "'loss'" in refused(biased, model=model)


def test_labels_that_spread_in_single_precision() -> None:
    """Its numbers of classes and degrees are those of all workers; rounding to float32 is no difference."""

    def step(model: torch.nn.Module, data: Any) -> Tensor:
        soft = pyg_sar.nn.LabelPropagation(2, 0.5)(data.y, data.edge_index)
        values, _ = losses(model, data)
        return finish(pyg_sar.global_mean(values) + pyg_sar.global_mean(soft.sum(-1)), model)

    pyg_sar.check(step, graph(), Net())


@pytest.mark.skipif(not ops.KERNELS, reason="PyG's own code runs in one process without kernels")
@pytest.mark.parametrize("model", [Net, lambda: pyg_sar.nn.GATConv(WIDTH, CLASSES, edge_dim=3)])
def test_layers_run_as_they_do_in_a_job(model, monkeypatch) -> None:
    """By kernels, and not by PyG's own code."""
    monkeypatch.delattr(pyg_sar.nn.MessagePassing, "updated_edges")
    pyg_sar.check(correct, graph(), model())


def test_nothing_changes() -> None:
    model, data = Net(), graph()
    model(data.x, data.edge_index, data.edge_attr).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())

    def step(model: torch.nn.Module, data: Any) -> float:
        optimizer.zero_grad()
        loss, _ = correct(model, data)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.item()

    kept, grads = data.to_dict(), [p.grad for p in model.parameters()]
    before = copy.deepcopy((model, data, grads))
    states = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    pyg_sar.check(step, data, model)
    assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate() and torch.get_default_dtype() == torch.float32
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    then, now = ([*m.state_dict().values(), *g] for m, g in ((before[0], before[2]), (model, grads)))
    assert all(torch.equal(a, b) for a, b in zip(then, now, strict=True))
    assert model.training and not optimizer.state
    assert data.to_dict().keys() == kept.keys() and all(data[key] is value for key, value in kept.items())
    assert all(torch.equal(data[key], before[1][key]) for key in ("x", "y", "edge_index", "train_mask"))


def on_parts(group: Any, folder: Path) -> float:
    """Check the loaded part, without talking to the others, on one rank alone and on both."""
    data, model = pyg_sar.load(folder, group=group), Net()
    if dist.get_rank(group) == 1:
        pyg_sar.check(correct, data, model)
    pyg_sar.check(correct, data, model)
    return pyg_sar.all_reduce(torch.ones(1), group).item()


def test_a_loaded_part_in_a_real_job(pool, tmp_path) -> None:
    pyg_sar.partition(graph(), 2, tmp_path / "parts")
    assert pool.run(2, on_parts, tmp_path / "parts") == [2.0, 2.0]


# What users do as in one process, or forget, each in the step above. What must be said of it: first where, then what.


def penalty(model: torch.nn.Module, data: Any) -> Tensor:
    loss = pyg_sar.global_mean(losses(model, data)[0])
    return finish(loss + 5e-4 * model.conv2.lin.weight.pow(2).sum(), model)


def whole_loss_everywhere(model: torch.nn.Module, data: Any) -> Tensor:
    values = losses(model, data)[0]
    return finish(pyg_sar.distributed.collectives.global_sum(values.sum()), model)


def class_weights(model: torch.nn.Module, data: Any) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1, dtype=data.x.dtype)
    return finish(pyg_sar.global_mean(losses(model, data, weight=weight)[0]), model)


def ignored_labels(model: torch.nn.Module, data: Any) -> Tensor:
    return finish(pyg_sar.global_mean(losses(model, data, ignore_index=1)[0]), model)


def local_mean(model: torch.nn.Module, data: Any) -> Tensor:
    return finish(losses(model, data, reduction="mean")[0], model)


def local_sum(model: torch.nn.Module, data: Any) -> Tensor:
    return finish(losses(model, data, reduction="sum")[0], model)


def local_number(model: torch.nn.Module, data: Any) -> dict[str, Any]:
    loss, out = correct(model, data)
    accuracy = (out.argmax(-1) == data.y).double().mean()
    return {"loss": loss, "accuracy": accuracy.item()}


def no_sum(model: torch.nn.Module, data: Any) -> Tensor:
    loss = pyg_sar.global_mean(losses(model, data)[0])
    loss.backward()
    return loss


def sum_before(model: torch.nn.Module, data: Any) -> Tensor:
    values = losses(model, data)[0]
    pyg_sar.global_mean(values).backward(retain_graph=True)
    pyg_sar.sum_gradients(model)
    loss = pyg_sar.global_mean(values.square())
    loss.backward()
    return loss


def sum_twice(model: torch.nn.Module, data: Any) -> Tensor:
    loss, _ = correct(model, data)
    pyg_sar.sum_gradients(model)
    return loss


def sum_each(model: torch.nn.Module, data: Any) -> Tensor:
    correct(model, data)
    return correct(model, data)[0]


def averaged(model: torch.nn.Module, data: Any) -> Tensor:
    loss, _ = correct(model, data)
    for p in model.parameters():
        p.grad /= pyg_sar.distributed.group.size_of()
    return loss


def clipped_before(model: torch.nn.Module, data: Any) -> Tensor:
    loss = pyg_sar.global_mean(losses(model, data)[0])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # which does nothing on the small graph
    pyg_sar.sum_gradients(model)
    return loss


def width_of_labels(model: torch.nn.Module, data: Any) -> Tensor:
    labels = F.one_hot(data.y).to(data.x.dtype)
    values = (model(data.x, data.edge_index, data.edge_attr) - labels).square().sum(-1)
    return finish(pyg_sar.global_mean(values), model)


def width_of_a_sum(model: torch.nn.Module, data: Any) -> Tensor:
    classes = int(data.y.max()) + 1
    pyg_sar.all_reduce(data.x.new_ones(classes))
    return correct(model, data)[0]


def width_of_a_layer(model: torch.nn.Module, data: Any) -> Tensor:
    around = pyg_sar.nn.convert(torch_geometric.nn.SimpleConv())(F.one_hot(data.y).to(data.x.dtype), data.edge_index)
    values, _ = losses(model, data)
    return finish(pyg_sar.global_mean(values) + pyg_sar.global_mean(around.sum(-1)), model)


def local_split(model: torch.nn.Module, data: Any) -> Tensor:
    data = transforms.RandomNodeSplit(num_val=0.2, num_test=0.2)(data)
    return correct(model, data)[0]


def local_svd(model: torch.nn.Module, data: Any) -> Tensor:
    data = transforms.SVDFeatureReduction(8)(data)
    data.x = F.pad(data.x, (0, 8))
    return correct(model, data)[0]


def global_ids(model: torch.nn.Module, data: Any) -> Tensor:
    values = model(data.x, data.edge_index, data.edge_attr)[torch.arange(data.total_nodes)].square().sum(-1)
    return finish(pyg_sar.global_mean(values), model)


def one_rank_alone(model: torch.nn.Module, data: Any) -> Tensor:
    loss, _ = correct(model, data)
    if pyg_sar.distributed.group.rank_of() == 0:
        pyg_sar.accuracy(data.y, data.y)
    return loss


def nothing_returned(model: torch.nn.Module, data: Any) -> None:
    correct(model, data)


def no_backward(model: torch.nn.Module, data: Any) -> Tensor:
    return pyg_sar.global_mean(losses(model, data)[0])


STEPS: dict[Any, tuple[str, ...]] = {
    penalty: (
        "A part of the gradient of 'conv2.lin.weight' is twice as large",
        "grows with the number of workers",
        "pyg_sar.replicated",
    ),
    whole_loss_everywhere: ("and 6 others is twice as large on two workers", "grows", "pyg_sar.replicated"),
    class_weights: ("fails in one process already", "pass weight=w[y] to 'global_mean', too", "(test_check.py:"),
    ignored_labels: ("fails in one process already", "pass 'mask', such as mask=y != ignore_index", "(test_check.py:"),
    local_mean: ("'loss' is ", "begins at 'cross_entropy' (test_check.py:", "`pyg_sar.global_mean`"),
    local_sum: ("'loss' is ", "These are shares, which sum up", "`pyg_sar.global_mean`"),
    local_number: ("'accuracy' is ", "at 'mean' (test_check.py:", "`pyg_sar.global_mean`"),
    no_sum: ("another one on each worker", "`pyg_sar.sum_gradients` did not run", "after `loss.backward()`"),
    sum_before: ("another one on each worker", "before the last backward pass", "after the last backward pass"),
    sum_twice: ("'sum_gradients' was called twice for one backward pass", "Call it once", "(test_check.py:"),
    sum_each: ("A backward pass added to the gradient of 'conv1.", "after the last one", "(test_check.py:"),
    averaged: ("is 0.5 times as large", "averaged over the workers", "divide nothing"),
    clipped_before: ("Gradients are read by '", "clip_grad_norm_", "right after `loss.backward()`"),
    width_of_labels: ("on worker 1 of 2 it raises RuntimeError", "'one_hot' (test_check.py:", "`data.num_classes`"),
    width_of_a_sum: ("do not find together: 'all_reduce' of tensors that differ", "'max' (test_check", "num_classes"),
    width_of_a_layer: ("runs layer 'SimpleConv' on rows of 5 columns", "rows of 4 columns", "num_classes"),
    local_split: ("'loss' is ", "draws random numbers from 'randperm' (test_check.py:", "before `pyg_sar.partition`"),
    local_svd: ("'loss' is ", "at 'linalg_svd' (test_check.py:", "before `pyg_sar.partition`"),
    global_ids: ("on every worker it raises IndexError", "(test_check.py:", "`data.n_id`"),
    one_rank_alone: ("do not find together", "worker 1 ended", "on every worker"),
    nothing_returned: ("returned nothing", "Return the loss"),
    no_backward: ("No parameter of the model has a gradient", "`loss.backward()`"),
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_wrong_step(step) -> None:
    text = refused(step)
    assert all(part in text for part in STEPS[step]), text


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def normalised(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)


def pooled(x: Tensor) -> Tensor:
    return x + torch_geometric.nn.global_mean_pool(x, None)


def scaled(x: Tensor) -> Tensor:
    return x / x.abs().max()


@pytest.mark.parametrize(
    "between, name", [(centred, "mean"), (normalised, "batch_norm"), (pooled, "mean"), (scaled, "max")]
)
def test_a_function_that_sees_a_workers_rows(between, name) -> None:
    text = refused(correct, model=Net(between))
    assert f"begins at '{name}' (test_check.py:{between.__code__.co_firstlineno + 1}, `return" in text, text


def test_a_module_that_sees_a_workers_rows() -> None:
    text = refused(correct, model=Net(norm=lambda _: torch.nn.Softmax(dim=0)))
    assert "begins at 'norm' (Softmax) (test_check.py" in text and "`pyg_sar.nn`" in text, text


def test_a_layer_that_is_refused_by_name() -> None:
    text = refused(correct, model=Net(norm=torch.nn.BatchNorm1d))
    assert "runs in one process, but on every worker it raises" in text and "'BatchNorm1d' in 'Net'" in text, text


# Other steps that are right.


class Hetero(torch.nn.Module):
    def __init__(self, data: HeteroData) -> None:
        super().__init__()
        conv = torch_geometric.nn.HeteroConv({it: torch_geometric.nn.SAGEConv((-1, -1), 8) for it in data.edge_types})
        self.conv = pyg_sar.nn.convert(conv)
        self.hgt = pyg_sar.nn.convert(torch_geometric.nn.HGTConv(8, CLASSES, data.metadata()))
        self.between = lambda x: x

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        x = {key: self.between(value.relu()) for key, value in self.conv(x, edges).items()}
        return self.hgt(x, edges)["paper"]


def hetero_graph() -> HeteroData:
    g, data = torch.Generator().manual_seed(0), HeteroData()
    for t, count in (("paper", 200), ("author", 100)):
        data[t].x = torch.randn(count, 6, generator=g)
    data["paper"].y = torch.randint(CLASSES, (200,), generator=g)
    data["paper"].train_mask = torch.rand(200, generator=g) < 0.5
    for source, target in (("paper", "paper"), ("author", "paper"), ("paper", "author")):
        sizes = (data[source].num_nodes, data[target].num_nodes)
        data[source, "to", target].edge_index = torch.stack([torch.randint(n, (400,), generator=g) for n in sizes])
    return data


def hetero_step(model: torch.nn.Module, data: HeteroData) -> tuple[Tensor, Tensor]:
    out, paper = model(data.x_dict, data.edge_index_dict), data["paper"]
    values = F.cross_entropy(out[paper.train_mask], paper.y[paper.train_mask], reduction="none")
    return finish(pyg_sar.global_mean(values), model), out


def test_a_heterogeneous_graph() -> None:
    data = hetero_graph()
    model = Hetero(data)
    assert "lazy layers" in refused(hetero_step, data, model)
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    pyg_sar.check(hetero_step, data, model)
    model.between = centred
    assert f"at 'mean' (test_check.py:{centred.__code__.co_firstlineno + 1}" in refused(hetero_step, data, model)


def pairs_step(model: torch.nn.Module, data: HeteroData, *types: str) -> Tensor:
    out = {t: model(x) for t, x in data.x_dict.items()}
    ids = [data[t].n_id for t in types]
    pairs = data["author", "to", "paper"].edge_label_index
    index, _ = pyg_sar.shard_links(pairs, tuple(ids) if len(ids) > 1 else ids[0])
    return finish(pyg_sar.global_mean((out["author"][index[0]] * out["paper"][index[1]]).sum(-1).sigmoid()), model)


def test_pairs_of_types_beside_a_type_of_one_node() -> None:
    data, g = hetero_graph(), torch.Generator().manual_seed(1)
    data["field"].x = torch.ones(1, 6)
    pairs = torch.stack([torch.randint(n, (60,), generator=g) for n in (100, 200)])
    data["author", "to", "paper"].edge_label_index = pairs
    model = torch.nn.Linear(6, 3)
    pyg_sar.check(lambda model, data: pairs_step(model, data, "author", "paper"), data, model)
    refused(lambda model, data: pairs_step(model, data, "author"), data, model)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mu, self.logstd = (pyg_sar.nn.GCNConv(a, 8) for a in (WIDTH, 8, 8))

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, edge_index).relu()
        return self.mu(x, edge_index), self.logstd(x, edge_index)


def link_graph() -> Data:
    data = graph()
    del data.edge_attr
    pairs = torch.randint(300, (2, 90), generator=torch.Generator().manual_seed(3))
    data.edge_label_index, data.edge_label = pairs, torch.arange(90) % 2.0
    return data


def link_step(model: torch.nn.Module, data: Data) -> Tensor:
    z = model.encode(data.x, data.edge_index)  # which draws a random number for each node
    index, mine = pyg_sar.shard_links(data.edge_label_index, data.n_id)
    score = (z[index[0]] * z[index[1]]).sum(-1)
    loss = F.binary_cross_entropy_with_logits(score, data.edge_label[mine].to(score), reduction="none")
    return finish(pyg_sar.global_mean(loss), model)


def recon_loss(model: torch.nn.Module, data: Data) -> Tensor:
    z = model.encode(data.x, data.edge_index)
    index, mine = pyg_sar.shard_links(data.edge_label_index, data.n_id)
    index = index[:, data.edge_label[mine] > 0]
    return finish(model.recon_loss(z, index, neg_edge_index=index), model)


def kl_loss(model: torch.nn.Module, data: Data) -> Tensor:
    model.encode(data.x, data.edge_index)
    return finish(model.kl_loss(), model)


def test_link_prediction() -> None:
    for step in (link_step, recon_loss, kl_loss):
        pyg_sar.check(step, link_graph(), pyg_sar.nn.VGAE(Encoder()))
        text = refused(step, link_graph(), torch_geometric.nn.VGAE(Encoder()))
        assert "'VGAE' in 'VGAE' cannot run on a share" in text and "averages its losses" in text


@pytest.mark.parametrize("count", [90, 200, 300])
def test_as_many_labels_as_nodes_or_edges(count: int) -> None:
    """Labels belong to their pairs, as ``RandomLinkSplit`` makes them: as many as edges of one direction."""
    data = link_graph()
    data.edge_index = data.edge_index[:, :200]
    pairs = torch.randint(300, (2, count), generator=torch.Generator().manual_seed(3))
    data.edge_label_index, data.edge_label = pairs, torch.arange(count) % 2.0
    pyg_sar.check(link_step, data, pyg_sar.nn.VGAE(Encoder()))


def test_integers_that_were_explained(tmp_path: Any) -> None:
    data = link_graph()
    data.codes = torch.arange(12)
    with pytest.raises(ValueError, match="may hold ids"):
        pyg_sar.partition(data, 1, tmp_path / "parts")
    pyg_sar.partition(data, 1, tmp_path / "parts", levels={"codes": "graph"})
    pyg_sar.check(link_step, pyg_sar.load(tmp_path / "parts"), pyg_sar.nn.VGAE(Encoder()))


class Tables(torch.nn.Module):
    """Learns features of nodes."""

    def __init__(self, data: Data) -> None:
        super().__init__()
        self.features, self.conv = pyg_sar.nn.NodeEmbedding(data, 8), pyg_sar.nn.SAGEConv(8, CLASSES)

    def forward(self, edge_index: Tensor, centred: bool = False) -> Tensor:
        x = self.features()
        return self.conv(x - x.mean(0) if centred else x, edge_index)


def tables_step(model: torch.nn.Module, data: Data, centred: bool = False) -> Tensor:
    out = model(data.edge_index, centred)
    return finish(pyg_sar.global_mean(F.cross_entropy(out, data.y, reduction="none")), model)


def test_tables_of_nodes(tmp_path: Path) -> None:
    pyg_sar.partition(graph(), 1, tmp_path / "parts")
    for data in (graph(), pyg_sar.load(tmp_path / "parts")):
        model = Tables(data)
        assert "gradient of 'features.weight'" in pyg_sar.check(tables_step, data, model).compared
        assert model.features.num_nodes == data.num_nodes
        text = refused(lambda model, data: tables_step(model, data, True), data, model)
        assert "begins at 'mean' (test_check.py:" in text


class Relational(torch.nn.Module):
    """Has a row of weights for each node, and messages that drop features."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.conv1 = pyg_sar.nn.RGCNConv(num_nodes, 8, 3, num_bases=2)
        self.conv2 = Dropping(8, CLASSES)

    def forward(self, x: None, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.conv2(self.conv1(x, edge_index, edge_type).relu(), edge_index)


class Dropping(pyg_sar.nn.MessagePassing):
    def __init__(self, width: int, out: int) -> None:
        super().__init__(aggr="sum")
        self.lin = torch.nn.Linear(width, out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(F.dropout(x_j.tanh(), 0.5, self.training))


def relational_graph() -> Data:
    data = graph(edge_type=torch.arange(2000) % 3)
    del data.x
    data.num_nodes = 300
    return data


def relational_step(model: torch.nn.Module, data: Data) -> Tensor:
    out = model(None, data.edge_index, data.edge_type)
    values = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
    return finish(pyg_sar.global_mean(values), model)


def test_tables_of_nodes_and_dropout_in_messages() -> None:
    pyg_sar.check(relational_step, relational_graph(), Relational(300))


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_the_step_of_an_example(examples, kind) -> None:
    from models import GNN
    from train import train

    model = GNN(pyg_sar.nn, kind, WIDTH, 8, CLASSES, heads=2, attention_dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters())
    pyg_sar.check(lambda model, data: train(model, data, optimizer), graph(), model)


def test_the_model_of_the_relational_example(examples) -> None:
    from rgcn import RGCN

    pyg_sar.check(relational_step, relational_graph(), RGCN(300, 8, CLASSES, 3, 2))


def test_what_only_a_sharded_graph_has_and_a_type_of_its_own() -> None:
    def step(model: torch.nn.Module, data: Data) -> Tensor:
        data.edge_index.cache_features(data.x)
        return correct(model, data)[0].float()

    assert pyg_sar.check(step, graph(), Net()).dtype == torch.float64

    def pinned(model: torch.nn.Module, data: Data) -> Tensor:
        data.x = data.x.float()
        return correct(model, data)[0]

    assert pyg_sar.check(pinned, graph(), Net()).dtype is None
    text = refused(lambda model, data: local_mean(model, data.update({"x": data.x.float()})))
    assert "begins at 'cross_entropy'" in text


def test_a_dictionary_of_splits() -> None:
    def step(model: torch.nn.Module, data: Any) -> tuple[Tensor, Tensor]:
        model.train()
        out, rows = model(data.x, data.edge_index, data.edge_attr), data.split_idx["train"]
        return finish(pyg_sar.global_mean(F.cross_entropy(out[rows], data.y[rows], reduction="none")), model), out

    splits = {"train": torch.randperm(300)[:40], "valid": torch.tensor([3, 7, 5])}
    pyg_sar.check(step, graph(split_idx=splits), Net())


def test_what_cannot_be_checked() -> None:
    outer, other = Net(), torch.nn.Linear(CLASSES, 1)

    def uses_outer(model: torch.nn.Module, data: Data) -> Tensor:
        return correct(outer, data)[0]

    def uses_other(model: torch.nn.Module, data: Data) -> Tensor:
        return pyg_sar.global_mean(other(model(data.x, data.edge_index, data.edge_attr)))

    assert "a parameter of 'outer'" in refused(uses_outer, model=Net())
    assert "a parameter of 'other'" in refused(uses_other)
    assert all(p.grad is None for p in (*outer.parameters(), *other.parameters()))
    x = graph().x
    text = refused(lambda model, data: model(x, data.edge_index, data.edge_attr)[data.train_mask].sum())
    assert "fails on the small graph in one process already" in text and "from the `data`" in text
    assert "no 'edge_index'" in refused(correct, Data(x=x))


class Attributes(torch.nn.Module):
    """What is called ``group`` and ``_cached_k`` here is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.group, self._cached_k = pyg_sar.nn.SAGEConv(WIDTH, CLASSES), 4, 3

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index) * self.group * self._cached_k


def test_attributes_of_the_user() -> None:
    def step(model: torch.nn.Module, data: Data) -> Tensor:
        out = model(data.x, data.edge_index)
        return finish(pyg_sar.global_mean(F.cross_entropy(out, data.y, reduction="none")), model)

    pyg_sar.check(step, graph(), Attributes())


class TwoTables(torch.nn.Module):
    """Learns features of two types of nodes, of which there are as many."""

    def __init__(self, data: HeteroData, group: Any) -> None:
        super().__init__()
        tables = {t: pyg_sar.nn.NodeEmbedding(data[t], 4, group=group) for t in data.node_types}
        self.tables = torch.nn.ModuleDict(tables)
        self.conv = torch_geometric.nn.HeteroConv({it: pyg_sar.nn.SAGEConv(4, CLASSES) for it in data.edge_types})

    def forward(self, edges: dict[Any, Tensor]) -> Tensor:
        return self.conv({t: table() for t, table in self.tables.items()}, edges)["paper"]


def two_tables_step(model: torch.nn.Module, data: HeteroData) -> Tensor:
    out = model(data.edge_index_dict)
    return finish(pyg_sar.global_mean(F.cross_entropy(out, data["paper"].y, reduction="none")), model)


def check_two_tables(group: Any, folder: Path) -> None:
    data = pyg_sar.load(folder, group=group)
    model = TwoTables(data, group)
    pyg_sar.check(two_tables_step, data, model)
    model.tables["paper"].num_nodes = 7
    with pytest.raises(pyg_sar.CheckError, match=r"The table 'tables\.paper' is of 7 nodes, which 'data' does not"):
        pyg_sar.check(two_tables_step, data, model)


def test_tables_of_two_types_with_as_many_nodes(pool, tmp_path) -> None:
    g, data = torch.Generator().manual_seed(0), HeteroData()
    for t in ("author", "paper"):
        data[t].num_nodes = 60
    data["paper"].y = torch.randint(CLASSES, (60,), generator=g)
    for source, target in (("author", "paper"), ("paper", "author")):
        data[source, "to", target].edge_index = torch.randint(60, (2, 200), generator=g)
    method = {t: torch.randint(2, (60,), generator=g) for t in ("author", "paper")}
    pyg_sar.partition(data, 2, tmp_path / "parts", method=method)
    pool.run(2, check_two_tables, tmp_path / "parts")


SCRIPT = """
import torch, torch.nn.functional as F, torch_geometric.nn as gnn, pyg_sar
from torch_geometric.data import Data
data = Data(x=torch.randn(20, 4), y=torch.randint(2, (20,)), edge_index=torch.randint(20, (2, 60)))
model = gnn.Sequential("x, e", [(gnn.GCNConv(4, 2), "x, e -> x")])  # which imports this script once more
def step(model, data):
    loss = pyg_sar.global_mean(F.cross_entropy(model(data.x, data.edge_index), data.y, reduction="none"))
    loss.backward()
    pyg_sar.sum_gradients(model)
    return loss
pyg_sar.check(step, data, model)
print("checked", __name__)
"""


def test_models_that_import_the_script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = [tmp_path, *sys.path[1:]] if sys.path[0] == "" else [tmp_path, *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ["checked script", "checked __main__"], done.stderr
