"""Graphs of the benchmarks of pipelines, without directions."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

import pyg_sar
from pyg_sar.data.datasets import dataset

NAMES = {
    "Cora": "Planetoid/Cora",
    "Physics": "Coauthor/Physics",
    "Computers": "Amazon/Computers",
    "tolokers": "HeterophilousGraphDataset/tolokers",
    "squirrel": "npz/squirrel.npz",
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


def partitions(data: Data, folder: str, counts: Iterable[int]) -> None:
    """Write a graph with its first split, in several numbers of parts."""
    data = data.clone()
    for mask in MASKS:
        data[mask] = data[mask][:, 0].clone()
    for parts in counts:
        pyg_sar.partition(data, parts, f"{folder}/{parts}")


def read(path: Path) -> Data:
    """Read a graph from a file with features of bits."""
    with np.load(path) as file:
        found = {name: torch.from_numpy(file[name]) for name in file}
    bits = np.unpackbits(found["x_bits"].numpy(), axis=1)[:, : int(found["num_features"])]
    edges = torch.stack([found["edge_src"], found["edge_dst"]]).long()
    x, y = torch.from_numpy(bits).float(), found["y"].long()
    return Data(x=x, y=y, edge_index=edges, num_classes=int(y.max()) + 1, **{mask: found[mask] for mask in MASKS})
