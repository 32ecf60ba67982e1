import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.sample_graphs import put_together, random_edges, read_part
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_sar
from pyg_sar import cli
from pyg_sar.data import store
from pyg_sar.data.split import Topology, split
from pyg_sar.distributed.values import write_tensors

NUM_NODES, NUM_EDGES, NUM_PARTS = 30, 200, 3


def shards(identity="a" * 32, num_nodes=NUM_NODES, **attrs):
    edge_index = random_edges(num_nodes, NUM_EDGES)
    part = torch.arange(num_nodes) % NUM_PARTS
    for p, topology in enumerate(split(edge_index, part, part, NUM_PARTS)):
        nodes = store.NodeRows(num_nodes, {"n_id": topology.src_id, **attrs.get("node_attrs", {})})
        edges = store.EdgeRows(NUM_EDGES, topology, attrs.get("edge_attrs", {}))
        types = {store.NODE: nodes}, {store.EDGE: edges}
        yield store.Shard(p, NUM_PARTS, identity, *types, attrs.get("graph_attrs", {}))


def topology_of(shard):
    return shard.edges[store.EDGE].topology


def write(folder, **changes):
    with store.create(folder) as new:
        for shard in shards(**changes):
            store.write_part(new, shard)
        store.write_meta(new, {"identity": shard.identity})
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "graph", node_attrs={"x": torch.randn(10, 2)})


def edit(file: Path, **changes):
    """Change what a file says, as a writer who is wrong: the checksum fits."""
    info = json.loads(file.read_text()) | changes
    info = {key: value for key, value in info.items() if key != "checksum" and value is not None}
    file.write_text(json.dumps(info | {"checksum": store.checksum(info)}))


def test_topology_comes_back(folder):
    read = [store.read_part(folder, p) for p in range(NUM_PARTS)]
    assert put_together([topology_of(shard) for shard in read]).equal(random_edges(NUM_NODES, NUM_EDGES))
    for shard, expected in zip(read, shards(), strict=True):
        for key in ("part", "num_parts", "identity"):
            assert getattr(shard, key) == getattr(expected, key)
        assert (shard.nodes[store.NODE].total, shard.edges[store.EDGE].total) == (NUM_NODES, NUM_EDGES)
        topology = topology_of(shard)
        for field in dataclasses.fields(Topology):
            found, wanted = getattr(topology, field.name), getattr(topology_of(expected), field.name)
            if field.name == "num_src":
                assert found == wanted
                continue
            many = isinstance(found, list)
            for a, b in zip(found if many else [found], wanted if many else [wanted], strict=True):
                assert (a is b is None) or (a.dtype == b.dtype and a.equal(b))
        assert topology.dst_id is topology.src_id is shard.nodes[store.NODE].attrs["n_id"]


@pytest.mark.parametrize(("num_edges", "doubly"), [(NUM_EDGES, False), (3, True)])
def test_row_pointers_over_some_of_the_destinations(tmp_path, num_edges, doubly):
    """Those of blocks with few edges."""
    edge_index, part = random_edges(NUM_NODES, num_edges), torch.arange(NUM_NODES) % 2
    with store.create(tmp_path / "graph") as path:
        for p, topology in enumerate(split(edge_index, part, part, 2)):
            nodes = {store.NODE: store.NodeRows(NUM_NODES, {"n_id": topology.src_id})}
            edges = {store.EDGE: store.EdgeRows(num_edges, topology, {})}
            info = store.write_part(path, store.Shard(p, 2, "one", nodes, edges, {}))
            assert any("rows" in name for name in info["files"]["graph"]["tensors"]) == doubly
    read = [store.read_part(tmp_path / "graph", p).edges[store.EDGE].topology for p in range(2)]
    assert put_together(read).equal(edge_index)
    assert all((rows is not None) == doubly for topology in read for rows in topology.rows)


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_data_types_survive(tmp_path, dtype):
    x = torch.randn(10, 3).mul(3).to(dtype)
    assert store.can_hold(dtype)
    folder = write(tmp_path / "graph", node_attrs={"x": x}, graph_attrs={"g": x[0]})
    shard = read_part(folder, 1)
    assert shard.node_attrs["x"].dtype == dtype and shard.node_attrs["x"].equal(x)
    assert shard.graph_attrs["g"].dtype == dtype and shard.graph_attrs["g"].equal(x[0])


