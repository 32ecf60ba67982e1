import torch
import torch.nn.functional as F
from torch_geometric.nn import HeteroConv, Linear, SAGEConv
import pyg_sar  #+

#- data = graphs.dblp()[0]
pyg_sar.init()  #+
data = pyg_sar.load(PARTS)  #+


class HeteroGNN(torch.nn.Module):
    def __init__(self, metadata, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            conv = HeteroConv({edge_type: SAGEConv((-1, -1), hidden_channels) for edge_type in metadata[1]})
            self.convs.append(conv)
        self.lin = Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
            x_dict = {key: F.leaky_relu(x) for key, x in x_dict.items()}
        return self.lin(x_dict["author"])


model = HeteroGNN(data.metadata(), hidden_channels=16, out_channels=4, num_layers=2)
pyg_sar.nn.convert(model)  #+
with torch.no_grad():  # Initialize lazy modules.
    out = model(data.x_dict, data.edge_index_dict)
pyg_sar.broadcast_parameters(model)  #+
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)
    mask = data["author"].train_mask
#-     loss = F.cross_entropy(out[mask], data["author"].y[mask])
    loss = pyg_sar.global_mean(F.cross_entropy(out[mask], data["author"].y[mask], reduction="none"))  #+
    loss.backward()
    pyg_sar.sum_gradients(model)  #+
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
