"""When the watch looks and when it leaves; losses, clips and modules that gradients are summed of."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
import torch_geometric.transforms as T
from support.watched import C, N, Net, graph, outcomes, passes, step
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.distributed.simulated import Workers
from pyg_sar.distributed.stages import mesh_of
from pyg_sar.watch import ROWS, SAME, current, is_alone, resting
from pyg_sar.watch.kinds import Kind
from pyg_sar.watch.mode import Watch, watching


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


def test_nothing_is_refused_without_the_watch(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_sar.distributed.guard.ON", False)  # as PYG_SAR_GUARDS=0 has it

    def worker(rank: int) -> Tensor:
        with watching():
            assert current() is None and not _get_current_function_mode_stack()
            x = pyg_sar.load(f"{parts}/one").x
            return x - x.mean(0)

    assert all(isinstance(x, Tensor) for x in Workers(2).run(worker))
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
    for k in range(2):
        optimizer.zero_grad(set_to_none=not keeps)
        pyg_sar.global_mean(F.cross_entropy(model(data.x), data.y, reduction="none")).backward()
        if early and k == 1:
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
            assert re.search(r"test_mode.py, line \d+: gradients are clipped.*sum_gradients' right after", str(error))
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
            assert re.search(r"test_mode.py, line \d+: .*norm of the gradient of a table of nodes", str(error))
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
