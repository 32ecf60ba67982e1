import torch
import torch.nn.functional as F
from torch_geometric.nn import BatchNorm, Linear, MixHopConv
import pyg_sar  # +

# - dataset = graphs.citations()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +


class MixHop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = MixHopConv(dataset.num_features, 6, powers=[0, 1, 2])
        self.norm1 = BatchNorm(3 * 6)
        self.conv2 = MixHopConv(3 * 6, 6, powers=[0, 1, 2])
        self.norm2 = BatchNorm(3 * 6)
        self.lin = Linear(3 * 6, dataset.num_classes)

    def forward(self, x, edge_index):
        x = self.norm1(self.conv1(x, edge_index))
        x = self.norm2(self.conv2(x, edge_index))
        return self.lin(x)


model = MixHop()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.005)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    # - loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    scheduler.step()
    return loss.item()


for epoch in range(4):
    log(train())
