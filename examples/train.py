"""Train GraphSAGE or GAT on the whole graph.

    pyg-sar partition Community --num-parts 2 --out runs/community-2
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py runs/community-2 --model gat
    pyg-sar partition Community --num-parts 1 --out runs/community-1
    python examples/train.py runs/community-1 --offload /scratch --budget 1GiB    # rows in files

With ``--checkpoint runs/checkpoints --resume`` it goes on where it ended, also by ``--max-restarts 3`` of the launcher.

Lines marked with ``# sar`` are what a script for one process would not have.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from models import GNN
from safetensors.torch import save_file

import pyg_sar  # sar
from pyg_sar.run_log import peak

parser = argparse.ArgumentParser()
parser.add_argument("data", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--model", choices=["sage", "gat"], default="sage")
parser.add_argument("--hidden", type=int, help="default: 256 for sage, 128 (a head) for gat")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--attention-dropout", type=float, default=0.0)
parser.add_argument("--mode", type=int, choices=[1, 2, 3], default=1, help="1 rematerialise, 2 keep, 3 one-shot")
parser.add_argument("--prefetch", type=int, default=1)
parser.add_argument("--offload", help="keep rows in host memory ('memory') or in files of this folder")
parser.add_argument("--budget", default="2GiB", help="with --offload: what a step may take beside data and rows")
parser.add_argument("--device", default="cpu")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoint", help="save the run to this folder, which all workers see")
parser.add_argument("--every", type=int, default=1, help="epochs between two checkpoints")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
parser.add_argument("--save", help="write the trained weights to this safetensors file")


def train(model: torch.nn.Module, data: object, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    losses = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
    loss = pyg_sar.global_mean(losses)  # sar: over the labelled nodes of all workers
    loss.backward()
    pyg_sar.sum_gradients(model)  # sar
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: object) -> list[float]:
    model.eval()
    pred = model(data.x, data.edge_index).argmax(-1)
    return [pyg_sar.accuracy(pred, data.y, m) for m in (data.train_mask, data.val_mask, data.test_mask)]  # sar


def main(args: argparse.Namespace, rank: int) -> list[float]:
    """Train, and return the seconds of every epoch."""
    torch.manual_seed(args.seed)
    mode = {"remat": args.mode == 1, "one_shot": args.mode == 3}
    data = pyg_sar.load(args.data, args.device, **mode, prefetch=args.prefetch)  # sar
    hidden = args.hidden or {"sage": 256, "gat": 128}[args.model]
    model = GNN(
        pyg_sar.nn, args.model, data.x.size(1), hidden, data.num_classes, args.heads, args.dropout,  # sar: pyg_sar.nn
        args.attention_dropout,
    ).to(args.device)  # fmt: skip
    pyg_sar.broadcast_parameters(model)  # sar
    torch.manual_seed(args.seed + rank)  # sar: or all workers drop the same features
    if args.offload:
        home = None if args.offload == "memory" else args.offload
        data = pyg_sar.offload(data, args.budget, model, home=home)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    saves = None
    if args.checkpoint:
        saves = pyg_sar.Checkpoints(args.checkpoint, args.every, model=model, optimizer=optimizer, data=data)  # sar
    first = 1 + saves.restore() if saves and args.resume else 1
    if first > args.epochs and rank == 0:
        print(f"All {args.epochs} epochs are done already.")

    loaded = peak(torch.device(args.device))
    times, log = [], pyg_sar.RunLog(args.log_dir, data)  # sar: prints on rank 0
    for epoch in range(first, args.epochs + 1):
        start = time.perf_counter()
        with pyg_sar.record_traffic(data.edge_index) as layers:
            loss = train(model, data, optimizer)
        times.append(time.perf_counter() - start)
        accs = test(model, data)
        log(Epoch=epoch, Loss=loss, Train=accs[0], Val=accs[1], Test=accs[2])
        if saves and saves.step(epoch):
            break  # SIGTERM: everything is saved
    if times:  # or nothing was left to be trained
        report(args.model, accs[2], times, loaded, layers, rank, data.edge_index)
    if rank == 0 and args.save:
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, args.save)
    return times


def report(
    name: str, accuracy: float, times: list[float], loaded: float, layers: list, rank: int, edge_index: torch.Tensor
) -> None:
    median = sorted(times)[len(times) // 2]
    lines = [f"peak memory {peak(edge_index.device):.0f} MiB, of which {loaded:.0f} MiB before training"]
    held = {kind: size / 2**20 for kind, size in edge_index.graph.memory().items() if size > 0}
    lines.append("topology: " + ", ".join(f"{kind} {size:.2f}" for kind, size in held.items()) + " MiB")
    for k, t in enumerate(layers):
        counts = (t.forward_sent, t.forward_received, t.backward_sent, t.backward_received)
        sizes = "forward sent {:.2f} received {:.2f} MiB, backward sent {:.2f} received {:.2f} MiB, saves {:.2f} MiB"
        told = sizes.format(*(n / 2**20 for n in (*counts, t.saved)))
        lines.append(f"layer {k}, case {t.case}: {told}, waited {t.forward_wait + t.backward_wait:.3f} s")
        if t.forward_stored:
            moved = (t.forward_loaded + t.backward_loaded, t.forward_stored + t.backward_stored)
            lines.append("loaded {:.2f} MiB from home, stored {:.2f} MiB there".format(*(n / 2**20 for n in moved)))
    gathered = pyg_sar.distributed.group.gather_objects("\n".join(f"  {line}" for line in lines))
    if rank == 0:
        print(f"\n{name}: test accuracy {accuracy:.4f}, median epoch {median:.3f} s")
        for r, text in enumerate(gathered):
            print(f"worker {r}\n{text}")


if __name__ == "__main__":
    arguments = parser.parse_args()
    with pyg_sar.process_group() as own_rank:  # sar
        main(arguments, own_rank)
