import torch
import torch.nn.functional as F
from torch_geometric.nn import DirGNNConv, GCNConv
import pyg_sar  # +

# - dataset = graphs.wikipedia()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +
data.train_mask = data.train_mask[:, 0]


class DirGNN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, alpha):
        super().__init__()
        self.conv1 = DirGNNConv(GCNConv(in_channels, hidden_channels), alpha, root_weight=False)
        self.conv2 = DirGNNConv(GCNConv(hidden_channels, out_channels), alpha, root_weight=False)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv2(x, edge_index)


model = DirGNN(dataset.num_features, 16, dataset.num_classes, alpha=0.7)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    # - loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
