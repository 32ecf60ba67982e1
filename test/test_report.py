"""Pages of partitions and runs."""

import errno
import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support import graphs
from torch.utils.tensorboard import SummaryWriter

import pyg_sar
from pyg_sar.cli import main
from pyg_sar.report import report


def page(path: Path) -> str:
    """Return a page that is well formed and needs nothing else."""
    text = path.read_text()
    assert not re.search(r'(src|href)="(?!#|data:)', text.replace("xlink:", ""))
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ElementTree.fromstring(svg)
    return text


def test_partition(tmp_path, capsys):
    told = pyg_sar.partition(graphs.citations(), 3, tmp_path / "parts")
    assert main(["report", str(tmp_path / "parts"), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    text = page(tmp_path / "page.html")
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Parts", "Balance", "Boundary"]
    rows = re.findall(r"<tr><td>part (\d)</td><td>(\d+)</td><td>(\d+)</td>", text)
    expected = zip("012", map(str, told["nodes"]), map(str, told["edges"]), strict=True)
    assert rows == list(expected)
    assert text.count("<svg") == 2
    for count in (n for row in told["boundary"] for n in row):
        assert f"<!-- {count} -->" in text  # what matplotlib notes of texts that it draws as shapes


def test_run(tmp_path):
    for rank in range(2):
        writer = SummaryWriter(tmp_path / "run" / f"rank-{rank}")
        for step in range(1, 4):
            told = {
                "values/Loss": 1 / step,
                "time/seconds": 0.5,
                "time/exposed communication": 0.1,
                "traffic/received": 2.0,
                "traffic/sent": 3.0,
                "memory/peak": 300.0,
            }
            told |= {f"aggregations/{k} {what}": float(k) for k in range(2) for what in ("received", "saved", "waited")}
            for name, value in told.items():
                writer.add_scalar(name, value, step)
        writer.close()
        names = ["layer 'convs.0' (SAGEConv)", ""]
        (tmp_path / "run" / f"rank-{rank}" / "layers.json").write_text(json.dumps(names))
    (tmp_path / "run" / "rank-0.bak").mkdir()
    (tmp_path / "run" / "rank-2").touch()
    text = page(report(tmp_path / "run", tmp_path / "page.html"))
    titles = ["Numbers", "Loss", "Seconds", "Exposed communication", "Received", "Sent", "Memory"]
    titles += [f"Aggregations: {what}" for what in ("received", "saved", "waited")]
    assert re.findall(r"<h2>(.*?)</h2>", text) == titles
    assert "<td>Loss</td><td>0.3333</td><td>0.3333</td><td>1</td>" in text and text.count("<svg") == 9
    assert text.count("<!-- convs.0 -->") == 3


def test_ranks_that_told_nothing(tmp_path, capsys):
    for rank in range(2):
        pyg_sar.RunLog(tmp_path / f"rank-{rank}").writer.close()  # which makes a folder of its own there
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "no rank has told anything yet. Wait for a step; after some" in capsys.readouterr().err
    write_steps(tmp_path / "rank-1", 1)
    with pytest.warns(UserWarning, match="rank 0 ends before its first step, others at step 1: a file is damaged or"):
        assert "<h2>Seconds</h2>" in page(report(tmp_path, tmp_path / "page.html"))


def write_steps(folder, count):
    """Write what a rank tells in so many steps."""
    writer = SummaryWriter(folder)
    for step in range(1, count + 1):
        for name in ("time/seconds", "time/exposed communication", "traffic/received", "traffic/sent", "memory/peak"):
            writer.add_scalar(name, 1.0, step)
    writer.close()
    return next(folder.glob("events*"))


@pytest.mark.parametrize(("steps", "told"), [(0, "before its first step"), (2, "at step 2")])
def test_a_rank_whose_file_is_cut(tmp_path, steps, told):
    """As while it is written: a step of which the memory is not there yet is no step."""
    write_steps(tmp_path / "rank-0", 4)
    file, whole = write_steps(tmp_path / "rank-1", 4), write_steps(tmp_path / "whole" / "rank-1", steps + 1)
    file.write_bytes(file.read_bytes()[: whole.stat().st_size - 10])
    message = f"rank 1 ends {told}, others at step 4: a file is damaged or still being written."
    with pytest.warns(UserWarning, match=message):
        report(tmp_path, tmp_path / "page.html")
    assert message in page(tmp_path / "page.html")


@pytest.mark.parametrize("text", ["{x", "[1, 2]", "null", "[" * 200_000], ids=["cut", "numbers", "null", "deep"])
def test_damaged_names_of_layers(tmp_path, text):
    write_steps(tmp_path / "rank-0", 1)
    (tmp_path / "rank-0" / "layers.json").write_text(text)
    with pytest.raises(ValueError, match=r"rank-0/layers\.json' is damaged, expected a list of names .*Remove it"):
        report(tmp_path, tmp_path / "page.html")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(write_steps(tmp_path / "rank-0", 1).with_name("events.out.tfevents.9"))
    with pytest.raises(ValueError, match=r"tfevents\.9' is not a file, expected one of events. Move it elsewhere"):
        report(tmp_path, tmp_path / "page.html")


def test_only_pages_are_replaced(tmp_path, capsys):
    pyg_sar.partition(graphs.citations(), 2, tmp_path / "parts")
    meta = tmp_path / "parts" / "meta.json"
    before = meta.read_bytes()
    for out in (meta, tmp_path / "parts"):
        assert main(["report", str(tmp_path / "parts"), "--out", str(out)]) == 2
        assert f"'{out}' will not be replaced, because it is no page" in capsys.readouterr().err
    assert meta.read_bytes() == before
    (tmp_path / "page.html").touch()
    for _ in range(2):
        report(tmp_path / "parts", tmp_path / "page.html")
    page(tmp_path / "page.html")


def test_a_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    pyg_sar.partition(graphs.citations(), 2, tmp_path / "parts")
    before = report(tmp_path / "parts", tmp_path / "page.html").read_bytes()

    def full(path, text, **options):
        path.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        report(tmp_path / "parts", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"parts", "page.html"}


def test_neither(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "is no partition (no 'meta.json') and no run that RunLog wrote" in capsys.readouterr().err


def test_info_env(capsys):
    assert main(["info", "--env"]) == 0
    told = capsys.readouterr().out
    assert re.search(rf"^pyg_sar: +{re.escape(pyg_sar.__version__)}$", told, re.M)
    assert re.search(rf"^torch: +{re.escape(torch.__version__)}$", told, re.M)
