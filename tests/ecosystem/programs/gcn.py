"""A graph convolutional network of torch_geometric classifies the nodes of a random graph."""

import results
import torch
import torch_geometric
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import coalesce, to_undirected

torch_geometric.seed_everything(0)
NODES, WIDTH, CLASSES = 2000, 32, 4
data = Data(
    x=torch.randn(NODES, WIDTH),
    edge_index=to_undirected(coalesce(torch.randint(0, NODES, (2, 10 * NODES)))),
    y=torch.randint(0, CLASSES, (NODES,)),
)


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = [WIDTH, 64, 64, 64, 64]
        self.hidden = torch.nn.ModuleList(map(GCNConv, widths[:-1], widths[1:]))
        self.last = GCNConv(64, CLASSES)

    def forward(self, data):
        x = data.x
        for layer in self.hidden:
            x = F.dropout(layer(x, data.edge_index).relu(), training=self.training)
        return self.last(x, data.edge_index)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
losses = []
for _ in range(8):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), data.y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    predicted = model(data).argmax(1)
results.write(model=model, optimizer=optimizer, losses=losses, predicted=predicted)
