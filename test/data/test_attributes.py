"""What attributes of graphs are: lists of ids become rows of each part, and what cannot be told raises."""

import numpy as np
import pytest
import torch
from support.nasty_graph import NUM_NODES, close, edges
from support.sample_graphs import random_edges, read_part
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.nn import SAGEConv

import pyg_sar
from pyg_sar import partition
from pyg_sar.data import attributes, store

PART = torch.tensor([2, 0, 0, 2, 0, 2, 0, 2, 0, 0])  # the second of three parts is empty


def tiny(**attributes):
    return Data(edge_index=random_edges(10, 24), num_nodes=10, **attributes)


def parts(data, folder, **options):
    partition(data, 3, folder, method=PART, **options)
    return [read_part(folder, p) for p in range(3)]


def globally(shards, get, ids="src_id"):
    """Return the ids that the rows of all parts name."""
    return torch.cat([getattr(shard.topology, ids)[get(shard.graph_attrs)] for shard in shards])


LISTS = {
    "train_idx": torch.tensor([7, 1, 4, 5]),
    "idx_val": torch.tensor([3, 3, 0], dtype=torch.int32),  # one of them twice
    "test_nodes": np.array([9, 2]),
    "seed_ids": [8, 6],
    "valid_index": torch.empty(0, dtype=torch.long),
    "test_id": torch.arange(10).flip(0),  # as many as nodes
}


def test_lists_of_nodes_become_rows(tmp_path):
    shards = parts(tiny(**LISTS), tmp_path / "graph")
    for key, value in LISTS.items():
        found = globally(shards, lambda attrs, key=key: attrs[key])
        assert found.sort().values.equal(torch.as_tensor(value).long().sort().values), key
        for shard in shards:  # in the order of the original
            own = [i for i in torch.as_tensor(value).tolist() if i in shard.topology.src_id]
            assert shard.topology.src_id[shard.graph_attrs[key]].tolist() == own
            assert shard.graph_attrs[key].dtype == torch.int64


def test_lists_in_a_dictionary(tmp_path):
    split = {"train": torch.tensor([7, 1]), "valid": np.array([4]), "test": {"hard/easy": torch.tensor([0, 9, 3])}}
    shards = parts(tiny(split_idx=split), tmp_path / "graph")
    assert sorted(globally(shards, lambda attrs: attrs["split_idx"]["train"]).tolist()) == [1, 7]
    assert globally(shards, lambda attrs: attrs["split_idx"]["valid"]).tolist() == [4]
    assert sorted(globally(shards, lambda attrs: attrs["split_idx"]["test"]["hard/easy"]).tolist()) == [0, 3, 9]
    assert store.read_meta(tmp_path / "graph")["labelled"] == [1, 0, 1], "the lists are balanced as masks are"


def test_what_belongs_to_a_list_is_cut_alike(tmp_path):
    data = tiny(train_idx=torch.tensor([7, 1, 4]), train_y=torch.tensor([70, 10, 40]), y_index=torch.tensor([8, 3]))
    data.train_weight, data.y = torch.tensor([[7.0], [1.0], [4.0]]), torch.tensor([8, 3])
    data.class_weight = torch.tensor([0.1, 0.2, 0.7])
    for shard in parts(data, tmp_path / "graph"):
        n_id, attrs = shard.topology.src_id, shard.graph_attrs
        assert attrs["train_y"].equal(10 * n_id[attrs["train_idx"]])
        assert attrs["train_weight"].view(-1).equal(n_id[attrs["train_idx"]].float())
        assert attrs["y"].equal(n_id[attrs["y_index"]])
        assert attrs["class_weight"].equal(data.class_weight)
    told = store.read_meta(tmp_path / "graph")
    assert told["lists"] == ["train_idx", "train_y", "y_index", "train_weight", "y"]
    assert told["attributes"][2]["train_idx"] == ["int64", [3], "node ids"]


