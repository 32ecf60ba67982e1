"""A GPU for tests on a machine that has none: memory of the host that says it lies elsewhere.

Within :func:`pretence` tensors can be moved to :data:`DEVICE`, and PyTorch treats them as those of an accelerator: they
do not mix with others, autograd walks them in a thread of the device. What they are used for is computed on the CPU.
Whenever the host would wait for a GPU, that is written down.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyg_sar.distributed import staging
from pyg_sar.offload.home import Home
from pyg_sar.offload.rows import HostRows

DEVICE = "pretend"
# The host needs to know what they find, or how many.
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
         "unique_dim", "unique_consecutive"}  # fmt: skip
COPIES, INDEXING = {"_to_copy", "copy_"}, {"index", "index_put", "index_put_", "_index_put_impl_"}


class There(Tensor):
    """A tensor on the device.

    Args:
        here: The same memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        self = Tensor._make_subclass(cls, here, dispatch_device=True, device_for_backend_keys=torch.device(DEVICE, 0))
        self.here = here
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(torch.tensor(index, device=self.device) if isinstance(index, list) else index)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = torch.nn.Parameter(copy, self.requires_grad) if hasattr(self, "_is_param") else copy
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return torch.device(DEVICE, 0)
        raise RuntimeError(f"'{func}' outside of the pretence")


def here(value: Any) -> Any:
    return tree_map_only(There, lambda t: t.here, value)


def is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE


class Pretence(TorchDispatchMode):
    """What becomes of operators.

    Args:
        kernels: The operators of ``pyg_sar`` on the device; by default those of the CPU take their place.
    """

    def __init__(self, kernels: Any = None) -> None:
        super().__init__()
        self.kernels, self.waits = kernels, []
        self.held = self.peak = 0  # bytes of all tensors on the device
        self.counted: set[int] = set()
        self.keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func._schema.name.partition("::")[2]
        if func is torch.ops.prim.device.default:
            return There.__torch_dispatch__(func, types, args)
        tensors, asked = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)], kwargs.get("device")
        if any(isinstance(t, HostRows) for t in tensors):  # whose parts lie on the device
            with self:
                return HostRows.__torch_dispatch__(func, types, args, kwargs)
        there = {id(t.here): t for t in tensors if isinstance(t, There)}
        if not there and not is_there(asked):
            return func(*args, **kwargs)
        if func.namespace == "pyg_sar" and self.kernels is not None:
            with self:
                return getattr(self.kernels, name)(*args, **kwargs)
        into = isinstance(args[0], There) if name == "copy_" else is_there(asked) or asked is None
        self.look(name, args, kwargs, tensors, into)
        kwargs.update((key, value) for key, value in {"device": "cpu", "pin_memory": False}.items() if key in kwargs)
        # Our operators in plain PyTorch may use autograd, which is otherwise behind us here.
        with torch._C._ForceDispatchKeyGuard(*self.keys) if func.namespace == "pyg_sar" else nullcontext():
            out = func(*here(args), **here(kwargs))
        return tree_map_only(Tensor, lambda t: there[id(t)] if id(t) in there else self.put(t), out) if into else out

    def put(self, tensor: Tensor) -> There:
        """Return a tensor that lies on the device, and count its memory."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self.counted:
            self.counted.add(memory._cdata)
            self.held += memory.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(memory, self.free, memory._cdata, memory.nbytes())
        return There(tensor)

    def free(self, key: int, count: int) -> None:
        """Forget memory that was given back."""
        self.counted.discard(key)
        self.held -= count

    def look(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], into: bool) -> None:
        """Write down whether the host waits; raise if tensors of different devices meet."""
        waits, meeting = name in WAITS, tensors
        if name in COPIES:
            blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            waits, meeting = blocking and into != isinstance(tensors[-1], There), []
        elif name == "repeat_interleave":
            waits = kwargs.get("output_size") is None
        elif name in INDEXING:
            indices = [t for t in args[1] if t is not None]
            waits = any(not isinstance(t, There) or t.dtype == torch.bool for t in indices)
            meeting = [args[0], *args[2:3]]
        if waits:
            stack = [line for line in traceback.extract_stack() if "/pyg_sar/" in line.filename]
            self.waits.append(f"{name} in {stack[-1] if stack else 'a test'}")
        if len({isinstance(t, There) for t in meeting if t.dim() > 0}) > 1:
            raise RuntimeError(f"'{name}' of tensors on different devices: {[(t.device, t.shape) for t in tensors]}")


class Module(backend_registration._DummyBackendModule):
    """What torch asks of ``torch.pretend``; its random numbers are those of the CPU."""

    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


def moved(make: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor, which torch would do out of sight, and move it."""
    return make(*args, **kwargs).to(device) if is_there(device) else make(*args, device=device, **kwargs)


class Landing:
    """Stands in for that of :mod:`pyg_sar.distributed.staging`."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.host = tensor, torch.full(tensor.shape, 77, dtype=tensor.dtype)

    def finish(self) -> None:
        self.tensor.copy_(self.host, non_blocking=True)


def seen(self: Home, rows: Tensor) -> Tensor | None:
    """Stands in for :meth:`Home.seen`."""
    living = rows.untyped_storage().data_ptr() in self._living and rows.is_contiguous()
    return There(rows.detach()) if living and self.folder is None and is_there(self.device) else None


@contextmanager
def pretence(kernels: Any = None) -> Iterator[Pretence]:
    """Have a GPU."""
    if not hasattr(torch, DEVICE):
        backend_registration._setup_privateuseone_for_python_backend(DEVICE, Module())
    with ExitStack() as stack:
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch(f"torch.{name}", functools.partial(moved, getattr(torch, name))))
        stack.enter_context(mock.patch.multiple(
            staging, is_staged=lambda tensor, group: isinstance(tensor, There), to_host=lambda t: t.here.clone(),
            Landing=Landing))  # fmt: skip
        apart = property(lambda home: home.folder is not None or is_there(home.device))
        stack.enter_context(mock.patch.multiple(Home, seen=seen, apart=apart))
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # they become of another class
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        yield stack.enter_context(Pretence(kernels))
