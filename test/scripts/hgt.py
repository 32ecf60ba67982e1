import torch
import torch.nn.functional as F
from torch_geometric.nn import HGTConv, Linear
import pyg_sar  # +

# - data = graphs.dblp()[0]
pyg_sar.init()  # +
data = pyg_sar.load(PARTS)  # +


class HGT(torch.nn.Module):
    def __init__(self, hidden_channels, out_channels, num_heads, num_layers):
        super().__init__()
        self.lin_dict = torch.nn.ModuleDict()
        for node_type in data.node_types:
            self.lin_dict[node_type] = Linear(-1, hidden_channels)
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            self.convs.append(HGTConv(hidden_channels, hidden_channels, data.metadata(), num_heads))
        self.lin = Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict):
        x_dict = {node_type: self.lin_dict[node_type](x).relu_() for node_type, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return self.lin(x_dict["author"])


model = HGT(hidden_channels=16, out_channels=4, num_heads=2, num_layers=2)
pyg_sar.nn.convert(model)  # +
with torch.no_grad():  # Initialize lazy modules.
    out = model(data.x_dict, data.edge_index_dict)
pyg_sar.broadcast_parameters(model)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    mask = data["author"].train_mask
    # - loss = F.cross_entropy(out[mask], data["author"].y[mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[mask], data["author"].y[mask], reduction="none"))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
