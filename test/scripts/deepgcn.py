import torch
import torch.nn.functional as F
from torch.nn import LayerNorm, Linear, ReLU
from torch_geometric.nn import DeepGCNLayer, GENConv
import pyg_sar  # +

# - data = graphs.proteins()[0]
pyg_sar.init()  # +
data = pyg_sar.load(PARTS)  # +


class DeeperGCN(torch.nn.Module):
    def __init__(self, hidden_channels, num_layers):
        super().__init__()
        self.node_encoder = Linear(data.x.size(-1), hidden_channels)
        self.edge_encoder = Linear(data.edge_attr.size(-1), hidden_channels)
        self.layers = torch.nn.ModuleList()
        for _ in range(num_layers):
            conv = GENConv(
                hidden_channels, hidden_channels, aggr="softmax", t=1.0, learn_t=True, num_layers=2, norm="layer"
            )
            norm = LayerNorm(hidden_channels, elementwise_affine=True)
            self.layers.append(DeepGCNLayer(conv, norm, ReLU(inplace=True), block="res+"))
        self.lin = Linear(hidden_channels, data.y.size(-1))

    def forward(self, x, edge_index, edge_attr):
        x = self.node_encoder(x)
        edge_attr = self.edge_encoder(edge_attr)
        x = self.layers[0].conv(x, edge_index, edge_attr)
        for layer in self.layers[1:]:
            x = layer(x, edge_index, edge_attr)
        return self.lin(self.layers[0].act(self.layers[0].norm(x)))


model = DeeperGCN(hidden_channels=8, num_layers=4)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
# - criterion = torch.nn.BCEWithLogitsLoss()
criterion = torch.nn.BCEWithLogitsLoss(reduction="none")  # +


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index, data.edge_attr)
    # - loss = criterion(out[data.train_mask], data.y[data.train_mask])
    loss = pyg_sar.global_mean(criterion(out[data.train_mask], data.y[data.train_mask]))  # +
    loss.backward()
    pyg_sar.sum_gradients(model)  # +
    optimizer.step()
    return loss.item()


for epoch in range(3):
    log(train())
