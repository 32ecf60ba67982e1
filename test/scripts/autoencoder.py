import torch
#- from torch_geometric.nn import GAE, GCNConv
import pyg_sar  #+
from pyg_sar.nn import GAE, GCNConv  #+

#- dataset = graphs.links()
#- data = dataset[0]
pyg_sar.init()  #+
data = dataset = pyg_sar.load(PARTS)  #+
data.pos_edge_label_index, _ = pyg_sar.shard_links(data.pos_edge_label_index, data.n_id)  #+
data.neg_edge_label_index, _ = pyg_sar.shard_links(data.neg_edge_label_index, data.n_id)  #+


class GCNEncoder(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, 2 * out_channels)
        self.conv2 = GCNConv(2 * out_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.conv1(x, edge_index).relu()
        return self.conv2(x, edge_index)


model = GAE(GCNEncoder(dataset.num_features, 8))
pyg_sar.broadcast_parameters(model)  #+
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    z = model.encode(data.x, data.edge_index)
    loss = model.recon_loss(z, data.pos_edge_label_index, data.neg_edge_label_index)
    loss.backward()
    pyg_sar.sum_gradients(model)  #+
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
