"""Random models: layers of PyG one after the other, normalised, joined and read out, and a loss of what they give."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as gnn
from support import conv_zoo as zoo
from support.nasty_graph import NUM_NODES, edges
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar

WIDTH, CLASSES, GRAPHS = zoo.F, 4, 4
OF_NODES, OF_EDGES = ("x_0", "pos", "normal", "node_type"), ("edge_weight", "edge_attr", "edge_type")
LAYERS = zoo.LAYERS | {name: case for name, case in zoo.OPTIONS.items() if "Conv" in name}
PAIRS = torch.randint(NUM_NODES, (2, 40), generator=torch.Generator().manual_seed(5))
LINKED, OF_GRAPHS = torch.arange(40) % 2, torch.arange(GRAPHS) % CLASSES
NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm": lambda: gnn.BatchNorm(WIDTH),
    "untracked": lambda: gnn.BatchNorm(WIDTH, affine=False, track_running_stats=False),
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(WIDTH),
    "LayerNorm of nodes": lambda: gnn.LayerNorm(WIDTH, mode="node"),
    "torch.LayerNorm": lambda: torch.nn.LayerNorm(WIDTH),
    "DiffGroupNorm": lambda: gnn.DiffGroupNorm(WIDTH, 2),
    "MLP": lambda: gnn.MLP([WIDTH, 5, WIDTH]),
}
WHOLE: dict[str, Callable[[int], torch.nn.Module]] = {
    "GraphNorm": gnn.GraphNorm, "InstanceNorm": gnn.InstanceNorm, "LayerNorm": gnn.LayerNorm,
    "PairNorm": lambda _: gnn.PairNorm(), "GraphSizeNorm": lambda _: gnn.GraphSizeNorm(),
}  # fmt: skip
BY_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "in place": lambda x: F.relu_(x * 1.5),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "view": lambda x: x.view(len(x), 2, -1).transpose(1, 2).reshape(len(x), -1),
    "cumsum": lambda x: x.cumsum(-1).tanh(),
    "norm": lambda x: x / (x.norm(dim=-1, keepdim=True) + 1),
}


def usable(case: zoo.Case) -> bool:
    """Whether a layer runs on one set of nodes, whose rows are what the layers before made."""
    known = {"x", "edge_index", *OF_NODES, *OF_EDGES}
    return not (case.says or case.two) and case.train and set(case.given.split()) <= known


NOT_AT_HOME = {"ARMAConv", "MFConv", "GCNConv decomposed"}
NAMES = [name for name, case in LAYERS.items() if usable(case) and case.dtype == torch.float64 and name in zoo.CASES]


def graph() -> Data:
    """The graph, with all that layers and losses read."""
    data = Data(x=zoo.numbers("x", NUM_NODES), edge_index=edges())
    for name in OF_NODES:
        data[name] = zoo.numbers(name, NUM_NODES)
    for name in OF_EDGES:
        data[name] = zoo.numbers(name, data.num_edges)
    data.y, data.train_mask = torch.arange(NUM_NODES) % CLASSES, torch.arange(NUM_NODES) % 3 > 0
    data.batch = torch.arange(NUM_NODES) * GRAPHS // NUM_NODES
    return data


class Conv(torch.nn.Module):
    """A layer, and a map to the common width."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.layer = name, zoo.layer_of(LAYERS[name])
        self.lin: torch.nn.Module = torch.nn.Identity()
        width = copy.deepcopy(self)(graph().x, graph()).size(
            -1
        )  # of a copy, since some layers keep what they are given
        if width != WIDTH:
            self.lin = torch.nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, data: Any) -> Tensor:
        given = {name: data[name] for name in LAYERS[self.name].given.split()[1:]}
        return self.lin(zoo.output(self.layer(x, **given)))


