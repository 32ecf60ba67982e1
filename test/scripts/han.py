import torch
import torch.nn.functional as F
# - from torch_geometric.nn import HANConv
import pyg_sar  # +
from pyg_sar.nn import HANConv  # +

# - data = graphs.imdb()[0]
pyg_sar.init()  # +
data = pyg_sar.load(PARTS)  # +


class HAN(torch.nn.Module):
    def __init__(self, in_channels, out_channels, hidden_channels=16, heads=4):
        super().__init__()
        self.han_conv = HANConv(in_channels, hidden_channels, heads=heads, metadata=data.metadata())
        self.lin = torch.nn.Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict):
        out = self.han_conv(x_dict, edge_index_dict)
        return self.lin(out["movie"])


model = HAN(in_channels=-1, out_channels=4)
with torch.no_grad():  # Initialize lazy modules.
    out = model(data.x_dict, data.edge_index_dict)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    mask = data["movie"].train_mask
    # - loss = F.cross_entropy(out[mask], data["movie"].y[mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[mask], data["movie"].y[mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
