"""GAT on all of ogbn-products, by the recipe of the SAR paper: labels as features, a decaying rate, Correct & Smooth.

    pyg-sar partition ogbn-products --num-parts 2 --out parts/products
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ogbn_products_gat.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from ogb.nodeproppred import PygNodePropPredDataset
# - from torch_geometric.logging import log
from torch_geometric.nn import GAT, CorrectAndSmooth, MaskLabel

# - from torch_geometric.utils import index_to_mask
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/products", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=128, help="of each head")
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--label-rate", type=float, default=0.5, help="share of the training labels that are features")
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


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.labels = MaskLabel(dataset.num_classes, dataset.num_features)
        self.gnn = GAT(
            dataset.num_features, args.hidden * args.heads, args.layers, dataset.num_classes, heads=args.heads,
            dropout=args.dropout, norm="batch_norm",
        )  # fmt: skip
        self.post = CorrectAndSmooth(50, 0.9, 50, 0.8)

    def forward(self, mask):
        return self.gnn(self.labels(data.x, data.y, mask), data.edge_index)


model = Net()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)


def train():
    model.train()
    optimizer.zero_grad()
    given = MaskLabel.ratio_mask(train_mask, args.label_rate)
    asked = train_mask & ~given
    out = model(given)
    # - loss = F.cross_entropy(out[asked], data.y[asked])
    loss = pyg_sar.global_mean(F.cross_entropy(out[asked], data.y[asked], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    scheduler.step()
    return loss.item()


@torch.no_grad()
def test(out):
    pred = out.argmax(dim=-1)
    # - return [int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()) for mask in (val_mask, test_mask)]
    return [pyg_sar.accuracy(pred, data.y, mask) for mask in (val_mask, test_mask)]  # +


@torch.no_grad()
def predict():
    model.eval()
    return model(train_mask).softmax(dim=-1)


for epoch in range(1, args.epochs + 1):
    loss = train()
    val_acc, test_acc = test(predict())
    log(Epoch=epoch, Loss=loss, Val=val_acc, Test=test_acc)
val_acc, test_acc = test(model.post(predict(), data.y[train_mask], train_mask, data.edge_index))
log(CorrectAndSmooth=True, Val=val_acc, Test=test_acc)