def test_lists_of_edges(tmp_path):
    data = tiny(train_edge_idx=torch.tensor([20, 3, 11]), train_edge_y=torch.tensor([20.0, 3.0, 11.0]))
    shards = parts(data, tmp_path / "graph")
    assert sorted(globally(shards, lambda attrs: attrs["train_edge_idx"], "e_id").tolist()) == [3, 11, 20]
    for shard in shards:
        attrs = shard.graph_attrs
        assert shard.topology.e_id[attrs["train_edge_idx"]].equal(attrs["train_edge_y"].long())


PAIRS = {
    "edge_label_index": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    "train_pos_edge_index": torch.randint(10, (2, 24)),  # as many as edges
    "test_edges": torch.tensor([[1, 2], [3, 4], [5, 6]]),
    "test_pairs": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    "face": torch.tensor([[1], [2], [3]]),
}


@pytest.mark.parametrize("key", PAIRS)
def test_pairs_keep_the_ids_of_the_graph(tmp_path, key):
    data = tiny(**{key: PAIRS[key]})
    shards = parts(data, tmp_path / "graph")
    assert all(shard.graph_attrs[key].equal(PAIRS[key]) for shard in shards)


def test_what_belongs_to_pairs_stays_with_them(tmp_path):
    data = tiny(edge_label_index=torch.randint(10, (2, 24)), edge_label=torch.randint(2, (24,)))
    data.train_edge_index, data.train_edge_type = torch.randint(10, (2, 5)), torch.randint(3, (5,))
    for shard in parts(data, tmp_path / "graph"):
        assert shard.graph_attrs["edge_label"].equal(data.edge_label)
        assert shard.graph_attrs["train_edge_type"].equal(data.train_edge_type)


def test_rows_and_values_of_the_graph_are_left_alone(tmp_path):
    nodes = {
        "node_id": torch.randperm(10),
        "y": torch.randint(5, (10,)),
        "batch": torch.arange(10) // 5,
        "z": torch.ones(10),
    }
    nodes["node_species"], nodes["val_mask"] = torch.zeros(10, 1).long(), torch.ones(10, 3) > 0
    rest = {"num_items": torch.tensor([4, 5, 6]), "energy": torch.tensor([2.0, 3.0]), "flags": torch.ones(3) > 0}
    rest |= {"offsets": torch.tensor([0, 400]), "graph_label": torch.tensor([1, 0]), "empty": torch.zeros(0).long()}
    shards = parts(tiny(**nodes, **rest, edge_type=torch.arange(24)), tmp_path / "graph")
    for shard in shards:
        assert shard.node_attrs.keys() == nodes.keys() and shard.edge_attrs.keys() == {"edge_type"}
        assert all(shard.node_attrs[key].equal(value[shard.topology.src_id]) for key, value in nodes.items())
        assert all(shard.graph_attrs[key].equal(value) for key, value in rest.items())


