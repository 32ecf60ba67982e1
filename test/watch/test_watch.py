"""What sees a worker's rows alone is refused by name in the first step; what does not, is not."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
from support.conv_zoo import CASES, INPUTS, Case, arguments, converted, default, layer_of, output, sizes
from support.nasty_graph import Share, assignment, edges
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data, HeteroData
from torch_geometric.utils import degree, homophily, scatter, softmax

import pyg_sar
from pyg_sar.data.load import assemble
from pyg_sar.data.split import split
from pyg_sar.distributed.simulated import Workers
from pyg_sar.distributed.stages import mesh_of
from pyg_sar.distributed.values import from_bytes, to_bytes
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.structure import tensors
from pyg_sar.watch import LOSS, ROWS, SAME, current, is_alone, resting, rows
from pyg_sar.watch.kinds import ENDS, SHARE, Kind
from pyg_sar.watch.mode import Watch, watching

N, C = 40, 3
RELATION, BACK = ("u", "to", "v"), ("v", "back", "u")


def graph() -> Data:
    g = torch.Generator().manual_seed(0)
    data = Data(x=torch.randn(N, 8, generator=g), edge_index=torch.randint(N, (2, 200), generator=g))
    data.y = torch.randint(C, (N,), generator=g)
    data.batch, data.train_mask = torch.arange(N) // 20, torch.rand(N, generator=g) < 0.5
    data.edge_attr, data.edge_type = torch.rand(200, 4, generator=g), torch.randint(2, (200,), generator=g)
    data.edge_label_index = torch.randint(N, (2, 30), generator=g)
    data.label, data.train_idx = torch.tensor([0.0, 1.0]), torch.arange(0, N, 3)  # of the two graphs, and of nodes
    return data


def two_types() -> HeteroData:
    g, data = torch.Generator().manual_seed(0), HeteroData()
    data["u"].x, data["v"].x = torch.randn(20, 8, generator=g), torch.randn(30, 8, generator=g)
    edge_index = torch.stack([torch.randint(20, (80,), generator=g), torch.randint(30, (80,), generator=g)])
    data[RELATION].edge_index, data[BACK].edge_index = edge_index, edge_index.flip(0)
    return data


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("watch"))
    pyg_sar.partition(graph(), 2, f"{path}/one", method=torch.arange(N) % 2)
    pyg_sar.partition(graph(), 2, f"{path}/alike", method=torch.arange(N) % 2)
    pyg_sar.partition(graph(), 2, f"{path}/other", method=torch.arange(N) // 20)
    pyg_sar.partition(two_types(), 2, f"{path}/two")
    return path


def outcomes(path: str, work: Callable[[Any], Any]) -> list:
    """Return what becomes of two workers that run ``work(data)`` under the watch."""

    def worker(rank: int) -> Any:
        with watching():
            assert isinstance(current(), Watch)
            return work(pyg_sar.load(path))

    return Workers(2).run(worker)


def passes(path: str, work: Callable[[Any], Any]) -> list:
    results = outcomes(path, work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Net(torch.nn.Module):
    """Two layers, and something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.first, self.second, self.between = pyg_sar.nn.GCNConv(8, 4), pyg_sar.nn.SAGEConv(4, C), between

    def forward(self, data: Any) -> Tensor:
        return self.second(self.between(self.first(data.x, data.edge_index)), data.edge_index)


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_sar.nn.GCNConv(8, 4) for _ in range(2))

    def forward(self, *args: Any) -> Any:
        return tuple(conv(*args) for conv in self.convs)


def net(data: Any, between: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    torch.manual_seed(0)
    return Net(between)(data)


def losses(data: Any) -> Tensor:
    return F.cross_entropy(net(data)[data.train_mask], data.y[data.train_mask], reduction="none")


def recon(data: Any) -> Tensor:
    model = gnn.GAE(pyg_sar.nn.GCNConv(8, 4))
    return model.recon_loss(model.encode(data.x, data.edge_index), data.edge_index, data.edge_index)


def kl(data: Any) -> Tensor:
    model = gnn.VGAE(Both())
    model.encode(data.x, data.edge_index)
    return model.kl_loss()


def auc(data: Any) -> Any:
    model = gnn.GAE(pyg_sar.nn.GCNConv(8, 4))
    return model.test(model.encode(data.x, data.edge_index), data.edge_index, data.edge_index)


def infomax(data: Any) -> Tensor:
    model = gnn.DeepGraphInfomax(4, pyg_sar.nn.GCNConv(8, 4), lambda z, *_: z, lambda x, e: (x.flip(0), e))
    z = model.encoder(data.x, data.edge_index)
    return model.loss(z, -z, torch.zeros(4))


def penalty(data: Any) -> Tensor:
    model = torch.nn.Linear(8, C)
    loss = pyg_sar.global_mean(F.cross_entropy(model(data.x), data.y, reduction="none"))
    return loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())


def by_label(data: Any) -> Tensor:
    score = pyg_sar.nn.global_add_pool(net(data), data.batch, size=2)[:, 0]
    F.binary_cross_entropy_with_logits(score, data.label).backward()
    return score


def to_a_buffer(data: Any, buffer: Tensor) -> Tensor:
    model = torch.nn.Linear(8, 4)
    model.register_buffer("goal", buffer)
    pyg_sar.broadcast_parameters(model)
    return pyg_sar.global_mean(losses(data)) + (model.weight - model.goal).square().sum()


def scaled(data: Any) -> Tensor:
    return torch.nn.Parameter(torch.zeros(())).exp() * pyg_sar.global_mean(data.x)


def learnt(data: Any) -> Tensor:
    return torch.nn.Parameter(torch.zeros(2)).softmax(0)


def two_losses(data: Any) -> Tensor:
    return torch.stack([pyg_sar.global_mean(data.x), pyg_sar.global_mean(losses(data))])


