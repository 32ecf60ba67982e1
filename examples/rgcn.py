"""Train R-GCN on a relational graph, whose nodes need no features (paper: eq. 4 and 5 of SAR, with basis weights).

    pyg-sar partition Entities/AIFB --num-parts 2 --out runs/aifb-2
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/rgcn.py runs/aifb-2

Lines marked with ``# sar`` are what a script for one process would not have.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor
from train import report

import pyg_sar  # sar
from pyg_sar.run_log import peak

parser = argparse.ArgumentParser()
parser.add_argument("data", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--bases", type=int, default=30)
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--weight-decay", type=float, default=5e-4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")


class RGCN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, num_relations: int, num_bases: int) -> None:
        super().__init__()
        self.conv1 = pyg_sar.nn.RGCNConv(in_channels, hidden, num_relations, num_bases)  # sar: pyg_sar.nn
        self.conv2 = pyg_sar.nn.RGCNConv(hidden, out_channels, num_relations, num_bases)

    def forward(self, x: Tensor | None, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.conv1(x, edge_index, edge_type).relu()
        return self.conv2(x, edge_index, edge_type)


def main(args: argparse.Namespace, rank: int) -> None:
    torch.manual_seed(args.seed)
    data = pyg_sar.load(args.data)  # sar
    x = data.get("x")
    in_channels = data.total_nodes if x is None else x.size(1)
    model = RGCN(in_channels, args.hidden, data.num_classes, data.num_relations, min(args.bases, data.num_relations))
    pyg_sar.broadcast_parameters(model)  # sar
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)

    loaded = peak(torch.device("cpu"))
    times, log = [], pyg_sar.RunLog(args.log_dir, data)  # sar: prints on rank 0
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        model.train()
        optimizer.zero_grad()
        with pyg_sar.record_traffic(data.edge_index) as layers:
            out = model(x, data.edge_index, data.edge_type)
            losses = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")
            loss = pyg_sar.global_mean(losses)  # sar
            loss.backward()
        pyg_sar.sum_gradients(model)  # sar
        optimizer.step()
        times.append(time.perf_counter() - start)
        model.eval()
        with torch.no_grad():
            pred = model(x, data.edge_index, data.edge_type).argmax(-1)
        train_acc = pyg_sar.accuracy(pred, data.y, data.train_mask)  # sar
        test_acc = pyg_sar.accuracy(pred, data.y, data.test_mask)  # sar
        log(Epoch=epoch, Loss=loss.item(), Train=train_acc, Test=test_acc)
    report("rgcn", test_acc, times, loaded, layers, rank, data.edge_index)


if __name__ == "__main__":
    arguments = parser.parse_args()
    with pyg_sar.process_group() as own_rank:  # sar
        main(arguments, own_rank)
