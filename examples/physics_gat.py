"""GAT on Coauthor Physics.

    pyg-sar partition Coauthor/Physics --num-parts 2 --out parts/physics
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/physics_gat.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from torch_geometric.datasets import Coauthor
# - from torch_geometric.logging import log
# - from torch_geometric.nn import GATConv
# - from torch_geometric.transforms import RandomNodeSplit
import pyg_sar  # +
from pyg_sar.nn import GATConv  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/physics", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=8, help="of each head")
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.6)
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = Coauthor("data", "Physics", transform=RandomNodeSplit(num_val=0.2, num_test=0.2))
# - data = dataset[0]
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +


class GAT(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, heads):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=args.dropout)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False, dropout=args.dropout)

    def forward(self, x, edge_index):
        x = F.dropout(x, args.dropout, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, args.dropout, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(dataset.num_features, args.hidden, dataset.num_classes, args.heads)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    # - loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    losses = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")  # +
    loss = pyg_sar.global_mean(losses)  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    masks = data.train_mask, data.val_mask, data.test_mask
    # - return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in masks]
    return [pyg_sar.accuracy(pred, data.y, mask) for mask in masks]  # +


best_val_acc = test_acc = 0
for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, tmp_test_acc = test()
    if val_acc > best_val_acc:
        best_val_acc, test_acc = val_acc, tmp_test_acc
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
