"""GraphSAGE on all of ogbn-papers100M; few of its nodes have labels, so each layer computes what these depend on.

    pyg-sar partition ogbn-papers100M --num-parts 8 --to-undirected --features bfloat16 --method fennel --order id \
        --out parts/papers100m
    python -m torch.distributed.run --standalone --nproc-per-node 8 examples/ogbn_papers100m_sage.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse
from itertools import pairwise

import torch
import torch.nn.functional as F

# - from ogb.nodeproppred import PygNodePropPredDataset
# - from torch_geometric.logging import log
from torch_geometric.nn import SAGEConv

# - from torch_geometric.utils import index_to_mask, to_undirected
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/papers100m", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--dropout", type=float, default=0.3)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--steps", type=int, default=1, help="of the optimizer in an epoch, each on other labels")
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = PygNodePropPredDataset("ogbn-papers100M")
# - data, split = dataset[0], dataset.get_idx_split()
# - data.edge_index, data.y = to_undirected(data.edge_index), data.y.view(-1)
# - masks = [index_to_mask(split[k], data.num_nodes) for k in ("train", "valid", "test")]
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
masks = [data.train_mask, data.val_mask, data.test_mask]  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +
place = torch.arange(len(masks[0])) % args.steps
masks = [*(masks[0] & (place == k) for k in range(args.steps)), *masks[1:]]
flows = [pyg_sar.message_flow_graphs(data.edge_index, m, args.layers) for m in masks]  # +


class SAGE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = [dataset.num_features, *[args.hidden] * (args.layers - 1), dataset.num_classes]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, k):
        # - x, edges = data.x.float(), [data.edge_index] * args.layers
        x, edges = data.x[flows[k].node_rows].float(), flows[k].edge_indices  # +
        for conv, edge_index in zip(self.convs[:-1], edges[:-1], strict=True):
            x = F.dropout(conv(x, edge_index).relu(), args.dropout, self.training)
        # - return self.convs[-1](x, edges[-1])[masks[k]]
        return self.convs[-1](x, edges[-1])  # +


model = SAGE()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)


def train():
    model.train()
    for k in range(args.steps):
        optimizer.zero_grad()
        # - loss = F.cross_entropy(model(k), data.y[masks[k]].long())
        loss = pyg_sar.global_mean(F.cross_entropy(model(k), data.y[masks[k]].long(), reduction="none"))  # +
        loss.backward()
        pyg_sar.sum_gradients(model)  # +
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    # - return [int((model(k).argmax(-1) == data.y[masks[k]]).sum()) / int(masks[k].sum()) for k in (-2, -1)]
    return [pyg_sar.accuracy(model(k).argmax(-1), data.y[masks[k]]) for k in (-2, -1)]  # +


for epoch in range(1, args.epochs + 1):
    loss = train()
    val_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Val=val_acc, Test=test_acc)
