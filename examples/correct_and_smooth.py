"""An MLP whose predictions are corrected and smoothed along the edges of the whole graph (Huang et al., 2021).

    pyg-sar partition ogbn-products --num-parts 2 --out parts/products
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/correct_and_smooth.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from ogb.nodeproppred import PygNodePropPredDataset
# - from torch_geometric.logging import log
# - from torch_geometric.nn import MLP, CorrectAndSmooth
# - from torch_geometric.utils import index_to_mask
from torch_geometric.nn import MLP  # +

import pyg_sar  # +
from pyg_sar.nn import CorrectAndSmooth  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/products", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=200)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=300)
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

widths = [dataset.num_features, args.hidden, args.hidden, dataset.num_classes]
model = MLP(widths, dropout=args.dropout, norm="batch_norm", act_first=True)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x[train_mask])
    # - loss = F.cross_entropy(out, data.y[train_mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out, data.y[train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(out):
    pred = out.argmax(dim=-1)
    # - return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in (train_mask, val_mask, test_mask)]
    return [pyg_sar.accuracy(pred, data.y, mask) for mask in (train_mask, val_mask, test_mask)]  # +


best_val_acc = -1
for epoch in range(1, args.epochs + 1):
    loss = train()
    model.eval()
    with torch.no_grad():
        out = model(data.x)
    train_acc, val_acc, test_acc = test(out)
    if val_acc > best_val_acc:
        best_val_acc, y_soft = val_acc, out.softmax(dim=-1)
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)

post = CorrectAndSmooth(50, 1.0, 50, 0.8, autoscale=False, scale=20.0)
y_train = data.y[train_mask]
y_soft = post.correct(y_soft, y_train, train_mask, data.edge_index)
y_soft = post.smooth(y_soft, y_train, train_mask, data.edge_index)
train_acc, val_acc, test_acc = test(y_soft)
log(CorrectAndSmooth=True, Train=train_acc, Val=val_acc, Test=test_acc)
