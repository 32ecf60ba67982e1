"""What sees a worker's rows alone is refused by name in the first step, or warned of."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
from support.watched import LINEAR, C, N, graph, losses, net, outcomes, passes, warned
from torch import Tensor
from torch_geometric.utils import degree, homophily, scatter

import pyg_sar
from pyg_sar.watch import SAME, current
from pyg_sar.watch.kinds import Kind


class Both(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(pyg_sar.nn.GCNConv(8, 4) for _ in range(2))

    def forward(self, *args: Any) -> Any:
        return tuple(conv(*args) for conv in self.convs)


def by_class(data: Any) -> Tensor:
    """Return a sum of rows for each class."""
    return torch.stack([data.x[data.y == c].sum(0) for c in range(C)])


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
    "numbers of destinations": (
        lambda d: d.edge_attr * d.edge_index[1].view(-1, 1),
        r"computes \('mul'\) with the numbers of destinations.*data\.n_id\[edge_index\[1\]\]",
    ),
    "the same as floats": (lambda d: d.edge_index[1].float(), "computes .'float'. with the numbers of destinations"),
    **{
        name: (use, r"makes use of a sum over this worker's rows.*pyg_sar\.global_sum")
        for name, use in {
            "linear attention": lambda d: torch.einsum("nd,de->ne", d.x, torch.einsum("nd,ne->de", d.x, d.x)),
            "sums of classes by distance": lambda d: torch.cdist(d.x, by_class(d)),
            "sums of classes by angle": lambda d: F.cosine_similarity(d.x[:, None], by_class(d)[None], dim=-1),
            "sums of classes for each node": lambda d: F.embedding(d.y, by_class(d)),
            "a memory of classes": lambda d: torch.cdist(d.x, torch.zeros(C, 8).index_add_(0, d.y, d.x)),
            "a bound": lambda d: d.x.clamp(max=d.x.sum()),
            "a choice": lambda d: torch.where(d.x > d.x.sum(0), d.x, 0),
            "a scale": lambda d: F.layer_norm(d.x, (8,), d.x.sum(0)),
            "a sum expanded": lambda d: d.x - d.x.sum(0).expand_as(d.x),
            "tensordot": lambda d: torch.tensordot(d.x, torch.tensordot(d.x, d.x, dims=([0], [0])), dims=([1], [0])),
            "classes by 'put'": lambda d: torch.cdist(d.x, torch.zeros(C, 8).index_put((d.y,), d.x, accumulate=True)),
            "rows that are set": lambda d: d.x.clone().__setitem__(d.train_mask, d.x.sum(0)),
        }.items()
    },
    "three factors": (lambda d: torch.einsum("nd,md,me->ne", d.x, d.x, d.x), "every row with every other one"),
    "a window along rows": (lambda d: F.conv1d(d.x.t()[None], torch.ones(8, 8, 3)), "takes 'conv1d'"),
    "norms of columns": (lambda d: d.x.renorm(2, 1, 1.0), "takes 'renorm'"),
    "NormalizeFeatures": (lambda d: T.NormalizeFeatures()(d), "'NormalizeFeatures' takes 'min'.*before"),
}


@pytest.mark.parametrize("name", ["numpy", "tolist"])
def test_rows_that_leave_torch(parts: str, name: str) -> None:
    for text in outcomes(f"{parts}/one", lambda data: warned(getattr(net(data).argmax(-1), name))):
        assert f"'{name}' gives the numbers of this worker's rows alone" in text and "pyg_sar.gather" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(f"{parts}/one", lambda data: getattr(pyg_sar.gather(data.y, data.n_id, None), name)())


def test_lazy_parameters_are_told_of_all_the_same(parts: str) -> None:
    for error in outcomes(f"{parts}/one", lambda data: pyg_sar.broadcast_parameters(gnn.GraphSAGE(-1, 8, 2, 4))):
        assert "parameter of a lazy layer" in str(error)


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


def test_a_number_of_one_worker_warns_once(parts: str) -> None:
    def work(data: Any) -> None:
        assert pyg_sar.accuracy(data.y, data.y, data.train_mask) == 1
        for _ in range(2):
            int((data.x[data.train_mask] > 0).sum()) / data.train_mask.sum().item()

    with pytest.warns(UserWarning, match=r"'int' of a sum over rows.*pyg_sar\.accuracy") as said:
        passes(f"{parts}/one", work)
    assert [warning.filename for warning in said] == [__file__] * 2  # one for each worker


def test_destinations_told_apart_by_their_numbers_warn_once(parts: str) -> None:
    def twice(data: Any) -> None:
        dst = data.edge_index[1]
        for _ in range(2):
            assert (dst < 13).dtype == torch.bool
        assert bool((dst < data.num_nodes).all() & (dst >= 0).all() & (dst < int(data.num_nodes)).all())
        assert (data.n_id[dst] < 13).shape == (dst * 2 + data.edge_type).shape

    with pytest.warns(UserWarning, match=r"'lt' tells apart numbers of destinations.*n_id\[edge_index") as said:
        passes(f"{parts}/one", twice)
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


def test_rows_are_grouped_by_where_they_stand(parts: str) -> None:
    def neighbors(data: Any) -> Tensor:
        rows = data.x[data.edge_index[0]]
        return rows.view(2, -1, 8)

    for text in outcomes(f"{parts}/one", lambda data: warned(lambda: neighbors(data))):
        assert "groups rows by where they stand" in text and "edge_index[1]" in text
    passes(f"{parts}/one", lambda data: data.x.view(1, -1, 2, 4).view(-1, 4).view(-1, 8))
    passes(f"{parts}/one", lambda data: F.conv1d(data.x[:, None].renorm(2, 0, 1.0), torch.ones(1, 1, 3)))


def test_rows_of_message_flow_graphs_stand_in_an_order(parts: str) -> None:
    def work(data: Any) -> None:
        flow = pyg_sar.message_flow_graphs(data.edge_index, data.train_mask, 1)
        x, edge_index = data.x[flow.node_rows], flow.edge_indices[0]
        pyg_sar.nn.SAGEConv(8, C)((x, x[: edge_index.graph.num_dst]), edge_index)

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


def test_a_term_of_a_table_is_a_share(parts: str) -> None:
    def work(data: Any) -> Tensor:
        weight = copy.deepcopy(pyg_sar.nn.NodeEmbedding(data, 4)).weight
        return pyg_sar.global_mean(weight.sum(1)) + 0.1 * weight.pow(2).sum()

    for result in outcomes(f"{parts}/one", work):
        assert isinstance(result, Tensor) or "replicated" not in str(result), result
