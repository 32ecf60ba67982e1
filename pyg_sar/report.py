r"""Makes a page of a run or of a partition: ``pyg-sar report``."""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pyg_sar.caller import warn
from pyg_sar.durable import owner
from pyg_sar.run_log import LAYERS

Series = dict[str, list[tuple[int, float]]]  # steps and values by tag
CURVES = (
    ("time/seconds", "seconds", "Seconds", "Of each step, with what else was done until it was told."),
    ("time/exposed communication", "seconds", "Exposed communication", "Seconds in which a rank waited for halo rows."),
    ("traffic/received", "MiB", "Received", "Rows and gradients that a rank received in each step."),
    ("traffic/sent", "MiB", "Sent", "Rows and gradients that a rank sent in each step."),
)

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.05rem; margin: 2rem 0 0.2rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.15rem 0.8rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }} tr {{ border-bottom: 1px solid #ddd; }}
svg {{ max-width: 100%; height: auto; }} p {{ margin: 0.3rem 0; color: #555; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def report(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    r"""Write one HTML file about a partition, or about a run of which :class:`pyg_sar.RunLog` has written.

    Args:
        source (str): A folder made by :func:`pyg_sar.partition`, or the folder of a run.
        out (str): The file to write; figures are within it.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: If the folder is neither.
        ValueError: If something in the folder is damaged, or ``out`` is there and no page.
        ImportError: If matplotlib, or for a run tensorboard, is not installed.
    """
    from pyg_sar.data.store import said_by

    source = Path(source)
    if (source / "meta.json").is_file():
        with said_by(source / "meta.json"):
            sections = of_partition(source)
    elif folders := ranks_of(source):
        ranks = {rank: scalars(path) for rank, path in folders.items()}
        late = incomplete(ranks)
        # A rank whose first step is not whole on the disk has nothing to draw.
        ranks = {rank: told for rank, told in ranks.items() if last_step(told) >= 0}
        if not ranks:
            raise FileNotFoundError(
                f"'{source}' holds a run of which no rank has told anything yet. Wait for a step; after some, its "
                "files are damaged."
            )
        if late:
            warn(late)
        sections = [("Incomplete", late, "")] * bool(late)
        sections += of_run(ranks, layers(folders[next(iter(ranks))]))
    else:
        raise FileNotFoundError(
            f"'{source}' is no partition (no 'meta.json') and no run that RunLog wrote (no 'rank-0'). Name the folder "
            f"that was given to 'pyg-sar partition --out' or to '--log-dir'."
        )
    title = html.escape(f"{'Partition' if (source / 'meta.json').is_file() else 'Run'} {source}")
    body = "\n".join(f"<h2>{html.escape(head)}</h2>\n<p>{html.escape(told)}</p>\n{it}" for head, told, it in sections)
    write_page(Path(out), PAGE.format(title=title, body=body))
    return Path(out)


def write_page(path: Path, text: str) -> None:
    """Write a page, whole or not at all, over nothing but another one."""
    path = path.resolve()
    if path.exists() and not is_page(path):
        raise ValueError(f"'{path}' will not be replaced, because it is no page of a report. Choose another file.")
    new = path.with_name(f".{path.name}.{owner()}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def is_page(path: Path) -> bool:
    """Whether a file may be replaced: a page, or one without content."""
    start = PAGE.partition("\n")[0].encode()
    if not path.is_file():
        return False
    with open(path, "rb") as f:
        return f.read(len(start)) in (start, b"")


def ranks_of(source: Path) -> dict[str, Path]:
    """Return the folders of the ranks of a run; others may lie beside, such as copies."""
    found = {path: re.fullmatch(r"rank-([0-9]+)", path.name) for path in source.glob("rank-*") if path.is_dir()}
    numbers = sorted((int(name[1]), path) for path, name in found.items() if name)
    return {f"rank {number}": path for number, path in numbers}


def last_step(told: Series) -> int:
    """Return the last step of which a rank has told everything, -1 if there is none."""
    tags = ("memory/peak", *(tag for tag, *_ in CURVES))
    return min(told[tag][-1][0] if tag in told else -1 for tag in tags)


def incomplete(ranks: dict[str, Series]) -> str:
    """Tell which ranks end before others: TensorBoard reads a damaged file up to the damage, and says nothing."""
    ends = {rank: last_step(told) for rank, told in ranks.items()}
    most = max(ends.values())
    early = [f"{rank} ends {f'at step {end}' if end >= 0 else 'before its first step'}"
             for rank, end in ends.items() if end < most]  # fmt: skip
    return f"{', '.join(early)}, others at step {most}: a file is damaged or still being written." * bool(early)


def of_partition(folder: Path) -> list[tuple[str, str, str]]:
    """Return the sections about a partition: title, explanation, what is shown."""
    from pyg_sar.data.store import read_meta

    meta = read_meta(folder)
    columns = {name: meta[name] for name in ("nodes", "edges", "labelled")}
    columns |= {"rows in": [sum(row) for row in meta["boundary"]], "bytes": meta["bytes"]}
    rows = [[f"part {k}", *values] for k, values in enumerate(zip(*columns.values(), strict=True))]
    shares = {name: [n * len(values) / max(sum(values), 1) for n in values] for name, values in columns.items()}
    about = (
        f"{meta['num_nodes']:,} nodes and {meta['num_edges']:,} edges, cut by '{meta['method']}'; "
        f"{meta['cut_fraction']:.1%} of the edges come from another part."
    )
    return [
        ("Parts", about, table(["", *columns], rows)),
        ("Balance", "Of each part, divided by the mean of all parts.", bars(shares, "part", "times the mean")),
        (
            "Boundary",
            "Rows that a worker fetches from another one, in each pass over a layer.",
            heat(meta["boundary"], "from part", "to part", "rows"),
        ),
    ]


def of_run(ranks: dict[str, Series], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the sections about the ranks of a run, in which aggregations are those of layers of such names."""
    first = next(iter(ranks.values()))
    told = {tag.removeprefix("values/"): points for tag, points in first.items() if tag.startswith("values/")}
    rows = [[name, f"{points[-1][1]:.4g}", f"{min(v for _, v in points):.4g}", f"{max(v for _, v in points):.4g}"]
            for name, points in told.items()]  # fmt: skip
    sections = [("Numbers", "What the run told.", table(["", "last", "least", "largest"], rows))]
    sections += [(name, "", curves({name: points}, name)) for name, points in told.items() if len(points) > 1]
    for tag, unit, head, about in CURVES:
        sections.append((head, about, curves({rank: one[tag] for rank, one in ranks.items()}, unit)))
    peaks = {"peak": [one["memory/peak"][-1][1] for one in ranks.values()]}
    about = "The largest that each rank has held, with what it loaded and imported."
    sections.append(("Memory", about, bars(peaks, "rank", "MiB")))
    for what, unit, about in (
        ("received", "MiB", "Of each aggregation of the middle step, in their order, by each rank."),
        ("saved", "MiB", "What each rank keeps of each aggregation of that step until its backward pass."),
        ("waited", "s", "Seconds in which a rank waited within each aggregation of that step."),
    ):
        cells = [of_middle_step(one, what) for one in ranks.values()]
        if any(cells):
            wide = max(map(len, cells))
            cells = [row + [0.0] * (wide - len(row)) for row in cells]
            sections.append((f"Aggregations: {what}", about, heat(cells, "aggregation", "rank", unit, names)))
    return sections


def of_middle_step(series: Series, what: str) -> list[float]:
    """Return what aggregations did in the middle step, in their order."""
    steps = [step for step, _ in series["time/seconds"]]
    tags = [tag for tag in series if re.fullmatch(rf"aggregations/\d+ {what}", tag)]
    found = {int(re.findall(r"\d+", tag)[0]): dict(series[tag]).get(steps[len(steps) // 2]) for tag in tags}
    return [value for _, value in sorted(found.items()) if value is not None]


def layers(folder: Path) -> list[str]:
    """Return what the layers of a run are called, without their kinds."""
    file = folder / LAYERS
    try:
        told = json.loads(file.read_text()) if file.is_file() else []
        return [re.sub(r"^layer '(.*?)'.*", r"\1", name) for name in told]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"'{file}' is damaged, expected a list of names ({error}). Remove it, and aggregations have numbers."
        ) from error


def scalars(folder: Path) -> Series:
    """Return all scalars of one rank."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError("A run is read by TensorBoard. Run 'pip install matplotlib tensorboard'.") from error
    for file in folder.glob("*tfevents*"):
        if not file.is_file():  # TensorBoard would wait for what is written into a pipe
            raise ValueError(f"'{file}' is not a file, expected one of events. Move it elsewhere.")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    # Of a step that was made again, by a run that went on from a checkpoint, what was told last.
    found = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    return {tag: sorted(points.items()) for tag, points in found.items()}


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table."""
    cells = [[f"<th>{html.escape(name)}</th>" for name in head]]
    cells += [[f"<td>{cell:,}</td>" if isinstance(cell, int) else f"<td>{html.escape(str(cell))}</td>" for cell in row]
              for row in rows]  # fmt: skip
    lines = ["<tr>" + "".join(row) + "</tr>" for row in cells]
    return "<table>" + "".join(lines) + "</table>"


def drawn(draw: Callable[[Any, Any], None]) -> str:
    """Return a figure as SVG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A report is drawn by matplotlib. Run 'pip install matplotlib tensorboard'.") from error
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    draw(figure, axes)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def curves(series: Series, unit: str) -> str:
    """Draw a line for each series."""

    def draw(figure: Any, axes: Any) -> None:
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
        axes.set(xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        if len(series) > 1:
            axes.legend(fontsize=8, ncols=4)

    return drawn(draw)


def bars(values: dict[str, list[float]], each: str, unit: str) -> str:
    """Draw groups of bars."""

    def draw(figure: Any, axes: Any) -> None:
        width = 0.8 / len(values)
        for k, (name, heights) in enumerate(values.items()):
            left = [place + k * width - 0.4 + width / 2 for place in range(len(heights))]
            axes.bar(left, heights, width, label=name)
        axes.set(xlabel=each, ylabel=unit, xticks=range(len(heights)))
        if len(values) > 1:
            axes.legend(fontsize=8, ncols=len(values), loc="lower center", bbox_to_anchor=(0.5, 1))

    return drawn(draw)


def heat(
    cells: Sequence[Sequence[float]], across: str, down: str, unit: str, names: Sequence[str] = ()
) -> str:  # fmt: skip
    """Draw a heat map with its numbers, if there are not too many; columns may have names."""

    def draw(figure: Any, axes: Any) -> None:
        most = max((value for row in cells for value in row), default=0) or 1
        image = axes.imshow(cells, cmap="Blues", vmin=0, aspect="auto")
        every = 1 + len(cells[0]) // 30
        axes.set(xlabel=across, ylabel=down, xticks=range(0, len(cells[0]), every), yticks=range(len(cells)))
        if len(names) == len(cells[0]):
            axes.set_xticks(range(0, len(names), every), names[::every], rotation=20, ha="right", fontsize=8)
        figure.colorbar(image, label=unit)
        if len(cells) * len(cells[0]) <= 200:
            for i, row in enumerate(cells):
                for j, value in enumerate(row):
                    told = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
                    color = "white" if value > 0.6 * most else "black"
                    axes.text(j, i, told, ha="center", va="center", fontsize=8, color=color)

    return drawn(draw)
