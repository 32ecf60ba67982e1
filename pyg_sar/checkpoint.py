r"""Checkpoints of a whole run, from which it goes on with the same bits, also after a crash while one is written.

.. code-block:: text

    DIR/checkpoint-000007/checkpoint.json        number of workers, epoch, a checksum of each file below, and its own
    DIR/checkpoint-000007/shared.safetensors     what all workers have alike: model, optimizer, scheduler
    DIR/checkpoint-000007/rank-0003.safetensors  random generators of a worker, and rows that only it has
    DIR/.checkpoint-000008.new                   being written; it gets its name when all is on the disk

Nothing is pickled: :mod:`torch.distributed.checkpoint` would pickle what it knows of the tensors.
"""

from __future__ import annotations

import copy
import json
import operator
import os
import random
import shutil
import signal
import threading
import warnings
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pyg_sar.csr import Lookup
from pyg_sar.distributed import guard, values
from pyg_sar.distributed.agreement import describe, fail, gathered, on_all
from pyg_sar.distributed.collectives import global_max
from pyg_sar.distributed.group import Group, host, is_local, rank_of, size_of
from pyg_sar.durable import checksum, digest, sync, write_json
from pyg_sar.edge_index import ShardedEdgeIndex
from pyg_sar.graph import Seeds

STATE = ("model", "pipe", "optimizer", "scheduler", "data")  # of a run, by keyword
INFO, SHARED = "checkpoint.json", "shared.safetensors"
FORMAT = {"format": "pyg_sar checkpoint", "version": 2}
THEIRS = (
    "Those of rank 0 would be kept. Give a pipeline as 'pipe=pipe', make tables of a worker's nodes by "
    "'pyg_sar.nn.NodeEmbedding', and call 'pyg_sar.broadcast_parameters(model)' at the start"
)


def save_checkpoint(
    path: str | os.PathLike[str], *, model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None, epoch: int = 0, data: Any = None,
    pipe: Any = None, keep: int = 2, group: Group = None, **more: Any,
) -> Path:  # fmt: skip
    r"""Write what a run needs to go on with the same bits; all workers call it together, between two steps.

    That is the state of model, optimizer and scheduler, the random generators of every worker (of torch, NumPy and
    Python), and how many seeds of dropout on edges the graph has drawn. It is on the disk, whole, when the function
    returns; a crash before leaves the last one as it was.

    Args:
        path (str): A folder that all workers see.
        model (torch.nn.Module, optional): The model. (default: :obj:`None`)
        optimizer (torch.optim.Optimizer, optional): The optimizer. (default: :obj:`None`)
        scheduler (optional): What has a ``state_dict``, such as one of learning rates. (default: :obj:`None`)
        epoch (int, optional): The last epoch that is complete. (default: :obj:`0`)
        data (Data or HeteroData, optional): What :func:`pyg_sar.load` returned. (default: :obj:`None`)
        pipe (Pipeline, optional): A pipeline, in place of ``model``: the blocks of every stage, what the optimizer
            knows of them, and histories. (default: :obj:`None`)
        keep (int, optional): How many checkpoints the folder keeps. (default: :obj:`2`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
        **more: Numbers, strings, tensors, and lists, tuples and dictionaries of these; those of rank 0 are kept.

    Returns:
        The folder of the checkpoint.

    Raises:
        RuntimeError: On all workers, if one cannot write, there is something that could only be pickled, or they have
            other parameters.
        ValueError: If ``keep`` is less than 1, or there is a ``model`` beside ``pipe``.
    """
    folder, rank = Path(path), rank_of(group)
    if keep < 1:
        raise ValueError(f"Expected 'keep' to be 1 or more (got {keep})")
    epoch = operator.index(epoch)
    stage, shared_optimizer = _stage(model, pipe, optimizer)
    local = _LocalRows(model, shared_optimizer)
    _check_alike(model, local, group)

    def begin() -> str:
        if rank > 0:
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".checkpoint-*"):
            shutil.rmtree(stale, ignore_errors=True)
        name = f"checkpoint-{max([0, *_numbers(folder)]) + 1:06d}"
        (folder / f".{name}.new").mkdir(exist_ok=True)
        return name

    name = on_all(begin, f"make a checkpoint in '{folder}'", group)[0]
    new = folder / f".{name}.new"

    def write() -> dict[str, str]:
        seeds = [(its.seed, its.drawn) for its in _seeds(data)]
        mine = {"generators": _generators(), "seeds": seeds, "nodes": _nodes(data), **local.state()}
        mine["stage"] = {name: state() for name, (state, _) in stage.items()}
        content = {f"rank-{rank:04d}.safetensors": mine}
        if rank == 0:
            content[SHARED] = {
                "model": None if model is None else local.without(model.state_dict()),
                "optimizer": None if shared_optimizer is None else local.optimizer_without(),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "more": more,
            }
        for file, value in content.items():
            values.write(new / file, value)
            sync(new / file)
        return {file: digest(new / file) for file in content}

    files = on_all(write, f"write a checkpoint to '{folder}', which all workers must see", group)

    def finish() -> None:
        if rank > 0:
            return
        listed = {file: found for of_worker in files for file, found in of_worker.items()}
        info = FORMAT | {"epoch": epoch, "workers": size_of(group), "files": listed}
        write_json(new / INFO, info)
        sync(new)
        os.replace(new, folder / name)
        sync(folder)
        for old in _numbers(folder)[:-keep]:
            gone = folder / f".checkpoint-{old:06d}.old"
            os.replace(folder / f"checkpoint-{old:06d}", gone)
            shutil.rmtree(gone, ignore_errors=True)  # the next one tries again

    on_all(finish, f"finish a checkpoint in '{folder}'", group)
    return folder / name


