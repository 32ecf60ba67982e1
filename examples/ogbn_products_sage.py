"""GraphSAGE on all of ogbn-products at once.

    pyg-sar partition ogbn-products --num-parts 2 --out parts/products
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ogbn_products_sage.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from ogb.nodeproppred import PygNodePropPredDataset
# - from torch_geometric.logging import log
from torch_geometric.nn import GraphSAGE

# - from torch_geometric.utils import index_to_mask
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/products", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = PygNodePropPredDataset("ogbn-products")
# - data, split = dataset[0], dataset.get_idx_split()
# - train_mask, val_mask, test_mask = (index_to_mask(split[k], data.num_nodes) for k in ("train", "valid", "test"))
# - data.y = data.y.view(-1)
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
train_mask, val_mask, test_mask = data.train_mask, data.val_mask, data.test_mask  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +

model = GraphSAGE(
    dataset.num_features, args.hidden, args.layers, dataset.num_classes, dropout=args.dropout, norm="batch_norm"
)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    # - loss = F.cross_entropy(out[train_mask], data.y[train_mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[train_mask], data.y[train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    # - return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in (train_mask, val_mask, test_mask)]
    return [pyg_sar.accuracy(pred, data.y, mask) for mask in (train_mask, val_mask, test_mask)]  # +


for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
