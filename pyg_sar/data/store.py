r"""The partition folder on disk: written whole or not at all, read one part at a time, never unpickled.

.. code-block:: text

    OUT/meta.json                  the whole, for people and ``pyg-sar info``
    OUT/part_0/part.json           what one worker must know, and a checksum of each file below
    OUT/part_0/graph.safetensors   ids of nodes, and the :class:`~pyg_sar.data.split.Topology`
    OUT/part_0/nodes.safetensors   node-level tensors, in the order of ``n_id``
    OUT/part_0/edges.safetensors   edge-level tensors, in the order of ``e_id``
    OUT/part_0/attrs.safetensors   graph-level tensors, the same in every part, and this part's rows of lists of ids

A heterogeneous graph has, by the numbers of node and edge types in ``part.json``:

.. code-block:: text

    OUT/part_0/node_0.safetensors    ids of a node type, and its tensors of all levels
    OUT/part_0/graph_0.safetensors   the topology of an edge type
    OUT/part_0/edge_0.safetensors    its tensors of all levels
    OUT/part_0/attrs.safetensors     tensors of the graph

What is no tensor stands in ``part.json``, beside the checksum of the file that it would be in, and so do the names of
graph-level tensors. Tensors in dictionaries are named by the keys that lead to them. A worker opens its own part and
nothing else, so parts may be spread over the disks of several machines.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from pyg_sar.data.split import Topology
from pyg_sar.distributed.values import write_tensors
from pyg_sar.durable import checksum, digest, exchange, is_dead, owner, sync, write_json

FORMAT = {"format": "pyg_sar partition", "version": 4}  # versions before had no checksum of the JSON files
# What part.json must say, and of which type; one of the two lines, for graphs without types and with them.
PART = {"part": int, "num_parts": int, "identity": str, "files": dict}
KINDS = (
    {"num_nodes": int, "num_edges": int, "counts": dict},
    {"node_types": dict, "edge_types": list, "counts_by_type": list},
)
AGAIN = "Copy the part folder again, or partition the graph again."

EdgeType = tuple[str, str, str]
NODE, EDGE = "", ("", "", "")  # the types of a graph without types


@dataclass(frozen=True, eq=False)
class NodeRows:
    """A part's nodes of one type."""

    total: int  # number of nodes of this type in the whole graph
    attrs: dict[str, Any]  # their attributes, and their ids as `n_id`


@dataclass(frozen=True, eq=False)
class EdgeRows:
    """The edges of one type that end at a part's nodes."""

    total: int | None  # number of edges of this type in the whole graph; a folder with types does not tell
    topology: Topology
    attrs: dict[str, Any]  # in the order of `topology.e_id`


@dataclass(frozen=True, eq=False)
class Shard:
    """What one worker holds of a partitioned graph; of one without types, under the types ``NODE`` and ``EDGE``."""

    part: int
    num_parts: int
    identity: str  # of the partition: the same in all its parts, and in no part of another one
    nodes: dict[str, NodeRows]
    edges: dict[EdgeType, EdgeRows]
    attrs: dict[str, Any]  # what is the same in every part, and the rows of this part that lists of ids name
    alike: Sequence[str] = ()  # the tensors among them that are the same in every part

    @property
    def typed(self) -> bool:
        """Whether the graph has types of nodes and edges."""
        return EDGE not in self.edges


