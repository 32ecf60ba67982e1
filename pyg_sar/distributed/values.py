r"""Values as bytes, and back, without pickle: who reads bytes of somebody else must not run what is in them.

Numbers, strings, tensors, data types, and lists, tuples and dictionaries of these are written as one safetensors file,
whose tensors are named by numbers and whose metadata holds the rest as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

KEY = "value"  # of the metadata


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        TypeError: If it holds something else than what is listed above.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_described(value, tensors))
    return save(tensors, metadata={KEY: text})


def from_bytes(data: bytes) -> Any:
    """Return the value.

    Raises:
        ValueError: If the bytes hold none.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return _value(json.loads(header["__metadata__"][KEY]), load(data))


def write(file: str | os.PathLike[str], value: Any) -> None:
    """Write a value to a file."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_described(value, tensors))
    write_tensors(file, tensors, {KEY: text})


def write_tensors(file: str | os.PathLike[str], tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors to a file.

    Raises:
        OSError: If the system does not let it.
    """
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"'{file}' could not be written: {error}") from error


def read(file: str | os.PathLike[str]) -> Any:
    """Return the value that a file holds.

    Raises:
        ValueError: If it holds none.
    """
    with safe_open(file, framework="pt") as f:
        text = (f.metadata() or {}).get(KEY)
        if text is None:
            raise ValueError(f"'{file}' holds no value that pyg_sar wrote")
        # Copies: who goes on to change them must not keep a file that is removed later, which NFS would not have.
        return _value(json.loads(text), {key: f.get_tensor(key).clone() for key in f.keys()})  # noqa: SIM118


def _described(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what JSON can hold, and put tensors aside."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return _described(value.item(), tensors)
    if isinstance(value, int) and not isinstance(value, Enum):  # such as the number of nodes of loaded data
        return int(value)
    if isinstance(value, Tensor):
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        key = whole.data_ptr(), whole.dtype, whole.shape
        same = (name for name, t in tensors.items() if (t.data_ptr(), t.dtype, t.shape) == key)
        if whole.numel() == 0 or (name := next(same, None)) is None:
            name = str(len(tensors))
            shared = any(t.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for t in tensors.values())
            own = whole.untyped_storage().nbytes() == whole.nbytes and not shared
            tensors[name] = whole if own else whole.clone()
        return {"tensor": name}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        items = [_described(v, tensors) for v in value]
        return items if isinstance(value, list) else {"tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        kind = "counter" if type(value) is Counter else "dict"
        return {kind: [[_described(k, tensors), _described(v, tensors)] for k, v in value.items()]}
    raise TypeError(
        f"Expected numbers, strings, tensors, and lists, tuples and dictionaries of these (got "
        f"{type(value).__name__}): others could only be pickled, and a pickle can run code where it is read."
    )


def _value(described: Any, tensors: dict[str, Tensor]) -> Any:
    """Return what was described."""
    if isinstance(described, list):
        return [_value(v, tensors) for v in described]
    if not isinstance(described, dict):
        return described
    ((kind, it),) = described.items()
    if kind == "tensor":
        return tensors[it]
    if kind == "dtype" and isinstance(found := getattr(torch, it), torch.dtype):
        return found
    if kind == "tuple":
        return tuple(_value(v, tensors) for v in it)
    if kind in ("dict", "counter"):
        found = {_value(k, tensors): _value(v, tensors) for k, v in it}
        return found if kind == "dict" else Counter(found)
    raise ValueError(f"Expected a tensor, a data type, a tuple or a dictionary (got '{kind}')")
