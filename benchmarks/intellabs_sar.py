"""Training steps beside the authors' implementation of SAR, which is for DGL, and beside DGL in one process.

    git clone https://github.com/IntelLabs/SAR DIRECTORY/SAR && git -C DIRECTORY/SAR checkout 5309fed
    pip install --no-deps --target DIRECTORY dgl==1.1.3 ifaddr
    PYTHONPATH=DIRECTORY:DIRECTORY/SAR python benchmarks/intellabs_sar.py --out docs/results

That commit is the last one with which its modes 1, 2 and 3 all run; it is not changed, and runs with current torch and
DGL's release 1.1.3 (which imports scipy, networkx, psutil and requests, too). All have the same graph, with self-loops,
the same parts, initial parameters and loop: three layers, batch normalisation between them, Adam. Their losses show
that they compute the same. Ways take turns, some steps each; the table has medians. Memory and traffic are measured in
other processes, which give tensors back to the system when they are freed. Writes ``intellabs-sar.md``.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.launch import answer, launch, words
from harness.process_memory import RETURN_FREED_MEMORY, resident, settle
from harness.report import processor, write
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops
from tqdm import tqdm

import pyg_sar
from pyg_sar.data.datasets import community_graph
from pyg_sar.data.metis import metis

FEATURES, CLASSES, HEADS = 100, 47, 4
LAYERS = {  # what each layer reads and makes; of attention, what each head makes
    "sage": [(FEATURES, 256), (256, 256), (256, CLASSES)],
    "gat": [(FEATURES, 128), (HEADS * 128, 128), (HEADS * 128, CLASSES)],
}
NAMES = {"sage": "GraphSAGE", "gat": "GAT"}
OURS, THEIRS, DGL = "pyg_sar", "IntelLabs/SAR", "DGL"


class Way(NamedTuple):
    """Who computes it, in which mode of SAR, on how many workers of how many threads."""

    who: str
    mode: int
    workers: int
    threads: int


WAYS = [*(Way(who, mode, 2, 1) for mode in (1, 2, 3) for who in (THEIRS, OURS)), Way(DGL, 1, 1, 2), Way(OURS, 1, 1, 2)]


class Model(Module):
    """Layers of either library with normalisations between them; ``call(conv, x)`` calls one."""

    def __init__(
        self, kind: str, convs: list[Module], norm: Callable[[int], Module], call: Callable[[Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        widths = [width for width, _ in LAYERS[kind][1:]]  # that the next layer reads
        self.convs, self.norms = torch.nn.ModuleList(convs), torch.nn.ModuleList(map(norm, widths))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(self.call(conv, x).flatten(1)).relu()
        x = self.call(self.convs[-1], x)
        return x.mean(1) if x.dim() == 3 else x  # DGL leaves the mean of heads to its user


def our_layers(kind: str) -> list[Module]:
    """Return the layers, with the parameters that all start with."""
    torch.manual_seed(0)
    if kind == "sage":
        return [pyg_sar.nn.SAGEConv(a, b) for a, b in LAYERS[kind]]
    return [pyg_sar.nn.GATConv(a, b, HEADS, concat=b != CLASSES, add_self_loops=False) for a, b in LAYERS[kind]]


def their_layers(kind: str) -> list[Module]:
    """Return DGL's layers with the same parameters; biases are zero."""
    import dgl.nn

    layers: list[Module] = []
    for (a, b), ours in zip(LAYERS[kind], our_layers(kind), strict=True):
        conv = dgl.nn.SAGEConv(a, b, "mean") if kind == "sage" else dgl.nn.GATConv(a, b, HEADS)
        names = {"fc_neigh.weight": "lin_l.weight", "fc_self.weight": "lin_r.weight", "fc.weight": "lin.weight"}
        names |= {"attn_l": "att_src", "attn_r": "att_dst", "fc_self.bias": "lin_l.bias"}
        with torch.no_grad():
            for name, parameter in conv.named_parameters():
                parameter.copy_(ours.get_parameter(names[name])) if name in names else parameter.zero_()
        layers.append(conv)
    return layers


