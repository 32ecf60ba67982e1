"""Any other PyG model, by one call: principal neighborhood aggregation, GCNII, GINE with features of edges.

    pyg-sar partition Amazon/Computers --num-parts 2 --out parts/computers
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/any_model.py --model PNA

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.nn import MLP, PNA, GCN2Conv, GINEConv, Linear

# - from torch_geometric.datasets import Amazon
# - from torch_geometric.logging import log
# - from torch_geometric.transforms import RandomNodeSplit
# - from torch_geometric.utils import degree
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/computers", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--model", default="PNA", choices=["PNA", "GCN2", "GINE"])
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = Amazon("data", "Computers", transform=RandomNodeSplit(num_val=0.2, num_test=0.2))
# - data = dataset[0]
# - histogram = torch.bincount(degree(data.edge_index[1], data.num_nodes).long())
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
histogram = pyg_sar.degree_histogram(data.edge_index)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +


class GCN2(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = Linear(dataset.num_features, args.hidden), Linear(args.hidden, dataset.num_classes)
        self.convs = torch.nn.ModuleList(GCN2Conv(args.hidden, 0.1, 0.5, k + 1) for k in range(args.layers))

    def forward(self, x, edge_index):
        x = x_0 = self.first(x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index).relu()
        return self.last(x)


class GINE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = [dataset.num_features, *[args.hidden] * (args.layers - 1)]
        self.convs = torch.nn.ModuleList(GINEConv(MLP([w, 2 * args.hidden, args.hidden]), edge_dim=1) for w in widths)
        self.last = Linear(args.hidden, dataset.num_classes)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index, x.new_ones(edge_index.size(1), 1)).relu()
        return self.last(x)


def pna():
    names = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
    return PNA(dataset.num_features, args.hidden, args.layers, dataset.num_classes, **names, deg=histogram)


model = {"PNA": pna, "GCN2": GCN2, "GINE": GINE}[args.model]()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)


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


for epoch in range(1, args.epochs + 1):
    loss = train()
    train_acc, val_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
