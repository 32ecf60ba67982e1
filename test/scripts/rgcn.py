import torch
import torch.nn.functional as F
from torch_geometric.nn import RGCNConv
import pyg_sar  # +

# - dataset = graphs.entities()
# - data = dataset[0]
pyg_sar.init()  # +
data = dataset = pyg_sar.load(PARTS)  # +


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # - self.conv1 = RGCNConv(data.num_nodes, 16, dataset.num_relations, num_bases=3)
        self.conv1 = RGCNConv(data.total_nodes, 16, dataset.num_relations, num_bases=3)  # +
        self.conv2 = RGCNConv(16, dataset.num_classes, dataset.num_relations, num_bases=3)

    def forward(self, edge_index, edge_type):
        x = F.relu(self.conv1(None, edge_index, edge_type))
        x = self.conv2(x, edge_index, edge_type)
        return F.log_softmax(x, dim=1)


model = Net()
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.0005)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.edge_index, data.edge_type)
    # - loss = F.nll_loss(out[data.train_idx], data.train_y)
    loss = pyg_sar.global_mean(F.nll_loss(out[data.train_idx], data.train_y, reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.edge_index, data.edge_type).argmax(dim=-1)
    # - return float((pred[data.test_idx] == data.test_y).double().mean())
    return pyg_sar.accuracy(pred[data.test_idx], data.test_y)  # +


for epoch in range(4):
    log(train(), test())
