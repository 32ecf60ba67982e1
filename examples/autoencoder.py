"""Graph autoencoders, plain and variational.

    python examples/split_links.py Planetoid/Cora parts/cora_links.pt
    pyg-sar partition parts/cora_links.pt --num-parts 2 --out parts/cora_links
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/autoencoder.py --variational

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch

# - from torch_geometric.logging import log
# - from torch_geometric.nn import GAE, VGAE, GCNConv
import pyg_sar  # +
from pyg_sar.nn import GAE, VGAE, GCNConv  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/cora_links", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--variational", action="store_true")
parser.add_argument("--channels", type=int, default=16)
parser.add_argument("--epochs", type=int, default=400)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - data = dataset = torch.load("parts/cora_links.pt", weights_only=False)
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +
pairs = {}
for name in ("train_pos", "test_pos", "test_neg"):
    # - pairs[name] = data[f"{name}_edge_label_index"]
    pairs[name], _ = pyg_sar.shard_links(data[f"{name}_edge_label_index"], data.n_id)  # +


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, 2 * out_channels)
        self.conv_mu = GCNConv(2 * out_channels, out_channels)
        self.conv_logstd = GCNConv(2 * out_channels, out_channels) if args.variational else None

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        mu = self.conv_mu(x, edge_index)
        return (mu, self.conv_logstd(x, edge_index)) if args.variational else mu


model = (VGAE if args.variational else GAE)(Encoder(dataset.num_features, args.channels))
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# - nodes = data.num_nodes
nodes = data.total_nodes  # +


def train():
    model.train()
    optimizer.zero_grad()
    z = model.encode(data.x, data.edge_index)
    loss = model.recon_loss(z, pairs["train_pos"])
    if args.variational:
        loss = loss + (1 / nodes) * model.kl_loss()
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    z = model.encode(data.x, data.edge_index)
    return model.test(z, pairs["test_pos"], pairs["test_neg"])


for epoch in range(1, args.epochs + 1):
    loss = train()
    auc, ap = test()
    log(Epoch=epoch, Loss=loss, AUC=float(auc), AP=float(ap))
