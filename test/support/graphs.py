"""Small random data sets in the shape of those that PyG's examples train on."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.utils import to_undirected

NODES, EDGES, FEATURES, CLASSES = 120, 600, 9, 4


class Dataset(InMemoryDataset):
    """A data set of one graph."""

    def __init__(self, data: Data | HeteroData) -> None:
        super().__init__()
        self._data, self.slices = self.collate([data])


class Entities(Dataset):
    """One whose edges have types, and some of whose nodes have labels."""

    num_relations, num_classes = 5, CLASSES


def seeded(seed: int) -> Callable:
    """Draw the numbers of a seed, and leave those that follow to others."""

    def decorate(make: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(make)
        def made() -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return make()

        return made

    return decorate


def draw(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def edges(num_src: int = NODES, num_dst: int = NODES, count: int = EDGES) -> Tensor:
    return torch.stack([torch.randint(n, (count,)) for n in (num_src, num_dst)])


def masks(data: Data) -> Data:
    place = torch.randperm(data.num_nodes) * 3 // data.num_nodes
    data.train_mask, data.val_mask, data.test_mask = place == 0, place == 1, place == 2
    return data


def citations() -> Dataset:
    """Cora's: features, one label for each node, masks; and what scripts would draw at random."""
    return Dataset(papers())


@seeded(1)
def papers() -> Data:
    data = masks(Data(x=draw(NODES, FEATURES), y=torch.randint(CLASSES, (NODES,)), edge_index=edges()))
    data.shuffled = data.x[torch.randperm(NODES)]
    data.hint_mask = data.train_mask & (torch.rand(NODES, dtype=torch.float64) < 0.6)
    return data


class Products(Dataset):
    """One of OGB's, which keeps the split apart."""

    def get_idx_split(self) -> dict[str, Tensor]:
        """Return ids by OGB's names."""
        masks = self[0].train_mask, self[0].val_mask, self[0].test_mask
        return {name: mask.nonzero().view(-1) for name, mask in zip(("train", "valid", "test"), masks, strict=True)}


def products() -> Products:
    """Those of ogbn-products: as Cora's, undirected."""
    data = papers()
    data.edge_index = to_undirected(data.edge_index)
    return Products(data)


@seeded(6)
def links() -> Dataset:
    """The same with edges held back, and pairs that are none."""
    data, pairs = papers(), edges(count=500)
    del data.hint_mask, data.shuffled
    data.edge_index, *held = data.edge_index.split([300, 100, 100, 100], 1)
    for name, pos, neg in zip(("train", "val", "test"), held, pairs.split([300, 100, 100], 1), strict=True):
        data[f"{name}_pos_edge_label_index"], data[f"{name}_neg_edge_label_index"] = pos, neg
    return Dataset(data)


def wikipedia() -> Dataset:
    """Chameleon's: several splits, a column of each mask."""
    data = papers()
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = torch.stack([data[name], data[name].flip(0)], 1)
    return Dataset(data)


@seeded(2)
def entities() -> Dataset:
    """AIFB's: edge types, and ids of labelled nodes with their labels."""
    data = Data(edge_index=edges(), edge_type=torch.randint(5, (EDGES,)), num_nodes=NODES)
    data.train_idx, data.test_idx = torch.randperm(NODES)[:70].split([40, 30])
    data.train_y, data.test_y = torch.randint(CLASSES, (40,)), torch.randint(CLASSES, (30,))
    return Entities(data)


@seeded(3)
def proteins() -> Dataset:
    """ogbn-proteins': features of edges, several labels for each node."""
    data = Data(edge_index=edges(), edge_attr=draw(EDGES, 8).abs(), num_nodes=NODES)
    data.x, data.y = draw(NODES, 5), torch.randint(2, (NODES, 6)).to(torch.float64)
    return Dataset(masks(data))


@seeded(4)
def dblp() -> Dataset:
    """DBLP's: types of nodes, of which one is labelled."""
    data, sizes = HeteroData(), {"author": 60, "paper": 80, "term": 30}
    for node_type, size in sizes.items():
        data[node_type].x = draw(size, FEATURES)
    for one, other in (("author", "paper"), ("term", "paper")):
        data[one, "to", other].edge_index = edges(sizes[one], sizes[other], 300)
        data[other, "to", one].edge_index = data[one, "to", other].edge_index.flip(0)
    authors = data["author"]
    authors.y, draws = torch.randint(CLASSES, (60,)), torch.rand(60, dtype=torch.float64)
    authors.train_mask, authors.val_mask, authors.test_mask = draws < 0.5, draws > 0.7, (draws - 0.6).abs() < 0.1
    return Dataset(data)


@seeded(5)
def imdb() -> Dataset:
    """IMDB's after its meta-paths: edges of several types among movies."""
    data = HeteroData()
    data["movie"].x, data["movie"].y = draw(NODES, FEATURES), torch.randint(CLASSES, (NODES,))
    data["movie"].train_mask = torch.rand(NODES, dtype=torch.float64) < 0.5
    for k in range(2):
        data["movie", f"path_{k}", "movie"].edge_index = edges()
    return Dataset(data)
