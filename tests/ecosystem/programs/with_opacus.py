"""Opacus: differentially private training of a network for sequences, with a gradient for each sample."""

import results
import torch
from networks import mlp
from opacus import PrivacyEngine
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
x, y = torch.randn(48, 128, 64), torch.randint(0, 10, (48, 128))
model = mlp(depth=3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x) // 6)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(1),
    poisson_sampling=False,
)
losses = []
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs).transpose(1, 2), targets)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, losses=losses)
