r"""Graphs by name, for the command line: PyG's and OGB's data sets, files, a generated default."""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch
import torch_geometric.datasets
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import AttrType, BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import index_to_mask

from pyg_sar.data.attributes import add_counts, names_split, tells_training, whole
from pyg_sar.data.partition import single

KINDS = (
    "'Class' or 'Class/name' of torch_geometric.datasets (Planetoid/Cora), 'ogbn-...', 'Community', "
    "'Community/NODES/EDGES' (or 'Relations', which has edge types), or a file .pt, .npz, .csv, .tsv, .txt"
)


# What torch.load would call of PyG, which itself lists only a part of it. A storage that was asked for the kinds of its
# attributes remembers them in a defaultdict, which torch.load cannot fill.
CALLED: list[Any] = [HeteroData, DataEdgeAttr, DataTensorAttr, BaseStorage, EdgeStorage, GlobalStorage, NodeStorage]
CALLED += [AttrType, (lambda kind: {}, "collections.defaultdict")]
CHUNK = 1 << 22  # edges or nodes that are generated together, so that steps in between take little memory


def dataset(name: str, root: str | os.PathLike[str] = "data") -> Data | HeteroData:
    r"""Load a graph by name.

    * ``Class`` or ``Class/name``: a data set of :mod:`torch_geometric.datasets`, kept in ``root/Class``.
    * ``ogbn-...``: a node data set of OGB (needs ``ogb``), kept in ``root``.
    * ``Community`` or ``Community/NODES/EDGES``: :func:`community_graph`; ``Relations`` is the same with ``edge_type``.
    * ``FILE.pt``: a saved :class:`~torch_geometric.data.Data`, or a dictionary of its attributes.
    * ``FILE.npz``: ``edge_index``, or ``edge_src`` and ``edge_dst``, or ``indptr`` and ``indices`` (CSR, edges from row
      to column); every other array becomes an attribute of the same name. The number of nodes is ``num_nodes``, else
      the length of ``x``, ``y``, ``labels`` or ``train_mask``, or of ``feat``, ``features`` or ``label`` if that is
      more than the largest node number, else that plus one.
    * ``FILE.csv``, ``.tsv``, ``.txt``: source and destination of an edge on each line.

    Labels given for lists of nodes (``Entities``) are there as ``y``, -1 where unlabelled, and masks, too. A graph with
    labels and no attribute that is named as one of a split gets a random one, 60/20/20, the same every time, and a note
    says so. ``num_classes`` and ``num_relations`` are set where labels and edge types tell them. A ``HeteroData`` is
    returned as it is.

    Args:
        name (str): What to load.
        root (str, optional): Where data sets are kept. (default: :obj:`"data"`)

    Returns:
        The graph, a :class:`~torch_geometric.data.Data` or :class:`~torch_geometric.data.HeteroData`.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If nothing has that name, or what has it cannot be read, or holds several graphs.
        ImportError: If a package is missing that the data set needs.
    """
    kind, *args = name.split("/")
    path = Path(name)
    if path.suffix in _READERS:
        if not path.is_file():
            raise FileNotFoundError(f"There is no file '{name}'. Correct the path.")
        read, expected = _READERS[path.suffix]
        try:
            data = read(path)
        except Exception as error:  # each format breaks in many ways
            raise ValueError(f"'{name}' could not be read as {expected}: {error}") from error
    elif kind in ("Community", "Relations"):
        if len(args) not in (0, 2) or not all(arg.isdecimal() for arg in args):
            raise ValueError(f"Expected '{kind}' or '{kind}/NODES/EDGES', got '{name}'.")
        data = community_graph(*map(int, args))
        if kind == "Relations":
            data.edge_type = _relations(data)
    else:
        data = _ogb(name, root) if kind.startswith("ogbn-") else _pyg(name, root)
    try:
        return data if isinstance(data, HeteroData) else _complete(data, name)
    # Such as lists of nodes that there are not, or that are no tensors.
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"'{name}' is no graph whose parts fit together, {type(error).__name__}: {error}.") from error


