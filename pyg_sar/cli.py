r"""The command line: ``pyg-sar partition``, ``pyg-sar info``, ``pyg-sar plan`` and ``pyg-sar report``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

WORKERS = [1, 2, 4, 8, 16]  # that a plan is of, if no others are asked for


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2, with one line on stderr, if it cannot be done."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (EOFError, ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        told = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "can't allocate memory" in told:  # torch's allocator
            told = f"not enough memory: {told}"
        elif isinstance(error, RuntimeError):  # which is a bug
            raise
        print(f"pyg-sar: error: {told}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pyg-sar", description="Prepare graphs for pyg_sar.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    make = commands.add_parser("partition", help="cut a graph into parts, one for each worker")
    make.set_defaults(command=_partition)
    add = make.add_argument
    add("dataset", help="Planetoid/Cora, ogbn-arxiv, Community, Community/NODES/EDGES, FILE.npz, ...")
    add("--root", default="data", help="where data sets are kept (default: data)")
    add("--num-parts", type=int, required=True, help="number of parts")
    add("--out", required=True, help="folder to write")
    how = make.add_mutually_exclusive_group()
    how.add_argument("--method", default="metis", help="metis (default), fennel, random or contiguous")
    how.add_argument("--assignment", help="file .npy with the part of each node, instead of a method")
    add("--order", default="locality", help="order of the rows of a part: locality (default), fennel or id")
    add("--to-undirected", action="store_true", help="add reverse edges, merge duplicates, add up their weights")
    add("--self-loops", action="store_true", help="add a self-loop where there is none")
    add("--gcn-norm", action="store_true", help="add self-loops and store GCN's edge_weight")
    add("--features", choices=["bfloat16", "float16", "float32"], help="type to store the node features x in")
    add("--split", type=int, metavar="K", help="keep one of several splits, whose masks have a column for each")
    add("--level", action="append", default=[], metavar="NAME=LEVEL", help="what an attribute is, if it does not tell")
    add("--seed", type=int, default=0, help="seed of the method (default: 0)")
    add("--overwrite", action="store_true", help="replace the partition that OUT holds")
    show = commands.add_parser("info", help="describe a partition folder, or this machine")
    show.set_defaults(command=_info)
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", nargs="?", help="a folder made by 'pyg-sar partition'")
    what.add_argument("--env", action="store_true", help="versions, kernels and devices, for reports of bugs")
    page = commands.add_parser("report", help="make an HTML page of a partition or of a run")
    page.set_defaults(command=_report)
    page.add_argument("folder", help="a folder made by 'pyg-sar partition', or by RunLog (--log-dir of the examples)")
    page.add_argument("--out", default="report.html", help="file to write (default: report.html)")
    tell = commands.add_parser("plan", help="tell memory and traffic of training, before it is tried")
    tell.set_defaults(command=_plan)
    add = tell.add_argument
    about = "a folder made by 'pyg-sar partition', several with --stages, or the counts of a graph:"
    add("folders", nargs="*", metavar="folder", help=about)
    add("--nodes", type=number, help="number of nodes")
    add("--edges", type=number, help="number of edges")
    add("--workers", type=positive, nargs="+", help="numbers of workers (default: 1 2 4 8 16)")
    add("--boundary", type=amount, help="rows read for each local row (default: as in a random partition, the worst)")
    add("--features", type=positive, help="features of a node (default: those of the folder)")
    add("--classes", type=positive, help="number of classes (default: that of the folder)")
    add("--relations", type=natural, default=0, help="number of edge types, for rgcn")
    add(
        "--model",
        choices=["sage", "gcn", "gat", "rgcn", "gcn2", "resgcn"],
        default="sage",
        help="layers, and norms between",
    )
    add("--layers", type=positive, default=3, help="number of layers (default: 3)")
    add("--hidden", type=positive, default=256, help="hidden features; of each head for gat (default: 256)")
    add("--heads", type=positive, default=4, help="heads of gat (default: 4)")
    add("--prefetch", type=natural, default=1, help="fetches under way (default: 1)")
    add("--budget", type=amount, help="GiB for each worker: what fits, with the least traffic")
    add("--offload", action="store_true", help="rows at home: the fewest chunks that fit --budget")
    add("--stages", type=positive, nargs="+", help="a pipeline of layers: numbers of stages, each of a folder's parts")
    add("--chunks", type=positive, default=1, help="chunks of a pipeline (default: 1, exact)")
    return parser


def positive(text: str) -> int:
    """Return a number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more (got {text})")
    return int(text)


