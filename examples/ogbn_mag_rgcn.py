"""R-GCN on ogbn-mag: a weight for each type of edge, one for a node itself, over authors, papers, fields, institutions.

    pyg-sar partition OGB_MAG/metapath2vec --num-parts 2 --to-undirected --out parts/mag
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ogbn_mag_rgcn.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from torch_geometric.datasets import OGB_MAG
# - from torch_geometric.logging import log
from torch_geometric.nn import HeteroConv, SAGEConv

# - from torch_geometric.transforms import ToUndirected
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/mag", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--target", default="paper", help="the type of nodes that has labels")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.5)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - data = OGB_MAG("data", preprocess="metapath2vec", transform=ToUndirected())[0]
torch.manual_seed(pyg_sar.init())  # +
data = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +
target = data[args.target]
for store in data.node_stores:  # Types of other data sets may have no features.
    store.x = store.x if "x" in store else torch.ones(store.num_nodes, 1)


class RGCN(torch.nn.Module):
    def __init__(self, edge_types, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for width in [hidden_channels] * (num_layers - 1) + [out_channels]:
            conv = HeteroConv({t: SAGEConv((-1, -1), width, aggr="mean") for t in edge_types}, aggr="sum")
            self.convs.append(conv)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs[:-1]:
            x_dict = conv(x_dict, edge_index_dict)
            x_dict = {t: F.dropout(x.relu(), args.dropout, self.training) for t, x in x_dict.items()}
        return self.convs[-1](x_dict, edge_index_dict)[args.target]


# - classes = int(target.y.max()) + 1
classes = target.num_classes  # +
model = RGCN(data.edge_types, args.hidden, classes, args.layers)
pyg_sar.nn.convert(model)  # +
with torch.no_grad():  # Initialize lazy modules.
    model(data.x_dict, data.edge_index_dict)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    # - loss = F.cross_entropy(out[target.train_mask], target.y[target.train_mask])
    losses = F.cross_entropy(out[target.train_mask], target.y[target.train_mask], reduction="none")  # +
    loss = pyg_sar.global_mean(losses)  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x_dict, data.edge_index_dict).argmax(dim=-1)
    masks = target.train_mask, target.val_mask, target.test_mask
    # - return [int((pred[mask] == target.y[mask]).sum()) / int(mask.sum()) for mask in masks]
    return [pyg_sar.accuracy(pred, target.y, mask) for mask in masks]  # +


for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