LINEAR = torch.nn.Linear(8, 8)
# By what they say: what, where it is known by name, and the way out.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "infomax": (infomax, r"'DeepGraphInfomax\.loss' takes 'mean'"),
    **{
        f"homophily {m}": (lambda d, m=m: homophily(d.edge_index, d.y, method=m), "'homophily' takes '(mean|max)'")
        for m in ("edge", "node", "edge_insensitive")
    },
    "mean pool": (lambda d: gnn.global_mean_pool(net(d), None), r"'global_mean_pool' takes 'mean'.*'pyg_sar\.nn'"),
    "mean pool of a batch": (lambda d: gnn.global_mean_pool(net(d), d.batch), "'global_mean_pool' takes 'max'"),
    "add pool": (lambda d: gnn.global_add_pool(net(d), None), "'global_add_pool' reads out nodes"),
    "add pool of a batch": (lambda d: gnn.global_add_pool(net(d), d.batch, 2), "'global_add_pool' reads out"),
    "max pool": (lambda d: gnn.global_max_pool(net(d), d.batch, 2), "'global_max_pool' takes 'scatter_reduce'"),
    "a pooling layer": (lambda d: gnn.aggr.SumAggregation()(net(d), d.batch, dim_size=2), "'SumAggregation' takes"),
    "batch_norm": (lambda d: net(d, lambda h: F.batch_norm(h, None, None, training=True)), "'batch_norm'.*pyg_sar.nn"),
    "BatchNorm1d": (lambda d: torch.nn.BatchNorm1d(8)(d.x), "statistics of 'batch_norm'"),
    "BatchNorm": (lambda d: gnn.BatchNorm(8)(d.x), "'BatchNorm' takes the statistics of 'batch_norm'"),
    "instance_norm": (lambda d: F.instance_norm(d.x.t().unsqueeze(0)), "statistics of 'instance_norm'"),
    "GraphNorm": (lambda d: gnn.GraphNorm(8)(d.x), "'GraphNorm'"),
    "LayerNorm": (lambda d: gnn.LayerNorm(8)(d.x), "'LayerNorm'"),
    "centered": (lambda d: net(d, lambda h: h - h.mean(0)), r"takes 'mean' over nodes.*global_sum\(x\.sum\(0\)\)"),
    "centered by a sum": (lambda d: d.x - d.x.sum(0) / N, r"'sub' makes use of a sum"),
    "a mean by the sum of a mask": (lambda d: losses(d).sum() / d.train_mask.sum(), "'div' of a sum"),
    "a norm of columns": (lambda d: d.x.square().sum(0).sqrt(), "'sqrt' of a sum"),
    "an absolute sum": (lambda d: pyg_sar.global_sum(d.x.sum(0).abs()), "'abs' of a sum"),
    "the largest sum": (lambda d: d.x.sum(0).max(), "'max' of a sum"),
    "at least one": (lambda d: losses(d).sum() / d.train_mask.sum().clamp(min=1), "'div' of a sum"),
    "at least nothing": (lambda d: d.x.sum(0).clamp(min=0), "'clamp' of a sum"),
    "a distance of sums": (lambda d: F.mse_loss(d.x.sum(0), torch.ones(8)), "'mse_loss' of a sum"),
    "a norm": (lambda d: F.normalize(d.x, dim=0), "takes 'normalize'"),
    "a softmax over nodes": (lambda d: torch.softmax(d.x @ torch.ones(8), 0), "takes 'softmax'"),
    "an edge mean": (lambda d: d.edge_attr.mean(), "takes 'mean'"),
    "means of groups": (lambda d: scatter(d.x, d.batch, 0, 2, "mean"), "'scatter'.*(makes use|takes '(div|clamp)')"),
    "all pairs": (lambda d: d.x @ d.x.t(), "every row with every other one"),
    "differences of all pairs": (lambda d: d.x[:, None] - d.x[None], "every other one .'sub'"),
    "products of all pairs": (lambda d: d.x.unsqueeze(1) * net(d).sum(1)[None, :, None], "every other one .'mul'"),
    "angles of all pairs": (lambda d: F.cosine_similarity(d.x[:, None], d.x[None], dim=-1), "every other one"),
    "attention among nodes": (lambda d: torch.nn.MultiheadAttention(8, 2)(d.x, d.x, d.x), "attention"),
    "a readout into a layer": (lambda d: LINEAR(d.x.sum(0)), "joins"),
    "batchmean": (
        lambda d: F.kl_div(d.x.log_softmax(1), d.x.softmax(1), reduction="batchmean"),
        r"reduction='batchmean'.*global_mean\(\.\.\.\)' of the sum of each row",
    ),
    "mean of a table": (
        lambda d: (table := copy.deepcopy(pyg_sar.nn.NodeEmbedding(d, 4)).weight) - table.mean(0),
        "takes 'mean' over nodes",
    ),
    "forgotten global_mean": (
        lambda d: F.cross_entropy(net(d)[d.train_mask], d.y[d.train_mask]),
        r"'cross_entropy' with reduction='mean'.*reduction='none' and take 'pyg_sar\.global_mean",
    ),
    "penalty": (penalty, r"joins \('add'\).*Wrap.*'pyg_sar\.replicated"),
    "learnt weight of a loss": (scaled, "joins"),
    "learnt weights of losses": (lambda d: learnt(d).dot(two_losses(d)), r"joins \('dot'\).*replicated"),
    "products of losses": (lambda d: two_losses(d)[None] @ learnt(d), r"joins \('matmul'\).*replicated"),
    "a sum of products": (lambda d: torch.einsum("i,i->", learnt(d), two_losses(d)), r"joins \('einsum'\)"),
    "labels of graphs": (by_label, r"differentiates what.*pyg_sar\.replicated"),
    "a penalty by a buffer": (lambda d: to_a_buffer(d, torch.from_numpy(np.ones((4, 8), "f"))), r"joins.*replicated"),
    "a loss times a sum": (lambda d: pyg_sar.global_mean(losses(d)) * d.train_mask.sum() / N, "'mul' of a sum"),
    "a loss of a readout": (lambda d: LINEAR(pyg_sar.nn.global_add_pool(d.x, None)).sum().backward(), "differentiates"),
    "width": (lambda d: int(d.y.max()) + 1, r"takes 'max'.*data\.num_classes"),
    "one_hot": (lambda d: F.one_hot(d.y), r"width of 'one_hot'.*data\.num_classes"),
    "LabelPropagation": (lambda d: gnn.LabelPropagation(2, 0.9)(d.y, d.edge_index), "'LabelPropagation'.*num_classes"),
    "class weights": (lambda d: 1 / torch.bincount(d.y, minlength=C), "of a sum"),
    "a sequence of nodes": (lambda d: torch.nn.GRU(8, 4)(d.x), "takes 'gru'"),
    "a sequence, batch first": (lambda d: torch.nn.LSTM(8, 4, batch_first=True)(d.x[None]), "takes 'lstm'"),
    "a histogram": (lambda d: torch.histc(d.x[:, 0], 5), "takes 'histc'"),
    "a Fourier transform": (lambda d: torch.fft.fft(d.x, dim=0), "takes 'fft_fft'"),
    "SVD": (lambda d: T.SVDFeatureReduction(3)(d), r"'SVDFeatureReduction'.*before 'pyg_sar\.partition'"),
    "TargetIndegree": (lambda d: T.TargetIndegree()(d), "'TargetIndegree' takes 'max'.*before"),
    "RandomNodeSplit": (lambda d: T.RandomNodeSplit(num_val=3, num_test=3)(d), "'RandomNodeSplit' draws.*before"),
    "accuracy": (lambda d: (net(d).argmax(-1) == d.y).float().mean(), r"takes 'mean'.*pyg_sar\.accuracy"),
    "degrees": (lambda d: torch.bincount(degree(d.edge_index[1], 20).long()), r"'bincount'.*pyg_sar\.degree_histogram"),
    "a sum of losses": (
        lambda d: pyg_sar.global_sum(losses(d).sum()).backward(),
        r"differentiates what.*pyg_sar\.replicated\(pyg_sar\.global_sum",
    ),
    "a sum beside a mean": (
        lambda d: pyg_sar.global_mean(losses(d)) + pyg_sar.global_sum(losses(d).sum()),
        r"joins \('add'\).*pyg_sar\.replicated\(pyg_sar\.global_sum",
    ),
    "a parameter for each node": (lambda d: d.x + torch.nn.Parameter(torch.ones(20, 8)), "NodeEmbedding"),
    "beside a parameter": (lambda d: torch.cat([d.x, torch.nn.Parameter(torch.ones(20, 8))], 1), "NodeEmbedding"),
    "pairs by ids": (lambda d: d.x[d.edge_label_index[0]], "numbers of nodes in the whole graph.*shard_links"),
    "negative pairs by ids": (
        lambda d: d.x[pyg_sar.negative_sampling(d.edge_index, d.n_id)[0]],
        "numbers of nodes in the whole graph",
    ),
    "some pairs by ids": (lambda d: d.x[d.edge_label_index.t()[:5].flatten()], "numbers of nodes in the whole graph"),
    "NormalizeFeatures": (lambda d: T.NormalizeFeatures()(d), "'NormalizeFeatures' takes 'min'.*before"),
}


def test_a_sum_by_the_number_of_rows_may_be_right(parts: str) -> None:
    for rank, text in enumerate(outcomes(f"{parts}/one", lambda data: warned(lambda: data.x.sum(0) / len(data.x)))):
        assert text.startswith(f"[rank {rank}] {__file__}, line ") and "by their number, which is a mean" in text


