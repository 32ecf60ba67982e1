import torch
#- from torch_geometric.nn import DeepGraphInfomax, GCNConv
import pyg_sar  #+
from pyg_sar.nn import DeepGraphInfomax, GCNConv, global_mean_pool  #+

#- dataset = graphs.citations()
#- data = dataset[0]
pyg_sar.init()  #+
data = dataset = pyg_sar.load(PARTS)  #+


class Encoder(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, hidden_channels)
        self.prelu = torch.nn.PReLU(hidden_channels)

    def forward(self, x, edge_index):
        return self.prelu(self.conv(x, edge_index))


def corruption(x, edge_index):
    return data.shuffled, edge_index


model = DeepGraphInfomax(
    hidden_channels=16,
    encoder=Encoder(dataset.num_features, 16),
#-     summary=lambda z, *args, **kwargs: z.mean(dim=0).sigmoid(),
    summary=lambda z, *args, **kwargs: global_mean_pool(z, None)[0].sigmoid(),  #+
    corruption=corruption,
)
pyg_sar.broadcast_parameters(model)  #+
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)


def train():
    model.train()
    optimizer.zero_grad()
    pos_z, neg_z, summary = model(data.x, data.edge_index)
    loss = model.loss(pos_z, neg_z, summary)
    loss.backward()
    pyg_sar.sum_gradients(model)  #+
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
