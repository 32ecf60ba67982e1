import torch
import torch.nn.functional as F
from torch.nn import Linear
from torch_geometric.nn import GCN2Conv
import pyg_sar  # +

# - dataset = graphs.citations()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +


class Net(torch.nn.Module):
    def __init__(self, hidden_channels, num_layers, alpha, theta):
        super().__init__()
        self.lins = torch.nn.ModuleList()
        self.lins.append(Linear(dataset.num_features, hidden_channels))
        self.lins.append(Linear(hidden_channels, dataset.num_classes))
        self.convs = torch.nn.ModuleList()
        for layer in range(num_layers):
            self.convs.append(GCN2Conv(hidden_channels, alpha, theta, layer + 1))

    def forward(self, x, edge_index):
        x = x_0 = self.lins[0](x).relu()
        for conv in self.convs:
            x = conv(x, x_0, edge_index).relu()
        return self.lins[1](x).log_softmax(dim=-1)


model = Net(hidden_channels=16, num_layers=64, alpha=0.1, theta=0.5)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(
    [
        dict(params=model.convs.parameters(), weight_decay=0.01),
        dict(params=model.lins.parameters(), weight_decay=5e-4),
    ],
    lr=0.01,
)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    # - loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss = pyg_sar.global_mean(F.nll_loss(out[data.train_mask], data.y[data.train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(3):
    log(train())