def test_a_parameter_for_each_edge_of_a_worker(parts: str) -> None:
    """It is this worker's own, and complete."""

    def work(data: Any) -> None:
        torch.manual_seed(0)
        model, layer, own = Net(), pyg_sar.nn.GCNConv(8, C), torch.nn.Parameter(torch.zeros(data.num_edges))
        optimizer = torch.optim.Adam([*model.parameters(), own])
        for _ in range(2):
            optimizer.zero_grad()
            out = layer(data.x, data.edge_index, own.exp()) + model(data)
            pyg_sar.global_mean(F.cross_entropy(out, data.y, reduction="none")).backward()
            pyg_sar.sum_gradients(model)
            optimizer.step()

    passes(f"{parts}/one", work)


def test_the_number_of_nodes_of_one_worker(parts: str) -> None:
    def works(data: Any) -> None:
        n = data.num_nodes
        assert n == 20 and n / data.total_nodes == 0.5 and torch.zeros(n, 2).size(0) == n
        assert type(copy.deepcopy(n)) is int and type(n * 2) is type(1 + n) is int
        with pyg_sar.allow_local():
            assert 1 / n == 0.05
        for module in (pyg_sar.nn.NodeEmbedding(data, 4), torch.nn.Embedding(data.total_nodes, 4), Net()):
            module.num_nodes = n
            pyg_sar.broadcast_parameters(module)

    passes(f"{parts}/one", works)
    for work in (lambda d: 1 / d.num_nodes, lambda d: d.x.sum() / d.num_nodes, lambda d: torch.ones(2) / d.num_nodes):
        for text in outcomes(f"{parts}/one", lambda data, work=work: warned(lambda: work(data))):
            assert "divides by the number of this worker's nodes" in text and "data.total_nodes" in text
    for call in (pyg_sar.broadcast_parameters, pyg_sar.sum_gradients):
        for error in outcomes(f"{parts}/one", lambda d, call=call: call(per_node(d))):
            assert re.search(r"'0' was made for the 20 nodes of this worker \('num_embeddings'\)", str(error)), error


def test_the_number_of_nodes_taken_for_that_of_all(parts: str) -> None:
    draws = [
        lambda d: torch.randint(0, d.num_nodes, (2, 9)),
        lambda d: torch.randint(d.num_nodes, (9,)),
        lambda d: torch.randint(high=d.num_nodes, size=(9,)),
    ]
    for work, told in [
        *((draw, "below 'data.total_nodes'") for draw in draws),
        (lambda d: torch.eye(d.num_nodes), "one of each worker"),
    ]:
        for text in outcomes(f"{parts}/one", lambda data, work=work: warned(lambda: work(data))):
            assert told in text, text

    def positions(data: Any, local: bool = True) -> Tensor:
        table = torch.nn.Embedding(data.total_nodes, 4)
        return table(torch.arange(data.num_nodes) if local else data.n_id)

    for error in outcomes(f"{parts}/one", positions):
        assert isinstance(error, NotImplementedError) and "read it by 'data.n_id'" in str(error), error

    def right(data: Any) -> None:
        positions(data, local=False)
        pyg_sar.nn.NodeEmbedding(data, 4)(torch.arange(data.num_nodes))
        torch.randint(0, C, (data.num_nodes,)), torch.eye(C), torch.randint(data.total_nodes, (4,))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(f"{parts}/one", right)


# What takes pairs of the graph for edges between the rows of a worker.
PAIRED: dict[str, Callable[[Any], Any]] = {
    "a layer": lambda d: pyg_sar.nn.SAGEConv(8, C)(d.x, d.edge_label_index),
    "a converted one": lambda d: pyg_sar.nn.convert(gnn.TAGConv(8, C))(d.x, edge_index=d.edge_label_index),
    "one of PyG": lambda d: gnn.GraphConv(8, C)(d.x, d.edge_label_index),
    "rows": lambda d: d.x[d.edge_label_index[0]],
}


@pytest.mark.parametrize("name", PAIRED)
def test_pairs_are_no_edges(parts: str, name: str) -> None:
    def right(data: Any) -> None:
        if name != "one of PyG":  # whose sums are those of one worker
            PAIRED[name](Data(x=data.x, edge_label_index=torch.randint(len(data.x), (2, 9))))
        PAIRED[name](Data(x=graph().x, edge_label_index=data.edge_label_index))  # of all nodes
        with pyg_sar.allow_local():
            PAIRED[name](Data(x=torch.cat([data.x] * 2), edge_label_index=data.edge_label_index))

    for error in outcomes(f"{parts}/one", PAIRED[name]):
        told = (
            error if isinstance(error, NotImplementedError) else error.__context__
        )  # PyG says that ids are too large, if they are
        assert isinstance(told, NotImplementedError) and "shard_links" in str(told), error
    passes(f"{parts}/one", right)


def test_a_single_worker_has_rows_in_another_order(tmp_path: Any) -> None:
    def alone(work: Callable[[Any], Any], order: str) -> Any:
        pyg_sar.partition(graph(), 1, tmp_path / order, order=order, overwrite=True)
        with watching():
            data = pyg_sar.load(tmp_path / order)
            assert torch.equal(data.n_id, torch.arange(N)) == (order == "id")
            return work(data)

    whole = {**PAIRED, "GAE": lambda d: pyg_sar.nn.GAE(None).recon_loss(d.x, d.edge_label_index)}
    for work in whole.values():
        with pytest.raises(NotImplementedError, match=r"pyg_sar\.shard_links"):
            alone(work, "locality")
        alone(work, "id")
    for work in (marked, lambda d: d.x[:10]):
        with pytest.warns(UserWarning, match="chooses rows by where they stand"):
            alone(work, "locality")

    def right(data: Any) -> None:
        model = Net()
        x = data.x - data.x.mean(0)
        optimizer = torch.optim.SGD([*model.parameters()], 0.1)
        for left in (False, True):
            F.cross_entropy(model(Data(x=x, edge_index=data.edge_index)), data.y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            pyg_sar.sum_gradients(model)
            optimizer.step()
            assert (current() is None) == left
        _ = 1 / data.num_nodes, pyg_sar.shard_links(data.edge_label_index, data.n_id)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone(right, "locality")
        alone(lambda d: d.x[:10], "id")


def per_node(data: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(data.num_nodes, 4))


@pytest.mark.parametrize("name", ["numpy", "tolist"])
def test_rows_that_leave_torch(parts: str, name: str) -> None:
    for text in outcomes(f"{parts}/one", lambda data: warned(getattr(net(data).argmax(-1), name))):
        assert f"'{name}' gives the numbers of this worker's rows alone" in text and "pyg_sar.gather" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(f"{parts}/one", lambda data: getattr(pyg_sar.gather(data.y, data.n_id, None), name)())


# What is done with two loads of data, of which the second may be those of other nodes.
JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "features": lambda a, b: net(Data(x=b.x, edge_index=a.edge_index)),
    "features, as PyG has it": lambda a, b: gnn.SAGEConv(8, C)(b.x, a.edge_index),
    "a mask": lambda a, b: net(a)[b.train_mask],
    "labels": lambda a, b: F.cross_entropy(net(a), b.y, reduction="none"),
    "accuracy": lambda a, b: pyg_sar.accuracy(net(a).argmax(-1), b.y),
    "side by side": lambda a, b: torch.cat([a.x, b.x], 1),
    "side by side, by another name": lambda a, b: torch.cat([a.x, b.x], axis=1),
    "numbers side by side": lambda a, b: torch.vstack([a.y, b.y]),
    "destinations": lambda a, b: a.x[b.edge_index[1]],
    "pairs": lambda a, b: net(a)[pyg_sar.shard_links(b.edge_label_index, b.n_id)[0][0]],
    "a readout": lambda a, b: pyg_sar.nn.global_add_pool(net(a), b.batch),
    "a table": lambda a, b: a.x[:, :4] + pyg_sar.nn.NodeEmbedding(b, 4)(),
}


