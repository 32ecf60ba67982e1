"""Link prediction: a GCN whose pairs of nodes may be on two workers.

    python examples/split_links.py Planetoid/Cora parts/cora_links.pt
    pyg-sar partition parts/cora_links.pt --num-parts 2 --out parts/cora_links
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/link_prediction.py

Of the script for one process, lines behind "# -" went and lines that end in "# +" came.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

# - from torch_geometric.logging import log
# - from torch_geometric.nn import GCNConv
# - from torch_geometric.utils import negative_sampling
import pyg_sar  # +
from pyg_sar.nn import GCNConv  # +

parser = argparse.ArgumentParser()
parser.add_argument("--dataset", default="parts/cora_links", help="a folder made by 'pyg-sar partition'")
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--log-dir", help="write TensorBoard scalars of all workers there")
args = parser.parse_args()

# - data = dataset = torch.load("parts/cora_links.pt", weights_only=False)
torch.manual_seed(pyg_sar.init())  # +
data = dataset = pyg_sar.load(args.dataset)  # +
log = pyg_sar.RunLog(args.log_dir, data)  # +
pairs, mine = {}, {}
for name in ("train_pos", "val_pos", "val_neg", "test_pos", "test_neg"):
    # - pairs[name] = data[f"{name}_edge_label_index"]
    pairs[name], mine[name] = pyg_sar.shard_links(data[f"{name}_edge_label_index"], data.n_id)  # +


class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def encode(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv2(x, edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


model = Net(dataset.num_features, args.hidden, args.hidden // 2)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(params=model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    z = model.encode(data.x, data.edge_index)
    # A new round of negative sampling for every training epoch:
    # - negative = negative_sampling(data.edge_index, data.num_nodes, pairs["train_pos"].size(1))
    negative, _ = pyg_sar.shard_links(pyg_sar.negative_sampling(pairs["train_pos"], data.n_id), data.n_id)  # +
    out = torch.cat([model.decode(z, pairs["train_pos"]), model.decode(z, negative)])
    label = (torch.arange(out.size(0)) < pairs["train_pos"].size(1)).to(out.dtype)
    # - loss = F.binary_cross_entropy_with_logits(out, label)
    loss = pyg_sar.global_mean(F.binary_cross_entropy_with_logits(out, label, reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(name):
    model.eval()
    z = model.encode(data.x, data.edge_index)
    scores = []
    for kind in ("pos", "neg"):
        score = model.decode(z, pairs[f"{name}_{kind}"])
        score = pyg_sar.gather(score, mine[f"{name}_{kind}"], None)  # +
        scores.append(score)
    label = torch.cat([torch.ones_like(scores[0]), torch.zeros_like(scores[1])])
    return float(roc_auc_score(label.numpy(), torch.cat(scores).numpy()))


best_val_auc = final_test_auc = 0
for epoch in range(1, args.epochs + 1):
    loss = train()
    val_auc, test_auc = test("val"), test("test")
    if val_auc > best_val_auc:
        best_val_auc, final_test_auc = val_auc, test_auc
    log(Epoch=epoch, Loss=loss, Val=val_auc, Test=final_test_auc)