def ours(args: argparse.Namespace) -> None:
    with pyg_sar.process_group():
        data = pyg_sar.load(folder(args), remat=args.mode == 1, one_shot=args.mode == 3)
        model = Model(args.kind, our_layers(args.kind), pyg_sar.nn.BatchNorm, lambda conv, x: conv(x, data.edge_index))
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> Tensor:
            scores = model(data.x)[data.train_mask]
            loss = pyg_sar.global_mean(F.cross_entropy(scores, data.y[data.train_mask], reduction="none"))
            loss.backward()
            pyg_sar.sum_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() / dist.get_world_size()

        with pyg_sar.record_traffic(data.edge_index) as layers:
            step()
        answer({**measure(step, args.steps), "sent": sum(t.forward_sent + t.backward_sent for t in layers)})


def theirs(args: argparse.Namespace) -> None:
    import sar

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["SAR_SOCKET_NAME"] = "lo"
    sar.initialize_comms(rank, size, os.environ["MASTER_ADDR"], "gloo", None, int(os.environ["MASTER_PORT"]))
    sar.patch_dgl()
    part = sar.load_dgl_partition_data(f"{folder(args)}/graph.json", rank, torch.device("cpu"))
    x, y, mask = (sar.suffix_key_lookup(part.node_features, name) for name in ("x", "y", "train_mask"))
    graph = sar.construct_full_graph(part)
    del part
    sar.Config.disable_sr = args.mode == 2
    if args.mode == 3:
        graph = graph.get_full_partition_graph()
    model = Model(args.kind, their_layers(args.kind), sar.DistributedBN1D, lambda conv, x: conv(graph, x))
    sar.sync_params(model)
    sent = count_sent()
    step = dgl_step(model, x, y, mask.bool(), args.labelled, lambda: sar.gather_grads(model))
    step()
    answer({"sent": sum(sent), **measure(step, args.steps)})
    sys.stdout.flush()
    os._exit(0)  # its threads would keep the process


def dgl_alone(args: argparse.Namespace) -> None:
    import dgl

    data = generate(args)
    graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    graph.create_formats_()
    model = Model(args.kind, their_layers(args.kind), torch.nn.BatchNorm1d, lambda conv, x: conv(graph, x))
    step = dgl_step(model, data.x, data.y, data.train_mask, args.labelled, lambda: None)
    step()
    answer({"sent": 0, **measure(step, args.steps)})


def dgl_step(model: Module, x: Tensor, y: Tensor, mask: Tensor, labelled: int, summed: Callable[[], None]) -> Any:
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> Tensor:
        loss = F.cross_entropy(model(x)[mask], y[mask], reduction="sum") / labelled
        loss.backward()
        summed()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def count_sent() -> list[int]:
    """Return a list to which the bytes of each tensor are added that this process sends."""
    sent, send = [], dist.isend

    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return send(tensor, *args, **kwargs)

    dist.isend = isend
    return sent


def measure(step: Callable[[], Tensor], steps: int) -> dict[str, Any]:
    """Take steps after a first one; return seconds and the share of the loss of each, and the peak of memory."""
    before, seconds, losses = settle(), [], []
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - start)
    return {"peak": resident("VmHWM") - before, "seconds": seconds, "losses": losses}


def folder(args: argparse.Namespace) -> str:
    return f"{args.folder}/{args.who.replace('/', '-')}-{os.environ['WORLD_SIZE']}"


def generate(args: argparse.Namespace) -> Data:
    """Return the graph, with self-loops."""
    data = community_graph(args.nodes, args.edges, FEATURES, CLASSES)
    edge_index, _ = add_self_loops(data.edge_index)
    return Data(x=data.x, y=data.y, train_mask=data.train_mask, edge_index=edge_index)


def prepare(args: argparse.Namespace, scratch: str) -> int:
    """Write the parts of the graph for each library; return how many labelled nodes there are."""
    import dgl

    data = generate(args)
    part = metis(data.edge_index, args.nodes, 2)
    pyg_sar.partition(data, 1, f"{scratch}/{OURS}-1")
    pyg_sar.partition(data, 2, f"{scratch}/{OURS}-2", method=part)
    graph = dgl.graph(tuple(data.edge_index), num_nodes=data.num_nodes)
    graph.ndata.update(x=data.x, y=data.y, train_mask=data.train_mask.byte())
    dgl.distributed.partition.metis_partition_assignment = lambda *args, **kwargs: part.long()  # not one of its own
    dgl.distributed.partition_graph(graph, "graph", 2, f"{scratch}/{THEIRS.replace('/', '-')}-2", num_hops=1)
    return int(data.train_mask.sum())