def natural(text: str) -> int:
    """Return a number of 0 or more."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more (got {text})")
    return int(text)


def amount(text: str) -> float:
    """Return a number of 0 or more, which need not be whole."""
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or more (got {text})")
    return float(text)


def number(text: str) -> int:
    """Return a number of 1 or more, which may be written as 1e9."""
    if not 1 <= float(text) < 2**48:
        raise argparse.ArgumentTypeError(f"expected 1 or more, and less than 2^48 (got {text})")
    return int(float(text))


def _partition(args: argparse.Namespace) -> None:
    import torch

    from pyg_sar.data.datasets import dataset
    from pyg_sar.data.partition import partition, prepare

    method = _assignment(args.assignment) if args.assignment else args.method
    data = prepare(
        dataset(args.dataset, args.root),
        to_undirected=args.to_undirected,
        self_loops=args.self_loops,
        gcn_norm=args.gcn_norm,
        features=getattr(torch, args.features) if args.features else None,
        split=args.split,
    )
    report = partition(
        data,
        args.num_parts,
        args.out,
        levels=dict(_level(said) for said in args.level),
        method=method,
        order=args.order,
        seed=args.seed,
        overwrite=args.overwrite,
        progress=sys.stderr.isatty(),
    )
    print(f"{args.out}:\n{table(report)}")


def _assignment(file: str) -> Any:
    """Return the part of each node that a file holds."""
    import numpy as np
    import torch

    try:
        part = np.load(file, allow_pickle=False)
        if not isinstance(part, np.ndarray):
            raise ValueError(f"it holds the arrays {[*part]}")
        return torch.from_numpy(part)
    except (EOFError, TypeError, ValueError) as error:
        raise ValueError(f"'{file}' could not be read as an array of integers (.npy): {error}.") from error


def _level(said: str) -> tuple[str, str]:
    name, equals, level = said.rpartition("=")
    if not equals:
        raise ValueError(f"Expected --level NAME=LEVEL, got '{said}'.")
    return name, level


def _report(args: argparse.Namespace) -> None:
    from pyg_sar.report import report

    print(report(args.folder, args.out))


def _environment() -> str:
    """Return what a report of a bug must tell, a line each."""
    import os
    import platform
    from importlib import metadata

    import torch

    from pyg_sar import ops

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    others = [
        "torch_geometric",
        "numpy",
        "pymetis",
        "safetensors",
        "triton",
        "ogb",
        "pyg-lib",
        "torch-scatter",
    ]
    gpus = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    told = {
        "pyg_sar": version("pyg_sar"),
        "compiled kernels": "yes" if ops.KERNELS else "no",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,  # which tells a build for CUDA, as its package's metadata need not
        **{package: version(package) for package in others},
        "Python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "GPUs": ", ".join(gpus) or "none",
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("PYG_SAR_")},
    }
    return "\n".join(f"{name + ':':<20} {value}" for name, value in told.items())


def _info(args: argparse.Namespace) -> None:
    if args.env:
        return print(_environment())
    from pyg_sar.data.store import read_meta, said_by

    meta = read_meta(args.folder)
    with said_by(meta.file):
        print(f"{args.folder}: partition {meta['identity']}\n{table(meta)}")
        for level, attributes in zip(("nodes", "edges", "graph"), meta["attributes"], strict=True):
            print(f"\nattributes of {level}: {len(attributes)}")
            for name, value in attributes.items():
                print(f"  {name:<20} {value}")


def _plan(args: argparse.Namespace) -> None:
    _check_plan(args)
    args.folder, args.workers = (args.folders or [None])[0], args.workers or WORKERS
    shares = _shares(args)
    if not args.features or not args.classes:
        raise ValueError("Expected --features and --classes: the folder does not tell both.")
    if (args.model in ("gcn2", "resgcn") and not args.stages) or (args.model == "rgcn" and args.stages):
        raise ValueError(f"Expected --stages with --model gcn2 and resgcn, and without for rgcn (got {args.model}).")
    if args.model == "rgcn" and not args.relations:
        raise ValueError("Expected --relations with --model rgcn: the folder does not tell of any.")
    if args.stages:
        return _stages(args)
    if args.offload:
        return _chunks(args, shares)
    columns = ["workers", "mode", "loaded", "step", "together", "received"]
    print("".join(f"{column:>10}" for column in columns) + "   (GiB, of the largest worker; in a step)")
    planned = []
    for share in shares:
        planned.append(_needs(args, share))
        for need in planned[-1]:
            sizes = (need.loaded, need.step, need.total, need.received)
            print(f"{need.workers:>10}{need.mode:>10}" + "".join(f"{size / 2**30:>10.3f}" for size in sizes))
    if args.budget is not None:
        _fit(args, planned)


def _check_plan(args: argparse.Namespace) -> None:
    """Raise where an option would do nothing, or finds nothing."""
    told = [name for name in ("nodes", "edges", "workers", "boundary") if getattr(args, name) is not None]
    if args.budget is not None and not args.offload:
        told = [name for name in told if name != "boundary"]  # that of more workers than the folder has parts
    workers, stages = args.workers or WORKERS, args.stages or []
    idle = [k for k in stages if not args.folders and all(n % k for n in workers)]
    for wrong, expected in (
        (len(args.folders) > 1 and not stages, f"one folder without --stages (got {len(args.folders)})"),
        (args.folders and told, f"a folder without --{', --'.join(told)}: it tells its own"),
        (stages and (args.offload or args.budget is not None), "--stages without --offload and --budget"),
        (idle, f"a multiple of --stages {' '.join(map(str, idle))} in --workers (got {' '.join(map(str, workers))})"),
        (args.chunks > 1 and not stages, "--chunks with --stages"),
        (args.budget == 0, "a --budget of more than 0 GiB (got 0)"),
    ):
        if wrong:
            raise ValueError(f"Expected {expected}.")


def _needs(args: argparse.Namespace, share: Any) -> list[Any]:
    """Return what every mode needs."""
    from pyg_sar.plan_models import Stack
    from pyg_sar.planner import plan

    options = {"prefetch": args.prefetch, "num_relations": args.relations}
    return plan(lambda: Stack(args), share, args.features, **options)


def _chunks(args: argparse.Namespace, shares: list[Any]) -> None:
    """Tell into how many chunks rows at home are cut, and what a step takes."""
    from pyg_sar.offload.counts import Counts, counts_of
    from pyg_sar.offload.plan import choose
    from pyg_sar.plan_models import Stack
    from pyg_sar.planner import chunk_counts

    if args.budget is None or args.relations:
        raise ValueError("Expected --offload with a --budget, and without --relations and --model rgcn.")
    graphs = _graphs(args.folder) if args.folder else []
    columns = ["workers", "chunks", "pieces of", "loaded", "step", "together", "at home", "moved"]
    print("".join(f"{column:>10}" for column in columns) + "   (rows; GiB, of the largest worker; in a step)")

    def largest(chunks: int) -> Counts:
        every = [counts_of(graph, chunks, graph.num_src) for graph in graphs]
        return Counts(*map(max, zip(*every, strict=True)))

    for share in shares:
        counts = largest if graphs else partial(chunk_counts, share)
        need = choose(lambda: Stack(args), counts, args.features, args.budget * 2**30)
        workers = len(share.rows_in) + 1
        sizes = (need.loaded, need.step, need.total, need.home, need.moved)
        told = f"{workers:>10}{need.chunks:>10}{need.slots or 'all':>10}"
        print(told + "".join(f"{size / 2**30:>10.3f}" for size in sizes))


def _stages(args: argparse.Namespace) -> None:
    """Tell what pipelines of so many stages move, and which of them moves least."""
    from pyg_sar.pipeline_planner import plan_pipeline
    from pyg_sar.plan_models import blocks
    from pyg_sar.planner import from_counts, from_partition

    columns = ["stages", "workers", "loaded", "step", "together", "between", "within", "parameters", "waiting"]
    print("".join(f"{column:>11}" for column in columns))
    needs = []
    for stages in args.stages:
        if args.folders:
            each = [from_partition(folder) for folder in args.folders]
        else:
            counts = [n // stages for n in args.workers if n % stages == 0]
            each = [[from_counts(args.nodes, args.edges, n, args.boundary)] * n for n in counts]
        for shares in each:
            need = plan_pipeline(lambda: blocks(args), shares, args.features, stages, chunks=args.chunks)
            sizes = (*max(need.each, key=sum), need.total, need.between, need.within, need.parameters)
            told = f"{stages:>11}{need.workers:>11}" + "".join(f"{size / 2**30:>11.3f}" for size in sizes)
            print(f"{told}{need.waiting:>11.1%}")
            needs.append(need)
    print("\nGiB: memory of the largest worker; what all of them move in an epoch")
    for total in sorted({need.stages * need.workers for need in needs}):
        least = min((n for n in needs if n.stages * n.workers == total), key=lambda need: need.moved)
        print(f"{total} workers: {least.stages} stages of {least.workers} move least")


def _graphs(folder: str) -> list[Any]:
    """Return the graphs of all parts of a partition."""
    from pyg_sar.data.load import assemble
    from pyg_sar.data.store import read_meta, read_part

    shards = [read_part(folder, p) for p in range(read_meta(folder)["num_parts"])]
    if shards[0].typed:
        raise ValueError("Expected a graph with one type of nodes and edges: others stay in memory.")
    return [assemble(rows.topology, p) for p, shard in enumerate(shards) for rows in shard.edges.values()]


def _shares(args: argparse.Namespace) -> list[Any]:
    """Return the share of the largest worker, for each number of workers."""
    from pyg_sar.data.store import read_meta, said_by
    from pyg_sar.planner import from_counts, from_partition, largest

    if not args.folder:
        if not (args.nodes and args.edges):
            raise ValueError("Expected a folder, or --nodes and --edges of a graph.")
        return [from_counts(args.nodes, args.edges, n, args.boundary) for n in args.workers]
    meta = read_meta(args.folder)
    with said_by(meta.file):
        _tell(args, meta)
        return [largest(from_partition(args.folder))]


def _tell(args: argparse.Namespace, meta: dict[str, Any]) -> None:
    """Take from ``meta.json`` what the options leave out."""
    if "node_types" in meta:
        raise ValueError(
            f"Expected a folder of a graph without types, of which plans tell (got {len(meta['node_types'])} types of "
            f"nodes in '{args.folder}'). Give counts instead: --nodes and --edges."
        )
    nodes, _, graph = meta["attributes"]
    if "x" in nodes and nodes["x"][0] != "float32":
        print(f"Features are counted as float32; the folder has them as {nodes['x'][0]}.")
    args.features = args.features or (math.prod(nodes["x"][1][1:]) if "x" in nodes else None)
    classes = graph.get("num_classes")
    args.classes = args.classes or (classes if isinstance(classes, int) else None)
    args.relations = args.relations or (graph.get("num_relations", 0) if args.model == "rgcn" else 0)
    args.nodes, args.edges = meta["num_nodes"], meta["num_edges"]


def _fit(args: argparse.Namespace, planned: list[Any]) -> None:
    """Find the fewest workers and the mode that fit the budget; beyond those asked for, double their number."""
    from pyg_sar.planner import choose, from_counts

    workers, budget = 0, f"{args.budget:g} GiB"
    planned.sort(key=lambda needs: needs[0].workers)
    while planned or workers < 1024:
        if planned:
            needs = planned.pop(0)
        else:
            needs = _needs(args, from_counts(args.nodes, args.edges, 2 * workers, args.boundary))
        workers, found = needs[0].workers, choose(needs, args.budget * 2**30)
        print(f"{workers} workers: {'nothing' if found is None else f'mode {found.mode}'} fits {budget}")
        if found is not None:
            return


def table(report: dict[str, Any]) -> str:
    """Return a report of :func:`~pyg_sar.data.partition.partition` in readable form."""
    columns = {
        "part": range(report["num_parts"]),
        "nodes": report["nodes"],
        "in-edges": report["edges"],
        "labelled": report["labelled"],
        "rows in": [sum(row) for row in report["boundary"]],
        "rows out": [sum(column) for column in zip(*report["boundary"], strict=True)],
        "bytes": report["bytes"],
    }
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    balance = ", ".join(f"{name} {value:.2f}" for name, value in report["balance"].items())
    lines = ["".join(f"{cell:>14}" for cell in row) for row in rows]
    lines += [
        "",
        f"{report['num_nodes']} nodes and {report['num_edges']} edges in {report['num_parts']} "
        f"parts by method '{report['method']}', order '{report['order']}', seed {report['seed']}",
        f"balance (largest part over mean): {balance}",
        f"edges cut: {report['cut']} ({report['cut_fraction']:.1%})",
        f"boundary rows: {report['boundary_rows']}, from part (column) to part (row)",
    ]
    lines += ["".join(f"{cell:>10}" for cell in row) for row in report["boundary"]]
    lines += [f"lists that become rows of each part: {', '.join(report['lists'])}"] * bool(report["lists"])
    return "\n".join(lines)
