"""Graphs without directions, with all of their splits.

Those of ``npz/`` are arrays that PyG has no class for: Geom-GCN's squirrel with its ten splits (edges, bits of
features), aclanth2021, papers of the ACL Anthology (edges, CSR of words, years as classes, a split), and the web graph
cnr-2000 (CSR). Benchmarks leave out what is not there.
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.nn import MaskLabel
from torch_geometric.utils import to_undirected

import pyg_sar
from pyg_sar.data.datasets import dataset
from pyg_sar.data.partition import prepare

NAMES = {
    "Cora": "Planetoid/Cora",
    "CiteSeer": "Planetoid/CiteSeer",
    "Physics": "Coauthor/Physics",
    "Computers": "Amazon/Computers",
    "tolokers": "HeterophilousGraphDataset/tolokers",
    "minesweeper": "HeterophilousGraphDataset/minesweeper",
    "squirrel": "npz/squirrel.npz",
    "aclanth2021": "npz/aclanth2021.npz",
    "cnr-2000": "npz/cnr-2000.npz",
}

MASKS = ("train_mask", "val_mask", "test_mask")


def graph(name: str, root: str) -> Data:
    """Return a graph with features, labels, masks of shape ``[N, splits]``, and every edge in both directions."""
    file = NAMES.get(name, name)
    data = read(Path(root) / file) if file.endswith(".npz") else dataset(file, root)
    data.edge_index = to_undirected(data.edge_index, num_nodes=data.num_nodes)
    for mask in MASKS:
        data[mask] = data[mask].view(data.num_nodes, -1)
    return Data(**{k: data[k] for k in ("x", "y", "edge_index", *MASKS, "num_classes")})


@functools.cache
def there(name: str, root: str) -> bool:
    """Whether a graph's files are there; say so if not."""
    path = Path(root) / NAMES.get(name, "")
    if name in NAMES and not path.exists():
        print(f"{name} is left out: there is no '{path}'.", file=sys.stderr)
        return False
    return True


def first_split(data: Data) -> Data:
    """Return a graph with the first of its splits alone."""
    return prepare(data, split=0)


def labels_as_features(data: Data) -> MaskLabel:
    """Return what adds embeddings of labels to features; PyG's begin with variance 1, which would drown features that
    are normalised, or of many zeros.
    """
    labels = MaskLabel(data.num_classes, data.x.size(1))
    torch.nn.init.zeros_(labels.emb.weight)
    return labels


def partitions(data: Data, folder: str, counts: Iterable[int]) -> None:
    """Write a graph with its first split, in several numbers of parts."""
    data = first_split(data)
    for parts in counts:
        pyg_sar.partition(data, parts, f"{folder}/{parts}")


def read(path: Path) -> Data:
    """Read a graph from a file with features of bits, as a matrix or as the columns that are set in each row."""
    with np.load(path) as file:
        found = {name: torch.from_numpy(file[name]) for name in file if file[name].dtype.kind in "biuf"}
    edges = torch.stack([found["edge_src"], found["edge_dst"]]).long()
    if "x_bits" in found:
        bits = np.unpackbits(found["x_bits"].numpy(), axis=1)[:, : int(found["num_features"])]
        x, y, masks = torch.from_numpy(bits).float(), found["y"].long(), {mask: found[mask] for mask in MASKS}
    else:
        pointers, columns = found["attr_indptr"], found["attr_indices"].long()
        x, y = torch.zeros(*found["attr_shape"].tolist()), found["year_class"].long()
        x[torch.arange(len(x)).repeat_interleave(pointers.diff()), columns] = 1
        masks = {mask: found["split_random"] == k for k, mask in enumerate(MASKS)}
    return Data(x=x, y=y, edge_index=edges, num_classes=int(y.max()) + 1, **masks)
