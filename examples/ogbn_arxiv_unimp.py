"""UniMP on ogbn-arxiv: masked label prediction, in which some of the training labels are features (Shi et al., 2020).

    pyg-sar partition ogbn-arxiv --num-parts 2 --to-undirected --out parts/arxiv
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ogbn_arxiv_unimp.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F

# - from ogb.nodeproppred import PygNodePropPredDataset
# - from torch_geometric.logging import log
from torch_geometric.nn import MaskLabel, TransformerConv

# - from torch_geometric.transforms import ToUndirected
# - from torch_geometric.utils import index_to_mask
import pyg_sar  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/arxiv", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--heads", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.3)
parser.add_argument("--epochs", type=int, default=500)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = PygNodePropPredDataset("ogbn-arxiv", transform=ToUndirected())
# - data, split = dataset[0], dataset.get_idx_split()
# - train_mask, val_mask, test_mask = (index_to_mask(split[k], data.num_nodes) for k in ("train", "valid", "test"))
# - data.y = data.y.view(-1)
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
train_mask, val_mask, test_mask = data.train_mask, data.val_mask, data.test_mask  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +


class UniMP(torch.nn.Module):
    def __init__(self, in_channels, num_classes, hidden_channels, num_layers, heads, dropout):
        super().__init__()
        self.label_emb = MaskLabel(num_classes, in_channels)
        self.convs, self.norms = torch.nn.ModuleList(), torch.nn.ModuleList()
        for i in range(1, num_layers + 1):
            last = i == num_layers
            out_channels = num_classes if last else hidden_channels // heads
            conv = TransformerConv(in_channels, out_channels, heads, concat=not last, beta=True, dropout=dropout)
            self.convs.append(conv)
            in_channels = hidden_channels
            if not last:
                self.norms.append(torch.nn.LayerNorm(hidden_channels))

    def forward(self, x, y, edge_index, label_mask):
        x = self.label_emb(x, y, label_mask)
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


model = UniMP(dataset.num_features, dataset.num_classes, args.hidden, 3, args.heads, args.dropout)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.0005)


def train(label_rate=0.65):  # How many labels to use for propagation.
    model.train()
    propagation_mask = MaskLabel.ratio_mask(train_mask, ratio=label_rate)
    supervision_mask = train_mask ^ propagation_mask
    optimizer.zero_grad()
    out = model(data.x, data.y, data.edge_index, propagation_mask)
    # - loss = F.cross_entropy(out[supervision_mask], data.y[supervision_mask])
    losses = F.cross_entropy(out[supervision_mask], data.y[supervision_mask], reduction="none")  # +
    loss = pyg_sar.global_mean(losses)  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    accs = []
    for given, asked in ((train_mask, val_mask), (train_mask | val_mask, test_mask)):
        pred = model(data.x, data.y, data.edge_index, given).argmax(dim=-1)
        # - accs.append(int((pred[asked] == data.y[asked]).sum()) / int(asked.sum()))
        accs.append(pyg_sar.accuracy(pred, data.y, asked))  # +
    return accs


for epoch in range(1, args.epochs + 1):
    loss = train()
    val_acc, test_acc = test()
    log(Epoch=epoch, Loss=loss, Val=val_acc, Test=test_acc)
