import torch
import torch.nn.functional as F
# - from torch_geometric.nn import GATConv
import pyg_sar  # +
from pyg_sar.nn import GATConv  # +

# - dataset = graphs.citations()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +


class GAT(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, heads):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.0)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, heads=1, concat=False, dropout=0.0)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.0, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.0, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(dataset.num_features, 8, dataset.num_classes, heads=8)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    mask = data.train_mask
    # - loss = F.cross_entropy(out[mask], data.y[mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[mask], data.y[mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    accs = []
    for mask in [data.train_mask, data.val_mask, data.test_mask]:
        # - accs.append(int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()))
        accs.append(pyg_sar.accuracy(pred, data.y, mask))  # +
    return accs


for epoch in range(4):
    log(train(), *test())
