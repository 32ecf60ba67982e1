import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sample_graphs import put_together, read_part
from support.small_pieces import ordinary_ranges
from torch_geometric.data import Data, HeteroData

import pyg_sar
from pyg_sar.cli import main
from pyg_sar.data import store
from pyg_sar.data.datasets import community_graph

ROOT = Path(__file__).resolve().parents[1]


def make(out, *options, parts=3):
    return main(["partition", "Community/200/2000", "--num-parts", str(parts), "--out", str(out), *options])


def test_partition_and_info(tmp_path, capsys):
    out = tmp_path / "graph"
    assert make(out) == 0
    made = capsys.readouterr()
    assert made.err == ""
    assert "200 nodes and 2000 edges in 3 parts by method 'metis', order 'locality', seed 0" in made.out
    shards = [read_part(out, p) for p in range(3)]
    assert put_together([shard.topology for shard in shards]).equal(community_graph(200, 2000).edge_index)

    assert main(["info", str(out)]) == 0
    meta, text = json.loads((out / "meta.json").read_text()), capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][-1] == meta["identity"]
    assert lines[1] == ["part", "nodes", "in-edges", "labelled", "rows", "in", "rows", "out", "bytes"]
    for p in range(3):
        read, served = sum(meta["boundary"][p]), sum(row[p] for row in meta["boundary"])
        size = sum(file.stat().st_size for file in (out / f"part_{p}").glob("*.safetensors"))
        row = p, meta["nodes"][p], meta["edges"][p], meta["labelled"][p], read, served, size
        assert lines[2 + p] == [str(value) for value in row]
    for line in (f"edges cut: {meta['cut']}", f"boundary rows: {meta['boundary_rows']}", "balance (largest part"):
        assert line in text
    for attribute in (["x", "['float32',", "[200,", "64]]"], ["num_classes", "16"]):
        assert attribute in lines


def test_method_and_seed(tmp_path):
    options = "--method", "random", "--seed"
    assert make(tmp_path / "a", *options, "1") == make(tmp_path / "b", *options, "2") == 0
    a, b = (read_part(tmp_path / name, 0).topology.src_id for name in ("a", "b"))
    assert not a.equal(b)


def test_assignment(tmp_path):
    np.save(tmp_path / "part.npy", np.arange(200) % 3)
    assert make(tmp_path / "graph", "--assignment", str(tmp_path / "part.npy"), "--order", "id") == 0
    assert read_part(tmp_path / "graph", 1).topology.src_id.equal(torch.arange(1, 200, 3))


def test_assignments_of_other_kinds(tmp_path, capsys):
    """Unsigned numbers are numbers; what is no array of numbers is told with the name of the file."""
    np.save(tmp_path / "part.npy", (np.arange(200) % 3).astype(np.uint64))
    assert make(tmp_path / "graph", "--assignment", str(tmp_path / "part.npy")) == 0
    np.savez(tmp_path / "part.npz", part=np.arange(200) % 3)
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "words.npy", np.array(["a"] * 200))
    for name, said in ("part.npz", "it holds the arrays ['part']"), ("empty.npy", "No data"), ("words.npy", "can't"):
        assert make(tmp_path / "other", "--assignment", str(tmp_path / name)) == 2
        assert f"{name}' could not be read as an array of integers (.npy): {said}" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError("16 GiB"), None, RuntimeError("a bug")], ids=["numpy", "torch", "bug"])
def test_too_little_memory(monkeypatch, capsys, error):
    """It is told in a line; other errors of the program keep their traceback."""

    def allocate(args):
        if error is not None:
            raise error
        torch.empty(2**60, dtype=torch.int8)

    monkeypatch.setattr("pyg_sar.cli._info", allocate)
    if isinstance(error, RuntimeError):
        with pytest.raises(RuntimeError, match="a bug"):
            main(["info", "--env"])
        return
    assert main(["info", "--env"]) == 2
    assert capsys.readouterr().err.startswith("pyg-sar: error: not enough memory: ")


def test_levels(tmp_path, capsys):
    data = community_graph(200, 2000)
    data.train_idx, data.chosen = torch.tensor([3, 1]), torch.tensor([4, 5])
    torch.save(data, tmp_path / "data.pt")
    command = ["partition", str(tmp_path / "data.pt"), "--num-parts", "2", "--out", str(tmp_path / "graph")]
    assert main(command) == 2
    assert "--level chosen=graph" in capsys.readouterr().err
    assert main([*command, "--level", "chosen=node_ids"]) == 0
    assert main(["info", str(tmp_path / "graph")]) == 0
    told = capsys.readouterr().out
    assert told.count("lists that become rows of each part: train_idx, chosen") == 2
    assert "train_idx            ['int64', [2], 'node ids']" in told