def _check_alike(model: torch.nn.Module | None, local: _LocalRows, group: Group) -> None:
    """Raise on all workers unless those that have a model have the same parameters: rank 0's are kept."""
    if size_of(group) == 1:
        return
    named: dict[str, Tensor] = {} if model is None else dict(sorted(model.named_parameters()))
    named = {name: p for name, p in named.items() if name not in local.names and not is_lazy(p)}
    mine = zip(
        map(str, describe(named)), guard.totals([*named.values()]), map(guard.bound, named.values()), strict=True
    )
    said = [one for one in gathered(None if model is None else [*mine], group) if one is not None]
    names = [{name for name, *_ in one} for one in said] or [set()]
    if odd := sorted(set.union(*names) - set.intersection(*names)):
        fail(f"The workers differ in the parameters of a checkpoint ({', '.join(odd[:3])}). {THEIRS}.", group)
    for entries in zip(*said, strict=True):
        (name, first, _), most = entries[0], max(bound for *_, bound in entries)
        if not all(guard.alike(total, first, most) for _, total, _ in entries):
            fail(f"The workers hold different values of {name}. {THEIRS}.", group)


def load_checkpoint(
    path: str | os.PathLike[str], *, model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None, data: Any = None, pipe: Any = None,
    group: Group = None,
) -> dict[str, Any] | None:  # fmt: skip
    r"""Go on from the newest checkpoint of a folder; all workers call it together, when everything else is made.

    With as many workers on the same partition, what follows has the same bits as if nothing had happened. Another
    number of workers, or another partition, goes on from the same parameters, with a note: random numbers are others,
    except the seeds of dropout on edges. Rows of a :class:`~pyg_sar.nn.NodeEmbedding` find their nodes. A pipeline
    needs the stages, workers, chunks and nodes that it had.

    Args:
        path (str): The folder that was given to :func:`save_checkpoint`.
        model (torch.nn.Module, optional): Gets its state. (default: :obj:`None`)
        optimizer (torch.optim.Optimizer, optional): Gets its state. (default: :obj:`None`)
        scheduler (optional): Gets its state. (default: :obj:`None`)
        data (Data or HeteroData, optional): What :func:`pyg_sar.load` returned. (default: :obj:`None`)
        pipe (Pipeline, optional): Gets its blocks and histories, in place of ``model``. (default: :obj:`None`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)

    Returns:
        ``epoch`` and what else was given to :func:`save_checkpoint`, by name; :obj:`None` if there is no checkpoint.

    Raises:
        RuntimeError: On all workers, if one cannot read it, or something in it is missing, damaged, or does not fit.
            Of a worker that it does not fit, model and optimizer stay as they were.
    """
    folder, rank = Path(path), rank_of(group)
    stage, optimizer = _stage(model, pipe, optimizer)
    newest = on_all(lambda: [] if rank else _numbers(folder)[-1:], f"look for checkpoints in '{folder}'", group)[0]
    if not newest:
        return None
    it = folder / f"checkpoint-{newest[0]:06d}"

    def read() -> tuple[dict[str, Any], Any]:
        info = _info(it)
        local = _LocalRows(model, optimizer)
        same = info["workers"] == size_of(group)
        mine = _read(it, f"rank-{rank if same else 0:04d}.safetensors", info)
        if not _fits(len(mine["seeds"]), len(_seeds(data))):
            raise ValueError(f"it was saved with 'data' of {len(mine['seeds'])} graphs (got {len(_seeds(data))})")
        theirs = mine["rows"]  # those of other nodes, and as many, of another partition
        same = same and _fits(mine["nodes"], _nodes(data))
        same = same and all(torch.equal(theirs.get(_ids_beside(k), ids[:0]), ids) for k, ids in local.ids.items())
        parts = [mine] if same else []
        if not same and local.names:
            parts = [_read(it, f"rank-{r:04d}.safetensors", info) for r in range(info["workers"])]
        shared = _read(it, SHARED, info)
        if stage.keys() - mine["stage"].keys():
            raise ValueError(f"it holds {', '.join(mine['stage']) or 'none'} of a pipeline's {', '.join(stage)}")
        for what, there in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
            if there is not None and shared[what] is None:
                raise ValueError(f"it holds no {what}")
        optimizers = [] if optimizer is None else [(shared["optimizer"], optimizer.state_dict())]
        optimizers += [(mine["stage"]["optimizer"], stage["optimizer"][0]())] if "optimizer" in stage else []
        for saved, here in (map(_groups, states) for states in optimizers):
            if saved != here:
                raise ValueError(f"its optimizer has groups of {saved} parameters (got {here})")
        return {"info": info, "same": same, "mine": mine, "local": local.found(parts, same)}, shared

    told, shared = on_all(read, f"read '{it}'", group, mine=True)
    same = bool(-global_max(torch.tensor([-int(told["same"])], device=host(group)), group))

    def put() -> None:
        rows, states = told["local"]
        for name, (_, load) in stage.items():
            load(told["mine"]["stage"][name])
        if model is not None:
            _load(model, shared["model"] | rows)
        if optimizer is not None:
            shared["optimizer"]["state"] |= states
            optimizer.load_state_dict(shared["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(shared["scheduler"])
        for seeds, (seed, drawn) in zip(_seeds(data), told["mine"]["seeds"], strict=False):
            seeds.seed, seeds.drawn = seed, drawn
        _restore_generators(told["mine"]["generators"], same, rank)

    on_all(put, f"load '{it}'", group)  # nobody begins before all have read theirs
    if not same and rank == 0:
        warnings.warn(
            f"'{it}' is of {told['info']['workers']} workers, or of another partition. Training goes on from its "
            f"parameters; random numbers other than those of dropout on edges are new ones.",
            stacklevel=2,
        )
    return {"epoch": told["info"]["epoch"], **shared["more"]}


class Checkpoints:
    r"""Saves a run every few epochs, and when it is told to end by SIGTERM, as schedulers of clusters do.

    A first SIGTERM no longer ends the process, but the next :meth:`step` does what is to be done; a second one ends it.
    ``torch.distributed.run`` kills its workers 30 seconds after a SIGTERM: where epochs take longer, give it more
    (:envvar:`TORCH_ELASTIC_SHUTDOWN_TIMEOUT`).

    .. code-block:: python

        checkpoints = pyg_sar.Checkpoints("runs/gat", every=10, model=model, optimizer=optimizer, data=data)
        for epoch in range(checkpoints.restore() + 1, 101):
            train()
            if checkpoints.step(epoch):
                break  # somebody wants this to end, and everything is saved

    Args:
        path (str): A folder that all workers see.
        every (int, optional): Number of epochs between two checkpoints. (default: :obj:`1`)
        keep (int, optional): How many checkpoints the folder keeps. (default: :obj:`2`)
        group (ProcessGroup, optional): The workers. (default: :obj:`None`, all of them)
        **state: ``model`` or ``pipe``, ``optimizer``, ``scheduler`` and ``data``, as for :func:`save_checkpoint`.

    Attributes:
        more (dict): What else the checkpoint that was restored holds.

    Raises:
        ValueError: If ``every`` or ``keep`` is less than 1.
        TypeError: For other keywords.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int = 1, keep: int = 2, group: Group = None, **state: Any
    ) -> None:
        if every < 1:
            raise ValueError(f"Expected 'every' to be 1 or more (got {every})")
        if keep < 1:
            raise ValueError(f"Expected 'keep' to be 1 or more (got {keep})")
        if others := state.keys() - STATE:
            raise TypeError(f"Expected keywords among {', '.join(STATE)} (got {', '.join(sorted(others))})")
        self.path, self.every, self.keep, self.group, self.state = path, every, keep, group, state
        self.more: dict[str, Any] = {}
        self.told, self.pid = False, os.getpid()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._tell)

    def _tell(self, *_: Any) -> None:
        if self.told or os.getpid() != self.pid:  # and nobody has listened, or this is a process that was forked later
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.told = True

    def restore(self) -> int:
        """Go on from the newest checkpoint, if there is one; return its epoch, or 0."""
        self.more = load_checkpoint(self.path, group=self.group, **self.state) or {"epoch": 0}
        return self.more["epoch"]

    def step(self, epoch: int, **more: Any) -> bool:
        """Save after an epoch, if it is time to, and return whether any worker was told to end."""
        told = bool(global_max(torch.tensor([int(self.told)], device=host(self.group)), self.group))
        if told or epoch % self.every == 0:
            save_checkpoint(self.path, epoch=epoch, keep=self.keep, group=self.group, **self.state, **more)
        return told


def _stage(model: torch.nn.Module | None, pipe: Any, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Return how to get and set what a worker of a pipeline has for itself, and the optimizer if all have it alike."""
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"Expected one optimizer (got {type(optimizer).__name__}); the state of another one can be a keyword, such "
            f"as 'second=other.state_dict()'"
        )
    if pipe is None:
        return {}, optimizer
    if model is not None:
        raise ValueError("Expected a 'model' or a 'pipe', whose blocks are the model, and not both")
    stage: dict[str, Any] = {"pipeline": (pipe.checkpoint, pipe.restore)}
    stage["blocks"] = pipe.blocks.state_dict, partial(_load, pipe.blocks)
    if optimizer is not None:
        stage["optimizer"] = optimizer.state_dict, optimizer.load_state_dict
    return stage, None


class _LocalRows:
    """The parameters of a model that hold rows of local nodes, and what belongs to them."""

    def __init__(self, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        named = () if model is None else model.named_parameters(remove_duplicate=False)  # as in its `state_dict`
        self.names = [name for name, p in named if is_local(p)]
        owners = [] if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        self.numbers = {k: p for k, p in enumerate(owners) if is_local(p)}  # in the optimizer
        self.ids: dict[str, Tensor] = {}  # of nodes, by the name of the parameter
        for name in self.names:
            assert model is not None
            self.ids[name] = model.get_buffer(_ids_beside(name)).cpu()
        self.keys = {*self.names, *map(_ids_beside, self.names)}  # in a state dictionary, of rows and ids

    def state(self) -> dict[str, Any]:
        """Return the rows, and what the optimizer knows of them."""
        assert self.model is not None or not self.names
        rows = {} if self.model is None else {k: v for k, v in self.model.state_dict().items() if k in self.keys}
        states = {} if self.optimizer is None else self.optimizer.state_dict()["state"]
        return {"rows": rows, "states": {k: states[k] for k in self.numbers if k in states}}

    def without(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the rest of the state of a model."""
        return {k: v for k, v in state.items() if k not in self.keys}

    def optimizer_without(self) -> dict[str, Any]:
        """Return the rest of the state of the optimizer."""
        assert self.optimizer is not None
        state = self.optimizer.state_dict()
        return {**state, "state": {k: v for k, v in state["state"].items() if k not in self.numbers}}

    def found(self, parts: list[Any], same: bool) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return the rows of this worker's nodes, and what the optimizer knew of them, from what workers wrote."""
        if same:
            return parts[0]["rows"], parts[0]["states"]
        rows: dict[str, Any] = {}
        states: dict[int, Any] = {}
        for name, ids in self.ids.items():
            theirs = [part["rows"][_ids_beside(name)] for part in parts]
            rows[name] = _pick([part["rows"][name] for part in parts], theirs, ids)
            rows[_ids_beside(name)] = ids
            assert self.model is not None
            parameter = self.model.get_parameter(name)
            for k in (k for k, p in self.numbers.items() if p is parameter and k in parts[0]["states"]):
                every = [part["states"][k] for part in parts]
                states[k] = {
                    key: _pick([one[key] for one in every], theirs, ids) if _has_rows(value, theirs[0]) else value
                    for key, value in every[0].items()
                }
        return rows, states


def _groups(optimizer: dict[str, Any]) -> list[int]:
    """Return how many parameters an optimizer has in each group."""
    return [len(group["params"]) for group in optimizer["param_groups"]]


def _load(model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the state of a model, wholly or not at all: torch loads what fits, and raises in the end."""
    every = model.state_dict()
    own = {name: t for name, t in every.items() if isinstance(t, Tensor) and not is_lazy(t)}
    fits = every.keys() == state.keys() and all(state[name].shape == t.shape for name, t in own.items())
    before = {} if fits else copy.deepcopy(own)
    try:
        model.load_state_dict(state)
    except Exception:
        if before:
            model.load_state_dict(before, strict=False)
        raise


def _ids_beside(name: str) -> str:
    """Return the name of the buffer with the ids of the nodes whose rows a parameter holds, in the same module."""
    owner, _, _ = name.rpartition(".")
    return f"{owner}.n_id" if owner else "n_id"


def _has_rows(value: Any, ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == len(ids)


def _pick(parts: list[Tensor], theirs: list[Tensor], ids: Tensor) -> Tensor:
    """Return the rows of some nodes, of which each part has some."""
    out, count = parts[0].new_empty(len(ids), *parts[0].shape[1:]), 0
    for rows, owned in zip(parts, theirs, strict=True):
        row = Lookup(owned).rows(ids)
        here = row >= 0
        out[here] = rows[row[here]]
        count += int(here.sum())
    if count != len(ids):
        raise ValueError(f"it holds rows of {count} of {len(ids)} nodes: it is of another graph")
    return out


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of checkpoints, ascending: a folder has such a name only when it was complete."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (name.removeprefix("checkpoint-") for name in names if name.startswith("checkpoint-"))
    return sorted(int(number) for number in found if number.isascii() and number.isdigit())


def _info(folder: Path) -> dict[str, Any]:
    """Return what ``checkpoint.json`` says."""
    text = _file(folder, INFO).read_bytes()
    try:
        info = json.loads(text)
    except ValueError as error:
        raise ValueError(f"'{folder / INFO}' is damaged ({error}). {_otherwise(folder)}") from error
    if {key: info.get(key) for key in FORMAT} != FORMAT:
        raise ValueError(f"'{folder / INFO}' is none of {FORMAT}. {_otherwise(folder)}")
    if info.pop("checksum", "") != checksum(info):
        raise ValueError(
            f"'{folder / INFO}' is damaged: its checksum is not that of what it says. {_otherwise(folder)}"
        )
    return info


def _otherwise(folder: Path) -> str:
    """Return what to do about a checkpoint that cannot be read any more."""
    return f"Remove '{folder}' to go on from the checkpoint before"


def _seeds(data: Any) -> list[Seeds]:
    """Return the seeds of all graphs of loaded data."""
    graphs: Iterator[Any] = (v for store in ([] if data is None else data.stores) for v in store.values())
    found = {id(v._graph.seeds): v._graph.seeds for v in graphs if isinstance(v, ShardedEdgeIndex)}
    return list(found.values())


def _fits(saved: int, here: int) -> bool:
    """Whether numbers that tell of ``data`` are the same, or 0 where there was none, or is none now."""
    return saved == here or 0 in (saved, here)


def _nodes(data: Any) -> int:
    """Return a number by which the nodes of a worker are known again."""
    ids = [store["n_id"] for store in ([] if data is None else data.stores) if "n_id" in store]
    return zlib.crc32(b"".join(t.cpu().numpy().tobytes() for t in ids))


def _generators() -> dict[str, Any]:
    """Return the states of the random generators of this process."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = state
    cuda, device = [], 0
    if torch.cuda.is_initialized():
        cuda, device = torch.cuda.get_rng_state_all(), torch.cuda.current_device()
    numpy = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
    return {"torch": torch.get_rng_state(), "cuda": cuda, "device": device, "numpy": numpy, "python": random.getstate()}


def _restore_generators(states: dict[str, Any], same: bool, rank: int) -> None:
    """Set the generators, to what they were, or on other workers to something that no epoch had before."""
    if not same:
        seed = zlib.crc32(states["torch"].numpy().tobytes()) + rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return
    torch.set_rng_state(states["torch"])
    if (cuda := states["cuda"]) and torch.cuda.is_available():
        here = torch.cuda.current_device()
        for k, state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, k)
        torch.cuda.set_rng_state(cuda[min(states["device"], len(cuda) - 1)], here)
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(states["python"])


def _read(folder: Path, file: str, info: dict[str, Any]) -> Any:
    """Return what a file holds, if it is the one that was written."""
    if digest(_file(folder, file)) != info["files"].get(file):
        raise ValueError(f"'{folder / file}' is damaged: its checksum differs. {_otherwise(folder)}")
    return values.read(folder / file)


def _file(folder: Path, name: str) -> Path:
    """Return a file, if it is there; to open a pipe in its place would wait for ever."""
    if not (folder / name).is_file():
        raise FileNotFoundError(
            f"'{folder / name}' is missing, or is no file. All workers must see its folder; if it is lost, remove "
            f"'{folder}' to go on from the checkpoint before"
        )
    return folder / name
