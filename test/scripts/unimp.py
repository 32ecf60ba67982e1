import torch
import torch.nn.functional as F
from torch_geometric.nn import MaskLabel, TransformerConv
import pyg_sar  #+

#- dataset = graphs.citations()
#- data = dataset[0]
pyg_sar.init()  #+
data = dataset = pyg_sar.load(PARTS)  #+


class UniMP(torch.nn.Module):
    def __init__(self, in_channels, num_classes, hidden_channels, num_layers, heads):
        super().__init__()
        self.label_emb = MaskLabel(num_classes, in_channels)
        self.convs = torch.nn.ModuleList()
        self.norms = torch.nn.ModuleList()
        for i in range(1, num_layers + 1):
            last = i == num_layers
            out_channels = num_classes if last else hidden_channels // heads
            self.convs.append(TransformerConv(in_channels, out_channels, heads, concat=not last, beta=True))
            in_channels = hidden_channels
            if not last:
                self.norms.append(torch.nn.LayerNorm(hidden_channels))

    def forward(self, x, y, edge_index, label_mask):
        x = self.label_emb(x, y, label_mask)
        for conv, norm in zip(self.convs, self.norms):
            x = norm(conv(x, edge_index)).relu()
        return self.convs[-1](x, edge_index)


model = UniMP(dataset.num_features, dataset.num_classes, hidden_channels=16, num_layers=3, heads=2)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  #+
optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.0005)


def train():
    model.train()
    propagation_mask = data.hint_mask
    supervision_mask = data.train_mask ^ propagation_mask
    optimizer.zero_grad()
    out = model(data.x, data.y, data.edge_index, propagation_mask)
#-     loss = F.cross_entropy(out[supervision_mask], data.y[supervision_mask])
    loss = F.cross_entropy(out[supervision_mask], data.y[supervision_mask], reduction="none")  #+
    loss = pyg_sar.global_mean(loss)  #+
    loss.backward()
    pyg_sar.sum_gradients(model)  #+
    optimizer.step()
    return loss.item()


for epoch in range(4):
    log(train())
