"""Train a deep model as a pipeline of layers.

    pyg-sar partition Community --num-parts 1 --out runs/community-1
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/deep_gcn.py runs/community-1 --stages 2

With 4 workers and 2 stages the folder has 2 parts. One chunk is exact; with more, see docs/pipeline.md.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

import pyg_sar

parser = argparse.ArgumentParser()
parser.add_argument("data", help="a folder made by 'pyg-sar partition', a part for each worker of a stage")
parser.add_argument("--model", choices=["gcn", "sage", "gcn2"], default="gcn2")
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--chunks", type=int, default=1)
parser.add_argument("--history", type=int, default=10)
parser.add_argument("--no-shuffle", action="store_true")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--lr", type=float, default=0.005)


class First(torch.nn.Module):
    """Features become rows of the hidden width; GCNII reads the first ones in every layer."""

    def __init__(self, in_channels: int, hidden: int, twice: bool) -> None:
        super().__init__()
        self.lin, self.twice = torch.nn.Linear(in_channels, hidden), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.lin(F.dropout(x, 0.5, self.training)).relu()
        return (x, x) if self.twice else x


class Layer(torch.nn.Module):
    """A convolution, a normalisation of each row, and a residual (GCNII has its own)."""

    def __init__(self, kind: str, hidden: int, number: int) -> None:
        super().__init__()
        nn = pyg_sar.nn
        self.initial = kind == "gcn2"
        kinds = {"gcn": nn.GCNConv, "sage": nn.SAGEConv}
        self.conv = nn.GCN2Conv(hidden, 0.1, 0.5, number) if self.initial else kinds[kind](hidden, hidden)
        self.norm = torch.nn.LayerNorm(hidden)

    def forward(self, x, edge_index):
        if self.initial:
            x, first = x
            return self.conv(F.dropout(x, 0.5, self.training), first, edge_index).relu(), first
        return x + F.dropout(self.norm(self.conv(x, edge_index)).relu(), 0.5, self.training)


class Last(torch.nn.Module):
    """Scores of classes."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(hidden, classes)

    def forward(self, x):
        return self.lin(x[0] if isinstance(x, tuple) else x)


def main(args: argparse.Namespace, rank: int) -> None:
    mesh = pyg_sar.stage_mesh(args.stages)
    data = pyg_sar.load(args.data, group=mesh.get_group("graph"))
    torch.manual_seed(0)
    middle = [Layer(args.model, args.hidden, k + 1) for k in range(args.layers)]
    blocks = [First(data.x.size(1), args.hidden, args.model == "gcn2"), *middle, Last(args.hidden, data.num_classes)]
    options = {"history": args.history, "shuffle": not args.no_shuffle}
    pipe = pyg_sar.Pipeline(blocks, data.edge_index, mesh, args.chunks, **options)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=args.lr)
    total = int(pyg_sar.all_reduce(data.train_mask.sum(), mesh.get_group("graph")))

    def loss_of(out: torch.Tensor, rows: slice) -> torch.Tensor:
        mask = data.train_mask[rows]
        return F.cross_entropy(out[mask], data.y[rows][mask], reduction="sum") / total

    bar = tqdm(range(1, args.epochs + 1), disable=rank != 0)
    for epoch in bar:
        start = time.perf_counter()
        pipe.train()
        optimizer.zero_grad()
        loss = pipe.step(data.x, loss_of)
        optimizer.step()
        seconds, out = time.perf_counter() - start, pipe.eval()(data.x)
        accuracy = None  # which the last stage knows
        if out is not None:
            accuracy = pyg_sar.accuracy(out.argmax(-1), data.y, data.test_mask, mesh.get_group("graph"))
        accuracy = pipe.tell(accuracy)
        if rank == 0:
            told = f"epoch {epoch:3d}  loss {loss:.4f}  test {accuracy:.4f}  stale edges {pipe.stale:.1%}"
            bar.write(f"{told}  {seconds:.2f} s")


if __name__ == "__main__":
    arguments = parser.parse_args()
    with pyg_sar.process_group() as own_rank:
        main(arguments, own_rank)
