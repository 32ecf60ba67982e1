r"""Runs a layer by its own code on rows at home, one chunk of destinations with all their edges at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import ShardedGraph
from pyg_sar.nn.replay.call import PAIR, Call, Ends, alike
from pyg_sar.nn.replay.choose import choose, rows_of
from pyg_sar.nn.replay.isolate import Lost, State
from pyg_sar.nn.replay.strategy import Strategy
from pyg_sar.offload.chunks import CONSTANT, DESTINATION, EDGE, PARAMETER, SOURCE, AtHome, Chunk, PerChunk, run
from pyg_sar.offload.rows import HostRows
from pyg_sar.structure import tensors


def in_host_memory(call: Call) -> HostRows | None:
    """Return rows at home among the arguments, if there are any."""
    return next((t for t in tensors(call.kwargs) if isinstance(t, HostRows)), None)


class Propagation(PerChunk):
    """A call of a layer's ``propagate``.

    Its inputs are the tensors of the call, then the layer's parameters; ``kinds`` tells what each has rows of.
    """

    needs_source, by_pieces = True, False

    def __init__(self, call: Call, graph: ShardedGraph) -> None:
        self.inputs: list[Tensor] = []
        self.kinds: list[str] = []
        self.seeds = graph.seeds
        self.drawn: list[int] = []
        self.makes = EDGE if call.updates else DESTINATION
        self.rows = edge, nodes, _ = rows_of(call, graph)
        kinds = dict.fromkeys(edge, EDGE) | dict.fromkeys(nodes, DESTINATION)
        kwargs: dict[str, Any] = {}
        for name, value in call.kwargs.items():
            if name in call.lifted:
                # A tensor that is read at destinations alone may have no rows of sources.
                pair = value if isinstance(value, PAIR) else Ends((value if f"{name}_j" in call.asked else None, value))
                numbers = (self.add(t, k) for t, k in zip(pair, (SOURCE, DESTINATION), strict=True))
                kwargs[name] = alike(pair, numbers)
            else:
                kwargs[name] = self.add(value, kinds.get(name, CONSTANT))
        self.call, self.state = replace(call, kwargs=kwargs), State(call.layer)
        self.strategy: Strategy | None = None
        for parameter in call.layer.parameters():
            self.add(parameter, PARAMETER)

    def add(self, value: Any, kind: str) -> Any:
        """Return the number of a tensor among the inputs, and other values as they are."""
        if not isinstance(value, Tensor):
            return value
        self.inputs.append(value)
        self.kinds.append(kind)
        return Number(len(self.inputs) - 1)

    def run(self, it: Chunk, values: Sequence[Any], exchange: AtHome) -> Tensor:
        """Run the layer's code on the chunk, as the layer was; every chunk, and backward, drops by the same seeds."""
        with self.state.restored(), self.seeds.replay(self.drawn):
            out = self.on_chunk(it, values)
            lost = {name: value for name, value in self.call.layer.__dict__.items() if isinstance(value, Lost)}
        if not torch.is_grad_enabled():  # in the forward pass, after which the layer may look for it
            self.call.layer.__dict__.update(lost)
        return out

    def on_chunk(self, it: Chunk, values: Sequence[Any]) -> Tensor:
        """Run the layer's own code on the chunk as the layer is."""
        call = replace(self.call, kwargs={name: given(spec, values) for name, spec in self.call.kwargs.items()})
        if self.strategy is None or not self.strategy.fits(call, it.graph):  # it was looked at for another chunk
            self.strategy = choose(call, it.graph, None, rows=self.rows)
        strategy = self.strategy
        if strategy.name in ("one-shot", "refused", "padded"):
            raise NotImplementedError(
                f"'{type(call.layer).__name__}' cannot run on chunks of rows at home: {strategy.why}. Leave "
                "the model in memory."
            )
        return strategy.run(call, it.graph)


def given(spec: Any, values: Sequence[Any]) -> Any:
    """Return an argument of the call: the value of a number, a pair of those, or what it is."""
    if isinstance(spec, tuple):
        return alike(spec, (given(s, values) for s in spec))
    return values[spec] if type(spec) is Number else spec


class Layer(PerChunk):
    """A layer as a whole, whose code mixes rows beside its aggregation.

    Args:
        layer: Called with the rows of sources and destinations, the edges, and tensors that have a row for each edge.
    """

    needs_source, by_pieces = True, False

    def __init__(self, layer: torch.nn.Module) -> None:
        self.layer = layer

    def run(self, it: Chunk, values: Sequence[Any], exchange: AtHome) -> Tensor:
        """Run the layer."""
        x_src, x_dst, *others = values
        edge = others[: len(others) - len(list(self.layer.parameters()))]
        return self.layer.forward((x_src, x_dst), ShardedEdgeIndex(it.graph), *edge)


class Number(int):
    """The number of a tensor among the inputs."""


@torch.compiler.disable
def by_chunks(call: Call, graph: ShardedGraph, rows: HostRows) -> Tensor:
    """Run a layer by its own code, chunk by chunk."""
    program = Propagation(call, graph)
    inputs, program.inputs = program.inputs, []  # autograd keeps the program as long as the result lives
    return run(rows.place, graph, program, program.kinds, inputs)


@torch.compiler.disable
def layer_by_chunks(layer: torch.nn.Module, graph: ShardedGraph, x: tuple[Any, Any], *edge: Tensor) -> Tensor:
    """Run a layer as a whole, chunk by chunk, on rows of sources and destinations and tensors of edges."""
    parameters = list(layer.parameters())
    kinds = [SOURCE, DESTINATION, *[EDGE] * len(edge), *[PARAMETER] * len(parameters)]
    return run(x[0].place, graph, Layer(layer), kinds, [*x, *edge, *parameters])
