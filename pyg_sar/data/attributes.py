r"""What each attribute of a graph is: rows of nodes or edges, ids of some of these, or the same in all parts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.storage import NodeStorage

from pyg_sar.caller import warn
from pyg_sar.csr import Lookup
from pyg_sar.data import store

Path = tuple[str, ...]  # a name, and the keys of dictionaries below it

LEVELS = ("node", "edge", "graph", "node_ids", "edge_ids")
LEFT_OUT = {
    **dict.fromkeys(("n_id", "e_id", "total_nodes"), "'load' sets an attribute of this name"),
    "ptr": "it counts rows of the whole graph; 'batch' is stored",
    "__metadata__": "files of tensors keep something else under this name",
}
# Words of a name, between underscores.
INDEX = {"idx", "index", "indices"}
IDS = INDEX | {"id", "ids", "nid", "nids", "nodes"}
COUNTS = {"n", "max", "min", "count", "counts", "per"}  # "n_nodes" counts nodes
SPLITS = {"train", "val", "valid", "validation", "test", "split"}
PAIRS = SPLITS | {"pos", "neg", "label"}
EDGES = {"edge", "edges"}
SURE = SPLITS | EDGES | {"node", "nodes", "nid", "nids", "seed", "seeds", "label", "labels", "y"}  # of nodes or edges
KEEPS = "keeps the ids of the whole graph ('n_id' tells those of a part)"
ROWS = {"x", "y", "pos", "batch", "label", "labels"}  # names of what every node has

# Of unsigned integers torch chooses no rows, but of their bits taken for others.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute of the whole graph."""

    value: Any
    rows: str = ""  # whose rows it has, or whose ids: "node", "edge", a type of nodes; or it is the same in all parts
    dim: int = 0  # the dimension that counts these rows
    ids: Tensor | None = None  # the ids themselves, or those to which the entries of `value` belong

    @property
    def level(self) -> str:
        """Tell whether it has a row for each "node" or "edge", or else is of the "graph"."""
        return self.rows if self.ids is None and self.rows else "graph"

    def of(self, part: dict[str, Lookup]) -> Any:
        """Return what a part has of it: its rows, or the rows of those of the ids that are its own, in their order."""
        if not self.rows:
            return self.value
        rows = part[self.rows]
        if self.ids is None:
            dtype = self.value.dtype
            return self.value.view(SIGNED.get(dtype, dtype)).index_select(self.dim, rows.n_id).view(dtype)
        row = rows.rows(self.ids)
        return row[row >= 0] if self.value is self.ids else self.value[row >= 0]


def alike(attributes: dict[Path, Attribute]) -> list[str]:
    """Return the names of tensors that are the same in all parts, but for those in dictionaries."""
    found = {path: it.value for path, it in attributes.items() if not it.rows}
    return [path[0] for path, value in found.items() if len(path) == 1 and isinstance(value, Tensor)]


def take(attributes: dict[Path, Attribute], part: dict[str, Lookup]) -> dict[str, Any]:
    """Return a part's share of attributes, by name."""
    found: dict[str, Any] = {}
    for path, attribute in attributes.items():
        store.put(found, path, attribute.of(part))
    return found