def test_data_types_that_cannot_be_stored_are_known():
    assert not store.can_hold(torch.complex128)


def test_layouts_survive(tmp_path):
    base = torch.arange(60.0)
    attrs = {
        "transposed": base.view(6, 10).t(),
        "strided": base[::6],
        "slice": base[20:30],
        "expanded": torch.ones(1, 4).expand(10, 4),
        "same": base,
        "same again": base,
        "empty": torch.empty(10, 0),
        "empty too": torch.empty(0, 3, dtype=torch.bool),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base[:10]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    folder = write(tmp_path / "graph", node_attrs=attrs, edge_attrs=attrs, graph_attrs=attrs)
    shard = read_part(folder, 2)
    for level in (shard.node_attrs, shard.edge_attrs, shard.graph_attrs):
        assert level.keys() == attrs.keys()
        for key, value in attrs.items():
            assert level[key].shape == value.shape and level[key].dtype == value.dtype
            assert level[key].equal(value), key


def test_plain_values_survive(tmp_path):
    attrs = {"num_classes": 7, "rate": 0.5, "name": "Zoë", "deep": True, "names": ["a", "b"], "none": None}
    folder = write(tmp_path / "graph", graph_attrs=attrs | {"t": torch.ones(2)})
    found = read_part(folder, 0).graph_attrs
    assert found.pop("t").equal(torch.ones(2))
    assert found == attrs


def test_parts_need_neither_the_whole_nor_each_other(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "part_1").rename(tmp_path / "elsewhere" / "part_1")
    shutil.rmtree(folder)
    assert store.read_part(tmp_path / "elsewhere", 1).part == 1


def test_part_json_says_what_is_there(folder):
    info = json.loads((folder / "part_1" / "part.json").read_text())
    topology = read_part(folder, 1).topology
    assert info["counts"] == {
        "nodes": 10,
        "edges": [col.numel() for col in topology.col],
        "rows_in": [topology.num_src[0], 0, topology.num_src[2]],
        "rows_out": [serve.numel() for serve in topology.serve],
    }
    assert info["files"]["nodes"]["tensors"] == {"x": ["float32", [10, 2]]}
    for name, file in info["files"].items():
        assert file["bytes"] == (folder / "part_1" / f"{name}.safetensors").stat().st_size


HEAD = ["format", "version", "part", "num_parts", "identity", "alike"]
LAYOUT = {
    "without types": ({}, [*HEAD, "num_nodes", "num_edges", "counts", "files"], ["graph", "nodes", "edges", "attrs"]),
    "with types": (
        {store.NODE: "paper", store.EDGE: ("paper", "cites", "paper")},
        [*HEAD, "node_types", "edge_types", "counts", "counts_by_type", "files"],
        ["node_0", "graph_0", "edge_0", "attrs"],
    ),
}


@pytest.mark.parametrize("kind", LAYOUT)
def test_layout_of_a_part(tmp_path, kind):
    names, keys, files = LAYOUT[kind]
    attrs = {"node_attrs": {"x": torch.ones(10)}, "edge_attrs": {"w": torch.ones(3)}, "graph_attrs": {"name": "a"}}
    with store.create(tmp_path / "graph") as new:
        for shard in shards(**attrs):
            nodes, edges = ({names.get(t, t): r for t, r in rows.items()} for rows in (shard.nodes, shard.edges))
            store.write_part(new, dataclasses.replace(shard, nodes=nodes, edges=edges))
    info = json.loads((tmp_path / "graph" / "part_1" / "part.json").read_text())
    assert list(info) == [*keys, "checksum"] and list(info["files"]) == files
    assert {path.stem for path in (tmp_path / "graph" / "part_1").iterdir()} == {"part", *files}
    shard = store.read_part(tmp_path / "graph", 1)
    assert shard.typed == bool(names) and list(shard.nodes) == list(nodes) and list(shard.edges) == list(edges)
    (nodes,), (edges,) = shard.nodes.values(), shard.edges.values()
    assert nodes.total == NUM_NODES and nodes.attrs.keys() == {"n_id", "x"} and edges.attrs.keys() == {"w"}
    assert edges.topology.src_id is edges.topology.dst_id is nodes.attrs["n_id"] and shard.attrs == {"name": "a"}


def test_files_can_be_read_by_whom_the_umask_says(folder, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in folder.rglob("*"):
        like = tmp_path / ("folder" if path.is_dir() else "file")
        assert path.stat().st_mode == like.stat().st_mode


def test_all_that_is_written_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    synced, replace = set(), store.os.replace
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: synced.add(os.readlink(f"/proc/self/fd/{descriptor}")))

    def check(source, target):
        assert synced == {str(path) for path in (source, *source.rglob("*"))}
        replace(source, target)

    monkeypatch.setattr(store.os, "replace", check)
    write(tmp_path / "graph")
    assert str(tmp_path) in synced, "the new name is durable, too"


# What can be wrong with a folder: each error says what was found, what was expected, what to do.


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*nowhere'.*pyg-sar partition"):
        store.read_part(tmp_path / "nowhere", 0)


def test_missing_part(folder):
    with pytest.raises(
        FileNotFoundError, match=r"part_3/part.json' is missing.*part_0, part_1, part_2.*as many workers"
    ):
        store.read_part(folder, 3)


def test_foreign_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds nothing"):
        store.read_part(tmp_path, 0)
    (tmp_path / "part_0").mkdir()
    (tmp_path / "part_0" / "part.json").write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"not written by pyg_sar, expected .*pyg_sar partition"):
        store.read_part(tmp_path, 0)


