r"""The partition folder on disk: written whole or not at all, read one part at a time, never unpickled.

.. code-block:: text

    OUT/meta.json                  the whole: counts, report, attributes; for people and ``pyg-sar info``
    OUT/part_0/part.json           what one worker needs to know, and a checksum of each file below
    OUT/part_0/graph.safetensors   its :class:`~pyg_sar.distributed.split.Topology`
    OUT/part_0/nodes.safetensors   node-level tensors of its nodes
    OUT/part_0/edges.safetensors   edge-level tensors of the edges that end at its nodes, in the order of ``e_id``
    OUT/part_0/attrs.safetensors   graph-level tensors, the same in every part
    OUT/part_1/...

A worker opens its own part and nothing else, so parts may be spread over the disks of several machines.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyg_sar.distributed.split import Topology

FORMAT = "pyg_sar partition"
VERSION = 1
GROUPS = ("graph", "nodes", "edges", "attrs")


@dataclass(frozen=True, eq=False)
class Shard:
    """What one worker holds of a partitioned graph.

    Args:
        part: Number of this part.
        num_parts: Number of parts of the partition.
        identity: Name of the partition; equal in all its parts and in no other partition.
        num_nodes: Number of nodes of the whole graph.
        num_edges: Number of edges of the whole graph.
        topology: The edges that end at this part's nodes.
        node_attrs: Node-level tensors, in the order of ``topology.src_id``.
        edge_attrs: Edge-level tensors, in the order of ``topology.e_id``.
        graph_attrs: Graph-level tensors and plain Python values, the same in every part.
    """

    part: int
    num_parts: int
    identity: str
    num_nodes: int
    num_edges: int
    topology: Topology
    node_attrs: dict[str, Tensor]
    edge_attrs: dict[str, Tensor]
    graph_attrs: dict[str, Any]


@contextmanager
def create(out: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` when the block ends well, and is removed when it does not.

    Args:
        out: The folder to make.
        overwrite: Whether to replace a partition that ``out`` holds, once the new one is complete.
    """
    out = Path(out).resolve()
    _check_free(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    unique = uuid.uuid4().hex
    new, old = (out.with_name(f".{out.name}.{unique}.{suffix}") for suffix in ("new", "old"))
    try:
        new.mkdir()
        yield new
        _sync(new)
        if overwrite and out.exists():
            os.replace(out, old)
        os.replace(new, out)
        _sync(out.parent)
    except BaseException:
        if old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_part(folder: Path, shard: Shard) -> dict[str, Any]:
    """Write one part into a folder that :func:`create` yielded, and return what its ``part.json`` says."""
    topology = shard.topology
    if topology.dst_id is not topology.src_id:
        raise ValueError("Only graphs with one set of nodes can be stored, but this one is bipartite.")
    tensors = {k: v for k, v in shard.graph_attrs.items() if isinstance(v, Tensor)}
    content = zip(GROUPS, (_arrays(topology), shard.node_attrs, shard.edge_attrs, tensors), strict=True)
    path = folder / f"part_{shard.part}"
    path.mkdir()
    info = {
        "format": FORMAT,
        "version": VERSION,
        "identity": shard.identity,
        "part": shard.part,
        "num_parts": shard.num_parts,
        "num_nodes": shard.num_nodes,
        "num_edges": shard.num_edges,
        "counts": {
            "nodes": topology.src_id.numel(),
            "edges": [col.numel() for col in topology.col],
            "rows_in": [0 if q == shard.part else n for q, n in enumerate(topology.num_src)],
            "rows_out": [serve.numel() for serve in topology.serve],
        },
        "attrs": {k: v for k, v in shard.graph_attrs.items() if k not in tensors},
        "files": {name: _save(path / f"{name}.safetensors", group, shard.identity) for name, group in content},
    }
    _write_json(path / "part.json", info)
    _sync(path)
    return info


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write ``meta.json``, after all parts."""
    _write_json(folder / "meta.json", {"format": FORMAT, "version": VERSION, **meta})


def read_meta(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``meta.json`` of a partition folder."""
    return _read_json(Path(folder) / "meta.json", Path(folder))


def read_part(folder: str | os.PathLike[str], part: int, *, verify: bool = True) -> Shard:
    """Read one part of a partition; ``meta.json`` and the other parts need not be there.

    Args:
        folder: The partition folder.
        part: Number of the part.
        verify: Whether to compare the files with their checksums, which reads them once more.

    Raises:
        FileNotFoundError: If the folder, the part or one of its files is missing.
        ValueError: If what is there is not this part of one partition, or is damaged.
    """
    path = Path(folder) / f"part_{part}"
    info = _read_json(path / "part.json", Path(folder))
    if info["part"] != part:
        raise ValueError(
            f"'{path}' holds part {info['part']} of {info['num_parts']}, expected part {part}: a part folder was "
            "renamed. Give it its own name again."
        )
    graph, nodes, edges, tensors = (_load(path, name, info, verify) for name in GROUPS)
    counts = info["counts"]
    found = {name: tensor.numel() for name, tensor in graph.items()}
    if found != _sizes(part, info):
        raise ValueError(
            f"'{path}': the arrays of graph.safetensors have {found} elements, but part.json says "
            f"{_sizes(part, info)}. Copy the part folder again, or partition the graph again."
        )
    parts = range(info["num_parts"])
    topology = Topology(
        src_id=graph["n_id"],
        dst_id=graph["n_id"],
        e_id=graph["e_id"],
        rowptr=[graph[f"rowptr.{q}"] for q in parts],
        col=[graph[f"col.{q}"] for q in parts],
        serve=[graph[f"serve.{q}"] for q in parts],
        num_src=[counts["nodes"] if q == part else counts["rows_in"][q] for q in parts],
    )
    whole = (info[key] for key in ("num_parts", "identity", "num_nodes", "num_edges"))
    return Shard(part, *whole, topology, nodes, edges, {**info["attrs"], **tensors})


def _arrays(topology: Topology) -> dict[str, Tensor]:
    arrays = {"n_id": topology.src_id, "e_id": topology.e_id}
    for name in ("rowptr", "col", "serve"):
        arrays |= {f"{name}.{q}": array for q, array in enumerate(getattr(topology, name))}
    return arrays


def _sizes(part: int, info: dict[str, Any]) -> dict[str, int]:
    """Return the number of elements that every array of the topology must have."""
    counts = info["counts"]
    sizes = {"n_id": counts["nodes"], "e_id": sum(counts["edges"])}
    for q in range(info["num_parts"]):
        sizes |= {f"rowptr.{q}": counts["nodes"] + 1, f"col.{q}": counts["edges"][q]}
        sizes[f"serve.{q}"] = counts["rows_out"][q]
    return sizes


def _save(file: Path, tensors: dict[str, Tensor], identity: str) -> dict[str, Any]:
    """Write tensors to disk and describe what was written."""
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        # The format knows no views: each tensor must own its storage.
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        whole[name] = tensor
    save_file(whole, file, metadata={"identity": identity})
    with open(file, "rb+") as f:
        os.fsync(f.fileno())
    return {"bytes": file.stat().st_size, "sha256": _digest(file), "tensors": describe(whole)}


def describe(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Return data type and shape of each tensor in a form that JSON can hold."""
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}


def _load(path: Path, name: str, info: dict[str, Any], verify: bool) -> dict[str, Tensor]:
    """Read one file of a part after comparing it with what ``part.json`` says of it."""
    file, expected = path / f"{name}.safetensors", info["files"][name]
    again = "Copy the part folder again, or partition the graph again."
    if not file.is_file():
        raise FileNotFoundError(f"'{file}' is missing, part.json lists {expected['bytes']} bytes. {again}")
    size = file.stat().st_size
    try:
        with safe_open(file, framework="pt") as f:
            identity = (f.metadata() or {}).get("identity")
            if identity != info["identity"]:
                raise ValueError(
                    f"'{file}' belongs to partition {identity}, but part.json beside it to {info['identity']}: files "
                    f"of two partitions are mixed. {again}"
                )
            tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"'{file}' is truncated or damaged: found {size} bytes, expected {expected['bytes']} ({error}). {again}"
        ) from error
    if size != expected["bytes"] or describe(tensors) != expected["tensors"]:
        raise ValueError(
            f"'{file}' holds {size} bytes and {describe(tensors)}, but part.json says {expected['bytes']} bytes and "
            f"{expected['tensors']}. {again}"
        )
    if verify and _digest(file) != expected["sha256"]:
        raise ValueError(f"'{file}' is damaged: its checksum is not {expected['sha256']} as in part.json. {again}")
    return tensors


def _check_free(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise FileExistsError(
            f"'{out}' exists already. Choose another folder, or pass overwrite=True (--overwrite) to replace it."
        )
    try:
        if any(out.iterdir()):
            read_meta(out)
    except (OSError, ValueError) as error:
        raise ValueError(f"'{out}' is not replaced, because it is no partition: {error}") from error


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    """Read a JSON file of ours; say what the partition folder holds instead if it is not there."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder '{folder}'. Make it with 'pyg-sar partition', or correct the path.")
    if not file.is_file():
        names = sorted(path.name for path in folder.iterdir())
        listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
        raise FileNotFoundError(
            f"'{file}' is missing, '{folder}' holds {listing}. Start one worker for each part of a folder that was "
            "made with 'pyg-sar partition'."
        )
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{file}' is truncated or damaged ({error}). Copy it again.") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise ValueError(f"'{file}' was not written by pyg_sar: it has no entry \"format\": \"{FORMAT}\".")
    if info["version"] > VERSION:
        raise ValueError(
            f"'{file}' has format version {info['version']}, this pyg_sar reads versions up to {VERSION}. Update "
            "pyg_sar, or partition the graph again."
        )
    return info


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with open(file, "x", encoding="utf-8") as f:
        json.dump(content, f, indent=1)
        f.flush()
        os.fsync(f.fileno())


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