@pytest.mark.parametrize("name", JOINED)
def test_rows_of_two_partitions(parts: str, name: str) -> None:
    def work(other: str) -> Callable[[Any], Any]:
        return lambda data: JOINED[name](data, pyg_sar.load(f"{parts}/{other}"))

    passes(f"{parts}/one", work("one"))
    passes(f"{parts}/one", work("alike"))
    for error in outcomes(f"{parts}/one", work("other")):
        assert isinstance(error, NotImplementedError), error
        text = r"test_watch\.py, line \d+: .* joins rows of two partitions.*row \d+ is node \d+ in one and node \d+ in"
        assert re.search(text, str(error)), error


def test_rows_of_two_partitions_one_after_the_other(parts: str) -> None:
    """As of several graphs in one loss."""

    def work(data: Any) -> None:
        other = pyg_sar.load(f"{parts}/other")
        both = torch.cat([losses(data), losses(other)])
        assert pyg_sar.global_mean(both).requires_grad
        with pyg_sar.allow_local():
            data.x + other.x

    passes(f"{parts}/one", work)


def relabelled(a: Any, b: Any) -> Tensor:
    """Rows of pairs by a table of one's own, which tells the row of each id."""
    row = torch.full((N,), -1)
    row[a.n_id] = torch.arange(a.num_nodes)
    own = row[a.edge_label_index]
    return a.x[own[:, (own >= 0).all(0)][0]]


def summed_in_place(a: Any, b: Any) -> Tensor:
    """A table for all nodes, of which a worker fills its own rows."""
    table = torch.zeros(N, 8)
    table[a.n_id] = a.x
    return table[b.n_id] + table[a.edge_label_index[0]].sum(0)


def buffered(a: Any, b: Any) -> Tensor:
    buffer = torch.empty(a.x.shape)
    for data in (a, b):
        buffer.copy_(data.x)
        buffer[:] = data.x
    return buffer + b.x


# What is right with data of other nodes.
APART: dict[str, Callable[[Any, Any], Any]] = {
    "ids are compared": lambda a, b: (torch.equal(a.n_id, b.n_id), torch.isin(a.n_id, b.n_id), a.n_id == b.n_id),
    "ids are looked up": lambda a, b: (a.n_id[:, None] == b.n_id[None], torch.searchsorted(b.n_id.sort()[0], a.n_id)),
    "ids leave torch": lambda a, b: (a.n_id.numpy(), a.n_id[a.train_mask].tolist()),
    "one below the other": lambda a, b: (torch.vstack([a.x, b.x]), torch.hstack([a.y, b.y])),
    "padded": lambda a, b: torch.nn.utils.rnn.pad_sequence([a.x, b.x]),
    "side by side for torch": lambda a, b: torch._foreach_mul([a.x, b.x], 2.0),
    "rows by a table": relabelled,
    "a table of all": summed_in_place,
    "classes of all by ids": lambda a, b: a.x[:, torch.arange(N)[a.edge_label_index[1]][:3] % 4],
    "a buffer": buffered,
    "a module with the number": lambda a, b: pyg_sar.broadcast_parameters(keeps(int(a.num_nodes))),
}


def keeps(number: int) -> torch.nn.Module:
    module = torch.nn.Linear(8, 20)
    module.number = number
    return module


