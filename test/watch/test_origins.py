"""Rows of two partitions, pairs of nodes by their ids, and rows in another order."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support.watched import RELATION, C, N, Net, graph, losses, net, outcomes, passes, two_types
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.watch import current
from pyg_sar.watch.mode import watching

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
    for work in (lambda d: operator.setitem(d.train_mask, slice(10), True), lambda d: d.x[:10]):
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


# What is done with two loads of data, of which the second may be those of other nodes.
JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "features": lambda a, b: pyg_sar.nn.GCNConv(8, C)(b.x, a.edge_index),
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
        text = (
            r"test_origins\.py, line \d+: .* joins rows of two partitions.*row \d+ is node \d+ in one and node \d+ in"
        )
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
