import torch
import torch.nn.functional as F
#- from torch_geometric.nn import MLP, CorrectAndSmooth
import pyg_sar  #+
from torch_geometric.nn import MLP  #+
from pyg_sar.nn import CorrectAndSmooth  #+

#- dataset = graphs.citations()
#- data = dataset[0]
pyg_sar.init()  #+
data = dataset = pyg_sar.load(PARTS)  #+

model = MLP([dataset.num_features, 20, 20, dataset.num_classes], dropout=0.0, norm="batch_norm", act_first=True)
pyg_sar.broadcast_parameters(pyg_sar.nn.convert(model))  #+
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x)
#-     loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="none")  #+
    loss = pyg_sar.global_mean(loss)  #+
    loss.backward()
    pyg_sar.sum_gradients(model)  #+
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(out):
    mask = ~data.train_mask
    pred = out.argmax(dim=-1)
#-     return int((pred[mask] == data.y[mask]).sum()) / int(mask.sum())
    return pyg_sar.accuracy(pred, data.y, mask)  #+


for epoch in range(4):
    log(train())

post = CorrectAndSmooth(
    num_correction_layers=50, correction_alpha=1.0, num_smoothing_layers=50, smoothing_alpha=0.8, autoscale=True
)
model.eval()
with torch.no_grad():
    y_soft = model(data.x).softmax(dim=-1)
y_train, train_mask = data.y[data.train_mask], data.train_mask
log(test(y_soft))
y_soft = post.correct(y_soft, y_train, train_mask, data.edge_index)
y_soft = post.smooth(y_soft, y_train, train_mask, data.edge_index)
log(test(y_soft))
#- log(F.nll_loss(y_soft.exp(), data.y).item())
log(pyg_sar.global_mean(F.nll_loss(y_soft.exp(), data.y, reduction="none")).item())  #+