def community_graph(
    num_nodes: int = 50_000,
    num_edges: int = 1_000_000,
    num_features: int = 64,
    num_classes: int = 16,
    seed: int = 0,
) -> Data:
    r"""Generate an undirected graph with communities, power-law degrees and noisy features.

    An edge joins two nodes drawn by popularity: four times in ten of one class, otherwise of any. With the default
    sizes, an MLP reaches about 58% accuracy and GraphSAGE about 92%.

    Args:
        num_nodes (int, optional): Number of nodes, in random order. (default: :obj:`50_000`)
        num_edges (int, optional): Number of edges, counted in both directions. (default: :obj:`1_000_000`)
        num_features (int, optional): Number of features of a node: the center of its class, and noise.
            (default: :obj:`64`)
        num_classes (int, optional): Number of classes, each of them a community. (default: :obj:`16`)
        seed (int, optional): Seed of everything random, the split 60/20/20 included. (default: :obj:`0`)

    Returns:
        A :class:`~torch_geometric.data.Data` with ``x`` :math:`(|\mathcal{V}|, F)`, ``y`` :math:`(|\mathcal{V}|)`,
        ``edge_index`` :math:`(2, |\mathcal{E}|)`, masks and ``num_classes``.

    Raises:
        ValueError: If there cannot be so many edges, or without nodes, features or classes.
    """
    if min(num_nodes, num_features, num_classes) < 1 or not 0 <= num_edges <= num_nodes**2 // 4:
        raise ValueError(
            f"A community graph needs a node and has at most NODES * NODES / 4 edges, got {num_nodes} nodes and "
            f"{num_edges} edges."
        )
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (num_nodes,), generator=generator).sort().values
    pair = _pairs(y, num_edges // 2, generator)
    name, half = torch.randperm(num_nodes, generator=generator), pair.numel()
    edge_index = torch.empty(2, 2 * half, dtype=torch.int64)
    for row, node in (0, pair // num_nodes), (1, pair % num_nodes):
        edge_index[row, :half] = edge_index[1 - row, half:] = name[node]
    del pair, node
    y = torch.empty_like(y).scatter_(0, name, y)
    center = 2 * torch.randn(num_classes, num_features, generator=generator) / num_features**0.5
    x = torch.randn(num_nodes, num_features, generator=generator)
    for rows, classes in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        rows += center[classes]
    return _split(Data(x=x, edge_index=edge_index, y=y, num_classes=num_classes), seed)


def _relations(data: Data) -> Tensor:
    """Draw one of four relations for each edge; it tells in seven of ten cases whether it joins nodes of one class."""
    generator = torch.Generator().manual_seed(0)
    src, dst = data.edge_index
    draw = torch.randint(2, src.shape, generator=generator)
    told = torch.rand(src.shape, generator=generator) < 0.7
    same = torch.where(told, data.y[src] == data.y[dst], torch.rand(src.shape, generator=generator) < 0.5)
    return 2 * draw + same


def _pairs(y: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw distinct pairs of different nodes, each pair as one number; ``y`` must be sorted."""
    num_nodes = y.numel()
    # The popularity u^(-1/2) has a density that falls with its third power.
    draw = torch.rand(num_nodes, generator=generator, dtype=torch.double).clamp_(min=1e-9)
    total = torch.cat([draw.new_zeros(1), draw.pow(-0.5).cumsum(0)])
    bounds = torch.searchsorted(y, torch.arange(int(y[-1]) + 2))
    found = torch.empty(0, dtype=torch.long)
    while found.numel() < count:
        size = 100 + count - found.numel() + count // 5
        point = torch.rand(2, size, generator=generator, dtype=torch.double)
        same = torch.rand(size, generator=generator) < 0.4
        chunks = zip(point.split(CHUNK, 1), same.split(CHUNK), strict=True)
        pairs = [_joined(y, bounds, total, *chunk) for chunk in chunks]
        del point, same, chunks
        found = torch.cat([found, *pairs]).unique()
        del pairs
    return found[torch.randperm(found.numel(), generator=generator)[:count]]


def _joined(y: Tensor, bounds: Tensor, total: Tensor, point: Tensor, same: Tensor) -> Tensor:
    """Return the pairs of different nodes that two rows of numbers from 0 to 1 point at, see :func:`_pairs`."""
    last = y.numel() - 1
    src = torch.searchsorted(total[1:], point[0] * total[-1]).clamp_(max=last)
    low = torch.where(same, total[bounds[y[src]]], 0.0)
    high = torch.where(same, total[bounds[y[src] + 1]], total[-1])
    dst = torch.searchsorted(total[1:], low + point[1] * (high - low)).clamp_(max=last)
    return (torch.minimum(src, dst) * y.numel() + torch.maximum(src, dst))[src != dst]


def _pyg(name: str, root: str | os.PathLike[str]) -> Any:
    kind, *args = name.split("/")
    cls = getattr(torch_geometric.datasets, kind, None)
    if not inspect.isclass(cls):
        close = difflib.get_close_matches(kind, torch_geometric.datasets.__all__, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ValueError(f"There is no data set '{name}', expected {KINDS}.{hint}")
    roots = [str(Path(root) / kind)] if "root" in inspect.signature(cls).parameters else []
    try:
        graphs: Any = cls(*roots, *args)
    except URLError as error:
        raise OSError(f"'{name}' is not below '{root}', and could not be downloaded: {error.reason}.") from error
    except (ImportError, OSError):
        raise
    except Exception as error:  # each class complains in its own way about its name
        raise ValueError(f"'{name}' could not be loaded, {type(error).__name__}: {error}. Expected {KINDS}.") from error
    return single(graphs)


def _ogb(name: str, root: str | os.PathLike[str]) -> Data:
    try:
        from ogb.nodeproppred import PygNodePropPredDataset
    except ImportError as error:
        raise ImportError(f"'{name}' needs the package ogb. Run 'pip install ogb'.") from error
    with plain_graphs():  # which OGB reads by torch.load
        graphs = PygNodePropPredDataset(name, root=str(root))
        data, splits = graphs[0], graphs.get_idx_split()
    if isinstance(getattr(data, "num_nodes_dict", None), dict):
        raise ValueError(f"'{name}' has several types of nodes: take PyG's own data set, such as 'OGB_MAG'.")
    for key, index in splits.items():
        mask = index_to_mask(torch.as_tensor(index), data.num_nodes)
        data[f"{key.removesuffix('id')}_mask"] = mask  # OGB says "valid" for PyG's "val"
    if data.y.dim() == 2 and data.y.size(1) == 1:
        data.y = data.y.squeeze(1)
        if "classification" in graphs.task_type:  # labels may be floats, and none of most nodes
            data.num_classes = int(graphs.num_classes)
    return data


@contextmanager
def plain_graphs() -> Iterator[None]:
    """Have ``torch.load`` read graphs of PyG, and run nothing else that is in a file."""
    before = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([one for one in before if one is not defaultdict] + CALLED)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _read_pt(path: Path) -> Any:
    try:
        with plain_graphs():
            data = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"it holds other objects{f' ({found[1]})' if found else ''}. Make arrays tensors ('torch.from_numpy'). Of "
            "a torch_geometric.data.Batch, save 'Data.from_dict(batch.to_dict())'."
        ) from error
    if not isinstance(data, (Data, HeteroData, dict)):
        raise ValueError(f"it holds a {type(data).__name__}.")
    data = Data.from_dict(data) if isinstance(data, dict) else data
    for store in data.stores:
        store.__dict__.pop("_cached_attr", None)
        if store.get("num_nodes") is not None:
            store.num_nodes = whole(store.num_nodes)
        for key, value in store.items():
            if isinstance(value, Tensor) and (value.is_meta or (key == "edge_index" and value.layout != torch.strided)):
                raise ValueError(f"its '{key}' is a {value.layout} tensor on '{value.device}', expected a dense one.")
    return data


def _read_npz(path: Path) -> Data:
    with path.open("rb") as f, np.load(f, allow_pickle=False) as file:
        arrays = dict(file)
    if "edge_index" in arrays:
        edges = arrays.pop("edge_index")
    elif {"edge_src", "edge_dst"} <= arrays.keys():
        edges = np.stack([arrays.pop("edge_src"), arrays.pop("edge_dst")])
    elif {"indptr", "indices"} <= arrays.keys():
        if {"format", "shape", "data"} <= arrays.keys():
            _of_scipy(arrays)
        arrays.setdefault("num_nodes", np.asarray(arrays["indptr"].size - 1))
        edges = _from_csr(arrays.pop("indptr"), arrays.pop("indices"))
    else:
        raise ValueError(f"it holds {sorted(arrays)}.")
    rows = [key for key in ("x", "y", "labels", "train_mask") if key in arrays]
    if single := [key for key in rows if not arrays[key].ndim]:
        raise ValueError(f"its {single[0]!r} is a single value, expected one for each node.")
    most = int(edges.max(initial=-1)) if edges.dtype.kind in "iu" else -1
    rows += [k for k in ("feat", "features", "label") if k in arrays and arrays[k].ndim and len(arrays[k]) > most]
    sizes = [len(arrays[key]) for key in rows]
    num_nodes = arrays.pop("num_nodes", sizes[0] if sizes else None)
    data = _edges(edges, num_nodes)
    for key, value in arrays.items():
        data[key] = torch.from_numpy(value) if value.dtype.kind in "biuf" else value
    return data


def _of_scipy(arrays: dict[str, np.ndarray]) -> None:
    """Have a matrix of ``scipy.sparse.save_npz`` be edges, and weights of these."""
    kind, shape = arrays.pop("format").item(), arrays.pop("shape").tolist()
    kind = kind.decode() if isinstance(kind, bytes) else kind
    if kind != "csr" or len({*shape}) != 1:
        raise ValueError(
            f"it is a matrix of format {kind!r} and shape {shape}, expected 'csr' and as many columns as rows."
        )
    arrays["edge_weight"] = arrays.pop("data")


def _from_csr(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return edges from the rows to the columns of a sparse matrix."""
    ascend = indptr.ndim == 1 and bool((indptr[1:] >= indptr[:-1]).all())
    if not ascend or [*indptr[:1], *indptr[-1:]] != [0, len(indices)]:
        raise ValueError(f"its 'indptr' does not ascend from 0 to the {len(indices)} entries of 'indices'.")
    degree = np.diff(indptr)
    return np.stack([np.arange(degree.size).repeat(degree.astype(np.int64, casting="same_kind")), indices])


def _read_text(path: Path) -> Data:
    delimiter = "," if path.suffix == ".csv" else None
    if path.stat().st_size == 0:
        raise ValueError("it is empty.")
    source, destination = np.loadtxt(path, np.int64, delimiter=delimiter, ndmin=2, encoding="utf-8-sig").T
    return _edges(np.stack([source, destination]))


def _edges(edges: np.ndarray, num_nodes: Any = None) -> Data:
    if edges.dtype.kind not in "iu":
        raise ValueError(f"its edges are of type {edges.dtype}, expected integers.")
    edge_index = torch.from_numpy(edges.astype(np.int64))
    count = int(edges.max(initial=-1)) + 1 if num_nodes is None else whole(num_nodes)
    if not 0 <= count < 2**48:  # index arithmetic multiplies it
        raise ValueError(f"it has {count} nodes, by the largest number of one or by 'num_nodes'.")
    if num_nodes is None and count > max(2**24, 1000 * max(edges.shape[-1], 1)):  # hashes, not numbers of nodes
        raise ValueError(
            f"it has {count} nodes, by the largest number of one, but {edges.shape[-1]} edges. Number nodes from 0 to "
            "n-1 (numpy.unique(edges, return_inverse=True)), or store 'num_nodes' beside the edges in an .npz."
        )
    return Data(edge_index=edge_index, num_nodes=count)


_READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    ".pt": (_read_pt, "a Data or a dictionary of tensors, written by torch.save (nothing that runs code is loaded)"),
    ".npz": (_read_npz, "arrays with edge_index, or edge_src and edge_dst, or indptr and indices"),
    **dict.fromkeys((".csv", ".tsv", ".txt"), (_read_text, "lines of two node numbers")),
}


def _complete(data: Data, name: str) -> Data:
    """Bring labels, masks and counts into one form."""
    if "train_idx" in data and "train_y" in data:
        given = data.train_y
        kind = given.dtype if given.is_floating_point() else torch.int64
        y = data.y.clone() if _labelled(data) else torch.full((data.num_nodes, *given.shape[1:]), -1, dtype=kind)
        for split in ("train", "val", "test"):
            index, labels = data.get(f"{split}_idx"), data.get(f"{split}_y")
            if index is not None:
                data[f"{split}_mask"] = index_to_mask(index, data.num_nodes)
                if labels is not None:
                    y[index] = labels if labels.is_floating_point() else labels.to(y.dtype)
        data.y = y
    if _labelled(data) and not tells_training(data._store):
        if told := [key for key in data.keys() if names_split(key)]:  # noqa: SIM118
            print(f"{name} has {', '.join(told)}, but no training nodes: no split is made.", file=sys.stderr)
        else:
            data = _split(data, 0)
            print(f"{name} has no split: using a random one, 60/20/20% with seed 0.", file=sys.stderr)
    add_counts(data)
    return data


def _labelled(data: Data) -> bool:
    return isinstance(data.y, Tensor) and data.is_node_attr("y")


def _split(data: Data, seed: int) -> Data:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RandomNodeSplit(num_val=0.2, num_test=0.2)(data)