def test_order(tmp_path, capsys):
    nodes = []
    for order in "id", "locality":
        assert make(tmp_path / order, "--order", order, parts=1) == 0
        assert f"order '{order}'" in capsys.readouterr().out
        nodes.append(read_part(tmp_path / order, 0).topology.src_id)
    assert nodes[0].equal(torch.arange(200))
    assert nodes[1].sort().values.equal(nodes[0]) and not nodes[1].equal(nodes[0])


def test_options_that_change_edges(tmp_path):
    np.savez(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]])
    for options, expected in (
        ([], [[0, 1], [1, 2]]),
        (["--to-undirected"], [[0, 1, 1, 2], [1, 0, 2, 1]]),
        (["--self-loops"], [[0, 1, 0, 1, 2], [1, 2, 0, 1, 2]]),
        (["--gcn-norm", "--to-undirected"], [[0, 1, 1, 2, 0, 1, 2], [1, 0, 2, 1, 0, 1, 2]]),
    ):
        out = tmp_path / "graph"
        argv = ["partition", str(tmp_path / "path.npz"), "--num-parts", "2", "--out", str(out), "--overwrite", *options]
        assert main(argv) == 0
        shards = [read_part(out, p) for p in range(2)]
        assert put_together([shard.topology for shard in shards]).tolist() == expected
        assert ("edge_weight" in shards[0].edge_attrs) == ("--gcn-norm" in options)


def test_features(tmp_path):
    assert make(tmp_path / "graph", "--features", "bfloat16", "--method", "fennel") == 0
    shard = read_part(tmp_path / "graph", 1)
    assert shard.node_attrs["x"].equal(community_graph(200, 2000).x.bfloat16()[shard.topology.src_id])


def test_split(tmp_path, capsys):
    edges, masks = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.eye(4, dtype=torch.bool)
    torch.save(Data(edge_index=edges, num_nodes=4, y=torch.arange(4), train_mask=masks[:, :3]), tmp_path / "graph.pt")
    argv = ["partition", str(tmp_path / "graph.pt"), "--num-parts", "1", "--out", str(tmp_path / "parts")]
    assert main([*argv, "--split", "3"]) == 2
    assert "the graph has 3 splits" in capsys.readouterr().err
    assert main([*argv, "--split", "1", "--order", "id"]) == 0
    assert read_part(tmp_path / "parts", 0).node_attrs["train_mask"].equal(masks[1])


@pytest.mark.parametrize("command", ["info", "plan", "report"])
def test_a_folder_that_says_something_else(tmp_path, capsys, command):
    """By a writer who is wrong: the checksum fits."""
    assert make(tmp_path / "graph") == 0
    said = {**store.read_meta(tmp_path / "graph"), "nodes": 3, "attributes": None, "boundary": [5]}
    (tmp_path / "graph" / "meta.json").unlink()
    store.write_meta(tmp_path / "graph", said)
    capsys.readouterr()
    assert main([command, str(tmp_path / "graph")]) == 2
    assert "graph/meta.json' does not say what it must (TypeError: " in capsys.readouterr().err


def test_existing_folder(tmp_path, capsys):
    assert make(tmp_path / "graph") == 0
    assert make(tmp_path / "graph", parts=2) == 2
    assert "exists already" in capsys.readouterr().err
    assert make(tmp_path / "graph", "--overwrite", parts=2) == 0
    assert store.read_meta(tmp_path / "graph")["num_parts"] == 2


