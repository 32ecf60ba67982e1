"""The messages that workers start."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


@contextmanager
def started(module: ModuleType) -> Iterator[list[Any]]:
    """Yield a list of all messages that this module has started since."""
    messages, start = [], module.start

    def noted(new, group):
        messages.extend(new)
        return start(new, group)

    with mock.patch.object(module, "start", noted):
        yield messages
