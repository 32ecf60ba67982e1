r"""The command line: ``pyg-sar partition`` and ``pyg-sar info``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 2, with one line on stderr, if it cannot be done."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (EOFError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"pyg-sar: error: {' '.join(str(error).split())}", file=sys.stderr)
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
    add("--method", default="metis", help="metis (default), fennel, random or contiguous")
    add("--assignment", help="file .npy with the part of each node, instead of a method")
    add("--order", default="locality", help="order of the rows of a part: locality (default), or id")
    add("--to-undirected", action="store_true", help="add reverse edges, merge duplicates")
    add("--self-loops", action="store_true", help="add a self-loop where there is none")
    add("--gcn-norm", action="store_true", help="add self-loops and store GCN's edge_weight")
    add("--features", choices=["bfloat16", "float16", "float32"], help="type to store the node features x in")
    add("--seed", type=int, default=0, help="seed of the method (default: 0)")
    add("--overwrite", action="store_true", help="replace the partition that OUT holds")
    show = commands.add_parser("info", help="describe a partition folder")
    show.set_defaults(command=_info)
    show.add_argument("folder", help="a folder made by 'pyg-sar partition'")
    return parser


def _partition(args: argparse.Namespace) -> None:
    import numpy as np
    import torch

    from pyg_sar.distributed.datasets import dataset
    from pyg_sar.distributed.partition import partition, prepare

    method = args.method
    if args.assignment:
        method = torch.from_numpy(np.load(args.assignment, allow_pickle=False))
    data = prepare(
        dataset(args.dataset, args.root),
        to_undirected=args.to_undirected,
        self_loops=args.self_loops,
        gcn_norm=args.gcn_norm,
        features=getattr(torch, args.features) if args.features else None,
    )
    report = partition(
        data,
        args.num_parts,
        args.out,
        method=method,
        order=args.order,
        seed=args.seed,
        overwrite=args.overwrite,
        progress=sys.stderr.isatty(),
    )
    print(f"{args.out}:\n{table(report)}")


def _info(args: argparse.Namespace) -> None:
    from pyg_sar.distributed.store import read_meta

    meta = read_meta(args.folder)
    print(f"{args.folder}: partition {meta['identity']}\n{table(meta)}")
    for level, attributes in zip(("nodes", "edges", "graph"), meta["attributes"], strict=True):
        print(f"\nattributes of {level}: {len(attributes)}")
        for name, value in attributes.items():
            print(f"  {name:<20} {value}")


def table(report: dict[str, Any]) -> str:
    """Return a report of :func:`~pyg_sar.distributed.partition.partition` in readable form."""
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
    order = report.get("order", "id")  # folders made before there was a choice do not say
    lines = ["".join(f"{cell:>14}" for cell in row) for row in rows]
    lines += [
        "",
        f"{report['num_nodes']} nodes and {report['num_edges']} edges in {report['num_parts']} "
        f"parts by method '{report['method']}', order '{order}', seed {report['seed']}",
        f"balance (largest part over mean): {balance}",
        f"edges cut: {report['cut']} ({report['cut_fraction']:.1%})",
        f"boundary rows: {report['boundary_rows']}, from part (column) to part (row)",
    ]
    lines += ["".join(f"{cell:>10}" for cell in row) for row in report["boundary"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