@pytest.mark.parametrize("text", ["", '{"format": ', "[1]", "[" * 200_000], ids=["empty", "cut", "list", "deep"])
def test_damaged_part_json(folder, text):
    (folder / "part_0" / "part.json").write_text(text)
    with pytest.raises(ValueError, match=r"part_0/part\.json' (is truncated or damaged|was not written by pyg_sar)"):
        store.read_part(folder, 0)


def test_newer_format(folder):
    edit(folder / "part_0" / "part.json", version=5)
    with pytest.raises(ValueError, match=r"has format version 5, but this pyg_sar reads 4. Install"):
        store.read_part(folder, 0)


@pytest.mark.parametrize("name", ["graph", "nodes", "edges", "attrs"])
@pytest.mark.parametrize("keep", [0, 5, -1])
def test_truncated_file(folder, name, keep):
    file = folder / "part_0" / f"{name}.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    size = len(content[:keep])
    message = rf"{name}\.safetensors' is truncated.*found {size} bytes, expected {len(content)}.*Copy the part"
    with pytest.raises(ValueError, match=message):
        store.read_part(folder, 0)


def test_missing_file(folder):
    (folder / "part_0" / "edges.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"edges\.safetensors' is missing.*Copy the part folder again"):
        store.read_part(folder, 0)


def test_flipped_bit_is_seen_by_the_checksum(folder):
    file = folder / "part_0" / "nodes.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"nodes\.safetensors' is damaged: its checksum"):
        store.read_part(folder, 0)


@pytest.mark.parametrize("name", ["part.json", "graph.safetensors", "nodes.safetensors", "attrs.safetensors"])
def test_files_of_two_partitions(folder, tmp_path, name):
    other = write(tmp_path / "other", identity="b" * 32, node_attrs={"x": torch.randn(10, 2)})
    shutil.copy(other / "part_0" / name, folder / "part_0" / name)
    with pytest.raises(ValueError, match=r"two partitions are mixed: .*(aaaa.*bbbb|bbbb.*aaaa).*Copy the part folder"):
        store.read_part(folder, 0)


def test_renamed_part(folder):
    shutil.rmtree(folder / "part_0")
    (folder / "part_1").rename(folder / "part_0")
    with pytest.raises(ValueError, match="holds part 1, expected 0"):
        store.read_part(folder, 0)


def test_file_of_another_shape(folder, tmp_path):
    other = write(tmp_path / "other", node_attrs={"x": torch.randn(10, 3)})
    shutil.copy(other / "part_0" / "nodes.safetensors", folder / "part_0" / "nodes.safetensors")
    with pytest.raises(ValueError, match=r"does not fit part.json"):
        store.read_part(folder, 0)


def test_wrong_counts(folder):
    file = folder / "part_0" / "part.json"
    counts = json.loads(file.read_text())["counts"] | {"nodes": 11}
    edit(file, counts=counts)
    with pytest.raises(ValueError, match=r"holds .*'nodes': 10.* but its part\.json says .*'nodes': 11"):
        store.read_part(folder, 0)


# Writing: all or nothing.


def test_existing_folder_is_kept(folder):
    before = store.read_meta(folder)
    with pytest.raises(FileExistsError, match=r"exists already\. Choose another folder, or pass overwrite=True"):
        write(folder, identity="b" * 32)
    assert store.read_meta(folder) == before


def test_overwrite_replaces_the_whole(folder, tmp_path):
    (folder / "part_7").mkdir()
    with store.create(folder, overwrite=True) as new:
        assert store.read_part(folder, 0).identity == "a" * 32, "the old one is there while the new one is made"
        for shard in shards("b" * 32):
            store.write_part(new, shard)
        store.write_meta(new, {"identity": "b" * 32})
    assert store.read_part(folder, 0).identity == "b" * 32
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "part_0", "part_1", "part_2"]
    assert list(tmp_path.iterdir()) == [folder]