@pytest.mark.parametrize("name", APART)
def test_what_is_right_with_two_partitions(parts: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(f"{parts}/one", lambda data: APART[name](data, pyg_sar.load(f"{parts}/other")))


def test_types_of_nodes_that_two_partitions_share(parts: str, tmp_path: Any) -> None:
    halves = {"u": torch.arange(20) % 2, "v": torch.arange(30) % 2}
    pyg_sar.partition(two_types(), 2, tmp_path / "one", method=halves, order="id")
    pyg_sar.partition(two_types(), 2, tmp_path / "other", method=halves | {"v": torch.arange(30) // 15}, order="id")

    def work(data: Any) -> None:
        other = pyg_sar.load(tmp_path / "other")
        assert (data["u"].x + other["u"].x).shape == (10, 8)
        conv = pyg_sar.nn.SAGEConv((8, 8), 4)
        conv((other["u"].x, data["v"].x), data[RELATION].edge_index)
        with pytest.raises(NotImplementedError, match="rows of two partitions"):
            conv((data["u"].x, other["v"].x), data[RELATION].edge_index)

    passes(str(tmp_path / "one"), work)


def test_more_rows_of_two_partitions(parts: str) -> None:
    def work(data: Any) -> None:
        other = pyg_sar.load(f"{parts}/other")
        with pytest.raises(NotImplementedError, match="rows of two partitions"):
            pyg_sar.message_flow_graphs(data.edge_index, other.train_mask, 1)
        with pytest.raises(NotImplementedError, match="rows of two partitions"):
            pyg_sar.gather(data.x, other.n_id)
        for ids in (data.n_id, data.n_id[data.train_mask], data.edge_label_index[0].int()):
            with pytest.raises(NotImplementedError, match="numbers of nodes in the whole graph"):
                data.x[ids]
            with pytest.raises(NotImplementedError, match="numbers of nodes in the whole graph"):
                F.embedding(ids, data.x)
        with pytest.raises(NotImplementedError, match="NodeEmbedding"):
            torch.nn.Parameter(torch.ones(20, 4))[data.train_mask]

    passes(f"{parts}/one", work)


def test_lazy_parameters_are_told_of_all_the_same(parts: str) -> None:
    for error in outcomes(f"{parts}/one", lambda data: pyg_sar.broadcast_parameters(gnn.GraphSAGE(-1, 8, 2, 4))):
        assert "parameter of a lazy layer" in str(error)


def test_the_number_of_nodes_can_be_saved(parts: str, tmp_path: Any) -> None:
    def work(data: Any) -> None:
        file = tmp_path / f"{data.n_id[0].item()}.pt"
        torch.save({"n": data.num_nodes}, file)
        assert torch.load(file, weights_only=True) == {"n": 20}
        assert type(from_bytes(to_bytes({"n": data.num_nodes}))["n"]) is int

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows by position
        passes(f"{parts}/one", work)


def test_a_mask_filled_by_a_list_of_rows(parts: str) -> None:
    def work(data: Any) -> None:
        mask, index = torch.zeros(data.num_nodes, dtype=torch.bool), data.train_mask.nonzero().view(-1)
        mask[index] = True
        data.x[mask]
        seen = torch.zeros(C)
        seen[data.y] = 1.0
        assert current().kind(seen) is None and current().kind(mask) is None  # type: ignore[union-attr]

    passes(f"{parts}/one", work)


def warned(work: Callable[[], Any]) -> str:
    with pytest.warns(UserWarning) as caught:
        work()
    return str(caught[0].message)


@pytest.mark.parametrize("work", [recon, kl, auc])
def test_what_a_model_averages_is_refused_before(parts: str, work: Callable[[Any], Any]) -> None:
    for error in outcomes(f"{parts}/one", work):
        assert isinstance(error, NotImplementedError)
        assert "averages its losses over nodes and pairs of nodes" in str(error) and "pyg_sar.nn.convert" in str(error)


def test_a_buffer_of_rows_is_not_that_of_rank_0(parts: str) -> None:
    def work(data: Any) -> None:
        model = torch.nn.Linear(8, 4)
        model.register_buffer("features", data.x.clone())
        pyg_sar.broadcast_parameters(model)

    for error in outcomes(f"{parts}/one", work):
        assert isinstance(error, ValueError) and "The buffer 'features' of shape [20, 8] has a row for" in str(error)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(parts: str, name: str) -> None:
    work, says = REFUSED[name]
    for rank, error in enumerate(outcomes(f"{parts}/one", work)):
        with pytest.raises(NotImplementedError, match=says) as caught:
            raise error if isinstance(error, BaseException) else AssertionError(f"it ran: {error}")
        text = str(caught.value)
        assert text.startswith(f"[rank {rank}] {__file__}, line ") and "pyg_sar.allow_local()" in text


@pytest.mark.parametrize("name", list(REFUSED)[::5])
def test_refused_while_numbers_are_looked_at(parts: str, name: str) -> None:
    """As 'pyg_sar.debug' does, by a mode that stands between the script and the watch."""
    work, says = REFUSED[name]

    def looked(data: Any) -> Any:
        with pyg_sar.debug():
            return work(data)

    for error in outcomes(f"{parts}/one", looked):
        with pytest.raises(NotImplementedError, match=says) as caught:
            raise error if isinstance(error, BaseException) else AssertionError(f"it ran: {error}")
        assert f"{__file__}, line " in str(caught.value)


def test_nothing_is_refused_without_the_watch(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_sar.distributed.guard.ON", False)  # as PYG_SAR_GUARDS=0 has it

    def worker(rank: int) -> Tensor:
        with watching():
            assert current() is None and not _get_current_function_mode_stack()
            return penalty(pyg_sar.load(f"{parts}/one"))

    assert all(isinstance(loss, Tensor) for loss in Workers(2).run(worker))
    monkeypatch.undo()
    with watching():  # a single worker sees all rows
        assert is_alone()


def test_allow_local(parts: str) -> None:
    @pyg_sar.allow_local()
    def center(x: Tensor) -> Tensor:
        return x - x.sum(0) / len(x)

    def work(data: Any) -> None:
        center(data.x)
        with pyg_sar.allow_local():
            h = data.x - data.x.mean(0)
            count = data.train_mask.sum()
            assert int(count) == count.item()
        h = h / count
        with pytest.raises(NotImplementedError):
            h.mean(0)  # what came of rows are rows

    passes(f"{parts}/one", work)
    assert center(torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2


def only_of_its_group(group: Any, folder: str) -> float | None:
    mesh = mesh_of(torch.arange(2).view(2, 1))
    if mesh is None:
        return None
    with watching():
        assert isinstance(current(), Watch)
        data = pyg_sar.load(folder, group=mesh.get_group("graph"))
        h = pyg_sar.nn.SAGEConv(8, C)(data.x - data.x.mean(0), data.edge_index)
        return float((h.argmax(-1) == data.y).double().mean())


def test_the_only_worker_of_a_group_has_all_rows(pool: Any, tmp_path: Any) -> None:
    """Such as the last stage of a pipeline, which tells the accuracy."""
    pyg_sar.partition(graph(), 1, tmp_path / "whole")
    assert all(0 <= share <= 1 for share in pool.run(2, only_of_its_group, str(tmp_path / "whole")))


def test_a_number_of_one_worker_warns_once(parts: str) -> None:
    def work(data: Any) -> None:
        assert pyg_sar.accuracy(data.y, data.y, data.train_mask) == 1
        for _ in range(2):
            int((data.x[data.train_mask] > 0).sum()) / data.train_mask.sum().item()

    with pytest.warns(UserWarning, match=r"'int' of a sum over rows.*pyg_sar\.accuracy") as said:
        passes(f"{parts}/one", work)
    assert [warning.filename for warning in said] == [__file__] * 2  # one for each worker


def marked(data: Any) -> None:
    data.train_mask[:10] = True


@pytest.mark.parametrize("work", [
    marked, lambda d: d.x[:10], lambda d: d.x[-3:, 2], lambda d: d.x[3], lambda d: d.x[[0, 1]],
    lambda d: d.x[torch.arange(5)], lambda d: d.x.index_select(0, torch.arange(5)),
    lambda d: d.x[torch.arange(d.num_nodes) < 5], lambda d: d.x[range(5), 0],
    lambda d: d.x[np.int64(3)],
    lambda d: d.x.t()[:, 4:8], lambda d: d.edge_attr[::2], lambda d: d.x.flip(0), lambda d: d.x.roll(1, 0),
])  # fmt: skip
def test_rows_chosen_by_position_warn_once(parts: str, work: Callable[[Any], Any]) -> None:
    def twice(data: Any) -> None:
        work(data)
        work(data)

    with pytest.warns(
        UserWarning, match=r"'(getitem|setitem|index_select|flip|roll)' chooses rows by where they stand"
    ) as said:
        passes(f"{parts}/one", twice)
    assert [warning.filename for warning in said] == [__file__] * 2  # one for each worker


def test_rows_chosen_by_rows_do_not_warn(parts: str) -> None:
    def work(data: Any) -> None:
        x, mask, index = data.x, data.train_mask, data.train_mask.nonzero().view(-1)
        for key in (slice(None), (..., slice(3)), (slice(None), [0, 1]), mask, index, data.n_id < 9):
            x[key]
        torch.zeros(data.num_nodes)[:5] = 1.0
        x[np.array(3)]  # of which nothing is known
        x.flip(1), x.roll(1, -1), x.flip([1]), torch.cat([x, x])[: len(x)], x[torch.rand(len(x)) < 0.5]
        x[torch.arange(len(x)), data.y], x[range(len(x)), data.y], x[torch.randperm(len(x))[:5]]
        for rows_, _ in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, data.y), batch_size=8):
            rows_.relu()
        x.index_select(0, index), x.index_select(1, torch.arange(2)), x[torch.isin(data.n_id, torch.arange(9))]
        assert current().kind(data.label) == Kind(SAME) and current().kind(data.train_idx) is None
        x[data.train_idx]  # this worker's rows among those of a list
        with pyg_sar.allow_local():
            x[:5]
        for part in x.split(8):
            part.relu()

    passes(f"{parts}/one", work)


def test_calls_in_other_forms_are_left_alone(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise TypeError("a call that the rules do not expect")

    def work(data: Any) -> None:
        assert data.x.index_select(index=torch.arange(20), dim=0).shape == data.x.shape
        with pytest.raises(TypeError):
            data.x.index_select("nodes")  # torch's own error
        with pytest.raises(IndexError):
            data.x[0, 0, 0]
        monkeypatch.setattr("pyg_sar.watch.rules.key_of_rows", fails)
        assert data.x[data.train_mask].size(1) == 8

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        passes(f"{parts}/one", work)


def test_rows_of_message_flow_graphs_stand_in_an_order(parts: str) -> None:
    def work(data: Any) -> None:
        flow = pyg_sar.message_flow_graphs(data.edge_index, data.train_mask, 1)
        x, edge_index = data.x[flow.node_rows], flow.edge_indices[0]
        pyg_sar.nn.SAGEConv(8, C)((x, x[: edge_index.graph.num_dst]), edge_index)

    passes(f"{parts}/one", work)


def weighted(data: Any, weight: Callable[[Any], float], local: bool = False) -> None:
    """Train a step with a loss that each worker weighs."""
    model = torch.nn.Linear(data.num_features, C)
    pyg_sar.broadcast_parameters(model)
    loss = pyg_sar.global_mean(F.cross_entropy(model(data.x), data.y, reduction="none")) * weight(data)
    if local:
        with pyg_sar.allow_local():
            loss.backward()
    else:
        loss.backward()
    pyg_sar.sum_gradients(model)


def test_splits_of_a_whole_graph_pass(parts: str) -> None:
    """Which one worker makes and partitions, after all were started."""

    def work(data: Any) -> None:
        whole = Data(x=torch.randn(N, 8), y=torch.randint(C, (N,)), edge_index=torch.randint(N, (2, 200)))
        assert T.RandomNodeSplit(num_val=3, num_test=3)(whole).train_mask.sum() == N - 6
        assert len(T.RandomLinkSplit()(whole)) == 3

    passes(f"{parts}/one", work)


def test_sums_of_another_type_are_sums(parts: str) -> None:
    found = passes(f"{parts}/one", lambda data: pyg_sar.all_reduce(data.train_mask.sum().float()))
    assert found[0] == found[1] == graph().train_mask.sum()


def test_destinations_that_are_left_out_are_counted(parts: str) -> None:
    def work(data: Any) -> None:
        ends = torch.where(data.edge_type == 0, data.edge_index[1], data.num_nodes)
        count = torch.zeros(data.num_nodes + 1).scatter_add_(0, ends, torch.ones(len(ends)))[:-1]
        assert torch.cat([data.x, count[:, None]], 1).shape == (data.num_nodes, 9)

    passes(f"{parts}/one", work)


def test_backward_passes_that_one_worker_leaves_out(parts: str) -> None:
    def work(data: Any) -> None:
        model, here = torch.nn.Linear(data.num_features, C), bool((data.n_id == 0).any())
        pyg_sar.broadcast_parameters(model)
        for mask in (data.n_id >= 0, data.n_id == 0):  # of which the second is on one worker
            losses = F.cross_entropy(model(data.x[mask]), data.y[mask], reduction="none")
            loss = pyg_sar.global_mean(losses)
            if here or int(mask.sum()):
                loss.backward()
        pyg_sar.sum_gradients(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers of one worker
        passes(f"{parts}/one", work)


def test_losses_that_differ_are_refused(parts: str) -> None:
    def own(data: Any) -> float:
        return 1 / (3 + int(bool((data.n_id == 0).any())))

    for error in outcomes(f"{parts}/one", lambda data: weighted(data, own)):
        assert isinstance(error, RuntimeError)
        assert re.search(r"differentiate different losses: .* on rank 0, .* on rank 1.*data\.total_nodes", str(error))
    passes(f"{parts}/one", lambda data: weighted(data, lambda data: 1 / data.total_nodes))
    passes(f"{parts}/one", lambda data: weighted(data, own, local=True))


# What rows become, by what is done with them.
KINDS: dict[str, tuple[Callable[[Any], Tensor], Kind | None]] = {
    "transposed": (lambda d: d.x.t(), Kind(ROWS, 1)),
    "heads": (lambda d: d.x.view(-1, 2, 4).transpose(0, 1), Kind(ROWS, 1)),
    "flat": (lambda d: d.x.flatten(), Kind(ROWS)),
    "new dimensions": (lambda d: d.x[None, :, 0, None], Kind(ROWS, 1)),
    "masked": (lambda d: d.x[d.train_mask], Kind(ROWS)),
    "masked columns": (lambda d: d.x[..., torch.tensor([0, 2])], Kind(ROWS)),
    "one row": (lambda d: d.x[0], None),
    "one row by a number of numpy": (lambda d: d.x[np.int64(0)], None),
    "one column by a number of numpy": (lambda d: d.x.t()[np.int64(0)], Kind(ROWS)),
    "stacked by another name": (lambda d: torch.stack([d.x, d.x], axis=1), Kind(ROWS)),
    "joined by another name": (lambda d: torch.cat([d.x, d.x], axis=1), Kind(ROWS)),
    "quantiles": (lambda d: torch.quantile(d.x, torch.tensor([0.1, 0.5]), dim=1), Kind(ROWS, 1)),
    "each row's median": (lambda d: torch.quantile(d.x, 0.5, dim=1), Kind(ROWS)),
    "rows times a vector": (lambda d: d.x @ torch.ones(8), Kind(ROWS)),
    "a vector times columns": (lambda d: torch.ones(8) @ d.x.t(), Kind(ROWS)),
    "numbers times a vector": (lambda d: torch.outer(d.x[:, 0], torch.ones(3)), Kind(ROWS)),
    "a vector times numbers": (lambda d: torch.outer(torch.ones(3), d.x[:, 0]), Kind(ROWS, 1)),
    "own destinations": (lambda d: d.edge_index[1][d.edge_type == 0], Kind(ENDS)),
    "read by sources": (lambda d: d.x[d.edge_index[0]], Kind(ROWS)),
    "read by destinations": (lambda d: d.x.index_select(0, d.edge_index[1]), Kind(ROWS)),
    "sequences of layers": (lambda d: torch.nn.LSTM(8, 4, batch_first=True)(torch.stack([d.x, d.x], 1))[0], Kind(ROWS)),
    "a cell": (lambda d: torch.nn.GRUCell(8, 8)(d.x, d.x), Kind(ROWS)),
    "a table": (lambda d: F.embedding(d.y, LINEAR.weight), Kind(ROWS)),
    "sums of rows": (lambda d: d.x.sum(-1), Kind(ROWS)),
    "stacked": (lambda d: torch.stack([d.x, d.x]).mean(0), Kind(ROWS)),
    "a layer": (lambda d: net(d), Kind(ROWS)),
    "a normalisation": (lambda d: pyg_sar.nn.BatchNorm(8)(d.x), Kind(ROWS)),
    "GraphNorm": (lambda d: pyg_sar.nn.GraphNorm(8)(d.x), Kind(ROWS)),
    "eval": (lambda d: torch.nn.BatchNorm1d(8).eval()(d.x), Kind(ROWS)),
    "statistics that are known": (lambda d: F.batch_norm(d.x, torch.zeros(8), torch.ones(8)), Kind(ROWS)),
    "degrees": (lambda d: degree(d.edge_index[1], d.num_nodes), Kind(ROWS)),
    "softmax": (lambda d: softmax(d.edge_attr, d.edge_index[1]), Kind(ROWS)),
    "sums by destination": (lambda d: scatter(d.edge_attr, d.edge_index[1], 0, d.num_nodes, "mean"), Kind(ROWS)),
    "one-hot": (lambda d: F.one_hot(d.y, C).float(), Kind(ROWS)),
    "in place": (lambda d: torch.zeros(d.num_nodes).masked_fill_(d.train_mask, 1.0), Kind(ROWS)),
    "assigned": (lambda d: assigned(d), Kind(ROWS)),
    "a sum": (lambda d: d.x.sum(0) * 2 + 1, Kind(SHARE, size=20)),
    "a sum of classes": (lambda d: torch.bincount(d.y, minlength=C), Kind(SHARE)),
    "contracted": (lambda d: d.x.t() @ d.x, Kind(SHARE, size=20)),
    "by letters": (lambda d: torch.einsum("nf,ng->fg", d.x, d.x), Kind(SHARE, size=20)),
    "a loss's sum": (lambda d: F.mse_loss(d.x, d.x, reduction="sum"), Kind(SHARE, size=20)),
    "a loss": (lambda d: pyg_sar.global_mean(losses(d)).log() * 2, Kind(LOSS)),
    "a weight": (lambda d: LINEAR.weight.square().mean(), Kind(SAME)),
    "the sum of all": (lambda d: pyg_sar.all_reduce(d.x.sum(0)), Kind(SAME)),
    "a readout": (lambda d: pyg_sar.nn.global_mean_pool(d.x, d.batch).relu(), Kind(SAME)),
    "by name": (lambda d: torch.matmul(input=d.x, other=torch.ones(8, 2)), None),
    "questions": (lambda d: (d.x > 0).any(0), None),
}


def assigned(data: Any) -> Tensor:
    out = torch.zeros(data.num_nodes)
    out[data.train_mask] = 1.0
    return out


@pytest.mark.filterwarnings("ignore:.*chooses rows by where they stand")
def test_kinds(parts: str) -> None:
    def work(data: Any) -> dict[str, Kind | None]:
        watch = current()
        assert watch is not None
        return {name: watch.kind(make(data)) for name, (make, _) in KINDS.items()}

    for found in passes(f"{parts}/one", work):
        assert found == {name: kind for name, (_, kind) in KINDS.items()}


def test_what_others_add_up_in_place_is_no_share_any_more(pool: Any, parts: str) -> None:
    pool.run(2, add_up, f"{parts}/one")


def add_up(group: Any, path: str) -> None:
    with watching():
        data = pyg_sar.load(path, group=group)
        total = data.x.sum(0)
        dist.all_reduce(total, group=group)
        total.sqrt()


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GCN": lambda: gnn.GCN(8, 4, 3, C, norm="BatchNorm", jk="lstm"),
    "GraphSAGE": lambda: gnn.GraphSAGE(8, 4, 2, C, norm="GraphNorm", jk="max"),
    "GIN": lambda: gnn.GIN(8, 4, 2, C, norm="InstanceNorm", jk="cat"),
    "GAT": lambda: gnn.GAT(8, 4, 2, C, v2=True, heads=2, norm="PairNorm", dropout=0.5),
    "PNA": lambda: gnn.PNA(8, 4, 2, C, aggregators=["mean", "std"], scalers=["identity"], deg=torch.ones(9).long()),
    "EdgeCNN": lambda: gnn.EdgeCNN(8, 4, 2, C, norm="LayerNorm"),
    "DeepGCN": lambda: gnn.Sequential(
        "x, edge_index",
        [
            (gnn.DeepGCNLayer(gnn.GENConv(8, 8), gnn.LayerNorm(8), torch.nn.ReLU()), "x, edge_index -> x"),
            gnn.MLP([8, 4, C]),
        ],
    ),
}


def step(model: torch.nn.Module, optimizer: Any, data: Any, out: Callable[[], Tensor]) -> None:
    optimizer.zero_grad()
    loss = pyg_sar.global_mean(F.cross_entropy(out()[data.train_mask], data.y[data.train_mask], reduction="none"))
    loss.backward()
    pyg_sar.sum_gradients(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_models_pass(parts: str, name: str) -> None:
    def work(data: Any) -> None:
        torch.manual_seed(0)
        model = pyg_sar.nn.convert(MODELS[name]())
        model(data.x, data.edge_index)
        pyg_sar.broadcast_parameters(model)
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4)
        step(model, optimizer, data, lambda: model(data.x, data.edge_index))
        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        assert current() is not None and current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
        pyg_sar.accuracy(out.argmax(-1), data.y, data.train_mask)

    passes(f"{parts}/one", work)


# Which have loops over types, orders and widths of their own, are not cut, or are written by hand.
ODD = ["MFConv", "RGCNConv", "HEATConv", "MedianAggregation", "RGATConv within-relation",
       "CorrectAndSmooth unscaled", "MetaLayer", "DirGNNConv"]  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("make", [CASES.get, converted], ids=["as it is", "converted"])
def test_layers_pass(name: str, make: Callable[[str], Case]) -> None:
    case = make(name)
    part = assignment("random", 2)
    topologies = [list(split(edges(seed=seed), part, part, 2)) for seed in (0, 1)]

    def worker(rank: int) -> None:
        own = [Share(ShardedEdgeIndex(assemble(t[rank], rank)), *ids(t[rank])) for t in topologies]
        with watching():
            given, _ = arguments(case, own, sizes(case))
            for value in tensors([given[k] for k in given if INPUTS.get(k, ("",))[0] in ("node", "dst", "edge")]):
                rows(value)
            out = output(layers[rank](**given))
            assert current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
            if out.requires_grad:
                out.square().sum().backward()

    with default(case.dtype):
        layers = [layer_of(case) for _ in range(2)]
        for error in Workers(2).run(worker):
            if error is not None:
                raise error


def ids(topology: Any) -> tuple[Tensor, Tensor, Tensor]:
    return topology.src_id, topology.dst_id, topology.e_id


def test_heterogeneous_models_pass(parts: str) -> None:
    metadata = (["u", "v"], [RELATION, BACK])
    models = {
        "HeteroConv": lambda: gnn.HeteroConv({t: gnn.SAGEConv((-1, -1), 4) for t in metadata[1]}, aggr="mean"),
        "to_hetero": lambda: gnn.to_hetero(gnn.GraphSAGE((-1, -1), 4, 2), metadata),
        "HGT": lambda: gnn.HGTConv(8, 4, metadata, heads=2),
        "HAN": lambda: gnn.HANConv(8, 4, metadata, heads=2),
    }
    try:
        models["to_hetero"]()
    except AttributeError:  # that of PyG 2.6 asks for an older torch
        del models["to_hetero"]

    def work(data: Any) -> None:
        for make in models.values():
            model = pyg_sar.nn.convert(make())
            for out in model(data.x_dict, data.edge_index_dict).values():
                assert current().kind(out) == Kind(ROWS)  # type: ignore[union-attr]
                out.square().sum().backward(retain_graph=True)

    passes(f"{parts}/two", work)


def test_it_leaves_after_the_second_step(parts: str) -> None:
    def work(data: Any) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.device("cpu"):  # a mode of torch as well
            assert len(_get_current_function_mode_stack()) == 2
            for left in (False, True, True):
                step(model, optimizer, data, lambda: checkpoint(model, data, use_reentrant=False))
                assert (current() is None) == left
                assert len(_get_current_function_mode_stack()) == 2 - left
        assert not _get_current_function_mode_stack()
        data.x.mean(0)

    passes(f"{parts}/one", work)


def right(model: torch.nn.Module, data: Any) -> None:
    step(model, torch.optim.SGD(model.parameters(), 0.1), data, lambda: model(data))


def wrong(head: torch.nn.Module, data: Any) -> None:
    head.zero_grad()
    F.cross_entropy(head(data.x), data.y).backward()  # a mean over local nodes
    pyg_sar.sum_gradients(head)


def student(data: Any, model: torch.nn.Module, head: torch.nn.Module) -> None:
    for _ in range(3):
        right(model, data)
    assert current() is None
    for _ in range(2):
        wrong(head, data)


def adversary(data: Any, model: torch.nn.Module, head: torch.nn.Module) -> None:
    for _ in range(2):
        for _ in range(3):
            right(model, data)
        wrong(head, data)


@pytest.mark.parametrize("work", [student, adversary])
def test_it_looks_at_each_model(parts: str, work: Callable[..., None]) -> None:
    """One that is trained behind another one, and one whose steps come after many of another one."""

    def meant(data: Any) -> None:
        with pyg_sar.allow_local():
            work(data, Net(), Head(8))

    def over(data: Any) -> None:
        model, head = Net(), Head(8)
        for _ in range(3):
            right(model, data)
            pyg_sar.sum_gradients(head)
        assert current() is None and not _get_current_function_mode_stack()
        right(model, data)
        wrong(head, data)
        assert current() is None

    for result in outcomes(f"{parts}/one", lambda data: work(data, Net(), Head(8))):
        assert isinstance(result, NotImplementedError) and "global_mean" in str(result), result
    passes(f"{parts}/one", meant)
    passes(f"{parts}/one", over)
    assert resting() is None and not _get_current_function_mode_stack()


def test_what_changed_while_it_did_not_look_is_unknown(parts: str) -> None:
    def work(data: Any) -> None:
        model, same = Net(), torch.nn.Parameter(torch.ones(20, 3)) * 2
        assert current().kind(same) == Kind(SAME)
        for _ in range(2):
            right(model, data)
        same.data.copy_(data.y.view(-1, 1))
        right(Net(), data)
        assert current().kind(same) is None and current().kind(data.x) == Kind(ROWS)

    passes(f"{parts}/one", work)


def test_what_a_step_computed_does_not_outlive_it(parts: str) -> None:
    def work(data: Any) -> None:
        model, alive = pyg_sar.nn.BatchNorm(8), []

        def forward() -> None:
            h = data.x * 2
            alive.append(weakref.ref(h))
            model(h)

        gc.disable()
        try:
            forward()
            assert alive[0]() is None
        finally:
            gc.enable()

    passes(f"{parts}/one", work)


def test_it_leaves_after_many_calls(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_sar.watch.mode.CALLS", 3)

    def work(data: Any) -> None:
        for _ in range(5):
            data.x.relu()
        data.x.mean(0)
        pyg_sar.all_reduce(data.x)
        assert current() is None and not _get_current_function_mode_stack()

    passes(f"{parts}/one", work)


def head(data: Any, norm: torch.nn.Module, x: Tensor | None = None) -> Tensor:
    """Return what a normalisation keeps of a readout, or of some rows."""
    rows = pyg_sar.nn.global_add_pool(data.x, data.batch) if x is None else x
    norm(torch.nn.functional.linear(rows, torch.ones(4, 8).tril()))
    return norm.running_var


def test_normalisations_of_readouts(parts: str, recwarn: Any) -> None:
    """Those that are not converted are exact; a converted one says what is not."""
    expected = head(graph(), torch.nn.BatchNorm1d(4))
    for found in passes(f"{parts}/one", lambda data: head(data, torch.nn.BatchNorm1d(4))):
        torch.testing.assert_close(found, expected)
    for work in (lambda data: data.x, lambda data: torch.full((data.num_nodes, 8), 0.3)):
        passes(f"{parts}/one", lambda data, work=work: head(data, pyg_sar.nn.BatchNorm1d(4), work(data)))
    assert not [warning for warning in recwarn if "readouts" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"same on all workers, as readouts are.*leave it out"):
        found, _ = passes(f"{parts}/one", lambda data: head(data, pyg_sar.nn.BatchNorm1d(4)))
    assert not torch.allclose(found, expected), "or there would be nothing to say"


CLIPS = {
    "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
    "norm, one by one": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
    "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.1),
    "value, one by one": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.1, foreach=False),
    "method": lambda parameters: [p.grad.clamp_(-0.1, 0.1) for p in parameters],
    "in one": lambda parameters: torch.norm(torch.stack([p.grad.norm() for p in parameters])),
}


def clipping(data: Any, clip: Callable[[Any], Any], early: bool, keeps: bool) -> None:
    """Train two steps with a clip before the sum of the second, or behind both."""
    model = torch.nn.Linear(data.num_features, C)
    pyg_sar.broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad(set_to_none=not keeps)
        pyg_sar.global_mean(F.cross_entropy(model(data.x), data.y, reduction="none")).backward()
        if early and step == 1:
            clip(model.parameters())
        pyg_sar.sum_gradients(model)
        if not early:
            clip(model.parameters())
        optimizer.step()


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_that_are_clipped_before_their_sum(parts: str, name: str) -> None:
    def allowed(data: Any) -> None:
        with pyg_sar.allow_local():
            clipping(data, CLIPS[name], True, False)

    for keeps in (False, True):
        for error in outcomes(f"{parts}/one", lambda data, keeps=keeps: clipping(data, CLIPS[name], True, keeps)):
            assert isinstance(error, RuntimeError)
            assert re.search(r"test_watch.py, line \d+: gradients are clipped.*sum_gradients' right after", str(error))
        passes(f"{parts}/one", lambda data, keeps=keeps: clipping(data, CLIPS[name], False, keeps))
    passes(f"{parts}/one", allowed)


class Embedded(torch.nn.Module):
    def __init__(self, data: Any) -> None:
        super().__init__()
        self.table, self.linear = pyg_sar.nn.NodeEmbedding(data, 4), torch.nn.Linear(4, C)


@pytest.mark.parametrize("name", ["norm", "norm, one by one", "in one", "value", "method"])
def test_norms_of_tables_of_nodes(parts: str, name: str) -> None:
    def work(data: Any, of: Callable[[Embedded], Any] = lambda model: model.parameters()) -> None:
        model = Embedded(data)
        pyg_sar.broadcast_parameters(model)
        pyg_sar.global_mean(F.cross_entropy(model.linear(model.table()), data.y, reduction="none")).backward()
        pyg_sar.sum_gradients(model)
        CLIPS[name](list(of(model)))

    if "norm" in name or name == "in one":
        for error in outcomes(f"{parts}/one", work):
            assert isinstance(error, NotImplementedError)
            assert re.search(r"test_watch.py, line \d+: .*norm of the gradient of a table of nodes", str(error))
        passes(f"{parts}/one", lambda data: work(data, lambda model: model.linear.parameters()))
    else:
        passes(f"{parts}/one", work)


def test_compiled_code_is_left_alone(parts: str) -> None:
    def work(data: Any) -> Tensor:
        return torch.compile(lambda x: x.relu() + 1, backend="eager", fullgraph=True)(data.x)

    passes(f"{parts}/one", work)


class Centred(gnn.MessagePassing):
    """Has an argument that is no tensor, for which it runs one-shot, and a mean over nodes."""

    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x, k=(1, 2))

    def message(self, x_j: Tensor, k: Any) -> Tensor:
        return k[0] * x_j.tanh()

    def update(self, out: Tensor) -> Tensor:
        return out - out.mean(0) if self.centred else out * 2


def test_code_of_layers_that_run_one_shot(parts: str) -> None:
    def work(centred: bool, hooked: bool) -> Callable[[Any], Tensor]:
        def run(data: Any) -> Tensor:
            it = pyg_sar.nn.convert(Centred(centred))
            if hooked:
                it.register_message_forward_hook(lambda *_: None)
            return it(data.x, data.edge_index)

        return run

    for hooked in (False, True):
        for result in outcomes(f"{parts}/one", work(True, hooked)):
            assert isinstance(result, NotImplementedError) and "'mean'" in str(result), result
        first, second = passes(f"{parts}/one", work(False, hooked))
        assert first.shape[1:] == second.shape[1:] == (8,)


def test_a_term_of_a_table_is_a_share(parts: str) -> None:
    def work(data: Any) -> Tensor:
        weight = copy.deepcopy(pyg_sar.nn.NodeEmbedding(data, 4)).weight
        return pyg_sar.global_mean(weight.sum(1)) + 0.1 * weight.pow(2).sum()

    for result in outcomes(f"{parts}/one", work):
        assert isinstance(result, Tensor) or "replicated" not in str(result), result


class Head(torch.nn.Module):
    def __init__(self, channels: int = C) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(channels, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@pytest.mark.parametrize("given", ["both", "one after the other", "model", "frozen", "meant", "table"])
def test_modules_that_are_left_out_of_the_sum(parts: str, given: str) -> None:
    """A predictor beside the model, as in many scripts, which steps by its own rows alone."""

    def work(data: Any) -> None:
        torch.manual_seed(0)
        model, head, table = Net(), Head(), pyg_sar.nn.NodeEmbedding(data, C)
        learns = [*model.parameters()] if given == "frozen" else [*model.parameters(), *head.parameters()]
        learns += table.parameters()  # whose gradients are complete
        optimizer = torch.optim.Adam(learns)
        for _ in range(2):
            optimizer.zero_grad()
            out = (head(model(data)) + table())[data.train_mask]
            pyg_sar.global_mean(F.cross_entropy(out, data.y[data.train_mask], reduction="none")).backward()
            if given == "meant":
                with pyg_sar.allow_local():
                    pyg_sar.sum_gradients(model)
            else:
                pyg_sar.sum_gradients(model, *[head] * (given in ("both", "table")), *[table] * (given == "table"))
            if given == "one after the other":
                pyg_sar.sum_gradients(head)
            optimizer.step()

    if given != "model":
        passes(f"{parts}/one", work)
        return
    with pytest.warns(
        UserWarning, match=r"not given parameters that were changed, of shapes \[3, 3\], \[3\]: each wor"
    ):
        passes(f"{parts}/one", work)