@pytest.mark.parametrize(
    "argv, message",
    [
        (["partition", "Nothing", "--num-parts", "2"], "There is no data set 'Nothing'"),
        (["partition", "nothing.npz", "--num-parts", "2"], "There is no file 'nothing.npz'"),
        (["partition", "KarateClub", "--num-parts", "0"], "'num_parts' must be an integer of at least 1, got 0"),
        (["partition", "KarateClub", "--num-parts", "2", "--method", "best"], "Unknown method 'best'"),
        (["partition", "KarateClub", "--num-parts", "2", "--order", "best"], "Unknown order 'best'"),
        (["partition", "KarateClub", "--num-parts", "2", "--assignment", "nothing.npy"], "No such file"),
        (["partition", "KarateClub", "--num-parts", "2", "--level", "y"], "Expected --level NAME=LEVEL, got 'y'"),
        (["info", "nowhere"], "There is no folder 'nowhere'"),
        (["info", "."], "meta.json' is missing"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(argv + ["--out", "graph"] * (argv[0] == "partition")) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyg-sar: error: ") and message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["party"],
        ["partition"],
        ["partition", "KarateClub", "--num-parts", "two"],
        ["partition", "KarateClub", "--num-parts", "2", "--out", "x", "--method", "random", "--assignment", "part.npy"],
        *(
            ["plan", "--nodes", "9", "--edges", "9", f"--{name}", "0"]
            for name in ("workers", "stages", "heads", "layers", "nodes", "edges")
        ),
    ],
)
def test_usage_errors(argv, capsys):
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert error.value.code == 2
    assert "usage: pyg-sar" in capsys.readouterr().err


def test_from_the_shell(tmp_path):
    def run(*options):
        argv = [sys.executable, "-m", "pyg_sar", "partition", "KarateClub", "--num-parts", "2"]
        argv += ["--out", str(tmp_path / "graph")]
        return subprocess.run([*argv, *options], cwd=ROOT, capture_output=True, text=True)

    done = run("--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "34 nodes and 156 edges in 2 parts by method 'metis', order 'locality', seed 3" in done.stdout
    again = run()
    assert again.returncode == 2 and again.stdout == ""
    assert "Traceback" not in again.stderr
    assert again.stderr.splitlines()[-1].startswith("pyg-sar: error: ")


def test_plan(capsys, tmp_path):
    """Of a folder, and of counts alone; the budget tells how many workers."""
    folder = tmp_path / "parts"
    assert main(["partition", "Community/600/6000", "--num-parts", "2", "--out", str(folder)]) == 0
    capsys.readouterr()
    small = ["--hidden", "8", "--layers", "2"]
    assert main(["plan", str(folder), *small, "--model", "gat", "--heads", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["2", "1"], ["2", "2"], ["2", "3"]]
    counts = ["--nodes", "1e6", "--edges", "1e7", "--features", "100", "--classes", "10", "--workers", "1", "2"]
    assert main(["plan", *counts, *small, "--budget", "0.2"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert ": mode " in told[-1] and told[-1].endswith("fits 0.2 GiB")
    assert told[-2].endswith("nothing fits 0.2 GiB")
    assert main(["plan", *counts, "8", "2", *small, "--budget", "9"]) == 0, "the fewest of those that were asked for"
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 workers: mode")


def test_plan_without_sense(capsys):
    """Numbers that nothing can have, and relations of which nobody knows, are refused by name."""
    counts = ["plan", "--nodes", "100", "--edges", "1000", "--features", "4", "--classes", "2", "--workers", "2"]
    for option, said in ("--prefetch", "-1"), ("--boundary", "-1"), ("--relations", "-3"), ("--budget", "nan"):
        with pytest.raises(SystemExit):
            main([*counts, option, said])
        assert f"argument {option}: expected 0 or more (got {said})" in capsys.readouterr().err
    assert main([*counts, "--model", "rgcn"]) == 2
    assert "Expected --relations with --model rgcn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--stages 2 --offload --budget 1", "Expected --stages without --offload and --budget."),
        ("--stages 1 2 3", "Expected a multiple of --stages 3 in --workers (got 2)."),
        ("--chunks 2", "Expected --chunks with --stages."),
        ("--budget 0", "Expected a --budget of more than 0 GiB (got 0)."),
    ],
)
def test_plan_with_options_that_do_nothing(capsys, options, message):
    counts = ["plan", "--nodes", "100", "--edges", "1000", "--features", "4", "--classes", "2", "--workers", "2"]
    assert main([*counts, *options.split()]) == 2
    told = capsys.readouterr()
    assert told.err == f"pyg-sar: error: {message}\n" and told.out == ""


def test_plan_of_a_folder_with_other_counts(capsys, tmp_path):
    folder, small = tmp_path / "parts", ["--hidden", "4", "--layers", "2"]
    assert make(folder, parts=1) == 0
    capsys.readouterr()
    assert main(["plan", str(folder), *small, "--nodes", "5", "--workers", "9", "--boundary", "1"]) == 2
    assert "Expected a folder without --nodes, --workers, --boundary: it tells its own." in capsys.readouterr().err
    assert main(["plan", str(folder), *small, "--boundary", "1", "--budget", "9"]) == 0, "that of more workers"


def test_plan_of_folders_of_other_graphs(capsys, tmp_path):
    """Of one feature in one dimension, with a number of classes that is a tensor; and of several types of nodes."""
    data = Data(x=torch.rand(50), edge_index=torch.randint(50, (2, 90)), num_classes=torch.tensor([3]))
    pyg_sar.partition(data, 1, tmp_path / "one", order="id")
    told, small = [], ["--hidden", "4", "--layers", "2", "--classes", "3"]
    for features in ([], ["--features", "1"]):
        assert main(["plan", str(tmp_path / "one"), *small, *features]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    data = HeteroData({"a": {"x": torch.rand(9, 2)}, ("a", "to", "a"): {"edge_index": torch.randint(9, (2, 20))}})
    pyg_sar.partition(data, 1, tmp_path / "typed")
    assert main(["plan", str(tmp_path / "typed"), *small, "--features", "2"]) == 2
    assert "Expected a folder of a graph without types" in capsys.readouterr().err


@pytest.mark.grid
def test_plan_of_rows_at_home(capsys, tmp_path):
    folder, small = tmp_path / "parts", ["--hidden", "64", "--layers", "2", "--offload", "--budget"]
    assert main(["partition", "Community/4000/20000", "--num-parts", "1", "--out", str(folder)]) == 0
    capsys.readouterr()
    counts = ["--nodes", "4000", "--edges", "20000", "--features", "64", "--classes", "16"]
    counts += ["--workers", "1"]
    found = []
    for words, budget in ((str(folder),), "0.003"), ((str(folder),), "1"), (counts, "0.003"):
        assert main(["plan", *words, *small, budget]) == 0
        found += [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in found] == ["1", "1", "1"]
    assert found[1][1:3] == ["1", "all"] and int(found[2][1]) >= int(found[0][1]) > 1
    assert all(float(row[5]) <= budget + 0.001 for row, budget in zip(found, (0.003, 1, 0.003), strict=True))
    assert main(["partition", "Community/4000/20000", "--num-parts", "2", "--out", str(tmp_path / "two")]) == 0
    capsys.readouterr()
    assert main(["plan", str(tmp_path / "two"), *small, "1"]) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert row[:3] == ["2", "1", "all"] and float(row[6]) < float(found[1][6])
    for words, error in ((["1e-9"], "needs at least"), (["1", "--relations", "3"], "without --relations")):
        assert main(["plan", str(folder), *small, *words]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize("model", ["gcn2", *(pytest.param(m, marks=pytest.mark.grid) for m in ("gat", "resgcn"))])
@ordinary_ranges()
def test_plan_of_stages(capsys, tmp_path, model):
    """Of a folder, whose parts each stage has, and of counts, for numbers of workers that stages divide."""
    folder, small = tmp_path / "parts", ["--hidden", "8", "--layers", "2", "--model", model, "--chunks", "2"]
    assert main(["partition", "Community/600/6000", "--num-parts", "2", "--out", str(folder)]) == 0
    capsys.readouterr()
    assert main(["plan", str(folder), *small, "--stages", "1", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:3]] == [["1", "2"], ["2", "2"]]
    assert lines[1][5] == "0.000" and lines[1][-1] == "0.0%" and lines[2][-1] == "33.3%"
    whole = tmp_path / "whole"
    assert main(["partition", "Community/600/6000", "--num-parts", "1", "--out", str(whole)]) == 0
    capsys.readouterr()
    assert main(["plan", str(whole), str(folder), *small, "--stages", "1", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines[1:5]] == [["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"]]
    totals = [" ".join(line) for line in lines if line[1:2] == ["workers:"]]
    assert [re.sub("[12] stages of [12]", "", line) for line in totals] == [
        f"{n} workers:  move least" for n in (1, 2, 4)
    ]
    assert main(["plan", str(whole), str(folder), "--model", "sage"]) == 2
    assert "one folder without --stages (got 2)" in capsys.readouterr().err
    counts = ["--nodes", "1e6", "--edges", "2e6", "--features", "16", "--classes", "10", "--workers", "2", "3"]
    assert main(["plan", *counts, *small, "--stages", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["2", "1"] and lines[-1] == "2 workers: 2 stages of 1 move least"
    assert main(["plan", *counts, *small, "--stages", "9", "--workers", "9"]) == 2
    assert "a block for each of the 9 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "--nodes and --edges"),
        (["--nodes", "9", "--edges", "9"], "--features and --classes"),
        (["nowhere"], "no folder"),
        (
            ["--nodes", "9", "--edges", "9", "--features", "9", "--classes", "9", "--model", "gcn2"],
            "--stages with --model gcn2",
        ),
    ],
)
def test_plan_needs_a_graph(capsys, words, error):
    assert main(["plan", *words]) == 2
    assert error in capsys.readouterr().err
