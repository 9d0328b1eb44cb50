"""e3nn: an equivariant network, whose code is generated and scripted."""

import results
import torch
from e3nn import o3
from e3nn.nn import FullyConnectedNet

torch.manual_seed(0)
harmonics = o3.Irreps.spherical_harmonics(2)
product = o3.FullyConnectedTensorProduct("8x0e", harmonics, "16x0e + 8x1o", shared_weights=False)
radial = FullyConnectedNet([4, 32, product.weight_numel], torch.nn.functional.silu)
out = o3.Linear("16x0e + 8x1o", "0e")
model = torch.nn.ModuleList([product, radial, out])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(6):
    positions, features = torch.randn(300, 3), torch.randn(300, 8)
    sh = o3.spherical_harmonics(harmonics, positions, normalize=True)
    distances = positions.norm(dim=1, keepdim=True) ** torch.arange(1, 5)
    energy = out(product(features, sh, radial(distances))).sum()
    loss = (energy - 1.0) ** 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