@contextmanager
def create(out: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` if the block succeeds, and vanishes if it raises.

    With ``overwrite``, a partition that ``out`` holds is replaced once the new one is complete.
    """
    out = Path(out).resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    for aside in _set_aside(out):
        if is_dead(aside.name.split(".")[-3]):
            os.replace(aside, out)
    for stale in _left(out, "new"):
        if is_dead(stale.name.split(".")[-3]):
            shutil.rmtree(stale, ignore_errors=True)
    _check_free(out, overwrite)
    new = out.with_name(f".{out.name}.{owner()}.{uuid.uuid4().hex}.new")
    try:
        new.mkdir()
        yield new
        sync(new)
        _check_free(out, overwrite)  # from whoever wrote it meanwhile
        if not overwrite or not out.exists():
            os.replace(new, out)
        elif not exchange(new, out):  # a file system that cannot, such as NFS
            os.replace(out, old := new.with_suffix(".old"))
            os.replace(new, out)
            os.replace(old, new)
        sync(out.parent)
    except BaseException:
        if not out.exists() and (old := new.with_suffix(".old")).exists():
            os.replace(old, out)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(new, ignore_errors=True)  # what was replaced


def write_part(folder: Path, shard: Shard) -> dict[str, Any]:
    """Write one part into a folder of :func:`create`, and return what its ``part.json`` says."""
    path = folder / f"part_{shard.part}"
    path.mkdir()
    each = [counts_of(edges.topology, shard.part) for edges in shard.edges.values()]
    counts: dict[str, Any] = {"nodes": sum(nodes.attrs["n_id"].numel() for nodes in shard.nodes.values())}
    for key in ("edges", "rows_in", "rows_out"):
        counts[key] = [sum(count[key][q] for count in each) for q in range(shard.num_parts)]
    info = FORMAT | {"part": shard.part, "num_parts": shard.num_parts, "identity": shard.identity}
    info["alike"] = list(shard.alike)
    if shard.typed:
        info["node_types"] = {t: nodes.total for t, nodes in shard.nodes.items()}
        info |= {"edge_types": [[*it] for it in shard.edges], "counts": counts, "counts_by_type": each}
    else:
        info |= {"num_nodes": shard.nodes[NODE].total, "num_edges": shard.edges[EDGE].total, "counts": counts}
    files = _files(shard).items()
    info["files"] = {name: _save(path / f"{name}.safetensors", attrs, shard.identity) for name, attrs in files}
    write_json(path / "part.json", info)
    sync(path)
    return info


def _files(shard: Shard) -> dict[str, dict[str, Any]]:
    """Return what the files of a part hold, by name."""
    files = {f"node_{k}": nodes.attrs for k, nodes in enumerate(shard.nodes.values())}
    files |= {f"graph_{k}": topology_tensors(edges.topology) for k, edges in enumerate(shard.edges.values())}
    files |= {f"edge_{k}": edges.attrs for k, edges in enumerate(shard.edges.values())}
    if not shard.typed:
        nodes, graph, edges = files.values()
        n_id = {"n_id": nodes["n_id"]}
        files = {"graph": n_id | graph, "nodes": {k: v for k, v in nodes.items() if k != "n_id"}, "edges": edges}
    return files | {"attrs": shard.attrs}


def topology_tensors(topology: Topology) -> dict[str, Tensor]:
    """Return what a file holds of a topology, besides the ids of nodes."""
    tensors = {"e_id": topology.e_id}
    for name in ("rowptr", "rows", "col", "serve"):
        tensors |= {f"{name}.{q}": array for q, array in enumerate(getattr(topology, name)) if array is not None}
    return tensors


def topology_of(tensors: dict[str, Tensor], counts: dict[str, Any], part: int, src: Tensor, dst: Tensor) -> Topology:
    """Return the topology that a file holds, between nodes of these ids."""
    parts = range(len(counts["rows_in"]))
    rowptr, col, serve = ([tensors[f"{name}.{q}"] for q in parts] for name in ("rowptr", "col", "serve"))
    num_src = [counts["nodes"] if q == part else counts["rows_in"][q] for q in parts]
    rows = [tensors.get(f"rows.{q}") for q in parts]
    return Topology(src, dst, tensors["e_id"], rowptr, col, serve, num_src, rows)


def read_part(folder: str | os.PathLike[str], part: int, *, mmap: bool = True) -> Shard:
    """Read one part; neither ``meta.json`` nor any other part need be there.

    Args:
        folder (str): The partition folder.
        part (int): Number of the part.
        mmap (bool, optional): Whether tensors stay in their files until they are used. (default: :obj:`True`)

    Raises:
        FileNotFoundError: If the folder, the part, or one of its files is missing.
        ValueError: If they are damaged, or are not this part of one partition.
    """
    path = Path(folder) / f"part_{part}"
    info = _read_json(path / "part.json", Path(folder))
    check_part(info, path / "part.json")
    if info["part"] != part:
        raise ValueError(f"'{path}' holds part {info['part']}, expected {part}. Give the folder its own name again.")
    with said_by(path / "part.json"):
        return _shard(info, path, mmap)


def _shard(info: dict[str, Any], path: Path, mmap: bool) -> Shard:
    """Read what a ``part.json`` tells of."""
    part, listed = info["part"], info["files"].items()
    files = {name: _load(path / f"{name}.safetensors", said, info["identity"], mmap) for name, said in listed}
    if "node_types" in info:
        node_types, counts = info["node_types"], info["counts_by_type"]
        edge_types = dict.fromkeys(map(tuple, info["edge_types"]))
    else:
        node_types, edge_types, counts = {NODE: info["num_nodes"]}, {EDGE: info["num_edges"]}, [info["counts"]]
        n_id = {"n_id": files["graph"].pop("n_id")}
        files |= {"node_0": n_id | files["nodes"], "graph_0": files["graph"], "edge_0": files["edges"]}
    nodes = {t: NodeRows(total, files[f"node_{k}"]) for k, (t, total) in enumerate(node_types.items())}
    edges = {}
    for k, (it, expected) in enumerate(zip(edge_types, counts, strict=True)):
        source, target = (nodes[t].attrs["n_id"] for t in (it[0], it[2]))
        topology = topology_of(files[f"graph_{k}"], expected, part, source, target)
        if (found := counts_of(topology, part)) != expected:
            raise ValueError(f"'{path}' holds {found}, but its part.json says {expected}. {AGAIN}")
        check_topology(topology, path)
        edges[it] = EdgeRows(edge_types[it], topology, files[f"edge_{k}"])
    return Shard(part, info["num_parts"], info["identity"], nodes, edges, files["attrs"], info.get("alike", ()))


@contextmanager
def said_by(file: Path) -> Iterator[None]:
    """Have errors name the JSON file whose content they come of."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"'{file}' does not say what it must ({type(error).__name__}: {error}). {AGAIN}") from error


def check_part(info: dict[str, Any], file: Path) -> None:
    """Raise unless ``part.json`` says what it must."""
    typed = "node_types" in info
    for key, expected in (PART | KINDS[typed]).items():
        if type(info.get(key)) is not expected:
            said = type(info[key]).__name__ if key in info else "nothing"
            raise ValueError(f"'{file}' says {said} for '{key}', expected {expected.__name__}. {AGAIN}")
    names = [f"node_{k}" for k in range(len(info["node_types"]))] if typed else ["graph", "nodes", "edges"]
    if typed:
        names += [f"{name}_{k}" for k in range(len(info["edge_types"])) for name in ("graph", "edge")]
    if missing := sorted({*names, "attrs"} - info["files"].keys()):
        raise ValueError(f"'{file}' lists no file {', '.join(missing)}. {AGAIN}")


def check_topology(topology: Topology, path: Path) -> None:
    """Raise unless all numbers of a topology are those of rows that there are: kernels do not look."""
    num_dst = topology.dst_id.numel()
    for q, (ptr, col, rows) in enumerate(zip(topology.rowptr, topology.col, topology.rows, strict=True)):
        ends = num_dst if rows is None else rows.numel()
        ascend = ptr.numel() == ends + 1 and bool((ptr[1:] >= ptr[:-1]).all())
        if not ascend or (int(ptr[0]), int(ptr[-1])) != (0, col.numel()):
            raise ValueError(
                f"'{path}': the row pointer to part {q} has {ptr.numel()} entries that do not ascend from 0 to the "
                f"{col.numel()} edges, expected {ends + 1} that do. {AGAIN}"
            )
        within = [("sources", col, topology.num_src[q]), ("served rows", topology.serve[q], topology.src_id.numel())]
        for what, ids, count in (*within, *([] if rows is None else [("destinations", rows, num_dst)])):
            least, most = (int(t) for t in ids.aminmax()) if ids.numel() else (0, -1)
            if least < 0 or most >= count:
                found = f"are numbered {least} to {most}, expected 0 to {count - 1}"
                raise ValueError(f"'{path}': the {what} of part {q} {found}. {AGAIN}")


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write ``meta.json``, the last file of a partition."""
    write_json(folder / "meta.json", FORMAT | meta)


def read_meta(folder: str | os.PathLike[str]) -> Said:
    """Read ``meta.json``."""
    return _read_json(Path(folder) / "meta.json", Path(folder))


def describe(attrs: dict[str, Any]) -> dict[str, Any]:
    """Return data type and shape of each tensor, and other values as they are."""
    return {
        key: [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else value
        for key, value in attrs.items()
    }


def put(attrs: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set an attribute, or what dictionaries hold that are one."""
    for key in path[:-1]:
        attrs = attrs.setdefault(key, {})
    attrs[path[-1]] = value


def can_hold(dtype: torch.dtype) -> bool:
    """Tell whether tensors of this data type can be stored."""
    try:
        load(save({"": torch.empty(0, dtype=dtype)}))
    except (KeyError, ValueError, SafetensorError):
        return False
    return True


def counts_of(topology: Topology, part: int) -> dict[str, Any]:
    """Count nodes, the edges from each part, and the rows read from and served to each other part."""
    return {
        "nodes": topology.src_id.numel(),
        "edges": [col.numel() for col in topology.col],
        "rows_in": [0 if q == part else rows for q, rows in enumerate(topology.num_src)],
        "rows_out": [rows.numel() for rows in topology.serve],
    }


def _named(attrs: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield attributes, and what dictionaries hold, by the keys that lead there."""
    for key, value in attrs.items():
        name = above + quote(key, safe="")
        yield from _named(value, f"{name}/") if isinstance(value, dict) else [(name, value)]


def _save(file: Path, attrs: dict[str, Any], identity: str) -> dict[str, Any]:
    """Write tensors durably, and describe the file and what is none."""
    named = dict(_named(attrs))
    tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    values = {key: value for key, value in named.items() if key not in tensors}
    # The format has no views, neither of memory that tensors share nor of signs that are yet to be flipped.
    whole = {key: t.detach().cpu().resolve_conj().resolve_neg().contiguous() for key, t in tensors.items()}
    seen: set[int] = set()
    for key, tensor in whole.items():
        if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
            whole[key] = tensor.clone()
        seen.add(tensor.data_ptr())
    file.touch(exist_ok=False)
    mode = file.stat().st_mode
    write_tensors(file, whole, {"identity": identity})
    file.chmod(mode)  # safetensors keeps others from reading its files
    sync(file)
    return {"bytes": file.stat().st_size, "sha256": digest(file), "tensors": describe(whole), "values": values}


def _load(file: Path, expected: dict[str, Any], identity: str, mmap: bool) -> dict[str, Any]:
    """Read one file of a part, and compare it with what ``part.json`` says."""
    if not file.is_file():
        raise FileNotFoundError(f"'{file}' is missing, but part.json lists it. {AGAIN}")
    size = f"found {file.stat().st_size} bytes, expected {expected['bytes']}"
    try:
        with safe_open(file, framework="pt") as f:
            found = (f.metadata() or {}).get("identity")
            tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118
            # Empty ones share an address, for which 'torch.save' takes several types for views of one memory.
            tensors = {key: t if t.numel() > 0 else torch.empty_like(t) for key, t in tensors.items()}
            tensors = tensors if mmap else {key: t.clone() for key, t in tensors.items()}
    except SafetensorError as error:
        raise ValueError(f"'{file}' is truncated or damaged: {size} ({error}). {AGAIN}") from error
    if found != identity:
        raise ValueError(
            f"Files of two partitions are mixed: '{file}' belongs to {found}, but part.json to {identity}. {AGAIN}"
        )
    if file.stat().st_size != expected["bytes"] or describe(tensors) != expected["tensors"]:
        raise ValueError(
            f"'{file}' does not fit part.json: {size}, {describe(tensors)}, {expected['tensors']}. {AGAIN}"
        )
    if digest(file) != expected["sha256"]:
        raise ValueError(f"'{file}' is damaged: its checksum is not the one in part.json. {AGAIN}")
    attrs: dict[str, Any] = {}
    for key, value in (tensors | expected["values"]).items():
        put(attrs, [unquote(k) for k in key.split("/")], value)
    return attrs


def _check_free(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise FileExistsError(f"'{out}' exists already. Choose another folder, or pass overwrite=True (--overwrite).")
    try:
        if out.exists() and any(out.iterdir()):
            read_meta(out)
    except (OSError, ValueError) as error:
        if not _is_ours(out / "meta.json"):
            raise ValueError(f"'{out}' will not be replaced, because it holds no partition: {error}") from error
    names = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if others := [name for name in names if not re.fullmatch(r"meta\.json|part_[0-9]+", name)]:
        raise ValueError(
            f"'{out}' will not be replaced, because it holds more than a partition: {', '.join(others[:9])}. Move that "
            "elsewhere, or choose another folder."
        )


def _is_ours(file: Path) -> bool:
    """Whether a JSON file is of any version of ours, also if it was changed since."""
    try:
        info = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(info, dict) and info.get("format") == FORMAT["format"]


def _set_aside(out: Path) -> list[Path]:
    """Return what a folder held that has no content now, because a writer was killed between two renames."""
    return [] if out.exists() else _left(out, "old")


def _left(out: Path, what: str) -> list[Path]:
    """Return what writers of a folder left beside it, and not those of one whose name goes on behind a dot."""
    there = out.parent.glob(f".{escape(out.name)}.*.{what}")
    return [path for path in there if path.name.count(".") == out.name.count(".") + 4]


def _read_json(file: Path, folder: Path) -> Said:
    """Read a JSON file of ours, or say what is there instead."""
    if not folder.is_dir():
        for aside in _set_aside(folder):
            raise FileNotFoundError(
                f"There is no folder '{folder}', but '{aside.name}' beside it: what it held when somebody began to "
                "replace it. If they work on, wait; if they were killed, give it its name back, or partition again."
            )
        raise FileNotFoundError(f"There is no folder '{folder}'. Correct the path, or make it: 'pyg-sar partition'.")
    if not file.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:9]) or "nothing"
        then = "Give another folder" if file.name == "meta.json" else "Start as many workers as the partition has parts"
        raise FileNotFoundError(
            f"'{file}' is missing, '{folder}' holds {found}. {then}, or make another: 'pyg-sar partition'."
        )
    try:
        info = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{file}' is truncated or damaged ({error}). {AGAIN}") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT["format"]:
        raise ValueError(f'\'{file}\' was not written by pyg_sar, expected "format": "{FORMAT["format"]}" in it.')
    if info.get("version") != FORMAT["version"]:
        raise ValueError(
            f"'{file}' has format version {info.get('version')}, but this pyg_sar reads {FORMAT['version']}. "
            "Install the pyg_sar that wrote it, or partition the graph again."
        )
    if info.pop("checksum", None) != checksum(info):
        raise ValueError(f"'{file}' is damaged: its checksum is not that of what it says. {AGAIN}")
    return Said(file, info)


class Said(dict):
    """What a JSON file says; a key that is missing is an error with the name of the file."""

    def __init__(self, file: Path, said: dict[str, Any]) -> None:
        super().__init__(said)
        self.file = file

    def __missing__(self, key: str) -> NoReturn:
        raise ValueError(f"'{self.file}' says nothing of '{key}'. {AGAIN}")
