"""Deep Graph Infomax: embeddings that agree with a summary of the whole graph.

    pyg-sar partition Planetoid/Cora --num-parts 2 --out parts/cora
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/infomax.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came. Each worker shuffles its rows.
"""

import argparse

import torch

# - from torch_geometric.datasets import Planetoid
# - from torch_geometric.logging import log
# - from torch_geometric.nn import DeepGraphInfomax, GCNConv
import pyg_sar  # +
from pyg_sar.nn import DeepGraphInfomax, GCNConv  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/cora", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--epochs", type=int, default=300)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - dataset = Planetoid("data", "Cora")
# - data = dataset[0]
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, hidden_channels)
        self.prelu = torch.nn.PReLU(hidden_channels)

    def forward(self, x, edge_index):
        x = self.conv(x, edge_index)
        x = self.prelu(x)
        return x


def corruption(x, edge_index):
    return x[torch.randperm(x.size(0), device=x.device)], edge_index


model = DeepGraphInfomax(
    hidden_channels=args.hidden,
    encoder=Encoder(dataset.num_features, args.hidden),
    summary=lambda z, *args, **kwargs: z.mean(dim=0).sigmoid(),
    corruption=corruption,
)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    pos_z, neg_z, summary = model(data.x, data.edge_index)
    loss = model.loss(pos_z, neg_z, summary)
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    z, _, _ = model(data.x, data.edge_index)
    return model.test(
        z[data.train_mask], data.y[data.train_mask], z[data.test_mask], data.y[data.test_mask], max_iter=150
    )


for epoch in range(1, args.epochs + 1):
    loss = train()
    log(Epoch=epoch, Loss=loss)
log(Accuracy=float(test()))
