r"""What layers send, receive, save and wait for, and the log in which all of it is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Traffic:
    """Bytes that one aggregation sent to and received from other workers, and the seconds in which it waited for them;
    ``case`` is the paper's 1 or 2, ``saved`` the bytes that it keeps until the backward pass, local rows included.
    Of rows at home (:func:`pyg_sar.offload`), the bytes that it loaded from there and stored there. ``layer`` is what
    its layer is called in the model, as far as that is known.
    """

    forward_sent: int = 0
    forward_received: int = 0
    backward_sent: int = 0
    backward_received: int = 0
    case: int = 0
    saved: int = 0
    forward_wait: float = 0.0
    backward_wait: float = 0.0
    forward_loaded: int = 0
    forward_stored: int = 0
    backward_loaded: int = 0
    backward_stored: int = 0
    layer: str = ""

    def forward(
        self, sent: int = 0, received: int = 0, wait: float = 0.0, loaded: int = 0, stored: int = 0
    ) -> None:  # fmt: skip
        """Add to the forward pass."""
        self.forward_sent += sent
        self.forward_received += received
        self.forward_wait += wait
        self.forward_loaded += loaded
        self.forward_stored += stored

    def backward(
        self, sent: int = 0, received: int = 0, wait: float = 0.0, loaded: int = 0, stored: int = 0
    ) -> None:  # fmt: skip
        """Add to the backward pass."""
        self.backward_sent += sent
        self.backward_received += received
        self.backward_wait += wait
        self.backward_loaded += loaded
        self.backward_stored += stored


@dataclass
class Log:
    """Gives the :class:`Traffic` of every aggregation to all who listen."""

    listeners: list[list[Traffic]] = field(default_factory=list)

    def open(self, layer: str) -> Traffic:
        """Return the record of a new aggregation of a layer."""
        traffic = Traffic(layer=layer)
        for records in self.listeners:
            records.append(traffic)
        return traffic

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """Collect a :class:`Traffic` for each aggregation within the context, in the order of the forward pass."""
        records: list[Traffic] = []
        self.listeners.append(records)
        try:
            yield records
        finally:  # in any order: lists that are alike are not the same
            self.listeners = [other for other in self.listeners if other is not records]


def record_traffic(edge_index: Any) -> AbstractContextManager[list[Traffic]]:
    """Count what every layer sends and receives, see :class:`Traffic`; an aggregate that is kept has no record.

    .. code-block:: python

        with pyg_sar.record_traffic(data.edge_index) as layers:
            model(data.x, data.edge_index).sum().backward()
        print(layers[0].forward_received)

    Args:
        edge_index (ShardedEdgeIndex): The sharded graph on which the layers run, in any mode.

    Returns:
        A context manager that gives a list, to which each aggregation adds its :class:`Traffic`.
    """
    return edge_index._graph.exchange.log.record()