class Pooled(torch.nn.Module):
    """What all nodes of a graph say together, for each of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.lin = how, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, batch: Tensor, pools: Any) -> Tensor:
        return x + self.lin(getattr(pools, f"global_{self.how}_pool")(x, batch, GRAPHS)).tanh()[batch]


class Model(torch.nn.Module):
    """A random model, perhaps without what rows at home refuse."""

    pools: Any = gnn  # whose poolings it takes

    def __init__(self, seed: int, at_home: bool) -> None:
        super().__init__()
        self.random, self.at_home = random.Random(seed), at_home
        self.steps, self.plan = torch.nn.ModuleList(), []
        depth = self.random.randint(1, 3)
        for _ in range(depth):
            name = self.random.choice([name for name in NAMES if not (at_home and name in NOT_AT_HOME)])
            self.add("conv", name, Conv(name))
            for _ in range(self.random.randint(0, 3)):
                self.between()
            self.add("keep", "")
        how = self.random.choice(["cat", "max"] if at_home else ["cat", "max", "lstm"])
        self.jump = gnn.JumpingKnowledge(how, WIDTH, depth)
        self.head = self.random.choice(["nodes", "nodes", "pairs"] if at_home else ["nodes", "pairs", "graphs"])
        self.add(f"jump by {how}, then {self.head}", "")
        self.soft = gnn.SoftmaxAggregation(learn=True)
        self.lin = torch.nn.Linear(WIDTH * depth if how == "cat" else WIDTH, CLASSES)

    def add(self, kind: str, name: str, module: torch.nn.Module | None = None) -> None:
        self.steps.append(torch.nn.Identity() if module is None else module)
        self.plan.append((kind, name))

    def between(self) -> None:
        """Add something between layers."""
        kinds = ["by row", "by row", "norm", "of one graph", "add", "cat"]
        kind = self.random.choice(kinds if self.at_home else [*kinds, "of graphs", "pooled"])
        if kind == "by row":
            self.add(kind, self.random.choice(list(BY_ROW)))
        elif kind == "norm":
            self.add(kind, name := self.random.choice(list(NORMS)), NORMS[name]())
        elif kind in ("of graphs", "of one graph"):
            name = self.random.choice(list(WHOLE))
            self.add("norm" if kind == "of one graph" else kind, name, WHOLE[name](WIDTH))
        elif kind == "pooled":
            how = self.random.choice(["mean", "add", "max"])
            self.add(kind, how, Pooled(how))
        else:
            self.add(kind, "", torch.nn.Linear(2 * WIDTH, WIDTH) if kind == "cat" else None)

    def forward(self, data: Any) -> Tensor:
        x, kept = data.x, []
        for (kind, name), step in zip(self.plan, self.steps, strict=True):
            if kind == "conv":
                x = step(x, data)
            elif kind == "by row":
                x = BY_ROW[name](x)
            elif kind == "norm":
                x = step(x)
            elif kind == "of graphs":
                x = step(x, data.batch)
            elif kind == "pooled":
                x = step(x, data.batch, self.pools)
            elif kind == "add":
                x = x + data.x
            elif kind == "cat":
                x = step(torch.cat([x, data.x], -1))
            elif kind == "keep":
                kept.append(x)
        x = self.jump(kept)
        return self.lin(self.soft(x, data.batch, dim_size=GRAPHS) if self.head == "graphs" else x)

    def loss(self, data: Any, shared: bool) -> Tensor:
        """Return the loss of all nodes, pairs or graphs, as a script says it, for one process or several."""
        out = self(data)
        if self.head == "graphs":
            loss = F.cross_entropy(out, OF_GRAPHS)
            return pyg_sar.replicated(loss) if shared else loss
        if self.head == "nodes":
            out, y = out[data.train_mask], data.y[data.train_mask]
            if shared:
                return pyg_sar.global_mean(F.cross_entropy(out, y, label_smoothing=0.1, reduction="none"))
            return F.cross_entropy(out, y, label_smoothing=0.1)
        if isinstance(out, pyg_sar.HostRows):
            out = out[torch.arange(len(out))]
        index, mine = pyg_sar.shard_links(PAIRS, data.n_id) if shared else (PAIRS, slice(None))
        score, linked = (out[index[0]] * out[index[1]]).sum(-1), LINKED[mine].to(out.dtype)
        if shared:
            return pyg_sar.global_mean(F.binary_cross_entropy_with_logits(score, linked, reduction="none"))
        return F.binary_cross_entropy_with_logits(score, linked)