ERRORS = {
    "a name that does not tell": ("sources", torch.tensor([1, 2]), r"may hold ids .* 1 to 2 .*name it 'sources_idx'"),
    "out of range": ("train_idx", torch.tensor([1, 10]), r"ids .*, 0 to 9, but holds 1 to 10"),
    "negative": ("train_idx", torch.tensor([-1, 3]), "0 to 9, but holds -1 to 3"),
    "floats": ("train_idx", torch.tensor([1.0, 3.0]), r"\[2\] should be a list .*integer tensor .*got torch\.float32"),
    "several splits": ("train_idx", torch.zeros(4, 3).long(), r"\[4, 3\] should be a list .*masks .*\[num_nodes, \*\]"),
    "labels of 9 nodes": ("y", torch.zeros(9), "a row for each node or edge .* 10 nodes and 24 edges"),
    "a mask of 9 nodes": ("val_mask", torch.ones(9) > 0, r"\[9\] should have a row"),
    "features of 25 edges": ("edge_attr", torch.zeros(25, 2), r"\[25, 2\] should have a row for each edge"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_told_or_is_wrong_raises(tmp_path, what):
    key, value, message = ERRORS[what]
    data = tiny(**{key: value})
    with pytest.raises(ValueError, match=rf"'{key}'.*{message}.*levels=.*'{key}': 'graph'.*--level {key}=graph"):
        partition(data, 3, tmp_path / "graph")
    shards = parts(data, tmp_path / "graph", levels={key: "graph"})
    assert all(shard.graph_attrs[key].equal(value) for shard in shards)


def test_levels_that_the_user_tells(tmp_path):
    data = tiny(sources=torch.tensor([4, 7]), hops={"a": torch.tensor([1])}, some_idx=torch.arange(10))
    levels = {"sources": "node_ids", "hops": "node_ids", "some_idx": "node"}
    shards = parts(data, tmp_path / "graph", levels=levels)
    assert sorted(globally(shards, lambda attrs: attrs["sources"]).tolist()) == [4, 7]
    assert globally(shards, lambda attrs: attrs["hops"]["a"]).tolist() == [1]
    assert all(shard.node_attrs["some_idx"].equal(shard.topology.src_id) for shard in shards)
    for levels, message in (
        ({"sources": "nodes"}, "Unknown level 'nodes' of 'sources', expected one of node, edge"),
        ({"source": "node"}, "'levels' names 'source', which the graph has not"),
        ({"sources": "edge"}, r"'sources' \[2\] is not of level 'edge': there are 10 nodes and 24 edges"),
    ):
        with pytest.raises(ValueError, match=message):
            partition(tiny(sources=data.sources), 2, tmp_path / "other", levels=levels)


def test_ids_of_something_are_named(tmp_path):
    with pytest.warns(
        UserWarning, match="'class_ids' is taken for ids of nodes and becomes rows.*'class_ids': 'node_ids'"
    ):
        parts(tiny(class_ids=torch.tensor([0, 1])), tmp_path / "a")
    with pytest.warns(UserWarning, match="'parent_idx' keeps the ids of the whole graph.*'parent_idx': 'node'"):
        parts(tiny(parent_idx=torch.arange(10)), tmp_path / "b")


def test_counts_and_codes_are_no_ids(tmp_path):
    """Numbers of nodes, and the split that each node is in."""
    rest = {"n_nodes": torch.tensor([3, 4, 5]), "max_nodes": torch.tensor([7, 2]), "edge_count": torch.tensor([8, 9])}
    codes = {"split_id": torch.arange(10) % 3}
    for shard in parts(tiny(**rest, **codes), tmp_path / "graph"):
        assert all(shard.graph_attrs[key].equal(value) for key, value in rest.items())
        assert shard.node_attrs["split_id"].equal(codes["split_id"][shard.topology.src_id])


def test_ids_of_two_nodes_in_a_column_are_no_pairs(tmp_path):
    with pytest.raises(ValueError, match=r"'train_idx' \[2, 1\] should be a list of ids"):
        parts(tiny(train_idx=torch.tensor([[3], [4]])), tmp_path / "graph")


def test_files_are_read_where_they_are(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((10, 2), dtype=np.float32))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert attributes.plain(x).data_ptr() == x.ctypes.data
    assert all(shard.node_attrs["x"].eq(1).all() for shard in parts(tiny(x=x), tmp_path / "graph"))


def test_each_attribute_is_looked_at_once(tmp_path, monkeypatch):
    looked, meaning = [], attributes.meaning

    def look(stored, path, value):
        looked.append(path)
        return meaning(stored, path, value)

    monkeypatch.setattr(attributes, "meaning", look)
    parts(tiny(**LISTS, x=torch.ones(10, 2), edge_attr=torch.ones(24)), tmp_path / "graph")
    assert sorted(looked) == sorted((key,) for key in (*LISTS, "x", "edge_attr"))


def test_a_batch(tmp_path):
    data = Batch.from_data_list(
        [Data(x=torch.ones(5, 1), edge_index=random_edges(5, 9), y=torch.tensor([k])) for k in (0, 3)]
    )
    data.idx = torch.tensor([7, 4])  # of each graph in the data set it is from
    with pytest.warns(UserWarning, match="'ptr' of the graph is left out: it counts rows of the whole graph"):
        shards = parts(data, tmp_path / "graph")
    assert all(shard.graph_attrs["idx"].tolist() == [7, 4] for shard in shards)
    assert all(shard.graph_attrs["y"].tolist() == [0, 3] for shard in shards)
    assert shards[0].node_attrs["batch"].equal(data.batch[shards[0].topology.src_id])
    del data.ptr
    data.root_index = torch.tensor([1, 6])  # of which PyG has made numbers of nodes
    with pytest.warns(UserWarning, match="'root_index' is taken for ids of nodes"):
        shards = parts(data, tmp_path / "roots")
    found = [shard.topology.src_id[shard.graph_attrs["root_index"]] for shard in shards]
    assert sorted(torch.cat(found).tolist()) == [1, 6]


# Counts of the whole graph


@pytest.mark.parametrize(
    "y, count",
    [
        (torch.tensor([0, 4, 1, -1, 2, 0, 0, 0, 0, 0]), 5),
        (torch.arange(10)[:, None] % 3, 3),
        (torch.zeros(10, 7), 7),
        (torch.tensor([0.0, 1.0]).repeat(5), 2),
        (torch.rand(10), None),  # PyG counts values, and warns
    ],
)
def test_number_of_classes(tmp_path, y, count):
    assert parts(tiny(y=y), tmp_path / "graph")[2].graph_attrs.get("num_classes") == count
    assert parts(tiny(y=y, num_classes=99), tmp_path / "other")[2].graph_attrs["num_classes"] == 99


def made_up(*graphs, classes=None):
    class Mock(InMemoryDataset):
        def __init__(self):
            super().__init__(None)
            self.data, self.slices = self.collate(list(graphs))

        num_classes = InMemoryDataset.num_classes if classes is None else classes

    return Mock()


def test_a_data_set_of_one_graph(tmp_path):
    data = tiny(y=torch.arange(10) % 4)
    assert parts(made_up(data), tmp_path / "a")[0].graph_attrs["num_classes"] == 4
    shards = parts(made_up(data, classes=6), tmp_path / "b")
    assert shards[0].graph_attrs["num_classes"] == 6 and shards[0].num_nodes == 10
    with pytest.raises(
        ValueError, match=r"'Mock' holds 2 graphs, expected a data set of one graph.*Batch\.from_data_list"
    ):
        partition(made_up(data, data), 2, tmp_path / "c")


# Heterogeneous graphs


def library():
    data = HeteroData()
    data["paper"].x, data["author"].num_nodes = torch.arange(10.0)[:, None], 4
    data["paper", "cites", "paper"].edge_index = random_edges(10, 24)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    return data


def hetero_parts(data, folder, **options):
    partition(data, 3, folder, method={"paper": PART, "author": torch.tensor([0, 2, 2, 0])}, **options)
    return [store.read_part(folder, p) for p in range(3)]


def test_attributes_of_types(tmp_path):
    data, cites = library(), ("paper", "cites", "paper")
    data["paper"].train_idx, data["paper"].train_y = torch.tensor([7, 1, 4]), torch.tensor([7, 1, 4])
    data["paper"].y = torch.arange(10) % 3
    data["paper"].class_weight, data["paper"].venue = torch.rand(3), "MLSys"
    data[cites].time, data[cites].train_idx = torch.arange(24), torch.tensor([5, 20])
    data.split_idx = {"test": {"paper": torch.tensor([2, 3]), "author": torch.tensor([3, 0])}}
    shards = hetero_parts(data, tmp_path / "graph")
    found = {"paper": [], "author": [], "cites": []}
    for shard in shards:
        papers, e_id = shard.nodes["paper"].attrs, shard.edges[cites].topology.e_id
        assert papers["train_y"].equal(papers["n_id"][papers["train_idx"]])
        assert papers["class_weight"].equal(data["paper"].class_weight)
        assert (papers["venue"], papers["num_classes"]) == ("MLSys", 3)
        assert shard.edges[cites].attrs["time"].equal(e_id)
        found["cites"] += e_id[shard.edges[cites].attrs["train_idx"]].tolist()
        for t, rows in shard.attrs["split_idx"]["test"].items():
            found[t] += shard.nodes[t].attrs["n_id"][rows].tolist()
    assert {t: sorted(ids) for t, ids in found.items()} == {"paper": [2, 3], "author": [0, 3], "cites": [5, 20]}
    partition(data, 1, tmp_path / "whole")
    split = pyg_sar.load(tmp_path / "whole").split_idx["test"]
    assert {t: len(rows) for t, rows in split.items()} == {"paper": 2, "author": 2}
    meta = store.read_meta(tmp_path / "graph")
    assert meta["labelled"] == [2, 0, 1] and "split_idx.test.author" in meta["lists"]
    assert meta["attributes"][0]["paper.x"] == ["float32", [10, 1]]


@pytest.mark.parametrize(
    "kind, key, value, message",
    [
        ("paper", "y", torch.zeros(9), r"'paper\.y' \[9\] should have a row for each node .* 10 nodes"),
        ("paper", "some", torch.tensor([1, 2]), r"'paper\.some' \[2\] may hold ids"),
        ("author", "train_idx", torch.tensor([4]), r"'author\.train_idx' \[1\] .*0 to 3, but holds 4 to 4"),
        (("paper", "cites", "paper"), "edge_attr", torch.zeros(2), r"'paper__cites__paper\.edge_attr' .*each edge"),
        (None, "train_idx", torch.tensor([1]), r"'train_idx' .* of which nodes or edges is not told"),
    ],
)
def test_attributes_of_types_that_are_wrong(tmp_path, kind, key, value, message):
    data = library()
    (data if kind is None else data[kind])[key] = value
    with pytest.raises(ValueError, match=message) as error:
        partition(data, 2, tmp_path / "graph")
    name = str(error.value).split("--level ")[1].split("=")[0]
    hetero_parts(data, tmp_path / "graph", levels={name: "graph"})


def test_what_is_left_out_of_types_is_named(tmp_path):
    data = library()
    data["paper"].words = ["a"] * 10
    with pytest.warns(
        UserWarning, match=r"'paper\.words' \(list\) is left out: only dense tensors of numbers are stored"
    ) as record:
        hetero_parts(data, tmp_path / "graph")
    assert record[0].filename == __file__


# Training


def labelled():
    g = torch.Generator().manual_seed(0)
    data = Data(x=torch.randn(NUM_NODES, 4, generator=g, dtype=torch.float64), edge_index=edges(), num_nodes=NUM_NODES)
    data.y = torch.arange(NUM_NODES) // 16  # parts that are ranges of nodes lack classes
    data.edge_type = torch.zeros(data.num_edges, dtype=torch.long)
    data.edge_type[data.edge_index[1] > NUM_NODES - 9] = 5
    data.split_idx = {"train": torch.randperm(NUM_NODES, generator=g)[:20]}
    data.train_idx = data.split_idx["train"][:15]
    data.train_y = data.y[data.train_idx]
    return data


def train(group, folder):
    """Train as a script of PyG does; return the losses, and the counts of the graph."""
    data = labelled() if folder is None else pyg_sar.load(folder, group=group)
    counts = (4, 6) if folder is None else (data.num_classes, data.num_relations)
    torch.manual_seed(0)
    conv = (SAGEConv if folder is None else pyg_sar.nn.SAGEConv)(4, counts[0]).double()
    optimizer, losses = torch.optim.Adam(conv.parameters(), 0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        out = conv(data.x, data.edge_index)
        each = torch.nn.functional.cross_entropy(out[data.train_idx], data.train_y, reduction="none")
        split = data.split_idx["train"]
        other = torch.nn.functional.cross_entropy(out[split], data.y[split], reduction="none")
        loss = each.mean() + other.mean()
        if folder is not None:
            loss = pyg_sar.global_mean(each, group) + pyg_sar.global_mean(other, group)
        loss.backward()
        if folder is not None:
            pyg_sar.sum_gradients(conv, group)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), counts


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_training_on_lists_equals_pyg(pool, tmp_path, workers):
    part = torch.arange(NUM_NODES) * min(workers, 2) // NUM_NODES  # the third worker has no nodes
    partition(labelled(), workers, tmp_path / "graph", method=part)
    expected, counts = train(None, None)
    for losses, found in pool.run(workers, train, tmp_path / "graph"):
        close(losses, expected, "losses", 1e-12)
        assert found == counts, "also where a worker's own labels and edge types stop earlier"
