import torch
import torch.nn.functional as F
from torch_geometric.nn import AGNNConv
import pyg_sar  # +

# - dataset = graphs.citations()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = torch.nn.Linear(dataset.num_features, 16)
        self.prop1 = AGNNConv(requires_grad=False)
        self.prop2 = AGNNConv(requires_grad=True)
        self.lin2 = torch.nn.Linear(16, dataset.num_classes)

    def forward(self):
        x = F.relu(self.lin1(data.x))
        x = self.prop1(x, data.edge_index)
        x = self.prop2(x, data.edge_index)
        return F.log_softmax(self.lin2(x), dim=1)


model = Net()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    # - loss = F.nll_loss(model()[data.train_mask], data.y[data.train_mask])
    loss = pyg_sar.global_mean(F.nll_loss(model()[data.train_mask], data.y[data.train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
