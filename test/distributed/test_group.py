"""How workers talk: whose an error is."""

import pytest
import torch

from pyg_sar.distributed.group import talking
from pyg_sar.distributed.notices import LostWorkers


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), RuntimeError("No backend type associated with device")]
)
def test_errors_of_this_worker_alone_are_its_own(error):
    with pytest.raises(type(error)) as caught, talking("summing"):
        raise error
    assert caught.value is error
    with pytest.raises(LostWorkers, match="Lost the other workers while summing"), talking("summing"):
        raise RuntimeError("Connection reset by peer")