def test_overwrite_keeps_its_hands_off_other_folders(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("Let")
    with pytest.raises(ValueError, match=r"will not be replaced, because it holds no partition.*chapter\.tex"):
        store.create(tmp_path / "thesis", overwrite=True).__enter__()
    (tmp_path / "thesis" / "meta.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"will not be replaced, because .*meta\.json' is truncated or damaged"):
        store.create(tmp_path / "thesis", overwrite=True).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="will not be replaced"):
        store.create(tmp_path / "file", overwrite=True).__enter__()


def test_overwrite_removes_nothing_but_a_partition(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "model.pt").touch()
    (folder / "part_x").touch()
    with pytest.raises(ValueError, match=r"because it holds more than a partition: part_x, runs\. Move that elsewhere"):
        store.create(folder, overwrite=True).__enter__()
    assert (folder / "runs" / "model.pt").exists() and store.read_part(folder, 0).part == 0


def test_overwrite_of_an_empty_folder(tmp_path):
    (tmp_path / "graph").mkdir()
    with store.create(tmp_path / "graph", overwrite=True) as new:
        store.write_meta(new, {})
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_failing_write_leaves_nothing(tmp_path, monkeypatch, error, overwrite):
    out = tmp_path / "graph"
    if overwrite:
        write(out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail_later(file, tensors, metadata):
        if file.parent.name == "part_1" and file.name == "edges.safetensors":
            raise error
        write_tensors(file, tensors, metadata)

    monkeypatch.setattr(store, "write_tensors", fail_later)
    with pytest.raises(type(error)), store.create(out, overwrite) as new:
        for shard in shards("b" * 32):
            store.write_part(new, shard)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert list(tmp_path.iterdir()) == ([out] if overwrite else [])


def test_failing_rename_brings_the_old_one_back(folder, tmp_path, monkeypatch):
    replace = store.os.replace

    def fail_once(source, target):
        if Path(source).suffix == ".new":
            raise OSError("no")
        replace(source, target)

    monkeypatch.setattr(store, "exchange", lambda *_: False)  # as on NFS
    monkeypatch.setattr(store.os, "replace", fail_once)
    with pytest.raises(OSError, match="no"), store.create(folder, overwrite=True) as new:
        store.write_meta(new, {})
    assert store.read_part(folder, 0).identity == "a" * 32
    assert list(tmp_path.iterdir()) == [folder]


def test_two_writers_of_one_folder(tmp_path):
    with pytest.raises(FileExistsError, match="exists already"), store.create(tmp_path / "graph") as first:
        store.write_meta(first, {"identity": "first"})
        with store.create(tmp_path / "graph") as second:
            store.write_meta(second, {"identity": "second"})
    assert store.read_meta(tmp_path / "graph")["identity"] == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


def test_parents_are_made_and_links_followed(tmp_path):
    write(tmp_path / "a" / "b" / "graph")
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "graph")
    with store.create(tmp_path / "link", overwrite=True) as new:
        store.write_meta(new, {"identity": "new"})
    assert store.read_meta(tmp_path / "a" / "b" / "graph")["identity"] == "new"
    assert (tmp_path / "link").is_symlink()


def test_nothing_is_unpickled():
    assert "pickle" not in Path(store.__file__).read_text().replace("unpickled", "")
    assert "torch.load" not in Path(store.__file__).read_text()


# Mutants: whatever is in a folder, it is read as it was written, or there is an error.


def mutants(folder, count, seed=0):
    """Yield files of which a byte was changed, taken out, put in, or all that follows it cut."""
    rng = random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(count):
        file = rng.choice(files)
        content = file.read_bytes()
        at, kind = rng.randrange(len(content)), rng.randrange(4)
        put = bytes([rng.randrange(256)]) if kind in (0, 2) else b""
        changed = content[:at] + put + (b"" if kind == 3 else content[at + (kind < 2) :])
        if changed != content:
            file.write_bytes(changed)
            yield file
            file.write_bytes(content)


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.grid)])
def test_mutants(tmp_path, count, capsys):
    write(tmp_path / "graph", node_attrs={"x": torch.ones(NUM_NODES // NUM_PARTS, 2)})
    data = Data(x=torch.ones(30, 3), edge_index=random_edges(30, 60), y=torch.arange(30) % 3)
    pyg_sar.partition(data, 2, tmp_path / "whole")
    for folder, parts in ((tmp_path / "graph", NUM_PARTS), (tmp_path / "whole", 2)):
        expected = [described(store.read_part(folder, p)) for p in range(parts)]
        meta = store.read_meta(folder)
        for file in mutants(folder, count // 2):
            for p in range(parts):
                try:
                    found = described(store.read_part(folder, p))
                except (OSError, ValueError):
                    continue
                assert found == expected[p], file
            if (folder / "meta.json").exists():
                status = cli.main(["info", str(folder)])
                assert status in (0, 2), file
                if status == 0:  # such as one blank more
                    assert store.read_meta(folder) == meta, file
                capsys.readouterr()


def described(shard):
    """All that a part holds, to be compared."""
    topologies = [e.topology for e in shard.edges.values()]
    tensors = [t for it in topologies for ts in (it.rowptr, it.col, it.serve, [it.e_id]) for t in ts]
    attrs = [*shard.attrs.items(), *(a for n in shard.nodes.values() for a in n.attrs.items())]
    return repr([shard.part, shard.num_parts, shard.identity, [t.tolist() for t in tensors], attrs])


WRONG = {
    "col": lambda t: t.fill_(NUM_NODES), "negative col": lambda t: t.fill_(-1),
    "rowptr": lambda t: t.copy_(t.flip(0)), "long rowptr": lambda t: t.add_(1), "serve": lambda t: t.fill_(NUM_NODES),
}  # fmt: skip


@pytest.mark.parametrize("which", WRONG)
def test_writers_that_are_wrong(tmp_path, which):
    """Numbers that kernels would read beyond their memory by, and checksums that fit."""
    some = list(shards())
    (edges,) = some[0].edges.values()
    tensor = max(getattr(edges.topology, which.split()[-1]), key=torch.numel)
    WRONG[which](tensor)
    with store.create(tmp_path / "graph") as new:
        for shard in some:
            store.write_part(new, shard)
    what = {"rowptr": "the row pointer to part", "col": "the sources of part", "serve": "the served rows of part"}
    with pytest.raises(ValueError, match=rf"part_0': {what[which.split()[-1]]} \d.*expected"):
        store.read_part(tmp_path / "graph", 0)


def mistake(topology, rng):
    """Change some numbers of a topology, or how many there are."""
    lists = [topology.rowptr, topology.col, topology.serve, [topology.src_id], [topology.e_id]]
    lists += [[rows for rows in topology.rows if rows is not None]]
    tensors = [t for some in lists for t in some if t.numel() > 0]
    tensor, kind = rng.choice(tensors), rng.randrange(4)
    flat, at = tensor.view(-1), rng.randrange(tensor.numel())
    if kind == 0:
        flat[at] = rng.choice([-1, 0, 1, 29, 30, 2**15, -(2**31), 2**31 - 1])
    elif kind == 1:
        flat[at] = flat[rng.randrange(len(flat))]
    elif kind == 2:
        flat.copy_(flat.flip(0))
    else:
        flat += rng.choice([-1, 1, 7])


def trained(group, folder):
    """Train for a step with what is read; return whether it could be read."""
    try:
        data = pyg_sar.load(folder, group=group)
    except RuntimeError:
        return False
    convs = [pyg_sar.nn.SAGEConv(3, 4), pyg_sar.nn.GATConv(4, 4, add_self_loops=False)]
    x = data.x
    for conv in convs:
        x = conv(x, data.edge_index)
    x.square().sum().backward()
    return True


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.grid)])
def test_writers_that_err_at_random(pool, tmp_path, count):
    """With checksums that fit: all workers say so, or train; no worker dies of it."""
    rng, told = random.Random(count), 0
    data = Data(x=torch.ones(30, 3), edge_index=random_edges(30, 60))
    pyg_sar.partition(data, 2, tmp_path / "whole")
    for _ in tqdm(range(count)):
        shutil.copytree(tmp_path / "whole", tmp_path / "graph")
        part = store.read_part(tmp_path / "graph", rng.randrange(2), mmap=False)
        mistake(topology_of(part), rng)
        shutil.rmtree(tmp_path / "graph" / f"part_{part.part}")
        store.write_part(tmp_path / "graph", part)
        read, other = pool.run(2, trained, tmp_path / "graph")
        assert read == other
        told += not read
        shutil.rmtree(tmp_path / "graph")
    assert told > count // 4


@pytest.mark.parametrize("key", ["part", "num_parts", "identity", "num_nodes", "num_edges", "counts", "files"])
@pytest.mark.parametrize("value", [None, 1.5])
def test_part_json_that_says_something_else(folder, key, value):
    edit(folder / "part_0" / "part.json", **{key: value})
    with pytest.raises(ValueError, match=rf"part_0/part.json' says (nothing|float) for '{key}', expected "):
        store.read_part(folder, 0)


def test_part_json_that_says_something_else_further_down(folder):
    file = folder / "part_0" / "part.json"
    files = json.loads(file.read_text())["files"]
    del files["nodes"]["bytes"]
    edit(file, files=files)
    with pytest.raises(ValueError, match=r"part_0/part\.json' does not say what it must \(KeyError: 'bytes'\)\. Copy"):
        store.read_part(folder, 0)


def test_rows_that_no_other_part_serves(pool, tmp_path):
    """Two parts of one identity that do not fit."""
    data = Data(x=torch.ones(30, 3), edge_index=random_edges(30, 60))
    pyg_sar.partition(data, 2, tmp_path / "one", method=torch.arange(30) % 2)
    pyg_sar.partition(data, 2, tmp_path / "two", method=torch.arange(30) // 15)
    part = store.read_part(tmp_path / "two", 1)
    shard = dataclasses.replace(part, identity=store.read_part(tmp_path / "one", 0).identity)
    shutil.rmtree(tmp_path / "one" / "part_1")
    store.write_part(tmp_path / "one", shard)
    for outcome in pool.outcomes(2, loaded, tmp_path / "one"):
        assert outcome[:2] == ("error", "RuntimeError") and "The parts do not fit together" in outcome[2], outcome


def loaded(group, folder):
    return pyg_sar.load(folder, group=group).num_nodes


def test_features_that_are_not_mapped(tmp_path):
    """Who writes to the file changes what is mapped, and nothing else."""
    write(tmp_path / "graph", node_attrs={"x": torch.ones(NUM_NODES // NUM_PARTS, 2)})
    file = tmp_path / "graph" / "part_0" / "nodes.safetensors"
    mapped, read = (store.read_part(tmp_path / "graph", 0, mmap=mmap).nodes[store.NODE] for mmap in (True, False))
    with open(file, "r+b") as f:
        f.seek(-4, os.SEEK_END)
        f.write(bytes(4))
    assert mapped.attrs["x"][-1, -1] == 0 and read.attrs["x"][-1, -1] == 1


def write_and_die(group, out, moment, exchanges):
    """Replace a partition by another one; the process is killed at that moment: when all is written, before or after
    the two folders change names, or before a rename where they cannot.
    """
    replace, exchange, moments = os.replace, store.exchange, itertools.count()

    def pass_by():
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def killing(*args):
        pass_by()
        replace(*args)

    def exchanging(*args):
        pass_by()
        done = exchanges and exchange(*args)
        pass_by()
        return done

    os.replace, store.exchange = killing, exchanging
    with store.create(out, overwrite=True) as new:
        store.write_meta(new, {"identity": "new"})
        pass_by()


def killed(pool, out, moment, exchanges):
    with store.create(out) as new:
        store.write_meta(new, {"identity": "old"})
    assert pool.outcomes(1, write_and_die, out, moment, exchanges) == [("died", -signal.SIGKILL)]


@pytest.mark.parametrize(("moment", "left"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_writer_that_is_killed_leaves_a_partition(pool, tmp_path, moment, left):
    """The old one or the new one; the next writer removes what it left."""
    killed(pool, out := tmp_path / "graph", moment, True)
    assert store.read_meta(out)["identity"] == left and len(list(tmp_path.iterdir())) == 2
    with store.create(out, overwrite=True) as new:
        store.write_meta(new, {"identity": "newest"})
    assert store.read_meta(out)["identity"] == "newest" and list(tmp_path.iterdir()) == [out]


def test_killed_between_two_renames(pool, tmp_path):
    """Where two folders cannot change names at once, such as on NFS: what there was is told, and put back by a writer.

    After the attempt to exchange, the old one is renamed, and then the new one.
    """
    killed(pool, out := tmp_path / "graph", 4, False)
    assert not out.exists() and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError, match=r"'\.graph\..*\.old' beside it: what it held"):
        store.read_meta(out)
    with pytest.raises(FileExistsError, match="exists already"), store.create(out):
        raise AssertionError("not reached")
    assert store.read_meta(out)["identity"] == "old" and list(tmp_path.iterdir()) == [out]


def test_a_name_that_goes_on_behind_a_dot(pool, tmp_path):
    """What a writer of ``graph.v2`` left is none of ``graph``."""
    killed(pool, out := tmp_path / "graph.v2", 4, False)
    with pytest.raises(FileNotFoundError, match=r"There is no folder '.*graph'\. Correct the path"):
        store.read_meta(tmp_path / "graph")
    with store.create(tmp_path / "graph") as new:
        store.write_meta(new, {"identity": "another"})
    with pytest.raises(FileExistsError, match="exists already"), store.create(out):
        raise AssertionError("not reached")
    assert store.read_meta(out)["identity"] == "old"


@pytest.mark.parametrize("what", [{"version": 3}, {"identity": "changed"}])
def test_overwrite_of_what_cannot_be_read_any_more(folder, what):
    file = folder / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | what))
    with pytest.raises(ValueError):
        store.read_meta(folder)
    with store.create(folder, overwrite=True) as new:
        for shard in shards("b" * 32):
            store.write_part(new, shard)
        store.write_meta(new, {"identity": "b" * 32})
    assert store.read_meta(folder)["identity"] == "b" * 32