def describe(sorted_stores: Iterable[tuple[Any, dict[Path, Attribute]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what ``meta.json`` says of node-level, edge-level and other attributes, and the names of lists of ids."""
    said: dict[str, dict[str, Any]] = {"node": {}, "edge": {}, "graph": {}}
    lists = []
    for stored, attributes in sorted_stores:
        for path, a in attributes.items():
            name = full_name(stored, ".".join(path))
            said[a.level] |= store.describe({name: a.value})
            if a.ids is not None:
                said[a.level][name].append(f"{a.rows} ids" if a.value is a.ids else "as ids")
                lists.append(name)
    return [*said.values()], lists


def trained(attributes: dict[Path, Attribute], num_nodes: int, rows: str = "node") -> Tensor:
    """Return which nodes are in the training set, of any split if there are several."""
    mask = attributes.get(("train_mask",), Attribute(None))
    if mask.rows and mask.level == rows and mask.value.dtype == torch.bool:
        return in_any(mask.value)
    found = torch.zeros(num_nodes, dtype=torch.bool)
    for path, a in attributes.items():
        if a.ids is not None and a.rows == rows and "train" in _words(path):
            found[a.ids] = True
    return found


def tells_training(stored: Any) -> bool:
    """Return whether a mask or a list of ids tells which nodes are in the training set."""
    found = (leaf for key, value in stored.items() for leaf in leaves((key,), plain(value)))
    return "train_mask" in stored or any(
        "train" in _words(path) and meaning(stored, path, value)[0] == "node_ids" for path, value in found
    )


def names_split(key: str) -> bool:
    """Return whether an attribute is one of the training, validation or test nodes, or edges, by its name."""
    return bool(_words((key,)) & SPLITS)


def stem_of(path: Path) -> set[str]:
    """Return the words of the name of a list, but those that say that it holds ids."""
    return _words(path) - IDS


def belongs(path: Path, stem: set[str]) -> bool:
    """Return whether an attribute is what the entries of a list have, by its name: all words of the list's stem."""
    words = _words(path)
    return len(stem) > 0 and stem <= words and "mask" not in words


def in_any(mask: Tensor) -> Tensor:
    """Return whether each node is in any of the splits of a mask."""
    return mask.flatten(1).any(1) if mask.dim() > 1 else mask


def add_counts(stored: Any) -> None:
    """Set ``num_classes`` and ``num_relations`` of the whole graph, where they are missing and the graph tells them."""
    y, edge_type = plain(stored.get("y", stored.get("train_y"))), plain(stored.get("edge_type"))
    relations = _classes(edge_type) if integers(edge_type) and edge_type.dim() == 1 else 0
    for key, count in (("num_classes", _classes(y)), ("num_relations", relations)):
        if count and key not in stored:
            stored[key] = count


def _classes(y: Any) -> int:
    """Return what :attr:`torch_geometric.data.Dataset.num_classes` does, or 0 where PyG warns that it may be wrong."""
    if not isinstance(y, Tensor) or not storable(y) or not y.dim() or not y.numel():
        return 0
    if y.numel() > len(y):
        return y.size(-1)
    if not y.is_floating_point() and not y.is_complex():
        return int(y.long().max()) + 1
    values = y.unique().numel()
    return values if values <= 2 else 0


def integers(value: Any) -> bool:
    """Tell whether a value is a tensor of integers."""
    if not isinstance(value, Tensor):
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def whole(count: Any) -> int:
    """Return a number of nodes, which may stand in an array or a tensor."""
    number: Any = np.asarray(count)
    number = number.item() if number.size == 1 else None
    if not isinstance(number, (int, float)) or number != number // 1 or number < 0:
        raise ValueError(f"Expected 'num_nodes' to be a whole number of 0 or more (got {count}).")
    return int(number)


def _words(path: Iterable[str]) -> set[str]:
    return {word for name in path for word in name.lower().split("_")}


def _counts(words: set[str]) -> bool:
    return "num" in words or bool(words & COUNTS and words & (EDGES | {"node", "nodes"}))


def _names_ids(path: Path) -> bool:
    words = _words(path)
    return bool(words & IDS) and not _counts(words)


def num_graphs(stored: Any) -> int:
    """Return the number of graphs in a batch."""
    batch = plain(stored.get("batch"))
    return int(batch.max()) + 1 if integers(batch) and batch.numel() else 1


def rows_of(stored: Any) -> dict[str, int]:
    """Return of how many nodes ("node") and edges ("edge") one of PyG's stores holds attributes."""
    rows = {"node": stored.num_nodes} if isinstance(stored, NodeStorage) else {}
    return rows | ({"edge": stored.edge_index.size(1)} if "edge_index" in stored else {})


def meaning(stored: Any, path: Path, value: Any) -> tuple[str, int | None]:
    """Tell what an attribute is by its size and name, and which dimension counts nodes or edges, if PyG names one.

    It is "node" or "edge" if it has a row for each, "node_ids" or "edge_ids" if it is a list of ids, "pairs" if it
    holds pairs of ids, else "graph".
    """
    if not isinstance(value, Tensor) or not value.dim():
        return "graph", None
    dim, words, rows = stored._parent().__cat_dim__(path[0], value, stored), _words(path), rows_of(stored)
    dim = dim if isinstance(dim, int) else None
    fits = [level for level, count in rows.items() if dim is not None and value.size(dim) == count]
    # Where there are as many nodes as edges, names tell, as in PyG ('is_node_attr').
    level = fits[-1 if "edge" in path[0] else 0] if fits else "graph"
    if integers(value) and is_pairs(path, value):
        return ("pairs" if level == "graph" or words & PAIRS else level), dim
    # Ids of a split that a file has as floats: they would be copied whole, and choose other nodes in each part.
    floats = level == "graph" and words & SPLITS and value.is_floating_point() and value.dim() == 1
    if _names_ids(path) and (floats or (integers(value) and (level == "graph" or words & SPLITS))):
        # An id of each, as QM9's "idx"; not numbers of nodes, which PyG counts on from graph to graph.
        counts_on = bool(torch.as_tensor(stored._parent().__inc__(path[0], value, stored)).any())
        of_graphs = not words & SURE and 1 < len(value) == num_graphs(stored) and not counts_on
        codes = level == "node" and words & SPLITS == {"split"} and value.unique().numel() < value.numel()
        if not of_graphs and not codes:  # of the splits that nodes are in
            return ("edge_ids" if words & EDGES or [*rows] == ["edge"] else "node_ids"), dim
    return level, dim


def plain(value: Any) -> Any:
    """Return arrays and PyG's index tensors as tensors, and other values as they are."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        with warnings.catch_warnings():  # of arrays that cannot be written, such as files: nobody does
            warnings.simplefilter("ignore")
            return torch.from_numpy(np.require(value, requirements="C"))
    if isinstance(value, Tensor):
        value = value.as_tensor() if hasattr(value, "as_tensor") else value
        return value.detach().cpu().resolve_conj().resolve_neg()
    return value


def storable(value: Any, sizes: Iterable[int] = ()) -> bool:
    """Tell whether a value is a tensor or JSON, and not a list that should be cut with nodes or edges."""
    if isinstance(value, Tensor):
        return value.layout == torch.strided and store.can_hold(value.dtype)
    if isinstance(value, (list, tuple)):
        return len(value) not in sizes and not any(isinstance(v, Tensor) or not storable(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))


def full_name(stored: Any, key: str) -> str:
    """Return the name of an attribute with its type of nodes or edges, as messages say it and ``levels`` takes it."""
    kind = stored._key
    return key if kind is None else f"{kind if isinstance(kind, str) else '__'.join(kind)}.{key}"


def check_levels(levels: dict[str, str], stores: Iterable[Any]) -> None:
    """Raise unless the levels are known, and those of attributes of the graph."""
    names = [full_name(stored, key) for stored in stores for key in stored.keys()]  # noqa: SIM118
    for name, level in levels.items():
        if level not in LEVELS:
            raise ValueError(f"Unknown level {level!r} of '{name}', expected one of {', '.join(LEVELS)}.")
        if name not in names:
            raise ValueError(f"'levels' names '{name}', which the graph has not. Expected some of {names}.")


def sort_attributes(stored: Any, levels: dict[str, str], types: dict[str, int] | None = None) -> dict[Path, Attribute]:
    """Tell what the attributes of one of PyG's stores are; what cannot be stored is left out, with a warning.

    ``levels`` are those that the user has told, by full name, ``types`` what ids may be of, and how many of these there
    are, by default the nodes and edges of the store. Dictionaries that hold lists of ids are taken apart.

    Raises:
        ValueError: If an attribute cannot be what its name says, or if it does not tell whether it holds ids.
    """
    rows = rows_of(stored)
    return _Sorter(stored, rows, levels, rows if types is None else types).sort()


@dataclass
class _Sorter:
    """Sorts the attributes of one store, see :func:`sort_attributes`."""

    stored: Any
    rows: dict[str, int]
    levels: dict[str, str]
    types: dict[str, int]

    def sort(self) -> dict[Path, Attribute]:
        values = dict(self.values())
        meant = {path: meaning(self.stored, path, value) for path, value in values.items()}
        told = {path: self.told(path, value, *meant[path]) for path, value in values.items()}
        lists = {path: found for path, found in told.items() if found is not None}
        return {
            path: lists.get(path) or self.beside(path, value, lists) or self.row(path, value, *meant[path])
            for path, value in values.items()
        }

    def name(self, path: Path) -> str:
        return full_name(self.stored, ".".join(path))

    def values(self) -> Iterator[tuple[Path, Any]]:
        """Yield what can be stored, and lists of ids in dictionaries one by one."""
        for key, value in self.stored.items():
            if key in ("edge_index", "num_nodes"):
                continue
            name, value = full_name(self.stored, key), plain(value)
            told = name in self.levels
            found = dict(leaves((key,), value)) if told or _names_ids((key,)) else {}
            if key in LEFT_OUT:
                warn(f"'{name}' of the graph is left out: {LEFT_OUT[key]}.")
            elif found and all(storable(leaf) if told else integers(leaf) for leaf in found.values()):
                yield from found.items()
            elif storable(value, self.rows.values()):
                yield (key,), value
            elif key in ROWS and isinstance(value, Tensor) and value.layout != torch.strided:
                raise ValueError(f"'{name}' is a {value.layout} tensor. Store '{key}.to_dense()', or remove it.")
            else:
                kind = type(value).__name__
                if isinstance(value, Tensor):
                    kind = f"tensor of {value.dtype if value.layout == torch.strided else value.layout}"
                warn(f"'{name}' ({kind}) is left out: only dense tensors of numbers are stored, and not of all types.")

    def told(self, path: Path, value: Any, what: str, dim: int | None) -> Attribute | None:
        """Return what the user has told, and ids and pairs of ids by their names."""
        said = self.levels.get(full_name(self.stored, path[0]))
        level = said or what
        if level == "pairs":  # whose nodes may belong to two workers, for `shard_links`; the watch refuses other uses
            return Attribute(value)
        if level.endswith("_ids"):
            rows = level.removesuffix("_ids")
            if not said and not _words(path) & SURE:
                self.hint(path, f"is taken for ids of {rows}s and becomes rows of each part", level)
            return self.ids(path, value, rows)
        if said in ("node", "edge") and (dim is None or value.size(dim) != self.rows.get(said)):
            raise ValueError(f"'{self.name(path)}' {_shape(value)} is not of level '{said}': {self.counts()}.")
        return None if not said else Attribute(value) if said == "graph" else Attribute(value, said, dim or 0)

    def ids(self, path: Path, value: Any, rows: str) -> Attribute:
        """Return ids, whose rows in a part are found later."""
        name = self.name(path)
        if not integers(value) or value.dim() != 1:
            raise ValueError(
                f"'{name}' {_shape(value)} should be a list of ids by its name or level, an integer tensor [*] (got "
                f"{getattr(value, 'dtype', type(value).__name__)}). Make it masks (of several splits: [num_nodes, *]) "
                f"or several attributes, {self.keep(path)}."
            )
        if not self.rows and rows == "node":  # of the type that the keys of dictionaries tell
            rows = next((t for t in self.types if t in path), rows)
        if rows not in self.types:
            raise ValueError(
                f"'{name}' {_shape(value)} should be ids by its name or level, but of which nodes or edges is not "
                f"told. Make it an attribute of these, {self.keep(path)}."
            )
        value = value.long()
        if value.numel() and (value.min() < 0 or value.max() >= self.types[rows]):
            raise ValueError(
                f"'{name}' {_shape(value)} should be ids by its name or level, 0 to {self.types[rows] - 1}, but holds "
                f"{int(value.min())} to {int(value.max())}. Correct it, {self.keep(path)}."
            )
        return Attribute(value, rows, ids=value)

    def beside(self, path: Path, value: Any, lists: dict[Path, Attribute]) -> Attribute | None:
        """Return what has an entry for each id of a list: ``train_y`` for ``train_idx``, ``y`` for ``y_index``."""
        if not isinstance(value, Tensor) or not value.dim():
            return None
        stems = {other: stem_of(other) for other, found in lists.items() if len(value) in _shape(found.value)}
        fits = [other for other, stem in stems.items() if belongs(path, stem)]
        if not fits or lists[(best := max(fits, key=lambda other: len(stems[other])))].level != "graph":
            return None
        return Attribute(value, lists[best].rows, ids=lists[best].ids)

    def row(self, path: Path, value: Any, level: str, dim: int | None) -> Attribute:
        """Return what has a row for each node or edge, or neither."""
        if level == "graph":
            return self.rest(path, value)
        if integers(value) and (_words(path) & INDEX or is_pairs(path, value)):
            self.hint(path, KEEPS, level)
        return Attribute(value, level, dim or 0)

    def rest(self, path: Path, value: Any) -> Attribute:
        """Return what is the same in all parts, unless it should or might be something else."""
        what, words = f"'{self.name(path)}' {_shape(value)}", _words(path)
        no_rows = not isinstance(value, Tensor) or not value.dim() or _counts(words)
        if no_rows or len(value) in (1, num_graphs(self.stored)):
            return Attribute(value)
        edges = path[0].startswith("edge_") and "edge" in self.rows
        if self.rows and (edges or path[0] in ROWS or words & ({"mask", "node"} if "node" in self.rows else {"mask"})):
            raise ValueError(
                f"{what} should have a row for each {'edge' if edges else ' or '.join(self.rows)} by its name, but "
                f"{self.counts()}. Correct it, {self.keep(path)}."
            )
        low, high = value.long().aminmax() if integers(value) and value.numel() else (-1, -1)
        if low >= 0 and high < max(self.types.values(), default=0):
            name = f"If so, name it '{path[0]}_idx' or make" if value.dim() == 1 else "If so, make"
            raise ValueError(
                f"{what} may hold ids of nodes or edges: integers from {int(low)} to {int(high)} where {self.counts()} "
                f"and a name that does not tell. {name} it a mask, {self.keep(path)}."
            )
        return Attribute(value)

    def counts(self) -> str:
        return "there are " + " and ".join(f"{count} {what}s" for what, count in (self.rows or self.types).items())

    def keep(self, path: Path) -> str:
        name = full_name(self.stored, path[0])
        return f"or pass levels={{'{name}': 'graph'}} (--level {name}=graph) to copy it into every part as it is"

    def hint(self, path: Path, what: str, level: str) -> None:
        """Warn of what may surprise, and name the level that asks for it."""
        name = full_name(self.stored, path[0])
        warn(
            f"'{self.name(path)}' {what}. levels={{'{name}': '{level}'}} (--level {name}={level}) says that it should."
        )


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield what a dictionary holds, by path, and lists of integers as tensors."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from leaves((*path, key), below) if isinstance(key, str) else [(path, ...)]  # which is not storable
    elif isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        yield path, torch.tensor(value, dtype=torch.long)
    else:
        yield path, plain(value)


def is_pairs(path: Path, value: Tensor) -> bool:
    """Tell whether integers are pairs of nodes, or faces of three, by name and shape."""
    words = _words(path)
    edges = bool(words & {"edges", "pairs", "links"}) or ("edge" in words and bool(words & (SPLITS | {"pos", "neg"})))
    by_row, by_column = (value.dim() == 2 and value.size(dim) == 2 for dim in (0, 1))
    named = edges or (_names_ids(path) and not words & SPLITS)  # "train_idx" of two nodes is none
    return path[-1] == "face" or (by_row and named) or (by_column and edges)


def _shape(value: Any) -> list[int]:
    return list(value.shape) if isinstance(value, Tensor) else []
