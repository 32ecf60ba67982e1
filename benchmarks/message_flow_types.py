"""Time of an epoch with few labelled papers of a heterogeneous graph, on what they depend on and on the whole graph.

    python benchmarks/message_flow_types.py --out docs/results

The graph and the models of ``offload_types.py``, on two workers. Before it trains, a run on the message-flow graph
checks that the outputs of labelled papers are those of the whole graph. Runs take turns; an epoch takes as long as its
slowest worker, and the first of a run does not count. Writes ``message-flow-types.md``.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.launch import answer, asked, launch, words
from harness.report import processor, write
from offload_types import CLASSES, LAYERS, Net, graph
from tqdm import tqdm

import pyg_sar

WORKERS, WAYS = 2, ("flow", "whole")


def outputs(model: Net, x: dict[str, torch.Tensor], edge_indices: list[Any]) -> torch.Tensor:
    """Return the scores of papers, with other edges in each layer."""
    x = {t: model.lins[t](rows).relu() for t, rows in x.items()}
    for conv, norms, edge_index in zip(model.convs, model.norms, edge_indices, strict=True):
        x = {t: norms[t](rows).relu() for t, rows in conv(x, edge_index).items()}
    return model.lin(x["paper"])


def worker(args: argparse.Namespace) -> None:
    """Train, and answer what was found."""
    with pyg_sar.process_group():
        data = pyg_sar.load(args.folder)
        paper, channels = data["paper"], data["paper"].x.size(1)
        torch.manual_seed(1)
        model = Net(args.kind, channels, args.hidden, data.edge_types)
        pyg_sar.nn.convert(model)
        optimizer = torch.optim.Adam(model.parameters())
        whole = [data.edge_index_dict] * LAYERS
        start = time.perf_counter()
        flow = pyg_sar.message_flow_graphs(data.edge_index_dict, {"paper": paper.train_mask}, LAYERS)
        made = time.perf_counter() - start
        x = {t: data[t].x[rows] for t, rows in flow.node_rows.items()}
        model.eval()
        with torch.no_grad():
            expected = outputs(model, data.x_dict, whole)[paper.train_mask]
            torch.testing.assert_close(outputs(model, x, flow.edge_indices), expected, rtol=1e-4, atol=1e-4)
        model.train()
        seconds, received = [], 0
        for _ in range(args.epochs):
            start = time.perf_counter()
            with pyg_sar.record_traffic(next(iter(data.edge_index_dict.values()))) as traffic:
                optimizer.zero_grad()
                given = (x, flow.edge_indices) if args.way == "flow" else (data.x_dict, whole)
                out = outputs(model, *given)
                out = out if args.way == "flow" else out[paper.train_mask]
                losses = F.cross_entropy(out, paper.y[paper.train_mask], reduction="none")
                pyg_sar.global_mean(losses).backward()
                pyg_sar.sum_gradients(model)
                optimizer.step()
            seconds.append(time.perf_counter() - start)
            received = sum(t.forward_received + t.backward_received for t in traffic)
        rows = [len(rows) for rows in flow.node_rows.values()], [len(rows) for rows in data.x_dict.values()]
        answer({"seconds": seconds[1:], "made": made, "received": received / 2**20, "rows": [*map(sum, rows)]})


def main(args: argparse.Namespace) -> None:
    settings = [(kind, share) for kind in args.models for share in args.labelled]
    found: dict[Any, list[list[dict[str, Any]]]] = {(*it, way): [] for it in settings for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        for share in args.labelled:
            data = graph(args.scale, args.channels)
            drawn = torch.rand(data["paper"].num_nodes, generator=torch.Generator().manual_seed(0))
            data["paper"].train_mask = drawn < share
            pyg_sar.partition(data, WORKERS, Path(scratch) / str(share))
        for _ in tqdm(range(args.rounds)):
            for kind, share, way in found:
                options = {"kind": kind, "hidden": args.hidden, "way": way, "epochs": args.epochs}
                folder = Path(scratch) / str(share)
                found[kind, share, way].append(launch(__file__, WORKERS, words(folder=folder, **options)))
    lines = [
        f"A random graph in the proportions of ogbn-mag, {args.scale} times smaller, {args.channels} features, "
        f"{CLASSES} classes of papers, of which a share has labels; {LAYERS} layers of {args.hidden} (GraphSAGE for "
        f"each type of edges, HGT with 4 heads), batch normalisation, Adam, single precision, {WORKERS} workers of 1 "
        f"thread, METIS parts. *Epoch*: seconds, medians of {args.rounds} alternating runs of {args.epochs} epochs, "
        f"the first left out; *making it*: the message-flow graph, once. {processor()}, torch {torch.__version__}. "
        "Made by `benchmarks/message_flow_types.py`.",
        "",
        "| model | papers with labels | rows read, of all | epoch, message-flow graph | epoch, whole graph | "
        "whole / flow | making it | MiB received | of the whole graph's |",
        "|" + "---|" * 9,
    ]
    for kind, share in settings:
        median = {way: middle(found[kind, share, way]) for way in WAYS}
        flow, whole = (median[way] for way in WAYS)
        rows = [sum(n) for n in zip(*(rank["rows"] for rank in found[kind, share, "flow"][0]), strict=True)]
        lines.append(
            f"| {kind} | {share:.0%} | {rows[0] / rows[1]:.0%} | {flow['seconds']:.2f} | {whole['seconds']:.2f} | "
            f"{whole['seconds'] / flow['seconds']:.2f} | {flow['made']:.2f} | {flow['received']:.1f} | "
            f"{flow['received'] / whole['received']:.2f} |"
        )
    print(write(args.out, "message-flow-types.md", lines))


def middle(runs: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Return medians over runs of what the slowest worker took, and of what a worker received on average."""
    epochs = [max(one) for ranks in runs for one in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        "seconds": statistics.median(epochs),
        "made": statistics.median(max(rank["made"] for rank in ranks) for ranks in runs),
        "received": statistics.median(statistics.mean(rank["received"] for rank in ranks) for ranks in runs),
    }


if __name__ == "__main__":
    if told := asked(folder=str, kind=str, hidden=int, way=str, epochs=int):
        worker(told)
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--models", nargs="+", default=["sage", "hgt"])
        parser.add_argument("--labelled", nargs="+", type=float, default=[0.01, 0.1, 1.0], help="shares of the papers")
        parser.add_argument("--scale", type=int, default=20)
        parser.add_argument("--channels", type=int, default=128)
        parser.add_argument("--hidden", type=int, default=128)
        parser.add_argument("--epochs", type=int, default=4, help="of each run; the first does not count")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--out", default="docs/results")
        main(parser.parse_args())