def run(args: argparse.Namespace, kind: str, way: Way, scratch: str, labelled: int, **settings: str) -> dict[str, Any]:
    """Return seconds and losses of the steps, the largest worker's memory, and MiB that a worker sends."""
    options = words(who=way.who, mode=way.mode, kind=kind, folder=scratch, labelled=labelled)
    options += words(nodes=args.nodes, edges=args.edges, steps=args.steps)
    answers = launch(__file__, way.workers, options, way.threads, **settings)
    return {
        "seconds": [max(times) for times in zip(*(a["seconds"] for a in answers), strict=True)],
        "losses": [sum(shares) for shares in zip(*(a["losses"] for a in answers), strict=True)],
        "peak": max(a["peak"] for a in answers),
        "sent": statistics.mean(a["sent"] for a in answers) / 2**20,
    }


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(args.kinds) * len(WAYS) * (args.rounds + 1)) as bar:
        labelled, rows = prepare(args, scratch), []
        for kind in args.kinds:
            found: dict[Way, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(args.rounds):
                for way in WAYS:
                    bar.set_description(f"{kind}, {way.who}, mode {way.mode}, {way.workers} workers")
                    found[way].append(run(args, kind, way, scratch, labelled))
                    bar.update()
            for way in WAYS:
                bar.set_description(f"{kind}, {way.who}, mode {way.mode}, {way.workers} workers, memory")
                found[way].append(run(args, kind, way, scratch, labelled, **RETURN_FREED_MEMORY))
                bar.update()
            rows += table(kind, found)
            text = write(args.out, "intellabs-sar.md", [heading(args), "", *TITLE, *rows])
    print(text)


COLUMNS = ["model", "library", "mode", "workers x threads", "step s (min to max)", "times pyg_sar", "peak MiB"]
COLUMNS += ["times pyg_sar", "MiB sent by a worker", "loss differs by"]
TITLE = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]


def table(kind: str, found: dict[Way, list[dict[str, Any]]]) -> list[str]:
    rows = []
    for way, (*timed, last) in found.items():
        *timed_ours, last_ours = found[way._replace(who=OURS)]
        seconds, seconds_ours = ([s for r in runs for s in r["seconds"]] for runs in (timed, timed_ours))
        step = statistics.median(seconds)
        pairs = [(a, b) for r in [*timed, last] for a, b in zip(r["losses"], found[WAYS[1]][0]["losses"], strict=True)]
        cells = [NAMES[kind], way.who, str(way.mode) if way.workers > 1 else "", f"{way.workers} x {way.threads}"]
        cells += [f"{step:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"]
        cells += [f"{step / statistics.median(seconds_ours):.2f}", f"{last['peak']:.0f}"]
        cells += [f"{last['peak'] / last_ours['peak']:.2f}", f"{last['sent']:.1f}"]
        rows.append(f"| {' | '.join([*cells, f'{max(abs(a - b) / b for a, b in pairs):.0e}'])} |")
    return rows


def heading(args: argparse.Namespace) -> str:
    return (
        f"Training steps of 3-layer models (GraphSAGE: 256 hidden; GAT: {HEADS} heads of 128) with batch normalisation "
        "and Adam beside IntelLabs/SAR (commit 5309fed, unchanged) and DGL 1.1.3; generated graph of "
        f"{args.nodes:,} nodes, {args.edges:,} edges and self-loops, {FEATURES} features, {CLASSES} classes, the same "
        f"parts by METIS; float32; {processor()}, {os.cpu_count()} cores, torch {torch.__version__}. *Step*: median of "
        f"{args.rounds} alternating runs of {args.steps} steps after a first one, of the slower worker. *Peak*: "
        "resident memory above the loaded state, of the larger worker; *times pyg_sar*: in the same mode. *Loss*: "
        "largest relative difference in any step from that of `pyg_sar` in mode 1 on two workers. Made by "
        "`benchmarks/intellabs_sar.py`."
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="+", choices=list(LAYERS), default=list(LAYERS))
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--edges", type=int, default=2_500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--out", default="docs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name, kind in {"who": str, "mode": int, "kind": str, "folder": str, "labelled": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    if arguments.worker:
        {OURS: ours, THEIRS: theirs, DGL: dgl_alone}[arguments.who](arguments)
    else:
        main(arguments)
