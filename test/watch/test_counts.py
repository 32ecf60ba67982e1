"""The number of this worker's nodes, taken for that of all."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import torch
from support.watched import C, Net, outcomes, passes, warned
from torch import Tensor

import pyg_sar
from pyg_sar.distributed.values import from_bytes, to_bytes


def test_a_sum_by_the_number_of_rows_may_be_right(parts: str) -> None:
    for rank, text in enumerate(outcomes(f"{parts}/one", lambda data: warned(lambda: data.x.sum(0) / len(data.x)))):
        assert text.startswith(f"[rank {rank}] {__file__}, line ") and "by their number, which is a mean" in text


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


def per_node(data: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(data.num_nodes, 4))


def test_the_number_of_nodes_can_be_saved(parts: str, tmp_path: Any) -> None:
    def work(data: Any) -> None:
        file = tmp_path / f"{data.n_id[0].item()}.pt"
        torch.save({"n": data.num_nodes}, file)
        assert torch.load(file, weights_only=True) == {"n": 20}
        assert type(from_bytes(to_bytes({"n": data.num_nodes}))["n"]) is int

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows by position
        passes(f"{parts}/one", work)
