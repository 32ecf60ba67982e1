"""A heterogeneous graph: GraphSAGE over the authors, papers, terms and conferences of DBLP.

    pyg-sar partition DBLP --num-parts 2 --out parts/dblp
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/hetero_dblp.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from torch_geometric.datasets import DBLP
# - from torch_geometric.logging import log
from torch_geometric.nn import HeteroConv, Linear, SAGEConv

import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/dblp", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--target", default="author", help="the type of nodes that has labels")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - data = DBLP("data")[0]
torch.manual_seed(pyg_sar.init())  # +
data = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +
for store in data.node_stores:  # Conferences have no features.
    store.x = store.x if "x" in store else torch.ones(store.num_nodes, 1)


class HeteroGNN(torch.nn.Module):
    def __init__(self, metadata, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            conv = HeteroConv({edge_type: SAGEConv((-1, -1), hidden_channels) for edge_type in metadata[1]})
            self.convs.append(conv)
        self.lin = Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
            x_dict = {key: F.leaky_relu(x) for key, x in x_dict.items()}
        return self.lin(x_dict[args.target])


target = data[args.target]
# - classes = int(target.y.max()) + 1
classes = target.num_classes  # +
model = HeteroGNN(data.metadata(), args.hidden, classes, num_layers=2)
pyg_sar.nn.convert(model)  # +
with torch.no_grad():  # Initialize lazy modules.
    model(data.x_dict, data.edge_index_dict)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    out, mask = model(data.x_dict, data.edge_index_dict), target.train_mask
    # - loss = F.cross_entropy(out[mask], target.y[mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[mask], target.y[mask], reduction="none"))  # +
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
