"""e3nn: an equivariant network of several layers, with generated and scripted code."""

import results
import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet

torch.manual_seed(0)
HARMONICS = o3.Irreps.spherical_harmonics(2)
HIDDEN = "8x0e + 4x1o"


class Layer(torch.nn.Module):
    def __init__(self, irreps):
        super().__init__()
        self.product = o3.FullyConnectedTensorProduct(irreps, HARMONICS, HIDDEN, shared_weights=False)
        self.radial = FullyConnectedNet([4, 32, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, features, harmonics, distances):
        return self.product(features, harmonics, self.radial(distances))


layers = torch.nn.ModuleList([Layer("8x0e"), *(Layer(HIDDEN) for _ in range(4))])
out = o3.Linear(HIDDEN, "0e")
model = torch.nn.ModuleList([layers, out])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(6):
    positions, features = torch.randn(300, 3), torch.randn(300, 8)
    harmonics = o3.spherical_harmonics(HARMONICS, positions, normalize=True)
    distances = positions.norm(dim=1, keepdim=True) ** torch.arange(1, 5)
    for layer in layers:
        features = layer(features, harmonics, distances)
    loss = (out(features).sum() - 1.0) ** 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
