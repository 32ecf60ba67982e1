"""Benchmarks on tiny graphs: they run, and write what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sample_graphs import REAL, real

from pyg_sar.linear import HAS_ONEDNN
from pyg_sar.offload.schedule import ranges

ROOT = Path(__file__).resolve().parents[2]


def run(script, *args):
    """Run a benchmark as the README says."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, f"benchmarks/{script}.py", *map(str, args)]
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    if done.returncode == 77:  # the machine does not permit what it takes
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.grid
def test_layers(tmp_path):
    """It validates every implementation before it measures."""
    pytest.importorskip("matplotlib")
    sizes = ["--nodes", 300, "--edges", 2000, "--repetitions", 1, "--warmups", 0, "--threads", 1]
    cases = ["--cases", "gat-2", "sum-100", "--implementations", "PyG", "gather"]
    run("layers", *sizes, *cases, "--out", tmp_path)
    table = (tmp_path / "layers-cpu.md").read_text()
    assert "| gat-2 | PyG |" in table and "| sum-100 | gather |" in table and "skipped" not in table
    assert (tmp_path / "layers-cpu.png").exists()


@pytest.mark.grid
def test_norm(tmp_path):
    run("norm", "--rows", 300, "--widths", 8, "--threads", 1, "--repetitions", 1, "--out", tmp_path)
    assert "| 8 | 1 |" in (tmp_path / "norm-cpu.md").read_text()


@pytest.mark.grid
def test_rgcn(tmp_path):
    sizes = ["--nodes", 300, "--edges", 2000, "--blocks", 2, "--sizes", 64, "--repetitions", 1, "--threads", 1]
    run("rgcn", *sizes, "--out", tmp_path)
    table = (tmp_path / "rgcn-cpu.md").read_text()
    assert "| none | 2 | 0." in table and "| 4 | 1 | 64 |" in table


@pytest.mark.grid
@pytest.mark.skipif(not HAS_ONEDNN, reason="oneDNN is not faster on processors like this one")
def test_dense(tmp_path):
    run("dense", "--shapes", "300/8/5", "--threads", 1, "--repetitions", 1, "--out", tmp_path)
    assert "| 300, 8, 5 | 1 |" in next(tmp_path.glob("dense-*.md")).read_text()


@pytest.mark.grid
def test_zoo(tmp_path):
    """It compares outputs before it measures."""
    layers = ["--layers", "GCNConv", "EdgeConv", "RGCNConv"]
    run("zoo", "--graphs", "300/2000", *layers, "--repetitions", 1, "--out", tmp_path)
    table = (tmp_path / "zoo-cpu.md").read_text()
    assert "| EdgeConv | streams by replay |" in table and table.count("| streams |") == 2


@pytest.mark.grid
def test_shares(tmp_path):
    run("shares", "--nodes", 300, "--edges", 2000, "--models", "gcn", "--workers", 1, "--steps", 1, "--out", tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "shares-cpu.md").read_text().splitlines()[4:]]
    shares = [float(share.rstrip("% |")) for _, share in rows[1:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares)) and max(shares) > 0


@pytest.mark.grid
def test_scaling(tmp_path):
    pytest.importorskip("matplotlib")
    sizes = ["--nodes", 300, "--edges", 2000, "--steps", 1, "--workers", 2]
    run("scaling", *sizes, "--models", "sage", "--modes", 1, 3, "--no-peer", "--out", tmp_path)
    table = (tmp_path / "scaling-metis.md").read_text()
    assert "| sage | 1 rematerialise | 2 |" in table and "| sage | 3 one-shot | 2 |" in table
    assert (tmp_path / "scaling-metis.png").exists()


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["sage", "gat"])
def test_intellabs_sar(tmp_path, kind):
    """All libraries train the same model."""
    pytest.importorskip("dgl")
    pytest.importorskip("sar")
    sizes = ["--nodes", 300, "--edges", 2000, "--steps", 2, "--rounds", 1]
    run("intellabs_sar", "--kinds", kind, *sizes, "--out", tmp_path)
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "intellabs-sar.md").read_text().splitlines()[4:]]
    assert len(rows) == 8 and {row[1] for row in rows} == {"pyg_sar", "IntelLabs/SAR", "DGL"}
    assert all(float(row[-1]) < 1e-4 for row in rows)


