"""Train a deep model as a pipeline of layers.

    pyg-sar partition Community --num-parts 1 --out runs/community-1
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/deep_gcn.py runs/community-1 --stages 2

With 4 workers and 2 stages the folder has 2 parts. One chunk is exact; with more, see docs/pipeline.md.
"""

import argparse

import torch
import torch.nn.functional as F
from models import DeepGNN

import pyg_sar

parser = argparse.ArgumentParser()
parser.add_argument("data", help="a folder made by 'pyg-sar partition', a part for each worker of a stage")
parser.add_argument("--model", choices=["gcn", "sage", "gcn2", "resgcn"], default="gcn2")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--chunks", type=int, default=1)
parser.add_argument("--history", type=int, default=10)
parser.add_argument("--no-shuffle", action="store_true")
parser.add_argument("--balance", action="store_true", help="stages by the measured seconds of blocks")
parser.add_argument("--checkpoint", help="a folder that all workers see: save each epoch there, and at SIGTERM")
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.005)


def main(args: argparse.Namespace, rank: int) -> None:
    mesh = pyg_sar.stage_mesh(args.stages)
    data = pyg_sar.load(args.data, group=mesh.get_group("graph"))
    torch.manual_seed(0)
    blocks = DeepGNN(pyg_sar.nn, args.model, data.x.size(1), args.hidden, data.num_classes, args.layers).blocks
    options = {"history": args.history, "shuffle": not args.no_shuffle}
    if args.balance:
        options["cut"] = pyg_sar.balanced_cut(blocks, data.x, data.edge_index, args.stages, mesh=mesh)
    pipe = pyg_sar.Pipeline(blocks, data.edge_index, mesh, args.chunks, **options)
    del blocks  # those of other stages
    optimizer = torch.optim.Adam(pipe.parameters(), lr=args.lr)
    total = int(pyg_sar.all_reduce(data.train_mask.sum(), mesh.get_group("graph")))

    def loss_of(out: torch.Tensor, rows: slice) -> torch.Tensor:
        mask = data.train_mask[rows]
        return F.cross_entropy(out[mask], data.y[rows][mask], reduction="sum") / total

    saves = None
    if args.checkpoint:
        saves = pyg_sar.Checkpoints(args.checkpoint, pipe=pipe, optimizer=optimizer, data=data)
    first = 1 + saves.restore() if saves and args.resume else 1
    log = pyg_sar.RunLog(args.log_dir, data)
    for epoch in range(first, args.epochs + 1):
        pipe.train()
        optimizer.zero_grad()
        loss = pipe.step(data.x, loss_of)
        optimizer.step()
        out = pipe.eval()(data.x)
        accuracy = None  # which the last stage knows
        if out is not None:
            accuracy = pyg_sar.accuracy(out.argmax(-1), data.y, data.test_mask, mesh.get_group("graph"))
        accuracy = pipe.tell(accuracy)
        log(Epoch=epoch, Loss=loss, Test=accuracy, Stale=pipe.stale)
        if saves and saves.step(epoch):
            break


if __name__ == "__main__":
    arguments = parser.parse_args()
    with pyg_sar.process_group() as own_rank:
        main(arguments, own_rank)