@pytest.mark.grid
def test_overlap(tmp_path):
    """What a worker does during a step adds up, and it received through its link what it says."""
    pytest.importorskip("matplotlib")
    sizes = ["--nodes", 300, "--edges", 4000, "--steps", 2, "--models", "gat", "--prefetch", 1]
    run("overlap", *sizes, "--out", tmp_path)
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "overlap.md").read_text().splitlines()[2:]]
    columns, workers = lines[0], [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    assert [(w["model"], w["hosts"], w["prefetch"], w["worker"]) for w in workers] == [
        ("gat", "2", "1", "0"),
        ("gat", "2", "1", "1"),
    ]
    parts = ["computing", "sending", "waiting, forward", "backward", "gradients", "collectives"]
    for w in workers:
        assert float(w["step"]) == pytest.approx(sum(float(w[part]) for part in parts), abs=0.005 * (len(parts) + 1))
        assert float(w["MiB received"]) > 0 and float(w["alone"]) > 0
    assert len(columns) == 15 and (tmp_path / "overlap.png").exists()


@pytest.mark.grid
def test_message_flow_graphs(tmp_path):
    """It compares outputs before it measures."""
    sizes = ["--nodes", 2000, "--degrees", 5, "--layers", 2, "--rounds", 1, "--epochs", 2]
    run("message_flow_graphs", *sizes, "--models", "gat", "--out", tmp_path)
    assert "| gat | 2 | 5 |" in (tmp_path / "message-flow-graphs.md").read_text()


@pytest.mark.grid
def test_partition(tmp_path):
    sizes = ["--nodes", 300, "--edges", 2000, "--parts", 2, "--graphs", "Community/300/2000", "--seeds", 1]
    run("partition", *sizes, "--out", tmp_path)
    table = (tmp_path / "partition.md").read_text()
    assert "| fennel | id | directed | 2 |" in table and "| Community/300/2000 | 300 | 2,000 | 32 |" in table


@pytest.mark.grid
def test_large(tmp_path):
    run("large", "--nodes", 300, "--edges", 2000, "--epochs", 2, "--out", tmp_path)
    table = (tmp_path / "large.md").read_text()
    rows = ("| generate and save |", "| read, partition and write |", "| load |", "| train sage |", "| train gat |")
    assert all(row in table for row in rows)
    for line in table.splitlines()[-2:]:
        first, last = map(float, line.split("|")[-2].split(","))
        assert last < first, "the loss falls"


@pytest.mark.grid
def test_offload(tmp_path):
    graph = "Community/3000/30000"
    sizes = ["--graph", graph, "--limited", graph, "--models", "sage", "--hidden", 64, "--rounds", 1, "--steps", 2]
    options = ["--of", "time", "limit", "--chunks", 3, "--shares", 1, "--folder", tmp_path, "--out", tmp_path]
    run("offload", *sizes, *options)
    texts = [(tmp_path / f"offload-{name}.md").read_text() for name in ("time", "limit")]
    times, limits = ([line.split(" | ") for line in text.splitlines() if "| sage |" in line] for text in texts)
    memory, three, again, stay = times
    assert memory[1:4:2] == ["in memory", "1.00"] and three[1] == "3" and float(three[5]) < 1
    assert (again[1], stay[1]) == ("3, again", "3, stay") and float(stay[8]) < float(three[8]) <= float(again[8])
    assert "times)" in limits[0][5]


@pytest.mark.grid
def test_offload_types(tmp_path):
    run(
        "offload_types",
        "--scale",
        2000,
        "--channels",
        8,
        "--hidden",
        16,
        "--chunks",
        3,
        "--rounds",
        1,
        "--out",
        tmp_path,
    )
    table = (tmp_path / "offload-types.md").read_text()
    assert all(f"| {kind} | {rows} |" in table for kind in ("sage", "hgt") for rows in ("PyG", "at home, 3 chunks"))


@pytest.mark.grid
def test_message_flow_types(tmp_path):
    sizes = ["--scale", 4000, "--channels", 8, "--hidden", 16, "--labelled", 0.1, "--rounds", 1, "--epochs", 2]
    run("message_flow_types", *sizes, "--out", tmp_path)
    table = (tmp_path / "message-flow-types.md").read_text()
    assert all(f"| {kind} | 10% |" in table for kind in ("sage", "hgt"))


@pytest.mark.grid
def test_gpu_offload(tmp_path):
    """On a CPU, too; it compares losses."""
    sizes = ["--device", "cpu", "--nodes", 3000, "--edges", 20000, "--hidden", 16, "--steps", 1, "--chunks", 3]
    run("gpu_offload", *sizes, "--out", tmp_path)
    table = (tmp_path / "gpu-offload.md").read_text()
    assert all(f"| {kind} | {graph} | 3 |" in table for kind in ("sage", "gat") for graph in ("near", "any"))


def test_mini_batches(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from harness.mini_batches import Neighbors

    edge_index = torch.randint(200, (2, 3000))
    nodes, found = Neighbors(edge_index, 200, [4, 3]).draw(torch.tensor([7, 3]))
    assert nodes[:2].tolist() == [7, 3] and nodes.unique().numel() == nodes.numel()
    edges = set(map(tuple, edge_index.t().tolist()))
    assert all(edge in edges for edge in map(tuple, nodes[found].t().tolist()))
    degree = torch.bincount(found[1], minlength=nodes.numel())
    assert degree.max() <= 4 and (degree[:2] > 1).all()


@pytest.mark.grid
def test_extrapolate(tmp_path):
    run("extrapolate", "--models", "gat", "--parts", 4, 8, "--out", tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "extrapolated.md").read_text().splitlines()[4:]]
    assert len(rows) == 4 and all(float(row[6]) > 0 for row in rows)
    assert float(rows[0][6]) == pytest.approx(2 * float(rows[1][6]), rel=0.05), "twice the workers, half the memory"


@pytest.mark.grid
def test_shards(tmp_path):
    """Shards change nothing but time and memory."""
    sizes = ["--nodes", 300, "--edges", 2000, "--steps", 1, "--rounds", 1, "--parts", 1, 3]
    ways = ["--ways", "mini-batches", "sparse matrix"]
    run("shards", *sizes, "--models", "gat", "sage", *ways, "--threads", 1, "--out", tmp_path)
    rows = [line.split(" | ") for line in (tmp_path / "shards-cpu.md").read_text().splitlines()[4:]]
    for kind, more in (("gat", []), ("sage", [["PyG, sparse matrix", ""]])):
        mine = [row for row in rows if row[0] == f"| {kind}"]
        names = [["pyg_sar", "1"], ["pyg_sar", "3"], ["PyG", ""], ["PyG, mini-batches", ""], *more]
        assert [row[1:3] for row in mine] == names
        assert len({row[-1] for row in mine[:3]}) == 1


def random_rows(seed: int, chunks: int, num_rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(num_rows, (20,), generator=generator).unique() for _ in range(chunks)]


def test_batches_of_chunks(monkeypatch):
    """Each takes in turn, of the chunks that are left, that with most rows of all its chunks so far."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from harness.batches import form_batches

    for chunks, num_rows in ((1, 30), (5, 60), (7, 200)):
        rows = [random_rows(seed, chunks, num_rows) for seed in range(3)]
        batches, expected = [set(ids.tolist()) for ids in rows[0]], [list(range(chunks))]
        for theirs in rows[1:]:
            left, order, before = list(range(chunks)), [], [set(b) for b in batches]
            for j in range(chunks):
                best = max(left, key=lambda c: len(before[j] & set(theirs[c].tolist())))
                left.remove(best)
                order.append(best)
                batches[j] |= set(theirs[best].tolist())
            expected.append(order)
        assert form_batches(rows, num_rows) == expected


@pytest.mark.parametrize("seed", range(3))
def test_batches_share_rows(monkeypatch, seed):
    """Worker 1 has the chunks of worker 0 in another order; so has worker 2, but for one row each."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from harness.batches import form_batches, union

    generator = torch.Generator().manual_seed(seed)
    first = [torch.arange(10 * k, 10 * k + 10) for k in range(8)]
    orders = [torch.randperm(8, generator=generator).tolist() for _ in range(2)]
    rows = [first, [first[c] for c in orders[0]], [first[c][1:] for c in orders[1]]]
    found = form_batches(rows, 80)
    assert found[0] == list(range(8))
    for given, order in zip(orders, found[1:], strict=True):
        assert [given[c] for c in order] == list(range(8))
    assert set(union(rows[1]).tolist()) == set(range(80))


def test_rows_that_chunks_read(monkeypatch):
    """Of a hub, of destinations without edges, and of chunks without destinations."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from harness.batches import source_rows

    generator = torch.Generator().manual_seed(2)
    count = torch.randint(0, 6, (60,), generator=generator)
    count[0] = 25
    rowptr = torch.cat([count.new_zeros(1), count.cumsum(0)])
    col = torch.randint(0, 90, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)
    chunks = ranges(rowptr, 70)
    found = source_rows(rowptr, col, chunks, 90)
    assert any(t.numel() == 0 for t in found)
    for chunk, ids in zip(chunks, found, strict=True):
        read = {int(i) for d in range(chunk.start, chunk.stop) for i in col[rowptr[d] : rowptr[d + 1]]}
        assert ids.tolist() == sorted(read)


@pytest.mark.grid
def test_chunks(tmp_path):
    """On a generated graph and a path that a file holds; graphs that are not there are left out."""
    np.savez(tmp_path / "cnr-2000.npz", indptr=np.arange(61), indices=np.arange(1, 61) % 60)
    sizes = ["--nodes", 300, "--edges", 2000, "--workers", 1, 3, "--chunks", 4]
    run("chunks", *sizes, "--graphs", "Community", "cnr-2000", "Physics", "--data", tmp_path, "--out", tmp_path)
    lines = (tmp_path / "chunks.md").read_text().splitlines()
    table = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [dict(zip(table[0], line, strict=True)) for line in table[2:]]
    assert [row["graph"] for row in rows] == ["Community"] * 6 + ["cnr-2000"] * 6
    for row in rows:
        columns = ("naive", "+ shared", "+ previous stays", "optimal", "+ order", "each once")
        loads = [float(row[column]) for column in columns]
        assert loads == sorted(loads, reverse=True) and float(row["+ reorganised"]) >= loads[-2]
    assert "loads more than HongTu's method: none." in "".join(lines)
    path = next(row for row in rows if row["graph"] == "cnr-2000" and row["rows"] == "as given")
    assert (path["naive"], path["+ order"]) == ("1.00", "1.00"), "each row has one reader"


@pytest.mark.grid
def test_guards(tmp_path):
    sizes = ["--graph", "Community/300/2000", "--hidden", 8, "--epochs", 3, "--rounds", 1, "--models", "sage"]
    run("epoch", "--of", "guards", *sizes, "--modes", 1, "--layers", 4, "--out", tmp_path)
    assert "| sage | 1 | 0." in (tmp_path / "guards-cpu.md").read_text()


@pytest.mark.grid
def test_pipeline(tmp_path):
    """It fails unless all bytes are those of the formulas."""
    run("pipeline", "--graphs", "Community/300/2000", "--layers", 8, "--chunks", 2, "--out", tmp_path)
    table = (tmp_path / "pipeline-traffic.md").read_text()
    assert table.count("| Community/300/2000 | 100 |") == 4 and "| Community/300/2000 | 8 | " in table
    run("pipeline_depth", "--graphs", "Community/300/2000", "--depths", 8, "--out", tmp_path)
    computed = (tmp_path / "pipeline-depth.md").read_text().splitlines()[-1].split(" | ")
    counted = next(line for line in table.splitlines() if "| 100 | GCN |" in line).split(" | ")
    assert computed[3] == counted[3]  # rows of other workers
    sharing, pipeline = computed[6].split(" / ")[0], computed[4]
    assert [float(sharing), float(pipeline)] == [round(float(counted[k])) for k in (4, 6)]


@pytest.mark.grid
def test_pipeline_time(tmp_path):
    small = ["--graphs", "Community/300/2000", "--models", "gcn", "--layers", 2]
    small += ["--epochs", 2, "--rates", "no limit"]
    run("pipeline_time", *small, "--of", "chunks", "waits", "--out", tmp_path)
    assert "| Community/300/2000 | gcn | 128 |" in (tmp_path / "pipeline-chunks.md").read_text()
    assert "| Community/300/2000 | gcn | 64 |" in (tmp_path / "pipeline-waits.md").read_text()
    run("pipeline_time", *small, "--of", "hosts", "--runs", tmp_path / "runs", "--out", tmp_path)
    assert "2 stages, 32 chunks" in (tmp_path / "pipeline-hosts.md").read_text()


@pytest.mark.grid
def test_pipeline_memory(tmp_path):
    """What is planned is what is counted, within the bounds of the planner's own tests."""
    small = ["--graphs", "Community/2000/20000", "--models", "gcn", "--layers", 8, "--of", "memory"]
    run("pipeline_time", *small, "--out", tmp_path)
    lines = (tmp_path / "pipeline-memory.md").read_text().splitlines()
    ratios = [float(line.split("|")[-2]) for line in lines if line.startswith("| Community")]
    assert len(ratios) == 4 and all(0.85 < ratio < 1.25 for ratio in ratios), ratios


@real
@pytest.mark.grid
def test_staleness(tmp_path):
    """What was trained is not trained again."""
    options = ["--root", REAL, "--graphs", "Cora", "--seeds", 1, "--epochs", 2, "--runs", tmp_path / "runs"]
    for _ in range(2):
        run("staleness", *options, "--out", tmp_path)
        table = (tmp_path / "staleness.md").read_text()
        assert table.count("\n| Cora | ") == 2 and "| history of the exact pass | " in table
        lines = (tmp_path / "runs").read_text().splitlines()
        assert len(lines) == 2 * 4 + 9
    runs = dict(map(json.loads, lines))
    of_32, staged = (
        runs[json.dumps(["Cora", "gcn2", name, 0])] for name in ("32 chunks", "four stages on four workers")
    )
    assert of_32 == staged


@pytest.mark.grid
def test_time_to_accuracy(tmp_path):
    small = ["--graphs", "small", "--seeds", 1, "--hidden", 8, "--runs", tmp_path / "runs"]
    run("time_to_accuracy", *small, "--ways", "PyG", "2 workers, 4 steps an epoch", "--out", tmp_path)
    lines = (tmp_path / "time-to-accuracy.md").read_text().splitlines()
    assert [line.split("|")[2].strip() for line in lines[-2:]] == ["PyG", "2 workers, 4 steps an epoch"]
    assert (tmp_path / "time-to-accuracy.png").stat().st_size > 0


@real
@pytest.mark.grid
def test_recipe(tmp_path):
    run("recipe", "--root", REAL, "--graphs", "Cora", "--seeds", 1, "--runs", tmp_path / "runs", "--out", tmp_path)
    lines = (tmp_path / "recipe.md").read_text().splitlines()
    cells = [float(cell.split("±")[0]) for line in lines if line.startswith("| Cora") for cell in line.split("|")[4:8]]
    assert len(cells) == 12 and all(60 < cell < 90 for cell in cells), lines
